"""How many groups may start from an image that is right already: the others get another prompt.

    totals = Totals()                                       # part of the resume state
    settled = resample(prompts, difficulty, totals, take=sampler.take, draw=draw, judge=judge)
    settled.prompts, settled.starts, settled.totals

A right first image teaches to leave it alone, a wrong one to mend it; a run that draws well would
see hardly any of the second kind. The share is kept over the whole run, not in each update: the
release keeps it at 15 %, with at most two other prompts for a group.

With several processes each draws and judges the groups that it rolls out, and all take the same
prompts from samplers that stand alike; only the booleans have to be exchanged:

    needed = {group for group, _ in mine}
    draw = lambda asked, attempt: draw_starts(..., {g: p for g, p in asked.items() if g in needed},
                                              attempt=attempt)
    judge = lambda asked, starts: merged over processes(bench.judge_firsts(asked, starts))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rl.rollout import Start
from rl.types import Prompt

Draw = Callable[[Mapping[int, Prompt], int], dict[int, Start]]  # (group -> prompt, attempt)
JudgeFirsts = Callable[[Mapping[int, Prompt], Mapping[int, Start]], Mapping[int, bool]]


@dataclass(frozen=True)
class Difficulty:
    """share: of groups whose first image is right already; None: as they come. attempts: other
    prompts that a group is given at most."""

    share: float | None = None
    attempts: int = 2

    def __post_init__(self) -> None:
        if self.share is not None and not 0 <= self.share <= 1:
            raise ValueError(f"share is {self.share}; give a number from 0 to 1, or none")
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; give 1 or more")


@dataclass(frozen=True)
class Totals:
    """Groups of the run so far, and those of them whose first image was right."""

    groups: int = 0
    correct: int = 0


@dataclass(frozen=True)
class Settled:
    """The groups of an update as they are rolled out. correct: of each first image. replaced: how
    many other prompts were drawn on the way."""

    prompts: tuple[Prompt, ...]
    starts: dict[int, Start]
    correct: tuple[bool, ...]
    totals: Totals
    replaced: int


def keeps(corrects: Sequence[bool], totals: Totals, share: float) -> list[bool]:
    """Which groups keep their prompt: wrong ones do; a right one if, with it, the share of right
    ones among all groups so far stays within `share`.

    Example: after 6 groups, 1 of them right, a share of .15: of (right, wrong, right) the first
    would make 2 of 7 and goes, the second stays, the third would make 2 of 9 and goes.
    """
    kept, right = [], 0
    for position, correct in enumerate(corrects):
        right_share = (totals.correct + right + 1) / (totals.groups + position + 1)
        stays = not correct or right_share <= share
        kept.append(stays)
        right += correct and stays
    return kept


def resample(
    prompts: Sequence[Prompt],
    difficulty: Difficulty,
    totals: Totals,
    *,
    take: Callable[[int], Sequence[Prompt]],
    draw: Draw,
    judge: JudgeFirsts,
) -> Settled:
    """Draw the starts of an update's groups, and other prompts for right ones beyond the share.

    take(n): further prompts, alike on every process. draw: the starts of those groups that this
    process needs. judge: for every group of the mapping whether its first image is right; with
    several processes, what all of them found. Without a share nothing is judged here, and `correct`
    is empty. A group whose last attempt is right too keeps it.
    """
    prompts = list(prompts)
    starts = draw(dict(enumerate(prompts)), 0)
    if difficulty.share is None:
        return Settled(tuple(prompts), starts, (), totals, 0)
    found = judge(dict(enumerate(prompts)), starts)
    corrects, replaced = [found[group] for group in range(len(prompts))], 0
    for attempt in range(1, difficulty.attempts + 1):
        kept = keeps(corrects, totals, difficulty.share)
        going = [group for group, stays in enumerate(kept) if not stays]
        if not going:
            break
        others = dict(zip(going, take(len(going)), strict=True))
        fresh = draw(others, attempt)
        for group, correct in judge(others, fresh).items():
            corrects[group] = correct
        for group, prompt in others.items():
            prompts[group] = prompt
            starts.pop(group, None)
        starts.update(fresh)
        replaced += len(going)
    after = Totals(totals.groups + len(prompts), totals.correct + sum(corrects))
    return Settled(tuple(prompts), starts, tuple(corrects), after, replaced)
