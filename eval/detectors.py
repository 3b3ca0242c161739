"""Finds objects of GenEval's 80 classes in images: Mask2Former Swin-S with mmdet's weights.

    detector = Mask2FormerDetector.load(folder, device="cuda:1")
    found = detector.detect(images)              # for each image: Found(kind, score, box, ...)

`folder` is what `umm-reflect geneval convert` writes from mmdet's published checkpoint. Images of
one size run together. drawn.py has a detector that needs no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image, ImageOps

from eval.geneval_prompts import CLASSES
from umm_reflect.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from eval.mask2former_images import Instance, Mask

FLOOR = 0.02  # detections that score less are nothing, not even evidence
MAX_SIDE = 2048  # larger images are reduced first: GenEval's have 512 to 1024 pixels a side


@dataclass(frozen=True)
class Found:
    """One object in an image. box: (x0, y0, x1, y1), pixels of the image as given; area: pixels;
    mask: the object's own pixels, None where they are not known."""

    kind: str
    score: float
    box: tuple[float, float, float, float]
    area: float
    mask: Mask | None = None


class Detector(Protocol):
    """Anything that finds objects of CLASSES."""

    def detect(self, images: Sequence[Image.Image]) -> list[list[Found]]:
        """Everything above FLOOR in each image, best first."""
        ...

    def identity(self) -> dict[str, Any]:
        """What decides the detections: name, hash of the weights, number format."""
        ...

    def move(self, device: torch.device) -> None:
        """Go to a device, or to the CPU while there is nothing to do."""
        ...


def as_seen(image: Image.Image) -> Image.Image:
    """The image as every part of the verifier looks at it: upright, RGB, at most MAX_SIDE."""
    image = ImageOps.exif_transpose(image).convert("RGB")
    longer = max(image.size)
    if longer <= MAX_SIDE:
        return image
    size = tuple(max(1, round(side * MAX_SIDE / longer)) for side in image.size)
    return image.resize(size, Image.Resampling.BOX)


# --- Mask2Former ----------------------------------------------------------------------------------


class Mask2FormerDetector:
    """Mask2Former Swin-S with mmdet's weights, in transformers, fp32."""

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device,
        batch_size: int,
        weights: str | None,
        source: str | None = None,
    ):
        """model: Mask2FormerForUniversalSegmentation of 80 classes. weights, source: sha256 of the
        weights and of the checkpoint that they were made from."""
        self.model = model.eval().requires_grad_(False).to(device)
        self.device = device
        self.batch_size = batch_size
        self.floor = FLOOR
        self.weights, self.source = weights, source

    @classmethod
    def load(
        cls, folder: Path, *, device: str | torch.device = "auto", batch_size: int = 16
    ) -> Mask2FormerDetector:
        """Errors: CheckpointError for a folder that is not what `geneval convert` writes."""
        from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

        from eval.conversion import WEIGHTS, check_converted, load_strictly, read_config
        from eval.mask2former_keys import OPTIONAL
        from umm_reflect.device import resolve_device

        record = check_converted(folder)
        config = Mask2FormerConfig.from_dict(read_config(folder))
        if config.num_labels != len(CLASSES):
            raise CheckpointError(
                f"{folder} finds {config.num_labels} classes, GenEval has {len(CLASSES)}",
                "Convert mmdet's instance checkpoint: umm-reflect geneval convert",
            )
        model = Mask2FormerForUniversalSegmentation(config)
        made_with = record.get("transformers", "another release")
        remedy = f"It was converted with transformers {made_with}: umm-reflect geneval convert"
        load_strictly(model, folder / WEIGHTS, OPTIONAL, remedy)
        return cls(
            model,
            device=resolve_device(device),
            batch_size=batch_size,
            weights=record["sha256"],
            source=record.get("source_sha256"),
        )

    def detect(self, images: Sequence[Image.Image]) -> list[list[Found]]:
        """Everything above FLOOR in each image, best first."""
        results: list[list[Found]] = [[] for _ in images]
        for indices in by_size(images, self.batch_size):
            pixels = np.stack([np.asarray(images[i].convert("RGB")) for i in indices])
            for index, instances in zip(indices, self._instances(pixels), strict=True):
                results[index] = [_found(instance) for instance in instances]
        return results

    def _instances(self, pixels_BHWC: np.ndarray) -> list[list[Instance]]:
        import torch

        from eval.mask2former_images import finish, prepare

        size = pixels_BHWC.shape[1:3]
        with torch.inference_mode():
            batch, inside = prepare(torch.from_numpy(pixels_BHWC).to(self.device))
            seen = self.model(pixel_values=batch)
            classes, masks = seen.class_queries_logits, seen.masks_queries_logits
            if not torch.isfinite(classes).all():
                raise FloatingPointError("the detector's class scores are no numbers")
            return finish(classes, masks, batch.shape[-2:], inside, size, self.floor)

    def identity(self) -> dict[str, Any]:
        """What decides the detections."""
        return {
            "name": "mask2former-swin-s",
            "sha256": self.weights,
            "source_sha256": self.source,
            "dtype": "float32",
        }

    def move(self, device: torch.device) -> None:
        """Go to a device."""
        self.model.to(device)
        self.device = device


def _found(instance: Instance) -> Found:
    box = tuple(float(side) for side in instance.box)
    return Found(CLASSES[instance.label], instance.score, box, float(instance.area), instance.mask)


def by_size(images: Sequence[Image.Image], most: int) -> Iterator[list[int]]:
    """Indices of images of one size, at most so many at a time, in the order of first sight."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, image in enumerate(images):
        groups.setdefault(image.size, []).append(index)
    for indices in groups.values():
        for start in range(0, len(indices), most):
            yield indices[start : start + most]
