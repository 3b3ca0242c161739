"""GenEval's folder of images: what its own evaluator reads, and what other generators write.

00000/metadata.jsonl            the row, one JSON object
00000/samples/0000.png          its images, by number
00000/grid.png                  not read

write(folder, [(0, row, 0, image)])            # place in the set, row, number, image
for asked in read(folder):                     # asked.index, asked.row, asked.images
    ...
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.geneval_rules import check_row
from eval.results import Sample
from eval.sets import all_rows, short_name
from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.shapes.sets import EvalRow

if TYPE_CHECKING:
    from PIL.Image import Image

    from agent.types import Trajectory

GIVEN = "given"  # the edit view of images that no edit of ours made
_SPEC = ("tag", "include", "exclude")


@dataclass(frozen=True)
class Asked:
    """One prompt's folder. index: its number; row: its metadata.jsonl; images: in order."""

    index: int
    row: dict[str, Any]
    images: tuple[Path, ...]


def write(folder: Path, items: Iterable[tuple[int, dict[str, Any], int, Image]]) -> None:
    """Write (place in the set, row, number of the image, image), each file aside and renamed."""
    for index, row, number, image in items:
        place = folder / f"{index:05d}"
        (place / "samples").mkdir(parents=True, exist_ok=True)
        write_aside(place / "metadata.jsonl", json.dumps(row))
        data = io.BytesIO()
        image.convert("RGB").save(data, "PNG")
        write_aside(place / "samples" / f"{number:05d}.png", data.getvalue())


def _prompt_folders(folder: Path) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((p for p in found if p.is_dir() and p.name.isdecimal()), key=lambda p: p.name)


def read(folder: Path) -> list[Asked]:
    """All prompts of a folder, by number.

    Errors: UserError for a folder without any, a prompt without images, or metadata that is no row.
    """
    found = []
    for place in _prompt_folders(folder):
        path = place / "metadata.jsonl"
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                raise ValueError("there is no prompt")
            check_row(row)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no row of GenEval's ({error})", "Mend or remove it.") from (
                error
            )
        images = tuple(p for p in (place / "samples").glob("*.png") if p.stem.isdecimal())
        if not images:
            raise UserError(f"{place} has no samples/*.png", "Draw them, or remove the folder.")
        found.append(Asked(int(place.name), row, tuple(sorted(images, key=lambda p: int(p.stem)))))
    if not found:
        raise UserError(
            f"{folder} holds no images of an evaluation",
            "Name a folder with 00000/metadata.jsonl and 00000/samples/*.png, or one that "
            "umm-reflect eval wrote with --predict-only or --log-samples.",
        )
    return found


@dataclass(frozen=True)
class GivenImages:
    """Images of others as trajectories of one image: a source for `produce.Producer`."""

    paths: dict[tuple[int, int], Path]  # by place in the set and number
    prompts: dict[int, str]

    def __call__(self, batch: Sequence[Sample]) -> list[Trajectory]:
        from agent.types import StopReason, Trajectory, Transition
        from umm_reflect.images import load_image

        return [
            Trajectory(
                prompt=self.prompts[sample.entry.index],
                source=None,
                plan=None,
                first=Transition(load_image(self.paths[sample.entry.index, sample.copy])),
                steps=(),
                stop=StopReason.MAX_ROUNDS,
                kept=0,
                seed=sample.seed,
                sample=sample.name,
            )
            for sample in batch
        ]

    def candidates(self, batch: Sequence[Sample], n: int) -> list[list[Trajectory]]:
        """There are none: nobody looked at these images."""
        return [[] for _ in batch]

    def on(self, device: str) -> GivenImages:
        return self


def given(folder: Path, set_name: str) -> tuple[GivenImages, list[Sample]]:
    """The images of a folder and the samples of a set that they are.

    A row is found by what it asks for, so longer prompts for the same objects are welcome. Errors:
    UserError for a row that is not in the set.
    """
    rows = all_rows(set_name)
    paths, prompts, samples = {}, {}, []
    for asked in read(folder):
        entry = _entry(asked, rows, set_name, folder)
        prompts[entry.index] = asked.row["prompt"]
        for number, path in enumerate(asked.images):
            if (entry.index, number) in paths:
                raise UserError(
                    f"{path} and {paths[entry.index, number]} are both of row {entry.index}",
                    "Remove one of the two folders.",
                )
            paths[entry.index, number] = path
            samples.append(Sample(GIVEN, short_name(set_name), entry, 0, number))
    samples.sort(key=lambda sample: (sample.entry.index, sample.copy))
    return GivenImages(paths, prompts), samples


def _entry(asked: Asked, rows: Sequence[EvalRow], set_name: str, folder: Path) -> EvalRow:
    spec = [asked.row.get(part) for part in _SPEC]
    here = rows[asked.index : asked.index + 1]
    for entry in (*here, *rows):
        if [entry.row.get(part) for part in _SPEC] == spec:
            return entry
    raise UserError(
        f"{folder}/{asked.index:05d} asks for '{asked.row['prompt']}', which is no row of "
        f"{set_name}",
        "Name the set that was drawn: umm-reflect eval SET --images DIR (geneval553, FILE.jsonl).",
    )


def images_sha256(given: GivenImages) -> str:
    """One hash of all images, by their place."""
    whole = hashlib.sha256()
    for place, path in sorted(given.paths.items()):
        whole.update(f"{place} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()
