"""curve.png: what edits buy against as many first images, and whether own scores can be believed.

    draw_curves(report_of(results, max_rounds=3)).save("curve.png")
    python -m eval.curves outputs/eval                      # writes it anew

Left, one line a set and edit view: accuracy against the number of images that were drawn on the
average, for budgets of 0, 1, ... edits (solid, with 95 % intervals); and for N first images of the
same prompt, of which the model's own SCORE picks one (dashed) or a perfect judge does (dotted).
The dashed line is the fair rival: it uses what the model has at inference. Best of N needs several
first images a prompt (--best-of, or --seeds, --samples-per-prompt); without them only its first
point is there.

Right, a reliability plot: of the images to which the model gave a score, the share that is right.
Points on the diagonal are honest; the area of a point grows with the looks behind it.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from eval.bootstrap import Estimate
from eval.calibration import TOP
from eval.report import Report, SetReport, report_of
from eval.results import read_results
from umm_reflect.errors import UserError
from umm_reflect.files import write_aside

CURVE = "curve.png"
COLORS = ("#2f6fde", "#cf3d3d", "#1f9d55", "#a35bd6", "#c98a00", "#39424e")
MOST_BEST_OF = 8  # first images on the left plot: beyond, the lines of the edits are a corner of it


def scaling_points(report: SetReport) -> list[tuple[float, Estimate]]:
    """(images drawn on the average, accuracy) for each budget of edits from 0 on."""
    points, k = [], 0
    while f"accuracy_at_{k}" in report.all:
        images = report.all[f"images_at_{k}"].value
        assert images is not None
        points.append((images, report.all[f"accuracy_at_{k}"]))
        k += 1
    return points


def best_of_points(report: SetReport, *, perfect: bool) -> list[tuple[float, Estimate]]:
    """(N, accuracy) for the best of N first images; [] where own scores are not known."""
    found = [(one.n, one.any_right if perfect else one.by_own_score) for one in report.best_of]
    return [(float(n), e) for n, e in found[:MOST_BEST_OF] if e is not None]


def draw_curves(report: Report, title: str = "") -> Image.Image:
    """Both plots side by side, RGB, the same for the same report."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    arms = [
        (f"{name}, {view}", figures)
        for name, views in report.sets.items()
        for view, figures in views.items()
    ]
    for place, (name, figures) in enumerate(arms):
        color = COLORS[place % len(COLORS)]
        _line(left, scaling_points(figures), color, "-", f"{name}: edits", intervals=True)
        for perfect, style, words in (
            (False, "--", "best of N by own score"),
            (True, ":", "best of N, perfect judge"),
        ):
            points = best_of_points(figures, perfect=perfect)
            if len(points) > 1:
                _line(left, points, color, style, f"{name}: {words}", intervals=not perfect)
        _reliability(right, figures, color, name)
    left.set(xlabel="images drawn per prompt (mean)", ylabel="accuracy")
    left.set_title("test-time scaling")
    right.plot([0, TOP], [0, 1], color="#b9c2cc", linewidth=1, zorder=0)
    right.set(xlim=(-0.5, TOP + 0.5), ylim=(-0.05, 1.05))
    right.set(xlabel="own SCORE of 10", ylabel="share that is right")
    right.set_title("own score against the verdict")
    for axes in (left, right):
        axes.grid(color="#e5e9ed")
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False, markerscale=0.5)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _line(axes, points: Sequence[tuple[float, Estimate]], color, style, label, intervals) -> None:
    xs, ys = [x for x, _ in points], [estimate.value for _, estimate in points]
    axes.plot(xs, ys, style, color=color, marker="o", markersize=4, label=label)
    bounded = [(x, e) for x, e in points if e.low is not None]
    if intervals and bounded:
        axes.fill_between(
            [x for x, _ in bounded],
            [e.low for _, e in bounded],
            [e.high for _, e in bounded],
            color=color,
            alpha=0.13,
            linewidth=0,
        )


def _reliability(axes, report: SetReport, color: str, name: str) -> None:
    bins = report.calibration.bins
    if not bins:
        return
    looks = sum(one.right.n for one in bins)
    for one in bins:
        if one.right.low is not None:
            axes.plot([one.score] * 2, [one.right.low, one.right.high], color=color, linewidth=1)
    area, error = report.calibration.auroc, report.calibration.expected_error
    told = f"error {error.value:.3f}"
    told += "" if area.value is None else f", area {area.value:.3f}"
    axes.scatter(
        [one.score for one in bins],
        [one.right.value for one in bins],
        s=[25 + 400 * one.right.n / looks for one in bins],
        color=color,
        alpha=0.6,
        linewidths=0,
        label=f"{name}: {told}",
    )


def write_curve(folder: str | Path, report: Report, title: str = "") -> Path:
    """Write curve.png into a folder."""
    data = io.BytesIO()
    draw_curves(report, title).save(data, "PNG")
    return write_aside(Path(folder) / CURVE, data.getvalue())


def main(argv: Sequence[str]) -> int:
    from umm_reflect.settings import load_yaml

    parser = argparse.ArgumentParser(
        prog="python -m eval.curves", description="Write curve.png of a run."
    )
    parser.add_argument("folder", type=Path, help="its output folder")
    folder = parser.parse_args(argv).folder
    results = read_results(folder / "results.jsonl")
    if not results:
        raise UserError(f"{folder} holds no results", "Name an --output-dir of eval.")
    config = load_yaml(folder / "config.yaml")
    print(write_curve(folder, report_of(results, int(config["max_rounds"])), str(config["model"])))
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
