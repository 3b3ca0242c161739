"""Training examples → packed rows → one forward with losses. The tokens are laid out by
`layout.py`.

Legend: B rows, U and G understanding and generation tokens of a row (padded), L = U + G in that
order, V ViT patches, S scored tokens, I images among the latents, C numbers a latent token.

    row = pack_row([[Piece(prompt), Piece(image, learn=True)], ...], frame, config)
    batch = collate([row, ...], latents, patches)
    out = training_forward(bagel, batch, times_I, noise_BGC)

A row holds several examples; they never see each other and their positions restart at 0. An image
with `learn` is a noised target, hidden from what follows; a text with `learn` is scored on all of
its ids and its end token. Source: BAGEL's packed training, held to the golden training tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from umm_reflect.attention import Attend, allowed
from umm_reflect.config import BagelConfig
from umm_reflect.context import ImageSegment, Segment, TextSegment
from umm_reflect.flow import interpolate
from umm_reflect.layout import (
    Block,
    Frame,
    grid_ids,
    latent_grid,
    row_tokens,
    segment_blocks,
    vae_block,
)
from umm_reflect.model import Bagel

NO_LABEL = -100
# Dense masks are used up to this many tokens a row; longer rows on a GPU take flex attention.
MAX_DENSE = 4096
# Tokens of each expert are padded to a multiple: kernels with a mask want 8, and flex attention, of
# long rows, is compiled for each length that comes.
MULTIPLE, LONG_MULTIPLE = 32, 1024


@dataclass(frozen=True)
class Piece:
    """One segment of a training example.

    learn: a text is scored, an image becomes a noised target. weights: one loss weight a scored
    label (ids, then the end). end_label: also score the end token's own position with this label.
    dropped: a condition that is left out; a text leaves no trace, an image still takes its
    position. Example: [Piece(prompt), Piece(image, learn=True)] is a text-to-image example.
    """

    segment: Segment
    learn: bool = False
    weights: tuple[float, ...] | None = None
    end_label: int | None = None
    dropped: bool = False


Example = Sequence[Piece]


@dataclass(frozen=True)
class PackedRow:
    """One row as numpy arrays, without padding. Arrays over L have the U tokens first, then the G.

    order_L: place in the sequence. block_L, sample_L: which block and example. label_U and
    weight_U: the token to predict from here (or NO_LABEL) and its loss weight. patch_U: places of
    ViT patches. cell_G, noised_G, image_G: table row, target or clean, and which of `vae_images` a
    latent is of.
    """

    ids_U: np.ndarray
    position_L: np.ndarray
    order_L: np.ndarray
    block_L: np.ndarray
    sample_L: np.ndarray
    full_L: np.ndarray
    noise_L: np.ndarray
    label_U: np.ndarray
    weight_U: np.ndarray
    patch_U: np.ndarray
    patch_cell_V: np.ndarray
    cell_G: np.ndarray
    noised_G: np.ndarray
    image_G: np.ndarray
    vit_images: tuple[ImageSegment, ...]
    vae_images: tuple[ImageSegment, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(U, G, V)."""
        return len(self.ids_U), len(self.cell_G), len(self.patch_U)


def example_blocks(
    example: Example, frame: Frame, config: BagelConfig
) -> tuple[list[Block], list[tuple[int, float]]]:
    """The blocks of one example, and (label, weight) for each token (NO_LABEL where none)."""
    blocks: list[Block] = []
    labels: list[tuple[int, float]] = []
    position = 0
    for piece in example:
        segment = piece.segment
        if piece.dropped:
            # a text that is dropped leaves no gap; an image keeps its positions (one a block)
            if isinstance(segment, ImageSegment):
                position += len(segment_blocks(segment, position, frame, config))
            continue
        if isinstance(segment, TextSegment):
            new = segment_blocks(segment, position, frame, config)
            labels += _text_labels(piece, frame)
        elif piece.learn:
            grid = latent_grid(segment, config)
            new = [vae_block(segment, grid, frame, position, noised=True)]
        else:
            new = segment_blocks(segment, position, frame, config)
        if isinstance(segment, ImageSegment):
            labels += [(NO_LABEL, 0.0)] * sum(block.length for block in new)
        blocks += new
        position = new[-1].next_position
    return blocks, labels


def _text_labels(piece: Piece, frame: Frame) -> list[tuple[int, float]]:
    ids = piece.segment.ids
    end = (NO_LABEL, 0.0) if piece.end_label is None else (piece.end_label, 1.0)
    if not piece.learn:
        return [(NO_LABEL, 0.0)] * (len(ids) + 1) + [end]
    labels = (*ids, frame.end)
    weights = piece.weights if piece.weights is not None else (1.0,) * len(labels)
    if len(weights) != len(labels):
        raise ValueError(f"{len(weights)} weights for {len(labels)} labels (ids and the end)")
    return [*zip(labels, weights, strict=True), end]


def pack_row(examples: Sequence[Example], frame: Frame, config: BagelConfig) -> PackedRow:
    """Lay several examples out one after another in one row."""
    blocks: list[list[Block]] = []
    labels: list[tuple[int, float]] = []
    for example in examples:
        new, new_labels = example_blocks(example, frame, config)
        blocks.append(new)
        labels += new_labels
    label, weight = (np.asarray(column) for column in zip(*labels, strict=True))
    return row_of_blocks(blocks, label, weight, config)


def row_of_blocks(
    examples: Sequence[Sequence[Block]], label: np.ndarray, weight: np.ndarray, config: BagelConfig
) -> PackedRow:
    """A row of examples that are laid out; label and weight: of each token, in sequence order."""
    blocks = [block for example in examples for block in example]
    lengths = [sum(block.length for block in example) for example in examples]
    sample = np.repeat(np.arange(len(examples)), lengths)
    tokens = row_tokens(blocks)
    und, gen = np.flatnonzero(~tokens.is_gen_L), np.flatnonzero(tokens.is_gen_L)
    both = np.concatenate([und, gen])
    patches, start = [], 0
    for block in blocks:
        if block.kind == "vit":
            patches.append(np.arange(start + 1, start + block.length - 1))
        start += block.length
    place = np.cumsum(~tokens.is_gen_L) - 1  # sequence place → place among the U
    vit = [block for block in blocks if block.kind == "vit"]
    vae = [block for block in blocks if block.kind == "vae"]
    none = np.zeros(0, np.int64)
    return PackedRow(
        ids_U=tokens.ids_L[und],
        position_L=tokens.position_L[both],
        order_L=both,
        block_L=tokens.block_L[both],
        sample_L=sample[both],
        full_L=tokens.full_L[both],
        noise_L=tokens.noise_L[both],
        label_U=label[und],
        weight_U=weight[und].astype(np.float32),
        patch_U=place[np.concatenate([none, *patches])],
        patch_cell_V=np.concatenate([none, *(grid_ids(b.grid, config.vit.grid_side) for b in vit)]),
        cell_G=np.concatenate([none, *(grid_ids(b.grid, config.latent_grid_side) for b in vae)]),
        noised_G=np.repeat([b.mode == "noise" for b in vae], [b.num_gen for b in vae]).astype(bool),
        image_G=np.repeat(np.arange(len(vae)), [b.num_gen for b in vae]),
        vit_images=tuple(block.image for block in vit),
        vae_images=tuple(block.image for block in vae),
    )


@dataclass
class PackedBatch:
    """Rows of equal padded size as tensors; names as in `PackedRow`, with leading B.

    patch_V: flat places row * U + u of all ViT patches, B * U for padding. score_S: flat places
    that are scored; label_S and weight_S belong to them (weight 0 is padding). latent_BGC: clean
    latents. image_BG: which entry of the times drawn for this batch a latent uses.
    """

    ids_BU: Tensor
    position_BL: Tensor
    order_BL: Tensor
    block_BL: Tensor
    sample_BL: Tensor
    full_BL: Tensor
    noise_BL: Tensor
    score_S: Tensor
    label_S: Tensor
    weight_S: Tensor
    patch_V: Tensor
    patch_cell_V: Tensor
    patches_VP: Tensor
    patch_lengths: list[int]
    latent_BGC: Tensor
    cell_BG: Tensor
    noised_BG: Tensor
    image_BG: Tensor
    num_images: int

    def to(self, device: torch.device | str) -> PackedBatch:
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


def stack_rows(
    rows: Sequence[PackedRow], sizes: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """The arrays over U, G and L of several rows, padded to `sizes` = (U, G): name → [B, ...].

    Padding tokens are an example of their own (sample -1) and see only their kind.
    """
    most = tuple(max(row.sizes[k] for row in rows) for k in (0, 1))
    pad_u, pad_g = sizes or most
    if most[0] > pad_u or most[1] > pad_g:
        raise ValueError(f"a row needs {most} tokens, but rows are padded to ({pad_u}, {pad_g})")

    def stacked(name: str, fill: int, dtype) -> Tensor:
        out = np.full((len(rows), pad_u + pad_g), fill, dtype)
        for i, row in enumerate(rows):
            values, u = getattr(row, name), len(row.ids_U)
            out[i, :u], out[i, pad_u : pad_u + len(row.cell_G)] = values[:u], values[u:]
        return torch.from_numpy(out)

    def part(name: str, size: int, fill: int, dtype) -> Tensor:
        out = np.full((len(rows), size), fill, dtype)
        for i, row in enumerate(rows):
            values = getattr(row, name)
            out[i, : len(values)] = values
        return torch.from_numpy(out)

    return {
        "position_BL": stacked("position_L", 0, np.int32),
        "order_BL": stacked("order_L", 0, np.int32),
        "block_BL": stacked("block_L", -1, np.int16),
        "sample_BL": stacked("sample_L", -1, np.int16),
        "full_BL": stacked("full_L", 0, bool),
        "noise_BL": stacked("noise_L", 0, bool),
        "ids_BU": part("ids_U", pad_u, 0, np.int32),
        "label_BU": part("label_U", pad_u, NO_LABEL, np.int32),
        "weight_BU": part("weight_U", pad_u, 0, np.float32),
        "cell_BG": part("cell_G", pad_g, 0, np.int32),
        "noised_BG": part("noised_G", pad_g, 0, bool),
        "image_BG": part("image_G", pad_g, 0, np.int32),
    }


def collate(
    rows: Sequence[PackedRow],
    latents: Sequence[Tensor],
    patches: Sequence[Tensor],
    sizes: tuple[int, int] | None = None,
) -> PackedBatch:
    """Rows, the clean latent tokens [n, C] of all their `vae_images` and the patches [n, P] of all
    their `vit_images` (in row order) → one batch. Raises ValueError when a row exceeds `sizes`.
    """
    arrays = stack_rows(rows, sizes)
    labels, weights = arrays.pop("label_BU"), arrays.pop("weight_BU")
    width = arrays["ids_BU"].shape[1]
    score = (labels.flatten() != NO_LABEL).nonzero().squeeze(1)
    patch = [torch.from_numpy(row.patch_U + i * width) for i, row in enumerate(rows)]
    cells = [torch.from_numpy(row.patch_cell_V) for row in rows]
    offsets = np.cumsum([0, *(len(row.vae_images) for row in rows)])
    assert len(latents) == offsets[-1], f"{len(latents)} latents for {offsets[-1]} images"
    channels = latents[0].shape[-1] if latents else 1
    latent = torch.zeros(*arrays["cell_BG"].shape, channels)
    for i, row in enumerate(rows):
        mine = latents[offsets[i] : offsets[i + 1]]
        if mine:
            latent[i, : len(row.cell_G)] = torch.cat([x.float().cpu() for x in mine])
    # a row without images pads with the last one, so that every place names a time
    first = offsets[:-1].clip(max=max(int(offsets[-1]) - 1, 0)).astype(np.int32)
    arrays["image_BG"] += torch.from_numpy(first)[:, None]
    return PackedBatch(
        **{name: t if t.dtype == torch.bool else t.long() for name, t in arrays.items()},
        score_S=score,
        label_S=labels.flatten()[score].long(),
        weight_S=weights.flatten()[score],
        patch_V=torch.cat(patch).long(),
        patch_cell_V=torch.cat(cells).long(),
        patches_VP=torch.cat(list(patches)) if patches else torch.zeros(0, 1),
        patch_lengths=[len(p) for p in patches],
        latent_BGC=latent,
        num_images=int(offsets[-1]),
    )


@dataclass
class TrainingOutput:
    """ce_S: cross-entropy of each scored token, fp32, unweighted; right_S: whether its label was
    the most likely token. velocity_BGC: predicted, fp32.

    embedded and hidden: what entered and left the decoder, per expert ([B * U, D], [B * G, D]).
    """

    ce_S: Tensor
    right_S: Tensor
    velocity_BGC: Tensor
    embedded: tuple[Tensor, Tensor]
    hidden: tuple[Tensor, Tensor]


def training_forward(
    bagel: Bagel,
    batch: PackedBatch,
    times_I: Tensor,
    noise_BGC: Tensor,
    *,
    recompute: bool = False,
) -> TrainingOutput:
    """One forward over packed rows. times_I: diffusion time of each image (clean ones ignore
    theirs).
    """
    rows, gen = batch.cell_BG.shape
    if gen:
        time_BG = torch.where(batch.noised_BG, times_I[batch.image_BG], 0.0)
        x_BGC = interpolate(batch.latent_BGC, noise_BGC, time_BG[..., None])
    else:
        x_BGC, time_BG = noise_BGC, batch.cell_BG.float()
    embedded, hidden = packed_forward(bagel, batch, x_BGC, time_BG, recompute=recompute)
    logits = bagel.logits(hidden[0].index_select(0, batch.score_S)).float()
    velocity = bagel.velocity(hidden[1]).float().unflatten(0, (rows, gen)) if gen else noise_BGC
    return TrainingOutput(
        ce_S=F.cross_entropy(logits, batch.label_S, reduction="none"),
        right_S=logits.detach().argmax(-1) == batch.label_S,
        velocity_BGC=velocity,
        embedded=embedded,
        hidden=hidden,
    )


def packed_forward(
    bagel: Bagel, batch: PackedBatch, x_BGC: Tensor, time_BG: Tensor, *, recompute: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What enters and what leaves the decoder, per expert ([B * U, D], [B * G, D]), with latents as
    they are given, at these diffusion times.
    """
    width, gen = batch.ids_BU.shape[1], batch.cell_BG.shape[1]
    x_UD = bagel.embed_ids(batch.ids_BU.flatten())
    if batch.patch_V.numel():
        patches = bagel.embed_patches(batch.patches_VP, batch.patch_cell_V, batch.patch_lengths)
        room = torch.cat([x_UD, x_UD.new_zeros(1, x_UD.shape[1])])  # the last place takes padding
        x_UD = room.index_copy(0, batch.patch_V, patches.to(room.dtype))[:-1]
    if gen:
        x_GD = bagel.embed_latents(x_BGC.flatten(0, 1), time_BG.flatten(), batch.cell_BG.flatten())
    else:
        x_GD = x_UD[:0]
    position_T = torch.cat(
        [batch.position_BL[:, :width].flatten(), batch.position_BL[:, width:].flatten()]
    )
    mask = attend(bagel, batch, (width, gen))
    return (x_UD, x_GD), bagel(x_UD, x_GD, position_T, mask, recompute=recompute)


def attend(bagel: Bagel, batch: PackedBatch, split: tuple[int, int]) -> Attend:
    """The mask of packed rows: dense, or flex blocks for long rows on a GPU."""
    rows, length = batch.block_BL.shape
    long = length > MAX_DENSE and bagel.device.type == "cuda"
    if bagel.attn == "flex" or (bagel.attn == "auto" and long):
        return Attend(rows=rows, queries=length, split=split, flex_mask=flex_mask(batch))
    return Attend(
        rows=rows, queries=length, split=split, mask=dense_mask(batch), backend=bagel.attn
    )


def dense_mask(batch: PackedBatch) -> Tensor:
    """[B, 1, L, L] bool: True where the query (row) may see the key (column)."""
    q, k = (slice(None), slice(None), None), (slice(None), None, slice(None))
    mask = allowed(
        batch.order_BL[q],
        batch.order_BL[k],
        batch.block_BL[q],
        batch.block_BL[k],
        batch.full_BL[k],
        batch.noise_BL[k],
    )
    return (mask & (batch.sample_BL[q] == batch.sample_BL[k]))[:, None]


def flex_mask(batch: PackedBatch):
    """The same rule as a block mask for flex attention."""
    from torch.nn.attention.flex_attention import create_block_mask

    order, block, sample = batch.order_BL, batch.block_BL, batch.sample_BL
    full, noise = batch.full_BL, batch.noise_BL

    def rule(b, h, q, k):
        seen = allowed(order[b, q], order[b, k], block[b, q], block[b, k], full[b, k], noise[b, k])
        return seen & (sample[b, q] == sample[b, k])

    rows, length = block.shape
    return create_block_mask(rule, rows, None, length, length, device=block.device)


def fill_bins(sizes: Sequence[tuple[int, ...]], capacity: tuple[int, ...]) -> list[list[int]]:
    """Best-fit decreasing: which items share a bin. sizes and capacity may have several measures.

    Every item lands in exactly one bin; raises ValueError for one that no bin can hold.
    """
    for index, size in enumerate(sizes):
        if any(s > c for s, c in zip(size, capacity, strict=True)):
            raise ValueError(f"item {index} has size {size}, more than a bin's {capacity}")
    bins: list[list[int]] = []
    room = np.zeros((len(sizes), len(capacity)), np.int64)
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
        left = room[: len(bins)] - np.asarray(sizes[i])
        fits = np.flatnonzero((left >= 0).all(1))
        if len(fits):
            best = int(fits[left[fits, 0].argmin()])
        else:
            best = len(bins)
            bins.append([])
            room[best] = capacity
        bins[best].append(i)
        room[best] -= sizes[i]
    return bins
