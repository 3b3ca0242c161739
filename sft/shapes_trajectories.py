"""Datasets of the shapes world in our own Parquet schema, written by many processes.

    python -m sft.shapes_trajectories data/shapes --trajectories 50000 --drawings 150000
    python -m sft.shapes_trajectories data/own --trajectories 0 --collected out/own   # eval.collect

trajectories  prompts and editing tasks with true looks until "done" (sft/shapes.py)
drawings      a prompt and a picture of it, as anchors
collected     a model's own images (sft/shapes_own.py): true looks at them and mended copies to draw
              as trajectories, and first images that are right and well drawn as anchors

What a file holds depends on the seed and its number alone. A run that is killed goes on with the
files that are not there yet.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from agent.protocol import parse_schema
from sft.data import Picture, Record, Said
from sft.data_own import write_parquet
from umm_reflect.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from sft.shapes_own import OwnLook

SIDE = 128  # pixels
PER_FILE = {"looks": 1000, "drawings": 4000, "own": 1000}


@dataclass(frozen=True)
class Config:
    """Write trajectories and drawings of the shapes world as Parquet."""

    output_dir: Annotated[Path, tyro.conf.Positional]
    """A folder; files that are there already are kept."""
    trajectories: int = 1000
    """How many, a fifth of them editing tasks and a fifth of the harder split."""
    drawings: int = 0
    """How many prompts with a picture."""
    collected: tuple[Path, ...] = ()
    """Folders of eval.collect."""
    careless: float = 0.0
    """The share of looks at wrong images that call them right, in `trajectories`: what a model
    learns from someone who overlooks mistakes. 0: every look is true."""
    variants: int = 1
    """How often each collected image is used: after the first time in other words, and moved by a
    few pixels where its background is plain."""
    seed: int = 0
    """Other numbers give other trajectories."""
    side: int = SIDE
    """Of the pictures that are rendered, in pixels."""
    workers: int = 0
    """Processes; 0: one a core."""

    def __post_init__(self) -> None:
        if min(self.trajectories, self.drawings, self.workers) < 0:
            raise ValueError("trajectories, drawings and workers must be 0 or more")
        if self.variants < 1:
            raise ValueError(f"variants is {self.variants}; give 1 or more")
        if not 0 <= self.careless < 1:
            raise ValueError(f"careless is {self.careless}; give 0 to below 1")
        if self.side < 8:
            raise ValueError(f"side is {self.side}; a scene needs at least 8 pixels")


@dataclass(frozen=True)
class File:
    """One file to write: `count` entries from `start` on. source: a folder of eval.collect."""

    path: Path
    kind: Literal["looks", "drawings", "own"]
    start: int
    count: int
    seed: int
    source: Path | None = None
    side: int = SIDE
    variants: int = 1
    careless: float = 0.0


def files(config: Config) -> list[File]:
    """Errors: UserError for a folder that eval.collect did not write."""
    wanted: list[tuple] = [
        ("looks", config.trajectories, None, "looks"),
        ("drawings", config.drawings, None, "drawings"),
    ]
    for number, source in enumerate(config.collected):
        lines = source / "records.jsonl"
        if not lines.exists():
            raise UserError(f"{source} has no records.jsonl", "Name a folder of eval.collect")
        count = lines.read_text(encoding="utf-8").count("\n")
        wanted.append(("own", count, source, f"own{number}"))
    return [
        File(
            config.output_dir / f"trajectories-{name}-{config.seed}-{start // PER_FILE[kind]:05d}"
            ".parquet",
            kind,
            start,
            min(PER_FILE[kind], total - start),
            config.seed,
            source,
            config.side,
            config.variants,
            config.careless,
        )
        for kind, total, source, name in wanted
        for start in range(0, total, PER_FILE[kind])
    ]


def write(file: File) -> int:
    """How many rows were written."""
    rng = random.Random(file.path.stem)
    makers = {"looks": looks, "drawings": drawings, "own": own}
    return write_parquet(makers[file.kind](file, rng), file.path)


def looks(file: File, rng: random.Random) -> Iterator[Record]:
    from sft.data_convert import shapes_record
    from sft.shapes import training_trajectory

    for i in range(file.start, file.start + file.count):
        trajectory = training_trajectory(rng, file.careless)
        yield shapes_record(trajectory, f"look-{file.seed}-{i:06d}", file.side)


def drawings(file: File, rng: random.Random) -> Iterator[Record]:
    from sft.shapes import training_drawing
    from umm_reflect.shapes.render import render

    for i in range(file.start, file.start + file.count):
        prompt, scene = training_drawing(rng)
        uid = f"drawing-{file.seed}-{i:06d}"
        yield Record(uid, "t2i", prompt, (), (picture(render(scene, file.side)),))


def own(file: File, rng: random.Random) -> Iterator[Record]:
    """What a part of the collected images teaches."""
    from PIL import Image

    from sft.shapes_own import collected, is_well_drawn, moved, own_looks

    name = file.path.stem.removeprefix("trajectories-")
    for record, pixels in collected(file.source, file.start, file.count):
        uid = f"{name}-{record['images'][0]:06d}"
        looks = (
            look if variant == 0 else moved(look, rng)
            for variant in range(file.variants)
            for look in own_looks(record, pixels, rng)
        )
        for k, look in enumerate(looks):
            yield own_record(look, f"{uid}-{k}")
        if is_well_drawn(record):
            first = picture(Image.fromarray(pixels[0]))
            yield Record(f"{uid}-kept", "t2i", record["prompt"], (), (first,))


def own_record(look: OwnLook, uid: str) -> Record:
    """A look at own images as a trajectory that may end with an edit."""
    from PIL import Image

    said = []
    for k, (text, learn) in enumerate(zip(look.turns, look.learned, strict=True)):
        read = parse_schema(text, k, f"Image #{k}")
        said.append(Said(text, read, learn))
    images = [
        picture(Image.fromarray(pixels), drawn)
        for pixels, drawn in zip(look.images, look.drawn, strict=True)
    ]
    return Record(uid, "t2i", look.prompt, tuple(said), tuple(images), open=True)


def picture(image: Image, learn: bool = True) -> Picture:
    data = io.BytesIO()
    image.save(data, "PNG", compress_level=1)
    return Picture(data=data.getvalue(), learn=learn)


def generate(config: Config) -> int:
    """Write what is missing; how many rows were written."""
    from sft.feed import default_workers
    from umm_reflect.training.metrics import progress

    todo = [file for file in files(config) if not file.path.exists()]
    workers = config.workers or default_workers() + 1
    rows = 0
    with ProcessPoolExecutor(workers) as pool, progress(len(todo), "files") as bar:
        for count in pool.map(write, todo):
            rows += count
            bar.advance(rows=rows)
    print(f"wrote {rows:,} rows in {len(todo)} files to {config.output_dir}")
    return rows


def main(argv: list[str]) -> int:
    from umm_reflect.settings import parse

    generate(parse(Config, argv, "python -m sft.shapes_trajectories"))
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
