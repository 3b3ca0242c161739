"""What became of one test row: one line of results.jsonl, the same on every machine and every day.

    result = result_of(trajectory, verdicts, sample)
    with ResultFile("outputs/eval/results.jsonl", resume=True) as file:
        file.append([result])
    result.correct_at(0), result.correct, result.protocol_valid      # first image, handed out, form

A line holds words and verdicts. Times are elsewhere (timing.json), so that two runs of one command
give one file. What hangs on single pixels is elsewhere too: another batch size moves a few of them
by one level, which changes no verdict but every hash. So hashes, graded scores and boxes have a
line of their own in images.jsonl beside it. `read_results` puts the two together; a file of an
earlier version has no images.jsonl. On a GPU rounding can change a word, where batches are others
or texts are said by other kernels (captured steps and eager ones).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.shapes.sets import EvalRow

if TYPE_CHECKING:
    from PIL.Image import Image

    from agent.types import Trajectory
    from eval.verdict import Verdict

IMAGES = "images.jsonl"  # beside results.jsonl


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


def candidate_place(key: Key, number: int) -> str:
    """Where, below the output folder, the trace of candidate `number` (1, 2, ...) is kept."""
    return f"{trace_place(key).replace('/traces/', '/candidates/')}/{number}"


def trace_place(key: Key) -> str:
    """Where, below the output folder, the trace of a sample is kept, if it is kept."""
    view, set_name, row, seed, copy = key
    return f"{set_name}-{view}/traces/{row:04d}-seed{seed}" + (f"-{copy}" if copy else "")


@dataclass(frozen=True)
class Box:
    """What a judge saw where. box: left, top, right, bottom as shares of the image's sides.

    score: the detector's confidence; None where it has none.
    """

    label: str
    box: tuple[float, float, float, float]
    score: float | None = None


@dataclass(frozen=True)
class Judged:
    """The verdict on one image. What is None (or without boxes) was not kept.

    score: graded, 1 exactly if correct. sha256: of the image's pixels, see `pixels_sha256`.
    """

    correct: bool
    reason: str
    score: float | None = None
    sha256: str | None = None
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True)
class Look:
    """One turn that counts. Look k is at image k. A malformed one has an error and nothing else."""

    action: str | None
    score: float | None
    edit: str | None
    error: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A further first image of the prompt (--best-of), and what was said at the one look at it
    (None if there was none)."""

    image: Judged
    look: Look | None


@dataclass(frozen=True)
class Result:
    """A judged trajectory. images[0] is the first image; `kept` is the one that is handed out.

    malformed: the code of every malformed turn that was sampled, those that were sampled anew too.
    candidates: first images beside images[0], see candidates.py.
    verifier: what judged, as `binding.verifier_sha256` has it; None in files of earlier versions.
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
    candidates: tuple[Candidate, ...] = ()
    verifier: str | None = None

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

    def check_whole(self) -> None:
        """ValueError unless the rounds add up: a first image and one for each edit that was drawn,
        each of them asked for by a look, and no look at an image that is not there."""
        edits = sum(look.action == "edit" for look in self.looks)
        if len(self.images) != self.edits + 1:
            raise ValueError(f"{len(self.images)} images, but {self.edits} edits were drawn")
        if not 0 <= self.kept < len(self.images):
            raise ValueError(f"image {self.kept} is handed out, of {len(self.images)}")
        if edits < self.edits:
            raise ValueError(f"{self.edits} edits were drawn, but {edits} looks ask for one")
        if len(self.looks) > len(self.images):
            raise ValueError(f"{len(self.looks)} looks at {len(self.images)} images")
        if self.stop == "done" and (not self.looks or self.looks[-1].action != "done"):
            raise ValueError("it stopped as done, but the look that says so is missing")

    @property
    def trace_folder(self) -> str:
        """Where, below the output folder, its trace is kept (image_0.png, ...) if it is kept."""
        return trace_place(self.key)

    def to_line(self) -> str:
        """Its line in results.jsonl: no hash, box or graded score, see the top of this file."""
        record = asdict(self)
        del record["verifier"]
        record["images"] = [{"correct": i.correct, "reason": i.reason} for i in self.images]
        del record["candidates"]
        if self.candidates:
            record["candidates"] = [
                {
                    "correct": one.image.correct,
                    "reason": one.image.reason,
                    "look": one.look and asdict(one.look),
                }
                for one in self.candidates
            ]
        return json.dumps(record, ensure_ascii=False) + "\n"

    def to_images_line(self) -> str:
        """Its line in images.jsonl: which pixels were judged, by what, and what it saw in them."""
        record = {"key": self.key, "verifier": self.verifier, "images": _seen(self.images)}
        if self.candidates:
            record["candidates"] = _seen([one.image for one in self.candidates])
        return json.dumps(record, ensure_ascii=False) + "\n"

    def with_images_line(self, record: Mapping[str, Any]) -> Result:
        """The result with what `to_images_line` kept. Errors: ValueError where the line is of
        another number of images, KeyError or TypeError where it is foreign."""
        images = _with_seen(self.images, record["images"])
        candidates = _with_seen([c.image for c in self.candidates], record.get("candidates", ()))
        return replace(
            self,
            verifier=record["verifier"],
            images=images,
            candidates=tuple(map(Candidate, candidates, (c.look for c in self.candidates))),
        )


def _seen(images: Sequence[Judged]) -> list[dict[str, Any]]:
    """What images.jsonl says of images."""
    return [
        {
            "sha256": image.sha256,
            "score": image.score,
            "boxes": [[box.label, *box.box, box.score] for box in image.boxes],
        }
        for image in images
    ]


def _with_seen(images: Sequence[Judged], kept: Sequence[Mapping[str, Any]]) -> tuple[Judged, ...]:
    """The inverse of `_seen`."""
    return tuple(
        replace(
            image,
            sha256=one["sha256"],
            score=one["score"],
            boxes=tuple(Box(b[0], tuple(b[1:5]), b[5]) for b in one["boxes"]),
        )
        for image, one in zip(images, kept, strict=True)
    )


def result_of(
    trajectory: Trajectory,
    verdicts: Sequence[Verdict],
    sample: Sample,
    verifier: str | None = None,
    candidates: Sequence[tuple[Trajectory, Verdict]] = (),
) -> Result:
    """A trajectory and the verdicts of all its images, as one record.

    candidates: see candidates.py, each with the verdict of its image.
    verifier: `binding.verifier_sha256` of the manifest of what judged.

    Errors: ValueError for a judge without a yes or no.
    """
    if any(verdict.correct is None for verdict in (*verdicts, *(v for _, v in candidates))):
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
        images=tuple(map(judged, trajectory.images, verdicts)),
        looks=tuple(_look(step.turn) for step in trajectory.steps),
        malformed=tuple(t.error.value for t in (*rejected, *trajectory.turns) if t.error),
        candidates=tuple(_candidate(one, verdict) for one, verdict in candidates),
        verifier=verifier,
    )


def _candidate(trajectory: Trajectory, verdict: Verdict) -> Candidate:
    looks = [_look(step.turn) for step in trajectory.steps]
    return Candidate(judged(trajectory.images[0], verdict), looks[0] if looks else None)


def judged(image: Image, verdict: Verdict) -> Judged:
    """A verdict bound to the image that it is about."""
    return Judged(
        correct=bool(verdict.correct),
        reason=verdict.reason,
        score=round(verdict.score, 6),
        sha256=pixels_sha256(image),
        boxes=boxes_of(verdict, image.size),
    )


def pixels_sha256(image: Image) -> str:
    """The hash of an image's size and RGB pixels: the same for a PNG and for what it was made of,
    whatever else the file says. The GenEval verifier's evidence has the same."""
    rgb = image.convert("RGB")
    return hashlib.sha256(f"{rgb.size}".encode() + rgb.tobytes()).hexdigest()


def boxes_of(verdict: Verdict, size: tuple[int, int]) -> tuple[Box, ...]:
    """What the evidence of a verdict (and of the terms of a sum) saw; size: width, height."""
    evidences = [verdict.evidence]
    evidences += [term["evidence"] for term in (verdict.evidence.get("terms") or {}).values()]
    found = []
    for evidence in evidences:
        width, height = (evidence.get("image") or {}).get("size") or size
        for mark in (m for key in ("detections", "words") for m in evidence.get(key) or ()):
            if not mark.get("box"):
                continue
            sides = (width, height, width, height)
            shares = [
                round(float(v) / side, 4) for v, side in zip(mark["box"], sides, strict=False)
            ]
            label = mark.get("text") or " ".join(filter(None, (mark.get("color"), mark["kind"])))
            score = mark.get("score")
            found.append(Box(label, tuple(shares), None if score is None else round(score, 4)))
    return tuple(found)


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
    candidates = tuple(
        Candidate(Judged(one["correct"], one["reason"]), one["look"] and Look(**one["look"]))
        for one in record.pop("candidates", ())
    )
    more = {"malformed": malformed, "candidates": candidates}
    return Result(**record, images=images, looks=looks, **more)


def read_results(path: str | Path) -> list[Result]:
    """All whole lines of a results.jsonl, with what images.jsonl says of them; [] if there
    is none. Errors: UserError with the line."""
    path = Path(path)
    if not path.exists():
        return []
    results = []
    for number, line in enumerate(_whole_lines(path.read_bytes()), start=1):
        with _named(path, number):
            result = result_from_line(line.decode())
            result.check_whole()
            results.append(result)
    beside = path.with_name(IMAGES)
    if not beside.exists():
        return results
    kept: dict[Key, tuple[int, dict[str, Any]]] = {}
    for number, line in enumerate(_whole_lines(beside.read_bytes()), start=1):
        with _named(beside, number):
            record = json.loads(line)
            kept[tuple(record["key"])] = number, record
    for place, result in enumerate(results):
        if result.key in kept:
            number, record = kept[result.key]
            with _named(beside, number):
                results[place] = result.with_images_line(record)
    return results


@contextmanager
def _named(path: Path, number: int) -> Iterator[None]:
    """Say in which line of which file it is that something cannot be read."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{path}, line {number}, is damaged ({type(error).__name__}: {error})",
            "Remove the line and go on with --resume.",
        ) from error


def _whole_lines(data: bytes) -> list[bytes]:
    """The lines that end: a killed run may leave half a line behind."""
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


class ResultFile:
    """results.jsonl and images.jsonl while a run writes them; `results` holds what they say so far.

    resume: go on after the whole lines that are there (half a line at the end is cut off).
    """

    def __init__(self, path: str | Path, *, resume: bool):
        self.path = Path(path)
        self.results = read_results(self.path) if resume else []
        kept = b"".join(_whole_lines(self.path.read_bytes())) if self.results else b""
        write_aside(self.path, kept)
        beside = self.path.with_name(IMAGES)
        known = [result for result in self.results if result.verifier or result.images[0].sha256]
        write_aside(beside, "".join(result.to_images_line() for result in known))
        self._file, self._images = self.path.open("ab"), beside.open("ab")

    def append(self, results: Sequence[Result]) -> None:
        """Write the lines at once; they are on the disk when this returns."""
        # images.jsonl first: a line of results.jsonl is then never without its other half
        for file, line in ((self._images, Result.to_images_line), (self._file, Result.to_line)):
            file.write("".join(map(line, results)).encode())
            file.flush()
            os.fsync(file.fileno())
        self.results += results

    def sort(self, order: Sequence[Key]) -> None:
        """Put the lines in the order of these keys, which are those of all results: what was made
        again then stands where it stood, and the files are those of a run without an interruption.
        """
        place = {key: number for number, key in enumerate(order)}
        self.results.sort(key=lambda result: place[result.key])
        known = [result for result in self.results if result.verifier or result.images[0].sha256]
        self._images.close()
        self._file.close()
        write_aside(self.path.with_name(IMAGES), "".join(r.to_images_line() for r in known))
        write_aside(self.path, "".join(r.to_line() for r in self.results))
        self._file = self.path.open("ab")
        self._images = self.path.with_name(IMAGES).open("ab")

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._images.close()
