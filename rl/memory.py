"""What a run holds at its fullest, while it rolls out and in an update: counted, nothing is loaded.

    plans = plan_run(config, bagel.config, profile, work, strategy="none", world=1, bf16=True,
                     keep_bytes=8 << 30)
    plans["rollout"].total, plans["update"].parts        # bytes of one process

work: of the largest forward of the replay. keep_bytes: of the engine of rollouts. Contexts and
turns are counted at their full length.
"""

from __future__ import annotations

import torch

from rl.rollout import rollout_profile
from rl.train_config import Config
from umm_reflect.config import BagelConfig
from umm_reflect.memory import MemoryPlan, Run, plan_memory
from umm_reflect.profile import ReflectionProfile
from umm_reflect.training.flops import Work
from umm_reflect.training.plan import Strategy, TrainingRun, plan_training
from umm_reflect.training.trainable import RANK

# Parts of a plan of training that are there in a rollout too.
STAYS = ("weights", "optimizer", "moving", "gradients", "further")


def plan_run(
    config: Config,
    model: BagelConfig,
    profile: ReflectionProfile,
    work: Work,
    *,
    strategy: Strategy,
    world: int,
    bf16: bool,
    keep_bytes: int,
) -> dict[str, MemoryPlan]:
    """{"rollout": ..., "update": ...}. Errors: ValueError for a size that the model cannot draw."""
    training = TrainingRun(
        work,
        preset=config.parameters,
        rank=config.lora.rank or RANK,
        frozen=config.frozen_parts,
        strategy=strategy,
        world=world,
        optimizer=config.optimizer.name,
        ema=config.optimizer.ema_decay is not None,
        recompute=config.recompute,
        bf16=bf16,
    )
    update = dict(plan_training(model, training).parts)
    if config.copies:
        update["further copies"] = len(config.copies) * update["weights: masters"]
    drawn = _drawing(config, model, profile, bf16=bf16, keep_bytes=keep_bytes)
    parts = {name: n for name, n in update.items() if name.startswith(STAYS)}
    if world > 1 and strategy in ("fsdp2", "deepspeed"):
        parts["whole weights, to draw"] = drawn.weights
    parts |= {name: n for name, n in drawn.parts.items() if not name.startswith("weights")}
    return {"rollout": _as(parts), "update": _as(update)}


def _drawing(
    config: Config,
    model: BagelConfig,
    profile: ReflectionProfile,
    *,
    bf16: bool,
    keep_bytes: int,
) -> MemoryPlan:
    rollout = config.rollout
    profile = rollout_profile(profile, rollout)
    _, (height, width) = profile.transforms.sizes(*profile.size)
    patch = model.vit.patch_size
    return plan_memory(
        model,
        Run(
            size=profile.size,
            batch_size=min(config.rollout_batch, rollout.groups * rollout.group_size),
            rounds=0 if rollout.single else rollout.max_rounds,
            turn_tokens=rollout.max_tokens,
            vit_tokens=(height // patch) * (width // patch),
            full_view=profile.edit_view == "full",
            keep_bytes=keep_bytes,
        ),
        torch.bfloat16 if bf16 else torch.float32,
        cuda=bf16,
    )


def _as(parts: dict[str, int]) -> MemoryPlan:
    return MemoryPlan({name: n for name, n in parts.items() if n})
