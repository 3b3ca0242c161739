"""What became of one test row: one line of results.jsonl, the same on every machine and every day.

    result = result_of(trajectory, verdicts, sample)
    with ResultFile("outputs/eval/results.jsonl", resume=True) as file:
        file.append([result])
    result.correct_at(0), result.correct, result.protocol_valid      # first image, handed out, form

A line holds words, numbers and verdicts. Times are elsewhere (timing.json), so that two runs of one
command give one file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.shapes.sets import EvalRow

if TYPE_CHECKING:
    from agent.types import Trajectory
    from eval.verdict import Verdict


@dataclass(frozen=True)
class Sample:
    """One thing to generate: a row of a set, under a sampling seed. copy: which of several."""

    edit_view: str
    set: str
    entry: EvalRow
    seed: int
    copy: int = 0

    @property
    def name(self) -> str:
        """With the seed it names every random draw: `umm-reflect reflect --seed S --sample NAME`
        gives the same trajectory. The row's own seed is a part of it."""
        name = f"{self.set}:{self.entry.index}:{self.entry.seed}"
        return f"{name}:{self.copy}" if self.copy else name

    @property
    def key(self) -> Key:
        return self.edit_view, self.set, self.entry.index, self.seed, self.copy


Key = tuple[str, str, int, int, int]  # (edit view, set, row, seed, copy)


@dataclass(frozen=True)
class Judged:
    """The verdict on one image."""

    correct: bool
    reason: str


@dataclass(frozen=True)
class Look:
    """One turn that counts. Look k is at image k. A malformed one has an error and nothing else."""

    action: str | None
    score: float | None
    edit: str | None
    error: str | None = None


@dataclass(frozen=True)
class Result:
    """A judged trajectory. images[0] is the first image; `kept` is the one that is handed out.

    malformed: the code of every malformed turn that was sampled, those that were sampled anew too.
    """

    edit_view: str
    set: str
    row: int
    family: str
    tag: str
    prompt: str
    seed: int
    copy: int
    stop: str
    edits: int
    protocol_valid: bool
    kept: int
    images: tuple[Judged, ...]
    looks: tuple[Look, ...]
    malformed: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return self.edit_view, self.set, self.row, self.seed, self.copy

    @property
    def correct(self) -> bool:
        """Whether the image that is handed out is right."""
        return self.images[self.kept].correct

    def correct_at(self, budget: int) -> bool:
        """Whether the last image is right that at most `budget` edits give."""
        return self.images[min(budget, len(self.images) - 1)].correct

    def legal_looks(self) -> list[tuple[Look, bool]]:
        """Each legal look with whether the image that it saw is right."""
        seen = zip(self.looks, self.images, strict=False)  # the last image may not be looked at
        return [(look, image.correct) for look, image in seen if look.error is None]

    def to_line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def result_of(trajectory: Trajectory, verdicts: Sequence[Verdict], sample: Sample) -> Result:
    """A trajectory and the verdicts of all its images, as one record.

    Errors: ValueError for a judge without a yes or no.
    """
    if any(verdict.correct is None for verdict in verdicts):
        raise ValueError("these verdicts have no yes or no: they give no accuracy")
    assert len(verdicts) == len(trajectory.images), (len(verdicts), len(trajectory.images))
    rejected = [*trajectory.plan_rejected, *(t for s in trajectory.steps for t in s.rejected)]
    return Result(
        edit_view=sample.edit_view,
        set=sample.set,
        row=sample.entry.index,
        family=sample.entry.family,
        tag=str(sample.entry.row["tag"]),
        prompt=trajectory.prompt,
        seed=sample.seed,
        copy=sample.copy,
        stop=trajectory.stop.value,
        edits=len(trajectory.images) - 1,
        protocol_valid=all(turn.error is None for turn in trajectory.turns),
        kept=trajectory.kept,
        images=tuple(Judged(bool(v.correct), v.reason) for v in verdicts),
        looks=tuple(_look(step.turn) for step in trajectory.steps),
        malformed=tuple(t.error.value for t in (*rejected, *trajectory.turns) if t.error),
    )


def _look(turn) -> Look:
    if (said := turn.reflection) is None:
        return Look(None, None, None, turn.error.value)
    return Look(said.action, said.score, said.edit)


def result_from_line(line: str) -> Result:
    """The inverse of `to_line`. Errors: ValueError, KeyError or TypeError for a foreign line."""
    record = json.loads(line)
    images = tuple(Judged(**image) for image in record.pop("images"))
    looks = tuple(Look(**look) for look in record.pop("looks"))
    malformed = tuple(record.pop("malformed"))
    return Result(**record, images=images, looks=looks, malformed=malformed)


def read_results(path: str | Path) -> list[Result]:
    """All whole lines of a results.jsonl; [] if there is none. Errors: UserError with the line."""
    path = Path(path)
    if not path.exists():
        return []
    results = []
    for number, line in enumerate(_whole_lines(path.read_bytes()), start=1):
        try:
            results.append(result_from_line(line.decode()))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {number}, is damaged ({type(error).__name__}: {error})",
                "Remove the line and go on with --resume.",
            ) from error
    return results


def _whole_lines(data: bytes) -> list[bytes]:
    """The lines that end: a killed run may leave half a line behind."""
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


class ResultFile:
    """results.jsonl while a run writes it; `results` holds what it says so far.

    resume: go on after the whole lines that are there (half a line at the end is cut off).
    """

    def __init__(self, path: str | Path, *, resume: bool):
        self.path = Path(path)
        self.results = read_results(self.path) if resume else []
        kept = b"".join(_whole_lines(self.path.read_bytes())) if self.results else b""
        write_aside(self.path, kept)
        self._file = self.path.open("ab")

    def append(self, results: Sequence[Result]) -> None:
        """Write the lines at once; they are on the disk when this returns."""
        self._file.write("".join(result.to_line() for result in results).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.results += results

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
