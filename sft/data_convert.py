"""Records → the release's Parquet schema; and eight rows of the shapes world to learn from.

    write_release(records, "data/sft")           # trajectory_parquet/shard-00000.parquet, ...
    write_example("data/example")                # trajectories.jsonl and images/

What the release's schema cannot say is refused by `misfit`, with the reason: a first image that no
turn asked for, and a part that is not learned.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.types import Reflection
from sft.data import Picture, Record, Said, expected
from sft.data_own import empty_folder, write_jsonl
from sft.data_release import IMAGES, OLD_FORMAT, SYSTEM_VERSION

if TYPE_CHECKING:
    from sft.shapes import ShapesTrajectory

ROW_GROUP = 16  # a reader of one image reads those of its whole group
EXAMPLE_ROWS = 8
EXAMPLE_SIDE = 128

# The sentence that the release's stored prompts have where the trained ones have a newer one.
FORMAT_SENTENCE = (
    "At every reasoning turn, output exactly one <think> block using these exact tags: "
    "[CURRENT_ROUND], [SCORE], [ACTION], [THINKING], [SOURCE_IMAGE], and [EDIT]."
)


def misfit(record: Record) -> str:
    """Why the release's schema cannot hold a record; "" where it can."""
    if record.task == "t2i" and not record.planned:
        return "no turn asks for its first image"
    if record.open:
        return "it may end without a done"
    if not all(said.learn for said in record.turns):
        return "a turn is not learned"
    if not all(image.learn for image in record.images[record.first_drawn :]):
        return "an image is not learned"
    return ""


def release_row(record: Record) -> dict[str, Any]:
    """One row of `trajectory_parquet`, images and all. Errors: ValueError where it does not fit."""
    if why := misfit(record):
        raise ValueError(f"{record.uid}: {why}")
    start = record.first_drawn
    n = start + len(record.turns)
    data = [picture.read() for picture in record.images] + [b""] * (n - len(record.images))
    steps: list[dict[str, Any]] = [{"action": "none"}] * start
    thinks, actions, roles, rounds = [""] * start, ["none"] * start, ["source"] * start, [0] * start
    sources = ["given"] * start
    for index, said in enumerate(record.turns):
        number, source = expected(record.task, record.planned, index)
        action = said.reflection.action
        inside, _, payload = said.text.partition("\n[EDIT] ")
        if record.plan and not index:  # reading adds it again
            inside = inside.replace(f"[THINKING] {record.plan}\n", "[THINKING] ", 1)
        thinks.append(inside.removesuffix("</think>") + f"[EDIT] {payload}\n</think>")
        actions.append(action)
        roles.append("done" if action == "done" else "edit" if index else "plan")
        rounds.append(number)
        sources.append(source)
        step: dict[str, Any] = {"action": action}
        if action == "edit":
            step["edit_instruction"] = said.reflection.edit
        if said.transition_kind:
            step["transition_kind"] = said.transition_kind
        if said.milestone:
            step["milestone_index"] = said.milestone
        steps.append(step)
    last = len(record.images) - 1
    stored = record.system_prompt or ""
    if not OLD_FORMAT.search(stored):
        stored = f"{stored}\n{FORMAT_SENTENCE}".strip()
    return {
        "uid": record.uid,
        "task": record.task,
        "trajectory_subtype": record.subtype,
        "user_prompt": record.prompt,
        "system_prompt": stored,
        "system_prompt_version": SYSTEM_VERSION,
        "meta_steps": json.dumps(steps, ensure_ascii=False),
        "think_list": thinks,
        "step_action_list": actions,
        "step_role_list": roles,
        "step_round_list": rounds,
        "step_source_image_list": sources,
        IMAGES: data,
        "step_image_name_list": [f"img_{i}.png" if d else "" for i, d in enumerate(data)],
        "step_image_sha256": [hashlib.sha256(d).hexdigest() if d else "" for d in data],
        "step_image_size_bytes": [len(d) for d in data],
        "step_need_loss": [i == last for i in range(n)],
        "n_steps": n,
        "n_images": len(record.images),
        "source_image_step_index": start - 1,
        "final_loss_step_index": last,
        "final_image_name": f"img_{last}.png",
    }


def write_release(records: Iterable[Record], folder: str | Path, shard_rows: int = 512) -> int:
    """Write shards of `shard_rows` rows into a new or empty folder; how many rows they hold."""
    folder = empty_folder(folder)
    waiting: list[dict[str, Any]] = []
    count = shard = 0
    for record in records:
        waiting.append(release_row(record))
        count += 1
        if len(waiting) == shard_rows:
            write_shard(waiting, folder / "trajectory_parquet" / f"shard-{shard:05d}.parquet")
            waiting, shard = [], shard + 1
    if waiting:
        write_shard(waiting, folder / "trajectory_parquet" / f"shard-{shard:05d}.parquet")
    return count


def write_shard(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Rows → one Parquet file (zstd), written aside and renamed."""
    import pyarrow
    from pyarrow.parquet import write_table

    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    try:
        table = pyarrow.Table.from_pylist(list(rows))
        write_table(table, aside, compression="zstd", row_group_size=ROW_GROUP)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


# --- the example ----------------------------------------------------------------------------------


def example_records(count: int = EXAMPLE_ROWS, seed: int = 0) -> list[Record]:
    """Trajectories of the shapes world as records, every fourth one an editing task.

    An image that is not what its prompt or its edit asked for is a condition, not learned.
    """
    from sft.shapes import make_trajectory

    rng = random.Random(seed)
    made = [make_trajectory(rng, task="edit" if i % 4 == 3 else "t2i") for i in range(count)]
    return [shapes_record(trajectory, f"shapes-{i:04d}") for i, trajectory in enumerate(made)]


def shapes_record(trajectory: ShapesTrajectory, uid: str, side: int = EXAMPLE_SIDE) -> Record:
    """A trajectory of the shapes world with its scenes rendered, `side` pixels wide."""
    from sft.shapes import turns
    from umm_reflect.shapes.render import render

    editing = trajectory.source is not None
    learn = (False,) * editing + trajectory.faithful
    images = []
    for scene, good in zip(trajectory.looks, learn, strict=True):
        data = io.BytesIO()
        render(scene, side).save(data, "PNG")
        images.append(Picture(data=data.getvalue(), learn=good))
    said = zip(turns(trajectory), trajectory.reflections, strict=True)
    return Record(
        uid=uid,
        task="edit" if editing else "t2i",
        prompt=trajectory.prompt,
        turns=tuple(Said(text, reflection) for text, reflection in said),
        images=tuple(images),
    )


def with_plan(record: Record, thinking: str = "I draw what is asked for.") -> Record:
    """A drawing task with the turn before its first image that the release's layout has."""
    from dataclasses import replace

    from agent.protocol import canonical

    if record.task == "edit" or record.planned:
        return record
    plan = Reflection(thinking, 0, "edit", record.prompt)
    turns = [Said(canonical(plan, 0, "None"), plan)]
    for index, said in enumerate(record.turns, start=1):
        text = canonical(said.reflection, *expected("t2i", True, index))
        turns.append(replace(said, text=text))
    return replace(record, turns=tuple(turns), planned=True)


def write_example(folder: str | Path, count: int = EXAMPLE_ROWS, seed: int = 0) -> int:
    """Write valid rows of the shapes world in our own schema; how many."""
    return write_jsonl(example_records(count, seed), folder)
