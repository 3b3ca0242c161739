"""umm-reflect eval compare: what changed between two runs, on the prompts that both hold.

    umm-reflect eval compare outputs/sft outputs/rl
    umm-reflect eval compare outputs/local outputs/full --output outputs/compared.json

Prints every figure of both runs with the paired difference (second minus first), its 95 % interval
and, for accuracies, a p-value; then the prompts that changed. From a checkout:
python -m eval.compare A B.

Interval: the bootstrap over prompts of `bootstrap.py`, the same draws for both runs. p: a sign-flip
test over prompts, that is, how often a difference at least as large arises where for each prompt
it is a coin that says which run is which. Seeds and copies of a prompt flip together.

Runs under different profiles or judges measure different things: they are refused unless --anyway,
and what differs is then said. Runs of different prompts are always refused.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from eval.bootstrap import BOOTSTRAP_SEED, Estimate, Metric, sums
from eval.report import UNCOMPARED, arms, difference, macro_difference, metrics, place_of
from eval.results import Result, read_results
from umm_reflect.errors import UsageError, UserError
from umm_reflect.files import write_aside
from umm_reflect.settings import load_yaml, parse

FLIPS = 10_000
SAME = ("profile", "verifier", "limit")  # what must be equal unless --anyway
TOLD = ("model_sha256", "adapter_sha256", "profiles", "loop", "device", "dtype")


@dataclass(frozen=True)
class CompareConfig:
    """The paired difference of two runs, with its interval, and the prompts that changed."""

    first: Annotated[Path, tyro.conf.Positional]
    """The output folder of a run."""
    second: Annotated[Path, tyro.conf.Positional]
    """That of another: differences are second minus first."""
    anyway: bool = False
    """Compare runs under different profiles or judges too, and say what differs."""
    show: int = 20
    """How many changed prompts are printed; the file of --output has all."""
    output: Path | None = None
    """A JSON file for all of it."""

    def __post_init__(self) -> None:
        if self.show < 0:
            raise ValueError(f"--show is {self.show}; give 0 or more")


@dataclass(frozen=True)
class Figure:
    """A figure of both runs. p is None where it is no accuracy, or without a difference."""

    first: float | None
    second: float | None
    difference: Estimate
    p: float | None


@dataclass(frozen=True)
class Changed:
    """A prompt of which another number of samples is handed out right."""

    row: int
    family: str
    prompt: str
    samples: int
    right_first: int
    right_second: int


@dataclass(frozen=True)
class Pair:
    """Two runs of one set. views: the edit views of the first and of the second.

    gained, lost: samples that are right only in the second, only in the first. only_first,
    only_second: samples that the other run lacks, which count nowhere.
    """

    set: str
    views: tuple[str, str]
    figures: dict[str, Figure]
    gained: int
    lost: int
    only_first: int
    only_second: int
    changed: tuple[Changed, ...]


@dataclass(frozen=True)
class Outcome:
    """A finished run, read from its folder. facts: what identifies it, by name."""

    folder: Path
    results: list[Result]
    max_rounds: int
    facts: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Outcome:
        """Errors: UserError where the folder holds no finished run."""
        try:
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            env = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError) as error:
            raise UserError(
                f"{folder} holds no finished run ({error})", "Name an --output-dir of eval."
            ) from error
        config = load_yaml(folder / "config.yaml")
        results = read_results(folder / "results.jsonl")
        if not results:
            raise UserError(f"{folder} holds no results", "Go on with eval --resume.")
        facts = {
            "profile": summary.get("profile"),
            "sets_sha256": summary.get("sets_sha256", {}),
            "verifier": _judges(results),
            "limit": config.get("limit"),
            **{name: env.get(name) for name in TOLD},
        }
        return cls(folder, results, int(config["max_rounds"]), facts)


def compare(first: Outcome, second: Outcome, *, anyway: bool = False) -> list[Pair]:
    """Every set that both runs hold, under each edit view that both have (or the only one of each).

    Errors: UsageError for runs that measure different things, unless `anyway`; UserError where they
    share nothing.
    """
    unlike = [line for line in differing(first, second) if line.partition(":")[0] in SAME]
    if unlike and not anyway:
        raise UsageError(
            f"{first.folder} and {second.folder} measure different things: {'; '.join(unlike)}",
            "Compare them --anyway, and say so where you quote it.",
        )
    hashes = first.facts["sets_sha256"], second.facts["sets_sha256"]
    for name in hashes[0].keys() & hashes[1].keys():
        if hashes[0][name] != hashes[1][name]:
            raise UserError(
                f"the set {name} holds other prompts in {second.folder} than in {first.folder}",
                "Run one of them again.",
            )
    members, others = arms(first.results), arms(second.results)
    rounds = min(first.max_rounds, second.max_rounds)
    pairs = []
    for name in dict.fromkeys(set_name for set_name, _ in members):
        for views in _views(name, members, others):
            both = members[name, views[0]], others[name, views[1]]
            pairs.append(pair_of(name, views, *both, rounds))
    if not pairs:
        raise UserError(
            f"{first.folder} and {second.folder} share no set under one edit view",
            "Run one of them with the set (and --edit-view) of the other.",
        )
    return pairs


def _views(name: str, *both: dict[tuple[str, str], list[Result]]) -> list[tuple[str, str]]:
    first, second = ([view for set_name, view in run if set_name == name] for run in both)
    if shared := [view for view in first if view in second]:
        return [(view, view) for view in shared]
    return [(first[0], second[0])] if len(first) == len(second) == 1 else []


def pair_of(
    name: str,
    views: tuple[str, str],
    first: Sequence[Result],
    second: Sequence[Result],
    max_rounds: int,
) -> Pair:
    """The comparison of two runs of one set. Errors: ValueError where they share no sample."""
    mine, theirs = ({place_of(r): r for r in run} for run in (first, second))
    shared = sorted(mine.keys() & theirs.keys())
    a, b = [mine[place] for place in shared], [theirs[place] for place in shared]
    figures = {}
    for figure, metric in metrics(max_rounds).items():
        if figure.startswith(UNCOMPARED):
            continue
        found = difference(a, b, figure, max_rounds)
        p = sign_flip_p(a, b, metric) if "accuracy" in figure else None
        figures[figure] = Figure(_value(a, metric), _value(b, metric), found, p)
        if "accuracy" in figure:
            macro = macro_difference(a, b, figure, max_rounds)
            means = (_macro_value(a, metric), _macro_value(b, metric))
            figures[f"macro_{figure}"] = Figure(*means, macro, None)
    rows: dict[int, list[tuple[Result, Result]]] = {}
    for one, other in zip(a, b, strict=True):
        rows.setdefault(one.row, []).append((one, other))
    changed = []
    for row, samples in sorted(rows.items()):
        right = tuple(sum(one[i].correct for one in samples) for i in (0, 1))
        if right[0] != right[1]:
            about = samples[0][0]
            changed.append(Changed(row, about.family, about.prompt, len(samples), *right))
    changed.sort(key=lambda one: (one.right_second - one.right_first, one.row))
    return Pair(
        set=name,
        views=views,
        figures=figures,
        gained=sum(y.correct and not x.correct for x, y in zip(a, b, strict=True)),
        lost=sum(x.correct and not y.correct for x, y in zip(a, b, strict=True)),
        only_first=len(mine) - len(shared),
        only_second=len(theirs) - len(shared),
        changed=tuple(changed),
    )


def _value(results: Sequence[Result], metric: Metric) -> float | None:
    counts = [metric(result) for result in results]
    total = sum(out_of for _, out_of in counts)
    return round(sum(one for one, _ in counts) / total, 6) if total else None


def _macro_value(results: Sequence[Result], metric: Metric) -> float:
    families: dict[str, list[Result]] = {}
    for result in results:
        families.setdefault(result.family, []).append(result)
    shares = [sum(metric(r)[0] for r in members) / len(members) for members in families.values()]
    return round(sum(shares) / len(shares), 6)


def sign_flip_p(first: Sequence[Result], second: Sequence[Result], metric: Metric) -> float:
    """Two-sided p of no difference between runs of the same samples, for a metric out of one each.

    Flips of the prompts that differ: all of them where those are few, else FLIPS random ones, the
    same every time.
    """
    rows = sorted({result.row for result in first})
    steps = sums(second, rows, metric)[0] - sums(first, rows, metric)[0]
    steps = steps[steps != 0]
    if not len(steps):
        return 1.0
    exact = 2 ** len(steps) <= FLIPS
    if exact:
        bits = np.arange(2 ** len(steps))[:, None] >> np.arange(len(steps)) & 1
    else:
        bits = np.random.default_rng([BOOTSTRAP_SEED, FLIPS]).integers(0, 2, (FLIPS, len(steps)))
    as_large = np.abs((2 * bits - 1) @ steps) >= abs(steps.sum()) - 1e-9
    p = as_large.mean() if exact else (1 + as_large.sum()) / (1 + FLIPS)
    return round(float(p), 6)


def differing(first: Outcome, second: Outcome) -> list[str]:
    """What is known to differ between two runs, in words that fit on a line each."""
    lines = []
    for name in (*SAME, *TOLD):
        a, b = first.facts[name], second.facts[name]
        if name == "verifier":  # of the sets that both hold
            a, b = ({key: x[key] for key in sorted(a.keys() & b.keys())} for x in (a, b))
        if a != b:
            a, b = (_short(value) for value in (a, b))
            lines.append(f"{name}: {a} and {b}" if len(a) + len(b) < 160 else name)
    return lines


def _short(value: Any) -> str:
    """A value in words; of hashes the first digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", str(value))


def _judges(results: Sequence[Result]) -> dict[str, str]:
    """Set -> what judged it."""
    judges: dict[str, set[str]] = {}
    for result in results:
        judges.setdefault(result.set, set()).add(result.verifier or "not recorded")
    return {name: ", ".join(sorted(found)) for name, found in judges.items()}


def print_pair(pair: Pair, show: int) -> None:
    """A table of figures, then the prompts that changed, the worst first."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 104)
    views = pair.views[0] if pair.views[0] == pair.views[1] else " against ".join(pair.views)
    table = Table(title=f"{pair.set}, edit view {views}", title_justify="left")
    table.add_column("")
    for heading in ("first", "second", "second - first", "p"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, figure in pair.figures.items():
        values = ("-" if v is None else f"{v:.3f}" for v in (figure.first, figure.second))
        p = "" if figure.p is None else f"{figure.p:.4f}"
        table.add_row(name, *values, str(figure.difference), p)
    console.print(table)
    words = f"  right only in the second: {pair.gained}, only in the first: {pair.lost} samples"
    if pair.only_first or pair.only_second:
        words += f"; left out: {pair.only_first} of the first, {pair.only_second} of the second"
    console.print(words, markup=False)
    for one in pair.changed[:show]:
        right = f"{one.right_first} -> {one.right_second} of {one.samples} right"
        console.print(f"  {right}  {one.family} {one.row}: {one.prompt}", markup=False)
    if len(pair.changed) > show:
        console.print(f"  and {len(pair.changed) - show} more (--show, --output)", markup=False)


def main(argv: Sequence[str]) -> int:
    """umm-reflect eval compare: returns 0; errors as in `umm_reflect.errors`."""
    config = parse(CompareConfig, argv, "umm-reflect eval compare")
    first, second = Outcome.read(config.first), Outcome.read(config.second)
    pairs = compare(first, second, anyway=config.anyway)
    lines = differing(first, second)
    for line in lines:
        print(f"they differ in {line}")
    for pair in pairs:
        print_pair(pair, config.show)
    if config.output:
        record = {"first": str(config.first), "second": str(config.second), "differ": lines}
        record["pairs"] = [asdict(pair) for pair in pairs]
        write_aside(config.output, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
