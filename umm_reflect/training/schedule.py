"""The learning rate of a run as pieces, one after another: what would be two stages is one run.

    fall, rest = Piece(1410, "cosine", 2e-6, 2e-7), Piece(2969, "constant", 2e-7, 2e-7)
    schedule = Schedule((fall, rest), warmup=50)
    schedule.lr(step)                       # of the 0-based update `step`
    schedule.factor(step, base_lr)          # for Learner.step

A piece ends after so many updates of the run, or once so many samples were seen.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, get_args

Shape = Literal["cosine", "linear", "constant"]
Unit = Literal["updates", "samples"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
UNITS: tuple[Unit, ...] = get_args(Unit)


@dataclass(frozen=True)
class Piece:
    """From where the piece before ended until `until`: from rate `start` to rate `end`.

    unit: what `until` counts, both from the start of the run: updates or samples.
    """

    until: int
    shape: Shape
    start: float
    end: float
    unit: Unit = "updates"

    def __post_init__(self) -> None:
        for name, choices in (("shape", SHAPES), ("unit", UNITS)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} of a piece is {getattr(self, name)!r}; "
                    f"choose one of {', '.join(choices)}"
                )
        if self.until < 1:
            raise ValueError(f"a piece ends at {self.until}; give 1 or more")
        for name in ("start", "end"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} of a piece is {getattr(self, name)}; give 0 or more")
        if self.shape == "constant" and self.start != self.end:
            raise ValueError(f"a constant piece goes from {self.start} to {self.end}")

    def lr(self, done: float) -> float:
        """The rate when the share `done` in [0, 1] of the piece is behind."""
        if self.shape == "constant":
            return self.start
        share = done if self.shape == "linear" else 0.5 * (1 - math.cos(math.pi * done))
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True)
class Schedule:
    """pieces: one after another. warmup: updates in which the rate rises linearly to the start of
    the first piece, which begins after them. Beyond the last piece its end holds."""

    pieces: tuple[Piece, ...]
    warmup: int = 0

    def __post_init__(self) -> None:
        if not self.pieces:
            raise ValueError("a schedule needs at least one piece")
        if self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup}; give 0 or more updates")
        for before, piece in itertools.pairwise(self.pieces):
            if before.unit == piece.unit and before.until >= piece.until:
                raise ValueError(
                    f"a piece until {piece.until} {piece.unit} follows one until {before.until}"
                )
            if before.unit != piece.unit and piece.shape != "constant":
                raise ValueError(
                    f"a {piece.shape} piece in {piece.unit} follows one in {before.unit}: where it "
                    "begins is not known; only a constant one may"
                )
        first = self.pieces[0]
        if self.warmup and first.unit == "samples" and first.shape != "constant":
            raise ValueError("after a warm-up, the first piece counts updates or is constant")
        if first.unit == "updates" and self.warmup > first.until:
            raise ValueError(f"a warm-up of {self.warmup} is longer than the first piece")

    def lr(self, step: int, samples: int = 0) -> float:
        """The learning rate of update `step` (0-based), with so many samples seen before it."""
        if step < self.warmup:
            return self.pieces[0].start * (step + 1) / self.warmup
        begin = self.warmup
        for piece in self.pieces:
            at = step if piece.unit == "updates" else samples
            if at < piece.until:
                return piece.lr((at - begin) / (piece.until - begin))
            begin = piece.until
        return self.pieces[-1].end

    def over(self, step: int, samples: int = 0) -> bool:
        """Whether the last piece has ended when so many updates are made and samples seen."""
        last = self.pieces[-1]
        return (step if last.unit == "updates" else samples) >= last.until

    def factor(self, step: int, base_lr: float, samples: int = 0) -> float:
        """lr as a multiple of the optimizer's own rate, for `Learner.step`."""
        return self.lr(step, samples) / base_lr


def release() -> Schedule:
    """The published recipe, both stages: 2e-6 falling to 2e-7 over 1,410 updates with 50 of
    warm-up, then 2e-7 until update 2,969."""
    return Schedule((Piece(1410, "cosine", 2e-6, 2e-7), Piece(2969, "constant", 2e-7, 2e-7)), 50)


def single(lr: float, total: int, warmup: int = 0, decay_fraction: float = 1.0) -> Schedule:
    """One rate, flat, then a cosine to zero over the last `decay_fraction` of `total` updates."""
    flat = round(total * (1 - decay_fraction))
    pieces = []
    if flat:
        pieces.append(Piece(flat, "constant", lr, lr))
    if flat < total:
        pieces.append(Piece(total, "cosine", lr, 0.0))
    return Schedule(tuple(pieces), warmup)
