"""What the models saw in one image, as a JSON record that suffices to judge it again.

    evidence = verifier.read(images, rows)[0]
    record = evidence.to_record()                 # plain lists and numbers
    Evidence.from_record(record) == evidence      # checked on the way in
    verdict(row, Evidence.from_record(record))    # geneval_scores.py: needs no GPU, no image

    {"image": {"sha256": "5c48...", "size": [512, 512]},
     "detections": [{"kind": "dog", "score": 0.97, "box": [10, 40, 200, 310], "area": 31000,
                     "color": "red", "colors": [0.9, 0.1, 0, 0, 0, 0, 0, 0, 0, 0]}],
     "answers": [{"kind": "dog", "color": "red", "yes": 0.81}]}

Detections below the verdict's threshold are in it too: a missing object then has a gradient, while
the thresholds stay the official ones. `colors` are over COLORS in GenEval's order; `color`, the
likeliest of them, is for people and is not read. Boxes are in pixels of `size`, to which a very
large image is reduced. `answers` are BLIP's about the most confident detection of a class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.geneval_rules import Detection
from umm_reflect.shapes.scene import COLORS


@dataclass(frozen=True)
class Answer:
    """How likely "yes" is as the answer to "{color} {kind}?" about a crop, in [0, 1]."""

    kind: str
    color: str
    yes: float


@dataclass(frozen=True)
class Evidence:
    """One image as seen. size: (width, height), pixels; detections: best first in each class."""

    size: tuple[int, int]
    detections: tuple[Detection, ...]
    answers: tuple[Answer, ...] = ()
    image_sha256: str = ""

    def answer(self, kind: str, color: str) -> float | None:
        """BLIP's "yes" to a colour of a class; None if it was not asked."""
        for answer in self.answers:
            if (answer.kind, answer.color) == (kind, color):
                return answer.yes
        return None

    def to_record(self) -> dict[str, Any]:
        """As plain JSON values; numbers are not rounded, so that no threshold is crossed."""
        return {
            "image": {"sha256": self.image_sha256, "size": list(self.size)},
            "detections": [_detection_record(d) for d in self.detections],
            "answers": [{"kind": a.kind, "color": a.color, "yes": a.yes} for a in self.answers],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Evidence:
        """Errors: ValueError that names the part that is no evidence."""
        image = _mapping(record.get("image"), "image")
        size = _numbers(image.get("size"), 2, "image.size")
        detections = [
            _detection(_mapping(d, f"detections[{i}]"), f"detections[{i}]")
            for i, d in enumerate(_list(record.get("detections"), "detections"))
        ]
        answers = [
            _answer(_mapping(a, f"answers[{i}]"), f"answers[{i}]")
            for i, a in enumerate(_list(record.get("answers", []), "answers"))
        ]
        sha256 = str(image.get("sha256", ""))
        return cls((int(size[0]), int(size[1])), tuple(detections), tuple(answers), sha256)


def color_of(probabilities: Sequence[float]) -> str:
    """The likeliest of COLORS; the first of equal ones, as argmax has it."""
    return COLORS[max(range(len(COLORS)), key=lambda i: (probabilities[i], -i))]


def _detection_record(d: Detection) -> dict[str, Any]:
    record: dict[str, Any] = {"kind": d.kind, "score": d.score, "box": list(d.box), "area": d.area}
    if d.color_probabilities is not None:
        record |= {"color": d.color, "colors": list(d.color_probabilities)}
    return record


def _detection(record: Mapping[str, Any], where: str) -> Detection:
    colors = record.get("colors")
    if colors is not None:
        colors = _numbers(colors, len(COLORS), f"{where}.colors")
        if min(colors) < 0 or abs(sum(colors) - 1) > 1e-3:
            raise ValueError(f"{where}.colors are no probabilities: {list(colors)}")
    return Detection(
        kind=_text(record.get("kind"), f"{where}.kind"),
        color=None if colors is None else color_of(colors),
        box=_numbers(record.get("box"), 4, f"{where}.box"),
        score=_share(record.get("score"), f"{where}.score"),
        area=_numbers([record.get("area", 0.0)], 1, f"{where}.area")[0],
        color_probabilities=colors,
    )


def _answer(record: Mapping[str, Any], where: str) -> Answer:
    color = _text(record.get("color"), f"{where}.color")
    if color not in COLORS:
        raise ValueError(f"{where}.color is {color!r}, not one of {', '.join(COLORS)}")
    yes = _share(record.get("yes"), f"{where}.yes")
    return Answer(_text(record.get("kind"), f"{where}.kind"), color, yes)


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r}, not an object")
    return value


def _list(value: object, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} is {value!r}, not a list")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where} is {value!r}, not a name")
    return value


def _numbers(value: object, many: int, where: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != many:
        raise ValueError(f"{where} is {value!r}, not {many} numbers")
    for number in value:
        known = isinstance(number, int | float) and not isinstance(number, bool)
        if not known or not math.isfinite(number):
            raise ValueError(f"{where} holds {number!r}, which is no number")
    return tuple(float(number) for number in value)


def _share(value: object, where: str) -> float:
    (number,) = _numbers([value], 1, where)
    if not 0 <= number <= 1:
        raise ValueError(f"{where} is {number}, outside [0, 1]")
    return number
