"""What a training process is fed: packs that are read, laid out and numbered, as one buffer each.

    reader = Reader(rows, planner, frame, config, mixture, loss, seed)  # planner: with stand-ins
    parcel = reader(reader.task(packs, have={}))                        # sft/feed.py: by workers
    batch, times_I, noise_BGC, more = store.batch(parcel)               # sft/latents.py, on a GPU

A task is the packs of one forward; the parcel that comes of it holds all that does not need the
model: the tokens of `packing.collate`, times and noise of every image, and the pixels of images
that the device does not have yet. Everything is named by the seed and the number of a row in the
plan, so a parcel is the same whoever makes it and whenever. A forward without anything to learn
(fewer packs than processes, only unusable rows) is one empty text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sft.loss import KINDS, LossSettings
from sft.mixture import Drawn, Mixture, Pack
from sft.packs import ImageName, branch_of, drop_segments, image_names
from sft.pictures import BadRow, Rule
from sft.rows import Kind, Layer, Row, StandIn
from sft.weights import Decision, decisions
from umm_reflect.config import BagelConfig
from umm_reflect.context import TextSegment
from umm_reflect.flow import sample_times
from umm_reflect.images import Transforms
from umm_reflect.layout import Frame, latent_grid
from umm_reflect.packing import (
    LONG_MULTIPLE,
    MAX_DENSE,
    MULTIPLE,
    Example,
    PackedBatch,
    PackedRow,
    Piece,
    collate,
    pack_row,
)
from umm_reflect.rng import stream
from umm_reflect.training.flops import Work, work

EMPTY: Example = (Piece(TextSegment(())),)

ImageKey = tuple[str, str, int]  # "anchor" or "", uid, number of the image


def image_key(row: Row, number: int) -> ImageKey:
    """The name of a picture, which rows of several kinds share."""
    return (
        "anchor" if row.kind == "anchor" else "",
        row.uid if row.kind == "anchor" else row.record.uid,
        number,
    )


# --- what is asked for, and what comes ------------------------------------------------------------


class Task(NamedTuple):
    """The packs of one forward. known: for each of their rows, in order, the numbers of images
    (bit by bit) whose pixels need not be sent. decisions: also say which scored tokens are a score
    or an action.
    """

    packs: tuple[Pack, ...]
    known: tuple[int, ...]
    decisions: bool = False


class Fresh(NamedTuple):
    """Pictures of one size whose pixels are in the buffer. cells: rows and columns of patches.

    The i-th of these groups is "vae i" [pictures, H, W, 3] and "vit i" [pictures, n, P], uint8.
    """

    keys: tuple[ImageKey, ...]
    cells: tuple[int, int]


@dataclass
class Parcel:
    """One forward's worth of packs. Arrays lie in one buffer, so that they travel at once.

    latents, patches: keys of the images of each block, in order; sampled: whether a latent block is
    a sample of the posterior (its noise is in "posterior"). drawn: all rows, pack by pack.
    """

    buffer: Tensor | np.ndarray
    fields: dict[str, tuple[str, tuple[int, ...], int, int]]
    latents: list[ImageKey]
    noised: list[bool]
    sampled: list[bool]
    patches: list[ImageKey]
    patch_lengths: list[int]
    fresh: list[Fresh]
    counts: tuple[float, float]
    work: Work
    drawn: list[Drawn]
    bad: list[tuple[Drawn, str, Rule, str]]

    def pin_memory(self) -> Parcel:
        return replace(self, buffer=torch.as_tensor(self.buffer).pin_memory())

    def arrays(self, device: torch.device | str) -> dict[str, Tensor]:
        """All arrays on the device, as views of one copy of the buffer."""
        whole = torch.as_tensor(self.buffer).to(device, non_blocking=True)
        views = {}
        for name, (dtype, shape, start, end) in self.fields.items():
            views[name] = whole[start:end].view(getattr(torch, dtype)).view(shape)
        return views


def _buffer(arrays: Mapping[str, np.ndarray]) -> tuple[Tensor, dict]:
    """Arrays one after another at places that every type may begin at."""
    fields, start = {}, 0
    for name, array in arrays.items():
        fields[name] = (str(array.dtype), array.shape, start, start + array.nbytes)
        start += -(-array.nbytes // 16) * 16
    whole = np.zeros(start, np.uint8)
    for array, (*_, first, end) in zip(arrays.values(), fields.values(), strict=True):
        whole[first:end] = np.ascontiguousarray(array).view(np.uint8).ravel()
    return torch.from_numpy(whole), fields


# --- reading --------------------------------------------------------------------------------------


class Reader:
    """Makes parcels. planner: a `Layer` with stand-ins; pictures are opened here, once a parcel.

    Errors of single pictures are in the parcel (`bad`), and its packs go without those rows.
    """

    def __init__(
        self,
        rows: Mapping[Kind, Sequence[Row]],
        planner: Layer,
        frame: Frame,
        config: BagelConfig,
        mixture: Mixture,
        loss: LossSettings,
        seed: int,
    ):
        if not planner.stand_ins:
            raise ValueError("a Reader takes a Layer with stand_ins=True and opens pictures itself")
        self.rows, self.planner, self.frame, self.config = rows, planner, frame, config
        self.dropout, self.condition_latents = mixture.dropout, mixture.condition_latents
        self.shift, self.seed = loss.timestep_shift, seed

    def task(self, packs: Sequence[Pack], have: Mapping[ImageKey, object], **options) -> Task:
        """The task of these packs, where the images in `have` are on the device already."""
        known = []
        for pack in packs:
            for drawn in pack:
                row, bits = self.rows[drawn.kind][drawn.index], 0
                for number in range(len(row.record.images)) if have else ():
                    bits |= (image_key(row, number) in have) << number
                known.append(bits)
        return Task(tuple(packs), tuple(known), **options)

    def __call__(self, task: Task) -> Parcel:
        known = iter(task.known)
        fresh: dict[ImageKey, tuple[np.ndarray, np.ndarray, tuple[int, int]]] = {}
        examples: list[list[tuple[Drawn, Example]]] = []
        bad: list[tuple[Drawn, str, Rule, str]] = []
        for pack in task.packs:
            examples.append([])
            for drawn in pack:
                bits = next(known)
                try:
                    examples[-1].append((drawn, self._example(drawn, bits, fresh)))
                except BadRow as error:
                    uid = self.rows[drawn.kind][drawn.index].record.uid
                    bad.append((drawn, uid, error.rule, error.detail))
        examples = levelled(examples, self.config) if len(examples) > 1 else examples or [[]]
        used = [[drawn for drawn, _ in row] for row in examples]
        packed = [
            pack_row([example for _, example in row] or [EMPTY], self.frame, self.config)
            for row in examples
        ]
        names = [image_names(row, mine) for row, mine in zip(packed, used, strict=True)]
        return self._parcel(task, packed, used, [n for some in names for n in some], fresh, bad)

    def _example(self, drawn: Drawn, known: int, fresh: dict) -> Example:
        """The pieces of a row, its pictures opened. Errors: BadRow."""
        row = self.rows[drawn.kind][drawn.index]
        generator = stream(self.seed, drawn.number, 0, "dropout")
        laid = self.planner.lay(row, branch_of(drawn.kind, self.dropout, generator))
        pieces = laid.pieces
        if self.dropout.independent:
            pieces = drop_segments(laid, self.dropout, generator)
        for piece in pieces:
            image = piece.segment
            if piece.dropped or not isinstance(image, StandIn) or known >> image.number & 1:
                continue
            key = image_key(row, image.number)
            if key not in fresh:
                fresh[key] = opened(row, image.number, self.planner.transforms)
            if (vae := image.vae_pixels) is not None and fresh[key][0].shape[:2] != vae.shape[1:]:
                raise BadRow(Rule.IMAGE_CORRUPT, "it has another size than when it was checked")
        return pieces

    def _parcel(self, task, packed, used, names, fresh, bad) -> Parcel:
        most = [max(row.sizes[k] for row in packed) for k in (0, 1)]
        multiple = MULTIPLE if sum(most) <= MAX_DENSE else LONG_MULTIPLE
        u, g = (-(-size // multiple) * multiple for size in most)
        blocks = [image for row in packed for image in row.vae_images]
        looks = [image for row in packed for image in row.vit_images]
        cells = [latent_grid(image, self.config) for image in blocks]
        lengths = [_patches(image, self.config) for image in looks]
        # latents and patches are put in on the device: here they are one number wide
        none = [torch.zeros(rows * columns, 1) for rows, columns in cells]
        batch = collate(packed, none, [torch.zeros(n, 1) for n in lengths], (u, g))
        arrays = {
            name: _small(getattr(batch, name).numpy())
            for name in PackedBatch.__dataclass_fields__
            if name not in ("latent_BGC", "patches_VP", "patch_lengths", "num_images")
        }
        sampled = [name.noised or self.condition_latents == "sampled" for name in names]
        arrays |= self._draws(names, blocks, cells, sampled)
        width = batch.cell_BG.shape[1]
        places = [np.arange(len(row.cell_G)) + i * width for i, row in enumerate(packed)]
        arrays["latent_T"] = np.concatenate(places).astype(np.int32)
        arrays["noised_T"] = np.flatnonzero(batch.noised_BG.numpy().ravel()).astype(np.int32)
        arrays |= kinds_of(batch, used)
        if task.decisions:
            arrays |= decisions_of(packed, self.planner.tokens)
        sizes: dict[tuple, list[ImageKey]] = {}
        for key, (vae, _, cells) in fresh.items():
            sizes.setdefault((vae.shape, cells), []).append(key)
        for i, keys in enumerate(sizes.values()):
            for place, name in enumerate(("vae", "vit")):
                arrays[f"{name} {i}"] = np.stack([fresh[key][place] for key in keys])
        buffer, fields = _buffer(arrays)
        return Parcel(
            buffer=buffer,
            fields=fields,
            latents=[image_key(image.row, image.number) for image in blocks],
            noised=[name.noised for name in names],
            sampled=sampled,
            patches=[image_key(image.row, image.number) for image in looks],
            patch_lengths=lengths,
            fresh=[Fresh(tuple(keys), cells) for (_, cells), keys in sizes.items()],
            counts=(float(batch.weight_S.sum()), float(batch.noised_BG.sum())),
            work=work(packed),
            drawn=[drawn for mine in used for drawn in mine],
            bad=bad,
        )

    def _draws(
        self,
        names: Sequence[ImageName],
        blocks: Sequence[StandIn],
        cells: Sequence[tuple[int, int]],
        sampled: Sequence[bool],
    ) -> dict[str, np.ndarray]:
        """What is drawn by lot for each latent block.

        time_I: diffusion times, 0 where clean (one more where there is no block). noise_TC: of
        latents to draw, block after block. posterior: of the blocks `sampled_K`, likewise.
        """
        vae, width = self.config.vae, self.config.latent_dim
        times = np.zeros(max(len(names), 1), np.float32)
        noise, posterior = [torch.zeros(0, width)], [torch.zeros(0)]
        for i, (name, block, (rows, columns)) in enumerate(zip(names, blocks, cells, strict=True)):
            if name.noised:
                times[i] = sample_times(1, self.shift, name.stream(self.seed, "time")).item()
                generator = name.stream(self.seed, "noise")
                noise.append(torch.randn(rows * columns, width, generator=generator))
            if sampled[i]:
                sides = (side // vae.downsample for side in block.vae_pixels.shape[1:])
                generator = name.stream(self.seed, "posterior")
                drawn = torch.randn(vae.z_channels, *sides, generator=generator)
                posterior.append(drawn.flatten())
        return {
            "time_I": times,
            "noise_TC": torch.cat(noise).numpy(),
            "posterior": torch.cat(posterior).numpy(),
            "sampled_K": np.flatnonzero(sampled).astype(np.int32),
        }


def levelled(
    packs: Sequence[Sequence[tuple[Drawn, Example]]], config: BagelConfig
) -> list[list[tuple[Drawn, Example]]]:
    """The examples of packs that run side by side, spread so that all get about as many tokens of
    each expert: less is padded, and nothing else changes, as examples never see each other.
    """
    some = [one for pack in packs for one in pack]
    sizes = np.array([expert_tokens(example, config) for _, example in some]).reshape(-1, 2)
    # a mean of 1 a pack and expert, so that both count alike
    load = sizes * (len(packs) / sizes.sum(0).clip(1))
    filled, rows = np.zeros((len(packs), 2)), [[] for _ in packs]
    for i in np.argsort(-load.sum(1), kind="stable").tolist():
        row = int((filled + load[i]).max(1).argmin())
        filled[row] += load[i]
        rows[row].append(some[i])
    return rows


def expert_tokens(example: Example, config: BagelConfig) -> tuple[int, int]:
    """How many tokens of the understanding and of the generation expert an example has."""
    und = gen = 0
    for piece in example:
        image = piece.segment
        if piece.dropped:
            continue
        if isinstance(image, TextSegment):
            und += len(image.ids) + 2
            continue
        if image.vae_pixels is not None:
            rows, columns = latent_grid(image, config)
            und, gen = und + 2, gen + rows * columns
        if image.vit_pixels is not None and not piece.learn:
            und += _patches(image, config) + 2
    return und, gen


def opened(row: Row, number: int, transforms: Transforms) -> tuple:
    """A picture as (levels [H, W, 3] for the latents, patches [n, P], rows and columns of those).

    Errors: BadRow for one that cannot be used.
    """
    vae, vit = transforms.resized(row.record.images[number].load())
    patch = transforms.vit_patch
    rows, columns = vit.height // patch, vit.width // patch
    levels = np.asarray(vit).reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
    return np.asarray(vae), levels.reshape(rows * columns, -1), (rows, columns)


def _patches(image: StandIn, config: BagelConfig) -> int:
    rows, columns = (side // config.vit.patch_size for side in image.vit_pixels.shape[1:])
    return rows * columns


def _small(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32) if array.dtype == np.int64 else array


def kinds_of(batch: PackedBatch, used: Sequence[Sequence[Drawn]]) -> dict[str, np.ndarray]:
    """What `loss.tallied` asks: the kind (place in KINDS) of scored tokens and of latents."""
    table = np.zeros((len(used), max(1, *(len(mine) for mine in used))), np.int8)
    for i, mine in enumerate(used):
        table[i, : len(mine)] = [KINDS.index(drawn.kind) for drawn in mine]
    sample = batch.sample_BL.numpy().clip(0)
    kind_BL = np.take_along_axis(table, sample, 1)
    width = batch.ids_BU.shape[1]
    return {
        "kind_S": kind_BL[:, :width].ravel()[batch.score_S.numpy()],
        "kind_BG": np.ascontiguousarray(kind_BL[:, width:]),
    }


def decisions_of(packed: Sequence[PackedRow], tokens) -> dict[str, np.ndarray]:
    """For each scored token which decision of which turn it is part of: 0 none, 1 score, 2 action;
    turns are numbered through the batch.
    """
    part, turn, turns = [], [], 0
    for row in packed:
        scored = np.flatnonzero(row.label_U >= 0)
        # labels of one turn lie in one block, in order; the last is the end token
        block = row.block_L[: len(row.ids_U)][scored]
        for number in dict.fromkeys(block.tolist()):
            ids = row.label_U[scored[block == number]]
            parts = decisions(tokens, ids[:-1].tolist())
            part += [*parts, Decision.NONE]
            turn += [turns] * len(ids)
            turns += 1
    return {"part_S": np.array(part, np.int8), "turn_S": np.array(turn, np.int32)}
