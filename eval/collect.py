"""A model's own images with what a judge reads in them: what it learns to look at next.

    python -m eval.collect --model DIR --count 20000 --output-dir out/own             # first images
    python -m eval.collect --model DIR --count 8000 --rounds 2 --output-dir out/own   # and edits

Prompts are training prompts. Writes images.npy ([all images, H, W, 3] uint8) and records.jsonl, one
line a trajectory: the prompt row, the words, the places of its images in the file, what was said
between them, and for each image the objects that the verifier read and its verdict.
`sft.shapes_own` turns them into looks.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from umm_reflect.files import write_aside
from umm_reflect.shapes.prompts import phrase
from umm_reflect.shapes.sampler import sample_row
from umm_reflect.training.metrics import progress

if TYPE_CHECKING:
    from agent.types import Trajectory
    from umm_reflect.model import Bagel
    from umm_reflect.profile import ReflectionProfile


@dataclass(frozen=True)
class Config:
    """Draw images for training prompts and write down what the verifier reads in them."""

    output_dir: Path
    """Folder for images.npy and records.jsonl."""
    model: str = "pretrained/bagel-nano-shapes"
    """A folder, a hub id or id@revision."""
    count: int = 20_000
    """How many prompts."""
    rounds: int = 0
    """Edits at most; 0: first images alone, without a look at them."""
    text_scales: tuple[float, ...] = (1.0, 2.0)
    """Guidance of first images toward the text, in turn, a batch each: weaker guidance makes more
    mistakes."""
    hard: float = 0.15
    """Share of prompts of the harder split."""
    batch_size: int = 512
    seed: int = 0
    workers: int = 0
    """Processes that judge; 0: one per core."""
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.count < 1 or self.batch_size < 1 or not self.text_scales:
            raise ValueError("count and batch-size must be at least 1, and text-scales not empty")
        if self.rounds < 0:
            raise ValueError(f"rounds is {self.rounds}; give 0 or more")


def collect(config: Config) -> Path:
    """Draw, judge, write; returns the folder."""
    from eval.judging import Judge
    from umm_reflect.hub import profile, resolve
    from umm_reflect.model import Bagel

    folder = resolve(config.model)
    bagel = Bagel.from_pretrained(folder, device=config.device)
    settings = profile(folder)
    rng = random.Random(f"collect {config.seed}")
    rows = [sample_row(rng, hard=rng.random() < config.hard) for _ in range(config.count)]
    prompts = [phrase(row, rng) for row in rows]
    config.output_dir.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    lines: list[str] = []
    pictures: list[np.ndarray] = []
    right = 0
    with Judge(config.workers) as judge, progress(config.count, "collecting") as bar:
        judge.start(min(config.count, config.batch_size))
        for number, start in enumerate(range(0, config.count, config.batch_size)):
            some = range(start, min(start + config.batch_size, config.count))
            scale = config.text_scales[number % len(config.text_scales)]
            runs = run(bagel, settings, [prompts[i] for i in some], scale, config, start)
            drawn = [trajectory.images for trajectory in runs]
            owners = [i for i, images in zip(some, drawn, strict=True) for _ in images]
            verdicts = iter(judge([*chain(*drawn)], [rows[i] for i in owners]))
            for i, trajectory, images in zip(some, runs, drawn, strict=True):
                count = len(images)
                judged = list(islice(verdicts, count))
                right += judged[0].correct
                record = {"row": rows[i], "prompt": prompts[i], "source": "model"}
                record["text_scale"] = scale
                record["images"] = list(range(len(pictures), len(pictures) + count))
                record["turns"] = spoken(trajectory)
                record["verdicts"] = [verdict.to_record() for verdict in judged]
                lines.append(json.dumps(record))
                pictures += [np.asarray(image) for image in images]
            bar.advance(len(some))
    write_collected(config.output_dir, np.stack(pictures), lines)
    print(
        f"{len(pictures)} images of {len(lines)} prompts, {right / len(lines):.3f} of the first "
        f"ones right: {config.output_dir}"
    )
    return config.output_dir


def run(
    bagel: Bagel,
    profile: ReflectionProfile,
    prompts: list[str],
    scale: float,
    config: Config,
    start: int,
) -> list[Trajectory]:
    """The loop under guidance `scale` of first images, one noise stream an image."""
    from agent.direct import draw_once
    from agent.loop import run_episodes
    from agent.policy import BagelPolicy
    from agent.types import OURS

    first = replace(profile.first, text_scale=scale)
    policy = BagelPolicy(bagel, replace(profile, first=first, say=profile.say.any_ten()))
    names = [f"collect:{start + i}" for i in range(len(prompts))]
    if not config.rounds:
        return draw_once(policy, prompts, seed=config.seed, samples=names)
    return run_episodes(
        policy,
        prompts,
        max_rounds=config.rounds,
        max_tokens=profile.say.max_tokens,
        options=replace(OURS, final_look=False),
        seed=config.seed,
        samples=names,
    )


def write_collected(folder: Path, images: np.ndarray, lines: Sequence[str]) -> None:
    """images.npy ([all images, H, W, 3] uint8) and, last, records.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "images.npy", images)
    write_aside(folder / "records.jsonl", "\n".join(lines) + "\n")


def spoken(trajectory: Trajectory) -> list[dict[str, str]]:
    """What was said before each edited image."""
    turns = [step.turn for step in trajectory.steps if step.transition is not None]
    return [{"said": turn.said, "edit": turn.reflection.edit} for turn in turns]


def main(argv: list[str]) -> int:
    from umm_reflect.settings import parse

    collect(parse(Config, argv, "python -m eval.collect"))
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
