"""SIGTERM and Ctrl-C as something a training loop looks at between two steps.

with noticed_signals() as stopped:
    while not done and not stopped:
        ...
if stopped:
    save(...)
    return 128 + stopped[0]
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noticed_signals() -> Iterator[list[int]]:
    """A list that gets the number of a SIGTERM or SIGINT; the run ends at its next look."""
    noticed: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: noticed.append(n))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield noticed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
