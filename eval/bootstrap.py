"""The one bootstrap of the report: prompts are drawn, each with all its seeds and copies.

    weights = bootstrap_weights(len(rows))                # always the same draws
    estimate(*sums(results, rows, metric), weights)       # Estimate(value, low, high, n)

Samples of one prompt are not independent of each other, so they stay together; two runs of the same
rows meet the same draws, so that what a row does to both cancels in their difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eval.results import Result

REPLICATES = 2000
BOOTSTRAP_SEED = 553

Metric = Callable[[Result], tuple[float, float]]  # (what counts, out of how many)
Counts = tuple[np.ndarray, np.ndarray]  # of `sums`


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


def sums(results: Sequence[Result], rows: Sequence[int], metric: Metric) -> Counts:
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
    value = ratio(numerators.sum(), denominators.sum())
    if value is None:
        return Estimate(None, None, None, 0)
    interval = (None, None)
    if len(numerators) > 1:
        interval = interval_of(replicates_of(numerators, denominators, weights))
    return rounded(value, *interval, float(denominators.sum()))


def ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator else None


def replicates_of(numerators, denominators, weights) -> np.ndarray:
    """[REPLICATES]; nan where a replicate has nothing to count."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return (weights @ numerators) / (weights @ denominators)


def interval_of(replicates: np.ndarray) -> tuple[float, float]:
    low, high = np.nanpercentile(replicates, (2.5, 97.5))
    return float(low), float(high)


def paired(
    first: Counts,
    second: Counts,
    weights: np.ndarray,
    how: Callable = np.subtract,
    n: int | None = None,
) -> Estimate:
    """how(second, first) of two ratios, by default their difference, with its interval: the same
    rows are drawn for both. n: otherwise what the second is out of (0 where a ratio is missing).
    """
    values = [ratio(*(c.sum() for c in counts)) for counts in (second, first)]
    if None in values:
        return Estimate(None, None, None, n or 0)
    interval = (None, None)
    if len(first[0]) > 1:
        interval = interval_of(how(*(replicates_of(*c, weights) for c in (second, first))))
    return rounded(float(how(*values)), *interval, float(second[1].sum()) if n is None else n)


def rounded(value: float, low: float | None, high: float | None, n: float) -> Estimate:
    bounds = (None if bound is None else round(bound, 6) for bound in (low, high))
    return Estimate(round(value, 6), *bounds, int(n) if n == int(n) else n)
