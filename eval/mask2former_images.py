"""Before and after the detector, as mmdet does it: pixels in, instances with boxes and masks out.

    batch, inside = prepare(pixels)              # [B, H, W, 3] uint8 of one size -> model's input
    instances = finish(classes, masks, batch.shape[-2:], inside, (height, width))

This is not the library's image processor, which resizes with a smoothing filter, pads with zeros
after normalising, scores masks of 384 x 384 and gives no boxes: its scores are others.

Axes: B images, Q queries, K classes, H and W pixels, N instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LONG_SIDE, SHORT_SIDE = 1333, 800  # an image is scaled until it fits: as large as both allow
PAD_TO = 32  # sides are padded to a multiple of this, at the right and the bottom
PAD_LEVEL = 128  # grey level of the padding, before it is normalised
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # red, green, blue
MOST_INSTANCES = 100  # (query, class) pairs of an image, the likeliest


@dataclass(frozen=True)
class Mask:
    """The pixels of an instance: one bit each, of the box alone. box: (x0, y0, x1, y1), whole
    pixels, x1 and y1 past the end."""

    box: tuple[int, int, int, int]
    bits: bytes

    @classmethod
    def of(cls, mask: np.ndarray, box: tuple[int, int, int, int]) -> Mask:
        """mask: [H, W] bool of the whole image."""
        x0, y0, x1, y1 = box
        return cls(box, np.packbits(mask[y0:y1, x0:x1]).tobytes())

    def inside_box(self) -> np.ndarray:
        """[height, width] bool of the box."""
        height, width = self.box[3] - self.box[1], self.box[2] - self.box[0]
        bits = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=height * width)
        return bits.reshape(height, width).astype(bool)


@dataclass(frozen=True)
class Instance:
    """One object found. label: index of the class. score: class probability times how sure its
    mask is. box: as in `Mask`, (0, 0, 0, 0) and no mask if no pixel is in it. area: pixels."""

    label: int
    score: float
    box: tuple[int, int, int, int]
    area: int
    mask: Mask | None


def scaled_size(height: int, width: int) -> tuple[int, int]:
    """(height, width) at which an image is looked at: 512 x 512 becomes 800 x 800."""
    scale = min(LONG_SIDE / max(height, width), SHORT_SIDE / min(height, width))
    return max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))


def prepare(pixels_BHWC: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """(normalised input [B, 3, H', W'] fp32 with padding, the size of the image inside it).

    pixels: uint8 RGB on the device that is to compute. Bilinear without a smoothing filter (as
    OpenCV), rounded to whole levels.
    """
    pixels = pixels_BHWC.permute(0, 3, 1, 2).float()
    height, width = scaled_size(*pixels.shape[-2:])
    pixels = F.interpolate(pixels, (height, width), mode="bilinear", align_corners=False)
    pixels = pixels.round().clamp(0, 255)
    right, below = -width % PAD_TO, -height % PAD_TO
    pixels = F.pad(pixels, (0, right, 0, below), value=PAD_LEVEL)
    mean, std = (pixels.new_tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std, (height, width)


def finish(
    classes_BQK: Tensor,
    masks_BQHW: Tensor,
    padded: Sequence[int],
    inside: tuple[int, int],
    size: tuple[int, int],
    floor: float = 0.0,
) -> list[list[Instance]]:
    """The instances of each image, best first; mmdet's formulas.

    classes: logits of K classes and "nothing", the last. masks: logits on a coarser grid.
    padded, inside, size: (height, width) of the input, of the image in it, of the image as given.
    floor: instances that cannot score more than this are left out, which saves resizing their masks
    (a score is at most the class probability).
    """
    found = []
    for classes_QK, masks_QHW in zip(classes_BQK, masks_BQHW, strict=True):
        probabilities = classes_QK.float().softmax(-1)[:, :-1]
        many = probabilities.shape[1]
        flat = probabilities.flatten()
        best, order = flat.topk(min(MOST_INSTANCES, flat.numel()))
        kept = int((best > floor).sum())
        best, order = best[:kept], order[:kept]
        if not kept:
            found.append([])
            continue
        queries, which = torch.unique(order // many, return_inverse=True)
        masks_NHW = _full_masks(masks_QHW[queries].float(), padded, inside, size)
        found.append(_instances(best, order % many, which, masks_NHW, floor))
    return found


def _full_masks(masks_NHW: Tensor, padded, inside, size) -> Tensor:
    """Mask logits at the size of the image: up to the padded input, cut, and resized again."""
    masks = masks_NHW[None]
    masks = F.interpolate(masks, tuple(padded), mode="bilinear", align_corners=False)
    masks = masks[..., : inside[0], : inside[1]]
    return F.interpolate(masks, tuple(size), mode="bilinear", align_corners=False)[0]


def _instances(best, labels, which, masks_NHW: Tensor, floor: float) -> list[Instance]:
    """Instances of one image. best, labels, which: class probability, class, row of the masks."""
    binary = masks_NHW > 0
    area = binary.sum((1, 2))
    sureness = (masks_NHW.sigmoid() * binary).sum((1, 2)) / (area + 1e-6)
    boxes = _boxes(binary)
    scores = best * sureness[which]
    seen = (scores > floor).nonzero()[:, 0]
    rows = torch.unique(which[seen])
    on_host = dict(zip(rows.tolist(), binary[rows].cpu().numpy(), strict=True))
    areas, corners = area.tolist(), [tuple(box) for box in boxes.tolist()]
    packed = {
        row: Mask.of(mask, corners[row]) if areas[row] else None for row, mask in on_host.items()
    }
    instances = [
        Instance(label, score, corners[row], areas[row], packed[row])
        for score, label, row in zip(
            scores[seen].tolist(), labels[seen].tolist(), which[seen].tolist(), strict=True
        )
    ]
    return sorted(instances, key=lambda instance: -instance.score)


def _boxes(binary_NHW: Tensor) -> Tensor:
    """[N, 4] whole numbers: the tight box (x0, y0, x1 + 1, y1 + 1) of each mask, zeros if empty."""
    sides = []
    for axis in (1, 2):  # over rows: the columns that are touched; over columns: the rows
        touched = binary_NHW.any(axis).int()
        first = touched.argmax(1)
        last = touched.shape[1] - touched.flip(1).argmax(1)
        sides.append(torch.stack([first, last], 1))
    boxes = torch.stack([sides[0][:, 0], sides[1][:, 0], sides[0][:, 1], sides[1][:, 1]], 1)
    return boxes * binary_NHW.any(1).any(1)[:, None]
