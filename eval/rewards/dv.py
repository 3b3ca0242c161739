"""Reward `dv`: yes or no questions about the image, each answered by a probability (AlphaGRPO).

    build({"reward": "dv", "url": "http://127.0.0.1:8000",
           "model": "Qwen/Qwen3-VL-30B-A3B-Instruct"})

A row has `semantic_questions` and, where wanted, `quality_questions`: lists of {"question": ...},
phrased so that yes is good; one with "is_valid": false is left out. Each is a request of its own at
temperature 0; q = P(yes) / (P(yes) + P(no)) over the first token's top log-probs. Without them the
words decide, and an answer that is neither leaves the image without a verdict.

combine  geometric  sqrt(mean(semantic q) * mean(quality q)), as published; the mean of what is
                    there where a row has one sort of questions
         mean       the mean of all q
         binary     as geometric, each q taken as 1 above a half and 0 below
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal

from PIL.Image import Image

from eval.rewards.chat import (
    Answer,
    Chat,
    Endpoint,
    NoAnswer,
    Question,
    asked_about,
    rendered,
    template_text,
    text_of,
)
from eval.rewards.registry import Row, facts, same_length
from eval.rewards.selftest import described_pairs, require
from eval.verdict import Verdict
from eval.wire import name_of

SORTS = ("semantic_questions", "quality_questions")


@dataclass(frozen=True)
class Settings:
    """max_tokens and top_logprobs are as published."""

    url: str = ""
    model: str = ""
    template: str = "dv"
    combine: Literal["geometric", "mean", "binary"] = "geometric"
    max_tokens: int = 10
    top_logprobs: int = 5
    timeout: float = 120.0
    attempts: int = 4
    concurrency: int = 32

    def __post_init__(self) -> None:
        self.endpoint()
        template_text(self.template)

    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.model, self.timeout, self.attempts, self.concurrency)


def build(settings: Settings) -> QuestionJudge:
    return QuestionJudge(settings)


def questions_of(row: Row) -> dict[str, list[str]]:
    """{sort: questions}. Errors: ValueError for a row without any, or with malformed ones."""
    found: dict[str, list[str]] = {}
    for sort in SORTS:
        asked = row.get(sort) or []
        if not isinstance(asked, list | tuple):
            raise ValueError(f"the row's {sort} is no list")
        for one in asked:
            text = one.get("question") if isinstance(one, Mapping) else one
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{sort} holds {one!r}, which has no question")
            if not isinstance(one, Mapping) or one.get("is_valid", True):
                found.setdefault(sort, []).append(text.strip())
    if not found:
        raise ValueError(f"the row has no {SORTS[0]} (its keys: {', '.join(map(str, row))})")
    return found


def probability_of_yes(answer: Answer) -> float | None:
    """P(yes) / (P(yes) + P(no)) of an answer; from its words where log-probs say neither."""
    mass = {"yes": 0.0, "no": 0.0}
    try:
        first = answer["logprobs"]["content"][0]
        for entry in first["top_logprobs"]:
            word = _word(entry["token"])
            if word in mass:
                mass[word] += math.exp(float(entry["logprob"]))
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        mass = dict.fromkeys(mass, 0.0)
    if total := sum(mass.values()):
        return mass["yes"] / total
    words = text_of(answer).split()
    said = _word(words[0]) if words else ""
    return {"yes": 1.0, "no": 0.0}.get(said)


def _word(token: str) -> str:
    return token.strip(" \t\r\n.,:;!*\"'`▁Ġ").lower()


class QuestionJudge:
    """As many requests an image as its row has questions."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._template = template_text(settings.template)
        self._chat = Chat(settings.endpoint())

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        same_length(images, rows)
        asked = [questions_of(row) for row in rows]
        options = {
            "temperature": 0.0,
            "max_tokens": self.settings.max_tokens,
            "logprobs": True,
            "top_logprobs": self.settings.top_logprobs,
        }
        requests = []
        for index, (image, row, sorts) in enumerate(zip(images, rows, asked, strict=True)):
            for question in (q for questions in sorts.values() for q in questions):
                text = rendered(self._template, question=question, prompt=row.get("prompt", ""))
                name = f"{name_of(row, index)}: {question[:60]}"
                requests.append(Question(name, partial(_messages, image, text), options))
        answers = iter(self._chat.ask(requests))
        return [
            self._verdict({sort: [(q, next(answers)) for q in qs] for sort, qs in sorts.items()})
            for sorts in asked
        ]

    def _verdict(self, answered: dict[str, list[tuple[str, Answer | NoAnswer]]]) -> Verdict:
        found: dict[str, list[tuple[str, float]]] = {}
        for sort, pairs in answered.items():
            for question, answer in pairs:
                if isinstance(answer, NoAnswer):
                    return Verdict.failed(f"{question}: {answer.reason}")
                q = probability_of_yes(answer)
                if q is None:
                    said = text_of(answer)[:80]
                    return Verdict.failed(f"'{question}' is answered by '{said}'", {"answer": said})
                found.setdefault(sort, []).append((question, q))
        score = combined(
            {sort: [q for _, q in pairs] for sort, pairs in found.items()}, self.settings.combine
        )
        everything = [pair for pairs in found.values() for pair in pairs]
        worst, least = min(everything, key=lambda pair: pair[1])
        doubts = sum(q < 0.5 for _, q in everything)
        reason = f"{len(everything) - doubts} of {len(everything)} yes"
        if doubts:
            reason += f"; least: {worst} ({least:.2f})"
        evidence = {
            "judge": self.settings.model,
            "answers": {sort: [[q, round(p, 6)] for q, p in ps] for sort, ps in found.items()},
        }
        return Verdict(None, score, reason, evidence)

    def manifest(self) -> dict[str, Any]:
        return {**facts("dv", self.settings), "template": self._template}

    def check(self) -> None:
        require(self, described_pairs(), "dv", f"See whether {self.settings.model} sees images.")

    def close(self) -> None:
        self._chat.close()


def _messages(image: Image, text: str) -> list[dict[str, Any]]:
    return [asked_about(image, text)]


def combined(q: Mapping[str, Sequence[float]], how: str) -> float:
    """The published combinations of the probabilities of each sort of question; in [0, 1]."""
    if how == "mean":
        return fmean(p for sort in q.values() for p in sort)
    if how == "binary":
        q = {sort: [float(p > 0.5) for p in ps] for sort, ps in q.items()}
    means = [fmean(ps) for ps in q.values()]
    return min(1.0, math.prod(means) ** (1 / len(means)))
