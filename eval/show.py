"""An evaluation on the terminal: a line per batch while it runs, a table of figures at its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from eval.report import Estimate, Report, SetReport
from eval.results import Result, Sample

TABLE_WIDTH = 104  # characters; less would cut figures off
LINES = (  # under each table: (what, figure, ...)
    ("form kept", "protocol_valid", "mean edits", "mean_edits"),
    ("looks at right images that say done", "look_on_right"),
    ("looks at wrong images that say edit", "look_on_wrong"),
    ("mean own score of right images", "score_on_right", "of wrong ones", "score_on_wrong"),
)


def print_report(report: Report, max_rounds: int, *, limit: int | None = None) -> None:
    """A table for each set and edit view, and the differences of the two views."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)
    for set_name, views in report.sets.items():
        for view, figures in views.items():
            console.print(_table(f"{set_name}, edit view {view}", figures, max_rounds))
            for line in LINES:
                parts = zip(line[::2], line[1::2], strict=True)
                text = ", ".join(f"{what} {figures.all[name]}" for what, name in parts)
                console.print(f"  {text}", markup=False)
            own = figures.calibration
            console.print(
                f"  own score tells right from wrong: area {own.auroc}, Brier {own.brier}, "
                f"expected error {own.expected_error}",
                markup=False,
            )
            for best in figures.best_of[1:]:
                chosen = "" if best.by_own_score is None else f", own choice {best.by_own_score}"
                console.print(
                    f"  best of {best.n} first images: any right {best.any_right}{chosen}",
                    markup=False,
                )
            for one in figures.equal_images:
                console.print(
                    f"  {one.images:.2f} images: {one.by_edits:.3f} by up to {one.edits} edits, "
                    f"{one.own:.3f} by the own choice of first images (edits minus that "
                    f"{one.edits_minus_own}), {one.perfect:.3f} by a perfect one",
                    markup=False,
                )
    for set_name, figures in report.full_minus_local.items():
        shown = {name: str(figures[name]) for name in ("final_accuracy", "repair", "damage")}
        text = ", ".join(f"{name.replace('_', ' ')} {figure}" for name, figure in shown.items())
        console.print(f"{set_name}, full minus local on the same rows: {text}", markup=False)
    if limit:
        console.print(f"--limit {limit}: these figures compare with nothing", style="bold red")


def _table(title: str, report: SetReport, max_rounds: int) -> Table:
    columns = {f"accuracy_at_{k}": f"{k} edits" for k in range(max_rounds + 1)}
    columns |= {"final_accuracy": "final", "repair": "repair", "damage": "damage"}
    seeds = ", ".join(map(str, report.seeds))
    table = Table(title=f"{title}: {report.rows} rows, seeds {seeds}", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("all", *(_with_interval(report.all[name]) for name in columns))
    if report.held_out:
        table.add_row("held out", *(_with_interval(report.held_out[name]) for name in columns))
    for family, figures in report.families.items():
        table.add_row(family, *(_value(figures[name]) for name in columns))
    return table


def _value(figure: Estimate) -> str:
    return "-" if figure.value is None else f"{figure.value:.3f}"


def _with_interval(figure: Estimate) -> str:
    if figure.low is None or figure.high is None:
        return _value(figure)
    return f"{_value(figure)}\n{figure.low:.2f}-{figure.high:.2f}"


class Progress:
    """One line on stderr after each batch, with the time that is left."""

    def __init__(self, total: int):
        self.total, self.done = total, 0
        self._made, self._seconds, self._right = 0, 0.0, 0

    def skip(self, count: int) -> None:
        self.done += count

    def show(self, first: Sample, results: Sequence[Result], seconds: float) -> None:
        self.done += len(results)
        self._made, self._seconds = self._made + len(results), self._seconds + seconds
        left = (self.total - self.done) * self._seconds / max(1, self._made)
        self._right += sum(r.correct for r in results)
        so_far = self._right / max(1, self._made)
        right = [sum(r.correct_at(0) for r in results), sum(r.correct for r in results)]
        print(
            f"{self.done}/{self.total}  {first.set} {first.edit_view} seed {first.seed}: "
            f"right {right[0]} -> {right[1]} of {len(results)}, {so_far:.3f} so far  "
            f"{seconds:.1f} s, {left:.0f} s left",
            file=sys.stderr,
        )
