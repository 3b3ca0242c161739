"""Looks at held-out prompts while training runs: the loop as it is evaluated, under the same noise
each time, judged by a judge of its own.

    held_out = HeldOut(settings, profile, processes, single=False)
    numbers, shown = held_out.look(learner)       # {"held_out/repair": 0.3, ...}, trajectories
    held_out.close()

Every process takes its share of the prompts; the numbers are of all of them and are the same on
every process. Nothing of it enters the reward: the prompts are a test set's, and what counts is
whether an image is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from agent.loop import run_episodes
from agent.policy import BagelPolicy
from agent.types import OURS, Trajectory
from eval.rewards.registry import build, named
from eval.sets import check_name, reward_of, rows_of, short_name
from eval.verdict import Verdict
from rl.judge import shared_out
from rl.outcomes import add_up, outcomes, rates
from umm_reflect.errors import UserError
from umm_reflect.profile import ReflectionProfile
from umm_reflect.shapes.sets import EvalRow
from umm_reflect.training.learner import Learner
from umm_reflect.training.processes import Processes


@dataclass(frozen=True)
class HeldOutSettings:
    """The loop on prompts that are never trained on."""

    every: int = 20
    """Updates between two looks; 0: never."""
    prompts: str = ""
    """A test set (umm-reflect eval --list) or a .jsonl file of rows; without one there is no
    look."""
    count: int = 64
    """Prompts, at equal distances in the set."""
    batch_size: int = 64
    """Trajectories that a process runs side by side."""
    reward: str = ""
    """The judge: a name or a YAML file; otherwise the set's own."""
    set: tuple[str, ...] = ()
    """KEY=VALUE settings of the judge."""
    seed: int = 0
    """Of all noise, the same at every look."""

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("count", 1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"held_out {name} is {getattr(self, name)}; give {least} or more")
        if self.prompts:
            check_name(self.prompts)

    @property
    def on(self) -> bool:
        return bool(self.prompts) and self.every > 0


@dataclass
class HeldOut:
    """profile: how the model is evaluated. single: first images alone, nothing is said."""

    settings: HeldOutSettings
    profile: ReflectionProfile
    processes: Processes
    single: bool
    rows: list[EvalRow] = field(init=False)

    def __post_init__(self) -> None:
        settings, processes = self.settings, self.processes
        name = settings.prompts
        rows = rows_of(name, settings.count)
        self.rows = rows[processes.rank :: processes.world]
        mapping = named(settings.reward or reward_of(name), settings.set)
        self.judge = build(shared_out(mapping, processes.local_world), "the held-out judge")

    def look(
        self, learner: Learner, *, averaged: bool = False
    ) -> tuple[dict[str, float], list[Trajectory]]:
        """The numbers, and this process's trajectories. Every process calls it. averaged: with the
        moving averages of the weights."""
        with learner.inference(averaged) as bagel, torch.no_grad():
            trajectories = self._run(bagel)
        verdicts = self._judged(trajectories)
        counts = self.processes.gather(outcomes(zip(trajectories, verdicts, strict=True)))
        found = rates(add_up(counts))
        return {f"held_out/{name}": value for name, value in found.items()}, trajectories

    def _run(self, bagel) -> list[Trajectory]:
        settings, say = self.settings, self.profile.say
        short, done = short_name(settings.prompts), []
        for start in range(0, len(self.rows), settings.batch_size):
            batch = self.rows[start : start + settings.batch_size]
            done += run_episodes(
                BagelPolicy(bagel, self.profile),
                [str(entry.row["prompt"]) for entry in batch],
                max_rounds=0 if self.single else say.max_rounds,
                max_tokens=say.max_tokens,
                options=OURS,
                seed=settings.seed,
                samples=[f"{short}:{entry.index}:{entry.seed}" for entry in batch],
            )
        return done

    def _judged(self, trajectories: Sequence[Trajectory]) -> list[list[Verdict]]:
        images = [image for trajectory in trajectories for image in trajectory.images]
        owners = zip(trajectories, self.rows, strict=True)
        rows = [entry.row for trajectory, entry in owners for _ in trajectory.images]
        verdicts = self.judge.score(images, rows)
        if failed := [verdict.error for verdict in verdicts if verdict.error is not None]:
            raise UserError(
                f"the held-out judge gave no verdict on {len(failed)} of {len(verdicts)} images "
                f"({failed[0]})",
                "Mend it: the run goes on from its newest state",
            )
        places = iter(verdicts)
        return [[next(places) for _ in trajectory.images] for trajectory in trajectories]

    def close(self) -> None:
        self.judge.close()
