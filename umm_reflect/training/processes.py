"""The processes of one run: who am I, sums over all, and one failure that stops everybody.

    with start(device="auto") as processes:            # torchrun's environment, or one process
        total = processes.sum(counts)                  # a copy, summed over all
        failed = processes.any(bad, "the loss is nan") # [(rank, why)], the same on every rank

    torchrun --standalone --nproc-per-node 2 -m ...    # gives every process its environment

CUDA talks through NCCL, the CPU through gloo. Flags and barriers always go through gloo, so that
they wait for no GPU. A process whose block ends in an exception tells the others through the store
of the launcher; each has a thread that looks there, so that a process which waits inside of a
collective ends too, within seconds, and says which rank failed and why.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from umm_reflect.device import resolve_device
from umm_reflect.errors import UsageError, UserError

T = TypeVar("T")
# A collective that waits longer than this is given up: longer than rank 0 takes to save 30 GB.
TIMEOUT = timedelta(minutes=15)
# How often a process looks whether another has failed, and how long it may go on after that.
LOOK_SECONDS = 2.0
GRACE_SECONDS = 10.0
Strategy = Literal["auto", "none", "ddp", "fsdp2", "deepspeed"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
BACKENDS = {"cuda": "nccl", "npu": "hccl"}


@dataclass
class Processes:
    """rank of world, local_rank of local_world on this machine, and the device that is ours. main:
    rank 0, which writes files and prints."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None  # gloo, on the CPU; None for one process
    _watch: _Watch | None = None

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, as a copy; every process calls it with the same shape."""
        out = tensor.detach().clone()
        if self.world > 1:
            dist.all_reduce(out, group=self.group if out.device.type == "cpu" else None)
        return out

    def any(self, flag: bool, why: str = "") -> list[tuple[int, str]]:
        """(rank, why) of every process that raises its flag, the same list on all of them. Waits
        for all processes, for no device."""
        if self.world == 1:
            return [(0, why)] if flag else []
        raised = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(raised, group=self.group)
        if not raised.item():
            return []
        said = self.gather((flag, why))
        return [(rank, text) for rank, (up, text) in enumerate(said) if up]

    def gather(self, thing: T) -> list[T]:
        """Every process's `thing` (anything that can be pickled), in the order of the ranks, the
        same on all of them. Waits for all processes, for no device."""
        if self.world == 1:
            return [thing]
        things: list = [None] * self.world
        dist.all_gather_object(things, thing, group=self.group)
        return things

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.any(False)

    def fail(self, why: str) -> str:
        """Tell the others that this process ends; they end too, within a quarter of a minute.
        Returns "rank: why" of another that has failed before, if there is one."""
        return "" if self._watch is None else self._watch.tell(why)

    def close(self) -> None:
        """Leave the group. Nothing of a group works after it."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind, error, _trace) -> None:
        if kind is None or (kind is SystemExit and not error.code):
            self.close()
            return
        # the others may wait in a collective: leaving the group would wait for them
        first = self.fail(f"{kind.__name__}: {error}")
        if first and not isinstance(error, UserError):  # which says enough
            say(self.rank, first)


class _Watch:
    """A thread that looks in the launcher's store whether a process has failed; then this one ends
    too, after a grace in which it may notice by itself."""

    def __init__(self, rank: int):
        self.rank = rank
        # a launcher that starts everybody again keeps its store
        self._key = f"umm_reflect/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = _connect()
        self._told = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="failures", daemon=True)
        self._thread.start()

    def tell(self, why: str) -> str:
        """The first that fails is the one that is named: it, unless it is this one."""
        self._told = True
        mine = f"rank {self.rank}: {why}"[:2000]
        try:
            first = _connect().compare_set(self._key, "", mine).decode()
        except (RuntimeError, dist.DistError) as error:  # the store went with its process
            first = f"the process that keeps the run together is gone ({error})"
        return "" if first == mine else first

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            try:
                text = self._store.get(self._key).decode() if self._store.check([self._key]) else ""
            except (RuntimeError, dist.DistError):
                text = "the process that keeps the run together is gone"
            if text:
                if not self._told and not self._ended.wait(GRACE_SECONDS) and not self._told:
                    say(self.rank, text)
                    os._exit(1)
                return


def say(rank: int, cause: str) -> None:
    sys.stdout.flush()
    print(f"error: rank {rank} ends because of {cause}", file=sys.stderr, flush=True)


def _connect() -> dist.TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=20))


def start(strategy: Strategy = "auto", device: str = "auto") -> Processes:
    """Join the processes that a launcher started (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT), or be the only one.

    strategy: as of `learner.Learner`; all but auto and none need a group, also with one process.
    device: auto|cuda|cpu|npu; on a machine with several, each process takes the one of its local
    rank. Errors: UsageError for an environment or a device that does not fit.
    """
    rank, world, local_rank = _number("RANK", 0), _number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0)
    local_world = _number("LOCAL_WORLD_SIZE", world)
    if not 0 <= rank < world:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE {world}", "Start it through torchrun")
    if strategy not in STRATEGIES:
        raise UsageError(f"there is no strategy '{strategy}'", f"One of {', '.join(STRATEGIES)}.")
    if world > 1 and strategy == "none":
        raise UsageError(
            f"strategy none is for one process, and there are {world}", "Choose ddp or fsdp2"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and world > 1:
        raise UsageError(f"{' and '.join(missing)} not set", "Start it through torchrun")
    found = resolve_device(device)
    if found.index is None and found.type in BACKENDS:
        found = _of_local_rank(found.type, local_rank)
        getattr(torch, found.type).set_device(found)
    if world == 1 and strategy in ("auto", "none"):
        return Processes(device=found)
    try:
        flags = _join(found, rank, world)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"rank {rank} of {world} could not join the others at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} ({error})",
            "See that all are started, with the same address",
        ) from error
    if world == 1:
        return Processes(device=found, group=flags)
    return Processes(rank, world, local_rank, local_world, found, flags, _Watch(rank))


def _join(device: torch.device, rank: int, world: int) -> dist.ProcessGroup:
    """The default group on the device, and one on the CPU, which is returned."""
    backend = BACKENDS.get(device.type, "gloo")
    options: dict = {"device_id": device} if device.type == "cuda" else {}
    if device.type == "npu" and world > 1:
        from accelerate import PartialState

        PartialState(timeout=TIMEOUT)  # knows what an NPU's group needs
    elif world == 1:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)
    else:
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=TIMEOUT, **options)
    return dist.new_group(backend="gloo", timeout=TIMEOUT)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"{name} is '{text}', which is no number", "Start it through torchrun")
    return int(text)


def _of_local_rank(kind: str, local_rank: int) -> torch.device:
    count = getattr(torch, kind).device_count()
    if local_rank >= count:
        raise UsageError(
            f"local rank {local_rank} has no device: this machine shows {count} {kind} devices",
            "Start as many processes as there are devices",
        )
    return torch.device(kind, local_rank)
