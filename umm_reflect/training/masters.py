"""fp32 masters, moments and averages of the trainable weights, updated in place, shard by shard.

    masters = Masters(names, parameters, settings, dtype=torch.bfloat16)
    report = masters.step(gradients, lr_factor)      # waits for no device

A process holds whole tensors or its shards of them; elementwise updates do not care. A parameter
that is fp32 is its own master; a bf16 one is a working copy, written after each update. AdamW is
torch's fused kernel, which takes the clipping factor and the skipping of a bad step as tensors;
Muon is that of `optim.py`, on matrices that are gathered for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from umm_reflect.training.optim import (
    EMA_WARMUP,
    MUON_MOMENTUM,
    layer_matrices,
    matrix_shape,
    newton_schulz,
)

# Numbers that Muon and the average handle at a time: 256 MB in fp32.
CHUNK = 1 << 26


@dataclass(frozen=True)
class OptimizerSettings:
    """name: adamw, or muon (matrices of the layers by Muon at muon_lr, the rest by AdamW at lr).

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

    def __post_init__(self) -> None:
        if self.name not in ("adamw", "muon"):
            raise ValueError(f"the optimizer is {self.name!r}; choose adamw or muon")
        for name in ("lr", "muon_lr", "eps", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; give two numbers in [0, 1)")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; give a number above 0, or none")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay is {self.ema_decay}; give a number in (0, 1), or none")


@dataclass(frozen=True)
class StepReport:
    """Scalars on the device; reading them waits for it. grad_norm: global, before clipping, fp32.
    applied: whether the norm was finite; if not, nothing has changed, on any process."""

    grad_norm: Tensor
    applied: Tensor


class Masters:
    """One entry a trainable parameter, in the same order everywhere.

    parameters: what the model computes with, local shards where it is sharded. shapes: of the whole
    parameters. square_sum: adds up the processes' sums of squares (None: each holds whole tensors).
    gather, cut: a shard of entry i to the whole tensor and back, for Muon.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        settings: OptimizerSettings,
        *,
        masters: Sequence[Tensor],
        square_sum: Callable[[Tensor], Tensor] | None = None,
        gather: Callable[[int, Tensor], Tensor] | None = None,
        cut: Callable[[int, Tensor], Tensor] | None = None,
    ):
        self.names, self.shapes, self.settings = list(names), list(shapes), settings
        self.parameters, self.masters = list(parameters), list(masters)
        self._square_sum, self._gather, self._cut = square_sum, gather, cut
        like = self.masters
        device = like[0].device
        whole = [torch.empty(shape, device="meta") for shape in self.shapes]
        muon = [
            settings.name == "muon" and layer_matrices(name, tensor)
            for name, tensor in zip(self.names, whole, strict=True)
        ]
        self._muon = [i for i, by_muon in enumerate(muon) if by_muon]
        self._adamw = [i for i, by_muon in enumerate(muon) if not by_muon]
        zeros = torch.zeros_like
        self.momentum = {i: zeros(like[i]) for i in self._muon}
        self.first = {i: zeros(like[i]) for i in self._adamw}
        self.second = {i: zeros(like[i]) for i in self._adamw}
        self.average = None
        if settings.ema_decay is not None:
            self.average = [master.float().clone() for master in like]
        self.step_count = torch.zeros((), device=device)
        self._steps = torch.zeros(len(like), device=device)

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
        self._adamw_step(grads, lr_factor, 1.0 / factor, 1.0 - go)
        self._muon_step(grads, lr_factor, factor * go, go)
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

    def _adamw_step(
        self, grads: Sequence[Tensor], lr_factor: float, scale: Tensor, skip: Tensor
    ) -> None:
        settings = self.settings
        for decays in (True, False):
            which = [
                i
                for i in self._adamw
                if (len(self.shapes[i]) >= 2) == decays and self.masters[i].numel()
            ]
            if not which:
                continue
            steps = self._steps.unbind()
            adamw(
                [self.masters[i] for i in which],
                [grads[i] for i in which],
                [self.first[i] for i in which],
                [self.second[i] for i in which],
                [],
                [steps[i] for i in which],
                fused=True,
                grad_scale=scale,
                found_inf=skip,
                amsgrad=False,
                beta1=settings.betas[0],
                beta2=settings.betas[1],
                lr=settings.lr * lr_factor,
                weight_decay=settings.weight_decay if decays else 0.0,
                eps=settings.eps,
                maximize=False,
            )

    def _muon_step(
        self, grads: Sequence[Tensor], lr_factor: float, factor: Tensor, go: Tensor
    ) -> None:
        rate = self.settings.muon_lr * lr_factor
        for chunk in self._muon_chunks():
            pieces = []
            for i in chunk:
                grad = grads[i].nan_to_num_(0.0, 0.0, 0.0).mul_(factor)
                self.momentum[i].lerp_(grad, (1 - MUON_MOMENTUM) * go)
                piece = grad.lerp_(self.momentum[i], MUON_MOMENTUM)
                pieces.append(piece if self._gather is None else self._gather(i, piece))
            rows, columns = matrix_shape(pieces[0])
            updates = newton_schulz(torch.stack([p.view(rows, columns) for p in pieces]))
            updates.mul_(max(1.0, rows / columns) ** 0.5)
            for i, update in zip(chunk, updates, strict=True):
                update = update.view(self.shapes[i])
                mine = update if self._cut is None else self._cut(i, update)
                master = self.masters[i]
                if self.settings.weight_decay:
                    master.mul_(1 - rate * self.settings.weight_decay * go)
                master.sub_(mine * (rate * go))

    def _muon_chunks(self) -> list[list[int]]:
        """Entries of one shape, as many as are handled at once."""
        chunks: list[list[int]] = []
        last: dict[torch.Size, list[int]] = {}
        for i in self._muon:
            shape = self.shapes[i]
            chunk = last.get(shape)
            if chunk is None or (len(chunk) + 1) * shape.numel() > CHUNK:
                chunk = last[shape] = []
                chunks.append(chunk)
            chunk.append(i)
        return chunks

    def _average_step(self, go: Tensor) -> None:
        if self.average is None:
            return
        count = self.step_count
        decay = ((1 + count) / (EMA_WARMUP + count)).clamp(max=self.settings.ema_decay)
        weight = (1 - decay) * go
        start = 0
        while start < len(self.average):
            end, size = start + 1, self.average[start].numel()
            while end < len(self.average) and size + self.average[end].numel() <= CHUNK:
                size += self.average[end].numel()
                end += 1
            averages = self.average[start:end]
            apart = torch._foreach_sub([m.float() for m in self.masters[start:end]], averages)
            torch._foreach_mul_(apart, weight)
            torch._foreach_add_(averages, apart)
            start = end

    @torch.no_grad()
    def publish(self, values: Sequence[Tensor] | None = None) -> None:
        """Masters (or other values) into the working copies."""
        values = self.masters if values is None else values
        pairs = [
            (p, v)
            for p, v in zip(self.parameters, values, strict=True)
            if p.data_ptr() != v.data_ptr()
        ]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [v for _, v in pairs])

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
        self.publish(averages)
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
