"""The autoencoder against recorded latents and pictures, and its names and shapes against FLUX's.

python -m pytest tests/test_autoencoder.py
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from umm_reflect.autoencoder import AutoEncoder, infer_vae_config
from umm_reflect.config import FLUX_VAE, NANO, VAEConfig
from umm_reflect.errors import CheckpointError
from umm_reflect.rng import stream

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
needs_golden = pytest.mark.skipif(
    not (GOLDEN / "manifest.json").exists(), reason="shared data not present"
)

TINY = VAEConfig(
    resolution=32,
    in_channels=3,
    out_ch=3,
    ch=8,
    ch_mult=(1, 2, 2, 4),
    num_res_blocks=1,
    z_channels=4,
    downsample=8,
    scale_factor=0.5,
    shift_factor=0.25,
    num_groups=4,
)


def shapes(model):
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def on_meta(config):
    with torch.device("meta"):
        return AutoEncoder(config)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return AutoEncoder(TINY).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def golden():
    from safetensors.torch import load_file

    state = load_file(GOLDEN / "tiny_bagel" / "ae.safetensors")
    model = on_meta(infer_vae_config({key: tensor.shape for key, tensor in state.items()}))
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False), load_file(GOLDEN / "vae.safetensors")


def distance(a, b):
    return (a - b).abs().max().item()


@needs_golden
def test_moments_latents_and_pictures_are_the_recorded_ones(golden):
    model, recorded = golden
    mean, logvar = model.moments(recorded["pixels"])
    assert distance(torch.cat([mean, logvar], 1), recorded["moments"]) < 1e-4
    assert distance(model.encode(recorded["pixels"]), recorded["latent"]) < 1e-4
    assert distance(model.encode(recorded["padded.pixels"]), recorded["padded.latent"]) < 1e-4
    assert distance(model.decode(recorded["latent"]), recorded["decoded"]) < 2e-4
    assert distance(model.decode(recorded["latent_random"]), recorded["decoded_random"]) < 1e-4


@needs_golden
def test_channels_last_and_bf16_agree_within_their_precision(golden):
    model, recorded = golden
    assert distance(model.encode(recorded["pixels"]), recorded["latent"]) < 1e-4
    last = AutoEncoder(model.config).to(memory_format=torch.channels_last)
    last.load_state_dict(model.state_dict())
    assert distance(last.encode(recorded["pixels"]), recorded["latent"]) < 1e-4
    half = last.bfloat16()
    latent = half.encode(recorded["pixels"])
    assert latent.dtype == torch.float32
    assert 0 < distance(latent, recorded["latent"]) < 0.05
    assert distance(half.decode(recorded["latent"]), recorded["decoded"]) < 0.2


@needs_golden
def test_pictures_of_several_sizes_are_encoded_without_padding(golden):
    model, recorded = golden
    large = recorded["padded.pixels"][0, :, :64, :]
    small = recorded["padded.pixels"][1, :, :, :64]
    first, second, third = model.encode_images([large, small, large])
    assert (first.shape, second.shape) == ((16, 8, 12), (16, 10, 8))
    assert distance(first, recorded["latent"][0]) < 1e-4
    assert distance(second, model.encode(small[None])[0]) < 1e-4
    assert distance(third, first) < 1e-5
    # What the padded batch of the original does to a latent:
    assert distance(recorded["padded.latent"][0, :, :8, :], first) > 0.01


def test_flux_has_its_244_tensors_and_83_8_million_parameters():
    found = shapes(on_meta(FLUX_VAE))
    assert len(found) == 244
    assert sum(torch.Size(shape).numel() for shape in found.values()) == 83_819_683
    assert found["encoder.conv_out.weight"] == (32, 512, 3, 3)
    assert found["decoder.conv_in.weight"] == (512, 16, 3, 3)
    assert found["decoder.conv_out.weight"] == (3, 128, 3, 3)
    assert found["encoder.down.1.block.0.nin_shortcut.weight"] == (256, 128, 1, 1)
    assert found["decoder.up.1.block.0.nin_shortcut.weight"] == (256, 512, 1, 1)
    assert "encoder.down.3.downsample.conv.weight" not in found
    assert "decoder.up.0.upsample.conv.weight" not in found
    assert "decoder.up.3.block.2.conv2.bias" in found


@pytest.mark.parametrize("config", [FLUX_VAE, NANO.vae, TINY], ids=["flux", "nano", "tiny"])
def test_the_config_is_read_from_the_shapes(config):
    unknown = {
        "resolution": config.resolution,
        "scale_factor": config.scale_factor,
        "shift_factor": config.shift_factor,
        "num_groups": config.num_groups,
    }
    assert infer_vae_config(shapes(on_meta(config)), replace(FLUX_VAE, **unknown)) == config


def test_a_missing_tensor_is_named():
    found = shapes(on_meta(TINY))
    del found["decoder.conv_in.weight"]
    with pytest.raises(CheckpointError, match=r"no tensor decoder\.conv_in\.weight"):
        infer_vae_config(found)
    with pytest.raises(CheckpointError, match=r"no tensor encoder\.conv_in\.weight"):
        infer_vae_config({})


def test_groups_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ValueError, match="8 VAE channels cannot be split into 3 groups"):
        AutoEncoder(replace(TINY, num_groups=3))


def test_the_latent_is_the_scaled_mean_and_the_scaling_is_undone(tiny):
    pixels = torch.rand(2, 3, 16, 24, generator=stream(0, 0, 0, "test")) * 2 - 1
    mean, logvar = tiny.moments(pixels)
    assert mean.shape == logvar.shape == (2, 4, 2, 3)
    latent = tiny.encode(pixels)
    assert torch.allclose(latent, 0.5 * (mean - 0.25))
    assert torch.allclose(tiny.decode(latent), tiny.decoder(mean), atol=1e-5)
    assert tiny.decode(latent).shape == (2, 3, 16, 24)


def test_sampling_follows_each_pictures_own_stream(tiny):
    pixels = torch.rand(2, 3, 16, 16, generator=stream(0, 0, 0, "test")) * 2 - 1

    def streams(*samples):
        return [stream(0, sample, 0, "vae") for sample in samples]

    both = tiny.encode(pixels, streams(0, 1))
    alone = tiny.encode(pixels[1:], streams(1))
    assert torch.allclose(both[1:], alone, atol=1e-5)
    assert not torch.allclose(both, tiny.encode(pixels))
    mean, logvar = tiny.moments(pixels)
    noise = torch.randn(4, 2, 2, generator=stream(0, 0, 0, "vae"))
    expected = 0.5 * (mean[0] + torch.exp(logvar[0] / 2) * noise - 0.25)
    assert torch.allclose(both[0], expected, atol=1e-5)


def test_the_padding_of_a_downsample_is_on_the_right_and_the_bottom(tiny):
    conv = tiny.encoder.down[0].downsample
    x = torch.zeros(1, 8, 4, 4)
    x[..., 0, 0] = 1.0  # the corner pixel meets the first tap of the kernel, not the middle one
    got = conv(x)[0, :, 0, 0] - conv.conv.bias
    assert torch.allclose(got, conv.conv.weight[:, :, 0, 0].sum(1), atol=1e-6)


def test_sizes_that_do_not_halve_three_times_are_refused(tiny):
    with pytest.raises(ValueError, match="20x16 cannot be encoded: use multiples of 8"):
        tiny.encode(torch.zeros(1, 3, 20, 16))


def test_lists_keep_their_order(tiny):
    latents = [torch.full((4, side, 2), float(side)) for side in (2, 3, 2, 4)]
    pictures = tiny.decode_latents(latents, batch_size=1)
    assert [tuple(p.shape) for p in pictures] == [(3, 8 * s, 16) for s in (2, 3, 2, 4)]
    assert torch.allclose(pictures[3], tiny.decode(latents[3][None])[0], atol=1e-6)
    assert tiny.encode_images([]) == []
