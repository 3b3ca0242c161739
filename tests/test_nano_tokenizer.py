"""The nano tokenizer: Qwen2.5's layout, turns in few tokens, cut where sampling cuts them."""

import hashlib
import json
import os
import random
import subprocess
import sys

import pytest

from agent.protocol import SCORES, prefix
from sft.shapes import make_trajectory, turns
from sft.tokenizer import train, turn_ids, write
from umm_reflect.config import NANO
from umm_reflect.shapes.prompts import VOCABULARY
from umm_reflect.tokens import Tokens

FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write(train(), path)
    return path


@pytest.fixture(scope="module")
def tokens(folder) -> Tokens:
    return Tokens.from_folder(folder)


@pytest.fixture(scope="module")
def spoken() -> dict[tuple[str, bool], list[str]]:
    """Turns by task and split; another seed than the one that the tokenizer was trained with."""
    rng = random.Random(77)
    return {
        (task, hard): [
            turn for _ in range(400) for turn in turns(make_trajectory(rng, hard=hard, task=task))
        ]
        for task in ("t2i", "edit")
        for hard in (False, True)
    }


def digests(folder) -> list[str]:
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES]


def test_training_again_in_another_process_gives_the_same_bytes(folder, tmp_path):
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-m", "sft.tokenizer", str(tmp_path)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert digests(tmp_path) == digests(folder)


def test_ids_are_bytes_then_merges_then_qwens_added_tokens(folder, tokens):
    vocab = json.loads((folder / "vocab.json").read_text())
    assert sorted(vocab.values()) == list(range(1000))
    merges = (folder / "merges.txt").read_text().splitlines()
    assert merges[0] == "#version: 0.2"
    assert len(merges) == 1 + 744
    assert tokens.size == tokens.symbols == 1022 <= NANO.llm.vocab_size
    assert (tokens.pad, tokens.start, tokens.end) == (1000, 1001, 1002)
    assert (tokens.image_start, tokens.image_end) == (1009, 1010)


def test_without_tokenizer_json_the_other_files_give_the_same_ids(folder, tokens, spoken, tmp_path):
    for name in FILES[1:]:
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    other = Tokens.from_folder(tmp_path)
    for turn in spoken["t2i", False][:50]:
        assert other.encode(turn) == tokens.encode(turn)


def test_transformers_reads_the_folder_and_agrees(folder, tokens, spoken):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*spoken["edit", True][:50], "Zwölf Bären, 345 €\n\n  <|im_end|> naïve"]:
        assert theirs.encode(text, add_special_tokens=False) == tokens.encode(text)


def test_a_turn_encoded_whole_has_the_ids_of_its_prefix_its_score_and_its_rest(tokens, spoken):
    everything = [turn for group in spoken.values() for turn in group]
    assert len(everything) > 2000
    for turn in everything:
        assert turn_ids(tokens.encode, turn) == tokens.encode(turn)


def test_where_a_field_ends_no_token_crosses_whatever_the_score_and_round(tokens):
    thinking = "\n[ACTION] done\n[THINKING] All of it is there."
    rest = f"{thinking}\n[SOURCE_IMAGE] Image #0\n</think>\n[EDIT] None"
    for round_index in (0, 3, 11):
        for score in SCORES:
            parts = (prefix(round_index), score, rest)
            assert tokens.encode("".join(parts)) == [
                i for part in parts for i in tokens.encode(part)
            ]


def test_what_is_no_turn_is_refused(tokens):
    with pytest.raises(ValueError, match="no canonical turn"):
        turn_ids(tokens.encode, "<think>\n[SCORE] 3/10")


def test_turns_are_short(tokens, spoken):
    for (_, hard), group in spoken.items():
        lengths = sorted(len(tokens.encode(turn)) + 1 for turn in group)  # with the end token
        assert sum(lengths) / len(lengths) < (95 if hard else 82)
        assert lengths[int(0.99 * len(lengths))] < 125
        assert lengths[-1] <= 160


def test_the_fixed_parts_of_a_turn_take_few_tokens(tokens):
    assert len(tokens.encode(prefix(0))) == 12
    assert [len(tokens.encode(score)) for score in ("0/10", "9/10", "10/10")] == [4, 4, 5]
    assert len(tokens.encode("\n[ACTION] edit\n[THINKING] ")) == 8
    assert len(tokens.encode("\n[SOURCE_IMAGE] Image #0\n</think>\n[EDIT] None")) == 14


def test_every_word_of_the_shapes_world_is_one_token(tokens):
    words = [word for word in VOCABULARY if word.isalpha()]
    longer = [word for word in words if len(tokens.encode(f" {word}")) > 1]
    assert longer == []


def test_any_text_comes_back_through_bytes(tokens):
    for text in ("naïve Zwölf 345", "日本語 🙂", "a\tb\r\n\n c  ", "[EDIT] <think> Ünïcödé {}~\\"):
        assert tokens.decode(tokens.encode(text)) == text
    assert tokens.decode(tokens.encode("e\u0301")) == "é"  # NFC


def test_digits_stand_alone(tokens):
    assert len(tokens.encode("2024")) == 4
