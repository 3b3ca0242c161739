"""Reward `pickscore`: how much people would prefer the image for its prompt (a CLIP ViT-H).

    build({"reward": "pickscore", "device": "cuda:1"})

value = exp(logit_scale) * cosine / 26, in fp32, as flow_grpo and VeRL-Omni have it; the score is
that within [0, 1]. Texts are cut at 77 tokens, equal prompts are encoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from eval.model_files import pretrained, processor_folder
from eval.rewards.registry import Row, facts, hashes, prompt_of, same_length
from eval.rewards.selftest import described_pairs, require
from eval.verdict import Verdict
from umm_reflect.hub import resolve

SCALE = 26.0
MAX_TOKENS = 77


@dataclass(frozen=True)
class Settings:
    """model, processor: hub ids, id@revision, or folders. batch_size: images a forward."""

    model: str = "yuvalkirstain/PickScore_v1"
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    device: str = "auto"
    batch_size: int = 32

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; give at least 1")


def build(settings: Settings) -> PickScore:
    return PickScore(settings)


class PickScore:
    """The network is loaded when it is built."""

    def __init__(self, settings: Settings):
        from transformers import AutoProcessor, CLIPModel

        from umm_reflect.device import resolve_device

        self.settings = settings
        self.device = resolve_device(settings.device)
        self._folder = resolve(settings.model)
        self._processor = AutoProcessor.from_pretrained(processor_folder(settings.processor))
        model = pretrained(CLIPModel, self._folder, may_hold_more=True)
        self._model = model.requires_grad_(False).to(self.device)

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        import torch

        same_length(images, rows)
        prompts = [prompt_of(row) for row in rows]
        self._model.to(self.device)
        with torch.inference_mode():
            texts = self._texts(list(dict.fromkeys(prompts)))
            values: list[float] = []
            for start in range(0, len(images), self.settings.batch_size):
                part = slice(start, start + self.settings.batch_size)
                image_BD = self._images(images[part])
                text_BD = torch.stack([texts[prompt] for prompt in prompts[part]])
                scale = self._model.logit_scale.exp() / SCALE
                values += (scale * (image_BD * text_BD).sum(-1)).tolist()
        return [
            Verdict(None, min(1.0, max(0.0, v)), f"preference {v:.4f}", {}, value=v) for v in values
        ]

    def _texts(self, prompts: Sequence[str]) -> dict[str, Any]:
        """Each prompt's unit vector."""
        vectors = {}
        for start in range(0, len(prompts), self.settings.batch_size):
            part = prompts[start : start + self.settings.batch_size]
            tokens = self._processor.tokenizer(
                list(part), padding=True, truncation=True, max_length=MAX_TOKENS,
                return_tensors="pt",
            ).to(self.device)  # fmt: skip
            encoded = self._model.text_model(**tokens).pooler_output
            unit_BD = _unit(self._model.text_projection(encoded))
            vectors |= dict(zip(part, unit_BD, strict=True))
        return vectors

    def _images(self, images: Sequence[Image]) -> Any:
        pixels = self._processor.image_processor(
            images=[image.convert("RGB") for image in images], return_tensors="pt"
        )["pixel_values"]
        encoded = self._model.vision_model(pixel_values=pixels.to(self.device)).pooler_output
        return _unit(self._model.visual_projection(encoded))

    def manifest(self) -> dict[str, Any]:
        return facts(
            "pickscore", self.settings, ["torch", "transformers", "pillow"], hashes(self._folder)
        )

    def check(self) -> None:
        require(
            self,
            described_pairs(),
            "pickscore",
            f"Check the weights in {self._folder} (sha256 {hashes(self._folder)}).",
        )

    def offload(self) -> None:
        import torch

        self._model.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.offload()
        del self._model


def _unit(x: Any) -> Any:
    return x / x.norm(dim=-1, keepdim=True)
