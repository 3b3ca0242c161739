"""Parcels from worker processes, in the order of their tasks.

for parcel in feed(reader, tasks, workers=8, pin=True): ...
"""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from sft.batches import Parcel, Reader, Task
from umm_reflect.errors import UserError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

WAIT_SECONDS = 600.0  # for a parcel: one large pack takes seconds
GRACE_SECONDS = 15  # that a worker lives on after SIGTERM
MAX_WORKERS = 16
# Workers hand a parcel over in shared memory, unless there is less of it than so much for each
# (a container has 64 MiB in all, unless told otherwise): then through a pipe, which is slower.
SHARED = "/dev/shm"
SHARED_BYTES = 64 * 2**20


def default_workers(processes: int = 1) -> int:
    """Workers of one of `processes` on this machine: all cores but one each, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(0, min(MAX_WORKERS, (cores or 1) // processes - 1))


def feed(
    reader: Reader, tasks: Iterable[Task], workers: int, *, pin: bool = False, ahead: int = 2
) -> Generator[Parcel, None, None]:
    """The parcels of the tasks, in order. workers: processes, each `ahead` tasks ahead; 0: here.

    Tasks are taken as workers get free; closing the generator ends the workers. Errors: UserError
    of a worker, or that one died.
    """
    if workers == 0:
        yield from map(reader, tasks)
        return
    try:
        for parcel in _loader(reader, tasks, workers, pin, ahead):
            if isinstance(parcel, UserError):
                raise parcel
            yield parcel
    except RuntimeError as error:
        if "DataLoader worker" not in str(error) and "DataLoader timed out" not in str(error):
            raise
        remedy = "Is there memory left? Try fewer --workers, or 0 to see the error itself."
        raise UserError(f"a data worker ended: {str(error).splitlines()[0]}", remedy) from error


def _loader(
    reader: Reader, tasks: Iterable[Task], workers: int, pin: bool, ahead: int
) -> DataLoader:
    from torch.utils.data import DataLoader

    room = shutil.disk_usage(SHARED).free if os.path.isdir(SHARED) else math.inf
    return DataLoader(
        _Parcels(reader, through_pipes=room < workers * ahead * SHARED_BYTES),
        sampler=tasks,
        batch_size=None,
        collate_fn=_itself,
        num_workers=workers,
        prefetch_factor=ahead,
        pin_memory=pin,
        timeout=WAIT_SECONDS,
        multiprocessing_context="fork" if hasattr(os, "fork") else None,
        worker_init_fn=_leave_signals_to_the_trainer,
    )


def _leave_signals_to_the_trainer(_worker: int) -> None:
    """A job that is stopped signals all its processes; this one goes on for a while, so that the
    trainer can end its step and save. It then ends as if it were done, which is no failure.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_SECONDS))


class _Parcels:
    """The reader as what a DataLoader takes: an index is a task."""

    def __init__(self, reader: Reader, through_pipes: bool):
        self.reader, self.through_pipes = reader, through_pipes

    def __getitem__(self, task: Task) -> Parcel | UserError:
        try:
            parcel = self.reader(task)
        except UserError as error:  # a worker's exception would lose its parts on the way
            return error
        return replace(parcel, buffer=parcel.buffer.numpy()) if self.through_pipes else parcel


def _itself(parcel: Parcel) -> Parcel:
    return parcel
