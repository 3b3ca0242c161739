"""Reward `shapes`: the exact verifier of the built-in world (eval/shapes.py), on every core.

build({"reward": "shapes"}).score(images, rows)       # rows in GenEval's schema
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from eval.judging import Judge
from eval.rewards.registry import Row, facts, same_length
from eval.rewards.selftest import require, shape_pairs
from eval.verdict import Verdict
from umm_reflect.shapes.scene import KINDS


@dataclass(frozen=True)
class Settings:
    """workers: processes that judge; 0: one per core, 1: none but this one."""

    workers: int = 0

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}; give 0 or more")


def build(settings: Settings) -> ShapesReward:
    return ShapesReward(settings)


def check_kinds(row: Row) -> None:
    """ValueError for a class that this world lacks: no image could show it."""
    for part in (*(row.get("include") or ()), *(row.get("exclude") or ())):
        if part.get("class") not in KINDS:
            raise ValueError(f"unknown class {part.get('class')!r}; choose from {', '.join(KINDS)}")


class ShapesReward:
    """Reads pixels, so it has no weights and nothing to be broken but itself."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._judge = Judge(settings.workers)

    def start(self, images: int) -> None:
        """Start the processes that a batch of so many images will need."""
        self._judge.start(images)

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        same_length(images, rows)
        for row in rows:
            check_kinds(row)
        return self._judge(images, rows)

    def manifest(self) -> dict[str, Any]:
        return facts("shapes", self.settings, ["numpy", "scipy", "pillow"])

    def check(self) -> None:
        require(self, shape_pairs(), "shapes", "The verifier of the shapes world is broken.")

    def close(self) -> None:
        self._judge.__exit__(None, None, None)
