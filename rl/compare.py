"""Runs beside each other at equal GPU seconds: reward and held-out accuracy of first images.

    python -m rl.compare outputs/nano-single outputs/nano-awm outputs/nano-nft --output curves.png

Reads metrics.jsonl and config.yaml of each run and writes one picture and, beside it, the table as
.json and .txt. GPU seconds are those of rollouts, verdicts and updates on every process; held-out
looks, preflight and checkpoints cost none. Runs that share a GPU get in each other's way, all of
them alike; rollouts of one number have the same prompts in runs of one seed. A held-out number is
of few prompts, under the same noise at each look: intervals come from `umm-reflect eval` and
rl/ablation.py. scripts/rl/compare_objectives.sh makes all of it.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.settings import load_yaml, parse
from umm_reflect.training.metrics import FILE, read_metrics

NAMES, NUMBERS = slice(0, 2), slice(2, None)  # of a line of the table
ENDS = 0.1  # this share of the steps, at both ends, is what a run's first and last reward mean


@dataclass(frozen=True)
class CompareConfig:
    """Draw the curves of several runs over GPU seconds, and put their ends into a table."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Output folders of umm-reflect rl."""
    output: Path = Path("curves.png")
    """The picture; the table lies beside it as .json and .txt."""

    def __post_init__(self) -> None:
        if self.output.suffix != ".png":
            raise ValueError(f"--output is {self.output}; name a .png file")
        if not self.runs:
            raise ValueError("no run is named; give one --output-dir of umm-reflect rl or more")
        if len({run.resolve().name for run in self.runs}) < len(self.runs):
            raise ValueError("two runs have one folder name; rename one, it is the curve's label")


@dataclass(frozen=True)
class Curve:
    """A run over its GPU seconds, both lists alike rising in them.

    steps: (GPU seconds at its end, mean reward, images, updates) of each step; looks: (GPU seconds,
    held-out share of first images that are right, or their mean score).
    """

    name: str
    objective: str
    steps: tuple[tuple[float, float, float, float], ...]
    looks: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        return self.steps[-1][0]


@dataclass(frozen=True)
class Line:
    """A run at the GPU seconds that all runs have reached. None: not looked at by then."""

    run: str
    objective: str
    steps: int
    updates: int
    images: int
    images_per_gpu_second: float
    reward_first: float
    reward_last: float
    held_out_start: float | None
    held_out_last: float | None


def read_run(folder: Path) -> Curve:
    """Errors: UserError for a folder without a training step in its metrics."""
    name = folder.resolve().name
    try:
        lines = read_metrics(folder / FILE)
        objective = load_yaml(folder / "config.yaml").get("objective", "grpo")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{folder} is no RL run: it has no {Path(error.filename).name}",
            "Name an --output-dir of umm-reflect rl",
        ) from error
    seconds, steps, looks = 0.0, [], []
    for line in lines:
        if "reward_mean" in line:
            seconds += line["images"] / line["images_per_gpu_second"]
            steps.append((seconds, line["reward_mean"], line["images"], line["updates"]))
        value = line.get("held_out/first", line.get("held_out/q/0"))
        if value is not None:
            looks.append((seconds, value))
    if not steps:
        raise UserError(f"{folder} has no training step in its {FILE}", "Let it run for longer")
    return Curve(name, objective, tuple(steps), tuple(looks))


def line_of(curve: Curve, seconds: float) -> Line:
    """The run up to so many GPU seconds, its first step at least."""
    steps = [step for step in curve.steps if step[0] <= seconds] or list(curve.steps[:1])
    looks = [value for at, value in curve.looks if at <= seconds]
    most = max(1, math.ceil(ENDS * len(steps)))
    images = sum(step[2] for step in steps)
    return Line(
        run=curve.name,
        objective=curve.objective,
        steps=len(steps),
        updates=int(sum(step[3] for step in steps)),
        images=int(images),
        images_per_gpu_second=round(images / steps[-1][0], 2),
        reward_first=_mean([step[1] for step in steps[:most]]),
        reward_last=_mean([step[1] for step in steps[-most:]]),
        held_out_start=looks[0] if looks else None,
        held_out_last=looks[-1] if looks else None,
    )


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def running_mean(values: Sequence[float], most: int = 10) -> list[float]:
    """Of each value and up to most - 1 before it: an update has few prompts, hard ones or easy."""
    return [_mean(values[max(0, i + 1 - most) : i + 1]) for i in range(len(values))]


def table(lines: Sequence[Line], seconds: float) -> str:
    """The lines as aligned text."""
    rows = [[name.replace("_", " ") for name in asdict(lines[0])]]
    rows += [[_shown(value) for value in asdict(line).values()] for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = [f"after {seconds:.0f} GPU seconds each"]
    for row in rows:
        names, numbers = (list(zip(row, widths, strict=True))[part] for part in (NAMES, NUMBERS))
        cells = [cell.ljust(w) for cell, w in names] + [cell.rjust(w) for cell, w in numbers]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text) + "\n"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def picture(curves: Sequence[Curve], seconds: float) -> bytes:
    """A PNG: reward and held-out accuracy over GPU seconds; dotted: where all runs have come to."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    reward, right = figure.subplots(1, 2)
    for curve in curves:
        label = f"{curve.name} ({curve.objective})"
        at, values = ([step[i] for step in curve.steps] for i in (0, 1))
        (raw,) = reward.plot(at, values, linewidth=0.7, alpha=0.35)
        reward.plot(at, running_mean(values), linewidth=1.8, color=raw.get_color(), label=label)
        if curve.looks:
            right.plot(*zip(*curve.looks, strict=True), marker="o", markersize=4, label=label)
    reward.set_title("mean reward of a rollout (thick: mean of 10)", fontsize=10)
    right.set_title("held out: first images that are right", fontsize=10)
    for axis in (reward, right):
        axis.axvline(seconds, linestyle=":", color="grey", linewidth=1)
        axis.set_xlabel("GPU seconds", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines[1:]:
            axis.legend(fontsize=8, frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def main(argv: Sequence[str]) -> int:
    config = parse(CompareConfig, argv, "python -m rl.compare")
    curves = [read_run(folder) for folder in config.runs]
    seconds = min(curve.seconds for curve in curves)
    lines = [line_of(curve, seconds) for curve in curves]
    text = table(lines, seconds)
    record = {"gpu_seconds": round(seconds, 1), "runs": [asdict(line) for line in lines]}
    write_aside(config.output, picture(curves, seconds))
    write_aside(config.output.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    write_aside(config.output.with_suffix(".txt"), text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
