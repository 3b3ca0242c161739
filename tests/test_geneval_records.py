"""GenEval's three results on hand-written evidence: what a person works out, and what code says.

python -m pytest tests/test_geneval_records.py
"""

from __future__ import annotations

import copy
import json

import pytest

from eval.evidence import Evidence
from eval.geneval_scores import (
    cross_checked,
    graded,
    margins,
    official_correct,
    questions,
    unanswered,
    verdict,
)
from tests.geneval_records import BOTH, CASES, COLOURED, DOG, RED, SURE_BLUE, SURE_RED, THREE, seen

EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row['tag']}-{case.name}")


def evidence_of(*detections, answers=()):
    image = {"sha256": "", "size": [512, 512]}
    record = {"image": image, "detections": list(detections), "answers": list(answers)}
    return Evidence.from_record(record)


def test_there_are_many_cases_of_every_family():
    tags = [case.row["tag"] for case in CASES]
    assert len(CASES) >= 60
    assert {tag: tags.count(tag) for tag in dict.fromkeys(tags)} == {
        "single_object": 8,
        "two_object": 9,
        "counting": 21,
        "colors": 11,
        "position": 25,
        "color_attr": 12,
    }


@EACH
def test_the_three_results_are_those_worked_out_by_hand(case):
    evidence = Evidence.from_record(json.loads(json.dumps(case.record)))
    assert official_correct(case.row, evidence) is case.official
    assert cross_checked(case.row, evidence) is case.cross_checked
    released = graded(case.row, evidence, "release", "cross_checked")
    assert released == pytest.approx(case.released, abs=1e-12)


@EACH
@pytest.mark.parametrize("preset", ["ours", "release"])
@pytest.mark.parametrize("rule", ["official", "cross_checked"])
def test_a_score_is_one_exactly_for_a_yes_and_below_half_for_a_no(case, rule, preset):
    evidence = Evidence.from_record(case.record)
    correct = case.official if rule == "official" else case.cross_checked
    opinion = verdict(case.row, evidence, rule=rule, preset=preset)
    assert opinion.correct is correct
    assert opinion.score == 1 if correct else 0 <= opinion.score < 0.5
    assert (opinion.reason == "as asked") is correct


@EACH
def test_a_verdict_can_be_reached_again_from_its_own_record(case):
    evidence = Evidence.from_record(case.record)
    first = verdict(case.row, evidence, rule="cross_checked", preset="ours")
    record = json.loads(json.dumps(first.to_record()))
    again = verdict(
        case.row, Evidence.from_record(record["evidence"]), rule="cross_checked", preset="ours"
    )
    assert again == first
    assert record["evidence"]["official_correct"] is case.official
    assert record["evidence"]["cross_checked"] is case.cross_checked


def test_our_score_rises_with_the_score_of_a_missing_object():
    climb = [graded(DOG, evidence_of(seen("dog", s)), "ours") for s in (0.05, 0.15, 0.3, 0.31)]
    assert climb == pytest.approx([0.25 * 0.05 / 0.3, 0.125, 0.25, 1.0])
    assert [graded(DOG, evidence_of(seen("dog", s)), "release") for s in (0.05, 0.3)] == [0, 0]


def test_our_score_rises_with_the_probability_of_the_right_colour():
    shares = [{"red": p, "blue": 1 - p} for p in (0.0, 0.2, 0.49)]
    climb = [graded(RED, evidence_of(seen("dog", **share)), "ours") for share in shares]
    assert climb == pytest.approx([0.25, 0.3, 0.3725])
    assert [graded(RED, evidence_of(seen("dog", **share)), "release") for share in shares] == [
        0.25
    ] * 3


def test_a_faint_object_of_the_right_colour_is_worth_more_than_one_of_the_wrong():
    right = graded(RED, evidence_of(seen("dog", 0.15, **SURE_RED)), "ours")
    wrong = graded(RED, evidence_of(seen("dog", 0.15, **SURE_BLUE)), "ours")
    assert (right, wrong) == pytest.approx((0.5 * 0.5 * 0.95 * 0.5, 0.5 * 0.5 * 0.55 * 0.5))


def test_our_score_of_a_count_rises_with_the_surest_that_is_missing():
    two = [seen("dog"), seen("dog")]
    climb = [graded(THREE, evidence_of(*two, seen("dog", s)), "ours") for s in (0.1, 0.5, 0.9)]
    assert climb == pytest.approx([0.5 * (2 + 0.5 * s / 0.9) / 3 for s in (0.1, 0.5, 0.9)])


def test_with_the_second_opinion_our_score_falls_with_the_margin():
    sure = next(case for case in COLOURED if case.name == "both right")
    scores = []
    for red in (0.1, 0.3, 0.5):
        record = copy.deepcopy(sure.record)
        record["answers"][0]["yes"], record["answers"][1]["yes"] = red, 0.5
        scores.append(graded(sure.row, Evidence.from_record(record), "ours", rule="cross_checked"))
    assert scores == pytest.approx([0.5 * (0.8 + 1) / 2, 0.5 * (0.9 + 1) / 2, 0.5])
    assert max(scores) < 0.5


def test_the_reason_names_what_is_wrong():
    by_name = {f"{case.row['tag']}: {case.name}": case for case in CASES}

    def reason(name):
        case = by_name[name]
        return verdict(case.row, Evidence.from_record(case.record), rule="cross_checked").reason

    assert reason("single_object: nothing at all") == "dog missing"
    assert reason("counting: count + 1") == "4 dogs instead of 3"
    assert reason("colors: a blue dog") == "dog is blue, not red"
    assert reason("position: on the other side") == "cat is not left of dog"
    assert reason("color_attr: BLIP prefers the other colour") == (
        "BLIP does not see the red dog (margin -0.20)"
    )


def test_blip_is_asked_about_each_object_in_its_colour_and_in_the_others():
    assert questions(BOTH) == [("dog", "red", "blue"), ("cat", "blue", "red")]
    assert questions(RED) == []
    seen_both = evidence_of(seen("dog", **SURE_RED), seen("cat", 0.3, **SURE_BLUE))
    assert unanswered(BOTH, seen_both) == [("dog", "red"), ("dog", "blue")]


def test_a_missing_answer_is_an_error_and_not_a_no():
    both = evidence_of(seen("dog", **SURE_RED), seen("cat", **SURE_BLUE))
    with pytest.raises(ValueError, match="ask BLIP"):
        margins(BOTH, both)
    assert official_correct(BOTH, both) is True
    opinion = verdict(BOTH, both)
    assert opinion.correct is True
    assert opinion.evidence["cross_checked"] is None


def test_a_row_of_two_objects_in_one_colour_has_no_second_opinion():
    row = {"tag": "color_attr", "include": [dict(c, color="red") for c in BOTH["include"]]}
    with pytest.raises(ValueError, match="different colours"):
        questions(row)


def test_the_published_formula_refuses_families_that_it_does_not_know():
    row = {"tag": "compound", "include": [{"class": "dog", "count": 2}]}
    with pytest.raises(ValueError, match="compound"):
        graded(row, evidence_of(), "release")
    assert graded(row, evidence_of(seen("dog")), "ours") == 0.25


DAMAGED = [
    ({"detections": 3}, "detections"),
    ({"detections": [3]}, r"detections\[0\]"),
    ({"detections": [{"kind": "dog", "score": 1.2, "box": [0, 0, 1, 1]}]}, "outside"),
    ({"detections": [{"kind": "dog", "score": float("nan"), "box": [0, 0, 1, 1]}]}, "no number"),
    ({"detections": [{"kind": "dog", "score": True, "box": [0, 0, 1, 1]}]}, "no number"),
    ({"detections": [{"kind": "dog", "score": 0.5, "box": [0, 0, 1]}]}, "4 numbers"),
    ({"detections": [{"kind": "", "score": 0.5, "box": [0, 0, 1, 1]}]}, "not a name"),
    ({"detections": [seen("dog", red=0.5)]}, "no probabilities"),
    ({"detections": [dict(seen("dog"), colors=[1.0])]}, "10 numbers"),
    ({"answers": [{"kind": "dog", "color": "gold", "yes": 0.5}]}, "gold"),
    ({"answers": [{"kind": "dog", "color": "red"}]}, "no number"),
    ({"image": None}, "image"),
    ({"image": {"size": [1]}}, "2 numbers"),
]


@pytest.mark.parametrize(("part", "message"), DAMAGED)
def test_a_record_that_is_no_evidence_is_refused_with_its_part(part, message):
    whole = {"image": {"sha256": "", "size": [8, 8]}, "detections": [], "answers": []}
    assert Evidence.from_record(whole).size == (8, 8)
    with pytest.raises(ValueError, match=message):
        Evidence.from_record({**whole, **part})
