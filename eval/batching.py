"""Images of many requests, judged together: a queue, one thread that judges, outcomes by item.

    batcher = Batcher(reward, max_batch=64, max_wait=0.01, max_pending=8192)
    batcher.start()                                    # in a running event loop
    outcomes = await batcher.submit(images, rows)      # Verdicts, or Faults, in order

A row that the judge cannot serve is a fault of that item: the rest of its batch is judged all the
same. A batch that does not fit into memory is halved.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from eval.verdict import Verdict
from umm_reflect.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from eval.rewards.registry import Reward

# row: the caller's fault. judge: it did not answer, come again. bug: ours.
FaultKind = Literal["image", "row", "judge", "bug"]


@dataclass(frozen=True)
class Fault:
    """Why an item has no verdict."""

    kind: FaultKind
    message: str


Outcome = Verdict | Fault


class Busy(Exception):
    """Too many images wait already."""


@dataclass
class _Work:
    image: Image
    row: dict[str, Any]
    outcome: asyncio.Future[Outcome]


class Batcher:
    """One reward, one thread: a device has one user."""

    def __init__(self, reward: Reward, max_batch: int, max_wait: float, max_pending: int):
        self.reward = reward
        self.max_batch, self.max_wait, self.max_pending = max_batch, max_wait, max_pending
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self.last_work = time.monotonic()
        self.offloaded = False
        self._waiting: deque[_Work] = deque()
        self._news = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._task: asyncio.Task[None] | None = None
        self._judged_now: list[_Work] = []

    @property
    def pending(self) -> int:
        """Images that wait."""
        return len(self._waiting)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Ends: what waits, or is being judged, is a fault of the judge; its caller tries again."""
        if self._task is not None:
            self._task.cancel()
        await asyncio.to_thread(self._thread.shutdown)
        for work in (*self._judged_now, *self._waiting):
            if not work.outcome.done():
                work.outcome.set_result(Fault("judge", "the service is ending"))
        self._waiting.clear()

    async def submit(
        self, images: Sequence[Image], rows: Sequence[dict[str, Any]]
    ) -> list[Outcome]:
        """An outcome for each image, in order. Errors: Busy."""
        if len(self._waiting) + len(images) > self.max_pending:
            raise Busy(f"{len(self._waiting)} images wait already (at most {self.max_pending})")
        loop = asyncio.get_running_loop()
        works = [_Work(i, r, loop.create_future()) for i, r in zip(images, rows, strict=True)]
        self._waiting.extend(works)
        self._news.set()
        return list(await asyncio.gather(*(work.outcome for work in works)))

    async def offload(self) -> None:
        """The weights leave the device, after what is being judged."""
        if hasattr(self.reward, "offload") and not self.offloaded:
            await asyncio.get_running_loop().run_in_executor(self._thread, self.reward.offload)
            self.offloaded = True
            self.counts["offloads"] += 1

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._news.wait()
            if len(self._waiting) < self.max_batch and self.max_wait:
                await asyncio.sleep(self.max_wait)
            batch = [
                self._waiting.popleft() for _ in range(min(self.max_batch, len(self._waiting)))
            ]
            if not self._waiting:
                self._news.clear()
            if not batch:
                continue
            began = time.monotonic()
            self.offloaded, self._judged_now = False, batch
            images, rows = [work.image for work in batch], [work.row for work in batch]
            outcomes = await loop.run_in_executor(
                self._thread, outcomes_of, self.reward, images, rows
            )
            self.last_work = time.monotonic()
            self.seconds += self.last_work - began
            self.counts["batches"] += 1
            for work, outcome in zip(batch, outcomes, strict=True):
                self.counts[_sort(outcome)] += 1
                if not work.outcome.done():
                    work.outcome.set_result(outcome)


def _sort(outcome: Outcome) -> str:
    if isinstance(outcome, Fault):
        return f"fault_{outcome.kind}"
    return "judged" if outcome.error is None else "unjudged"


def outcomes_of(
    reward: Reward, images: Sequence[Image], rows: Sequence[dict[str, Any]]
) -> list[Outcome]:
    """What the reward says of each image; never raises for what one of them is."""
    try:
        verdicts = reward.score(images, rows)
        assert len(verdicts) == len(images), (len(verdicts), len(images))
        return list(verdicts)
    except UserError as error:
        return [Fault("judge", str(error))] * len(images)
    except Exception as error:
        of_one_row = isinstance(error, ValueError)
        if (of_one_row or _no_memory(error)) and len(images) > 1:
            half = len(images) // 2
            return [
                *outcomes_of(reward, images[:half], rows[:half]),
                *outcomes_of(reward, images[half:], rows[half:]),
            ]
        if of_one_row:
            return [Fault("row", _line(error))]
        print(f"error: the judge failed on {len(images)} images", file=sys.stderr)
        traceback.print_exc()
        return [Fault("bug", f"the judge failed ({type(error).__name__}); see its log")] * len(
            images
        )


def _no_memory(error: Exception) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
