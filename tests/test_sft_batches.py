"""Parcels: what workers make of packs equals what one process makes of each row, pictures and all.

The reference is the plain path of `sft.packs` (read, pack, encode, collate) on the same rows.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

import sft.feed
from sft.batches import Reader, Task, expert_tokens, image_key, levelled
from sft.data import Picture, Record, read_dataset
from sft.data_convert import example_records
from sft.data_own import write_jsonl
from sft.feed import feed
from sft.latents import ImageStore
from sft.loss import KINDS, LossSettings
from sft.mixture import Drawn, Dropout, Mixture, Sampler
from sft.packs import (
    encode,
    image_names,
    image_noise,
    image_times,
    measure,
    read_pack,
)
from sft.rows import Layer, expand
from sft.weights import Decision
from tests.tiny import TINY, train_tokenizer
from umm_reflect.autoencoder import AutoEncoder
from umm_reflect.errors import UserError
from umm_reflect.images import mended_transforms, patchify_pixels
from umm_reflect.layout import Frame
from umm_reflect.packing import PackedBatch, collate, pack_row
from umm_reflect.tokens import Tokens

TOKENS = Tokens(train_tokenizer())
FRAME = Frame(TOKENS.start, TOKENS.end, TOKENS.image_start, TOKENS.image_end)
TRANSFORMS = mended_transforms(vae=(32, 32, 16), vit=(28, 28, 14))
DROPOUT = Dropout(text_uncond=0.2, image_uncond=0.2)
MIXTURE = Mixture(
    weights={"whole": 1, "transition": 2},
    by="samples",
    dropout=DROPOUT,
    expected_tokens=1000,
    max_tokens=1400,
    max_sample_tokens=1400,
)
SHIFT = LossSettings(timestep_shift=2.0)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(example_records(8), folder / "example")
    found = read_dataset(folder / "example")
    return expand(found.records, (), ["whole", "transition", "controller"])


@pytest.fixture(scope="module")
def vae() -> AutoEncoder:
    torch.manual_seed(0)
    return AutoEncoder(TINY.vae).eval()


def reader(rows, mixture=MIXTURE, **changes) -> Reader:
    planner = Layer(TOKENS, TRANSFORMS, "Draw.", "ours", stand_ins=True)
    return Reader(rows, planner, FRAME, TINY, mixture, SHIFT, seed=3, **changes)


def store(vae, **options) -> ImageStore:
    return ImageStore(vae, TINY, torch.device("cpu"), **options)


def packs(rows, step: int = 0, count: int = 3, mixture=MIXTURE):
    planner = Layer(TOKENS, TRANSFORMS, "Draw.", "ours", stand_ins=True)
    return Sampler(mixture, measure(rows, planner, FRAME, TINY), 3, count).step(step)


def plain(rows, pack, vae, mixture, sizes):
    """The same pack by the functions of `sft.packs`, one after another."""
    layer = Layer(TOKENS, TRANSFORMS, "Draw.", "ours")
    read = read_pack(pack, rows, layer, mixture.dropout, 3)
    row = pack_row(read.examples, FRAME, TINY)
    names = image_names(row, read.drawn)
    latents = encode(vae, row.vae_images, names, 3, mixture.condition_latents)
    patches = [patchify_pixels(image.vit_pixels) for image in row.vit_images]
    batch = collate([row], latents, patches, sizes)
    return batch, names, image_times(names, 3, 2.0), image_noise(batch, names, 3)


@pytest.mark.parametrize("latents", ["mean", "sampled"])
def test_a_parcel_is_what_reading_packing_and_encoding_each_row_gives(rows, vae, latents):
    mixture = replace(MIXTURE, condition_latents=latents)
    reads, images = reader(rows, mixture), store(vae)
    for pack in packs(rows, count=4):
        batch, times, noise, more = images.batch(reads(reads.task([pack], {})))
        sizes = (batch.ids_BU.shape[1], batch.cell_BG.shape[1])
        wanted, names, wanted_times, wanted_noise = plain(rows, pack, vae, mixture, sizes)
        for name in PackedBatch.__dataclass_fields__:
            have, want = getattr(batch, name), getattr(wanted, name)
            if name == "latent_BGC":  # encoded one by one here, a batch at a time there
                torch.testing.assert_close(have, want, atol=2e-5, rtol=0)
            elif isinstance(want, torch.Tensor):
                assert have.dtype == want.dtype, name
                assert torch.equal(have, want), name
            else:
                assert have == want, name
        noised = torch.tensor([name.noised for name in names])
        assert noised.any()
        assert torch.equal(times[noised], wanted_times[noised])
        assert torch.equal(noise, wanted_noise)
        kinds = [KINDS[k] for k in more["kind_BG"][batch.noised_BG].tolist()]
        assert set(kinds) <= {"whole", "transition"}


def test_packs_side_by_side_hold_the_same_examples_and_less_padding(rows):
    some = packs(rows, count=4)
    reads = reader(rows)
    together = reads(reads.task(some, {}))
    alone = [reads(reads.task([pack], {})) for pack in some]
    drawn = sorted(d.number for p in alone for d in p.drawn)
    assert sorted(d.number for d in together.drawn) == drawn
    assert together.counts == pytest.approx(np.sum([p.counts for p in alone], axis=0).tolist())
    assert together.work.tokens == sum(p.work.tokens for p in alone)
    assert together.work.pairs == sum(p.work.pairs for p in alone)
    rows_padded = [p.fields["ids_BU"][1][1] for p in alone]
    assert together.fields["ids_BU"][1][1] <= max(rows_padded)


def test_levelling_gives_every_row_its_share_of_both_experts(rows):
    reads = reader(rows)
    examples = [[(d, reads._example(d, -1, {})) for d in pack] for pack in packs(rows, count=6)]
    for row in levelled(examples, TINY):
        for _, example in row:
            sizes = pack_row([example], FRAME, TINY).sizes
            assert expert_tokens(example, TINY) == sizes[:2]


def test_pictures_that_the_device_has_are_not_sent_again_and_change_nothing(rows, vae):
    (pack,) = packs(rows, count=1)
    reads, images = reader(rows), store(vae, room=1e9)
    first = reads(reads.task([pack], images.kept))
    fresh = [key for group in first.fresh for key in group.keys]
    assert set(fresh) == set(first.latents) | set(first.patches)
    before = images.batch(first)
    again = reads(reads.task([pack], images.kept))
    assert again.fresh == []
    assert again.buffer.numel() < first.buffer.numel()
    after = images.batch(again)
    assert torch.equal(before[0].latent_BGC, after[0].latent_BGC)
    assert torch.equal(before[0].patches_VP, after[0].patches_VP)


def test_what_exceeds_the_room_is_sent_and_encoded_each_time(rows, vae):
    (pack,) = packs(rows, count=1)
    reads, small, large = reader(rows), store(vae, room=15_000), store(vae, room=1e9)
    want = large.batch(reads(reads.task([pack], {})))[0]
    for _ in range(2):
        parcel = reads(reads.task([pack], small.kept))
        assert torch.equal(small.batch(parcel)[0].latent_BGC, want.latent_BGC)
    assert 0 < small.used <= 15_000
    assert 0 < len(small.kept) < len(large.kept)


@pytest.mark.parametrize("shared", [0, 2**60])
def test_workers_give_the_parcels_in_order_and_the_same_bytes(rows, monkeypatch, shared):
    # in shared memory, and where there is too little of it through pipes
    monkeypatch.setattr(sft.feed, "SHARED_BYTES", shared)
    reads = reader(rows)
    tasks = [reads.task(packs(rows, step), {}) for step in range(5)]
    here = list(feed(reads, tasks, 0))
    there = list(feed(reads, tasks, 2))
    assert len(there) == 5
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a.buffer, torch.as_tensor(b.buffer))
        assert a.drawn == b.drawn


def test_a_forward_without_packs_is_one_text_that_teaches_nothing(rows, vae):
    parcel = reader(rows)(Task((), ()))
    batch, *_ = store(vae).batch(parcel)
    assert parcel.counts == (0.0, 0.0)
    assert batch.score_S.numel() == 0
    assert batch.noised_BG.numel() == 0
    assert batch.num_images == 0
    assert (batch.sample_BL >= 0).sum() == 2


def test_a_row_whose_picture_cannot_be_read_is_left_out_and_named(tmp_path, vae):
    write_jsonl(example_records(4), tmp_path / "data")
    found = read_dataset(tmp_path / "data")
    rows = expand(found.records, (), ["whole"])
    broken = rows["whole"][1].record.images[0].file
    with open(broken, "wb") as file:
        file.write(b"no picture")
    reads = reader(rows, replace(MIXTURE, weights={"whole": 1}))
    pack = tuple(Drawn("whole", index, index, 0) for index in range(4))
    parcel = reads(reads.task([pack], {}))
    ((drawn, uid, rule, _),) = parcel.bad
    assert (drawn.index, uid, str(rule)) == (1, rows["whole"][1].uid, "image_hash")
    assert [d.index for d in parcel.drawn] == [0, 2, 3]
    assert store(vae).batch(parcel)[0].num_images == len(parcel.latents)


def test_an_error_in_a_worker_arrives_as_itself(rows):
    class Failing(Reader):
        def __call__(self, task):
            raise UserError("the disk is gone", "Mount it")

    planner = Layer(TOKENS, TRANSFORMS, "Draw.", "ours", stand_ins=True)
    failing = Failing(rows, planner, FRAME, TINY, MIXTURE, SHIFT, 3)
    with pytest.raises(UserError, match=r"the disk is gone. Mount it"):
        next(feed(failing, [Task((), ())], 1))


def test_a_worker_that_dies_is_an_error_that_says_so(rows):
    class Dying(Reader):
        def __call__(self, task):
            os._exit(9)

    planner = Layer(TOKENS, TRANSFORMS, "Draw.", "ours", stand_ins=True)
    dying = Dying(rows, planner, FRAME, TINY, MIXTURE, SHIFT, 3)
    with pytest.raises(UserError, match="a data worker ended"):
        next(feed(dying, [Task((), ())], 1))


def test_a_worker_that_is_told_to_end_does_so_after_a_while_and_without_a_failure(
    rows, monkeypatch
):
    monkeypatch.setattr(sft.feed, "GRACE_SECONDS", 1)
    reads = reader(rows)
    parcels = feed(reads, (reads.task(packs(rows), {}) for _ in range(10_000)), 1)
    next(parcels)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGTERM)
    for _ in range(3):  # it goes on for now
        next(parcels)
    worker.join(20)
    assert worker.exitcode == 0
    parcels.close()


def test_scores_and_actions_of_turns_are_found_among_the_scored_tokens(rows):
    reads = reader(rows)
    parcel = reads(reads.task(packs(rows), {}, decisions=True))
    arrays = parcel.arrays("cpu")
    said = {Decision.SCORE: [], Decision.ACTION: []}
    for turn in range(int(arrays["turn_S"].max()) + 1):
        mine = arrays["turn_S"] == turn
        for part, found in said.items():
            ids = arrays["label_S"][mine & (arrays["part_S"] == part)].tolist()
            found.append(TOKENS.decode(ids).strip())
    assert set(said[Decision.ACTION]) == {"edit", "done"}
    assert all(0 <= int(score) <= 10 for score in said[Decision.SCORE])


def test_a_round_trip_changes_what_is_looked_at_and_not_what_is_drawn(rows, vae):
    (pack,) = packs(rows, count=1)
    reads = reader(rows)
    parcel = reads(reads.task([pack], {}))
    plain_batch = store(vae).batch(parcel)[0]
    through = store(vae, room=1e9, round_trip=1.0)
    batch = through.batch(parcel)[0]
    noised = batch.noised_BG
    assert torch.equal(batch.latent_BGC[noised], plain_batch.latent_BGC[noised])
    clean = ~noised & (batch.sample_BL[:, batch.ids_BU.shape[1] :] >= 0)
    assert not torch.equal(batch.latent_BGC[clean], plain_batch.latent_BGC[clean])
    assert not torch.equal(batch.patches_VP, plain_batch.patches_VP)
    half = store(vae, room=1e9, round_trip=0.5)
    half.batch(parcel)
    changed = [one.seen is not one.target for one in half.kept.values()]
    assert 0 < sum(changed) < len(changed)


def test_anchors_and_trajectories_of_one_uid_have_pictures_of_their_own():
    record = Record("a", "t2i", "two dots", (), (Picture(data=b"x"),))
    rows = expand([], [record], ["anchor"])
    assert image_key(rows["anchor"][0], 0) == ("anchor", "a", 0)
    assert image_key(replace(rows["anchor"][0], kind="whole"), 0) == ("", "a", 0)
