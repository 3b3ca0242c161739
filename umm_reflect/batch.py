"""Rows of blocks → tensors: which token goes where, through which expert, and what it may see.

Legend: B rows, Q new tokens of the longest row, S key slots of the longest row, U and G
understanding and generation tokens of all rows, T = U + G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from umm_reflect.attention import (
    MANY_QUERIES,
    MAX_GROUPS,
    Attend,
    Backend,
    Group,
    Workspace,
    allowed,
    groups_of,
)
from umm_reflect.layout import Block, Row, grid_ids, row_tokens


@dataclass
class RowBatch:
    """One forward's tokens. Understanding tokens of all rows stand first, then generation tokens.

    ids_U: token ids (0 where a ViT patch stands). patch_U: the places among U of the patches of
    `vit_blocks`, in order. cell_G: position-table rows of the latents of `vae_blocks`, in order.
    position_T: RoPE positions. last_R: the place among U of each row's last token, where a row
    ends in one.
    """

    ids_U: Tensor
    position_T: Tensor
    patch_U: Tensor
    cell_G: Tensor
    vit_blocks: list[Block]
    vae_blocks: list[Block]
    last_R: Tensor
    attend: Attend


def build(
    rows: Sequence[Row],
    *,
    latent_grid_side: int,
    device: torch.device,
    workspace: Workspace,
    backend: Backend,
) -> RowBatch:
    """Lay out `rows` (each after its `past` cached tokens) for one forward that writes into
    `workspace`.
    """
    laid = [row_tokens(row.blocks) for row in rows]
    queries = max(row.length for row in rows)
    slots = workspace.slots
    place, write, position, ids, last = ([], []), ([], []), ([], []), [], []
    patch, cells, vit_blocks, vae_blocks, seen = [], [], [], [], 0
    for index, (row, tokens) in enumerate(zip(rows, laid, strict=True)):
        for expert in (0, 1):
            mine = np.flatnonzero(tokens.is_gen_L == bool(expert))
            place[expert].append(index * queries + mine)
            write[expert].append(index * slots + row.past + mine)
            position[expert].append(tokens.position_L[mine])
        und = np.flatnonzero(~tokens.is_gen_L)
        ids.append(tokens.ids_L[und])
        last.append(seen + len(und) - 1)
        start = seen
        for block in row.blocks:
            if block.kind == "vit":
                vit_blocks.append(block)
                patch.append(np.arange(start + 1, start + block.length - 1))
            elif block.kind == "vae":
                vae_blocks.append(block)
                cells.append(grid_ids(block.grid, latent_grid_side))
            start += block.length - block.num_gen
        seen += len(und)

    def tensor(parts: list) -> Tensor:
        flat = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return torch.from_numpy(flat.astype(np.int64)).to(device)

    keys = max(row.past + row.length for row in rows)
    groups = _plain_groups(rows, device)
    return RowBatch(
        ids_U=tensor(ids),
        position_T=tensor(position[0] + position[1]),
        patch_U=tensor(patch),
        cell_G=tensor(cells),
        vit_blocks=vit_blocks,
        vae_blocks=vae_blocks,
        last_R=tensor([np.asarray(last)]),
        attend=Attend(
            rows=len(rows),
            queries=queries,
            place_T=tensor(place[0] + place[1]),
            mask=None if groups else _mask(rows, laid, queries, keys, device),
            groups=groups,
            workspace=workspace,
            write_T=tensor(write[0] + write[1]),
            keys=keys,
            backend=backend,
        ),
    )


def _plain_groups(rows: Sequence[Row], device: torch.device) -> list[Group]:
    """Groups that need no mask: every row is one block that sees all of itself and all before
    it.
    """
    if any(len(row.blocks) != 1 for row in rows):
        return []
    if any(row.blocks[0].mode == "causal" and row.length > 1 for row in rows):
        return []
    groups = groups_of([(row.length, row.past + row.length) for row in rows])
    worth_it = len(groups) <= MAX_GROUPS or min(g.queries for g in groups) >= MANY_QUERIES
    return groups if device.type == "cpu" or worth_it else []


def _mask(rows: Sequence[Row], laid: list, queries: int, keys: int, device: torch.device) -> Tensor:
    """[B, 1, Q, S] bool by `attention.allowed`; padded queries see key 0, so that no row is
    empty.
    """
    count = len(rows)
    block = np.full((count, keys), -1)
    full, noise, valid = (np.zeros((count, keys), bool) for _ in range(3))
    block_q = np.full((count, queries), -2)
    order_q = np.zeros((count, queries), np.int64)
    for index, (row, tokens) in enumerate(zip(rows, laid, strict=True)):
        new = slice(row.past, row.past + row.length)
        block[index, new], full[index, new], noise[index, new] = (
            tokens.block_L,
            tokens.full_L,
            tokens.noise_L,
        )
        valid[index, : row.past + row.length] = True
        block_q[index, : row.length] = tokens.block_L
        order_q[index, : row.length] = np.arange(row.past, row.past + row.length)
    block, full, noise, valid, block_q, order_q = (
        torch.from_numpy(x).to(device) for x in (block, full, noise, valid, block_q, order_q)
    )
    mask = allowed(
        order_q[:, :, None],
        torch.arange(keys, device=device)[None, None, :],
        block_q[:, :, None],
        block[:, None, :],
        full[:, None, :],
        noise[:, None, :],
    )
    mask &= valid[:, None, :]
    padding = block_q == -2
    mask[padding] = False
    mask[..., 0] |= padding
    return mask[:, None]
