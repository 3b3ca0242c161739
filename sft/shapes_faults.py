"""How pictures of the shapes world go wrong: first images that miss their prompt, failed edits.

The faults are those that small diffusion models make: an object missing, one too many, a wrong or
swapped colour, a wrong kind, a malformed object, a wrong side, several at once; an edit that does
nothing, does something else, hits the wrong object, leaves the old object behind, or harms another
one.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from random import Random

from sft.shapes_assess import is_satisfied
from sft.shapes_ops import LEAST_GAP, Op, apply, swapped, turned
from sft.shapes_words import PART_REACH
from umm_reflect.shapes.scene import (
    COLORS,
    KINDS,
    Scene,
    Shape,
    gap,
    is_apart,
    nearest_colors,
)

BROKEN = (
    0.28,
    0.5,
)  # share of the turn that a malformed object lacks; with less it can still be told
RUN_TOGETHER = 0.4  # malformed objects that are two pieces of two kinds in one

# How often a first image is wrong in each way, among the ways that are wrong for its row.
FAULT_WEIGHTS = {
    "drop": 0.20,
    "double": 0.27,
    "recolor": 0.20,
    "swap_colors": 0.08,
    "rekind": 0.17,
    "break": 0.10,
    "relation": 1.00,
}
FAULT_COUNTS = ((1, 2, 3), (0.76, 0.17, 0.07))  # how many faults, and how often


def spoil_first(row: Mapping, scene: Scene, rng: Random) -> Scene | None:
    """A scene that misses the row, made from one that satisfies it; None on a bad lot."""
    for _ in range(8):
        spoiled: Scene | None = scene
        for _ in range(rng.choices(*FAULT_COUNTS)[0]):
            spoiled = _spoil_once(row, spoiled, rng) or spoiled
        if not is_satisfied(row, spoiled):
            return spoiled
    return None


def _spoil_once(row: Mapping, scene: Scene, rng: Random) -> Scene | None:
    whole = [i for i, shape in enumerate(scene.shapes) if not shape.broken]
    if not whole:
        return None
    include = row["include"]
    weights = dict(FAULT_WEIGHTS)
    colored = [c for c in include if "color" in c]
    if not colored:
        weights["recolor"] = 0.0
    if len({c["color"] for c in colored}) < 2:
        weights["swap_colors"] = 0.0
    if not any("position" in c for c in include):
        weights["relation"] = 0.0
    if not row.get("exclude"):  # one more is wrong only where it stands on a wrong side
        weights["double"] = 0.1 if weights["relation"] else 0.0
    way = rng.choices(list(weights), list(weights.values()))[0]
    index = rng.choice(whole)
    shape = scene.shapes[index]
    if way == "drop":
        return scene.without(index)
    if way == "double":
        return add_stray(scene, rng, shape.kind, shape.color if rng.random() < 0.7 else None)
    if way == "recolor":
        return scene.changing(index, color=other_color(shape.color, rng))
    if way == "rekind":
        kinds = [c["class"] for c in include if c["class"] != shape.kind]
        kind = rng.choice(kinds) if kinds and rng.random() < 0.4 else other_kind(shape.kind, rng)
        return scene.changing(index, kind=kind, rotation=turned(kind, rng))
    if way == "break":
        base, *parts = malformed(shape, rng)
        return apply(scene, [Op("replace", index, base), *(Op("add", None, p) for p in parts)])
    if way == "swap_colors":
        others = [i for i in whole if scene.shapes[i].color != shape.color]
        if not others:
            return None
        other = rng.choice(others)
        recolored = scene.changing(index, color=scene.shapes[other].color)
        return recolored.changing(other, color=shape.color)
    assert way == "relation", way
    return _on_the_wrong_side(row, scene, rng)


def _on_the_wrong_side(row: Mapping, scene: Scene, rng: Random) -> Scene | None:
    clause = next(c for c in row["include"] if "position" in c)
    relation, anchor = clause["position"]
    subjects = scene.matching(clause["class"], clause.get("color"))
    anchors = scene.matching(row["include"][anchor]["class"], row["include"][anchor].get("color"))
    if not subjects or not anchors:
        return None
    subject, other = rng.choice(subjects), rng.choice(anchors)
    a, b = scene.shapes[subject], scene.shapes[other]
    if rng.random() < 0.5:
        return apply(scene, [swapped(dict(enumerate(scene.shapes)), subject, other)])
    for _ in range(20):
        placed = _anywhere(a, rng)
        dx, dy = placed.x - b.x, placed.y - b.y
        along = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[relation]
        moved = scene.changing(subject, x=placed.x, y=placed.y)
        if along < 0.35 * (dx * dx + dy * dy) ** 0.5 and _is_drawable(moved, (subject,)):
            return moved
    return None


def _is_drawable(scene: Scene, changed: tuple[int, ...]) -> bool:
    """Whether the changed shapes lie inside the picture and overlap nothing."""
    for index in changed:
        shape = scene.shapes[index]
        room = min(shape.x, shape.y, 1 - shape.x, 1 - shape.y)
        if room < shape.size / 2:
            return False
        if any(gap(shape, o) < 0 for i, o in enumerate(scene.shapes) if i != index):
            return False
    return True


def _anywhere(shape: Shape, rng: Random) -> Shape:
    low, high = shape.size / 2 + 0.01, 0.99 - shape.size / 2
    return replace(shape, x=rng.uniform(low, high), y=rng.uniform(low, high))


def add_stray(
    scene: Scene, rng: Random, kind: str | None = None, color: str | None = None
) -> Scene | None:
    """The scene with one more shape, its looks by lot where not given; None if it is full."""
    kind, color = kind or rng.choice(KINDS), color or rng.choice(COLORS)
    size = rng.choice([shape.size for shape in scene.shapes] or [0.28])
    for attempt in range(24):
        stray = Shape(kind, color, 0.5, 0.5, max(0.15, size * 0.95**attempt), turned(kind, rng))
        stray = _anywhere(stray, rng)
        if is_apart(stray, scene.shapes, LEAST_GAP):
            return scene.adding(stray)
    return None


def other_color(color: str, rng: Random) -> str:
    """Another colour, often a near one."""
    near = nearest_colors(color)
    return rng.choice(near[:2] if rng.random() < 0.35 else near)


def other_kind(kind: str, rng: Random) -> str:
    return rng.choice([other for other in KINDS if other != kind])


def spoil_edit(scene: Scene, op: Op, rng: Random) -> Scene | None:
    """What a failed attempt at an edit leaves; None on a bad lot."""
    lot = rng.random()
    if lot < 0.3:
        return scene  # nothing happened
    done = apply(scene, [op])
    others = [i for i, s in enumerate(scene.shapes) if i not in op.touched and not s.broken]
    if lot < 0.5:  # done, but another object was harmed
        if not others:
            return None
        other = rng.choice(others)
        if rng.random() < 0.4:
            return apply(scene, [op, Op("remove", other, None)])
        return apply(scene, [op, *_looks_wrong(scene.shapes[other], other, rng)])
    if op.verb == "add":
        index = len(done.shapes) - 1
        if rng.random() < 0.2:
            return add_stray(done, rng, op.shape.kind, op.shape.color)
        return _wrong_looks(done, index, rng)
    if op.verb == "remove":
        if scene.shapes[op.index].broken:
            return None
        return _wrong_looks(scene, op.index, rng)
    if op.verb == "move" and rng.random() < 0.5:  # the old one stays, or it is lost
        if rng.random() < 0.4:
            return scene.without(op.index)
        return scene.adding(op.shape) if is_apart(op.shape, scene.shapes, 0.0) else None
    if op.verb == "move":
        for _ in range(20):
            placed = _anywhere(op.shape, rng)
            if is_apart(placed, scene.without(op.index).shapes, 0.0):
                return scene.changing(op.index, x=placed.x, y=placed.y)
        return None
    if op.verb == "swap":
        return _wrong_looks(done, rng.choice(op.touched), rng)
    if others and rng.random() < 0.35:  # the wrong object was changed
        other = rng.choice(others)
        if op.verb == "recolor":
            return scene.changing(other, color=op.shape.color)
        return scene.changing(other, kind=op.shape.kind, color=op.shape.color)
    return _wrong_looks(done, op.index, rng)


def _wrong_looks(scene: Scene, index: int, rng: Random) -> Scene:
    return apply(scene, _looks_wrong(scene.shapes[index], index, rng))


def _looks_wrong(shape: Shape, index: int, rng: Random) -> list[Op]:
    """Ops that give a whole shape another colour or kind, or make it malformed."""
    lot = rng.random()
    if lot < 0.4:
        return [Op("recolor", index, replace(shape, color=other_color(shape.color, rng)))]
    if lot < 0.7:
        kind = other_kind(shape.kind, rng)
        return [Op("replace", index, replace(shape, kind=kind, rotation=turned(kind, rng)))]
    base, *parts = malformed(shape, rng)
    return [Op("replace", index, base), *(Op("add", None, part) for part in parts)]


def malformed(shape: Shape, rng: Random) -> tuple[Shape, ...]:
    """The shape with a wedge missing, turned anyhow, at times run together with a second piece."""
    angle, wedge = rng.uniform(-180, 180), rng.uniform(*BROKEN)
    base = replace(shape, rotation=angle, broken=wedge)
    if rng.random() >= RUN_TOGETHER:
        return (base,)
    turn, far = rng.uniform(0, 2 * math.pi), rng.uniform(0.1, 0.9) * PART_REACH * shape.size
    kind = rng.choice(KINDS)
    part = Shape(
        kind,
        shape.color,
        shape.x + far * math.cos(turn),
        shape.y + far * math.sin(turn),
        shape.size * rng.uniform(0.65, 0.95),
        turned(kind, rng),
        rng.uniform(*BROKEN),
    )
    return base, part
