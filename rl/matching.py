"""RL by flow matching on the images that were drawn: AWM and DiffusionNFT, pure tensors.

    t_K = matching_times(TimeSettings(), points=16, shift=3.0, generator=named)   # one set a group
    x_t = interpolate(x0, noise, t)                                 # of umm_reflect.flow
    loss, sums = awm(v, noise - x0, t, advantage, weight, AwmSettings(), ref=v_ref, slow=v_slow)
    loss, sums = nft(v, v_old, x_t, t, x0, advantage, weight, NftSettings(), ref=v_ref)
    d = decay("linear_to_0_3", step)                                # slow <- d slow + (1 - d) now

Neither needs the sampler's steps or log-probs: any solver draws the image, without noise, and the
final latent x0 is all that is kept. Losses, weights and sums as in `rl.objectives`.

Sources: Advantage Weighted Matching (arXiv 2509.25050), DiffusionNFT (arXiv 2509.16117) and their
published code. Legend: N noised states, n latent tokens, C channels; x_t = (1-t) x0 + t noise,
v = noise - x0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl.objectives import (
    Reduction,
    Sums,
    check_choice,
    check_number,
    clipped_surrogate,
    one_each,
    sums_of,
    velocity_kl,
)
from umm_reflect.flow import schedule

Surrogate = Literal["uniform", "t", "t2", "huber", "ghuber"]
Decay = Literal["copy", "linear_to_0_3", "linear_to_0_5", "delayed_to_0_999"]
AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]
Choice = Literal["window", "stratified"]

_EPSILON = 1e-10


# --- times ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeSettings:
    """At which of the sampler's times an image is noised again."""

    count: int = 6
    """Times an image."""
    choice: Choice = "window"
    """window: consecutive steps, the first of them drawn. stratified: one from each of `count`
    equal stretches, the first step (pure noise) left out."""
    steps: tuple[int, int] = (0, 11)
    """First step and end of what is chosen from; an end beyond the sampler's last step is cut."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        check_choice("times choice", self.choice, Choice)
        if self.count < 1 or len(self.steps) != 2 or self.steps[0] < 0:
            raise ValueError(f"{self.count} times of the steps {self.steps} cannot be chosen")
        self.first_and_room(self.steps[1])

    def first_and_room(self, steps: int) -> tuple[int, int]:
        """(first step to choose from, how many there are) for a sampler of so many steps."""
        first = max(self.steps[0], int(self.choice == "stratified"))
        room = min(self.steps[1], steps) - first
        if room < self.count:
            raise ValueError(
                f"{self.count} different times cannot be chosen of the steps {first} to "
                f"{first + max(room, 0)}; lower times.count or widen times.steps"
            )
        return first, room


def matching_times(
    settings: TimeSettings, points: int, shift: float, generator: torch.Generator
) -> Tensor:
    """[count] fp32, falling: times of the schedule, drawn from a named stream (0 is never one)."""
    first, room = settings.first_and_room(points - 1)
    if settings.choice == "window":
        start = int(torch.randint(room - settings.count + 1, (), generator=generator))
        chosen = first + start + torch.arange(settings.count)
    else:
        edges = torch.arange(settings.count + 1) * room // settings.count
        within = torch.rand(settings.count, generator=generator) * (edges[1:] - edges[:-1])
        chosen = first + edges[:-1] + within.long()
    return schedule(points, shift)[chosen]


# --- advantage weighted matching ------------------------------------------------------------------


@dataclass(frozen=True)
class AwmSettings:
    """Advantage weighted matching: the matching loss stands for the log-prob of an image."""

    weight: float = 1.0
    """Of this loss in the total."""
    surrogate: Surrogate = "ghuber"
    """What of the matching error m stands for -log p: m, t m, t^2 m, or t times a root of m."""
    power: float = 0.25
    """Of ghuber."""
    clip: float = 1.0
    """The ratio is cut to 1 - clip .. 1 + clip."""
    true_ratio: bool = False
    """Ratios against the surrogate before the first update; else against itself (always 1)."""
    ref: float = 0.003
    """Of mean |v - v_ref|^2; 0: no reference is needed."""
    slow: float = 1.0
    """Of mean |v - v_slow|^2, to a slow average of the weights; 0: none is kept."""
    slow_decay: Decay = "linear_to_0_3"
    """How slow that average is, see `decay`."""
    reduction: Reduction = "release"

    def __post_init__(self) -> None:
        for name in ("weight", "ref", "slow"):
            check_number(f"awm {name}", getattr(self, name))
        for name in ("power", "clip"):
            check_number(f"awm {name}", getattr(self, name), above=True)
        check_choice("awm surrogate", self.surrogate, Surrogate)
        check_choice("awm slow_decay", self.slow_decay, Decay)
        check_choice("awm reduction", self.reduction, Reduction)


def surrogate_logprob(
    velocity_NnC: Tensor,
    target_NnC: Tensor,
    t_N: Tensor,
    kind: Surrogate = "ghuber",
    power: float = 0.25,
) -> Tensor:
    """[N]: what stands for the log-prob, from m = mean over an image of (v - (noise - x0))^2.

    uniform -m; t -t m; t2 -t^2 m; ghuber -t ((m + e)^p - e^p) / p with e = 1e-10; huber the same
    with p = 1/2 and without the division, -t (sqrt(m + e) - sqrt(e)).
    """
    m = velocity_kl(velocity_NnC, target_NnC)
    t = one_each(t_N, m)
    if kind == "uniform":
        return -m
    if kind == "t":
        return -t * m
    if kind == "t2":
        return -t.square() * m
    if kind == "huber":
        return -t * ((m + _EPSILON).sqrt() - _EPSILON**0.5)
    check_choice("surrogate", kind, Surrogate)
    return -t * ((m + _EPSILON) ** power - _EPSILON**power) / power


def awm(
    velocity_NnC: Tensor,
    target_NnC: Tensor,
    t_N: Tensor,
    advantage_N: Tensor,
    weight_N: Tensor,
    settings: AwmSettings,
    *,
    old_N: Tensor | None = None,
    ref_NnC: Tensor | None = None,
    slow_NnC: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """(loss, sums): sum of w max(-A r, -A clip(r, 1 ± clip)) + w (ref |v - v_ref|^2 + slow ...).

    target: noise - x0. old_N: `surrogate_logprob` of the policy before the first update, at the
    same states; needed for true_ratio. ref, slow: velocities of the reference and of the slow
    average at the same states.
    """
    new = surrogate_logprob(velocity_NnC, target_NnC, t_N, settings.surrogate, settings.power)
    old = old_N if settings.true_ratio else new
    assert old is not None, "true_ratio needs the old surrogates"
    columns = clipped_surrogate(new - old.detach(), advantage_N, settings.clip, settings.clip)
    each = columns["policy"]
    columns["matching_error"] = velocity_kl(velocity_NnC, target_NnC)
    for name, factor, other in (
        ("kl", settings.ref, ref_NnC),
        ("slow", settings.slow, slow_NnC),
    ):
        assert other is not None or not factor, f"awm's penalty '{name}' needs velocities"
        if other is not None:
            columns[name] = velocity_kl(velocity_NnC, other)
            each = each + factor * columns[name]
    loss = (each * weight_N).sum() * settings.weight
    return loss, sums_of(loss, **columns)


def decay(kind: Decay, step: int) -> float:
    """How much of the old (or slow) weights stays after update number `step` (from 0).

    copy 0; linear_to_0_3 min(0.001 s, 0.3); linear_to_0_5 min(0.001 s, 0.5); delayed_to_0_999 0 up
    to step 75, then min(0.0075 (s - 75), 0.999).
    """
    check_choice("decay", kind, Decay)
    if kind == "copy":
        return 0.0
    if kind == "delayed_to_0_999":
        return min(0.0075 * max(step - 75, 0), 0.999)
    return min(0.001 * step, 0.3 if kind == "linear_to_0_3" else 0.5)


# --- negative-aware fine-tuning -------------------------------------------------------------------


@dataclass(frozen=True)
class NftSettings:
    """DiffusionNFT: a good image pulls the velocity to itself, a bad one pushes it off."""

    weight: float = 1.0
    """Of this loss in the total."""
    beta: float = 1.0
    """How far the two implicit policies are from the old one."""
    ref: float = 1e-4
    """Of mean |v - v_ref|^2; 0: no reference is needed."""
    clip: float = 5.0
    """Advantages from -clip to clip become optimality probabilities from 0 to 1."""
    mode: AdvantageMode = "all"
    """Which advantages are used, and how: only of one sign, as 1 or 0, as their sign."""
    old_decay: Decay = "linear_to_0_5"
    """How fast the old policy, which draws the images, follows."""
    reduction: Reduction = "release"

    def __post_init__(self) -> None:
        for name in ("weight", "ref"):
            check_number(f"nft {name}", getattr(self, name))
        for name in ("beta", "clip"):
            check_number(f"nft {name}", getattr(self, name), above=True)
        check_choice("nft mode", self.mode, AdvantageMode)
        check_choice("nft old_decay", self.old_decay, Decay)
        check_choice("nft reduction", self.reduction, Reduction)


def optimality(advantage_N: Tensor, clip: float, mode: AdvantageMode = "all") -> Tensor:
    """[N] in [0, 1]: clamp(A / clip / 2 + 1/2) of the advantages that the mode keeps."""
    advantage = advantage_N.float().clamp(-clip, clip)
    if mode == "positive_only":
        advantage = advantage.clamp_min(0)
    elif mode == "negative_only":
        advantage = advantage.clamp_max(0)
    elif mode == "one_only":
        advantage = (advantage > 0).float()
    elif mode == "binary":
        advantage = advantage.sign()
    return (advantage / clip / 2 + 0.5).clamp(0, 1)


def nft(
    velocity_NnC: Tensor,
    old_NnC: Tensor,
    x_t_NnC: Tensor,
    t_N: Tensor,
    x0_NnC: Tensor,
    advantage_N: Tensor,
    weight_N: Tensor,
    settings: NftSettings,
    *,
    ref_NnC: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """(loss, sums): sum of w clip (rho L+ + (1 - rho) L-) / beta + w ref |v - v_ref|^2.

    v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v; L± = the mean over an image of
    (x_t - t v± - x0)^2, over its mean absolute value (no gradient through that).
    """
    v, old = velocity_NnC.float(), old_NnC.detach().float()
    x_t, x0 = x_t_NnC.float(), x0_NnC.float()
    t = one_each(t_N, weight_N)[:, None, None]
    rho = optimality(advantage_N, settings.clip, settings.mode)

    def error(implicit: Tensor) -> Tensor:
        off = x_t - t * implicit - x0
        scale = off.detach().abs().mean((-2, -1)).clamp_min(1e-5)
        return off.square().mean((-2, -1)) / scale

    plus = error(settings.beta * v + (1 - settings.beta) * old)
    minus = error((1 + settings.beta) * old - settings.beta * v)
    columns = {
        "policy": settings.clip * (rho * plus + (1 - rho) * minus) / settings.beta,
        "rho": rho,
        "plus": plus,
        "minus": minus,
        "from_old": velocity_kl(v, old),
    }
    each = columns["policy"]
    assert ref_NnC is not None or not settings.ref, "nft's penalty needs the reference's velocities"
    if ref_NnC is not None:
        columns["kl"] = velocity_kl(v, ref_NnC)
        each = each + settings.ref * columns["kl"]
    loss = (each * weight_N).sum() * settings.weight
    return loss, sums_of(loss, **columns)
