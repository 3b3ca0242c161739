"""Losses of packed rows: literal masks, worked sums, packs against single samples, golden ones."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from agent.types import Reflection
from sft.data import Picture, Record, Said, read_dataset
from sft.loss import (
    KINDS,
    PRESETS,
    LossSettings,
    Tally,
    counts,
    flow_errors,
    loss,
    tallied,
)
from sft.mixture import Drawn, Dropout
from sft.packs import encode, image_names, image_noise, image_times, read_pack
from sft.rows import Layer, Row, expand
from tests import released
from tests.letters import LETTERS
from tests.tiny import TINY, write_tiny_checkpoint
from umm_reflect import Bagel, packing
from umm_reflect.context import ImageSegment, TextSegment
from umm_reflect.images import mended_transforms, patchify_pixels
from umm_reflect.layout import Frame
from umm_reflect.packing import (
    NO_LABEL,
    PackedBatch,
    PackedRow,
    Piece,
    TrainingOutput,
    collate,
    pack_row,
    training_forward,
)

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
TRANSFORMS = mended_transforms(vae=(32, 16, 16), vit=(28, 14, 14))
FRAME = Frame(LETTERS.start, LETTERS.end, LETTERS.image_start, LETTERS.image_end)


# --- literal masks --------------------------------------------------------------------------------

PLAN = """<think>
[CURRENT_ROUND] Round#0
[SCORE] 0/10
[ACTION] edit
[THINKING] Nothing yet.
[SOURCE_IMAGE] None
</think>
[EDIT] A dog."""
LOOK = """<think>
[CURRENT_ROUND] Round#1
[SCORE] 10/10
[ACTION] done
[THINKING] A dog.
[SOURCE_IMAGE] Image #0
</think>
[EDIT] None"""
GIVEN = """<think>
[CURRENT_ROUND] Round#0
[SCORE] 2/10
[ACTION] edit
[THINKING] No hat.
[SOURCE_IMAGE] given
</think>
[EDIT] Add it."""
SEEN = """<think>
[CURRENT_ROUND] Round#1
[SCORE] 9/10
[ACTION] done
[THINKING] A hat.
[SOURCE_IMAGE] Image #1
</think>
[EDIT] None"""
END = "<|im_end|>"

DRAWING = Record(
    "t",
    "t2i",
    "one dog",
    (
        Said(PLAN, Reflection("Nothing yet.", 0, "edit", "A dog.")),
        Said(LOOK, Reflection("A dog.", 10, "done", "")),
    ),
    (Picture(data=released.png(1)),),
    planned=True,
)
EDITING = Record(
    "e",
    "edit",
    "a hat",
    (
        Said(GIVEN, Reflection("No hat.", 2, "edit", "Add it.")),
        Said(SEEN, Reflection("A hat.", 9, "done", "")),
    ),
    (Picture(data=released.png(2)), Picture(data=released.png(3))),
)


def carried(record: Record, kind: str, image: int = -1) -> list[tuple[str, str | int]]:
    """Each block of a row: (what stands there, the labels it is scored on or how many latents are
    noised).
    """
    laid = Layer(LETTERS, TRANSFORMS, "Draw.").lay(Row(kind, "", record, image))
    row = pack_row([laid.pieces], FRAME, TINY)
    order = np.argsort(row.order_L)
    u = len(row.ids_U)
    blocks = []
    for _, places in groupby(order.tolist(), key=lambda place: row.block_L[place]):
        places = list(places)
        texts = [place for place in places if place < u]
        labels = [int(row.label_U[p]) for p in texts if row.label_U[p] != NO_LABEL]
        assert all(row.weight_U[p] == 0 for p in texts if row.label_U[p] == NO_LABEL)
        gen = [place - u for place in places if place >= u]
        if gen:
            assert not labels
            blocks.append(("latents", int(row.noised_G[gen].sum())))
        elif row.ids_U[texts[0]] == LETTERS.image_start:
            assert not labels
            blocks.append(("patches", 0))
        else:
            text = LETTERS.decode(row.ids_U[texts[1:-1]].tolist())
            blocks.append((text, LETTERS.decode(labels)))
    return blocks


def test_exactly_these_tokens_of_a_drawing_trajectory_carry_a_loss():
    assert carried(DRAWING, "controller") == [
        *(("Draw.", ""), ("one dog", ""), (PLAN, PLAN + END)),
        *(("latents", 0), ("patches", 0), (LOOK, LOOK + END)),
    ]
    assert carried(DRAWING, "transition", 0) == [("A dog.", ""), ("latents", 4)]
    assert carried(DRAWING, "verifier", 0) == [
        *(("Draw.", ""), ("one dog", ""), (PLAN, "")),
        *(("latents", 0), ("patches", 0), (LOOK, LOOK + END)),
    ]
    assert carried(DRAWING, "anchor") == [("one dog", ""), ("latents", 4)]
    assert carried(DRAWING, "whole") == [
        *(("Draw.", ""), ("one dog", ""), (PLAN, PLAN + END), ("latents", 4)),
        *(("latents", 0), ("patches", 0), (LOOK, LOOK + END)),
    ]


def test_exactly_these_tokens_of_an_editing_trajectory_carry_a_loss():
    source = [("latents", 0), ("patches", 0)]
    assert carried(EDITING, "controller") == [
        *(("Draw.", ""), *source, ("a hat", ""), (GIVEN, GIVEN + END), *source, (SEEN, SEEN + END)),
    ]
    assert carried(EDITING, "transition", 1) == [*source, ("Add it.", ""), ("latents", 4)]
    assert carried(EDITING, "verifier", 1) == [
        *(("Draw.", ""), *source, ("a hat", ""), (GIVEN, ""), *source, (SEEN, SEEN + END)),
    ]
    assert carried(EDITING, "whole") == [
        *(("Draw.", ""), *source, ("a hat", ""), (GIVEN, GIVEN + END), ("latents", 4)),
        *(*source, (SEEN, SEEN + END)),
    ]


def test_the_loss_counts_the_published_weights_of_a_turn():
    laid = Layer(LETTERS, TRANSFORMS, "Draw.").lay(Row("verifier", "", EDITING, 1))
    row = pack_row([laid.pieces], FRAME, TINY)
    looked = [patchify_pixels(image.vit_pixels) for image in row.vit_images]
    batch = collate([row], [torch.zeros(4, 16)] * 2, looked)
    # every label weighs 1, and more: the tags 1, "done" 2, "Image #1" 1, the newline after
    # </think> 1, "[EDIT]" 2 each
    tags = "<think></think>[CURRENT_ROUND][SCORE][ACTION][THINKING][SOURCE_IMAGE]"
    more = len(tags) + 2 * len("done") + len("Image #1") + 1 + 2 * len("[EDIT]")
    labels = len(SEEN) + 1
    ce_count, mse_count = counts(batch).tolist()
    assert ce_count == pytest.approx((labels + more) / math.sqrt(labels), abs=1e-4)
    assert mse_count == 0


# --- worked sums ----------------------------------------------------------------------------------

PICTURE = ImageSegment(latent=torch.zeros(4, 4, 2))  # two latent tokens
SAID = TextSegment((21, 22))


def worked() -> tuple[PackedBatch, TrainingOutput, Tensor, Tensor]:
    """Two rows: a turn with weights 2, 0, 1 and a picture; then a picture at another time."""
    turn = [Piece(SAID, learn=True, weights=(2.0, 0.0, 1.0))]
    drawing = [Piece(TextSegment((31,))), Piece(PICTURE, learn=True)]
    rows = [pack_row(examples, FRAME, TINY) for examples in ([turn, drawing], [drawing])]
    batch = collate(rows, [torch.zeros(2, 16), torch.ones(2, 16)], [])
    noise = torch.ones(2, 2, 16)
    velocity = torch.zeros(2, 2, 16)  # targets are noise - clean: 1 in the first row, 0 after
    velocity[0, 1] = 3.0
    velocity[1, 0, :8] = 2.0
    out = TrainingOutput(
        torch.tensor([0.5, 7.0, 2.0]), torch.tensor([True, True, False]), velocity, (), ()
    )
    return batch, out, noise, torch.tensor([0.25, 0.99])


def test_a_worked_step():
    batch, out, noise, _ = worked()
    assert counts(batch).tolist() == [3.0, 4.0]
    assert flow_errors(out, batch, noise)[batch.noised_BG].tolist() == [1.0, 4.0, 2.0, 0.0]
    got = loss(out, batch, noise, counts(batch), LossSettings(ce_weight=2.0, mse_weight=0.5))
    assert got.ce == pytest.approx((2 * 0.5 + 0 * 7 + 1 * 2) / 3)
    assert got.mse == pytest.approx(7 / 4)
    assert got.total == pytest.approx(2 * 1 + 0.5 * 7 / 4)


def test_means_are_over_the_whole_step_and_gradients_over_all_processes():
    batch, out, noise, _ = worked()
    step = torch.tensor([6.0, 14.0])  # as if other processes had as many weights and ten tokens
    got = loss(out, batch, noise, step, PRESETS["release"], processes=2)
    assert (float(got.ce), float(got.mse)) == (pytest.approx(0.5), pytest.approx(0.5))
    assert got.total == pytest.approx(2.0)


def test_a_loss_without_a_token_is_zero_and_has_a_gradient():
    row = pack_row([[Piece(TextSegment((31,)))]], FRAME, TINY)
    batch = collate([row], [], [])
    ce = torch.zeros(0, requires_grad=True)
    out = TrainingOutput(ce, torch.zeros(0, dtype=bool), torch.zeros(1, 0, 1), (), ())
    got = loss(out, batch, torch.zeros(1, 0, 1), counts(batch), PRESETS["ours"])
    assert float(got.total.detach()) == 0
    got.total.backward()


def test_logs_are_means_by_kind_and_by_time():
    batch, out, noise, times = worked()
    tally = tallied(out, batch, noise, times, [["verifier", "anchor"], ["transition"]])
    report = tally.report()
    assert report == {
        "ce": pytest.approx(1.0),
        "token_ce": pytest.approx(1.25),  # the label of weight 0 is left out
        "token_accuracy": pytest.approx(0.5),
        "mse": pytest.approx(7 / 4),
        "verifier/ce": pytest.approx(1.0),
        "verifier/token_ce": pytest.approx(1.25),
        "verifier/token_accuracy": pytest.approx(0.5),
        "anchor/mse": pytest.approx(5 / 2),
        "transition/mse": pytest.approx(2 / 2),
        "mse/t 0.2-0.3": pytest.approx(5 / 2),
        "mse/t 0.9-1.0": pytest.approx(2 / 2),
    }
    assert (tally + tally).report() == report
    assert Tally.from_flat(tally.flat()).report() == report
    assert Tally.zero().report() == {}
    with pytest.raises(ValueError, match=r"kinds of \[1, 1\] examples for rows of \[2, 1\]"):
        tallied(out, batch, noise, times, [["verifier"], ["transition"]])


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="timestep_shift is 0; give a number above 0"):
        LossSettings(timestep_shift=0)
    with pytest.raises(ValueError, match="ce_weight is -1; give 0"):
        LossSettings(ce_weight=-1)
    assert PRESETS["release"] == LossSettings(1.0, 1.0, 1.0)


# --- packs against single samples -----------------------------------------------------------------


@pytest.fixture(scope="module")
def bagel(tmp_path_factory) -> Bagel:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=2)
    return Bagel.from_pretrained(folder, device="cpu", dtype="float32")


def run(bagel: Bagel, packs, rows, layer):
    """(batch, output, noise, times, kinds) of packs, one row each, as the trainer makes them."""
    reads = [read_pack(pack, rows, layer, Dropout(text=0.3, vit=0.3, vae=0.3), 0) for pack in packs]
    some: list[PackedRow] = [pack_row(read.examples, FRAME, TINY) for read in reads]
    names = [n for row, r in zip(some, reads, strict=True) for n in image_names(row, r.drawn)]
    images = [image for row in some for image in row.vae_images]
    looked = [patchify_pixels(image.vit_pixels) for row in some for image in row.vit_images]
    latents = encode(bagel.vae, images, names, 0, "sampled")
    batch = collate(some, latents, looked)
    times, noise = image_times(names, 0, 1.0), image_noise(batch, names, 0)
    out = training_forward(bagel, batch, times, noise)
    return batch, out, noise, times, [read.kinds for read in reads]


def test_packed_rows_have_the_losses_gradients_and_logs_of_their_samples_alone(bagel, tmp_path):
    found = read_dataset(released.write_released(tmp_path))
    # with the short prompt of this file, so that sequences stay short
    records = [replace(r, system_prompt=None) for r in found.records[:6]]
    rows = expand(records, found.anchors, KINDS)
    layer = Layer(LETTERS, TRANSFORMS, "Draw.")
    drawn = [
        Drawn(kind, index % len(rows[kind]), number, 0)
        for number, (kind, index) in enumerate(zip(KINDS * 2, range(3, 15), strict=True))
    ]
    weights = [p.requires_grad_(True) for p in bagel.parameters()]
    total = torch.zeros(2)
    parts = [run(bagel, [(one,)], rows, layer) for one in drawn]
    for batch, *_ in parts:
        total += counts(batch)
    alone = [loss(out, batch, noise, total, PRESETS["release"]) for batch, out, noise, *_ in parts]
    sums = [
        sum(float(getattr(one, name).detach()) for one in alone) for name in ("ce", "mse", "total")
    ]
    single = torch.autograd.grad(sum(one.total for one in alone), weights, allow_unused=True)
    log = sum((tally_of(part) for part in parts), Tally.zero())

    packed = run(bagel, [tuple(drawn[:5]), tuple(drawn[5:9]), tuple(drawn[9:])], rows, layer)
    batch, out, noise, *_ = packed
    torch.testing.assert_close(counts(batch), total, atol=1e-3, rtol=1e-5)
    got = loss(out, batch, noise, counts(batch), PRESETS["release"])
    assert sums[0] > 1
    assert sums[1] > 0.5
    for value, name in zip(sums, ("ce", "mse", "total"), strict=True):
        assert float(getattr(got, name).detach()) == pytest.approx(value, rel=1e-5)
    together = torch.autograd.grad(got.total, weights, allow_unused=True)
    for one, other in zip(single, together, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one - other).abs().max() <= 1e-5 * max(1.0, float(one.abs().max()))
    report = tally_of(packed).report()
    assert report["ce"] == pytest.approx(float(got.ce), rel=1e-5)
    assert report["mse"] == pytest.approx(float(got.mse), rel=1e-5)
    assert report == pytest.approx(log.report(), rel=1e-5)
    assert {f"{kind}/ce" for kind in ("controller", "verifier", "penultimate", "whole")} <= {
        *report
    }
    assert {f"{kind}/mse" for kind in ("transition", "anchor", "whole")} <= {*report}


def tally_of(part) -> Tally:
    batch, out, noise, times, kinds = part
    return tallied(out, batch, noise, times, kinds)


# --- golden ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="shared data: there is no ../shared/golden")
@pytest.mark.parametrize("shift", [1, 3])
def test_the_golden_batch_has_the_golden_losses(shift, monkeypatch):
    from umm_reflect.parity_fast import FastImplementation
    from umm_reflect.parity_golden import Golden
    from umm_reflect.parity_training import read_batch

    golden = Golden(GOLDEN)
    impl = FastImplementation(golden.checkpoint)
    file = "train.safetensors"
    tensors = golden.tensors(file)
    noise = tensors[f"shift{shift}.noise"]
    samples = read_batch(golden, impl, file, golden.cases(file)["batch"], noise).samples
    seen = []

    def noting(bagel, batch, times_I, noise_BGC, **options):
        out = training_forward(bagel, batch, times_I, noise_BGC, **options)
        seen.append((batch, out, noise_BGC, times_I))
        return out

    monkeypatch.setattr(packing, "training_forward", noting)
    impl.train(samples, float(shift))
    ((batch, out, noise_BGC, times),) = seen
    total, ce, mse = tensors[f"shift{shift}.loss"].tolist()
    # recorded with the plain mean over scored tokens
    plain = replace(batch, weight_S=torch.ones_like(batch.weight_S))
    settings = LossSettings(timestep_shift=float(shift))
    got = loss(out, plain, noise_BGC, counts(plain), settings)
    assert counts(plain).tolist() == [16.0, 42.0]
    assert float(got.ce) == pytest.approx(ce, abs=1e-5)
    assert float(got.mse) == pytest.approx(mse, abs=1e-5)
    assert float(got.total.detach()) == pytest.approx(total, abs=1e-5)
    # with the recorded weights, 1 over the root of the number of labels of each turn
    weights, recorded = tensors["in.ce_loss_weights"], tensors[f"shift{shift}.ce"]
    weighted = loss(
        out,
        replace(batch, weight_S=weights),
        noise_BGC,
        torch.stack([weights.sum(), torch.tensor(42.0)]),
        settings,
    )
    assert float(weighted.ce) == pytest.approx(
        float((recorded * weights).sum() / weights.sum()), abs=1e-5
    )
    kinds = [["whole"] * (int(batch.sample_BL.max()) + 1)]
    report = tallied(out, plain, noise_BGC, times, kinds).report()
    assert report["whole/ce"] == pytest.approx(ce, abs=1e-5)
    by_time = [value for name, value in report.items() if name.startswith("mse/t")]
    assert min(by_time) <= mse <= max(by_time)
