"""Which kind a blob is: its coverage against drawn templates.

A blob's coverage is moved so that its centre of mass is at 0 and scaled by the root of its area,
then averaged into a 20 x 20 grid. The same is done to every kind, drawn at several sizes, turns
and sub-pixel places, sharp and blurred. The mismatch of two grids is their squared distance over
the template's square; it grows as blobs get smaller, so templates of like size are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import ndimage

from umm_reflect.shapes.render import coverage as drawn_coverage
from umm_reflect.shapes.scene import KINDS, MAX_ROTATION, Shape

GRID = 20  # cells a side
REACH = 1.2  # the grid spans this many roots of the area either way
SCALES = (6.0, 7.2, 8.6, 10.4, 12.4, 15.0, 18.0, 21.5, 26.0, 31.0, 37.0, 45.0)  # roots of the area
_PLACES = ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.5, 0.5), (0.25, 0.25))
_BLURS = (0.0, 0.6)
_CANVAS = 128
_STEPS = np.arange(GRID) - (GRID - 1) / 2  # middles of the cells


@dataclass(frozen=True)
class Match:
    """The best kind for a blob. mismatch: 0 is perfect."""

    kind: str
    mismatch: float


def match(coverages: Sequence[np.ndarray]) -> list[Match]:
    """The kind that each coverage, [h, w] in [0, 1], fits best.

    Reading the templates from memory takes most of the time, so many are matched at once.
    """
    if not coverages:
        return []
    grids, scales = zip(*map(normalise, coverages), strict=True)
    levels = [int(np.abs(np.log(np.array(SCALES) / scale)).argmin()) for scale in scales]
    least = np.full((len(grids), len(KINDS)), np.inf)
    for near in range(max(0, min(levels) - 1), min(len(SCALES), max(levels) + 2)):
        for index, level in enumerate(levels):
            if abs(level - near) <= 1:
                least[index] = np.minimum(least[index], _mismatches(grids[index], near))
    kinds = least.argmin(1)
    return [Match(KINDS[kind], float(row[kind])) for row, kind in zip(least, kinds, strict=True)]


def normalise(coverage: np.ndarray) -> tuple[np.ndarray, float]:
    """(the GRID x GRID mean coverage as a vector [400] fp32, the root of the area in pixels)."""
    coverage = ((coverage - 0.15) / 0.7).clip(0, 1)
    mass = float(coverage.sum())
    if mass < 1:
        return np.zeros(GRID * GRID, np.float32), 1.0
    height, width = coverage.shape
    y = float(coverage.sum(1) @ (np.arange(height) + 0.5)) / mass
    x = float(coverage.sum(0) @ (np.arange(width) + 0.5)) / mass
    scale = math.sqrt(mass)
    rows, columns = _cells((y, x), scale, max(height, width))
    grid = rows[:, :height] @ coverage @ columns[:, :width].T
    return grid.ravel().astype(np.float32), scale


def _cells(centre: tuple[float, float], scale: float, length: int) -> np.ndarray:
    """[2, GRID, length]: share of each pixel in each cell of a grid around the centre, by axis."""
    step = 2 * REACH * scale / GRID
    width = max(step, 1.0)
    middle = np.array(centre)[:, None, None] + _STEPS[:, None] * step
    pixel = np.arange(length, dtype=float)
    shares = np.minimum(pixel + 1, middle + width / 2)
    shares -= np.maximum(pixel, middle - width / 2)
    np.maximum(shares, 0, out=shares)
    shares /= width
    return shares


def _mismatches(grid: np.ndarray, level: int) -> np.ndarray:
    """Least mismatch with any template of each kind at one of the SCALES, [kinds]."""
    templates, squares, starts = bank(level)
    mismatch = (squares - 2 * (templates @ grid) + grid @ grid) / squares
    return np.minimum.reduceat(mismatch, starts)


@cache
def bank(level: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Templates of one scale: grids [n, 400], their squares [n], where each kind starts [kinds]."""
    grids, starts = [], []
    for kind in KINDS:
        starts.append(len(grids))
        most = MAX_ROTATION[kind]
        turns = np.linspace(-1.15 * most, 1.15 * most, 9) if most else [0.0]
        size = SCALES[level] / _unit_scale(kind)
        for turn in turns:
            for dx, dy in _PLACES:
                middle = _CANVAS // 2 + np.array([dx, dy])
                shape = Shape(kind, "black", *(middle / _CANVAS), size / _CANVAS, float(turn))
                mask = np.pad(np.asarray(drawn_coverage(shape, _CANVAS)[0], np.float32) / 255, 3)
                for blur in _BLURS:
                    soft = ndimage.gaussian_filter(mask, blur) if blur else mask
                    grids.append(normalise(soft)[0])
    stacked = np.stack(grids)
    return stacked, np.einsum("nc,nc->n", stacked, stacked), np.array(starts)


def draw_all() -> None:
    """Have the templates of every scale ready (a second)."""
    for level in range(len(SCALES)):
        bank(level)


@cache
def _unit_scale(kind: str) -> float:
    """Root of a kind's area over its diameter."""
    mask = np.asarray(drawn_coverage(Shape(kind, "black", 0.5, 0.5, 0.5), 256)[0], np.float32)
    return math.sqrt(float(mask.sum()) / 255) / 128
