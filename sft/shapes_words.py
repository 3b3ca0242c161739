"""Names, places and descriptions of drawn shapes: which words single out which object.

scene = Scene((Shape("star", "red", 0.2, 0.2, 0.2), Shape("star", "red", 0.8, 0.2, 0.2)))
description(scene, 1)       # "red star at the top right"
"""

import math

from umm_reflect.shapes.scene import Scene, Shape

# A 3 x 3 grid over the picture, row by row. `place_of` names the cell that holds a shape's centre.
PLACES = (
    "top left",
    "top",
    "top right",
    "left",
    "centre",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
PART_REACH = 0.32  # a piece of a malformed object is this close to its middle, in its sizes
EXTREMES = (
    ("leftmost", "x", 1),
    ("rightmost", "x", -1),
    ("topmost", "y", 1),
    ("lowest", "y", -1),
)


def cell_of(shape: Shape) -> int:
    """Index into PLACES of the cell that holds the shape's centre."""
    column, row = (min(2, max(0, int(v * 3))) for v in (shape.x, shape.y))
    return 3 * row + column


def place_of(shape: Shape) -> str:
    """The cell of the 3 x 3 grid that holds the shape's centre, as words."""
    return PLACES[cell_of(shape)]


def middle_of(cell: int) -> tuple[float, float]:
    """Middle (x, y) of a cell of the 3 x 3 grid, in picture fractions."""
    return (cell % 3 + 0.5) / 3, (cell // 3 + 0.5) / 3


def parts_of(scene: Scene, index: int) -> list[int]:
    """Indices of the later shapes that are further pieces of a malformed object: broken too, of its
    colour, and over its middle. Such a heap of pieces is one object to the eye."""
    base = scene.shapes[index]
    if not base.broken:
        return []
    return [
        i
        for i, shape in enumerate(scene.shapes[index + 1 :], index + 1)
        if shape.broken
        and shape.color == base.color
        and math.hypot(shape.x - base.x, shape.y - base.y) < PART_REACH * base.size
    ]


def objects_of(scene: Scene) -> list[int]:
    """Indices of the objects that one sees: every shape that is no further piece of another."""
    parts = {part for index in range(len(scene.shapes)) for part in parts_of(scene, index)}
    return [index for index in range(len(scene.shapes)) if index not in parts]


def reading_order(scene: Scene) -> list[int]:
    """Indices of the objects by row of the grid, then from left to right."""
    return sorted(
        objects_of(scene),
        key=lambda i: (cell_of(scene.shapes[i]) // 3, scene.shapes[i].x, scene.shapes[i].y),
    )


def plural(kind: str) -> str:
    """English plural of a kind: circles, crosses."""
    return kind + ("es" if kind.endswith("s") else "s")


def article(words: str) -> str:
    """The words with "a" or "an" before them."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def noun(kind: str, color: str | None, count: int = 1) -> str:
    """What a clause asks for, without article or number: "red circles"."""
    kind = plural(kind) if count != 1 else kind
    return f"{color} {kind}" if color else kind


def name_of(shape: Shape) -> str:
    """A shape by its looks: "red circle", or "malformed red shape", whose kind cannot be told."""
    return f"malformed {shape.color} shape" if shape.broken else f"{shape.color} {shape.kind}"


def description(scene: Scene, index: int) -> str:
    """Words that single out one shape of the scene: its name, with a place if another has the same
    name.

    Two of one name in one cell are told apart as the leftmost, rightmost, topmost or lowest; where
    that fails too the words fit more than one shape (`is_unique` tells).
    """
    shape = scene.shapes[index]
    name = name_of(shape)
    seen = [scene.shapes[i] for i in objects_of(scene)]
    same = [other for other in seen if name_of(other) == name]
    if len(same) == 1:
        return name
    if sum(cell_of(other) == cell_of(shape) for other in same) == 1:
        return f"{name} at the {place_of(shape)}"
    for word, axis, sign in EXTREMES:
        here = sign * getattr(shape, axis)
        if all(here + 0.05 < sign * getattr(o, axis) for o in same if o is not shape):
            return f"{word} {name}"
    return f"{name} at the {place_of(shape)}"


def is_unique(scene: Scene, index: int) -> bool:
    """Whether `description` singles the shape out."""
    words = description(scene, index)
    return sum(description(scene, other) == words for other in objects_of(scene)) == 1
