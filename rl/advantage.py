"""Advantages: how much better than its siblings a trajectory did, one number for all it chose.

    settings = AdvantageSettings(kind="group", std_floor=0.1, clip=1.0, malformed=0.5)
    values = advantages(rewards, groups, malformed, settings)      # None: teaches nothing
    metrics = statistics(rewards, groups, values, settings)

Pure functions of the rewards of a whole step: every process that is given the same ones gets the
same answer, in whatever order they come (sums are rounded once). Sources: the released system
(floor 0.1, clip 1, malformed rule after normalisation), Flow-GRPO (arXiv 2505.05470: epsilon 1e-4,
clip 5, one std for the step as an option), RLOO (leave one out), AWM (arXiv 2509.25050: clipped at
5, then brought to [-1, 1]).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["group", "leave_one_out", "global_std"]

# A group whose rewards differ by less than this says nothing about its members.
FLAT = 1e-9


@dataclass(frozen=True)
class AdvantageSettings:
    """How rewards become advantages."""

    kind: Kind = "group"
    """group: (reward - mean) / std of the group. leave_one_out: reward - mean of the others.
    global_std: (reward - mean of the group) / std of all rewards of the step."""
    std_floor: float = 0.1
    """The std that is divided by is at least this (rewards from 0 to 1; 0 for other scales)."""
    std_epsilon: float = 0.0
    """Added to the std (Flow-GRPO: 1e-4)."""
    unbiased: bool = False
    """Divide squares by n - 1 for the std (VeRL-Omni), not by n."""
    clip: float = 5.0
    """Advantages are cut to [-clip, clip]."""
    malformed: float | None = 0.5
    """A malformed trajectory gets min(advantage, 0) minus this, whatever its siblings did. None:
    no such rule."""
    skip_flat: bool = True
    """Leave out members of groups whose rewards are all the same (else their advantage is 0)."""
    scale_to: float | None = None
    """Bring [-clip, clip] to [-this, this] in the end (AWM: 1)."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"advantage kind is {self.kind!r}; choose one of {', '.join(get_args(Kind))}"
            )
        for name in ("std_floor", "std_epsilon", "malformed"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"advantage {name} is {value}; give 0 or more")
        for name in ("clip", "scale_to"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"advantage {name} is {value}; give a number above 0")


PRESETS: dict[str, AdvantageSettings] = {
    "ours": AdvantageSettings(),
    "release": AdvantageSettings(std_floor=0.1, clip=1.0, malformed=0.5, skip_flat=False),
    "flow_grpo": AdvantageSettings(
        std_floor=0.0, std_epsilon=1e-4, clip=5.0, malformed=None, skip_flat=False
    ),
    "verl": AdvantageSettings(
        std_floor=0.0, std_epsilon=1e-4, unbiased=True, clip=5.0, malformed=None, skip_flat=False
    ),
    "awm": AdvantageSettings(
        kind="global_std", std_floor=0.0, std_epsilon=1e-4, clip=5.0, malformed=None, scale_to=1.0
    ),
    "nft": AdvantageSettings(
        kind="global_std", std_floor=0.0, std_epsilon=1e-4, clip=5.0, malformed=None
    ),
}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float], unbiased: bool) -> float:
    """0 for a single value."""
    mean, degrees = _mean(values), len(values) - unbiased
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / degrees) if degrees else 0.0


def _members(groups: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """The places of the members of each group."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        members[group].append(place)
    return members


def _is_flat(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) <= FLAT * max(1.0, *map(abs, rewards))


def advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    malformed: Sequence[bool],
    settings: AdvantageSettings,
) -> list[float | None]:
    """One advantage a trajectory, or None for one that is left out.

    rewards, groups, malformed: of all trajectories of the step, on all processes. groups: any name
    that siblings share. A group of one has nothing to be compared with: it is a flat group. In a
    flat group the malformed rule still holds for its malformed members. Errors: ValueError for a
    reward that is not finite or for lists of different lengths.
    """
    if not len(rewards) == len(groups) == len(malformed):
        raise ValueError(
            f"{len(rewards)} rewards, {len(groups)} groups and {len(malformed)} marks of malformed "
            "trajectories; give one of each for every trajectory"
        )
    for place, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"the reward of trajectory {place} is {reward}")
    out: list[float | None] = [None] * len(rewards)
    of_step = _std(rewards, settings.unbiased) if rewards else 0.0
    for places in _members(groups).values():
        own = [rewards[place] for place in places]
        flat = _is_flat(own)
        for place, value in zip(places, _normalised(own, of_step, settings), strict=True):
            value = max(-settings.clip, min(settings.clip, 0.0 if flat else value))
            if malformed[place] and settings.malformed is not None:
                value = max(min(value, 0.0) - settings.malformed, -settings.clip)
            elif flat and settings.skip_flat:
                continue
            out[place] = value * (settings.scale_to or settings.clip) / settings.clip
    return out


def _normalised(
    rewards: Sequence[float], std_of_step: float, settings: AdvantageSettings
) -> list[float]:
    """The advantages within one group, not yet clipped."""
    if len(rewards) == 1:
        return [0.0]
    mean, n = _mean(rewards), len(rewards)
    if settings.kind == "leave_one_out":  # r - (n mean - r) / (n - 1)
        return [(reward - mean) * n / (n - 1) for reward in rewards]
    own = settings.kind == "group"
    std = _std(rewards, settings.unbiased) if own else std_of_step
    scale = max(std, settings.std_floor) + settings.std_epsilon
    return [(reward - mean) / scale if scale else 0.0 for reward in rewards]


def statistics(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    values: Sequence[float | None],
    settings: AdvantageSettings,
) -> dict[str, float]:
    """What is logged of a step; {} for an empty one.

    zero_std_ratio: share of groups without a spread. saturation: share of the advantages that were
    clipped. skipped: share of trajectories left out.
    """
    if not rewards:
        return {}
    members = [[rewards[place] for place in places] for places in _members(groups).values()]
    used = [value for value in values if value is not None]
    limit = (settings.scale_to or settings.clip) * (1 - 1e-12)
    found = {
        "reward_mean": _mean(rewards),
        "reward_std": _std(rewards, False),
        "group_std": _mean([_std(own, False) for own in members]),
        "zero_std_ratio": _mean([float(_is_flat(own)) for own in members]),
        "skipped": 1 - len(used) / len(values),
    }
    if used:
        found |= {
            "advantage_mean": _mean(used),
            "advantage_abs": _mean([abs(value) for value in used]),
            "advantage_positive": _mean([float(value > 0) for value in used]),
            "saturation": _mean([float(abs(value) >= limit) for value in used]),
        }
    return found
