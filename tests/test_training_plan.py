"""The memory plan of a training run: exact where numbers are counted, near what autograd keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.tiny import TINY
from umm_reflect.config import BAGEL_7B_MOT, NANO
from umm_reflect.context import ImageSegment, TextSegment
from umm_reflect.layout import Frame
from umm_reflect.model import Bagel
from umm_reflect.packing import Piece, collate, pack_row, training_forward
from umm_reflect.training.flops import Work, work
from umm_reflect.training.learner import Learner, OptimizerSettings
from umm_reflect.training.plan import (
    TrainingRun,
    activations,
    checkpoint_bytes,
    plan_lines,
    plan_training,
    sizes,
)
from umm_reflect.training.processes import Processes
from umm_reflect.training.trainable import LoraSettings, apply

PACK = Work(und=12_288, gen=20_480, scored=2_048, patches=6_000)
TINY_PACK = Work(und=100, gen=50, scored=20, patches=16)
GIB = 2**30


def parts(config, run) -> dict[str, int]:
    return dict(plan_training(config, run).parts)


def test_full_training_of_the_release_in_one_process_takes_twenty_bytes_a_number():
    found = parts(BAGEL_7B_MOT, TrainingRun(PACK, "full"))
    numbers = 14_575_018_464
    assert found["weights: frozen and working copies"] == 2 * numbers
    assert found["weights: masters"] == 4 * numbers
    assert found["optimizer moments"] == 8 * numbers
    assert found["gradients"] == 4 * numbers
    assert found["gradients of a pack"] == 2 * numbers


def test_the_published_way_of_bf16_throughout_takes_eight_bytes_a_number():
    run = TrainingRun(PACK, "full", legacy_bf16=True, strategy="fsdp2", world=8)
    found = parts(BAGEL_7B_MOT, run)
    numbers = 14_575_018_464
    assert found["weights: masters"] == 2 * numbers // 8
    assert found["optimizer moments"] == 4 * numbers // 8
    assert found["gradients"] == 2 * numbers // 8
    assert "weights: frozen and working copies" not in found


def test_eight_processes_hold_an_eighth_where_weights_are_sharded_and_all_of_it_where_not():
    one = parts(BAGEL_7B_MOT, TrainingRun(PACK, "full"))
    for name in ("weights: masters", "optimizer moments", "gradients"):
        for strategy, cut in (("ddp", 1), ("fsdp2", 8), ("deepspeed", 8)):
            run = TrainingRun(PACK, "full", strategy=strategy, world=8)
            assert parts(BAGEL_7B_MOT, run)[name] == one[name] // cut
    whole = "weights: frozen and working copies"
    for stage, cut in ((2, 1), (3, 8)):
        run = TrainingRun(PACK, "full", strategy="deepspeed", world=8, zero_stage=stage)
        assert parts(BAGEL_7B_MOT, run)[whole] == one[whole] // cut


def test_a_copy_a_machine_is_cut_over_the_processes_of_that_machine():
    run = TrainingRun(PACK, "full", strategy="fsdp2", world=16, copies=2)
    eight = TrainingRun(PACK, "full", strategy="fsdp2", world=8)
    assert parts(BAGEL_7B_MOT, run) == parts(BAGEL_7B_MOT, eight)
    assert "fsdp2 over 16 processes in 2 copies" in "\n".join(plan_lines(BAGEL_7B_MOT, run))
    with pytest.raises(ValueError, match="3 copies do not divide 16 processes"):
        replace(run, copies=3)


def test_lora_holds_masters_and_moments_of_its_low_rank_weights_alone():
    found = parts(BAGEL_7B_MOT, TrainingRun(PACK, "lora-gen"))
    assert found["weights: masters"] == 4 * 80_740_352
    assert found["optimizer moments"] == 8 * 80_740_352
    assert found["weights: frozen and working copies"] == 2 * (14_575_018_464 + 80_740_352)


def test_an_average_is_one_more_fp32_copy_and_muon_keeps_one_moment_of_its_matrices():
    plain = parts(TINY, TrainingRun(TINY_PACK))
    average = parts(TINY, TrainingRun(TINY_PACK, ema=True))
    muon = parts(TINY, TrainingRun(TINY_PACK, optimizer="muon"))
    size = sizes(TINY, "full")
    assert average["moving average"] == 4 * size.trained == plain["weights: masters"]
    assert 0 < size.matrices < size.trained
    assert muon["optimizer moments"] == plain["optimizer moments"] - 4 * size.matrices


def test_fp32_weights_are_their_own_masters():
    found = parts(TINY, TrainingRun(TINY_PACK, "full", frozen=("vit",), bf16=False))
    size = sizes(TINY, "full", frozen=("vit",))
    assert found["weights: frozen and working copies"] == 4 * size.frozen
    assert found["weights: masters"] == 4 * size.trained


def test_sharded_weights_are_gathered_a_layer_at_a_time_and_whole_to_draw():
    few = Work(und=10, gen=10)
    run = TrainingRun(few, "full", strategy="fsdp2", world=8, picture=(64, 64))
    layer, vocabulary = 2 * 233_058_048, 152_064 * 3584
    rest = 402_552_736 + 16_980_992 + 14_232_128 - 26 * 15_239_504 + 2 * 3584
    assert parts(BAGEL_7B_MOT, run)["gathered weights"] == 2 * (layer + vocabulary + rest)
    drawing = parts(BAGEL_7B_MOT, replace(run, draws=True))
    assert drawing["whole weights, to draw"] == 2 * 14_575_018_464
    assert "gathered weights" not in drawing
    alone = TrainingRun(few, "full", picture=(64, 64))
    assert parts(BAGEL_7B_MOT, alone) == parts(BAGEL_7B_MOT, replace(alone, draws=True))


def test_encoding_many_large_pictures_can_be_what_takes_most():
    many = parts(NANO, TrainingRun(Work(und=10, gen=64 * 8), picture=(128, 128), recompute=True))
    assert many["encoding pictures"] == 8 * 4 * 128 * 128 * 2 * 32 * 2
    assert "activations: layers" not in many


@pytest.mark.parametrize(
    ("preset", "frozen"), [("full", ()), ("full", ("vit",)), ("lora-both", ()), ("lora-gen", ())]
)
def test_the_plan_of_activations_is_near_what_autograd_keeps(preset, frozen):
    """fp32 on the CPU, where a norm is several operations, so that a little more is kept."""
    config = replace(NANO, llm=replace(NANO.llm, num_layers=4, num_kv_heads=2))
    torch.manual_seed(0)
    bagel = Bagel(config)
    apply(bagel, preset, LoraSettings(rank=8) if preset.startswith("lora") else None, frozen)
    image = ImageSegment(latent=torch.ones(16, 16, 16), vit_pixels=torch.ones(3, 112, 112))
    texts = [TextSegment((9,) * length) for length in (150, 100)]
    example = (Piece(texts[0]), Piece(image), Piece(texts[1], True), Piece(image, True))
    row = pack_row([example], Frame(1, 2, 3, 4), config)
    batch = collate([row], [torch.ones(64, 64)] * 2, [torch.ones(64, 588)])
    tensors = [*bagel.parameters(), *bagel.buffers(), *vars(batch).values()]
    given = {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in given:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = training_forward(bagel, batch, torch.full((2,), 0.5), torch.ones(1, 128, 64))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert out.ce_S.requires_grad
    run = TrainingRun(work([row]), preset, 8, frozen, bf16=False, recompute=False)
    found = activations(config, run)
    found.pop("activations: gradients of a layer")  # of the backward pass
    assert 0.75 < sum(found.values()) / measured < 1.25


def test_running_layers_again_keeps_their_inputs_and_one_layer():
    again = activations(BAGEL_7B_MOT, TrainingRun(PACK, "full"))["activations: layers"]
    kept = activations(BAGEL_7B_MOT, TrainingRun(PACK, "full", recompute=False))
    kept = kept["activations: layers"]
    rotations = 2 * 32_768 * 128 * 4
    assert again - rotations == 28 * 32_768 * 3584 * 2 + (kept - rotations) // 28


def test_a_full_save_is_the_bf16_folder_and_twelve_bytes_of_state_a_number():
    saved = checkpoint_bytes(BAGEL_7B_MOT, TrainingRun(PACK, "full"))
    vae = sizes(BAGEL_7B_MOT, "full").vae
    assert saved == {
        "model folder": 2 * 14_575_018_464 + 4 * vae,
        "resume state": 12 * 14_575_018_464,
    }
    low = checkpoint_bytes(BAGEL_7B_MOT, TrainingRun(PACK, "lora-gen", ema=True))
    assert low == {"adapter folder": 4 * 80_740_352, "resume state": 16 * 80_740_352}


@pytest.mark.parametrize("preset", ["full", "gen", "lora-both"])
@pytest.mark.parametrize(("optimizer", "ema"), [("adamw", False), ("adamw", True), ("muon", True)])
def test_the_planned_state_is_what_the_learner_saves(preset, optimizer, ema):
    torch.manual_seed(0)
    bagel = Bagel(TINY)
    apply(bagel, preset, LoraSettings(rank=8) if preset.startswith("lora") else None)
    settings = OptimizerSettings(optimizer, ema_decay=0.9 if ema else None)
    learner = Learner(bagel, Processes(), "none", settings, recompute=False, compile=False)
    state = learner.state_dict()
    assert state.pop("step_count").numel() == 1
    run = TrainingRun(TINY_PACK, preset, 8, optimizer=optimizer, ema=ema, bf16=False)
    found = sum(tensor.nbytes for tensor in state.values())
    assert found == checkpoint_bytes(TINY, run)["resume state"]
    plan = parts(TINY, run)
    names = ("weights: masters", "optimizer moments", "moving average")
    assert found == sum(plan.get(name, 0) for name in names)


def test_the_text_says_whether_it_fits_and_what_else_there_is():
    run = TrainingRun(PACK, "full", strategy="fsdp2", world=8)
    text = "\n".join(plan_lines(BAGEL_7B_MOT, run, 139 * GIB))
    assert "14,575,018,464 of 14,575,018,464 numbers learn; fsdp2 over 8 processes" in text
    assert "Fits in 139.0 GiB, with" in text
    assert "deepspeed ZeRO-2 over 8 processes, layers run again" in text
    assert "deepspeed ZeRO-3 over 8 processes, all activations kept" in text
    assert "resume state 162.9 GiB" in text


@pytest.mark.parametrize(
    ("run", "remedy"),
    [
        (TrainingRun(PACK, "full", recompute=False), "Run layers again (recompute)."),
        (TrainingRun(PACK, "full"), "Use more processes, or train less: one of lora-und"),
        (TrainingRun(PACK, "full", strategy="ddp", world=8), "strategy fsdp2"),
        (TrainingRun(replace(PACK, und=900_000), "lora-gen"), "Pack fewer tokens."),
    ],
)
def test_what_does_not_fit_is_told_what_to_change(run, remedy):
    text = "\n".join(plan_lines(BAGEL_7B_MOT, run, 80 * GIB))
    assert "Does not fit in 80.0 GiB: " in text
    assert remedy in text


def test_a_strategy_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="strategy 'fsdp' is none of none, ddp, fsdp2, deepspeed"):
        TrainingRun(PACK, strategy="fsdp")
