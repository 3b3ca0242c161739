"""GenEval's decision on hand-written detections.

python -m pytest tests/test_geneval_rules.py
"""

import json

import pytest

from eval.geneval_rules import (
    COLORS,
    MALFORMED,
    RELATIONS,
    Detection,
    judge,
    keep,
    offset_direction,
    plural,
    relations_of,
)


def at(kind, x=50.0, y=50.0, *, color=None, score=0.95, size=20.0, **more):
    """A square detection around (x, y)."""
    half = size / 2
    return Detection(kind, color, (x - half, y - half, x + half, y + half), score, **more)


def shape(color, kind, x=50.0, y=50.0):
    return at(kind, x, y, color=color, score=1.0)


def row(tag, *include, exclude=()):
    return {"tag": tag, "include": list(include), "exclude": list(exclude), "prompt": "…"}


def want(kind, count=1, **more):
    return {"class": kind, "count": count, **more}


ROW_POSITION = row("position", want("dog"), want("cat", position=["left of", 0]))
ROW_THREE = row("counting", want("dog", 3), exclude=[want("dog", 4)])


def test_colours_and_relations_are_genevals_in_genevals_order():
    assert " ".join(COLORS) == "red orange yellow green blue purple pink brown black white"
    assert ", ".join(RELATIONS) == "left of, right of, above, below"


def test_one_object_is_found_strictly_above_the_threshold():
    asked = row("single_object", want("dog"))
    assert judge(asked, [at("dog", score=0.31)]).correct is True
    verdict = judge(asked, [at("dog", score=0.3), at("cat")])
    assert (verdict.correct, verdict.reason) == (False, "dog missing")


def test_two_objects_need_one_of_each_and_more_do_not_harm():
    asked = row("two_object", want("dog"), want("cat"))
    assert judge(asked, [at("cat"), at("dog"), at("dog"), at("bus")]).correct is True
    assert judge(asked, [at("cat"), at("cat")]).reason == "dog missing"
    assert judge(asked, []).reason == "dog missing; cat missing"


@pytest.mark.parametrize(
    ("scores", "correct", "reason"),
    [
        ([0.95, 0.95, 0.95], True, "as asked"),
        ([0.95, 0.95, 0.9], False, "2 of 3 dogs"),
        ([0.95, 0.95, 0.95, 0.91], False, "4 dogs instead of 3"),
        ([0.95, 0.95, 0.95, 0.89], True, "as asked"),
        ([], False, "0 of 3 dogs"),
    ],
)
def test_counting_is_exact_at_the_counting_threshold(scores, correct, reason):
    verdict = judge(ROW_THREE, [at("dog", score=s) for s in scores])
    assert (verdict.correct, verdict.reason) == (correct, reason)


def test_the_colour_rule_takes_the_most_confident_instances_only():
    asked = row("colors", want("dog", color="red"))
    red, blue = at("dog", color="red", score=0.8), at("dog", color="blue", score=0.9)
    assert judge(asked, [red]).correct is True
    assert judge(asked, [red, blue]).correct is False
    assert judge(asked, [red, at("dog", color="blue", score=0.7)]).correct is True


def test_a_count_with_a_colour_wants_that_many_of_the_taken_in_the_colour():
    asked = row("colors", want("dog", 2, color="red"))
    reds = [at("dog", color="red", score=0.9), at("dog", color="red", score=0.5)]
    assert judge(asked, reds).correct is True
    assert judge(asked, [*reds, at("dog", color="blue", score=0.7)]).correct is False


@pytest.mark.parametrize(
    ("relation", "x", "y"),
    [("left of", 0, 50), ("right of", 100, 50), ("above", 50, 0), ("below", 50, 100)],
)
def test_each_relation_holds_on_its_own_side_and_on_no_other(relation, x, y):
    assert relations_of(at("cat", x, y), at("dog")) == {relation}


def test_the_offset_shrinks_by_a_tenth_of_both_sizes_and_keeps_its_old_norm():
    assert offset_direction(at("cat", 40, 50), at("dog", 50, 50)) == (-0.6, 0.0)
    assert offset_direction(at("cat", 54, 46), at("dog", 50, 50)) == (0.0, 0.0)
    assert relations_of(at("cat", 0, 0), at("dog")) == {"left of", "above"}


def test_exactly_half_is_not_enough_for_a_relation():
    # offset (8, 0), sizes 20 + 20: shrunk to 4, over 8 = 0.5 exactly
    assert offset_direction(at("cat", 58, 50), at("dog")) == (0.5, 0.0)
    assert relations_of(at("cat", 58, 50), at("dog")) == set()
    assert relations_of(at("cat", 58.5, 50), at("dog")) == {"right of"}


def test_position_looks_at_the_most_confident_instance_of_each_class():
    dog, cat = at("dog", 50), at("cat", 10, score=0.6)
    assert judge(ROW_POSITION, [dog, cat]).correct is True
    verdict = judge(ROW_POSITION, [dog, cat, at("cat", 90, score=0.9)])
    assert (verdict.correct, verdict.reason) == (False, "cat is not left of dog")


def test_every_pair_of_taken_detections_must_stand_in_the_relation():
    asked = row("position", want("dog"), want("cat", 2, position=["left of", 0]))
    assert judge(asked, [at("dog", 80), at("cat", 20), at("cat", 40)]).correct is True
    assert judge(asked, [at("dog", 30), at("cat", 5), at("cat", 60)]).correct is False


def test_a_failed_anchor_fails_the_clause_that_refers_to_it():
    verdict = judge(ROW_POSITION, [at("cat", 10)])
    assert verdict.reason == "dog missing; cat is not left of dog (which is not right)"


def test_at_most_sixteen_detections_of_a_class_are_kept_best_first():
    kept = keep([at("dog", score=0.4 + i / 100) for i in range(20)], "dog", 0.3)
    assert [round(d.score, 2) for d in kept[:2]] == [0.59, 0.58]
    assert len(kept) == 16


TWO_RED_ONE_BLUE = row(
    "compound",
    want("circle", 2, color="red"),
    want("circle", color="blue"),
    exclude=[want("circle", 3, color="red"), want("circle", 2, color="blue")],
)


@pytest.mark.parametrize(
    ("colors", "reason"),
    [
        ("red blue red", "as asked"),
        ("red blue", "1 of 2 red circles"),
        ("red red", "blue circle missing"),
        ("red red green", "circle is green, not blue"),
        ("red red red blue", "3 red circles instead of 2"),
        ("red red blue blue", "2 blue circles instead of 1"),
        ("red red blue green", "as asked"),
        ("", "0 of 2 red circles; blue circle missing"),
    ],
)
def test_exact_reading_counts_class_and_colour_together(colors, reason):
    seen = [shape(c, "circle", 20 * i) for i, c in enumerate(colors.split())]
    verdict = judge(TWO_RED_ONE_BLUE, seen, reading="exact")
    assert (verdict.reason, verdict.correct) == (reason, reason == "as asked")


def test_exact_reading_ignores_scores():
    seen = [at("circle", color="red", score=0.01) for _ in range(3)]
    asked = row("counting", want("circle", 3), exclude=[want("circle", 4)])
    assert judge(asked, seen, reading="exact").correct is True


def test_an_exclude_clause_of_one_forbids_the_class():
    asked = row("compound", want("square"), exclude=[want("star", 1)])
    verdict = judge(asked, [shape("red", "square"), shape("red", "star")], reading="exact")
    assert verdict.reason == "1 star instead of none"


def test_a_malformed_object_fails_every_shapes_row_and_says_so():
    asked = row("single_object", want("square"))
    blob = shape(None, MALFORMED)
    verdict = judge(asked, [shape("red", "square"), blob], reading="exact")
    assert verdict.reason == "an object has no recognisable shape"
    assert judge(asked, [shape("red", "square"), blob]).correct is True


def test_a_relation_between_coloured_shapes_looks_at_those_shapes_only():
    asked = row(
        "compound",
        want("square", color="blue"),
        want("circle", color="red", position=["left of", 0]),
    )
    seen = [shape("blue", "square", 60), shape("red", "circle", 20)]
    assert judge(asked, [*seen, shape("green", "circle", 100)], reading="exact").correct is True
    swapped = [shape("blue", "square", 20), shape("red", "circle", 60)]
    verdict = judge(asked, swapped, reading="exact")
    assert verdict.reason == "red circle is not left of blue square"


def scores(asked, *images, reading="exact"):
    return [judge(asked, image, reading=reading).score for image in images]


def test_counting_scores_follow_the_distance_to_the_target():
    dogs = [[at("dog")] * n for n in range(7)]
    assert scores(ROW_THREE, *dogs, reading="official") == pytest.approx(
        [0, 1 / 6, 1 / 3, 1, 1 / 3, 1 / 6, 0]
    )


def test_scores_rise_as_an_image_comes_nearer_to_its_row():
    asked = row("color_attr", want("square", color="blue"), want("circle", color="red"))
    square = shape("blue", "square")
    climb = scores(
        asked,
        [],
        [shape("blue", "star")],
        [shape("green", "square")],
        [square],
        [square, shape("red", "star")],
        [square, shape("pink", "circle")],
        [square, shape("red", "circle")],
    )
    assert climb == pytest.approx([0, 0.0625, 0.125, 0.25, 0.3125, 0.375, 1.0])


def test_position_scores_rise_as_the_subject_goes_round_to_its_side():
    dog = at("dog", 50)
    climb = scores(
        ROW_POSITION,
        [dog],
        [dog, at("cat", 100)],
        [dog, at("cat", 50, 0)],
        [dog, at("cat", 25, 0)],
        [dog, at("cat", 0)],
        reading="official",
    )
    assert climb == sorted(climb)
    assert len(set(climb)) == 5
    assert climb[-1] == 1
    assert climb[-2] < 0.5


def test_evidence_below_the_threshold_and_colour_probabilities_raise_the_score():
    asked = row("single_object", want("dog"))
    assert scores(asked, [at("dog", score=0.15)], reading="official") == [0.125]
    red = row("colors", want("dog", color="red"))
    probabilities = (0.4, 0.6, *[0.0] * 8)
    seen = at("dog", color="orange", color_probabilities=probabilities)
    assert scores(red, [seen], reading="official") == pytest.approx([0.35])


def test_the_evidence_is_json_and_holds_what_was_seen():
    verdict = judge(TWO_RED_ONE_BLUE, [shape("red", "circle")], reading="exact")
    record = json.loads(json.dumps(verdict.to_record()))
    assert record["evidence"]["detections"] == [
        {"kind": "circle", "color": "red", "box": [40.0, 40.0, 60.0, 60.0], "score": 1.0}
    ]
    assert record["evidence"]["clauses"][0] == {
        "clause": "red circle",
        "held": False,
        "found": 1,
        "credit": 0.5,
    }


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"tag": "x"}, "no include clause"),
        (row("x", {"class": "dog"}), "count >= 1"),
        (row("x", want("dog", color="gold")), "gold"),
        (row("x", want("dog"), want("cat", position=["near", 0])), "near"),
        (row("x", want("dog", position=["above", 0])), "earlier clause"),
        (row("x", want("dog"), exclude=[want("cat", position=["above", 0])]), "exclude"),
    ],
)
def test_a_row_outside_the_schema_is_refused_with_the_fault_named(bad, message):
    with pytest.raises(ValueError, match=message):
        judge(bad, [])


def test_a_colour_that_was_not_classified_is_an_error_not_a_no():
    with pytest.raises(ValueError, match="classify its colour first"):
        judge(row("colors", want("dog", color="red")), [at("dog")])


def test_plurals_follow_the_ending():
    assert [plural(k) for k in ("circle", "cross", "bench")] == ["circles", "crosses", "benches"]
