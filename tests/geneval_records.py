"""Hand-written evidence, as JSON records, with what a person works out from each.

A case: name, row, record, GenEval's yes or no, the same with BLIP's second opinion, and the score
of the published formula (where the second opinion decides, as in the release). Boxes are squares of
20 around their centre unless they are given; the dog stands at (50, 50) in all position cases.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from eval.geneval_prompts import color_attr, colors, counting, position, single_object, two_object
from umm_reflect.shapes.scene import COLORS

JUST_BELOW = math.nextafter(0.5, 0.0)


class Case(NamedTuple):
    name: str
    row: dict[str, Any]
    record: dict[str, Any]
    official: bool
    cross_checked: bool
    released: float


def seen(kind, score=0.95, at=(50, 50), box=None, **shares):
    """A detection; shares: red=0.9, blue=0.1 ..., all ten colours' probabilities."""
    x, y = at
    record = {"kind": kind, "score": score, "box": list(box or (x - 10, y - 10, x + 10, y + 10))}
    if shares:
        record["colors"] = [shares.get(color, 0.0) for color in COLORS]
    return record


def case(name, row, detections, official, released, *, cross=None, answers=()):
    """cross: where it differs from `official`. answers: (class, colour, P(yes))."""
    said = [{"kind": kind, "color": color, "yes": yes} for kind, color, yes in answers]
    image = {"sha256": "", "size": [512, 512]}
    record = {"image": image, "detections": list(detections), "answers": said}
    return Case(name, row, record, official, official if cross is None else cross, released)


DOG = single_object("dog")
SINGLE = [
    case("a dog", DOG, [seen("dog")], True, 1),
    case("a dog just above the threshold", DOG, [seen("dog", 0.3000001)], True, 1),
    case("a dog exactly at the threshold", DOG, [seen("dog", 0.3)], False, 0),
    case("a dog just below it", DOG, [seen("dog", 0.2999999)], False, 0),
    case("nothing at all", DOG, [], False, 0),
    case("another animal", DOG, [seen("cat", 0.99)], False, 0),
    case("two dogs do no harm", DOG, [seen("dog"), seen("dog", 0.5)], True, 1),
    case("seventeen dogs neither", DOG, [seen("dog")] * 17, True, 1),
]

PAIR = two_object("dog", "cat")
PAIRS = [
    case("both", PAIR, [seen("dog"), seen("cat")], True, 1),
    case("both in the other order", PAIR, [seen("cat"), seen("dog")], True, 1),
    case("the first alone", PAIR, [seen("dog")], False, 0.25),
    case("the second alone", PAIR, [seen("cat")], False, 0.25),
    case("neither", PAIR, [seen("bus")], False, 0),
    case("the cat exactly at the threshold", PAIR, [seen("dog"), seen("cat", 0.3)], False, 0.25),
    case("two of the first", PAIR, [seen("dog"), seen("dog")], False, 0.25),
    case("both, barely", PAIR, [seen("dog", 0.31), seen("cat", 0.31)], True, 1),
    case("both among others", PAIR, [seen("bus"), seen("cat"), seen("dog"), seen("cat")], True, 1),
]


def dogs(many, score=0.95):
    return [seen("dog", score)] * many


TWO, THREE, FOUR = counting("dog", 2), counting("dog", 3), counting("dog", 4)
COUNTS = [
    case("three of three", THREE, dogs(3), True, 1),
    case("two of three", THREE, dogs(2), False, 1 / 3),
    case("one of three", THREE, dogs(1), False, 1 / 6),
    case("none of three", THREE, [], False, 0),
    case("count + 1", THREE, dogs(4), False, 1 / 3),
    case("count + 2", THREE, dogs(5), False, 1 / 6),
    case("twice the count", THREE, dogs(6), False, 0),
    case("a fourth exactly at .9", THREE, [*dogs(3), *dogs(1, 0.9)], True, 1),
    case("a third exactly at .9", THREE, [*dogs(2), *dogs(1, 0.9)], False, 1 / 3),
    case("a fourth just above .9", THREE, [*dogs(3), *dogs(1, 0.9001)], False, 1 / 3),
    case("five more below .9", THREE, [*dogs(3), *dogs(5, 0.85)], True, 1),
    case("three that other tags would see", THREE, dogs(3, 0.5), False, 0),
    case("three among cats", THREE, [*dogs(3), *[seen("cat")] * 7], True, 1),
    case("two of two", TWO, dogs(2), True, 1),
    case("one of two", TWO, dogs(1), False, 0.25),
    case("three of two", TWO, dogs(3), False, 0.25),
    case("four of two", TWO, dogs(4), False, 0),
    case("three of four", FOUR, dogs(3), False, 0.375),
    case("five of four", FOUR, dogs(5), False, 0.375),
    case("one of four", FOUR, dogs(1), False, 0.125),
    case("twenty of four, sixteen are kept", FOUR, dogs(20), False, 0),
]

RED = colors("dog", "red")
SURE_RED, SURE_BLUE = {"red": 0.9, "blue": 0.1}, {"red": 0.1, "blue": 0.9}
COLOURS = [
    case("a red dog", RED, [seen("dog", **SURE_RED)], True, 1),
    case("a blue dog", RED, [seen("dog", **SURE_BLUE)], False, 0.25),
    case("no dog", RED, [seen("cat", **SURE_RED)], False, 0),
    case("a red dog at the threshold", RED, [seen("dog", 0.3, **SURE_RED)], False, 0),
    case("a faint red dog", RED, [seen("dog", 0.2, **SURE_RED)], False, 0),
    case(
        "the surest is blue",
        RED,
        [seen("dog", 0.8, **SURE_RED), seen("dog", 0.9, **SURE_BLUE)],
        *(False, 0.25),
    ),
    case(
        "the surest is red",
        RED,
        [seen("dog", 0.9, **SURE_RED), seen("dog", 0.8, **SURE_BLUE)],
        *(True, 1),
    ),
    case("red by a hair", RED, [seen("dog", red=0.34, blue=0.33, green=0.33)], True, 1),
    case("a tie goes to the first", RED, [seen("dog", red=0.5, orange=0.5)], True, 1),
    case(
        "and not to the second",
        colors("dog", "orange"),
        [seen("dog", red=0.5, orange=0.5)],
        *(False, 0.25),
    ),
    case("the last colour", colors("dog", "white"), [seen("dog", white=1.0)], True, 1),
]

LEFT, RIGHT = position("cat", "left of", "dog"), position("cat", "right of", "dog")
ABOVE, BELOW = position("cat", "above", "dog"), position("cat", "below", "dog")
IT = seen("dog")


def cat(x, y, score=0.95):
    return seen("cat", score, at=(x, y))


WIDE = seen("dog", box=(300, 100, 500, 300))  # centre (400, 200), 200 wide
PLACES = [
    # offset (-50, 0) shrinks by .1 * 40 to -46, over 50: -.92
    case("on its side", LEFT, [IT, cat(0, 50)], True, 1),
    case("on the other side", LEFT, [IT, cat(100, 50)], False, 0.3),
    case("above instead of left", LEFT, [IT, cat(50, 0)], False, 0.3),
    case("right", RIGHT, [IT, cat(100, 50)], True, 1),
    case("above: y grows downwards", ABOVE, [IT, cat(50, 0)], True, 1),
    case("below", BELOW, [IT, cat(50, 100)], True, 1),
    case("below is not above", ABOVE, [IT, cat(50, 100)], False, 0.3),
    # (-8, 0) -> -4, over 8: -.5 exactly, and that is not less than -.5
    case("exactly half", LEFT, [IT, cat(42, 50)], False, JUST_BELOW),
    # (-9, 0) -> -5, over 9: -.556
    case("a little more than half", LEFT, [IT, cat(41, 50)], True, 1),
    # (-50, -50) -> (-46, -46), over 70.7: -.65 both
    case("two relations at once, the first", LEFT, [IT, cat(0, 0)], True, 1),
    case("two relations at once, the second", ABOVE, [IT, cat(0, 0)], True, 1),
    case("two relations at once, neither", RIGHT, [IT, cat(0, 0)], False, 0.3),
    # (-50, -20) -> (-46, -16), over 53.85: (-.854, -.297); .297 / .5 = .594 of what is needed
    case("mostly to the left", LEFT, [IT, cat(0, 30)], True, 1),
    case("hardly above", ABOVE, [IT, cat(0, 30)], False, 0.3 + 0.2 * 16 / math.sqrt(2900) / 0.5),
    case("on top of each other", LEFT, [IT, cat(48, 50)], False, 0.3),
    case("in the same place", LEFT, [IT, cat(50, 50)], False, 0.3),
    case("no cat", LEFT, [IT], False, 0.15),
    case("no dog", LEFT, [cat(0, 50)], False, 0.15),
    case("neither of them", LEFT, [], False, 0),
    case("the anchor at the threshold", LEFT, [seen("dog", 0.3), cat(0, 50)], False, 0.15),
    case("the surer cat is wrong", LEFT, [IT, cat(100, 50), cat(0, 50, 0.6)], False, 0.3),
    case("the surer cat is right", LEFT, [IT, cat(0, 50), cat(100, 50, 0.6)], True, 1),
    # centre (10.5, 50): -39.5 shrinks by .1 * 21 to -37.4
    case("a thin cat", LEFT, [IT, seen("cat", box=(10, 0, 11, 100))], True, 1),
    # centre (250, 200): -150 shrinks by .1 * 700 to -80, over 150: -.533
    case("large and overlapping", LEFT, [WIDE, seen("cat", box=(0, 100, 500, 300))], True, 1),
    # centre (260, 200): -140 shrinks by 72 to -68, over 140: -.486
    case(
        "too large to be left of it",
        LEFT,
        [WIDE, seen("cat", box=(0, 100, 520, 300))],
        *(False, 0.3 + 0.2 * 68 / 140 / 0.5),
    ),
]

BOTH = color_attr(("dog", "red"), ("cat", "blue"))
RED_DOG, BLUE_CAT = seen("dog", **SURE_RED), seen("cat", **SURE_BLUE)
BLUE_DOG, RED_CAT = seen("dog", **SURE_BLUE), seen("cat", **SURE_RED)
CAT_SAID = (("cat", "blue", 0.8), ("cat", "red", 0.2))


def said(red, blue, of_cat=CAT_SAID):
    return (("dog", "red", red), ("dog", "blue", blue), *of_cat)


COLOURED = [
    case("both right", BOTH, [RED_DOG, BLUE_CAT], True, 1, answers=said(0.9, 0.1)),
    # dog: .5 + .5 * mean(.9, 1) = .975, cat 1
    case(
        "BLIP cannot tell: a tie fails",
        BOTH,
        [RED_DOG, BLUE_CAT],
        *(True, 0.5 * (0.975 + 1) / 2),
        cross=False,
        answers=said(0.5, 0.5),
    ),
    # dog: .5 + .5 * mean(.9, .8) = .925
    case(
        "BLIP prefers the other colour",
        BOTH,
        [RED_DOG, BLUE_CAT],
        *(True, 0.5 * (0.925 + 1) / 2),
        cross=False,
        answers=said(0.3, 0.5),
    ),
    # dog: .5 + .5 * mean(0, 1) = .75
    case("CLIP alone is wrong", BOTH, [BLUE_DOG, BLUE_CAT], False, 0.4375, answers=said(0.6, 0.4)),
    # dog: .5 + .5 * mean(0, .5) = .625
    case("both are wrong", BOTH, [BLUE_DOG, BLUE_CAT], False, 0.40625, answers=said(0.2, 0.7)),
    case("no dog", BOTH, [BLUE_CAT], False, 0.25, answers=CAT_SAID),
    case("no animal", BOTH, [], False, 0),
    # dog: .5 + .5 * mean(0, .2) = .55, cat: .5 + .5 * mean(0, .4) = .6
    case(
        "the colours are swapped",
        BOTH,
        [BLUE_DOG, RED_CAT],
        *(False, 0.5 * (0.55 + 0.6) / 2),
        answers=said(0.1, 0.9, (("cat", "blue", 0.2), ("cat", "red", 0.8))),
    ),
    case(
        "a less sure dog is red",
        BOTH,
        [BLUE_DOG, seen("dog", 0.9, **SURE_RED), BLUE_CAT],
        *(False, 0.5 * (0.55 + 1) / 2),
        answers=said(0.1, 0.9),
    ),
    case(
        "the dog at the threshold",
        BOTH,
        [seen("dog", 0.3, **SURE_RED), BLUE_CAT],
        *(False, 0.25),
        answers=CAT_SAID,
    ),
    case(
        "BLIP is sure of neither colour",
        BOTH,
        [RED_DOG, BLUE_CAT],
        *(True, 1),
        answers=said(0.011, 0.010),
    ),
    case(
        "a margin that four digits lose",
        BOTH,
        [RED_DOG, BLUE_CAT],
        *(True, 1),
        answers=said(0.50004, 0.5),
    ),
]

CASES = [*SINGLE, *PAIRS, *COUNTS, *COLOURS, *PLACES, *COLOURED]
