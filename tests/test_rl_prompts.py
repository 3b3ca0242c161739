"""Pools, the sampler, and prompt files that become Parquet."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from PIL import Image
from pyarrow.parquet import read_table

from rl.prepare import PrepareConfig, main, prepare, prepare_lines
from rl.prompts import Pool, Sampler, open_pool
from rl.types import Prompt
from tests.tiny import write_tiny_checkpoint
from umm_reflect.errors import UsageError, UserError
from umm_reflect.shapes.sets import is_held_out
from umm_reflect.tokens import Tokens


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def numbered(size):
    def at(number):
        return Prompt(str(number), str(number), {})

    return Pool("numbers", size, at, "")


def taken(sampler, *counts):
    return [[int(p.uid) for p in sampler.take(count)] for count in counts]


# --- the sampler ----------------------------------------------------------------------------------


def test_each_prompt_comes_once_before_any_comes_again():
    [first, second] = taken(Sampler(numbered(10), seed=0), 10, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != sorted(first)


def test_how_many_were_taken_is_all_that_a_resume_needs():
    whole = Sampler(numbered(7), seed=3)
    [everything] = taken(whole, 30)
    for start in (0, 4, 7, 13, 29):
        resumed = Sampler(numbered(7), seed=3, taken=start)
        assert taken(resumed, 30 - start) == [everything[start:]]
        assert resumed.taken == whole.taken == 30
    assert taken(Sampler(numbered(7), seed=3), 3, 3, 24) == [
        everything[:3],
        everything[3:6],
        everything[6:],
    ]
    assert taken(Sampler(numbered(7), seed=4), 30) != [everything]


def test_a_pool_without_end_is_taken_in_order():
    assert taken(Sampler(numbered(None), seed=0, taken=5), 3) == [[5, 6, 7]]


# --- the built-in world ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shapes", "shapes-hard", "compound", "shapes-hard:3,shapes:1"])
def test_no_pool_of_shapes_asks_what_an_evaluation_row_asks(name):
    pool = open_pool(name, seed=5)
    assert pool.size is None
    rows = [pool.at(number).row for number in range(300)]
    assert not any(is_held_out(row) for row in rows if row["tag"] != "single_object")
    tags = {row["tag"] for row in rows}
    if name == "shapes-hard":
        assert tags == {"counting", "compound"}
    if name == "compound":
        assert tags == {"compound"}


def test_names_with_weights_mix_pools():
    pool = open_pool("shapes-hard:3,shapes:1")
    hard = Counter(
        sum(part["count"] for part in pool.at(i).row["include"]) >= 5 for i in range(400)
    )
    assert 100 < hard[True] < 300
    assert {"single_object", "color_attr"} <= {pool.at(i).row["tag"] for i in range(400)}


def test_a_pool_of_so_many_rows_repeats_none_and_the_seed_decides_which():
    pool = open_pool("shapes", rows=200, seed=1)
    prompts = [pool.at(number) for number in range(200)]
    assert pool.size == 200
    assert len({p.text for p in prompts}) == len({p.uid for p in prompts}) == 200
    assert prompts[0].text == prompts[0].row["prompt"]
    assert "include" in prompts[0].row
    again, other = open_pool("shapes", rows=200, seed=1), open_pool("shapes", rows=200, seed=2)
    assert again.sha256 == pool.sha256 != other.sha256
    assert again.at(7) == prompts[7]
    assert open_pool("shapes", seed=1).sha256 != open_pool("shapes", seed=2).sha256


def test_more_rows_than_the_world_has_are_refused(monkeypatch):
    from rl import prompts

    monkeypatch.setitem(prompts.SHAPES, "compound", {"family": "single_object"})
    with pytest.raises(UserError, match="compound has 8 different prompts in 2000 draws, not 10"):
        open_pool("compound", rows=10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shape", "there is no pool 'shape'; did you mean shapes"),
        ("flowers", "there are shapes, shapes-hard, compound, geneval, geneval-unseen, and files"),
        ("shapes:no", "has the weight 'no', which is no number"),
        ("shapes:0", "give one above 0"),
    ],
)
def test_a_name_that_there_is_not_is_an_error_with_a_hint(name, message):
    with pytest.raises(ValueError, match=message):
        open_pool(name)


def test_the_pool_of_geneval_leaves_its_553_out():
    from eval.geneval_prompts import official_rows
    from umm_reflect.shapes.prompts import canonical_spec

    pool = open_pool("geneval", rows=500)
    asked = {canonical_spec(row) for row in official_rows()}
    assert pool.size == 500
    assert not any(canonical_spec(pool.at(number).row) in asked for number in range(500))
    assert pool.at(0).text.startswith("Create an image with ")


# --- files ----------------------------------------------------------------------------------------


def test_a_text_file_is_a_prompt_a_line(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("a red ball\n\n  a blue box \n")
    pool = open_pool(str(path))
    assert [pool.at(i).text for i in range(pool.size)] == ["a red ball", "a blue box"]
    assert pool.at(1) == Prompt("mine-2", "a blue box", {"prompt": "a blue box"})
    assert open_pool(str(path), rows=1).size == 1


def test_a_row_of_a_jsonl_file_goes_to_the_judge_whole_and_may_name_an_image(tmp_path):
    Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / "ball.png")
    rows = [
        {"uid": "one", "prompt": "a red ball", "include": [{"class": "ball", "count": 1}]},
        {"prompt": "make it blue", "image": "ball.png"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pool = open_pool(str(path))
    first, second = pool.at(0), pool.at(1)
    assert first.uid == "one"
    assert first.row == {"prompt": "a red ball", "include": [{"class": "ball", "count": 1}]}
    assert first.source is None
    assert second.row == {"prompt": "make it blue"}
    assert second.source.getpixel((0, 0)) == (1, 2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": " "}', "row 2: there is no prompt"),
        ('{"prompt": "a"}\nnonsense', "line 2, is no JSON"),
        ('["a"]', "line 1, is no JSON object"),
        ('{"prompt": "a", "uid": 1}\n{"prompt": "b", "uid": 1}', "the uid 1 is another row's"),
        ('{"prompt": "a", "image": "no.png"}', "there is no image"),
        ("", "holds no prompts"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_that_names_the_line(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        open_pool(str(path))
    with pytest.raises(UserError, match="there is no file"):
        open_pool(str(tmp_path / "missing.jsonl"))


# --- published prompt files -----------------------------------------------------------------------

OCR = ['a sign that says "OPEN 24h" at night', "a sign without words", "", '"Hi" and "you"']


def test_ocr_prompts_get_the_published_columns_and_lines_without_quotes_are_named(
    tokenizer_folder, tmp_path, capsys
):
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text("\n".join(OCR))
    argv = ["ocr", "--input-dir", str(tmp_path), "--output-dir", str(tmp_path / "out")]
    assert main([*argv, "--model-path", str(tokenizer_folder)]) == 0
    tokens = Tokens.from_folder(tokenizer_folder)
    rows = read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert rows[0] == {
        "data_source": "flow_grpo/ocr",
        "prompt": [{"role": "user", "content": OCR[0]}],
        "negative_prompt": [{"role": "user", "content": " "}],
        "prompt_token_ids": [tokens.start, *tokens.encode(OCR[0]), tokens.end],
        "ability": "ocr",
        "reward_model": {"style": "model", "ground_truth": "OPEN 24h"},
        "extra_info": {"split": "test", "index": 0},
    }
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["OPEN 24h", "Hi"]
    meta = json.loads((tmp_path / "out" / "bagel_meta.json").read_text())
    assert meta["splits"]["train"]["rows"] == 2
    assert meta["splits"]["train"]["without_quotes"] == [2]
    said = capsys.readouterr().out
    assert "train.txt: 1 lines without double quotes left out: line 2 (a sign without" in said

    pool = open_pool(str(tmp_path / "out" / "train.parquet"))
    assert pool.at(0).text == OCR[0]
    assert pool.at(0).row == {"prompt": OCR[0], "text": "OPEN 24h"}


def test_pickscore_prompts_are_judged_by_their_words(tokenizer_folder, tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text("a cat\na dog\n")
    config = PrepareConfig(
        "pickscore", tmp_path / "out", input_dir=tmp_path, model_path=str(tokenizer_folder)
    )
    prepare(config)
    rows = read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert rows[1]["reward_model"] == {"style": "model", "ground_truth": "a dog"}
    assert rows[1]["extra_info"] == {"split": "train", "index": 1}
    assert open_pool(str(tmp_path / "out" / "train.parquet")).at(1).row == {"prompt": "a dog"}


def test_the_words_of_a_prompt_that_is_too_long_are_cut_and_never_its_end(tokenizer_folder):
    tokens = Tokens.from_folder(tokenizer_folder)
    text = "two red circles and a blue square left of a green triangle"
    made = prepare_lines([text], "pickscore", "train", tokens, max_prompt_length=5)
    assert made.rows[0]["prompt_token_ids"] == [tokens.start, *tokens.encode(text)[:3], tokens.end]
    assert made.cut == 1


def test_a_prompt_file_that_is_missing_or_useless_is_an_error(tokenizer_folder, tmp_path):
    config = PrepareConfig(
        "ocr", tmp_path / "out", input_dir=tmp_path, model_path=str(tokenizer_folder)
    )
    with pytest.raises(UserError, match=r"there is no .*train\.txt"):
        prepare(config)
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text("no quotes here\n")
    with pytest.raises(UserError, match="has no line that can be used"):
        prepare(config)


def test_a_built_in_pool_is_written_as_a_file_of_rows(tmp_path):
    out = tmp_path / "hard"
    assert main(["shapes-hard", "--rows", "12", "--seed", "3", "--output-dir", str(out)]) == 0
    written, made = open_pool(str(out / "train.jsonl")), open_pool("shapes-hard", rows=12, seed=3)
    assert [written.at(i) for i in range(12)] == [made.at(i) for i in range(12)]
    with pytest.raises(UsageError, match="--rows is missing"):
        main(["shapes", "--output-dir", str(out)])
    with pytest.raises(UsageError, match="--input-dir goes with ocr and pickscore"):
        main(["ocr", "--output-dir", str(out)])
