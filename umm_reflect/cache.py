"""Keys and values of one sequence as an immutable chain of chunks, one chunk a segment.

Appending makes a new link and leaves the old one as it is, so a fork is the same object held
twice, a shared prefix is stored once, and truncation is a step up the chain. Nothing is copied
until a batch is assembled for a forward (`assemble`, once per say or draw, not per token or step).

    root ── system ── request ── image 0 ┬─ turn A ── image A
                                         └─ turn B ── image B      two siblings, one prefix
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from umm_reflect.attention import Workspace
from umm_reflect.config import LLMConfig


@dataclass(frozen=True, eq=False)
class KVCache:
    """One link. `chunk`: [layers, 2 (key, value), tokens, kv_heads, head_dim], keys after norm and
    RoPE.

    length: tokens cached up to and with this link. position: the RoPE position of whatever comes
    next.
    """

    parent: KVCache | None = None
    chunk: Tensor | None = None
    position: int = 0
    length: int = 0

    def append(self, chunk: Tensor, position: int) -> KVCache:
        """A longer cache; this one stays as it is."""
        return KVCache(self, chunk, position, self.length + chunk.shape[2])

    def truncate(self, length: int) -> KVCache:
        """The ancestor that holds exactly `length` tokens; raises ValueError between two links."""
        link = self
        while link.length > length:
            link = link.parent
        if link.length != length:
            raise ValueError(
                f"cannot cut a cache of {self.length} tokens at {length}: segments end at "
                f"{[c.length for c in self.links()]}"
            )
        return link

    def links(self) -> list[KVCache]:
        """All links with a chunk, oldest first."""
        links, link = [], self
        while link is not None and link.chunk is not None:
            links.append(link)
            link = link.parent
        return links[::-1]


EMPTY = KVCache()


def assemble(
    caches: Sequence[KVCache], room: int | Sequence[int], config: LLMConfig, *, device, dtype
) -> Workspace:
    """One padded buffer for a batch: row r holds cache r in its first slots and has `room` free
    ones after.
    """
    rooms = [room] * len(caches) if isinstance(room, int) else room
    slots = max(cache.length + extra for cache, extra in zip(caches, rooms, strict=True))
    workspace = Workspace.empty(
        config.num_layers,
        len(caches),
        slots,
        config.num_kv_heads,
        config.head_dim,
        device=device,
        dtype=dtype,
    )
    rows_of: dict[KVCache, list[int]] = {}
    for row, cache in enumerate(caches):
        for link in cache.links():
            rows_of.setdefault(link, []).append(row)
    for link, rows in rows_of.items():
        slots_of_link = slice(link.length - link.chunk.shape[2], link.length)
        for first, last in _runs(rows):  # neighbours that share a link get it in one copy
            workspace.kv[:, :, first : last + 1, slots_of_link] = link.chunk[:, :, None]
    return workspace


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive ones among ascending numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def extract(workspace: Workspace, row: int, start: int, end: int) -> Tensor:
    """The chunk that slots start..end of a row hold, as a tensor of its own."""
    return workspace.kv[:, :, row, start:end].clone()
