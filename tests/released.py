"""Writes training data in the release's schema, from its description and not from our own writer.

    write_released(folder)     # 40 trajectories (20 of each task), 3 anchors and their list

Of every three trajectories one draws one image, one two and one three. Among those that draw are
planned progressions; some stored texts cut their edit off or spell its blanks otherwise.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

SIDE = 32
LONG = "Draw a red circle " + "and one more red circle " * 40 + "on white."
STORED_SYSTEM = (
    "You draw, edit and verify pictures.\n"
    "At every reasoning turn, output exactly one <think> block using these exact tags: "
    "[CURRENT_ROUND], [SCORE], [ACTION], [THINKING], [SOURCE_IMAGE], and [EDIT].\n"
    "Judge only what can be seen."
)
# Our own words in the place of the released prompt, which is fetched and never part of the code.
PROMPT_FILE = (
    "One.\nTwo.\nAt every turn give a think block, then [EDIT]. More of line three.\n"
    "Four.\nFive.\nSix.\nA planned progression begins with its plan.\nEight.\nNine."
)
TRAINED_SYSTEM = (
    "You draw, edit and verify pictures.\n"
    "At every turn give a think block, then [EDIT].\n"
    "Judge only what can be seen.\n"
    "A planned progression begins with its plan."
)


def png(level: int, side: int = SIDE) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (side, side), (level % 256, 40, 90)).save(data, "PNG")
    return data.getvalue()


def think(number: int, score: str, action: str, thinking: str, source: str, edit: str) -> str:
    return (
        f"<think>\n[CURRENT_ROUND] Round#{number}\n[SCORE] {score}/10\n[ACTION] {action}\n"
        f"[THINKING] {thinking}\n[SOURCE_IMAGE] {source}\n[EDIT] {edit}\n</think>"
    )


def row(index: int, task: str) -> dict[str, Any]:
    """Trajectory `index` of a task: it draws 1 + index % 3 images."""
    images, given = 1 + index % 3, int(task == "edit")
    planned = task == "t2i" and index % 6 in (1, 2)
    edits = [f"Edit {k} of {task} {index}." for k in range(images)]
    stored = list(edits)
    if index == 3:  # the stored text is cut off, meta_steps has all of it
        edits[0], stored[0] = LONG, LONG[:600]
    if index == 4:
        edits[1], stored[1] = "Make it  blue.", "Make it blue."
    thinks, sources = [""] * given, ["given"] * given
    meta: list[dict[str, Any]] = [{"action": "none"}] * given
    for k in range(images + 1):
        done = k == images
        source = f"Image #{k - 1 + given}"
        if k == 0:
            source = "given" if given else "None"
        edit = "None" if done else stored[k]
        action, score = ("done", "10") if done else ("edit", f"{k}.5" if k else "0")
        thinks.append(think(k, score, action, f"I look,\nround {k}.", source, edit))
        sources.append(source)
        step: dict[str, Any] = {"action": action}
        if not done:
            step["edit_instruction"] = edits[k]
            if planned:
                kinds = ("planned_initial", "planned_transition", "corrective_repair")
                step["transition_kind"] = kinds[k]
                step["milestone_index"] = min(k + 1, 2)
        meta.append(step)
    n = given + images + 1
    data = [png(7 * index + k) for k in range(given + images)] + [b""]
    last = given + images - 1
    return {
        "uid": f"{task}-{index:03d}",
        "task": task.upper() if index == 5 else task,
        "trajectory_subtype": "planned_progression" if planned else "natural_repair",
        "user_prompt": f"Prompt {index} ({task}).",
        "system_prompt": STORED_SYSTEM,
        "system_prompt_version": "clean29529_full_trajectory_v1",
        "meta_steps": json.dumps(meta),
        "think_list": thinks,
        "step_action_list": ["none"] * given + ["edit"] * images + ["done"],
        "step_role_list": [*["source"] * given, "plan", *["edit"] * (images - 1), "done"],
        "step_round_list": [0] * given + list(range(images + 1)),
        "step_source_image_list": sources,
        "step_image_list": data,
        "step_image_name_list": [f"img_{k}.png" if d else "" for k, d in enumerate(data)],
        "step_image_sha256": [hashlib.sha256(d).hexdigest() if d else "" for d in data],
        "step_image_size_bytes": [len(d) for d in data],
        "step_need_loss": [k == last for k in range(n)],
        "n_steps": n,
        "n_images": given + images,
        "source_image_step_index": given - 1,
        "final_loss_step_index": last,
        "final_image_name": f"img_{last}.png",
    }


def rows() -> list[dict[str, Any]]:
    return [row(index, task) for index in range(20) for task in ("t2i", "edit")]


def write_rows(some: list[dict[str, Any]], path: Path, group: int = 8) -> None:
    from pyarrow import Table
    from pyarrow.parquet import write_table

    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(Table.from_pylist(some), path, row_group_size=group)


def write_released(folder: Path) -> Path:
    made = rows()
    write_rows(made[:25], folder / "trajectory_parquet" / "part-0.parquet")
    write_rows(made[25:], folder / "trajectory_parquet" / "part-1.parquet")
    anchors = [
        {
            "uid": f"anchor-{k}",
            "task": "t2i",
            "category": "two",
            "user_prompt": f"A Photo of {k} (red) dogs!",
            "step_image_list": [png(k)],
        }
        for k in range(5)
    ]
    write_rows(anchors, folder / "anchor" / "parquet" / "part-0.parquet", group=2)
    listed = [
        {
            "uid": f"anchor-{k}",
            "normalized_prompt_sha256": hashlib.sha256(
                f"a photo of {k} red dogs".encode()
            ).hexdigest(),
            "target_step_index": 0,
        }
        for k in (0, 2, 4)
    ]
    allowlist = {"pass": True, "strict_benchmark_prompt_overlap": 0, "rows": listed}
    (folder / "anchor" / "base_anchor_allowlist.json").write_text(json.dumps(allowlist))
    return folder
