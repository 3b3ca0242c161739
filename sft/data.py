"""What SFT learns from: trajectories as records, whichever schema they lie in, checked row by row.

    found = read_dataset("data/sft")            # or a .jsonl file, a folder of traces, a hub id
    found.records[0].turns[0].text              # texts are in memory, pictures are read anew
    for violation in found.violations: ...      # every rule that a row breaks; it is left out then
    train, held_out = split(found.records, 0.02)

Schemas that read into one `Record`: the release's Parquet (data_release.py), our own as JSONL with
pictures beside it or as Parquet, and the agent's traces (all data_own.py). A record says what a
trajectory says, image number k being the k-th picture (the user's or the first one is 0):

    first turn comes ...         turn r looks at     turn r draws
    before image 0 (`planned`)   image r - 1         image r
    after image 0                image r             image r + 1
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from agent.types import Reflection, Seen
from agent.views import current
from sft.pictures import BadRow, ImageCheck, Picture, Problem, Rule
from umm_reflect.context import TextSegment
from umm_reflect.errors import UserError

Task = Literal["t2i", "edit"]
_SURROGATE = re.compile("[\ud800-\udfff]")  # no tokenizer can read it
MAX_BAD = 0.01  # share of the rows that may be left out before a run refuses to start


@dataclass(frozen=True)
class Violation:
    """A rule that one row breaks. where: 'shard-00000.parquet row 3', 'trajectories.jsonl:4'."""

    where: str
    uid: str
    rule: Rule
    detail: str

    def __str__(self) -> str:
        return f"{self.where} ({self.uid or 'no uid'}): {self.rule}: {self.detail}"


@dataclass(frozen=True)
class Said:
    """A turn: its exact text, what that says, and whether it is learned.

    transition_kind, milestone: of the release's planned progressions, else "" and 0.
    """

    text: str
    reflection: Reflection
    learn: bool = True
    transition_kind: str = ""
    milestone: int = 0


@dataclass(frozen=True)
class Record:
    """One trajectory (or, without turns, an anchor: a prompt and an image).

    planned: the first turn comes before image 0. open: it may end with an edit that was not drawn.
    system_prompt: as stored; None takes the one of the run. subtype, plan, payload_sources: what
    the release says of its rows.
    """

    uid: str
    task: Task
    prompt: str
    turns: tuple[Said, ...]
    images: tuple[Picture, ...]
    planned: bool = False
    system_prompt: str | None = None
    subtype: str = ""
    plan: str = ""
    payload_sources: tuple[str, ...] = ()
    open: bool = False

    @property
    def first_drawn(self) -> int:
        """Number of the first image that was drawn: 1 where image 0 is the user's."""
        return int(self.task == "edit")

    def draws(self, turn: int) -> int:
        """The number of the image that an edit turn draws."""
        return turn + (not self.planned)


def expected(task: Task, planned: bool, turn: int) -> tuple[int, str]:
    """(round, what [SOURCE_IMAGE] says) of a turn: the answer of `agent.views.current`."""
    nothing = TextSegment(())
    looks = turn - planned
    seen = Seen(
        None,
        nothing,
        editing=task == "edit",
        plan=nothing if planned and turn else None,
        images=(nothing,) * (looks + 1),
        turns=(nothing,) * max(looks, 0),
    )
    return current(seen)


# --- reading --------------------------------------------------------------------------------------

Reading = tuple[str, str, Record | None, list[Problem]]  # where, uid, the record or its problems


@dataclass(frozen=True)
class Found:
    """What a dataset holds. rows: how many rows were read; bad: how many of them were left out."""

    records: tuple[Record, ...]
    anchors: tuple[Record, ...]
    violations: tuple[Violation, ...]
    rows: int
    bad: int
    schema: str

    def refuse_more_than(self, max_bad: float) -> Found:
        """Itself. Errors: UserError when a larger share of the rows than `max_bad` was left out."""
        if self.rows and self.bad > max_bad * self.rows:
            first = "; ".join(str(violation) for violation in self.violations[:3])
            raise UserError(
                f"{self.bad} of {self.rows} rows break a rule, more than {max_bad:.2%}: {first}",
                "See all of them with: umm-reflect data check",
            )
        return self


class Quarantine:
    """Rows that turn out bad while a run goes on: counted, left out, and too many end the run."""

    def __init__(self, total: int, max_bad: float = MAX_BAD):
        self.total, self.max_bad = total, max_bad
        self.violations: list[Violation] = []

    def add(self, violation: Violation) -> None:
        """Note a row. Errors: UserError once more than the allowed share has been noted."""
        self.violations.append(violation)
        uids = {v.uid for v in self.violations}
        if len(uids) > self.max_bad * self.total:
            raise UserError(
                f"{len(uids)} of {self.total} rows turned out bad, more than {self.max_bad:.2%}; "
                f"the last: {violation}",
                "See all of them with: umm-reflect data check",
            )


def scan(
    source: str | Path, images: ImageCheck = "decode", workers: int = 1, processes: int = 0
) -> Iterator[tuple[Reading, bool]]:
    """Each row of a dataset in order, and whether it is an anchor.

    workers: threads that read and decode images (a few rows ahead, so little is in memory).
    processes: that share the files of our own Parquet schema; texts then arrive file by file.
    Errors: UserError for a folder that is no dataset, or a file that cannot be read at all.
    """
    uids: dict[tuple[bool, str], str] = {}
    for reading, anchor in _examined_readings(source, images, workers, processes):
        where, uid, _, problems = reading
        first = uids.setdefault((anchor, uid), where)
        if uid and first != where:
            problems.append((Rule.UID, f"{first} has the same uid"))
            reading = (where, uid, None, problems)
        yield reading, anchor


def _examined_readings(
    source: str | Path, images: ImageCheck, workers: int, processes: int
) -> Iterator[tuple[Reading, bool]]:
    files = parquet_files(Path(source))
    if processes > 1 and len(files) > 1:
        examined = partial(_examined_file, images=images)
        with ProcessPoolExecutor(min(processes, len(files))) as pool:
            for some in pool.map(examined, files):
                yield from some
        return
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        waiting: deque[Future] = deque()
        for reading, anchor in _readings(source, images != "none"):
            waiting.append(pool.submit(_examined, reading, anchor, images))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _examined_file(path: Path, images: ImageCheck) -> list[tuple[Reading, bool]]:
    from sft.data_own import read_parquet

    rows = read_parquet(path, images != "none")
    return [_examined(reading, anchor, images) for reading, anchor in rows]


def parquet_files(source: Path) -> list[Path]:
    """The files of a folder in our own Parquet schema; none where it is no such folder."""
    return sorted(source.glob("trajectories*.parquet"))


def _examined(reading: Reading, anchor: bool, images: ImageCheck) -> tuple[Reading, bool]:
    where, uid, record, problems = reading
    if record:
        said = [text for turn in record.turns for text in (turn.text, turn.reflection.edit)]
        if any(map(_SURROGATE.search, [record.prompt, record.system_prompt or "", *said])):
            problems.append((Rule.UNREADABLE, "a text holds half of a surrogate pair"))
    pictures = []
    for number, picture in enumerate(record.images if record else ()):
        try:
            pictures.append(picture.examined(images))
        except BadRow as error:
            problems.append((error.rule, f"image {number}: {error.detail}"))
    good = record is not None and not problems
    return (where, uid, replace(record, images=tuple(pictures)) if good else None, problems), anchor


def read_dataset(
    source: str | Path,
    images: ImageCheck = "headers",
    *,
    workers: int = 1,
    processes: int = 0,
    keep_pictures: bool = True,
) -> Found:
    """The whole dataset: records that keep every rule, and what the others break.

    Texts stay in memory (about 5 KB a trajectory). Pictures are on the disk and are read anew; only
    those that a hub id streams stay in memory too, unless `keep_pictures` is off. Errors: as
    `scan`.
    """
    records: list[Record] = []
    anchors: list[Record] = []
    violations: list[Violation] = []
    rows = bad = 0
    readings = scan(source, images, workers, processes)
    for reading, anchor in tqdm(readings, desc=str(source), unit=" rows", disable=None):
        where, uid, record, problems = reading
        rows += 1
        bad += bool(problems)
        violations += [Violation(where, uid, rule, detail) for rule, detail in problems]
        if record is not None:
            if not keep_pictures:
                bare = tuple(replace(picture, data=None) for picture in record.images)
                record = replace(record, images=bare)
            (anchors if anchor else records).append(record)
    if not rows:
        raise UserError(f"{source} holds no rows", "Name a folder with trajectories.")
    return Found(tuple(records), tuple(anchors), tuple(violations), rows, bad, schema_of(source))


def schema_of(source: str | Path) -> str:
    """'parquet', 'release', 'jsonl', 'traces' or 'hub'. Errors: UserError for anything else."""
    from umm_reflect.hub import is_hub_id

    path = Path(source)
    if path.suffix == ".jsonl" and path.is_file():
        return "jsonl"
    if path.is_dir():
        if parquet_files(path):
            return "parquet"
        if any(path.glob("trajectory_parquet/*.parquet")) or any(path.glob("*.parquet")):
            return "release"
        if any(path.glob("*.jsonl")):
            return "jsonl"
        if (path / "trace.json").exists() or any(path.glob("*/trace.json")):
            return "traces"
        raise UserError(
            f"{path} holds no trajectories",
            "Expected trajectory_parquet/*.parquet, trajectories*.parquet, *.jsonl, */trace.json.",
        )
    if is_hub_id(str(source)):
        return "hub"
    raise UserError(
        f"{path} does not exist", "Name a folder, a .jsonl file or a hub id (owner/data)."
    )


def _readings(source: str | Path, with_images: bool) -> Iterable[tuple[Reading, bool]]:
    from sft import data_hub, data_own, data_release

    schema, path = schema_of(source), Path(source)
    if schema == "release":
        rows = data_release.read_trajectories(path, with_images)
        yield from ((reading, False) for reading in rows)
        yield from ((reading, True) for reading in data_release.read_anchors(path, with_images))
    elif schema == "hub":
        yield from ((reading, False) for reading in data_hub.stream_trajectories(str(source)))
        yield from ((reading, True) for reading in data_hub.stream_anchors(str(source)))
    elif schema == "parquet":
        for file in parquet_files(path):
            yield from data_own.read_parquet(file, with_images)
    elif schema == "jsonl":
        yield from data_own.read_jsonl(path)
    else:
        yield from ((reading, False) for reading in data_own.read_traces(path))


# --- held-out split -------------------------------------------------------------------------------


def split(
    records: Sequence[Record], share: float, seed: int = 0
) -> tuple[list[Record], list[Record]]:
    """(to train on, held out): whole trajectories by the hash of their uid, order kept.

    At least one is held out where share is above 0 and there are two. Neither the order of the
    records nor the number of processes matters. Errors: ValueError for a share outside [0, 1).
    """
    if not 0 <= share < 1:
        raise ValueError(f"the held-out share is {share}; give 0 or more, and less than 1")
    count = round(share * len(records))
    if share and len(records) > 1:
        count = min(max(count, 1), len(records) - 1)

    def lot(record: Record) -> str:
        return hashlib.sha256(f"{seed} {record.uid}".encode()).hexdigest()

    chosen = {record.uid for record in sorted(records, key=lot)[:count]}
    train = [record for record in records if record.uid not in chosen]
    return train, [record for record in records if record.uid in chosen]
