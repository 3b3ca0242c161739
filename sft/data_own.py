"""Our own schemas: JSONL with pictures beside it, the same in Parquet, and the agent's folders.

    for (where, uid, record, problems), is_anchor in read_jsonl("data/mine"): ...
    write_jsonl(records, "data/mine")
    write_parquet(records, "data/mine/trajectories-00000.parquet")

One line of `trajectories.jsonl` is one trajectory; turn k looks at image k and draws image k + 1:

    {"uid": "circles-1", "task": "t2i", "prompt": "two red circles",
     "images": ["images/circles-1_0.png", {"file": "images/circles-1_1.png", "learn": false}],
     "turns": [
       {"thinking": "One circle.", "score": 5, "action": "edit", "edit": "Add a red circle."},
       {"thinking": "Two red circles.", "score": 10, "action": "done"}]}

uid, task ("t2i" draws image 0 from the prompt, in "edit" it is the user's), prompt, images and
turns are needed. A path is relative to the file and stays below its folder. A t2i line with one
image and no turns is an anchor: a prompt and its image alone. Optional:

    learn          of a turn or an image: false makes it a condition that carries no loss
    open           of the trajectory: true lets it end with an edit that was not drawn
    sha256         of an image: checked when it is read
    plan           of a t2i trajectory: the turn before image 0, which is drawn from its edit
    system_prompt  of the trajectory; otherwise the one of the run is taken
    text           of a turn: its exact text, where it is not the canonical one
    subtype, milestone_plan, payload_sources; transition_kind and milestone_index of a turn: what
                   the release's schema says beyond ours

In Parquet a row holds such a line as text, `trajectory`, whose images have no file, and their bytes
as a list, `images`. Files are named trajectories*.parquet; many processes can write one each.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from agent.protocol import canonical, parse_schema
from agent.types import ProtocolError, Reflection
from sft.data import Picture, Problem, Reading, Record, Rule, Said, expected
from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.settings import nearest

TRAJECTORIES = "trajectories.jsonl"
TABLE_ROWS = 1000  # of a Parquet file: as many pictures are in memory while it is written
ROW_GROUP = 32  # a reader of one image reads those of its whole group
RECORD_KEYS = (
    *("uid", "task", "prompt", "images", "turns", "plan", "system_prompt", "open"),
    *("subtype", "milestone_plan", "payload_sources"),
)
TURN_KEYS = (
    *("thinking", "score", "action", "edit", "learn", "text"),
    *("transition_kind", "milestone_index"),
)
IMAGE_KEYS = ("file", "learn", "sha256")


# --- reading --------------------------------------------------------------------------------------


def read_jsonl(source: str | Path) -> Iterator[tuple[Reading, bool]]:
    """The lines of a .jsonl file, or of all of a folder's, and whether each is an anchor. Errors:
    OSError as the system's.
    """
    source = Path(source)
    for path in sorted(source.glob("*.jsonl")) if source.is_dir() else [source]:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    found = read_line(line, _beside(path.parent))
                    yield _reading(f"{path.name}:{number}", *found)


def read_parquet(path: Path, with_images: bool = True) -> Iterator[tuple[Reading, bool]]:
    """The rows of one file, and whether each is an anchor. with_images: pictures hold their bytes.

    Errors: UserError for a file that cannot be read.
    """
    from sft.data_release import parquet_rows

    for number, values, at in parquet_rows(path, ("trajectory",), with_images, "images"):

        def place(image: dict[str, Any], number: int, problems: list[Problem], at=at) -> Picture:
            learn = bool(image.get("learn", True))
            return replace(at(number, image.get("sha256", "")), learn=learn)

        found = read_line(values["trajectory"] or "", place)
        yield _reading(f"{path.name} row {number}", *found)


def _reading(
    where: str, uid: str, record: Record | None, problems: list[Problem]
) -> tuple[Reading, bool]:
    anchor = record is not None and not record.turns
    return (where, uid, None if problems else record, problems), anchor


Place = Callable[[dict[str, Any], int, list[Problem]], Picture | None]  # image, its number, ...


def read_line(line: bytes | str, place: Place) -> tuple[str, Record | None, list[Problem]]:
    """(uid, record, problems) of one line. place: where a picture is, or what is wrong."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return "", None, [(Rule.UNREADABLE, f"no JSON: {error}")]
    if not isinstance(entry, dict):
        return "", None, [(Rule.UNREADABLE, "no JSON object")]
    problems = _unknown(entry, RECORD_KEYS, "")
    uid = entry.get("uid")
    uid = uid if isinstance(uid, str) else ""
    try:
        return uid, _record(entry, place, problems), problems
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        return uid, None, [*problems, (Rule.UNREADABLE, what)]


def _unknown(entry: Mapping[str, Any], known: Iterable[str], at: str) -> list[Problem]:
    problems = []
    for key in entry:
        if key not in known:
            hint = nearest(key, known)
            meant = f"; did you mean {hint!r}?" if hint else ""
            problems.append((Rule.UNKNOWN_KEY, f"{at}{key!r}{meant}"))
    return problems


def _record(entry: dict[str, Any], place: Place, problems: list[Problem]) -> Record:
    uid, task, prompt = entry["uid"], entry["task"], entry["prompt"]
    if not (isinstance(uid, str) and uid):
        problems.append((Rule.UID, f"{uid!r} is no text, or empty"))
    if task not in ("t2i", "edit"):
        problems.append((Rule.TASK, f"{task!r} is neither t2i nor edit"))
    if not (isinstance(prompt, str) and prompt.strip()):
        problems.append((Rule.PROMPT, f"{prompt!r} is no text, or empty"))
    plan, given = entry.get("plan"), entry["turns"]
    if plan and task == "edit":
        problems.append((Rule.TASK, "an editing task has no plan: its first turn sees the image"))
    images = [_image(image, k, place, problems) for k, image in enumerate(entry["images"])]
    anchor = task == "t2i" and not given and not plan and len(images) == 1
    if len(images) != len(given) and not anchor:
        counts = f"{len(given)} turns for {len(images)} images; every image has its turn"
        problems.append((Rule.LENGTHS, counts))
    if len(images) < 1 + (task == "edit" and not entry.get("open")):
        problems.append((Rule.NO_IMAGE, "no image was drawn"))
    entries = [plan, *given] if plan else list(given)
    turns = [_turn(turn, k, task, bool(plan), problems) for k, turn in enumerate(entries)]
    actions = [turn.get("action") for turn in entries]
    done, last = actions.count("done"), actions[-1] if actions else ""
    if entry.get("open") and not anchor:
        if done > (last == "done"):
            problems.append((Rule.LAST_NOT_DONE, f"actions {', '.join(map(str, actions))}"))
    elif (done != 1 or last != "done") and not anchor:
        said = ", ".join(map(str, actions)) or "none"
        problems.append((Rule.LAST_NOT_DONE, f"actions {said}; expected one done, as the last"))
    return Record(
        uid=uid,
        task=task,
        prompt=prompt,
        turns=tuple(turn for turn in turns if turn),
        images=tuple(image for image in images if image),
        planned=bool(plan),
        system_prompt=entry.get("system_prompt"),
        subtype=entry.get("subtype", ""),
        plan=entry.get("milestone_plan", ""),
        payload_sources=tuple(entry.get("payload_sources", ())),
        open=bool(entry.get("open", False)),
    )


def _image(
    image: str | dict[str, Any], number: int, place: Place, problems: list[Problem]
) -> Picture | None:
    image = {"file": image} if isinstance(image, str) else image
    problems += _unknown(image, IMAGE_KEYS, "image: ")
    return place(image, number, problems)


def _beside(folder: Path) -> Place:
    """Pictures in files whose paths are relative to a folder."""

    def place(image: dict[str, Any], number: int, problems: list[Problem]) -> Picture | None:
        name = image["file"]
        if PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive:
            problems.append((Rule.PATH, f"{name} is absolute; write it relative to the file"))
            return None
        if ".." in re.split(r"[/\\]", name):
            problems.append((Rule.PATH, f"{name} leads out of the folder of the data"))
            return None
        sha, learn = image.get("sha256", ""), bool(image.get("learn", True))
        return Picture(str(folder / name), sha256=sha, learn=learn)

    return place


def _turn(
    turn: dict[str, Any], index: int, task: str, planned: bool, problems: list[Problem]
) -> Said | None:
    problems += _unknown(turn, TURN_KEYS, f"turn {index}: ")
    number, source = expected("edit" if task == "edit" else "t2i", planned, index)
    action, edit = turn["action"], turn.get("edit") or ""
    if action not in ("edit", "done"):
        problems.append((Rule.ACTION, f"turn {index}: {action!r} is neither edit nor done"))
        return None
    if (action == "done") != (edit == ""):
        what = "has no edit" if action == "edit" else f"has the edit {edit[:60]!r}"
        problems.append((Rule.PAYLOAD, f"turn {index}: {action} {what}"))
        return None
    score = turn["score"]
    if isinstance(score, bool) or not isinstance(score, int | float):
        problems.append((Rule.TEXT, f"{ProtocolError.SCORE_FORMAT}: turn {index}: {score!r}"))
        return None
    reflection = Reflection(turn["thinking"], score, action, edit)
    text = turn.get("text") or canonical(reflection, number, source)
    read = parse_schema(text, number, source, decimals=True)
    if read != reflection:
        code = read if isinstance(read, ProtocolError) else ProtocolError.NOT_CANONICAL
        problems.append((Rule.TEXT, f"{code}: turn {index}"))
        return None
    return Said(
        text,
        reflection,
        bool(turn.get("learn", True)),
        turn.get("transition_kind", ""),
        turn.get("milestone_index", 0),
    )


def read_traces(root: Path) -> Iterator[Reading]:
    """The agent's own runs: a folder of a trace, or all traces one level below `root`."""
    folders = [root] if (root / "trace.json").exists() else sorted(root.glob("*/trace.json"))
    for path in folders:
        folder = path.parent if path.name == "trace.json" else path
        yield read_trace(folder, root)


def read_trace(folder: Path, root: Path) -> Reading:
    """One trace as a record; its uid is its place below `root` (the folder's own name for root)."""
    from agent import trace

    uid = folder.name if folder == root else folder.relative_to(root).as_posix()
    try:
        run = trace.read_record(folder)
        entries = [*([run["plan"]] if run["plan"] else []), *(s["turn"] for s in run["steps"])]
        files = [run["source"], (run["first"] or {}).get("image")]
        files += [(step["transition"] or {}).get("image") for step in run["steps"]]
        editing, planned = run["source"] is not None, run["plan"] is not None
        turns, problems = _trace_turns(entries, "edit" if editing else "t2i", planned)
        place, names = _beside(folder), [name for name in files if name]
        images = tuple(_image(name, k, place, problems) for k, name in enumerate(names))
    except (UserError, KeyError, TypeError, AttributeError) as error:
        return uid, uid, None, [(Rule.UNREADABLE, str(error))]
    if editing and run["first"]:
        problems.append((Rule.TASK, "its first image was drawn from the prompt without a turn"))
    if run["stop"] != "done":
        problems.append((Rule.LAST_NOT_DONE, f"the run stopped at {run['stop']}"))
    elif len(images) != len(turns) - planned:
        problems.append((Rule.LENGTHS, f"{len(images)} images, {len(turns)} turns"))
    if not any(problems) and len(images) < 1 + editing:
        problems.append((Rule.NO_IMAGE, "no image was drawn"))
    task, prompt = "edit" if editing else "t2i", run["prompt"]
    record = Record(uid, task, prompt, tuple(turns), images, planned)
    return uid, uid, None if problems else record, problems


def _trace_turns(entries, task, planned) -> tuple[list[Said], list[Problem]]:
    turns: list[Said] = []
    problems: list[Problem] = []
    for index, entry in enumerate(entries):
        number, source = expected(task, planned, index)
        if entry["said"] is None:
            problems.append((Rule.MALFORMED_TURN, f"turn {index}: {entry['outcome']['error']}"))
            continue
        read = parse_schema(entry["said"], number, source)
        if isinstance(read, ProtocolError):
            problems.append((Rule.TEXT, f"{read}: turn {index}"))
            continue
        turns.append(Said(entry["said"], read))
    return turns, problems


# --- writing --------------------------------------------------------------------------------------


def write_jsonl(records: Iterable[Record], folder: str | Path) -> int:
    """Write `trajectories.jsonl` and images/ into a new or empty folder; how many lines it has.

    Images keep their bytes. The JSONL comes last, written aside and renamed. Errors: UserError
    where the folder holds something; OSError as the system's.
    """
    folder = empty_folder(folder)
    lines = []
    for record in records:
        images = []
        for number, picture in enumerate(record.images):
            data = picture.read()
            name = f"images/{safe_name(record.uid)}_{number}{_suffix(data)}"
            write_aside(folder / name, data)
            images.append({"file": name, "sha256": hashlib.sha256(data).hexdigest()})
        lines.append(json.dumps(line_of(record, images), ensure_ascii=False))
    write_aside(folder / TRAJECTORIES, "".join(f"{line}\n" for line in lines))
    return len(lines)


def write_tables(records: Iterable[Record], folder: str | Path, rows: int = TABLE_ROWS) -> int:
    """Write trajectories-00000.parquet and so on into a new or empty folder; how many rows."""
    folder, count = empty_folder(folder), 0
    some = iter(records)
    while part := list(itertools.islice(some, rows)):
        write_parquet(part, folder / f"trajectories-{count // rows:05d}.parquet")
        count += len(part)
    return count


def write_parquet(records: Iterable[Record], path: str | Path) -> int:
    """Write one file trajectories*.parquet, aside and renamed; how many rows it has.

    Images keep their bytes, which are not compressed again.
    """
    import pyarrow
    from pyarrow.parquet import write_table

    lines, images = [], []
    for record in records:
        data = [picture.read() for picture in record.images]
        hashes = [{"sha256": hashlib.sha256(one).hexdigest()} for one in data]
        lines.append(json.dumps(line_of(record, hashes), ensure_ascii=False))
        images.append(data)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    kinds = {"trajectory": pyarrow.string(), "images": pyarrow.list_(pyarrow.binary())}
    table = pyarrow.table({"trajectory": lines, "images": images}, pyarrow.schema(kinds))
    compression = {"trajectory": "zstd", "images.list.element": "none"}
    try:
        write_table(table, aside, compression=compression, row_group_size=ROW_GROUP)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return len(lines)


def empty_folder(folder: str | Path) -> Path:
    folder = Path(folder)
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise UserError(f"{folder} holds something already", "Choose another --output-dir.")
    return folder


def line_of(record: Record, images: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of a record. images: what it says of where each of them is."""
    shown = [
        entry if picture.learn else {**entry, "learn": False}
        for entry, picture in zip(images, record.images, strict=True)
    ]
    turns = [turn_of(record, index) for index in range(len(record.turns))]
    extra = {
        "system_prompt": record.system_prompt,
        "subtype": record.subtype,
        "milestone_plan": record.plan,
        "payload_sources": list(record.payload_sources),
        "open": record.open,
    }
    return {
        "uid": record.uid,
        "task": record.task,
        "prompt": record.prompt,
        "images": shown,
        **({"plan": turns[0]} if record.planned else {}),
        "turns": turns[record.planned :],
        **{key: value for key, value in extra.items() if value},
    }


def turn_of(record: Record, index: int) -> dict[str, Any]:
    """The JSON of a turn: its exact text only where it is not the canonical one."""
    said = record.turns[index]
    r = said.reflection
    entry: dict[str, Any] = {"thinking": r.thinking, "score": r.score, "action": r.action}
    if r.edit:
        entry["edit"] = r.edit
    if said.text != canonical(r, *expected(record.task, record.planned, index)):
        entry["text"] = said.text
    if not said.learn:
        entry["learn"] = False
    if said.transition_kind:
        entry["transition_kind"] = said.transition_kind
    if said.milestone:
        entry["milestone_index"] = said.milestone
    return entry


def safe_name(uid: str) -> str:
    """A file name of a uid; one that had to be changed carries a part of the uid's hash."""
    name = re.sub(r"[^\w.-]", "_", uid).lstrip(".")[:80]
    return name if name == uid else f"{name}-{hashlib.sha256(uid.encode()).hexdigest()[:8]}"


def _suffix(data: bytes) -> str:
    return ".jpg" if data[:2] == b"\xff\xd8" else ".webp" if data[8:12] == b"WEBP" else ".png"
