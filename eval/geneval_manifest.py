"""What the release evaluates on: the 553 rows with their slots, seeds and requests.

    rows = manifest_rows()             # color_attr first: the release orders by family name
    rows[0]["seed"]                    # 20260830; two neighbours share a seed
    manifest_text()                    # geneval553_eval_manifest.json, by its recipe
    window_start(slot=0, edit=0, repair_rng_step=500)     # 14: first noisy step of the first edit

The rows, as canonical JSON, have the published sha256 (ROWS_SHA256); this is compared whenever they
are made.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

from eval.geneval_prompts import official_rows, request
from umm_reflect.errors import UserError

BASE_SEED = 20260830
PAIR = 2  # slots that share a seed: the release draws them as one batch
ROWS_SHA256 = "338eb3b8a835714d39fbcf3bb6f9f6c27f388afa439501c34dbf6af4f2c1b48b"
REPAIR_RNG_STEP = {"base": 0, "sft": 0, "rl": 500}  # by arm; so arms share no edit noise
WINDOW_RANGE, WINDOW_LENGTH = (0, 25), 2
DESCRIPTION = "GenEval's 553 prompts as the release asks them, with slots and seeds."


def manifest_rows() -> list[dict[str, Any]]:
    """The 553 rows of the manifest, in order. Errors: UserError if they differ from the published
    ones."""
    return json.loads(_rows_text())


@cache
def _rows_text() -> str:
    official = official_rows()
    order = sorted(range(len(official)), key=lambda index: (official[index]["tag"], index))
    rows = [_row(slot, index, official[index]) for slot, index in enumerate(order)]
    canonical = json.dumps(rows, sort_keys=True, separators=(",", ":"))
    found = hashlib.sha256(canonical.encode()).hexdigest()
    if found != ROWS_SHA256:
        raise UserError(
            f"the release's manifest cannot be made: sha256 {found}, published {ROWS_SHA256}",
            "This is a fault of this program: report it.",
        )
    return json.dumps(rows)


def _row(slot: int, index: int, official: dict[str, Any]) -> dict[str, Any]:
    tag = official["tag"]
    return {
        "slot": slot,
        "sample_id": f"official553_{tag}_{index:04d}",
        "official_index": index,
        "family": tag,
        "prompt": request(official),
        "official_prompt": official["prompt"],
        "seed": BASE_SEED + slot // PAIR,
        "geneval_metadata": _sorted(official),
        "verification_contract": [_contract(official)],
    }


def _contract(official: dict[str, Any]) -> dict[str, Any]:
    tag, clauses = official["tag"], official["include"]
    if tag == "counting":
        names = {"id": "count_exact", "kind": "count_exact"}
        return {"class": clauses[0]["class"], "exact_count": clauses[0]["count"], **names}
    return {"context": _context(tag, clauses), "id": f"{tag}_v1", "kind": tag}


def _context(tag: str, clauses: list[dict[str, Any]]) -> dict[str, Any]:
    """What a row asks for, as the release's verifier reads it; keys in alphabetical order."""
    if tag == "single_object":
        return {"object": clauses[0]["class"]}
    if tag == "two_object":
        return {"objects": [clause["class"] for clause in clauses]}
    if tag == "colors":
        return {"color": clauses[0]["color"], "object": clauses[0]["class"]}
    if tag == "color_attr":
        attributes = [{"color": c["color"], "object": c["class"]} for c in clauses]
        return {"attributes": attributes}
    subject = clauses[1]
    relation, anchor = subject["position"]
    anchor = clauses[anchor]["class"]
    return {"object": anchor, "relation": relation, "subject": subject["class"]}


def _sorted(value: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(value, sort_keys=True))


@cache
def _by_index() -> dict[int, tuple[int, int]]:
    """Place in the official file -> (slot, seed)."""
    return {row["official_index"]: (row["slot"], row["seed"]) for row in manifest_rows()}


def seeds() -> list[int]:
    """The published seed of each row, in the order of the official file."""
    return [_by_index()[index][1] for index in range(len(_by_index()))]


def slot_of(index: int) -> int:
    """The slot of the row at this place in the official file."""
    return _by_index()[index][0]


def window_start(
    slot: int, edit: int, repair_rng_step: int, within: tuple[int, int] = WINDOW_RANGE
) -> int:
    """The first noisy step of an edit (the first edit is 0), as published: 0 to 23.

    within: where the window may lie; another range than the published one for fewer steps. Errors:
    ValueError for one that holds no window.
    """
    from umm_reflect.flow import released_window_start

    identity = (BASE_SEED, repair_rng_step, slot, edit)
    return released_window_start(identity, within, WINDOW_LENGTH)


def first_window_start(within: tuple[int, int] = WINDOW_RANGE) -> int:
    """The first noisy step of every first image, as published: 12."""
    from umm_reflect.flow import released_window_start

    return released_window_start(None, within, WINDOW_LENGTH)


def manifest_text() -> str:
    """The whole manifest as a file."""
    rows = manifest_rows()
    head = {"benchmark": "geneval", "n": len(rows), "description": DESCRIPTION}
    return json.dumps({**head, "base_seed": BASE_SEED, "rows": rows}, indent=1) + "\n"
