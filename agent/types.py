"""The words of a trajectory: what was said, what was drawn, and why it ended.

Everything here is frozen and knows only itself. The agent shows these types, SFT learns from them,
RL scores them and the evaluation counts them. Equality is by content: ids, texts, numbers and
pixels. The contexts that a head saw are left out of it, since `views.py` rebuilds them from the
rest.

    Trajectory(
        prompt="two red circles",
        source=None,             # the user's image in an editing task
        plan=None,               # the turn before the first image (layout "sft")
        first=Transition(...),   # image 0
        steps=(
            # says Reflection("One circle.", 4, "edit", "Add a red circle."), which gives image 1
            Step(Turn(...), Transition(...)),
            Step(Turn(...), None),  # says Reflection("Two circles.", 10, "done", "")
        ),
        stop=StopReason.DONE,
        kept=1,                  # the image that is handed out
    )
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from umm_reflect.context import Context, ImageSegment, TextSegment


Action = Literal["edit", "done"]
Layout = Literal["rl", "sft"]
EditView = Literal["local", "full"]


@dataclass(frozen=True)
class Reflection:
    """What one legal turn says. `edit` is empty exactly when `action` is "done".

    `score` is a whole number 0..10; only the training data of the release holds decimal ones.
    """

    thinking: str
    score: float
    action: Action
    edit: str

    def __post_init__(self) -> None:
        if (self.action == "done") != (self.edit == ""):
            raise ValueError(f"action {self.action!r} does not go with edit {self.edit!r}")


class ProtocolError(StrEnum):
    """Why a turn is malformed: one code for each rule of `protocol.py` that it can break."""

    MALFORMED_THINK = "malformed_think"  # not exactly one <think> at the start and one </think>
    EDIT_MARKER = "edit_marker"  # "</think>" is not followed by "\n[EDIT] "
    EDIT_COUNT = "edit_count"  # more than one [EDIT] after the think block
    ACTION_COUNT = "action_count"  # not exactly one well-formed [ACTION]
    THINKING_COUNT = "thinking_count"  # not exactly one [THINKING]
    THINKING_EMPTY = "thinking_empty"
    THINKING_PLACEHOLDER = "thinking_placeholder"
    SCORE_COUNT = "score_count"  # not exactly one line that begins with [SCORE]
    SCORE_FORMAT = "score_format"  # not N/10
    SCORE_RANGE = "score_range"  # N above 10
    EDIT_WHITESPACE = "edit_whitespace"  # blanks around the edit text
    EDIT_PROTOCOL_TEXT = "edit_protocol_text"  # a think tag or a field tag inside the edit text
    DONE_NOT_NONE = "done_not_none"  # "done" with anything but "[EDIT] None"
    # Rules of the strict schema, which the canonical text (and training data) must keep:
    THINKING_HOLDS_EDIT = "thinking_holds_edit"  # an [EDIT] inside the think block
    FIELD_ORDER = "field_order"  # other tags at line starts than the five, or in another order
    FIELD_VALUE = "field_value"  # a field without a value
    FIELD_MULTILINE = "field_multiline"  # a one-line field that goes on
    EDIT_SPECIAL_TEXT = "edit_special_text"  # [CURRENT_ROUND] or <|...|> inside the edit text
    EDIT_EMPTY = "edit_empty"  # "edit" with nothing, or "none", where the alias is not allowed
    EDIT_PLACEHOLDER = "edit_placeholder"
    ROUND_SYNTAX = "round_syntax"
    ROUND_INDEX = "round_index"
    SOURCE_SYNTAX = "source_syntax"
    SOURCE_STATE = "source_state"  # a legal source, but not the image that is current
    SOURCE_TASK = "source_task"  # "given" without a user's image, or "None" with one
    ACTION_UNKNOWN = "action_unknown"
    NOT_CANONICAL = "not_canonical"  # the canonical text does not read back as what was said
    # Faults of the sampling, not of the grammar:
    TRUNCATED = "truncated"  # ran into the token budget
    REPEATED_TEXT = "repeated_text"  # the same few tokens over and over


class StopReason(StrEnum):
    """Why a trajectory ended."""

    DONE = "done"
    MAX_ROUNDS = "max_rounds"
    MALFORMED = "malformed"
    TOO_LONG = "too_long"
    REPEATED_TEXT = "repeated_text"
    REPEATED_EDIT = "repeated_edit"
    NO_VISIBLE_CHANGE = "no_visible_change"


@dataclass(frozen=True)
class Turn:
    """One turn of the policy, legal or not, with all that training needs to replay it.

    `forced_ids` were written by the loop; `sampled_ids` came from the policy (with the end token if
    the policy chose it). For each sampled id: `chosen` is False where only one token was legal,
    `allowed` lists the legal ids where the choice was constrained (else None), `logprobs` is its
    log-probability at `temperature`. `text` is prefix and sampled text as decoded; `said` is the
    canonical text that later turns see, or None.
    """

    round: int
    forced_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    chosen: tuple[bool, ...]
    allowed: tuple[tuple[int, ...] | None, ...]
    logprobs: tuple[float, ...]
    text: str
    outcome: Reflection | ProtocolError
    said: str | None
    temperature: float = 1.0
    seconds: float = field(default=0.0, compare=False)
    context: Context | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        lengths = {len(self.sampled_ids), len(self.chosen), len(self.allowed), len(self.logprobs)}
        assert len(lengths) == 1, f"a turn's per-token fields differ in length: {lengths}"
        assert (self.said is None) == (self.reflection is None), "only a legal turn is said"

    @property
    def reflection(self) -> Reflection | None:
        """What was said, or None if the turn is malformed."""
        return self.outcome if isinstance(self.outcome, Reflection) else None

    @property
    def error(self) -> ProtocolError | None:
        """Why the turn is malformed, or None."""
        return self.outcome if isinstance(self.outcome, ProtocolError) else None


@dataclass(frozen=True)
class Seen:
    """All that was said and drawn so far: image k is followed by turn k, then by image k + 1."""

    system: TextSegment | None
    request: TextSegment
    editing: bool = False  # image 0 is the user's
    plan: TextSegment | None = None  # the planning turn (layout "sft")
    plan_edit: TextSegment | None = None  # its [EDIT] text alone, None for done
    images: tuple[ImageSegment, ...] = ()
    turns: tuple[TextSegment, ...] = ()
    edits: tuple[TextSegment | None, ...] = ()  # the [EDIT] text of each turn alone, None for done

    def with_image(self, image: ImageSegment) -> Seen:
        return replace(self, images=(*self.images, image))

    def with_turn(self, said: TextSegment, edit: TextSegment | None) -> Seen:
        """A legal turn and its [EDIT] text; before the first image of a task to draw, the plan."""
        if not self.images:
            return replace(self, plan=said, plan_edit=edit)
        return replace(self, turns=(*self.turns, said), edits=(*self.edits, edit))


@dataclass(frozen=True)
class View:
    """The three contexts of one drawing. None: equals the conditional one (folded, not run)."""

    conditional: Context
    text_uncond: Context | None
    image_uncond: Context | None


@dataclass(frozen=True, eq=False)
class Transition:
    """One drawn image. `latents`, `times` and `logprobs` hold the steps inside the noise window, if
    any.

    latents: [steps + 1, tokens, channels] fp32, times: [steps + 1] fp32, logprobs: [steps] fp32.
    `segment` is the image as later contexts hold it. latent: [tokens, channels] fp32, the state
    that was decoded, where the policy keeps it.
    """

    image: Image
    latents: Tensor | None = None
    times: Tensor | None = None
    logprobs: Tensor | None = None
    seconds: float = 0.0
    view: View | None = field(default=None, repr=False)
    segment: ImageSegment | None = field(default=None, repr=False)
    latent: Tensor | None = field(default=None, repr=False)

    @property
    def context(self) -> Context | None:
        """What the image was drawn from (the conditional branch)."""
        return self.view.conditional if self.view else None

    def __eq__(self, other: object) -> bool:
        """Equal pixels and equal records of the noise window; contexts and timings do not count."""
        if not isinstance(other, Transition):
            return NotImplemented
        tensors = zip(self._window(), other._window(), strict=True)
        return same_pixels(self.image, other.image) and all(_same_tensor(a, b) for a, b in tensors)

    __hash__ = None  # compared by pixels

    def _window(self) -> tuple[Tensor | None, ...]:
        return self.latents, self.times, self.logprobs


@dataclass(frozen=True)
class Step:
    """A look at the current image and, if it asked for an edit that was drawn, the next image."""

    turn: Turn
    transition: Transition | None
    rejected: tuple[Turn, ...] = ()


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A finished run for one prompt.

    Image 0 is `source` (editing) or `first`; step k looks at image k and may add image k + 1. With
    both, `first` was drawn from the user's image by the prompt itself, without a turn.
    """

    prompt: str
    source: Image | None
    plan: Turn | None
    first: Transition | None
    steps: tuple[Step, ...]
    stop: StopReason
    kept: int
    seed: int = 0
    sample: int | str = 0
    plan_rejected: tuple[Turn, ...] = ()

    @property
    def images(self) -> list[Image]:
        """All images in order, the user's or the first one at index 0."""
        drawn = [self.first, *(step.transition for step in self.steps)]
        given = [] if self.source is None else [self.source]
        return given + [transition.image for transition in drawn if transition is not None]

    @property
    def scores(self) -> list[float | None]:
        """The policy's own score of each image, None where no legal turn looked at it."""
        said = [step.turn.reflection for step in self.steps]
        scores = [reflection.score if reflection else None for reflection in said]
        return scores + [None] * (len(self.images) - len(scores))

    @property
    def final(self) -> Image:
        """The image that is handed out."""
        return self.images[self.kept]

    @property
    def turns(self) -> list[Turn]:
        """The turns that count, in order, the planning turn first (no rejected ones)."""
        return [*((self.plan,) if self.plan else ()), *(step.turn for step in self.steps)]

    def best(self, keep_best: bool) -> int:
        """Which image should be handed out: the last one, unless `keep_best`.

        Then the one with the highest own score (the later of equals), with two exceptions: "done"
        is the policy's own choice of the last image, and an image that nobody looked at is kept
        too, since every image before it was found wrong.
        """
        scores, last = self.scores, len(self.images) - 1
        if not keep_best or self.stop is StopReason.DONE or scores[last] is None:
            return last
        return max(range(last + 1), key=lambda k: (-1 if scores[k] is None else scores[k], k))

    def __eq__(self, other: object) -> bool:
        """Equal in all but contexts and timings; images by pixels."""
        if not isinstance(other, Trajectory):
            return NotImplemented
        sources = (self.source, other.source)
        same_source = sources == (None, None) or (None not in sources and same_pixels(*sources))
        return same_source and self._parts() == other._parts()

    __hash__ = None  # compared by pixels

    def _parts(self) -> tuple:
        return (
            *(self.prompt, self.plan, self.plan_rejected, self.first, self.steps),
            *(self.stop, self.kept, self.seed, self.sample),
        )


@dataclass(frozen=True)
class Ask:
    """A request for one turn: what the policy sees, and the name of its random stream."""

    context: Context
    round: int
    source: str  # what [SOURCE_IMAGE] says: "None", "given" or "Image #k"
    seed: int
    sample: int | str
    attempt: int = 0
    index: int = 0  # place of the prompt in the run, for the watcher


@dataclass(frozen=True)
class DrawAsk:
    """A request for one image: its number (0: the first one) names its random stream."""

    view: View
    number: int
    seed: int
    sample: int | str
    base: Image | None = None  # the image that is edited; it gives the size
    index: int = 0


@dataclass(frozen=True)
class Options:
    """How the loop behaves beyond its budgets. RELEASE: the released system. OURS: the default."""

    final_look: bool = True  # look at the image that the last round drew
    keep_best: bool = True  # hand out the image with the highest own score, not the last one
    retries: int = 1  # new samples of a malformed turn
    stop_at_line: bool = True  # end a turn at the end of its [EDIT] line
    accept_truncated: bool = False  # read a turn that ran into the token budget all the same
    stop_repeated_text: bool = True
    same_edit_limit: int = (
        2  # stop when the same edit is asked for this many times in a row; 0: never
    )
    min_change: float = 1e-3  # stop when a smaller share of the pixels changed visibly; 0: never

    def __post_init__(self) -> None:
        if self.retries < 0 or self.same_edit_limit < 0 or not 0 <= self.min_change <= 1:
            raise ValueError(
                f"retries {self.retries} and same_edit_limit {self.same_edit_limit} must be 0 or "
                f"more, min_change {self.min_change} between 0 and 1"
            )


OURS = Options()
RELEASE = Options(
    final_look=False,
    keep_best=False,
    retries=0,
    stop_at_line=False,
    accept_truncated=True,
    stop_repeated_text=False,
    same_edit_limit=0,
    min_change=0.0,
)
PROFILES: dict[str, Options] = {"ours": OURS, "release": RELEASE}


class Watcher:
    """What wants to know how a run goes. Every method may be overridden; none has to be.

    `index` is the place of the prompt in the run. An error that a watcher raises ends the run.
    """

    wants_tokens = False  # True: `on_token` is called as the text is sampled

    def on_token(self, index: int, text: str) -> None:
        """The policy said a further piece of text."""

    def on_turn(self, index: int, turn: Turn) -> None:
        """A turn is complete (a rejected one too: it has an `error`)."""

    def on_step(self, step: int, total: int) -> None:
        """The images that are being drawn passed denoising step `step` of `total`."""

    def on_image(self, index: int, number: int, image: Image) -> None:
        """Image `number` of the prompt is there."""


def same_pixels(first: Image, second: Image) -> bool:
    """Whether two images have the same size, mode and pixels."""
    return (
        first.size == second.size
        and first.mode == second.mode
        and np.array_equal(np.asarray(first), np.asarray(second))
    )


def _same_tensor(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.shape == second.shape and bool((first == second).all())
