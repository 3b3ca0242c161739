"""The release's training data: `trajectory_parquet`, anchors and their list → records.

A row is one trajectory as parallel lists over its steps; texts hold [EDIT] inside the think block,
and `meta_steps` (JSON) the full edit instruction. `read_row` makes the text that is trained on
(the [EDIT] field outside, with the full instruction) and names every rule that a row breaks:

    for where, uid, record, problems in read_trajectories(Path("data/sft")): ...

Nothing here knows an absolute path: shards are found by their place in the folder.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.protocol import parse_schema
from agent.types import ProtocolError
from sft.data import Picture, Problem, Reading, Record, Rule, Said, Task, expected
from umm_reflect.errors import UserError

SYSTEM_VERSION = "clean29529_full_trajectory_v1"
PLANNED = "planned_progression"
STEP_LISTS = (
    *("think_list", "step_action_list", "step_role_list", "step_round_list"),
    *("step_source_image_list", "step_image_name_list", "step_image_sha256"),
    *("step_image_size_bytes", "step_need_loss"),
)
SINGLE = (
    *("uid", "task", "trajectory_subtype", "user_prompt", "system_prompt"),
    *("system_prompt_version", "meta_steps", "n_steps", "n_images"),
    *("source_image_step_index", "final_loss_step_index", "final_image_name"),
)
COLUMNS = (*SINGLE, *STEP_LISTS)
IMAGES = "step_image_list"
ANCHOR_COLUMNS = ("uid", "task", "user_prompt")
BATCH, BUFFER = 8, 1 << 20  # rows at a time, and bytes of a column that are read ahead
ALLOWLIST = "base_anchor_allowlist.json"
AnchorRow = tuple[str, dict[str, Any], Callable[[int], Picture]]  # where, values, step → image
TRUNCATED_AT = 600  # characters to which the stored text cut an edit

OLD_FORMAT = re.compile(
    r"At every reasoning turn, output exactly one <think> block using these exact tags:"
    r"[^\n]*?and \[EDIT\]\."
)
_NULL = {"", "none", "null", "n/a", "na"}
_ACTION_LINE = re.compile(r"^\[ACTION\][ \t]*(edit|done)[ \t]*$", re.IGNORECASE | re.MULTILINE)
_EDIT_FIELD = re.compile(
    r"^\[EDIT\](?P<payload>.*?)(?=\n\[[A-Za-z]|\n?</think>|\Z)\n?", re.DOTALL | re.MULTILINE
)


# --- texts ----------------------------------------------------------------------------------------


def split_controller(text: str) -> tuple[str, str, str] | str:
    """(text without its [EDIT] field, action, payload or "") of a stored turn, or what is wrong."""
    text = text.strip()
    if not text.startswith("<think>") or not text.endswith("</think>"):
        return "it is not one think block"
    if text.count("<think>") != 1 or text.count("</think>") != 1:
        return "it holds a second think tag"
    actions = _ACTION_LINE.findall(text)
    if len(actions) != 1:
        return f"it has {len(actions)} lines '[ACTION] edit|done'"
    fields = list(_EDIT_FIELD.finditer(text))
    if len(fields) != 1 or text.count("[EDIT]") != 1:
        return f"it has {text.count('[EDIT]')} [EDIT] fields"
    payload, action = fields[0]["payload"].strip(), actions[0].lower()
    if (payload.lower() in _NULL) != (action == "done"):
        return f"{action} does not go with [EDIT] {payload or 'nothing'}"
    controller = (text[: fields[0].start()] + text[fields[0].end() :]).strip()
    return controller, action, "" if action == "done" else payload


def payload_source(stored: str, full: str) -> str:
    """How the stored text holds the full instruction; "other_mismatch" where it does not."""
    if stored == full:
        return "exact"
    squeezed, whole = " ".join(stored.split()), " ".join(full.split())
    if squeezed == whole:
        return "whitespace_normalized"
    if len(stored) <= TRUNCATED_AT and (full.startswith(stored) or whole.startswith(squeezed)):
        return "render_truncated"
    return "other_mismatch"


def milestone_plan(steps: list[dict[str, Any]]) -> str:
    """The plan that a planned progression begins with, from the steps that drew an image.

    Errors: ValueError for an unknown kind, or milestones that are not 1..K with K >= 2.
    """
    planned: list[tuple[int, str]] = []
    for step in steps:
        kind = step.get("transition_kind")
        if kind in ("planned_initial", "planned_transition"):
            planned.append((step.get("milestone_index"), str(step["edit_instruction"]).strip()))
        elif kind != "corrective_repair":
            raise ValueError(f"transition_kind {kind!r}")
    indexes = [index for index, _ in planned]
    if indexes != list(range(1, len(planned) + 1)) or len(planned) < 2:
        raise ValueError(f"milestones {indexes}; expected 1, 2, ... and at least two")
    return "Milestone plan: " + " | ".join(f"m{index}: {text}" for index, text in planned)


def system_prompt(stored: str, file_text: str) -> str:
    """The stored prompt as it is trained on: its format sentence is the file's, and the sentence
    on planned progressions is added. file_text: the released system prompt.

    Errors: UserError where either text is not as it must be.
    """
    lines = file_text.splitlines()
    if len(lines) < 7:
        raise UserError(
            f"the system prompt has {len(lines)} lines; line 3 and line 7 are needed",
            "Fetch it with: umm-reflect download prompt",
        )
    if len(OLD_FORMAT.findall(stored)) != 1:
        raise UserError("a stored system prompt has no (or a second) format sentence", "data check")
    sentence = re.split(r"(?<=\.)\s", lines[2].strip())[0]
    text = OLD_FORMAT.sub(lambda _: sentence, stored)
    return text if lines[6] in text else f"{text.rstrip()}\n{lines[6]}"


# --- rows -----------------------------------------------------------------------------------------


class _Row:
    """One row while it is read: what is wrong so far, and the parts of its record."""

    def __init__(self, values: dict[str, Any]):
        self.values = values
        self.problems: list[Problem] = []
        self.task: Task = "edit" if str(values["task"]).lower() == "edit" else "t2i"
        self.start = int(self.task == "edit")

    def check(self, good: bool, rule: Rule, detail: str) -> bool:
        if not good:
            self.problems.append((rule, detail))
        return good

    def lists(self) -> bool:
        v = self.values
        n = v["n_steps"]
        wrong = {k: len(v[k]) for k in STEP_LISTS if len(v[k]) != n}
        return self.check(not wrong, Rule.LENGTHS, f"n_steps {n}, but {wrong}")

    def present(self) -> list[bool]:
        v = self.values
        present = [size > 0 for size in v["step_image_size_bytes"]]
        for step, there in enumerate(present):
            name, sha = v["step_image_name_list"][step], v["step_image_sha256"][step]
            sha_fits = re.fullmatch(r"[0-9a-f]{64}" if there else "", sha) is not None
            name_fits = name == (f"img_{step}.png" if there else "")
            fits = sha_fits and name_fits
            size = v["step_image_size_bytes"][step]
            what = f"step {step}: size {size}, name {name!r}, sha {sha[:8]!r}"
            self.check(fits, Rule.IMAGE_PRESENCE, what)
        count = sum(present)
        self.check(count == v["n_images"], Rule.LENGTHS, f"n_images {v['n_images']} of {count}")
        return present

    def prompts(self) -> None:
        v = self.values
        known = str(v["task"]).lower() in ("t2i", "edit")
        self.check(known, Rule.TASK, f"{v['task']!r} is neither t2i nor edit")
        self.check(bool(v["uid"]), Rule.UID, "empty")
        self.check(bool(v["user_prompt"].strip()), Rule.PROMPT, "empty")
        version, found = v["system_prompt_version"], len(OLD_FORMAT.findall(v["system_prompt"]))
        self.check(version == SYSTEM_VERSION, Rule.SYSTEM_PROMPT, f"version {version!r}")
        self.check(found == 1, Rule.SYSTEM_PROMPT, f"{found} format sentences; expected one")

    def source_step(self, present: list[bool]) -> None:
        v = self.values
        if self.task == "edit":
            names = ("step_action_list", "step_role_list", "step_round_list")
            is_source = [v[k][0] for k in names] == ["none", "source", 0]
            is_source &= v["step_source_image_list"][0] == "given" and v["think_list"][0] == ""
            is_source &= present[0] and not v["step_need_loss"][0]
            self.check(is_source, Rule.SOURCE_STEP, "step 0 is not the given image")
        wanted = 0 if self.task == "edit" else -1
        given = v["source_image_step_index"]
        self.check(given == wanted, Rule.SOURCE_STEP, f"source_image_step_index {given}")

    def end(self, present: list[bool]) -> None:
        v = self.values
        actions = v["step_action_list"]
        self.check(
            actions.count("done") == 1 and actions[-1] == "done" and not present[-1],
            Rule.LAST_NOT_DONE,
            f"actions {', '.join(actions)}; expected one done, as the last, without an image",
        )
        drawn = [step for step in range(self.start, len(present)) if present[step]]
        if not self.check(bool(drawn), Rule.NO_IMAGE, "no image was drawn"):
            return
        flags = [step for step, need in enumerate(v["step_need_loss"]) if need]
        says = (flags, v["final_loss_step_index"], v["final_image_name"])
        fits = says == ([drawn[-1]], drawn[-1], v["step_image_name_list"][drawn[-1]])
        self.check(fits, Rule.LOSS_FLAG, f"{says} does not say step {drawn[-1]}")

    def meta(self) -> list[dict[str, Any]] | None:
        n = self.values["n_steps"]
        try:
            steps = json.loads(self.values["meta_steps"])
        except ValueError as error:
            self.check(False, Rule.UNREADABLE, f"meta_steps is no JSON ({error})")
            return None
        good = isinstance(steps, list) and all(isinstance(step, dict) for step in steps)
        if not self.check(good, Rule.UNREADABLE, "meta_steps is no list of objects"):
            return None
        fits = self.check(len(steps) == n, Rule.LENGTHS, f"meta_steps has {len(steps)} of {n}")
        return steps if fits else None

    def plan(self, meta: list[dict[str, Any]], present: list[bool]) -> str:
        if self.values["trajectory_subtype"] != PLANNED:
            return ""
        try:
            return milestone_plan([meta[i] for i in range(self.start, len(meta)) if present[i]])
        except (ValueError, KeyError) as error:
            self.check(False, Rule.PLAN, f"{type(error).__name__}: {error}")
            return ""

    def turn(self, step: int, meta: dict[str, Any], plan: str) -> tuple[Said, str] | None:
        """The turn of a step with its payload source, or None with the problems noted."""
        v, turn = self.values, step - self.start
        action = v["step_action_list"][step]
        number, source = expected(self.task, self.task == "t2i", turn)
        self.check(v["step_round_list"][step] == number, Rule.ROUND, f"step {step}: not {number}")
        given = v["step_source_image_list"][step]
        fits = given == source
        self.check(fits, Rule.SOURCE_REFERENCE, f"step {step}: {given!r}, expected {source!r}")
        if action not in ("edit", "done"):
            self.check(False, Rule.ACTION, f"step {step}: {action!r} is neither edit nor done")
            return None
        role = "done" if action == "done" else "edit" if turn else "plan"
        said_role = v["step_role_list"][step]
        self.check(said_role == role, Rule.ROLE, f"step {step}: {said_role!r}, expected {role!r}")
        parsed = split_controller(v["think_list"][step])
        if isinstance(parsed, str):
            self.check(False, Rule.TEXT, f"step {step}: {parsed}")
            return None
        controller, said_action, stored = parsed
        fits = said_action == action
        if not self.check(fits, Rule.ACTION, f"step {step}: the text says {said_action}"):
            return None
        full, origin = "None", ""
        if action == "edit":
            full = str(meta.get("edit_instruction") or "").strip()
            origin = payload_source(stored, full)
            self.check(meta.get("action") == "edit", Rule.ACTION, f"step {step}: meta disagrees")
            what = f"step {step}: the text says {stored[:60]!r}, meta_steps {full[:60]!r}"
            if not self.check(origin != "other_mismatch", Rule.PAYLOAD, what):
                return None
        text = f"{controller}\n[EDIT] {full}"
        if plan and turn == 0:
            once = text.count("[THINKING] ") == 1
            self.check(once, Rule.PLAN, "the first turn has no single '[THINKING] '")
            text = text.replace("[THINKING] ", f"[THINKING] {plan}\n", 1)
        reflection = parse_schema(text, number, source, decimals=True)
        if isinstance(reflection, ProtocolError):
            self.check(False, Rule.TEXT, f"{reflection}: step {step}")
            return None
        kind, milestone = meta.get("transition_kind") or "", meta.get("milestone_index") or 0
        return Said(text, reflection, True, str(kind), int(milestone)), origin


def read_row(
    values: dict[str, Any], picture: Callable[[int, str], Picture]
) -> tuple[Record | None, list[Problem]]:
    """The record of one row, or every rule that it breaks.

    picture: (step, sha256) → where its bytes are. Keys that are missing or of another type give
    the rule `unreadable`.
    """
    row = _Row(values)
    try:
        return _record(row, picture), row.problems
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        return None, [*row.problems, (Rule.UNREADABLE, f"{type(error).__name__}: {error}")]


def _record(row: _Row, picture: Callable[[int, str], Picture]) -> Record | None:
    v = row.values
    row.prompts()
    if not row.lists():
        return None
    present = row.present()
    row.source_step(present)
    row.end(present)
    meta = row.meta()
    if meta is None:
        return None
    plan = row.plan(meta, present)
    turns: list[tuple[Said, str]] = []
    for step in range(row.start, v["n_steps"]):
        due = v["step_action_list"][step] == "edit"
        what = f"step {step} is {v['step_action_list'][step]!r}, image {present[step]}"
        row.check(present[step] == due, Rule.IMAGE_PRESENCE, what)
        if turn := row.turn(step, meta[step], plan):
            turns.append(turn)
    if row.problems:
        return None
    steps = [step for step, there in enumerate(present) if there]
    return Record(
        uid=v["uid"],
        task=row.task,
        prompt=v["user_prompt"],
        turns=tuple(said for said, _ in turns),
        images=tuple(picture(step, v["step_image_sha256"][step]) for step in steps),
        planned=row.task == "t2i",
        system_prompt=sys.intern(v["system_prompt"]),  # tens of thousands of rows share one
        subtype=v["trajectory_subtype"],
        plan=plan,
        payload_sources=tuple(origin for _, origin in turns if origin),
    )


# --- files ----------------------------------------------------------------------------------------


def read_trajectories(root: Path, with_images: bool = True) -> Iterator[Reading]:
    """The rows of `trajectory_parquet/*.parquet` (or of the folder's own shards), in order.

    with_images: the pictures hold their bytes; otherwise they say where these are.
    """
    folder = root / "trajectory_parquet"
    for path in sorted((folder if folder.is_dir() else root).glob("*.parquet")):
        for number, values, at in parquet_rows(path, COLUMNS, with_images):
            record, problems = read_row(values, at)
            yield f"{path.name} row {number}", str(values.get("uid") or ""), record, problems


def parquet_rows(
    path: Path, columns: tuple[str, ...], with_images: bool, images: str = IMAGES
) -> Iterator[tuple[int, dict[str, Any], PictureAt]]:
    """(row, values, where its pictures are), a few rows in memory at a time.

    Errors: UserError names the file and the columns that it lacks.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    wanted = [*columns, *([images] if with_images else [])]
    try:
        with ParquetFile(path, pre_buffer=False, buffer_size=BUFFER) as parquet:
            names = parquet.schema_arrow.names
            if missing := [name for name in (*columns, images) if name not in names]:
                raise UserError(f"{path} has no column {', '.join(missing)}", "See data example.")
            number = 0
            for group in range(parquet.num_row_groups):
                index = 0
                batches = parquet.iter_batches(BATCH, row_groups=[group], columns=wanted)
                for values in (row for batch in batches for row in batch.to_pylist()):
                    yield number, values, PictureAt(str(path), group, index, values.get(images))
                    number, index = number + 1, index + 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is no readable Parquet file ({error})", "Fetch it again."
        ) from None


@dataclass(frozen=True)
class PictureAt:
    """The pictures of one Parquet row: called with a step (and hash), gives where it is."""

    file: str
    group: int
    row: int
    images: list[bytes | dict[str, Any] | None] | None

    def __call__(self, step: int, sha256: str = "") -> Picture:
        cell = (self.group, self.row, step)
        if self.images is None:
            return Picture(self.file, cell, sha256)
        value = self.images[step]
        data = value["bytes"] if isinstance(value, dict) else value
        return Picture(self.file, cell, sha256, data=data or None)


def normalized_hash(prompt: str) -> str:
    """The hash by which the list of anchors names a prompt: its words, lower case."""
    return hashlib.sha256(" ".join(re.findall(r"[a-z0-9]+", prompt.lower())).encode()).hexdigest()


def read_anchors(root: Path, with_images: bool = True) -> Iterator[Reading]:
    """The anchors that the list allows; none where the folder has no anchors."""
    shards = sorted((root / "anchor" / "parquet").glob("*.parquet"))
    if not shards:
        return
    rows = (
        (f"anchor {shard.name} row {number}", values, at)
        for shard in shards
        for number, values, at in parquet_rows(shard, ANCHOR_COLUMNS, with_images)
    )
    yield from allowed_anchors(rows, read_allowlist(root / "anchor" / ALLOWLIST))


def read_allowlist(path: Path) -> dict[str, dict[str, Any]]:
    """The allowed anchors by uid. Errors: UserError where the list is damaged or did not pass."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        allowed = {row["uid"]: row for row in listed["rows"]}
        fits = listed["pass"] is True and listed["strict_benchmark_prompt_overlap"] == 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error})", "Fetch it again.") from None
    if not fits or len(allowed) != len(listed["rows"]):
        raise UserError(f"{path} did not pass its own check, or names a uid twice", "Fetch it.")
    return allowed


def allowed_anchors(
    rows: Iterable[AnchorRow], allowed: dict[str, dict[str, Any]]
) -> Iterator[Reading]:
    """Of all anchors those that the list names, and what it names that is not there."""
    seen = set()
    for where, row, picture in rows:
        entry = allowed.get(row["uid"])
        if entry is None:
            continue
        seen.add(row["uid"])
        problems: list[Problem] = []
        if row["task"] != "t2i":
            problems.append((Rule.ANCHOR, f"task {row['task']!r}"))
        if normalized_hash(row["user_prompt"]) != entry["normalized_prompt_sha256"]:
            problems.append((Rule.ANCHOR, "the prompt is not the one that the list allows"))
        image = picture(entry["target_step_index"])
        record = Record(row["uid"], "t2i", row["user_prompt"], (), (image,))
        yield where, row["uid"], None if problems else record, problems
    for uid in sorted(allowed.keys() - seen):
        yield f"{ALLOWLIST} {uid}", uid, None, [(Rule.ANCHOR, "listed, but no shard has it")]
