"""umm-reflect eval: generate a test set, judge every image, write the figures.

    umm-reflect eval shapes553 --seeds 0,1,2 --output-dir outputs/eval
    umm-reflect eval shapes553 compound hard --model DIR --edit-view both --batch-size 512
    umm-reflect eval shapes553 --output-dir outputs/eval --resume       # after it was killed

Writes results.jsonl (a line per sample, no times), summary.json (figures with intervals, see
report.py), timing.json, config.yaml, env.json, and for each set and edit view a folder with
failures.png, gallery.png and the traces that they show. From a checkout: python -m eval.run ...
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import platform
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.config import loop_options, resolved_profile
from eval.config import EvalConfig, batches, set_sha256, what_is_run
from eval.judging import Judge
from eval.report import Report, arms, report_of
from eval.results import Result, ResultFile, Sample, result_of
from eval.sheets import Picks, draw_sheet, pick
from eval.show import Progress, print_report
from umm_reflect.errors import UsageError, UserError
from umm_reflect.files import write_aside
from umm_reflect.settings import load_yaml, parse, save, to_mapping

if TYPE_CHECKING:
    from agent.policy import Policy
    from agent.types import EditView, Trajectory
    from umm_reflect.hub import ReflectionProfile

RESULTS, SUMMARY, TIMING, CONFIG, ENV = (
    *("results.jsonl", "summary.json", "timing.json", "config.yaml", "env.json"),
)
SCHEMA = 1

MakePolicy = Callable[["EditView"], "Policy"]  # called for each batch: policies remember images


def main(argv: Sequence[str]) -> int:
    """umm-reflect eval: returns 0; errors as in `umm_reflect.errors`."""
    config = parse(EvalConfig, argv, "umm-reflect eval")
    run = Run.prepare(config)
    evaluate(config, run, _loader(config, run))
    return 0


@dataclass(frozen=True)
class Run:
    """What is run, resolved: how each edit view samples, and the facts that identify the results.

    facts: JSON values, compared when a run is resumed and written to env.json.
    """

    folder: Path
    profiles: dict[EditView, ReflectionProfile]
    facts: dict[str, Any]

    @classmethod
    def prepare(cls, config: EvalConfig) -> Run:
        """Everything that can be wrong with the settings, found before the weights are loaded."""
        from umm_reflect import hub
        from umm_reflect.config import BagelConfig
        from umm_reflect.device import resolve_device, resolve_dtype
        from umm_reflect.images import check_drawn_size

        device = resolve_device(config.device)
        folder = hub.resolve(config.model)
        own = hub.profile(folder)
        wanted = config.edit_view or own.edit_view
        views: tuple[EditView, ...] = ("local", "full") if wanted == "both" else (wanted,)
        profiles = {v: resolved_profile(own, config.reflect_config(0, v)) for v in views}
        model = BagelConfig.from_folder(folder)
        check_drawn_size(*own.size, model.latent_grid_side, model.latent_stride)
        adapter = hub.resolve(config.adapter) if config.adapter else None
        facts = {
            "model_sha256": _sha256s(folder),
            "adapter_sha256": _sha256s(adapter) if adapter else None,
            "profiles": {view: _without_prompt(profile) for view, profile in profiles.items()},
            "loop": to_mapping(loop_options(config.reflect_config(0))),
            "sets_sha256": {name: set_sha256(name) for name in config.sets},
            "device": device.type,
            "dtype": str(resolve_dtype(config.dtype, device)).removeprefix("torch."),
        }
        return cls(folder, profiles, facts)


def _sha256s(folder: Path) -> dict[str, str]:
    from umm_reflect.hub import digest

    return {path.name: digest(path) for path in sorted(folder.glob("*.safetensors"))}


def _without_prompt(profile: ReflectionProfile) -> dict[str, Any]:
    """The profile, its system prompt (which may be long) as a hash."""
    record = to_mapping(profile)
    prompt = record.pop("system_prompt").encode()
    record["system_prompt_sha256"] = hashlib.sha256(prompt).hexdigest() if prompt else None
    return record


def _loader(config: EvalConfig, run: Run) -> MakePolicy:
    """Loads the model when the first policy is asked for: a finished run needs none."""
    loaded = []

    def make(view: EditView) -> Policy:
        from agent.policy import BagelPolicy
        from umm_reflect import Bagel

        if not loaded:
            how = {"device": config.device, "dtype": config.dtype, "attn": config.attn}
            loaded.append(Bagel.from_pretrained(str(run.folder), adapter=config.adapter, **how))
        return BagelPolicy(loaded[0], run.profiles[view])

    return make


# --- generating and judging -----------------------------------------------------------------------


def evaluate(config: EvalConfig, run: Run, make_policy: MakePolicy) -> Report:
    """Generate what is missing, judge it, write all files, print the table.

    Errors: UsageError if the folder holds results and neither --resume nor --overwrite is given,
    UserError if it holds those of other settings.
    """
    folder = config.output_dir
    _check_folder(config, run)
    save(replace(config, resume=False, overwrite=False), folder / CONFIG)
    _write_json(folder / ENV, {**run.facts, "model": config.model, **_machine(run.facts["device"])})
    todo = list(batches(config, list(run.profiles)))
    progress = Progress(sum(map(len, todo)))
    with ResultFile(folder / RESULTS, resume=config.resume) as file, Judge(config.workers) as judge:
        done = {result.key for result in file.results}
        progress.skip(len(done))
        for batch in todo:
            if {sample.key for sample in batch} <= done:
                continue
            began = time.perf_counter()
            trajectories = _generate(config, run, make_policy, batch)
            generated = time.perf_counter()
            # a batch that was cut off is made again as a whole, so that its shape is the same
            results = _judge(judge, trajectories, batch)
            fresh = [result for result in results if result.key not in done]
            times = {"generate": generated - began, "judge": time.perf_counter() - generated}
            _keep_traces(config, run, zip(trajectories, results, strict=True), file.results, fresh)
            file.append(fresh)
            _note_times(folder / TIMING, batch, results, times)
            progress.show(batch[0], fresh, times["generate"] + times["judge"])
        results = list(file.results)
    report = report_of(results, config.max_rounds)
    _write_json(folder / SUMMARY, _summary(config, run, report))
    _draw_sheets(folder, results)
    print_report(report, config.max_rounds, limit=config.limit)
    print(f"results: {folder}")
    return report


def _check_folder(config: EvalConfig, run: Run) -> None:
    """Refuse to mix results of two settings, or to write over any. Makes way for --overwrite."""
    folder = config.output_dir
    if not (folder / RESULTS).exists() or not (folder / RESULTS).stat().st_size:
        return
    if config.overwrite:
        for part in (RESULTS, SUMMARY, TIMING, CONFIG, ENV):
            (folder / part).unlink(missing_ok=True)
        for traces in folder.glob("*/traces"):
            shutil.rmtree(traces.parent)
        return
    if not config.resume:
        raise UsageError(
            f"{folder} holds results", "Go on with --resume, or --overwrite, or --output-dir OTHER."
        )
    try:
        facts = json.loads((folder / ENV).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise UserError(f"{folder / ENV} cannot be read ({error})", "Use --overwrite.") from error
    before = {**load_yaml(folder / CONFIG), **facts}
    now = {**json.loads(json.dumps(what_is_run(config))), **json.loads(json.dumps(run.facts))}
    if other := [name for name, value in now.items() if before.get(name) != value]:
        raise UserError(
            f"the results in {folder} were made with another {', '.join(other)}",
            "Resume with the settings of its config.yaml, or use another --output-dir.",
        )


def _generate(
    config: EvalConfig, run: Run, make_policy: MakePolicy, batch: Sequence[Sample]
) -> list[Trajectory]:
    from agent.loop import run_episodes

    view, seed = batch[0].edit_view, batch[0].seed
    try:
        return run_episodes(
            make_policy(view),
            [str(sample.entry.row["prompt"]) for sample in batch],
            max_rounds=config.max_rounds,
            max_tokens=run.profiles[view].say.max_tokens,
            options=loop_options(config.reflect_config(seed, view)),
            seed=seed,
            samples=[sample.name for sample in batch],
        )
    except FloatingPointError as error:
        raise UserError(str(error), "Check the checkpoint.") from error


def _judge(
    judge: Judge, trajectories: Sequence[Trajectory], batch: Sequence[Sample]
) -> list[Result]:
    """Every image of every trajectory is judged, all of them in one go."""
    owners = [
        (image, sample.entry.row)
        for trajectory, sample in zip(trajectories, batch, strict=True)
        for image in trajectory.images
    ]
    verdicts = iter(judge([image for image, _ in owners], [row for _, row in owners]))
    return [
        result_of(trajectory, [next(verdicts) for _ in trajectory.images], sample)
        for trajectory, sample in zip(trajectories, batch, strict=True)
    ]


# --- what is kept to be looked at -----------------------------------------------------------------


def _picks(results: Sequence[Result], set_name: str) -> Picks:
    from umm_reflect.shapes.sets import build_sets

    return pick(results, len({entry.family for entry in getattr(build_sets(), set_name)}))


def _trace_folder(folder: Path, result: Result) -> Path:
    name = f"{result.row:04d}-seed{result.seed}" + (f"-{result.copy}" if result.copy else "")
    return folder / f"{result.set}-{result.edit_view}" / "traces" / name


def _keep_traces(config, run, judged, before: Sequence[Result], fresh: Sequence[Result]) -> None:
    """Save the trajectories of a batch that the sheets will show (before their lines are)."""
    from agent import trace
    from umm_reflect import __version__

    set_name, view = fresh[0].set, fresh[0].edit_view
    arm = arms([*before, *fresh])[set_name, view]
    picks = _picks(arm, set_name)
    wanted = {*picks.failures, *picks.gallery}
    for trajectory, result in judged:
        if result.key not in wanted:
            continue
        about = trace.About(
            model=config.model,
            model_sha256=run.facts["model_sha256"].get("ema.safetensors"),
            adapter_sha256=(run.facts["adapter_sha256"] or {}).get("adapter_model.safetensors"),
            settings=to_mapping(config.reflect_config(result.seed, view)),
            sampler=run.facts["profiles"][view],
            versions={"umm-reflect": __version__},
        )
        trace.save(trajectory, _trace_folder(config.output_dir, result), about)


def _draw_sheets(folder: Path, results: Sequence[Result]) -> None:
    """failures.png and gallery.png of each set and edit view."""
    from agent import trace

    for (set_name, view), arm in arms(results).items():
        by_key, picks = {result.key: result for result in arm}, _picks(arm, set_name)
        for name, keys in (("failures", picks.failures), ("gallery", picks.gallery)):
            shown = [by_key[key] for key in keys]
            items = [(trace.load(_trace_folder(folder, result)), result) for result in shown]
            title = "wrong in the end" if name == "failures" else "right in the end"
            sheet, data = draw_sheet(items, f"{set_name}, edit view {view}, {title}"), io.BytesIO()
            sheet.save(data, "PNG")
            write_aside(folder / f"{set_name}-{view}" / f"{name}.png", data.getvalue())


# --- files ------------------------------------------------------------------------------


def _summary(config: EvalConfig, run: Run, report: Report) -> dict[str, Any]:
    """summary.json: the figures, and what they are of."""
    return {
        "schema": SCHEMA,
        "comparable": config.limit is None,
        "note": f"not comparable: --limit {config.limit}" if config.limit else "",
        "model": config.model,
        "model_sha256": run.facts["model_sha256"],
        "adapter": config.adapter,
        "profile": config.profile,
        "sets_sha256": run.facts["sets_sha256"],
        **asdict(report),
    }


def _machine(device: str) -> dict[str, Any]:
    """Versions and hardware, for env.json."""
    import torch

    from umm_reflect import __version__

    versions = {"umm-reflect": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "numpy", "pillow", "scipy"):
        versions[package] = importlib.metadata.version(package)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    return {"versions": versions, "device_name": name, "platform": platform.platform()}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_aside(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _note_times(path: Path, batch, results: Sequence[Result], times: dict[str, float]) -> None:
    """Add a batch to timing.json."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"batches": []}
    first = batch[0]
    entry = {"edit_view": first.edit_view, "set": first.set, "seed": first.seed}
    entry |= {"samples": len(batch), "images": sum(len(result.images) for result in results)}
    entry |= {f"{name}_seconds": round(seconds, 3) for name, seconds in times.items()}
    content["batches"].append(entry)
    _write_json(path, content)


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
