"""Batches for one process or several, and what they make of them, in the order of the batches.

    for batch, made in in_order(batches, producer, processes=4):
        ...

Every process takes the next batch as soon as it has none, so a slow one holds nobody up; the caller
gets them in order, so that a file written from them does not depend on who was fast. A process that
dies (out of memory, killed, a faulty GPU) is replaced, and its batch made again; if the same batch
ends a second one, the run ends and says so. An error that a process reports ends the run as it
would in this one.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from eval.config import EvalConfig
from eval.produce import Made, Producer, without_contexts
from eval.results import Sample
from umm_reflect.errors import UsageError, UserError

TRIES = 2  # processes that may die on one batch

Batch = Sequence[Sample]


def in_order(
    batches: Sequence[Batch], producer: Producer, *, processes: int
) -> Iterator[tuple[Batch, Made]]:
    """(batch, what was made of it), in the order of the batches. processes 1: this one.

    Errors: whatever making a batch raises; UserError when processes die.
    """
    if processes == 1 or len(batches) < 2:
        with producer:
            for batch in batches:
                yield batch, producer(batch)
        return
    team = Team(producer, min(processes, len(batches)))
    try:
        yield from team.run(batches)
    finally:
        team.stop()


def processes(config: EvalConfig) -> int:
    """How many processes --gpus means here. Errors: UsageError for more than there are GPUs."""
    from umm_reflect.device import resolve_device

    kind = resolve_device(config.device).type
    if kind not in ("cuda", "npu"):
        return max(1, config.gpus)
    import torch

    there = getattr(torch, kind).device_count()
    if config.gpus > there:
        raise UsageError(f"--gpus is {config.gpus}, but there are {there}", "Give at most those.")
    return config.gpus or there


class Team:
    """The processes, each with a batch at a time."""

    def __init__(self, producer: Producer, size: int):
        self.producer, self.size = producer, size
        self._members: list[Member] = []

    def run(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, Made]]:
        self._members = [Member(self.producer, place, self.size) for place in range(self.size)]
        waiting = deque(range(len(batches)))
        ready: dict[int, Made] = {}
        deaths = [0] * len(batches)
        for number, batch in enumerate(batches):
            while number not in ready:
                for member in self._members:
                    if member.task is None and waiting:
                        member.give(waiting.popleft(), batches)
                for member in _ready(self._members):
                    task = member.task
                    if (made := member.take()) is not None:
                        ready[task] = made
                        continue
                    deaths[task] += 1
                    self._replace(member, task, deaths[task])
                    waiting.appendleft(task)
            yield batch, ready.pop(number)

    def _replace(self, member: Member, task: int, deaths: int) -> None:
        how = f"process {member.place} of {self.size} died ({_cause(member.process.exitcode)})"
        if deaths >= TRIES:
            raise UserError(
                f"{how}, the second one to die while it made batch {task}",
                "Go on with --resume and a smaller --batch-size (memory?) or fewer --gpus.",
            )
        print(f"{how}; another one takes its place", file=sys.stderr)
        self._members[member.place] = Member(self.producer, member.place, self.size)

    def stop(self) -> None:
        """End all processes, whatever they do."""
        for member in self._members:
            member.end()


class Member:
    """One process and what it is at."""

    def __init__(self, producer: Producer, place: int, of: int):
        # "spawn": a process that was forked from one that uses a GPU may hang
        context = multiprocessing.get_context("spawn")
        self.place, self.task = place, None
        self.pipe, other = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(other, pickle.dumps(producer), place, of), daemon=False
        )
        self.process.start()
        other.close()

    def give(self, task: int, batches: Sequence[Batch]) -> None:
        self.task = task
        try:
            self.pipe.send_bytes(pickle.dumps(list(batches[task])))
        except OSError:  # it has died already: `take` finds that out
            return

    def take(self) -> Made | None:
        """What it made; None if it has died. Errors: the one that it met."""
        try:
            answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            return None
        if isinstance(answer, Made):
            self.task = None
            return answer
        kind, *said = answer
        raise kind(*said)

    def end(self) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(timeout=5)
            if self.process.is_alive():
                self.process.kill()
        self.process.join()


def _ready(members: Sequence[Member]) -> list[Member]:
    """The members that have answered or died; waits for the first."""
    pipes = {member.pipe: member for member in members if member.task is not None}
    return [pipes[pipe] for pipe in wait(list(pipes))]


def _cause(exitcode: int | None) -> str:
    return f"signal {-exitcode}" if exitcode and exitcode < 0 else f"exit code {exitcode}"


def _serve(pipe: Connection, pickled: bytes, place: int, of: int) -> None:
    """A process: batches in, what was made of them out, until the pipe closes."""
    try:
        with pickle.loads(pickled).placed(place, of) as producer:
            while True:
                batch = pickle.loads(pipe.recv_bytes())
                made = producer(batch)
                small = [without_contexts(trajectory) for trajectory in made.trajectories]
                more = [list(map(without_contexts, some)) for some in made.candidates]
                made = replace(made, trajectories=small, candidates=more)
                pipe.send_bytes(pickle.dumps(made))
    except (EOFError, KeyboardInterrupt):
        return
    except UserError as error:
        pipe.send_bytes(pickle.dumps((type(error), error.what, error.remedy)))
    except Exception as error:  # ours to mend: the caller shows where it was
        text = "".join(traceback.format_exception(error))
        pipe.send_bytes(pickle.dumps((RuntimeError, text)))
