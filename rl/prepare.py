"""Prompt files as they are published → Parquet; a pool of the built-in world → a file.

    umm-reflect rl prepare ocr --input-dir flow_grpo/dataset/ocr --output-dir data/ocr
    umm-reflect rl prepare pickscore --input-dir ... --output-dir ... --model-path FOLDER
    umm-reflect rl prepare shapes-hard --rows 3000 --output-dir data/hard        # train.jsonl
    python -m rl.prepare ocr --input-dir ... --output-dir ...

`ocr` and `pickscore` read train.txt and test.txt, a prompt a line, and write train.parquet and
test.parquet with the columns that VeRL-Omni's scripts write (data_source, prompt, negative_prompt,
prompt_token_ids, ability, reward_model, extra_info), and bagel_meta.json, which says what was read.
What an OCR prompt puts in double quotes is what must be read; a line without any is left out, and
named. Of a prompt that is too long the words are cut, never the end token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rl.prompts import GENEVAL, SHAPES, open_pool
from umm_reflect.errors import UsageError, UserError
from umm_reflect.files import sha256, write_aside
from umm_reflect.settings import parse

if TYPE_CHECKING:
    from umm_reflect.tokens import Tokens

PUBLISHED = ("ocr", "pickscore")
SPLITS = ("train", "test")
META = "bagel_meta.json"
NAMED = 5  # lines that are named when many are left out


@dataclass(frozen=True)
class PrepareConfig:
    """Write the prompts of a run: published prompt files as Parquet, or a built-in pool."""

    kind: Annotated[
        Literal["ocr", "pickscore", "shapes", "shapes-hard", "compound", "geneval",
                "geneval-unseen"],
        tyro.conf.Positional,
    ]  # fmt: skip
    """What the prompts are."""
    output_dir: Path
    """Where the files go."""
    input_dir: Path | None = None
    """ocr, pickscore: the folder of train.txt and test.txt."""
    model_path: str = "pretrained/bagel-nano-shapes"
    """ocr, pickscore: whose tokenizer the ids are of: a folder, a hub id or id@revision."""
    max_prompt_length: int = 256
    """ocr, pickscore: tokens of a prompt, its start and end included."""
    rows: int | None = None
    """The built-in pools: how many prompts."""
    seed: int = 0
    """The built-in pools: which ones."""

    def __post_init__(self) -> None:
        if self.max_prompt_length < 3:
            raise ValueError(f"--max-prompt-length is {self.max_prompt_length}; give 3 or more")
        if (self.kind in PUBLISHED) != (self.input_dir is not None):
            raise ValueError(
                "--input-dir goes with ocr and pickscore, which read train.txt and test.txt there"
            )
        if self.kind in SHAPES and self.rows is None:
            raise ValueError(f"--rows is missing: {self.kind} has no end")


@dataclass(frozen=True)
class Prepared:
    """One split. left_out: (line, text) of the lines without quotes; cut: prompts too long."""

    rows: list[dict[str, Any]]
    left_out: list[tuple[int, str]]
    cut: int


def prepare_lines(
    lines: Sequence[str], kind: str, split: str, tokens: Tokens, max_prompt_length: int = 256
) -> Prepared:
    """Rows with the published columns. Example: line 0, 'a sign that says "OPEN"', gives
    {"data_source": "flow_grpo/ocr", "prompt": [{"role": "user", "content": the line}],
    "reward_model": {"style": "model", "ground_truth": "OPEN"}, ...}."""
    from eval.rewards.ocr import target_of

    rows, left_out, cut = [], [], 0
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        truth = text
        if kind == "ocr":
            try:
                truth = target_of({"prompt": text})
            except ValueError:
                left_out.append((number, text))
                continue
        ids = tokens.encode(text, allow_special=False)
        room = max_prompt_length - 2
        cut += len(ids) > room
        rows.append(
            {
                "data_source": f"flow_grpo/{kind}",
                "prompt": [{"role": "user", "content": text}],
                "negative_prompt": [{"role": "user", "content": " "}],
                "prompt_token_ids": [tokens.start, *ids[:room], tokens.end],
                "ability": kind,
                "reward_model": {"style": "model", "ground_truth": truth},
                "extra_info": {"split": split, "index": len(rows)},
            }
        )
    return Prepared(rows, left_out, cut)


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Write train.parquet, test.parquet and bagel_meta.json; returns what the last one says."""
    from umm_reflect.hub import resolve
    from umm_reflect.tokens import Tokens

    assert config.input_dir is not None, "checked by the config"
    folder = resolve(config.model_path)
    tokens = Tokens.from_folder(folder)
    texts = {split: _lines(config.input_dir / f"{split}.txt") for split in SPLITS}
    meta: dict[str, Any] = {
        "data_source": f"flow_grpo/{config.kind}",
        "tokenizer": config.model_path,
        "start_token_id": tokens.start,
        "end_token_id": tokens.end,
        "max_prompt_length": config.max_prompt_length,
        "splits": {},
    }
    for split, lines in texts.items():
        made = prepare_lines(lines, config.kind, split, tokens, config.max_prompt_length)
        if not made.rows:
            raise UserError(
                f"{config.input_dir / f'{split}.txt'} has no line that can be used",
                "An OCR prompt holds what is to be read in double quotes."
                if config.kind == "ocr"
                else "Write a prompt a line.",
            )
        path = config.output_dir / f"{split}.parquet"
        _write(made.rows, path)
        meta["splits"][split] = {
            "rows": len(made.rows),
            "without_quotes": [number for number, _ in made.left_out],
            "cut": made.cut,
            "sha256": sha256(path),
        }
        for note in notes(made, f"{split}.txt"):
            print(note)
        print(f"{path}: {len(made.rows)} prompts")
    write_aside(config.output_dir / META, json.dumps(meta, indent=1) + "\n")
    return meta


def notes(made: Prepared, name: str) -> Iterator[str]:
    """What a person should know of a split, a line each."""
    if made.left_out:
        lines = ", ".join(f"line {n} ({text[:40]})" for n, text in made.left_out[:NAMED])
        more = f" and {len(made.left_out) - NAMED} more" if len(made.left_out) > NAMED else ""
        yield f"{name}: {len(made.left_out)} lines without double quotes left out: {lines}{more}"
    if made.cut:
        yield f"{name}: {made.cut} prompts are longer than allowed; their last words are cut"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"there is no {path}", "It holds a prompt a line.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error})", "Write it as UTF-8.") from error


def _write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    buffer = pyarrow.BufferOutputStream()
    write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
    write_aside(path, buffer.getvalue().to_pybytes())


def main(argv: Sequence[str]) -> int:
    """The verb `umm-reflect rl prepare`."""
    config = parse(PrepareConfig, argv, "umm-reflect rl prepare")
    if config.kind in PUBLISHED:
        prepare(config)
        return 0
    assert config.kind in (*SHAPES, *GENEVAL), config.kind
    try:
        pool = open_pool(config.kind, rows=config.rows, seed=config.seed)
    except ValueError as error:
        raise UsageError(str(error), "See --help.") from error
    prompts = [pool.at(number) for number in range(pool.size)]
    lines = "".join(json.dumps({"uid": p.uid, **p.row}) + "\n" for p in prompts)
    path = write_aside(config.output_dir / "train.jsonl", lines)
    print(f"{path}: {len(prompts)} prompts")
    return 0


if __name__ == "__main__":
    import sys

    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
