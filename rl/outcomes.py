"""What became of judged trajectories: right at first, repaired, damaged, given up wrongly.

    counts = outcomes([(trajectory, verdicts), ...])        # sums, which add up over processes
    rates(add_up([counts, ...]))                            # {"first": 0.4, "repair": 0.3, ...}

    first, final      share that is right at first; of which the image that is handed out is right
    repair            of those wrong at first, the share that ends right
    damage            of those right at first, the share that ends wrong
    accuracy/k, q/k   right, and mean score, of the last image that at most k edits give
    wrong_done        of those that stopped as done, the share whose image is wrong
    look_right        of legal looks at a right image, the share that says done
    look_wrong        of legal looks at a wrong image, the share that asks for an edit
    protocol_valid    share whose turns are all legal
    edits, tokens     of a trajectory; score: of the image that is handed out
    stop/REASON       share that ended so

What needs a yes or no is left out where a judge gives none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from agent.types import StopReason, Trajectory
from eval.verdict import Verdict

# rate -> what it is a share of; all others are means over trajectories.
SHARE_OF = {
    "repair": "first_wrong",
    "damage": "first_right",
    "wrong_done": "dones",
    "look_right": "looks_at_right",
    "look_wrong": "looks_at_wrong",
    "first": "yes_or_no",
    "final": "yes_or_no",
}
COUNTED = "trajectories"


def outcomes(judged: Iterable[tuple[Trajectory, Sequence[Verdict]]]) -> Counter[str]:
    """Numerators under the names of the rates, and what they are shares of."""
    counts: Counter[str] = Counter()
    for trajectory, verdicts in judged:
        counts.update(_one(trajectory, verdicts))
    return counts


def _one(trajectory: Trajectory, verdicts: Sequence[Verdict]) -> dict[str, float]:
    last, kept = len(verdicts) - 1, verdicts[trajectory.kept]
    counts: dict[str, float] = {COUNTED: 1, "edits": last, "score": kept.score}
    counts["tokens"] = sum(len(turn.sampled_ids) for turn in trajectory.turns)
    counts["protocol_valid"] = all(turn.error is None for turn in trajectory.turns)
    counts[f"stop/{trajectory.stop.value}"] = 1
    for number, verdict in enumerate(verdicts):
        counts[f"score_of/{number}"] = verdict.score
        counts[f"images/{number}"] = 1
    # images that were never drawn count as the last one that was
    counts[f"ended_score/{last}"] = verdicts[-1].score
    if any(verdict.correct is None for verdict in verdicts):
        return counts
    for number, verdict in enumerate(verdicts):
        counts[f"right_of/{number}"] = bool(verdict.correct)
    counts[f"ended_right/{last}"] = bool(verdicts[-1].correct)
    first, final = bool(verdicts[0].correct), bool(kept.correct)
    counts |= {"yes_or_no": 1, "first": first, "final": final}
    counts |= {"first_right": first, "first_wrong": not first}
    counts |= {"repair": not first and final, "damage": first and not final}
    if trajectory.stop is StopReason.DONE:
        counts |= {"dones": 1, "wrong_done": not final}
    for step, verdict in zip(trajectory.steps, verdicts, strict=False):
        if (said := step.turn.reflection) is not None:
            seen, wanted = ("right", "done") if verdict.correct else ("wrong", "edit")
            counts[f"looks_at_{seen}"] = counts.get(f"looks_at_{seen}", 0) + 1
            hit = said.action == wanted
            counts[f"look_{seen}"] = counts.get(f"look_{seen}", 0) + hit
    return counts


def add_up(counts: Iterable[Counter[str]]) -> Counter[str]:
    """The sum over processes."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total


def rates(counts: Counter[str]) -> dict[str, float]:
    """The rates by name; {} for no trajectories."""
    every = counts[COUNTED]
    if not every:
        return {}
    found = {n: counts[n] / every for n in ("score", "protocol_valid", "edits", "tokens")}
    found |= {n: counts[n] / every for n in sorted(counts) if n.startswith("stop/")}
    found |= {n: counts[n] / counts[of] for n, of in SHARE_OF.items() if counts[of]}
    rounds = sorted(int(n.removeprefix("images/")) for n in counts if n.startswith("images/"))
    for number in rounds:
        found[f"q/{number}"] = _by_budget(counts, "score", number) / every
        if counts["yes_or_no"] == every:
            found[f"accuracy/{number}"] = _by_budget(counts, "right", number) / every
    return found


def _by_budget(counts: Counter[str], what: str, budget: int) -> float:
    """Those that drew image `budget`, and the last images of those that had ended before."""
    ended = (counts[f"ended_{what}/{number}"] for number in range(budget))
    return counts[f"{what}_of/{budget}"] + sum(ended)
