"""Looks at scenes of the shapes world, worked out by hand: faults, scores, edits."""

import random
import re

from sft.shapes import (
    make_trajectory,
    reflect,
    reflect_on_edit,
    scene_of,
)
from sft.shapes_assess import assess_edit, is_satisfied
from sft.shapes_ops import Crowded, Op, apply
from sft.shapes_words import PLACES, description, name_of
from umm_reflect.shapes.prompts import clause, plain_row, position_row
from umm_reflect.shapes.scene import Scene, Shape

PLACE = "|".join(sorted(PLACES, key=len, reverse=True))


def shape(name: str, x: float, y: float, size: float = 0.25, **more) -> Shape:
    color, kind = name.split()
    return Shape(kind, color, x, y, size, **more)


TWO_CIRCLES_AND_A_SQUARE = plain_row(
    "compound", [clause("circle", 2, "red"), clause("square", 1, "blue")]
)


def look(row, *shapes, seed=0):
    said, after = reflect(row, Scene(shapes), random.Random(seed))
    return said.score, said.thinking.split(". ")[-1].rstrip("."), said.edit, after


def test_a_missing_circle_costs_its_kind_and_its_colour_of_six_facts():
    score, differs, edit, after = look(
        TWO_CIRCLES_AND_A_SQUARE, shape("red circle", 0.2, 0.2), shape("blue square", 0.8, 0.8)
    )
    assert score == 7  # 4 of 6 facts
    assert differs in ("One red circle is missing", "One red circle is not there")
    assert re.fullmatch(rf"(add|draw|put) a red circle at the ({PLACE})", edit)
    assert len(after.shapes) == 3
    assert is_satisfied(TWO_CIRCLES_AND_A_SQUARE, after)


def test_a_wrong_colour_is_turned_in_place():
    score, differs, edit, after = look(
        TWO_CIRCLES_AND_A_SQUARE,
        shape("red circle", 0.2, 0.2),
        shape("pink circle", 0.8, 0.2),
        shape("blue square", 0.8, 0.8),
    )
    assert score == 8  # 5 of 6 facts, 8.3
    assert differs in ("The pink circle should be red", "The pink circle is not red")
    assert edit in (
        "turn the pink circle red",
        "make the pink circle red",
        "change the pink circle to red",
    )
    assert after.shapes[1] == shape("red circle", 0.8, 0.2)


def test_the_circle_that_nobody_asked_for_goes_and_not_a_red_one():
    _, differs, edit, after = look(
        TWO_CIRCLES_AND_A_SQUARE,
        shape("green circle", 0.5, 0.5),
        shape("red circle", 0.2, 0.2),
        shape("red circle", 0.8, 0.2),
        shape("blue square", 0.8, 0.8),
    )
    assert differs in ("One circle too many", "There is one circle too many")
    assert edit.split(" ", 1)[1] == "the green circle"
    assert [name_of(s) for s in after.shapes] == ["red circle", "red circle", "blue square"]


def test_two_of_one_name_are_told_apart_by_their_place():
    scene = Scene(
        (shape("red star", 0.2, 0.2), shape("red star", 0.8, 0.2), shape("red star", 0.72, 0.3))
    )
    assert description(scene, 0) == "red star at the top left"
    assert description(scene, 1) == "rightmost red star"
    assert description(scene, 2) == "lowest red star"


def test_a_malformed_object_becomes_what_is_missing():
    row = plain_row("two_object", [clause("star"), clause("moon")])
    score, differs, edit, after = look(
        row, shape("red star", 0.2, 0.2, broken=0.3), shape("blue moon", 0.8, 0.8)
    )
    assert score == 5
    assert differs.startswith("The malformed red shape ")
    assert edit in (
        "replace the malformed red shape with a red star",
        "turn the malformed red shape into a red star",
    )
    assert is_satisfied(row, after)


def test_objects_on_the_wrong_sides_with_no_room_between_edge_and_anchor_change_places():
    row = position_row(clause("moon"), clause("star"), "left of")
    score, differs, edit, after = look(
        row, shape("blue moon", 0.2, 0.5, 0.38), shape("red star", 0.8, 0.5, 0.38)
    )
    assert score == 7  # 2 of 3 facts
    assert differs in (
        "The red star should be left of the blue moon",
        "The red star is not left of the blue moon",
    )
    assert edit in (
        "swap the red star and the blue moon",
        "exchange the red star and the blue moon",
    )
    assert after.shapes == (shape("blue moon", 0.8, 0.5, 0.38), shape("red star", 0.2, 0.5, 0.38))


def test_an_object_on_the_wrong_side_moves_to_a_named_place_if_there_is_room():
    row = position_row(clause("moon"), clause("star"), "above")
    _, _, edit, after = look(row, shape("blue moon", 0.5, 0.5), shape("red star", 0.5, 0.85))
    assert re.fullmatch(r"(move|shift) the red star to the top", edit)
    assert after.shapes[0] == shape("blue moon", 0.5, 0.5)
    assert after.shapes[1].y < 0.25


def test_an_unasked_object_is_accepted_where_the_row_does_not_count_it():
    row = plain_row("single_object", [clause("star")])
    score, _, edit, _ = look(row, shape("red star", 0.2, 0.2), shape("blue moon", 0.8, 0.8))
    assert (score, edit) == (10, "")


def test_an_empty_picture_scores_nothing():
    score, _, edit, _ = look(plain_row("colors", [clause("star", 1, "red")]))
    assert score == 0
    assert " red star at the " in edit


def test_an_edit_that_did_nothing_scores_five_and_is_asked_for_again():
    source = Scene((shape("red star", 0.2, 0.2), shape("blue moon", 0.8, 0.8)))
    op = Op("remove", 0, None)
    said, after = reflect_on_edit(source, op, "Remove the star.", source, random.Random(0))
    assert said.score == 5
    assert "remove the star. The red star " in said.thinking
    assert after == apply(source, [op])
    assert assess_edit(source, op, after).score == 10


def test_an_edit_that_also_lost_another_object_scores_less_and_asks_for_it_back():
    source = Scene((shape("red star", 0.2, 0.2), shape("blue moon", 0.8, 0.8)))
    op = Op("recolor", 0, shape("pink star", 0.2, 0.2))
    lost = Scene((shape("pink star", 0.2, 0.2),))
    said, after = reflect_on_edit(source, op, "make the star pink", lost, random.Random(0))
    assert said.score == 5  # the change is there, none of the one other object
    assert re.search(r"One blue moon is (missing|not there)\.$", said.thinking)
    assert after.shapes == (shape("pink star", 0.2, 0.2), shape("blue moon", 0.8, 0.8))


def test_an_object_of_two_colours_has_no_name_and_so_no_scene():
    assert scene_of([{"kind": "malformed", "color": None, "box": (1, 1, 9, 9)}], 128) is None


def test_any_scene_can_be_mended_step_by_step():
    """Scenes by lot against rows by lot, as a model's own bad pictures would be."""
    rng = random.Random(11)
    mended = 0
    for _ in range(300):
        t, other = make_trajectory(rng), make_trajectory(rng)
        scene = other.scenes[0]
        try:
            for _ in range(9):
                said, after = reflect(t.row, scene, rng)
                if after is None:
                    break
                scene = after
        except Crowded:
            continue
        assert said.action == "done"
        assert is_satisfied(t.row, scene)
        mended += 1
    assert mended > 270
