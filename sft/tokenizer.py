"""Train the tokenizer of the nano model: byte-level BPE in the layout of Qwen2.5, on the words of
the shapes world.

    python -m sft.tokenizer pretrained/bagel-nano-shapes     # writes tokenizer.json, vocab.json,
    merges.txt, ...

256 bytes, 744 merges, and Qwen2.5's 22 added tokens in their order: ids 0..1021. Normalisation
(NFC) and the split before the merges (words with one leading sign or blank, digits alone, signs)
are Qwen2.5's. A word of the shapes world is one token; any other text is spelled in bytes and short
pieces. No split crosses a field of the protocol, so a turn that is encoded whole has the ids of its
prefix, its score and its rest, one after the other (`turn_ids`). The files depend on the seed
alone.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from tokenizers import trainers as bpe_trainers

from sft.shapes import make_trajectory, turns
from umm_reflect.files import write_aside
from umm_reflect.shapes.prompts import FAMILIES, VOCABULARY, phrase
from umm_reflect.shapes.sampler import sample_row
from umm_reflect.tokens import QWEN2_SPLIT, qwen2_pipeline

VOCAB_SIZE = 1000  # bytes and merges; the added tokens follow
MODEL_MAX_LENGTH = 4096

# Qwen2.5's added tokens in its order. The first 14 are special (skipped when a text is shown).
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)

# Words that the shapes world lacks but prompts often hold: they take the merges that are left.
COMMON_WORDS = """
the of and to in is you that it he was for on are as with his they be at one have this from or had
by not but what some we can out other were all there when up use your how said each she which do
their time if will way about many then them write would like so these her long make thing see him
two has look more day could go come did number sound no most people my over know water than call
first who may down side been now find any new work part take get place made live where after back
little only round man year came show every good me give our under name very through just form
sentence great think say help low line differ turn cause much mean before move right boy old too
same tell does set three want air well also play small end put home read hand port large spell add
even land here must big high such follow act why ask men change went light kind off need house
picture try us again animal point mother world near build self earth father head stand own page
should country found answer school grow study still learn plant cover food sun four between state
keep eye never last let thought city tree cross farm hard start might story saw far sea draw left
late run while press close night real life few north open seem together next white children begin
got walk example ease paper group always music those both mark often letter until mile river car
feet care second book carry took dog cat bird horse apple table chair cup bottle window door street
sky cloud grass flower mountain bright dark soft wooden glass metal colour shape image photo
painting style background foreground realistic detailed beautiful
"""


def train(seed: int = 0, trajectories: int = 2000) -> Tokenizer:
    """The tokenizer, trained on `trajectories` draws of each task and as many prompts (5 s)."""
    tokenizer = qwen2_pipeline(models.BPE())
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = bpe_trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus(seed, trajectories), trainer)
    size = tokenizer.get_vocab_size()
    assert size == VOCAB_SIZE, f"the corpus yields {size} tokens, not {VOCAB_SIZE}"
    return tokenizer


def corpus(seed: int, trajectories: int) -> list[str]:
    """Every piece of the shapes world (what the split leaves whole), so often that each becomes one
    token, and the common words, which get the merges that remain.

    seed: of the draws. trajectories: how many of each task, and how many prompts.
    """
    rng = random.Random(seed)
    rows = (sample_row(rng, family=FAMILIES[i % len(FAMILIES)]) for i in range(trajectories))
    texts = [phrase(row, rng) for row in rows]
    for i in range(trajectories):
        for task in ("t2i", "edit"):
            trajectory = make_trajectory(rng, hard=i % 4 == 0, task=task)
            texts += [trajectory.prompt, *turns(trajectory)]
    texts += [form for word in VOCABULARY for form in (f" {word}", f" {word.capitalize()}", word)]
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    pieces = Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
    # The most frequent pair is merged first, so rare pieces must outnumber the common words.
    lines = [piece for piece in sorted(pieces) for _ in range(100 + min(pieces[piece], 100))]
    common = COMMON_WORDS.split()
    lines += [f" {word}" for rank, word in enumerate(common) for _ in range(2 + (rank < 100))]
    return lines


def write(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write tokenizer.json, vocab.json, merges.txt, tokenizer_config.json as Qwen2.5's look."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    merges = [" ".join(pair) for pair in model["merges"]]
    first = len(vocab)
    added = [
        {
            "id": first + i,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": content in SPECIAL_TOKENS,
        }
        for i, content in enumerate((*SPECIAL_TOKENS, *PLAIN_TOKENS))
    ]
    whole = json.loads(tokenizer.to_str())
    whole["added_tokens"] = added
    whole["model"]["vocab"] = vocab
    _write_json(folder / "tokenizer.json", whole)
    _write_json(folder / "vocab.json", vocab, indent=None)
    write_aside(folder / "merges.txt", "#version: 0.2\n" + "\n".join(merges) + "\n")
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: token[key] for key in sorted(token) if key != "id"}
            for token in added
        },
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": MODEL_MAX_LENGTH,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    _write_json(folder / "tokenizer_config.json", config)


def turn_ids(encode: Callable[[str], Sequence[int]], text: str) -> list[int]:
    """Ids of a canonical turn as sampling sees it: prefix, score and rest, each encoded alone.

    With this tokenizer (and Qwen2.5's) the same as `encode(text)`, which later turns see. Raises
    ValueError if the text does not begin as a turn does.
    """
    parts = re.fullmatch(
        r"(<think>\n\[CURRENT_ROUND\] Round#\d+\n\[SCORE\] )(\d+/10)(.*)", text, re.DOTALL
    )
    if parts is None:
        raise ValueError(f"this is no canonical turn: {text[:60]!r}")
    return [token for part in parts.groups() for token in encode(part)]


def _write_json(path: Path, content: object, indent: int | None = 2) -> None:
    write_aside(path, json.dumps(content, ensure_ascii=False, indent=indent) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sft.tokenizer", description=__doc__.split("\n")[0]
    )
    parser.add_argument("folder", help="where to write the files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    write(train(args.seed), args.folder)
    print(f"wrote the tokenizer to {args.folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
