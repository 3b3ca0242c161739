"""Which rows a step learns from, and which of them share a pack: a pure function of (seed, step).

    measured = measure(rows, layer, frame, config)          # sft/packs.py: tokens of every row
    sampler = Sampler(PRESETS["release"], measured, seed=0, packs_per_step=16)
    packs = share(sampler.step(1200), rank, world)          # of this process
    for line in sampler.coverage(1410).lines(): print(line)

The plan is one endless list of packs: rows are drawn kind by kind in the mixture's proportions and
put best-fit into packs that are open. It depends on the mixture, the lengths and the seed alone.
A step is the next `packs_per_step` of them, whoever works on it, so a resumed run needs only its
step number, and another number of processes or workers learns from the same rows. To go to a step
the plan is made anew from its beginning (about a second for 100,000 rows).

Nothing that was drawn is ever lost: a pack is closed when it holds enough, or when it has waited
for `look_ahead` further rows. Rows that no pack may hold are left out before, and counted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Literal, get_args

import numpy as np
import torch

from sft.rows import Kind
from umm_reflect.errors import UserError
from umm_reflect.packing import fill_bins
from umm_reflect.rng import stream

By = Literal["rows", "samples", "tokens"]
Latents = Literal["mean", "sampled"]

TOO_LONG = "longer than max_sample_tokens"


# --- settings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dropout:
    """What a row that draws loses of its context, so that guidance has something to steer from.

    Two ways that exclude each other. text, vit, vae: every droppable segment is left out by a lot
    of its own with this probability (BAGEL's way; it touches the system prompt and the request of
    rows that learn turns, too). text_uncond, image_uncond: the share of drawing rows laid out as
    that branch of guidance, exactly as inference builds it; rows that learn turns lose nothing.
    """

    text: float = 0.0
    vit: float = 0.0
    vae: float = 0.0
    text_uncond: float = 0.0
    image_uncond: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value <= 1:
                raise ValueError(f"dropout {name} is {value}; give a probability from 0 to 1")
        if self.text_uncond + self.image_uncond > 1:
            both = f"{self.text_uncond} + {self.image_uncond}"
            raise ValueError(f"text_uncond and image_uncond are {both}; give at most 1 together")
        if self.independent and (self.text_uncond or self.image_uncond):
            raise ValueError("dropout takes text, vit, vae or text_uncond, image_uncond, not both")

    @property
    def independent(self) -> bool:
        """Whether segments are dropped one by one."""
        return bool(self.text or self.vit or self.vae)


@dataclass(frozen=True)
class Mixture:
    """How much of each kind, how much in a pack, and what is left out.

    weights           kind → weight; kinds that are not named are not used
    by                the weights are proportions of samples, of tokens, or (rows) of passes: with
                      equal weights each row comes up equally often
    replacement       False: every row of a kind once before any comes again, in a new order each
                      pass; True: each draw is independent
    every_pack        a kind of which every pack gets one more row when it is opened
    expected_tokens   a pack is closed when it holds at least this many tokens
    max_tokens        and never holds more than these
    max_sample_tokens rows that are longer are left out (and counted)
    look_ahead        a pack is closed after so many further rows at the latest
    condition_latents of images that a row looks at: the posterior's mean, or a sample of it;
                      images to draw are always sampled
    """

    weights: Mapping[Kind, float]
    by: By = "samples"
    replacement: bool = False
    every_pack: Kind | None = None
    expected_tokens: int = 32_768
    max_tokens: int = 40_960
    max_sample_tokens: int = 28_672
    look_ahead: int = 64
    dropout: Dropout = field(default_factory=Dropout)
    condition_latents: Latents = "mean"

    def __post_init__(self) -> None:
        named = [*self.weights, *([self.every_pack] if self.every_pack else [])]
        if unknown := [kind for kind in named if kind not in get_args(Kind)]:
            choices = ", ".join(get_args(Kind))
            raise ValueError(f"unknown kind {unknown[0]!r}; choose from {choices}")
        for kind, weight in self.weights.items():
            if not 0 <= weight < float("inf"):
                raise ValueError(f"the weight of {kind} is {weight}; give 0 (unused) or more")
        if not any(self.weights.values()):
            raise ValueError("a mixture needs a kind with a weight above 0")
        for name, choices in (("by", By), ("condition_latents", Latents)):
            if getattr(self, name) not in get_args(choices):
                allowed = ", ".join(get_args(choices))
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {allowed}")
        if not 0 < self.expected_tokens <= self.max_tokens:
            raise ValueError(
                f"expected_tokens is {self.expected_tokens} and max_tokens {self.max_tokens}; "
                "give 1 or more, and not more expected than allowed"
            )
        if not 0 < self.max_sample_tokens <= self.max_tokens:
            raise ValueError(
                f"max_sample_tokens is {self.max_sample_tokens}; give 1 to max_tokens "
                f"({self.max_tokens}), or no pack can hold such a row"
            )
        if self.look_ahead < 0:
            raise ValueError(f"look_ahead is {self.look_ahead}; give 0 (no waiting) or more")


# release: the published launcher's weights, caps and dropout, with its controller in every pack.
# ours: every row once a pass. Verifier rows are left out: controller rows learn the same turns.
PRESETS: dict[str, Mixture] = {
    "release": Mixture(
        weights={"controller": 4, "transition": 4, "verifier": 4, "penultimate": 1, "anchor": 1},
        every_pack="controller",
        dropout=Dropout(text=0.1, vit=0.3, vae=0.3),
        condition_latents="sampled",
    ),
    "ours": Mixture(
        weights={"controller": 1, "transition": 1, "anchor": 1},
        by="rows",
        expected_tokens=31_744,
        max_tokens=32_768,
        dropout=Dropout(text_uncond=0.1, image_uncond=0.1),
    ),
}


# --- what is drawn --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """tokens: of each row of each kind, before anything is dropped, int64; 0 for one that cannot
    be used. skipped: how many of a kind that are, by reason.
    """

    tokens: Mapping[Kind, np.ndarray]
    skipped: Mapping[Kind, Counter[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A row in the plan. number: its place among all that are drawn, which names its random
    streams (dropout, time, noise). index: of the row among those of its kind.
    """

    kind: Kind
    index: int
    number: int
    tokens: int

    def __reduce__(self) -> tuple:  # workers are sent thousands a second
        return Drawn, (self.kind, self.index, self.number, self.tokens)


Pack = tuple[Drawn, ...]


class _Deck:
    """Rows of one kind in the order in which they come up: a new shuffle every pass."""

    def __init__(self, kind: Kind, usable: np.ndarray, seed: int, replacement: bool):
        self.kind, self.usable, self.seed, self.replacement = kind, usable, seed, replacement
        self.given = 0
        self._order = np.zeros(0, np.int64)

    def next_index(self) -> int:
        count = len(self.usable)
        turn, place = divmod(self.given, count)
        if place == 0:
            generator = stream(self.seed, self.kind, turn, "order of rows")
            if self.replacement:
                order = torch.randint(count, (count,), generator=generator)
            else:
                order = torch.randperm(count, generator=generator)
            self._order = self.usable[order.numpy()]
        self.given += 1
        return int(self._order[place])


class _Open:
    """A pack that is being filled. opened: how many rows had been put away by then."""

    def __init__(self, opened: int):
        self.members: list[Drawn] = []
        self.tokens = 0
        self.opened = opened

    def add(self, drawn: Drawn) -> None:
        self.members.append(drawn)
        self.tokens += drawn.tokens


class Sampler:
    """The plan of a run. skipped: rows left out, kind → reason → how many; empty: kinds of the
    mixture without a usable row, which the others make up for.

    One object goes on cheaply from step to step; going back makes the plan anew. Errors: UserError
    when no row can be used, ValueError for packs_per_step below 1.
    """

    def __init__(self, mixture: Mixture, measured: Measured, seed: int, packs_per_step: int):
        if packs_per_step < 1:
            raise ValueError(f"packs_per_step is {packs_per_step}; give 1 or more")
        self.mixture, self.seed, self.packs_per_step = mixture, seed, packs_per_step
        self.tokens = {kind: np.asarray(t) for kind, t in measured.tokens.items()}
        self.skipped = {kind: Counter(measured.skipped.get(kind, {})) for kind in self.tokens}
        self.usable: dict[Kind, np.ndarray] = {}
        used = [kind for kind, weight in mixture.weights.items() if weight]
        extra = [mixture.every_pack] if mixture.every_pack else []
        for kind in dict.fromkeys([*used, *extra]):
            tokens = self.tokens.get(kind, np.zeros(0, np.int64))
            self.usable[kind] = np.flatnonzero((tokens > 0) & (tokens <= mixture.max_sample_tokens))
            if long := int((tokens > mixture.max_sample_tokens).sum()):
                self.skipped[kind][TOO_LONG] += long
        self.empty = tuple(kind for kind, rows in self.usable.items() if not len(rows))
        self.rates = {
            kind: self._rate(kind)
            for kind in used
            if kind in self.usable and kind not in self.empty
        }
        if not self.rates:
            reasons = {kind: dict(some) for kind, some in self.skipped.items() if some}
            raise UserError(
                f"no row of {', '.join(used)} can be used (left out: {reasons or 'none'})",
                "Choose other kinds, or raise max_sample_tokens.",
            )
        self._plan: Iterator[Pack] = iter(())
        self._at: int | None = None

    def _rate(self, kind: Kind) -> float:
        """Relative number of samples of a kind."""
        weight, rows = self.mixture.weights[kind], self.usable[kind]
        if self.mixture.by == "rows":
            return weight * len(rows)
        if self.mixture.by == "tokens":
            return weight / float(self.tokens[kind][rows].mean())
        return weight

    def plan(self) -> Iterator[Pack]:
        """All packs from the first on, without end."""
        mixture = self.mixture
        decks = {
            kind: _Deck(kind, rows, self.seed, mixture.replacement)
            for kind, rows in self.usable.items()
            if len(rows)
        }
        drawn_of = dict.fromkeys(self.rates, 0)
        number = 0

        def draw(kind: Kind) -> Drawn:
            nonlocal number
            index = decks[kind].next_index()
            number += 1
            return Drawn(kind, index, number - 1, int(self.tokens[kind][index]))

        every = mixture.every_pack if mixture.every_pack in decks else None
        waiting: list[_Open] = []
        while True:
            # whichever kind is furthest behind its share: even, and exact after a whole pass
            kind = min(drawn_of, key=lambda k: (drawn_of[k] + 0.5) / self.rates[k])
            drawn_of[kind] += 1
            new = draw(kind)
            fitting = [p for p in waiting if p.tokens + new.tokens <= mixture.max_tokens]
            if fitting:
                max(fitting, key=lambda p: p.tokens).add(new)
            else:
                pack = _Open(number)
                if every is not None:
                    pack.add(draw(every))
                    if pack.tokens + new.tokens > mixture.max_tokens:  # each its own pack then
                        waiting.append(pack)
                        pack = _Open(number)
                pack.add(new)
                waiting.append(pack)
            still = []
            for pack in waiting:
                if (
                    pack.tokens >= mixture.expected_tokens
                    or number - pack.opened > mixture.look_ahead
                ):
                    yield tuple(pack.members)
                else:
                    still.append(pack)
            waiting = still

    def step(self, number: int) -> list[Pack]:
        """The packs of step `number` (from 0), of all processes together."""
        if number < 0:
            raise ValueError(f"step is {number}; give 0 or more")
        if self._at is None or self._at > number:
            self._plan, self._at = self.plan(), 0
        skip = (number - self._at) * self.packs_per_step
        packs = list(islice(self._plan, skip, skip + self.packs_per_step))
        self._at = number + 1
        return packs

    def coverage(self, steps: int) -> Coverage:
        """What the first `steps` steps hold of each kind."""
        packs = islice(self.plan(), steps * self.packs_per_step)
        usable = {kind: len(rows) for kind, rows in self.usable.items()}
        return Coverage.of(packs, usable, self.skipped)

    def fingerprint(self) -> str:
        """16 hex digits that change with the mixture, the seed, the packs of a step or the rows'
        lengths: what a resumed run must have in common with the one it goes on from.
        """
        settings = [asdict(self.mixture), self.seed, self.packs_per_step]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for kind, tokens in sorted(self.tokens.items()):
            digest.update(kind.encode() + tokens.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


def share(packs: Sequence[Pack], rank: int, world: int) -> list[Pack]:
    """The packs of one of `world` processes. Where they do not divide, the first have one more.

    Errors: ValueError for a rank that does not exist.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank is {rank} of {world} processes; give 0 to {world - 1}")
    return list(packs[rank::world])


def pack_once(measured: Measured, mixture: Mixture) -> list[Pack]:
    """Every usable row of the mixture's kinds exactly once, best-fit decreasing: for validation."""
    rows: list[Drawn] = []
    for kind, weight in mixture.weights.items():
        tokens = measured.tokens.get(kind, ())
        for index, length in enumerate(tokens):
            if weight and 0 < length <= mixture.max_sample_tokens:
                rows.append(Drawn(kind, index, len(rows), int(length)))
    bins = fill_bins([(row.tokens,) for row in rows], (mixture.max_tokens,))
    return [tuple(rows[i] for i in members) for members in bins]


# --- coverage -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KindCoverage:
    """rows: that can be used; samples and tokens: drawn; seen: different rows among the samples."""

    rows: int
    samples: int
    tokens: int
    seen: int
    skipped: Mapping[str, int]

    @property
    def passes(self) -> float:
        """Samples over rows; 0 where there are none."""
        return self.samples / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class Coverage:
    """What a number of packs holds, kind by kind, and how many tokens a pack has on average."""

    kinds: Mapping[Kind, KindCoverage]
    packs: int

    @classmethod
    def of(
        cls,
        packs: Iterator[Pack] | Sequence[Pack],
        usable: Mapping[Kind, int],
        skipped: Mapping[Kind, Mapping[str, int]],
    ) -> Coverage:
        samples: Counter[Kind] = Counter()
        tokens: Counter[Kind] = Counter()
        seen: dict[Kind, set[int]] = {kind: set() for kind in usable}
        count = 0
        for pack in packs:
            count += 1
            for drawn in pack:
                samples[drawn.kind] += 1
                tokens[drawn.kind] += drawn.tokens
                seen[drawn.kind].add(drawn.index)
        kinds = {
            kind: KindCoverage(
                rows, samples[kind], tokens[kind], len(seen[kind]), dict(skipped.get(kind, {}))
            )
            for kind, rows in usable.items()
        }
        return cls(kinds, count)

    @property
    def samples(self) -> int:
        return sum(kind.samples for kind in self.kinds.values())

    @property
    def tokens(self) -> int:
        return sum(kind.tokens for kind in self.kinds.values())

    def lines(self) -> Iterator[str]:
        """For a terminal: a line for each kind, then one for the packs."""
        for kind, c in self.kinds.items():
            skips = ", ".join(f"{count} {reason}" for reason, count in c.skipped.items())
            yield (
                f"{kind}: {c.samples:,} samples ({c.samples / max(self.samples, 1):.1%}), "
                f"{c.tokens:,} tokens ({c.tokens / max(self.tokens, 1):.1%}), "
                f"{c.passes:.2f} passes over {c.rows:,} rows, {c.rows - c.seen:,} never seen"
                + (f"; left out: {skips}" if skips else "")
            )
        packs = max(self.packs, 1)
        yield (
            f"{self.packs:,} packs of {self.tokens / packs:,.0f} tokens and "
            f"{self.samples / packs:.2f} samples on average"
        )
