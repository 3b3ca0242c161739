"""The GenEval verifier's three models with random weights: full size to time them, tiny to test.

    verifier = random_verifier("full", device="cuda:0")
    detector = random_detector("tiny", device="cpu")

Nothing is downloaded. Tokenizers, which have no random form, are replaced by one that gives every
text ids of its own of the usual number. What these models see means nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from eval.blip_vqa import MEASURED, BlipVqa
from eval.clip_colors import ClipColors
from eval.detectors import Mask2FormerDetector
from eval.geneval import GenEvalVerifier

if TYPE_CHECKING:
    import torch
    from transformers import BlipConfig, CLIPConfig, Mask2FormerConfig

Size = Literal["full", "tiny"]


class AnyTokens:
    """A stand-in for a tokenizer: ids from the hash of a text, always LENGTH of them."""

    LENGTH = 8
    unk_token_id = 100

    def __init__(self, many: int, last: int):
        """many: size of the vocabulary; last: the id that ends a text."""
        self.many, self.last = many, last

    def __len__(self) -> int:
        return self.many

    def __call__(self, texts: Sequence[str], **how: Any) -> Any:
        """As a tokenizer's call with return_tensors="pt"."""
        import torch
        from transformers import BatchEncoding

        hashes = [zlib.crc32(text.encode()) for text in texts]
        rows = [[(h >> i) % (self.many - 8) for i in range(self.LENGTH - 1)] for h in hashes]
        ids = torch.tensor([[*row, self.last] for row in rows])
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def convert_tokens_to_ids(self, token: str) -> int:
        """BERT's for the two answers."""
        return {"yes": 2748, "no": 2053}[token]


# --- configurations -------------------------------------------------------------------------------


def detector_config(size: Size) -> Mask2FormerConfig:
    """Mask2Former: Swin-S as GenEval's, or two small layers of everything."""
    if size == "full":
        from eval.mask2former_keys import full_size_config

        return full_size_config()
    from transformers import Mask2FormerConfig, SwinConfig

    swin = SwinConfig(
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 4, 8],
        window_size=7,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    return Mask2FormerConfig(
        backbone_config=swin,
        num_labels=80,
        num_queries=20,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_layers=1,
        encoder_feedforward_dim=32,
        decoder_layers=2,
        dim_feedforward=32,
        num_attention_heads=2,
    )


def clip_config(size: Size) -> CLIPConfig:
    """CLIP ViT-L/14, or two small layers."""
    from transformers import CLIPConfig

    if size == "full":
        wide = {"num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14}
        return CLIPConfig(
            text_config={
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
            },
            vision_config={"hidden_size": 1024, "intermediate_size": 4096, **wide},
            projection_dim=768,
        )
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return CLIPConfig(
        text_config=dict(small),
        vision_config={**small, "image_size": 56, "patch_size": 14},
        projection_dim=16,
    )


def blip_config(size: Size) -> BlipConfig:
    """BLIP base for questions, or two small layers with the whole vocabulary."""
    if size == "full":
        from eval.blip_vqa import full_size_config

        return full_size_config()
    from transformers import BlipConfig

    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return BlipConfig(
        text_config={**small, "encoder_hidden_size": 32, "vocab_size": MEASURED},
        vision_config={**small, "image_size": 32, "patch_size": 16},
    )


# --- models ---------------------------------------------------------------------------------------


def random_weights(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Fill all matrices anew, where they are: some of the library's starts are so near 0 that
    nothing shows."""
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
    return model


def made(model_class: Any, config: Any, device: torch.device) -> torch.nn.Module:
    """A model with random weights, made on the device: a GPU fills 400 M numbers in no time."""
    with device:
        model = model_class(config)
    return random_weights(model.to(device))  # a few parameters are made on the CPU all the same


def random_detector(
    size: Size, *, device: str | torch.device = "cpu", batch_size: int = 16
) -> Mask2FormerDetector:
    """A detector that is sure of nothing: its class scores are about alike."""
    import torch
    from transformers import Mask2FormerForUniversalSegmentation

    where = torch.device(device)
    model = made(Mask2FormerForUniversalSegmentation, detector_config(size), where)
    return Mask2FormerDetector(model, device=where, batch_size=batch_size, weights=None)


def random_verifier(
    size: Size, *, device: str | torch.device = "cpu", batch_size: int = 16, cache_bytes: int = 0
) -> GenEvalVerifier:
    """All three models, judging by both rules; nothing is remembered unless asked for."""
    import torch
    from transformers import BlipForQuestionAnswering, CLIPModel

    where = torch.device(device)
    clip = made(CLIPModel, clip_config(size), where)
    blip = made(BlipForQuestionAnswering, blip_config(size), where)
    words, ends = clip.config.text_config.vocab_size, clip.config.text_config.eos_token_id
    placed = {"device": where, "weights": None}
    return GenEvalVerifier(
        random_detector(size, device=where, batch_size=batch_size),
        ClipColors(clip, AnyTokens(words, ends), batch_size=4 * batch_size, **placed),
        BlipVqa(blip, AnyTokens(MEASURED, 102), batch_size=2 * batch_size, **placed),
        rule="cross_checked",
        preset="ours",
        device=where,
        cache_bytes=cache_bytes,
    )
