"""Rectified flow as pure functions: schedule, steps with their log-probs, guidance, loss.

Convention everywhere: x_t = (1-t) clean + t noise, velocity v = noise - clean, t runs from 1
(noise) to 0 (image). N schedule points are N-1 steps. Times, latents and log-probs are fp32::

    times = schedule(settings.points, settings.timestep_shift)
    for t, t_next in pairwise(times):
        v = guide(v_cond, v_text_uncond, v_image_uncond, settings)
        x = euler_step(x, v, t, t_next)

Shapes: x_nC is one image of n latent tokens with C channels (64); leading dimensions, if any, are
images. A time is one number for all images or has one entry an image.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Renorm = Literal["global", "channel", "text_channel"]
StepKind = Literal["ode", "sde", "cps"]
Sigma = Literal["second_point", "capped", "constant"]
LogProb = Literal["released", "gaussian"]
NormOver = Literal["image", "call"]

SIGMA_TIME_CAP = 0.95  # sigma="capped": the largest t in the denominator 1 - t
NORM_EPSILON = 1e-8


def _choice(name: str, value: str, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(get_args(choices))}")


@dataclass(frozen=True)
class DrawSettings:
    """How one picture is drawn. Errors: ValueError that names the value and what is allowed.

    points           schedule points; points - 1 velocity evaluations
    timestep_shift   s in t' = s t / (1 + (s-1) t)
    text_scale       guidance against the text-unconditional branch; <= 1 switches all guidance off
    image_scale      guidance against the image-unconditional branch; <= 1 switches this part off
    interval         (low, high): guided where low < t' <= high, t' being the shifted time
    renorm           which norm of the guided velocity is brought back to the conditional one
    renorm_min       lower bound of that ratio; 1 switches the renorm off
    norm_over        the global norm is taken over each image, or (as the original) over the call
    noise_level      a of the stochastic steps; 0 makes every step an Euler step
    window           (first step, number of steps) that are stochastic; None: all but the last one
    step_kind        the rule of the stochastic steps
    sigma            the noise schedule of "sde": see `sigma_of`
    """

    points: int = 50
    timestep_shift: float = 3.0
    text_scale: float = 3.0
    image_scale: float = 1.5
    interval: tuple[float, float] = (0.4, 1.0)
    renorm: Renorm = "global"
    renorm_min: float = 0.0
    norm_over: NormOver = "image"
    noise_level: float = 0.0
    window: tuple[int, int] | None = None
    step_kind: StepKind = "ode"
    sigma: Sigma = "second_point"

    def __post_init__(self):
        if isinstance(self.points, bool) or int(self.points) != self.points or self.points < 2:
            raise ValueError(
                f"points is {self.points}; give at least 2 (N points are N-1 denoising steps)"
            )
        if not (math.isfinite(self.timestep_shift) and self.timestep_shift > 0):
            raise ValueError(f"timestep_shift is {self.timestep_shift}; give a number above 0")
        for name in ("text_scale", "image_scale"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more (1 is off)")
        object.__setattr__(self, "interval", tuple(self.interval))
        if len(self.interval) != 2 or not 0 <= self.interval[0] <= self.interval[1] <= 1:
            raise ValueError(f"interval is {self.interval}; give (low, high) with 0<=low<=high<=1")
        if not 0 <= self.renorm_min <= 1:
            raise ValueError(f"renorm_min is {self.renorm_min}; give a number from 0 to 1")
        _choice("renorm", self.renorm, Renorm)
        _choice("norm_over", self.norm_over, NormOver)
        _choice("step_kind", self.step_kind, StepKind)
        _choice("sigma", self.sigma, Sigma)
        if not (math.isfinite(self.noise_level) and self.noise_level >= 0):
            raise ValueError(f"noise_level is {self.noise_level}; give 0 (off) or more")
        if self.step_kind == "cps" and self.noise_level > 1:
            raise ValueError(f"noise_level is {self.noise_level}; step_kind 'cps' takes 0 to 1")
        if self.step_kind == "ode" and self.noise_level > 0:
            raise ValueError(
                f"noise_level is {self.noise_level} with step_kind 'ode', which adds no noise; "
                "set step_kind to 'sde' or 'cps', or noise_level to 0"
            )
        if self.window is not None:
            object.__setattr__(self, "window", tuple(self.window))
            if len(self.window) != 2 or self.window[0] < 0 or self.window[1] < 1:
                raise ValueError(f"window is {self.window}; give (first step >= 0, length >= 1)")
            if sum(self.window) > self.steps:
                raise ValueError(
                    f"window {self.window} ends after step {sum(self.window) - 1}, but "
                    f"{self.points} points have the steps 0 to {self.steps - 1}"
                )

    @property
    def steps(self) -> int:
        """Velocity evaluations: one fewer than points."""
        return self.points - 1

    @property
    def times(self) -> Tensor:
        """[points] fp32, from 1 to 0."""
        return schedule(self.points, self.timestep_shift)

    def guided(self, t: Tensor | float) -> bool:
        """Whether guidance is on at the shifted time t (and is on at all)."""
        return self.text_scale > 1 and in_interval(t, self.interval)

    def stochastic(self, step: int) -> bool:
        """Whether step number `step` (from 0) adds noise and has a log-prob."""
        if self.noise_level == 0:
            return False
        if self.window is None:
            return step < self.steps - 1
        return self.window[0] <= step < sum(self.window)


class StochasticStep(NamedTuple):
    """One stochastic step: x_next = mean + std z, detached. logprob has one entry an image."""

    x_next: Tensor
    mean: Tensor
    std: Tensor
    logprob: Tensor


# --- times ----------------------------------------------------------------------------------------


def shift_times(times: Tensor, shift: float) -> Tensor:
    """t' = s t / (1 + (s-1) t): more of the schedule at high noise for s > 1."""
    return shift * times / (1 + (shift - 1) * times)


def schedule(points: int, shift: float) -> Tensor:
    """[points] fp32 on the CPU, from 1 to 0, shifted; equal to the original's bit for bit."""
    if points < 2:
        raise ValueError(f"points is {points}; give at least 2 (N points are N-1 denoising steps)")
    return shift_times(torch.linspace(1, 0, points, dtype=torch.float32), shift)


def in_interval(t: Tensor | float, interval: tuple[float, float]) -> bool:
    """Whether low < t <= high for the shifted time t, compared in fp32 as the original does."""
    t = torch.as_tensor(t, dtype=torch.float32)
    return bool((t > interval[0]) & (t <= interval[1]))


def sample_times(n: int, shift: float, generator: torch.Generator) -> Tensor:
    """[n] fp32 training times: the sigmoid of N(0, 1), then shifted. One per image."""
    return shift_times(torch.sigmoid(torch.randn(n, generator=generator)), shift)


def _per_image(t: Tensor | float, x: Tensor) -> Tensor:
    """A time as fp32 that broadcasts against x [..., n, C]: one number, or one entry an image."""
    t = torch.as_tensor(t, dtype=torch.float32)
    if t.dim() == 0:
        return t  # stays on the CPU: no copy, no synchronisation
    return t.to(x.device)[..., None, None]


# --- training -------------------------------------------------------------------------------------


def interpolate(clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = (1-t) clean + t noise; t broadcasts (per token: [n, 1])."""
    return (1 - t) * clean + t * noise


def velocity_target(clean: Tensor, noise: Tensor) -> Tensor:
    """What the model learns to predict: noise - clean."""
    return noise - clean


def flow_matching_errors(velocity: Tensor, noise: Tensor, clean: Tensor) -> Tensor:
    """[..., n] fp32: per token, the mean over channels of (velocity - (noise - clean))^2."""
    return (velocity.float() - velocity_target(clean.float(), noise.float())).square().mean(-1)


def flow_matching_loss(
    velocity: Tensor, noise: Tensor, clean: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Scalar fp32: the (weighted) mean over tokens of `flow_matching_errors`.

    velocity, noise, clean: [..., n, C]; weights: [..., n], not negative, or None for equal ones.
    Weights of zero everywhere give a loss of zero (a batch without a picture).
    """
    errors = flow_matching_errors(velocity, noise, clean)
    if weights is None:
        return errors.mean()
    weights = weights.to(errors)
    return (errors * weights).sum() / weights.sum().clamp_min(torch.finfo(torch.float32).tiny)


# --- steps ----------------------------------------------------------------------------------------


def euler_step(x: Tensor, v: Tensor, t: Tensor | float, t_next: Tensor | float) -> Tensor:
    """The deterministic step: x - v (t - t_next), in fp32."""
    return x.float() - v.float() * (_per_image(t, x) - _per_image(t_next, x))


def sigma_of(t: Tensor, t_next: Tensor, noise_level: float, sigma: Sigma) -> Tensor:
    """sigma_t, the diffusion coefficient of the SDE, fp32.

    second_point  a sqrt(t / (1-t)); at t == 1 exactly the denominator takes the schedule's second
                  point, which is t_next there (Flow-GRPO; the released evaluation)
    capped        a sqrt(t / (1 - min(t, 0.95))) (R3; the released RL training)
    constant      a (DanceGRPO, MixGRPO)
    """
    if sigma == "constant":
        return torch.full_like(t, noise_level)
    if sigma == "second_point":
        below_one = torch.where(t == 1, t_next, t)
    elif sigma == "capped":
        below_one = t.clamp_max(SIGMA_TIME_CAP)
    else:
        raise ValueError(f"sigma is {sigma!r}; choose one of {', '.join(get_args(Sigma))}")
    return noise_level * torch.sqrt(t / (1 - below_one))


def sde_mean_std(
    x: Tensor,
    v: Tensor,
    t: Tensor | float,
    t_next: Tensor | float,
    noise_level: float,
    sigma: Sigma = "second_point",
) -> tuple[Tensor, Tensor]:
    """Mean [..., n, C] and std (one number, or [..., 1, 1]) of the SDE step, fp32, differentiable.

    mean = x + [v + sigma^2 / (2t) (x + (1-t) v)] dt, std = sigma sqrt(-dt), dt = t_next - t < 0
    (Flow-GRPO, arXiv 2505.05470; -(x + (1-t) v) / t is the score). With noise level 0 the mean is
    the Euler step bit for bit.
    """
    x, v = x.float(), v.float()
    t, t_next = _per_image(t, x), _per_image(t_next, x)
    dt = t_next - t
    diffusion = sigma_of(t, t_next, noise_level, sigma)
    half = diffusion.square() / (2 * t)
    mean = x * (1 + half * dt) + v * (1 + half * (1 - t)) * dt
    return mean, diffusion * torch.sqrt(-dt)


def cps_mean_std(
    x: Tensor, v: Tensor, t: Tensor | float, t_next: Tensor | float, noise_level: float
) -> tuple[Tensor, Tensor]:
    """Mean and std of the coefficient-preserving step (Flow-CPS, arXiv 2509.05952), fp32.

    std = t_next sin(a pi/2), mean = (1-t_next) x0 + sqrt(t_next^2 - std^2) eps, where x0 and eps
    are the clean picture and the noise that v implies. The total noise stays on schedule; the last
    step is deterministic.
    """
    x, v = x.float(), v.float()
    t, t_next = _per_image(t, x), _per_image(t_next, x)
    std = t_next * math.sin(noise_level * math.pi / 2)
    clean, noise = x - t * v, x + (1 - t) * v
    mean = (1 - t_next) * clean + torch.sqrt((t_next.square() - std.square()).clamp_min(0)) * noise
    return mean, std


def transition_logprob(
    x_next: Tensor,
    mean: Tensor,
    std: Tensor,
    kind: Literal["sde", "cps"] = "sde",
    logprob: LogProb = "released",
) -> Tensor:
    """Log-prob of a step, averaged over all elements of an image: [...] fp32.

    released  "sde": mean of -(x_next - mean)^2 / (2 std^2), no constants (about -1/2 for a fresh
              draw); "cps": mean of -(x_next - mean)^2, no variance either
    gaussian  the mean over elements of the Gaussian log density, constants and all
    A step without noise (std 0) has log-prob 0 in either: it is no choice.
    """
    _choice("logprob", logprob, LogProb)
    square = (x_next.float() - mean).square()
    std = torch.as_tensor(std, dtype=torch.float32)
    noisy = std > 0
    safe = torch.where(noisy, std, 1.0)
    if logprob == "gaussian":
        terms = -square / (2 * safe.square()) - torch.log(safe) - 0.5 * math.log(2 * math.pi)
    elif kind == "sde":
        terms = -square / (2 * safe.square())
    else:
        terms = -square
    return torch.where(noisy.to(terms.device), terms, 0.0).mean((-2, -1))


def sde_step(
    x: Tensor,
    v: Tensor,
    t: Tensor | float,
    t_next: Tensor | float,
    noise_level: float,
    noise: Tensor,
    sigma: Sigma = "second_point",
    logprob: LogProb = "released",
) -> StochasticStep:
    """One SDE step with the given noise z ~ N(0, 1), [..., n, C]; see `sde_mean_std`."""
    mean, std = sde_mean_std(x, v, t, t_next, noise_level, sigma)
    x_next = (mean + std * noise).detach()
    return StochasticStep(x_next, mean, std, transition_logprob(x_next, mean, std, "sde", logprob))


def cps_step(
    x: Tensor,
    v: Tensor,
    t: Tensor | float,
    t_next: Tensor | float,
    noise_level: float,
    noise: Tensor,
    logprob: LogProb = "released",
) -> StochasticStep:
    """One CPS step with the given noise z ~ N(0, 1), [..., n, C]; see `cps_mean_std`."""
    mean, std = cps_mean_std(x, v, t, t_next, noise_level)
    x_next = (mean + std * noise).detach()
    return StochasticStep(x_next, mean, std, transition_logprob(x_next, mean, std, "cps", logprob))


# --- guidance -------------------------------------------------------------------------------------


def _image_norms(v: Tensor, lengths: Sequence[int] | None, norm_over: NormOver) -> Tensor:
    """Norm of each image over all its tokens and channels, shaped to broadcast against v."""
    if norm_over == "call":
        return torch.linalg.vector_norm(v)
    if lengths is None:
        return torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
    # Image by image, so that a norm does not depend on what else is in the batch.
    norms = [torch.linalg.vector_norm(image) for image in v.split(list(lengths))]
    return torch.cat([norm.expand(n, 1) for norm, n in zip(norms, lengths, strict=True)])


def guide(
    cond: Tensor,
    text_uncond: Tensor | None,
    image_uncond: Tensor | None,
    settings: DrawSettings,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """The guided velocity, fp32, from the velocities of the branches.

    cond, text_uncond, image_uncond: [..., n, C] with one image a leading index, or, with `lengths`,
    [sum of lengths, C] with the images' tokens one after another. A branch that is None equals the
    conditional one, so it is folded and need not be run; for the image branch this means
    v = b + s_eff (a - b) with s_eff = 1 + s_img (s_text - 1), before the renorm.

    With a = cond, b = text_uncond, c = image_uncond, g = b + s_text (a - b), and the ratio of norms
    clamped to [renorm_min, 1]:
    global        u = c + s_img (g - c); u |a| / |u|, norms over each image (or over the call)
    channel       the same with norms over the channels of each token
    text_channel  g' = g |a| / |g| per token; c + s_img (g' - c)
    s_text <= 1 gives a; s_img <= 1 leaves the image step out. Whether a step is guided at all
    (`settings.guided(t)`) is the caller's question.
    """
    cond = cond.float()
    if settings.text_scale <= 1:
        return cond
    uncond = cond if text_uncond is None else text_uncond.float()
    base = cond if image_uncond is None else image_uncond.float()

    def toward_image(v: Tensor) -> Tensor:
        return base + settings.image_scale * (v - base) if settings.image_scale > 1 else v

    def renormed(v: Tensor) -> Tensor:
        if settings.renorm == "global":
            goal = _image_norms(cond, lengths, settings.norm_over)
            norm = _image_norms(v, lengths, settings.norm_over)
        else:
            goal = torch.linalg.vector_norm(cond, dim=-1, keepdim=True)
            norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
        return v * (goal / (norm + NORM_EPSILON)).clamp(settings.renorm_min, 1.0)

    guided = uncond + settings.text_scale * (cond - uncond)
    if settings.renorm == "text_channel":
        return toward_image(renormed(guided))
    return renormed(toward_image(guided))


# --- noise windows --------------------------------------------------------------------------------

# The released code's own domain separator; kept only because the published windows depend on it.
_RELEASED_WINDOW_DOMAIN = "clean29529_g012_local_sde_window_seed_v1|"


def released_window_start(
    identity: tuple[int, int, int, int] | None,
    window_range: tuple[int, int] = (0, 25),
    length: int = 2,
) -> int:
    """First step of the released sampler's noise window, by its published rule.

    identity: (experiment seed, logical step, trajectory index, round index) of an edit; None for a
    first image, whose window is constant. The window
    lies in [low, high) = window_range.
    """
    rng = random.Random(0)
    if identity is not None:
        name = _RELEASED_WINDOW_DOMAIN + "|".join(str(int(part)) for part in identity)
        rng = random.Random(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))
    return rng.randint(window_range[0], _last_start(window_range, length))


def sample_window_start(
    window_range: tuple[int, int], length: int, generator: torch.Generator
) -> int:
    """A uniform first step such that `length` steps lie in [low, high), from a named stream."""
    low, last = window_range[0], _last_start(window_range, length)
    return int(torch.randint(low, last + 1, (), generator=generator))


def _last_start(window_range: tuple[int, int], length: int) -> int:
    low, high = window_range
    if length < 1 or high - length < low:
        raise ValueError(f"a window of {length} steps does not fit the range {window_range}")
    return high - length
