"""How the trajectories of an update are sampled.

RolloutSettings(groups=32, group_size=16, window=NoiseWindow(size=2, range=(0, 7)))
RolloutSettings(single=True, first=DrawSettings(points=15, step_kind="sde", noise_level=0.7))
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from agent.types import OURS, EditView, Options
from umm_reflect.flow import DrawSettings

# The loop as it is learned from: each turn counts, and so does the last image.
LEARNING = replace(OURS, retries=0, keep_best=False)


@dataclass(frozen=True)
class NoiseWindow:
    """Which steps of a drawing are stochastic, where the drawing has noise at all.

    size: how many; 0: all but the last. range: they lie in [first, end). shared: who has the same
    window: the members of a "group" in one update, all of one update ("step"), or nobody
    ("released": the published windows, one for each trajectory and round).
    """

    size: int = 2
    range: tuple[int, int] = (0, 10)
    shared: Literal["group", "step", "released"] = "group"

    def __post_init__(self) -> None:
        object.__setattr__(self, "range", tuple(self.range))
        low, high = self.range
        if self.size < 0 or low < 0 or (self.size and high - low < self.size):
            raise ValueError(
                f"a window of {self.size} steps does not fit the range {low} to {high}; "
                "give size <= end - first, or size 0 for all steps but the last"
            )


@dataclass(frozen=True)
class RolloutSettings:
    """How an update's trajectories are sampled.

    groups, group_size   prompts of an update, and trajectories of each prompt
    single               one image a member, no turns
    max_rounds, max_tokens, temperature   edits of a trajectory, tokens of a turn, of the words
    first, edit          how first images and edits are drawn; noise makes their steps a choice
    window               which of those steps are stochastic
    share_first          siblings have one first image; False: each draws its own
    edit_view            what an edit sees; None: what the checkpoint was trained with
    size                 pixels of a side; None: the checkpoint's own size
    options              how the loop behaves beyond its budgets
    """

    groups: int = 8
    group_size: int = 16
    single: bool = False
    max_rounds: int = 3
    max_tokens: int = 512
    temperature: float = 0.9
    first: DrawSettings = field(default_factory=lambda: DrawSettings(points=20))
    edit: DrawSettings = field(
        default_factory=lambda: DrawSettings(points=20, step_kind="sde", noise_level=1.0)
    )
    window: NoiseWindow = field(default_factory=NoiseWindow)
    share_first: bool = True
    edit_view: EditView | None = None
    size: int | None = None
    options: Options = LEARNING

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("max_tokens", 1), ("max_rounds", 1), ("size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; give {least} or more")
        if self.group_size < 2:
            raise ValueError(
                f"group_size is {self.group_size}: the members of a group are compared with each "
                "other; give 2 or more"
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; words to learn from need above 0")
        if self.options.retries or self.options.keep_best:
            raise ValueError(
                f"options.retries is {self.options.retries} and options.keep_best "
                f"{self.options.keep_best}; what is learned from has neither: give 0 and false"
            )
        for name in ("first", "edit"):
            drawing = getattr(self, name)
            if drawing.window is not None:
                raise ValueError(
                    f"{name}.window is {drawing.window}, but windows are drawn for each group: "
                    "give window.size and window.range instead"
                )
            if drawing.noise_level and self.window.size and self.window.range[1] > drawing.steps:
                raise ValueError(
                    f"window.range ends at step {self.window.range[1]}, but {name} has "
                    f"{drawing.steps} steps ({drawing.points} points)"
                )

    @property
    def forks(self) -> bool:
        """Whether siblings start from one first image."""
        return self.share_first and not self.single
