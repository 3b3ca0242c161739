"""Prompts to train on: pools by name or from a file, and a sampler that repeats none in an epoch.

pool = open_pool("shapes-hard")                        # endless, made up as they are asked for
pool = open_pool("shapes-hard:3,shapes:1", rows=2000)  # two thousand different ones, mixed 3:1
pool = open_pool("data/ocr/train.parquet")             # or .jsonl, or .txt with one a line
sampler = Sampler(pool, seed=0)
prompts = sampler.take(8)                              # sampler.taken: all that a resume needs

shapes, shapes-hard, compound   the built-in world; none asks what an evaluation row asks
geneval                         GenEval's families without its 553 (eval/geneval_pools.py)
geneval-unseen                  the same without twenty classes, which a test is made of
FILE.jsonl     a row a line, {"prompt": ..., more that the judge reads}; optional: "uid", and
               "image", a path beside the file, where the task is to edit that image
FILE.parquet   the same as columns, or those that rl/prepare.py writes
FILE.txt       a prompt a line
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.types import Prompt
from umm_reflect.errors import UserError
from umm_reflect.images import load_image
from umm_reflect.settings import nearest
from umm_reflect.shapes.sampler import sample_row

# How `sample_row` draws from each.
SHAPES: dict[str, dict[str, Any]] = {
    "shapes": {},
    "shapes-hard": {"hard": True},
    "compound": {"family": "compound"},
}
GENEVAL = ("geneval", "geneval-unseen")
SUFFIXES = (".jsonl", ".parquet", ".txt")
TRIES = 200  # of a pool of so many rows, for each row: more means that the world has no more
SAMPLE = 64  # rows of an endless pool that stand for all of them


@dataclass(frozen=True)
class Pool:
    """Prompts by number. size: how many there are; None: no end. sha256: of the rows (of an endless
    pool, of the first of them): two pools of one hash give the same prompts."""

    name: str
    size: int | None
    at: Callable[[int], Prompt]
    sha256: str

    def __post_init__(self) -> None:
        if self.size == 0:
            raise UserError(f"the pool {self.name} holds no prompts", "Give it some.")


class Sampler:
    """Takes prompts in a random order, each once before any comes again.

    What comes next depends on the pool, the seed and how many were `taken`: that number resumes.
    """

    def __init__(self, pool: Pool, seed: int, taken: int = 0):
        self.pool, self.seed, self.taken = pool, seed, taken
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, count: int) -> list[Prompt]:
        """The next prompts; a pool of `size` begins anew, in another order, after each epoch."""
        first, self.taken = self.taken, self.taken + count
        return [self.pool.at(self._index(number)) for number in range(first, self.taken)]

    def _index(self, number: int) -> int:
        size = self.pool.size
        if size is None:
            return number
        epoch, place = divmod(number, size)
        if self._order[0] != epoch:
            order = list(range(size))
            random.Random(f"{self.seed}/epoch {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][place]


def open_pool(name: str, *, rows: int | None = None, seed: int = 0) -> Pool:
    """The pool of that name, or of that file.

    rows: of the built-in world, so many different ones instead of no end; else the first so many.
    seed: of what the built-in world makes up. Errors: UserError that names the line or the file;
    ValueError for a name that there is not.
    """
    if rows is not None and rows < 1:
        raise ValueError(f"rows is {rows}; give 1 or more")
    if Path(name).suffix in SUFFIXES:
        return _of_rows(name, _read(Path(name)), rows, Path(name).parent)
    if name in GENEVAL:
        return _of_rows(name, iter(_geneval(name)), rows, Path())
    return _shapes(name, rows, seed)


# --- the built-in world ---------------------------------------------------------------------------


def _shapes(name: str, rows: int | None, seed: int) -> Pool:
    weights = _weights(name)

    def row_at(number: int) -> dict[str, Any]:
        rng = random.Random(f"{seed}/{name}/{number}")
        chosen = rng.choices(list(weights), list(weights.values()))[0]
        return dict(sample_row(rng, "train", **SHAPES[chosen]))

    if rows is None:
        first = [row_at(number) for number in range(SAMPLE)]
        return Pool(name, None, lambda number: shapes_prompt(row_at(number)), _digest(first))
    found: dict[str, dict[str, Any]] = {}
    for number in range(TRIES * rows):
        row = row_at(number)
        found.setdefault(row["prompt"], row)
        if len(found) == rows:
            return _of_rows(
                name, iter([shapes_record(row) for row in found.values()]), None, Path()
            )
    raise UserError(
        f"{name} has {len(found)} different prompts in {TRIES * rows} draws, not {rows}",
        "Ask for fewer rows.",
    )


def shapes_record(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its uid: the family and the hash of the words."""
    digest = hashlib.sha256(row["prompt"].encode()).hexdigest()
    return {"uid": f"{row['tag']}_{digest[:16]}", **row}


def shapes_prompt(row: Mapping[str, Any]) -> Prompt:
    return Prompt(shapes_record(row)["uid"], row["prompt"], row)


def _weights(name: str) -> dict[str, float]:
    """'shapes-hard:3,shapes' -> {"shapes-hard": 3.0, "shapes": 1.0}."""
    weights = {}
    for part in name.split(","):
        known, colon, weight = part.strip().partition(":")
        if known not in SHAPES:
            close = nearest(known, [*SHAPES, *GENEVAL])
            hint = f"did you mean {close}?" if close else f"there are {', '.join(SHAPES)}, "
            hint += "" if close else f"{', '.join(GENEVAL)}, and files ({', '.join(SUFFIXES)})"
            raise ValueError(f"there is no pool '{known}'; {hint}")
        try:
            weights[known] = float(weight) if colon else 1.0
        except ValueError:
            raise ValueError(f"'{part}' has the weight '{weight}', which is no number") from None
        if not weights[known] > 0:
            raise ValueError(f"'{part}' has the weight {weight}; give one above 0")
    return weights


def _geneval(name: str) -> Sequence[Mapping[str, Any]]:
    from eval.geneval_pools import build_pool, every_row, held_out_objects

    return (build_pool(every_row()) if name == "geneval" else held_out_objects()).train


# --- files ----------------------------------------------------------------------------------------


def _of_rows(
    name: str, records: Iterator[Mapping[str, Any]], limit: int | None, folder: Path
) -> Pool:
    """A pool of records, each checked: a prompt that is text, a uid of its own, an image that is
    there."""
    kept, seen = [], set()
    for number, record in enumerate(records, start=1):
        if limit is not None and len(kept) == limit:
            break
        where = f"{name}, row {number}"
        prompt = record.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(f"{where}: there is no prompt", 'A row is {"prompt": "...", ...}.')
        uid = str(record.get("uid", f"{Path(name).stem}-{number}"))
        if uid in seen:
            raise UserError(f"{where}: the uid {uid} is another row's", "Give each row its own.")
        seen.add(uid)
        if record.get("image") is not None and not (folder / record["image"]).is_file():
            raise UserError(
                f"{where}: there is no image {folder / record['image']}",
                "The path of an image is relative to the file's folder.",
            )
        kept.append((uid, dict(record)))

    def at(number: int) -> Prompt:
        uid, record = kept[number]
        row = {key: value for key, value in record.items() if key not in ("uid", "image")}
        name = record.get("image")
        return Prompt(uid, row["prompt"], row, None if name is None else load_image(folder / name))

    return Pool(name, len(kept), at, _digest(kept))


def _read(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        raise UserError(f"there is no file {path}", "Check the path of the prompts.")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error})", "Write it as UTF-8.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            yield {"prompt": line.strip()}
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}, is no JSON ({error})", "Mend it.") from error
        if not isinstance(record, dict):
            raise UserError(
                f"{path}, line {number}, is no JSON object", 'A row is {"prompt": "...", ...}.'
            )
        yield record


def _read_parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow
    from pyarrow.parquet import read_table

    try:
        table = read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet ({error})", "Write it anew.") from error
    if "prompt" not in table.column_names:
        raise UserError(
            f"{path} has no column 'prompt' (it has {', '.join(table.column_names)})",
            "Name the column of the prompts so.",
        )
    for record in table.to_pylist():
        chat = record["prompt"]
        if isinstance(chat, str):
            yield record
            continue
        asked = [message["content"] for message in chat or () if message["role"] == "user"]
        row = {"prompt": asked[-1] if asked else None}
        if str(record.get("data_source", "")).endswith("/ocr"):
            row["text"] = record["reward_model"]["ground_truth"]  # what the reward `ocr` looks for
        yield row


def _digest(rows: Any) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()
