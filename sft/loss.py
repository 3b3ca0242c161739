"""The two losses of packed rows and what is logged of them: pure functions of a forward's output.

    total = sum_over_ranks(counts(batch) of every batch of the step)      # before any forward
    losses = loss(out, batch, noise_BGC, total, PRESETS["release"])
    losses.total.backward()                    # gradients add up over batches and processes
    tally = tally + tallied(out, batch, noise_BGC, times_I, kinds)        # one all-reduce, then
    metrics = tally.report()                   # {"controller/ce": ..., "mse/t 0.0-0.1": ...}

ce   = sum over scored tokens of weight * -log p      / sum of the weights       of the whole step
mse  = sum over noised tokens of mean_C (v - (noise - clean))^2 / number of them   of the whole step

so a step's gradient does not depend on how its samples lie in packs, batches and processes. The
token weights are those of `sft.weights` (published: 1 to 3 over the root of the turn's length).
Source: the published trainer's losses; x_t and v as in `umm_reflect.flow`.

Legend as in `umm_reflect.packing`: B rows, U and G tokens, S scored tokens, I images, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from sft.rows import Kind
from umm_reflect.flow import flow_matching_errors
from umm_reflect.packing import PackedBatch, TrainingOutput

KINDS: tuple[Kind, ...] = get_args(Kind)
TIME_BUCKETS = 10


@dataclass(frozen=True)
class LossSettings:
    """timestep_shift: s in t' = s t / (1 + (s-1) t), t the sigmoid of N(0, 1), one time an image.
    ce_weight, mse_weight: of the two losses in the total.
    """

    timestep_shift: float = 1.0
    ce_weight: float = 1.0
    mse_weight: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timestep_shift) and self.timestep_shift > 0):
            raise ValueError(f"timestep_shift is {self.timestep_shift}; give a number above 0")
        for name in ("ce_weight", "mse_weight"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 (off) or more")


# release: no shift in training (BAGEL's default, never overridden), though it samples with 3.
# ours: the times at which the sampler looks, too.
PRESETS: dict[str, LossSettings] = {
    "release": LossSettings(timestep_shift=1.0),
    "ours": LossSettings(timestep_shift=3.0),
}


# --- loss -----------------------------------------------------------------------------------------


def counts(batch: PackedBatch) -> Tensor:
    """[2] fp32: the sum of the weights of scored tokens, and the number of noised latent tokens.

    They are known before the forward. Add them up over the batches and processes of a step.
    """
    return torch.stack([batch.weight_S.sum().float(), batch.noised_BG.sum().float()])


@dataclass(frozen=True)
class Losses:
    """Scalars, fp32: this batch's part of the step's losses. total carries the gradient."""

    total: Tensor
    ce: Tensor
    mse: Tensor


def flow_errors(out: TrainingOutput, batch: PackedBatch, noise_BGC: Tensor) -> Tensor:
    """[B, G] fp32: the mean over channels of (v - (noise - clean))^2 where noised, else 0."""
    errors = flow_matching_errors(out.velocity_BGC, noise_BGC, batch.latent_BGC)
    return torch.where(batch.noised_BG, errors, 0.0)  # no choice by mask: that waits for a GPU


def loss(
    out: TrainingOutput,
    batch: PackedBatch,
    noise_BGC: Tensor,
    total: Tensor,
    settings: LossSettings,
    *,
    processes: int = 1,
) -> Losses:
    """The part of one batch in the losses of its step.

    total: `counts` of all batches of the step. processes: what the wrapper divides gradients by
    (DDP and FSDP take their mean); the losses that are reported are not scaled by it. A loss that
    has no token in the whole step is 0.
    """
    ce_total, mse_total = (count.clamp_min(torch.finfo(torch.float32).tiny) for count in total)
    ce = (out.ce_S * batch.weight_S).sum() / ce_total
    mse = flow_errors(out, batch, noise_BGC).sum() / mse_total
    both = settings.ce_weight * ce + settings.mse_weight * mse
    return Losses(both * processes, ce.detach(), mse.detach())


# --- logs -----------------------------------------------------------------------------------------

# Columns of a kind: weighted cross-entropy and weights, then over scored tokens with a weight the
# plain cross-entropy, how many were right and how many there are, then errors and noised tokens.
_WEIGHTED, _WEIGHT, _CE, _RIGHT, _SCORED, _ERROR, _NOISED = range(7)


@dataclass(frozen=True)
class Tally:
    """Sums, never means, so that tallies of batches and processes add up.

    kinds: [kinds, 7] in the order of KINDS. times: [TIME_BUCKETS, 2], errors and noised tokens by
    the diffusion time of their image. float64 on the CPU, else float32.
    """

    kinds: Tensor
    times: Tensor

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> Tally:
        dtype = torch.float64 if torch.device(device).type == "cpu" else torch.float32
        return cls(
            torch.zeros(len(KINDS), 7, device=device, dtype=dtype),
            torch.zeros(TIME_BUCKETS, 2, device=device, dtype=dtype),
        )

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.kinds + other.kinds, self.times + other.times)

    def flat(self) -> Tensor:
        """All sums as one vector, for one all-reduce."""
        return torch.cat([self.kinds.flatten(), self.times.flatten()])

    @classmethod
    def from_flat(cls, sums: Tensor) -> Tally:
        split = len(KINDS) * 7
        return cls(sums[:split].view(len(KINDS), 7), sums[split:].view(TIME_BUCKETS, 2))

    def report(self) -> dict[str, float]:
        """Means by name, only of what occurred: "ce", "mse", "<kind>/ce" (weighted as the loss),
        "<kind>/token_ce" (plain), "<kind>/token_accuracy", "<kind>/mse", "mse/t 0.0-0.1".
        """
        out: dict[str, float] = {}
        rows = dict(zip(KINDS, self.kinds.tolist(), strict=True))
        everything = {"": self.kinds.sum(0).tolist()}
        for name, row in (everything | rows).items():
            prefix = f"{name}/" if name else ""
            if row[_WEIGHT] > 0:
                out[f"{prefix}ce"] = row[_WEIGHTED] / row[_WEIGHT]
                out[f"{prefix}token_ce"] = row[_CE] / row[_SCORED]
                out[f"{prefix}token_accuracy"] = row[_RIGHT] / row[_SCORED]
            if row[_NOISED] > 0:
                out[f"{prefix}mse"] = row[_ERROR] / row[_NOISED]
        for bucket, (error, count) in enumerate(self.times.tolist()):
            if count:
                low, high = bucket / TIME_BUCKETS, (bucket + 1) / TIME_BUCKETS
                out[f"mse/t {low:.1f}-{high:.1f}"] = error / count
        return out


def tallied(
    out: TrainingOutput,
    batch: PackedBatch,
    noise_BGC: Tensor,
    times_I: Tensor,
    kinds: Sequence[Sequence[Kind]],
) -> Tally:
    """The sums of one batch. kinds: of the examples of each row, in their order.

    Errors: ValueError when a row has another number of examples than kinds.
    """
    have = [int(row.max()) + 1 for row in batch.sample_BL.cpu()]
    if have != [len(row) for row in kinds]:
        raise ValueError(f"kinds of {[len(row) for row in kinds]} examples for rows of {have}")
    width = batch.ids_BU.shape[1]
    table = torch.zeros(len(kinds), max(have), dtype=torch.long)
    for row, names in enumerate(kinds):
        table[row, : len(names)] = torch.tensor([KINDS.index(name) for name in names])
    # padding is example -1; nothing there is scored or noised
    kind_BL = table.to(batch.ids_BU.device).gather(1, batch.sample_BL.clamp_min(0))
    kind_S = kind_BL[:, :width].flatten()[batch.score_S]
    return tallied_by(out, batch, noise_BGC, times_I, kind_S, kind_BL[:, width:])


@torch.no_grad()
def tallied_by(
    out: TrainingOutput,
    batch: PackedBatch,
    noise_BGC: Tensor,
    times_I: Tensor,
    kind_S: Tensor,
    kind_BG: Tensor,
) -> Tally:
    """`tallied` with the kind (place in KINDS) of scored tokens and latents; waits for no GPU."""
    zero = Tally.zero(batch.ids_BU.device)
    weight = batch.weight_S.to(zero.kinds)
    counted = (weight > 0).to(weight)
    nll = out.ce_S.to(weight)
    columns = torch.stack(
        [nll * weight, weight, nll * counted, out.right_S.to(weight) * counted, counted], 1
    )
    by_kind = zero.kinds.clone()
    by_kind[:, :_ERROR] = by_kind[:, :_ERROR].index_add(0, kind_S.long(), columns)
    errors = flow_errors(out, batch, noise_BGC).to(weight)
    pairs = torch.stack([errors, batch.noised_BG.to(weight)], -1).flatten(0, 1)
    by_kind[:, _ERROR:] = by_kind[:, _ERROR:].index_add(0, kind_BG.long().flatten(), pairs)
    if not batch.num_images:
        return Tally(by_kind, zero.times)
    time_BG = times_I.to(zero.times.device)[batch.image_BG]
    bucket = (time_BG * TIME_BUCKETS).long().clamp(0, TIME_BUCKETS - 1)
    return Tally(by_kind, zero.times.index_add(0, bucket.flatten(), pairs))
