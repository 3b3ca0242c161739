"""How the training state lies on the processes: whole (one process), replicated (DDP) or sharded
(FSDP2). `learner.py` speaks to one of these; `zero.py` is the one of DeepSpeed.

A layout wraps the module, owns the `Masters`, adds up gradients in fp32 over batches and processes,
and turns an entry (a trainable parameter by its number) from this process's part into the whole
tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from umm_reflect.training.masters import Masters, OptimizerSettings, StepReport
from umm_reflect.training.processes import Processes


class Whole:
    """One process: whole tensors, masters beside working copies in the compute dtype."""

    def __init__(
        self,
        step: nn.Module,
        names: list[str],
        settings: OptimizerSettings,
        processes: Processes,
        dtype: torch.dtype,
        legacy_bf16: bool,
    ):
        self.processes, self.names, self.dtype = processes, names, dtype
        named = dict(step.bagel.named_parameters())
        self.parameters = [named[name] for name in names]
        masters = []
        for p in self.parameters:
            masters.append(p.detach() if legacy_bf16 else p.detach().float())
            p.data = p.data.to(dtype)
        working = [p.detach() for p in self.parameters]
        shapes = [p.shape for p in self.parameters]
        self.masters = Masters(names, working, shapes, settings, masters=masters)
        self.module: nn.Module = step
        self._sums: list[Tensor] | None = None
        self._added = False

    def backward(self, loss: Tensor, last: bool) -> None:
        if loss.requires_grad:  # a batch may touch nothing that is trained
            loss.backward()
        mine = self.masters
        if any(m.dtype != p.dtype for m, p in zip(mine.masters, self.parameters, strict=True)):
            self._add([p.grad for p in self.parameters])
            for p in self.parameters:
                p.grad = None

    @torch.no_grad()
    def _add(self, grads: list[Tensor | None], entries: list[int] | None = None) -> None:
        """Gradients of some entries (default: of all) into the fp32 sums."""
        if self._sums is None:
            self._sums = [torch.zeros_like(master) for master in self.masters.masters]
        elif not self._added:
            torch._foreach_zero_(self._sums)
        self._added = True
        sums = self._sums if entries is None else [self._sums[i] for i in entries]
        for total, grad in zip(sums, grads, strict=True):
            if grad is not None:
                total.add_(grad)

    def step(self, lr_factor: float) -> StepReport:
        grads = self._gradients()
        report = self.masters.step(grads, lr_factor)
        for p in self.parameters:
            p.grad = None
        self._added = False
        return report

    def _gradients(self) -> list[Tensor]:
        """This process's part of the sums; zeros for what no batch has touched."""
        if self._sums is not None:
            if not self._added:
                torch._foreach_zero_(self._sums)
            return self._sums
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]

    def whole(self, entry: int, part: Tensor) -> Tensor:
        """The whole tensor of an entry from every process's part of it."""
        return part

    def saved(self, entry: int, part: Tensor) -> Tensor:
        """The part as a checkpoint wants it: with its place in the whole."""
        return part

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The model's weights are whole on every process while the block runs."""
        yield


class Replicated(Whole):
    """DDP: whole tensors everywhere. Gradients are added up in fp32 whatever the model computes in,
    and go over the wire with an update's last batch."""

    def __init__(self, step, names, settings, processes, dtype, legacy_bf16):
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(step, names, settings, processes, dtype, legacy_bf16)
        for master in self.masters.masters:  # one start for all
            dist.broadcast(master, 0)
        self.masters.publish()
        # torch 2.13 calls broadcast_buffers otherwise; the tables are the same everywhere
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options = {buffers: False, "gradient_as_bucket_view": True, "init_sync": False}
        self.module = DistributedDataParallel(step, **options)
        self._entry = {id(p): i for i, p in enumerate(self.parameters)}
        self._last = True
        self.module.register_comm_hook(None, self._reduce)

    def backward(self, loss: Tensor, last: bool) -> None:
        self._last = last
        loss.backward()
        for p in self.parameters:
            p.grad = None

    def _reduce(self, _state, bucket):
        """DDP hands over a `GradBucket` as soon as the backward pass has made it, and waits for the
        future (it compares annotations as objects, which postponed ones are not)."""
        entries = [self._entry[id(p)] for p in bucket.parameters()]
        self._add(bucket.gradients(), entries)
        buffer = bucket.buffer()
        if not self._last:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        sums = [self._sums[i] for i in entries]
        flat = torch.cat([total.reshape(-1) for total in sums])
        work = dist.all_reduce(flat, async_op=True)

        def spread(_) -> Tensor:
            flat.div_(self.processes.world)
            parts = flat.split([total.numel() for total in sums])
            torch._foreach_copy_(
                sums, [part.view_as(total) for part, total in zip(parts, sums, strict=True)]
            )
            return buffer

        return work.get_future().then(spread)


class Sharded(Whole):
    """FSDP2 (`fully_shard`): every process holds a slice of every tensor, trained or frozen. The
    slices of trained ones are fp32 and their own masters; layers are gathered in the compute dtype
    when they run, and gradients are reduced in fp32 after each batch."""

    def __init__(self, step, names, settings, processes, dtype, legacy_bf16):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.processes, self.names, self.dtype = processes, names, dtype
        mesh = init_device_mesh(processes.device.type, (processes.world,))
        reduce = dtype if legacy_bf16 else torch.float32
        # rotations and times enter in fp32: inputs are not to be cast
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False
        )
        self._units: list[nn.Module] = []
        for unit in units(step):
            for p in unit.parameters():
                if p.requires_grad and not legacy_bf16 and not _is_sharded(p):
                    p.data = p.data.float()
            fully_shard(unit, mesh=mesh, mp_policy=policy)
            self._units.append(unit)
        self.module = step
        named = dict(step.bagel.named_parameters())
        self.parameters = [named[name] for name in names]
        self._mesh = mesh
        local = [p.to_local().detach() for p in self.parameters]
        self.masters = Masters(
            names,
            local,
            [p.shape for p in self.parameters],
            settings,
            masters=local,
            square_sum=processes.sum,
            gather=self.whole,
            cut=self._cut,
        )

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def _gradients(self) -> list[Tensor]:
        return [
            torch.zeros_like(master) if p.grad is None else p.grad.to_local()
            for p, master in zip(self.parameters, self.masters.masters, strict=True)
        ]

    def step(self, lr_factor: float) -> StepReport:
        report = self.masters.step(self._gradients(), lr_factor)
        for p in self.parameters:
            p.grad = None
        return report

    def whole(self, entry: int, part: Tensor) -> Tensor:
        return self.saved(entry, part).full_tensor()

    def saved(self, entry: int, part: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        like = self.parameters[entry]
        return DTensor.from_local(
            part,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def _cut(self, entry: int, whole: Tensor) -> Tensor:
        """This process's slice of a whole tensor."""
        parts = whole.chunk(self.processes.world)
        rank = self.processes.rank
        return parts[rank] if rank < len(parts) else whole[:0]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The hooks are off meanwhile: whoever runs the model then starts no collective."""
        kept = []
        for unit in self._units:
            unit.unshard()
            kept.append((unit, unit._forward_pre_hooks, unit._forward_hooks))
            unit._forward_pre_hooks, unit._forward_hooks = type(kept[-1][1])(), type(kept[-1][2])()
        try:
            yield
        finally:
            for unit, before, after in kept:
                unit._forward_pre_hooks, unit._forward_hooks = before, after
                unit.reshard()


def _is_sharded(p: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(p, DTensor)


def units(step: nn.Module) -> Iterator[nn.Module]:
    """What is gathered at a time: each layer of the decoder and of the vision tower, the two
    vocabulary matrices, and last the rest. A forward must call each of them."""
    language = step.bagel.language_model
    yield from language.model.layers
    yield from step.bagel.vit_model.vision_model.encoder.layers
    yield language.model.embed_tokens
    yield language.lm_head
    yield step
