"""Touching shapes of one colour: one blob that fits no kind, cut along a line where it is narrow.

Shapes that only touch lie on two sides of a line. For many directions the blob's cross-section is
measured along the direction, the narrowest places are tried as cuts, and a cut is believed only if
both sides are shapes, or can be cut into shapes. What cannot be cut so stays one malformed blob:
an honest "I cannot tell".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.shapes_segment import Blob
from eval.shapes_templates import Match, match

_SMALLEST = 50.0  # pixels that a shape covers at least
_NARROW = 0.8  # a cut may be as long as this share of the smaller piece's root of the area
_THIN = 0.5  # up to this share a cut is thin
_MISMATCH_THIN = 0.032  # what both pieces of a thin cut may have at most,
_MISMATCH_WIDE = 0.018  # and of a wider one: halves of a broken triangle look like triangles
_DIRECTIONS = np.deg2rad(np.arange(0.0, 180.0, 5.0))
_BIN = 0.5  # pixels
_CANDIDATES = 18
_DEPTH = 2  # cuts; a blob of three shapes needs two


def touching(blob: Blob, depth: int = _DEPTH) -> list[tuple[Blob, Match]]:
    """The shapes that a blob is made of, [] if it cannot be cut into shapes.

    depth: how many cuts there may be. Where a thin cut frees one good shape only, that shape and
    the rest, which fits no kind, come back.
    """
    cuts = _cuts(blob, _narrow_places(blob.coverage))
    for cut in cuts:
        if cut.worse <= cut.limit / 2:
            return cut.pieces
    cuts.sort(key=lambda cut: cut.worse / cut.limit)
    for cut in cuts[:2]:
        best = _refined(blob, cut) if cut.limit < cut.worse <= 3 * cut.limit else cut
        if best.worse <= best.limit:
            return best.pieces
    cuts.sort(key=lambda cut: cut.better)
    if depth > 1:
        for cut in cuts[:3]:
            if cut.better <= cut.limit and (rest := touching(cut.pieces[1][0], depth - 1)):
                return [cut.pieces[0], *rest]
    clean = [cut for cut in cuts if cut.better <= _MISMATCH_THIN / 2 and cut.neck <= _THIN]
    return clean[0].pieces if clean else []


@dataclass(frozen=True)
class _Cut:
    """A line (direction in radians, pixels along it) and both pieces, the better fit first."""

    angle: float
    offset: float
    neck: float
    pieces: list[tuple[Blob, Match]]

    @property
    def limit(self) -> float:
        return _MISMATCH_THIN if self.neck <= _THIN else _MISMATCH_WIDE

    @property
    def better(self) -> float:
        return self.pieces[0][1].mismatch

    @property
    def worse(self) -> float:
        return self.pieces[1][1].mismatch


def _cuts(blob: Blob, lines: Sequence[tuple[float, float, float]]) -> list[_Cut]:
    """The cuts along lines (direction, offset, neck)."""
    sides = [_side(blob, *line[:2], way) for line in lines for way in (1.0, -1.0)]
    pieces = zip(sides, match([side.coverage for side in sides]), strict=True)
    return [
        _Cut(*line, sorted(pair, key=lambda piece: piece[1].mismatch))
        for line, pair in zip(lines, zip(pieces, pieces, strict=True), strict=True)
    ]


def _refined(blob: Blob, cut: _Cut) -> _Cut:
    """The best of small turns and shifts of a cut, turned about the middle of its neck."""
    y, x = np.nonzero(blob.coverage > 0.05)
    points = np.stack([x, y], 1) + 0.5
    toward = np.array([math.cos(cut.angle), math.sin(cut.angle)])
    across = np.array([-toward[1], toward[0]])
    pivot = points[np.abs(points @ toward - cut.offset) < 1].mean(0)
    lines = []
    for turn in np.deg2rad((-9.0, -6.0, -3.0, 0.0, 3.0, 6.0, 9.0)):
        way = math.cos(turn) * toward + math.sin(turn) * across
        for shift in (-0.6, -0.3, 0.0, 0.3, 0.6):
            offset = float(pivot @ way) + shift
            lines.append((float(cut.angle + turn), offset, cut.neck))
    return min([cut, *_cuts(blob, lines)], key=lambda one: one.worse)


def _narrow_places(coverage: np.ndarray) -> list[tuple[float, float, float]]:
    """Cuts, narrowest first: (direction in radians, pixels along it from the array's corner, length
    of the cut over the root of the smaller side's area)."""
    y, x = np.nonzero(coverage > 0.05)
    weight = coverage[y, x]
    total = float(weight.sum())
    if total < 2 * _SMALLEST:
        return []
    along = np.outer(np.cos(_DIRECTIONS), x + 0.5) + np.outer(np.sin(_DIRECTIONS), y + 0.5)
    start = along.min() - 2 * _BIN
    index = np.rint((along - start) / _BIN).astype(int)
    count = int(index.max()) + 3
    rows = np.arange(len(_DIRECTIONS))[:, None] * count
    sums = np.bincount(
        (index + rows).ravel(), np.tile(weight, len(_DIRECTIONS)), len(_DIRECTIONS) * count
    ).reshape(-1, count)
    width = np.zeros_like(sums)
    width[:, 1:-1] = (sums[:, :-2] + 2 * sums[:, 1:-1] + sums[:, 2:]) / (4 * _BIN)
    before = sums.cumsum(1) - sums / 2
    smaller = np.minimum(before, total - before)
    share = np.where(smaller > _SMALLEST, width / np.sqrt(np.maximum(smaller, 1)), np.inf)

    places: list[tuple[float, float, float]] = []
    for flat in np.argsort(share, axis=None)[: 60 * _CANDIDATES]:
        d, b = divmod(int(flat), count)
        if share[d, b] > _NARROW or len(places) == _CANDIDATES:
            break
        angle, offset = float(_DIRECTIONS[d]), start + b * _BIN
        if not any(abs(angle - a) < 0.13 and abs(offset - o) < 2.2 for a, o, _ in places):
            places.append((angle, offset, float(share[d, b])))
    return places


def _side(blob: Blob, angle: float, offset: float, side: float) -> Blob:
    """The part of a blob on one side of a line, its edge soft over one pixel."""
    height, width = blob.coverage.shape
    x = (np.arange(width) + 0.5) * math.cos(angle)
    y = (np.arange(height) + 0.5) * math.sin(angle)
    share = y[:, None] + x
    share -= offset
    share *= side
    share += 0.5
    share = share.clip(0, 1, out=share).astype(np.float32)
    return Blob(blob.color, blob.coverage * share, blob.corner)
