"""Which of ten colours an object has, by CLIP ViT-L/14, as GenEval asks it.

    colors = ClipColors.load("openai/clip-vit-large-patch14", device="cuda:0")
    colors.probabilities([on_grey(image, found)], ["bench"])     # [(0.91, 0.02, ...)] over COLORS

The object stands on plain grey where its own pixels are known. A colour is described by three
sentences whose directions are averaged; the likeliest of ten wins, sharpened a hundredfold. The
weights need the quick GELU that they were trained with: another activation is refused, since it
gives other colours without any error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from umm_reflect.errors import CheckpointError
from umm_reflect.shapes.scene import COLORS
from umm_reflect.verifier_files import CLIP

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from eval.detectors import Found

TEMPLATES = ("a photo of a {c} {k}", "a photo of a {c}-colored {k}", "a photo of a {c} object")
SHARPNESS = 100.0  # of the cosines, before the softmax
GREY = (153, 153, 153)  # what an object stands on
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


# --- pixels ---------------------------------------------------------------------------------------


def on_grey(image: Image.Image, found: Found) -> Image.Image:
    """The crop of a detection, on grey where its own pixels are known."""
    crop = plain_crop(image, found)
    if found.mask is None:
        return crop
    mask = Image.fromarray(found.mask.inside_box().astype(np.uint8) * 255)
    return Image.composite(crop, Image.new("RGB", crop.size, GREY), mask)


def plain_crop(image: Image.Image, found: Found) -> Image.Image:
    """The crop of a detection with what is around it; at least one pixel."""
    x0, y0, x1, y1 = (round(side) for side in found.box)
    return image.convert("RGB").crop((x0, y0, max(x1, x0 + 1), max(y1, y0 + 1)))


def centre_square(image: Image.Image, side: int) -> Image.Image:
    """The short side scaled to `side` (bicubic), then the centre cut out, in one go.

    Scaling the whole of a thin crop first would need side * side * length / width pixels.
    """
    short, long = min(image.size), max(image.size)
    scaled = side * long // short
    start = round((scaled - side) / 2) * long / scaled
    end = min(start + side * long / scaled, long)
    box = (start, 0, end, short) if image.width == long else (0, start, short, end)
    return image.resize((side, side), Image.Resampling.BICUBIC, box=box)


def normalised(images: Sequence[Image.Image], device: torch.device) -> Tensor:
    """[N, 3, side, side] fp32: RGB images of one size with CLIP's mean and spread."""
    import torch

    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).to(device)
    pixels = pixels.permute(0, 3, 1, 2).float() / 255
    mean, std = (pixels.new_tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std


# --- the model ------------------------------------------------------------------------------------


class ClipColors:
    """CLIP asked for one of COLORS; what a class's colours are called is kept per class."""

    def __init__(
        self, model: Any, tokenizer: Any, *, device: torch.device, batch_size: int, weights: str
    ):
        """model: CLIPModel; tokenizer: its own. weights: their sha256.

        Errors: CheckpointError for a model whose activation is not quick GELU, or a tokenizer of
        another size (without its files it loads as an empty one, and knows no word).
        """
        words = model.config.text_config.vocab_size
        if len(tokenizer) != words:
            raise CheckpointError(
                f"this CLIP has {words} tokens and its tokenizer knows {len(tokenizer)}",
                "Its folder needs tokenizer.json, or vocab.json and merges.txt.",
            )
        for part in (model.config.text_config, model.config.vision_config):
            if part.hidden_act != "quick_gelu":
                raise CheckpointError(
                    f"this CLIP has hidden_act {part.hidden_act!r}, and OpenAI's needs quick_gelu",
                    f"Take {CLIP}, or set hidden_act in its config.json.",
                )
        self.model = model.eval().requires_grad_(False).to(device)
        self.tokenizer = tokenizer
        self.device = device
        self.batch_size = batch_size
        self.weights = weights
        self.side = model.config.vision_config.image_size
        self._directions: dict[str, Tensor] = {}  # [10, D] on the CPU, of each class met

    @classmethod
    def load(
        cls, name: str | Path = CLIP, *, device: str | torch.device = "auto", batch_size: int = 64
    ) -> ClipColors:
        """A folder, a hub id or id@revision. Errors: CheckpointError."""
        from transformers import CLIPModel, CLIPTokenizer

        from eval.model_files import pretrained, weights_sha256
        from umm_reflect import hub
        from umm_reflect.device import resolve_device

        folder = hub.resolve(name)
        model = pretrained(CLIPModel, folder)
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        return cls(
            model,
            tokenizer,
            device=resolve_device(device),
            batch_size=batch_size,
            weights=weights_sha256(folder),
        )

    def probabilities(
        self, crops: Sequence[Image.Image], kinds: Sequence[str]
    ) -> list[tuple[float, ...]]:
        """For each crop of an object of a class: how likely each of COLORS is."""
        import torch

        for kind in dict.fromkeys(kinds):
            if kind not in self._directions:
                self._directions[kind] = self._text_directions(kind).cpu()
        found: list[tuple[float, ...]] = []
        for start in range(0, len(crops), self.batch_size):
            part = crops[start : start + self.batch_size]
            squares = [centre_square(crop.convert("RGB"), self.side) for crop in part]
            with torch.inference_mode():
                images_ND = self._image_directions(normalised(squares, self.device))
                names = kinds[start : start + self.batch_size]
                texts_NCD = torch.stack([self._directions[kind] for kind in names]).to(self.device)
                logits_NC = SHARPNESS * torch.einsum("nd,ncd->nc", images_ND, texts_NCD)
                if not torch.isfinite(logits_NC).all():
                    raise FloatingPointError("CLIP's scores are no numbers")
                shares = logits_NC.cpu().double().softmax(-1)
            found += [tuple(row) for row in shares.tolist()]
        return found

    def _text_directions(self, kind: str) -> Tensor:
        """[10, D]: the mean direction of the three sentences about each colour of a class."""
        import torch

        sentences = [template.format(c=color, k=kind) for color in COLORS for template in TEMPLATES]
        tokens = self.tokenizer(sentences, padding=True, return_tensors="pt").to(self.device)
        with torch.inference_mode():
            pooled = self.model.text_model(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            ).pooler_output
            directions = _unit(self.model.text_projection(pooled))
            return _unit(directions.unflatten(0, (len(COLORS), len(TEMPLATES))).mean(1))

    def _image_directions(self, pixels: Tensor) -> Tensor:
        pooled = self.model.vision_model(pixel_values=pixels).pooler_output
        return _unit(self.model.visual_projection(pooled))

    def identity(self) -> dict[str, Any]:
        """What decides the colours."""
        return {"name": "clip", "sha256": self.weights, "dtype": "float32", "side": self.side}

    def move(self, device: torch.device) -> None:
        """Go to a device."""
        self.model.to(device)
        self.device = device


def _unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)
