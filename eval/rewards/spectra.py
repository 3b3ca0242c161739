"""Reward `spectra`: how likely the prompt is to a frozen model that looks at the image.

    build({"reward": "spectra", "model": "Qwen/Qwen3-VL-8B-Instruct"})        # here, transformers
    build({"reward": "spectra", "url": "http://10.0.0.2:18090",               # a vLLM server of
           "model": "Qwen/Qwen3-VL-30B-A3B-Instruct"})            # scripts/serve_spectrareward.sh
    build({"reward": "spectra", "backend": "self", "model": "ByteDance-Seed/BAGEL-7B-MoT"})

value = the mean over the prompt's tokens of log p(token | those before, the image), one teacher-
forced pass (SpectraReward); the score is exp(value), the geometric mean of the probabilities. The
image and `user_instruction` are what the user says, prompt_prefix + prompt + prompt_suffix what the
model is taken to answer. Tokens that end a turn are no targets.

Where a setting says nothing, SPECTRAREWARD_URL and SPECTRAREWARD_MODEL_ID do, as the card of the
SpectraReward adapter has people set them; then the published model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from PIL.Image import Image

from eval.rewards.registry import Row, prompt_of, same_length
from eval.rewards.selftest import Pair, described_pairs, require, shape_pairs
from eval.verdict import Verdict

if TYPE_CHECKING:
    from eval.rewards.registry import Reward

PUBLISHED_MODEL = "Qwen/Qwen3-VL-30B-A3B-Instruct"
URL_VARIABLE, MODEL_VARIABLE = "SPECTRAREWARD_URL", "SPECTRAREWARD_MODEL_ID"
END_TOKENS = ("<|im_end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<eos>")


@dataclass(frozen=True)
class Settings:
    """backend auto: vllm with a url, else transformers. batch_size: images a forward, here."""

    backend: Literal["auto", "transformers", "vllm", "self"] = "auto"
    model: str = ""
    url: str = ""
    user_instruction: str = ""
    prompt_prefix: str = ""
    prompt_suffix: str = ""
    device: str = "auto"
    dtype: str = "auto"
    attn: str = "sdpa"
    batch_size: int = 16
    timeout: float = 600.0
    attempts: int = 8
    concurrency: int = 16

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; give at least 1")
        if self.backend == "self" and not self.model:
            raise ValueError("backend self needs model: the BAGEL folder or id that looks")


@dataclass(frozen=True)
class Likelihood:
    """The prompt's tokens (as text) and the log-probability of each."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


def build(settings: Settings) -> Reward:
    settings = resolved(settings)
    if settings.backend == "vllm":
        from eval.rewards.spectra_vllm import VllmSpectra

        return VllmSpectra(settings)
    if settings.backend == "self":
        from eval.rewards.spectra_self import SelfSpectra

        return SelfSpectra.load(settings)
    from eval.rewards.spectra_local import LocalSpectra

    return LocalSpectra(settings)


def resolved(settings: Settings) -> Settings:
    """The settings with what the card's variables say, and the backend that follows."""
    if settings.backend == "self":
        return settings
    url = settings.url or os.environ.get(URL_VARIABLE, "")
    model = settings.model or os.environ.get(MODEL_VARIABLE) or PUBLISHED_MODEL
    backend = settings.backend
    if backend == "auto":
        backend = "vllm" if url else "transformers"
    if backend == "vllm" and not url:
        raise ValueError(f"backend vllm needs url (or {URL_VARIABLE}): where the server is")
    return replace(settings, backend=backend, url=url if backend == "vllm" else "", model=model)


def targets_of(settings: Settings, images: Sequence[Image], rows: Sequence[Row]) -> list[str]:
    """What the model is taken to say of each image."""
    same_length(images, rows)
    return [f"{settings.prompt_prefix}{prompt_of(r)}{settings.prompt_suffix}" for r in rows]


def verdict_of(found: Likelihood) -> Verdict:
    """Errors are verdicts: a prompt without tokens, a log-probability that is no number."""
    if not found.logprobs:
        return Verdict.failed("the prompt has no tokens")
    if not all(math.isfinite(logprob) for logprob in found.logprobs):
        return Verdict.failed("a log-probability is not finite: the weights or dtype are broken")
    value = sum(found.logprobs) / len(found.logprobs)
    token, least = min(zip(found.tokens, found.logprobs, strict=True), key=lambda pair: pair[1])
    reason = f"{value:.3f} a token; least likely: {token.strip()!r} {least:.2f}"
    evidence = {"tokens": list(found.tokens), "logprobs": [round(p, 6) for p in found.logprobs]}
    return Verdict(None, min(1.0, math.exp(value)), reason, evidence, value=value)


def check(reward: Reward, settings: Settings) -> None:
    """The self-test of all backends. BAGEL itself gets prompts as it is trained on."""
    pairs: list[Pair] = shape_pairs() if settings.backend == "self" else described_pairs()
    require(reward, pairs, "spectra", f"See whether {settings.model} sees images.")


def tail(user: Sequence[int], full: Sequence[int]) -> int:
    """How many of `full`'s last ids are not a common beginning with `user`.

    The two are the conversation without and with the answer; letters may have merged where the
    answer begins, so the common beginning, and not the length of `user`, is where it starts.
    """
    same = 0
    for a, b in zip(user, full, strict=False):
        if a != b:
            break
        same += 1
    return len(full) - same
