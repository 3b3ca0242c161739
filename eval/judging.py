"""Judge many images at once, on every core, so that the judge never keeps a GPU waiting.

    with Judge(workers=0) as judge:                  # 0: as many processes as there are cores
        judge.start(1700)                            # if it is known early that many will come
        verdicts = judge(images, rows)

The verdicts do not depend on the number of processes: each image is judged by itself.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType

from PIL.Image import Image

from eval.geneval_rules import Row
from eval.shapes import ShapesVerifier
from eval.shapes_templates import draw_all
from eval.verdict import Verdict
from umm_reflect.errors import UserError

FEW = 64  # images, less than a second for one process: it does not pay to start others
CHUNK = 16  # images that a process takes at once; few, since some take ten times as long as others


class Judge:
    """The shapes verifier in a pool of processes, which start when the first large batch comes, or
    is announced."""

    def __init__(self, workers: int = 0):
        """workers: processes; 0: one per core that this process may use, 1: none but this one."""
        self.workers = workers or cores()
        self._pool: ProcessPoolExecutor | None = None

    def start(self, images: int) -> None:
        """Start the processes now, if a batch of so many images will need them: they take seconds,
        most of it for importing the program's main module, which this one need not wait for."""
        if self.workers == 1 or self._pool is not None or images < FEW:
            return
        # "spawn": a process that was forked from one that uses a GPU may hang
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=draw_all)
        for _ in range(self.workers):
            self._pool.submit(cores)  # any task: it starts one process more

    def __call__(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        """One verdict per image and row, in their order.

        Errors: as `ShapesVerifier.score`; UserError when a process dies.
        """
        self.start(len(images))
        if self._pool is None:
            return ShapesVerifier().score(images, rows)
        try:
            return list(self._pool.map(judge_one, images, rows, chunksize=CHUNK))
        except BrokenProcessPool as error:
            raise UserError(
                f"one of {self.workers} judging processes died (too little memory?)",
                "Go on with --resume and fewer --workers.",
            ) from error

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def cores() -> int:
    """The cores that this process may use (all of them where the system does not say)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def judge_one(image: Image, row: Row) -> Verdict:
    """One image, in a process of the pool."""
    return ShapesVerifier().score([image], [row])[0]
