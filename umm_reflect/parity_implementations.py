"""What parity asks of an implementation, and the naive reference as one.

`umm-reflect parity` (parity.py) drives anything that has these operations: the reference, here, and
`FastImplementation` (parity_fast.py), which is the code that the product runs.

Axes: L tokens of a context, n latent tokens of all pictures of a call, D = patch*patch*channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from umm_reflect import reference, reference_pictures
from umm_reflect.reference import Prefill, Text, ViTImage, ViTStages


@dataclass(frozen=True, eq=False)
class VAEPicture:
    """A clean picture that enters a context as latents: pixels [3, H, W] in [-1, 1]."""

    pixels: Tensor


ContextPart = Text | ViTImage | VAEPicture
GoldenContext = Sequence[ContextPart]


@dataclass(frozen=True)
class SizeRule:
    """A resize rule: `max_pixels` already divided by the number of pictures."""

    max_size: int
    min_size: int
    stride: int
    max_pixels: float = 14 * 14 * 9 * 1024


@dataclass(frozen=True)
class Branches:
    """The three contexts that one picture is drawn from."""

    cond: GoldenContext
    text_uncond: GoldenContext
    image_uncond: GoldenContext


@dataclass(frozen=True)
class Guidance:
    """The settings of one drawing case."""

    points: int
    shift: float
    text_scale: float
    image_scale: float
    interval: tuple[float, float]
    renorm: str
    renorm_min: float
    norm_over: Literal["image", "call"]


@dataclass(frozen=True)
class Drawing:
    """A drawing of one call: the pictures' tokens are concatenated (n of all pictures).

    times [points]; cond, text_uncond, image_uncond, guided [points - 1, n, D]: velocities at the
    GIVEN x (zeros where a branch is not needed); x [points, n, D]: the implementation's own run
    from x[0]; latents and images: one [C, h, w] and one [3, H, W] a picture, of that run.
    """

    times: Tensor
    on: list[bool]
    cond: Tensor
    text_uncond: Tensor
    image_uncond: Tensor
    guided: Tensor
    x: Tensor
    latents: list[Tensor]
    images: list[Tensor]


@dataclass(frozen=True, eq=False)
class TrainText:
    """A framed text; `labels` maps an offset in the framed text to the id to predict there."""

    ids: tuple[int, ...]
    labels: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class TrainLatents:
    """A VAE picture: clean tokens [N, D] on grid; raw time (-inf = clean); noise [N, D]."""

    tokens: Tensor
    grid: tuple[int, int]
    raw_time: float
    noise: Tensor

    @property
    def noised(self) -> bool:
        return self.raw_time != float("-inf")


TrainPart = TrainText | ViTImage | TrainLatents


@dataclass(frozen=True)
class Training:
    """A training forward and backward over all samples, concatenated in order (L tokens).

    ce [scored tokens] and mse [noised tokens, D] are unreduced; loss is [total, ce, mse] with
    total = mean ce + mean mse; gradients are of the total, None for a tensor that is not trained.
    """

    position_ids: Tensor
    attention_mask: Tensor
    t: Tensor
    input_sequence: Tensor
    hidden: Tensor
    ce: Tensor
    mse: Tensor
    loss: Tensor
    gradients: Mapping[str, Tensor | None]


class Implementation(Protocol):
    """Everything that a golden folder records, as operations. Tensors are fp32 on the CPU."""

    name: str
    special_ids: Mapping[str, int]  # start, end, image_start, image_end, pad
    vit_side: int
    vit_patch: int
    latent_side: int
    latent_patch: int
    downsample: int  # pixels a side of one latent cell

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...

    def resized_size(self, rule: SizeRule, height: int, width: int) -> tuple[int, int]: ...
    def resize(self, picture: np.ndarray, rule: SizeRule) -> np.ndarray: ...
    def to_pixels(self, picture: np.ndarray) -> Tensor: ...
    def to_uint8(self, pixels: Tensor) -> np.ndarray: ...
    def patchify_pixels(self, image: Tensor, patch: int) -> Tensor: ...
    def patchify_latent(self, latent: Tensor, patch: int) -> Tensor: ...

    def position_ids(self, rows: int, columns: int, side: int, interpolate: bool) -> Tensor: ...
    def position_table(self, side: int, width: int) -> Tensor: ...
    def time_features(self, t: Tensor) -> Tensor: ...
    def time_embedding(self, t: Tensor) -> Tensor: ...
    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]: ...

    def prefill(self, contexts: Sequence[GoldenContext]) -> list[Prefill]: ...
    def greedy(self, context: GoldenContext, steps: int) -> tuple[list[int], Tensor]: ...
    def vit(self, images: Sequence[Tensor]) -> ViTStages: ...
    def vae_moments(self, pixels: Tensor) -> Tensor: ...
    def vae_encode(self, pixels: Tensor) -> Tensor: ...
    def vae_decode(self, latent: Tensor) -> Tensor: ...

    def schedule(self, points: int, shift: float) -> Tensor: ...
    def guided_at(self, t: float, interval: tuple[float, float]) -> bool: ...
    def draw(
        self,
        branches: Sequence[Branches],
        grids: Sequence[tuple[int, int]],
        x: Tensor,
        guidance: Guidance,
    ) -> Drawing: ...

    def train(self, samples: Sequence[Sequence[TrainPart]], shift: float) -> Training: ...


class ReferenceImplementation:
    """The naive reference behind the operations that parity asks for."""

    name = "reference"

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = model = reference.Reference(folder, dtype)
        self.special_ids = {
            name: getattr(model, name)
            for name in ("start", "end", "image_start", "image_end", "pad")
        }
        self.vit_side, self.vit_patch = model.vit_side, model.patch
        self.latent_side, self.latent_patch = model.side, model.latent_patch
        self.downsample = model.downsample
        self.encode, self.decode = model.encode, model.decode
        self.rope, self.time_embedding = model.rope, model.time_embedding
        self.vae_moments, self.vae_encode = model.vae.moments, model.vae.encode
        self.vae_decode = model.vae.decode

    to_pixels = staticmethod(reference_pictures.to_pixels)
    to_uint8 = staticmethod(reference_pictures.to_uint8)
    patchify_pixels = staticmethod(reference_pictures.patchify)
    patchify_latent = staticmethod(reference_pictures.patchify)
    position_ids = staticmethod(reference_pictures.position_ids)
    position_table = staticmethod(reference.position_table)
    time_features = staticmethod(reference.time_features)
    schedule = staticmethod(reference.schedule)

    def resized_size(self, rule: SizeRule, height: int, width: int) -> tuple[int, int]:
        return reference_pictures.resized_size(
            height, width, rule.max_size, rule.min_size, rule.stride, rule.max_pixels
        )

    def resize(self, picture: np.ndarray, rule: SizeRule) -> np.ndarray:
        return reference_pictures.resize(picture, *self.resized_size(rule, *picture.shape[:2]))

    def guided_at(self, t: float, interval: tuple[float, float]) -> bool:
        return interval[0] < t <= interval[1]

    def _blocks(self, context: GoldenContext) -> list[reference.Block]:
        return [
            self.model.clean_image(part.pixels) if isinstance(part, VAEPicture) else part
            for part in context
        ]

    @torch.no_grad()
    def prefill(self, contexts: Sequence[GoldenContext]) -> list[Prefill]:
        return [self.model.prefill(self._blocks(context)) for context in contexts]

    @torch.no_grad()
    def greedy(self, context: GoldenContext, steps: int) -> tuple[list[int], Tensor]:
        return self.model.greedy(self._blocks(context), steps)

    @torch.no_grad()
    def vit(self, images: Sequence[Tensor]) -> ViTStages:
        stages = [self.model.vit(image) for image in images]
        return ViTStages(
            *(
                torch.cat([getattr(stage, name) for stage in stages])
                for name in ("patches", "position_ids", "tower", "connector", "embeddings")
            )
        )

    @torch.no_grad()
    def draw(
        self,
        branches: Sequence[Branches],
        grids: Sequence[tuple[int, int]],
        x: Tensor,
        guidance: Guidance,
    ) -> Drawing:
        model, g = self.model, guidance
        times = reference.schedule(g.points, g.shift)
        on = [self.guided_at(float(t), g.interval) for t in times[:-1]]
        lengths = [rows * columns for rows, columns in grids]
        whole = [sum(lengths)] if g.norm_over == "call" else lengths
        blocks = {
            name: [self._blocks(getattr(branch, name)) for branch in branches]
            for name in ("cond", "text_uncond", "image_uncond")
        }

        def velocity(name: str, x: Tensor, step: int, wanted: bool) -> Tensor:
            if not wanted:
                return torch.zeros_like(x)
            return torch.cat(
                [
                    model.velocity(context, part, grid, float(times[step]))
                    for context, part, grid in zip(
                        blocks[name], x.split(lengths), grids, strict=True
                    )
                ]
            )

        def all_velocities(x: Tensor, step: int) -> list[Tensor]:
            three = [
                velocity("cond", x, step, True),
                velocity("text_uncond", x, step, on[step] and g.text_scale > 1),
                velocity("image_uncond", x, step, on[step] and g.image_scale > 1),
            ]
            if not on[step]:
                return [*three, three[0]]
            guided = [
                reference.guide(*parts, g.text_scale, g.image_scale, g.renorm, g.renorm_min)
                for parts in zip(*(v.split(whole) for v in three), strict=True)
            ]
            return [*three, torch.cat(guided)]

        x = x.to(model.dtype)
        given = [all_velocities(x[step], step) for step in range(g.points - 1)]
        own = [x[0]]
        for step in range(g.points - 1):
            v = all_velocities(own[-1], step)[3]
            own.append(own[-1] - v * (times[step] - times[step + 1]))
        latents = [
            reference_pictures.unpatchify(part, grid, model.latent_patch)
            for part, grid in zip(own[-1].split(lengths), grids, strict=True)
        ]
        images = [model.vae.decode(latent[None])[0] for latent in latents]
        stacked = [torch.stack(v) for v in zip(*given, strict=True)]
        return Drawing(times, on, *stacked, torch.stack(own), latents, images)

    def train(self, samples: Sequence[Sequence[TrainPart]], shift: float) -> Training:
        """Each sample on its own, with its own dense mask; no packing."""
        model = self.model
        fixed = {"latent_pos_embed.pos_embed", "vit_pos_embed.pos_embed"}
        vae = ("encoder.", "decoder.")
        trained = {
            name: tensor
            for name, tensor in model.weights.items()
            if name not in fixed and not name.startswith(vae)
        }
        for tensor in trained.values():
            tensor.requires_grad_(True)
        try:
            sequences, hiddens, ce, mse, t_all = [], [], [], [], []
            for sample in samples:
                blocks, targets = [], []
                for part in sample:
                    if isinstance(part, TrainLatents):
                        s = torch.tensor(part.raw_time, dtype=model.dtype).sigmoid()
                        t = shift * s / (1 + (shift - 1) * s)
                        noisy = (1 - t) * part.tokens + t * part.noise
                        blocks.append(
                            reference.VAEImage(noisy, part.grid, float(t), noised=part.noised)
                        )
                        t_all.append(t.expand(len(part.tokens)))
                        targets.append(part.noise - part.tokens)
                    else:
                        blocks.append(Text(part.ids) if isinstance(part, TrainText) else part)
                        targets.append(None)
                sequence = model.lay_out(blocks)
                hidden, _ = model.forward(sequence)
                for number, (part, target) in enumerate(zip(sample, targets, strict=True)):
                    rows = hidden[sequence.block_of == number]
                    if isinstance(part, TrainText):
                        for offset, label in part.labels.items():
                            logits = model.logits(rows[offset])
                            ce.append(F.cross_entropy(logits, torch.tensor(label)))
                    elif isinstance(part, TrainLatents) and part.noised:
                        velocity = F.linear(
                            rows[1:-1],
                            model.weights["llm2vae.weight"],
                            model.weights["llm2vae.bias"],
                        )
                        mse.append((velocity - target) ** 2)
                sequences.append(sequence)
                hiddens.append(hidden)
            ce_all = torch.stack(ce) if ce else torch.zeros(0)
            mse_all = torch.cat(mse) if mse else torch.zeros(0, 0)
            parts = [
                losses.mean() if losses.numel() else torch.zeros(()) for losses in (ce_all, mse_all)
            ]
            total = parts[0] + parts[1]
            gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        finally:
            for tensor in trained.values():
                tensor.requires_grad_(False)
        return Training(
            position_ids=torch.cat([s.positions for s in sequences]),
            attention_mask=torch.block_diag(*(s.allowed.to(torch.uint8) for s in sequences)),
            t=torch.cat(t_all) if t_all else torch.zeros(0),
            input_sequence=torch.cat([s.embeddings for s in sequences]).detach(),
            hidden=torch.cat(hiddens).detach(),
            ce=ce_all.detach(),
            mse=mse_all.detach(),
            loss=torch.stack([total, *parts]).detach(),
            gradients={**dict.fromkeys(fixed), **dict(zip(trained, gradients, strict=True))},
        )
