"""What a picture of the shapes world holds: coloured shapes on a background, as plain frozen data.

Coordinates are fractions of the picture's side, x to the right and y down. `Shape.size` is the
diameter of the circle around (x, y) that the shape fits in; at rotation 0 the middle of the shape's
box is (x, y). Nothing here draws (render.py) or draws lots (sampler.py).

    circle = Shape("circle", "red", 0.3, 0.5, 0.3)
    star = Shape("star", "blue", 0.7, 0.5, 0.3, rotation=10)
    scene = Scene((circle, star))
    circle.box()               # (0.15, 0.35, 0.45, 0.65)
    relations(circle, star)    # {"left of"}
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

KINDS = ("circle", "square", "triangle", "star", "ring", "cross", "heart", "moon")

# GenEval's ten colours in GenEval's order. Any two are at least 100 apart in RGB, and every one is
# at least 90 away from every plain background, so a mean over a shape's inside names its colour.
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (215, 20, 30),
    "orange": (250, 125, 5),
    "yellow": (255, 230, 30),
    "green": (25, 150, 55),
    "blue": (30, 75, 225),
    "purple": (125, 35, 165),
    "pink": (255, 120, 195),
    "brown": (115, 65, 25),
    "black": (12, 12, 14),
    "white": (252, 252, 252),
}

RELATIONS = ("left of", "right of", "above", "below")
MIRRORED = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

# Plain backgrounds are greys of a level in this range (inclusive).
PLAIN_LEVELS = (162, 186)

# Degrees either way that a shape may be turned and still be told from its neighbours: a square at
# 45 degrees is a diamond, a plus at 45 degrees another sign.
MAX_ROTATION = {
    "circle": 0.0,
    "square": 14.0,
    "triangle": 16.0,
    "star": 18.0,
    "ring": 0.0,
    "cross": 14.0,
    "heart": 16.0,
    "moon": 16.0,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """One drawn object; a malformed one lacks a wedge that takes the share `broken` (0 to 0.5) of
    a full turn."""

    kind: str
    color: str
    x: float
    y: float
    size: float
    rotation: float = 0.0
    broken: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}; choose from {', '.join(KINDS)}")
        if self.color not in PALETTE:
            raise ValueError(f"unknown color {self.color!r}; choose from {', '.join(COLORS)}")
        if not self.size > 0:
            raise ValueError(f"size must be positive, got {self.size}")
        if not 0 <= self.broken <= 0.5:
            raise ValueError(f"broken must be in [0, 0.5], got {self.broken}")

    def points(self) -> np.ndarray:
        """Outer outline in picture fractions, [n, 2] float64."""
        return place(outline(self.kind), self)

    def box(self) -> tuple[float, float, float, float]:
        """Tight box (left, top, right, bottom) in picture fractions; a broken shape's is that of
        the whole one."""
        points = self.points()
        left, top = points.min(axis=0)
        right, bottom = points.max(axis=0)
        return float(left), float(top), float(right), float(bottom)


@dataclass(frozen=True, slots=True)
class Background:
    """`plain` is one grey, `tint` one pale colour, `texture` a soft pattern around `rgb` that
    `seed` chooses."""

    kind: Literal["plain", "tint", "texture"] = "plain"
    rgb: tuple[int, int, int] = (174, 174, 174)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Scene:
    """Shapes in drawing order (a later one covers an earlier one) on a background."""

    shapes: tuple[Shape, ...]
    background: Background = Background()

    def adding(self, *shapes: Shape) -> "Scene":
        return replace(self, shapes=self.shapes + shapes)

    def without(self, index: int) -> "Scene":
        return replace(self, shapes=self.shapes[:index] + self.shapes[index + 1 :])

    def changing(self, index: int, **changes: object) -> "Scene":
        """The scene with fields of one shape changed: `scene.changing(0, color="blue")`."""
        changed = replace(self.shapes[index], **changes)
        return replace(self, shapes=(*self.shapes[:index], changed, *self.shapes[index + 1 :]))

    def matching(self, kind: str, color: str | None = None) -> list[int]:
        """Indices of the whole (not broken) shapes of a kind, of one color if it is given."""
        return [
            index
            for index, shape in enumerate(self.shapes)
            if shape.kind == kind and not shape.broken and color in (None, shape.color)
        ]


def place(points: np.ndarray, shape: Shape) -> np.ndarray:
    """Points [n, 2] of a shape's own frame (circle of radius 1) put into the picture, [n, 2] in
    fractions of its side."""
    angle = math.radians(shape.rotation)
    cos, sin = math.cos(angle), math.sin(angle)
    turned = points @ np.array([[cos, sin], [-sin, cos]])
    return turned * (shape.size / 2) + (shape.x, shape.y)


RING_HOLE = 0.55  # inner radius of a ring over its outer one


@cache
def outline(kind: str) -> np.ndarray:
    """Outer outline of a kind in its own frame, [n, 2]: box centred on 0, farthest point at
    radius 1, y down."""
    turn = np.linspace(0, 2 * math.pi, 64, endpoint=False)
    if kind in ("circle", "ring"):
        points = np.stack([np.cos(turn), np.sin(turn)], 1)
    elif kind == "square":
        points = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)], float)
    elif kind == "triangle":
        points = np.array([(0, -1), (0.95, 0.7), (-0.95, 0.7)], float)
    elif kind == "star":
        spokes = -math.pi / 2 + np.arange(10) * math.pi / 5
        radius = np.where(np.arange(10) % 2 == 0, 1.0, 0.42)
        points = np.stack([radius * np.cos(spokes), radius * np.sin(spokes)], 1)
    elif kind == "cross":
        arm = 0.34
        corners = [(-arm, -1), (arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm)]
        points = np.array(corners + [(-x, -y) for x, y in corners], float)
    elif kind == "heart":
        across = 16 * np.sin(turn) ** 3
        up = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
        points = np.stack([across, -up], 1)
    elif kind == "moon":  # the unit disc without a disc of radius 0.85 around (0.5, 0)
        tip_x = (1 - 0.85**2 + 0.5**2) / (2 * 0.5)
        tip = math.acos(tip_x)
        outer = np.linspace(tip, 2 * math.pi - tip, 48)
        bite_tip = math.atan2(math.sin(tip), tip_x - 0.5)
        inner = np.linspace(2 * math.pi - bite_tip, bite_tip, 40)[1:-1]
        back = np.stack([np.cos(outer), np.sin(outer)], 1)
        front = np.stack([0.5 + 0.85 * np.cos(inner), 0.85 * np.sin(inner)], 1)
        points = np.concatenate([back, front])
    else:
        raise ValueError(f"unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    points = points - (points.min(axis=0) + points.max(axis=0)) / 2
    return points / np.linalg.norm(points, axis=1).max()


def relations(subject: Shape, anchor: Shape) -> set[str]:
    """Relations of subject to anchor by GenEval's rule on boxes: the offset of the box centres,
    shrunk by a tenth of the summed sizes and divided by the unshrunk distance, must exceed a half.
    Two may hold at once, or none."""
    box, other = subject.box(), anchor.box()
    offsets, shrunk = [], []
    for low, high in ((0, 2), (1, 3)):
        offset = (box[low] + box[high] - other[low] - other[high]) / 2
        sizes = box[high] - box[low] + other[high] - other[low]
        offsets.append(offset)
        shrunk.append(math.copysign(max(abs(offset) - 0.1 * sizes, 0.0), offset))
    distance = math.hypot(*offsets)
    if distance == 0:
        return set()
    dx, dy = shrunk[0] / distance, shrunk[1] / distance
    tests = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {relation for relation, holds in tests.items() if holds}


def gap(a: Shape, b: Shape) -> float:
    """Room between the bounding circles of two shapes in fractions; negative if they overlap."""
    return math.hypot(a.x - b.x, a.y - b.y) - (a.size + b.size) / 2


def is_apart(shape: Shape, others: Iterable[Shape], least: float) -> bool:
    return all(gap(shape, other) >= least for other in others)


@cache
def nearest_colors(color: str) -> tuple[str, ...]:
    """The nine other colors, nearest in RGB first."""
    here = PALETTE[color]
    return tuple(
        sorted((c for c in COLORS if c != color), key=lambda c: math.dist(here, PALETTE[c]))
    )
