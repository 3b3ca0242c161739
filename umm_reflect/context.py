"""What a model has in view: an immutable list of text and image segments.

A `Context` says what is there, in order; `layout.py` says how it becomes tokens. Appending makes a
new context, so a prefix that two episodes share is one object and can be cached under its value::

    context = Context.of(TextSegment(tokens.encode("a red circle")), transforms.segment(image))
    longer = context + TextSegment(tokens.encode("make it blue"))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TextSegment:
    """One text, without its start and end tokens (`layout.py` frames it). Equal by its ids."""

    ids: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "ids", tuple(self.ids))


@dataclass(frozen=True, eq=False)
class ImageSegment:
    """One picture, as the blocks in which it enters: latents for drawing, patches for looking.

    vae_pixels: [3, H, W] fp32 in [-1, 1], H and W multiples of 16, or None (no latent block)
    vit_pixels: [3, h, w] fp32 in [-1, 1], h and w multiples of 14, or None (no ViT block)
    latent:     [C, H/8, W/8] the scaled latent of `vae_pixels` where it is known already, or None

    Equal only to itself: comparing pixels would cost more than the cache it is compared for.
    """

    vae_pixels: torch.Tensor | None = None
    vit_pixels: torch.Tensor | None = None
    latent: torch.Tensor | None = None

    def __post_init__(self):
        if not (self.has_vae or self.has_vit):
            raise ValueError("an image segment needs vae_pixels, latent or vit_pixels")

    @property
    def has_vae(self) -> bool:
        """Whether the picture enters as a block of latents."""
        return self.vae_pixels is not None or self.latent is not None

    @property
    def has_vit(self) -> bool:
        """Whether the picture enters as a block of ViT patches."""
        return self.vit_pixels is not None


Segment = TextSegment | ImageSegment


@dataclass(frozen=True)
class Context:
    """Segments in the order in which the model reads them. Hashable; `Context()` is empty."""

    segments: tuple[Segment, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "segments", tuple(self.segments))
        for segment in self.segments:
            if not isinstance(segment, Segment):
                raise TypeError(
                    f"a context holds TextSegment and ImageSegment, not {type(segment).__name__}"
                )

    @classmethod
    def of(cls, *segments: Segment) -> Context:
        return cls(segments)

    def __add__(self, other: Segment | Context | Iterable[Segment]) -> Context:
        """This context followed by one segment, by another context or by several segments."""
        more = (other,) if isinstance(other, Segment) else tuple(other)
        return Context(self.segments + more)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def __len__(self) -> int:
        return len(self.segments)

    def texts_only(self) -> Context:
        """All texts in order, no images: what image-unconditional guidance sees."""
        return Context(tuple(s for s in self.segments if isinstance(s, TextSegment)))

    def images_only(self) -> Context:
        """All images in order, no texts."""
        return Context(tuple(s for s in self.segments if isinstance(s, ImageSegment)))

    def prefix(self, length: int) -> Context:
        """The first `length` segments."""
        return Context(self.segments[:length])

    @property
    def has_images(self) -> bool:
        return any(isinstance(s, ImageSegment) for s in self.segments)
