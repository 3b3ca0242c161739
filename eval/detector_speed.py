"""How fast the GenEval verifier is with random weights: many images together, and one at a time.

    python -m eval.detector_speed --output speed.json            # full size, on the GPU
    python -m eval.detector_speed --weights tiny --images 4      # a try on a CPU

Random weights take the time of trained ones, but for how many objects are found, each of which
costs the resizing of a mask: the floor under scores is set so that about ten of an image are kept,
as in photographs; the time with all 100 kept is given too. Images are noise at several scales. Each
figure is the best of some repeats after a warm-up; the GPU has finished when the clock stops.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from umm_reflect.settings import parse

OBJECTS = 10  # in an image; COCO's photographs have seven


@dataclass(frozen=True)
class SpeedConfig:
    """Time the detector, the colours, the answers and all of them, with random weights."""

    weights: Literal["full", "tiny"] = "full"
    """The size of the models."""
    images: int = 64
    """How many images a repeat has."""
    size: int = 512
    """Their side, pixels."""
    batch_size: int = 16
    """How many images run together."""
    repeats: int = 3
    """How often each part is timed."""
    device: str = "auto"
    """auto, cuda, cuda:1 or cpu."""
    output: Path | None = None
    """JSON file for the figures."""

    def __post_init__(self) -> None:
        for name in ("images", "size", "batch_size", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")


def main(argv: Sequence[str]) -> int:
    config = parse(SpeedConfig, argv, "python -m eval.detector_speed")
    figures = measure(config)
    text = json.dumps(figures, indent=1) + "\n"
    if config.output:
        from umm_reflect.files import write_aside

        write_aside(config.output, text)
    print(text, end="")
    return 0


def measure(config: SpeedConfig) -> dict[str, Any]:
    """All figures: images, crops and questions a second."""
    import torch

    from eval.geneval_prompts import color_attr
    from eval.random_models import random_verifier
    from umm_reflect.device import resolve_device

    device = resolve_device(config.device)
    verifier = random_verifier(config.weights, device=device, batch_size=config.batch_size)
    images = noise(config.images, config.size)
    detector, colors, vqa = verifier.detector, verifier.colors, verifier.vqa
    assert vqa is not None

    def rate(many: int, work: Callable[[], object]) -> float:
        return round(many / _seconds(work, config.repeats, device), 2)

    def singly(work: Callable[[Sequence[Any]], object], things: Sequence[Any]) -> object:
        return [work([thing]) for thing in things]

    all_kept = _all_kept(detector, images, rate)
    detector.floor = _floor_for(detector, images[0])
    found = detector.detect(images)
    rows = [color_attr(*pair) for pair in map(_two_objects, found)]
    crops = [image.resize((160, 120)) for image in images]
    asked = ["red bench?" for _ in crops]
    few = images[: max(1, min(len(images), 16))]  # one at a time takes longer
    figures: dict[str, Any] = {
        "weights": f"random, {config.weights} size, fp32",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": {p: importlib.metadata.version(p) for p in ("torch", "transformers")},
        "image": [config.size, config.size],
        "batch_size": config.batch_size,
        "objects_an_image": round(sum(map(len, found)) / len(found), 1),
        "detector_images_per_second": {
            "batched": rate(len(images), lambda: detector.detect(images)),
            "one_at_a_time": rate(len(few), lambda: singly(detector.detect, few)),
        },
        "clip_crops_per_second": {
            "batched": rate(
                len(crops), lambda: colors.probabilities(crops, ["bench"] * len(crops))
            ),
            "one_at_a_time": rate(
                len(few), lambda: singly(lambda c: colors.probabilities(c, ["bench"]), crops[:16])
            ),
        },
        "blip_questions_per_second": {
            "batched": rate(len(crops), lambda: vqa.yes(crops, asked)),
            "one_at_a_time": rate(
                len(few), lambda: singly(lambda c: vqa.yes(c, asked[:1]), crops[:16])
            ),
        },
        "verifier_images_per_second": {
            "what": "two coloured objects: detector, 2 to 6 crops, 4 questions",
            "batched": rate(len(images), lambda: verifier.score(images, rows)),
            "one_at_a_time": rate(
                len(few),
                lambda: [verifier.score([i], [r]) for i, r in zip(few, rows, strict=False)],
            ),
        },
        "detector_images_per_second_all_100_kept": all_kept,
    }
    if device.type == "cuda":
        figures["peak_memory_gib"] = round(torch.cuda.max_memory_reserved(device) / 2**30, 2)
    return figures


def _all_kept(detector: Any, images: Sequence[Image.Image], rate: Callable[..., float]) -> float:
    """The detector when the mask of every one of its 100 instances is resized and kept."""
    detector.floor = 0.0
    return rate(len(images), lambda: detector.detect(images))


def _floor_for(detector: Any, image: Image.Image) -> float:
    """The score that OBJECTS of an image exceed."""
    detector.floor = 0.0
    scores = [one.score for one in detector.detect([image])[0]]
    return scores[min(OBJECTS, len(scores) - 1)]


def _two_objects(found: Sequence[Any]) -> list[tuple[str, str]]:
    """Two classes that are there, so that a row about them has something to look at."""
    kinds = list(dict.fromkeys([*(one.kind for one in found), "bench", "dog"]))
    return [(kinds[0], "red"), (kinds[1], "blue")]


def noise(many: int, side: int) -> list[Image.Image]:
    """Images of noise at several scales, the same on every call."""
    draw = np.random.default_rng(0)
    images = []
    for _ in range(many):
        layers = []
        for scale in (4, 16, 64):
            layer = draw.integers(0, 256, (scale, scale, 3), dtype=np.uint8)
            layers.append(np.asarray(Image.fromarray(layer).resize((side, side)), np.float32))
        images.append(Image.fromarray((sum(layers) / len(layers)).astype(np.uint8)))
    return images


def _seconds(work: Callable[[], object], repeats: int, device: Any) -> float:
    """The shortest of some runs after one that is not counted."""
    import torch

    def finished() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    times = []
    for _ in range(repeats):
        finished()
        began = time.perf_counter()
        work()
        finished()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
