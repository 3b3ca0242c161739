"""Say: batched, ragged sampling of text over cached contexts.

    engine = Engine(bagel)
    said = say(bagel, engine.caches(contexts), forced=..., temperature=0.5, max_tokens=512,
               generators=...)

Randomness comes from one generator a sample, so nothing depends on what else is in the batch, but
for the rounding of a GPU's kernels, which are chosen by shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from umm_reflect.cache import KVCache
from umm_reflect.decode import make_decoder
from umm_reflect.model import Bagel

# Nested dictionaries from token id to what may follow; a leaf is empty. {7: {8: {}, 9: {}}} allows
# "7 8" and "7 9".
Trie = dict[int, "Trie"]
# Devices without fp64: there the choice is made on the CPU.
NO_DOUBLES = ("mps", "npu")


@dataclass(frozen=True)
class Said:
    """What one sample said after its forced prefix.

    sampled_ids: the ids, with the end token when the model chose it. logprobs: fp32, at the
    sampling temperature, one an id (0 where there was no choice). allowed: the ids a constrained
    position chose from, else None. chosen: whether the model had a choice. truncated: the budget
    ended before the text did.
    """

    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    allowed: tuple[tuple[int, ...] | None, ...]
    chosen: tuple[bool, ...]
    truncated: bool


@dataclass(frozen=True)
class StopRule:
    """When to ask whether a text has ended: after one of `after`, and at every `every`-th id (0:
    never). It is not asked at other ids, so that hundreds of rows cost nothing.
    """

    ends: Callable[[list[int]], bool]
    after: Collection[int] = frozenset()
    every: int = 0

    def __call__(self, ids: list[int]) -> bool:
        asked = ids[-1] in self.after or (self.every > 0 and len(ids) % self.every == 0)
        return asked and self.ends(ids)


class _Speaker:
    """One row while it speaks. allowed: of its first ids, as long as it follows a trie."""

    def __init__(self, index: int, trie: Trie | None, most: int):
        self.index = index
        self.trie = trie or None
        self.most = most  # it ends with this many ids
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.allowed: list[tuple[int, ...]] = []

    def legal(self) -> tuple[int, ...] | None:
        return tuple(sorted(self.trie)) if self.trie else None

    def take(self, token: int, logprob: float) -> None:
        if self.trie:
            legal = self.legal()
            self.allowed.append(legal)
            self.trie = self.trie[token] or None
            logprob = 0.0 if len(legal) == 1 else logprob
        self.ids.append(token)
        self.logprobs.append(logprob)

    def result(self, truncated: bool) -> Said:
        free = len(self.ids) - len(self.allowed)
        return Said(
            tuple(self.ids),
            tuple(self.logprobs),
            (*self.allowed, *(None,) * free),
            (*(len(legal) > 1 for legal in self.allowed), *(True,) * free),
            truncated,
        )


@dataclass(frozen=True)
class Sure:
    """A first id that is only legal where it has at least this share of the first choice (of a
    trie, at temperature 1); less sure, a row chooses among the others.

    least: of each row. others: [rows, glances] shares that it has in further contexts of each row;
    the mean counts.
    """

    token: int
    least: Sequence[float]
    others: Tensor | None = None

    def share(self, logits: Tensor, trie: Trie) -> Tensor:
        """[rows] of logits [rows, vocabulary], fp32."""
        legal = sorted(trie)
        return logits[:, legal].float().softmax(-1)[:, legal.index(self.token)]

    def withdraw(self, logits: Tensor, speakers: Sequence[_Speaker]) -> None:
        """logits: [rows, vocabulary], of the first ids. Waits for the device once."""
        for trie in {id(s.trie): s.trie for s in speakers}.values():
            if trie is None or self.token not in trie or len(trie) < 2:
                continue
            share = self.share(logits, trie)
            if self.others is not None:
                share = torch.cat([share[:, None], self.others.to(share)], 1).mean(1)
            others = {token: rest for token, rest in trie.items() if token != self.token}
            for speaker, own, least in zip(speakers, share.tolist(), self.least, strict=True):
                if speaker.trie is trie and own < least:
                    speaker.trie = others


@torch.inference_mode()
def first_shares(
    bagel: Bagel,
    caches: Sequence[KVCache],
    *,
    forced: Sequence[Sequence[int]],
    choices: Trie,
    sure: Sure,
) -> Tensor:
    """[rows]: what share of the first choice `sure.token` has after each context and its forced
    text. Nothing is said."""
    pieces = [(bagel.frame.start, *ids) for ids in forced]
    decoder = make_decoder(bagel, caches, pieces, 1, steps=1, capture=False)
    try:
        return sure.share(decoder.first, choices)
    finally:
        decoder.close()


@torch.inference_mode()
def say(
    bagel: Bagel,
    caches: Sequence[KVCache],
    *,
    forced: Sequence[Sequence[int]],
    temperature: float,
    max_tokens: int,
    generators: Sequence[torch.Generator],
    choices: Trie | None = None,
    greedy: bool = False,
    stop_ids: Sequence[int] = (),
    stop_after: Callable[[list[int]], bool] | None = None,
    force: Sequence[Sequence[int]] | None = None,
    on_token: Callable[[int, int], None] | None = None,
    on_logits: Callable[[Tensor], None] | None = None,
    support: int | None = None,
    capture: bool | None = None,
    sure: Sure | None = None,
) -> list[Said]:
    """Continue each context with a text: the start token, `forced[r]`, then up to `max_tokens`
    sampled ids.

    choices: the first sampled ids must follow this trie, with probabilities renormalised over what
    is legal at each step. Then sampling is free: softmax(logits / temperature) over the first
    `support` ids (default: those that the tokenizer can spell). Stops at the end token, at a
    `stop_ids` token, when `stop_after(ids)` says so (a `StopRule` names the ids that it is asked
    at), or at the cap. force: ids to take instead of sampling (their log-probs are still the
    model's). on_token(row, id) streams; on_logits sees [live rows, vocabulary], which the next step
    may overwrite. capture: whether steps have static shapes and are captured into CUDA graphs
    (decode.py); None asks the model: by default on a GPU, for texts that may be long. sure: a first
    choice that takes certainty; what was legal is in the result. Forced texts do not ask it.

    Draws one uniform number a token from each row's generator. The caches stay as they are.
    Raises ValueError for a temperature that is not positive, or lengths that differ, and
    FloatingPointError when the logits are no numbers.
    """
    rows = len(caches)
    if not rows:
        return []
    if not greedy and temperature <= 0:
        raise ValueError(
            f"temperature {temperature} must be positive; for the most likely text set greedy=True"
        )
    for name, value in (("forced", forced), ("generators", generators), ("force", force)):
        if value is not None and len(value) != rows:
            raise ValueError(f"{rows} contexts but {len(value)} {name}")
    if force is not None and not all(len(ids) for ids in force):
        raise ValueError("force has a row without ids")
    frame, device = bagel.frame, bagel.device
    support = support if support is not None else bagel.tokens.size
    uniform = torch.stack([torch.rand(max_tokens, generator=g) for g in generators]).to(device)
    most = [max_tokens] * rows if force is None else [len(ids) for ids in force]
    speakers = [_Speaker(r, choices, most[r]) for r in range(rows)]
    forced_ids = None if force is None else _padded(force, max_tokens).to(device)
    done: dict[int, Said] = {}
    stops, steps = {frame.end, *stop_ids}, min(max_tokens, max(most))

    decoder = make_decoder(
        bagel,
        caches,
        [(frame.start, *ids) for ids in forced],
        max_tokens,
        steps=steps,
        capture=bagel.capture if capture is None else capture,
    )
    try:
        logits = decoder.first
        if sure is not None and force is None:
            sure.withdraw(logits, speakers)
        for step in range(max_tokens):
            if on_logits is not None:
                on_logits(logits)
            tokens_R, logprobs_R = _choose(
                logits,
                speakers,
                uniform[:, step],
                None if forced_ids is None else forced_ids[:, step],
                temperature,
                greedy,
                support,
            )
            transfer = _Transfer(tokens_R, logprobs_R)
            # a static step does not mind which rows have finished: the GPU goes on meanwhile
            ahead = decoder.ahead and step < steps - 1
            if ahead:
                logits = decoder.step(tokens_R)
            finished = []
            tokens, logprobs = transfer.lists()
            for place, (speaker, token, logprob) in enumerate(
                zip(speakers, tokens, logprobs, strict=True)
            ):
                speaker.take(token, logprob)
                if on_token is not None:
                    on_token(speaker.index, token)
                ended = token in stops or (stop_after is not None and stop_after(speaker.ids))
                if ended or (force is not None and len(speaker.ids) == speaker.most):
                    done[speaker.index] = speaker.result(truncated=False)
                    finished.append(place)
            if step == max_tokens - 1 or len(finished) == len(speakers):
                break
            if finished:
                gone = set(finished)
                keep = [place for place in range(len(speakers)) if place not in gone]
                speakers = [speakers[place] for place in keep]
                keep_R = torch.tensor(keep, device=device)
                uniform, tokens_R = uniform[keep_R], tokens_R[keep_R.to(tokens_R.device)]
                forced_ids = None if forced_ids is None else forced_ids[keep_R]
                decoder.drop(finished)
                if ahead:
                    logits = logits[keep_R]
            if not ahead:
                logits = decoder.step(tokens_R.to(device))
    finally:
        decoder.close()
    for speaker in speakers:
        if speaker.index not in done:
            done[speaker.index] = speaker.result(truncated=True)
    return [done[r] for r in range(rows)]


def _padded(force: Sequence[Sequence[int]], length: int) -> Tensor:
    """[rows, length]: what each row is made to say, then -1."""
    return torch.tensor([[*ids, *[-1] * length][:length] for ids in force])


def _choose(
    logits: Tensor,
    speakers: list[_Speaker],
    uniform: Tensor,
    forced: Tensor | None,
    temperature: float,
    greedy: bool,
    support: int,
) -> tuple[Tensor, Tensor]:
    """One token a row by inverse transform of its own uniform number, and its log-prob (fp32).

    forced: a row's token where that is given, else -1.
    """
    scores = logits.float()
    scores[:, support:] = -torch.inf
    if any(speaker.trie for speaker in speakers):
        # rows mostly stand at the same place of the trie: one line of the table for all of them
        lines: dict[tuple[int, ...] | None, int] = {}
        line_of = [lines.setdefault(speaker.legal(), len(lines)) for speaker in speakers]
        closed = torch.zeros(len(lines), scores.shape[-1], dtype=torch.bool)
        for ids, line in lines.items():
            if ids is not None:
                closed[line] = True
                closed[line, list(ids)] = False
        closed = closed[line_of] if len(lines) > 1 else closed
        scores = scores.masked_fill(closed.to(scores.device), -torch.inf)
    if not greedy:
        scores = scores / temperature
    if scores.device.type in NO_DOUBLES:
        scores, uniform = scores.cpu(), uniform.cpu()
    logprobs = scores.log_softmax(-1)
    if greedy:
        tokens = scores.argmax(-1)
    else:
        mass = logprobs.double().exp().cumsum(-1)
        goal = uniform.double()[:, None] * mass[:, -1:]
        tokens = torch.searchsorted(mass, goal, right=True).squeeze(-1)
        tokens = tokens.clamp_max(scores.shape[-1] - 1)  # logits that are no numbers lead beyond
    if forced is not None:
        forced = forced.to(tokens.device)
        tokens = torch.where(forced >= 0, forced, tokens)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


class _Transfer:
    """The tokens and log-probs of a step on their way to the host: one copy, waited for late."""

    def __init__(self, tokens_R: Tensor, logprobs_R: Tensor):
        self._both = torch.stack([tokens_R.double(), logprobs_R.double()])
        self._arrived: torch.cuda.Event | None = None
        if self._both.is_cuda:
            host = torch.empty(self._both.shape, dtype=self._both.dtype, pin_memory=True)
            host.copy_(self._both, non_blocking=True)
            self._arrived = torch.cuda.current_stream(self._both.device).record_event()
            self._both = host

    def lists(self) -> tuple[list[int], list[float]]:
        """Raises FloatingPointError where the log-prob of what was taken is no number."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, logprobs = self._both.tolist()
        if math.isnan(sum(logprobs)):  # of numbers that are 0 at most
            raise FloatingPointError(
                "the model's words have no probability: the weights or the number type are broken; "
                "try --dtype float32"
            )
        return [int(token) for token in tokens], logprobs
