"""Say: batched, ragged sampling of text over cached contexts.

    engine = Engine(bagel)
    said = say(bagel, engine.caches(contexts), forced=..., temperature=0.5, max_tokens=512,
               generators=...)

Randomness comes from one generator a sample, so nothing depends on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from umm_reflect import batch as batching
from umm_reflect.attention import Attend, Group
from umm_reflect.cache import KVCache, assemble
from umm_reflect.layout import Row, text_block
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


class _Speaker:
    """One row while it speaks."""

    def __init__(self, index: int, trie: Trie | None, force: Sequence[int] | None):
        self.index = index
        self.trie = trie or None
        self.force = None if force is None else list(force)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.allowed: list[tuple[int, ...] | None] = []
        self.chosen: list[bool] = []

    def legal(self) -> tuple[int, ...] | None:
        return tuple(sorted(self.trie)) if self.trie else None

    def take(self, token: int, logprob: float) -> None:
        legal = self.legal()
        self.ids.append(token)
        self.logprobs.append(0.0 if legal is not None and len(legal) == 1 else logprob)
        self.allowed.append(legal)
        self.chosen.append(legal is None or len(legal) > 1)
        if self.trie:
            self.trie = self.trie[token] or None

    def result(self, truncated: bool) -> Said:
        return Said(
            tuple(self.ids),
            tuple(self.logprobs),
            tuple(self.allowed),
            tuple(self.chosen),
            truncated,
        )


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
) -> list[Said]:
    """Continue each context with a text: the start token, `forced[r]`, then up to `max_tokens`
    sampled ids.

    choices: the first sampled ids must follow this trie, with probabilities renormalised over what
    is legal at each step. Then sampling is free: softmax(logits / temperature) over the first
    `support` ids (default: those that the tokenizer can spell). Stops at the end token, at a
    `stop_ids` token, when `stop_after(ids)` says so, or at the cap. force: ids to take instead of
    sampling (their log-probs are still the model's). on_token(row, id) streams.

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
    frame, device = bagel.frame, bagel.device
    support = support if support is not None else bagel.tokens.size
    uniform = torch.stack([torch.rand(max_tokens, generator=g) for g in generators]).to(device)
    speakers = [_Speaker(r, choices, force[r] if force is not None else None) for r in range(rows)]
    done: dict[int, Said] = {}
    stops = {frame.end, *stop_ids}

    pieces = [(frame.start, *ids) for ids in forced]
    decoder = _Decoder(bagel, caches, pieces, max_tokens)
    logits = decoder.first
    for step in range(max_tokens):
        if on_logits is not None:
            on_logits(logits)
        tokens, logprobs = _choose(
            logits,
            speakers,
            uniform[[s.index for s in speakers], step],
            temperature,
            greedy,
            support,
        )
        finished = []
        for place, (speaker, token, logprob) in enumerate(
            zip(speakers, tokens, logprobs, strict=True)
        ):
            speaker.take(token, logprob)
            if on_token is not None:
                on_token(speaker.index, token)
            ended = token in stops or (stop_after is not None and stop_after(speaker.ids))
            if ended or (speaker.force is not None and len(speaker.ids) == len(speaker.force)):
                done[speaker.index] = speaker.result(truncated=False)
                finished.append(place)
        if step == max_tokens - 1 or len(finished) == len(speakers):
            break
        if finished:
            gone = set(finished)
            speakers = [s for place, s in enumerate(speakers) if place not in gone]
            tokens = [t for place, t in enumerate(tokens) if place not in gone]
            decoder.drop(finished)
        logits = decoder.step(tokens)
    for speaker in speakers:
        if speaker.index not in done:
            done[speaker.index] = speaker.result(truncated=True)
    return [done[r] for r in range(rows)]


def _choose(
    logits: Tensor,
    speakers: list[_Speaker],
    uniform: Tensor,
    temperature: float,
    greedy: bool,
    support: int,
) -> tuple[list[int], list[float]]:
    """One token a row by inverse transform of its own uniform number, and its log-prob (fp32).

    Raises FloatingPointError where the log-prob of what was taken is no number.
    """
    scores = logits.float()
    scores[:, support:] = -torch.inf
    legal = [s.legal() for s in speakers]
    if any(ids is not None for ids in legal):
        closed = torch.zeros(scores.shape, dtype=torch.bool)
        for row, ids in enumerate(legal):
            if ids is not None:
                closed[row] = True
                closed[row, list(ids)] = False
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
    for row, speaker in enumerate(speakers):
        if speaker.force is not None:
            tokens[row] = speaker.force[len(speaker.ids)]
    picked = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    both = torch.stack([tokens.double(), picked.double()]).tolist()  # one transfer a step
    if any(math.isnan(logprob) for logprob in both[1]):
        raise FloatingPointError(
            "the model's words have no probability: the weights or the number type are broken; "
            "try --dtype float32"
        )
    return [int(t) for t in both[0]], both[1]


class _Decoder:
    """A batch of contexts that grow by one token a row and step, in place."""

    def __init__(self, bagel: Bagel, caches: Sequence[KVCache], pieces: list, max_tokens: int):
        self.bagel = bagel
        rows = [
            Row((text_block(ids, cache.position),), cache.length)
            for ids, cache in zip(pieces, caches, strict=True)
        ]
        device = bagel.device
        self.workspace = assemble(
            caches,
            [row.length + max_tokens for row in rows],
            bagel.config.llm,
            device=device,
            dtype=bagel.dtype,
        )
        batch = batching.build(
            rows,
            latent_grid_side=bagel.config.latent_grid_side,
            device=device,
            workspace=self.workspace,
            backend=bagel.attn,
        )
        x_UD = bagel.embed_ids(batch.ids_U)
        hidden, _ = bagel(x_UD, x_UD[:0], batch.position_T, batch.attend)
        self.first = bagel.logits(hidden[batch.last_R])
        self.lengths = [row.past + row.length for row in rows]
        self.positions = [
            cache.position + row.length for cache, row in zip(caches, rows, strict=True)
        ]
        self._upload()

    def _upload(self) -> None:
        device = self.bagel.device
        self._slots = torch.tensor(self.lengths, device=device)
        self._position = torch.tensor(self.positions, device=device)
        self._rows = torch.arange(len(self.lengths), device=device)
        self._base = self._rows * self.workspace.slots

    def drop(self, places: Sequence[int]) -> None:
        """Rows that have finished leave the batch."""
        gone = set(places)
        keep = [i for i in range(len(self.lengths)) if i not in gone]
        self.lengths = [self.lengths[i] for i in keep]
        self.positions = [self.positions[i] for i in keep]
        self.workspace = self.workspace.rows(keep)
        self._upload()

    def step(self, tokens: list[int]) -> Tensor:
        """Feed one token a live row; returns the next logits [rows, vocabulary]."""
        bagel = self.bagel
        rows, keys = len(self.lengths), max(self.lengths) + 1
        groups, mask = (Group(0, rows, 1, keys),), None
        if len(set(self.lengths)) > 1:
            seen = torch.arange(keys, device=bagel.device)[None] <= self._slots[:, None]
            groups, mask = (), seen[:, None, None, :]
        attend = Attend(
            rows=rows,
            queries=1,
            place_T=self._rows,
            mask=mask,
            groups=groups,
            workspace=self.workspace,
            write_T=self._base + self._slots,
            keys=keys,
            backend=bagel.attn,
        )
        x_UD = bagel.embed_ids(torch.tensor(tokens, device=bagel.device))
        hidden, _ = bagel(x_UD, x_UD[:0], self._position, attend)
        self.lengths = [length + 1 for length in self.lengths]
        self.positions = [position + 1 for position in self.positions]
        self._slots = self._slots + 1
        self._position = self._position + 1
        return bagel.logits(hidden)
