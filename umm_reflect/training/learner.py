"""The model under training, whatever shards it: forward, backward, step, and its weights.

    for p in ...: p.requires_grad_(...)                      # what is trained, before
    learner = Learner(bagel, processes, "auto", OptimizerSettings(lr=2e-6), recompute=True,
                      compile=False)
    for batch in batches:                                    # one update
        out = learner.forward(batch, times_I, noise_BGC)     # packing.TrainingOutput
        total = loss(out, ..., processes=processes.world).total
        learner.backward(total, last=batch is batches[-1])
    report = learner.step(lr_factor)                         # its numbers stay on the device
    save(bagel, folder, weights=dict(learner.weights()))     # every process calls weights()

Masters, moments, averages and gradient sums are fp32; the model computes in the dtype in which it
was loaded (bf16 on a GPU).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from umm_reflect.model import Bagel, compile_operations
from umm_reflect.packing import PackedBatch, TrainingOutput, training_forward
from umm_reflect.training.masters import Masters, OptimizerSettings, StepReport
from umm_reflect.training.processes import Processes

__all__ = ["Learner", "OptimizerSettings", "StepReport", "Strategy", "TrainStep"]

Strategy = Literal["auto", "none", "ddp", "fsdp2", "deepspeed"]


class TrainStep(nn.Module):
    """One forward over a packed batch, as the module that wrappers wrap. Returns the fields of
    `TrainingOutput` as a tuple, which wrappers can look into."""

    def __init__(self, bagel: Bagel, recompute: bool):
        super().__init__()
        self.bagel = bagel
        self.recompute = recompute

    def forward(self, batch: PackedBatch, times_I: Tensor, noise_BGC: Tensor) -> tuple:
        recompute = self.recompute and torch.is_grad_enabled()
        out = training_forward(self.bagel, batch, times_I, noise_BGC, recompute=recompute)
        return tuple(getattr(out, f.name) for f in fields(out))


class Learner:
    """Trains the parameters that require a gradient when it is built.

    strategy: none (one process), ddp (whole weights everywhere), fsdp2 (everything sharded),
    deepspeed; auto: none for one process, fsdp2 for several. recompute: run layers again in the
    backward pass. compile: fuse norms and rotations. legacy_bf16: no fp32 masters, as the published
    run had it (nearly all updates round away at its rates); for comparison only.
    Errors: ValueError when nothing is trainable or the strategy does not fit the processes.
    """

    def __init__(
        self,
        bagel: Bagel,
        processes: Processes,
        strategy: Strategy,
        optimizer: OptimizerSettings,
        *,
        recompute: bool,
        compile: bool,  # noqa: A002
        legacy_bf16: bool = False,
    ):
        if strategy not in get_args(Strategy):
            raise ValueError(
                f"strategy is {strategy!r}; choose one of {', '.join(get_args(Strategy))}"
            )
        if strategy == "auto":
            strategy = "none" if processes.world == 1 else "fsdp2"
        self.bagel, self.processes, self.strategy = bagel, processes, strategy
        self.settings = optimizer
        self.trainable = [name for name, p in bagel.named_parameters() if p.requires_grad]
        if not self.trainable:
            raise ValueError("no parameter requires a gradient: there is nothing to train")
        if compile:
            compile_operations()
        self.dtype = bagel.dtype
        bagel.train()
        self.module: nn.Module = TrainStep(bagel, recompute)
        self._build_whole(legacy_bf16)

    # --- none -------------------------------------------------------------------------------------

    def _build_whole(self, legacy_bf16: bool) -> None:
        """Every process holds whole tensors: masters beside working copies in the compute dtype."""
        parameters = self._trained()
        masters = []
        for p in parameters:
            masters.append(p.detach() if legacy_bf16 else p.detach().float())
            p.data = p.data.to(self.dtype)
        self._grads: list[Tensor] | None = None
        self.masters = Masters(
            self.trainable,
            [p.detach() for p in parameters],
            [p.shape for p in parameters],
            self.settings,
            masters=masters,
        )

    def _trained(self) -> list[nn.Parameter]:
        named = dict(self.bagel.named_parameters())
        return [named[name] for name in self.trainable]

    # --- one update -------------------------------------------------------------------------------

    def forward(self, batch: PackedBatch, times_I: Tensor, noise_BGC: Tensor) -> TrainingOutput:
        """One forward over a packed batch on the device. Every process makes as many."""
        return TrainingOutput(*self.module(batch, times_I, noise_BGC))

    def backward(self, total_loss: Tensor, last: bool) -> None:
        """Add the gradient of a loss to this update's. last: of its batches, so that sums over the
        processes are taken now."""
        if total_loss.requires_grad:  # a batch may touch nothing that is trained
            total_loss.backward()
        self._gather_grads()

    @torch.no_grad()
    def _gather_grads(self) -> None:
        """This batch's gradients into the fp32 sums; where parameters are their own masters, torch
        has added them up."""
        mine = self.masters
        if all(m.dtype == p.dtype for m, p in zip(mine.masters, mine.parameters, strict=True)):
            return
        if self._grads is None:
            self._grads = [torch.zeros_like(master) for master in mine.masters]
        for total, p in zip(self._grads, self._trained(), strict=True):
            if p.grad is not None:
                total.add_(p.grad)
                p.grad = None

    def step(self, lr_factor: float) -> StepReport:
        """One update with all learning rates times lr_factor. A gradient norm that is not finite
        changes nothing, on any process."""
        parameters = self._trained()
        grads = self._grads
        if grads is None:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        report = self.masters.step(grads, lr_factor)
        for p in parameters:
            p.grad = None
        self._grads = None
        return report

    # --- weights ----------------------------------------------------------------------------------

    def weights(
        self, *, dtype: torch.dtype = torch.bfloat16, trained_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """(name in the model, whole tensor on the CPU) one by one, on rank 0; the others, which
        must call it too, get none. Trained ones come from their masters, rounded once."""
        return self._stream(self.masters.masters, dtype, trained_only)

    def ema_weights(
        self, *, dtype: torch.dtype = torch.bfloat16, trained_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """As `weights`, the moving averages in place of the masters."""
        if self.masters.average is None:
            raise ValueError("there is no moving average: set ema_decay")
        return self._stream(self.masters.average, dtype, trained_only)

    @torch.no_grad()
    def _stream(
        self, trained: list[Tensor], dtype: torch.dtype, trained_only: bool
    ) -> Iterator[tuple[str, Tensor]]:
        mine = dict(zip(self.trainable, trained, strict=True))
        for name, tensor in self.bagel.state_dict().items():
            if trained_only and name not in mine:
                continue
            whole = mine.get(name, tensor)
            if self.processes.main:
                yield name, whole.detach().to("cpu", dtype).contiguous()

    @contextmanager
    def inference(self, averaged: bool = False) -> Iterator[Bagel]:
        """The model in eval mode, whole, for drawing and speaking while the block runs; averaged:
        with the moving averages. Every process enters and leaves; nothing inside needs others."""
        if averaged and self.masters.average is None:
            raise ValueError("there is no moving average: set ema_decay")
        self.bagel.eval()
        try:
            if averaged:
                kept = self._swap_in_averages()
            yield self.bagel
        finally:
            if averaged:
                self._swap_back(kept)
            self.bagel.train()

    @torch.no_grad()
    def _swap_in_averages(self) -> list[Tensor]:
        kept = [p.clone() for p in self.masters.parameters]
        self.masters.publish(self.masters.average)
        return kept

    @torch.no_grad()
    def _swap_back(self, kept: list[Tensor]) -> None:
        torch._foreach_copy_(self.masters.parameters, kept)

    # --- resume -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Masters, moments, averages and the step counter by name: live tensors, whose names and
        whole shapes do not depend on the number of processes."""
        state = {name: tensor for name, (_, tensor) in self.masters.tensors().items()}
        return {"step_count": self.masters.step_count, **state}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a state of the same names; the live tensors themselves may be given back after
        they were filled. Errors: ValueError when names or shapes differ."""
        own = self.state_dict()
        if odd := sorted(own.keys() ^ state.keys()):
            raise ValueError(
                f"the saved state is of another training: {len(odd)} names differ, {odd[0]} first"
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"the saved {name} is {list(state[name].shape)}, expected {list(tensor.shape)}"
                )
            if tensor is not state[name]:
                tensor.copy_(state[name])
        self.masters.loaded()
