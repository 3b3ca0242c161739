"""Named random streams: every draw belongs to (seed, sample, round, purpose) and to nothing else.

Noise, and the numbers that words are chosen by, then do not depend on batch size, order, the
number of processes or a resume::

    noise = torch.randn(n, 64, generator=stream(seed=0, sample=12, round=1, purpose="latent"))
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def stream_seed(seed: int, sample: int | str, round: int, purpose: str) -> int:  # noqa: A002
    """The 64-bit seed of a stream: the first 8 bytes, big-endian, of the sha256 of the name.

    The name is written as a JSON list, so that no two different tuples share one (the sample 1 is
    not the sample "1").
    """
    name = json.dumps([int(seed), sample, int(round), purpose], ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(name.encode("ascii")).digest()[:8], "big")


def stream(seed: int, sample: int | str, round: int, purpose: str) -> torch.Generator:  # noqa: A002
    """A fresh CPU generator at the start of the named stream.

    Always on the CPU, so that a GPU run draws the same noise. torch's CPU generator keeps 32 bits
    of a seed, so among 10,000 streams two coincide with a chance of 1 %; nothing relies on more.
    """
    import torch

    return torch.Generator("cpu").manual_seed(stream_seed(seed, sample, round, purpose))
