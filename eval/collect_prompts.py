"""What `umm-reflect collect` asks for: prompts by lot or of a file, and none of a test set.

    samples("shapes-hard", count=8, copies=1, seed=0, reward="shapes")
    samples("pool.jsonl", None, 4, 0, "geneval")         # a row a line, as the reward takes it
    samples("prompts.txt", None, 1, 0, "ocr")            # a prompt a line

A name ("collect:3", of a second copy "collect:3:1") names with the seed every random draw.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.geneval_rules import check_row
from umm_reflect.errors import UsageError, UserError

BUILT_IN = {"shapes": False, "shapes-hard": True}  # whether of the harder split


@dataclass(frozen=True)
class Wanted:
    """One trajectory to make. name: with the seed it names every random draw."""

    name: str
    prompt: str
    row: dict[str, Any]


def samples(prompts: str, count: int | None, copies: int, seed: int, reward: str) -> list[Wanted]:
    """Every trajectory to make, in order. prompts: one of BUILT_IN, or a file; count: of a file the
    first ones, otherwise 256; reward: rows must suit it.

    Errors: UsageError for no such file, UserError for a line that is no row, or of a test set.
    """
    pairs = _by_lot(prompts, count or 256, seed) if prompts in BUILT_IN else None
    pairs = pairs or _of_file(Path(prompts), reward)[:count]
    return [
        Wanted(f"collect:{number}" + (f":{copy}" if copy else ""), prompt, row)
        for number, (prompt, row) in enumerate(pairs)
        for copy in range(copies)
    ]


def _by_lot(prompts: str, count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    from umm_reflect.shapes.prompts import phrase
    from umm_reflect.shapes.sampler import sample_row

    rng = random.Random(f"{prompts} {seed}")
    rows = [sample_row(rng, hard=BUILT_IN[prompts]) for _ in range(count)]
    return [(phrase(row, rng), dict(row)) for row in rows]


def _of_file(path: Path, reward: str) -> list[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        known = ", ".join(BUILT_IN)
        raise UsageError(f"--prompts {path} does not exist", f"Name a file, or one of {known}.")
    tests = _test_prompts()
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line) if path.suffix == ".jsonl" else {"prompt": line.strip()}
            if not isinstance(row, dict) or not str(row.get("prompt") or "").strip():
                raise ValueError("there is no prompt")
            if reward in ("shapes", "geneval"):
                check_row(row)
            if row["prompt"] in tests or _is_test_row(row):
                raise ValueError("a test set asks for this; learning it would spoil the test")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {number}: {error}",
                "One prompt a line, or in .jsonl one row a line as the reward takes it.",
            ) from error
        pairs.append((row["prompt"], row))
    if not pairs:
        raise UserError(f"{path} holds no prompts", "Write one a line.")
    return pairs


def _test_prompts() -> set[str]:
    """All that a test set asks for; a drawn shape alone is trained on too, see shapes/sets.py."""
    from eval.sets import BUILT_IN as SETS
    from eval.sets import all_rows, request_of

    rows = [(name, entry) for name in SETS for entry in all_rows(name)]
    return {
        request_of(name, entry.row, raw=raw)
        for name, entry in rows
        for raw in (True, False)
        if name == "geneval553" or entry.family != "single_object"
    }


def _is_test_row(row: dict[str, Any]) -> bool:
    """Whether a row of the shapes world asks, in any words, for what a test row asks for."""
    from umm_reflect.shapes.scene import KINDS
    from umm_reflect.shapes.sets import is_held_out

    clauses = row.get("include") or ()
    return bool(clauses) and all(c["class"] in KINDS for c in clauses) and is_held_out(row)
