"""The 553 rows byte for byte; training pools without any of them.

python -m pytest tests/test_geneval_prompts.py
"""

from __future__ import annotations

import hashlib
import json
import random

import pytest

from eval import geneval_cli
from eval.geneval_pools import (
    HELD_OUT_CLASSES,
    RELEASE_DEV,
    RELEASE_TRAIN,
    allot,
    build_pool,
    every_row,
    find_overlaps,
    held_out_objects,
    read_rows,
)
from eval.geneval_prompts import (
    CLASSES,
    CLASSES_SHA256,
    FAMILY_SIZES,
    PROMPTS_SHA256,
    ROWS_SHA256,
    color_attr,
    colors,
    counting,
    official_file,
    official_rows,
    position,
    proper_plural,
    request,
    single_object,
    two_object,
    with_article,
)
from umm_reflect.errors import UserError
from umm_reflect.shapes.prompts import canonical_spec


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


# --- the evaluation -------------------------------------------------------------------------------


def test_the_evaluation_file_is_the_published_one_byte_for_byte():
    assert hashlib.sha256(official_file()).hexdigest() == ROWS_SHA256
    assert ROWS_SHA256 == "5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13"
    assert sha256("".join(row["prompt"] + "\n" for row in official_rows())) == PROMPTS_SHA256
    assert sha256("".join(kind + "\n" for kind in CLASSES)) == CLASSES_SHA256


def test_the_families_come_in_order_and_with_their_published_sizes():
    tags = [row["tag"] for row in official_rows()]
    assert list(dict.fromkeys(tags)) == list(FAMILY_SIZES)
    assert {tag: tags.count(tag) for tag in tags} == FAMILY_SIZES


def test_changing_a_row_does_not_change_the_next_reading():
    official_rows()[0]["include"].clear()
    assert official_rows()[0]["include"] == [{"class": "bench", "count": 1}]


def test_rows_have_the_published_keys_in_the_published_order():
    assert json.dumps(counting("bus", 3)) == (
        '{"tag": "counting", "include": [{"class": "bus", "count": 3}], '
        '"exclude": [{"class": "bus", "count": 4}], "prompt": "a photo of three buses"}'
    )
    assert json.dumps(position("dog", "right of", "teddy bear")) == (
        '{"tag": "position", "include": [{"class": "teddy bear", "count": 1}, '
        '{"class": "dog", "count": 1, "position": ["right of", 0]}], '
        '"prompt": "a photo of a dog right of a teddy bear"}'
    )


def test_articles_and_plurals():
    assert [with_article(word) for word in ("bench", "apple", "orange")] == [
        *("a bench", "an apple", "an orange")
    ]
    proper = {"person": "people", "sheep": "sheep", "bench": "benches", "bus": "buses"}
    proper |= {"knife": "knives", "wine glass": "wine glasses", "tv": "tvs"}
    assert {kind: proper_plural(kind) for kind in proper} == proper


def test_requests_are_worded_as_the_released_controllers_are_asked():
    assert request(colors("cow", "orange")) == "Create an image with an orange cow."
    assert request(counting("bench", 3)) == "Create an image with three benchs."
    assert request(counting("bench", 3), exactly=True) == (
        "Create an image with exactly three benches."
    )


# --- overlaps -------------------------------------------------------------------------------------


def first_of(tag):
    return next(row for row in official_rows() if row["tag"] == tag)


def said_otherwise(row):
    """The same request in another order: the clauses turned round, a relation mirrored."""
    parts = row["include"]
    if row["tag"] == "position":
        mirror = {
            "left of": "right of",
            "right of": "left of",
            "above": "below",
            "below": "above",
        }
        relation = mirror[parts[1]["position"][0]]
        return position(parts[0]["class"], relation, parts[1]["class"])
    if row["tag"] == "two_object":
        return two_object(parts[1]["class"], parts[0]["class"])
    if row["tag"] == "color_attr":
        return color_attr(*((part["class"], part["color"]) for part in reversed(parts)))
    return {**row, "prompt": request(row, exactly=True)}


@pytest.mark.parametrize("tag", FAMILY_SIZES)
def test_a_planted_evaluation_row_is_found_in_other_words_and_order(tag):
    planted = said_otherwise(first_of(tag))
    fine = [
        counting("dog", 6),
        colors("dog", "pink"),
        color_attr(("dog", "pink"), ("cat", "pink")),
    ]
    fine = [row for row in fine if not find_overlaps([row], official_rows())]
    found = find_overlaps([*fine, planted], official_rows())
    assert [(overlap.family, overlap.how) for overlap in found] == [(tag, "spec")]
    assert found[0].evaluation_prompt == first_of(tag)["prompt"]
    drawn = build_pool([*fine, planted], train={tag: 5}, dev={})
    assert planted["prompt"] not in [row["official_prompt"] for row in drawn.train]
    assert drawn.report["families"][tag]["in_evaluation"] == 1


def test_a_row_with_the_words_of_an_evaluation_prompt_is_found_whatever_its_clauses_say():
    asked = first_of("colors")["prompt"].removeprefix("a photo of ")
    row = {**colors("dog", "pink"), "prompt": f"Create an image with  {asked.upper()}."}
    (found,) = find_overlaps([row], official_rows())
    assert found.how == "words"


def test_rows_that_ask_for_the_same_are_taken_once():
    left, right = position("tv", "left of", "dog"), position("dog", "right of", "tv")
    assert canonical_spec(left) == canonical_spec(right)
    drawn = build_pool([left, right], train={"position": 5}, dev={}, evaluation=[])
    assert len(drawn.train) == 1
    assert drawn.report["families"]["position"]["duplicates"] == 1
    assert drawn.report["short"] == {"train": 4, "dev": 0}


# --- pools ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything():
    return every_row()


def test_everything_that_can_be_asked_has_the_size_that_can_be_computed(everything):
    tags = [row["tag"] for row in everything]
    assert {tag: tags.count(tag) for tag in FAMILY_SIZES} == {
        "single_object": 80,
        "two_object": 80 * 79 // 2,
        "counting": 80 * 5,
        "colors": 79 * 10,
        "position": 80 * 79 * 4 // 2,
        "color_attr": 20_000,
    }
    assert len({canonical_spec(row) for row in everything}) == len(everything)


def test_the_release_sized_pool_shares_out_what_two_families_lack(everything):
    drawn = build_pool(everything)
    families = drawn.report["families"]
    assert (len(drawn.train), len(drawn.dev)) == (3000, 270)
    assert families["single_object"]["train"] == families["single_object"]["dev"] == 0
    assert families["single_object"]["in_evaluation"] == 80
    assert families["counting"]["available"] == 320
    assert families["counting"]["train"] + families["counting"]["dev"] == 320
    assert families["position"]["train"] > RELEASE_TRAIN["position"]
    specs = [canonical_spec(row) for row in (*drawn.train, *drawn.dev, *official_rows())]
    mirrored_in_the_evaluation = 1
    assert len(set(specs)) == len(specs) - mirrored_in_the_evaluation
    assert sum(RELEASE_DEV.values()) == 270
    assert len({row["uid"] for row in (*drawn.train, *drawn.dev)}) == 3270


def test_a_pool_depends_on_the_seed_and_not_on_the_order_of_its_candidates(everything):
    some = [row for row in everything if row["tag"] in ("colors", "two_object")]
    sizes = {"train": {"colors": 30, "two_object": 20}, "dev": {"colors": 5}}
    first = build_pool(some, **sizes)
    shuffled = random.Random(1).sample(some, len(some))
    assert build_pool(shuffled, **sizes).report["sha256"] == first.report["sha256"]
    assert build_pool(some, **sizes, seed=1).report["sha256"] != first.report["sha256"]


@pytest.mark.parametrize(
    ("wanted", "available", "given"),
    [
        ({"a": 4, "b": 2, "c": 1}, {"a": 1, "b": 9, "c": 9}, {"a": 1, "b": 4, "c": 2}),
        ({"a": 4, "b": 2}, {"a": 9, "b": 9}, {"a": 4, "b": 2}),
        ({"a": 4, "b": 2}, {"a": 0, "b": 3}, {"a": 0, "b": 3}),
        ({"a": 4, "b": 4, "c": 4}, {"a": 0, "b": 5, "c": 9}, {"a": 0, "b": 5, "c": 7}),
        ({"a": 3}, {"a": 0, "b": 9}, {"a": 0, "b": 0}),
        # 163 of counting are short: 95 + 41 + 14 + 13
        (
            {"position": 1305, "counting": 865, "color_attr": 559, "colors": 187, "two": 187},
            {"position": 20538, "counting": 702, "color_attr": 8774, "colors": 636, "two": 2891},
            {"position": 1400, "counting": 702, "color_attr": 600, "colors": 201, "two": 200},
        ),
    ],
)
def test_what_a_family_lacks_is_shared_out_by_size(wanted, available, given):
    assert allot(wanted, available) == given


def test_a_held_out_object_split_never_trains_on_what_it_tests():
    split = held_out_objects()
    assert (len(split.train), len(split.dev), len(split.test)) == (3000, 270, 256)
    assert len(HELD_OUT_CLASSES) == 20

    def kinds(rows):
        return {part["class"] for row in rows for part in row["include"]}

    assert not kinds(split.train) & set(HELD_OUT_CLASSES)
    assert not kinds(split.dev) & set(HELD_OUT_CLASSES)
    assert kinds(split.test) == set(HELD_OUT_CLASSES)
    assert set(split.report["test_families"]) == set(FAMILY_SIZES)
    with pytest.raises(ValueError, match="unicorn"):
        held_out_objects(["unicorn"])


# --- files and the command ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("[1]", "line 2: a row is"),
        ('{"tag": "colors", "include": [], "prompt": "x"}', "no include clause"),
        (json.dumps({**single_object("dog"), "tag": "odd"}), "'odd' is none of"),
        (json.dumps(single_object("dgo")), "did you mean 'dog'"),
        (json.dumps(counting("dog", 2)).replace("2", '"2"'), "count >= 1"),
        (json.dumps(position("dog", "above", "tv")).replace("above", "over"), "over"),
    ],
)
def test_a_bad_line_of_a_file_is_named(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(single_object("dog")) + "\n" + line + "\n")
    with pytest.raises(UserError, match=message):
        read_rows(path)


def test_the_command_writes_the_rows_a_pool_and_finds_overlaps(tmp_path, capsys):
    rows, pool = tmp_path / "rows.jsonl", tmp_path / "pool"
    assert geneval_cli.main(["prompts", str(rows)]) == 0
    assert hashlib.sha256(rows.read_bytes()).hexdigest() == ROWS_SHA256
    assert geneval_cli.main(["overlaps", str(rows), "--report", str(tmp_path / "r.jsonl")]) == 1
    assert "553 of 553 rows are asked" in capsys.readouterr().out
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 553
    candidates = tmp_path / "candidates.jsonl"
    some = [colors("dog", color) for color in ("red", "green", "blue", "pink", "white", "black")]
    candidates.write_text("".join(json.dumps(row) + "\n" for row in [*some, *official_rows()]))
    assert geneval_cli.main(["pool", str(pool), "--candidates", str(candidates)]) == 0
    assert "rows short" in capsys.readouterr().out
    report = json.loads((pool / "report.json").read_text())
    assert len(report["overlaps"]) >= 553
    assert geneval_cli.main(["overlaps", str(pool / "dev.jsonl")]) == 0
