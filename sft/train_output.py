"""What a run leaves: folders that every command loads, curves, and lines for a tracker.

save_folder(learner, prepared, config, step)       # RUN/checkpoints/step-..., RUN/checkpoint
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sft.train_config import Config
from sft.train_data import Prepared
from umm_reflect.checkpoint import VAE_WEIGHTS, save
from umm_reflect.errors import UserError
from umm_reflect.profile import save_profile
from umm_reflect.training import trainable
from umm_reflect.training.learner import Learner

CHECKPOINTS, NEWEST = "checkpoints", "checkpoint"


def save_folder(learner: Learner, prepared: Prepared, config: Config, step: int) -> None:
    """checkpoints/step-..., written aside and renamed; the newest `keep` stay. Where weights are
    averaged, the averages are written."""
    out = config.output_dir
    lora = config.parameters in trainable.LORA
    stream = learner.ema_weights if config.optimizer.ema_decay is not None else learner.weights
    dtype = torch.float32 if lora else torch.bfloat16
    weights = dict(stream(dtype=dtype, trained_only=lora))  # all processes take part
    why = ""
    if learner.processes.main:
        try:
            _write_folder(learner.bagel, prepared, config, out, step, weights, lora)
        except (OSError, UserError) as error:
            why = str(error)
    if failed := learner.processes.any(bool(why), why):
        raise UserError(f"the checkpoint cannot be written: {failed[0][1]}", "Is the disk full?")


def _write_folder(bagel, prepared, config, out, step, weights, lora) -> None:
    folder = out / CHECKPOINTS
    path, aside = folder / f"step-{step:07d}", folder / ".new" / f"step-{step:07d}"
    shutil.rmtree(aside.parent, ignore_errors=True)
    if lora:
        from umm_reflect.adapters import save_adapter

        save_adapter(bagel, aside, config.model, weights=weights)
    else:
        save(bagel, aside, weights=weights)
        if (own := prepared.folder / VAE_WEIGHTS).exists():  # as it was, in its own precision
            shutil.copyfile(own, aside / VAE_WEIGHTS)
        save_profile(prepared.profile, aside)
    if path.exists():
        shutil.rmtree(path)
    os.replace(aside, path)
    link = folder / ".link"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(CHECKPOINTS) / path.name)
    os.replace(link, out / NEWEST)
    for old in sorted(folder.glob("step-*"))[: -config.keep]:
        shutil.rmtree(old)


def settings_text(config: Config) -> str:
    from umm_reflect.settings import to_yaml

    return to_yaml(replace(config, resume="auto", dry_run=False))


def curves(path: Path) -> dict[str, list[str]]:
    """Panels of curve.png from the names that a run has logged."""
    from umm_reflect.training.metrics import read_metrics

    names = dict.fromkeys(name for line in read_metrics(path) for name in line)
    panels = {"cross-entropy": ["ce", "held_out/ce"], "flow matching": ["mse", "held_out/mse"]}
    panels["right tokens"] = ["token_accuracy", "held_out/token_accuracy"]
    panels["held-out decisions"] = [
        n for n in names if n.endswith(("score_accuracy", "action_accuracy"))
    ]
    panels |= {"learning rate": ["lr"], "gradient norm": ["grad_norm"]}
    panels |= {"tokens a second": ["tokens_per_second"], "share of the peak": ["mfu"]}
    return panels


def tracker_of(config: Config) -> Callable[[int, dict[str, float]], Any] | None:
    """A function of (step, values) that sends metrics on; None without a tracker."""
    if config.tracker == "none":
        return None
    if config.tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(config.output_dir / "tensorboard")
        return lambda step, values: [writer.add_scalar(n, v, step) for n, v in values.items()]
    import wandb

    from umm_reflect.settings import to_mapping

    wandb.init(project="umm-reflect", dir=str(config.output_dir), config=to_mapping(config))
    return lambda step, values: wandb.log(values, step=step)
