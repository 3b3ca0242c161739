"""The loop: draw an image, look at it, say what is wrong, draw again, until it is right.

    trajectories = run_episodes(policy, ["two red circles and a blue square"], max_rounds=3)
    trajectories[0].final.save("out.png")

All prompts go through a round together; one that has ended costs nothing more. No judge is asked:
the policy sees its own images and texts. Command line: umm-reflect reflect "two red circles".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agent import guards, types, views
from agent.types import OURS, Ask, DrawAsk, Step, StopReason, Trajectory, Transition, Turn, Watcher

if TYPE_CHECKING:
    from PIL.Image import Image

    from agent.policy import Policy


def run_episodes(
    policy: Policy,
    prompts: Sequence[str],
    *,
    max_rounds: int,
    max_tokens: int = 512,
    options: types.Options = OURS,
    sources: Sequence[Image | None] | None = None,
    firsts: Sequence[Transition] | None = None,
    seed: int = 0,
    samples: Sequence[int | str] | None = None,
    watcher: Watcher | None = None,
) -> list[Trajectory]:
    """Run the prompts as one batch; the trajectories come back in the same order.

    max_rounds: edits that may be drawn (0: only the first image). max_tokens: the budget of a turn.
    sources: the user's images, where the task is to edit. firsts: first images drawn before, for
    the prompts without a source (siblings in RL share one). seed, samples: names of the random
    streams; what a prompt gets depends on its (seed, sample) and not on the other prompts.
    """
    if max_rounds < 0 or max_tokens < 1:
        raise ValueError(
            f"max_rounds {max_rounds} must be 0 or more, max_tokens {max_tokens} 1 or more"
        )
    watcher = watcher or Watcher()
    sources = [None] * len(prompts) if sources is None else sources
    samples = range(len(prompts)) if samples is None else samples
    given = enumerate(zip(prompts, sources, samples, strict=True))
    episodes = [Episode(policy, i, *names, seed) for i, names in given]
    drawing = [e for e in episodes if e.source is None]

    if firsts is None:
        if policy.layout == "sft":  # the plan is said before there is an image
            speak(policy, drawing, max_tokens, options, watcher, may_edit=True)
        firsts = policy.draw([e.draw_ask() for e in drawing], on_step=watcher.on_step)
    for episode, first in zip(drawing, firsts, strict=True):
        episode.add_image(first, options)
        watcher.on_image(episode.index, 0, first.image)

    for round_index in range(max_rounds + (options.final_look and max_rounds > 0)):
        live = [e for e in episodes if e.stop is None]
        if not live:
            break
        speak(policy, live, max_tokens, options, watcher, may_edit=round_index < max_rounds)
        editing = [e for e in live if e.stop is None]
        drawn = policy.draw([e.draw_ask() for e in editing], on_step=watcher.on_step)
        for episode, transition in zip(editing, drawn, strict=True):
            episode.add_image(transition, options)
            watcher.on_image(episode.index, round_index + 1, transition.image)
    return [e.finish(options) for e in episodes]


def speak(policy, episodes, max_tokens, options, watcher, *, may_edit: bool) -> None:
    """Each episode says a turn; a malformed one is sampled anew, from another random stream."""
    rejected: dict[int, tuple[Turn, ...]] = {e.index: () for e in episodes}
    on_token = watcher.on_token if watcher.wants_tokens else None
    for attempt in range(options.retries + 1):
        asks = [e.ask(attempt) for e in episodes]
        turns = policy.say(asks, max_tokens=max_tokens, options=options, on_token=on_token)
        again = []
        for episode, turn in zip(episodes, turns, strict=True):
            watcher.on_turn(episode.index, turn)
            if turn.error and attempt < options.retries:
                rejected[episode.index] += (turn,)
                again.append(episode)
            else:
                episode.add_turn(turn, rejected[episode.index], options, may_edit)
        episodes = again


class Episode:
    """A trajectory while it runs: the one thing here that changes."""

    def __init__(self, policy: Policy, index: int, prompt: str, source, sample, seed: int):
        self.policy, self.index, self.prompt = policy, index, prompt
        self.source, self.sample, self.seed = source, sample, seed
        self.seen = views.start(policy, prompt, source)
        self.images: list[Image] = [] if source is None else [source]
        self.plan: Turn | None = None
        self.plan_rejected: tuple[Turn, ...] = ()
        self.first: Transition | None = None
        self.steps: list[Step] = []
        self.stop: StopReason | None = None

    def ask(self, attempt: int) -> Ask:
        names = (*views.current(self.seen), self.seed, self.sample, attempt, self.index)
        return Ask(views.reflect_view(self.seen), *names)

    def draw_ask(self) -> DrawAsk:
        what_it_sees = views.edit_view if self.images else views.first_image_view
        view, base = what_it_sees(self.seen, self.policy.edit_view), (self.images or [None])[-1]
        return DrawAsk(view, len(self.images), self.seed, self.sample, base, self.index)

    def add_turn(self, turn: Turn, rejected, options: types.Options, may_edit: bool) -> None:
        if said := turn.reflection:
            edit = self.policy.text(said.edit) if said.edit else None
            self.seen = self.seen.with_turn(self.policy.text(turn.said), edit)
        if self.images:
            self.steps.append(Step(turn, None, rejected))
            self.stop = guards.stop_after_turn(self.steps, may_edit, options)
        else:  # whatever the plan says, the first image is drawn
            self.plan, self.plan_rejected = turn, rejected
            self.stop = guards.stop_after_plan(turn)

    def add_image(self, transition: Transition, options: types.Options) -> None:
        segment = transition.segment or self.policy.image(transition.image)
        self.seen = self.seen.with_image(segment)
        self.images.append(transition.image)
        if self.steps:
            self.steps[-1] = replace(self.steps[-1], transition=transition)
            self.stop = guards.stop_after_edit(*self.images[-2:], options)
        else:
            self.first = transition

    def finish(self, options: types.Options) -> Trajectory:
        trajectory = Trajectory(
            *(self.prompt, self.source, self.plan, self.first, tuple(self.steps)),
            *(self.stop or StopReason.MAX_ROUNDS, 0, self.seed, self.sample, self.plan_rejected),
        )
        return replace(trajectory, kept=trajectory.best(options.keep_best))
