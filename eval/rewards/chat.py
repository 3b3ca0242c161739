"""A vision-language judge behind an OpenAI-compatible endpoint (vLLM, SGLang, ...).

    chat = Chat(Endpoint("http://127.0.0.1:8000", "Qwen/Qwen3-VL-8B-Instruct"))
    answers = chat.ask([Question("row 7", lambda: messages, {"temperature": 0.0})])

An answer is the first choice of the reply, or a `NoAnswer` with the reason: it never raises for one
question, and raises `ServiceError` when the endpoint is gone for all.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from PIL.Image import Image

from eval.pictures import as_png
from eval.transport import Patience, Refused, ServiceError, Transport
from eval.wire import listed

TEMPLATES = Path(__file__).with_name("templates")
KEY_VARIABLE = "OPENAI_API_KEY"  # the one that such clients share; never written anywhere


@dataclass(frozen=True)
class Endpoint:
    """Where the judge is. timeout: seconds for one answer; concurrency: questions at a time."""

    url: str
    model: str
    timeout: float = 120.0
    attempts: int = 4
    concurrency: int = 16

    def __post_init__(self) -> None:
        if not self.url or not self.model:
            raise ValueError("a judge needs the url of an endpoint and the name of its model")
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}; give at least 1")


@dataclass(frozen=True)
class Question:
    """One request. name: how a person knows it; options: temperature, max_tokens, ...

    messages: makes them when their turn comes, so that not all pictures are encoded at once.
    """

    name: str
    messages: Callable[[], Sequence[Mapping[str, Any]]]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoAnswer:
    """Why a question has no answer."""

    reason: str


Answer = dict[str, Any]  # one choice of a chat completion: message, finish_reason, logprobs


class Chat:
    """Asks many questions at once; the answers come in the order of the questions."""

    def __init__(self, endpoint: Endpoint):
        key = os.environ.get(KEY_VARIABLE)
        self.endpoint = endpoint
        self.transport = Transport(
            endpoint.url.rstrip("/").removesuffix("/v1"),
            Patience(endpoint.attempts, longest_pause=8.0),
            endpoint.timeout,
            {"Authorization": f"Bearer {key}"} if key else None,
            endpoint.concurrency,
        )

    def ask(self, questions: Sequence[Question]) -> list[Answer | NoAnswer]:
        """One choice (or why there is none) for each question.

        Errors: ServiceError when nothing was answered, or the endpoint cannot be reached at all;
        Refused for a wrong address, model or key (401, 403, 404).
        """
        if not questions:
            return []
        replies = self.replies([(q.name, partial(self.body, q)) for q in questions])
        return [reply if isinstance(reply, NoAnswer) else _choice(reply) for reply in replies]

    def body(self, question: Question) -> dict[str, Any]:
        """The request of a question."""
        return {
            "model": self.endpoint.model,
            "messages": list(question.messages()),
            **question.options,
        }

    def replies(
        self,
        requests: Sequence[tuple[str, Callable[[], Mapping[str, Any]]]],
        path: str = "/v1/chat/completions",
    ) -> list[dict[str, Any] | NoAnswer]:
        """Whole replies to (name, what makes the body) requests, in order. Errors as `ask`."""
        pool = ThreadPoolExecutor(min(self.endpoint.concurrency, max(1, len(requests))))
        tasks = [pool.submit(self._one, name, make, path) for name, make in requests]
        try:
            results: list[dict[str, Any] | NoAnswer] = []
            failures = 0
            for task, (name, _) in zip(tasks, requests, strict=True):
                try:
                    results.append(task.result())
                except ServiceError as error:
                    results.append(NoAnswer(str(error)))
                    failures += 1
                # a judge that has answered nothing so far is dead, not slow
                if failures == len(results) >= min(len(requests), self.endpoint.concurrency):
                    left = [n for n, _ in requests[len(results) - failures :]]
                    raise ServiceError(
                        f"the judge at {self.transport.url} answers nothing; pending: "
                        f"{listed(left)} (the last: {name})",
                        "Start it, or check the url.",
                    )
            return results
        finally:
            for task in tasks:
                task.cancel()
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self.transport.close()

    def _one(
        self, name: str, make: Callable[[], Mapping[str, Any]], path: str
    ) -> dict[str, Any] | NoAnswer:
        try:
            reply = self.transport.post(path, {"json": make()}, pending=name)
        except Refused as error:
            if error.status in (401, 403, 404):
                raise
            return NoAnswer(str(error))
        try:
            content = reply.json()
        except ValueError:
            return NoAnswer("the judge's reply is no JSON")
        return content if isinstance(content, dict) else NoAnswer("the judge's reply is no object")


def _choice(reply: Mapping[str, Any]) -> Answer | NoAnswer:
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return NoAnswer("the judge's reply holds no choice")
    if not isinstance(text, str):
        return NoAnswer("the judge's reply holds no text")
    return dict(choice)


def text_of(answer: Answer) -> str:
    """What the judge wrote."""
    return answer["message"]["content"]


def picture_part(image: Image) -> dict[str, Any]:
    """An image as a part of a message: a PNG in a data URI."""
    data = base64.b64encode(as_png(image)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def asked_about(image: Image, text: str) -> dict[str, Any]:
    """A user's message: an image, and words about it."""
    return {"role": "user", "content": [picture_part(image), {"type": "text", "text": text}]}


def template_text(name: str) -> str:
    """The source of a template: one of ours, by name, or a file."""
    path = TEMPLATES / f"{name}.j2" if "/" not in name and "." not in name else Path(name)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        ours = ", ".join(sorted(p.stem for p in TEMPLATES.glob("*.j2")))
        raise ValueError(f"there is no template {name}; ours are {ours}") from None


@cache
def _compiled(source: str):
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source)


def rendered(source: str, **values: object) -> str:
    """A template filled in. Errors: ValueError for a name that the template has and we have not."""
    import jinja2

    try:
        return _compiled(source).render(**values).strip()
    except jinja2.TemplateError as error:
        raise ValueError(f"the judge's template cannot be filled in: {error}") from error
