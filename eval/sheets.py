"""Trajectories to look at: which ones, and a sheet that shows many of them.

    picks = pick(results)                    # failures and others, spread over the families
    draw_sheet([(trajectory, result), ...], "wrong in the end").save("failures.png")

A green frame is a right image, a red one a wrong one, by the verifier; under it its reason, then
what the model said of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from eval.results import Key, Result

if TYPE_CHECKING:
    from agent.types import Trajectory

SHEET_SIZE = 24  # trajectories on a sheet

COLUMNS, TILE, GAP, MARGIN = 2, 152, 12, 20  # pixels but for the first
LINE, TEXT_LINES = 15, 5
PAPER, INK, GREY, GREEN, RED = "#ffffff", "#1d232b", "#68727f", "#1f9d55", "#cf3d3d"


@dataclass(frozen=True)
class Picks:
    """Which trajectories are kept to be looked at: on failures.png and on gallery.png."""

    failures: tuple[Key, ...]
    gallery: tuple[Key, ...]


def pick(results: Iterable[Result], families: int) -> Picks:
    """The first few of each family: wrong in the end; repaired, and right at once.

    families: how many there will be. What is picked stays picked as more results come.
    """
    each = max(1, SHEET_SIZE // families)
    limits = {"wrong": each, "repaired": -(-each // 2), "right": max(1, each // 2)}
    taken: Counter[tuple[str, str]] = Counter()
    failures, gallery = [], []
    for result in results:
        kind = "wrong" if not result.correct else "right" if result.correct_at(0) else "repaired"
        if taken[result.family, kind] < limits[kind]:
            taken[result.family, kind] += 1
            (failures if kind == "wrong" else gallery).append(result.key)
    return Picks(tuple(failures[:SHEET_SIZE]), tuple(gallery[:SHEET_SIZE]))


def draw_sheet(items: Sequence[tuple[Trajectory, Result]], title: str) -> Image.Image:
    """The trajectories in two columns, each a strip of its images. RGB."""
    tiles = max((len(result.images) for _, result in items), default=1)
    width, height = tiles * (TILE + GAP), 30 + TILE + (TEXT_LINES + 1) * LINE + GAP
    rows = -(-len(items) // COLUMNS)
    columns = min(COLUMNS, max(1, len(items)))
    sheet = Image.new("RGB", (2 * MARGIN + columns * width, 60 + max(1, rows) * height), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, 16), f"{title}: {len(items)}", INK, _font(18))
    for place, (trajectory, result) in enumerate(items):
        x = MARGIN + place % COLUMNS * width
        y = 56 + place // COLUMNS * height
        _strip(sheet, draw, trajectory, result, x, y, width - GAP)
    return sheet


def _strip(sheet, draw, trajectory: Trajectory, result: Result, x: int, y: int, width: int) -> None:
    stop = result.stop.replace("_", " ")
    name = f"{result.prompt}   [{result.set} {result.row}, seed {result.seed}: {stop}]"
    draw.text((x, y), _fit(name, _font(13), width), INK, _font(13))
    for number, (image, judged) in enumerate(zip(trajectory.images, result.images, strict=True)):
        left, top = x + number * (TILE + GAP), y + 22
        color = GREEN if judged.correct else RED
        scaled = image.convert("RGB").resize((TILE - 6, TILE - 6), Image.Resampling.LANCZOS)
        sheet.paste(scaled, (left + 3, top + 3))
        draw.rectangle((left, top, left + TILE - 1, top + TILE - 1), outline=color, width=3)
        lines = [(_fit(judged.reason, _font(12), TILE), color)]
        said = _what_was_said(result, number)
        lines += [(line, GREY) for line in _wrap(said, _font(12), TILE, TEXT_LINES)]
        for i, (line, ink) in enumerate(lines):
            draw.text((left, top + TILE + 3 + i * LINE), line, ink, _font(12))


def _what_was_said(result: Result, number: int) -> str:
    if number >= len(result.looks):
        return "not looked at"
    look = result.looks[number]
    if look.error:
        return f"malformed: {look.error}"
    return f"{look.score:g}/10 {look.action}" + (f": {look.edit}" if look.edit else "")


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: float, most: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) > width and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    cut = lines[:most] if len(lines) <= most else [*lines[: most - 1], lines[most - 1] + " ..."]
    return [_fit(line, font, width) for line in cut]


def _fit(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text.rstrip()}..."


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)
