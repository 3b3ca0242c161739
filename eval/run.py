"""umm-reflect eval: generate a test set, judge every image, write the figures.

    umm-reflect eval shapes553 --seeds 0,1,2 --output-dir outputs/eval
    umm-reflect eval shapes553 compound hard --model DIR --edit-view both --batch-size 512
    umm-reflect eval shapes553 --output-dir outputs/eval --resume       # after it was killed
    umm-reflect eval geneval553 --model DIR --profile release --gpus 8
    umm-reflect eval hard553 --best-of 4            # first images instead of edits, as many of them
    umm-reflect eval geneval553 --model DIR --predict-only --output-dir outputs/images
    umm-reflect eval --images outputs/images                            # judge them, anywhere
    umm-reflect eval geneval553 --images DIR            # images of others, in GenEval's layout
    umm-reflect eval compare outputs/a outputs/b        # the paired difference of two runs
    umm-reflect eval --list

Writes results.jsonl (a line per sample, no times), images.jsonl (hashes and boxes), summary.json
(figures with intervals, see report.py), report.html and curve.png, timing.json, config.yaml,
env.json, and for each set and edit view a folder with failures.png, gallery.png and the traces that
they show. From a checkout: python -m eval.run ...
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from eval.binding import check, drop_stale, lasting
from eval.config import EvalConfig, batches, in_batches, what_is_run
from eval.geneval_manifest import manifest_text
from eval.kept import OwnImages, draw_sheets, is_kept, keep, keep_picked, write_official
from eval.layout_geneval import GIVEN, given, images_sha256
from eval.prepare import Run
from eval.produce import Generator, Loader, MakePolicy, Producer, Source
from eval.report import Report, report_of
from eval.results import IMAGES, ResultFile, Sample, read_results
from eval.sets import PROFILES, all_rows, listing, set_sha256, short_name
from eval.show import Progress, print_report
from eval.work_queue import in_order, processes
from umm_reflect.errors import UsageError, UserError
from umm_reflect.files import write_aside
from umm_reflect.settings import load_yaml, parse, save

RESULTS, SUMMARY, TIMING, CONFIG, ENV = (
    *("results.jsonl", "summary.json", "timing.json", "config.yaml", "env.json"),
)
MANIFEST = "geneval553_eval_manifest.json"  # of the release profile
SCHEMA = 1
ABOUT_HERE = ("versions", "device_name", "platform", "model", "judges")  # in env.json, no facts


def main(argv: Sequence[str]) -> int:
    """umm-reflect eval: returns 0; errors as in `umm_reflect.errors`."""
    if argv and argv[0] == "compare":
        from eval.compare import main as compare

        return compare(argv[1:])
    if "--list" in argv:
        print(listing())
        return 0
    config = parse(EvalConfig, argv, "umm-reflect eval")
    config = replace(config, gpus=processes(config))
    if config.images is not None:
        rescore(config)
        return 0
    lora = os.environ.get("BAGEL_LORA_PATH")
    if lora and config.adapter is None:
        print(f"adapter {lora} (from BAGEL_LORA_PATH)", file=sys.stderr)
        config = replace(config, adapter=lora)
    run = Run.prepare(config)
    (predict if config.predict_only else evaluate)(config, run, Loader(config, run))
    return 0


# --- the three ways -------------------------------------------------------------------------------


def evaluate(config: EvalConfig, run: Run, make_policy: MakePolicy) -> Report:
    """Generate what is missing, judge it, write all files, print the table.

    Errors: UsageError if the folder holds results and neither --resume nor --overwrite is given,
    UserError if it holds those of other settings.
    """
    todo = list(batches(config, list(run.profiles)))
    return _judged(config, run, Generator(config, run, make_policy), todo)


def predict(config: EvalConfig, run: Run, make_policy: MakePolicy) -> None:
    """Generate what is missing and keep every image; GenEval's layout of what was handed out."""
    folder = config.output_dir
    _start(config, run)
    todo = list(batches(config, list(run.profiles)))
    producer = Producer(config, Generator(config, run, make_policy))
    missing = [b for b in todo if not all(is_kept(folder, sample.key) for sample in b)]
    done = sum(map(len, todo)) - sum(map(len, missing))
    for batch, made in in_order(missing, producer, processes=config.gpus):
        for trajectory, more, sample in zip(made.trajectories, made.candidates, batch, strict=True):
            keep(config, run, trajectory, more, sample.key)
        write_official(folder, batch)
        images = sum(len(t.images) for t in (*made.trajectories, *chain(*made.candidates)))
        _note_times(folder / TIMING, batch, images, made.seconds)
        done += len(batch)
        print(f"{done}/{sum(map(len, todo))}  {batch[0].set}: drawn", file=sys.stderr)
    print(f"images: {folder}\njudge them: umm-reflect eval --images {folder} --output-dir OTHER")


def rescore(config: EvalConfig) -> Report:
    """Judge the images of a folder: our own trajectories, or GenEval's layout.

    Errors: UserError if it is neither, or lacks images that it should have.
    """
    from umm_reflect.device import resolve_device

    folder = config.images
    assert folder is not None
    if (folder / ENV).exists():
        config, run = _own(config, folder)
        todo = list(batches(config, list(run.profiles)))
        return _judged(config, run, OwnImages(folder), todo)
    if len(config.sets) != 1:
        raise UsageError(f"{' '.join(config.sets)} are several sets", "Judge one at a time.")
    source, samples = given(folder, config.sets[0])
    config = replace(config, max_rounds=0, best_of=None)
    facts = {
        "model_sha256": {},
        "adapter_sha256": None,
        "profiles": {GIVEN: {}},
        "images_sha256": images_sha256(source),
        "sets_sha256": {short_name(name): set_sha256(name) for name in config.sets},
        "device": resolve_device(config.device).type,
    }
    run = Run(folder, {}, facts)
    return _judged(config, run, source, list(in_batches(samples, config.batch_size)))


def _own(config: EvalConfig, folder: Path) -> tuple[EvalConfig, Run]:
    """The settings and facts with which a folder of ours was drawn, and the judge that is asked for
    now."""
    if folder.resolve() == config.output_dir.resolve():
        raise UsageError(f"--images and --output-dir are both {folder}", "Name another folder.")
    drawn = parse(EvalConfig, ["--config", str(folder / CONFIG)], "umm-reflect eval")
    now = ("reward", "reward_set", "batch_size", "gpus", "workers", "device", "log_samples")
    now += ("output_dir", "resume", "overwrite")
    changes = {name: getattr(config, name) for name in now}
    env = json.loads((folder / ENV).read_text(encoding="utf-8"))
    facts = {name: env[name] for name in env if name not in ABOUT_HERE}
    views = dict.fromkeys(facts["profiles"])
    return replace(drawn, **changes, predict_only=False, images=folder), Run(folder, views, facts)


def _judged(
    config: EvalConfig, run: Run, source: Source, todo: Sequence[Sequence[Sample]]
) -> Report:
    """The batches that have no results yet are made and judged; then all files are written."""
    folder = config.output_dir
    from eval.curves import CURVE, write_curve
    from eval.gallery import write_report

    env = _start(config, run)
    if config.resume:
        _drop_stale(folder)
    progress = Progress(sum(map(len, todo)))
    with ResultFile(folder / RESULTS, resume=config.resume) as file:
        done = {result.key for result in file.results}
        progress.skip(len(done))
        # a batch that was cut off is made again as a whole, so that its shape is the same
        missing = [batch for batch in todo if not {sample.key for sample in batch} <= done]
        began = time.perf_counter()
        for batch, made in in_order(missing, Producer(config, source), processes=config.gpus):
            env.note_judges(made.judges)
            fresh = [result for result in made.results if result.key not in done]
            judged = zip(made.trajectories, made.candidates, made.results, strict=True)
            keep_picked(config, run, judged, file.results, fresh)
            file.append(fresh)
            images = sum(len(r.images) + len(r.candidates) for r in made.results)
            _note_times(folder / TIMING, batch, images, made.seconds)
            progress.show(batch[0], fresh, time.perf_counter() - began)
            began = time.perf_counter()
        file.sort([sample.key for batch in todo for sample in batch])
        results = list(file.results)
    report = report_of(results, config.max_rounds)
    _write_json(folder / SUMMARY, _summary(config, run, report))
    draw_sheets(config, results)
    write_curve(folder, report, short_model(config.model))
    page = write_report(folder, results)
    print_report(report, config.max_rounds, limit=config.limit)
    print(f"results: {folder} ({page.name} and {CURVE} show them)")
    return report


def short_model(name: str) -> str:
    """A model's name for a title: the last part of a path."""
    return name.rstrip("/").rpartition("/")[2]


def _drop_stale(folder: Path) -> None:
    """Results whose images were replaced since are made again."""
    path = folder / RESULTS
    held = check(folder, read_results(path) if path.exists() else [])
    for one in held.stale:
        print(
            f"stale, made again: {' '.join(map(str, one.result.key))}: {one.why}", file=sys.stderr
        )
    if held.stale:
        drop_stale(folder, held)


# --- the folder -----------------------------------------------------------------------------------


def _start(config: EvalConfig, run: Run) -> Env:
    """Makes the folder ready, with what is run written in it."""
    folder = config.output_dir
    _check_folder(config, run)
    save(replace(config, resume=False, overwrite=False), folder / CONFIG)
    if config.profile == "release" and "geneval553" in config.sets:
        write_aside(folder / MANIFEST, manifest_text())
    return Env(folder / ENV, {**run.facts, "model": config.model, **_machine(run.facts["device"])})


def _check_folder(config: EvalConfig, run: Run) -> None:
    """Refuse to mix results of two settings, or to write over any. Makes way for --overwrite."""
    folder = config.output_dir
    results = folder / RESULTS
    judged = results.exists() and results.stat().st_size
    if not judged and not any(folder.glob("*/traces/*/trace.json")):
        return
    if config.overwrite:
        for part in (RESULTS, IMAGES, SUMMARY, TIMING, CONFIG, ENV):
            (folder / part).unlink(missing_ok=True)
        for traces in list(folder.glob("*/traces")):
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
    before = {**what_is_run(EvalConfig()), **load_yaml(folder / CONFIG), **facts}
    before = json.loads(json.dumps(before))
    now = {**json.loads(json.dumps(what_is_run(config))), **json.loads(json.dumps(run.facts))}
    if other := [name for name, value in now.items() if before.get(name) != value]:
        raise UserError(
            f"the results in {folder} were made with another {', '.join(other)}",
            "Resume with the settings of its config.yaml, or use another --output-dir.",
        )


# --- files ------------------------------------------------------------------------------


def _summary(config: EvalConfig, run: Run, report: Report) -> dict[str, Any]:
    """summary.json: the figures, and what they are of."""
    notes = [f"--limit {config.limit}"] if config.limit else []
    for name in config.sets:
        whole = len(all_rows(name))
        for view, figures in report.sets.get(short_name(name), {}).items():
            if figures.rows < whole and not config.limit:
                notes.append(f"{figures.rows} of the {whole} rows of {short_name(name)}, {view}")
    return {
        "schema": SCHEMA,
        "comparable": not notes,
        "note": f"not comparable: {', '.join(notes)}" if notes else "",
        "model": config.model,
        "model_sha256": run.facts["model_sha256"],
        "adapter": config.adapter,
        "profile": config.profile,
        "profile_is": PROFILES[config.profile],
        "arm": config.arm,
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


class Env:
    """env.json: the facts of a run and, once they judged, the manifests of its judges."""

    def __init__(self, path: Path, facts: dict[str, Any]):
        self.path = path
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.content = {**facts, "judges": before.get("judges", {})}
        _write_json(path, self.content)

    def note_judges(self, manifests: dict[str, Any]) -> None:
        """Errors: UserError if another judge has judged the results that are there."""
        judges = self.content["judges"]
        for name, manifest in json.loads(json.dumps(manifests)).items():
            if lasting(judges.setdefault(name, manifest)) != manifest:
                raise UserError(
                    f"another judge has judged the results of {name} in {self.path.parent}",
                    "Judge as before, score the images anew (--images), or --overwrite.",
                )
        _write_json(self.path, self.content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_aside(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _note_times(path: Path, batch: Sequence[Sample], images: int, times: dict[str, float]) -> None:
    """Add a batch to timing.json."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"batches": []}
    first = batch[0]
    entry = {"edit_view": first.edit_view, "set": first.set, "seed": first.seed}
    entry |= {"samples": len(batch), "images": images}
    entry |= {f"{name}_seconds": round(seconds, 3) for name, seconds in times.items()}
    content["batches"].append(entry)
    _write_json(path, content)


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
