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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from umm_reflect.model import Bagel, compile_operations
from umm_reflect.packing import PackedBatch, TrainingOutput, training_forward
from umm_reflect.training.masters import OptimizerSettings, StepReport
from umm_reflect.training.parts import empty_batch, with_all_parts
from umm_reflect.training.processes import STRATEGIES, Processes, Strategy
from umm_reflect.training.sharding import Replicated, Sharded, Whole

__all__ = [
    "Learner",
    "OptimizerSettings",
    "Step",
    "StepReport",
    "Strategy",
    "empty_batch",
    "training_step",
]


Out = TypeVar("Out")


@dataclass(frozen=True)
class Step(Generic[Out]):
    """A forward that a learner can wrap. Each process that runs it runs the same modules.

    run(bagel, batch, times_I, x_BGC, recompute): what losses read as a plain tuple, in which
    wrappers find the tensors: first one of scored tokens [S], last the velocity [B, G, C]; none is
    a view, since wrappers hang hooks on them. x_BGC: latents, or the noise for them, as `run` has
    it. read: the tuple as the losses want it.
    """

    run: Callable[[Bagel, PackedBatch, Tensor, Tensor, bool], tuple[Tensor, ...]]
    read: Callable[..., Out]

    def __call__(self, bagel: Bagel, batch, times_I: Tensor, x_BGC: Tensor, recompute: bool) -> Out:
        """The same without a learner."""
        return self.read(*self.run(bagel, batch, times_I, x_BGC, recompute))


def _run_training(
    bagel: Bagel, batch: PackedBatch, times_I: Tensor, noise_BGC: Tensor, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out = training_forward(bagel, batch, times_I, noise_BGC, recompute=recompute)
    return out.ce_S, out.right_S, out.velocity_BGC.clone()


def _read_training(ce_S: Tensor, right_S: Tensor, velocity_BGC: Tensor) -> TrainingOutput:
    """The hidden states are not kept."""
    return TrainingOutput(ce_S, right_S, velocity_BGC, (), ())


training_step = Step(_run_training, _read_training)


class Stepped(nn.Module):
    """A step over packed batches, as the module that wrappers wrap."""

    def __init__(self, bagel: Bagel, step: Step, recompute: bool):
        super().__init__()
        self.bagel = bagel
        self.step = step
        self.recompute = recompute

    def forward(self, batch: PackedBatch, times_I: Tensor, x_BGC: Tensor) -> tuple[Tensor, ...]:
        recompute = self.recompute and torch.is_grad_enabled()
        return self.step.run(self.bagel, batch, times_I, x_BGC, recompute)


class Learner(Generic[Out]):
    """Trains the parameters that require a gradient when it is built.

    strategy: none (one process), ddp (whole weights everywhere), fsdp2 (everything sharded),
    deepspeed; auto: none for one process, fsdp2 for several. recompute: run layers again in the
    backward pass. compile: fuse norms and rotations. legacy_bf16: no fp32 masters, as the published
    run had it (nearly all updates round away at its rates); for comparison only. forward: what is
    run over a batch and read by the losses (`rl.replay.replay_step` for RL).
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
        forward: Step[Out] = training_step,
    ):
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy is {strategy!r}; choose one of {', '.join(STRATEGIES)}")
        if strategy == "none" and processes.world > 1:
            raise ValueError(f"strategy none is for one process, and there are {processes.world}")
        if strategy == "auto":
            strategy = "none" if processes.world == 1 else "fsdp2"
        if strategy != "none" and processes.group is None:
            raise ValueError(f"strategy {strategy} needs a group: processes = start({strategy!r})")
        self.bagel, self.processes, self.strategy = bagel, processes, strategy
        self.settings = optimizer
        self.trainable = [name for name, p in bagel.named_parameters() if p.requires_grad]
        if not self.trainable:
            raise ValueError("no parameter requires a gradient: there is nothing to train")
        if compile:
            compile_operations()
        bagel.train()
        self._forward = forward
        self._stepped = Stepped(bagel, forward, recompute)
        layout = _layout(strategy)
        self._layout = layout(
            self._stepped, self.trainable, optimizer, processes, bagel.dtype, legacy_bf16
        )

    @property
    def module(self) -> nn.Module:
        """What the strategy has wrapped around the forward."""
        return self._layout.module

    # --- one update -------------------------------------------------------------------------------

    def forward(self, batch: PackedBatch, times_I: Tensor, x_BGC: Tensor) -> Out:
        """One forward over a packed batch on the device. Several processes make the same number of
        them; one that has no data left takes `empty_batch`."""
        gen = batch.cell_BG.shape[1]
        if self.strategy != "none":
            batch, times_I, x_BGC = with_all_parts(batch, times_I, x_BGC, self.bagel.config)
        *rest, velocity_BGC = self.module(batch, times_I, x_BGC)
        return self._forward.read(*rest, velocity_BGC[:, :gen])

    def backward(self, total_loss: Tensor, last: bool) -> None:
        """Add the gradient of a loss to this update's. last: of its batches, so that what goes over
        the wire once an update goes now."""
        self._layout.backward(total_loss, last)

    def step(self, lr_factor: float) -> StepReport:
        """One update with all learning rates times lr_factor. A gradient norm that is not finite
        changes nothing, on any process."""
        return self._layout.step(lr_factor)

    # --- weights ----------------------------------------------------------------------------------

    def weights(
        self, *, dtype: torch.dtype = torch.bfloat16, trained_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """(name in the model, whole tensor on the CPU) one by one, on rank 0; the others, which
        must call it too, get none. Trained ones come from their masters, rounded once."""
        return self._stream(False, dtype, trained_only)

    def ema_weights(
        self, *, dtype: torch.dtype = torch.bfloat16, trained_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """As `weights`, the moving averages in place of the masters."""
        return self._stream(True, dtype, trained_only)

    @torch.no_grad()
    def _stream(
        self, averaged: bool, dtype: torch.dtype, trained_only: bool
    ) -> Iterator[tuple[str, Tensor]]:
        entries = {name: i for i, name in enumerate(self.trainable)}
        for name, tensor in self.bagel.state_dict().items():
            if name in entries:
                whole = self._layout.trained(entries[name], averaged)
            elif trained_only:
                continue
            else:
                whole = self._layout.frozen(name, tensor)
            if self.processes.main:
                yield name, whole.detach().to("cpu", dtype).contiguous()

    @contextmanager
    def inference(self, averaged: bool = False) -> Iterator[Bagel]:
        """The model in eval mode, whole on every process, for drawing and speaking while the block
        runs; averaged: with the moving averages. Every process enters and leaves; inside, nobody
        waits for the others."""
        self.bagel.eval()
        try:
            with self._layout.gathered(averaged):
                yield self.bagel
        finally:
            self.bagel.train()

    # --- resume -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Masters, moments, averages and the step counter by name, this process's part of them:
        tensors, or DTensors where sharded, to be filled in place. Names and whole shapes (see
        `state_shapes`) do not depend on the strategy and the number of processes."""
        return self._layout.state()

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → whole shape of everything that all processes together save."""
        return self._layout.state_shapes()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` of this learner gave, once it is filled, or another's of the
        same strategy. Errors: ValueError when names or shapes differ."""
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
        self._layout.load(state)


def _layout(strategy: Strategy) -> type[Whole]:
    if strategy == "deepspeed":
        from umm_reflect.training.zero import DeepSpeed

        return DeepSpeed
    return {"none": Whole, "ddp": Replicated, "fsdp2": Sharded}[strategy]
