"""Lengths, dropout, latents, times and noise of packs, on rows in the release's schema."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from sft.data import Picture, read_dataset
from sft.mixture import PRESETS, Drawn, Dropout, Mixture, Sampler
from sft.packs import (
    ImageName,
    encode,
    image_names,
    image_noise,
    image_times,
    measure,
    read_pack,
)
from sft.rows import Layer, expand
from tests import released
from tests.letters import LETTERS
from tests.tiny import TINY
from umm_reflect.autoencoder import AutoEncoder
from umm_reflect.context import ImageSegment
from umm_reflect.images import mended_transforms, patchify_latent, patchify_pixels
from umm_reflect.layout import Frame
from umm_reflect.packing import collate, pack_row

TRANSFORMS = mended_transforms(vae=(32, 16, 16), vit=(28, 14, 14))
FRAME = Frame(LETTERS.start, LETTERS.end, LETTERS.image_start, LETTERS.image_end)
KINDS = ("controller", "transition", "verifier", "penultimate", "anchor", "whole")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    found = read_dataset(released.write_released(tmp_path_factory.mktemp("released")))
    return expand(found.records[:8], found.anchors, KINDS)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer(LETTERS, TRANSFORMS, released.PROMPT_FILE)


@pytest.fixture(scope="module")
def planner() -> Layer:
    return Layer(LETTERS, TRANSFORMS, released.PROMPT_FILE, stand_ins=True)


def packed(read):
    return pack_row(read.examples, FRAME, TINY)


def one(rows, kind: str, index: int = 0, number: int = 0) -> tuple[Drawn]:
    assert index < len(rows[kind])
    return (Drawn(kind, index, number, 0),)


# --- lengths --------------------------------------------------------------------------------------


def test_the_length_of_a_row_is_that_of_its_pack(rows, layer, planner):
    measured = measure(rows, planner, FRAME, TINY)
    assert all(not reasons for reasons in measured.skipped.values())
    for kind, some in rows.items():
        for index, tokens in enumerate(measured.tokens[kind]):
            row = pack_row([layer.lay(some[index]).pieces], FRAME, TINY)
            assert len(row.order_L) == tokens
    # a prompt and its frame, and 2 x 2 latents and theirs
    text = len("A Photo of 0 (red) dogs!") + 2
    assert measured.tokens["anchor"].tolist() == [text + 6] * 3


def test_processes_measure_the_same_lengths(rows, planner):
    some = {kind: rows[kind] for kind in ("whole", "anchor")}
    here, there = (measure(some, planner, FRAME, TINY, workers=w) for w in (0, 1))
    for kind in some:
        assert here.tokens[kind].tolist() == there.tokens[kind].tolist()
        assert here.tokens[kind].min() > 0


def test_rows_that_cannot_be_laid_out_have_no_length_and_are_counted(rows, layer, planner):
    record = rows["anchor"][0].record
    gone = replace(record, images=(Picture(file="gone.png"),))
    huge = Picture(data=released.png(1, side=300))
    some = {"anchor": [replace(rows["anchor"][0], record=gone), rows["anchor"][1]]}
    measured = measure(some, planner, FRAME, TINY)
    assert measured.tokens["anchor"].tolist() == [0, 32]
    assert measured.skipped == {"anchor": {"image_missing": 1}}
    some = {"anchor": [replace(rows["anchor"][0], record=replace(record, images=(huge,)))]}
    wide = mended_transforms(vae=(300, 16, 16), vit=(28, 14, 14))
    measured = measure(some, Layer(LETTERS, wide, stand_ins=True), FRAME, TINY)
    assert measured.skipped == {"anchor": {"a picture larger than the model's grid": 1}}
    with pytest.raises(ValueError, match="measure takes a Layer with stand_ins=True"):
        measure(some, layer, FRAME, TINY)


def test_a_picture_that_turns_out_bad_costs_its_row_and_not_the_pack(rows, layer):
    record = rows["anchor"][0].record
    broken = Picture(data=released.png(1)[:60], size=(32, 32))
    some = {"anchor": [replace(rows["anchor"][0], record=replace(record, images=(broken,)))]}
    some["anchor"] += rows["anchor"][1:]
    pack = (*one(some, "anchor", 0, 7), *one(some, "anchor", 1, 8))
    read = read_pack(pack, some, layer, Dropout(), 0)
    assert [d.number for d in read.drawn] == [8]
    assert read.kinds == ("anchor",)
    assert [(d.number, str(e.rule)) for d, e in read.bad] == [(7, "image_corrupt")]


# --- dropout --------------------------------------------------------------------------------------


def lost(read) -> list[str]:
    """What each example of a read pack has lost."""
    return [
        ", ".join(
            "text" if hasattr(p.segment, "ids") else "vae" if p.segment.has_vae else "vit"
            for p in example
            if p.dropped
        )
        for example in read.examples
    ]


def many(rows, layer, kind, index, dropout, count=400):
    pack = tuple(Drawn(kind, index, number, 0) for number in range(count))
    return read_pack(pack, rows, layer, dropout, seed=0)


def edit_row(rows) -> int:
    return next(i for i, r in enumerate(rows["transition"]) if r.uid.startswith("edit_transition"))


def test_the_published_dropout_leaves_each_segment_out_by_itself(rows, layer):
    dropout = PRESETS["release"].dropout
    often = Counter(lost(many(rows, layer, "transition", edit_row(rows), dropout)))
    share = {what: count / 400 for what, count in often.items()}
    assert share[""] == pytest.approx(0.7 * 0.7 * 0.9, abs=0.06)
    assert share["vae"] == pytest.approx(0.3 * 0.7 * 0.9, abs=0.06)
    assert share["vae, vit"] == pytest.approx(0.09 * 0.9, abs=0.04)
    assert share["text"] == pytest.approx(0.49 * 0.1, abs=0.03)
    # as published, the system prompt and the request of rows that learn turns are lost too
    often = Counter(lost(many(rows, layer, "controller", 0, dropout)))
    assert set(often) == {"", "text", "text, text"}
    assert often[""] / 400 == pytest.approx(0.81, abs=0.06)


def test_our_dropout_is_the_branches_of_guidance_and_leaves_turns_alone(rows, layer):
    dropout = Dropout(text_uncond=0.2, image_uncond=0.3)
    index = edit_row(rows)
    read = many(rows, layer, "transition", index, dropout)
    assert not any(lost(read))
    shapes = Counter(
        tuple("text" if hasattr(p.segment, "ids") else "image" for p in e) for e in read.examples
    )
    assert set(shapes) == {
        ("image", "image", "text", "image"),  # latents, patches, edit, target
        ("image", "image", "image"),
        ("text", "image"),
    }
    assert shapes["image", "image", "image"] / 400 == pytest.approx(0.2, abs=0.06)
    assert shapes["text", "image"] / 400 == pytest.approx(0.3, abs=0.07)
    # without its images the edit begins at position 0, as guidance runs it
    example = next(e for e in read.examples if len(e) == 2)
    assert pack_row([example], FRAME, TINY).position_L[0] == 0
    for kind in ("controller", "verifier", "penultimate", "whole"):
        read = many(rows, layer, kind, 0, dropout, count=20)
        plain = layer.lay(rows[kind][0]).pieces
        for example in read.examples:
            assert [(p.learn, p.dropped) for p in example] == [(p.learn, False) for p in plain]


def test_what_a_row_loses_depends_on_its_number_and_not_on_its_pack(rows, layer):
    dropout = PRESETS["release"].dropout
    pack = tuple(Drawn("transition", edit_row(rows), number, 0) for number in range(12))
    together = lost(read_pack(pack, rows, layer, dropout, seed=3))
    apart = [lost(read_pack((d,), rows, layer, dropout, seed=3))[0] for d in reversed(pack)]
    assert together == apart[::-1]
    assert together != lost(read_pack(pack, rows, layer, dropout, seed=4))


# --- latents, times and noise ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def vae() -> AutoEncoder:
    torch.manual_seed(0)
    return AutoEncoder(TINY.vae).eval()


def test_images_are_named_by_their_row_and_their_place_in_it(rows, layer):
    index = next(i for i, r in enumerate(rows["whole"]) if r.uid == "edit-001")
    pack = (*one(rows, "anchor", 1, 5), *one(rows, "whole", index, 9))
    read = read_pack(pack, rows, layer, Dropout(), 0)
    assert image_names(packed(read), read.drawn) == [
        ImageName(5, 0, True),
        ImageName(9, 0, False),  # the source, then each drawn image as target and as seen
        ImageName(9, 1, True),
        ImageName(9, 2, False),
        ImageName(9, 3, True),
        ImageName(9, 4, False),
    ]


def test_conditions_come_from_the_mean_or_a_sample_and_targets_from_a_sample(vae):
    images = [ImageSegment(torch.full((3, 16, 32), 0.5)), ImageSegment(torch.zeros(3, 16, 32))]
    names = [ImageName(4, 0, False), ImageName(4, 1, True)]
    means = [patchify_latent(vae.encode(i.vae_pixels[None])[0]) for i in images]
    clean, target = encode(vae, images, names, 0, "mean")
    assert clean.shape == (2, 16)
    torch.testing.assert_close(clean, means[0], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(target, means[1], atol=1e-3)
    sampled, same = encode(vae, images, names, 0, "sampled")
    assert not torch.allclose(sampled, means[0], atol=1e-3)
    torch.testing.assert_close(same, target, atol=1e-6, rtol=1e-6)
    other = encode(vae, images, names, 1, "sampled")
    assert not torch.allclose(other[1], target, atol=1e-3)


def test_times_and_noise_of_an_image_do_not_depend_on_its_pack(rows, layer, vae):
    index = edit_row(rows)
    first, second = one(rows, "transition", index, 31), one(rows, "anchor", 0, 32)

    def of(*packs):
        read = [read_pack(pack, rows, layer, Dropout(), 0) for pack in packs]
        some = [packed(r) for r in read]
        names = [n for row, r in zip(some, read, strict=True) for n in image_names(row, r.drawn)]
        images = [image for row in some for image in row.vae_images]
        looked = [patchify_pixels(i.vit_pixels) for row in some for i in row.vit_images]
        batch = collate(some, encode(vae, images, names, 0, "mean"), looked)
        times, noise = image_times(names, 0, 3.0), image_noise(batch, names, 0)
        order = [n.number for n in names if n.noised]
        target = {
            number: noise[batch.noised_BG & (batch.image_BG == i)]
            for i, number in ((i, n.number) for i, n in enumerate(names) if n.noised)
        }
        time = {n.number: float(t) for n, t in zip(names, times, strict=True) if n.noised}
        assert set(order) == set(target)
        assert not noise[~batch.noised_BG].any()
        return time, target

    together, apart = of((*first, *second)), of(second, first)
    assert together[0] == apart[0]
    assert together[0][31] != together[0][32]
    for number in (31, 32):
        assert together[1][number].shape == (4, 16)
        assert torch.equal(together[1][number], apart[1][number])


def test_times_are_the_sigmoid_of_a_normal_shifted():
    names = [ImageName(number, 0, True) for number in range(500)]
    plain, shifted = image_times(names, 0, 1.0), image_times(names, 0, 3.0)
    torch.testing.assert_close(shifted, 3 * plain / (1 + 2 * plain))
    assert float(plain.logit().mean()) == pytest.approx(0, abs=0.15)
    assert float(plain.logit().std()) == pytest.approx(1, abs=0.1)
    assert image_times([], 0, 1.0).shape == (0,)


def test_from_rows_to_a_step_of_packs_within_their_caps(rows, layer, planner):
    weights = {"controller": 1, "transition": 1, "anchor": 1}
    mixture = Mixture(weights, "rows", False, None, 1100, 1200, 1200)
    plan = Sampler(mixture, measure(rows, planner, FRAME, TINY), 0, 2)
    for pack in plan.step(0):
        read = read_pack(pack, rows, layer, mixture.dropout, 0)
        assert len(packed(read).order_L) == sum(d.tokens for d in pack) <= 1200
