"""Judged images to look at: boxes with names, colors and confidences, the verdict and its reason.

sheet = annotated([(image, prompt, verdict), ...])
sheet.save("annotated.png")

A green frame is a right image, a red one a wrong one, a grey one has no yes or no. Boxes come from
the evidence: `detections` (kind, color, box, score) of a detector, `words` (text, box) of a reader.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from eval.verdict import Verdict

TILE, GAP, MARGIN, LINE, COLUMNS = 384, 24, 20, 18, 4  # pixels but for the last
LETTERS = 58  # of one line under a tile
PAPER, INK, GREY, GREEN, RED = "#ffffff", "#1d232b", "#68727f", "#1f9d55", "#cf3d3d"
FAINT = 0.3  # a detection below it is drawn thin: it does not count
BOX_INKS = {"white": "#b9c2cc", "black": "#1d232b", "yellow": "#c9a800", None: "#2f6fde"}


def annotated(items: Sequence[tuple[Image.Image, str, Verdict]]) -> Image.Image:
    """A sheet of all of them, RGB; four in a row."""
    tiles = [_tile(*item) for item in items]
    columns = min(COLUMNS, max(1, len(tiles)))
    rows = [tiles[i : i + columns] for i in range(0, len(tiles), columns)]
    heights = [max(tile.height for tile in row) for row in rows]
    width = 2 * MARGIN + columns * TILE + (columns - 1) * GAP
    sheet = Image.new("RGB", (width, 2 * MARGIN + sum(heights) + GAP * (len(rows) - 1)), PAPER)
    y = MARGIN
    for row, height in zip(rows, heights, strict=True):
        for place, tile in enumerate(row):
            sheet.paste(tile, (MARGIN + place * (TILE + GAP), y))
        y += height + GAP
    return sheet


def _tile(image: Image.Image, prompt: str, verdict: Verdict) -> Image.Image:
    color = GREY if verdict.correct is None else GREEN if verdict.correct else RED
    lines = [(line, INK) for line in textwrap.wrap(prompt, LETTERS)[:3]]
    lines += [(line, color) for line in textwrap.wrap(headline(verdict), LETTERS)[:2]]
    lines += [(line, GREY) for line in textwrap.wrap(verdict.reason, LETTERS)[:4]]
    scale = TILE / max(image.size)
    size = tuple(max(1, round(side * scale)) for side in image.size)
    tile = Image.new("RGB", (TILE, size[1] + 8 + LINE * len(lines)), PAPER)
    tile.paste(image.convert("RGB").resize(size, Image.Resampling.LANCZOS))
    draw = ImageDraw.Draw(tile)
    for mark in _marks(verdict):
        _box(draw, mark, scale)
    draw.rectangle((0, 0, size[0] - 1, size[1] - 1), outline=color, width=4)
    for number, (line, ink) in enumerate(lines):
        draw.text((2, size[1] + 6 + number * LINE), line, ink, _font(14))
    return tile


def headline(verdict: Verdict) -> str:
    """'right, score 1.000' and the like."""
    if verdict.error is not None:
        return "not judged"
    words = {True: "right, ", False: "wrong, ", None: ""}[verdict.correct]
    own = "" if verdict.value is None else f", value {verdict.value:.4g}"
    return f"{words}score {verdict.score:.3f}{own}"


def _marks(verdict: Verdict) -> list[dict]:
    """The boxes of a verdict, and of the terms of a sum."""
    evidence = verdict.evidence
    own = [m for key in ("detections", "words") for m in evidence.get(key) or ()]
    for term in (evidence.get("terms") or {}).values():
        own += [m for key in ("detections", "words") for m in term["evidence"].get(key) or ()]
    return [mark for mark in own if mark.get("box")]


def _box(draw: ImageDraw.ImageDraw, mark: dict, scale: float) -> None:
    corners = [float(v) * scale for v in mark["box"][:4]]
    if corners[2] <= corners[0] or corners[3] <= corners[1]:
        return
    score = mark.get("score")
    faint = score is not None and "text" not in mark and score <= FAINT
    name = mark.get("text") or " ".join(filter(None, (mark.get("color"), mark.get("kind"))))
    ink = BOX_INKS.get(mark.get("color"), mark.get("color") or BOX_INKS[None])
    draw.rectangle(corners, outline=ink, width=1 if faint else 3)
    if faint:
        return
    label = name if score is None else f"{name} {score:.2f}"
    x, y = corners[0], max(0.0, corners[1] - 15)
    draw.rectangle(draw.textbbox((x + 2, y), label, _font(12)), fill=PAPER)
    draw.text((x + 2, y), label, INK, _font(12))


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)
