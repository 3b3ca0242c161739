"""Whether the model's own SCORE can be believed: what it says of images against the verdicts.

    found = calibration_of(results)
    found.bins                          # Bin(score=8, right=Estimate(0.71, ...)) for each score
    found.auroc, found.brier, found.expected_error

Every legal look counts: its score, and whether the image that it saw is right. SCORE k of 10 is
read as a probability of k / 10.

auroc            how often a right image scores above a wrong one (a tie counts half)
brier            mean of (k / 10 - right)^2; 0 is perfect, 0.25 is what always saying 5 gives
expected_error   mean over the looks of |share right at their score - k / 10|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.bootstrap import Estimate, bootstrap_weights, estimate, interval_of, rounded
from eval.results import Result

TOP = 10.0  # the highest SCORE


@dataclass(frozen=True)
class Bin:
    """All looks that gave one score. right: the share of right images, n of them the looks."""

    score: float
    right: Estimate


@dataclass(frozen=True)
class Calibration:
    """Own scores against verdicts. Figures are without a value where nothing was looked at."""

    bins: tuple[Bin, ...]
    auroc: Estimate
    brier: Estimate
    expected_error: Estimate


def calibration_of(results: Sequence[Result]) -> Calibration:
    """Over all legal looks of the results; intervals are over prompts, as everywhere."""
    looks = [
        (result.row, float(look.score), correct)
        for result in results
        for look, correct in result.legal_looks()
    ]
    rows = sorted({result.row for result in results})
    scores = sorted({score for _, score, _ in looks})
    place_row = {row: i for i, row in enumerate(rows)}
    place_score = {score: i for i, score in enumerate(scores)}
    right, wrong = np.zeros((2, len(rows), len(scores)))
    for row, score, correct in looks:
        (right if correct else wrong)[place_row[row], place_score[score]] += 1
    weights = bootstrap_weights(len(rows)) if rows else np.zeros((0, 0))
    chances = np.array(scores) / TOP
    squares = right @ (1 - chances) ** 2 + wrong @ chances**2
    return Calibration(
        bins=tuple(
            Bin(score, estimate(right[:, i], right[:, i] + wrong[:, i], weights))
            for i, score in enumerate(scores)
        ),
        auroc=_figure(_auroc, right, wrong, weights),
        brier=estimate(squares, (right + wrong).sum(1), weights),
        expected_error=_figure(
            lambda r, w: _ratio(np.abs(r - (r + w) * chances).sum(-1), (r + w).sum(-1)),
            right,
            wrong,
            weights,
        ),
    )


def _figure(of, right: np.ndarray, wrong: np.ndarray, weights: np.ndarray) -> Estimate:
    """A figure of the counts by score, right and wrong, with its interval."""
    value = float(of(right.sum(0), wrong.sum(0)))
    if np.isnan(value):
        return Estimate(None, None, None, 0)
    interval = (None, None)
    if len(right) > 1:
        interval = interval_of(of(weights @ right, weights @ wrong))
    return rounded(value, *interval, float(right.sum() + wrong.sum()))


def _auroc(right: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """[..., S] counts by rising score -> [...]; nan where there is no pair."""
    below = np.cumsum(wrong, -1) - wrong
    return _ratio((right * (below + wrong / 2)).sum(-1), right.sum(-1) * wrong.sum(-1))


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(numerator) / np.asarray(denominator)
