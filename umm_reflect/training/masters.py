"""fp32 masters, moments and averages of the trainable weights, updated in place, shard by shard.

    masters = Masters(names, working, [p.float() for p in working], shapes, settings)
    report = masters.step(gradients, lr_factor)      # waits for no device

A process holds whole tensors or its shards of them; elementwise updates do not care. A parameter
that is fp32 is its own master; a bf16 one is a working copy, written after each update. AdamW is
torch's fused kernel, which takes the clipping factor and the skipping of a bad step as tensors;
Muon is that of `optim.py`, on matrices that are gathered for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from umm_reflect.training.optim import (
    EMA_WARMUP,
    MUON_MOMENTUM,
    layer_matrices,
    newton_schulz,
)
from umm_reflect.training.trainable import part_of

# Numbers that Muon and the average handle at a time: 256 MB in fp32.
CHUNK = 1 << 26


@dataclass(frozen=True)
class OptimizerSettings:
    """name: adamw, or muon (matrices of the layers by Muon at muon_lr, the rest by AdamW at lr).

    flow_lr: of what draws (the generation expert, and what leads latents and times in and out),
    None for the same lr as what speaks; adamw alone.
    weight_decay: decoupled, on parameters of two and more dimensions. clip_norm: largest global
    gradient norm, None for no limit. ema_decay: of the moving average of the masters, None for
    none. Defaults: the published ones of BAGEL's fine-tuning.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 2e-6
    muon_lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-15
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    ema_decay: float | None = None
    flow_lr: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ("adamw", "muon"):
            raise ValueError(f"the optimizer is {self.name!r}; choose adamw or muon")
        for name in ("lr", "muon_lr", "eps", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more")
        if self.flow_lr is not None:
            if self.name != "adamw":
                raise ValueError("flow_lr goes with adamw: muon has one rate for all matrices")
            if not 0 <= self.flow_lr < float("inf"):
                raise ValueError(f"flow_lr is {self.flow_lr}; give 0 or more, or none")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; give two numbers in [0, 1)")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; give a number above 0, or none")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay is {self.ema_decay}; give a number in (0, 1), or none")

    def groups(self, names: Sequence[str], shapes: Sequence[torch.Size]) -> list[AdamWGroup]:
        """What AdamW treats alike, of these parameters: matrices decay and the rest does not, and
        what draws has its own rate. Groups may be empty."""
        flow = [self.flow_lr is not None and draws(name) for name in names]
        kinds = [(drawing, len(shape) >= 2) for drawing, shape in zip(flow, shapes, strict=True)]
        return [
            AdamWGroup(
                [i for i, kind in enumerate(kinds) if kind == (drawing, decays)],
                self.flow_lr if drawing else self.lr,
                self.weight_decay if decays else 0.0,
            )
            for drawing in ((False,) if self.flow_lr is None else (False, True))
            for decays in (True, False)
        ]


class AdamWGroup(NamedTuple):
    """Places in a list of parameters, and their learning rate and decay."""

    entries: list[int]
    lr: float
    weight_decay: float


def draws(name: str) -> bool:
    """Whether a parameter belongs to the drawing head: the generation expert (an adapter's too),
    and what leads latents and times into and out of the decoder."""
    return part_of(name) in ("gen", "latents")


@dataclass(frozen=True)
class StepReport:
    """Scalars on the device; reading them waits for it. grad_norm: global, before clipping, fp32.
    applied: whether the norm was finite; if not, nothing has changed, on any process."""

    grad_norm: Tensor
    applied: Tensor


def in_chunks(entries: Iterable[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Neighbouring entries, as many as hold CHUNK numbers together (one that holds more alone)."""
    chunk: list[int] = []
    total = 0
    for i in entries:
        if chunk and total + sizes[i] > CHUNK:
            yield chunk
            chunk, total = [], 0
        chunk.append(i)
        total += sizes[i]
    if chunk:
        yield chunk


class Masters:
    """One entry a trainable parameter, in the same order everywhere.

    parameters: what the model computes with; masters: fp32, and the same tensors where the model
    computes with them; local shards of both where they are sharded. shapes: of the whole
    parameters. square_sum: adds up the processes' sums of squares (None: each holds whole tensors).
    gather, cut: a stack of shards of one shape to whole matrices and back, for Muon.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        masters: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        settings: OptimizerSettings,
        *,
        square_sum: Callable[[Tensor], Tensor] | None = None,
        gather: Callable[[Tensor, torch.Size], Tensor] | None = None,
        cut: Callable[[Tensor], Tensor] | None = None,
    ):
        self.names, self.shapes, self.settings = list(names), list(shapes), settings
        self.parameters, self.masters = list(parameters), list(masters)
        self._square_sum, self._gather, self._cut = square_sum, gather, cut
        self._copied = [
            i
            for i, (p, m) in enumerate(zip(self.parameters, self.masters, strict=True))
            if p.numel() and p.data_ptr() != m.data_ptr()
        ]
        by_muon: dict[torch.Size, list[int]] = {}
        rest = []
        for i, (name, shape) in enumerate(zip(self.names, self.shapes, strict=True)):
            is_muon = settings.name == "muon" and layer_matrices(
                name, torch.empty(shape, device="meta")
            )
            (by_muon.setdefault(shape, []) if is_muon else rest).append(i)
        whole = [shape.numel() for shape in self.shapes]
        self._muon = [chunk for same in by_muon.values() for chunk in in_chunks(same, whole)]
        groups = settings.groups([self.names[i] for i in rest], [self.shapes[i] for i in rest])
        self._adamw = [g._replace(entries=[rest[k] for k in g.entries]) for g in groups]
        zeros = torch.zeros_like
        self._stacks = [zeros(torch.stack([self.masters[i] for i in same])) for same in self._muon]
        self.momentum = {
            i: view
            for same, stack in zip(self._muon, self._stacks, strict=True)
            for i, view in zip(same, stack, strict=True)
        }
        self.first = {i: zeros(self.masters[i]) for i in rest}
        self.second = {i: zeros(self.masters[i]) for i in rest}
        self.average: list[Tensor] | None = None
        if settings.ema_decay is not None:
            self.average = [master.float().clone() for master in self.masters]
        device = self.masters[0].device
        self.step_count = torch.zeros((), device=device)
        self._steps = torch.zeros(len(self.masters), device=device)
        self._step_views = self._steps.unbind()
        self._fused = device.type in ("cuda", "cpu")

    # --- one update -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], lr_factor: float) -> StepReport:
        """One update from gradients in the masters' shapes and dtypes; they are used up. The
        learning rates are those of the settings times lr_factor."""
        norm = self._norm(grads)
        finite = norm.isfinite()
        go = finite.float()
        clip = self.settings.clip_norm
        factor = torch.ones_like(norm) if clip is None else (clip / (norm + 1e-6)).clamp(max=1.0)
        factor = torch.where(finite, factor, 1.0)
        for entries, lr, decay in self._adamw:
            some = [i for i in entries if self.masters[i].numel()]
            if some:
                update = self._adamw_fused if self._fused else self._adamw_plain
                update(some, [grads[i] for i in some], lr * lr_factor, decay, factor, go)
        self._muon_step(grads, lr_factor, factor, go)
        self.step_count.add_(go)
        self._average_step(go)
        self.publish()
        return StepReport(norm, finite)

    def _norm(self, grads: Sequence[Tensor]) -> Tensor:
        some = [grad for grad in grads if grad.numel()]
        if some:
            squares = torch.stack([n.float() for n in torch._foreach_norm(some)]).square().sum()
        else:
            squares = torch.zeros((), device=self.step_count.device)
        return (squares if self._square_sum is None else self._square_sum(squares)).sqrt()

    def _adamw_fused(
        self, entries: list[int], grads: list[Tensor], rate: float, decay: float, factor, go
    ) -> None:
        adamw(
            [self.masters[i] for i in entries],
            grads,
            [self.first[i] for i in entries],
            [self.second[i] for i in entries],
            [],
            [self._step_views[i] for i in entries],
            fused=True,
            grad_scale=1.0 / factor,
            found_inf=1.0 - go,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=rate,
            weight_decay=decay,
            eps=self.settings.eps,
            maximize=False,
        )

    def _adamw_plain(
        self, entries: list[int], grads: list[Tensor], rate: float, decay: float, factor, go
    ) -> None:
        """The same on devices without the fused kernel (NPU)."""
        beta1, beta2 = self.settings.betas
        for i, grad in zip(entries, grads, strict=True):
            grad = grad.nan_to_num_(0.0, 0.0, 0.0).mul_(factor)
            first, second, steps = self.first[i], self.second[i], self._step_views[i]
            steps.add_(go)
            first.lerp_(grad, (1 - beta1) * go)
            second.lerp_(grad.square_(), (1 - beta2) * go)
            count = steps.clamp(min=1)
            root = (second / (1 - beta2**count)).sqrt_().add_(self.settings.eps)
            self.masters[i].mul_(1 - rate * decay * go)
            self.masters[i].sub_((first / (1 - beta1**count)).div_(root).mul_(rate * go))

    def _muon_step(
        self, grads: Sequence[Tensor], lr_factor: float, factor: Tensor, go: Tensor
    ) -> None:
        rate = self.settings.muon_lr * lr_factor * go
        for same, momentum in zip(self._muon, self._stacks, strict=True):
            rows, columns = shape = self.shapes[same[0]]
            grad = torch.stack([grads[i] for i in same]).nan_to_num_(0.0, 0.0, 0.0).mul_(factor)
            momentum.lerp_(grad, (1 - MUON_MOMENTUM) * go)
            grad.lerp_(momentum, MUON_MOMENTUM)
            update = newton_schulz(grad if self._gather is None else self._gather(grad, shape))
            update = update if self._cut is None else self._cut(update)
            masters = [self.masters[i] for i in same]
            if self.settings.weight_decay:
                torch._foreach_mul_(masters, 1 - rate * self.settings.weight_decay)
            update = update * (rate * max(1.0, rows / columns) ** 0.5)
            torch._foreach_sub_(masters, list(update.unbind()))

    def _average_step(self, go: Tensor) -> None:
        if self.average is None:
            return
        count = self.step_count
        decay = ((1 + count) / (EMA_WARMUP + count)).clamp(max=self.settings.ema_decay)
        sizes = [average.numel() for average in self.average]
        for some in in_chunks(range(len(sizes)), sizes):
            averages = [self.average[i] for i in some]
            apart = torch._foreach_sub([self.masters[i].float() for i in some], averages)
            torch._foreach_mul_(apart, (1 - decay) * go)
            torch._foreach_add_(averages, apart)

    @torch.no_grad()
    def publish(self) -> None:
        """Masters into the working copies."""
        if self._copied:
            torch._foreach_copy_(
                [self.parameters[i] for i in self._copied], [self.masters[i] for i in self._copied]
            )

    def values(self, averaged: bool = False) -> list[Tensor]:
        """The masters, or their moving averages. Errors: ValueError where there are none."""
        if not averaged:
            return self.masters
        if self.average is None:
            raise ValueError("there is no moving average: set ema_decay")
        return self.average

    @torch.no_grad()
    def swap_in_averages(self) -> list[Tensor]:
        """The averages into the working parameters; returns what was there, for `swap_back`."""
        averages = self.values(averaged=True)
        kept = [p.clone() for p in self.parameters]
        torch._foreach_copy_(self.parameters, averages)
        return kept

    @torch.no_grad()
    def swap_back(self, kept: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self.parameters, list(kept))

    # --- state ------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, tuple[int, Tensor]]:
        """All that a resume needs: "master/NAME", "first/NAME", ... → (entry, live tensor)."""
        parts: dict[str, dict[int, Tensor]] = {
            "master": dict(enumerate(self.masters)),
            "first": self.first,
            "second": self.second,
            "momentum": self.momentum,
            "ema": dict(enumerate(self.average or [])),
        }
        return {
            f"{part}/{self.names[i]}": (i, tensor)
            for part, entries in parts.items()
            for i, tensor in entries.items()
        }

    def loaded(self) -> None:
        """After the live tensors were filled: counters and working copies follow."""
        self._steps.copy_(self.step_count.expand_as(self._steps))
        self.publish()
