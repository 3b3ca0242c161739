"""Reward `geneval`: GenEval's verifier, its yes or no and a graded score (eval/geneval.py).

    build({"reward": "geneval", "device": "cuda:1"})
    build({"reward": "geneval", "rule": "cross_checked", "preset": "release"})   # UMM-Reflection's
    build({"reward": "geneval", "models": "drawn"})        # no weights: the shapes world's pictures

Rows are in GenEval's schema. The weights come with `umm-reflect download geneval` and
`umm-reflect geneval convert`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from PIL.Image import Image

from eval.geneval import CACHE_BYTES, GenEvalVerifier
from eval.geneval_scores import Preset, Rule
from eval.rewards.registry import Row, facts, same_length
from eval.verdict import Verdict
from umm_reflect.verifier_files import CLIP


@dataclass(frozen=True)
class Settings:
    """rule: whose yes or no: GenEval's, or with BLIP's second opinion. preset: how a no is graded.
    models: drawn needs no weights. detector, blip: converted folders, "" for their own place.
    other_weights: the self-test takes detectors that are not mmdet's."""

    rule: Rule = "official"
    preset: Preset = "ours"
    models: Literal["full", "drawn"] = "full"
    detector: str = ""
    clip: str = CLIP
    blip: str = ""
    other_weights: bool = False
    device: str = "auto"
    batch_size: int = 16
    cache_bytes: int = CACHE_BYTES

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; give at least 1")
        if self.cache_bytes < 0:
            raise ValueError(f"cache_bytes is {self.cache_bytes}; give 0 or more")


def build(settings: Settings) -> GenEvalReward:
    return GenEvalReward(settings)


class GenEvalReward:
    """The models are loaded when it is built."""

    def __init__(self, settings: Settings):
        self.settings = settings
        graded = {"rule": settings.rule, "preset": settings.preset}
        if settings.models == "drawn":
            from eval.drawn import DrawnColors, DrawnDetector, DrawnVqa

            models = (DrawnDetector(), DrawnColors(), DrawnVqa())
            self.verifier = GenEvalVerifier(*models, **graded, cache_bytes=settings.cache_bytes)
        else:
            self.verifier = GenEvalVerifier.load(
                **graded,
                detector=settings.detector,
                clip=settings.clip,
                blip=settings.blip,
                device=settings.device,
                batch_size=settings.batch_size,
                cache_bytes=settings.cache_bytes,
            )

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        same_length(images, rows)
        return self.verifier.score(images, rows)

    def manifest(self) -> dict[str, Any]:
        manifest = self.verifier.manifest()
        hashes = {part: model["sha256"] for part, model in manifest["models"].items()}
        packages = ["torch", "transformers", "numpy", "pillow"]
        known = {part: sha256 for part, sha256 in hashes.items() if sha256}
        return {**facts("geneval", self.settings, packages, known), "models": manifest["models"]}

    def check(self) -> None:
        from eval.geneval_check import check

        for line in check(self.verifier, other_weights=self.settings.other_weights):
            print(f"geneval: {line}")

    def offload(self) -> None:
        self.verifier.offload()

    def close(self) -> None:
        self.verifier.offload()
        del self.verifier
