"""`umm-reflect parity GOLDEN_DIR`: does this code compute what the original BAGEL computed?

    umm-reflect parity ../shared/golden
    umm-reflect parity ../shared/golden --implementation reference --json parity.json

GOLDEN_DIR holds a manifest, recorded inputs and outputs, and the tiny checkpoint they were recorded
with. Every tensor and every case is compared within max(1e-4, 20 x its fp64 noise floor); the worst
of each group is printed, then a count. Exit code 0 only when nothing failed and nothing was left
uncovered, 1 otherwise, 2 when there is no golden folder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from umm_reflect.cli import run_program
from umm_reflect.errors import UsageError
from umm_reflect.settings import parse

if TYPE_CHECKING:
    from umm_reflect.parity_golden import Golden
    from umm_reflect.parity_implementations import Implementation
    from umm_reflect.parity_report import Report


@dataclass(frozen=True)
class Config:
    """Compare this code with recorded tensors of the original BAGEL."""

    golden: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="GOLDEN_DIR")]
    """Folder with manifest.json, the recorded tensors and a checkpoint folder."""
    implementation: Literal["fast", "reference"] = "fast"
    """The product's own path, or the naive reference."""
    json: Path | None = None
    """Also write all records to this file."""

    def __post_init__(self) -> None:
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise UsageError(f"there is no folder {self.json.parent} for --json", "Create it first")


def make_implementation(name: Literal["fast", "reference"], checkpoint: Path) -> Implementation:
    """The fast path or the naive reference on a checkpoint folder, in fp32 on the CPU."""
    if name == "reference":
        from umm_reflect.parity_implementations import ReferenceImplementation

        return ReferenceImplementation(checkpoint)
    from umm_reflect.parity_fast import FastImplementation

    return FastImplementation(checkpoint)


def run(
    golden: Golden, implementation: Implementation, files: Sequence[str] | None = None
) -> Report:
    """Walks all files of the folder, or `files`; whatever no check has recorded is not covered."""
    from umm_reflect import parity_contexts, parity_drawing, parity_primitives, parity_training
    from umm_reflect.parity_report import Report

    checks = (
        ("misc", parity_primitives.check_misc),
        ("text", parity_contexts.check_text),
        ("und", parity_contexts.check_und),
        ("vit", parity_primitives.check_vit),
        ("vae", parity_primitives.check_vae),
        ("gen_", parity_drawing.check_drawings),
        ("train", parity_training.check_training),
        ("", parity_contexts.check_other),
    )
    report = Report()
    if files is None:
        parity_primitives.check_conventions(golden, implementation, report)
    for file in golden.all_files() if files is None else files:
        if file in golden.unreadable:
            report.failed(file, "(the file)", golden.unreadable[file])
            continue
        _check_description(golden, report, file)
        check = next(check for stem, check in checks if file.startswith(stem))
        with report.guard(file, [f"cases ({file})"]):
            check(golden, implementation, report, file)
        for name in golden.tensors(file):
            if not report.has(file, name):
                report.not_covered(file, name, "an unknown tensor")
    return report


def _check_description(golden: Golden, report: Report, file: str) -> None:
    """A tensor that is not there, or not as the manifest says, cannot be compared."""
    stored = golden.tensors(file)
    for name, described in golden.described(file).items():
        if name not in stored:
            report.failed(file, name, "the manifest lists it, but the file does not hold it")
        elif list(described.get("shape", stored[name].shape)) != list(stored[name].shape):
            note = f"shape {list(stored[name].shape)}, not {described['shape']} as in the manifest"
            report.failed(file, f"{name} (description)", note)


def main(argv: Sequence[str]) -> int:
    """The verb: prints the report, returns the exit code; errors rise (see `cli.run_program`)."""
    config = parse(Config, argv, "umm-reflect parity")

    from umm_reflect.parity_golden import Golden

    started = time.perf_counter()
    golden = Golden(config.golden)
    report = run(golden, make_implementation(config.implementation, golden.checkpoint))
    if config.json is not None:
        report.write_json(config.json, config.implementation)
    for line in report.lines():
        print(line)
    print(f"{config.implementation} implementation, {time.perf_counter() - started:.1f} s")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
