"""SpectraReward through a vLLM server's `prompt_logprobs` (scripts/serve_spectrareward.sh).

    VllmSpectra(Settings(url="http://127.0.0.1:18090", model="Qwen/Qwen3-VL-30B-A3B-Instruct", ...))

Each image is one chat completion, continued by one token that nobody looks at: the user shows the
image, the assistant's message is the prompt, left open. /tokenize says which ids the prompt has,
and the log-probabilities at the end must carry just these: a server that cuts, reorders or caches
positions away is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from PIL.Image import Image

from eval.rewards.chat import Chat, Endpoint, NoAnswer, picture_part
from eval.rewards.registry import Row, facts
from eval.rewards.spectra import (
    END_TOKENS,
    Likelihood,
    Settings,
    check,
    tail,
    targets_of,
    verdict_of,
)
from eval.transport import ServiceError
from eval.verdict import Verdict
from eval.wire import listed, name_of
from umm_reflect.errors import UserError

AT_ONCE = 512  # images whose replies are in memory together
KEPT_TEXTS = 20_000  # prompts whose ids are remembered


class VllmSpectra:
    """Asks for many images at once; the server batches them."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._chat = Chat(
            Endpoint(
                settings.url,
                settings.model,
                settings.timeout,
                settings.attempts,
                settings.concurrency,
            )
        )
        self._known: dict[str, list[int]] = {}

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        targets = targets_of(self.settings, images, rows)
        names = [name_of(row, index) for index, row in enumerate(rows)]
        verdicts: list[Verdict] = []
        for start in range(0, len(images), AT_ONCE):  # a reply holds its whole prompt's numbers
            part = slice(start, start + AT_ONCE)
            answers = self._answers(dict.fromkeys(targets[part]))
            asked = zip(names[part], images[part], targets[part], strict=True)
            replies = self._chat.replies(
                [(name, partial(self._body, image, target)) for name, image, target in asked]
            )
            verdicts += [
                self._verdict(answers[target], reply)
                for target, reply in zip(targets[part], replies, strict=True)
            ]
        return verdicts

    def _verdict(self, answer: list[int] | NoAnswer, reply: Mapping[str, Any] | NoAnswer):
        for failure in (answer, reply):
            if isinstance(failure, NoAnswer):
                return Verdict.failed(failure.reason)
        return verdict_of(likelihood(answer, reply.get("prompt_logprobs")))

    def _body(self, image: Image, target: str) -> dict[str, Any]:
        return {
            "model": self.settings.model,
            "messages": self._messages([picture_part(image)], target),
            "add_generation_prompt": False,
            "continue_final_message": True,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }

    def _messages(self, shown: list[dict[str, Any]], target: str | None) -> list[dict[str, Any]]:
        content = list(shown)
        if self.settings.user_instruction:
            content.append({"type": "text", "text": self.settings.user_instruction})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if target is not None:
            messages.append({"role": "assistant", "content": target})
        return messages

    def _answers(self, targets: Mapping[str, Any]) -> dict[str, list[int] | NoAnswer]:
        """The ids of each text as an answer. They do not depend on what the user shows."""
        if len(self._known) > KEPT_TEXTS:
            self._known.clear()
        new = [target for target in targets if target not in self._known]
        shown = [{"type": "text", "text": "."}]
        opened = {"messages": self._messages(shown, None), "add_generation_prompt": True}
        requests = [("the opening of a conversation", partial(self._tokenize, opened))]
        for target in new:
            answered = {
                "messages": self._messages(shown, target),
                "add_generation_prompt": False,
                "continue_final_message": True,
            }
            requests.append((f"the tokens of '{target[:40]}'", partial(self._tokenize, answered)))
        failed: dict[str, NoAnswer] = {}
        if new:
            opening, *rest = self._chat.replies(requests, "/tokenize")
            if isinstance(opening, NoAnswer):
                raise ServiceError(
                    f"{self.settings.url}/tokenize does not serve ({opening.reason})",
                    "Start vLLM with scripts/serve_spectrareward.sh.",
                )
            for target, reply in zip(new, rest, strict=True):
                if isinstance(reply, NoAnswer):
                    failed[target] = reply
                    continue
                ids = list(reply["tokens"])
                self._known[target] = ids[len(ids) - tail(opening["tokens"], ids) :]
        return {target: failed.get(target) or self._known[target] for target in targets}

    def _tokenize(self, conversation: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self.settings.model, **conversation}

    def manifest(self) -> dict[str, Any]:
        served = self._chat.transport.get("/v1/models", "the list of models").json()
        version = self._chat.transport.get("/version", "the version").json()
        names = [model.get("id") for model in served.get("data", [])]
        return {**facts("spectra", self.settings), "served": names, "vllm": version.get("version")}

    def check(self) -> None:
        served = self.manifest()["served"]
        if self.settings.model not in served:
            raise UserError(
                f"{self.settings.url} serves {listed(served) or 'nothing'}, not "
                f"{self.settings.model}",
                "Start it with the same name, or set the model (SPECTRAREWARD_MODEL_ID).",
            )
        check(self, self.settings)

    def close(self) -> None:
        self._chat.close()


def likelihood(answer: Sequence[int], entries: Any) -> Likelihood:
    """The answer's log-probabilities from the end of vLLM's `prompt_logprobs`.

    entries: one mapping a prompt token from id to {logprob, decoded_token, ...} (the first is
    null). Errors: UserError when the last ones are not the answer's: the server is not to be used.
    """
    if not isinstance(entries, list) or len(entries) < len(answer):
        raise UserError(
            "the server gives no prompt_logprobs for the whole prompt",
            "It must be vLLM, started with scripts/serve_spectrareward.sh.",
        )
    tokens, logprobs = [], []
    for token, entry in zip(answer, entries[len(entries) - len(answer) :], strict=True):
        own = (entry or {}).get(str(token))
        if own is None:
            raise UserError(
                f"the server's prompt_logprobs are of other tokens (no id {token} where the prompt "
                "stands)",
                "The server's tokenizer or template differs between /tokenize and the chat.",
            )
        if own.get("decoded_token") in END_TOKENS:
            continue
        tokens.append(str(own.get("decoded_token")))
        logprobs.append(float(own["logprob"]))
    return Likelihood(tuple(tokens), tuple(logprobs))
