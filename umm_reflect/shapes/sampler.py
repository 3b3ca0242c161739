"""Lots of the shapes world: rows to train on, scenes that satisfy a row, scenes that just miss it.

    rng = random.Random(0)
    row = sample_row(rng)                    # never one that a test set asks for
    scene = scene_for(row, rng)              # exactly the asked objects, apart, with a margin
    bad, change = violate(scene, row, rng)   # one thing wrong; `change` says what
    busy = scene_for(row, rng, hard=True)    # smaller, touching, on a tint or a texture

Every lot comes from the `random.Random` that is passed in.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import numpy as np

from umm_reflect.shapes.prompts import HARD_FAMILIES, MIXED, Row, draw_row
from umm_reflect.shapes.scene import (
    COLORS,
    KINDS,
    MAX_ROTATION,
    PLAIN_LEVELS,
    RELATIONS,
    Background,
    Scene,
    Shape,
    is_apart,
    nearest_colors,
    relations,
)
from umm_reflect.shapes.sets import build_sets, is_held_out

# How often training asks for a family (weights).
TRAINING_MIX = {
    "single_object": 5,
    "two_object": 16,
    "counting": 16,
    "colors": 9,
    "position": 16,
    "color_attr": 16,
    "compound": 18,
    MIXED: 10,
}

# Smallest and largest diameter by the number of shapes in the scene.
SIZES = {
    1: (0.28, 0.50),
    2: (0.26, 0.42),
    3: (0.24, 0.36),
    4: (0.22, 0.31),
    5: (0.20, 0.27),
    6: (0.18, 0.25),
}
HARD_SHRINK, HARD_SMALLEST = 0.75, 0.15
MARGIN = 0.03  # room to the picture's edge
GAP = 0.045  # room between two bounding circles
HARD_GAP = 0.02
TOUCHING = 0.4  # share of the hard scenes with two shapes or more in which two of them touch
TRIES = 60  # places tried for one shape before the scene is begun anew


def sample_row(
    rng: random.Random,
    split: Literal["train", "test"] = "train",
    *,
    hard: bool = False,
    family: str | None = None,
) -> Row:
    """A row by lot. "train" refuses every held-out spec, "test" takes a row of the test sets. The
    family is `family` (of prompts.FAMILIES), or one of the harder split if `hard`, or a lot of
    TRAINING_MIX."""
    if family is None:
        mix = TRAINING_MIX if not hard else dict.fromkeys(HARD_FAMILIES, 1)
        if split == "test":  # the test sets have no such family
            mix = {name: weight for name, weight in mix.items() if name != MIXED}
        family = rng.choices(list(mix), list(mix.values()))[0]
    if split == "test":
        sets = build_sets()
        rows = [*sets.shapes553, *sets.compound, *sets.hard]
        return rng.choice([entry.row for entry in rows if entry.family == family])
    if split != "train":
        raise ValueError(f"unknown split {split!r}; choose from train, test")
    while is_held_out(row := draw_row(rng, family)):
        pass
    return row


# --- scenes that satisfy a row -------------------------------------------------------------------


def scene_for(row: Row, rng: random.Random, *, hard: bool = False, distractors: int = 0) -> Scene:
    """A scene that satisfies the row: its shapes in the order of the clauses, then `distractors`
    shapes of other kinds. Colors that the row leaves open are lots. `hard` makes shapes smaller,
    lets two of them touch at times, and takes tinted and textured backgrounds too.

    Raises ValueError if the row asks for more shapes than the world holds (six).
    """
    wanted = _wanted(row, rng, distractors)
    if len(wanted) > max(SIZES):
        raise ValueError(f"a scene holds at most {max(SIZES)} shapes, not {len(wanted)}")
    background = _hard_background(rng) if hard else _plain_background(rng)
    relation = _relation(row)
    while True:
        sizes = [draw_size(rng, len(wanted), hard) for _ in wanted]
        touching = hard and len(wanted) > 1 and rng.random() < TOUCHING
        shapes = _arranged(wanted, sizes, relation, rng, HARD_GAP if hard else GAP, touching)
        if shapes is not None:
            return Scene(tuple(shapes), background)


def draw_size(rng: random.Random, shapes: int, hard: bool = False) -> float:
    """A diameter by lot for a scene of so many shapes."""
    low, high = SIZES[min(max(shapes, 1), max(SIZES))]
    if hard:
        low, high = (max(HARD_SHRINK * bound, HARD_SMALLEST) for bound in (low, high))
    return rng.uniform(low, high)


def draw_shape(rng: random.Random, kind: str, color: str, x: float, y: float, size: float) -> Shape:
    """A shape turned by lot as far as its kind allows."""
    return Shape(kind, color, x, y, size, rng.uniform(-1, 1) * MAX_ROTATION[kind])


def find_place(
    rng: random.Random, size: float, others: Sequence[Shape], least: float = GAP, tries: int = TRIES
) -> tuple[float, float] | None:
    """A centre by lot for a shape of this size, `least` away from all others and MARGIN from the
    edge; None if `tries` lots find none."""
    edge = size / 2 + MARGIN
    for _ in range(tries):
        x, y = rng.uniform(edge, 1 - edge), rng.uniform(edge, 1 - edge)
        for other in others:
            room = (size + other.size) / 2 + least
            if (x - other.x) ** 2 + (y - other.y) ** 2 < room * room:
                break
        else:
            return x, y
    return None


def is_clear(relation: str, subject: Shape, anchor: Shape) -> bool:
    """Whether the relation holds by a clear margin of GenEval's rule and no other is near:
    stricter than `scene.relations` whatever the kinds and turns of the two shapes."""
    dx, dy = subject.x - anchor.x, subject.y - anchor.y
    along, across = (dx, dy) if relation in ("left of", "right of") else (dy, dx)
    if relation in ("left of", "above"):
        along = -along
    sizes, distance = subject.size + anchor.size, math.hypot(dx, dy)
    return along - 0.11 * sizes > 0.62 * distance and abs(across) - 0.06 * sizes < 0.4 * distance


def _wanted(row: Row, rng: random.Random, distractors: int) -> list[tuple[str, str]]:
    """(kind, color) of every shape to draw; shapes of a clause without a color often share one."""
    wanted = []
    for part in row["include"]:
        color = part.get("color")
        if color is None and rng.random() < 0.6:
            color = rng.choice(COLORS)
        wanted += [(part["class"], color or rng.choice(COLORS)) for _ in range(part["count"])]
    free = [kind for kind in KINDS if kind not in _kinds(row)]
    return wanted + [(rng.choice(free), rng.choice(COLORS)) for _ in range(distractors)]


def _kinds(row: Row) -> set[str]:
    return {part["class"] for part in row["include"]}


def _relation(row: Row) -> tuple[int, str, int] | None:
    """(index of the subject's shape, relation, index of the anchor's) in a scene of the row."""
    starts, count = [], 0
    for part in row["include"]:
        starts.append(count)
        count += part["count"]
    for start, part in zip(starts, row["include"], strict=True):
        if "position" in part:
            relation, anchor = part["position"]
            return start, str(relation), starts[int(anchor)]
    return None


def _arranged(
    wanted: Sequence[tuple[str, str]],
    sizes: Sequence[float],
    relation: tuple[int, str, int] | None,
    rng: random.Random,
    least: float,
    touching: bool,
) -> list[Shape] | None:
    """The wanted shapes at places by lot, or None if one did not fit."""
    shapes: list[Shape] = []
    touches = rng.randrange(1, len(wanted)) if touching else None
    for index, ((kind, color), size) in enumerate(zip(wanted, sizes, strict=True)):
        for _ in range(TRIES):
            place = find_place(rng, size, shapes, least)
            if place is None:
                return None
            shape = draw_shape(rng, kind, color, *place, size)
            if index == touches:
                other = rng.randrange(index)
                shape = _moved_to_touch(shape, shapes[other], rng)
                edge = size / 2 + MARGIN
                rest = shapes[:other] + shapes[other + 1 :]
                inside = edge <= shape.x <= 1 - edge and edge <= shape.y <= 1 - edge
                if not (inside and is_apart(shape, rest, least)):
                    continue
            if relation is None or index != max(relation[0], relation[2]):
                break
            subject, name, anchor = relation
            both = [*shapes, shape]
            if is_clear(name, both[subject], both[anchor]):
                break
        else:
            return None
        shapes.append(shape)
    return shapes


def _moved_to_touch(shape: Shape, other: Shape, rng: random.Random) -> Shape:
    """The shape pushed against another from a direction by lot, to within half a pixel of 128."""
    angle = rng.uniform(-math.pi, math.pi)
    way = np.array([math.cos(angle), math.sin(angle)])
    reach = ((other.points() - (other.x, other.y)) @ way).max()
    back = ((shape.points() - (shape.x, shape.y)) @ -way).max()
    x, y = (other.x, other.y) + way * (reach + back + rng.uniform(-0.004, 0.004))
    return replace(shape, x=float(x), y=float(y))


def _plain_background(rng: random.Random) -> Background:
    level = rng.randint(*PLAIN_LEVELS)
    return Background("plain", (level, level, level))


def _hard_background(rng: random.Random) -> Background:
    lot = rng.random()
    if lot < 0.3:
        return _plain_background(rng)
    level = rng.randint(160, 178)
    red, green, blue = (level + rng.randint(-22, 22) for _ in range(3))
    if lot < 0.6:
        return Background("tint", (red, green, blue))
    return Background("texture", (red, green, blue), rng.getrandbits(31))


# --- scenes that miss a row ----------------------------------------------------------------------


class Fault(StrEnum):
    """What is wrong with a scene; missing and extra are also counts that are off by one."""

    MISSING = "missing"
    EXTRA = "extra"
    COLOR = "color"
    KIND = "kind"
    RELATION = "relation"
    BROKEN = "broken"


@dataclass(frozen=True)
class Change:
    """How the bad scene differs: `before` are shapes of the good scene that are not in the bad one,
    `after` those of the bad one that are not in the good one; `clause` is the include clause hit.
    Example: Change(Fault.COLOR, 0, (red circle,), (pink circle,))."""

    fault: Fault
    clause: int
    before: tuple[Shape, ...] = ()
    after: tuple[Shape, ...] = ()


def faults(row: Row) -> list[Fault]:
    """The faults that make a scene of this row wrong. One object too many is wrong only where the
    row excludes it, a color only where a color is asked, a place only where a relation is."""
    found = [Fault.MISSING, Fault.KIND, Fault.BROKEN]
    if "exclude" in row:
        found.append(Fault.EXTRA)
    if any("color" in part for part in row["include"]):
        found.append(Fault.COLOR)
    if any("position" in part for part in row["include"]):
        found.append(Fault.RELATION)
    return found


def violate(
    scene: Scene, row: Row, rng: random.Random, fault: Fault | None = None
) -> tuple[Scene, Change]:
    """The scene that `scene_for` made for the row with one thing made wrong: `fault`, or a lot of
    those that the row allows. All other shapes stay as they are.

    Raises ValueError if the row does not allow the fault. Where no free place is left for an extra
    shape, it is made smaller until one is.
    """
    allowed = faults(row)
    if fault is None:
        fault = rng.choice(allowed)
    elif fault not in allowed:
        raise ValueError(f"{fault} is no fault of a {row['tag']} row; choose from {allowed}")
    owners = [i for i, part in enumerate(row["include"]) for _ in range(part["count"])]
    if fault is Fault.RELATION:
        return _wrongly_placed(scene, row, rng)
    index = rng.randrange(len(owners))
    if fault is Fault.COLOR:
        index = rng.choice([i for i, o in enumerate(owners) if "color" in row["include"][o]])
    shape, owner = scene.shapes[index], owners[index]
    if fault is Fault.MISSING:
        return scene.without(index), Change(fault, owner, before=(shape,))
    if fault is Fault.EXTRA:
        extra = _extra(scene, shape, rng)
        return scene.adding(extra), Change(fault, owner, after=(extra,))
    if fault is Fault.COLOR:
        nearest = nearest_colors(shape.color)
        wrong = replace(shape, color=nearest[0] if rng.random() < 0.5 else rng.choice(nearest))
    elif fault is Fault.KIND:
        kind = rng.choice([kind for kind in KINDS if kind not in _kinds(row)])
        wrong = draw_shape(rng, kind, shape.color, shape.x, shape.y, shape.size)
    else:
        wrong = replace(shape, broken=rng.uniform(0.24, 0.32))
    shapes = (*scene.shapes[:index], wrong, *scene.shapes[index + 1 :])
    return replace(scene, shapes=shapes), Change(fault, owner, (shape,), (wrong,))


def _extra(scene: Scene, like: Shape, rng: random.Random) -> Shape:
    size, least = like.size, GAP
    while (place := find_place(rng, size, scene.shapes, least)) is None:
        size, least = max(0.96 * size, 0.8 * HARD_SMALLEST), 0.96 * least
    return draw_shape(rng, like.kind, like.color, *place, size)


def _wrongly_placed(scene: Scene, row: Row, rng: random.Random) -> tuple[Scene, Change]:
    """The subject moved to where another relation clearly holds; the two exchanged if none fits."""
    found = _relation(row)
    assert found is not None, "faults() allows a wrong place only where the row has a relation"
    subject, relation, anchor = found
    clause = next(i for i, part in enumerate(row["include"]) if "position" in part)
    shape, other = scene.shapes[subject], scene.shapes[anchor]
    rest = scene.without(subject).shapes
    wrong = [name for name in RELATIONS if name != relation]
    for _ in range(TRIES):
        place = find_place(rng, shape.size, rest, HARD_GAP)
        if place is None:
            break
        moved = replace(shape, x=place[0], y=place[1])
        if any(is_clear(name, moved, other) for name in wrong):
            bad = scene.changing(subject, x=moved.x, y=moved.y)
            return bad, Change(Fault.RELATION, clause, (shape,), (moved,))
    there = replace(shape, x=other.x, y=other.y, size=other.size)
    here = replace(other, x=shape.x, y=shape.y, size=shape.size)
    shapes = list(scene.shapes)
    shapes[subject], shapes[anchor] = there, here
    bad = replace(scene, shapes=tuple(shapes))
    return bad, Change(Fault.RELATION, clause, (shape, other), (there, here))


def satisfies(scene: Scene, row: Row) -> bool:
    """GenEval's decision on what a scene truly holds; broken shapes count as nothing."""
    taken = []
    for part in row["include"]:
        indices = scene.matching(part["class"], part.get("color"))[: part["count"]]
        if len(indices) < part["count"]:
            return False
        taken.append([scene.shapes[index] for index in indices])
    for part, subjects in zip(row["include"], taken, strict=True):
        if "position" in part:
            relation, anchor = part["position"]
            pairs = [(subject, other) for subject in subjects for other in taken[int(anchor)]]
            if any(relation not in relations(subject, other) for subject, other in pairs):
                return False
    return all(len(scene.matching(e["class"])) < e["count"] for e in row.get("exclude", ()))
