"""The trainer of the nano model on a CPU: it learns, writes a checkpoint that loads, repeats to the
bit, and goes on after SIGTERM. The model is narrow, the rows are real."""

from __future__ import annotations

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eval.shapes import ShapesVerifier
from sft import pretrain, shapes_data
from sft.pretrain import SYSTEM_PROMPT, Config, train
from sft.shapes import make_trajectory
from sft.shapes_data import LOOK_ROW, ShardPlan, make_shard
from tests.tiny import TINY, write_tiny_checkpoint
from umm_reflect import Bagel
from umm_reflect.autoencoder import AutoEncoder
from umm_reflect.config import NANO
from umm_reflect.context import ImageSegment
from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.flow import flow_matching_errors
from umm_reflect.hub import profile
from umm_reflect.packing import Piece, collate, pack_row, training_forward
from umm_reflect.shapes.render import render
from umm_reflect.tokens import Tokens
from umm_reflect.training.metrics import read_metrics
from umm_reflect.training.optim import Optimizer

NARROW = replace(
    NANO,
    llm=replace(
        NANO.llm,
        hidden_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=96,
    ),
    vit=replace(NANO.vit, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48),
    vae=replace(NANO.vae, ch=8),
)


def test_thirty_steps_on_one_trajectory_learn_its_words_and_its_pictures(tmp_path):
    bagel = Bagel.from_pretrained(write_tiny_checkpoint(tmp_path), device="cpu", dtype="float32")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int):
        return torch.randn(*shape, generator=generator)

    text = bagel.tokens.segment
    first, second = (
        ImageSegment(latent=normal(4, 4, 4), vit_pixels=normal(3, 28, 28)) for _ in range(2)
    )
    trajectory = [
        Piece(text("two red circles")),
        Piece(first, learn=True),
        Piece(first),
        Piece(text("One is missing. Add a red circle."), learn=True),
        Piece(second, learn=True),
        Piece(second),
        Piece(text("Two red circles: done."), learn=True),
    ]
    rows = [pack_row([trajectory], bagel.frame, TINY)] * 8  # each with times of its own
    latents = [normal(4, 16) for _ in range(2)]
    patches = [normal(4, 588) for _ in range(2)]
    batch = collate(rows, [latents[k] for k in (0, 0, 1, 1)] * 8, patches * 8)
    times, noise = (
        torch.rand(batch.num_images, generator=generator),
        normal(*batch.latent_BGC.shape),
    )
    for p in bagel.parameters():
        p.requires_grad_(True)
    optimizer = Optimizer(bagel.named_parameters(), muon_lr=0.02, adamw_lr=5e-3, ema_decay=None)
    curve = []
    for _ in range(30):
        out = training_forward(bagel, batch, times, noise)
        errors = flow_matching_errors(out.velocity_BGC, noise, batch.latent_BGC)
        losses = out.ce_S.mean(), errors[batch.noised_BG].mean()
        sum(losses).backward()
        optimizer.step(torch.tensor(1.0))
        optimizer.zero_grad()
        curve.append([loss.item() for loss in losses])
    (ce, flow), (ce_end, flow_end) = curve[0], curve[-1]
    assert ce_end < 0.1 * ce
    assert flow_end < 0.7 * flow
    assert out.right_S.float().mean() > 0.95


# --- the program ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, str]:
    """A tokenizer, an untrained autoencoder, and a folder for the shards that all runs share."""
    folder = tmp_path_factory.mktemp("sources")
    tokenizer = write_tiny_checkpoint(folder / "tokenizer")
    torch.manual_seed(0)
    vae = folder / "vae"
    vae.mkdir()
    save_file(AutoEncoder(NARROW.vae).state_dict(), vae / "ae.safetensors")
    write_aside(vae / "vae_config.json", json.dumps(asdict(NARROW.vae)))
    return {"tokenizer": str(tokenizer), "vae": str(vae), "data": str(folder / "data")}


@pytest.fixture(scope="module", autouse=True)
def narrow():
    """A narrow model, and long rows, since the tiny tokenizer spells almost byte by byte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "NANO", NARROW)
        patch.setattr(pretrain, "ProcessPoolExecutor", ThreadPoolExecutor)
        patch.setattr(pretrain, "sample_sheet", lambda bagel, path: path.touch())
        patch.setattr(shapes_data, "LOOK_ROW", (1400, *LOOK_ROW[1:]))
        patch.setattr(shapes_data, "DRAW_ROW", (200, 64, 0))
        yield


def config(folder: Path, sources: dict[str, str], **changes) -> Config:
    small = {
        "max_steps": 4,
        "seconds": 1e6,
        "draw_rows": 2,
        "look_rows": 1,
        "draw_shards": 1,
        "look_shards": 2,
        "shard_pictures": 6,
        "shard_trajectories": 3,
        "log_every": 2,
        "warmup": 1,
        "device": "cpu",
        "workers": 1,
    }
    return Config(output_dir=str(folder), **{**sources, **small, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sources) -> Path:
    return train(config(tmp_path_factory.mktemp("run"), sources))


def weights(folder: Path) -> bytes:
    return (folder / "ema.safetensors").read_bytes()


def test_a_run_leaves_a_checkpoint_that_loads_its_curves_and_its_profile(trained):
    bagel = Bagel.from_pretrained(str(trained), device="cpu", dtype="float32")
    assert bagel.config.llm.hidden_size == 64
    assert bagel.vae.config.ch == 8
    assert profile(trained).system_prompt == SYSTEM_PROMPT
    lines = read_metrics(trained.parent / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 4]
    assert {"draw_flow", "edit_flow", "ce", "decision_accuracy", "grad_norm"} <= set(lines[0])
    assert lines[0]["ce"] > lines[1]["ce"] > 1
    assert {"held_out_edit_flow", "held_out_ce"} <= set(lines[2])
    assert lines[1]["skipped"] == 0
    assert {path.name for path in trained.parent.iterdir()} == {
        "checkpoint",
        "config.yaml",
        "curve.png",
        "metrics.jsonl",
        "samples.png",
        "state.safetensors",
    }


def test_a_repeat_gives_the_same_bytes_and_another_seed_does_not(trained, sources, tmp_path):
    assert weights(train(config(tmp_path / "again", sources))) == weights(trained)
    assert weights(train(config(tmp_path / "other", sources, seed=1))) != weights(trained)


def test_fine_tuning_starts_from_a_checkpoint(trained, sources, tmp_path):
    options = {"muon_lr": 0.0, "adamw_lr": 0.0, "max_steps": 1}
    tuned = train(config(tmp_path, sources, init=str(trained), **options))
    assert weights(tuned) == weights(trained)


def test_sigterm_saves_the_state_and_a_resume_ends_in_the_same_bytes(
    trained, sources, tmp_path, monkeypatch
):
    step = Optimizer.step

    def step_and_be_ended(self, scale):
        step(self, scale)
        if int(self.step_count) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Optimizer, "step", step_and_be_ended)
    with pytest.raises(UserError, match="stopped by signal 15 at step 2"):
        train(config(tmp_path, sources))
    assert not (tmp_path / "checkpoint").exists()
    assert weights(train(config(tmp_path, sources, resume=True))) == weights(trained)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [2, 4, 4]
    with pytest.raises(UserError, match="there is nothing to resume"):
        train(config(tmp_path / "empty", sources, resume=True))


def test_ones_own_images_become_looks_and_targets(sources, tmp_path):
    """What `eval.collect` writes becomes look rows with mending edits, and right ones draw rows."""
    rng, verifier, lines, images, right = random.Random(4), ShapesVerifier(), [], [], 0
    for number in range(8):
        trajectory = make_trajectory(rng)
        picture = render(trajectory.scenes[0], 128)
        [verdict] = verifier.score([picture], [trajectory.row])
        record = {"row": trajectory.row, "prompt": trajectory.prompt, "turns": []}
        record["source"] = "model"
        record |= {"images": [number], "verdicts": [verdict.to_record()]}
        lines.append(json.dumps(record))
        images.append(np.asarray(picture))
        right += verdict.correct
    assert 0 < right < 8
    collected = tmp_path / "own"
    collected.mkdir()
    np.save(collected / "images.npy", np.stack(images))
    (collected / "records.jsonl").write_text("\n".join(lines) + "\n")
    common = (sources["tokenizer"], SYSTEM_PROMPT, str(tmp_path), str(collected))
    with np.load(make_shard(ShardPlan("own", 0, 100, *common))) as shard:
        ends = shard["label_BU"] == Tokens.from_folder(sources["tokenizer"]).end
        assert (ends & (shard["weight_BU"] > 0)).sum() > 8
        assert shard["noised_BG"].any()  # a mended image is drawn
    with np.load(make_shard(ShardPlan("kept", 0, 100, *common))) as shard:
        assert len(shard["ids_BU"]) == right
    settings = {"own_rows": 1, "kept_rows": 1, "max_steps": 2}
    run = train(config(tmp_path / "run", sources, collected=(str(collected),), **settings))
    assert (run / "ema.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"look_shards": 1}, "give at least 2, one is held out"),
        ({"own_rows": 4}, r"own_rows or kept_rows and collected .* go together"),
        ({"decay": 1.5}, "decay is 1.5"),
    ],
)
def test_impossible_settings_are_named(sources, changes, message):
    with pytest.raises(ValueError, match=message):
        config(Path("nowhere"), sources, **changes)
