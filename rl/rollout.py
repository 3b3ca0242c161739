"""Rollouts: every member of every group draws, looks and edits in its own way; nothing is judged.

    mine = share_of(rank, world, settings)                      # [(group, member), ...]
    rollouts = roll_out(bagel, profile, prompts, settings, step=0, seed=0, mine=mine)

    settings.single = False    the siblings of a group share one first image (and, in layout "sft",
                               the plan before it), then each runs the agent's loop
    settings.single = True     each member draws one image of its own from the prompt, no turns

It is the loop of `agent/`, on gathered weights, without collectives: a rank that is done waits for
nobody. What was chosen is in the turns and transitions: ids, allowed sets, log-probs, the states of
the noise window and the final latent in fp32. Every random draw has a name (rl/types.py, `Place`),
so a rollout does not depend on the number of processes, the batch size or a resume (on a GPU but
for rounding: kernels are chosen by shapes, and long texts are said by captured steps).

A new policy (engine, prefix cache) is made on each call: nothing outlives an update of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from agent.direct import draw_once
from agent.loop import run_episodes
from agent.policy import BagelPolicy, ForcedTurns, OnStep, OnToken
from agent.types import Ask, DrawAsk, Options, Trajectory, Transition, Turn
from rl.rollout_settings import RolloutSettings
from rl.types import Place, Prompt, Rollout
from umm_reflect.errors import UserError
from umm_reflect.flow import DrawSettings, released_window_start, sample_window_start
from umm_reflect.rng import stream

if TYPE_CHECKING:
    from PIL.Image import Image

    from umm_reflect.context import ImageSegment
    from umm_reflect.hub import ReflectionProfile
    from umm_reflect.model import Bagel

# Forced turns repeat words and edits that may change nothing: no guard ends them.
UNGUARDED = {"stop_repeated_text": False, "same_edit_limit": 0, "min_change": 0.0}
PLAN_RETRIES = 3  # of the plan that siblings share: nobody learns from it, so it may be said anew

Which = tuple[int, int]  # (group, member)
OnBatch = Callable[[int, int], None]  # (done, all) of the rollouts of this process


class SameNoise(UserError):
    """Members of a group drew the same image: their comparison would teach nothing."""


# --- who does what --------------------------------------------------------------------------------


def share_of(rank: int, world: int, settings: RolloutSettings) -> list[Which]:
    """Which (group, member) a process makes: whole groups where they divide, else equal shares of
    the members in order (the first images of a group that is split are drawn by each share)."""
    assert 0 <= rank < world, f"rank {rank} of {world}"
    everyone = [(g, m) for g in range(settings.groups) for m in range(settings.group_size)]
    return everyone[len(everyone) * rank // world : len(everyone) * (rank + 1) // world]


def window_of(
    settings: RolloutSettings, place: Place, number: int, seed: int
) -> tuple[int, int] | None:
    """(first step, how many) of the noise window of image `number`; None: all steps but the last.

    The published windows count updates from 1 and edits from 0, and first images have all the same.
    """
    window = settings.window
    if window.size == 0:
        return None
    if window.shared == "released":
        trajectory = place.group * settings.group_size + place.member
        identity = (seed, place.step + 1, trajectory, number - 1)
        start = released_window_start(identity if number else None, window.range, window.size)
    else:
        name = place.group_name if window.shared == "group" else f"step {place.step}"
        start = sample_window_start(window.range, window.size, stream(seed, name, 0, "window"))
    return start, window.size


def rollout_profile(profile: ReflectionProfile, settings: RolloutSettings) -> ReflectionProfile:
    """The checkpoint's profile with what a rollout samples by."""
    say = replace(
        profile.say.any_ten(),
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        max_rounds=settings.max_rounds,
    )
    changes = {"edit_view": settings.edit_view or profile.edit_view, "say": say}
    if settings.size is not None:
        rule = replace(profile.transforms.vae, max_size=settings.size, min_size=settings.size)
        changes["size"] = (settings.size, settings.size)
        changes["transforms"] = replace(profile.transforms, vae=rule)
    return replace(profile, first=settings.first, edit=settings.edit, **changes)


# --- the policy -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Start:
    """What the siblings of a group share: the first image and, in layout "sft", the plan before it,
    none of whose tokens counts as chosen."""

    first: Transition
    plan: Turn | None = None


class RolloutPolicy(BagelPolicy):
    """The model as it is sampled from: noise windows by name, and a start that siblings share."""

    keep_latents = True

    def __init__(self, bagel: Bagel, profile: ReflectionProfile, settings: RolloutSettings):
        super().__init__(bagel, rollout_profile(profile, settings))
        self.engine.keep_bytes = kept_bytes(bagel.device, self.engine.keep_bytes)
        self.settings = settings
        self.places: dict[int | str, Place] = {}  # by the name of the random streams
        self.starts: Mapping[int, Start] = {}  # by group
        self._segments: dict[int, tuple[Image, ImageSegment]] = {}

    def image(self, image: Image) -> ImageSegment:
        """One segment an image: what siblings are given to edit is read once for all of them."""
        if id(image) not in self._segments:
            self._segments[id(image)] = image, super().image(image)
        return self._segments[id(image)][1]

    def settings_of(self, ask: DrawAsk) -> DrawSettings:
        own = super().settings_of(ask)
        if own.noise_level == 0:
            return own
        place = self.places[ask.sample]
        return replace(own, window=window_of(self.settings, place, ask.number, ask.seed))

    def say(
        self,
        asks: Sequence[Ask],
        *,
        max_tokens: int,
        options: Options,
        on_token: OnToken | None = None,
        force: Sequence[Sequence[int]] | None = None,
    ) -> list[Turn]:
        starts = [self._start(a.sample) if a.source == "None" else None for a in asks]
        given = [start and start.plan for start in starts]
        rest = [i for i, turn in enumerate(given) if turn is None]
        said = super().say(
            [asks[i] for i in rest],
            max_tokens=max_tokens,
            options=options,
            on_token=on_token,
            force=force and [force[i] for i in rest],
        )
        for i, turn in zip(rest, said, strict=True):
            given[i] = turn
        return given

    def draw(self, asks: Sequence[DrawAsk], *, on_step: OnStep | None = None) -> list[Transition]:
        starts = [self._start(a.sample) if a.base is None else None for a in asks]
        given = [start and start.first for start in starts]
        rest = [i for i, transition in enumerate(given) if transition is None]
        drawn = super().draw([asks[i] for i in rest], on_step=on_step)
        for i, transition in zip(rest, drawn, strict=True):
            given[i] = transition
        return given

    def _start(self, sample: int | str) -> Start | None:
        place = self.places.get(sample)
        return self.starts.get(place.group) if place else None


# --- rollouts -------------------------------------------------------------------------------------


def draw_starts(
    bagel: Bagel,
    profile: ReflectionProfile,
    prompts: Mapping[int, Prompt],
    settings: RolloutSettings,
    *,
    step: int,
    seed: int,
    batch_size: int = 64,
    attempt: int = 0,
    force_turns: int | None = None,
    on_batch: OnBatch | None = None,
    who: type[RolloutPolicy] = RolloutPolicy,
) -> dict[int, Start]:
    """The shared start of each of these groups (none for an editing task: its image is given).

    attempt: 0 for the prompt that the group was given first, and so on: each has its own noise.
    """
    groups = [group for group, prompt in prompts.items() if prompt.source is None]
    policy = who(bagel, profile, settings)
    places = {_start_name(Place(step, g, 0), attempt): Place(step, g, 0) for g in groups}
    policy.places.update(places)
    options, starts = replace(settings.options, retries=PLAN_RETRIES), {}
    for part in _parts(list(zip(groups, places, strict=True)), batch_size, on_batch):
        with _broken_numbers_named():
            drawn = run_episodes(
                _speaker(policy, force_turns),
                [prompts[group].text for group, _ in part],
                max_rounds=0,
                max_tokens=settings.max_tokens,
                options=options,
                seed=seed,
                samples=[name for _, name in part],
            )
        for (group, _), one in zip(part, drawn, strict=True):
            plan = one.plan and replace(one.plan, chosen=(False,) * len(one.plan.chosen))
            starts[group] = Start(one.first, plan)
    return starts


def roll_out(
    bagel: Bagel,
    profile: ReflectionProfile,
    prompts: Sequence[Prompt],
    settings: RolloutSettings,
    *,
    step: int,
    seed: int,
    mine: Sequence[Which],
    batch_size: int = 64,
    starts: Mapping[int, Start] | None = None,
    force_turns: int | None = None,
    on_batch: OnBatch | None = None,
    who: type[RolloutPolicy] = RolloutPolicy,
) -> list[Rollout]:
    """The rollouts of the (group, member) in `mine`, in that order; prompts: one a group.

    batch_size: trajectories at a time. starts: of `draw_starts`, where they are drawn already.
    force_turns: for measurements on random weights, legal turns of this many tokens that ask for an
    edit. on_batch(done, all) is called after each batch; what it raises ends the rollout. who:
    speaks and draws (rl/full_size.py counts with one that does neither).
    Errors: UserError for weights that give no numbers; SameNoise.
    """
    if len(prompts) != settings.groups:
        raise ValueError(f"{len(prompts)} prompts for {settings.groups} groups")
    names = {"step": step, "seed": seed, "batch_size": batch_size, "who": who}
    if settings.forks and starts is None:
        wanted = {group: prompts[group] for group in dict.fromkeys(group for group, _ in mine)}
        starts = draw_starts(bagel, profile, wanted, settings, force_turns=force_turns, **names)
    policy = who(bagel, profile, settings)
    if settings.forks:
        lacking = {g for g, _ in mine if prompts[g].source is None} - set(starts)
        assert not lacking, f"groups {sorted(lacking)} have no start to share"
        policy.starts = starts
    rollouts = []
    for part in _parts([Place(step, *which) for which in mine], batch_size, on_batch):
        policy.places = {place.name: place for place in part}
        asked = [prompts[place.group] for place in part]
        with _broken_numbers_named():
            trajectories = _trajectories(policy, part, asked, settings, seed, force_turns)
        rollouts += map(Rollout, part, asked, trajectories)
    if alike := same_noise(rollouts):
        first, second = alike[0]
        raise SameNoise(
            f"members {first.member} and {second.member} of group {first.group} drew the same "
            f"image from the same noise ({len(alike)} such pairs)",
            "Each member needs random streams of its own.",
        )
    return rollouts


def _trajectories(
    policy: RolloutPolicy,
    places: Sequence[Place],
    prompts: Sequence[Prompt],
    settings: RolloutSettings,
    seed: int,
    force_turns: int | None,
) -> list[Trajectory]:
    texts, sources = [p.text for p in prompts], [p.source for p in prompts]
    names = {"seed": seed, "samples": [place.name for place in places]}
    if settings.single:
        return draw_once(policy, texts, sources=sources, **names)
    options = settings.options if force_turns is None else replace(settings.options, **UNGUARDED)
    return run_episodes(
        _speaker(policy, force_turns),
        texts,
        max_rounds=settings.max_rounds,
        max_tokens=settings.max_tokens,
        options=options,
        sources=sources,
        **names,
    )


# --- checks ---------------------------------------------------------------------------------------


def same_noise(rollouts: Iterable[Rollout]) -> list[tuple[Place, Place]]:
    """Members of one group that drew the same image by themselves (a shared start aside)."""
    drawn: dict[tuple[int, int, int, bytes], tuple[Place, Transition]] = {}
    alike = []
    for rollout in rollouts:
        place = rollout.place
        for number, transition in own_images(rollout.trajectory):
            key = (place.step, place.group, number, transition.latent[0].numpy().tobytes())
            other, twin = drawn.setdefault(key, (place, transition))
            if twin is not transition:  # siblings hold one shared first image
                alike.append((other, place))
    return alike


def own_images(trajectory: Trajectory) -> list[tuple[int, Transition]]:
    """(number, transition) of every image that was drawn, first images and edits."""
    first = [] if trajectory.first is None else [trajectory.first]
    edits = [step.transition for step in trajectory.steps if step.transition is not None]
    return list(enumerate([*first, *edits], start=int(trajectory.source is not None)))


def plain_difference(
    bagel: Bagel,
    profile: ReflectionProfile,
    prompts: Sequence[str],
    settings: RolloutSettings,
    *,
    seed: int,
) -> float:
    """The largest difference of a latent number between a rollout without noise and the plain
    sampling of inference with these settings, over first images and an edit of each; 0 is equal."""
    quiet = {kind: replace(getattr(settings, kind), noise_level=0.0) for kind in ("first", "edit")}
    ours = RolloutPolicy(bagel, profile, replace(settings, **quiet))
    plain = BagelPolicy(bagel, rollout_profile(profile, settings))
    euler = {kind: replace(drawing, step_kind="ode") for kind, drawing in quiet.items()}
    plain.profile = replace(plain.profile, **euler)
    plain.keep_latents = True
    largest, sources = 0.0, [None] * len(prompts)
    for _ in ("first", "edit"):
        drawn = [draw_once(policy, prompts, sources=sources, seed=seed) for policy in (ours, plain)]
        pairs = [(a.first.latent, b.first.latent) for a, b in zip(*drawn, strict=True)]
        largest = max(largest, *(float((a - b).abs().max()) for a, b in pairs))
        sources = [trajectory.first.image for trajectory in drawn[1]]
    return largest


def kept_bytes(device: torch.device, usual: int) -> int:
    """Room for contexts that were read: siblings come back to theirs in every round, and nothing
    else of a trainer is on the device meanwhile but the weights."""
    if device.type != "cuda":
        return usual
    return max(usual, torch.cuda.get_device_properties(device).total_memory // 4)


# --- small things ---------------------------------------------------------------------------------


def _speaker(policy: RolloutPolicy, force_turns: int | None) -> RolloutPolicy | ForcedTurns:
    return policy if force_turns is None else ForcedTurns(policy, force_turns)


def _start_name(place: Place, attempt: int) -> str:
    return place.group_name + (f" attempt {attempt}" if attempt else "")


def _parts(items: list, size: int, on_batch: OnBatch | None) -> Iterator[list]:
    if size < 1:
        raise ValueError(f"batch_size is {size}; give 1 or more")
    for start in range(0, len(items), size):
        yield items[start : start + size]
        if on_batch is not None:
            on_batch(min(start + size, len(items)), len(items))


@contextmanager
def _broken_numbers_named() -> Iterator[None]:
    """Weights that give no numbers: said as what a person can act on."""
    try:
        yield
    except FloatingPointError as error:
        raise UserError(
            f"the rollout broke down: {error}",
            "Go back to an earlier checkpoint, with a lower learning rate.",
        ) from error
