"""A reward for toys: an image is right when it is brighter (or darker) than a threshold.

Registered by tests:

monkeypatch.setitem(registry.REWARDS, "bright", "tests.bright")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL.Image import Image

from eval.rewards.registry import Row
from eval.verdict import Verdict
from umm_reflect.errors import UserError


@dataclass(frozen=True)
class Settings:
    threshold: float = 0.5
    dark: bool = False


def build(settings: Settings) -> Bright:
    return Bright(settings)


def brightness(image: Image) -> float:
    return float(np.asarray(image, dtype=np.float32).mean() / 255)


class Bright:
    def __init__(self, settings: Settings):
        self.settings = settings

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        bright = [brightness(image) > self.settings.threshold for image in images]
        words = ["bright" if is_bright else "dark" for is_bright in bright]
        right = [is_bright != self.settings.dark for is_bright in bright]
        return [Verdict(r, 1.0 if r else 0.25, w) for r, w in zip(right, words, strict=True)]

    def manifest(self) -> dict[str, Any]:
        return {"reward": "bright", "settings": {"threshold": self.settings.threshold}}

    def check(self) -> None:
        from PIL import Image as images

        white, black = (images.new("RGB", (8, 8), color) for color in ("white", "black"))
        verdicts = self.score([white, black], [{}, {}])
        good, bad = reversed(verdicts) if self.settings.dark else verdicts
        if not good.reward > bad.reward:
            raise UserError("bright does not tell good from bad", "")

    def close(self) -> None:
        pass
