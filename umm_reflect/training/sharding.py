"""How the training state lies on the processes: whole (one process), replicated (DDP) or sharded
(FSDP2). `learner.py` speaks to one of these; `zero.py` is the one of DeepSpeed.

A layout wraps the module, owns the `Masters`, adds up gradients in fp32 over batches and processes,
and turns an entry (a trainable parameter by its number) from this process's part into the whole
tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from umm_reflect.training.masters import Masters, OptimizerSettings, StepReport, in_chunks
from umm_reflect.training.parts import empty_batch, with_all_parts
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
        self.masters = Masters(names, working, masters, shapes, settings)
        self.module: nn.Module = step
        self._apart = any(m.dtype != p.dtype for m, p in zip(masters, working, strict=True))
        self._sums: list[Tensor] | None = None  # fp32, where torch's own sums are not
        self._summed: set[int] = set()

    def backward(self, loss: Tensor, last: bool) -> None:
        if loss.requires_grad:  # a batch may touch nothing that is trained
            loss.backward()
        if self._apart:
            some = [i for i, p in enumerate(self.parameters) if p.grad is not None]
            self._add(some, [self.parameters[i].grad for i in some])
            for i in some:
                self.parameters[i].grad = None

    @torch.no_grad()
    def _add(self, entries: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Gradients of some entries into the fp32 sums."""
        if self._sums is None:
            self._sums = [torch.empty_like(master) for master in self.masters.masters]
        grad = dict(zip(entries, grads, strict=True))
        for new in (True, False):
            some = [i for i in entries if (i not in self._summed) == new]
            for chunk in in_chunks(some, [p.numel() for p in self.parameters]):
                sums = [self._sums[i] for i in chunk]
                room = sums if new else [torch.empty_like(total) for total in sums]
                torch._foreach_copy_(room, [grad[i] for i in chunk])
                if not new:
                    torch._foreach_add_(sums, room)
        self._summed.update(entries)

    def step(self, lr_factor: float) -> StepReport:
        report = self.masters.step(self._gradients(), lr_factor)
        for p in self.parameters:
            p.grad = None
        self._summed.clear()
        return report

    def _gradients(self) -> list[Tensor]:
        """This process's part of the sums; zeros for what no batch has touched."""
        if self._apart:
            self._add([], [])
            untouched = [t for i, t in enumerate(self._sums) if i not in self._summed]
            if untouched:
                torch._foreach_zero_(untouched)
            return self._sums
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]

    def whole(self, entry: int, part: Tensor) -> Tensor:
        """The whole tensor of an entry from every process's part of it."""
        return part

    def trained(self, entry: int, averaged: bool) -> Tensor:
        """The whole master of an entry, or its moving average."""
        return self.whole(entry, self.masters.values(averaged)[entry])

    def frozen(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of any other tensor of the state dict."""
        return tensor

    @contextmanager
    def gathered(self, averaged: bool) -> Iterator[None]:
        """The model's weights are whole on every process while the block runs."""
        kept = self.masters.swap_in_averages() if averaged else None
        try:
            with self._whole_weights():
                yield
        finally:
            if kept is not None:
                self.masters.swap_back(kept)

    def _whole_weights(self) -> AbstractContextManager:
        return nullcontext()

    def forget_gathered(self) -> None:
        """What was gathered of weights before is gathered anew: they were written meanwhile."""

    # --- state ------------------------------------------------------------------------------------

    def saved(self, entry: int, part: Tensor) -> Tensor:
        """The part of an entry as a checkpoint wants it: with its place in the whole."""
        return part

    def state(self) -> dict[str, Tensor]:
        parts = self.masters.tensors()
        state = {name: self.saved(i, tensor) for name, (i, tensor) in parts.items()}
        return {"step_count": self.masters.step_count, **state}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.state().items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.masters.loaded()


class Replicated(Whole):
    """DDP: whole tensors everywhere. Gradients are added up in fp32 whatever the model computes in,
    and go over the wire with an update's last batch."""

    def __init__(self, step, names, settings, processes, dtype, legacy_bf16):
        from torch.nn.parallel import DistributedDataParallel

        one_start(step)
        super().__init__(step, names, settings, processes, dtype, legacy_bf16)
        self._apart = True
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
        self._add(entries, bucket.gradients())
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
    when they run, and gradients are reduced in fp32 after each batch.

    Over several machines, each holds a copy where that fits (see `copies`): then only sums of
    gradients go between machines, with an update's last batch.
    """

    def __init__(self, step, names, settings, processes, dtype, legacy_bf16):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.processes, self.names, self.dtype = processes, names, dtype
        self._apart, self._summed = False, set()
        one_start(step)
        self._copies = copies(step, processes, settings)
        sizes, names_of = (self._copies, processes.world // self._copies), ("copy", "shard")
        used = slice(0 if self._copies > 1 else 1, None)
        mesh = init_device_mesh(processes.device.type, sizes[used], mesh_dim_names=names_of[used])
        reduce = dtype if legacy_bf16 else torch.float32
        # rotations and times enter in fp32: inputs are not to be cast
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False
        )
        self._units: list[nn.Module] = []
        self._ran = False
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
            local,
            [p.shape for p in self.parameters],
            settings,
            square_sum=lambda squares: processes.sum(squares) / self._copies,
            gather=self._gather,
            cut=self._cut,
        )

    def backward(self, loss: Tensor, last: bool) -> None:
        if self._copies > 1:
            self.module.set_requires_all_reduce(last)
        loss.backward()
        self._ran = True

    def _gradients(self) -> list[Tensor]:
        return [
            torch.zeros_like(master) if p.grad is None else p.grad.to_local()
            for p, master in zip(self.parameters, self.masters.masters, strict=True)
        ]

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

    def _gather(self, stack: Tensor, shape: torch.Size) -> Tensor:
        """[n, rows here, columns] → [n, all rows, columns]."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        whole = torch.Size((len(stack), *shape))
        strides = torch.empty(whole, device="meta").stride()
        options = {"run_check": False, "shape": whole, "stride": strides}
        placements = [*[Replicate()] * (self._mesh.ndim - 1), Shard(1)]
        return DTensor.from_local(stack, self._mesh, placements, **options).full_tensor()

    def _cut(self, stack: Tensor) -> Tensor:
        """This process's rows of a stack of whole matrices."""
        parts = stack.chunk(self.processes.world // self._copies, dim=1)
        rank = self._mesh.get_local_rank(self._mesh.ndim - 1)
        return parts[rank] if rank < len(parts) else stack[:, :0]

    def frozen(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if _is_sharded(tensor) else tensor  # buffers are whole

    def forget_gathered(self) -> None:
        for unit in self._units:  # the last one stays gathered after a forward without gradients
            unit.reshard()

    @contextmanager
    def _whole_weights(self) -> Iterator[None]:
        if not self._ran:  # FSDP2 finds out in a first forward what belongs together
            batch = empty_batch(self.module.bagel.config).to(self.processes.device)
            nothing = torch.zeros(0, device=self.processes.device), batch.latent_BGC
            with torch.no_grad():
                self.module(*with_all_parts(batch, *nothing, self.module.bagel.config))
        self.forget_gathered()
        for unit in self._units:
            unit.unshard()
        try:
            with without_hooks(self._units):
                yield
        finally:
            for unit in self._units:
                unit.reshard()


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Forwards of these modules run alone meanwhile, so that they start no collective."""
    kept = [(m, m._forward_pre_hooks, m._forward_hooks) for m in modules]
    for module, before, after in kept:
        module._forward_pre_hooks, module._forward_hooks = type(before)(), type(after)()
    try:
        yield
    finally:
        for module, before, after in kept:
            module._forward_pre_hooks, module._forward_hooks = before, after


@torch.no_grad()
def one_start(step: nn.Module) -> None:
    """What is trained begins as rank 0 has it, whatever the others have drawn."""
    for p in step.parameters():
        if p.requires_grad:
            dist.broadcast(p.data, 0)


def copies(step: nn.Module, processes: Processes, settings: OptimizerSettings) -> int:
    """How many times the weights are held, each time by the processes of one machine: once a
    machine where that takes at most half of a device's memory, else once altogether."""
    machines = processes.world // processes.local_world
    if machines * processes.local_world != processes.world or processes.local_world == 1:
        return 1
    state = 16 if settings.ema_decay is None else 20  # master, gradient, two moments, average
    needed = sum(
        p.numel() * (state if p.requires_grad else p.element_size()) for p in step.parameters()
    )
    if processes.device.type == "cuda":
        memory = torch.cuda.get_device_properties(processes.device).total_memory
        if needed / processes.local_world > memory / 2:
            return 1
    return machines


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
