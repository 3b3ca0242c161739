"""From results to figures: accuracies, repair, damage, looking, each with a 95 % interval. Pure.

    report = set_report(results, max_rounds=3)        # of one set and one edit view
    report.all["final_accuracy"]                      # Estimate(value, low, high, n)
    difference(local, full, "final_accuracy", max_rounds=3)

Every figure is a ratio of two sums over results: `metrics` says which. Intervals are percentiles
of a bootstrap over prompts: a row is drawn with all its seeds and copies, since these are not
independent of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agent.types import StopReason
from eval.best_of import BestOf, EqualImages, best_of, equal_images
from eval.bootstrap import (
    Estimate,
    Metric,
    bootstrap_weights,
    estimate,
    interval_of,
    paired,
    ratio,
    replicates_of,
    rounded,
    sums,
)
from eval.calibration import Calibration, calibration_of
from eval.results import Result

LAST = 1_000_000  # a budget that no trajectory reaches: its last image
UNCOMPARED = ("stop_", "score_at_", "images_at_")
NOT_HELD_OUT = "single_object"  # its few specs are in the training data, see shapes/sets.py


Summary = dict[str, Estimate]


@dataclass(frozen=True)
class SetReport:
    """The figures of one set under one edit view. held_out: all rows but those of single_object,
    None where that is no difference. calibration: the model's own SCORE against the verdicts.
    best_of: what first images give without an edit; equal_images: that against edits, at as many
    images."""

    rows: int
    samples: int
    seeds: tuple[int, ...]
    all: Summary
    held_out: Summary | None
    families: Mapping[str, Summary]
    calibration: Calibration
    best_of: tuple[BestOf, ...]
    equal_images: tuple[EqualImages, ...]


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
    score_at_k             the graded score of the same image, where it is known
    images_at_k            how many images that took
    final_accuracy         the image that is handed out (the kept one, not always the last)
    repair, damage         wrong first images that are handed out right, and the reverse
    repair_last, damage_last   the same of the last image, which is what the published rates mean
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
    for k in range(max_rounds + 1):
        named[f"score_at_{k}"] = _graded_at(k)
        named[f"images_at_{k}"] = _images_at(k)
    named |= {
        "final_accuracy": lambda r: (r.correct, 1),
        "repair": lambda r: (r.correct and not r.correct_at(0), not r.correct_at(0)),
        "damage": lambda r: (r.correct_at(0) and not r.correct, r.correct_at(0)),
        "repair_last": lambda r: (r.correct_at(LAST) and not r.correct_at(0), not r.correct_at(0)),
        "damage_last": lambda r: (r.correct_at(0) and not r.correct_at(LAST), r.correct_at(0)),
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


def _graded_at(budget: int) -> Metric:
    def count(result: Result) -> tuple[float, float]:
        score = result.images[min(budget, len(result.images) - 1)].score
        return (0, 0) if score is None else (score, 1)

    return count


def _images_at(budget: int) -> Metric:
    return lambda r: (min(budget + 1, len(r.images)), 1)


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
            names = [name for name in metrics(max_rounds) if not name.startswith(UNCOMPARED)]
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
        calibration=calibration_of(results),
        best_of=best_of(results),
        equal_images=equal_images(results, max_rounds),
    )


def summary(results: Sequence[Result], max_rounds: int) -> Summary:
    """Every figure of `metrics`, and `any_sample_right`: prompts of which one sample at least is
    handed out right (GenEval's "correct prompts"). Left out are stop reasons that did not occur and
    graded scores that no verdict gave."""
    rows = sorted({r.row for r in results})
    weights = bootstrap_weights(len(rows))
    figures = {
        name: estimate(*sums(results, rows, metric), weights)
        for name, metric in metrics(max_rounds).items()
    }
    right = np.zeros(len(rows))
    right[[rows.index(r.row) for r in results if r.correct]] = 1
    figures["any_sample_right"] = estimate(right, np.ones(len(rows)), weights)
    return {n: e for n, e in figures.items() if not _says_nothing(n, e)}


def _says_nothing(name: str, figure: Estimate) -> bool:
    if name.startswith("score_at_"):
        return figure.n == 0
    return name.startswith("stop_") and figure.value == 0


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
            values.append(ratio(*(c.sum() for c in counts)))
            replicates.append(replicates_of(*counts, bootstrap_weights(len(rows), place)))
        interval = interval_of(np.mean(replicates, axis=0))
        figures[f"macro_{name}"] = rounded(float(np.mean(values)), *interval, len(families))
    return figures


def difference(
    first: Sequence[Result], second: Sequence[Result], name: str, max_rounds: int
) -> Estimate:
    """Figure `name` of `second` minus that of `first`, on the samples that both hold.

    The bootstrap draws the same rows for both, so what a row does to both cancels. n: the samples
    of each. Errors: ValueError where they share no sample.
    """
    shared = {place_of(r) for r in first} & {place_of(r) for r in second}
    if not shared:
        raise ValueError("the two runs share no row and seed, so nothing can be compared")
    rows = sorted({place[1] for place in shared})
    weights = bootstrap_weights(len(rows))
    metric = metrics(max_rounds)[name]
    counts = [
        sums([r for r in results if place_of(r) in shared], rows, metric)
        for results in (first, second)
    ]
    return paired(*counts, weights, n=len(shared))


def macro_difference(
    first: Sequence[Result], second: Sequence[Result], name: str, max_rounds: int
) -> Estimate:
    """As `difference`, of the plain mean over the families; `name` is that of an accuracy.

    The two hold the same samples. n: the number of families. Errors: ValueError for no samples.
    """
    metric = metrics(max_rounds)[name]
    families = dict.fromkeys(result.family for result in first)
    if not families:
        raise ValueError("the two runs share no row and seed, so nothing can be compared")
    values, replicates = [], []
    for place, family in enumerate(families):
        pair = [[r for r in run if r.family == family] for run in (first, second)]
        rows = sorted({r.row for r in pair[0]})
        weights = bootstrap_weights(len(rows), place)
        counts = [sums(run, rows, metric) for run in pair]
        values.append(np.subtract(*(n.sum() / d.sum() for n, d in reversed(counts))))
        replicates.append(np.subtract(*(replicates_of(*c, weights) for c in reversed(counts))))
    interval = interval_of(np.mean(replicates, axis=0))
    return rounded(float(np.mean(values)), *interval, len(families))


def place_of(result: Result) -> tuple[str, int, int, int]:
    """What a sample is of, whatever the edit view: (set, row, seed, copy)."""
    return result.set, result.row, result.seed, result.copy
