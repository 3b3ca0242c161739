"""Badly drawn shapes with what the verifier reads in them: looks that no model has to draw first.

    python -m eval.distort --count 40000 --output-dir out/distorted
    python -m eval.distort --show distorted.png                       # look at some

A young model draws stars with six points, triangles that bend into moons, squares without corners,
shapes that run into each other. These are drawn here on purpose, more and less so, and the verifier
says of each image whether it still counts: so a model learns the verifier's own limit between lumpy
and malformed. Writes what eval.collect writes (images.npy, records.jsonl).
"""

from __future__ import annotations

import json
import math
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from eval.collect import write_collected
from eval.judging import cores
from eval.shapes import ShapesVerifier
from umm_reflect.shapes.prompts import Row, phrase
from umm_reflect.shapes.render import SUPERSAMPLING, background
from umm_reflect.shapes.sampler import sample_row, scene_for
from umm_reflect.shapes.scene import (
    KINDS,
    PALETTE,
    RING_HOLE,
    Scene,
    Shape,
    nearest_colors,
    outline,
    place,
)
from umm_reflect.training.metrics import progress

SIDE = 128
POINTS = 120  # of a resampled outline
DISTORTED = 0.4  # shapes that are not drawn as they should be
NEAR = 0.35  # scenes in which a shape is pushed into another
BLUR = 0.9  # pixels at most, as an autoencoder blurs
CHUNK = 250
# Kinds that models draw badly most often: in half of the scenes there is one of them for sure.
HARD_KINDS = ("star", "cross")


@dataclass(frozen=True)
class Config:
    """Draw distorted scenes and write down what the verifier reads in them."""

    output_dir: Path = Path("outputs/distorted")
    """Folder for images.npy and records.jsonl."""
    count: int = 40_000
    """How many images."""
    hard: float = 0.1
    """Share of prompts of the harder split."""
    seed: int = 0
    workers: int = 0
    """Processes; 0: one per core."""
    show: Path | None = None
    """Only draw a sheet of 40 of them into this file."""

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.hard <= 1 or self.workers < 0:
            raise ValueError("count must be 1 or more, hard a share from 0 to 1, workers 0 or more")


# --- outlines ------------------------------------------------------------------------------------


@cache
def resampled(kind: str) -> np.ndarray:
    """A kind's outline as POINTS points at equal distances, from the top on, clockwise: [n, 2]."""
    return _resample(outline(kind))


def _resample(points: np.ndarray) -> np.ndarray:
    x, y = points.T
    if (x * np.roll(y, -1) - y * np.roll(x, -1)).sum() < 0:
        points = points[::-1]
    start = np.argmin(points[:, 1] + 1e-6 * points[:, 0])
    closed = np.concatenate([points[start:], points[: start + 1]])
    along = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(closed, axis=0), axis=1))])
    wanted = np.linspace(0, along[-1], POINTS, endpoint=False)
    return np.stack([np.interp(wanted, along, closed[:, axis]) for axis in (0, 1)], 1)


def spiked(points: int, inner: float) -> np.ndarray:
    """A star of so many points."""
    turn = -math.pi / 2 + np.arange(2 * points) * math.pi / points
    radius = np.where(np.arange(2 * points) % 2 == 0, 1.0, inner)
    return _resample(np.stack([radius * np.cos(turn), radius * np.sin(turn)], 1))


def distorted(kind: str, rng: random.Random) -> np.ndarray:
    """The outline of a kind, drawn wrongly in one way by lot and more or less so: [POINTS, 2]."""
    points = resampled(kind)
    way = rng.choice(("melt", "melt", "spikes", "wobble", "wobble", "round", "stretch"))
    if way == "melt":
        other = resampled(rng.choice([k for k in KINDS if k != kind]))
        share = rng.uniform(0.1, 0.6)
        return (1 - share) * points + share * other
    if way == "spikes" and kind in ("star", "cross", "triangle", "square"):
        usual = {"star": 5, "cross": 4, "triangle": 3, "square": 4}[kind]
        count = rng.choice([n for n in range(3, 8) if n != usual])
        return spiked(count, rng.uniform(0.35, 0.6))
    if way == "round":
        width = rng.randint(3, 14)
        strength = np.ones(2 * width + 1) / (2 * width + 1)
        wrapped = np.concatenate([points[-width:], points, points[:width]])
        return np.stack([np.convolve(wrapped[:, a], strength, "valid") for a in (0, 1)], 1)
    if way == "stretch":
        factor, turn = rng.uniform(1.15, 1.8), rng.uniform(0, math.pi)
        axis = np.array([math.cos(turn), math.sin(turn)])
        along = (points @ axis)[:, None] * axis
        return (points - along) / math.sqrt(factor) + along * math.sqrt(factor)
    angle = np.arctan2(points[:, 1], points[:, 0])
    bumps = [(rng.randint(1, 6), rng.uniform(0, 2 * math.pi)) for _ in range(2)]
    size = rng.uniform(0.03, 0.22)
    return points * (1 + sum(size / 2 * np.cos(n * angle + phase) for n, phase in bumps))[:, None]


# --- drawing -------------------------------------------------------------------------------------


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """The scene at SIDE pixels, each shape distorted by lot, then blurred a little."""
    picture = background(scene.background, SIDE)
    for shape in scene.shapes:
        bad = rng.random() < DISTORTED
        mask = _mask(shape, bad, rng)
        color = Image.new("RGB", picture.size, PALETTE[shape.color])
        if bad and rng.random() < 0.15:
            color = _bleeding(shape, color, rng)
        picture.paste(color, (0, 0), mask)
    return picture.filter(ImageFilter.GaussianBlur(rng.uniform(0, BLUR)))


def _mask(shape: Shape, bad: bool, rng: random.Random) -> Image.Image:
    fine = Image.new("L", (SIDE * SUPERSAMPLING,) * 2)
    pen = ImageDraw.Draw(fine)
    scale = SIDE * SUPERSAMPLING

    def fill(points: np.ndarray, value: int) -> None:
        pen.polygon((place(points, shape) * scale).ravel().tolist(), fill=value)

    fill(distorted(shape.kind, rng) if bad else outline(shape.kind), 255)
    if shape.kind == "ring":
        hole, off = RING_HOLE, np.zeros(2)
        if bad:
            hole *= rng.uniform(0.5, 1.2)
            off = np.array([rng.uniform(-0.3, 0.3), rng.uniform(-0.3, 0.3)])
        fill(outline("ring") * hole + off, 0)
    if bad and rng.random() < 0.15:  # a bite
        turn, size = rng.uniform(0, 2 * math.pi), rng.uniform(0.15, 0.5)
        fill(outline("circle") * size + [math.cos(turn), math.sin(turn)], 0)
    return fine.reduce(SUPERSAMPLING)


def _bleeding(shape: Shape, color: Image.Image, rng: random.Random) -> Image.Image:
    """Another colour runs into the shape's from one side."""
    other = Image.new("RGB", color.size, PALETTE[rng.choice(nearest_colors(shape.color))])
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    turn, edge = rng.uniform(0, 2 * math.pi), rng.uniform(-0.3, 0.4) * shape.size
    beyond = (x - shape.x) * math.cos(turn) + (y - shape.y) * math.sin(turn) - edge
    share = np.clip(beyond / (0.15 * shape.size) + 0.5, 0, 1)
    color.paste(other, (0, 0), Image.fromarray((share * 255).astype(np.uint8)))
    return color


def crowded(scene: Scene, rng: random.Random) -> Scene:
    """The scene with one shape pushed toward, or into, another; or made tiny."""
    if len(scene.shapes) < 2 or rng.random() < 0.2:
        index = rng.randrange(len(scene.shapes))
        return scene.changing(index, size=scene.shapes[index].size * rng.uniform(0.3, 0.7))
    index, other = rng.sample(range(len(scene.shapes)), 2)
    a, b = scene.shapes[index], scene.shapes[other]
    turn = rng.uniform(0, 2 * math.pi)
    apart = (a.size + b.size) / 2 * rng.uniform(0.6, 1.05)
    low, high = a.size / 2, 1 - a.size / 2
    x = min(high, max(low, b.x + apart * math.cos(turn)))
    y = min(high, max(low, b.y + apart * math.sin(turn)))
    moved = replace(a, x=x, y=y)
    return replace(scene, shapes=(*scene.shapes[:index], moved, *scene.shapes[index + 1 :]))


# --- the files -----------------------------------------------------------------------------------


def example(rng: random.Random, hard: float) -> tuple[Row, str, Image.Image]:
    """A row, its words, and an image that may or may not be what it asks for."""
    is_hard = rng.random() < hard
    wants_hard_kind, row = rng.random() < 0.5, sample_row(rng, hard=is_hard)
    while wants_hard_kind and not any(part["class"] in HARD_KINDS for part in row["include"]):
        row = sample_row(rng, hard=is_hard)
    scene = scene_for(row, rng, hard=is_hard and rng.random() < 0.5)
    if rng.random() < NEAR:
        scene = crowded(scene, rng)
    return row, phrase(row, rng), draw(scene, rng)


def part(seed: int, number: int, count: int, hard: float) -> tuple[np.ndarray, list[dict]]:
    """One process's job: (images [count, H, W, 3], a record each)."""
    rng, verifier = random.Random(f"distort {seed} {number}"), ShapesVerifier()
    images, records = [], []
    for i in range(count):
        row, prompt, image = example(rng, hard)
        [verdict] = verifier.score([image], [row])
        images.append(np.asarray(image))
        record = {"row": row, "prompt": prompt, "source": "renderer", "turns": []}
        record["images"] = [number * CHUNK + i]
        records.append(record | {"verdicts": [verdict.to_record()]})
    return np.stack(images), records


def generate(config: Config) -> Path:
    """Write the files; returns the folder."""
    starts = range(0, config.count, CHUNK)
    counts = [min(CHUNK, config.count - start) for start in starts]
    numbers = range(len(counts))
    pictures, lines, right = [], [], 0
    workers = config.workers or cores()
    with ProcessPoolExecutor(workers) as pool, progress(config.count, "distorting") as bar:
        same = ([config.seed] * len(counts), numbers, counts, [config.hard] * len(counts))
        for images, records in pool.map(part, *same):
            pictures.append(images)
            lines += [json.dumps(record) for record in records]
            right += sum(record["verdicts"][0]["correct"] for record in records)
            bar.advance(len(records))
    write_collected(config.output_dir, np.concatenate(pictures), lines)
    print(f"{len(lines)} images, {right / len(lines):.3f} right: {config.output_dir}")
    return config.output_dir


def sheet(config: Config, path: Path, columns: int = 8, rows: int = 5) -> None:
    """Forty of them with what the verifier says."""
    rng, verifier = random.Random(config.seed), ShapesVerifier()
    canvas = Image.new("RGB", (columns * 160, rows * 190), "white")
    pen = ImageDraw.Draw(canvas)
    for i in range(columns * rows):
        row, prompt, image = example(rng, config.hard)
        [verdict] = verifier.score([image], [row])
        x, y = i % columns * 160, i // columns * 190
        canvas.paste(image, (x + 8, y + 8))
        pen.text((x + 8, y + 140), prompt[:28], fill="black")
        pen.text((x + 8, y + 155), verdict.reason[:28], fill="green" if verdict.correct else "red")
    canvas.save(path)


def main(argv: list[str]) -> int:
    from umm_reflect.settings import parse

    config = parse(Config, argv, "python -m eval.distort")
    if config.show is not None:
        sheet(config, config.show)
    else:
        generate(config)
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
