"""The test sets of `umm-reflect eval`: their rows, what the model is asked, and who judges them.

    rows_of("geneval553", None)[0].row["prompt"]         # "a photo of a bench"
    request_of("geneval553", row, raw=False)             # "Create an image with a bench."
    rows_of("mine.jsonl", 6)                             # one row in GenEval's schema a line
    umm-reflect eval --list

A row is {tag, include, [exclude,] prompt}, see geneval_rules.py. The seed of a row of geneval553 is
the published one (geneval_manifest.py), so it names the same prompt's randomness in every profile.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from eval.geneval_rules import check_row
from umm_reflect.errors import UserError
from umm_reflect.settings import nearest
from umm_reflect.shapes.scene import KINDS
from umm_reflect.shapes.sets import EvalRow, build_sets

BUILT_IN = {
    "shapes553": "GenEval's six families over drawn shapes",
    "compound": "shapes: two counted and coloured kinds at once",
    "hard": "shapes: five and six of a kind, hard compounds and relations",
    "hard553": "shapes: hard and 253 rows more, for differences of a few points",
    "geneval553": "GenEval's own 553 prompts",
}
SUFFIX = ".jsonl"

# How far each profile of `--profile` is what its authors published, and what is our reading.
PROFILES = {
    "ours": {"published": "", "our_reading": "all of it: the checkpoint's own settings"},
    "release": {
        "published": "512 x 512, 50 points, guidance 3.0 and 1.5, noise 0.8 on two steps in the "
        "published windows, temperature 0.5, three edits, rewritten prompts, seeds",
        "our_reading": "random streams have names, where the original draws from global "
        "generators: settings are equal, pixels are not",
    },
    "official": {
        "published": "GenEval's prompts word for word, four images a prompt, no edit, its rules",
        "our_reading": "the sampler: GenEval sets none for this model, so BAGEL's recommended "
        "guidance 4.0 with 50 points, shift 3.0, up to 1024 x 1024; four named streams in place of "
        "seed 42 anew for each prompt",
    },
}


def check_name(name: str) -> None:
    """ValueError unless this is a built-in set or a .jsonl file that is there."""
    if name in BUILT_IN:
        return
    if name.endswith(SUFFIX):
        if not Path(name).is_file():
            raise ValueError(f"the set {name} does not exist; name a file with a row a line")
        return
    close = nearest(name, BUILT_IN)
    hint = f"did you mean {close}?" if close else f"there are {', '.join(BUILT_IN)}."
    raise ValueError(f"there is no set '{name}'; {hint} A file of rows ends in {SUFFIX}.")


def short_name(name: str) -> str:
    """The name in results and folders: a file's without folder and ending."""
    return Path(name).stem if name.endswith(SUFFIX) else name


def all_rows(name: str) -> tuple[EvalRow, ...]:
    """Every row of a set, in order. Errors: UserError for a line of a file that is no row."""
    if name == "geneval553":
        return _geneval553()
    if name in BUILT_IN:
        return getattr(build_sets(), name)
    return _file_rows(str(Path(name).resolve()))


def rows_of(name: str, limit: int | None) -> list[EvalRow]:
    """The rows of a set; with a limit, so many of them at equal distances."""
    rows = all_rows(name)
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[i * len(rows) // limit] for i in range(limit)]


def set_sha256(name: str) -> str:
    """The hash of a whole set: its rows in order, as JSON."""
    rows = [[r.index, r.family, r.seed, r.row] for r in all_rows(name)]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def family_sizes(name: str) -> dict[str, int]:
    """Family -> how many rows, in the order of the set."""
    return dict(Counter(entry.family for entry in all_rows(name)))


def request_of(name: str, row: dict[str, Any], *, raw: bool) -> str:
    """What the model is asked. raw: the row's own words; else geneval553 asks as the released
    controllers were asked, "Create an image with ..."."""
    from eval.geneval_prompts import request

    return request(row) if name == "geneval553" and not raw else str(row["prompt"])


def reward_of(name: str) -> str:
    """The judge of a set where none is named: the exact one where every class is a drawn shape."""
    if name in BUILT_IN:
        return "geneval" if name == "geneval553" else "shapes"
    clauses = [c for entry in all_rows(name) for c in entry.row["include"]]
    return "shapes" if all(c["class"] in KINDS for c in clauses) else "geneval"


def listing() -> str:
    """What `umm-reflect eval --list` prints."""
    lines = []
    for name, about in BUILT_IN.items():
        sizes = family_sizes(name)
        lines.append(f"{name:<10} {sum(sizes.values()):>4} rows, judged by {reward_of(name)}")
        lines.append(f"{'':<10} {about}")
        families = ", ".join(f"{family} {size}" for family, size in sizes.items())
        lines.append(f"{'':<10} {families}")
        lines.append(f"{'':<10} sha256 {set_sha256(name)}")
    lines.append(f"FILE{SUFFIX} one row in GenEval's schema a line: tag, include, prompt")
    for name, parts in PROFILES.items():
        lines.append(f"--profile {name}")
        lines += [f"{'':<10} {key.replace('_', ' ')}: {v}" for key, v in parts.items() if v]
    return "\n".join(lines)


@cache
def _geneval553() -> tuple[EvalRow, ...]:
    from eval.geneval_manifest import seeds
    from eval.geneval_prompts import official_rows

    rows = zip(official_rows(), seeds(), strict=True)
    return tuple(EvalRow(i, row["tag"], seed, row) for i, (row, seed) in enumerate(rows))


@cache
def _file_rows(path: str) -> tuple[EvalRow, ...]:
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not str(row.get("prompt") or "").strip():
                raise ValueError("there is no prompt")
            if not isinstance(row.get("tag"), str):
                raise ValueError("there is no tag, the family that it is reported under")
            check_row(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}, line {number}, is no row of a test set: {error}",
                'A row: {"tag": "colors", "include": [{"class": "cow", "count": 1, '
                '"color": "red"}], "prompt": "a photo of a red cow"}',
            ) from error
        rows.append(EvalRow(number - 1, row["tag"], number - 1, row))
    if not rows:
        raise UserError(f"{path} holds no rows", "Write one row a line.")
    return tuple(rows)
