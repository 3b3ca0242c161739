"""Reward `judge`: a vision-language model grades the image for its prompt.

    build({"reward": "judge", "url": "http://127.0.0.1:8000", "model": "Qwen/Qwen3-VL-8B-Instruct"})
    build({..., "template": "my_rubric.j2", "pattern": "Final Score:\\\\s*([0-9.]+)"})

The template (templates/judge.j2, or a file) gets the row as `row`, its `prompt`, `lowest` and
`highest`; the answer's last match of `pattern` is the grade. The score is
(grade - lowest) / (highest - lowest); the defaults, 0 to 5 in <Score>, are flow_grpo's x / 5. A
grade that is missing or out of range is no grade: the image is not judged, and counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL.Image import Image

from eval.rewards.chat import (
    Chat,
    Endpoint,
    NoAnswer,
    Question,
    asked_about,
    rendered,
    template_text,
    text_of,
)
from eval.rewards.registry import Row, facts, prompt_of, same_length
from eval.rewards.selftest import described_pairs, require
from eval.verdict import Verdict
from eval.wire import name_of


@dataclass(frozen=True)
class Settings:
    """pattern: a regular expression whose first group is the grade."""

    url: str = ""
    model: str = ""
    template: str = "judge"
    pattern: str = r"<Score>\s*([-+]?[0-9]*\.?[0-9]+)\s*</Score>"
    lowest: float = 0.0
    highest: float = 5.0
    temperature: float = 0.0
    max_tokens: int = 512
    seed: int | None = None
    timeout: float = 120.0
    attempts: int = 4
    concurrency: int = 16

    def __post_init__(self) -> None:
        self.endpoint()
        template_text(self.template)
        if self.highest <= self.lowest:
            raise ValueError(f"grades go from {self.lowest} to {self.highest}; give a range")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(
                f"pattern '{self.pattern}' is no regular expression ({error})"
            ) from None
        if groups != 1:
            raise ValueError(f"pattern {self.pattern} has {groups} groups; give it one, the grade")

    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.model, self.timeout, self.attempts, self.concurrency)


def build(settings: Settings) -> GradingJudge:
    return GradingJudge(settings)


def grade_of(text: str, settings: Settings) -> float | None:
    """The grade in an answer, None where it has none in range."""
    found = re.findall(settings.pattern, text)
    try:
        grade = float(found[-1])
    except (IndexError, ValueError):
        return None
    return grade if settings.lowest <= grade <= settings.highest else None


class GradingJudge:
    """One question an image."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._template = template_text(settings.template)
        self._chat = Chat(settings.endpoint())

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        same_length(images, rows)
        texts = [self._text(row) for row in rows]
        questions = [
            Question(name_of(row, index), partial(_messages, image, text), self._options())
            for index, (image, row, text) in enumerate(zip(images, rows, texts, strict=True))
        ]
        return [self._verdict(answer) for answer in self._chat.ask(questions)]

    def _text(self, row: Row) -> str:
        s = self.settings
        return rendered(
            self._template, row=row, prompt=prompt_of(row), lowest=s.lowest, highest=s.highest
        )

    def _options(self) -> dict[str, Any]:
        s = self.settings
        options = {"temperature": s.temperature, "max_tokens": s.max_tokens}
        return options if s.seed is None else {**options, "seed": s.seed}

    def _verdict(self, answer: dict[str, Any] | NoAnswer) -> Verdict:
        if isinstance(answer, NoAnswer):
            return Verdict.failed(answer.reason)
        said = text_of(answer).strip()
        evidence = {"answer": said, "judge": self.settings.model}
        grade = grade_of(said, self.settings)
        if grade is None:
            return Verdict.failed(f"no grade in the answer '{said[-80:]}'", evidence)
        s = self.settings
        score = (grade - s.lowest) / (s.highest - s.lowest)
        why = " ".join(re.sub(s.pattern, "", said).split())[:160]
        reason = f"{grade:g} of {s.highest:g}" + (f": {why}" if why else "")
        return Verdict(None, score, reason, {**evidence, "grade": grade})

    def manifest(self) -> dict[str, Any]:
        return {**facts("judge", self.settings), "template": self._template}

    def check(self) -> None:
        require(self, described_pairs(), "judge", f"See whether {self.settings.model} sees images.")

    def close(self) -> None:
        self._chat.close()


def _messages(image: Image, text: str) -> list[dict[str, Any]]:
    return [asked_about(image, text)]
