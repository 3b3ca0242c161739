"""Error rates of the shapes verifier; the truth comes from the scenes, never from pixels.

    python -m eval.shapes --self-test 10000 --output self_test.json

Rows of all families, a third of the scenes of the harder split, some with an object of another kind
beside. Half of the scenes miss their row by one edit. Each is judged twice: as rendered, and after
`degrade`, which stands in for what a VAE and a small generator do to an image.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy import ndimage

from eval.shapes import ShapesVerifier
from umm_reflect.shapes.prompts import FAMILIES, HARD_FAMILIES, Row
from umm_reflect.shapes.render import render
from umm_reflect.shapes.sampler import Fault, sample_row, satisfies, scene_for, violate
from umm_reflect.shapes.scene import Scene

_EXAMPLES = 20  # failures that the result names


@dataclass(frozen=True)
class Case:
    """A row, a scene, and whether the scene satisfies the row; fault: what was made wrong."""

    row: Row
    scene: Scene
    fault: Fault | None
    hard: bool

    @property
    def correct(self) -> bool:
        return self.fault is None


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """`count` cases, every second one with a fault."""
    for number in range(count):
        rng = random.Random(f"shapes verifier {seed} {number}")
        family = rng.choice(FAMILIES)
        hard = family in HARD_FAMILIES or rng.random() < 0.1
        row = sample_row(rng, family=family)
        asked = sum(part["count"] for part in row["include"])
        scene = scene_for(row, rng, hard=hard, distractors=int(asked < 5 and rng.random() < 0.15))
        fault = None
        if number % 2:
            scene, change = violate(scene, row, rng)
            fault = change.fault
        assert satisfies(scene, row) == (fault is None), (row, scene)
        yield Case(row, scene, fault, hard)


def degrade(image: Image.Image, seed: int = 0) -> Image.Image:
    """Blur (sigma 0.5 pixels), a drift of each channel by up to 8 levels, noise (sigma 3: about
    38 dB) and levels in steps of 4."""
    rng = np.random.default_rng(seed)
    pixels = ndimage.gaussian_filter(np.asarray(image, np.float32), (0.5, 0.5, 0))
    pixels = pixels + rng.uniform(-8, 8, 3) + rng.normal(0, 3, pixels.shape)
    return Image.fromarray(np.clip(4 * np.rint(pixels / 4), 0, 255).astype(np.uint8))


def measure(
    tried: list[Case], change: Callable[[Image.Image, int], Image.Image] | None = None
) -> dict[str, object]:
    """Error rates of the verifier over cases, each image changed by `change(image, number)` first.

    false_positives: wrong scenes judged correct, over the wrong ones; false_negatives: right scenes
    judged wrong, over the right ones; misread: images whose list of kinds and colours is not the
    scene's; milliseconds: mean CPU time to judge one image.
    """
    verifier, passed, read, seconds = ShapesVerifier(), Counter(), 0, 0.0
    examples: list[dict[str, object]] = []
    for number, case in enumerate(tried):
        image = render(case.scene)
        if change is not None:
            image = change(image, number)
        begin = time.process_time()
        verdict = verifier.score([image], [case.row])[0]
        seconds += time.process_time() - begin
        seen = sorted((d["kind"], d["color"]) for d in verdict.evidence["detections"])
        held = sorted(("malformed" if s.broken else s.kind, s.color) for s in case.scene.shapes)
        read += seen == held
        wrong = verdict.correct != case.correct
        passed[case.correct, wrong] += 1
        if (wrong or seen != held) and len(examples) < _EXAMPLES:
            examples.append(
                {
                    "case": number,
                    "prompt": case.row["prompt"],
                    "fault": case.fault,
                    "hard": case.hard,
                    "verdict_wrong": wrong,
                    "reason": verdict.reason,
                    "missed": [f"{c} {k}" for k, c in (Counter(held) - Counter(seen)).elements()],
                    "invented": [f"{c} {k}" for k, c in (Counter(seen) - Counter(held)).elements()],
                }
            )
    return {
        "scenes": len(tried),
        "false_positives": _rate(passed[False, True], passed[False, False]),
        "false_negatives": _rate(passed[True, True], passed[True, False]),
        "misread": 1 - read / len(tried),
        "milliseconds": round(1000 * seconds / len(tried), 2),
        "examples": examples,
    }


def self_test(count: int, seed: int = 0) -> dict[str, object]:
    """Error rates on `count` scenes as rendered and degraded; a JSON-serialisable record."""
    tried = list(cases(count, seed))
    return {
        "seed": seed,
        "faults": dict(Counter(str(case.fault) for case in tried)),
        "rendered": measure(tried),
        "degraded": measure(tried, degrade),
    }


def _rate(bad: int, good: int) -> float:
    return bad / max(1, bad + good)
