"""A random two-layer BAGEL on disk, for tests that need a checkpoint but not a trained one.

    from tests.tiny import write_tiny_checkpoint
    folder = write_tiny_checkpoint(tmp_path / "tiny", seed=0)
    bagel = Bagel.from_pretrained(folder, device="cpu", dtype="float32")

Weights are far from zero, the two experts differ, the head has clear favourites, and everything is
stored as in the release (bf16 weights, fp32 VAE, BAGEL's names, Qwen2.5's special tokens).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models
from tokenizers import pre_tokenizers as splits
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from sft.tokenizer import PLAIN_TOKENS, SPECIAL_TOKENS
from umm_reflect.autoencoder import AutoEncoder
from umm_reflect.config import BagelConfig, LLMConfig, VAEConfig, ViTConfig
from umm_reflect.model import Bagel
from umm_reflect.tokens import qwen2_pipeline

TINY = BagelConfig(
    llm=LLMConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        vocab_size=448,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
    ),
    vit=ViTConfig(
        hidden_size=24,
        num_layers=2,
        num_heads=2,
        intermediate_size=48,
        patch_size=14,
        grid_side=8,
        layer_norm_eps=1e-6,
    ),
    vae=VAEConfig(
        resolution=64,
        in_channels=3,
        out_ch=3,
        ch=8,
        ch_mult=(1, 1, 2, 2),
        num_res_blocks=1,
        z_channels=4,
        downsample=8,
        scale_factor=0.5,
        shift_factor=0.1,
        num_groups=4,
    ),
    latent_patch_size=2,
    latent_grid_side=8,
)

ADDED_TOKENS = (*SPECIAL_TOKENS, *PLAIN_TOKENS)

CORPUS = (
    "two red circles and a blue square left of a green triangle",
    "<think>\n[CURRENT_ROUND] Round#1\n[SCORE] 7.5\n</think>\nACTION: edit\nadd a yellow star",
    "The picture shows three purple hearts. One is missing, so the score is low.",
    "make the sky darker above the moon; remove the second ring, keep the rest as it is",
)


def write_tiny_checkpoint(folder: str | Path, seed: int = 0) -> Path:
    """Writes a complete checkpoint folder (about 0.4 MB) and returns it; one seed, one content."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    _write_tokenizer(tokenizer, folder)
    TINY.to_files(
        folder,
        bos_token_id=tokenizer.token_to_id("<|endoftext|>"),
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
    )
    generator = torch.Generator().manual_seed(seed)
    tables = ("latent_pos_embed.pos_embed", "vit_pos_embed.pos_embed")
    weights = {
        name: tensor.clone() if name in tables else _random(name, tensor, generator).bfloat16()
        for name, tensor in Bagel(TINY).state_dict().items()
    }
    save_file(weights, folder / "ema.safetensors")
    vae = AutoEncoder(TINY.vae).state_dict()
    save_file(
        {name: _random(name, tensor, generator) for name, tensor in vae.items()},
        folder / "ae.safetensors",
    )
    return folder


def _random(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    draw = torch.randn(like.shape, generator=generator)
    if like.ndim == 1:
        is_scale = "norm" in name and name.endswith("weight")
        return 1 + 0.2 * draw if is_scale else 0.1 * draw
    if name.endswith("embed_tokens.weight"):
        return draw
    gain = 3.0 if name.endswith("lm_head.weight") else 1.0
    return gain * draw / like[0].numel() ** 0.5


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE of 400 entries with Qwen2.5's split, and its 22 special tokens after."""
    tokenizer = qwen2_pipeline(models.BPE())
    trainer = BpeTrainer(
        vocab_size=400, initial_alphabet=splits.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens(_added_tokens())
    return tokenizer


def _added_tokens() -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=token in SPECIAL_TOKENS)
        for token in ADDED_TOKENS
    ]


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in ADDED_TOKENS
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
