"""What a judge returns about one image.

Example:
    Verdict(correct=False, score=0.33, reason="2 of 3 circles",
            evidence={"clauses": [...], "detections": [...]})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """One judge's opinion of one image.

    correct: yes or no; None where a reward has no yes or no (an aesthetic score, say).
    score: graded, in [0, 1]; 1 exactly if `correct` is True (GenEval's: below 0.5 if it is False).
    reason: one human sentence fragment, such as "2 of 3 circles" or "blue square missing".
    evidence: what the judge saw, a JSON-serialisable record that suffices to judge again.
    value: the number as its authors publish it where that is not `score`, in a scale of its own:
        a log-likelihood, a preference.
    error: why there is no opinion (an answer that cannot be parsed, a judge that did not answer).
        Such a verdict has no `reward`: it is counted and left out, never taken for 0.
    """

    correct: bool | None
    score: float
    reason: str
    evidence: Mapping[str, object] = field(default_factory=dict)
    value: float | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        assert math.isfinite(self.score), f"score {self.score} is not finite"
        assert 0.0 <= self.score <= 1.0, f"score {self.score} is outside [0, 1]"
        assert self.value is None or math.isfinite(self.value), f"value {self.value} is not finite"
        if self.correct is not None:
            assert self.correct == (self.score == 1.0), (self.correct, self.score)
        assert self.error is None or (self.correct is None and self.score == 0.0), self.error

    @classmethod
    def failed(cls, error: str, evidence: Mapping[str, object] | None = None) -> Verdict:
        """No opinion, and why."""
        return cls(None, 0.0, f"not judged: {error}", evidence or {}, error=error)

    @property
    def reward(self) -> float:
        """What RL takes: `value`, or `score` where there is none. ValueError without an opinion."""
        if self.error is not None:
            raise ValueError(f"an image without a verdict has no reward ({self.error})")
        return self.score if self.value is None else self.value

    def to_record(self) -> dict[str, object]:
        """The verdict as a JSON-serialisable dict; `value` and `error` only where there is one."""
        record: dict[str, object] = {
            "correct": self.correct,
            "score": self.score,
            "reason": self.reason,
            "evidence": dict(self.evidence),
        }
        own = {"value": self.value, "error": self.error}
        return record | {name: value for name, value in own.items() if value is not None}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Verdict:
        """The verdict of `to_record`. ValueError for anything else."""
        try:
            return cls(**record)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"no record of a verdict: {error}") from error
