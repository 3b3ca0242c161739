"""Token ids, special tokens, and the two forms in which a tokenizer comes.

python -m pytest tests/test_tokens.py
"""

import json
import shutil
import unicodedata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from umm_reflect.errors import CheckpointError
from umm_reflect.tokens import END, IMAGE_END, IMAGE_START, PAD, START, Tokens

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
needs_golden = pytest.mark.skipif(
    not (GOLDEN / "manifest.json").exists(), reason="shared data not present"
)
SPECIALS = [PAD, START, END, IMAGE_START, IMAGE_END]


def byte_tokenizer(specials=SPECIALS):
    """256 bytes, no merges, then the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return tokenizer


@pytest.fixture
def tokens():
    return Tokens(byte_tokenizer())


@pytest.fixture(scope="module", params=["tokenizer.json", "vocab.json and merges.txt"])
def golden_tokens(request, tmp_path_factory):
    if request.param == "tokenizer.json":
        return Tokens.from_folder(GOLDEN / "tiny_bagel")
    folder = tmp_path_factory.mktemp("parts")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "tiny_bagel" / name, folder)
    return Tokens.from_folder(folder)


@needs_golden
def test_ids_are_the_recorded_ones_from_either_form(golden_tokens):
    manifest = json.loads((GOLDEN / "manifest.json").read_text())
    cases = manifest["files"]["misc.safetensors"]["cases"]
    for case in cases["tokenizer"]:
        assert golden_tokens.encode(case["text"]) == case["ids"]
        assert golden_tokens.decode(case["ids"]) == unicodedata.normalize("NFC", case["text"])
    special = cases["special_ids"]
    assert golden_tokens.start == special["bos_token_id"]
    assert golden_tokens.end == special["eos_token_id"]
    assert golden_tokens.image_start == special["start_of_image"]
    assert golden_tokens.image_end == special["end_of_image"]


@needs_golden
def test_accents_are_composed_but_ligatures_are_kept(golden_tokens):
    assert golden_tokens.decode(golden_tokens.encode("e\u0301 \ufb01")) == "\u00e9 \ufb01"


@needs_golden
def test_rows_beyond_the_tokenizer_have_no_symbol(golden_tokens):
    assert golden_tokens.symbols == golden_tokens.size == 1022
    assert golden_tokens.unsupported(1024) == [1022, 1023]
    assert golden_tokens.decode([64, 1023, 1022, 1002]) == "a<|im_end|>"


def test_special_ids_come_from_the_tokenizer(tokens):
    framing = [tokens.pad, tokens.start, tokens.end, tokens.image_start, tokens.image_end]
    assert framing == [256, 257, 258, 259, 260]
    assert (tokens.size, tokens.symbols) == (261, 261)


def test_a_special_string_in_a_text_is_special_unless_that_is_refused(tokens):
    text = "a<|im_end|>b"
    assert [i for i in tokens.encode(text) if i >= 256] == [258]
    plain = tokens.encode(text, allow_special=False)
    assert len(plain) == len(text)
    assert max(plain) < 256
    assert tokens.decode(plain) == tokens.decode(tokens.encode(text)) == text
    assert tokens.encode(text)[1] == 258  # asking for plain text once changes nothing later


def test_any_text_comes_back(tokens):
    for text in ["", " two  spaces\n\n", "Café 中文 😀", "<think>\n[SCORE] 3/10"]:
        assert tokens.decode(tokens.encode(text)) == text


def test_a_segment_holds_the_bare_ids(tokens):
    assert tokens.segment("ab").ids == tuple(tokens.encode("ab"))
    assert len(tokens.segment("ab").ids) == 2


def test_a_missing_special_token_is_named():
    with pytest.raises(CheckpointError, match=r"no token <\|vision_end\|>"):
        Tokens(byte_tokenizer(SPECIALS[:-1]))


def test_long_texts_are_never_cut():
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    assert len(Tokens(tokenizer).encode("a" * 10_000)) == 10_000
    assert len(Tokens(tokenizer).encode("a")) == 1


def test_folders_without_a_whole_tokenizer_say_what_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"vocab.json, merges.txt, tokenizer_config.json is"):
        Tokens.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read"):
        Tokens.from_folder(tmp_path)


@needs_golden
def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "tiny_bagel" / name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    decoder = config["added_tokens_decoder"]
    config["added_tokens_decoder"] = {str(int(i) + 5): entry for i, entry in decoder.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"the id 1005, but after vocab\.json it is 1000"):
        Tokens.from_folder(tmp_path)


def test_line_ends_are_the_ids_whose_text_holds_a_newline(tokens):
    assert tokens.line_ends == {tokens.encode("\n")[0]}
    folder = Path(__file__).resolve().parents[1] / "pretrained" / "bagel-nano-shapes"
    nano = Tokens.from_folder(folder)
    alone = {i for i in range(nano.size) if "\n" in nano.decode([i])}
    assert nano.line_ends == alone
    assert len(alone) > 1
