"""Best of N first images: what the same number of images gives without a single edit.

    for one in best_of(results):
        one.n, one.any_right, one.by_own_score

The samples of a row (all its seeds and copies) are independent draws of its first image. From m of
them, the figures for N <= m are means over all subsets of N, worked out exactly:

any_right      at least one of the N is right: what a perfect judge could pick (pass@N)
by_own_score   the one is right that the model's own SCORE picks, a tie counting as a mean;
               None where a first image was not looked at
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from eval.bootstrap import Estimate, bootstrap_weights, estimate
from eval.results import Result


@dataclass(frozen=True)
class BestOf:
    """Accuracy where the best of n first images is handed out."""

    n: int
    any_right: Estimate
    by_own_score: Estimate | None


def best_of(results: Sequence[Result]) -> tuple[BestOf, ...]:
    """For N = 1 up to the number of samples that every row has; () for no results."""
    rows: dict[int, list[Result]] = {}
    for result in results:
        rows.setdefault(result.row, []).append(result)
    most = min(map(len, rows.values()), default=0)
    weights, ones = bootstrap_weights(len(rows)) if rows else None, np.ones(len(rows))
    drawn = [[(_own_score(r), r.correct_at(0)) for r in rows[row]] for row in sorted(rows)]
    scored = all(score is not None for row in drawn for score, _ in row)
    found = []
    for n in range(1, most + 1):
        right = np.array([any_right([correct for _, correct in row], n) for row in drawn])
        own = np.array([picked_right(row, n) for row in drawn]) if scored else None
        found.append(
            BestOf(
                n,
                estimate(right, ones, weights),
                None if own is None else estimate(own, ones, weights),
            )
        )
    return tuple(found)


def any_right(correct: Sequence[bool], n: int) -> float:
    """The share of the subsets of n that hold a right one: 1 - C(wrong, n) / C(all, n)."""
    return 1 - comb(len(correct) - sum(correct), n) / comb(len(correct), n)


def picked_right(scored: Sequence[tuple[float, bool]], n: int) -> float:
    """The mean over the subsets of n of the share of right ones among those of the highest score.

    The highest score of a subset is s in C(at most s, n) - C(below s, n) of them, and each sample
    of score s is then as likely as another to be the one that is picked.
    """
    total = 0.0
    for level in {score for score, _ in scored}:
        below = sum(score < level for score, _ in scored)
        at = [correct for score, correct in scored if score == level]
        total += (comb(below + len(at), n) - comb(below, n)) * sum(at) / len(at)
    return total / comb(len(scored), n)


def _own_score(result: Result) -> float | None:
    """What was said of the first image; a malformed turn is taken for the lowest score."""
    if not result.looks:
        return None
    look = result.looks[0]
    return -1.0 if look.error is not None else look.score
