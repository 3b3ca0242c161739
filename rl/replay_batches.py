"""Units in packed batches: rows, latents and pictures, and where in them words and states are.

    for batch in batches(units, bagel, max_tokens=65536):
        batch = batch.to(bagel.device)

Legend: S scored words, K constrained ones, A allowed ids, N noised states, n latent tokens a state,
C channels, I latent blocks; B, U, G as in `umm_reflect.packing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl.replay_layout import NO_BLOCK, NO_WORD, Unit
from umm_reflect.config import BagelConfig
from umm_reflect.context import ImageSegment
from umm_reflect.flow import DrawSettings
from umm_reflect.images import patchify_latent, patchify_pixels
from umm_reflect.model import Bagel
from umm_reflect.packing import (
    LONG_MULTIPLE,
    MAX_DENSE,
    MULTIPLE,
    NO_LABEL,
    PackedBatch,
    PackedRow,
    collate,
    fill_bins,
    row_of_blocks,
)
from umm_reflect.training.flops import Work, work
from umm_reflect.training.parts import empty_batch


class MoveGroup(NamedTuple):
    """States start to end - 1 of a batch: one sampler, the same branches run."""

    start: int
    end: int
    settings: DrawSettings
    text: bool
    image: bool


# Flex attention works in blocks of so many tokens.
SHORT = 128


@dataclass
class ReplayBatch(PackedBatch):
    """A packed batch whose latents are what enters the model (states noised, images clean).

    support: ids that can be sampled are below it. times_I: of each latent block, 0 where clean.
    choice_K: places in S of constrained words; choice_KA their allowed ids (-1: none), pick_K which
    of them was taken. start_N3: flat place (row * G + g) of the first latent of each branch of a
    state, -1 where it is not run. x_next_NnC: zeros where a state has none. unit_*: places in the
    list of units; image_N: number of the image in its trajectory; step_N: which of its states.
    """

    support: int
    times_I: Tensor
    temperature_S: Tensor
    old_S: Tensor
    unit_S: Tensor
    turn_S: Tensor
    choice_K: Tensor
    choice_KA: Tensor
    pick_K: Tensor
    start_N3: Tensor
    x_next_NnC: Tensor
    t_N: Tensor
    t_next_N: Tensor
    old_N: Tensor
    unit_N: Tensor
    image_N: Tensor
    step_N: Tensor
    groups: tuple[MoveGroup, ...]
    units: tuple[int, ...]
    work: Work


def batches(
    units: Sequence[Unit],
    bagel: Bagel,
    *,
    max_tokens: int,
    latents_of: Callable[[Sequence[ImageSegment]], list[Tensor]] | None = None,
) -> list[ReplayBatch]:
    """All units in batches of at most about max_tokens tokens, padding counted (a unit that is
    larger is alone), on the CPU. A unit is in one row of one batch.

    latents_of: the clean latent tokens [n, C] of images; by default the VAE encodes each once (its
    posterior mean). A rollout's own `engine.latent_tokens` knows them already.
    """
    pictures = _Pictures(bagel, latents_of or _encoder(bagel), units)
    out = []
    kinds = sorted({unit.cells for unit in units} - {None}) or [0]
    for cells in kinds:
        mine = [i for i, u in enumerate(units) if (u.cells or kinds[0]) == cells and u.chains]
        for rows, sizes in _rows([units[i].size for i in mine], max_tokens):
            some = [[mine[k] for k in row] for row in rows]
            out.append(_batch(units, some, sizes, pictures, bagel, cells))
    return out


def _rows(
    sizes: Sequence[tuple[int, int]], max_tokens: int
) -> Iterator[tuple[list[list[int]], tuple[int, int]]]:
    """Rows of units for each batch, with the (U, G) to which they are padded."""
    if not sizes:
        return
    most = tuple(max(size[k] for size in sizes) for k in (0, 1))
    long = sum(most) > MAX_DENSE
    # few tokens of one expert beside many of the other are not padded to as many again
    multiples = [MULTIPLE if not long else min(LONG_MULTIPLE, _power_of_two(n)) for n in most]

    def padded(size: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            -(-n // multiple) * multiple for n, multiple in zip(size, multiples, strict=True)
        )

    capacity = padded(most)
    bins = fill_bins(sizes, capacity)
    loads = [tuple(sum(sizes[i][k] for i in row) for k in (0, 1)) for row in bins]
    order = sorted(range(len(bins)), key=lambda r: (-sum(loads[r]), r))
    start = 0
    while start < len(order):
        end, size = start, (0, 0)
        while end < len(order):
            load = loads[order[end]]
            # long rows have one length, for which the attention kernel is compiled once
            wider = capacity if long else padded(tuple(map(max, size, load)))
            if end > start and (end + 1 - start) * sum(wider) > max_tokens:
                break
            end, size = end + 1, wider
        yield [bins[r] for r in order[start:end]], size
        start = end


def _power_of_two(tokens: int) -> int:
    """The next one, SHORT at least."""
    return max(SHORT, 1 << max(tokens - 1, 0).bit_length())


def _batch(
    units: Sequence[Unit],
    rows: list[list[int]],
    sizes: tuple[int, int],
    pictures: _Pictures,
    bagel: Bagel,
    cells: int,
) -> ReplayBatch:
    packed: list[PackedRow] = []
    latents: list[Tensor] = []
    times: list[float] = []
    words: list[tuple[int, int]] = []
    starts: dict[tuple[int, int], np.ndarray] = {}
    for r, row in enumerate(rows):
        word, made = _row(units, row, bagel.config)
        packed.append(made)
        words.append((r, word))
        place = r * sizes[1]
        for i in row:
            for chain in units[i].chains:
                moves = iter(chain.moves)
                for entry in chain.latents:
                    if isinstance(entry, ImageSegment):
                        latents.append(pictures.latents[entry])
                        times.append(0.0)
                    else:
                        state, branch = next(moves)
                        latents.append(units[i].states[state].x)
                        times.append(units[i].states[state].t)
                        mine = starts.setdefault((i, state), np.full(3, NO_BLOCK))
                        mine[branch] = place
                    place += len(latents[-1])
    patches = [pictures.patches[image] for row in packed for image in row.vit_images]
    batch = collate(packed, latents, patches, sizes)
    used = tuple(i for row in rows for i in row)
    none = torch.zeros(1, dtype=torch.float32)
    return ReplayBatch(
        **{name: getattr(batch, name) for name in PackedBatch.__dataclass_fields__},
        support=bagel.tokens.size,
        times_I=torch.tensor(times) if times else none,
        **_word_fields(units, rows, words),
        **_move_fields(units, used, starts, cells, bagel.config.latent_dim),
        units=used,
        work=work(packed),
    )


def _row(
    units: Sequence[Unit], row: Sequence[int], config: BagelConfig
) -> tuple[np.ndarray, PackedRow]:
    """(for each scored token the word of the row that it predicts, the packed row)."""
    chains, word, offset = [], [], 0
    for i in row:
        chains += [chain.blocks for chain in units[i].chains]
        for chain in units[i].chains:
            word.append(np.where(chain.word_L == NO_WORD, NO_WORD, chain.word_L + offset))
        offset += len(units[i].words.ids)
    word_L = np.concatenate(word)
    ids = np.concatenate([*(units[i].words.ids for i in row), [NO_LABEL]])
    label = ids[word_L]  # NO_WORD is the last one
    packed = row_of_blocks(chains, label, (label != NO_LABEL).astype(np.float32), config)
    scored = word_L[packed.order_L[: len(packed.ids_U)]]
    return scored[scored != NO_WORD], packed


def _word_fields(
    units: Sequence[Unit], rows: list[list[int]], words: list[tuple[int, np.ndarray]]
) -> dict[str, Tensor]:
    columns: dict[str, list[np.ndarray]] = {"temperature": [], "old": [], "unit": [], "turn": []}
    allowed: list[tuple[int, tuple[int, ...]]] = []
    picks: list[int] = []
    before = 0
    for r, order in words:
        mine = [units[i].words for i in rows[r]]
        count = [len(w.ids) for w in mine]
        for name in ("temperature", "old", "turn"):
            columns[name].append(np.concatenate([getattr(w, name) for w in mine])[order])
        columns["unit"].append(np.repeat(rows[r], count)[order])
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order)) + before
        first = 0
        for w, n in zip(mine, count, strict=True):
            for word, ids in w.allowed.items():
                allowed.append((int(place[first + word]), ids))
                picks.append(ids.index(int(w.ids[word])))
            first += n
        before += len(order)
    width = max((len(ids) for _, ids in allowed), default=1)
    choices = np.full((len(allowed), width), -1)
    for k, (_, ids) in enumerate(allowed):
        choices[k, : len(ids)] = ids
    joined = {f"{name}_S": torch.from_numpy(np.concatenate(v)) for name, v in columns.items()}
    joined["unit_S"] = joined["unit_S"].long()
    joined["turn_S"] = joined["turn_S"].long()
    return {
        **joined,
        "choice_K": torch.tensor([place for place, _ in allowed], dtype=torch.long),
        "choice_KA": torch.from_numpy(choices).long(),
        "pick_K": torch.tensor(picks, dtype=torch.long),
    }


def _move_fields(
    units: Sequence[Unit],
    used: Sequence[int],
    starts: dict[tuple[int, int], np.ndarray],
    cells: int,
    channels: int,
) -> dict[str, object]:
    """The states of a batch in an order in which those that are combined alike are neighbours."""
    found = []
    for i in used:
        unit, seen = units[i], {}
        for (number, which), other in unit.shared.items():
            starts[i, number][which] = starts[i, number][other]
        for number, state in enumerate(unit.states):
            step = seen.setdefault(state.image, 0)
            seen[state.image] += 1
            found.append((i, number, step, unit.settings[number], *unit.branches[number][1:]))
    kinds = list(dict.fromkeys(entry[3:] for entry in found))
    found.sort(key=lambda entry: kinds.index(entry[3:]))
    groups, start = [], 0
    for kind in kinds:
        end = start + sum(entry[3:] == kind for entry in found)
        groups.append(MoveGroup(start, end, kind[0], bool(kind[1]), bool(kind[2])))
        start = end
    states = [units[i].states[number] for i, number, *_ in found]
    nothing_next = torch.zeros(cells, channels)
    following = [nothing_next if s.x_next is None else s.x_next.float() for s in states]

    def column(values: list, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    start_N3 = [starts[i, number] for i, number, *_ in found]
    return {
        "start_N3": torch.from_numpy(np.stack(start_N3) if start_N3 else np.zeros((0, 3), int)),
        "x_next_NnC": torch.stack(following) if following else torch.zeros(0, cells, channels),
        "t_N": column([s.t for s in states], torch.float32),
        "t_next_N": column([s.t_next for s in states], torch.float32),
        "old_N": column([s.old_logprob for s in states], torch.float32),
        "unit_N": column([entry[0] for entry in found]),
        "image_N": column([s.image for s in states]),
        "step_N": column([entry[2] for entry in found]),
        "groups": tuple(groups),
    }


def nothing(bagel: Bagel) -> ReplayBatch:
    """A batch without words and states, for a process that has no more: on the CPU."""
    batch = empty_batch(bagel.config)
    none = {"units": (), "choice_KA": torch.zeros(0, 1, dtype=torch.long), "work": Work()}
    floats = ("temperature_S", "old_S")
    longs = ("unit_S", "turn_S", "choice_K", "pick_K")
    return ReplayBatch(
        **{name: getattr(batch, name) for name in PackedBatch.__dataclass_fields__},
        support=bagel.tokens.size,
        times_I=torch.zeros(1),
        **{name: torch.zeros(0) for name in floats},
        **{name: torch.zeros(0, dtype=torch.long) for name in longs},
        **none,
        **_move_fields([], [], {}, 0, bagel.config.latent_dim),
    )


class _Pictures:
    """Clean latents and patches of all images that are seen, once each, on the CPU."""

    def __init__(self, bagel: Bagel, latents_of: Callable, units: Sequence[Unit]):
        latent = [e for u in units for c in u.chains for e in c.latents]
        seen = [i for i in dict.fromkeys(latent) if isinstance(i, ImageSegment)]
        by_shape: dict[torch.Size, list[tuple[ImageSegment, Tensor]]] = {}
        for image, tokens in zip(seen, latents_of(seen) if seen else [], strict=True):
            by_shape.setdefault(tokens.shape, []).append((image, tokens))
        self.latents: dict[ImageSegment, Tensor] = {}
        for pairs in by_shape.values():  # one transfer from the device a shape
            whole = torch.stack([tokens for _, tokens in pairs]).float().cpu()
            self.latents.update(zip([image for image, _ in pairs], whole, strict=True))
        looks = [b.image for u in units for c in u.chains for b in c.blocks if b.kind == "vit"]
        patch = bagel.config.vit.patch_size
        self.patches = {i: patchify_pixels(i.vit_pixels, patch) for i in dict.fromkeys(looks)}


def _encoder(bagel: Bagel) -> Callable[[Sequence[ImageSegment]], list[Tensor]]:
    patch = bagel.config.latent_patch_size

    @torch.no_grad()
    def encode(images: Sequence[ImageSegment]) -> list[Tensor]:
        pixels = [i.vae_pixels.to(bagel.device) for i in images if i.latent is None]
        encoded = iter(bagel.vae.encode_images(pixels) if pixels else [])
        latents = [next(encoded) if i.latent is None else i.latent for i in images]
        return [patchify_latent(latent.float(), patch) for latent in latents]

    return encode
