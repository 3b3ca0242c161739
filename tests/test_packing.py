"""Packed rows: literal positions, labels, weights and noised pictures of hand-written examples;
padding, bins, and the rows of the shapes world."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from sft import shapes_data
from sft.pretrain import SYSTEM_PROMPT, nano_profile
from sft.shapes_data import LOOK_ROW, ShardPlan, load_store, make_shard
from tests.tiny import TINY, write_tiny_checkpoint
from umm_reflect import Bagel
from umm_reflect.autoencoder import AutoEncoder
from umm_reflect.config import NANO
from umm_reflect.context import ImageSegment, TextSegment
from umm_reflect.images import patchify_pixels
from umm_reflect.layout import Frame
from umm_reflect.packing import (
    NO_LABEL,
    PackedBatch,
    PackedRow,
    Piece,
    collate,
    fill_bins,
    pack_row,
    stack_rows,
    training_forward,
)
from umm_reflect.tokens import Tokens

START, END, OPEN, CLOSE = 1, 2, 3, 4
FRAME = Frame(START, END, OPEN, CLOSE)
NONE = NO_LABEL

PROMPT = TextSegment((11, 12))
TURN = TextSegment((21, 22, 23))
EDIT = TextSegment((31,))
# two latent tokens (2 x 1) and two patches (1 x 2); the second picture has one latent token
FIRST = ImageSegment(latent=torch.zeros(4, 4, 2), vit_pixels=torch.zeros(3, 14, 28))
SECOND = ImageSegment(latent=torch.zeros(4, 2, 2))


def pack(*examples) -> PackedRow:
    return pack_row(examples, FRAME, TINY)


def at(row: PackedRow, name: str) -> list:
    """An array over U and G, in sequence order."""
    return getattr(row, name)[np.argsort(row.order_L)].tolist()


# --- a trajectory, token by token -----------------------------------------------------------------

TRAJECTORY = (
    Piece(PROMPT),
    Piece(FIRST, learn=True),
    Piece(FIRST),
    Piece(TURN, learn=True, weights=(0.0, 2.0, 1.0, 1.0)),
    Piece(SECOND, learn=True),
)


def test_positions_of_a_trajectory_are_those_of_the_layout_table():
    assert at(pack(TRAJECTORY), "position_L") == [
        *(0, 1, 2, 3),  # prompt
        *(4, 4, 4, 4),  # noised picture: one position, which it does not use up
        *(4, 4, 4, 4),  # its clean latents
        *(5, 5, 5, 5),  # its patches
        *(6, 7, 8, 9, 10),  # turn
        *(11, 11, 11),  # noised edit
    ]


def test_exactly_the_tokens_of_the_turn_carry_cross_entropy():
    row = pack(TRAJECTORY)
    expected = [
        *((START, NONE, 0), (11, NONE, 0), (12, NONE, 0), (END, NONE, 0)),
        *((OPEN, NONE, 0), (CLOSE, NONE, 0)),  # the latents between them are no U tokens
        *((OPEN, NONE, 0), (CLOSE, NONE, 0)),
        *((OPEN, NONE, 0), (0, NONE, 0), (0, NONE, 0), (CLOSE, NONE, 0)),
        *((START, 21, 0.0), (21, 22, 2.0), (22, 23, 1.0), (23, END, 1.0), (END, NONE, 0)),
        *((OPEN, NONE, 0), (CLOSE, NONE, 0)),
    ]
    columns = (row.ids_U, row.label_U, row.weight_U)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


def test_exactly_the_pictures_to_learn_are_noised_and_hidden():
    row = pack(TRAJECTORY)
    assert row.noised_G.tolist() == [True, True, False, False, True]
    assert row.image_G.tolist() == [0, 0, 1, 1, 2]
    assert row.cell_G.tolist() == [0, 8, 0, 8, 0]  # rows and columns of a grid of 8 x 8
    assert row.vae_images == (FIRST, FIRST, SECOND)
    assert row.vit_images == (FIRST,)
    noised = [False] * 4 + [True] * 4 + [False] * 13 + [True] * 3
    assert at(row, "noise_L") == noised
    assert at(row, "full_L") == [False] * 4 + [True] * 12 + [False] * 5 + [True] * 3
    assert at(row, "block_L") == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 5 + [5] * 3


def test_patches_stand_between_their_markers():
    row = pack(TRAJECTORY)
    assert row.patch_U.tolist() == [9, 10]
    assert row.patch_cell_V.tolist() == [0, 1]
    assert row.sizes == (19, 5, 2)


def test_a_second_example_starts_at_position_0_and_shares_nothing():
    alone, both = pack(TRAJECTORY), pack(TRAJECTORY, TRAJECTORY)
    assert at(both, "position_L") == at(alone, "position_L") * 2
    assert at(both, "sample_L") == [0] * 24 + [1] * 24
    assert len(set(at(both, "block_L"))) == 12
    assert both.image_G.tolist() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    assert both.patch_U.tolist() == [9, 10, 28, 29]
    assert sorted(both.order_L.tolist()) == list(range(48))
    assert np.array_equal(both.label_U, np.tile(alone.label_U, 2))


def test_text_to_image_and_editing_examples():
    row = pack([Piece(PROMPT), Piece(SECOND, learn=True)])
    assert (row.label_U == NONE).all()
    assert at(row, "position_L") == [0, 1, 2, 3, 4, 4, 4]
    row = pack([Piece(FIRST), Piece(EDIT), Piece(SECOND, learn=True)])
    assert at(row, "position_L") == [0] * 4 + [1] * 4 + [2, 3, 4] + [5] * 3
    assert row.noised_G.tolist() == [False, False, True]
    row = pack([Piece(SECOND, learn=True)])  # a prompt that is left out
    assert at(row, "position_L") == [0, 0, 0]


def test_a_dropped_text_leaves_no_trace_and_a_dropped_picture_keeps_its_positions():
    def positions(drop):
        pieces = [Piece(PROMPT), Piece(FIRST), Piece(EDIT), Piece(SECOND, learn=True)]
        pieces[drop] = replace(pieces[drop], dropped=True)
        row = pack(pieces)
        return row.ids_U.tolist(), at(row, "position_L")

    picture, edit = [OPEN, CLOSE, OPEN, 0, 0, CLOSE], [START, 31, END]
    ids, places = positions(0)
    assert ids == [*picture, *edit, OPEN, CLOSE]
    assert places == [0] * 4 + [1] * 4 + [2, 3, 4] + [5] * 3
    ids, places = positions(1)
    assert ids == [START, 11, 12, END, *edit, OPEN, CLOSE]
    assert places == [0, 1, 2, 3, 6, 7, 8] + [9] * 3  # two blocks left out, two positions kept
    ids, places = positions(2)
    assert ids == [START, 11, 12, END, *picture, OPEN, CLOSE]
    assert places == [0, 1, 2, 3] + [4] * 4 + [5] * 4 + [6] * 3


def test_the_end_token_can_be_taught_that_a_picture_follows():
    row = pack([Piece(PROMPT, end_label=OPEN), Piece(TURN, learn=True, end_label=OPEN)])
    assert row.label_U.tolist() == [NONE, NONE, NONE, OPEN, 21, 22, 23, END, OPEN]
    assert row.weight_U.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]


def test_weights_that_do_not_fit_the_labels_are_refused():
    with pytest.raises(ValueError, match=r"3 weights for 4 labels \(ids and the end\)"):
        pack([Piece(TURN, learn=True, weights=(1.0, 1.0, 1.0))])


def test_a_picture_that_the_grid_cannot_hold_is_refused():
    wide = ImageSegment(latent=torch.zeros(4, 2, 18))
    with pytest.raises(ValueError, match="16x144 px needs a 1x9 grid; this model holds 1 to 8"):
        pack([Piece(wide, learn=True)])


# --- batches --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bagel(tmp_path_factory) -> Bagel:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=2)
    return Bagel.from_pretrained(folder, device="cpu", dtype="float32")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(rows: list[PackedRow], sizes=None) -> PackedBatch:
    images = [image for row in rows for image in row.vae_images]
    latents = [normal(i.latent[0].numel() // 4, 16, seed=k) for k, i in enumerate(images)]
    patches = [normal(2, 588, seed=k) for row in rows for k, _ in enumerate(row.vit_images)]
    return collate(rows, latents, patches, sizes)


def test_scored_places_and_images_are_counted_across_rows():
    text = [Piece(PROMPT), Piece(TURN, learn=True)]
    batch = batch_of([pack(TRAJECTORY), pack(text, [Piece(EDIT), Piece(SECOND, learn=True)])])
    width = batch.ids_BU.shape[1]
    assert width == 19
    assert batch.score_S.tolist() == [12, 13, 14, 15] + [width + i for i in (4, 5, 6, 7)]
    assert batch.label_S.tolist() == [21, 22, 23, END] * 2
    assert batch.weight_S.tolist() == [0, 2, 1, 1, 1, 1, 1, 1]
    assert batch.num_images == 4
    assert batch.image_BG.tolist()[1][0] == 3
    assert batch.noised_BG.tolist() == [[True, True, False, False, True], [True] + [False] * 4]
    assert torch.equal(batch.latent_BGC[0, :2], normal(2, 16, seed=0))
    assert torch.equal(batch.latent_BGC[1, 0], normal(1, 16, seed=3)[0])
    assert (batch.sample_BL[1] == -1).sum() == 48 - 24 - 9 - 6


def test_padding_changes_nothing(bagel):
    rows = [pack(TRAJECTORY), pack([Piece(EDIT, learn=True)])]
    times = torch.tensor([0.7, 0.0, 0.2])
    noise = normal(2, 9, 16, seed=9)
    with torch.no_grad():
        tight, wide = batch_of(rows), batch_of(rows, (40, 9))
        one = training_forward(bagel, tight, times, noise[:, :5])
        other = training_forward(bagel, wide, times, noise)
    torch.testing.assert_close(one.ce_S, other.ce_S, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one.velocity_BGC[0], other.velocity_BGC[0, :5], atol=1e-5, rtol=1e-5)


def test_rows_that_are_longer_than_their_padding_are_refused():
    with pytest.raises(ValueError, match=r"a row needs \(19, 5\) tokens.*padded to \(18, 5\)"):
        stack_rows([pack(TRAJECTORY)], (18, 5))


def test_rows_of_text_alone_have_no_velocity(bagel):
    batch = batch_of([pack([Piece(PROMPT), Piece(TURN, learn=True)])])
    with torch.no_grad():
        out = training_forward(bagel, batch, torch.zeros(0), torch.zeros(1, 0, 1))
    assert out.velocity_BGC.shape == (1, 0, 1)
    assert out.ce_S.shape == (4,)
    assert out.hidden[1].shape == (0, 32)


def test_running_layers_again_in_the_backward_pass_gives_the_same_gradients(bagel):
    batch = batch_of([pack(TRAJECTORY)])
    gradients = []
    weights = [p.requires_grad_(True) for p in bagel.parameters()]
    for recompute in (False, True):
        out = training_forward(
            bagel, batch, torch.tensor([0.5, 0, 0.9]), normal(1, 5, 16), recompute=recompute
        )
        loss = out.ce_S.sum() + out.velocity_BGC[batch.noised_BG].square().sum()
        gradients.append(torch.autograd.grad(loss, weights, allow_unused=True))
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert sum(g is not None for g in gradients[0]) > 100


# --- bins -----------------------------------------------------------------------------------------


def test_bins_of_a_worked_example():
    assert fill_bins([(3,), (7,), (5,), (5,)], (10,)) == [[1, 0], [2, 3]]
    assert fill_bins([(4, 1), (4, 9), (2, 1)], (10, 10)) == [[1, 0], [2]]
    assert fill_bins([], (10,)) == []


def test_every_item_lands_in_exactly_one_bin_and_none_overflows():
    rng = random.Random(0)
    for capacity in ((512, 384, 256), (100,), (64, 0)):
        sizes = [tuple(rng.randint(0, c) for c in capacity) for _ in range(700)]
        sizes += [capacity, tuple(0 for _ in capacity)]
        bins = fill_bins(sizes, capacity)
        assert sorted(item for members in bins for item in members) == list(range(len(sizes)))
        for members in bins:
            for k, most in enumerate(capacity):
                assert sum(sizes[i][k] for i in members) <= most


def test_bins_are_nearly_full():
    rng = random.Random(1)
    sizes = [(rng.randint(5, 60),) for _ in range(1000)]
    least = sum(size for (size,) in sizes) / 100
    assert len(fill_bins(sizes, (100,))) < 1.01 * least + 1


def test_an_item_that_no_bin_can_hold_is_named():
    with pytest.raises(
        ValueError, match=r"item 1 has size \(5, 11\), more than a bin's \(10, 10\)"
    ):
        fill_bins([(5, 5), (5, 11)], (10, 10))


# --- the shapes world -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """A shard of look rows: (its packed rows, a store of them, the tokenizer, the VAE, images)."""
    folder = tmp_path_factory.mktemp("shapes")
    tokenizer = write_tiny_checkpoint(folder / "tiny")
    plan = ShardPlan("look", 0, 6, str(tokenizer), SYSTEM_PROMPT, str(folder))
    rows: list[PackedRow] = []
    # byte by byte, as the tiny tokenizer spells, turns are long
    sizes = (1536, *LOOK_ROW[1:])

    def noting(packed, padded):
        rows.extend(packed)
        return stack_rows(packed, padded)

    torch.manual_seed(0)
    vae = AutoEncoder(NANO.vae).eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes_data, "stack_rows", noting)
        patch.setattr(shapes_data, "LOOK_ROW", sizes)
        path = make_shard(plan)
        store = load_store([path], "look", vae, torch.device("cpu"), own_pixels=0.0)
    images = np.load(path.with_suffix(".npy"))
    return rows, store, Tokens.from_folder(tokenizer), vae, images


def test_a_batch_of_the_store_trains_as_the_collated_rows_do(shard):
    rows, store, _, _, _ = shard
    pick = torch.tensor([len(rows) - 1, 0])
    config = replace(NANO, llm=replace(NANO.llm, num_layers=2), vit=replace(NANO.vit, num_layers=1))
    torch.manual_seed(1)
    bagel = Bagel(config).eval()
    latents, patches = [], []
    for i in pick.tolist():
        vae, vit = (store.arrays[name][i].tolist() for name in ("vae_BI", "vit_BI"))
        latents += [store.tables["latents"][k].float() for k in vae if k >= 0]
        patches += [store.tables["patches"][k].float() / 127.5 - 1 for k in vit if k >= 0]
    collated = collate([rows[i] for i in pick], latents, patches, store.size[:2])
    stored = store.batch(pick)
    same = ("ids_BU", "position_BL", "order_BL", "block_BL", "sample_BL", "full_BL", "noise_BL")
    for name in (*same, "cell_BG", "noised_BG"):
        assert torch.equal(getattr(stored, name), getattr(collated, name)), name
    real = collated.sample_BL[:, store.size[0] :] >= 0
    assert torch.equal(stored.latent_BGC[real], collated.latent_BGC[real])

    image_times = torch.rand(stored.num_images, generator=torch.Generator().manual_seed(2))
    noise = normal(*stored.latent_BGC.shape, seed=3)
    # the store numbers images by slots of a row, `collate` without gaps
    slots = torch.cat([stored.image_BG[b][real[b]].unique() for b in range(2)])
    with torch.no_grad():
        one = training_forward(bagel, stored, image_times, noise)
        other = training_forward(bagel, collated, image_times[slots], noise)
    counted, scored = stored.weight_S > 0, collated.weight_S > 0
    assert torch.equal(stored.label_S[counted], collated.label_S[scored])
    assert torch.equal(stored.weight_S[counted], collated.weight_S[scored])
    torch.testing.assert_close(one.ce_S[counted], other.ce_S[scored], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        one.velocity_BGC[real], other.velocity_BGC[real], atol=1e-5, rtol=1e-5
    )


def test_turns_are_learned_from_the_score_on_and_every_noised_picture_is_hidden(shard):
    rows, _, tokens, _, _ = shard
    turns = 0
    for row in rows:
        scored = row.label_U != NO_LABEL
        assert (row.weight_U[~scored] == 0).all()
        counted = row.weight_U > 0
        ends = np.flatnonzero(counted & (row.label_U == tokens.end))
        start = 0
        for end in ends:
            said = tokens.decode(row.label_U[start : end + 1][counted[start : end + 1]])
            assert said.endswith("<|im_end|>")
            score, action, *_ = said.split("\n")
            assert score.endswith("/10")
            assert action in ("[ACTION] edit", "[ACTION] done")
            start, turns = end + 1, turns + 1
        assert not counted[start:].any()
        # every noised target is hidden, every clean picture is seen
        gen = slice(len(row.ids_U), None)
        assert np.array_equal(row.noise_L[gen], row.noised_G)
    assert turns >= 6
    weights = sorted({float(w) for row in rows for w in row.weight_U})
    assert weights == [0.0, 1.0, 4.0]


def test_what_training_looks_at_is_what_the_agent_looks_at(shard):
    _, store, _, vae, images = shard
    transforms = nano_profile().transforms
    for k in (0, len(images) - 1):
        segment = transforms.segment(Image.fromarray(images[k]))
        seen = patchify_pixels(segment.vit_pixels)
        stored = store.tables["patches"][k].float() / 127.5 - 1
        levels = (seen - stored).abs() * 127.5  # PIL rounds and clips between its two passes
        assert levels.max() < 4
        assert levels.mean() < 0.1
        with torch.no_grad():
            latent = shapes_data._tokens(vae.encode(segment.vae_pixels[None]))[0]
        torch.testing.assert_close(latent, store.tables["latents"][k], atol=0.02, rtol=0.02)


def test_pictures_that_are_looked_at_may_have_been_through_the_vae_and_targets_have_not(
    shard, tmp_path
):
    rows, _, _, vae, images = shard
    torch.manual_seed(0)
    path = tmp_path / "look-00000.npz"
    arrays = stack_rows(rows, tuple(max(r.sizes[k] for r in rows) for k in (0, 1)))
    ids = np.zeros((len(rows), 6), np.int32)
    np.savez(
        path,
        **{name: t.numpy() for name, t in arrays.items()},
        score_BS=ids,
        vae_BI=ids,
        vit_BI=ids[:, :4],
        patch_BV=ids,
        left_out=np.zeros(len(rows), np.int32),
    )
    np.save(path.with_suffix(".npy"), images[:4])
    store = load_store([path], "look", vae, torch.device("cpu"), own_pixels=1.0)
    pixels = torch.from_numpy(images[:4]).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        again = (vae.decode(vae.encode(pixels)).clamp(-1, 1) * 127.5).round() / 127.5
        seen = shapes_data._tokens(vae.encode(again))
    torch.testing.assert_close(store.tables["conditions"], seen, atol=0.02, rtol=0.02)
    assert not torch.equal(store.tables["latents"], seen)
    small = F.interpolate(again, 112, mode="bicubic", antialias=True).clamp(-1, 1)
    levels = (patchify_pixels(small[0]) * 127.5 + 127.5).round()
    assert (store.tables["patches"][0].float() - levels).abs().max() <= 1
