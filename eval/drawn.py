"""Stand-ins for the three models of the GenEval verifier, without weights, for drawn shapes.

    verifier = GenEvalVerifier(DrawnDetector(), DrawnColors(), DrawnVqa())

They see the shapes world's pictures under names of COCO's (DRAWN: a circle is a sports ball), so
that everything around the models can be run and tested anywhere: evidence, rules, caches, the
service, a training run. On photographs they find nothing that means anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from eval.detectors import FLOOR, Found
from umm_reflect.shapes.scene import COLORS, PALETTE

if TYPE_CHECKING:
    import torch

DRAWN = {
    "circle": "sports ball",
    "square": "tv",
    "triangle": "pizza",
    "star": "kite",
    "ring": "donut",
    "cross": "scissors",
    "heart": "apple",
    "moon": "banana",
}
_NEAR = 60.0  # a pixel this near to a colour of the palette (RGB distance) has it


class _StandIn:
    """What the three have in common: nothing to load and nothing to move."""

    name = ""

    def identity(self) -> dict[str, Any]:
        """What decides the results."""
        return {"name": f"{self.name} (a stand-in without weights)", "sha256": None}

    def move(self, device: torch.device) -> None:
        """There is nothing to move."""


class DrawnDetector(_StandIn):
    """Finds shapes; a score is how well a shape is drawn, lifted above the counting threshold."""

    name = "drawn shapes"

    def detect(self, images: Sequence[Image.Image]) -> list[list[Found]]:
        """Everything above FLOOR in each image, best first."""
        from eval.shapes import ShapesVerifier

        results = []
        for image in images:
            drawn = [
                Found(DRAWN[d.kind], 0.92 + 0.08 * d.score, d.box, d.area)
                for d in ShapesVerifier().read(image)
                if d.kind in DRAWN and d.score > FLOOR
            ]
            results.append(sorted(drawn, key=lambda found: -found.score))
        return results


class DrawnColors(_StandIn):
    """The share that each colour of the palette has in a crop."""

    name = "drawn colours"

    def probabilities(
        self, crops: Sequence[Image.Image], kinds: Sequence[str]
    ) -> list[tuple[float, ...]]:
        """For each crop: how likely each of COLORS is."""
        return [_shares(crop) for crop in crops]


class DrawnVqa(_StandIn):
    """Says yes to a question in proportion to the colour that it names."""

    name = "drawn answers"

    def yes(self, crops: Sequence[Image.Image], questions: Sequence[str]) -> list[float]:
        """The share of the colour that begins each question."""
        return [
            _shares(crop)[COLORS.index(question.split()[0])]
            for crop, question in zip(crops, questions, strict=True)
        ]


def _shares(crop: Image.Image) -> tuple[float, ...]:
    pixels = np.asarray(crop.convert("RGB"), np.float32).reshape(-1, 1, 3)
    palette = np.array([PALETTE[color] for color in COLORS], np.float32)
    distance = np.linalg.norm(pixels - palette, axis=2)
    nearest = distance.argmin(1)[distance.min(1) < _NEAR]
    counts = np.bincount(nearest, minlength=len(COLORS)).astype(float)
    if not counts.sum():
        counts += 1
    return tuple((counts / counts.sum()).tolist())
