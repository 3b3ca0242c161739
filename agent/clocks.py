"""Where the time and the memory of a run go: nested parts, and what the host held meanwhile.

watch = Stopwatch(device)
watch.wrap(engine, "caches", lambda: "prefill")
with HostMemory() as host, watch.part("load"):
    bagel = Bagel.from_pretrained(folder)
print(watch.parts, host.grown)
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class Part:
    """One timed part. own: its seconds without those of the parts inside it."""

    name: str
    inside: str
    seconds: float = 0.0
    own: float = 0.0


class Stopwatch:
    """Times parts, also nested ones; the device is waited for at both ends of each."""

    def __init__(self, device: torch.device):
        self.device = device
        self.parts: list[Part] = []
        self._open: list[Part] = []

    @contextmanager
    def part(self, name: str) -> Iterator[Part]:
        """Time the block; its `Part` joins `parts` when it ends without an error."""
        part = Part(name, self._open[-1].name if self._open else "")
        self._wait()
        self._open.append(part)
        began = time.perf_counter()
        yield part
        self._wait()
        part.seconds = time.perf_counter() - began
        part.own += part.seconds
        self._open.pop()
        if self._open:
            self._open[-1].own -= part.seconds
        self.parts.append(part)

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def wrap(self, owner: Any, method: str, name: Callable[[], str]) -> None:
        """Time each call of a method of one object whose first argument is not empty."""
        call = getattr(owner, method)

        def timed(work, *args, **options):
            if not len(work):
                return call(work, *args, **options)
            with self.part(name()):
                return call(work, *args, **options)

        setattr(owner, method, timed)


class HostMemory:
    """Memory of this process while a block runs, in bytes; 0 where the system does not tell.

    grown: by how much the peak of all resident pages exceeds what was resident before. Pages of a
    mapped file count there, though the system may drop them at any time; `anonymous` is the growth
    without them and `file_backed` theirs alone (sampled every 5 ms). process_peak: the peak of the
    process in all its life.
    """

    def __init__(self) -> None:
        self.grown = self.anonymous = self.file_backed = self.process_peak = 0

    def __enter__(self) -> HostMemory:
        # starts VmHWM anew, where the system can; the samples are the peak where it cannot
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _resident()
        self._peak = dict(self._before)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        growth = {name: self._peak[name] - value for name, value in self._before.items()}
        high = _resident().get("VmHWM", 0) if growth.get("VmHWM") else 0
        self.grown = max(growth.get("VmRSS", 0), high - self._before.get("VmRSS", 0))
        self.anonymous = growth.get("RssAnon", 0)
        self.file_backed = growth.get("RssFile", 0)
        unit = 1 if sys.platform == "darwin" else 1024
        self.process_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            for name, value in _resident().items():
                self._peak[name] = max(self._peak[name], value)


def _resident() -> dict[str, int]:
    """Bytes by name from /proc/self/status; {} where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        return {}
    wanted = ("VmHWM", "VmRSS", "RssAnon", "RssFile")
    pairs = (line.split(":", 1) for line in lines if line.startswith(wanted))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
