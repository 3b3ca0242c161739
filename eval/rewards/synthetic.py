"""Reward `synthetic`: a number out of the pixels and the prompt, for tests of speed alone.

    build({"reward": "synthetic"}).score(images, rows)

It says nothing about an image: the same pixels and prompt give the same number, others another one,
spread evenly over [0, 1). What trains on it learns nothing; what is measured with it is real.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from eval.rewards.registry import Row, facts, prompt_of, same_length
from eval.verdict import Verdict


@dataclass(frozen=True)
class Settings:
    """correct_from: numbers from here on count as correct."""

    correct_from: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.correct_from <= 1:
            raise ValueError(f"correct_from is {self.correct_from}; give a number from 0 to 1")


def build(settings: Settings) -> SyntheticReward:
    return SyntheticReward(settings)


class SyntheticReward:
    """Holds nothing."""

    def __init__(self, settings: Settings):
        self.settings = settings

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        same_length(images, rows)
        return [self._verdict(*pair) for pair in zip(images, rows, strict=True)]

    def _verdict(self, image: Image, row: Row) -> Verdict:
        content = prompt_of(row).encode() + image.tobytes()
        number = int.from_bytes(hashlib.sha256(content).digest()[:4], "big") / 2**32
        correct = number >= self.settings.correct_from
        score = 1.0 if correct else number / 2
        return Verdict(correct, score, "synthetic, from a hash of the pixels")

    def manifest(self) -> dict[str, Any]:
        return facts("synthetic", self.settings)

    def check(self) -> None:
        """Nothing: it tells no image from another, and says so."""

    def close(self) -> None:
        """Holds nothing."""
