"""The shapes world's test sets, and what training may therefore never be asked.

    sets = build_sets()
    sets.shapes553[0].row["prompt"]      # rows in GenEval's order: 80 single_object come first
    is_held_out(row)                     # True: no training prompt may ask for this

What is held out is a *whole request* (`canonical_spec`: kinds, counts, colors and relations, in any
words and order, mirrored relations included), not its parts. A held-out "red star" is never asked
for alone in training, yet a red star may be part of "a red star and a blue moon"; a held-out pair
"star and moon" may appear in "a star left of a moon". So every test row outside single_object is a
new combination of things that were each seen. single_object has eight members that training cannot
do without; it is reported apart.

Held out are 8 of 24 (kind, count), 20 of 80 (kind, color), 8 of 28 pairs of kinds, 28 of 112 (pair,
relation), and of the large families the specs of the rows themselves: 100 color_attr, 100 compound,
44 hard counts, 185 hard compounds, 184 hard relations. A family with fewer specs than rows repeats
them in turn; the rows then differ in `seed` (and, where it can, in the order of the words).

hard553 is hard and 253 rows more, so many that a difference of a few points shows. The shipped nano
was trained before it was set: it may have been asked for specs of those 253.
"""

import itertools
import random
from dataclasses import dataclass
from functools import cache

from umm_reflect.shapes.prompts import (
    Row,
    Spec,
    canonical_spec,
    clause,
    draw_row,
    plain_row,
    position_row,
)
from umm_reflect.shapes.scene import COLORS, KINDS, MIRRORED

SETS_SEED = 553

# GenEval's family sizes, in GenEval's order.
FAMILY_SIZES = {
    "single_object": 80,
    "two_object": 99,
    "counting": 80,
    "colors": 94,
    "position": 100,
    "color_attr": 100,
}
COMPOUND_SIZE = 100
HARD_SIZES = {"hard_counting": 100, "hard_compound": 100, "hard_relation": 100}
MORE_HARD_SIZES = {"hard_counting": 84, "hard_compound": 85, "hard_relation": 84}


@dataclass(frozen=True)
class EvalRow:
    """A row of a test set: its place in the set, the family that drew it (prompts.FAMILIES), and
    the seed that names its own random streams."""

    index: int
    family: str
    seed: int
    row: Row


@dataclass(frozen=True)
class EvalSets:
    shapes553: tuple[EvalRow, ...]
    compound: tuple[EvalRow, ...]
    hard: tuple[EvalRow, ...]
    hard553: tuple[EvalRow, ...]


@cache
def build_sets() -> EvalSets:
    """The test sets, the same on every call and in every process."""
    rng = random.Random(SETS_SEED)
    families: dict[str, list[Row]] = {
        "single_object": _in_turn(_singles(), FAMILY_SIZES["single_object"], rng),
        "two_object": _in_turn(_pairs(rng), FAMILY_SIZES["two_object"], rng),
        "counting": _in_turn(_counts(rng), FAMILY_SIZES["counting"], rng),
        "colors": _in_turn(_colors(rng), FAMILY_SIZES["colors"], rng),
        "position": _in_turn(_positions(rng), FAMILY_SIZES["position"], rng),
        "color_attr": _different("color_attr", FAMILY_SIZES["color_attr"], rng),
        "compound": _different("compound", COMPOUND_SIZE, rng),
        "hard_counting": _in_turn(_hard_counts(rng), HARD_SIZES["hard_counting"], rng),
        "hard_compound": _different("hard_compound", HARD_SIZES["hard_compound"], rng),
        "hard_relation": _different("hard_relation", HARD_SIZES["hard_relation"], rng),
    }

    def numbered(*names: str) -> tuple[EvalRow, ...]:
        rows = [(name, row) for name in names for row in families[name]]
        return tuple(
            EvalRow(index, name, rng.getrandbits(31), row) for index, (name, row) in enumerate(rows)
        )

    first = (numbered(*FAMILY_SIZES), numbered("compound"), numbered(*HARD_SIZES))
    return EvalSets(*first, (*first[2], *_more_hard(first[2])))


@cache
def held_out() -> frozenset[Spec]:
    """The canonical specs of all test rows but single_object."""
    sets = build_sets()
    rows = [entry.row for entry in (*sets.shapes553, *sets.compound, *sets.hard553)]
    return frozenset(canonical_spec(row) for row in rows if row["tag"] != "single_object")


def is_held_out(row: Row) -> bool:
    """Whether a row asks for exactly what some test row asks for (single_object aside)."""
    return canonical_spec(row) in held_out()


# Each entry below is one spec, as the list of the rows that say it (orders of its words).


def _singles() -> list[list[Row]]:
    return [[plain_row("single_object", [clause(kind)])] for kind in KINDS]


def _pairs(rng: random.Random) -> list[list[Row]]:
    """Eight pairs of kinds; every kind is in two of them."""
    ring = rng.sample(KINDS, len(KINDS))
    pairs = [(kind, ring[(i + 1) % len(ring)]) for i, kind in enumerate(ring)]
    return [
        [plain_row("two_object", [clause(a), clause(b)]) for a, b in ((x, y), (y, x))]
        for x, y in pairs
    ]


def _counts(rng: random.Random) -> list[list[Row]]:
    """Eight (kind, count); every kind in one of them, the counts 2, 3 and 4 in turn."""
    kinds = rng.sample(KINDS, len(KINDS))
    return [[plain_row("counting", [clause(kind, 2 + i % 3)])] for i, kind in enumerate(kinds)]


def _colors(rng: random.Random) -> list[list[Row]]:
    """Twenty (kind, color); every color in two, every kind in two or three."""
    kinds, colors = rng.sample(KINDS, len(KINDS)), rng.sample(COLORS, len(COLORS))
    return [
        [plain_row("colors", [clause(kinds[(i + step) % len(kinds)], 1, color)])]
        for step in (0, 3)
        for i, color in enumerate(colors)
    ]


def _positions(rng: random.Random) -> list[list[Row]]:
    """One (pair, relation) of every pair of kinds, half of them left of and half above, each with
    its mirrored wording."""
    pairs = list(itertools.combinations(KINDS, 2))
    rng.shuffle(pairs)
    specs = []
    for i, pair in enumerate(pairs):
        subject, anchor = pair if rng.random() < 0.5 else pair[::-1]
        relation = ("left of", "above")[i % 2]
        direct = position_row(clause(anchor), clause(subject), relation)
        mirrored = position_row(clause(subject), clause(anchor), MIRRORED[relation])
        specs.append([direct, mirrored])
    return specs


def _hard_counts(rng: random.Random) -> list[list[Row]]:
    """Counts five and six: four without a color, and four of every color (two of each count)."""
    bare = [(kind, 5 + i % 2, None) for i, kind in enumerate(rng.sample(KINDS, 4))]
    colored = [
        (kind, 5 + i % 2, color) for color in COLORS for i, kind in enumerate(rng.sample(KINDS, 4))
    ]
    return [
        [plain_row("counting", [clause(kind, count, color)])]
        for kind, count, color in [*bare, *colored]
    ]


def _in_turn(specs: list[list[Row]], size: int, rng: random.Random) -> list[Row]:
    """`size` rows that take the specs in turn, and a spec's wordings in turn, then shuffled."""
    rows = [specs[i % len(specs)] for i in range(size)]
    worded = [wordings[i // len(specs) % len(wordings)] for i, wordings in enumerate(rows)]
    rng.shuffle(worded)
    return worded


def _different(
    family: str, size: int, rng: random.Random, but: frozenset[Spec] = frozenset()
) -> list[Row]:
    """`size` rows of a large family, no two of one spec and none of those in `but`."""
    found: dict[Spec, Row] = {}
    while len(found) < size:
        row = draw_row(rng, family)
        if canonical_spec(row) not in but:
            found.setdefault(canonical_spec(row), row)
    return list(found.values())


def _more_hard(hard: tuple[EvalRow, ...]) -> list[EvalRow]:
    """The rows of hard553 after those of hard: the specs of hard_counting once more, in turn, and
    new ones of the large families. Their random stream is their own."""
    rng = random.Random(f"hard553 {SETS_SEED}")
    known = {canonical_spec(entry.row): [entry.row] for entry in hard}
    counts = [known[spec] for spec in known if known[spec][0]["tag"] == "counting"]
    rows: list[tuple[str, Row]] = []
    for family, size in MORE_HARD_SIZES.items():
        if family == "hard_counting":
            drawn = _in_turn(counts, size, rng)
        else:
            drawn = _different(family, size, rng, frozenset(known))
        rows += [(family, row) for row in drawn]
    return [
        EvalRow(len(hard) + i, name, rng.getrandbits(31), row) for i, (name, row) in enumerate(rows)
    ]
