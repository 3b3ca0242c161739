"""What the tests of the RL trainer share: a two-layer BAGEL that has learnt two turns, a run of it.

    toy = write_toy(tmp_path)                   # seconds: it is trained to say either turn
    toy = write_toy(tmp_path, steps=0)          # random weights
    quick()                                     # its judge is known
    config = toy_config(toy, tmp_path / "run", max_steps=4)
    code = run(config)

The task: a black image is given, "make it bright". The model says "done" or asks for an edit, each
about as often. Half of the edits come out brighter than the threshold. So the better choice of the
speaking head is the edit, and that of the drawing head a bright image.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import rl.train_output
from agent import protocol
from agent.direct import draw_once
from agent.policy import BagelPolicy
from agent.types import Reflection
from agent.views import current, reflect_view, start
from eval.rewards import registry
from rl.rollout import RolloutPolicy
from rl.rollout_settings import RolloutSettings
from rl.train import train
from rl.train_config import Config
from rl.types import Place
from tests.bright import brightness
from tests.tiny import write_tiny_checkpoint
from umm_reflect.checkpoint import load, save
from umm_reflect.flow import DrawSettings
from umm_reflect.images import mended_transforms, patchify_pixels
from umm_reflect.packing import Piece, collate, pack_row, training_forward
from umm_reflect.profile import ReflectionProfile, SaySettings, load_profile, save_profile
from umm_reflect.settings import _overlaid, build
from umm_reflect.training.metrics import read_metrics
from umm_reflect.training.processes import start as start_processes

PROMPT = "make it bright"
TURNS = (Reflection("no", 3, "edit", "more"), Reflection("no", 3, "done", ""))
DRAWING = {"points": 5, "text_scale": 1.0, "step_kind": "sde", "noise_level": 1.0}


# The given image is black and the better one white: what a collapse looks like elsewhere.
QUIET: dict[str, Any] = {
    **{"reward_drop": None, "format": {"low": 0}, "entropy": {"low": None, "high": None}},
    **{name: {"low": None, "high": None} for name in ("saturation", "clipped", "edges")},
    "diversity": {"low": None},
}


@dataclass(frozen=True)
class Toy:
    model: Path
    prompts: Path
    threshold: float


def write_toy(root: Path, steps: int = 160) -> Toy:
    """The model after `steps` of training, the prompts, and the brightness that half of its edits
    pass."""
    torch.manual_seed(0)
    model = write_tiny_checkpoint(root / "model")
    profile = ReflectionProfile(
        layout="rl",
        edit_view="full",
        system_prompt="",
        transforms=mended_transforms(vae=(32, 32, 16), vit=(28, 28, 14)),
        size=(32, 32),
        first=DrawSettings(points=5, text_scale=1.0),
        edit=DrawSettings(points=5, text_scale=1.0),
        say=SaySettings(temperature=1.0, max_tokens=64, max_rounds=1),
    )
    save_profile(profile, model)
    black = Image.new("RGB", (32, 32), "black")
    black.save(root / "black.png")
    lines = [{"prompt": PROMPT, "uid": f"toy {i}", "image": "black.png"} for i in range(4)]
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _teach_two_turns(model, black, steps)
    return Toy(model, prompts, _median_brightness(model, black))


def _teach_two_turns(model: Path, black: Image.Image, steps: int) -> None:
    bagel = load(model, device="cpu", dtype="float32", attn="auto")
    policy = BagelPolicy(bagel, load_profile(model))
    seen = start(policy, PROMPT, black)
    round_index, source = current(seen)
    said = [policy.text(protocol.canonical(turn, round_index, source)) for turn in TURNS]
    context = [Piece(segment) for segment in reflect_view(seen).segments]
    rows = [
        pack_row([[*context, Piece(text, learn=True)]], bagel.frame, bagel.config) for text in said
    ]
    latents = policy.engine.latent_tokens([i for row in rows for i in row.vae_images])
    patches = [patchify_pixels(i.vit_pixels, 14) for row in rows for i in row.vit_images]
    batch = collate(rows, latents, patches)
    learning = [p for n, p in bagel.named_parameters() if "moe_gen" not in n and "layers" in n]
    learning.append(bagel.language_model.lm_head.weight)
    for p in bagel.parameters():
        p.requires_grad_(False)
    for p in learning:
        p.requires_grad_(True)
    optimizer = torch.optim.Adam(learning, lr=1e-2)
    times, noise = torch.zeros(batch.num_images), torch.zeros_like(batch.latent_BGC)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / steps)
        out = training_forward(bagel, batch, times, noise)
        out.ce_S.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    profile = load_profile(model)
    save(bagel, model, weights={n: t.detach().bfloat16() for n, t in bagel.state_dict().items()})
    save_profile(profile, model)


def _median_brightness(model: Path, black: Image.Image) -> float:
    """Of edits as rollouts draw them."""
    bagel = load(model, device="cpu", dtype="float32", attn="auto")
    settings = build(RolloutSettings, _rollout(), "test")
    policy = RolloutPolicy(bagel, load_profile(model), settings)
    names = [f"look {i}" for i in range(48)]
    policy.places = {name: Place(0, 0, i) for i, name in enumerate(names)}
    with torch.no_grad():
        drawn = draw_once(policy, ["more"] * 48, sources=[black] * 48, seed=0, samples=names)
    return float(np.median([brightness(one.first.image) for one in drawn]))


def _rollout() -> dict[str, Any]:
    return {
        "groups": 4,
        "group_size": 8,
        "max_rounds": 1,
        "max_tokens": 64,
        "temperature": 1.0,
        "edit": dict(DRAWING),
        "first": dict(DRAWING),
        "window": {"size": 0},
        "options": {"final_look": False, "min_change": 0.0},
    }


def toy_config(toy: Toy, out: Path, **changes: Any) -> Config:
    """changes: as in a YAML file."""
    values: dict[str, Any] = {
        "model": str(toy.model),
        "output_dir": str(out),
        "prompts": str(toy.prompts),
        "judge": {"reward": "bright", "set": [f"threshold={toy.threshold}"]},
        "rollout": _rollout(),
        "flow": {"clip_low": 0.2, "clip_high": 0.2},
        "optimizer": {"lr": 1e-3, "flow_lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8},
        "warmup": 4,
        "watch": QUIET,
        "device": "cpu",
        "recompute": False,
        "preflight": False,
        "pictures_every": 0,
        "save_every": 1000,
        "max_steps": 4,
    }
    return build(Config, _overlaid(values, changes), "test")


def quick() -> None:
    """The toy's judge is known, and no curves are drawn: for a process of its own too."""
    registry.REWARDS["bright"] = "tests.bright"
    rl.train_output.draw_curves = lambda *_: None


def run(config: Config) -> int:
    with start_processes(config.strategy, config.device) as processes:
        return train(config, processes)


def run_on(processes, config: Config) -> list[dict[str, float]]:
    """`train` as one of several processes; the lines of metrics on rank 0."""
    quick()
    train(config, processes)
    return step_lines(config.output_dir) if processes.main else []


def step_lines(out: Path) -> list[dict[str, Any]]:
    """The lines that training steps wrote."""
    return [line for line in read_metrics(out / "metrics.jsonl") if "reward_mean" in line]
