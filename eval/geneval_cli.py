"""GenEval's prompts, prompts to train on that are none of them, and the verifier's weights.

    umm-reflect geneval prompts prompts.jsonl              # the 553 rows, byte for byte
    umm-reflect geneval pool data/pool                     # train.jsonl, dev.jsonl, report.json
    umm-reflect geneval pool data/unseen --held-out-objects
    umm-reflect geneval overlaps my_prompts.jsonl          # which of them the evaluation asks
    umm-reflect geneval convert                            # what `download geneval` has fetched
    umm-reflect geneval convert --detector FILE.pth --output-dir FOLDER

Rows are in GenEval's schema: {tag, include, [exclude,] prompt}, one a line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.settings import run_verb

PROG = "umm-reflect geneval"
SHOWN = 20  # overlaps that are printed; the report has all of them


@dataclass(frozen=True)
class PromptsConfig:
    """Write the official 553 rows."""

    output: Annotated[Path, tyro.conf.Positional]
    """The file to write."""
    form: Literal["rows", "prompts"] = "rows"
    """rows: GenEval's .jsonl; prompts: the prompts alone, one a line."""


@dataclass(frozen=True)
class PoolConfig:
    """Draw training and validation prompts that the evaluation does not ask."""

    output_dir: Annotated[Path, tyro.conf.Positional]
    """Where train.jsonl, dev.jsonl and report.json go."""
    candidates: Path | None = None
    """A .jsonl of rows to draw from; without it, everything that can be asked."""
    held_out_objects: bool = False
    """Keep twenty classes for a test set (test.jsonl), out of training and validation."""
    seed: int = 20260829
    """Other numbers draw other rows."""

    def __post_init__(self) -> None:
        if self.candidates and self.held_out_objects:
            raise ValueError("--held-out-objects draws from everything: leave out --candidates")


@dataclass(frozen=True)
class OverlapsConfig:
    """Say which rows of a file the evaluation asks too; exit code 1 if any does."""

    rows: Annotated[Path, tyro.conf.Positional]
    """A .jsonl file in GenEval's schema."""
    report: Path | None = None
    """A .jsonl file for all of them."""


@dataclass(frozen=True)
class ConvertConfig:
    """Turn the published checkpoints of the detector and of BLIP into what the verifier loads."""

    detector: Path | None = None
    """mmdet's .pth; without it, and without --blip, both that were downloaded."""
    blip: Path | None = None
    """Salesforce's .pth."""
    tokenizer: Path | None = None
    """A folder with BERT's tokenizer; without it, from the hub's cache."""
    output_dir: Path | None = None
    """Where the folders mask2former and blip-vqa go; without it, the verifier's own place."""
    any_hash: bool = False
    """Take files that are not the published ones: weights of your own."""


def main(argv: Sequence[str]) -> int:
    verbs: dict[str, tuple[Callable[..., int], type]] = {
        "prompts": (prompts, PromptsConfig),
        "pool": (pool, PoolConfig),
        "overlaps": (overlaps, OverlapsConfig),
        "convert": (convert, ConvertConfig),
    }
    return run_verb(argv, PROG, __doc__, verbs)


def prompts(config: PromptsConfig) -> int:
    from eval.geneval_prompts import PROMPTS_SHA256, ROWS_SHA256, official_file, official_rows

    if config.form == "rows":
        write_aside(config.output, official_file())
        print(f"wrote 553 rows to {config.output} (sha256 {ROWS_SHA256}, as published)")
        return 0
    write_aside(config.output, "".join(row["prompt"] + "\n" for row in official_rows()))
    print(f"wrote 553 prompts to {config.output} (sha256 {PROMPTS_SHA256}, as published)")
    return 0


def pool(config: PoolConfig) -> int:
    from eval.geneval_pools import build_pool, every_row, held_out_objects, read_rows

    if config.held_out_objects:
        drawn = held_out_objects(seed=config.seed)
    else:
        rows = read_rows(config.candidates) if config.candidates else every_row()
        drawn = build_pool(rows, seed=config.seed)
    print(
        f"{'family':<15}{'candidates':>11}{'evaluated':>10}{'repeated':>9}{'dev':>6}{'train':>14}"
    )
    for family, count in drawn.report["families"].items():
        asked = f"{count['train']} of {count['train_wanted']}"
        print(
            f"{family:<15}{count['candidates']:>11}{count['in_evaluation']:>10}"
            f"{count['duplicates']:>9}{count['dev']:>6}{asked:>14}"
        )
    for part, short in drawn.report["short"].items():
        if short:
            print(f"{part} is {short} rows short: there are no more")
    if drawn.test:
        print(f"test: {len(drawn.test)} rows of held-out objects")
    for path in drawn.save(config.output_dir):
        print(f"wrote {path}")
    return 0


def overlaps(config: OverlapsConfig) -> int:
    from eval.geneval_pools import find_overlaps, read_rows
    from eval.geneval_prompts import official_rows

    rows = read_rows(config.rows)
    found = find_overlaps(rows, official_rows())
    if config.report:
        lines = [json.dumps(overlap.to_record()) for overlap in found]
        write_aside(config.report, "".join(f"{line}\n" for line in lines))
    for overlap in found[:SHOWN]:
        print(f"{overlap.family}: {overlap.prompt!r} is {overlap.evaluation_prompt!r}")
    if len(found) > SHOWN:
        print(f"... and {len(found) - SHOWN} more (--report FILE has all)")
    print(f"{len(found)} of {len(rows)} rows are asked by the evaluation")
    return 1 if found else 0


def convert(config: ConvertConfig) -> int:
    from eval.blip_vqa import convert as convert_blip
    from eval.mask2former_keys import convert as convert_detector
    from umm_reflect import verifier_files

    files = {"detector": config.detector, "blip": config.blip}
    if not any(files.values()):
        folder = verifier_files.verifier_folder()
        files = {
            "detector": folder / verifier_files.MASK2FORMER.name,
            "blip": folder / verifier_files.BLIP_VQA.name,
        }
        if missing := [str(path) for path in files.values() if not path.exists()]:
            raise UserError(f"{missing[0]} is missing", "Fetch it: umm-reflect download geneval")
    output = config.output_dir or verifier_files.verifier_folder()
    if files["detector"]:
        sha256 = None if config.any_hash else verifier_files.MASK2FORMER.sha256
        done = convert_detector(files["detector"], output / "mask2former", sha256=sha256)
        print(f"wrote {done}")
    if files["blip"]:
        sha256 = None if config.any_hash else verifier_files.BLIP_VQA.sha256
        tokenizer = config.tokenizer or verifier_files.tokenizer_folder()
        done = convert_blip(files["blip"], output / "blip-vqa", tokenizer=tokenizer, sha256=sha256)
        print(f"wrote {done}")
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
