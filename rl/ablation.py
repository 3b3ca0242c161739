"""The table of an RL ablation: every arm against the start and, at equal image count, best of N.

    python -m rl.ablation start=RL/eval-start both=RL/eval-both-1 both=RL/eval-both-2 \\
        words=RL/eval-words-1 --best-of RL/eval-best-of-4 --output ablation.md

Each RESULT is NAME=FOLDER (or FOLDER alone, its name then), an output folder of `umm-reflect eval`;
the first is the start, folders of one name are seeds of one arm and count as one: a mean over them.
An arm is compared with the start under the edit view that it was evaluated in, so a start of both
views (eval --edit-view both) serves arms of either.

Writes the table as Markdown and, beside it, .json, with each seed apart too. Intervals are of 95 %,
by the bootstrap over prompts of `eval.bootstrap`, the same prompts for both sides, so that what is
hard in a prompt cancels; samples of one name have the same noise. They say how sure a difference is
for these weights, not how another training seed would fall out: that is what the seeds show.
scripts/rl/nano.sh makes all of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from eval.best_of import picked_right, pools
from eval.bootstrap import Counts, Estimate, Metric, bootstrap_weights, estimate, paired, sums
from eval.compare import SAME, Outcome, differing
from eval.report import arms, metrics, place_of
from eval.results import Result
from umm_reflect.errors import UsageError, UserError
from umm_reflect.files import write_aside
from umm_reflect.settings import parse

FIGURES = {
    "accuracy_at_0": "first image right",
    "final_accuracy": "image handed out right",
    "repair": "repair",
    "damage": "damage",
    "look_on_right": "looks at right: done",
    "look_on_wrong": "looks at wrong: edit",
    "protocol_valid": "protocol-valid",
    "mean_edits": "edits",
}
COMPARED = ("accuracy_at_0", "final_accuracy", "repair", "damage")


@dataclass(frozen=True)
class AblationConfig:
    """Every arm of an RL experiment against the start, with paired intervals, as one table."""

    results: Annotated[tuple[str, ...], tyro.conf.Positional]
    """NAME=FOLDER of finished evaluations; the start first."""
    best_of: Path | None = None
    """An evaluation of the start with --best-of: its first images against each arm's edits."""
    output: Path = Path("ablation.md")
    """The table; .json beside it."""

    def __post_init__(self) -> None:
        if self.output.suffix != ".md":
            raise ValueError(f"--output is {self.output}; name a .md file")
        if len(self.results) < 2:
            raise ValueError(
                f"{len(self.results)} result(s): give the start first, then one arm or more"
            )


@dataclass(frozen=True)
class Arm:
    """One arm, or one seed of it. figures: by name. minus_start: the paired difference to the
    start; repair_factor: the arm's repair rate over the start's; minus_best_of: of the image handed
    out, to the best of so many first images by the own score. images: a trajectory's mean."""

    name: str
    view: str
    runs: int
    samples: int
    images: float
    figures: dict[str, Estimate]
    minus_start: dict[str, Estimate]
    repair_factor: Estimate
    minus_best_of: Estimate | None


@dataclass(frozen=True)
class BestOf:
    """The best of n first images of the start, by the model's own score."""

    n: int
    accuracy: Estimate
    view: str


class Paired:
    """Runs of the same samples, whose figures are resampled by the same draws of prompts."""

    def __init__(self, runs: Sequence[Sequence[Result]]):
        self.rows = sorted({result.row for result in runs[0]})
        self.weights = bootstrap_weights(len(self.rows))

    def counts(self, runs: Sequence[Sequence[Result]], metric: Metric) -> Counts:
        """Numerators and denominators by row, of all the runs together."""
        every = [sums(run, self.rows, metric) for run in runs]
        return sum(c[0] for c in every), sum(c[1] for c in every)

    def figure(self, counts: Counts) -> Estimate:
        return estimate(*counts, self.weights)

    def difference(self, arm: Counts, start: Counts) -> Estimate:
        return paired(start, arm, self.weights)

    def factor(self, arm: Counts, start: Counts) -> Estimate:
        if not start[0].sum():
            return Estimate(None, None, None, 0)
        return paired(start, arm, self.weights, _over)


def _over(a, b):
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.asarray(b) > 0, np.divide(a, b), np.nan)


# --- what is compared -----------------------------------------------------------------------------


def arm_of(
    name: str,
    view: str,
    runs: Sequence[Sequence[Result]],
    start: Sequence[Result],
    max_rounds: int,
    best_of: Sequence[Result] | None = None,
) -> Arm:
    """runs: the results of its seeds. Errors: UserError where they are of other samples."""
    wanted = {place_of(result) for result in start}
    for run in runs:
        if {place_of(result) for result in run} != wanted:
            raise UserError(
                f"'{name}' was not evaluated on the rows and seeds of the start",
                "Evaluate both alike (sets, --seeds, --limit)",
            )
    paired, named = Paired([start]), metrics(max_rounds)
    mine = {figure: paired.counts(runs, named[figure]) for figure in FIGURES}
    theirs = {figure: paired.counts([start], named[figure]) for figure in FIGURES}
    return Arm(
        name=name,
        view=view,
        runs=len(runs),
        samples=sum(map(len, runs)),
        images=round(float(np.mean([len(r.images) for run in runs for r in run])), 3),
        figures={figure: paired.figure(counts) for figure, counts in mine.items()},
        minus_start={f: paired.difference(mine[f], theirs[f]) for f in COMPARED},
        repair_factor=paired.factor(mine["repair"], theirs["repair"]),
        minus_best_of=None
        if best_of is None
        else paired.difference(mine["final_accuracy"], best_counts(best_of)),
    )


def best_counts(results: Sequence[Result]) -> Counts:
    """By row: the share that the own score picks right among all candidates, out of one."""
    drawn = pools(results)
    right = [np.mean([picked_right(pool, len(pool)) for pool in row]) for row in drawn]
    return np.array(right), np.ones(len(drawn))


def table_of(
    results: Sequence[tuple[str, Outcome]], best: Outcome | None
) -> tuple[list[Arm], BestOf | None]:
    """The start in the views that were evaluated, each arm, and of an arm of several seeds each,
    named by its folder.

    Errors: UsageError for evaluations that measure different things, UserError for other samples.
    """
    start = results[0][1]
    for outcome in [outcome for _, outcome in results[1:]] + ([best] if best else []):
        unlike = [line for line in differing(start, outcome) if line.partition(":")[0] in SAME]
        if unlike or start.facts["sets_sha256"] != outcome.facts["sets_sha256"]:
            raise UsageError(
                f"{outcome.folder} and {start.folder} measure different things: "
                f"{'; '.join(unlike) or 'other prompts'}",
                "Evaluate both with the same sets, judge, profile and limit",
            )
    starts = _views(start)
    rounds = min(outcome.max_rounds for _, outcome in results)
    first_images = None if best is None else _only(best)
    names = list(dict.fromkeys(name for name, _ in results[1:]))
    found = [arm_of(results[0][0], v, [s], s, rounds, _if(first_images)) for v, s in starts.items()]
    for name in names:
        outcomes = [outcome for other, outcome in results[1:] if other == name]
        members = [_only(outcome) for outcome in outcomes]
        views = {view for view, _ in members}
        if len(views) > 1 or not views <= starts.keys():
            raise UserError(
                f"'{name}' was evaluated in {' and '.join(sorted(views))}, the start in "
                f"{' and '.join(starts)}",
                "Evaluate the start with --edit-view both, and an arm in one view",
            )
        [view] = views
        runs = [run for _, run in members]
        same = (starts[view], rounds, _if(first_images))
        found.append(arm_of(name, view, runs, *same))
        if len(runs) > 1:
            folders = [outcome.folder.name for outcome in outcomes]
            found += [arm_of(f, view, [r], *same) for f, r in zip(folders, runs, strict=True)]
    if first_images is None:
        return found, None
    view, drawn = first_images
    if not all(result.candidates for result in drawn):
        raise UserError(f"{best.folder} has no candidates", "Evaluate the start with --best-of 4")
    if {place_of(r) for r in drawn} != {place_of(r) for r in next(iter(starts.values()))}:
        raise UserError(
            f"{best.folder} is not of the rows and seeds of the start", "Evaluate both alike"
        )
    accuracy = Paired([drawn]).figure(best_counts(drawn))
    return found, BestOf(len(drawn[0].candidates) + 1, accuracy, view)


def _if(first_images: tuple[str, list[Result]] | None) -> list[Result] | None:
    return first_images and first_images[1]


def _views(outcome: Outcome) -> dict[str, list[Result]]:
    """Its results by edit view. Errors: UserError for several sets."""
    members = arms(outcome.results)
    names = sorted({name for name, _ in members})
    if len(names) > 1:
        raise UserError(
            f"{outcome.folder} holds the sets {', '.join(names)}", "Evaluate one set by itself"
        )
    return {view: results for (_, view), results in members.items()}


def _only(outcome: Outcome) -> tuple[str, list[Result]]:
    """Its one edit view, and its results."""
    views = _views(outcome)
    if len(views) > 1:
        raise UserError(
            f"{outcome.folder} holds two edit views",
            "Evaluate an arm in the view it was trained in",
        )
    return next(iter(views.items()))


# --- as a text ------------------------------------------------------------------------------------


def markdown(found: Sequence[Arm], best: BestOf | None) -> str:
    """Percent; differences in points with their intervals."""
    heads = ["arm", "view", *FIGURES.values()]
    heads += [f"{FIGURES[name]}, minus start" for name in COMPARED]
    heads += ["repair, times start", "images", *(["minus best of " + str(best.n)] if best else [])]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for arm in found:
        seeds = f" ({arm.runs} seeds)" if arm.runs > 1 else ""
        cells = [arm.name + seeds, arm.view]
        cells += [
            _number(e.value) if n == "mean_edits" else _percent(e) for n, e in arm.figures.items()
        ]
        cells += [_points(estimate) for estimate in arm.minus_start.values()]
        cells += [_factor(arm.repair_factor), _number(arm.images)]
        cells += [_points(arm.minus_best_of)] if best else []
        lines.append("| " + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n"
    if best:
        text += (
            f"\nBest of {best.n} first images of the start by the model's own score "
            f"({best.view} view): {_percent(best.accuracy)} right.\n"
        )
    return text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(figure: Estimate) -> str:
    return _shown(figure, lambda share: f"{100 * share:.1f}")


def _points(figure: Estimate) -> str:
    return _shown(figure, lambda share: f"{100 * share:+.1f}")


def _factor(figure: Estimate) -> str:
    return _shown(figure, lambda factor: f"{factor:.2f}")


def _shown(figure: Estimate, number: Callable[[float], str]) -> str:
    if figure.value is None:
        return "-"
    if figure.low is None or figure.high is None:
        return number(figure.value)
    return f"{number(figure.value)} ({number(figure.low)} to {number(figure.high)})"


def main(argv: Sequence[str]) -> int:
    config = parse(AblationConfig, argv, "python -m rl.ablation")
    results = []
    for word in config.results:
        name, _, folder = word.rpartition("=")
        results.append((name or Path(folder).name, Outcome.read(Path(folder))))
    best = None if config.best_of is None else Outcome.read(config.best_of)
    found, of_first = table_of(results, best)
    text = markdown(found, of_first)
    record = {"arms": [asdict(arm) for arm in found], "best_of": of_first and asdict(of_first)}
    write_aside(config.output, text)
    write_aside(config.output.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    print(text, end="")
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
