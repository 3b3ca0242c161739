"""LoRA adapters: attach, change, save, load under every released key prefix, switch off, merge.

pytest tests/test_adapters.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import write_tiny_checkpoint
from umm_reflect import adapters
from umm_reflect.context import Context, ImageSegment
from umm_reflect.errors import CheckpointError
from umm_reflect.flow import DrawSettings
from umm_reflect.generate import DrawRequest, Engine, draw, say
from umm_reflect.model import Bagel
from umm_reflect.rng import stream

GEN_TARGETS = [
    "mlp_moe_gen.down_proj",
    "mlp_moe_gen.gate_proj",
    "mlp_moe_gen.up_proj",
    "self_attn.k_proj_moe_gen",
    "self_attn.o_proj_moe_gen",
    "self_attn.q_proj_moe_gen",
    "self_attn.v_proj_moe_gen",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def bagel(checkpoint) -> Bagel:
    return Bagel.from_pretrained(checkpoint, device="cpu", dtype="float32")


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    """An adapter of the generation expert with weights that matter."""
    bagel = Bagel.from_pretrained(checkpoint, device="cpu", dtype="float32")
    shake(adapters.attach_lora(bagel, rank=4, alpha=8))
    return adapters.save_adapter(bagel, tmp_path / "adapter", "tiny")


def shake(bagel: Bagel) -> Bagel:
    """Random weights in place of the zeros of B."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapters.adapter_parameters(bagel):
        if ".lora_B." in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return bagel


def drawn(bagel: Bagel) -> torch.Tensor:
    """A picture drawn from a text and an image: both experts, cache and guidance take part."""
    picture = torch.linspace(-1, 1, 3 * 32 * 32).reshape(3, 32, 32)
    context = Context.of(bagel.tokens.segment("two red circles"), ImageSegment(vae_pixels=picture))
    request = DrawRequest(context, Context.of(), None, (32, 32), stream(0, 0, 0, "draw"))
    return draw(Engine(bagel), [request], DrawSettings(points=3))[0].latent


def said(bagel: Bagel) -> list[float]:
    """Log-probs of a fixed text after a context of text alone: only the understanding expert."""
    context = Context.of(bagel.tokens.segment("two red circles"))
    ids = tuple(bagel.tokens.encode("a blue square"))
    (answer,) = say(
        bagel,
        Engine(bagel).caches([context]),
        forced=[()],
        temperature=1.0,
        max_tokens=len(ids),
        generators=[stream(0, 0, 0, "say")],
        force=[ids],
    )
    return list(answer.logprobs)


def test_a_fresh_adapter_changes_nothing_and_a_changed_one_does(bagel):
    before = drawn(bagel)
    adapters.attach_lora(bagel, rank=4, alpha=8)
    assert torch.equal(drawn(bagel), before)
    assert (drawn(shake(bagel)) - before).abs().max() > 0.01


def test_the_update_is_alpha_over_rank_times_b_a(bagel):
    adapters.attach_lora(bagel, rank=2, alpha=6)
    layer = bagel.get_submodule("language_model.model.layers.0.self_attn.q_proj_moe_gen")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert (a.shape, b.shape) == ((2, 32), (32, 2))
    b.data.fill_(0.5)
    x = torch.ones(1, 32)
    change = layer(x) - layer.base_layer(x)
    expected = 6 / 2 * 0.5 * (a[0].sum() + a[1].sum())
    assert torch.allclose(change, expected.expand(1, 32), atol=1e-5)


@pytest.mark.parametrize(
    ("experts", "layers", "first"),
    [("gen", 14, "q_proj_moe_gen"), ("und", 14, "q_proj"), ("both", 28, "q_proj")],
)
def test_each_expert_has_seven_targets_in_each_of_the_two_layers(bagel, experts, layers, first):
    adapters.attach_lora(bagel, rank=2, alpha=2, experts=experts)
    names = [name for name, _ in adapters.adapter_layers(bagel)]
    assert len(names) == layers
    assert names[0] == f"language_model.model.layers.0.self_attn.{first}"
    assert all(name.startswith("language_model.model.layers.") for name in names)
    assert all(name.endswith("_moe_gen") or "_moe_gen." in name for name in names) == (
        experts == "gen"
    )


def test_an_adapter_of_the_generation_expert_leaves_text_alone(bagel):
    before = said(bagel)
    shake(adapters.attach_lora(bagel, rank=4, alpha=8, experts="gen"))
    assert said(bagel) == before


def test_an_adapter_of_the_understanding_expert_changes_text(bagel):
    before = said(bagel)
    shake(adapters.attach_lora(bagel, rank=4, alpha=8, experts="und"))
    assert said(bagel) != before


def test_only_the_adapter_is_trainable_and_gets_gradients(bagel):
    adapters.attach_lora(bagel, rank=2, alpha=2)
    trainable = [name for name, p in bagel.named_parameters() if p.requires_grad]
    assert trainable == [name for name, _ in adapters.adapter_parameters(bagel)]
    layer = bagel.get_submodule("language_model.model.layers.1.mlp_moe_gen")
    layer(torch.ones(3, 32)).sum().backward()
    assert layer.down_proj.lora_B["default"].weight.grad.abs().sum() > 0
    assert layer.down_proj.base_layer.weight.grad is None


def test_the_seed_names_the_first_weights_and_leaves_the_global_stream_alone(checkpoint):
    state = torch.random.get_rng_state()
    first = [_first_a(checkpoint, seed=3), _first_a(checkpoint, seed=3), _first_a(checkpoint, 4)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    assert torch.equal(torch.random.get_rng_state(), state)


def _first_a(checkpoint: Path, seed: int) -> torch.Tensor:
    bagel = Bagel.from_pretrained(checkpoint, device="cpu", dtype="float32")
    adapters.attach_lora(bagel, rank=2, alpha=2, seed=seed)
    return next(adapters.adapter_parameters(bagel))[1]


def test_numbers_that_mean_nothing_are_refused(bagel):
    with pytest.raises(ValueError, match="rank 0 must be 1 or more, alpha 2 positive, dropout 0"):
        adapters.attach_lora(bagel, rank=0, alpha=2)
    with pytest.raises(ValueError, match="experts is 'all'; choose one of gen, und, both"):
        adapters.attach_lora(bagel, rank=2, alpha=2, experts="all")
    adapters.attach_lora(bagel, rank=2, alpha=2)
    with pytest.raises(ValueError, match="the model has an adapter already"):
        adapters.attach_lora(bagel, rank=2, alpha=2)


def test_what_is_saved_has_pefts_layout_and_bagels_names(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == "tiny"
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["target_modules"] == GEN_TARGETS
    state = load_file(folder / "adapter_model.safetensors")
    assert len(state) == 28
    q = "base_model.model.language_model.model.layers.0.self_attn.q_proj_moe_gen.lora_"
    assert state[q + "A.weight"].shape == (4, 32)
    assert state[q + "B.weight"].shape == (32, 4)


def test_what_is_saved_is_loaded_by_us_and_by_peft(checkpoint, folder, bagel):
    from peft import PeftModel

    trained = shake(adapters.attach_lora(bagel, rank=4, alpha=8))
    expected = drawn(trained)
    ours = Bagel.from_pretrained(checkpoint, device="cpu", dtype="float32", adapter=folder)
    assert torch.equal(drawn(ours), expected)
    assert not any(p.requires_grad for p in ours.parameters())
    other = Bagel.from_pretrained(checkpoint, device="cpu", dtype="float32")
    PeftModel.from_pretrained(other, str(folder))
    assert torch.equal(drawn(other), expected)


def test_a_second_round_trip_writes_the_same_bytes(checkpoint, folder, tmp_path):
    bagel = Bagel.from_pretrained(checkpoint, device="cpu", dtype="float32", adapter=folder)
    again = adapters.save_adapter(bagel, tmp_path / "again", "tiny")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def rewritten(folder: Path, target: Path, rename) -> Path:
    """The adapter with other keys."""
    shutil.copytree(folder, target)
    state = load_file(folder / "adapter_model.safetensors")
    renamed = {rename(name): tensor for name, tensor in state.items()}
    save_file(renamed, target / "adapter_model.safetensors")
    return target


PREFIXES = [
    "base_model.model.language_model.model.",
    "base_model.model.model.",
    "base_model.model.",
    "language_model.model.",
    "model.",
    "",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_keys_bind_with_and_without_the_prefixes_of_released_adapters(
    checkpoint, folder, tmp_path, prefix
):
    expected = drawn(Bagel.from_pretrained(checkpoint, dtype="float32", adapter=folder))
    other = rewritten(
        folder, tmp_path / "other", lambda name: prefix + name[name.index("layers.") :]
    )
    bagel = Bagel.from_pretrained(checkpoint, dtype="float32", adapter=other)
    assert torch.equal(drawn(bagel), expected)


def test_an_adapter_trained_on_the_language_model_alone_does_not_touch_the_vision_tower(
    checkpoint, bagel, tmp_path
):
    shake(adapters.attach_lora(bagel, rank=2, alpha=4, experts="und"))
    expected = said(bagel)
    folder = adapters.save_adapter(bagel, tmp_path / "und", "tiny")
    part = rewritten(
        folder,
        tmp_path / "part",
        lambda name: "base_model.model." + name[name.index("model.layers") :],
    )
    config = json.loads((part / "adapter_config.json").read_text())
    config["exclude_modules"] = None  # there was no vision tower to exclude
    config["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config["target_modules"] += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    (part / "adapter_config.json").write_text(json.dumps(config))
    loaded = Bagel.from_pretrained(checkpoint, dtype="float32", adapter=part)
    assert said(loaded) == expected
    # saved again it speaks of the whole model, and binds there
    whole = adapters.save_adapter(loaded, tmp_path / "whole", "tiny")
    reloaded = Bagel.from_pretrained(checkpoint, dtype="float32", adapter=whole)
    assert said(reloaded) == expected


def mended(folder: Path, **changes) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_key_that_binds_to_nothing_is_an_error_that_names_it(bagel, folder, tmp_path):
    before = drawn(bagel)
    key = "base_model.model.language_model.model.layers.7.self_attn.q_proj_moe_gen.lora_A.weight"
    wrong = rewritten(
        folder, tmp_path / "wrong", lambda name: name.replace("layers.1.", "layers.7.")
    )
    with pytest.raises(CheckpointError, match="has keys that bind to nothing: ") as error:
        adapters.load_adapter(bagel, wrong)
    assert "layers.7." in str(error.value)
    assert str(wrong) in str(error.value)
    assert str(error.value).endswith(" and 9 more. It belongs to another model, or it is damaged")
    state = load_file(folder / "adapter_model.safetensors")
    save_file(state | {key: torch.zeros(4, 32)}, wrong / "adapter_model.safetensors")
    with pytest.raises(CheckpointError) as error:
        adapters.load_adapter(bagel, wrong)
    assert str(error.value) == (
        f"the adapter in {wrong} has keys that bind to nothing: {key}. "
        "It belongs to another model, or it is damaged"
    )
    assert torch.equal(drawn(bagel), before)


def test_a_key_that_is_no_lora_weight_binds_to_nothing(bagel, folder):
    state = load_file(folder / "adapter_model.safetensors")
    save_file(state | {"llm2vae.weight": torch.zeros(2)}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"that bind to nothing: llm2vae\.weight\. "):
        adapters.load_adapter(bagel, folder)


def test_a_target_that_matches_no_module_is_an_error(bagel, folder):
    mended(folder, target_modules=[*GEN_TARGETS, "self_attn.qkv_proj_moe_gen"])
    with pytest.raises(
        CheckpointError,
        match=r"targets modules that this model lacks: self_attn\.qkv_proj_moe_gen\. ",
    ):
        adapters.load_adapter(bagel, folder)


def test_a_targeted_module_without_weights_is_an_error(bagel, folder, tmp_path):
    state = load_file(folder / "adapter_model.safetensors")
    module = "language_model.model.layers.1.mlp_moe_gen.up_proj"
    rest = {name: tensor for name, tensor in state.items() if module not in name}
    save_file(rest, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks the weights of {module}. "):
        adapters.load_adapter(bagel, folder)
    half = {
        name: t for name, t in state.items() if name != f"base_model.model.{module}.lora_B.weight"
    }
    save_file(half, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=rf"lacks {module}\.lora_B\.weight\. "):
        adapters.load_adapter(bagel, folder)
    assert not adapters.has_adapter(bagel)


def test_weights_of_a_module_that_is_not_targeted_are_an_error(bagel, folder):
    mended(folder, target_modules=GEN_TARGETS[1:])
    with pytest.raises(CheckpointError, match="has weights of modules that it does not target: "):
        adapters.load_adapter(bagel, folder)


def test_a_rank_that_differs_is_an_error_with_both_shapes_and_leaves_the_model(bagel, folder):
    before = drawn(bagel)
    mended(folder, r=8)
    with pytest.raises(CheckpointError, match=r"\[4, 32\] \(expected \[8, 32\]\)"):
        adapters.load_adapter(bagel, folder)
    assert not adapters.has_adapter(bagel)
    assert torch.equal(drawn(bagel), before)


def test_folders_that_are_no_lora_adapters_are_refused(bagel, folder, tmp_path):
    with pytest.raises(CheckpointError, match="is no model folder"):
        adapters.load_adapter(bagel, tmp_path)
    config = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3", "target_modules": ["x"]}')
    with pytest.raises(
        CheckpointError, match=r"describes an adapter of kind IA3\. Give a LoRA one"
    ):
        adapters.load_adapter(bagel, folder)
    for broken in ('{"peft_type": "FOO"}', "{", "[]"):
        (folder / "adapter_config.json").write_text(broken)
        with pytest.raises(CheckpointError, match="is not an adapter's config"):
            adapters.load_adapter(bagel, folder)
    (folder / "adapter_config.json").write_text(config)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        adapters.load_adapter(bagel, folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors\. "):
        adapters.load_adapter(bagel, folder)


def test_disabling_the_adapter_gives_the_reference_and_then_the_adapter_again(bagel):
    before = drawn(bagel)
    with_adapter = drawn(shake(adapters.attach_lora(bagel, rank=4, alpha=8)))
    with adapters.adapters_disabled(bagel):
        assert torch.equal(drawn(bagel), before)
    assert torch.equal(drawn(bagel), with_adapter)
    assert all(p.requires_grad for _, p in adapters.adapter_parameters(bagel))


def test_disabling_a_loaded_adapter_does_not_make_it_trainable(bagel, folder):
    adapters.load_adapter(bagel, folder)
    with adapters.adapters_disabled(bagel):
        pass
    assert not any(p.requires_grad for p in bagel.parameters())


def test_a_merged_model_equals_the_adapter_and_has_bagels_names(bagel, folder):
    names = list(bagel.state_dict())
    adapters.load_adapter(bagel, folder)
    expected = drawn(bagel)
    adapters.merge_adapter(bagel)
    assert not adapters.has_adapter(bagel)
    assert list(bagel.state_dict()) == names
    assert (drawn(bagel) - expected).abs().max() < 1e-4
    with pytest.raises(ValueError, match="the model has no adapter"):
        adapters.merge_adapter(bagel)


def test_a_merged_bf16_weight_is_the_sum_rounded_once(checkpoint, folder):
    exact = Bagel.from_pretrained(checkpoint, dtype="float32", adapter=folder)
    layer = exact.get_submodule("language_model.model.layers.0.self_attn.v_proj_moe_gen")
    weight = layer.base_layer.weight + layer.get_delta_weight("default")
    bagel = Bagel.from_pretrained(checkpoint, device="cpu", dtype="bfloat16")
    adapters.merge_adapter(adapters.load_adapter(bagel, folder, dtype=torch.float32))
    merged = bagel.get_submodule("language_model.model.layers.0.self_attn.v_proj_moe_gen").weight
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, weight.bfloat16())


def test_a_loaded_adapter_takes_the_models_number_type_and_a_trainable_one_fp32(checkpoint, folder):
    bagel = Bagel.from_pretrained(checkpoint, device="cpu", dtype="bfloat16")
    adapters.load_adapter(bagel, folder)
    assert {p.dtype for _, p in adapters.adapter_parameters(bagel)} == {torch.bfloat16}
    assert drawn(bagel).isfinite().all()
    adapters.load_adapter(adapters.remove_adapter(bagel), folder, trainable=True)
    assert {p.dtype for _, p in adapters.adapter_parameters(bagel)} == {torch.float32}
    assert all(p.requires_grad for _, p in adapters.adapter_parameters(bagel))
