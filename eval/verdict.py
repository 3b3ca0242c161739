"""What a judge returns about one image.

Example:
    Verdict(correct=False, score=0.33, reason="2 of 3 circles",
            evidence={"clauses": [...], "detections": [...]})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Verdict:
    """One judge's opinion of one image.

    correct: yes or no; None where a reward has no yes or no (an aesthetic score, say).
    score: graded, in [0, 1]; 1 exactly if `correct` is True, below 0.5 if it is False.
    reason: one human sentence fragment, such as "2 of 3 circles" or "blue square missing".
    evidence: what the judge saw, a JSON-serialisable record that suffices to judge again.
    """

    correct: bool | None
    score: float
    reason: str
    evidence: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert math.isfinite(self.score), f"score {self.score} is not finite"
        assert 0.0 <= self.score <= 1.0, f"score {self.score} is outside [0, 1]"
        if self.correct is not None:
            assert self.correct == (self.score == 1.0), (self.correct, self.score)

    def to_record(self) -> dict[str, object]:
        """The verdict as a JSON-serialisable dict."""
        return {
            "correct": self.correct,
            "score": self.score,
            "reason": self.reason,
            "evidence": dict(self.evidence),
        }
