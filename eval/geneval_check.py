"""Whether the GenEval verifier works here and now, on pictures whose answers are known.

    for line in check(verifier): print(line)      # UserError, with the cause, if it does not

The detector looks at a photograph of a person (matplotlib ships one) and at an empty picture; CLIP
and BLIP look at balls of ten colours that are drawn here. Wrong weights pass every other test: they
load, they answer, and every image of a training run scores 0.
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw

from eval.drawn import DRAWN, DrawnDetector
from eval.geneval import GenEvalVerifier
from eval.geneval_prompts import Row, single_object
from eval.geneval_rules import THRESHOLD
from umm_reflect.errors import UserError
from umm_reflect.shapes.render import render
from umm_reflect.shapes.scene import COLORS, PALETTE, Scene, Shape
from umm_reflect.verifier_files import MASK2FORMER

ENOUGH = 7  # of ten colours: brown and orange, or white and grey, may be taken for each other
SIDE = 512


def check(verifier: GenEvalVerifier, *, other_weights: bool = False) -> list[str]:
    """What was found, a line for each part. other_weights: the detector need not be mmdet's.

    Errors: UserError with the cause, CheckpointError of the models themselves.
    """
    lines = [_check_detector(verifier, other_weights), _check_colors(verifier)]
    if verifier.asks:
        lines.append(_check_answers(verifier))
    return lines


def photograph() -> Image.Image:
    """A person in uniform. Errors: UserError if matplotlib came without its sample data."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    if not path.exists():
        raise UserError(
            f"the photograph for the self-test is missing ({path})",
            "Install matplotlib from PyPI, which ships it.",
        )
    return Image.open(path).convert("RGB")


def ball(color: str, side: int = SIDE) -> Image.Image:
    """A disc of one colour on grey."""
    image = Image.new("RGB", (side, side), (170, 170, 170))
    ImageDraw.Draw(image).ellipse((side / 8, side / 8, side * 7 / 8, side * 7 / 8), PALETTE[color])
    return image


def _known(verifier: GenEvalVerifier) -> tuple[Row, Image.Image]:
    """A row, and a picture of what it asks for."""
    if isinstance(verifier.detector, DrawnDetector):
        drawn = render(Scene((Shape("circle", "red", 0.5, 0.5, 0.5),)), SIDE)
        return single_object(DRAWN["circle"]), drawn
    return single_object("person"), photograph()


def _check_detector(verifier: GenEvalVerifier, other_weights: bool) -> str:
    source = getattr(verifier.detector, "source", MASK2FORMER.sha256)
    if source != MASK2FORMER.sha256 and not other_weights:
        raise UserError(
            f"the detector was not made from mmdet's published checkpoint (sha256 {source}, "
            f"published {MASK2FORMER.sha256})",
            "Convert that one (umm-reflect geneval convert), or say other_weights: true.",
        )
    row, picture = _known(verifier)
    kind = row["include"][0]["class"]
    empty = Image.new("RGB", picture.size, (153, 153, 153))
    seen, nothing = verifier.detector.detect([picture, empty])
    best = max((found.score for found in seen if found.kind == kind), default=0.0)
    if best <= THRESHOLD:
        others = ", ".join(f"{f.kind} {f.score:.2f}" for f in seen[:3]) or "nothing at all"
        raise UserError(
            f"the detector finds no {kind} in a picture of one (best {best:.2f}; it finds "
            f"{others})",
            "Its weights are not what they should be: umm-reflect geneval convert",
        )
    imagined = max((found.score for found in nothing if found.kind == kind), default=0.0)
    if imagined > THRESHOLD:
        raise UserError(
            f"the detector finds a {kind} ({imagined:.2f}) in an empty picture",
            "Its weights are not what they should be: umm-reflect geneval convert",
        )
    good, bad = verifier.score([picture, empty], [row, row])
    if not (good.correct and good.score > bad.score):
        raise UserError(
            f"a picture of a {kind} scores {good.score:.3f} ({good.reason}) and an empty one "
            f"{bad.score:.3f}",
            "The verifier cannot tell right from wrong: see its manifest.",
        )
    return f"detector: {kind} {best:.2f} in a picture of one, {imagined:.2f} in an empty picture"


def _check_colors(verifier: GenEvalVerifier) -> str:
    balls = [ball(color) for color in COLORS]
    shares = verifier.colors.probabilities(balls, ["sports ball"] * len(balls))
    named = [COLORS[row.index(max(row))] for row in shares]
    right = sum(a == b for a, b in zip(named, COLORS, strict=True))
    if right < ENOUGH:
        wrong = ", ".join(f"{a} as {b}" for a, b in zip(COLORS, named, strict=True) if a != b)
        raise UserError(
            f"CLIP names {right} of {len(COLORS)} colours rightly ({wrong})",
            "Its weights or its activation are not what they should be (openai's, quick_gelu).",
        )
    return f"colours: {right} of {len(COLORS)} named rightly"


def _check_answers(verifier: GenEvalVerifier) -> str:
    from eval.blip_vqa import question

    assert verifier.vqa is not None
    crops, asked = [], []
    for index, color in enumerate(COLORS):
        picture = ball(color)
        crops += [picture, picture]
        asked += [question(c, "sports ball") for c in (color, COLORS[index - 3])]
    yes = verifier.vqa.yes(crops, asked)
    right = sum(own > other for own, other in zip(yes[::2], yes[1::2], strict=True))
    if right < ENOUGH:
        raise UserError(
            f"BLIP prefers the right colour for {right} of {len(COLORS)} balls",
            "Its weights are not what they should be: umm-reflect geneval convert",
        )
    return f"answers: the right colour preferred for {right} of {len(COLORS)} balls"
