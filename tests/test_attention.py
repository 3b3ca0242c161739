"""Attention against a softmax in fp64 that is written out here: kernels, groups, masks, packed runs
of patches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tiny import TINY, train_tokenizer
from umm_reflect import attention, packing
from umm_reflect import batch as batching
from umm_reflect.attention import (
    Attend,
    Group,
    Workspace,
    allowed,
    groups_of,
    packed_attention,
    sdpa,
)
from umm_reflect.context import ImageSegment, TextSegment
from umm_reflect.layout import Block, Frame, Row, text_block, vae_block
from umm_reflect.packing import Piece, collate, dense_mask, pack_row
from umm_reflect.tokens import Tokens

FRAME = Frame(start=1, end=2, image_start=3, image_end=4)


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k / sqrt(D)) v in fp64, head by head: [B, Q, H, D]."""
    q, k, v = q.double(), k.double(), v.double()
    heads, share = q.shape[2], q.shape[2] // k.shape[2]
    out = []
    for h in range(heads):
        scores = q[:, :, h] @ k[:, :, h // share].mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0], -torch.inf)
        out.append(scores.softmax(-1) @ v[:, :, h // share])
    return torch.stack(out, dim=2).float()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(rows: int, queries: int, keys: int, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    return (
        random(rows, queries, heads, 8, seed=1),
        random(rows, keys, kv_heads, 8, seed=2),
        random(rows, keys, kv_heads, 8, seed=3),
    )


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("backend", ["auto", "math"])
@pytest.mark.parametrize("masked", [False, True])
def test_every_ratio_of_heads_equals_the_written_out_softmax(
    heads, kv_heads, queries, backend, masked
):
    q, k, v = qkv(3, queries, 9, heads, kv_heads)
    mask = None
    if masked:
        mask = random(3, 1, queries, 9, seed=4) > 0
        mask[..., 0] = True
    out = sdpa(q, k, v, mask, backend)
    assert out.shape == q.shape
    torch.testing.assert_close(out, naive(q, k, v, mask), atol=1e-6, rtol=1e-5)


def test_folding_query_heads_does_not_mix_rows_queries_or_heads():
    q, k, v = qkv(2, 3, 7, 4, 2)
    whole = sdpa(q, k, v, None, "auto")
    for b in range(2):
        for n in range(3):
            for h in range(4):
                kv = slice(h // 2, h // 2 + 1)
                one = sdpa(
                    q[b : b + 1, n : n + 1, h : h + 1],
                    k[b : b + 1, :, kv],
                    v[b : b + 1, :, kv],
                    None,
                    "auto",
                )
                torch.testing.assert_close(one[0, 0, 0], whole[b, n, h])


def test_ragged_runs_of_patches_attend_one_by_one():
    lengths = [3, 5, 5, 2]
    q, k, v = (random(15, 4, 8, seed=s) for s in range(3))
    out = packed_attention(q, k, v, lengths, "auto")
    alone = [
        naive(*(x[None] for x in run), None)[0]
        for run in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(alone), atol=1e-6, rtol=1e-5)
    equal = packed_attention(q, k, v, [5, 5, 5], "auto")
    alone = [
        packed_attention(q[i : i + 5], k[i : i + 5], v[i : i + 5], [5], "auto") for i in (0, 5, 10)
    ]
    torch.testing.assert_close(equal, torch.cat(alone), atol=1e-6, rtol=1e-5)


# --- groups and masks -----------------------------------------------------------------------------


def test_neighbours_of_equal_lengths_form_a_group():
    assert groups_of([(4, 9), (4, 9), (4, 8), (4, 9)]) == [
        Group(0, 2, 4, 9),
        Group(2, 3, 4, 8),
        Group(3, 4, 4, 9),
    ]
    assert groups_of([]) == []


def picture(rows: int, cols: int, position: int, *, noised: bool) -> Block:
    return vae_block(None, (rows, cols), FRAME, position, noised=noised)


def run(rows: list[Row], filled: Workspace, **changes) -> list[Tensor]:
    """One layer of attention over new tokens with made-up queries, keys and values."""
    workspace = Workspace(filled.kv.clone())
    batch = batching.build(
        rows,
        latent_grid_side=8,
        device=torch.device("cpu"),
        workspace=workspace,
        backend="auto",
    )
    for name, value in changes.items():
        setattr(batch.attend, name, value)
    und, gen = len(batch.ids_U), len(batch.cell_G)
    parts = [
        [random(count, heads, 8, seed=seed + heads) for count, seed in ((und, 10), (gen, 20))]
        for heads in (4, 2, 2)
    ]
    return batch.attend(0, *parts)


def test_groups_without_a_mask_equal_one_padded_call_with_a_mask():
    rows = [
        Row((picture(2, 3, 0, noised=True),), past=5),
        Row((picture(2, 3, 0, noised=True),), past=5),
        Row((picture(1, 2, 0, noised=True),), past=9),
        Row((picture(2, 2, 0, noised=True),), past=0),
    ]
    filled = Workspace(random(1, 2, 4, 13, 2, 8, seed=7))
    plain = run(rows, filled)
    mask = torch.zeros(4, 1, 8, 13, dtype=torch.bool)
    mask[0:2, :, :, :13] = True
    mask[2, :, :4, :13] = True
    mask[3, :, :6, :6] = True
    mask[:, :, :, 0] = True  # padded queries see something
    masked = run(rows, filled, groups=[], mask=mask)
    for one, other in zip(plain, masked, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert plain[0].shape == (4 * 2, 32)  # markers
    assert plain[1].shape == (6 + 6 + 2 + 4, 32)  # latents


def mask_of(rows: list[Row], slots: int) -> Tensor:
    workspace = Workspace.empty(1, len(rows), slots, 2, 8)
    batch = batching.build(
        rows,
        latent_grid_side=8,
        device=torch.device("cpu"),
        workspace=workspace,
        backend="auto",
    )
    return batch.attend.mask


def test_the_mask_of_new_tokens_is_the_one_that_the_layout_table_gives():
    """Two cached tokens, then a text of two, a clean picture and a noised one, a token each."""
    blocks = (
        text_block((7, 8), 2),
        picture(1, 1, 4, noised=False),
        picture(1, 1, 5, noised=True),
    )
    mask = mask_of([Row(blocks, past=2), Row((text_block((7, 8, 9), 0),), past=0)], slots=10)
    seen = ["".join("x" if key else "." for key in query) for query in mask[0, 0].tolist()]
    assert seen == [
        "xxx.......",  # text
        "xxxx......",
        "xxxxxxx...",  # clean picture: markers and latent see each other
        "xxxxxxx...",
        "xxxxxxx...",
        "xxxxxxxxxx",  # noised picture
        "xxxxxxxxxx",
        "xxxxxxxxxx",
    ]
    causal = mask[1, 0, :3, :4].tolist()
    assert causal == [[True, False, False, False], [True, True, False, False], [True] * 3 + [False]]
    assert mask[1, 0, 3:].sum(1).tolist() == [1] * 5  # padding sees key 0, so that no row is empty


def test_nothing_else_sees_a_noised_block():
    blocks = (picture(1, 1, 0, noised=True), text_block((7,), 0), picture(1, 1, 1, noised=False))
    mask = mask_of([Row(blocks)], slots=7)
    seen = ["".join("x" if key else "." for key in query) for query in mask[0, 0].tolist()]
    assert seen == ["xxx....", "xxx....", "xxx....", "...x...", "...xxxx", "...xxxx", "...xxxx"]


def test_a_decoded_token_after_caches_of_other_lengths_sees_its_own_row_alone():
    rows = [Row((text_block((7,), 3),), past=3), Row((text_block((8,), 5),), past=5)]
    filled = Workspace(random(1, 2, 2, 6, 2, 8, seed=7))
    both = run(rows, filled)[0]
    keys = []
    for r, row in enumerate(rows):
        k, v = (filled.kv[0, which, r : r + 1].clone() for which in (0, 1))
        k[0, row.past] = random(2, 2, 8, seed=12)[r]
        v[0, row.past] = random(2, 2, 8, seed=12)[r]
        q = random(2, 4, 8, seed=14)[r][None, None]
        keys.append(naive(q, k[:, : row.past + 1], v[:, : row.past + 1], None).flatten())
    torch.testing.assert_close(both, torch.stack(keys), atol=1e-6, rtol=1e-5)


# --- packed rows ----------------------------------------------------------------------------------


def packed_batch():
    """Two rows of several examples of texts, looked-at, clean and noised pictures."""
    tokens = Tokens(train_tokenizer())
    frame = Frame(tokens.start, tokens.end, tokens.image_start, tokens.image_end)
    text = TextSegment((5, 6, 7))
    drawn = ImageSegment(latent=random(4, 4, 6))
    looked_at = ImageSegment(vit_pixels=random(3, 28, 14))
    rows = [
        [
            [Piece(text), Piece(drawn, learn=True), Piece(drawn), Piece(text, learn=True)],
            [Piece(looked_at), Piece(text, learn=True)],
        ],
        [[Piece(text), Piece(drawn, learn=True)]],
    ]
    packed = [pack_row(row, frame, TINY) for row in rows]
    latents = [random(6, 16) for row in packed for _ in row.vae_images]
    return collate(packed, latents, [random(2, 588)])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_the_dense_mask_on_packed_rows():
    batch = packed_batch()
    rows, length = batch.block_BL.shape
    mask = dense_mask(batch)
    assert 0.05 < mask.float().mean() < 0.6
    q, k, v = qkv(rows, length, length, 4, 2)
    flex = attention._flex(q, k, v, packing.flex_mask(batch))
    torch.testing.assert_close(flex, sdpa(q, k, v, mask, "auto"), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(flex, naive(q, k, v, mask), atol=1e-6, rtol=1e-5)


def test_the_dense_mask_follows_the_rule_token_by_token():
    batch = packed_batch()
    mask = dense_mask(batch)[:, 0]
    for b in range(mask.shape[0]):
        order, block, sample = batch.order_BL[b], batch.block_BL[b], batch.sample_BL[b]
        full, noise = batch.full_BL[b], batch.noise_BL[b]
        for i in range(mask.shape[1]):
            for j in range(mask.shape[1]):
                seen = bool(
                    sample[i] == sample[j]
                    and (order[j] <= order[i] or (block[i] == block[j] and full[j]))
                    and (not noise[j] or block[i] == block[j])
                )
                assert mask[b, i, j] == seen
    assert mask.any(-1).all()  # no token, padding neither, has nothing to see


def test_the_rule_is_causal_inside_texts_and_full_inside_pictures():
    order, yes, no = torch.arange(3), torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=bool)
    one = torch.zeros(3)
    of = (order[:, None], order[None], one[:, None], one[None])
    assert allowed(*of, no[None], no[None]).tolist() == torch.ones(3, 3).tril().bool().tolist()
    assert allowed(*of, yes[None], no[None]).all()
    assert allowed(*of, yes[None], yes[None]).all()
    apart = torch.arange(3.0)
    noised = allowed(order[:, None], order[None], apart[:, None], apart[None], yes[None], yes[None])
    assert noised.tolist() == torch.eye(3).bool().tolist()


def test_rectangular_batches_come_back_in_the_order_in_which_they_went_in():
    """Training: two rows of three understanding and two generation tokens."""
    attend = Attend(rows=2, queries=5, split=(3, 2))
    parts = [[random(6, 4, 8), random(4, 4, 8, seed=1)], *([random(6, 2, 8), random(4, 2, 8)],) * 2]
    out = attend(0, *parts)
    assert [part.shape for part in out] == [(6, 32), (4, 32)]
    q, k, v = (
        torch.stack([torch.cat([p[0][3 * b : 3 * b + 3], p[1][2 * b : 2 * b + 2]]) for b in (0, 1)])
        for p in parts
    )
    expected = naive(q, k, v, None).flatten(2)
    torch.testing.assert_close(out[0], expected[:, :3].flatten(0, 1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(out[1], expected[:, 3:].flatten(0, 1), atol=1e-6, rtol=1e-5)
