"""Pictures that a working judge tells apart, drawn here, and what is said when it does not.

    require(reward, shape_pairs(), "pickscore", "the weights may be wrong")

Each pair is one row, an image that shows what it asks for and one that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw, ImageFont

from umm_reflect.errors import UserError
from umm_reflect.shapes.prompts import clause, plain_row, position_row
from umm_reflect.shapes.render import render
from umm_reflect.shapes.scene import Scene, Shape

if TYPE_CHECKING:
    from eval.rewards.registry import Reward
    from eval.verdict import Verdict

SIDE = 256


@dataclass(frozen=True)
class Pair:
    """One row, and an image that should score above another."""

    row: dict[str, Any]
    good: Image.Image
    bad: Image.Image


def require(reward: Reward, pairs: Sequence[Pair], name: str, cause: str) -> list[Verdict]:
    """Scores all pairs; UserError with the numbers and the likely cause unless all are in order.

    Returns the verdicts, good and bad in turn.
    """
    images = [image for pair in pairs for image in (pair.good, pair.bad)]
    rows = [pair.row for pair in pairs for _ in range(2)]
    verdicts = reward.score(images, rows)
    failed = [verdict.error for verdict in verdicts if verdict.error is not None]
    if failed:
        raise UserError(
            f"{name}: {len(failed)} of {len(verdicts)} self-test images were not judged "
            f"({failed[0]})",
            cause,
        )
    wrong = [
        (pair.row["prompt"], good, bad)
        for pair, good, bad in zip(pairs, verdicts[::2], verdicts[1::2], strict=True)
        if not good.reward > bad.reward
    ]
    if not wrong:
        return verdicts
    prompt, good, bad = wrong[0]
    everywhere = len({verdict.reward for verdict in verdicts}) == 1
    what = "every image scores the same" if everywhere else f"{len(wrong)} of {len(pairs)} pairs"
    raise UserError(
        f"{name} does not tell good from bad on its self-test: {what}; for '{prompt}' the right "
        f"image scores {good.reward:.4g} ({good.reason}) and the wrong one {bad.reward:.4g} "
        f"({bad.reason})",
        cause,
    )


# --- shapes ---------------------------------------------------------------------------------------


def shape_pairs() -> list[Pair]:
    """Four rows of the shapes world: a color, a kind, a count, a relation."""
    red, blue = _one("circle", "red"), _one("circle", "blue")
    star = _one("star", "yellow")
    three = [Shape("triangle", "green", x, 0.5, 0.22, 0.0) for x in (0.2, 0.5, 0.8)]
    left = [Shape("circle", "red", 0.25, 0.5, 0.3, 0.0), Shape("square", "blue", 0.75, 0.5, 0.3, 0)]
    right = [Shape("circle", "red", 0.75, 0.5, 0.3, 0), Shape("square", "blue", 0.25, 0.5, 0.3, 0)]
    placed = position_row(clause("square", 1, "blue"), clause("circle", 1, "red"), "left of")
    return [
        Pair(dict(plain_row("colors", [clause("circle", 1, "red")])), _draw(red), _draw(blue)),
        Pair(dict(plain_row("single_object", [clause("star")])), _draw(star), _draw(blue)),
        Pair(dict(plain_row("counting", [clause("triangle", 3)])), _draw(three), _draw(three[:1])),
        Pair(dict(placed), _draw(left), _draw(right)),
    ]


def described_pairs() -> list[Pair]:
    """The same pictures for judges that read the prompt as a sentence, with questions for `dv`."""
    pairs = []
    for pair in shape_pairs():
        prompt = f"a simple drawing of {pair.row['prompt']} on a plain background"
        questions = {
            "semantic_questions": [{"question": f"Does the image show {pair.row['prompt']}?"}],
            "quality_questions": [{"question": "Are the shapes drawn with clean edges?"}],
        }
        pairs.append(Pair({**pair.row, "prompt": prompt, **questions}, pair.good, pair.bad))
    return pairs


def _one(kind: str, color: str) -> list[Shape]:
    return [Shape(kind, color, 0.5, 0.5, 0.5, 0.0)]


def _draw(shapes: Sequence[Shape]) -> Image.Image:
    return render(Scene(tuple(shapes)), SIDE)


# --- text -----------------------------------------------------------------------------------------


def written(text: str, size: int = 40, side: int = SIDE) -> Image.Image:
    """Black letters in the middle of a white square."""
    image = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(image)
    draw.text((side / 2, side / 2), text, "black", ImageFont.load_default(size), anchor="mm")
    return image


def text_pairs() -> list[Pair]:
    """Three texts to be read, each beside another text or none."""
    return [
        Pair({"prompt": 'a sign that says "OPEN"'}, written("OPEN"), written("CLOSED")),
        Pair({"prompt": 'the number "1984" on a wall'}, written("1984"), written("27")),
        Pair({"prompt": 'a page with "good day"'}, written("good day"), written("")),
    ]
