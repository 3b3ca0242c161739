"""umm-reflect eval --best-of: first images against edits, by hand, resumed, judged again."""

from __future__ import annotations

import json

import pytest

from eval.best_of import best_of, equal_images, picked
from eval.binding import check
from eval.config import EvalConfig
from eval.gallery import record
from eval.results import Candidate, Judged, Look, read_results
from eval.run import main as eval_main
from tests.test_eval_report import BROKEN, DONE, EDIT, result
from tests.test_eval_run import TEN, Actor, play
from umm_reflect.errors import UsageError
from umm_reflect.settings import parse


def candidate(right: bool, score: int) -> Candidate:
    look = Look("done", score, "") if score >= 0 else BROKEN
    return Candidate(Judged(right, "as asked" if right else "circle missing"), look)


# Row 0: the first image (4 of 10) is wrong and mended by one edit; of two more, 9 is right.
# Row 1: right at once (10); the two more are wrong, one as sure of itself, one malformed.
TWO = [
    result(0, "01", (EDIT, DONE), candidates=(candidate(True, 9), candidate(False, 2))),
    result(1, "1", (DONE,), candidates=(candidate(False, 10), candidate(False, -1))),
]


def test_the_candidates_of_a_sample_are_its_own_first_images():
    found = best_of(TWO)
    assert [one.n for one in found] == [1, 2, 3]
    assert [one.any_right.value for one in found] == [
        round((1 / 3 + 1 / 3) / 2, 6),
        round((2 / 3 + 2 / 3) / 2, 6),
        1.0,
    ]
    # pairs of row 0: 4-9 right, 4-2 wrong, 9-2 right; of row 1: tie, right, wrong
    assert found[1].by_own_score.value == round((2 / 3 + 1 / 2) / 2, 6)
    assert found[2].by_own_score.value == 0.75
    assert [picked(one) for one in TWO] == [1, 0]


def test_edits_are_held_against_as_many_first_images():
    one, two = equal_images(TWO, 2)
    assert (one.edits, one.images, one.by_edits) == (1, 1.5, 1.0)
    own = ((1 / 3 + 2 / 3) / 2 + (1 / 3 + 1 / 2) / 2) / 2
    assert one.own == pytest.approx(own, abs=1e-6)
    assert one.perfect == 0.5
    assert one.edits_minus_own.value == pytest.approx(1 - own, abs=1e-6)
    assert one.edits_minus_own_at_most.value == pytest.approx(1 - (2 / 3 + 1 / 2) / 2, abs=1e-6)
    assert two.edits_minus_own_at_most.value == 0.25
    assert equal_images([result(0, "01", (EDIT, DONE))], 1) == ()  # two images, one first one


def test_a_page_shows_the_candidates_and_the_own_choice():
    shown = record(TWO[0], lambda r, n: None, lambda r, n: f"{n}.png")
    assert [one["file"] for one in shown["candidates"]] == ["1.png", "2.png"]
    assert shown["picked"] == 1
    assert record(result(0, "1"), lambda r, n: None)["candidates"] == []


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return play(tmp_path_factory.mktemp("best"), best_of=3, log_samples=True)[0]


def test_each_sample_gets_so_many_first_images_with_a_look_each(played):
    results = read_results(played / "results.jsonl")
    assert [len(one.candidates) for one in results] == [2] * 10
    # the actor paints and says by row: each candidate is as the first image of its row
    assert [one.candidates[0].image.correct for one in results] == [
        one.images[0].correct for one in results
    ]
    assert [one.candidates[1].look for one in results] == [one.looks[0] for one in results]
    summary = json.loads((played / "summary.json").read_text())["sets"]["shapes553"]["local"]
    assert [one["any_right"]["value"] for one in summary["best_of"]] == [0.4] * 3
    assert summary["equal_images"][0]["images"] == 1.5
    assert (summary["equal_images"][0]["by_edits"], summary["equal_images"][0]["own"]) == (0.6, 0.4)


@pytest.mark.parametrize("how", [{"batch_size": 3}, {"batch_size": 10}])
def test_neither_the_batch_nor_a_resume_changes_a_byte(tmp_path, played, how):
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, actor=Actor(breaks_at=5), best_of=3, **how)
    folder, _ = play(tmp_path, best_of=3, resume=True, **how)
    for name in ("results.jsonl", "summary.json"):
        assert (folder / name).read_bytes() == (played / name).read_bytes()


def test_kept_candidates_are_judged_again_and_a_replaced_one_is_noticed(tmp_path, played):
    env = json.loads((played / "env.json").read_text())
    env["profiles"] = {"local": {}}  # the view that was played
    (played / "env.json").write_text(json.dumps(env))
    words = ["--images", str(played), "--output-dir", str(tmp_path / "again"), "--workers", "1"]
    assert eval_main(words) == 0
    again = (tmp_path / "again/results.jsonl").read_bytes()
    assert again == (played / "results.jsonl").read_bytes()
    results = read_results(played / "results.jsonl")
    assert check(played, results).stale == ()
    place = played / f"shapes553-local/candidates/{TEN[0]:04d}-seed0"
    kept = (place / "1/image_0.png").read_bytes()
    other = played / f"shapes553-local/candidates/{TEN[9]:04d}-seed0/1/image_0.png"
    (place / "1/image_0.png").write_bytes(other.read_bytes())
    (stale,) = check(played, results).stale
    assert stale.why.startswith("candidate 1: ")
    (place / "1/image_0.png").write_bytes(kept)


def test_without_it_a_line_is_as_before_and_with_it_edits_are_needed(played):
    assert "candidates" not in result(0, "1").to_line()
    with pytest.raises(UsageError, match="compares with edits"):
        parse(EvalConfig, ["--best-of", "4", "--max-rounds", "0"], "umm-reflect eval")
    with pytest.raises(UsageError, match="--best-of is 1"):
        parse(EvalConfig, ["--best-of", "1"], "umm-reflect eval")
