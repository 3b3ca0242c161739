"""Reward `ocr`: is the text that the prompt puts in quotes to be read in the image?

    build({"reward": "ocr"})                                            # here, on the CPU
    build({"reward": "ocr", "engine": "vlm", "url": "http://127.0.0.1:8000",
           "model": "Qwen/Qwen3-VL-8B-Instruct"})

The target is the row's `text` where it has one, else what stands in the first pair of double quotes
of its prompt (flow_grpo). Reader and target lose white space and case; the score is 1 where the
target is a part of what was read, else 1 - min(edit distance, n) / n for a target of n letters
(flow_grpo, VeRL-Omni). A target without letters asks for an image without text.

engine local: RapidOCR, whose PP-OCR weights ship in its package (extra `ocr`). engine vlm: a
vision-language model with VeRL-Omni's prompt; its settings were temperature 0.7 and top_p 0.8, ours
are 0 and 1, so that a repeat gives the same reward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

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
from eval.rewards.selftest import require, text_pairs
from eval.verdict import Verdict
from eval.wire import name_of
from umm_reflect.files import sha256

if TYPE_CHECKING:
    from eval.rewards.ocr_local import Word

QUOTED = re.compile(r'["“”](.*?)["“”]', re.DOTALL)
SYSTEM = "You are a helpful assistant."  # VeRL-Omni's


@dataclass(frozen=True)
class Settings:
    """engine local: `workers` (0: one per core). engine vlm: the rest."""

    engine: Literal["local", "vlm"] = "local"
    workers: int = 0
    url: str = ""
    model: str = ""
    template: str = "ocr"
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 4096
    seed: int | None = None
    timeout: float = 120.0
    attempts: int = 4
    concurrency: int = 16

    def __post_init__(self) -> None:
        if self.engine == "vlm":
            self.endpoint()
            template_text(self.template)
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}; give 0 or more")

    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.model, self.timeout, self.attempts, self.concurrency)


def build(settings: Settings) -> LocalReader | VlmReader:
    return LocalReader(settings) if settings.engine == "local" else VlmReader(settings)


def target_of(row: Row) -> str:
    """What should be read. Errors: ValueError for a row without `text` and without quotes."""
    if row.get("text") is not None:
        return str(row["text"])
    prompt = prompt_of(row)
    found = QUOTED.search(prompt)
    if found is None:
        raise ValueError(f"'{prompt[:80]}' has no text in double quotes, and the row no `text`")
    return found[1]


def verdict_of(target: str, read: str, evidence: dict[str, Any]) -> Verdict:
    """The published score of what was read."""
    wanted, got = (re.sub(r"\s+", "", text).lower() for text in (target, read))
    evidence = {"target": target, "read": read, **evidence}
    if not wanted:
        if got:
            return Verdict(False, 0.0, f"reads '{read[:60]}' where no text is asked for", evidence)
        return Verdict(True, 1.0, "no text, as asked", evidence)
    if wanted in got:
        return Verdict(True, 1.0, f"reads '{target}'", evidence)
    score = 1 - min(edit_distance(wanted, got), len(wanted)) / len(wanted)
    seen = f"reads '{read[:60]}'" if got else "no text"
    return Verdict(False, score, f"{seen}, not '{target}'", evidence)


def edit_distance(a: str, b: str) -> int:
    """Levenshtein: insertions, deletions and replacements, each 1."""
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (letter != other))
    return row[-1]


class LocalReader:
    """RapidOCR on the CPU, an engine a worker."""

    def __init__(self, settings: Settings):
        from eval.rewards.ocr_local import Engines

        self.settings = settings
        self._engines = Engines(settings.workers)

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        same_length(images, rows)
        targets = [target_of(row) for row in rows]
        read = self._engines.read(images)
        return [_local_verdict(t, words) for t, words in zip(targets, read, strict=True)]

    def manifest(self) -> dict[str, Any]:
        files = {path.name: sha256(path) for path in self._engines.files}
        return facts("ocr", self.settings, ["rapidocr", "onnxruntime"], files)

    def check(self) -> None:
        require(self, text_pairs(), "ocr", "Reinstall the extra: pip install -e '.[ocr]'")

    def close(self) -> None:
        self._engines.close()


def _local_verdict(target: str, words: Sequence[Word]) -> Verdict:
    boxes = [{"text": w.text, "box": list(w.box), "score": round(w.score, 4)} for w in words]
    return verdict_of(target, " ".join(word.text for word in words), {"words": boxes})


class VlmReader:
    """A vision-language model that is asked for the text and nothing else."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._instruction = rendered(template_text(settings.template))
        self._chat = Chat(settings.endpoint())

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        same_length(images, rows)
        targets = [target_of(row) for row in rows]
        questions = [
            Question(name_of(row, index), partial(self._messages, image), self._options())
            for index, (image, row) in enumerate(zip(images, rows, strict=True))
        ]
        answers = self._chat.ask(questions)
        return [
            Verdict.failed(answer.reason)
            if isinstance(answer, NoAnswer)
            else verdict_of(target, text_of(answer), {"judge": self.settings.model})
            for target, answer in zip(targets, answers, strict=True)
        ]

    def _messages(self, image: Image) -> list[dict[str, Any]]:
        return [{"role": "system", "content": SYSTEM}, asked_about(image, self._instruction)]

    def _options(self) -> dict[str, Any]:
        s = self.settings
        options = {"temperature": s.temperature, "top_p": s.top_p, "max_tokens": s.max_tokens}
        return options if s.seed is None else {**options, "seed": s.seed}

    def manifest(self) -> dict[str, Any]:
        return {**facts("ocr", self.settings), "template": template_text(self.settings.template)}

    def check(self) -> None:
        require(self, text_pairs(), "ocr", f"See whether {self.settings.model} reads images.")

    def close(self) -> None:
        self._chat.close()
