"""The parts of BAGEL-7B-MoT, spelled from its release's table and compared with our modules.

Nothing is loaded: the modules are built on the meta device. pytest tests/test_inventory.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

import pytest
import torch

from umm_reflect.autoencoder import AutoEncoder, infer_vae_config
from umm_reflect.checkpoint import empty_bagel
from umm_reflect.config import BAGEL_7B_MOT, FLUX_VAE, NANO

Shape = tuple[int, ...]

H, I, KV, D = 3584, 18944, 512, 128  # noqa: E741  (the table's letters)


def released_tensors() -> Iterator[tuple[str, Shape]]:
    """ema.safetensors of the release: every name and its shape."""
    lm = "language_model.model."
    yield lm + "embed_tokens.weight", (152064, H)
    yield "language_model.lm_head.weight", (152064, H)
    yield lm + "norm.weight", (H,)
    yield lm + "norm_moe_gen.weight", (H,)
    for layer in range(28):
        for g in ("", "_moe_gen"):
            at = f"{lm}layers.{layer}."
            yield f"{at}input_layernorm{g}.weight", (H,)
            yield f"{at}post_attention_layernorm{g}.weight", (H,)
            for name, rows in (("q", H), ("k", KV), ("v", KV)):
                yield f"{at}self_attn.{name}_proj{g}.weight", (rows, H)
                yield f"{at}self_attn.{name}_proj{g}.bias", (rows,)
            yield f"{at}self_attn.o_proj{g}.weight", (H, H)
            yield f"{at}self_attn.q_norm{g}.weight", (D,)
            yield f"{at}self_attn.k_norm{g}.weight", (D,)
            yield f"{at}mlp{g}.gate_proj.weight", (I, H)
            yield f"{at}mlp{g}.up_proj.weight", (I, H)
            yield f"{at}mlp{g}.down_proj.weight", (H, I)
    yield from linear("time_embedder.mlp.0", H, 256)
    yield from linear("time_embedder.mlp.2", H, H)
    yield from linear("vae2llm", H, 64)
    yield from linear("llm2vae", 64, H)
    yield "latent_pos_embed.pos_embed", (4096, H)
    yield "vit_pos_embed.pos_embed", (4900, H)
    yield from linear("connector.fc1", H, 1152)
    yield from linear("connector.fc2", H, H)
    vit = "vit_model.vision_model."
    yield from linear(vit + "embeddings.patch_embedding", 1152, 588)
    yield vit + "embeddings.position_embedding.weight", (4900, 1152)
    for layer in range(26):
        at = f"{vit}encoder.layers.{layer}."
        for name in ("q", "k", "v", "out"):
            yield from linear(f"{at}self_attn.{name}_proj", 1152, 1152)
        yield from norm(at + "layer_norm1", 1152)
        yield from norm(at + "layer_norm2", 1152)
        yield from linear(at + "mlp.fc1", 4304, 1152)
        yield from linear(at + "mlp.fc2", 1152, 4304)
    yield from norm(vit + "post_layernorm", 1152)


def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, Shape]]:
    yield name + ".weight", (rows, columns)
    yield name + ".bias", (rows,)


def norm(name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield name + ".weight", (width,)
    yield name + ".bias", (width,)


def conv(name: str, c_in: int, c_out: int, side: int = 3) -> Iterator[tuple[str, Shape]]:
    yield name + ".weight", (c_out, c_in, side, side)
    yield name + ".bias", (c_out,)


def res_block(name: str, c_in: int, c_out: int) -> Iterator[tuple[str, Shape]]:
    yield from norm(name + ".norm1", c_in)
    yield from conv(name + ".conv1", c_in, c_out)
    yield from norm(name + ".norm2", c_out)
    yield from conv(name + ".conv2", c_out, c_out)
    if c_in != c_out:
        yield from conv(name + ".nin_shortcut", c_in, c_out, 1)


def middle(name: str) -> Iterator[tuple[str, Shape]]:
    yield from res_block(name + ".block_1", 512, 512)
    yield from norm(name + ".attn_1.norm", 512)
    for part in ("q", "k", "v", "proj_out"):
        yield from conv(f"{name}.attn_1.{part}", 512, 512, 1)
    yield from res_block(name + ".block_2", 512, 512)


def released_vae_tensors() -> Iterator[tuple[str, Shape]]:
    """ae.safetensors of the release (the FLUX autoencoder)."""
    yield from conv("encoder.conv_in", 3, 128)
    levels = [(128, 128), (128, 256), (256, 512), (512, 512)]
    for level, (c_in, c_out) in enumerate(levels):
        yield from res_block(f"encoder.down.{level}.block.0", c_in, c_out)
        yield from res_block(f"encoder.down.{level}.block.1", c_out, c_out)
        if level < 3:
            yield from conv(f"encoder.down.{level}.downsample.conv", c_out, c_out)
    yield from middle("encoder.mid")
    yield from norm("encoder.norm_out", 512)
    yield from conv("encoder.conv_out", 512, 32)
    yield from conv("decoder.conv_in", 16, 512)
    yield from middle("decoder.mid")
    for level, (c_in, c_out) in {
        3: (512, 512),
        2: (512, 512),
        1: (512, 256),
        0: (256, 128),
    }.items():
        for block in range(3):
            yield from res_block(
                f"decoder.up.{level}.block.{block}", c_in if block == 0 else c_out, c_out
            )
        if level > 0:
            yield from conv(f"decoder.up.{level}.upsample.conv", c_out, c_out)
    yield from norm("decoder.norm_out", 128)
    yield from conv("decoder.conv_out", 128, 3)


def shapes_of(module: torch.nn.Module) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


@pytest.fixture(scope="module")
def full_size() -> torch.nn.Module:
    return empty_bagel(BAGEL_7B_MOT)


def test_the_full_size_model_has_exactly_the_1223_tensors_of_the_release(full_size):
    released = list(released_tensors())
    assert len(released) == len(dict(released)) == 1223
    ours = shapes_of(full_size)
    assert set(ours) ^ set(dict(released)) == set()
    assert ours == dict(released)


def test_it_holds_14_607_billion_numbers_and_no_memory(full_size):
    counts: Counter[str] = Counter()
    for name, shape in shapes_of(full_size).items():
        in_layer = name.startswith("language_model.model.layers.")
        expert = "generation" if "_moe_gen" in name else "understanding"
        counts[expert if in_layer else name.split(".")[0]] += prod(shape)
    assert counts == {
        "understanding": 6_525_625_344,
        "generation": 6_525_625_344,
        "language_model": 2 * 152064 * 3584 + 2 * 3584,  # embeddings, head, the two last norms
        "vit_model": 402_552_736,
        "connector": 16_980_992,
        "time_embedder": 13_769_728,
        "latent_pos_embed": 4096 * 3584,
        "vit_pos_embed": 4900 * 3584,
        "vae2llm": 65 * 3584,
        "llm2vae": 64 * 3585,
    }
    assert counts.total() == 14_607_260_128
    assert {tensor.device.type for tensor in full_size.state_dict().values()} == {"meta"}


def test_the_vae_has_exactly_the_244_tensors_of_the_release():
    released = list(released_vae_tensors())
    assert len(released) == len(dict(released)) == 244
    with torch.device("meta"):
        ours = shapes_of(AutoEncoder(FLUX_VAE))
    assert set(ours) ^ set(dict(released)) == set()
    assert ours == dict(released)
    assert sum(map(prod, ours.values())) == 83_819_683


def test_the_vaes_shape_is_read_from_its_tensors():
    assert infer_vae_config(dict(released_vae_tensors()), FLUX_VAE) == FLUX_VAE
    with torch.device("meta"):
        nano = shapes_of(AutoEncoder(NANO.vae))
    assert infer_vae_config(nano, NANO.vae) == NANO.vae
