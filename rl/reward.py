"""The reward of a trajectory: a sum of terms, each logged, from what the judge says of its images.

    reward, terms = score(judged, PRESETS["ours"])     # 0.95, {"final": 1.0, "edits": -0.05}
    for problem in loopholes(PRESETS["release"], max_rounds=3):
        print(problem)                                 # which detours this reward pays for

With q_0 .. q_T the qualities of the images in order (1 if right, below 0.5 if wrong, as GenEval's
verdicts have it), d_t = q_{t+1} - q_t, and what was said last:

    final       q_T
    gain        sum of the positive d_t
    sustained   the same without the largest of them
    loss        sum of the negative d_t, as a penalty
    wrong_done  "done" although the last image is wrong
    wrong_cap   ended in another legal way (no rounds left, say) while the last image is wrong
    edits       every edit that was asked for, the one that no round was left for too
    malformed   ended by a malformed turn
    format      the share of turns that are legal

Sources: the published reward of the released system (preset "release"); "ours" mends its holes, see
`loopholes`. A trajectory without turns (single-image RL) is rewarded with its verdict alone. Where
the judge has no yes or no (a preference, a likelihood), nothing is right or wrong and only the
quality counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise, product

from agent.types import StopReason, Trajectory
from rl.types import Judged

MALFORMED_STOPS = (StopReason.MALFORMED, StopReason.TOO_LONG, StopReason.REPEATED_TEXT)


@dataclass(frozen=True)
class RewardSettings:
    """How much each term counts; 0 switches it off. The defaults are the preset "ours"."""

    final: float = 1.0
    """Quality of the last image."""
    gain: float = 0.3
    """Bonus on each improvement of the quality."""
    sustained: float = 0.0
    """Bonus on all improvements but the largest."""
    loss: float = 0.5
    """Penalty on each decline of the quality."""
    wrong_done: float = 0.5
    """Penalty on saying done while the image is wrong."""
    wrong_cap: float = 0.1
    """Penalty on ending in another legal way while the image is wrong."""
    edit_cost: float = 0.05
    """Penalty on each edit that is asked for."""
    malformed: float = 0.6
    """Penalty on a malformed turn, which ends the trajectory."""
    format: float = 0.0
    """Bonus on the share of legal turns."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"reward {field.name} is {value}; give 0 (off) or more: the penalties are "
                    "subtracted"
                )
        if self.final == 0:
            raise ValueError("reward final is 0: nothing would ask for a right image")


PRESETS: dict[str, RewardSettings] = {
    "ours": RewardSettings(),
    "release": RewardSettings(
        final=1.0,
        gain=0.3,
        sustained=0.3,
        loss=0.5,
        wrong_done=0.5,
        wrong_cap=0.0,
        edit_cost=0.0,
        malformed=0.0,
        format=0.0,
    ),
}


def is_malformed(trajectory: Trajectory) -> bool:
    """Whether a malformed turn ended it."""
    return trajectory.stop in MALFORMED_STOPS


def edits_asked(trajectory: Trajectory) -> int:
    """Legal turns about an image that asked for an edit, drawn or not."""
    said = [step.turn.reflection for step in trajectory.steps]
    return sum(reflection is not None and reflection.action == "edit" for reflection in said)


def trajectory_reward(
    qualities: Sequence[float],
    corrects: Sequence[bool | None],
    stop: StopReason,
    edits: int,
    settings: RewardSettings,
    *,
    turns: int | None = None,
) -> dict[str, float]:
    """The terms that apply, by name; the reward is their sum.

    qualities, corrects: of all images, in order. edits: that were asked for. turns: that were said
    (None: edits and one more, unless the edits ended it), for the term "format" alone.
    """
    assert len(qualities) == len(corrects) > 0, (len(qualities), len(corrects))
    if edits < len(qualities) - 1:
        raise ValueError(f"{len(qualities)} images come from more than the {edits} edits asked for")
    if not all(map(math.isfinite, qualities)):
        raise ValueError(f"the qualities {list(qualities)} are not all finite numbers")
    changes = [later - earlier for earlier, later in pairwise(qualities)]
    gains = [change for change in changes if change > 0]
    wrong = corrects[-1] is False
    malformed = stop in MALFORMED_STOPS
    if turns is None:
        turns = edits + (malformed or stop is StopReason.DONE)
    terms = {
        "final": settings.final * qualities[-1],
        "gain": settings.gain * math.fsum(gains),
        "sustained": settings.sustained * (math.fsum(gains) - max(gains, default=0.0)),
        "loss": settings.loss * math.fsum(change for change in changes if change < 0),
        "wrong_done": -settings.wrong_done * (wrong and stop is StopReason.DONE),
        "wrong_cap": -settings.wrong_cap
        * (wrong and not malformed and stop is not StopReason.DONE),
        "edits": -settings.edit_cost * edits,
        "malformed": -settings.malformed * malformed,
        "format": settings.format * (turns - malformed) / max(turns, 1),
    }
    return {name: value for name, value in terms.items() if name == "final" or value != 0}


def score(judged: Judged, settings: RewardSettings) -> tuple[float, dict[str, float]]:
    """The reward of a judged trajectory and its terms.

    Errors: ValueError where a verdict is missing (the judge failed on an image) or where the loop
    hands out another image than the last one, which is what the reward is about.
    """
    trajectory = judged.rollout.trajectory
    rewards = [verdict.reward for verdict in judged.verdicts]
    if not trajectory.turns:
        return rewards[-1], {"final": rewards[-1]}
    if trajectory.kept != len(rewards) - 1:
        raise ValueError(
            f"image {trajectory.kept} of {len(rewards)} is handed out, but the last one is "
            "rewarded; set keep_best to false"
        )
    terms = trajectory_reward(
        rewards,
        [verdict.correct for verdict in judged.verdicts],
        trajectory.stop,
        edits_asked(trajectory),
        settings,
        turns=len(trajectory.turns),
    )
    return math.fsum(terms.values()), terms


# --- what a reward pays for -----------------------------------------------------------------------

_LEVELS = (0.0, 0.25, 0.45, 1.0)  # qualities that are tried; only 1 is right
_LONGEST = 4  # edits of a path that is tried
_EQUAL = 1e-9


def _total(path: Sequence[float], stop: StopReason, edits: int, settings: RewardSettings) -> float:
    right = [quality == 1.0 for quality in path]
    return math.fsum(trajectory_reward(path, right, stop, edits, settings).values())


def _endings(
    path: Sequence[float], max_rounds: int, settings: RewardSettings
) -> Iterator[tuple[str, float]]:
    """How a path may end legally, and the reward: "done", or "edit" when no round is left."""
    drawn = len(path) - 1
    yield "done", _total(path, StopReason.DONE, drawn, settings)
    if drawn == max_rounds:
        yield "edit", _total(path, StopReason.MAX_ROUNDS, drawn + 1, settings)


def _words(path: Sequence[float], ending: str) -> str:
    return f"{' → '.join(f'{quality:g}' for quality in path)}, {ending}"


def loopholes(settings: RewardSettings, max_rounds: int) -> list[str]:
    """What this reward pays for and should not, one sentence a hole with an example; [] if none.

    All paths of up to four edits over four levels of quality are tried. Asked is whether a detour
    earns more than the direct repair, whether going on with a right image earns as much as
    stopping, whether a wrong "done" earns as much as trying on in vain to the end, and whether a
    malformed turn earns more than a legal end (which the malformed rule of `rl.advantage` mends).
    """
    if max_rounds < 1:
        return []
    worst: dict[str, tuple[float, str]] = {}

    def hole(kind: str, excess: float, sentence: str) -> None:
        if kind not in worst or excess > worst[kind][0] + _EQUAL:
            worst[kind] = excess, sentence

    paths = [
        p for n in range(min(max_rounds, _LONGEST) + 1) for p in product(_LEVELS, repeat=n + 1)
    ]
    for path in paths:
        drawn = len(path) - 1
        for ending, reward in _endings(path, max_rounds, settings):
            if path[0] != 1.0 and drawn > 1:
                direct = _total((path[0], 1.0), StopReason.DONE, 1, settings)
                if reward > direct + _EQUAL:
                    hole(
                        "detour",
                        reward - direct,
                        f"a detour beats the direct repair: {_words(path, ending)} earns "
                        f"{reward:.3f}, {_words((path[0], 1.0), 'done')} {direct:.3f}",
                    )
            if path[0] == 1.0 and drawn:
                stopped = _total(path[:1], StopReason.DONE, 0, settings)
                if reward > stopped - _EQUAL:
                    hole(
                        "right",
                        reward - stopped,
                        f"going on with a right image earns as much as stopping: "
                        f"{_words(path, ending)} earns {reward:.3f}, 1, done {stopped:.3f}",
                    )
            broken = _total(path, StopReason.MALFORMED, drawn, settings)
            if broken > reward + _EQUAL:
                hole(
                    "malformed",
                    broken - reward,
                    f"a malformed turn beats a legal end: {_words(path, 'malformed')} earns "
                    f"{broken:.3f}, {_words(path, ending)} {reward:.3f}",
                )
    for quality in _LEVELS[:-1]:
        gave_up = _total((quality,), StopReason.DONE, 0, settings)
        path = (quality,) * (max_rounds + 1)
        tried = _total(path, StopReason.MAX_ROUNDS, max_rounds + 1, settings)
        if gave_up > tried - _EQUAL:
            hole(
                "wrong",
                gave_up - tried,
                f"a wrong done earns as much as trying on in vain: {_words((quality,), 'done')} "
                f"earns {gave_up:.3f}, {max_rounds} failed edits and the end of the rounds "
                f"{tried:.3f}",
            )
    return [sentence for _, sentence in worst.values()]
