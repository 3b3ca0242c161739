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
    pure = pure_colours(pixels)
    back = background_colour(pixels, pure)
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
        own = np.where(mask, pure[window], -1)
        blobs += _split_by_colour(pixels[window], offset[window], mask, own, others, back, window)
    return blobs


def pure_colours(pixels: np.ndarray) -> np.ndarray:
    """Which palette colour each pixel is purely of, -1 where of none: [H, W] int8.

    No pixel is purely of two, as colours are more than 2 PURE apart.
    """
    planes = pixels.reshape(-1, 3).T.copy()  # channel by channel, for speed
    # |pixel - colour|² < PURE², with |pixel|² on its own side: all of it is exact in whole numbers
    dots = (2 * PALETTE_RGB) @ planes
    dots -= (np.square(PALETTE_RGB).sum(1) - PURE**2)[:, None]
    near = dots > np.square(planes).sum(0)
    pure = np.full(planes.shape[1], -1, np.int8)
    for color in np.flatnonzero(near.any(1)):
        pure[near[color]] = color
    return pure.reshape(pixels.shape[:2])


def background_colour(pixels: np.ndarray, pure: np.ndarray) -> np.ndarray:
    """The colour around which most pixels lie that are not of a palette colour, [3] fp32.

    A coarse histogram finds the place and three steps of mean shift the centre, so that a texture
    of a few grey levels has its mean taken.
    """
    planes = pixels[::3, ::3].reshape(-1, 3).T.copy()
    plain = planes[:, pure[::3, ::3].ravel() < 0]
    if plain.shape[1] < planes.shape[1] // 20:
        plain = planes
    code = np.array([121, 11, 1]) @ (plain / 24).astype(np.int64)
    centre = plain[:, code == np.bincount(code).argmax()].mean(1)
    for _ in range(3):
        near = (np.abs(plain - centre[:, None]) < 26).all(0)
        centre = plain[:, near].mean(1)
    return centre


def _grow(where: tuple[slice, slice], rim: int, shape: tuple[int, int]) -> tuple[slice, slice]:
    return tuple(
        slice(max(s.start - rim, 0), min(s.stop + rim, n))
        for s, n in zip(where, shape, strict=True)
    )


def _split_by_colour(
    pixels: np.ndarray,
    offset: np.ndarray,
    mask: np.ndarray,
    own: np.ndarray,
    others: np.ndarray,
    back: np.ndarray,
    window: tuple[slice, slice],
) -> list[Blob]:
    """Blobs of one connected piece of foreground; arrays are the piece's window.

    own: the colours that the piece's pixels are purely of, -1 elsewhere; others: other pieces.
    """
    corner = (window[1].start, window[0].start)
    colours = _colours_present(own, back)
    if len(colours) < 2:
        inside = np.median(pixels[_core(mask)].T.copy(), axis=1)
        color = colours[0] if colours else _nearest_colour(inside)
        target = inside if color is None else PALETTE_RGB[color]
        coverage = _coverage(offset, target - back)
        near = _dilate(mask) & ~_dilate(others) if others.any() else _dilate(mask)
        return [Blob(color, _framed(coverage * near), _shift(corner))]

    owner = _owners(colours, own, mask)
    blobs = []
    for color in colours:
        parts, count = ndimage.label(owner == color, _EIGHT)
        for number in range(1, count + 1):
            part = parts == number
            if part.sum() < SPECK or not (own[part] >= 0).any():
                continue
            coverage = _coverage_beside(offset, part, owner, color, back)
            blobs.append(Blob(color, _framed(coverage), _shift(corner)))
    return blobs


def _shift(corner: tuple[int, int]) -> tuple[int, int]:
    return corner[0] - 1, corner[1] - 1


def _framed(coverage: np.ndarray) -> np.ndarray:
    height, width = coverage.shape
    framed = np.zeros((height + 2, width + 2), np.float32)
    framed[1:-1, 1:-1] = coverage
    return framed


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


def _nearest_colour(inside: np.ndarray) -> int | None:
    """The palette colour nearest to the inside [3] of a piece, None if it is near none."""
    distances = np.linalg.norm(PALETTE_RGB - inside, axis=1)
    color = int(distances.argmin())
    return color if distances[color] <= FOREIGN else None


def _colours_present(own: np.ndarray, back: np.ndarray) -> list[int]:
    """Colours that have an inside in this piece, largest first, seams between others left out."""
    present: list[tuple[int, int]] = []
    sizes = np.bincount(own[own >= 0], minlength=len(COLORS))
    for color in np.flatnonzero(sizes >= 4):
        pixels = own == color
        blocks = pixels[:-1, :-1] & pixels[1:, :-1] & pixels[:-1, 1:] & pixels[1:, 1:]
        if blocks.any():
            present.append((int(blocks.sum()), int(color)))
    present.sort(reverse=True)
    kept: list[int] = []
    for _, color in present:
        if not kept or not _is_seam(color, kept, own, back):
            kept.append(color)
    return kept


def _is_seam(color: int, kept: list[int], own: np.ndarray, back: np.ndarray) -> bool:
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
    pixels = own == color
    close = _dilate(_dilate(np.isin(own, kept)))
    alone = pixels & ~close
    if alone.sum() >= 3:
        return False
    thick = ndimage.binary_opening(pixels, _EIGHT)
    return not thick.any()


def _distance_to_line(p: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    along = b - a
    share = float(np.clip((p - a) @ along / max(1e-6, along @ along), 0, 1))
    return float(np.linalg.norm(a + share * along - p))


def _owners(colours: list[int], own: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """For each pixel of the mask the colour of the nearest pure pixel, -1 outside, int."""
    seeds = np.where(np.isin(own, colours), own, -1)
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
