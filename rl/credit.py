"""Rewards and advantages of a step, the same on every process.

    scored, values = credit(judged, made, config, processes)

Each process rewards its own rollouts; advantages are worked out from all of them, in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl.advantage import advantages, statistics
from rl.judge import unjudged
from rl.outcomes import add_up, outcomes, rates
from rl.reward import is_malformed, score
from rl.train_config import Config
from rl.types import Judged, Scored
from umm_reflect.training.processes import Processes


def credit(
    judged: Sequence[Judged], made: int, config: Config, processes: Processes
) -> tuple[list[Scored], dict[str, float]]:
    """This process's rollouts with their credit (those with an image that nobody judged are left
    out, of `made` that there were), and what is logged of all of them."""
    own: list[tuple[tuple[int, int], float, dict[str, float], bool]] = []
    whole = [one for one in judged if unjudged(one) is None]
    for one in whole:
        place, trajectory = one.rollout.place, one.rollout.trajectory
        reward, terms = score(one, config.reward)
        malformed = bool(trajectory.turns) and is_malformed(trajectory)
        own.append(((place.group, place.member), reward, dict(terms), malformed))
    everyone = [entry for part in processes.gather(own) for entry in part]
    everyone.sort(key=lambda entry: entry[0])
    groups = [place[0] for place, *_ in everyone]
    rewards = [reward for _, reward, *_ in everyone]
    marks = [malformed for *_, malformed in everyone]
    found = advantages(rewards, groups, marks, config.advantage)
    advantage = dict(zip([place for place, *_ in everyone], found, strict=True))
    scored = [
        Scored(one, reward, terms, advantage[place])
        for one, (place, reward, terms, _) in zip(whole, own, strict=True)
    ]
    counts = processes.gather(outcomes((s.trajectory, s.judged.verdicts) for s in scored))
    values = {f"rollout/{name}": value for name, value in rates(add_up(counts)).items()}
    values |= statistics(rewards, groups, found, config.advantage)
    for name in dict.fromkeys(name for _, _, terms, _ in everyone for name in terms):
        values[f"reward/{name}"] = sum(e[2].get(name, 0.0) for e in everyone) / len(everyone)
    values["unjudged"] = float(sum(processes.gather(made - len(whole))))
    return scored, values
