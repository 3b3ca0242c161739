"""The losses of RL as pure functions of tensors: no model, no batch, no process group.

    totals = Totals.of(unit_S) + ...                       # all batches and processes, known before
    weight_S = weights(unit_S, turn_S, totals, "release")
    loss, sums = text_grpo(logprob_S, old_S, advantage_S, weight_S, TextSettings(), ref_S=ref_S)
    loss, sums = flow_grpo(logprob_N, old_N, advantage_N, weight_N, FlowSettings(), kl_N=kl_N)
    report(merged([sums, ...]))                            # {"clip_fraction": 0.02, ...}

A loss is this batch's part of the step's loss: the weights are shares of the whole step, so parts
add up over batches and processes (times the number of processes where the wrapper takes the mean of
gradients). Old log-probs, references, advantages and weights carry no gradient. `sums` hold no
means: they add up too, and those named "..._max" by taking the largest.

Legend: S chosen tokens, N noised states (of steps in the noise window, or of AWM's and NFT's own
times), n latent tokens, C channels. A log-prob of a state is a mean over n and C, as
`umm_reflect.flow` has it. All arithmetic is fp32. AWM and NFT: `rl.matching`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Sums = dict[str, Tensor]
Reduction = Literal["release", "token"]

MAX_EXPONENT = 10.0  # beyond it exp goes on as its tangent: one wild token must not be infinite


def check_choice(name: str, value: str, choices: object) -> None:
    """ValueError unless `value` is one of a Literal's."""
    if value not in get_args(choices):
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(get_args(choices))}")


def check_number(name: str, value: float | None, low: float = 0, *, above: bool = False) -> None:
    """ValueError unless `value` is None or finite and at least (or above) `low`."""
    if value is None:
        return
    if not (math.isfinite(value) and (value > low or (value == low and not above))):
        raise ValueError(f"{name} is {value}; give {'more than' if above else 'at least'} {low:g}")


# --- weights --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Totals:
    """What one head learns from in the whole step. items: its tokens, or its noised states."""

    trajectories: int = 0
    items: int = 0

    @classmethod
    def of(cls, unit: Tensor) -> Totals:
        """Of the trajectories in one batch. unit: [items], which trajectory each belongs to."""
        return cls(int(torch.unique(unit).numel()), unit.numel())

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.trajectories + other.trajectories, self.items + other.items)


def weights(unit: Tensor, part: Tensor, totals: Totals, reduction: Reduction) -> Tensor:
    """[items] fp32: the share of each token (or state) in the step's loss; over all batches they
    sum to 1.

    unit: the trajectory, part: the turn (or the image) in it; all items of a trajectory must be
    here.
    release  the mean over trajectories of the mean over turns of the mean over tokens
    token    all alike: a long turn counts for more than a short one, a token does not
    """
    check_choice("reduction", reduction, Reduction)
    if unit.numel() == 0:
        return torch.zeros(0, device=unit.device)
    if reduction == "token":
        return torch.full(unit.shape, 1 / totals.items, device=unit.device)
    turns, turn, tokens = torch.unique(
        torch.stack([unit, part]), dim=1, return_inverse=True, return_counts=True
    )
    _, unit, parts = torch.unique(turns[0], return_inverse=True, return_counts=True)
    each = totals.trajectories * parts[unit] * tokens  # by turn
    return each.float().reciprocal()[turn]


# --- sums that are logged -------------------------------------------------------------------------


def merged(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """The sums of several batches and processes as one."""
    out: dict[str, float] = {}
    for part in parts:
        for name, value in _on_host(part).items():
            if name.endswith("_max"):
                out[name] = max(out.get(name, -math.inf), value)
            else:
                out[name] = out.get(name, 0.0) + value
    return out


def _on_host(part: Mapping[str, Tensor | float]) -> dict[str, float]:
    """The same as numbers; tensors are waited for once, not one by one."""
    tensors = {name: value for name, value in part.items() if isinstance(value, Tensor)}
    numbers = torch.stack(list(tensors.values())).tolist() if tensors else []
    return {**part, **dict(zip(tensors, numbers, strict=True))}


def report(sums: Mapping[str, float]) -> dict[str, float]:
    """Means by name from merged sums. "loss" is a sum already, "..._max" a maximum; "count" stays
    the number of items. {} where there was nothing."""
    count = sums.get("count", 0.0)
    if not count:
        return {}
    whole = ("loss", "count")
    return {k: v if k in whole or k.endswith("_max") else v / count for k, v in sums.items()}


def sums_of(loss: Tensor, **columns: Tensor) -> Sums:
    """loss, and of each column over the items its sum and, for ratios and distances of log-probs,
    its maximum."""
    count = next(iter(columns.values())).numel()
    sums = {"loss": loss.detach(), "count": loss.detach().new_full((), count)}
    for name, column in columns.items():
        column = column.detach().float()
        sums[name] = column.sum()
        if name in ("ratio", "drift", "mismatch"):
            # of no items: not above anything
            sums[f"{name}_max"] = column.max() if count else column.new_tensor(-math.inf)
    return sums


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x), from MAX_EXPONENT on its tangent."""
    bounded = x.clamp_max(MAX_EXPONENT)
    return torch.exp(bounded) * (1 + (x - bounded))


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, low: float, high: float
) -> dict[str, Tensor]:
    """The clipped surrogate of PPO by item, and what is logged of it.

    clip_fraction: where the clip took the gradient away. approx_kl: k3 of old against new, (r - 1)
    - log r. drift: |log r|.
    """
    ratio = bounded_exp(log_ratio)
    plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)
    return {
        "policy": torch.maximum(plain, clipped),
        "clip_fraction": (clipped > plain).float(),
        "clip_low": ((clipped > plain) & (ratio < 1)).float(),
        "clip_high": ((clipped > plain) & (ratio > 1)).float(),
        "approx_kl": ratio - 1 - log_ratio,
        "ratio": ratio,
        "drift": log_ratio.abs(),
    }


# --- text -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextSettings:
    """The loss on words: GRPO with a ratio for every chosen token."""

    weight: float = 1.0
    """Of the text loss in the total; 0: words are not trained."""
    clip_low: float = 0.2
    """The ratio is cut below 1 - this where the advantage is negative."""
    clip_high: float = 0.2
    """And above 1 + this where it is positive."""
    kl: float = 0.0
    """Of the KL to the reference, estimated at each chosen token; 0: no reference is needed."""
    importance_cap: float | None = None
    """Weigh each token with min(old log-prob of the learner against the sampler's, this), where
    the two differ by their kernels. None: not."""
    reduction: Reduction = "token"
    """release: mean over trajectories of means over turns. token: every token counts alike."""

    def __post_init__(self) -> None:
        for name in ("weight", "clip_low", "clip_high", "kl"):
            check_number(f"text {name}", getattr(self, name))
        check_number("text importance_cap", self.importance_cap, above=True)
        check_choice("text reduction", self.reduction, Reduction)


def k3(logprob: Tensor, ref: Tensor) -> Tensor:
    """An estimate of KL(policy | reference) at a token that the policy sampled: exp(d) - 1 - d with
    d = ref - logprob. Never negative; its mean over samples is the KL.

    (With d the other way round, as published, it is unbounded just where the policy has learnt to
    like a token.)
    """
    d = ref.float() - logprob.float()
    return bounded_exp(d) - 1 - d


def text_grpo(
    logprob_S: Tensor,
    old_S: Tensor,
    advantage_S: Tensor,
    weight_S: Tensor,
    settings: TextSettings,
    *,
    ref_S: Tensor | None = None,
    entropy_S: Tensor | None = None,
    sampled_S: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """(loss, sums): sum of w (max(-A r, -A clip(r, 1-low, 1+high)) + kl k3), r = exp(new - old).

    All [S]. old_S: log-probs of the policy that is being improved (the rollout's, or the learner's
    own before the first update). ref_S: of the reference; needed for a KL. entropy_S: of the
    distributions, logged. sampled_S: the rollout's log-probs where old_S are the learner's; needed
    for importance_cap.
    """
    new, old = logprob_S.float(), old_S.detach().float()
    columns = clipped_surrogate(new - old, advantage_S, settings.clip_low, settings.clip_high)
    each = columns["policy"]
    if sampled_S is not None:
        columns["mismatch"] = (old - sampled_S).abs()
    if settings.importance_cap is not None:
        assert sampled_S is not None, "importance_cap needs the sampler's log-probs"
        each = each * bounded_exp(old - sampled_S).clamp_max(settings.importance_cap)
    if settings.kl:
        assert ref_S is not None, "a KL needs the reference's log-probs"
    if ref_S is not None:
        columns["kl"] = k3(new, ref_S.detach())
        each = each + settings.kl * columns["kl"]
    if entropy_S is not None:
        columns["entropy"] = entropy_S
    loss = (each * weight_S).sum() * settings.weight
    return loss, sums_of(loss, **columns)


# --- images: steps of the noise window ------------------------------------------------------------

FlowKL = Literal["velocity", "transition"]


@dataclass(frozen=True)
class FlowSettings:
    """The loss on the stochastic steps of images: FlowGRPO."""

    weight: float = 1.0
    """Of the flow loss in the total; 0: images are not trained."""
    clip_low: float = 1e-5
    """As for words; small, since a log-prob is a mean over all latent numbers."""
    clip_high: float = 1e-5
    kl: float = 0.0
    """Of the distance to the reference; 0: no reference is needed."""
    kl_kind: FlowKL = "velocity"
    """velocity: mean |v - v_ref|^2. transition: the KL of the two Gaussian steps."""
    guard: bool = False
    """GRPO-Guard: ratios re-centred and brought to one scale over the steps (arXiv 2510.22319)."""
    reduction: Reduction = "release"
    """release: mean over trajectories of means over images. token: every step counts alike."""

    def __post_init__(self) -> None:
        for name in ("weight", "clip_low", "clip_high", "kl"):
            check_number(f"flow {name}", getattr(self, name))
        check_choice("flow kl_kind", self.kl_kind, FlowKL)
        check_choice("flow reduction", self.reduction, Reduction)


def velocity_kl(velocity_NnC: Tensor, ref_NnC: Tensor) -> Tensor:
    """[N]: mean over an image's numbers of (v - v_ref)^2 (UniGRPO, arXiv 2603.23500)."""
    return (velocity_NnC.float() - ref_NnC.detach().float()).square().mean((-2, -1))


def transition_kl(mean_NnC: Tensor, ref_NnC: Tensor, std: Tensor) -> Tensor:
    """[N]: KL of the two Gaussians of a step, mean over its numbers: (mean - ref)^2 / (2 std^2).

    std: as `flow.sde_mean_std` gives it, sigma sqrt(-dt): with the step's own length, which
    published code leaves out. Where it is 0 there is no choice, and the KL is 0.
    """
    square = (mean_NnC.float() - ref_NnC.detach().float()).square().mean((-2, -1))
    std = one_each(std, square)
    safe = torch.where(std > 0, std, 1.0)
    return torch.where(std > 0, square / (2 * safe.square()), 0.0)


def one_each(value: Tensor | float, like: Tensor) -> Tensor:
    """[N] from one number, [N], or [N, 1, 1]."""
    value = torch.as_tensor(value, dtype=torch.float32, device=like.device)
    return value.reshape(-1).expand(like.shape) if value.numel() == 1 else value.reshape(like.shape)


@dataclass(frozen=True)
class Guard:
    """What GRPO-Guard needs of each step. mean, old_mean: [N, n, C]; std: sigma sqrt(-dt) and dt:
    [N]."""

    mean: Tensor
    old_mean: Tensor
    std: Tensor
    dt: Tensor


def flow_grpo(
    logprob_N: Tensor,
    old_N: Tensor,
    advantage_N: Tensor,
    weight_N: Tensor,
    settings: FlowSettings,
    *,
    kl_N: Tensor | None = None,
    guard: Guard | None = None,
    sampled_N: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """(loss, sums): sum of w (max(-A r, -A clip(r, 1-low, 1+high)) + kl KL), r = exp(new - old).

    All [N] (arXiv 2505.05470). kl_N: `velocity_kl` or `transition_kl` to the reference, needed for
    a KL. guard: r = exp((new - old + |mean - old mean|^2 / (2 std^2)) std) and the policy term over
    -dt. sampled_N: the rollout's log-probs where old_N are the learner's, logged.
    """
    new, old = logprob_N.float(), old_N.detach().float()
    log_ratio = new - old
    if settings.guard:
        assert guard is not None, "guard needs the means and stds of the steps"
        std = one_each(guard.std, new)
        log_ratio = (log_ratio + transition_kl(guard.mean, guard.old_mean, std)) * std
    columns = clipped_surrogate(log_ratio, advantage_N, settings.clip_low, settings.clip_high)
    each = columns["policy"]
    if sampled_N is not None:
        columns["mismatch"] = (old - sampled_N).abs()
    if settings.guard:
        each = each / -one_each(guard.dt, new)
    if settings.kl:
        assert kl_N is not None, "a KL needs the distance to the reference"
    if kl_N is not None:
        columns["kl"] = kl_N
        each = each + settings.kl * kl_N
    loss = (each * weight_N).sum() * settings.weight
    return loss, sums_of(loss, **columns)


def norm_ratio(velocity_NnC: Tensor, ref_NnC: Tensor) -> Tensor:
    """[N]: |v| / |v_ref|. RL on images inflates it before one sees it (arXiv 2606.27771)."""
    norms = [torch.linalg.vector_norm(v.float(), dim=(-2, -1)) for v in (velocity_NnC, ref_NnC)]
    return (norms[0] / norms[1].clamp_min(torch.finfo(torch.float32).tiny)).detach()
