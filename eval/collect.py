"""A model's own first images with what a judge reads in them: what it learns to look at next.

    python -m eval.collect --model DIR --count 20000 --output-dir out/own

Prompts are training prompts. Writes images.npy ([count, H, W, 3] uint8) and records.jsonl, one
line an image: the prompt row, the words, the objects that the verifier read, and its verdict.
`sft.shapes_data` turns them into looks.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from umm_reflect.files import write_aside
from umm_reflect.shapes.prompts import phrase
from umm_reflect.shapes.sampler import sample_row

if TYPE_CHECKING:
    from PIL.Image import Image

    from umm_reflect.model import Bagel
    from umm_reflect.profile import ReflectionProfile


@dataclass(frozen=True)
class Config:
    """Draw first images for training prompts and write down what the verifier reads in them."""

    output_dir: Path
    """Folder for images.npy and records.jsonl."""
    model: str = "pretrained/bagel-nano-shapes"
    """A folder, a hub id or id@revision."""
    count: int = 20_000
    """How many images."""
    text_scales: tuple[float, ...] = (1.0, 2.0)
    """Guidance toward the text, in turn, a batch each: weaker guidance makes more mistakes."""
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
    config.output_dir.mkdir(parents=True, exist_ok=True)
    lines, pictures, right = [], [], 0
    with Judge(config.workers) as judge:
        for number, start in enumerate(range(0, config.count, config.batch_size)):
            some = range(start, min(start + config.batch_size, config.count))
            scale = config.text_scales[number % len(config.text_scales)]
            images = draw_first(
                bagel, settings, [prompts[i] for i in some], scale, config.seed, start
            )
            verdicts = judge(images, [rows[i] for i in some])
            for i, image, verdict in zip(some, images, verdicts, strict=True):
                pictures.append(np.asarray(image))
                right += verdict.correct
                record = {"row": rows[i], "prompt": prompts[i], "text_scale": scale}
                lines.append(json.dumps(record | {"verdict": verdict.to_record()}))
    np.save(config.output_dir / "images.npy", np.stack(pictures))
    write_aside(config.output_dir / "records.jsonl", "\n".join(lines) + "\n")
    print(f"{len(lines)} images, {right / len(lines):.3f} right: {config.output_dir}")
    return config.output_dir


def draw_first(
    bagel: Bagel,
    profile: ReflectionProfile,
    prompts: list[str],
    scale: float,
    seed: int,
    start: int,
) -> list[Image]:
    """First images as the loop draws them, under guidance `scale`, one noise stream an image."""
    from agent.direct import draw_once
    from agent.policy import BagelPolicy

    policy = BagelPolicy(bagel, replace(profile, first=replace(profile.first, text_scale=scale)))
    names = [f"collect:{start + i}" for i in range(len(prompts))]
    return [drawn.final for drawn in draw_once(policy, prompts, seed=seed, samples=names)]


def main(argv: list[str]) -> int:
    from umm_reflect.settings import parse

    collect(parse(Config, argv, "python -m eval.collect"))
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
