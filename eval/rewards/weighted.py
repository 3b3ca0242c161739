"""Reward `sum`: several rewards, weighted. Each term is kept, to be logged by itself.

    reward: sum
    terms:
      - {reward: ocr, weight: 0.8}
      - {reward: pickscore, weight: 0.2, name: taste, device: "cuda:1"}

A verdict's `value` is sum(weight * the term's reward), as flow_grpo has it, its `score` the
weighted mean of the scores; `terms_of(verdict)` gives the terms. An image that one term could not
judge is not judged: a sum without a term is another reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from eval.rewards.registry import Reward, Row, facts, same_length
from eval.rewards.registry import build as build_reward
from eval.verdict import Verdict


@dataclass(frozen=True)
class Settings:
    """terms: mappings of a reward each, with `weight` and, where one occurs twice, `name`."""

    terms: tuple[dict, ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("a sum needs terms")
        names = [name_of(term) for term in self.terms]
        if len(set(names)) < len(names):
            raise ValueError(f"the terms are named {', '.join(names)}; give each its own `name`")
        for term in self.terms:
            weight = term.get("weight")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or weight <= 0:
                raise ValueError(f"term {name_of(term)} has weight {weight!r}; give one above 0")


def name_of(term: Mapping[str, Any]) -> str:
    return str(term.get("name", term.get("reward")))


def build(settings: Settings) -> WeightedReward:
    with ExitStack() as opened:  # what was built is closed when a later term cannot be
        rewards = []
        for term in settings.terms:
            own = {key: value for key, value in term.items() if key not in ("weight", "name")}
            rewards.append(build_reward(own, f"term {name_of(term)}"))
            opened.callback(rewards[-1].close)
        opened.pop_all()
    return WeightedReward(settings, rewards)


class WeightedReward:
    """The terms run side by side: one may wait for a service while another computes."""

    def __init__(self, settings: Settings, rewards: Sequence[Reward]):
        self.settings = settings
        self.weights = {name_of(term): float(term["weight"]) for term in settings.terms}
        self.rewards = dict(zip(self.weights, rewards, strict=True))
        self._pool = ThreadPoolExecutor(len(rewards))

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        same_length(images, rows)
        tasks = [self._pool.submit(r.score, images, rows) for r in self.rewards.values()]
        columns = [task.result() for task in tasks]
        return [
            self._sum(dict(zip(self.rewards, r, strict=True))) for r in zip(*columns, strict=True)
        ]

    def _sum(self, verdicts: dict[str, Verdict]) -> Verdict:
        evidence = {
            "terms": {
                name: {"weight": self.weights[name], **verdict.to_record()}
                for name, verdict in verdicts.items()
            }
        }
        failed = [f"{name}: {v.error}" for name, v in verdicts.items() if v.error is not None]
        if failed:
            return Verdict.failed("; ".join(failed), evidence)
        value = sum(self.weights[name] * verdict.reward for name, verdict in verdicts.items())
        whole = sum(self.weights.values())
        score = sum(self.weights[name] * v.score for name, v in verdicts.items()) / whole
        opinions = [v.correct for v in verdicts.values()]
        correct = None if None in opinions else all(opinions)
        if correct is not None:
            score = 1.0 if correct else min(score, 1 - 1e-9)
        reason = "; ".join(f"{name} {v.reward:.4g} ({v.reason})" for name, v in verdicts.items())
        return Verdict(correct, min(1.0, score), reason, evidence, value)

    def manifest(self) -> dict[str, Any]:
        terms = {name: reward.manifest() for name, reward in self.rewards.items()}
        return {**facts("sum", self.settings), "terms": terms}

    def check(self) -> None:
        for reward in self.rewards.values():
            reward.check()

    def start(self, images: int) -> None:
        for reward in self.rewards.values():
            if hasattr(reward, "start"):
                reward.start(images)

    def offload(self) -> None:
        for reward in self.rewards.values():
            if hasattr(reward, "offload"):
                reward.offload()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for reward in self.rewards.values():
            reward.close()


def terms_of(verdict: Verdict) -> dict[str, float]:
    """{name: reward} of the terms of a sum that were judged; {} for any other verdict."""
    terms = verdict.evidence.get("terms", {})
    return {
        name: float(term.get("value", term["score"]))
        for name, term in terms.items()
        if "error" not in term
    }
