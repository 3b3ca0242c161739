"""Who speaks and draws in the loop: a model, a script (or person), a model that is made to speak.

policy = BagelPolicy(bagel, profile)            # profile: umm_reflect.hub.profile(folder)
policy = ScriptedPolicy(["3/10\\n[ACTION] edit ...", Reflection("Two.", 10, "done", "")])
policy = ForcedTurns(BagelPolicy(bagel, profile), length=200)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from PIL import Image

from agent import guards, protocol
from agent.types import (
    Ask,
    DrawAsk,
    EditView,
    Layout,
    Options,
    ProtocolError,
    Reflection,
    Transition,
    Turn,
)
from umm_reflect.context import Context, ImageSegment, TextSegment

if TYPE_CHECKING:
    from umm_reflect.flow import DrawSettings
    from umm_reflect.generate import Said, StopRule, Sure
    from umm_reflect.hub import ReflectionProfile
    from umm_reflect.model import Bagel

# Every so many tokens of a turn it is asked whether it repeats itself.
LOOPS_EVERY = 8

OnToken = Callable[[int, str], None]
OnStep = Callable[[int, int], None]


class Policy(Protocol):
    """What the loop needs. The answers come in the order of the asks; no asks, no answers."""

    layout: Layout
    edit_view: EditView
    system_prompt: str

    def text(self, text: str) -> TextSegment:
        """A text as contexts hold it."""

    def image(self, image: Image.Image) -> ImageSegment:
        """An image as contexts hold it."""

    def say(
        self,
        asks: Sequence[Ask],
        *,
        max_tokens: int,
        options: Options,
        on_token: OnToken | None = None,
    ) -> list[Turn]:
        """One turn for each ask. on_token(ask.index, text) is called as text comes."""

    def draw(self, asks: Sequence[DrawAsk], *, on_step: OnStep | None = None) -> list[Transition]:
        """One image for each ask. on_step(step, total) is called after each denoising step."""


class BagelPolicy:
    """A BAGEL model. Sampler settings, sizes and the system prompt come from the profile.

    At temperature 0 it says the most likely token.
    """

    keep_latents = False  # True: transitions hold the latent that was decoded

    def __init__(self, bagel: Bagel, profile: ReflectionProfile):
        from umm_reflect.generate import Engine

        self.bagel, self.profile = bagel, profile
        self.engine = Engine(bagel)
        self.layout, self.edit_view = profile.layout, profile.edit_view
        self.system_prompt = profile.system_prompt
        self._scores = protocol.score_trie(bagel.tokens.encode)

    def text(self, text: str) -> TextSegment:
        """<|im_end|> and the like inside a text are characters, not tokens: texts frame nothing."""
        return self.bagel.tokens.segment(text, allow_special=False)

    def image(self, image: Image.Image) -> ImageSegment:
        return self.profile.transforms.segment(image)

    def say(
        self,
        asks: Sequence[Ask],
        *,
        max_tokens: int,
        options: Options,
        on_token: OnToken | None = None,
        force: Sequence[Sequence[int]] | None = None,
    ) -> list[Turn]:
        """force: for each ask the ids to say instead of sampling; log-probs stay the model's."""
        from umm_reflect.generate import say
        from umm_reflect.rng import stream

        if not asks:
            return []
        tokens, began = self.bagel.tokens, time.perf_counter()
        temperature = self.profile.say.temperature
        forced = [tuple(tokens.encode(protocol.prefix(ask.round))) for ask in asks]
        said = say(
            self.bagel,
            self.engine.caches([ask.context for ask in asks]),
            forced=forced,
            choices=self._scores,
            temperature=temperature,
            greedy=temperature == 0,
            max_tokens=max_tokens,
            generators=[stream(a.seed, a.sample, a.round, f"say {a.attempt}") for a in asks],
            stop_after=None if force else self._stop_rule(options),
            on_token=on_token and _Stream(asks, tokens, on_token),
            force=force,
            sure=None if force else self._sure(asks, forced),
        )
        seconds = time.perf_counter() - began
        return [
            self._turn(ask, prefix, answer, options, seconds)
            for ask, prefix, answer in zip(asks, forced, said, strict=True)
        ]

    def settings_of(self, ask: DrawAsk) -> DrawSettings:
        """How an image is drawn: first images and edits have settings of their own."""
        return self.profile.first if ask.base is None else self.profile.edit

    def draw(self, asks: Sequence[DrawAsk], *, on_step: OnStep | None = None) -> list[Transition]:
        """Asks whose settings differ in the noise window at most are one batch."""
        from umm_reflect.generate import DrawRequest, draw
        from umm_reflect.rng import stream

        batches: dict[DrawSettings, list[int]] = {}
        own = [self.settings_of(ask) for ask in asks]
        for i, settings in enumerate(own):
            batches.setdefault(replace(settings, window=None), []).append(i)
        transitions: dict[int, Transition] = {}
        for batch in batches.values():
            began = time.perf_counter()
            requests = [
                DrawRequest(
                    *(asks[i].view.conditional, asks[i].view.text_uncond),
                    asks[i].view.image_uncond,
                    self._size(asks[i].base),
                    stream(asks[i].seed, asks[i].sample, asks[i].number, "draw"),
                )
                for i in batch
            ]
            truncate, settings = self.profile.transforms.truncate, [own[i] for i in batch]
            drawn = draw(self.engine, requests, settings, on_step=on_step, truncate=truncate)
            seconds = time.perf_counter() - began
            for i, result in zip(batch, drawn, strict=True):
                noisy = result.logprobs.numel() > 0
                transitions[i] = Transition(
                    result.image,
                    *((result.latents, result.times, result.logprobs) if noisy else ()),
                    seconds=seconds,
                    view=asks[i].view,
                    segment=self.image(result.image),
                    latent=result.latent if self.keep_latents else None,
                )
        return [transitions[i] for i in range(len(asks))]

    def _sure(self, asks: Sequence[Ask], forced: Sequence[Sequence[int]]) -> Sure | None:
        """A score of 10 takes certainty where the profile says so. (Where digits are tokens, the
        score 1 begins with the same one and is withdrawn with it.)"""
        import torch

        from umm_reflect.generate import Sure, first_shares
        from umm_reflect.images import MOVES

        say = self.profile.say
        images = [sum(isinstance(s, ImageSegment) for s in ask.context) for ask in asks]
        least = tuple(say.sure(later=count > 1) for count in images)
        if not any(least):
            return None
        sure = Sure(self.bagel.tokens.encode(protocol.SCORES[-1])[0], least)
        contexts = [ask.context for ask in asks]
        moves = MOVES[: say.glances - 1]
        if not moves or not all(context.has_images for context in contexts):  # a plan sees nothing
            return sure
        shares = []
        for move in moves:
            moved = [_with_moved_image(context, move) for context in contexts]
            caches = self.engine.caches(moved, remember=False)
            shares.append(
                first_shares(self.bagel, caches, forced=forced, choices=self._scores, sure=sure)
            )
        return replace(sure, others=torch.stack(shares, 1))

    def _size(self, base: Image.Image | None) -> tuple[int, int]:
        return self.profile.size if base is None else self.profile.transforms.drawn_size(base)

    def _stop_rule(self, options: Options) -> StopRule | None:
        """After which ids a turn ends, beyond the end token."""
        from umm_reflect.generate import StopRule

        tokens = self.bagel.tokens
        lines, loops = options.stop_at_line, options.stop_repeated_text

        def ended(ids: list[int]) -> bool:
            at_line = lines and ids[-1] in tokens.line_ends
            if at_line and protocol.payload_ended(tokens.decode(ids)):
                return True
            return loops and len(ids) % LOOPS_EVERY == 0 and guards.repeats_itself(ids)

        after = tokens.line_ends if lines else frozenset()
        return StopRule(ended, after, LOOPS_EVERY if loops else 0) if lines or loops else None

    def _turn(self, ask, forced, answer: Said, options, seconds) -> Turn:
        ids = answer.sampled_ids
        end = self.bagel.tokens.end
        raw = self.bagel.tokens.decode(ids[:-1] if ids and ids[-1] == end else ids)
        loops = options.stop_repeated_text and guards.repeats_itself(ids)
        return read_turn(
            ask,
            raw,
            options,
            fault=ProtocolError.REPEATED_TEXT if loops else None,
            truncated=answer.truncated,
            forced_ids=forced,
            sampled_ids=ids,
            chosen=answer.chosen,
            allowed=answer.allowed,
            logprobs=answer.logprobs,
            temperature=self.profile.say.temperature,
            seconds=seconds,
        )


def _with_moved_image(context: Context, move: tuple[float, float]) -> Context:
    """The context with its last image moved (`images.moved`)."""
    from umm_reflect.images import moved

    segments = list(context.segments)
    last = max(i for i, segment in enumerate(segments) if isinstance(segment, ImageSegment))
    segments[last] = moved(segments[last], move)
    return Context(tuple(segments))


class ScriptedPolicy:
    """Says what a script says and paints plain images: for tests, and for a person who plays the
    model.

    turns: what to say, in order: what follows the forced prefix, or a Reflection that is spelled
    out. Either one list that every prompt starts from the beginning, or a function of the `Ask`.
    images: likewise, a list by image number (the last one repeats) or a function of the `DrawAsk`.
    Its tokens are the bytes of the text, and 256 for the end. `said` and `drawn` keep the asks.
    """

    END = 256

    def __init__(
        self,
        turns: Sequence[str | Reflection] | Callable[[Ask], str | Reflection],
        images: Sequence[Image.Image] | Callable[[DrawAsk], Image.Image] | None = None,
        *,
        layout: Layout = "rl",
        edit_view: EditView = "local",
        system_prompt: str = "",
    ):
        self.layout, self.edit_view, self.system_prompt = layout, edit_view, system_prompt
        self.said: list[Ask] = []
        self.drawn: list[DrawAsk] = []
        self._turns = turns
        self._images = images or plain_image
        self._place: dict[int | str, int] = {}

    def text(self, text: str) -> TextSegment:
        return TextSegment(tuple(text.encode()))

    def image(self, image: Image.Image) -> ImageSegment:
        from umm_reflect.images import to_tensor

        return ImageSegment(vae_pixels=to_tensor(image))

    def say(
        self,
        asks: Sequence[Ask],
        *,
        max_tokens: int,
        options: Options,
        on_token: OnToken | None = None,
    ) -> list[Turn]:
        turns = []
        for ask in asks:
            self.said.append(ask)
            raw = self._next(ask)
            whole = (*raw.encode(), self.END)
            ids = whole[:max_tokens]
            if on_token:
                on_token(ask.index, raw)
            turns.append(
                read_turn(
                    ask,
                    bytes(i for i in ids if i != self.END).decode(errors="replace"),
                    options,
                    fault=ProtocolError.REPEATED_TEXT
                    if options.stop_repeated_text and guards.repeats_itself(ids)
                    else None,
                    truncated=len(whole) > max_tokens,
                    forced_ids=tuple(protocol.prefix(ask.round).encode()),
                    sampled_ids=ids,
                    chosen=(True,) * len(ids),
                    allowed=(None,) * len(ids),
                    logprobs=(0.0,) * len(ids),
                )
            )
        return turns

    def draw(self, asks: Sequence[DrawAsk], *, on_step: OnStep | None = None) -> list[Transition]:
        transitions = []
        for ask in asks:
            self.drawn.append(ask)
            image = (
                self._images(ask)
                if callable(self._images)
                else self._images[min(ask.number, len(self._images) - 1)]
            )
            transitions.append(Transition(image, view=ask.view, segment=self.image(image)))
        if asks and on_step:
            on_step(1, 1)
        return transitions

    def _next(self, ask: Ask) -> str:
        if callable(self._turns):
            line = self._turns(ask)
        else:
            place = self._place.get(ask.index, 0)
            self._place[ask.index] = place + 1
            if place >= len(self._turns):
                raise ValueError(f"the script has {len(self._turns)} turns, no turn {place}")
            line = self._turns[place]
        if isinstance(line, Reflection):
            whole = protocol.canonical(line, ask.round, ask.source)
            return whole.removeprefix(protocol.prefix(ask.round))
        return line


class ForcedTurns:
    """A model that is made to say legal turns of exactly `length` tokens, each asking for an edit.

    Random weights would end every run at its first turn. Whatever is measured on them uses this:
    the model computes the log-prob of every token, as if it had sampled it, and draws real edits.
    """

    def __init__(self, policy: BagelPolicy, length: int):
        self.policy, self.length = policy, length
        self.layout, self.edit_view = policy.layout, policy.edit_view
        self.system_prompt = policy.system_prompt
        self.text, self.image, self.draw = policy.text, policy.image, policy.draw

    def say(
        self,
        asks: Sequence[Ask],
        *,
        max_tokens: int,
        options: Options,
        on_token: OnToken | None = None,
    ) -> list[Turn]:
        if max_tokens < self.length:
            raise ValueError(f"turns of {self.length} tokens do not fit a budget of {max_tokens}")
        force = [self._ids(ask) for ask in asks]
        return self.policy.say(
            asks, max_tokens=max_tokens, options=options, on_token=on_token, force=force
        )

    @classmethod
    def shortest(cls, policy: BagelPolicy) -> int:
        """Tokens of the shortest turns that can be forced, in any of the first ten rounds."""
        from umm_reflect.context import Context

        empty = Context(())
        asks = [Ask(empty, k, s, 0, 0) for k in range(10) for s in (f"Image #{k}", "given", "None")]
        bare = cls(policy, 0)
        word = len(policy.bagel.tokens.encode(" a"))
        return word + max(len(head) + len(tail) + 1 for head, tail in map(bare._frame, asks))

    def _frame(self, ask: Ask) -> tuple[list[int], list[int]]:
        """A legal turn before and after the padding of its thinking, without the end."""
        tokens = self.policy.bagel.tokens
        head = tokens.encode(f"{ask.round % 10}/10")
        head += tokens.encode("\n[ACTION] edit\n[THINKING] It")
        tail = tokens.encode(
            f".\n[SOURCE_IMAGE] {ask.source}\n</think>\n[EDIT] Add circle number {ask.round}."
        )
        return head, tail

    def _ids(self, ask: Ask) -> list[int]:
        """A legal turn, its thinking padded with one word to the length."""
        tokens = self.policy.bagel.tokens
        head, tail = self._frame(ask)
        word = tokens.encode(" a")
        room = self.length - len(head) - len(tail) - 1
        if room < len(word):
            least = self.length - room + len(word)
            raise ValueError(f"a legal turn needs {least} tokens or more, not {self.length}")
        padding = (word * room)[: room - room % len(word)]
        padding += padding[-1:] * (room - len(padding))
        return [*head, *padding, *tail, tokens.end]


def read_turn(
    ask: Ask, raw: str, options: Options, *, fault: ProtocolError | None, truncated: bool, **record
) -> Turn:
    """The turn that an answer is. raw: what was said after the forced prefix, without the end
    token.

    record: the per-token fields of `Turn`.
    """
    text = protocol.prefix(ask.round) + raw
    if fault is None and truncated and not options.accept_truncated:
        fault = ProtocolError.TRUNCATED
    read = protocol.first_payload_line(text) if options.stop_at_line else text
    outcome = fault or protocol.parse(read, ask.round, ask.source)
    legal = isinstance(outcome, Reflection)
    said = protocol.canonical(outcome, ask.round, ask.source) if legal else None
    return Turn(ask.round, text=text, outcome=outcome, said=said, context=ask.context, **record)


def plain_image(ask: DrawAsk) -> Image.Image:
    """A grey image, lighter with each number, so that every edit is visible."""
    return Image.new("RGB", (32, 32), (40 + 50 * (ask.number % 4),) * 3)


class _Stream:
    """Passes sampled ids on as text, a piece at a time, once its characters are whole."""

    def __init__(self, asks: Sequence[Ask], tokens, on_token: OnToken):
        self.asks, self.tokens, self.on_token = asks, tokens, on_token
        self.ids: list[list[int]] = [[] for _ in asks]

    def __call__(self, row: int, token: int) -> None:
        if token == self.tokens.end:
            return
        self.ids[row].append(token)
        piece = self.tokens.decode(self.ids[row])
        if not piece.endswith("\ufffd"):
            self.ids[row].clear()
            self.on_token(self.asks[row].index, piece)
