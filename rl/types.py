"""Generate, judge, credit: three steps of an update, and the type that each hands on.

    Rollout   a trajectory of a group: what the policy said and drew, before anybody judged it
    Judged    the same with a verdict on each of its images
    Scored    the same with its reward, term by term, and its advantage within the group

Example: prompt "two red circles", group 7 of the run, member 3, whose first image (shared by the
group) shows one circle and whose edit mends it, has verdicts (wrong, correct), the reward
{"final": 1.0, "edits": -0.05} = 0.95, and an advantage of 0.8 among its 16 siblings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent.types import Trajectory
from eval.verdict import Verdict

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Prompt:
    """What a group is asked. row: what the judge gets (GenEval's schema, or {"prompt": ...}).
    source: the user's image in an editing task."""

    uid: str
    text: str
    row: Mapping[str, Any]
    source: Image | None = None


@dataclass(frozen=True)
class Place:
    """Where a rollout stands in the run: update `step` (from 0), its group in that step, its
    member in the group. Names every random stream of it."""

    step: int
    group: int
    member: int

    @property
    def group_name(self) -> str:
        """The random streams that siblings share (first image, noise window)."""
        return f"step {self.step} group {self.group}"

    @property
    def name(self) -> str:
        """The random streams of this sibling alone."""
        return f"{self.group_name} member {self.member}"


@dataclass(frozen=True)
class Rollout:
    """A trajectory as it was sampled, with the contexts that each head saw still in its turns and
    transitions."""

    place: Place
    prompt: Prompt
    trajectory: Trajectory


@dataclass(frozen=True)
class Judged:
    """verdicts: one an image of the trajectory, in order."""

    rollout: Rollout
    verdicts: tuple[Verdict, ...]

    def __post_init__(self) -> None:
        images = len(self.rollout.trajectory.images)
        assert len(self.verdicts) == images, f"{len(self.verdicts)} verdicts on {images} images"


@dataclass(frozen=True)
class Scored:
    """terms: the parts of the reward, which is their sum. advantage: one number for all that this
    trajectory chose, words and images; None: its group teaches nothing (no spread) or is left out.
    """

    judged: Judged
    reward: float
    terms: Mapping[str, float] = field(default_factory=dict)
    advantage: float | None = None

    @property
    def trajectory(self) -> Trajectory:
        return self.judged.rollout.trajectory

    @property
    def place(self) -> Place:
        return self.judged.rollout.place
