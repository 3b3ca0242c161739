"""Text to token ids and back; the special ids that frame segments come from the tokenizer itself.

    tokens = Tokens.from_folder("pretrained/bagel-nano-shapes")
    tokens.decode(tokens.encode("two red circles"))        # "two red circles"

No `transformers` here: its import costs more than a whole run of the nano model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from umm_reflect.context import TextSegment
from umm_reflect.errors import CheckpointError

START = "<|im_start|>"
END = "<|im_end|>"
IMAGE_START = "<|vision_start|>"
IMAGE_END = "<|vision_end|>"
PAD = "<|endoftext|>"

# How Qwen2 cuts text before byte-level BPE: contractions, words, single digits, signs, white space.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokens:
    """A tokenizer. `start`, `end`, `image_start`, `image_end`, `pad` are the ids of the framing."""

    def __init__(self, tokenizer: Tokenizer, source: str = "the tokenizer"):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.source = source
        self.start = self._special(START)
        self.end = self._special(END)
        self.image_start = self._special(IMAGE_START)
        self.image_end = self._special(IMAGE_END)
        self.pad = self._special(PAD)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokens:
        """Read tokenizer.json or, without it, vocab.json, merges.txt and tokenizer_config.json.

        Errors: CheckpointError when files are missing or damaged, or a special token is unknown.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if path.exists():
            try:
                return cls(Tokenizer.from_file(str(path)), str(path))
            except CheckpointError:
                raise
            except Exception as error:  # tokenizers raises bare Exception for a damaged file
                raise CheckpointError(
                    f"{path} cannot be read ({error})", "Fetch it again."
                ) from error
        return cls(_byte_level_bpe(folder), str(folder))

    def encode(self, text: str, allow_special: bool = True) -> list[int]:
        """Ids of the text, without any framing.

        allow_special: a special token's string inside the text becomes that token, as in the
        original. False treats it as the characters that it is.
        """
        tokenizer = self.tokenizer if allow_special else self._plain
        return tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(
        self, text: str, allow_special: bool = True
    ) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Ids, and for each the characters (first, one past the last) of the text that it covers.

        The tokens of a character that is cut into several all cover it.
        """
        tokenizer = self.tokenizer if allow_special else self._plain
        encoded = tokenizer.encode(text, add_special_tokens=False)
        return tuple(encoded.ids), encoded.offsets

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens included; ids without a symbol are left out."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def segment(self, text: str, allow_special: bool = True) -> TextSegment:
        """The text as a context segment."""
        return TextSegment(tuple(self.encode(text, allow_special)))

    @cached_property
    def size(self) -> int:
        """One more than the highest id that has a symbol."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def symbols(self) -> int:
        """How many ids have a symbol; a model may have more embedding rows."""
        return len(set(self.tokenizer.get_vocab(with_added_tokens=True).values()))

    @cached_property
    def line_ends(self) -> frozenset[int]:
        """The ids whose text holds a newline."""
        texts = self.tokenizer.decode_batch([[i] for i in range(self.size)], False)
        return frozenset(i for i, text in enumerate(texts) if "\n" in text)

    def unsupported(self, vocab_size: int) -> list[int]:
        """The ids below vocab_size (rows of the model) that have no symbol."""
        known = set(self.tokenizer.get_vocab(with_added_tokens=True).values())
        return [i for i in range(vocab_size) if i not in known]

    @cached_property
    def _plain(self) -> Tokenizer:
        plain = Tokenizer.from_str(self.tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def _special(self, symbol: str) -> int:
        token = self.tokenizer.token_to_id(symbol)
        if token is None:
            raise CheckpointError(
                f"{self.source} has no token {symbol}",
                "Take the tokenizer files that belong to the checkpoint.",
            )
        return token


def qwen2_pipeline(model: models.BPE) -> Tokenizer:
    """A BPE with what Qwen2 puts around it: NFC, its split, bytes in and bytes out."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_level_bpe(folder: Path) -> Tokenizer:
    """The Qwen2 tokenizer from vocab.json and merges.txt: NFC, Qwen2 split, byte-level BPE."""
    paths = [folder / name for name in ("vocab.json", "merges.txt", "tokenizer_config.json")]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and {', '.join(missing)} is missing too",
            "Name a folder that holds the checkpoint's tokenizer files.",
        )
    vocab, merges, config = paths
    try:
        tokenizer = qwen2_pipeline(models.BPE.from_file(str(vocab), str(merges)))
        added = json.loads(config.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        raise CheckpointError(
            f"the tokenizer files in {folder} cannot be read ({error})", "Fetch them again."
        ) from error
    for number in sorted(added, key=int):
        entry = added[number]
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token = AddedToken(entry["content"], **{f: entry[f] for f in flags if f in entry})
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(entry["content"]) != int(number):
            raise CheckpointError(
                f"{config} gives {entry['content']} the id {number}, but after {vocab.name} it is "
                f"{tokenizer.token_to_id(entry['content'])}",
                "Take the tokenizer files that belong together.",
            )
    return tokenizer
