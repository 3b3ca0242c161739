"""Pixels of the shapes world -> blobs: background, palette colours, connected pieces.

`segment(pixels)` estimates the background, finds what stands out from it, and cuts it into pieces
of one palette colour each. A blob carries the *coverage* of its pixels (0..1, soft at edges), so
that kinds are told by sub-pixel outlines (shapes_templates.py).

Colour needs care, because an edge pixel is a mixture: red over grey reads as pink, white beside
black as grey, red beside yellow as orange. So a colour exists in a piece only where pixels that
are purely it have an inside (a 2 x 2 block), and a thin seam of a third colour between two others
is theirs, not an object.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from umm_reflect.shapes.scene import COLORS, PALETTE

PALETTE_RGB = np.array([PALETTE[c] for c in COLORS], np.float32)

CONTRAST = 36.0  # RGB distance from the background above which a pixel belongs to something
CLEAR_CONTRAST = 50.0  # what the inside of a blob must reach; fainter blobs are ghosts
PURE = 45.0  # RGB distance to a palette colour within which a pixel is purely of it
FOREIGN = 62.0  # distance of a blob's inside to the nearest palette colour: above it has none
SPECK = 10  # pixels; anything smaller is no object
_EIGHT = np.ones((3, 3), bool)


@dataclass(frozen=True)
class Blob:
    """A connected piece of one colour.

    color: index into COLORS, or None if its inside is near none of them. coverage: [h, w] fp32 in
    [0, 1], with a rim of empty pixels. corner: (x, y) in pixels of coverage[0, 0].
    """

    color: int | None
    coverage: np.ndarray
    corner: tuple[int, int]
    color_distance: float

    def box(self) -> tuple[float, float, float, float]:
        """(x0, y0, x1, y1) in pixels of the image, to a fraction of a pixel at soft edges."""
        x0, x1 = _extent(self.coverage.max(0))
        y0, y1 = _extent(self.coverage.max(1))
        return self.corner[0] + x0, self.corner[1] + y0, self.corner[0] + x1, self.corner[1] + y1


def _extent(profile: np.ndarray) -> tuple[float, float]:
    """Where a profile of peak coverages begins and ends; a pixel half covered ends halfway."""
    filled = np.flatnonzero(profile > 0.25)
    if not len(filled):
        return 0.0, 0.0
    first, last = int(filled[0]), int(filled[-1])
    return first + 1 - float(profile[first]), last + float(profile[last])


def segment(pixels: np.ndarray) -> list[Blob]:
    """Blobs of an image, pixels: [H, W, 3] uint8 or float, 0..255."""
    pixels = np.asarray(pixels, np.float32)
    back = background_colour(pixels)
    offset = pixels - back
    contrast = np.sqrt(np.einsum("hwc,hwc->hw", offset, offset))
    pieces, _ = ndimage.label(contrast > CONTRAST, _EIGHT)
    blobs: list[Blob] = []
    for number, where in enumerate(ndimage.find_objects(pieces), start=1):
        window = _grow(where, 2, pieces.shape)
        mask = pieces[window] == number
        area = int(mask.sum())
        if area < SPECK:
            continue
        inside = np.partition(contrast[window][mask], -max(4, area // 8))[-max(4, area // 8)]
        if inside < CLEAR_CONTRAST:
            continue
        others = (pieces[window] > 0) & ~mask
        blobs += _split_by_colour(pixels[window], offset[window], mask, others, back, window)
    return blobs


def background_colour(pixels: np.ndarray) -> np.ndarray:
    """The colour around which most pixels lie that are not of a palette colour, [3] fp32.

    A coarse histogram finds the place and three steps of mean shift the centre, so that a texture
    of a few grey levels has its mean taken.
    """
    flat = pixels[::3, ::3].reshape(-1, 3)
    plain = flat[_palette_distances(flat).min(0) > PURE]
    if len(plain) < len(flat) // 20:
        plain = flat
    bins = (plain / 24).astype(np.int64)
    code = bins @ np.array([121, 11, 1])
    centre = plain[code == np.bincount(code).argmax()].mean(0)
    for _ in range(3):
        near = np.abs(plain - centre).max(1) < 26
        centre = plain[near].mean(0)
    return centre.astype(np.float32)


def _palette_distances(colours: np.ndarray) -> np.ndarray:
    """RGB distance of colours [..., 3] to each palette colour, [10, ...]."""
    squares = np.tensordot(-2 * PALETTE_RGB, colours, (1, -1)) + np.einsum(
        "...c,...c->...", colours, colours
    )
    squares += np.einsum("kc,kc->k", PALETTE_RGB, PALETTE_RGB).reshape(
        -1, *[1] * (colours.ndim - 1)
    )
    return np.sqrt(np.maximum(squares, 0))


def _grow(where: tuple[slice, slice], rim: int, shape: tuple[int, int]) -> tuple[slice, slice]:
    return tuple(
        slice(max(s.start - rim, 0), min(s.stop + rim, n))
        for s, n in zip(where, shape, strict=True)
    )


def _split_by_colour(
    pixels: np.ndarray,
    offset: np.ndarray,
    mask: np.ndarray,
    others: np.ndarray,
    back: np.ndarray,
    window: tuple[slice, slice],
) -> list[Blob]:
    """Blobs of one connected piece of foreground; arrays are the piece's window."""
    corner = (window[1].start, window[0].start)
    distances = _palette_distances(pixels)
    nearest = distances.argmin(0)
    pure = mask & (distances.min(0) < PURE)
    colours = _colours_present(nearest, pure, back)
    if len(colours) < 2:
        inside = np.median(pixels[_core(mask)], axis=0)
        color, distance = _inside_colour(inside, colours)
        target = inside if color is None else PALETTE_RGB[color]
        coverage = _coverage(offset, target - back)
        near = _dilate(mask) & ~_dilate(others) if others.any() else _dilate(mask)
        return [Blob(color, _framed(coverage * near), _shift(corner), distance)]

    owner = _owners(colours, nearest, pure, mask)
    blobs = []
    for color in colours:
        parts, count = ndimage.label(owner == color, _EIGHT)
        for number in range(1, count + 1):
            part = parts == number
            if part.sum() < SPECK or not (part & pure).any():
                continue
            coverage = _coverage_beside(offset, part, owner, color, back)
            distance = float(np.median(distances[color][part & pure & (nearest == color)]))
            blobs.append(Blob(color, _framed(coverage), _shift(corner), distance))
    return blobs


def _shift(corner: tuple[int, int]) -> tuple[int, int]:
    return corner[0] - 1, corner[1] - 1


def _framed(coverage: np.ndarray) -> np.ndarray:
    return np.pad(coverage, 1).astype(np.float32)


def _erode(mask: np.ndarray) -> np.ndarray:
    """The pixels whose four neighbours are in the mask too (outside the array counts as not)."""
    inner = np.zeros_like(mask)
    inner[1:-1, 1:-1] = (
        mask[1:-1, 1:-1] & mask[:-2, 1:-1] & mask[2:, 1:-1] & mask[1:-1, :-2] & mask[1:-1, 2:]
    )
    return inner


def _dilate(mask: np.ndarray) -> np.ndarray:
    """The mask and the eight neighbours of all its pixels."""
    rows = mask.copy()
    rows[1:] |= mask[:-1]
    rows[:-1] |= mask[1:]
    wide = rows.copy()
    wide[:, 1:] |= rows[:, :-1]
    wide[:, :-1] |= rows[:, 1:]
    return wide


def _core(mask: np.ndarray) -> np.ndarray:
    """The mask eroded as far as two steps leave anything of it."""
    once = _erode(mask)
    twice = _erode(once)
    return next((inner for inner in (twice, once) if inner.sum() >= 4), mask)


def _inside_colour(inside: np.ndarray, colours: list[int]) -> tuple[int | None, float]:
    """The one colour of a piece whose inside is [3], and the distance of the inside to it."""
    distances = _palette_distances(inside)
    color = colours[0] if colours else int(distances.argmin())
    if distances[color] > FOREIGN and not colours:
        return None, float(distances[color])
    return color, float(distances[color])


def _colours_present(nearest: np.ndarray, pure: np.ndarray, back: np.ndarray) -> list[int]:
    """Colours that have an inside in this piece, largest first, seams between others left out."""
    present: list[tuple[int, int]] = []
    sizes = np.bincount(nearest[pure], minlength=len(COLORS))
    for color in np.flatnonzero(sizes >= 4):
        own = pure & (nearest == color)
        blocks = own[:-1, :-1] & own[1:, :-1] & own[:-1, 1:] & own[1:, 1:]
        if blocks.any():
            present.append((int(blocks.sum()), int(color)))
    present.sort(reverse=True)
    kept: list[int] = []
    for _, color in present:
        own = pure & (nearest == color)
        if not kept or not _is_seam(own, color, kept, nearest, pure, back):
            kept.append(color)
    return kept


def _is_seam(
    own: np.ndarray,
    color: int,
    kept: list[int],
    nearest: np.ndarray,
    pure: np.ndarray,
    back: np.ndarray,
) -> bool:
    """Whether the pixels of a colour are only mixtures along edges of colours already kept.

    They are if the colour lies near the line between two of {kept colours, background} and no
    block of it is thicker than a blurred edge.
    """
    ends = [PALETTE_RGB[k] for k in kept] + [back]
    mixes = any(
        _distance_to_line(PALETTE_RGB[color], a, b) < 70
        for i, a in enumerate(ends)
        for b in ends[i + 1 :]
    )
    if not mixes:
        return False
    beside = np.zeros_like(own)
    for k in kept:
        beside |= pure & (nearest == k)
    close = _dilate(_dilate(beside))
    alone = own & ~close
    if alone.sum() >= 3:
        return False
    thick = ndimage.binary_opening(own, _EIGHT)
    return not thick.any()


def _distance_to_line(p: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    along = b - a
    share = float(np.clip((p - a) @ along / max(1e-6, along @ along), 0, 1))
    return float(np.linalg.norm(a + share * along - p))


def _owners(
    colours: list[int], nearest: np.ndarray, pure: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """For each pixel of the mask the colour of the nearest pure pixel, -1 outside, int."""
    seeds = np.full(mask.shape, -1)
    for color in colours:
        seeds[pure & (nearest == color)] = color
    index = ndimage.distance_transform_edt(seeds < 0, return_distances=False, return_indices=True)
    return np.where(mask, seeds[tuple(index)], -1)


def _coverage(offset: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """Share of each pixel that a colour `direction` away from the background covers, [h, w]."""
    return np.clip(offset @ direction / max(1.0, float(direction @ direction)), 0, 1)


def _coverage_beside(
    offset: np.ndarray, part: np.ndarray, owner: np.ndarray, color: int, back: np.ndarray
) -> np.ndarray:
    """Coverage by one colour where others touch it: least squares over it and its neighbours."""
    near = _dilate(part)
    direction = PALETTE_RGB[color] - back
    coverage = _coverage(offset, direction) * near
    foreign = (owner >= 0) & (owner != color)
    for other in np.unique(owner[near & foreign]):
        along = PALETTE_RGB[other] - back
        basis = np.stack([direction, along], 1)
        gram = basis.T @ basis
        beside = near & _dilate(owner == other)
        if np.linalg.det(gram) < 0.02 * gram[0, 0] * gram[1, 1]:
            coverage[beside & foreign] = 0  # on one line with the background: cannot be told
            continue
        shares = offset[beside] @ basis @ np.linalg.inv(gram)
        coverage[beside] = np.clip(shares[:, 0], 0, 1)
    return coverage
