"""From the plan to what a forward takes: lengths of rows, dropout, pieces, latents, times, noise.

    measured = measure(rows, planner, frame, config)              # planner: Layer(stand_ins=True)
    read = read_pack(pack, rows, layer, mixture.dropout, seed)    # in a worker: decodes pictures
    row = pack_row(read.examples, frame, config)
    names = image_names(row, read.drawn)                          # (row number, which, noised)
    latents = encode(vae, row.vae_images, names, seed, mixture.condition_latents)
    batch = collate([row], latents, patches)
    times_I, noise_BGC = image_times(names, seed, shift), image_noise(batch, names, seed)

Every draw is named by the seed and the number of the row in the plan, and for images by which image
of the row it is. So neither the pack a row lies in nor the process that reads it changes anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_all_start_methods, get_context

import numpy as np
import torch
from torch import Tensor

from sft.mixture import Drawn, Dropout, Latents, Measured, Pack
from sft.pictures import BadRow
from sft.rows import Branch, Kind, Laid, Layer, Row
from umm_reflect.autoencoder import AutoEncoder
from umm_reflect.config import BagelConfig
from umm_reflect.context import ImageSegment
from umm_reflect.flow import sample_times
from umm_reflect.images import patchify_latent
from umm_reflect.layout import Frame, latent_grid, segment_blocks, vae_block
from umm_reflect.packing import Example, PackedBatch, PackedRow, Piece
from umm_reflect.rng import stream

DRAWING: tuple[Kind, ...] = ("transition", "anchor")  # kinds that guidance has branches of
NO_GRID = "a picture larger than the model's grid"
CHUNK = 512  # rows that a process measures at a time


# --- lengths --------------------------------------------------------------------------------------


def tokens_of(pieces: Sequence[Piece], frame: Frame, config: BagelConfig) -> int:
    """Length of an example before anything is dropped. Errors: ValueError, as `latent_grid`."""
    total = 0
    for piece in pieces:
        segment = piece.segment
        if isinstance(segment, ImageSegment) and piece.learn:
            grid = latent_grid(segment, config)
            total += vae_block(segment, grid, frame, 0, noised=True).length
        else:
            total += sum(block.length for block in segment_blocks(segment, 0, frame, config))
    return total


def measure(
    rows: Mapping[Kind, Sequence[Row]],
    planner: Layer,
    frame: Frame,
    config: BagelConfig,
    workers: int = 0,
) -> Measured:
    """The length of every row. planner: a `Layer` with stand-ins, which reads no pixels.

    A row that cannot be laid out (its picture is missing, too large for the grid, ...) has length 0
    and is counted under the rule that it breaks. workers: processes that share the work; 0 does it
    here (.3 to 2 ms a row, most of it for the tokenizer).
    """
    if not planner.stand_ins:
        raise ValueError("measure takes a Layer with stand_ins=True, or every picture is decoded")
    length = partial(_length, planner=planner, frame=frame, config=config)
    parts = [(kind, start) for kind, some in rows.items() for start in range(0, len(some), CHUNK)]
    tokens: dict[Kind, list[int]] = {kind: [] for kind in rows}
    skipped: dict[Kind, Counter[str]] = {kind: Counter() for kind in rows}
    with ExitStack() as stack:
        run = map
        _keep(length, rows)
        if workers and len(parts) > 1:
            # a forked process has the rows already; another one is sent them once
            forks = "fork" in get_all_start_methods()
            context = get_context("fork" if forks else "spawn")
            given = {} if forks else {"initializer": _keep, "initargs": (length, rows)}
            pool = ProcessPoolExecutor(min(workers, len(parts)), context, **given)
            run = stack.enter_context(pool).map
        for (kind, _), found in zip(parts, run(_lengths, parts), strict=True):
            tokens[kind] += [one if isinstance(one, int) else 0 for one in found]
            skipped[kind].update(one for one in found if isinstance(one, str))
    _KEPT.clear()
    return Measured({kind: np.array(some, np.int64) for kind, some in tokens.items()}, skipped)


_KEPT: list = []  # of a process that measures: how, and the rows


def _keep(length: Callable[[Row], int | str], rows: Mapping[Kind, Sequence[Row]]) -> None:
    _KEPT[:] = [length, rows]


def _lengths(part: tuple[Kind, int]) -> list[int | str]:
    (kind, start), (length, rows) = part, _KEPT
    return [length(row) for row in rows[kind][start : start + CHUNK]]


def _length(row: Row, planner: Layer, frame: Frame, config: BagelConfig) -> int | str:
    """The length of a row, or why it cannot be laid out."""
    try:
        pieces = planner.lay(row).pieces
    except BadRow as error:
        return str(error.rule)
    try:
        return tokens_of(pieces, frame, config)
    except ValueError:  # of `latent_grid`
        return NO_GRID


# --- dropout --------------------------------------------------------------------------------------


def branch_of(kind: Kind, dropout: Dropout, generator: torch.Generator) -> Branch:
    """By lot, the branch of guidance that a row is laid out as; always "conditional" for rows that
    learn turns.
    """
    if kind not in DRAWING or not (dropout.text_uncond or dropout.image_uncond):
        return "conditional"
    lot = float(torch.rand((), generator=generator))
    if lot < dropout.text_uncond:
        return "text_uncond"
    return "image_uncond" if lot < dropout.text_uncond + dropout.image_uncond else "conditional"


def drop_segments(laid: Laid, dropout: Dropout, generator: torch.Generator) -> tuple[Piece, ...]:
    """The pieces, each droppable one left out with the probability of its kind."""
    odds = {"text": dropout.text, "vit": dropout.vit, "vae": dropout.vae}
    pieces = []
    for piece, droppable in zip(laid.pieces, laid.droppable, strict=True):
        gone = droppable and float(torch.rand((), generator=generator)) < odds[droppable]
        pieces.append(replace(piece, dropped=True) if gone else piece)
    return tuple(pieces)


@dataclass(frozen=True)
class Read:
    """A pack as it is trained: examples for `pack_row`, and the rows that they are of.

    bad: rows whose pictures turned out unusable, with what is wrong; the pack goes without them.
    """

    drawn: tuple[Drawn, ...]
    examples: tuple[Example, ...]
    bad: tuple[tuple[Drawn, BadRow], ...]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Of the examples, in order: what `loss.tallied` wants to know."""
        return tuple(drawn.kind for drawn in self.drawn)


def read_pack(
    pack: Pack, rows: Mapping[Kind, Sequence[Row]], layer: Layer, dropout: Dropout, seed: int
) -> Read:
    """Lays the rows of a pack out, reads their pictures, and drops what the lots say."""
    drawn: list[Drawn] = []
    examples: list[Example] = []
    bad: list[tuple[Drawn, BadRow]] = []
    for one in pack:
        generator = stream(seed, one.number, 0, "dropout")
        branch = branch_of(one.kind, dropout, generator)
        try:
            laid = layer.lay(rows[one.kind][one.index], branch)
        except BadRow as error:
            bad.append((one, error))
            continue
        drawn.append(one)
        independent = dropout.independent
        examples.append(drop_segments(laid, dropout, generator) if independent else laid.pieces)
    return Read(tuple(drawn), tuple(examples), tuple(bad))


# --- latents, times and noise ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageName:
    """One of a row's `vae_images`: number of its row in the plan, which of that row's, a target?"""

    number: int
    which: int
    noised: bool

    def stream(self, seed: int, purpose: str) -> torch.Generator:
        return stream(seed, self.number, self.which, purpose)


def image_names(row: PackedRow, drawn: Sequence[Drawn]) -> list[ImageName]:
    """The names of the row's `vae_images`, in their order. drawn: of each of its examples."""
    _, first = np.unique(row.image_G, return_index=True)
    samples = row.sample_L[len(row.ids_U) :][first]
    seen: Counter[int] = Counter()
    names = []
    for sample, noised in zip(samples.tolist(), row.noised_G[first].tolist(), strict=True):
        names.append(ImageName(drawn[sample].number, seen[sample], noised))
        seen[sample] += 1
    return names


def encode(
    vae: AutoEncoder,
    images: Sequence[ImageSegment],
    names: Sequence[ImageName],
    seed: int,
    condition_latents: Latents,
    patch: int = 2,
) -> list[Tensor]:
    """Clean latent tokens [n, C] of each image, encoded at its own size, never padded.

    Targets are sampled from the posterior; images to look at too, or with "mean" not, as they enter
    at inference. Each image has a noise of its own, named by its row.
    """
    sampled = [name.noised or condition_latents == "sampled" for name in names]
    latents: list[Tensor | None] = [None] * len(images)
    for wanted in (True, False):
        some = [i for i, it in enumerate(sampled) if it is wanted]
        streams = [names[i].stream(seed, "posterior") for i in some] if wanted else None
        pixels = [images[i].vae_pixels for i in some]
        with torch.no_grad():
            encoded = vae.encode_images(pixels, streams)
        for i, latent in zip(some, encoded, strict=True):
            latents[i] = patchify_latent(latent, patch)
    return latents


def image_times(names: Sequence[ImageName], seed: int, timestep_shift: float) -> Tensor:
    """[I] fp32: the diffusion time of each image (clean ones ignore theirs)."""
    times = [sample_times(1, timestep_shift, name.stream(seed, "time")) for name in names]
    return torch.cat(times) if times else torch.zeros(0)


def image_noise(batch: PackedBatch, names: Sequence[ImageName], seed: int) -> Tensor:
    """[B, G, C] fp32 on the CPU: the noise of each noised image, 0 elsewhere.

    names: of all images of the batch, row after row.
    """
    noise = torch.zeros(batch.latent_BGC.shape)
    noised, image = batch.noised_BG.cpu(), batch.image_BG.cpu()
    for number, name in enumerate(names):
        if name.noised:
            here = noised & (image == number)
            drawn = torch.randn(
                int(here.sum()), noise.shape[-1], generator=name.stream(seed, "noise")
            )
            noise[here] = drawn
    return noise
