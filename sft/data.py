"""What SFT learns from: trajectories as records, whichever schema they lie in, checked row by row.

    found = read_dataset("data/sft")            # or a .jsonl file, a folder of traces, a hub id
    found.records[0].turns[0].text              # texts are in memory, pictures are read anew
    for violation in found.violations: ...      # every rule that a row breaks; it is left out then
    train, held_out = split(found.records, 0.02)

Three schemas read into one `Record`: the release's Parquet (data_release.py), JSONL with pictures
beside it and the agent's own traces (both data_own.py). A record says what a trajectory says, image
number k being the k-th picture (the user's or the first one is 0):

    first turn comes ...         turn r looks at     turn r draws
    before image 0 (`planned`)   image r - 1         image r
    after image 0                image r             image r + 1
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tqdm import tqdm

from agent.types import Reflection, Seen
from agent.views import current
from umm_reflect.context import TextSegment
from umm_reflect.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

Task = Literal["t2i", "edit"]
ImageCheck = Literal["decode", "headers", "none"]

MAX_SIDE = 8192  # pixels; more is no picture to learn from, and 20,000 px would fill the memory
_SURROGATE = re.compile("[\ud800-\udfff]")  # no tokenizer can read it
MAX_BAD = 0.01  # share of the rows that may be left out before a run refuses to start


class Rule(StrEnum):
    """What a row must keep. The value is the name that `umm-reflect data check` prints."""

    UNREADABLE = "unreadable"  # no JSON, a missing field, a value of another type
    UNKNOWN_KEY = "unknown_key"
    UID = "uid"  # empty, or used by an earlier row
    TASK = "task"  # neither t2i nor edit
    PROMPT = "prompt"  # empty
    SYSTEM_PROMPT = "system_prompt"  # of another version, or without its format sentence
    LENGTHS = "lengths"  # the lists of a row do not have one length, or the counts differ
    IMAGE_PRESENCE = "image_presence"  # name, hash and size of an image disagree, or it is not due
    SOURCE_STEP = "source_step"  # the source of an editing task is not as it must be
    ROUND = "round"
    SOURCE_REFERENCE = "source_reference"  # not the image that is current
    ROLE = "role"
    ACTION = "action"  # unknown, or the text says another one
    LAST_NOT_DONE = "last_not_done"  # a trajectory ends with exactly one done
    NO_IMAGE = "no_image"  # nothing was drawn
    LOSS_FLAG = "loss_flag"  # not exactly at the last image that was drawn
    TEXT = "text"  # a turn is not of the protocol; the detail begins with the protocol's code
    PAYLOAD = "payload"  # the text's edit is not the one that the row holds, nor its beginning
    PLAN = "plan"  # the milestones of a planned progression
    MALFORMED_TURN = "malformed_turn"  # a trace holds a turn that the agent could not read
    IMAGE_MISSING = "image_missing"
    IMAGE_CORRUPT = "image_corrupt"
    IMAGE_TOO_LARGE = "image_too_large"
    IMAGE_HASH = "image_hash"
    PATH = "path"  # absolute, or outside the folder of the data
    ANCHOR = "anchor"  # disagrees with the list of allowed anchors


Problem = tuple[Rule, str]


@dataclass(frozen=True)
class Violation:
    """A rule that one row breaks. where: 'shard-00000.parquet row 3', 'trajectories.jsonl:4'."""

    where: str
    uid: str
    rule: Rule
    detail: str

    def __str__(self) -> str:
        return f"{self.where} ({self.uid or 'no uid'}): {self.rule}: {self.detail}"


class BadRow(UserError):
    """A row (or the image of one) that cannot be used, with the rule that it breaks."""

    def __init__(self, rule: Rule, detail: str):
        super().__init__(f"an image cannot be used: {rule}: {detail}", "See umm-reflect data check")
        self.rule, self.detail = rule, detail


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
class Picture:
    """Where the bytes of an image are; they are read anew each time.

    file: an image file, or with `cell` a Parquet file: (row group, row in it, place in the list).
    data: the bytes themselves, where they came over the wire or with their row.
    size: (height, width), upright, once it was examined.
    """

    file: str = ""
    cell: tuple[int, int, int] | None = None
    sha256: str = ""
    learn: bool = True
    data: bytes | None = None
    size: tuple[int, int] | None = None

    def read(self) -> bytes:
        """The encoded bytes. Errors: OSError for a missing file, ValueError for an empty cell."""
        if self.data is not None:
            return self.data
        if self.cell is None:
            return Path(self.file).read_bytes()
        group, row, place = self.cell
        value = image_column(self.file, group)[row][place].as_py()
        value = value.get("bytes") if isinstance(value, dict) else value
        if not value:
            raise ValueError("the cell is empty")
        return value

    def load(self) -> Image:
        """The decoded picture, upright, RGB. Errors: BadRow with the rule that it breaks."""
        from umm_reflect.images import load_image

        data, _ = self._checked()
        try:
            return load_image(data)
        except UserError as error:
            raise BadRow(Rule.IMAGE_CORRUPT, error.what) from None

    def examined(self, check: ImageCheck) -> Picture:
        """Itself with its size noted, without bytes that lie on the disk. "headers": hash and size
        are checked; "decode": every pixel too.

        Errors: BadRow with the rule that it breaks.
        """
        if check == "none":
            return self
        if check == "decode":
            self.load()
        size = self._checked()[1]
        return replace(self, size=size, data=None if self.cell else self.data)

    def _checked(self) -> tuple[bytes, tuple[int, int]]:
        """The bytes and (height, width), once hash and size are right."""
        from PIL import Image

        try:
            data = self.read()
        except (OSError, ValueError, IndexError) as error:
            why = "does not exist" if isinstance(error, FileNotFoundError) else str(error)
            raise BadRow(Rule.IMAGE_MISSING, f"{Path(self.file).name} {why}") from None
        if self.sha256 and hashlib.sha256(data).hexdigest() != self.sha256:
            raise BadRow(Rule.IMAGE_HASH, f"{len(data)} bytes with another sha256 than is noted")
        try:
            height, width = upright_size(data)
        except Image.DecompressionBombError as error:
            raise BadRow(Rule.IMAGE_TOO_LARGE, str(error).split(",")[0]) from None
        except (OSError, SyntaxError, ValueError) as error:
            raise BadRow(Rule.IMAGE_CORRUPT, str(error).replace("\n", " ")[:200]) from None
        if max(height, width) > MAX_SIDE:
            what = f"{width}x{height} px; at most {MAX_SIDE} a side"
            raise BadRow(Rule.IMAGE_TOO_LARGE, what)
        return data, (height, width)


def upright_size(data: bytes) -> tuple[int, int]:
    """(height, width) of an encoded image after it is turned upright, from its header."""
    from PIL import ExifTags, Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(io.BytesIO(data)) as image:
            on_its_side = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
            return image.size if on_its_side else (image.height, image.width)


@lru_cache(maxsize=2)
def image_column(file: str, group: int):
    """The images of one row group, all in memory; the last two groups are kept.

    For one image out of many. A scan takes images with their rows, a few at a time.
    """
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as parquet:
        return parquet.read_row_group(group, columns=["step_image_list"])["step_image_list"]


@dataclass(frozen=True)
class Record:
    """One trajectory (or, without turns, an anchor: a prompt and an image).

    planned: the first turn comes before image 0. system_prompt: as stored; None takes the one of
    the run. subtype, plan, payload_sources: what the release says of its rows.
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
    source: str | Path, images: ImageCheck = "decode", workers: int = 1
) -> Iterator[tuple[Reading, bool]]:
    """Each row of a dataset in order, and whether it is an anchor.

    workers: threads that read and decode images (a few rows ahead, so little is in memory).
    Errors: UserError for a folder that is no dataset, or a file that cannot be read at all.
    """
    uids: dict[tuple[bool, str], str] = {}
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        waiting: deque[Future] = deque()
        for reading, anchor in _readings(source, images != "none"):
            where, uid, _, problems = reading
            first = uids.setdefault((anchor, uid), where)
            if uid and first != where:
                problems.append((Rule.UID, f"{first} has the same uid"))
            waiting.append(pool.submit(_examined, reading, anchor, images))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


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
    readings = scan(source, images, workers)
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
    """'release', 'jsonl', 'traces' or 'hub'. Errors: UserError for anything else."""
    from umm_reflect.hub import is_hub_id

    path = Path(source)
    if path.suffix == ".jsonl" and path.is_file():
        return "jsonl"
    if path.is_dir():
        if any(path.glob("trajectory_parquet/*.parquet")) or any(path.glob("*.parquet")):
            return "release"
        if any(path.glob("*.jsonl")):
            return "jsonl"
        if (path / "trace.json").exists() or any(path.glob("*/trace.json")):
            return "traces"
        raise UserError(
            f"{path} holds no trajectories",
            "Expected trajectory_parquet/*.parquet, *.jsonl, or */trace.json.",
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
    elif schema == "jsonl":
        yield from ((reading, False) for reading in data_own.read_jsonl(path))
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
