"""The trajectories of an evaluation that stay on the disk, and the sheets that show some of them.

FOLDER/SET-VIEW/traces/0012-seed0/     trace.json and an image a round (agent/trace.py)
FOLDER/SET-VIEW/candidates/0012-seed0/1/  likewise, of each further first image (--best-of)
FOLDER/SET-VIEW/official/00012/        GenEval's layout of what was handed out (seed 0)
FOLDER/SET-VIEW/failures.png           and gallery.png

OwnImages(folder)(batch)               # the trajectories again, without a model
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eval.config import EvalConfig
from eval.layout_geneval import GIVEN, write
from eval.prepare import Run
from eval.report import arms
from eval.results import Key, Result, Sample, candidate_place, trace_place
from eval.sets import family_sizes, short_name
from eval.sheets import Picks, draw_sheet, pick
from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.settings import to_mapping

if TYPE_CHECKING:
    from agent.types import Trajectory


def trace_folder(folder: Path, key: Key) -> Path:
    """Where the trajectory of a sample or result is kept."""
    return folder / trace_place(key)


def is_kept(folder: Path, key: Key) -> bool:
    return (trace_folder(folder, key) / "trace.json").exists()


def picks(config: EvalConfig, results: Sequence[Result], set_name: str) -> Picks:
    """Which trajectories the sheets of a set show."""
    (name,) = (name for name in config.sets if short_name(name) == set_name)
    return pick(results, len(family_sizes(name)))


def keep_picked(
    config: EvalConfig,
    run: Run,
    judged: Iterable[tuple[Trajectory, Sequence[Trajectory], Result]],
    before: Sequence[Result],
    fresh: Sequence[Result],
) -> None:
    """Keep those of a batch that the sheets will show, or all (--log-samples)."""
    set_name, view = fresh[0].set, fresh[0].edit_view
    arm = arms([*before, *fresh])[set_name, view]
    chosen = picks(config, arm, set_name)
    wanted = {*chosen.failures, *chosen.gallery}
    for trajectory, candidates, result in judged:
        if config.log_samples or result.key in wanted:
            keep(config, run, trajectory, candidates, result.key)


def keep(
    config: EvalConfig,
    run: Run,
    trajectory: Trajectory,
    candidates: Sequence[Trajectory],
    key: Key,
) -> None:
    """Write one trajectory, its candidates before it: where it is, all is."""
    from agent import trace
    from umm_reflect import __version__

    view, _, _, seed, _ = key
    foreign = view == GIVEN
    about = trace.About(
        model=str(config.images) if foreign else config.model,
        model_sha256=run.facts["model_sha256"].get("ema.safetensors"),
        adapter_sha256=(run.facts["adapter_sha256"] or {}).get("adapter_model.safetensors"),
        settings={} if foreign else to_mapping(config.reflect_config(seed, view)),
        sampler=run.facts["profiles"][view],
        versions={"umm-reflect": __version__},
    )
    for number, one in enumerate(candidates, start=1):
        trace.save(one, config.output_dir / candidate_place(key, number), about)
    trace.save(trajectory, trace_folder(config.output_dir, key), about)


def write_official(folder: Path, samples: Sequence[Sample]) -> None:
    """What was handed out, in GenEval's layout, one folder for each set, view and seed."""
    from agent import trace

    for sample in samples:
        image = trace.load(trace_folder(folder, sample.key)).final
        place = folder / f"{sample.set}-{sample.edit_view}" / "official" / f"seed{sample.seed}"
        entry = sample.entry
        write(place, [(entry.index, entry.row, sample.copy, image)])


@dataclass(frozen=True)
class OwnImages:
    """Trajectories that an evaluation kept: a source for `produce.Producer`."""

    folder: Path

    def __call__(self, batch: Sequence[Sample]) -> list[Trajectory]:
        """Errors: UserError for one that is not there."""
        from agent import trace

        for sample in batch:
            if not is_kept(self.folder, sample.key):
                raise UserError(
                    f"{self.folder} has no images of {sample.set} row {sample.entry.index}, seed "
                    f"{sample.seed}",
                    "Draw with --predict-only or --log-samples: only these keep every image.",
                )
        return [trace.load(trace_folder(self.folder, sample.key)) for sample in batch]

    def candidates(self, batch: Sequence[Sample], n: int) -> list[list[Trajectory]]:
        from agent import trace

        return [
            [trace.load(self.folder / candidate_place(one.key, k)) for k in range(1, n)]
            for one in batch
        ]

    def on(self, device: str) -> OwnImages:
        return self


def draw_sheets(config: EvalConfig, results: Sequence[Result]) -> None:
    """failures.png and gallery.png of each set and edit view."""
    from agent import trace

    folder = config.output_dir
    for (set_name, view), arm in arms(results).items():
        by_key, chosen = {result.key: result for result in arm}, picks(config, arm, set_name)
        for name, keys in (("failures", chosen.failures), ("gallery", chosen.gallery)):
            items = [(trace.load(trace_folder(folder, key)), by_key[key]) for key in keys]
            title = "wrong in the end" if name == "failures" else "right in the end"
            sheet, data = draw_sheet(items, f"{set_name}, edit view {view}, {title}"), io.BytesIO()
            sheet.save(data, "PNG")
            write_aside(folder / f"{set_name}-{view}" / f"{name}.png", data.getvalue())
