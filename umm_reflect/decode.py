"""The decode step of `say`: one token a row and forward, eager, with static shapes, or captured.

    decoder = make_decoder(bagel, caches, pieces, max_tokens, steps=max_tokens, capture=None)
    logits = decoder.first                       # [live rows, vocabulary] after the pieces
    logits = decoder.step(tokens_R)              # one id a live row
    decoder.drop([2, 5])                         # places among the live rows that have finished
    decoder.close()

`Decoder` lays every step out anew: rows that finish leave, attention covers the longest row. A GPU
then waits for launches. `StaticDecoder` does a step on tensors that keep their place and shape, so
that a CUDA graph of it can be replayed: ids, slots and positions are updated in place, a mask made
from the slots hides the rest of the workspace, and finished rows stay until half of many have
finished.

A static step attends under a mask where an eager one of rows of equal length needs none, and may
have more rows. Other kernels then run, and log-probs differ by rounding.

What a capture costs: its warm-up is the step that was due anyhow, and recording takes the time of
launching one more. The first one of a call is compared with an eager step: about three forwards. A
step is captured anew when the longest row outgrows `KEYS_STEP` more keys, and after each halving.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from umm_reflect import batch as batching
from umm_reflect.attention import Attend, Group
from umm_reflect.cache import KVCache, assemble
from umm_reflect.graphs import NotCaptured, make_recorder
from umm_reflect.layout import Row, text_block
from umm_reflect.model import Bagel

# Fewer steps than this are not worth a first capture, and a further one.
MIN_STEPS, MIN_LATER_STEPS = 16, 4
# A captured step of so few rows takes as long as one of half as many: finished ones may stay.
FEW_ROWS = 32
# The keys that a static step attends to are rounded up to a multiple of this.
KEYS_STEP = 256
# Slots of a static workspace: masks of such lengths need no padding in any kernel.
SLOTS_STEP = 16
# By how much the logits of a captured step may differ from the eager step's, as a share of the
# largest logit (of 1, where that is less). Other kernels round otherwise; a wrong step is far off.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


def make_decoder(
    bagel: Bagel,
    caches: Sequence[KVCache],
    pieces: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    steps: int,
    capture: bool | None,
) -> Decoder | StaticDecoder:
    """Reads the piece of each row after its cache; the decoder has room for `max_tokens` more.

    steps: how many tokens will be said at most. capture: False eager; True static, captured on a
    GPU; None static and captured on a GPU when there are enough steps, else eager.
    """
    if capture is None:
        capture = bagel.device.type == "cuda" and steps >= MIN_STEPS and not _obstacle(bagel)
    if not capture:
        return Decoder(bagel, caches, pieces, max_tokens)
    return StaticDecoder(bagel, caches, pieces, max_tokens, steps)


class Decoder:
    """A batch of contexts that grow by one token a row and step, in place."""

    ahead = False  # a step is worth waiting for what has finished

    def __init__(
        self,
        bagel: Bagel,
        caches: Sequence[KVCache],
        pieces: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        slots_step: int = 1,
    ):
        self.bagel = bagel
        rows = [
            Row((text_block(ids, cache.position),), cache.length)
            for ids, cache in zip(pieces, caches, strict=True)
        ]
        device = bagel.device
        slots = _round_up(max(row.past + row.length for row in rows) + max_tokens, slots_step)
        self.workspace = assemble(
            caches,
            [slots - row.past for row in rows],
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
        # lengths and positions at `grown` 0; every row grows by one a step
        self.lengths = [row.past + row.length for row in rows]
        self.positions = [
            cache.position + row.length for cache, row in zip(caches, rows, strict=True)
        ]
        self.grown = 0
        self._upload()

    def _upload(self) -> None:
        device = self.bagel.device
        self.slots_R = torch.tensor(self.lengths, device=device) + self.grown
        self.position_R = torch.tensor(self.positions, device=device) + self.grown
        self.rows_R = torch.arange(len(self.lengths), device=device)
        self.base_R = self.rows_R * self.workspace.slots
        self._ragged = len(set(self.lengths)) > 1
        self._longest = max(self.lengths)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def keys(self) -> int:
        """How many keys the longest row sees in the next step."""
        return self._longest + self.grown + 1

    def drop(self, places: Sequence[int]) -> None:
        """Rows that have finished leave the batch."""
        gone = set(places)
        keep = [i for i in range(len(self.lengths)) if i not in gone]
        self.lengths = [self.lengths[i] for i in keep]
        self.positions = [self.positions[i] for i in keep]
        self.workspace = self.workspace.rows(keep)
        self._upload()

    def step(self, tokens_R: Tensor) -> Tensor:
        """Feed one token a live row; returns the next logits [rows, vocabulary]."""
        keys = self.keys
        groups, mask = (Group(0, self.rows, 1, keys),), None
        if self._ragged:
            seen = torch.arange(keys, device=self.bagel.device)[None] <= self.slots_R[:, None]
            groups, mask = (), seen[:, None, None, :]
        logits = self.forward(tokens_R, keys, mask, groups)
        self.grown += 1
        return logits

    def forward(
        self, tokens_R: Tensor, keys: int, mask: Tensor | None, groups: Sequence[Group] = ()
    ) -> Tensor:
        """One step over the first `keys` slots; moves the slots and positions on, in place."""
        bagel = self.bagel
        attend = Attend(
            rows=self.rows,
            queries=1,
            place_T=self.rows_R,
            mask=mask,
            groups=groups,
            workspace=self.workspace,
            write_T=self.base_R + self.slots_R,
            keys=keys,
            backend=bagel.attn,
        )
        x_UD = bagel.embed_ids(tokens_R)
        hidden, _ = bagel(x_UD, x_UD[:0], self.position_R, attend)
        logits = bagel.logits(hidden)
        self.slots_R.add_(1)
        self.position_R.add_(1)
        return logits

    def close(self) -> None:
        """There is nothing to give back."""


class StaticDecoder:
    """A `Decoder` whose steps have static shapes; on a GPU they are captured and replayed.

    Logits of `step` may be overwritten by the next one. captures: host seconds of each capture, the
    step that warmed it up included. Where a step cannot be captured, or a captured one is not what
    it should be, one line says so and this model's further steps are eager (`bagel.capture`).
    """

    def __init__(
        self,
        bagel: Bagel,
        caches: Sequence[KVCache],
        pieces: Sequence[Sequence[int]],
        max_tokens: int,
        steps: int,
    ):
        self.bagel = bagel
        self.eager = Decoder(bagel, caches, pieces, max_tokens, slots_step=SLOTS_STEP)
        self.first = self.eager.first
        self.steps = steps
        self.captures: list[float] = []
        self.recorder = make_recorder(bagel.device)
        self._static, self._verified = True, False
        self._keys = 0
        self._place()
        if self.recorder is not None and (obstacle := _obstacle(bagel)):
            self._give_up(obstacle)

    @property
    def ahead(self) -> bool:
        """Whether the next step may begin before it is known which rows have finished."""
        return self._static

    @property
    def _left(self) -> int:
        return self.steps - self.eager.grown

    def _place(self) -> None:
        """New static tensors: the batch has another number of rows."""
        self.live = list(range(self.eager.rows))
        self._live_R: Tensor | None = None  # the places of the live rows, once some have finished
        self._ids_R = torch.zeros_like(self.eager.rows_R)
        self._keys = 0

    def drop(self, places: Sequence[int]) -> None:
        """Rows that have finished stay where they are, until half of many have."""
        if not self._static:
            self.eager.drop(places)
            return
        gone = set(places)
        self.live = [row for place, row in enumerate(self.live) if place not in gone]
        many = self.eager.rows > FEW_ROWS and self._left >= MIN_LATER_STEPS
        if 2 * len(self.live) <= self.eager.rows and (many or self.recorder is None):
            self._compact()
        else:
            self._live_R = torch.tensor(self.live, device=self.bagel.device)

    def _compact(self) -> None:
        if len(self.live) < self.eager.rows:
            self.eager.drop(sorted(set(range(self.eager.rows)) - set(self.live)))
            self._place()

    def step(self, tokens_R: Tensor) -> Tensor:
        """Feed one token a live row; returns the next logits [live rows, vocabulary]."""
        if not self._static:
            return self.eager.step(tokens_R)
        live = self._live_R
        if live is None:
            self._ids_R.copy_(tokens_R)
        else:
            self._ids_R.index_copy_(0, live, tokens_R)
        logits = self._step()
        if not self._static:  # it gave up in this step
            self._compact()
        return logits if live is None else logits.index_select(0, live)

    def _step(self) -> Tensor:
        keys = min(_round_up(self.eager.keys, KEYS_STEP), self.eager.workspace.slots)
        changed, self._keys = keys != self._keys, keys
        if self.recorder is None:
            logits = self._forward()
        elif changed:
            return self._capture()
        elif self.recorder.ready:
            logits = self.recorder.replay()
        else:
            logits = self._forward()
        self.eager.grown += 1
        return logits

    def _forward(self) -> Tensor:
        """What is captured: it reads and writes static tensors alone, and waits for nothing."""
        keys = torch.arange(self._keys, device=self.bagel.device)
        hidden = keys[None] > self.eager.slots_R[:, None]
        mask = torch.zeros(hidden.shape, device=hidden.device, dtype=self.bagel.dtype)
        mask.masked_fill_(hidden, -torch.inf)
        return self.eager.forward(self._ids_R, self._keys, mask[:, None, None, :])

    def _capture(self) -> Tensor:
        """The step that is due, and a graph for those after it where there are enough of them."""
        self.recorder.forget()
        eager, began = self.eager, time.perf_counter()
        if self._left < (MIN_LATER_STEPS if self._verified else MIN_STEPS):
            logits = self._forward()
        elif not self._verified:
            return self._first_capture()
        else:
            try:
                logits = self.recorder.record(self._forward)
            except NotCaptured as error:
                self._give_up(error.reason)
                if error.result is None:
                    return eager.step(self._ids_R)
                logits = error.result
            self.captures.append(time.perf_counter() - began)
        eager.grown += 1
        return logits

    def _first_capture(self) -> Tensor:
        """Capture in another state than the one that is due, and compare a replay in that one with
        an eager step, whose results are the ones that stay: what a graph has taken for a constant
        shows there.
        """
        eager, began = self.eager, time.perf_counter()
        state = (self._ids_R, eager.slots_R, eager.position_R)
        due = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, value in zip(state, due, strict=True):
                tensor.copy_(value)

        self._ids_R.zero_()
        for tensor in state[1:]:  # the slot after is free: the next step writes it anew
            tensor.add_(1)
        try:
            self.recorder.record(self._forward)
        except NotCaptured as error:
            restore()
            self._give_up(error.reason)
            return eager.step(self._ids_R)
        self.captures.append(time.perf_counter() - began)
        restore()
        replayed = self.recorder.replay().clone()
        restore()
        logits = eager.step(self._ids_R)
        live = slice(None) if self._live_R is None else self._live_R
        expected = logits[live].float()
        apart = (replayed[live].float() - expected).abs().max()
        worst, largest = torch.stack([apart, expected.abs().max()]).tolist()
        limit = TOLERANCE.get(logits.dtype, TOLERANCE[torch.float32]) * max(1.0, largest)
        self._verified = True
        if not worst <= limit and largest == largest:  # broken weights are `say`'s to report
            self._give_up(f"its logits differ by {worst:.3g} from the plain step's")
        return logits

    def _give_up(self, reason: str) -> None:
        """From now on this call's steps, and this model's, are eager."""
        print(f"note: text is said without a CUDA graph: {reason}", file=sys.stderr)
        self.bagel.capture = False
        self._static = False
        self.close()

    def close(self) -> None:
        """Give the graph and its memory back."""
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None


def _obstacle(bagel: Bagel) -> str | None:
    """Why a step of this model must not be captured, where that is known beforehand.

    A forward of sharded weights starts collectives. Weights that `Learner.inference` has gathered
    are plain tensors, and their forwards start none.
    """
    if torch.is_autocast_enabled(bagel.device.type):
        return "autocast keeps copies of the weights that a graph would outlive"
    weights = bagel.language_model.parameters()
    if any(hasattr(weight, "device_mesh") or hasattr(weight, "ds_id") for weight in weights):
        return "the weights are sharded"
    return None


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
