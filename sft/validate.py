"""Looks at held-out trajectories while training runs: losses, decisions, and the loop as a picture.

    held_out = HeldOut(parcels)                            # read once, kept on the host
    numbers = held_out.look(learner, store, config.loss)   # {"held_out/whole/ce": ..., ...}
    draw_stories(learner, profile, held, 3, RUN / "pictures" / "step-0000200.png", averaged=False)

Every process looks at its share; the numbers are of all of them. A score or an action is right when
all of its tokens are the most likely ones after the true text before them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sft.batches import Parcel
from sft.data import Record
from sft.latents import ImageStore
from sft.loss import KINDS, LossSettings, Tally, tallied_by
from sft.weights import Decision
from umm_reflect.files import write_aside
from umm_reflect.packing import TrainingOutput
from umm_reflect.profile import ReflectionProfile
from umm_reflect.training.learner import Learner

DECISIONS = {Decision.SCORE: "score_accuracy", Decision.ACTION: "action_accuracy"}


@dataclass(frozen=True)
class HeldOut:
    """parcels: this process's; every process has as many."""

    parcels: Sequence[Parcel]

    @torch.no_grad()
    def look(self, learner: Learner, store: ImageStore, settings: LossSettings) -> dict[str, float]:
        """Means over all held-out rows, by name. Every process calls it."""
        device, world = store.device, learner.processes
        tally = Tally.zero(device)
        right = torch.zeros(len(KINDS), len(DECISIONS), 2, device=device)
        learner.bagel.eval()
        try:
            for parcel in self.parcels:
                batch, times, noise, more = store.batch(parcel)
                out = learner.forward(batch, times, noise)
                kinds = more["kind_S"], more["kind_BG"]
                tally = tally + tallied_by(out, batch, noise, times, *kinds)
                right += decisions_right(out, more)
        finally:
            learner.bagel.train()
        tally, right = Tally.from_flat(world.sum(tally.flat())), world.sum(right).tolist()
        numbers = tally.report()
        for kind, columns in zip(KINDS, right, strict=True):
            for name, (hits, turns) in zip(DECISIONS.values(), columns, strict=True):
                if turns:
                    numbers[f"{kind}/{name}"] = hits / turns
        return {f"held_out/{name}": value for name, value in numbers.items()}


def decisions_right(out: TrainingOutput, more: dict[str, Tensor]) -> Tensor:
    """[kinds, decisions, 2]: how many turns have the whole score (action) right, and how many are
    there. more: "part_S", "turn_S", "kind_S" of a parcel.
    """
    device = out.right_S.device
    result = torch.zeros(len(KINDS), len(DECISIONS), 2, device=device)
    turn, part, kind = (more[name].long() for name in ("turn_S", "part_S", "kind_S"))
    turns = int(turn.max()) + 1 if len(turn) else 0
    kind_of = torch.zeros(turns, dtype=torch.long, device=device).index_put((turn,), kind)
    wrong = (~out.right_S).float()
    for column, decision in enumerate(DECISIONS):
        mine = (part == decision).float()
        missed = torch.zeros(turns, device=device).index_add(0, turn, wrong * mine)
        there = torch.zeros(turns, device=device).index_add(0, turn, mine) > 0
        pairs = torch.stack([(there & (missed == 0)).float(), there.float()], 1)
        result[:, column] = result[:, column].index_add(0, kind_of, pairs)
    return result


# --- the loop as a picture ------------------------------------------------------------------------


def draw_stories(
    learner: Learner,
    profile: ReflectionProfile,
    records: Sequence[Record],
    count: int,
    path: Path,
    *,
    averaged: bool,
    seed: int = 0,
) -> None:
    """The loop on the prompts of `count` held-out trajectories, one under another. averaged: with
    the moving averages of the weights. Every process calls it; rank 0 draws and writes.
    """
    with learner.inference(averaged) as bagel:
        if learner.processes.main:
            write_aside(path, stories(bagel, profile, records[:count], seed))


def stories(bagel, profile: ReflectionProfile, records: Sequence[Record], seed: int) -> bytes:
    """One PNG of the runs of these trajectories' prompts (editing tasks: on the user's image)."""
    from PIL import Image

    from agent.loop import run_episodes
    from agent.policy import BagelPolicy
    from agent.story import draw_story

    short = replace(profile.say, max_rounds=min(2, profile.say.max_rounds))
    policy = BagelPolicy(bagel, replace(profile, say=short))
    with torch.no_grad():
        runs = run_episodes(
            policy,
            [record.prompt for record in records],
            max_rounds=short.max_rounds,
            max_tokens=short.max_tokens,
            sources=[r.images[0].load() if r.task == "edit" else None for r in records],
            seed=seed,
        )
    drawn = [draw_story(run, record.uid) for run, record in zip(runs, records, strict=True)]
    sheet = Image.new("RGB", (max(s.width for s in drawn), sum(s.height for s in drawn)), "white")
    top = 0
    for story in drawn:
        sheet.paste(story, (0, top))
        top += story.height
    data = io.BytesIO()
    sheet.save(data, "PNG")
    return data.getvalue()
