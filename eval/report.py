"""From results to figures: accuracies, repair, damage, looking, each with a 95 % interval. Pure.

    report = set_report(results, max_rounds=3)        # of one set and one edit view
    report.all["final_accuracy"]                      # Estimate(value, low, high, n)
    difference(local, full, "final_accuracy", max_rounds=3)

Every figure is a ratio of two sums over results: `metrics` says which. Intervals are percentiles
of a bootstrap over prompts: a row is drawn with all its seeds and copies, since these are not
independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agent.types import StopReason
from eval.results import Result

REPLICATES = 2000
BOOTSTRAP_SEED = 553
NOT_HELD_OUT = "single_object"  # its few specs are in the training data, see shapes/sets.py

Metric = Callable[[Result], tuple[float, float]]  # (what counts, out of how many)


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval. n: what it is out of (images, looks, trajectories).

    value is None where there is nothing to count (the repair rate without a wrong first image).
    """

    value: float | None
    low: float | None
    high: float | None
    n: float

    def __str__(self) -> str:
        if self.value is None:
            return "-"
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


Summary = dict[str, Estimate]


@dataclass(frozen=True)
class SetReport:
    """The figures of one set under one edit view. held_out: all rows but those of single_object,
    None where that is no difference."""

    rows: int
    samples: int
    seeds: tuple[int, ...]
    all: Summary
    held_out: Summary | None
    families: Mapping[str, Summary]


@dataclass(frozen=True)
class Report:
    """Set -> edit view -> figures; and for sets with both views, figure -> paired difference."""

    sets: dict[str, dict[str, SetReport]]
    full_minus_local: dict[str, Summary]


# --- what is counted ------------------------------------------------------------------------------


def metrics(max_rounds: int) -> dict[str, Metric]:
    """Name -> (numerator, denominator) of one result, whose sums over results make the figure.

    accuracy_at_k          the last image that at most k edits give; who stopped earlier keeps his
    accuracy_at_k_gated    the same, but wrong if the protocol was broken and k is 1 or more
    final_accuracy         the image that is handed out (the kept one, not always the last)
    repair, damage         wrong first images that are right in the end, and the reverse
    protocol_valid         trajectories without a malformed turn (one sampled anew is forgiven)
    turns_valid            turns, those sampled anew included, that kept the form
    look_on_right/_wrong   looks at right images that say "done", at wrong ones that say "edit"
    score_on_right/_wrong  the mean own score of right and of wrong images
    mean_edits             edits that were drawn
    stop_REASON            share of the trajectories that ended so
    """
    named: dict[str, Metric] = {}
    for k in range(max_rounds + 1):
        named[f"accuracy_at_{k}"] = _accuracy_at(k, gated=False)
    for k in range(1, max_rounds + 1):
        named[f"accuracy_at_{k}_gated"] = _accuracy_at(k, gated=True)
    named |= {
        "final_accuracy": lambda r: (r.correct, 1),
        "repair": lambda r: (r.correct and not r.correct_at(0), not r.correct_at(0)),
        "damage": lambda r: (r.correct_at(0) and not r.correct, r.correct_at(0)),
        "protocol_valid": lambda r: (r.protocol_valid, 1),
        "turns_valid": _turns_valid,
        "look_on_right": _look(right=True, action="done"),
        "look_on_wrong": _look(right=False, action="edit"),
        "score_on_right": _own_score(right=True),
        "score_on_wrong": _own_score(right=False),
        "mean_edits": lambda r: (r.edits, 1),
    }
    for reason in StopReason:
        named[f"stop_{reason.value}"] = _stopped(reason.value)
    return named


def _accuracy_at(budget: int, *, gated: bool) -> Metric:
    return lambda r: (r.correct_at(budget) and (r.protocol_valid or not gated), 1)


def _turns_valid(result: Result) -> tuple[float, float]:
    legal = sum(look.error is None for look in result.looks)
    return legal, legal + len(result.malformed)


def _look(*, right: bool, action: str) -> Metric:
    def count(result: Result) -> tuple[float, float]:
        actions = [look.action for look, correct in result.legal_looks() if correct == right]
        return actions.count(action), len(actions)

    return count


def _own_score(*, right: bool) -> Metric:
    def count(result: Result) -> tuple[float, float]:
        scores = [look.score for look, correct in result.legal_looks() if correct == right]
        return sum(scores), len(scores)

    return count


def _stopped(reason: str) -> Metric:
    return lambda r: (r.stop == reason, 1)


# --- figures --------------------------------------------------------------------------------------


def report_of(results: Sequence[Result], max_rounds: int) -> Report:
    """All figures of a run, each set and edit view apart."""
    sets: dict[str, dict[str, SetReport]] = {}
    compared: dict[str, Summary] = {}
    members = arms(results)
    for (set_name, view), arm in members.items():
        sets.setdefault(set_name, {})[view] = set_report(arm, max_rounds)
    for set_name, views in sets.items():
        if {"local", "full"} <= set(views):
            pair = members[set_name, "local"], members[set_name, "full"]
            names = [name for name in metrics(max_rounds) if not name.startswith("stop_")]
            compared[set_name] = {name: difference(*pair, name, max_rounds) for name in names}
    return Report(sets, compared)


def arms(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """The results of each (set, edit view), in their order."""
    members: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        members.setdefault((result.set, result.edit_view), []).append(result)
    return members


def set_report(results: Sequence[Result], max_rounds: int) -> SetReport:
    """All figures of the results of one set under one edit view.

    Errors: ValueError for no results or for results of several sets or views.
    """
    kinds = {(r.set, r.edit_view) for r in results}
    if len(kinds) != 1:
        raise ValueError(f"a report is of one set and one edit view, not of {sorted(kinds)}")
    families: dict[str, list[Result]] = {}
    for result in results:
        families.setdefault(result.family, []).append(result)
    held_out = [r for r in results if r.family != NOT_HELD_OUT]
    return SetReport(
        rows=len({r.row for r in results}),
        samples=len(results),
        seeds=tuple(sorted({r.seed for r in results})),
        all=summary(results, max_rounds) | macro(families, max_rounds),
        held_out=summary(held_out, max_rounds) if 0 < len(held_out) < len(results) else None,
        families={name: summary(members, max_rounds) for name, members in families.items()},
    )


def summary(results: Sequence[Result], max_rounds: int) -> Summary:
    """Every figure of `metrics`; stop reasons that did not occur are left out."""
    rows = sorted({r.row for r in results})
    weights = bootstrap_weights(len(rows))
    figures = {
        name: estimate(*sums(results, rows, metric), weights)
        for name, metric in metrics(max_rounds).items()
    }
    return {n: e for n, e in figures.items() if not (n.startswith("stop_") and e.value == 0)}


def macro(families: Mapping[str, Sequence[Result]], max_rounds: int) -> Summary:
    """Accuracies as the plain mean over the families, each of which is resampled by itself.

    n: the number of families.
    """
    named = {n: m for n, m in metrics(max_rounds).items() if "accuracy" in n}
    figures = {}
    for name, metric in named.items():
        values, replicates = [], []
        for place, members in enumerate(families.values()):
            rows = sorted({r.row for r in members})
            counts = sums(members, rows, metric)
            values.append(_ratio(*(c.sum() for c in counts)))
            replicates.append(_replicates(*counts, bootstrap_weights(len(rows), place)))
        interval = _interval(np.mean(replicates, axis=0))
        figures[f"macro_{name}"] = _rounded(float(np.mean(values)), *interval, len(families))
    return figures


def difference(
    first: Sequence[Result], second: Sequence[Result], name: str, max_rounds: int
) -> Estimate:
    """Figure `name` of `second` minus that of `first`, on the samples that both hold.

    The bootstrap draws the same rows for both, so what a row does to both cancels. n: the samples
    of each. Errors: ValueError where they share no sample.
    """
    shared = {_place(r) for r in first} & {_place(r) for r in second}
    if not shared:
        raise ValueError("the two runs share no row and seed, so nothing can be compared")
    rows = sorted({place[1] for place in shared})
    weights = bootstrap_weights(len(rows))
    metric = metrics(max_rounds)[name]
    values, replicates = [], []
    for results in (first, second):
        counts = sums([r for r in results if _place(r) in shared], rows, metric)
        values.append(_ratio(*(c.sum() for c in counts)))
        replicates.append(_replicates(*counts, weights))
    if None in values:
        return Estimate(None, None, None, len(shared))
    interval = _interval(replicates[1] - replicates[0]) if len(rows) > 1 else (None, None)
    return _rounded(values[1] - values[0], *interval, len(shared))


def _place(result: Result) -> tuple[str, int, int, int]:
    return result.set, result.row, result.seed, result.copy


# --- the bootstrap --------------------------------------------------------------------------------


def sums(
    results: Sequence[Result], rows: Sequence[int], metric: Metric
) -> tuple[np.ndarray, np.ndarray]:
    """([R] numerators, [R] denominators), summed over the results of each of the R rows."""
    place = {row: i for i, row in enumerate(rows)}
    counts = np.zeros((2, len(rows)))
    for result in results:
        counts[:, place[result.row]] += metric(result)
    return counts[0], counts[1]


def bootstrap_weights(n_rows: int, stream: int = 0) -> np.ndarray:
    """[REPLICATES, n_rows]: how often each row is drawn in each replicate, always the same."""
    rng = np.random.default_rng([BOOTSTRAP_SEED, stream])
    return rng.multinomial(n_rows, np.full(n_rows, 1 / n_rows), size=REPLICATES)


def estimate(numerators: np.ndarray, denominators: np.ndarray, weights: np.ndarray) -> Estimate:
    """Sum of the numerators over that of the denominators, with its interval. One row has none."""
    value = _ratio(numerators.sum(), denominators.sum())
    if value is None:
        return Estimate(None, None, None, 0)
    interval = (None, None)
    if len(numerators) > 1:
        interval = _interval(_replicates(numerators, denominators, weights))
    return _rounded(value, *interval, float(denominators.sum()))


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator else None


def _replicates(numerators, denominators, weights) -> np.ndarray:
    """[REPLICATES]; nan where a replicate has nothing to count."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return (weights @ numerators) / (weights @ denominators)


def _interval(replicates: np.ndarray) -> tuple[float, float]:
    low, high = np.nanpercentile(replicates, (2.5, 97.5))
    return float(low), float(high)


def _rounded(value: float, low: float | None, high: float | None, n: float) -> Estimate:
    bounds = (None if bound is None else round(bound, 6) for bound in (low, high))
    return Estimate(round(value, 6), *bounds, int(n) if n == int(n) else n)
