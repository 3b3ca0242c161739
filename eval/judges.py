"""The judges of an evaluation: one reward for each of its sets, built when it is first needed.

with Judges(config, device="cuda:1") as judges:
    verdicts = judges(images, rows, "geneval553")
    judges.manifests()                       # what judged so far, comparable across machines
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from PIL.Image import Image

from eval.binding import lasting
from eval.config import EvalConfig
from eval.rewards.registry import REWARDS, Reward, Row, build
from eval.sets import short_name
from eval.verdict import Verdict
from umm_reflect.errors import UserError


class Judges:
    """Judges by set name (`short_name`). device: where the networks of a judge run that names no
    device itself."""

    def __init__(self, config: EvalConfig, *, device: str | None = None):
        self._wanted = {
            short_name(name): with_place(config.reward_mapping(name), config.workers, device)
            for name in config.sets
        }
        self._built: dict[str, Reward] = {}

    def __call__(self, images: Sequence[Image], rows: Sequence[Row], name: str) -> list[Verdict]:
        """One verdict per image and row of a set.

        Errors: as the reward's `score`; UserError for an image that could not be judged, since a
        figure without it would be of fewer images than it says.
        """
        if name not in self._built:
            self._built[name] = build(self._wanted[name], "the judge")
        verdicts = self._built[name].score(images, rows)
        for verdict in verdicts:
            if verdict.error is not None:
                raise UserError(
                    f"the {self._wanted[name]['reward']} judge gave no verdict: {verdict.error}",
                    "Mend it and go on with --resume.",
                )
            if verdict.correct is None:
                raise UserError(
                    f"the {self._wanted[name]['reward']} judge says neither right nor wrong",
                    "An accuracy needs a yes or no, as shapes and geneval give it.",
                )
        return verdicts

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Set -> what judged it, without where and how fast it did."""
        return {name: lasting(reward.manifest()) for name, reward in self._built.items()}

    def __enter__(self) -> Judges:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reward in self._built.values():
            reward.close()


def with_place(mapping: dict[str, Any], workers: int, device: str | None) -> dict[str, Any]:
    """The mapping with workers and device, where that reward has such settings and names none."""
    if mapping["reward"] not in REWARDS:
        return mapping  # `build` says so, with a hint
    settings = importlib.import_module(REWARDS[mapping["reward"]]).Settings
    known = {field.name for field in dataclasses.fields(settings)}
    place = {"workers": workers, "device": device}
    return {n: v for n, v in place.items() if n in known and v is not None} | mapping
