"""The nano autoencoder's training on a CPU: a narrow one, small pictures, few steps."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from sft import vae as program
from sft.vae import Config, latent_moments, lr_scale, projected_total, read_vae_config
from sft.vae_pictures import color_fidelity, inside, psnr, rendered, scene_by_lot
from umm_reflect.checkpoint import load_vae
from umm_reflect.config import NANO
from umm_reflect.errors import CheckpointError, UserError
from umm_reflect.shapes.render import render
from umm_reflect.shapes.scene import PALETTE, Scene, Shape
from umm_reflect.training.metrics import read_metrics, series

SMALL = {
    "seconds": None,
    "max_steps": 8,
    "batch_size": 2,
    "images": 16,
    "held_out": 8,
    "size": 32,
    "channels": 8,
    "warmup": 2,
    "eval_every": 4,
    "device": "cpu",
    "workers": 1,
}


def config(folder, **changes):
    return Config(output_dir=folder, **{**SMALL, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run that is long enough to have learned something: 120 steps, about 6 s."""
    folder = tmp_path_factory.mktemp("vae")
    options = {"max_steps": 120, "batch_size": 4, "adamw_lr": 4e-3, "eval_every": 60}
    assert program.run(config(folder, **options)) == 0
    return folder


def weights(folder):
    return (folder / "ae.safetensors").read_bytes()


def load(folder):
    whole = replace(NANO, vae=read_vae_config(folder))
    return load_vae(folder, whole, device=torch.device("cpu"), dtype=torch.float32)


# --- the run -------------------------------------------------------------------------------------


def test_the_loss_falls(trained):
    steps, losses = series(read_metrics(trained / "metrics.jsonl"), "loss")
    assert steps == [19, 39, 59, 79, 99, 119]
    assert losses[-1] < 0.8 * losses[0]
    assert series(read_metrics(trained / "metrics.jsonl"), "psnr")[0] == [59, 119]


def test_the_finished_folder_holds_all_files_and_no_leftovers(trained):
    assert sorted(path.name for path in trained.iterdir()) == [
        "ae.safetensors",
        "config.yaml",
        "curve.png",
        "metrics.jsonl",
        "reconstructions.png",
        "report.json",
        "vae_config.json",
    ]


def test_the_weights_load_as_a_checkpoint_does(trained):
    vae = load(trained)
    assert vae.config == read_vae_config(trained)
    assert (vae.config.ch, vae.config.ch_mult, vae.config.z_channels) == (8, (1, 2, 2, 4), 16)
    assert vae.config.num_groups == 8
    assert vae.encode(torch.zeros(1, 3, 32, 32)).shape == (1, 16, 4, 4)
    assert vae.decode(torch.zeros(1, 16, 4, 4)).shape == (1, 3, 32, 32)


def test_scaled_latents_of_training_pictures_have_mean_0_and_variance_1(trained):
    vae = load(trained)
    pictures = rendered(16, seed=0, split="train", size=32, workers=1)
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    with torch.no_grad():
        latents = vae.encode(program.to_pixels(pixels))
    assert latents.mean().item() == pytest.approx(0, abs=1e-4)
    assert latents.std().item() == pytest.approx(1, abs=1e-3)
    mean, deviation = latent_moments(vae, pixels, batch_size=5)
    assert mean == pytest.approx(vae.config.shift_factor, abs=1e-5)
    assert 1 / deviation == pytest.approx(vae.config.scale_factor, abs=1e-5)


def test_the_report_tells_what_was_measured(trained):
    report = json.loads((trained / "report.json").read_text())
    assert report["steps"] == 120
    assert report["skipped_steps"] == 0
    assert report["held_out_pictures"] == 8
    assert report["psnr_worst"] < report["psnr"] < 40
    assert report["psnr"] == pytest.approx((report["psnr_plain"] + report["psnr_hard"]) / 2)


def test_a_finished_folder_is_left_alone_without_force(trained, capsys):
    before = weights(trained)
    assert program.run(config(trained, max_steps=3)) == 0
    assert "finished" in capsys.readouterr().out
    assert weights(trained) == before


def test_a_run_that_sigterm_ended_continues_to_the_same_bits(tmp_path, monkeypatch):
    assert program.run(config(tmp_path / "whole")) == 0

    step = program.Trainer.step

    def step_and_be_ended(self, number, scale):
        step(self, number, scale)
        if number == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(program.Trainer, "step", step_and_be_ended)
    halves = tmp_path / "halves"
    assert program.run(config(halves)) == 143
    assert not (halves / "vae_config.json").exists()
    assert (halves / "state.safetensors").exists()
    monkeypatch.setattr(program.Trainer, "step", step)
    with pytest.raises(UserError, match="other settings"):
        program.run(config(halves, seed=1))
    assert program.run(config(halves)) == 0
    assert weights(halves) == weights(tmp_path / "whole")
    assert [line["step"] for line in read_metrics(halves / "metrics.jsonl")] == [3, 4, 7]


def test_a_repeat_is_equal_and_another_seed_is_not(tmp_path):
    runs = {"a": {}, "b": {}, "other": {"seed": 1}, "adamw": {"optimizer": "adamw"}}
    for name, changes in runs.items():
        assert program.run(config(tmp_path / name, max_steps=2, **changes)) == 0
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert weights(tmp_path / "a") != weights(tmp_path / "other")
    assert weights(tmp_path / "a") != weights(tmp_path / "adamw")


def test_training_by_time_ends_at_its_time_and_lets_the_rate_fall(tmp_path):
    assert program.run(config(tmp_path, seconds=1.0, max_steps=None, eval_every=1000)) == 0
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert 1.0 <= last["seconds"] < 5.0
    assert last["lr_scale"] < 0.5


def test_the_projected_length_follows_the_pace_and_the_smaller_limit(tmp_path):
    timed = config(tmp_path, seconds=45.0, max_steps=None, warmup=100)
    assert projected_total(timed, step=500, elapsed=9.0) == 2500
    assert projected_total(timed, step=2500, elapsed=45.0) == 2501
    both = config(tmp_path, seconds=45.0, max_steps=1000)
    assert projected_total(both, step=500, elapsed=9.0) == 1000
    assert lr_scale(0, projected_total(timed, 0, 0.0), 100, 0.7) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": None}, "without both"),
        ({"size": 36}, "multiple of 8"),
        ({"channels": 12}, "multiple of 8"),
        ({"batch_size": 0}, "batch-size must be positive"),
    ],
)
def test_impossible_settings_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


def test_a_folder_without_a_finished_run_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"python -m sft\.vae"):
        read_vae_config(tmp_path)


def test_the_shipped_autoencoder_has_three_million_numbers():
    from umm_reflect.autoencoder import AutoEncoder

    with torch.device("meta"):
        vae = AutoEncoder(NANO.vae)
    assert sum(p.numel() for p in vae.parameters()) == 3_039_683


# --- pictures and measures -----------------------------------------------------------------------


def test_pictures_do_not_depend_on_the_number_of_workers():
    one = rendered(6, seed=3, split="test", size=32, workers=1)
    two = rendered(6, seed=3, split="test", size=32, workers=2)
    assert one.shape == (6, 32, 32, 3)
    assert np.array_equal(one, two)
    assert not np.array_equal(one, rendered(6, seed=4, split="test", size=32, workers=1))


def test_every_other_scene_is_of_the_harder_split():
    kinds = [scene_by_lot(i, seed=0, split="train").background.kind for i in range(40)]
    assert set(kinds[::2]) == {"plain"}
    assert set(kinds[1::2]) == {"plain", "tint", "texture"}


def test_psnr_of_an_error_of_one_level_is_48_db():
    picture = np.full((2, 8, 8, 3), 100, np.uint8)
    assert psnr(picture, picture + 1) == pytest.approx([48.13, 48.13], abs=0.01)


def test_the_inside_of_a_shape_is_flat_and_leaves_out_what_covers_it():
    scene = Scene(
        (Shape("square", "red", 0.5, 0.5, 0.6), Shape("circle", "blue", 0.5, 0.5, 0.2)),
    )
    picture = np.asarray(render(scene, 128))
    (first, square), (second, circle) = inside(scene, 128)
    assert (first, second) == ("red", "blue")
    assert not (square & circle).any()
    assert (picture[square] == PALETTE["red"]).all()
    assert (picture[circle] == PALETTE["blue"]).all()


def test_color_fidelity_counts_pixels_that_read_as_another_color():
    scene = Scene((Shape("square", "red", 0.5, 0.5, 0.6),))
    picture = np.asarray(render(scene, 128)).copy()
    right, levels = color_fidelity([scene], picture[None])
    assert right == {"red": 1.0}
    assert levels == {"red": 0.0}
    picture[:] = PALETTE["pink"]
    right, levels = color_fidelity([scene], picture[None])
    assert right == {"red": 0.0}
    assert levels["red"] == pytest.approx((40 + 100 + 165) / 3)
