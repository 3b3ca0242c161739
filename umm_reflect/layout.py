"""The sequence format, and the only place that knows it: segments → tokens, positions, modes.

    segment                     tokens                           positions           mode    hidden?
    text                        start, ids ..., end              p, p + 1, ...       causal  no
    image, VAE block (clean)    image_start, latents, image_end  all p, then p += 1  full    no
    image, ViT block            image_start, patches, image_end  all p, then p += 1  full    no
    image being drawn, noised   image_start, latents, image_end  all p, p stays      noise   yes
    text said, then replaced    start, ids ...                   p ..., p stays      aside   yes

hidden: from all later tokens. A full or noised block sees all of itself and all before it. A text
aside (replay alone has it) is what was sampled where later tokens see its canonical form.
An image that enters as "vae+vit" is a VAE block followed by a ViT block. Only latent tokens use
the generation expert; text, patches and all markers use the understanding expert. A clean copy
that follows a noised target gets the target's own position. Source: BAGEL, recorded in the golden
tensors.

Everything that runs the transformer (prefill in pieces or at once, say, draw, packed training,
replay) builds its tokens here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from umm_reflect.config import BagelConfig
from umm_reflect.context import ImageSegment, TextSegment
from umm_reflect.images import grid_positions

Kind = Literal["text", "vae", "vit"]
Mode = Literal["causal", "full", "noise", "aside"]


@dataclass(frozen=True)
class Frame:
    """Ids of the four tokens that frame segments, as the tokenizer names them."""

    start: int
    end: int
    image_start: int
    image_end: int


@dataclass(frozen=True)
class Block:
    """A run of tokens of one segment that share an attention mode.

    Example: a 64x96 px picture as VAE block at position 3 has kind "vae", length 26 (4 x 6 latent
    tokens and two markers), ids (image_start, image_end), position 3, mode "full".
    """

    kind: Kind
    length: int
    ids: tuple[int, ...]
    position: int
    mode: Mode
    grid: tuple[int, int] = (0, 0)
    image: ImageSegment | None = None

    @property
    def num_gen(self) -> int:
        """Tokens of this block that use the generation expert."""
        return self.length - 2 if self.kind == "vae" else 0

    @property
    def hidden(self) -> bool:
        """Whether later tokens do not see this block."""
        return self.mode in ("noise", "aside")

    @property
    def positions(self) -> np.ndarray:
        if self.kind == "text":
            return np.arange(self.position, self.position + self.length)
        return np.full(self.length, self.position)

    @property
    def next_position(self) -> int:
        if self.hidden:
            return self.position
        return self.position + (self.length if self.kind == "text" else 1)


def text_block(ids: Sequence[int], position: int, *, aside: bool = False) -> Block:
    """A causal run of token ids exactly as given (a whole framed text, or a piece of one)."""
    return Block("text", len(ids), tuple(ids), position, "aside" if aside else "causal")


def vae_block(
    image: ImageSegment | None, grid: tuple[int, int], frame: Frame, position: int, *, noised: bool
) -> Block:
    ids = (frame.image_start, frame.image_end)
    mode: Mode = "noise" if noised else "full"
    return Block("vae", grid[0] * grid[1] + 2, ids, position, mode, grid, image)


def segment_blocks(
    segment: TextSegment | ImageSegment, position: int, frame: Frame, config: BagelConfig
) -> list[Block]:
    """The blocks of one segment that starts at RoPE position `position`."""
    if isinstance(segment, TextSegment):
        return [text_block((frame.start, *segment.ids, frame.end), position)]
    blocks = []
    if segment.vae_pixels is not None or segment.latent is not None:
        grid = latent_grid(segment, config)
        blocks.append(vae_block(segment, grid, frame, position, noised=False))
        position += 1
    if segment.vit_pixels is not None:
        rows, cols = (side // config.vit.patch_size for side in segment.vit_pixels.shape[-2:])
        ids = (frame.image_start, frame.image_end)
        blocks.append(Block("vit", rows * cols + 2, ids, position, "full", (rows, cols), segment))
    assert blocks, "an image segment enters as at least one block"
    return blocks


def segment_length(segment: TextSegment | ImageSegment, config: BagelConfig) -> int:
    """How many tokens its blocks have together."""
    if isinstance(segment, TextSegment):
        return len(segment.ids) + 2
    length = 0
    if segment.has_vae:
        rows, cols = latent_grid(segment, config)
        length += rows * cols + 2
    if segment.has_vit:
        height, width = segment.vit_pixels.shape[-2:]
        length += (height // config.vit.patch_size) * (width // config.vit.patch_size) + 2
    return length


def latent_grid(segment: ImageSegment, config: BagelConfig) -> tuple[int, int]:
    """Rows and columns of latent tokens of an image; raises ValueError when the model's grid
    cannot hold them.
    """
    if segment.latent is not None:
        height, width = segment.latent.shape[-2:]
        rows, cols = height // config.latent_patch_size, width // config.latent_patch_size
    else:
        height, width = segment.vae_pixels.shape[-2:]
        rows, cols = height // config.latent_stride, width // config.latent_stride
    check_grid(rows, cols, config.latent_grid_side, config.latent_stride)
    return rows, cols


def check_grid(rows: int, cols: int, side: int, stride: int) -> None:
    if not (0 < rows <= side and 0 < cols <= side):
        raise ValueError(
            f"a picture of {rows * stride}x{cols * stride} px needs a {rows}x{cols} grid; "
            f"this model holds 1 to {side} cells a side: use {stride} to {side * stride} px"
        )


@dataclass(frozen=True)
class Row:
    """One sequence of a batch: blocks that are new, after `past` tokens that are cached."""

    blocks: tuple[Block, ...]
    past: int = 0

    @property
    def length(self) -> int:
        return sum(block.length for block in self.blocks)


@dataclass(frozen=True)
class RowTokens:
    """The tokens of one row in sequence order, as flat arrays over its L new tokens.

    is_gen_L: bool, uses the generation expert. ids_L: token id (0 where a patch or latent stands).
    position_L: RoPE position. block_L: index of the block. full_L: sees its whole block. noise_L:
    hidden from other blocks.
    """

    ids_L: np.ndarray
    is_gen_L: np.ndarray
    position_L: np.ndarray
    block_L: np.ndarray
    full_L: np.ndarray
    noise_L: np.ndarray


def row_tokens(blocks: Sequence[Block]) -> RowTokens:
    """Lay blocks out as per-token arrays (source of the mask rule: `attention.allowed`)."""
    ids, gen = [], []
    for block in blocks:
        if block.kind == "text":
            ids.append(np.asarray(block.ids))
            gen.append(np.zeros(block.length, bool))
        else:
            row = np.zeros(block.length, np.int64)
            row[0], row[-1] = block.ids
            ids.append(row)
            inner = np.zeros(block.length, bool)
            inner[1:-1] = block.kind == "vae"
            gen.append(inner)
    lengths = [block.length for block in blocks]
    return RowTokens(
        ids_L=np.concatenate(ids).astype(np.int64),
        is_gen_L=np.concatenate(gen),
        position_L=np.concatenate([block.positions for block in blocks]),
        block_L=np.repeat(np.arange(len(blocks)), lengths),
        full_L=np.repeat([block.mode in ("full", "noise") for block in blocks], lengths),
        noise_L=np.repeat([block.hidden for block in blocks], lengths),
    )


@functools.lru_cache(maxsize=256)
def grid_ids(grid: tuple[int, int], side: int) -> np.ndarray:
    """Position-table rows of a grid, row * side + column: [rows * cols], not to be written to."""
    return grid_positions(*grid, side).numpy()
