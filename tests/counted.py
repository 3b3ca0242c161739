"""What the tests of reading, saying and drawing share: contexts of every form, and a count of what
is run.

with counted(bagel) as counts:
    say(bagel, ...)
assert counts.forwards == 6
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

from umm_reflect import Bagel
from umm_reflect.context import Context, ImageSegment


@cache
def picture(seed: int, height: int = 32, width: int = 48) -> ImageSegment:
    """One seed, one object: engines know pictures by identity."""
    generator = torch.Generator().manual_seed(seed)
    return ImageSegment(
        vae_pixels=torch.rand(3, height, width, generator=generator) * 2 - 1,
        vit_pixels=torch.rand(3, 28, 42, generator=generator) * 2 - 1,
    )


@dataclass
class Counts:
    """Forwards of the language model, their tokens of each expert, and pictures looked at."""

    forwards: int = 0
    und: list[int] = field(default_factory=list)
    gen: list[int] = field(default_factory=list)
    vit: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.und) + sum(self.gen)


@contextmanager
def counted(bagel: Bagel) -> Iterator[Counts]:
    counts = Counts()

    def note(module, given):
        counts.forwards += 1
        counts.und.append(given[0].shape[0])
        counts.gen.append(given[1].shape[0])

    def look(module, given):
        counts.vit += len(given[2])

    hooks = [
        bagel.register_forward_pre_hook(note),
        bagel.vit_model.register_forward_pre_hook(look),
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def ragged(bagel: Bagel) -> list[Context]:
    """Texts and pictures of several lengths."""
    text = bagel.tokens.segment
    return [
        Context.of(text("two red circles and a blue square")),
        Context.of(text("a star"), picture(0), text("make it blue")),
        Context.of(picture(1), text("a")),
        Context.of(text("Look."), text("three purple hearts left of it")),
    ]
