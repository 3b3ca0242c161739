"""What the tests of the SFT trainer share: a small model folder, a small dataset, a run of them.

config = tiny_config(folders, tmp_path / "run", max_steps=4)
code = run(config)                      # one process; or `train` on several
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from sft.data_convert import example_records
from sft.data_own import write_jsonl
from sft.train import train
from sft.train_config import PRESETS, Config
from tests.tiny import write_tiny_checkpoint
from umm_reflect.flow import DrawSettings
from umm_reflect.images import mended_transforms
from umm_reflect.profile import ReflectionProfile, SaySettings, save_profile
from umm_reflect.settings import _overlaid, build
from umm_reflect.training.metrics import read_metrics
from umm_reflect.training.processes import start
from umm_reflect.training.resume import latest

QUICK = DrawSettings(points=3)


@dataclass(frozen=True)
class Folders:
    model: Path
    data: Path


def write_folders(root: Path, rows: int = 8) -> Folders:
    """A tiny checkpoint that draws 32 x 32 pixels in two steps, and rows of the shapes world."""
    model = write_tiny_checkpoint(root / "model")
    profile = ReflectionProfile(
        layout="rl",
        edit_view="local",
        system_prompt="Draw.",
        transforms=mended_transforms(vae=(32, 32, 16), vit=(28, 28, 14)),
        size=(32, 32),
        first=QUICK,
        edit=QUICK,
        say=SaySettings(temperature=0.0, max_tokens=24, max_rounds=1),
    )
    save_profile(profile, model)
    write_jsonl(example_records(rows), root / "data")
    return Folders(model, root / "data")


# One row of each kind a pack, so that a step is quick; eps above the noise of gradients.
TINY_RUN: dict[str, Any] = {
    "packing": {"expected_tokens": 1200, "max_tokens": 1500, "max_sample_tokens": 1500},
    "optimizer": {"lr": 2e-3, "eps": 1e-5},
    "rates": {"warmup": 0},
    "validation": {"every": 0, "share": 0.2, "pictures": 0},
    "max_steps": 4,
    "packs_per_step": 2,
    "log_every": 1,
    "save_every": 1000,
    "workers": 0,
    "device": "cpu",
}


def tiny_config(folders: Folders, out: Path, **changes: Any) -> Config:
    """changes: as in a YAML file, over TINY_RUN over the preset nano."""
    values = _overlaid(_overlaid(PRESETS["nano"], TINY_RUN), changes)
    values |= {"model": str(folders.model), "data": [str(folders.data)], "output_dir": str(out)}
    return build(Config, values | changes_of_paths(changes), "test")


def changes_of_paths(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: changes[name] for name in ("model", "data") if name in changes}


def run(config: Config) -> int:
    with start(config.strategy, config.device) as processes:
        return train(config, processes)


def run_on(processes, config: Config) -> list[dict[str, float]]:
    """`train` as one of several processes; the lines of metrics on rank 0."""
    train(config, processes)
    return metrics(config.output_dir) if processes.main else []


def metrics(out: Path) -> list[dict[str, float]]:
    return read_metrics(out / "metrics.jsonl")


def step_lines(out: Path) -> list[dict[str, float]]:
    """The lines that training steps wrote."""
    return [line for line in metrics(out) if "lr" in line]


def weights(out: Path) -> bytes:
    return (out / "checkpoint" / "ema.safetensors").read_bytes()


def master_bytes(out: Path) -> dict[str, bytes]:
    """All tensors of the newest state, as bytes by name."""
    return state_bytes(latest(out / "resume"))


def state_bytes(path: Path) -> dict[str, bytes]:
    """The same of one state."""
    reader = dcp.FileSystemReader(path)
    names = {
        name: meta
        for name, meta in reader.read_metadata().state_dict_metadata.items()
        if not name.startswith("random/")
    }
    state = {name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in names.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def lines_of(out: Path) -> list[bytes]:
    path = out / "metrics.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def kill_by_lot(
    run_alone: Callable, config: Any, lot: Random, *, preload: list[str], most: int, late: float
) -> int:
    """Start run_alone(config) over and over, in a process of its own (preload: what it imports that
    takes long), and kill it up to `late` seconds after its next line of metrics, so
    somewhere in a step or a save, until it ends by itself; how often it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    out, kills = config.output_dir, 0
    while kills < most:
        child = context.Process(target=run_alone, args=(config,))
        child.start()
        before, until = len(lines_of(out)), time.monotonic() + 90
        while child.is_alive() and len(lines_of(out)) <= before:
            assert time.monotonic() < until, "it does not begin"
            time.sleep(0.005)
        time.sleep(lot.uniform(0, late))
        if not child.is_alive():
            break
        child.kill()
        child.join()
        kills += 1
    return kills


def about(out: Path) -> dict[str, Any]:
    return json.loads((latest(out / "resume") / "about.json").read_text(encoding="utf-8"))
