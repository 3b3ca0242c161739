"""Changes of a scene: ops, how they are applied, and where a shape that is placed finds room.

op = Op("recolor", 0, replace(scene.shapes[0], color="blue"))
after = apply(scene, [op])          # everything else is as it was
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from sft.shapes_words import cell_of, middle_of, name_of, parts_of
from umm_reflect.shapes.scene import MAX_ROTATION, Scene, Shape, is_apart

Verb = Literal["add", "remove", "recolor", "replace", "move", "swap"]

LEAST_GAP = 0.03  # between the bounding circles of a shape that an op places and any other
EDGE = 0.02  # between such a shape and the border of the picture
SMALLEST = 0.15  # a cell that has no room for this diameter is taken
JITTER = 0.05  # how far from the middle of its cell, on each axis, a shape is placed
ANYWHERE = 0.14  # and how far where that is taken


@dataclass(frozen=True, slots=True)
class Op:
    """One change of a scene: `index` is the shape that it acts on (None: add), `shape` what is
    there afterwards (None: remove). A swap acts on a `partner` too, which becomes
    `partner_shape`."""

    verb: Verb
    index: int | None
    shape: Shape | None
    partner: int | None = None
    partner_shape: Shape | None = None

    @property
    def touched(self) -> tuple[int, ...]:
        """The indices of the shapes that it acts on."""
        return tuple(index for index in (self.index, self.partner) if index is not None)

    @property
    def results(self) -> tuple[Shape, ...]:
        """The shapes that it leaves."""
        return tuple(shape for shape in (self.shape, self.partner_shape) if shape is not None)


class Crowded(Exception):
    """There is no room where an op would have to place a shape; the caller draws another scene."""


def apply(scene: Scene, ops: Sequence[Op]) -> Scene:
    """The scene after ops that name its shapes by index, each at most once; new ones come last.

    What an op does to a malformed object it does to all pieces: one shape is left, or none.
    """
    changed = {op.index: op.shape for op in ops if op.index is not None}
    changed |= {op.partner: op.partner_shape for op in ops if op.partner is not None}
    changed |= {part: None for index in list(changed) for part in parts_of(scene, index)}
    kept = [changed.get(i, shape) for i, shape in enumerate(scene.shapes)]
    added = [op.shape for op in ops if op.index is None]
    return replace(scene, shapes=tuple(shape for shape in (*kept, *added) if shape is not None))


def swapped(shapes: Mapping[int, Shape], index: int, partner: int) -> Op:
    """The op by which two shapes change places; each takes the size that fits its new place."""
    a, b = shapes[index], shapes[partner]
    there, here = replace(a, x=b.x, y=b.y, size=b.size), replace(b, x=a.x, y=a.y, size=a.size)
    return Op("swap", index, there, partner, here)


def turned(kind: str, rng: Random) -> float:
    """A rotation in degrees by lot, within what a kind may be turned."""
    return rng.uniform(-1, 1) * MAX_ROTATION[kind]


def find_room(
    shape: Shape,
    others: Sequence[Shape],
    rng: Random,
    fits: Callable[[Shape], bool] = lambda shape: True,
    cells: Sequence[int] = range(9),
    shrinks: bool = True,
) -> Shape:
    """The shape put near the middle of a free cell of the 3 x 3 grid, or at least into one.

    others: what it must keep LEAST_GAP from. fits: what else must hold of the placed shape.
    shrinks: whether it may become smaller where it does not fit. Raises Crowded.
    """
    cells = list(cells)
    rng.shuffle(cells)
    size = shape.size
    while True:
        low, high = size / 2 + EDGE, 1 - size / 2 - EDGE
        for reach in (JITTER, *[ANYWHERE] * 3):
            for cell in cells:
                x, y = middle_of(cell)
                x = min(high, max(low, x + rng.uniform(-reach, reach)))
                y = min(high, max(low, y + rng.uniform(-reach, reach)))
                placed = replace(shape, x=x, y=y, size=size)
                apart = is_apart(placed, others, LEAST_GAP)
                if apart and cell_of(placed) == cell and fits(placed):
                    return placed
        if size <= SMALLEST or not shrinks:
            raise Crowded(f"no room for a {name_of(shape)} among {len(others)} shapes")
        size = max(SMALLEST, size * 0.85)
