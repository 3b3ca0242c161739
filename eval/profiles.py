"""How an evaluation samples, by profile. What a flag says counts before what a profile says.

    ours      the checkpoint's own settings: plain steps, named random streams, a final look
    release   as published: 512², 50 points, guidance 3.0 and 1.5, noise 0.8 on two steps of each
              image, the published windows, temperature 0.5, at most three edits, no final look
    official  GenEval's own protocol: its words, four images a prompt, no edit, guidance 4.0

Seeds and windows of `release` are the published ones. Its pixels cannot be: the original draws from
global generators, so that an image depends on its neighbour, and noise here has named streams.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agent.config import resolved_profile
from agent.policy import BagelPolicy
from eval.config import EvalConfig
from eval.geneval_manifest import (
    REPAIR_RNG_STEP,
    WINDOW_LENGTH,
    WINDOW_RANGE,
    first_window_start,
    slot_of,
    window_start,
)
from umm_reflect.errors import UsageError

if TYPE_CHECKING:
    from agent.policy import OnStep
    from agent.types import DrawAsk, EditView, Transition
    from umm_reflect.flow import DrawSettings
    from umm_reflect.hub import ReflectionProfile

NOISE_LEVEL = 0.8
RELEASE_SIDE, OFFICIAL_SIDE = 512, 1024  # pixels; a model that draws less draws its most


def sampling(
    config: EvalConfig, own: ReflectionProfile, view: EditView, drawable: int
) -> ReflectionProfile:
    """How the model is sampled. own: its own profile; drawable: pixels that a side may have.

    Errors: UsageError for settings that do not go together.
    """
    asked = config.reflect_config(0, view)
    if config.profile == "ours":
        return resolved_profile(own, asked)
    if config.profile == "official":
        guided = {"text_scale": 4.0, "image_scale": 1.0, "points": 50, "timestep_shift": 3.0}
        side = min(OFFICIAL_SIDE, drawable)
        return resolved_profile(_with(own, guided, side), asked)
    guided = {"text_scale": 3.0, "image_scale": 1.5, "points": 50, "timestep_shift": 3.0}
    say = replace(own.say.any_ten(), temperature=0.5, max_tokens=512)
    start = replace(_with(own, guided, min(RELEASE_SIDE, drawable)), say=say)
    profile = resolved_profile(start, asked)
    low, high = window_range(profile.first.points)
    try:
        first = noisy(profile.first, first_window_start((low, high)))
        return replace(profile, first=first, edit=noisy(profile.edit, low))
    except ValueError as error:
        raise UsageError(str(error), "Give more --steps.") from error


def _with(own: ReflectionProfile, drawing: dict[str, Any], side: int) -> ReflectionProfile:
    common = {"interval": (0.4, 1.0), "renorm": "global", "renorm_min": 0.0, **drawing}
    return replace(
        own,
        first=replace(own.first, **common),
        edit=replace(own.edit, **common),
        size=(side, side),
    )


def noisy(settings: DrawSettings, start: int) -> DrawSettings:
    """The published noise in a window that begins at this step."""
    window = (start, WINDOW_LENGTH)
    return replace(settings, step_kind="sde", noise_level=NOISE_LEVEL, window=window)


def window_range(points: int) -> tuple[int, int]:
    """Where windows may lie: as published for 50 points, the first half of fewer."""
    return WINDOW_RANGE[0], min(WINDOW_RANGE[1], points // 2)


def repair_rng_step(config: EvalConfig) -> int:
    """The part of the published windows that differs between arms."""
    if config.repair_rng_step is not None:
        return config.repair_rng_step
    return REPAIR_RNG_STEP[config.arm] if config.arm else 0


class ReleasePolicy(BagelPolicy):
    """A BAGEL model whose edits have the published windows: each sample and round its own."""

    def __init__(self, bagel, profile: ReflectionProfile, *, repair_rng_step: int):
        super().__init__(bagel, profile)
        self.repair_rng_step = repair_rng_step

    def draw(self, asks: Sequence[DrawAsk], *, on_step: OnStep | None = None) -> list[Transition]:
        """Asks with the same window are one batch; first images all have the same."""
        groups: dict[int, list[int]] = {}
        for place, ask in enumerate(asks):
            groups.setdefault(self.start_of(ask), []).append(place)
        drawn: dict[int, Transition] = {}
        for start, places in groups.items():
            one = copy.copy(self)  # the same engine, another window
            edit = noisy(self.profile.edit, start) if start >= 0 else self.profile.edit
            one.profile = replace(self.profile, edit=edit)
            made = BagelPolicy.draw(one, [asks[place] for place in places], on_step=on_step)
            drawn |= dict(zip(places, made, strict=True))
        return [drawn[place] for place in range(len(asks))]

    def start_of(self, ask: DrawAsk) -> int:
        """The first noisy step of an edit; -1 for a first image."""
        if ask.base is None:
            return -1
        set_name, row, *_ = str(ask.sample).split(":")
        slot = slot_of(int(row)) if set_name == "geneval553" else int(row)
        points = self.profile.edit.points
        return window_start(slot, ask.number - 1, self.repair_rng_step, window_range(points))
