"""SpectraReward in this process: any image-text-to-text model of transformers.

    LocalSpectra(Settings(model="Qwen/Qwen3-VL-8B-Instruct", backend="transformers"))

The chat template renders the conversation with the answer left open (`continue_final_message`), so
no end token follows; a batch is padded on the left, so its answers end together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL.Image import Image

from eval.model_files import pretrained
from eval.rewards.registry import Row, facts, hashes
from eval.rewards.spectra import (
    END_TOKENS,
    Likelihood,
    Settings,
    check,
    tail,
    targets_of,
    verdict_of,
)
from eval.verdict import Verdict
from umm_reflect.errors import UserError
from umm_reflect.hub import resolve


class LocalSpectra:
    """The model is loaded when it is built."""

    def __init__(self, settings: Settings):
        from transformers import AutoModelForImageTextToText, AutoProcessor

        from umm_reflect.device import resolve_device, resolve_dtype

        self.settings = settings
        self.device = resolve_device(settings.device)
        self._folder = resolve(settings.model)
        try:
            self._processor = AutoProcessor.from_pretrained(self._folder)
        except ImportError as error:  # of a model that reads videos too, without torchvision
            why = " ".join(str(error).split())
            raise UserError(
                f"the processor of {settings.model} cannot be made ({why})",
                "Most need the extra vl: pip install -e '.[vl]'",
            ) from error
        model = pretrained(
            AutoModelForImageTextToText,
            self._folder,
            resolve_dtype(settings.dtype, self.device),
            may_hold_more=True,
            attn_implementation=settings.attn,
        )
        self._model = model.requires_grad_(False).to(self.device)
        tokenizer = self._processor.tokenizer
        vocabulary = tokenizer.get_vocab()
        self._ends = {vocabulary[token] for token in END_TOKENS if token in vocabulary}
        self._ends |= {tokenizer.eos_token_id} - {None}

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        targets = targets_of(self.settings, images, rows)
        self._model.to(self.device)
        size = self.settings.batch_size
        return [
            verdict_of(found)
            for start in range(0, len(images), size)
            for found in self.likelihoods(
                images[start : start + size], targets[start : start + size]
            )
        ]

    def likelihoods(self, images: Sequence[Image], targets: Sequence[str]) -> list[Likelihood]:
        """The log-probabilities of each text under its image, in one forward."""
        import torch

        texts = [self._rendered(target) for target in targets]
        answers = [self._answer(text) for text in texts]
        bos = self._processor.tokenizer.bos_token
        inputs = self._processor(
            text=texts,
            images=[[image.convert("RGB")] for image in images],
            padding=True,
            padding_side="left",
            add_special_tokens=not (bos and texts[0].startswith(bos)),
            return_tensors="pt",
        ).to(self.device)
        longest = max(map(len, answers))
        with torch.inference_mode():
            logits_BTV = self._model(**inputs, logits_to_keep=longest + 1, use_cache=False).logits
        ids_BT = inputs["input_ids"]
        found = []
        for row, answer in enumerate(answers):
            length = len(answer)
            if ids_BT[row, ids_BT.shape[1] - length :].tolist() != answer:
                raise UserError(
                    f"{self.settings.model} does not end its conversation with the answer",
                    "Its chat template or processor is not supported.",
                )
            logprobs_TV = logits_BTV[row, -length - 1 : -1].float().log_softmax(-1)
            picked = logprobs_TV.gather(-1, ids_BT[row, -length:, None])[:, 0].tolist()
            kept = [i for i, token in enumerate(answer) if token not in self._ends]
            tokens = self._processor.tokenizer.convert_ids_to_tokens(answer)
            words = [self._processor.tokenizer.convert_tokens_to_string([t]) for t in tokens]
            found.append(Likelihood(tuple(words[i] for i in kept), tuple(picked[i] for i in kept)))
        return found

    def _rendered(self, target: str | None) -> str:
        """The conversation as text; None: up to where the answer begins."""
        content: list[dict[str, Any]] = [{"type": "image"}]
        if self.settings.user_instruction:
            content.append({"type": "text", "text": self.settings.user_instruction})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if target is None:
            return self._processor.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        messages.append({"role": "assistant", "content": [{"type": "text", "text": target}]})
        return self._processor.apply_chat_template(
            messages, continue_final_message=True, tokenize=False
        )

    def _answer(self, text: str) -> list[int]:
        """The ids of the answer at the end of a conversation."""
        tokenizer = self._processor.tokenizer
        user = tokenizer(self._rendered(None), add_special_tokens=False)["input_ids"]
        full = tokenizer(text, add_special_tokens=False)["input_ids"]
        return full[len(full) - tail(user, full) :]

    def manifest(self) -> dict[str, Any]:
        packages = ["torch", "transformers", "pillow"]
        return facts("spectra", self.settings, packages, hashes(self._folder))

    def check(self) -> None:
        check(self, self.settings)

    def offload(self) -> None:
        import torch

        self._model.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.offload()
        del self._model
