"""story.png: the rounds of a trajectory side by side, made to be looked at.

    draw_story(trajectory, footer="bagel-nano-shapes, seed 0").save("story.png")

Each panel is an image with what the model said about it: score, action, edit, and the gist of its
thinking. The image that is handed out has a green frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from agent.types import StopReason, Trajectory, Turn

PANEL, GAP, MARGIN = 400, 56, 48  # pixels
COLUMNS = 4
TEXT_LINES = {"edit": 5, "thinking": 6}

PAPER, INK, GREY, FAINT = "#ffffff", "#1d232b", "#68727f", "#d9dee4"
GREEN, BLUE, RED = "#1f9d55", "#2f6fde", "#cf3d3d"
SCORE_COLORS = {0: (207, 61, 61), 4: (222, 118, 46), 7: (219, 165, 32), 10: (31, 157, 85)}
STOP_TEXTS = {
    StopReason.DONE: "done: the model says the image is right",
    StopReason.MAX_ROUNDS: "stopped: no rounds are left",
    StopReason.MALFORMED: "stopped: the model broke the form of a turn",
    StopReason.TOO_LONG: "stopped: a turn ran into its token budget",
    StopReason.REPEATED_TEXT: "stopped: the model repeated itself",
    StopReason.REPEATED_EDIT: "stopped: the same edit again",
    StopReason.NO_VISIBLE_CHANGE: "stopped: the edit changed nothing",
}


def draw_story(trajectory: Trajectory, footer: str = "") -> Image.Image:
    """A picture of the whole trajectory, RGB, up to four panels wide and as high as it needs."""
    alone = len(trajectory.images) == 1
    panels = [_panel(trajectory, number, alone) for number in range(len(trajectory.images))]
    rows = [panels[i : i + COLUMNS] for i in range(0, len(panels), COLUMNS)]
    columns = 2 if alone else len(rows[0])
    width = 2 * MARGIN + columns * PANEL + (columns - 1) * GAP
    header = _header(trajectory, width - 2 * MARGIN)
    heights = [max(panel.height for panel in row) for row in rows]
    height = MARGIN + header.height + sum(h + 32 for h in heights) + 24 + MARGIN
    story = Image.new("RGB", (width, height), PAPER)
    story.paste(header, (MARGIN, MARGIN))
    draw, y = ImageDraw.Draw(story), MARGIN + header.height + 8
    for row, row_height in zip(rows, heights, strict=True):
        for column, panel in enumerate(row):
            x = MARGIN + column * (PANEL + GAP)
            story.paste(panel, (x, y))
            if panel is not row[-1]:
                _arrow(draw, x + PANEL + GAP // 2, y + 40 + PANEL // 2)
        y += row_height + 32
    draw.line((MARGIN, y, width - MARGIN, y), FAINT, 1)
    stop = STOP_TEXTS[trajectory.stop]
    color = GREEN if trajectory.stop is StopReason.DONE else GREY
    draw.text((MARGIN, y + 14), stop, color, _font(17, bold=True))
    room = width - 2 * MARGIN - _font(17, bold=True).getlength(stop) - 40
    draw.text((width - MARGIN, y + 15), _fit(footer, _font(15), room), GREY, _font(15), anchor="ra")
    return story


def _header(trajectory: Trajectory, width: int) -> Image.Image:
    lines = [(line, 28, True, INK) for line in _wrap(trajectory.prompt, _font(28, True), width, 3)]
    if trajectory.plan and trajectory.plan.reflection:
        plan = f"Plan: {trajectory.plan.reflection.edit or trajectory.plan.reflection.thinking}"
        lines += [(line, 17, False, GREY) for line in _wrap(plan, _font(17), width, 2)]
    return _text_block(lines, width, after=24)


def _panel(trajectory: Trajectory, number: int, alone: bool) -> Image.Image:
    """Image `number`, its caption above, what was said about it below (beside, if alone)."""
    turn = trajectory.steps[number].turn if number < len(trajectory.steps) else None
    drawn = number + 1 < len(trajectory.images)
    said = _text_block(list(_what_was_said(turn, drawn)), PANEL)
    size = (2 * PANEL + GAP, 40 + PANEL) if alone else (PANEL, 40 + PANEL + 16 + said.height)
    panel = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(panel)

    given = number == 0 and trajectory.source is not None
    caption = "Your image" if given else "First image" if number == 0 else f"Edit {number}"
    draw.text((0, 4), caption, INK, _font(19, bold=True))
    kept = number == trajectory.kept
    if kept and len(trajectory.images) > 1:
        place = _font(19, bold=True).getlength(caption) + 12
        draw.text((place, 7), "handed out", GREEN, _font(15))
    score = trajectory.scores[number]
    if score is not None:
        _badge(panel, f"{score:g}/10", _score_color(score))

    image = _fitted(trajectory.images[number])
    left, top = (PANEL - image.width) // 2, 40 + (PANEL - image.height) // 2
    panel.paste(image, (left, top))
    box = (left, top, left + image.width - 1, top + image.height - 1)
    draw.rectangle(box, outline=GREEN if kept else FAINT, width=4 if kept else 1)
    panel.paste(said, (PANEL + GAP, 40) if alone else (0, 40 + PANEL + 16))
    return panel


def _what_was_said(turn: Turn | None, drawn: bool) -> Iterator[tuple[str, int, bool, str]]:
    """(text, font size, bold, colour) of each line under an image."""
    if turn is None:
        yield "not looked at", 16, False, GREY
        return
    if turn.reflection is None:
        yield f"not a legal turn: {turn.error}".replace("_", " "), 17, True, RED
        raw = " ".join(turn.text.partition("[SCORE] ")[2].split())
        for line in _wrap(raw, _font(15), PANEL, 4):
            yield line, 15, False, GREY
        return
    said = turn.reflection
    if said.action == "done":
        yield "done", 18, True, GREEN
    else:
        edit = f"edit{'' if drawn else ' (not drawn)'}: {said.edit}"
        for line in _wrap(edit, _font(18, True), PANEL, TEXT_LINES["edit"]):
            yield line, 18, True, BLUE
    yield "", 6, False, INK
    for line in _wrap(said.thinking, _font(16), PANEL, TEXT_LINES["thinking"]):
        yield line, 16, False, GREY


# --- pieces ---------------------------------------------------------------------------------------


def _text_block(lines: list[tuple[str, int, bool, str]], width: int, after: int = 0) -> Image.Image:
    height = sum(round(size * 1.38) for _, size, _, _ in lines) + after
    block, y = Image.new("RGB", (width, max(height, 1)), PAPER), 0
    draw = ImageDraw.Draw(block)
    for text, size, bold, color in lines:
        draw.text((0, y), text, color, _font(size, bold))
        y += round(size * 1.38)
    return block


def _badge(panel: Image.Image, text: str, color: tuple[int, int, int]) -> None:
    """A rounded badge in the upper right corner, drawn large and reduced, for smooth corners."""
    width, height = round(_font(17, True).getlength(text)) + 26, 30
    large = Image.new("L", (width * 4, height * 4), 0)
    ImageDraw.Draw(large).rounded_rectangle((0, 0, width * 4 - 1, height * 4 - 1), 60, fill=255)
    panel.paste(color, (PANEL - width, 1), large.resize((width, height), Image.Resampling.BOX))
    middle = (PANEL - width / 2, 16)
    ImageDraw.Draw(panel).text(middle, text, "#ffffff", _font(17, True), anchor="mm")


def _arrow(draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
    draw.line((x - 14, y, x + 10, y), GREY, 3)
    draw.polygon(((x + 6, y - 8), (x + 6, y + 8), (x + 18, y)), GREY)


def _fitted(image: Image.Image) -> Image.Image:
    """The image at the size of a panel, its proportions kept."""
    scale = PANEL / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def _score_color(score: float) -> tuple[int, int, int]:
    above = next(s for s in SCORE_COLORS if s >= score and s > 0)
    below = max(s for s in SCORE_COLORS if s < above)
    part = (score - below) / (above - below)
    ends = zip(SCORE_COLORS[below], SCORE_COLORS[above], strict=True)
    return tuple(round(a + (b - a) * part) for a, b in ends)


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: float, most: int) -> list[str]:
    """The text in at most `most` lines that fit `width` pixels; cut short with an ellipsis."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1]} …"]
    return [_fit(line, font, width) for line in lines]


def _fit(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    if font.getlength(text) <= width:
        return text
    text = text.removesuffix(" …")
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


@cache
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans from matplotlib's folder (not imported: that takes longer than drawing)."""
    package = find_spec("matplotlib").submodule_search_locations[0]
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(package) / "mpl-data" / "fonts" / "ttf" / name, size)
