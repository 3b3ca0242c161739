"""Presets of trainable weights: which parameters learn, literally, and what is refused."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import TINY, write_tiny_checkpoint
from umm_reflect.adapters import attach_lora, save_adapter
from umm_reflect.checkpoint import empty_bagel, load
from umm_reflect.config import BAGEL_7B_MOT
from umm_reflect.model import Bagel
from umm_reflect.training.trainable import (
    PARTS,
    PRESETS,
    LoraSettings,
    apply,
    counts,
    part_of,
    summary,
    trained_parts,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def bagel(folder) -> Bagel:
    return load(folder, device="cpu", dtype="float32")


def learning(bagel: Bagel) -> list[str]:
    return [name for name, p in bagel.named_parameters() if p.requires_grad]


def test_every_parameter_of_the_release_belongs_to_one_part_and_all_parts_add_up():
    found = counts(empty_bagel(BAGEL_7B_MOT))
    assert dict(found.total) == {
        "und": 6_525_628_928,
        "gen": 6_525_628_928,
        "embeddings": 544_997_376,
        "lm_head": 544_997_376,
        "latents": 14_232_128,
        "vit": 402_552_736,
        "connector": 16_980_992,
    }
    assert found.everything == 14_575_018_464


@pytest.mark.parametrize(
    ("preset", "parts"),
    [
        ("full", {"und", "gen", "embeddings", "lm_head", "latents", "vit", "connector"}),
        ("llm", {"und", "gen", "embeddings", "lm_head"}),
        ("und", {"und", "embeddings", "lm_head", "connector"}),
        ("gen", {"gen", "latents"}),
    ],
)
def test_a_full_preset_trains_all_of_its_parts_and_nothing_else(bagel, preset, parts):
    names = apply(bagel, preset)
    assert names == learning(bagel)
    assert {part_of(name) for name in names} == parts
    found = counts(bagel)
    assert {part for part in PARTS if found.trainable[part] == found.total[part]} == parts
    assert {part for part in PARTS if found.trainable[part] == 0} == set(PARTS) - parts


def test_a_frozen_part_stays_as_it_is(bagel):
    names = apply(bagel, "full", frozen=("vit", "embeddings"))
    assert {part_of(name) for name in names} == {"und", "gen", "lm_head", "latents", "connector"}


@pytest.mark.parametrize(("preset", "modules"), [("lora-gen", 14), ("lora-und", 14)])
def test_lora_trains_two_matrices_a_projection_and_no_weight_of_the_model(bagel, preset, modules):
    names = apply(bagel, preset, LoraSettings(rank=4))
    assert names == learning(bagel)
    assert len(names) == 2 * modules  # seven projections in each of two layers
    assert all(".lora_A.default." in name or ".lora_B.default." in name for name in names)
    assert {part_of(name) for name in names} == {preset.removeprefix("lora-")}
    assert all(p.dtype == torch.float32 for p in bagel.parameters() if p.requires_grad)


def test_lora_on_both_experts_counts_rank_times_inputs_and_outputs(bagel):
    apply(bagel, "lora-both", LoraSettings(rank=4))
    width, heads, keys, inner = 32, 4 * 8, 2 * 8, 64
    pairs = [(width, heads), (width, keys), (width, keys), (heads, width)]
    pairs += [(width, inner), (width, inner), (inner, width)]
    one = sum(4 * (into + out) for into, out in pairs) * TINY.llm.num_layers
    found = counts(bagel)
    assert found.trainable["und"] == found.trainable["gen"] == one == 4096
    assert found.all_trainable == 2 * one
    assert "8,192" in summary(bagel)


def test_a_frozen_expert_keeps_its_new_low_rank_weights_still(bagel):
    names = apply(bagel, "lora-both", LoraSettings(rank=4), frozen=("und",))
    assert {part_of(name) for name in names} == {"gen"}


def test_low_rank_weights_are_fp32_on_a_bf16_model(folder):
    bagel = load(folder, device="cpu", dtype="bfloat16")
    apply(bagel, "lora-gen", LoraSettings(rank=2))
    assert {p.dtype for p in bagel.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in bagel.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_an_adapter_is_gone_on_with_from_its_exact_numbers(bagel, folder, tmp_path):
    attach_lora(bagel, 3, 12.0, "gen", dropout=0.25)
    draw = torch.Generator().manual_seed(5)
    saved = {}
    for name, p in bagel.named_parameters():
        if ".lora_" in name:
            p.data = torch.randn(p.shape, generator=draw)
            saved[name] = p.data.clone()
    save_adapter(bagel, tmp_path / "adapter", "base")
    again = load(folder, device="cpu", dtype="bfloat16")
    names = apply(again, "lora-gen", LoraSettings(adapter=str(tmp_path / "adapter")))
    assert names == list(saved)
    for name, p in again.named_parameters():
        if name in saved:
            assert torch.equal(p.data, saved[name])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"rank": 8}, r"the LoRA rank is 8, but .* was made with 3"),
        ({"alpha": 8.0}, r"the LoRA alpha is 8.0, but .* was made with 12"),
        ({"dropout": 0.5}, r"the LoRA dropout is 0.5, but .* was made with 0.25"),
    ],
)
def test_other_numbers_than_the_adapters_own_are_refused(bagel, folder, tmp_path, settings, line):
    attach_lora(bagel, 3, 12.0, "gen", dropout=0.25)
    save_adapter(bagel, tmp_path / "adapter", "base")
    again = load(folder, device="cpu", dtype="float32")
    adapter = str(tmp_path / "adapter")
    with pytest.raises(ValueError, match=line):
        apply(again, "lora-gen", LoraSettings(adapter=adapter, **settings))
    apply(again, "lora-gen", LoraSettings(adapter=adapter, rank=3))  # it was taken off again


def test_an_adapter_of_the_other_expert_matches_nothing(bagel, folder, tmp_path):
    attach_lora(bagel, 3, 12.0, "gen")
    save_adapter(bagel, tmp_path / "adapter", "base")
    again = load(folder, device="cpu", dtype="float32")
    with pytest.raises(ValueError, match="preset 'lora-und' matches none of the model's weights"):
        apply(again, "lora-und", LoraSettings(adapter=str(tmp_path / "adapter")))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"preset": "lora-gne"}, "did you mean 'lora-gen'"),
        ({"preset": "xyz"}, "choose of full, llm, und, gen, lora-und, lora-gen, lora-both"),
        ({"preset": "full", "frozen": ("vti",)}, "did you mean 'vit'"),
        ({"preset": "gen", "frozen": ("gen", "latents")}, "'gen' without gen, latents trains noth"),
        ({"preset": "lora-und", "frozen": ("und",)}, "'lora-und' without und trains nothing"),
        ({"preset": "full", "lora": LoraSettings(rank=4)}, "LoRA settings are given, but preset"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_model_is_touched(bagel, arguments, line):
    before = learning(bagel)
    with pytest.raises(ValueError, match=line):
        apply(bagel, **arguments)
    assert learning(bagel) == before


def test_a_model_with_an_adapter_is_refused(bagel):
    attach_lora(bagel, 2, 4.0)
    with pytest.raises(ValueError, match="has an adapter attached already"):
        apply(bagel, "full")


@pytest.mark.parametrize("settings", [{"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}])
def test_lora_numbers_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=f"the LoRA {next(iter(settings))} is"):
        LoraSettings(**settings)


def test_every_preset_names_parts_that_exist():
    for preset in PRESETS:
        assert set(trained_parts(preset)) <= set(PARTS)
