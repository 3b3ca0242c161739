"""The pictures' half of the reference: patches, the released transforms, and the VAE, written out.

Used by `reference.py` alone; see there for what it is for and how to run it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor


def position_ids(rows: int, columns: int, side: int, interpolate: bool = False) -> Tensor:
    """Row of a fixed side x side table for every cell of a grid: [rows*columns], row-major.

    By default row*side + column; `interpolate` buckets fractional coordinates into the cells.
    """
    if interpolate:
        edges = torch.arange(1 / side, 1.0, 1 / side)
        row, column = (
            torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / n), edges, right=True)
            for n in (rows, columns)
        )
    else:
        row, column = torch.arange(rows), torch.arange(columns)
    return (row[:, None] * side + column[None, :]).flatten()


def patchify(image: Tensor, patch: int) -> Tensor:
    """[C, H, W] to [(H/p)*(W/p), p*p*C]; inner order (row in patch, column in patch, channel)."""
    _, height, width = image.shape
    cells = [
        image[:, y : y + patch, x : x + patch].permute(1, 2, 0).flatten()
        for y in range(0, height, patch)
        for x in range(0, width, patch)
    ]
    return torch.stack(cells)


def unpatchify(tokens: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """The inverse of `patchify`: [N, p*p*C] on `grid` to [C, rows*p, columns*p]."""
    rows, columns = grid
    cells = tokens.reshape(rows, columns, patch, patch, -1)
    return cells.permute(4, 0, 2, 1, 3).reshape(-1, rows * patch, columns * patch)


def resized_size(
    height: int, width: int, largest: int, smallest: int, stride: int, max_pixels: float
) -> tuple[int, int]:
    """(height, width) after the released resize rule; the pixel limit scales by the AREA ratio."""

    def scaled(scale: float, h: int, w: int) -> tuple[int, int]:
        sides = (max(stride, round(round(side * scale) / stride) * stride) for side in (h, w))
        return tuple(sides)

    scale = max(min(largest / max(height, width), 1.0), smallest / min(height, width))
    height, width = scaled(scale, height, width)
    if height * width > max_pixels:
        height, width = scaled(max_pixels / (height * width), height, width)
    if max(height, width) > largest:
        height, width = scaled(largest / max(height, width), height, width)
    return height, width


def to_pixels(picture: np.ndarray) -> Tensor:
    """uint8 [H, W, 3] to fp32 [3, H, W] in [-1, 1]."""
    return (torch.from_numpy(picture.copy()).permute(2, 0, 1).float() / 255 - 0.5) / 0.5


def to_uint8(pixels: Tensor) -> np.ndarray:
    """[3, H, W] to uint8 [H, W, 3], clamped and truncated as the original does."""
    return ((pixels * 0.5 + 0.5).clamp(0, 1) * 255).permute(1, 2, 0).to(torch.uint8).numpy()


def resize(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bicubic PIL resize of uint8 [H, W, 3]."""
    return np.array(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))


def count(weights: Mapping[str, Tensor], pattern: str) -> int:
    """How many consecutive numbers from 0 make `pattern` a key of the state dict."""
    n = 0
    while pattern.format(n) in weights:
        n += 1
    return n


class ReferenceVAE:
    """The FLUX autoencoder as functions of `weights` (the tensors of ae.safetensors).

    `scale` and `shift` map posterior means to latents: scale * (mean - shift).
    """

    def __init__(
        self, weights: Mapping[str, Tensor], scale: float, shift: float, groups: int
    ) -> None:
        self.weights, self.scale, self.shift, self.groups = weights, scale, shift, groups
        self.dtype = weights["encoder.conv_in.weight"].dtype

    def _conv(self, name: str, x: Tensor, stride: int = 1, padding: int | None = None) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        padding = weight.shape[-1] // 2 if padding is None else padding
        return F.conv2d(x, weight, self.weights[f"{name}.bias"], stride, padding)

    def _group_norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.group_norm(x, self.groups, weight, bias, eps=1e-6)

    def _residual(self, name: str, x: Tensor) -> Tensor:
        h = self._conv(f"{name}.conv1", F.silu(self._group_norm(f"{name}.norm1", x)))
        h = self._conv(f"{name}.conv2", F.silu(self._group_norm(f"{name}.norm2", h)))
        if f"{name}.nin_shortcut.weight" in self.weights:
            x = self._conv(f"{name}.nin_shortcut", x)
        return x + h

    def _middle(self, name: str, x: Tensor) -> Tensor:
        x = self._residual(f"{name}.block_1", x)
        h = self._group_norm(f"{name}.attn_1.norm", x)
        q, k, v = (self._conv(f"{name}.attn_1.{part}", h).flatten(2) for part in "qkv")
        weights = (q.transpose(1, 2) @ k / math.sqrt(q.shape[1])).softmax(-1)
        mixed = (v @ weights.transpose(1, 2)).reshape(h.shape)
        x = x + self._conv(f"{name}.attn_1.proj_out", mixed)
        return self._residual(f"{name}.block_2", x)

    def moments(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] to [B, 2*C, H/8, W/8]: means, then log-variances (unscaled)."""
        x = self._conv("encoder.conv_in", pixels.to(self.dtype))
        for level in range(count(self.weights, "encoder.down.{}.block.0.norm1.weight")):
            for i in range(count(self.weights, f"encoder.down.{level}.block.{{}}.norm1.weight")):
                x = self._residual(f"encoder.down.{level}.block.{i}", x)
            if f"encoder.down.{level}.downsample.conv.weight" in self.weights:
                x = F.pad(x, (0, 1, 0, 1))
                x = self._conv(f"encoder.down.{level}.downsample.conv", x, stride=2, padding=0)
        x = self._middle("encoder.mid", x)
        return self._conv("encoder.conv_out", F.silu(self._group_norm("encoder.norm_out", x)))

    def encode(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] to scaled posterior means [B, C, H/8, W/8]."""
        mean = self.moments(pixels).chunk(2, dim=1)[0]
        return self.scale * (mean - self.shift)

    def decode(self, latent: Tensor) -> Tensor:
        """Scaled latents [B, C, h, w] to pixels [B, 3, 8h, 8w], not clamped."""
        x = self._conv("decoder.conv_in", latent.to(self.dtype) / self.scale + self.shift)
        x = self._middle("decoder.mid", x)
        for level in reversed(range(count(self.weights, "decoder.up.{}.block.0.norm1.weight"))):
            for i in range(count(self.weights, f"decoder.up.{level}.block.{{}}.norm1.weight")):
                x = self._residual(f"decoder.up.{level}.block.{i}", x)
            if f"decoder.up.{level}.upsample.conv.weight" in self.weights:
                x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
                x = self._conv(f"decoder.up.{level}.upsample.conv", x)
        return self._conv("decoder.conv_out", F.silu(self._group_norm("decoder.norm_out", x)))
