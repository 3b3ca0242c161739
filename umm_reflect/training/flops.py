"""How many floating-point operations a packed batch takes, and what share of a device's peak that
is.

    learns = learns_of(bagel)                                  # or Learns.of_preset("lora-gen")
    done = flops(work(batch), bagel.config, learns)            # adds up over batches and processes
    share = mfu(done.model, seconds, devices=8, peak=peak_flops(torch.cuda.get_device_name()))

Counted are matrix products (two a multiply-add) of real tokens; padding, norms, the VAE and
lookups are not. Attention costs what the mask lets through: the keys that each query sees. A
backward pass costs what autograd does: a frozen weight no gradient of its own, and nothing where
no weight that learns lies upstream. The counts of linear maps are held to torch's own counter.
Running layers again in the backward pass is no work of the model: `model` leaves it out, `hardware`
has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import nn

from umm_reflect.config import BagelConfig
from umm_reflect.model import TIME_FREQUENCIES
from umm_reflect.packing import NO_LABEL, PackedBatch, PackedRow
from umm_reflect.training.trainable import (
    LORA,
    RANK,
    Part,
    part_of,
    trained_parts,
)

# Dense bf16 matrix products with fp32 sums, in TFLOP/s, as the makers publish them (no sparsity).
# The first pattern that the device's name contains counts.
PEAKS: tuple[tuple[str, float], ...] = (
    (r"GB300|B300", 2500.0),
    (r"GB200", 2500.0),
    (r"B200", 2250.0),
    (r"GH200|H200|H800", 989.4),
    (r"H100 NVL", 835.5),
    (r"H100 PCIe", 756.5),
    (r"H100", 989.4),
    (r"H20", 148.0),
    (r"A100|A800", 312.0),
    (r"L40S", 362.1),
    (r"L40", 181.1),
    (r"L4\b", 121.0),
    (r"A40\b", 149.7),
    (r"A30\b", 165.0),
    (r"A10\b", 125.0),
    (r"RTX 6000 Ada", 364.2),
    (r"RTX A6000", 154.8),
    (r"RTX 5090", 209.5),
    (r"RTX 4090", 165.2),
    (r"RTX 3090", 71.0),
    (r"MI325X|MI300X", 1307.4),
    (r"MI250X", 383.0),
)


@dataclass(frozen=True)
class Work:
    """What a batch has to do, in tokens: plain numbers that add up.

    und, gen: tokens of the two experts. scored: of which the head reads. patches: of the ViT.
    pairs: (query, key) pairs that the mask allows. patch_pairs: the same inside the ViT.
    """

    und: int = 0
    gen: int = 0
    scored: int = 0
    patches: int = 0
    pairs: int = 0
    patch_pairs: int = 0

    @property
    def tokens(self) -> int:
        return self.und + self.gen

    def __add__(self, other: Work) -> Work:
        return Work(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )


def work(batch: PackedBatch | Sequence[PackedRow]) -> Work:
    """The work of a batch, or of the rows that it will be made of (costs no device anything there).

    A batch on a GPU is copied to the host: count before it moves.
    """
    if not isinstance(batch, PackedBatch):
        return sum((_work_of_row(row) for row in batch), Work())
    names = ("order", "block", "sample", "full", "noise")
    arrays = [getattr(batch, f"{name}_BL").cpu().numpy() for name in names]
    width = batch.ids_BU.shape[1]
    real = arrays[2] >= 0
    lengths = np.asarray(batch.patch_lengths, np.int64)
    return Work(
        und=int(real[:, :width].sum()),
        gen=int(real[:, width:].sum()),
        scored=batch.score_S.numel(),
        patches=int(lengths.sum()),
        pairs=sum(seen_pairs(*row) for row in zip(*arrays, strict=True)),
        patch_pairs=int((lengths**2).sum()),
    )


def _work_of_row(row: PackedRow) -> Work:
    _, lengths = np.unique(row.block_L[: len(row.ids_U)][row.patch_U], return_counts=True)
    return Work(
        und=len(row.ids_U),
        gen=len(row.cell_G),
        scored=int((row.label_U != NO_LABEL).sum()),
        patches=len(row.patch_U),
        pairs=seen_pairs(row.order_L, row.block_L, row.sample_L, row.full_L, row.noise_L),
        patch_pairs=int((lengths.astype(np.int64) ** 2).sum()),
    )


def seen_pairs(
    order_L: np.ndarray,
    block_L: np.ndarray,
    sample_L: np.ndarray,
    full_L: np.ndarray,
    noise_L: np.ndarray,
) -> int:
    """How many (query, key) pairs the mask of a row allows, without making the mask.

    A block sees the clean tokens before it in its sample, and of itself all (`full`) or, causally,
    half. Padding (sample -1) counts for nothing.
    """
    real = np.flatnonzero(sample_L >= 0)
    sequence = real[np.argsort(order_L[real])]
    if not len(sequence):
        return 0
    block = block_L[sequence]
    first = np.flatnonzero(np.r_[True, block[1:] != block[:-1]])
    length = np.diff(np.r_[first, len(sequence)]).astype(np.int64)
    sample, full, noise = (values[sequence][first] for values in (sample_L, full_L, noise_L))
    clean = np.where(noise, 0, length)
    before = np.cumsum(clean) - clean
    starts = np.flatnonzero(np.r_[True, sample[1:] != sample[:-1]])
    before -= np.repeat(before[starts], np.diff(np.r_[starts, len(sample)]))
    own = np.where(full, length**2, length * (length + 1) // 2)
    return int((length * before + own).sum())


# --- what learns ----------------------------------------------------------------------------------

EXPERT_PARTS: tuple[Literal["und", "gen"], ...] = ("und", "gen")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LowRank:
    """A low-rank update of a projection: its rank, and whether it learns or is only there."""

    rank: int
    learns: bool = True


@dataclass(frozen=True)
class Learns:
    """full: parts whose own weights learn. lora: (expert, projection) → its low-rank update."""

    full: frozenset[Part] = frozenset()
    lora: Mapping[tuple[str, str], LowRank] = field(default_factory=dict)

    @classmethod
    def of_preset(cls, preset: str, rank: int = RANK, frozen: Sequence[str] = ()) -> Learns:
        """Before there is a model. Errors: ValueError, as `trainable.trained_parts`."""
        parts = trained_parts(preset, frozen)
        if preset not in LORA:
            return cls(frozenset(parts))
        there = trained_parts(preset)
        return cls(
            lora={(e, p): LowRank(rank, e in parts) for e in there for p in PROJECTIONS},
        )


def learns_of(bagel: nn.Module) -> Learns:
    """From `requires_grad` as it stands, and the adapter that is attached."""
    full: set[Part] = set()
    lora: dict[tuple[str, str], LowRank] = {}
    for name, parameter in bagel.named_parameters():
        if ".lora_A." in name:
            projection = name.partition(".lora_A.")[0].rpartition(".")[2]
            key = (part_of(name), projection.removesuffix("_moe_gen"))
            lora[key] = LowRank(parameter.shape[0], parameter.requires_grad)
        elif ".lora_" not in name and parameter.requires_grad:
            full.add(part_of(name))
    return Learns(frozenset(full), lora)


# --- counting -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops:
    """forward, backward: operations of the two passes. layers: the forward of the decoder layers,
    which recomputation does once more.
    """

    forward: int = 0
    backward: int = 0
    layers: int = 0

    @property
    def model(self) -> int:
        """What the model needs, however it is run: the numerator of MFU."""
        return self.forward + self.backward

    def hardware(self, recompute: bool) -> int:
        """What is really done."""
        return self.model + (self.layers if recompute else 0)

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.forward + other.forward,
            self.backward + other.backward,
            self.layers + other.layers,
        )


class _Count:
    """Sums up while the model is walked through. `graded` says whether an input has a gradient."""

    def __init__(self) -> None:
        self.forward = self.backward = 0

    def linear(self, tokens: int, into: int, out: int, *, graded: bool, learns: bool) -> bool:
        """One linear map; returns whether its output has a gradient."""
        once = 2 * tokens * into * out
        self.forward += once
        self.backward += once * (int(graded) + int(learns))
        return graded or learns

    def attention(self, pairs: int, width: int, *, graded: bool) -> None:
        """Scores and their sum of values: two products forward, four backward."""
        self.forward += 4 * pairs * width
        self.backward += 8 * pairs * width * int(graded)


def flops(done: Work, config: BagelConfig, learns: Learns) -> Flops:
    """Operations of one forward and backward over `done`."""
    count, llm = _Count(), config.llm
    graded = {"und": _understanding_inputs(count, done, config, learns)}
    graded["gen"] = _latent_inputs(count, done, config, learns)
    tokens = {"und": done.und, "gen": done.gen}
    before = count.forward
    for _ in range(llm.num_layers):
        _decoder_layer(count, tokens, done.pairs, config, learns, graded)
    layers = count.forward - before
    for part, out, head in (
        ("und", llm.vocab_size, "lm_head"),
        ("gen", config.latent_dim, "latents"),
    ):
        read = done.scored if part == "und" else done.gen
        normed = graded[part] or part in learns.full  # the final norm learns with its expert
        count.linear(read, llm.hidden_size, out, graded=normed, learns=head in learns.full)
    return Flops(count.forward, count.backward, layers)


def _understanding_inputs(count: _Count, done: Work, config: BagelConfig, learns: Learns) -> bool:
    """Ids, patches through the ViT and the connector; whether they have a gradient."""
    vit, width = config.vit, config.llm.hidden_size
    tower, w = "vit" in learns.full, config.vit.hidden_size
    count.linear(done.patches, 3 * vit.patch_size**2, w, graded=False, learns=tower)
    for _ in range(vit.num_layers):
        for into, out in ((w, w),) * 4 + ((w, vit.intermediate_size), (vit.intermediate_size, w)):
            count.linear(done.patches, into, out, graded=tower, learns=tower)
        count.attention(done.patch_pairs, w, graded=tower)
    bridge = "connector" in learns.full
    count.linear(done.patches, w, width, graded=tower, learns=bridge)
    count.linear(done.patches, width, width, graded=tower or bridge, learns=bridge)
    return "embeddings" in learns.full or (done.patches > 0 and (tower or bridge))


def _latent_inputs(count: _Count, done: Work, config: BagelConfig, learns: Learns) -> bool:
    """Latents and their times into the decoder; whether they have a gradient."""
    width, own = config.llm.hidden_size, "latents" in learns.full
    count.linear(done.gen, 2 * TIME_FREQUENCIES, width, graded=False, learns=own)
    count.linear(done.gen, width, width, graded=own, learns=own)
    count.linear(done.gen, config.latent_dim, width, graded=False, learns=own)
    return own and done.gen > 0


def _decoder_layer(
    count: _Count,
    tokens: Mapping[str, int],
    pairs: int,
    config: BagelConfig,
    learns: Learns,
    graded: dict[str, bool],
) -> None:
    """One layer; `graded` (by expert, of its hidden states) is brought up to its output."""
    llm = config.llm
    width, inner = llm.hidden_size, llm.intermediate_size
    heads, keys = llm.num_heads * llm.head_dim, llm.num_kv_heads * llm.head_dim
    used = [part for part in EXPERT_PARTS if tokens[part]]

    def project(part: str, name: str, into: int, out: int, has: bool) -> bool:
        own, n = part in learns.full, tokens[part]
        result = count.linear(n, into, out, graded=has, learns=own)
        low = learns.lora.get((part, name))
        if low is not None:
            middle = count.linear(n, into, low.rank, graded=has, learns=low.learns)
            result |= count.linear(n, low.rank, out, graded=middle, learns=low.learns)
        return result

    seen = False
    for part in used:
        has = graded[part] or part in learns.full  # norms learn with their expert
        for name, out in (("q_proj", heads), ("k_proj", keys), ("v_proj", keys)):
            seen |= project(part, name, width, out, has)
        seen |= has
    count.attention(pairs, heads, graded=seen)
    for part in used:
        mixed = project(part, "o_proj", heads, width, seen) or graded[part]
        has = mixed or part in learns.full
        wide = [project(part, name, width, inner, has) for name in ("gate_proj", "up_proj")]
        graded[part] = project(part, "down_proj", inner, width, any(wide)) or mixed


# --- share of the peak ----------------------------------------------------------------------------


def peak_flops(device_name: str) -> float | None:
    """Operations a second of a device (bf16, dense), by its name; None where it is not known."""
    for pattern, tera in PEAKS:
        if re.search(pattern, device_name):
            return tera * 1e12
    return None


def mfu(model_flops: float, seconds: float, *, devices: int, peak: float | None) -> float | None:
    """The share of the peak of all devices that went into the model; None without a known peak."""
    if peak is None or seconds <= 0:
        return None
    return model_flops / (seconds * devices * peak)
