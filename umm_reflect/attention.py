"""Attention of a batch of rows, one signature for cached inference and packed training.

Legend: B rows, Q new tokens a row (padded), S key slots a row, H heads, K key-value heads, D head
width.

`Attend` is what a transformer layer is handed: it knows where each token sits in its row, what it
may see and where its keys and values are kept. Tokens arrive by expert (understanding first, then
generation), since a layer's weights do.

Backends: torch's scaled_dot_product_attention everywhere (cuDNN, flash, memory-efficient or math
kernels, chosen by `attn`), `flex` for packed training, torch's varlen kernel for ragged rows
without a mask. Nothing compiled is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

Backend = Literal["auto", "cudnn", "flash", "efficient", "math", "varlen", "flex"]
BACKENDS = ("auto", "cudnn", "flash", "efficient", "math", "varlen", "flex")
# More groups of equal length than this are run as one padded call with a mask (on a GPU, where
# launches cost).
MAX_GROUPS = 16


def allowed(
    order_q: Tensor,
    order_k: Tensor,
    block_q: Tensor,
    block_k: Tensor,
    full_k: Tensor,
    noise_k: Tensor,
) -> Tensor:
    """BAGEL's mask rule as booleans; the arguments broadcast (queries against keys).

    A token sees what stands before it (`order`), and all of its own block when the block is `full`
    or `noise`; a noised block is hidden from every other block.
    """
    same = block_q == block_k
    return ((order_q >= order_k) | (same & full_k)) & (~noise_k | same)


@dataclass
class Workspace:
    """Keys and values of a batch of rows in one buffer: [layers, 2, B, S, K, D] with room for new
    tokens.
    """

    kv: Tensor

    @classmethod
    def empty(
        cls, layers: int, rows: int, slots: int, kv_heads: int, head_dim: int, **like
    ) -> Workspace:
        return cls(torch.zeros(layers, 2, rows, slots, kv_heads, head_dim, **like))

    @property
    def slots(self) -> int:
        return self.kv.shape[3]

    def read(self, layer: int, keys: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `keys` slots of every row, as views: [B, keys, K, D]
        each.
        """
        return self.kv[layer, 0, :, :keys], self.kv[layer, 1, :, :keys]

    def rows(self, keep: Sequence[int] | slice) -> Workspace:
        """A workspace of some rows: a view for a slice, a copy for a list."""
        return Workspace(self.kv[:, :, keep])

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Put new keys and values into flat slots (row * S + slot)."""
        for which, new in ((0, k_TKD), (1, v_TKD)):
            flat = self.kv[layer, which].view(-1, *new.shape[1:])
            flat.index_copy_(0, slots_T, new.to(self.kv.dtype))


@dataclass(frozen=True)
class Group:
    """Neighbouring rows that have equal query and key lengths, so that they need no mask."""

    start: int
    end: int
    queries: int
    keys: int


@dataclass
class Attend:
    """How the tokens of one forward attend.

    rows, queries: B and Q. place_T: flat query place row * Q + i of every token, understanding
    tokens first; None when the batch is rectangular (`split` tokens of each expert in every row,
    in that order). workspace and write_T: where keys and values are kept; without one, keys are
    the batch's own tokens (training). mask: [B, 1, Q, S] bool, or 0 and -inf in the queries'
    number type, or None (every group sees all of its keys).
    """

    rows: int
    queries: int
    place_T: Tensor | None = None
    split: tuple[int, int] | None = None
    mask: Tensor | None = None
    groups: Sequence[Group] = field(default_factory=tuple)
    workspace: Workspace | None = None
    write_T: Tensor | None = None
    keys: int = 0
    backend: Backend = "auto"
    flex_mask: object | None = None

    def __call__(self, layer: int, q_parts: list, k_parts: list, v_parts: list) -> list[Tensor]:
        """q_parts: per expert [T_e, H, D]; k_parts, v_parts: [T_e, K, D] → per expert [T_e, H *
        D].
        """
        q = self._rows(q_parts)
        if self.workspace is None:
            k, v = self._rows(k_parts), self._rows(v_parts)
        else:
            self.workspace.write(layer, self.write_T, torch.cat(k_parts), torch.cat(v_parts))
            k, v = self.workspace.read(layer, self.keys)
        if self.flex_mask is not None:
            out = _flex(q, k, v, self.flex_mask)
        elif self.mask is not None or not self.groups:
            out = sdpa(q, k, v, self.mask, self.backend)
        elif len(self.groups) == 1:
            (one,) = self.groups
            out = sdpa(q, k[:, : one.keys], v[:, : one.keys], None, self.backend)
        else:
            out = torch.zeros_like(q)
            for g in self.groups:
                rows = slice(g.start, g.end)
                out[rows, : g.queries] = sdpa(
                    q[rows, : g.queries], k[rows, : g.keys], v[rows, : g.keys], None, self.backend
                )
        return self._parts(out, [part.shape[0] for part in q_parts])

    def _rows(self, parts: list[Tensor]) -> Tensor:
        """Tokens by expert → [B, Q, heads, D]."""
        if self.split is not None:
            return torch.cat(
                [rearrange(p, "(b n) h d -> b n h d", b=self.rows) for p in parts], dim=1
            )
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        out = flat.new_zeros(self.rows * self.queries, *flat.shape[1:])
        return out.index_copy(0, self.place_T, flat).unflatten(0, (self.rows, self.queries))

    def _parts(self, out_BQHD: Tensor, sizes: list[int]) -> list[Tensor]:
        if self.split is not None:
            parts = out_BQHD.split([size // self.rows for size in sizes], dim=1)
            return [rearrange(p, "b n h d -> (b n) (h d)") for p in parts]
        flat = out_BQHD.flatten(0, 1).index_select(0, self.place_T).flatten(1)
        return list(flat.split(sizes))


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: Backend) -> Tensor:
    """q: [B, Q, H, D]; k, v: [B, S, K, D]; mask: [B, 1, Q, S] bool, True = may see, or what to
    add to the scores → [B, Q, H, D].

    Grouped-query heads are folded into the query length where no query-dependent mask forbids it,
    so that keys are never repeated and every kernel serves every head ratio.
    """
    repeat = q.shape[2] // k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    with _kernel(backend, q, mask):
        if repeat > 1 and (mask is None or q.shape[1] == 1):
            folded = rearrange(q, "b q (k g) d -> b k (g q) d", g=repeat)
            out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
            return rearrange(out, "b k (g q) d -> b q (k g) d", g=repeat)
        if repeat > 1:
            k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        return out.transpose(1, 2)


def _kernel(backend: Backend, q: Tensor, mask: Tensor | None):
    """The SDPA kernel choice for this call: on a GPU cuDNN first without a mask, memory-efficient
    with one.
    """
    if q.device.type != "cuda" and backend != "math":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if backend == "math":
        return sdpa_kernel([SDPBackend.MATH])
    fallback = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    # cuDNN's backward gave NaN in a captured graph (torch 2.11, H200): it only serves inference
    learning = torch.is_grad_enabled() and backend not in ("cudnn", "efficient")
    if backend == "flash" or learning:
        order = fallback if mask is None else fallback[1:]
    elif backend == "efficient" or mask is not None or q.dtype == torch.float32:
        order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    else:
        order = [SDPBackend.CUDNN_ATTENTION, *fallback]
    return sdpa_kernel(order, set_priority=True)


def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask) -> Tensor:
    out = _flex_kernel(compiled=q.is_cuda)(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=block_mask,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


@functools.cache
def _flex_kernel(compiled: bool):
    """Flex attention; compiled on a GPU, where the plain one would write all scores to memory."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention


def packed_attention(
    q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, lengths: Sequence[int], backend: Backend
) -> Tensor:
    """Full attention inside each of several runs of tokens that lie one after another (the ViT):
    [N, H, D].

    Equal lengths run as one batch; ragged ones through torch's varlen kernel on a GPU, else one by
    one.
    """
    if len(set(lengths)) == 1:
        split = [rearrange(x, "(b n) h d -> b n h d", n=lengths[0]) for x in (q_NHD, k_NHD, v_NHD)]
        return sdpa(*split, None, backend).flatten(0, 1)
    varlen = _varlen_kernel() if q_NHD.is_cuda and q_NHD.dtype != torch.float32 else None
    if varlen is not None and backend in ("auto", "varlen"):
        ends = torch.tensor([0, *lengths], device=q_NHD.device, dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        )
        longest = max(lengths)
        return varlen(q_NHD, k_NHD, v_NHD, ends, ends, longest, longest)
    out, start = [], 0
    for length in lengths:
        run = slice(start, start + length)
        out.append(sdpa(q_NHD[None, run], k_NHD[None, run], v_NHD[None, run], None, backend)[0])
        start += length
    return torch.cat(out)


def _varlen_kernel():
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch < 2.10
        return None
    return varlen_attn


def groups_of(lengths: Sequence[tuple[int, int]]) -> list[Group]:
    """Neighbouring rows of equal (queries, keys) as groups."""
    groups: list[Group] = []
    for row, (queries, keys) in enumerate(lengths):
        last = groups[-1] if groups else None
        if last is not None and (last.queries, last.keys) == (queries, keys):
            groups[-1] = Group(last.start, row + 1, queries, keys)
        else:
            groups.append(Group(row, row + 1, queries, keys))
    return groups
