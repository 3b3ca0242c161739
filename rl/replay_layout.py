"""A rollout laid out for replay: which words and which noised states stand where in which example.

    unit = lay_out(scored, policy, text=True, flow="edits", guided=True)
    len(unit.words.ids), len(unit.states), unit.size                # what it holds, and its tokens

Later tokens never see a noised image, so many of them can stand at one position. A trajectory is
few examples, often one: the running context with every turn scored in place, and where an edit was
drawn the states x_t of its noise window, each once for each guidance branch (the text-unconditional
branch sees what stood before the turn), then the image itself. What has a context of its own (edits
in the local view, branches without images) is an example of its own, and contexts of which one
continues the other share it. A turn that later turns see in other words than were sampled stands
aside: it is scored, and they see the canonical text that follows it.

Example (local view, one edit, a window of two steps, then "done"):
    [system, request, image 0, turn 0, image 1, turn 1]    both turns scored
    [image 0, x x, edit, x x]                              branch without the text; conditional
    [edit, x x]                                            branch without the image
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from agent.policy import BagelPolicy
from agent.types import Trajectory, Transition, Turn
from rl.types import Rollout, Scored
from umm_reflect.context import ImageSegment, Segment, TextSegment
from umm_reflect.draw import unconditional
from umm_reflect.flow import DrawSettings, interpolate
from umm_reflect.layout import Block, segment_blocks, text_block, vae_block
from umm_reflect.model import Bagel

# Which drawings are replayed: those of an image that is edited, those from nothing, both.
Flow = Literal["none", "edits", "first", "all"]
Segments = tuple[Segment, ...]
BRANCHES = ("conditional", "without the text", "without the images")
NO_WORD, NO_BLOCK = -1, -1


class State(NamedTuple):
    """A noised image: x_t [n, C] fp32 of image number `image` at time t, and where it goes.

    x_next, t_next: the state after the step that was taken (the clean image at t_next 0, where a
    state was made from it); None where nobody asks. old_logprob: of that step, when it was taken.
    """

    image: int
    x: Tensor
    t: float
    x_next: Tensor | None = None
    t_next: float = 0.0
    old_logprob: float = 0.0

    @classmethod
    def noised(cls, image: int, clean: Tensor, noise: Tensor, t: float) -> State:
        """The state between a finished image and some noise, which leads back to that image."""
        return cls(image, interpolate(clean, noise, torch.tensor(t)), t, clean)


@dataclass(frozen=True)
class WordsOf:
    """The tokens of a trajectory that were chosen, in order; arrays over W.

    allowed: place → the ids among which a constrained one was chosen.
    """

    ids: np.ndarray
    old: np.ndarray
    temperature: np.ndarray
    turn: np.ndarray
    allowed: dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Chain:
    """One example. word_L: which of the unit's words each token predicts, or NO_WORD.

    latents: for each latent block the image, or the number of the state that is in it. moves: for
    each noised block (state, branch), in order.
    """

    blocks: list[Block]
    word_L: np.ndarray
    latents: list[ImageSegment | int]
    moves: list[tuple[int, int]]


@dataclass(frozen=True)
class Unit:
    """A trajectory laid out. settings: of each state. branches: [states, 3] bool, which branches
    are run; in `shared` is the branch whose velocity another one uses too, by (state, branch)."""

    chains: list[Chain]
    words: WordsOf
    states: list[State]
    settings: list[DrawSettings]
    branches: np.ndarray
    shared: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """Tokens of the understanding and of the generation expert."""
        blocks = [block for chain in self.chains for block in chain.blocks]
        gen = sum(block.num_gen for block in blocks)
        return sum(block.length for block in blocks) - gen, gen

    @property
    def cells(self) -> int | None:
        """Latent tokens of its states, None where it has none."""
        return len(self.states[0].x) if self.states else None


def lay_out(
    rollout: Rollout | Scored,
    policy: BagelPolicy,
    *,
    text: bool = True,
    flow: Flow = "edits",
    guided: bool = True,
    states: Callable[[Rollout], Sequence[State]] | None = None,
) -> Unit:
    """What is replayed of a trajectory that `policy` has just made.

    text: score what was said. flow: which drawings are replayed. guided: with all branches of the
    guidance; False takes the conditional velocity alone. states: other ones than were recorded in
    the noise window (those of drawings that `flow` leaves out are left out).
    Errors: ValueError where the trajectory lacks what was seen, or its drawings differ in size.
    """
    if flow not in get_args(Flow):
        raise ValueError(f"flow is {flow!r}; choose one of {', '.join(get_args(Flow))}")
    if isinstance(rollout, Scored):
        rollout = rollout.judged.rollout
    trajectory, drawings = rollout.trajectory, _drawings(rollout.trajectory, policy, flow)
    found = _recorded(drawings) if states is None else list(states(rollout))
    found = [state for state in found if state.image in drawings]
    plan = _Plan(policy.bagel)
    for number, state in enumerate(found):
        plan.add_state(number, state, *drawings[state.image], guided=guided)
    words = _words(trajectory.turns if text else [], plan)
    return plan.unit(words, found)


def _drawings(
    trajectory: Trajectory, policy: BagelPolicy, flow: Flow
) -> dict[int, tuple[Transition, DrawSettings]]:
    """Number of the image → how it was drawn, of those that are replayed."""
    given = trajectory.source is not None
    drawn = [trajectory.first, *(step.transition for step in trajectory.steps)]
    numbered = enumerate((t for t in drawn if t is not None), start=int(given))
    found = {}
    for number, transition in numbered:
        kind = "edits" if number > 0 else "first"
        if flow in (kind, "all"):
            settings = policy.profile.edit if kind == "edits" else policy.profile.first
            found[number] = (transition, settings)
    return found


def _recorded(drawings: dict[int, tuple[Transition, DrawSettings]]) -> list[State]:
    """The steps of every noise window."""
    states = []
    for number, (transition, _) in drawings.items():
        if transition.logprobs is None:
            continue
        x, times, old = transition.latents, transition.times.tolist(), transition.logprobs.tolist()
        for k, logprob in enumerate(old):
            states.append(State(number, x[k], times[k], x[k + 1], times[k + 1], logprob))
    return states


def _words(turns: Sequence[Turn], plan: _Plan) -> WordsOf:
    """What was chosen, turn after turn; each turn is also put at its place in the plan."""
    columns: dict[str, list[np.ndarray]] = {"ids": [], "old": [], "temperature": [], "turn": []}
    allowed: dict[int, tuple[int, ...]] = {}
    count = 0
    for number, turn in enumerate(turns):
        if turn.context is None:
            raise ValueError(f"turn {number} has no context: replay takes fresh rollouts")
        if turn.temperature <= 0:
            raise ValueError(f"turn {number} was said at temperature 0, where nothing is chosen")
        chosen = np.flatnonzero(turn.chosen)
        if not len(chosen):
            continue
        for place, word in enumerate(chosen.tolist(), start=count):
            if turn.allowed[word] is not None:
                allowed[place] = turn.allowed[word]
        columns["ids"].append(np.asarray(turn.sampled_ids)[chosen])
        columns["old"].append(np.asarray(turn.logprobs, np.float32)[chosen])
        columns["temperature"].append(np.full(len(chosen), turn.temperature, np.float32))
        columns["turn"].append(np.full(len(chosen), number))
        plan.add_turn(turn, chosen, count)
        count += len(chosen)
    kinds = {"ids": np.int64, "old": np.float32, "temperature": np.float32, "turn": np.int64}
    none = {name: np.zeros(0, kind) for name, kind in kinds.items()}
    return WordsOf(
        **{name: np.concatenate([none[name], *parts]) for name, parts in columns.items()},
        allowed=allowed,
    )


@functools.lru_cache
def _is_guided(settings: DrawSettings, t: float) -> bool:
    """`settings.guided(t)`: few times, asked for thousands of states."""
    return settings.guided(t)


class _Said(NamedTuple):
    """A turn in a plan: its framed ids as far as they are known (start, forced, sampled without the
    last), and which of them predict a word: place → word, both arrays."""

    ids: tuple[int, ...]
    body: tuple[int, ...]
    places: np.ndarray
    words: np.ndarray


class _Plan:
    """What is to stand behind each context, before contexts are made into examples."""

    def __init__(self, bagel: Bagel):
        self.bagel = bagel
        self.turns: dict[Segments, _Said] = {}
        self.noised: dict[Segments, list[tuple[int, int]]] = {}
        self.images: dict[int, Transition] = {}
        self.settings: list[DrawSettings] = []
        self.branches: list[tuple[bool, bool, bool]] = []
        self.shared: dict[tuple[int, int], int] = {}

    def add_state(
        self,
        number: int,
        state: State,
        transition: Transition,
        settings: DrawSettings,
        *,
        guided: bool,
    ) -> None:
        """The branches of a state, as `draw.Denoiser` runs them."""
        view = transition.view
        if view is None:
            raise ValueError(f"image {state.image} has no view: replay takes fresh rollouts")
        contexts: list[Segments | None] = [view.conditional.segments, None, None]
        if guided and _is_guided(settings, state.t):
            if settings.norm_over == "call":
                raise ValueError(
                    "norm_over is 'call': a norm over whatever was drawn together cannot be "
                    "replayed; choose 'image'"
                )
            run = unconditional(view.conditional, view.text_uncond, view.image_uncond, settings)
            contexts[1:] = [None if branch is None else branch.segments for branch in run]
        for which, context in enumerate(contexts):
            if context is None:
                continue
            if which == 2 and context == contexts[1]:
                self.shared[number, 2] = 1
            else:
                self.noised.setdefault(context, []).append((number, which))
        self.images[number] = transition
        self.settings.append(settings)
        self.branches.append(tuple(context is not None for context in contexts))

    def add_turn(self, turn: Turn, chosen: np.ndarray, first_word: int) -> None:
        end = self.bagel.frame.end
        ended = turn.sampled_ids[-1] == end
        said = (*turn.forced_ids, *turn.sampled_ids)
        self.turns[turn.context.segments] = _Said(
            ids=(self.bagel.frame.start, *said[:-1]),
            body=said[:-1] if ended else said,
            places=len(turn.forced_ids) + chosen,  # a token is predicted by the one before it
            words=np.arange(first_word, first_word + len(chosen)),
        )

    def unit(self, words: WordsOf, states: list[State]) -> Unit:
        sizes = {tuple(state.x.shape) for state in states}
        if len(sizes) > 1:
            raise ValueError(f"the drawings of a trajectory differ in size: {sorted(sizes)}")
        contexts = sorted({*self.turns, *self.noised}, key=len, reverse=True)
        chains: list[Segments] = []
        for context in contexts:
            if not any(chain[: len(context)] == context for chain in chains):
                chains.append(context)
        done: set[Segments] = set()
        return Unit(
            [self._chain(chain, done, states) for chain in chains],
            words,
            states,
            self.settings,
            np.asarray(self.branches, bool).reshape(-1, 3),
            self.shared,
        )

    def _chain(self, segments: Segments, done: set[Segments], states: list[State]) -> Chain:
        """The example of the longest context, with what stands behind each of its prefixes; `done`
        are prefixes that another example has taken along."""
        bagel = self.bagel
        chain, words, position = Chain([], np.zeros(0), [], []), [], 0

        def put(block: Block, said: _Said | None = None) -> None:
            chain.blocks.append(block)
            places = np.full(block.length, NO_WORD)
            if said is not None:
                places[said.places] = said.words
            words.append(places)

        for length in range(len(segments) + 1):
            prefix = segments[:length]
            following = segments[length] if length < len(segments) else None
            said, noised = None, []
            if prefix not in done:
                done.add(prefix)
                said, noised = self.turns.get(prefix), self.noised.get(prefix, [])
            for number, branch in noised:
                put(vae_block(None, self._grid(number, states), bagel.frame, position, noised=True))
                chain.latents.append(number)
                chain.moves.append((number, branch))
            in_place = isinstance(following, TextSegment) and said and following.ids == said.body
            if said and not in_place:
                put(text_block(said.ids, position, aside=True), said)
            if following is None:
                continue
            for block in segment_blocks(following, position, bagel.frame, bagel.config):
                put(block, said if in_place else None)
                position = block.next_position
                if block.kind == "vae":
                    chain.latents.append(following)
        return Chain(chain.blocks, np.concatenate(words), chain.latents, chain.moves)

    def _grid(self, number: int, states: list[State]) -> tuple[int, int]:
        width, height = self.images[number].image.size
        stride = self.bagel.config.latent_stride
        grid = height // stride, width // stride
        n, x = grid[0] * grid[1], states[number].x
        assert len(x) == n, f"a state of {len(x)} tokens for a picture of {grid} cells"
        return grid
