"""umm-reflect reward: is a reward fit for use, and what does it say of some images?

    umm-reflect reward check --reward ocr
    umm-reflect reward check --reward judge --set url=http://127.0.0.1:8000 model=Qwen/Qwen3-VL-8B
    umm-reflect reward score --reward shapes a.png b.png --prompt "two red circles"
    umm-reflect reward score --reward reward.yaml *.png --rows rows.jsonl --output-dir verdicts

check judges images drawn for the purpose, on the device that will be used, and says why when the
right ones do not score higher. score prints a table and writes verdicts.jsonl and annotated.png.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from umm_reflect.errors import UsageError
from umm_reflect.files import write_aside
from umm_reflect.settings import parse

if TYPE_CHECKING:
    from eval.verdict import Verdict

PROG = "umm-reflect reward"
HELP = """usage: umm-reflect reward check --reward NAME [--set KEY=VALUE ...]
       umm-reflect reward score --reward NAME IMAGE ... --prompt TEXT

check   good images must score above bad ones, here and now
score   a table, verdicts.jsonl and annotated.png of some images

umm-reflect reward check --help and umm-reflect reward score --help tell more."""


@dataclass(frozen=True)
class CheckConfig:
    """Judge images whose order is known; exit code 1, with the cause, when it comes out wrong."""

    reward: str
    """A reward's name, or a YAML file with its settings."""
    set: tuple[str, ...] = ()
    """Settings of the reward: KEY=VALUE ..."""
    device: str | None = None
    """Where its networks run, for example cuda:1; otherwise what its settings say."""
    json: bool = False
    """Print the reward's manifest as JSON."""


@dataclass(frozen=True)
class ScoreConfig:
    """Judge some images."""

    images: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """PNG, JPEG or WebP files."""
    reward: str
    """A reward's name, or a YAML file with its settings."""
    prompt: str | None = None
    """What all of the images were asked to show."""
    rows: Path | None = None
    """A JSONL file with a row for each image, or one for all, in place of --prompt."""
    set: tuple[str, ...] = ()
    """Settings of the reward: KEY=VALUE ..."""
    device: str | None = None
    """Where its networks run, for example cuda:1; otherwise what its settings say."""
    output_dir: Path = Path("outputs/reward")
    """Where verdicts.jsonl and annotated.png go."""
    overwrite: bool = False
    """Replace what --output-dir holds."""

    def __post_init__(self) -> None:
        if not self.images:
            raise ValueError("name the images to be judged")
        if (self.prompt is None) == (self.rows is None):
            raise ValueError("give either --prompt or --rows")


def main(argv: Sequence[str]) -> int:
    """umm-reflect reward: returns 0, or 1 when a check fails or an image was not judged."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP, file=sys.stdout if argv else sys.stderr)
        if argv:
            raise SystemExit(0)
        return 2
    actions = {"check": check, "score": score}
    if argv[0] not in actions:
        raise UsageError(f"there is no 'reward {argv[0]}'", "Choose check or score.")
    return actions[argv[0]](argv[1:])


def check(argv: Sequence[str]) -> int:
    config = parse(CheckConfig, argv, f"{PROG} check")
    from eval.rewards.registry import build, named

    with closing(build(named(config.reward, config.set, config.device))) as reward:
        reward.check()
        manifest = reward.manifest()
    if config.json:
        print(json.dumps(manifest, indent=1))
    else:
        for name, sha256 in manifest.get("sha256", {}).items():
            print(f"{name}  sha256 {sha256}")
        print(f"{manifest['reward']}: good images score above bad ones; it is fit for use")
    return 0


def score(argv: Sequence[str]) -> int:
    config = parse(ScoreConfig, argv, f"{PROG} score")
    from eval.pictures import read_file
    from eval.rewards.registry import build, named

    files = [config.output_dir / name for name in ("verdicts.jsonl", "annotated.png")]
    if not config.overwrite and any(file.exists() for file in files):
        raise UsageError(
            f"{config.output_dir} holds verdicts", "Use --overwrite, or another --output-dir."
        )
    rows = _rows(config)
    images = [read_file(path) for path in config.images]
    with closing(build(named(config.reward, config.set, config.device))) as reward:
        verdicts = reward.score(images, rows)
    _print_table(config.images, verdicts)
    _write(config, files, images, rows, verdicts)
    return int(any(verdict.error is not None for verdict in verdicts))


def _rows(config: ScoreConfig) -> list[dict[str, Any]]:
    if config.prompt is not None:
        from eval.prompt_spec import row_of

        row = row_of(config.prompt) or {"prompt": config.prompt}
        return [row] * len(config.images)
    assert config.rows is not None
    rows = []
    for number, line in enumerate(config.rows.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{config.rows}:{number} is no JSON ({error})") from None
        if not isinstance(row, dict):
            raise UsageError(f"{config.rows}:{number} is no object")
        rows.append(row)
    if len(rows) == 1:
        rows *= len(config.images)
    if len(rows) != len(config.images):
        raise UsageError(f"{len(config.images)} images but {len(rows)} rows in {config.rows}")
    return rows


def _print_table(paths: Sequence[Path], verdicts: Sequence[Verdict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("image", "verdict", "score", "value", "reason"):
        table.add_column(name, justify="right" if name in ("score", "value") else "left")
    for path, verdict in zip(paths, verdicts, strict=True):
        judged = verdict.error is None
        word = {True: "right", False: "wrong", None: "-" if judged else "not judged"}
        table.add_row(
            path.name,
            word[verdict.correct],
            f"{verdict.score:.3f}" if judged else "",
            "" if verdict.value is None else f"{verdict.value:.4g}",
            verdict.reason.replace("[", r"\["),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _write(config: ScoreConfig, files: Sequence[Path], images, rows, verdicts) -> None:
    import io

    from eval.annotate import annotated

    lines = [
        json.dumps({"image": str(path), "row": row, **verdict.to_record()}, ensure_ascii=False)
        for path, row, verdict in zip(config.images, rows, verdicts, strict=True)
    ]
    write_aside(files[0], "\n".join(lines) + "\n")
    items = [
        (image, str(row.get("prompt", "")), verdict)
        for image, row, verdict in zip(images, rows, verdicts, strict=True)
    ]
    data = io.BytesIO()
    annotated(items).save(data, "PNG")
    write_aside(files[1], data.getvalue())
    print(f"written: {files[0]} {files[1]}")


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
