"""CUDA graphs of a function that is run again and again on tensors that keep their place.

    recorder = make_recorder(device)             # None where there are no such graphs
    result = recorder.record(forward)            # runs it once, and captures it
    output = recorder.replay()                   # the same tensor every time
    recorder.close()

`forward` reads and writes tensors in place, has one tensor as its output, and waits for nothing.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch
from torch import Tensor

# Memory of a graph goes back to the driver only when asked to: after this many recorders.
CLOSED_A_SWEEP = 16

Forward = Callable[[], Tensor]


class NotCaptured(Exception):
    """The function could not be captured. result: of the run before it; None if there was none."""

    def __init__(self, error: Exception, result: Tensor | None):
        self.reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        super().__init__(self.reason)
        self.result = result


class Recorder:
    """The CUDA graphs of one call, one at a time, in one memory pool."""

    def __init__(self, device: torch.device):
        self.side = _side_stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.ready = False
        self._output: Tensor | None = None

    def record(self, forward: Forward) -> Tensor:
        """Run `forward` once, then capture it for `replay`. Returns what the run gave.

        Both on a side stream, so that what libraries set up at a first use is there before the
        capture. The result needs no `record_stream`: the side stream waits before its next work.
        Errors: NotCaptured.
        """
        main = torch.cuda.current_stream(self.side.device)
        self.side.wait_stream(main)
        try:
            with torch.cuda.stream(self.side):
                result = forward()
        except RuntimeError as error:
            raise NotCaptured(error, None) from error
        finally:
            main.wait_stream(self.side)
        graph = torch.cuda.CUDAGraph()
        try:
            with _no_collection(), torch.cuda.stream(self.side):
                # not torch.cuda.graph: it empties the allocator's cache at each capture
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    output = forward()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            # a capture that broke has left the allocator in it
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(self.side.device_index, self.pool)
            raise NotCaptured(error, result) from error
        old, self.graph = self.graph, graph
        if old is not None:  # until now it kept the pool alive
            old.reset()
        self._output, self.ready = output, True
        return result

    def replay(self) -> Tensor:
        """Run the captured step; its output is a tensor that the next replay overwrites."""
        self.graph.replay()
        return self._output

    def forget(self) -> None:
        """The captured step no longer fits."""
        self._output, self.ready = None, False

    def close(self) -> None:
        self.forget()
        if self.graph is not None:
            self.graph.reset()
            self.graph = None
            if next(_closed) % CLOSED_A_SWEEP == 0:
                torch.cuda.empty_cache()


_closed = itertools.count(1)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all calls: libraries keep a workspace for each stream that they have met."""
    return torch.cuda.Stream(device)


def make_recorder(device: torch.device) -> Recorder | None:
    """None where there are no CUDA graphs: static steps run as they are."""
    return Recorder(device) if device.type == "cuda" else None


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection meanwhile: freeing another graph would break the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
