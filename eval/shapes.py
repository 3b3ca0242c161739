"""The exact verifier of the shapes world: it reads pixels, and GenEval's rules judge what it reads.

    from eval.shapes import ShapesVerifier
    verdict = ShapesVerifier().score([image], [row])[0]
    verdict.correct, verdict.reason                     # False, "2 of 3 circles"

    python -m eval.shapes --self-test 10000 --output self_test.json

segment (shapes_segment.py) -> kind by template (shapes_templates.py) -> judge (geneval_rules.py,
exact reading). A blob that fits no kind, or whose colour is none of the ten, is a `malformed`
detection, and one malformed object fails every row: nobody asked for it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from eval.geneval_rules import MALFORMED, Detection, Row, judge
from eval.shapes_segment import Blob, segment
from eval.shapes_split import touching
from eval.shapes_templates import Match, match
from eval.verdict import Verdict
from umm_reflect.shapes.scene import COLORS

MISMATCH = 0.11  # a blob that fits its best kind worse is malformed; broken shapes begin at 0.12
READ_SIDE = 128  # the side, in pixels, at which images are read
_READ_AS_IS = (112, 160)  # images with a longer side in this range are not resized


class ShapesVerifier:
    """Reads images of the shapes world. It has no state and no settings; any image is read."""

    def read(self, image: Image.Image) -> list[Detection]:
        """Every object in an image, largest first. Boxes are in pixels of the image as given.

        `score` falls from 1 (a perfect shape) to 0 (as badly drawn as a shape may be, or worse).
        """
        pixels, factor = _pixels(image)
        found: list[Detection] = []
        blobs = segment(pixels)
        fits = match([blob.coverage for blob in blobs])
        for blob, whole in zip(blobs, fits, strict=True):
            pieces = [(blob, whole)]
            if whole.mismatch > MISMATCH:
                pieces = touching(blob) or pieces
            found += [_detection(piece, fit, factor) for piece, fit in pieces]
        return sorted(found, key=lambda d: -d.area)

    def score(self, images: Sequence[Image.Image], rows: Sequence[Row]) -> list[Verdict]:
        """One verdict per image and row; the evidence holds the detections.

        Raises ValueError if there are not as many rows as images, or for a row outside the schema.
        """
        if len(images) != len(rows):
            raise ValueError(f"{len(images)} images but {len(rows)} rows")
        return [
            judge(row, self.read(image), reading="exact")
            for image, row in zip(images, rows, strict=True)
        ]


def _pixels(image: Image.Image) -> tuple[np.ndarray, float]:
    """([H, W, 3] uint8 of about READ_SIDE, pixels of the image per pixel read)."""
    image = image.convert("RGB")
    longer = max(image.size)
    if _READ_AS_IS[0] <= longer <= _READ_AS_IS[1]:
        return np.asarray(image), 1.0
    factor = longer / READ_SIDE
    size = tuple(max(1, round(side / factor)) for side in image.size)
    how = Image.Resampling.BOX if factor > 1 else Image.Resampling.BICUBIC
    return np.asarray(image.resize(size, how)), factor


def _detection(blob: Blob, fit: Match, factor: float) -> Detection:
    known = blob.color is not None and fit.mismatch <= MISMATCH
    return Detection(
        kind=fit.kind if known else MALFORMED,
        color=None if blob.color is None else COLORS[blob.color],
        box=tuple(side * factor for side in blob.box()),
        score=max(0.0, 1 - fit.mismatch / MISMATCH),
        area=float(blob.coverage.sum()) * factor**2,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m eval.shapes --self-test N`: error rates on rendered scenes, as JSON."""
    from eval.shapes_selftest import self_test

    parser = argparse.ArgumentParser(prog="python -m eval.shapes", description=__doc__)
    parser.add_argument("--self-test", type=int, required=True, metavar="SCENES")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    if options.self_test < 1:
        parser.error(f"--self-test needs at least 1 scene, got {options.self_test}")
    result = json.dumps(self_test(options.self_test, options.seed), indent=1)
    if options.output:
        options.output.write_text(result + "\n")
    print(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
