"""Operations of a packed batch: literal counts of tokens and pairs, held to the mask itself and to
torch's own counter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.tiny import TINY, write_tiny_checkpoint
from umm_reflect.checkpoint import load
from umm_reflect.config import BAGEL_7B_MOT
from umm_reflect.context import ImageSegment, TextSegment
from umm_reflect.layout import Frame
from umm_reflect.packing import (
    PackedRow,
    Piece,
    collate,
    dense_mask,
    pack_row,
    training_forward,
)
from umm_reflect.training.flops import (
    Flops,
    Learns,
    LowRank,
    Work,
    flops,
    learns_of,
    mfu,
    peak_flops,
    seen_pairs,
    work,
)
from umm_reflect.training.trainable import PRESETS, LoraSettings, apply

FRAME = Frame(1, 2, 3, 4)
PROMPT, TURN, EDIT = TextSegment((11, 12)), TextSegment((21, 22, 23)), TextSegment((31,))
# two latent tokens and two patches; the second picture has one latent token and no patches
FIRST = ImageSegment(latent=torch.ones(4, 4, 2), vit_pixels=torch.ones(3, 14, 28))
SECOND = ImageSegment(latent=torch.ones(4, 2, 2))
TRAJECTORY = (
    Piece(PROMPT),
    Piece(FIRST, learn=True),
    Piece(FIRST),
    Piece(TURN, learn=True),
    Piece(SECOND, learn=True),
)
DRAWING = (Piece(EDIT), Piece(SECOND, learn=True))


def pack(*examples) -> PackedRow:
    return pack_row(examples, FRAME, TINY)


def batch_of(*rows: PackedRow):
    draw = torch.Generator().manual_seed(0)
    latents = [
        torch.randn(image.latent.shape[-2] // 2 * (image.latent.shape[-1] // 2), 16, generator=draw)
        for row in rows
        for image in row.vae_images
    ]
    patches = [
        torch.randn(
            image.vit_pixels.shape[-2] * image.vit_pixels.shape[-1] // 196, 588, generator=draw
        )
        for row in rows
        for image in row.vit_images
    ]
    return collate(rows, latents, patches)


# --- tokens and pairs -----------------------------------------------------------------------------


def test_the_pairs_of_a_trajectory_are_those_a_person_counts():
    # prompt 4 causal: 10; noised 4: sees 4 + own 4, 32; clean latents 4: the same 32;
    # patches 4: 4 + 4 + 4, 48; turn 5: 12 clean before and 15 of its own, 75;
    # noised edit 3: 17 clean before and own 3, 60
    assert work([pack(TRAJECTORY)]).pairs == 10 + 32 + 32 + 48 + 75 + 60


def test_examples_of_a_row_do_not_see_each_other():
    assert work([pack(DRAWING)]).pairs == 6 + 3 * (3 + 3)
    both = work([pack(TRAJECTORY, DRAWING)])
    assert both == work([pack(TRAJECTORY)]) + work([pack(DRAWING)])


def test_the_tokens_of_a_trajectory_are_counted_by_expert():
    assert work([pack(TRAJECTORY)]) == Work(
        und=4 + 2 + 2 + 4 + 5 + 2,  # texts, frames of pictures, patches
        gen=2 + 2 + 1,
        scored=4,  # three ids and the end
        patches=2,
        pairs=257,
        patch_pairs=4,
    )


def test_a_batch_has_the_work_of_its_rows_whatever_the_padding():
    rows = [pack(TRAJECTORY, DRAWING), pack(DRAWING)]
    assert work(batch_of(*rows)) == work(rows)


@pytest.mark.parametrize("seed", range(6))
def test_counted_pairs_equal_the_sum_of_the_mask_for_random_rows(seed):
    draw = np.random.default_rng(seed)
    examples = []
    for _ in range(int(draw.integers(1, 5))):
        pieces = []
        for _ in range(int(draw.integers(1, 6))):
            learn = bool(draw.integers(2))
            length = int(draw.integers(1, 7))
            image = replace(FIRST, latent=torch.ones(4, 2 * length, 2))
            pieces.append(Piece(image if draw.integers(2) else TextSegment((9,) * length), learn))
        examples.append(pieces)
    row = pack(*examples)
    batch = batch_of(row, pack(DRAWING))
    real = (batch.sample_BL >= 0)[:, None, :, None]
    assert work(batch).pairs == int((dense_mask(batch) & real).sum())


def test_an_empty_row_has_no_pairs():
    nothing = np.zeros(0, np.int64)
    assert seen_pairs(nothing, nothing, nothing, nothing, nothing) == 0


# --- operations -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def counted(bagel, batch) -> tuple[int, int]:
    """(linear maps, attention) of a forward and backward, as torch counts them."""
    times = torch.full((batch.num_images,), 0.5)
    with FlopCounterMode(display=False) as counter:
        out = training_forward(bagel, batch, times, torch.ones_like(batch.latent_BGC))
        (out.ce_S.sum() + out.velocity_BGC.sum()).backward()
    by_name = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    attention = by_name.pop("aten.bmm", 0)
    assert set(by_name) <= {"aten.mm", "aten.addmm"}
    return sum(by_name.values()), attention


CASES = [(preset, ()) for preset in PRESETS] + [
    ("full", ("vit",)),
    ("full", ("vit", "embeddings", "latents", "connector")),
    ("full", ("und", "gen", "embeddings", "latents", "connector", "vit")),  # the head alone
    ("lora-both", ("und",)),
]


TEXT = (Piece(PROMPT, learn=True),)
BY_ROW = [((TRAJECTORY, DRAWING), *case) for case in CASES]
# what only draws gets no gradient from a text
BY_ROW += [((TEXT,), *case) for case in CASES if "gen" not in case[0] and case[1] != ("und",)]


@pytest.mark.parametrize(("examples", "preset", "frozen"), BY_ROW)
def test_every_linear_map_is_counted_as_torch_counts_it(folder, preset, frozen, examples):
    bagel = load(folder, device="cpu", dtype="float32", attn="math")
    lora = LoraSettings(rank=3) if preset.startswith("lora") else None
    apply(bagel, preset, lora, frozen)
    row = pack(*examples)
    done = work([row])
    length = done.tokens
    # the kernels of this test compute every pair of a row, so dense counts are what must agree
    dense = replace(done, pairs=length * length)
    linear, attention = counted(bagel, batch_of(row))
    learns = learns_of(bagel)
    mine = flops(dense, TINY, learns)
    alone = flops(replace(dense, pairs=0, patch_pairs=0), TINY, learns)
    assert alone.model == linear
    assert mine.model - alone.model == attention


def test_what_a_preset_learns_is_known_before_there_is_a_model(folder):
    for preset, frozen in CASES:
        bagel = load(folder, device="cpu", dtype="float32")
        rank = {"rank": 3} if preset.startswith("lora") else {}
        apply(bagel, preset, LoraSettings(**rank) if rank else None, frozen)
        assert learns_of(bagel) == Learns.of_preset(preset, frozen=frozen, **rank)


def test_a_trained_token_costs_six_operations_a_weight_and_a_frozen_one_four():
    # tokens of the generation expert alone, in the full-size model; attention and heads apart
    done = Work(gen=1000)
    llm = BAGEL_7B_MOT.llm
    weights = 28 * (3584 * 3584 * 2 + 3584 * 512 * 2 + 3 * 3584 * 18944)
    ends = (256 + 3584 + 64) * 3584  # times and latents in
    trained = flops(done, BAGEL_7B_MOT, Learns(frozenset({"gen"})))
    # the first layer's norm learns, so that every input has a gradient
    inputs = 2 * ends + 2 * 3584 * 64 + 2 * 3584 * 64
    assert trained.model == 1000 * (6 * weights + inputs)
    low = flops(
        done,
        BAGEL_7B_MOT,
        Learns(lora={("gen", "down_proj"): LowRank(1)}),
    )
    first = 3584 * 3584 + 3584 * 512 * 2  # no gradient reaches what enters the first layer
    first += 3584 * 3584 + 3 * 3584 * 18944
    extra = 28 * 6 * (18944 + 3584) - 2 * 18944
    assert low.model == 1000 * (4 * weights - 2 * first + inputs + extra)
    assert llm.num_layers == 28


def test_running_layers_again_is_hardware_work_and_no_model_work():
    done = Flops(forward=10, backward=20, layers=8)
    assert done.model == 30
    assert done.hardware(recompute=False) == 30
    assert done.hardware(recompute=True) == 38
    assert done + done == Flops(20, 40, 16)


# --- share of the peak ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10G", None),
        ("NVIDIA GB200", 2500.0),
        ("Some CPU", None),
    ],
)
def test_peaks_are_found_by_the_name_that_the_driver_gives(name, tera):
    assert peak_flops(name) == (tera * 1e12 if tera else None)


def test_mfu_is_the_share_of_all_devices_peaks():
    assert mfu(4e12, 2.0, devices=4, peak=1e12) == 0.5
    assert mfu(4e12, 2.0, devices=4, peak=None) is None
