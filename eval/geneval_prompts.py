"""GenEval's 553 test rows, made anew from their recipe, and the words of such rows.

    rows = official_rows()                     # the 553 of djghosh13/geneval, in its order
    rows[0]["prompt"]                          # "a photo of a bench"
    request(rows[0])                           # "Create an image with a bench."
    umm-reflect geneval prompts OUT.jsonl      # the same bytes as prompts/evaluation_metadata.jsonl

The recipe draws everything from one numpy generator of seed 43; the result is compared with the
published sha256 whenever it is made, so a numpy that draws otherwise cannot pass unnoticed.
A row is {tag, include, [exclude,] prompt}, see geneval_rules.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from umm_reflect.errors import UserError
from umm_reflect.shapes.scene import COLORS, RELATIONS

# The 80 classes of COCO in the detector's order; three names are GenEval's own (computer mouse, tv
# remote, computer keyboard).
CLASSES = tuple(
    """person|bicycle|car|motorcycle|airplane|bus|train|truck|boat|traffic light|fire hydrant
    stop sign|parking meter|bench|bird|cat|dog|horse|sheep|cow|elephant|bear|zebra|giraffe|backpack
    umbrella|handbag|tie|suitcase|frisbee|skis|snowboard|sports ball|kite|baseball bat
    baseball glove|skateboard|surfboard|tennis racket|bottle|wine glass|cup|fork|knife|spoon|bowl
    banana|apple|sandwich|orange|broccoli|carrot|hot dog|pizza|donut|cake|chair|couch|potted plant
    bed|dining table|toilet|tv|laptop|computer mouse|tv remote|computer keyboard|cell phone
    microwave|oven|toaster|sink|refrigerator|book|clock|vase|scissors|teddy bear|hair drier
    toothbrush""".replace("\n    ", "|").split("|")
)
CLASSES_SHA256 = "608f6a0e5c8ca1c7a92b818430141fe268c85b7930b50f4160f1d65893b5bacd"
ROWS_SHA256 = "5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13"
PROMPTS_SHA256 = "55b6e3650e980c13daf30569eb666e000faf19bfc2b7b4cbe999fcdb7aa9d680"

# GenEval's families in its order, and how many of the 553 rows are of each.
FAMILY_SIZES = {
    "single_object": 80,
    "two_object": 99,
    "counting": 80,
    "colors": 94,
    "position": 100,
    "color_attr": 100,
}
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
OPENING = "a photo of "  # how every official prompt begins

_SEED = 43
_DRAWN = 100  # rows drawn of each family but the first; repeats are dropped
_COLORLESS = "person"  # the class that is never given a colour

# Plurals that are not formed by an ending.
_PLURALS = {
    "person": "people",
    "sheep": "sheep",
    "skis": "skis",
    "scissors": "scissors",
    "broccoli": "broccoli",
    "knife": "knives",
    "computer mouse": "computer mice",
}

Row = dict[str, Any]


# --- rows -----------------------------------------------------------------------------------------


def single_object(kind: str) -> Row:
    """A photo of a bench."""
    return _row("single_object", [_clause(kind)], with_article(kind))


def two_object(first: str, second: str) -> Row:
    """A photo of a bench and a sports ball."""
    prompt = f"{with_article(first)} and {with_article(second)}"
    return _row("two_object", [_clause(first), _clause(second)], prompt)


def counting(kind: str, count: int) -> Row:
    """A photo of three buses: exactly three."""
    prompt = f"{NUMBERS[count]} {official_plural(kind)}"
    return _row("counting", [_clause(kind, count)], prompt, exclude=[_clause(kind, count + 1)])


def colors(kind: str, color: str) -> Row:
    """A photo of an orange cow."""
    return _row("colors", [_clause(kind, color=color)], f"{with_article(color)} {kind}")


def position(subject: str, relation: str, anchor: str) -> Row:
    """A photo of a dog right of a teddy bear; the anchor (the bear) is the first clause."""
    include = [_clause(anchor), {**_clause(subject), "position": [relation, 0]}]
    return _row("position", include, f"{with_article(subject)} {relation} {with_article(anchor)}")


def color_attr(first: tuple[str, str], second: tuple[str, str]) -> Row:
    """A photo of a purple wine glass and a black apple; each is (class, colour)."""
    named = " and ".join(f"{with_article(color)} {kind}" for kind, color in (first, second))
    include = [_clause(kind, color=color) for kind, color in (first, second)]
    return _row("color_attr", include, named)


def _row(tag: str, include: list[Row], rest: str, exclude: Sequence[Row] = ()) -> Row:
    # the order of the keys is the published file's
    row: Row = {"tag": tag, "include": include}
    if exclude:
        row["exclude"] = list(exclude)
    row["prompt"] = OPENING + rest
    return row


def _clause(kind: str, count: int = 1, color: str | None = None) -> Row:
    return {"class": kind, "count": count} | ({"color": color} if color else {})


@cache
def _official() -> tuple[str, ...]:
    """The lines of the published file, without line ends."""
    import numpy

    draw = numpy.random.default_rng(_SEED)
    many = len(CLASSES)
    person = CLASSES.index(_COLORLESS)
    rows = [single_object(CLASSES[i]) for i in draw.choice(many, size=many, replace=False)]
    for _ in range(_DRAWN):
        first, second = draw.choice(many, size=2, replace=False)
        rows.append(two_object(CLASSES[first], CLASSES[second]))
    for _ in range(_DRAWN):
        kind = draw.choice(many)
        rows.append(counting(CLASSES[kind], int(draw.integers(2, 4, endpoint=True))))
    for _ in range(_DRAWN):
        kind = (draw.choice(many - 1) + 1 + person) % many
        rows.append(colors(CLASSES[kind], COLORS[draw.choice(len(COLORS))]))
    for _ in range(_DRAWN):
        subject, anchor = draw.choice(many, size=2, replace=False)
        relation = RELATIONS[draw.choice(len(RELATIONS))]
        rows.append(position(CLASSES[subject], relation, CLASSES[anchor]))
    for _ in range(_DRAWN):
        kinds = (draw.choice(many - 1, size=2, replace=False) + 1 + person) % many
        hues = draw.choice(len(COLORS), size=2, replace=False)
        pairs = [(CLASSES[k], COLORS[h]) for k, h in zip(kinds, hues, strict=True)]
        rows.append(color_attr(*pairs))
    lines = tuple(dict.fromkeys(json.dumps(row) for row in rows))
    found = hashlib.sha256(_as_file(lines)).hexdigest()
    if found != ROWS_SHA256:
        raise UserError(
            f"numpy {numpy.__version__} makes other rows than GenEval's (sha256 {found}, published "
            f"{ROWS_SHA256})",
            "Install a numpy whose default_rng draws as before (1.23 and 2.4 do).",
        )
    return lines


def official_rows() -> list[Row]:
    """The 553 rows, new objects on each call. Errors: UserError if they differ from the published
    file."""
    return [json.loads(line) for line in _official()]


def official_file() -> bytes:
    """The published `evaluation_metadata.jsonl`, byte for byte."""
    return _as_file(_official())


def _as_file(lines: Sequence[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


# --- words ----------------------------------------------------------------------------------------


def with_article(noun: str) -> str:
    """'bench' -> 'a bench', 'apple' -> 'an apple'; by the first letter, as GenEval does."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def official_plural(kind: str) -> str:
    """GenEval's plurals: buses, but also sheeps, benchs and persons."""
    return kind + ("es" if kind.endswith("s") else "s")


def proper_plural(kind: str) -> str:
    """English plurals: people, sheep, benches."""
    if kind in _PLURALS:
        return _PLURALS[kind]
    return kind + ("es" if kind.endswith(("s", "x", "sh", "ch")) else "s")


def request(row: Row, *, exactly: bool = False) -> str:
    """A row's prompt as the released controllers are asked: "Create an image with a bench."

    exactly: a counting row as in the release's training pool, "exactly three benches", instead of
    the official words ("three benchs") that its evaluation keeps.
    """
    if exactly and row["tag"] == "counting":
        clause = row["include"][0]
        rest = f"exactly {NUMBERS[clause['count']]} {proper_plural(clause['class'])}"
    else:
        rest = row["prompt"].removeprefix(OPENING)
    return f"Create an image with {rest}."
