"""What a run leaves that every command loads: RUN/checkpoints/step-..., and RUN/checkpoint, a link.

    origin = Origin(model="ByteDance-Seed/BAGEL-7B-MoT", folder=folder, profile=profile)
    path = save_folder(learner, origin, out, step, lora=False, averaged=False, keep=2)

A whole model in BAGEL's layout, or with LoRA the adapter, in fp32, and its reflection.json. Written
aside and renamed; of the earlier ones the newest `keep` stay, and those in `also_keep`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from umm_reflect.adapters import save_adapter
from umm_reflect.checkpoint import VAE_WEIGHTS, save
from umm_reflect.errors import UserError
from umm_reflect.profile import ReflectionProfile, save_profile
from umm_reflect.training.learner import Learner

CHECKPOINTS, NEWEST = "checkpoints", "checkpoint"


@dataclass(frozen=True)
class Origin:
    """model: as it was named; an adapter says so. folder: where it lies. profile: how what is
    trained is to be run."""

    model: str
    folder: Path
    profile: ReflectionProfile


def save_folder(
    learner: Learner,
    origin: Origin,
    out: Path,
    step: int,
    *,
    lora: bool,
    averaged: bool,
    keep: int,
    also_keep: Collection[str] = (),
) -> Path:
    """The folder of this step. averaged: the moving averages are written. Every process calls it.
    Errors: UserError on all processes when rank 0 cannot write."""
    stream = learner.ema_weights if averaged else learner.weights
    dtype = torch.float32 if lora else torch.bfloat16
    weights = dict(stream(dtype=dtype, trained_only=lora))  # all processes take part
    path, why = out / CHECKPOINTS / f"step-{step:07d}", ""
    if learner.processes.main:
        try:
            _write(learner, origin, path, weights, lora)
            link_newest(out, path)
            # those of later steps are of a run that was given up: they take nobody's place
            past = [p for p in sorted(path.parent.glob("step-*")) if p.name <= path.name]
            for old in past[:-keep]:
                if old.name not in also_keep:
                    shutil.rmtree(old)
        except (OSError, UserError) as error:
            why = str(error)
    if failed := learner.processes.any(bool(why), why):
        raise UserError(f"the checkpoint cannot be written: {failed[0][1]}", "Is the disk full?")
    return path


def _write(learner: Learner, origin: Origin, path: Path, weights: dict, lora: bool) -> None:
    aside = path.parent / ".new" / path.name
    shutil.rmtree(aside.parent, ignore_errors=True)
    if lora:
        save_adapter(learner.bagel, aside, origin.model, weights=weights)
    else:
        save(learner.bagel, aside, weights=weights)
        if (own := origin.folder / VAE_WEIGHTS).exists():  # as it was, in its own precision
            shutil.copyfile(own, aside / VAE_WEIGHTS)
    save_profile(origin.profile, aside)
    if path.exists():
        shutil.rmtree(path)
    os.replace(aside, path)


def link_newest(out: Path, path: Path, name: str = NEWEST) -> None:
    """out/NAME points at a folder of out/checkpoints, from one moment to the next."""
    link = path.parent / ".link"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(CHECKPOINTS) / path.name)
    os.replace(link, out / name)
