"""Best of N first images: what the same number of images gives without a single edit.

    for one in best_of(results):
        one.n, one.any_right, one.by_own_score
    equal_images(results, max_rounds=3)     # edits against as many first images, the same prompts

Two sources of first images. With --best-of every sample has its own N (results.Candidate; the first
is that of the trajectory). Otherwise the samples of a row (all its seeds and copies) are taken
together. Either way they are independent draws, each looked at once. From m of them, the figures
for N <= m are means over all subsets of N, worked out exactly:

any_right      at least one of the N is right: what a perfect judge could pick (pass@N)
by_own_score   the one is right that the model's own SCORE picks, a tie counting as a mean;
               None where a first image was not looked at
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, floor

import numpy as np

from eval.bootstrap import (
    Estimate,
    bootstrap_weights,
    estimate,
    interval_of,
    replicates_of,
    rounded,
)
from eval.results import Look, Result

# Of each first image: the own score (None: not looked at), and whether it is right.
Pool = list[tuple[float | None, bool]]


@dataclass(frozen=True)
class BestOf:
    """Accuracy where the best of n first images is handed out."""

    n: int
    any_right: Estimate
    by_own_score: Estimate | None


@dataclass(frozen=True)
class EqualImages:
    """Accuracy at most `edits` edits, against first images of the same prompts.

    images: how many the edits took on the average. own, perfect: the best of as many first images,
    by the model's own score and by a perfect judge (between two whole numbers in proportion).
    edits_minus_own: the paired difference. edits_minus_own_at_most: the same against edits + 1
    first images, which is as many as the edits might have taken. None where there are too few.
    """

    edits: int
    images: float
    by_edits: float
    own: float
    perfect: float
    edits_minus_own: Estimate
    edits_minus_own_at_most: Estimate | None


def pools(results: Sequence[Result]) -> list[list[Pool]]:
    """Of each row, in the order of the rows: its sets of first images."""
    own = bool(results) and all(result.candidates for result in results)
    rows: dict[int, list[Pool]] = {}
    for result in results:
        first = (_own_score(result.looks[0] if result.looks else None), result.correct_at(0))
        row = rows.setdefault(result.row, [])
        if own:
            scores = [first[0], *(_own_score(c.look) for c in result.candidates)]
            right = [first[1], *(c.image.correct for c in result.candidates)]
            # no look: the plan before it was malformed
            lowest = [-1.0 if score is None else score for score in scores]
            row.append(list(zip(lowest, right, strict=True)))
        elif row:
            row[0].append(first)
        else:
            row.append([first])
    return [rows[row] for row in sorted(rows)]


def best_of(results: Sequence[Result]) -> tuple[BestOf, ...]:
    """For N = 1 up to the number of first images that there are of everything; () for none."""
    drawn = pools(results)
    if not drawn:
        return ()
    weights, ones = bootstrap_weights(len(drawn)), np.ones(len(drawn))
    found = []
    for n in range(1, _most(drawn) + 1):
        own = _shares(drawn, picked_right, n) if _scored(drawn) else None
        found.append(
            BestOf(
                n,
                estimate(_shares(drawn, _any_right, n), ones, weights),
                None if own is None else estimate(own, ones, weights),
            )
        )
    return tuple(found)


def equal_images(results: Sequence[Result], max_rounds: int) -> tuple[EqualImages, ...]:
    """For each budget of 1 to max_rounds edits; a budget that takes more images than there are
    first ones is left out. () without own scores."""
    drawn = pools(results)
    if not drawn or not _scored(drawn):
        return ()
    members: dict[int, list[Result]] = {}
    for result in results:
        members.setdefault(result.row, []).append(result)
    rows = [members[row] for row in sorted(members)]
    weights, ones, most = bootstrap_weights(len(rows)), np.ones(len(rows)), _most(drawn)
    found = []
    for k in range(1, max_rounds + 1):
        edits = np.array([np.mean([r.correct_at(k) for r in row]) for row in rows])
        taken = [np.mean([min(k + 1, len(r.images)) for r in row]) for row in rows]
        images = float(np.mean(taken))
        if images > most:
            continue

        def difference(rival: np.ndarray, edits=edits) -> Estimate:
            both = [replicates_of(values, ones, weights) for values in (edits, rival)]
            interval = interval_of(both[0] - both[1]) if len(rows) > 1 else (None, None)
            return rounded(float(np.mean(edits - rival)), *interval, len(results))

        own = _between(drawn, picked_right, images)
        enough = k + 1 <= most
        found.append(
            EqualImages(
                edits=k,
                images=round(images, 6),
                by_edits=round(float(edits.mean()), 6),
                own=round(float(own.mean()), 6),
                perfect=round(float(_between(drawn, _any_right, images).mean()), 6),
                edits_minus_own=difference(own),
                edits_minus_own_at_most=difference(_shares(drawn, picked_right, k + 1))
                if enough
                else None,
            )
        )
    return tuple(found)


def _most(drawn: Sequence[Sequence[Pool]]) -> int:
    return min(len(pool) for row in drawn for pool in row)


def _scored(drawn: Sequence[Sequence[Pool]]) -> bool:
    return all(score is not None for row in drawn for pool in row for score, _ in pool)


def _shares(drawn: Sequence[Sequence[Pool]], right: Callable[[Pool, int], float], n: int):
    """Of each row: the mean of its pools."""
    return np.array([np.mean([right(pool, n) for pool in row]) for row in drawn])


def _between(drawn: Sequence[Sequence[Pool]], right: Callable[[Pool, int], float], images: float):
    """As `_shares`, for a number of images that need not be whole."""
    low = floor(images)
    share = images - low
    below = _shares(drawn, right, low)
    return below if not share else (1 - share) * below + share * _shares(drawn, right, low + 1)


def _any_right(pool: Pool, n: int) -> float:
    return any_right([correct for _, correct in pool], n)


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


def picked(result: Result) -> int:
    """The candidate that the model's own SCORE hands out: 0 is the first image of the trajectory.
    The first of equals."""
    looks = [result.looks[0] if result.looks else None, *(c.look for c in result.candidates)]
    scores = [-1.0 if (score := _own_score(look)) is None else score for look in looks]
    return scores.index(max(scores))


def _own_score(look: Look | None) -> float | None:
    """What was said of a first image; a malformed turn is taken for the lowest score."""
    if look is None:
        return None
    return -1.0 if look.error is not None else look.score
