"""A random Qwen2.5-VL on disk, small enough for a test, complete enough for vLLM.

folder = write_tiny_qwen_vl(tmp_path / "qwen-vl")     # heads of 64, two layers, 4 MB

Its tokenizer is the one of tests/tiny.py with Qwen's own special tokens; its chat template is a
short one of ours in Qwen's form.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, models
from tokenizers import pre_tokenizers as splits
from tokenizers.trainers import BpeTrainer

from tests.tiny import CORPUS
from umm_reflect.tokens import qwen2_pipeline

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') or 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_qwen_vl(folder: str | Path, seed: int = 0) -> Path:
    """Writes weights, configs and processor files; one seed, one content."""
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
    )

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = qwen2_pipeline(models.BPE())
    trainer = BpeTrainer(
        vocab_size=400, initial_alphabet=splits.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    text = {
        "vocab_size": 448,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 8, 8],
        },
        "tie_word_embeddings": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 1,
        "out_hidden_size": 128,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            gain = 2.0 if "lm_head" in name or "embed" in name else 1.0
            fan = parameter[0].numel()
            parameter.data = gain * torch.randn_like(parameter) / fan**0.5
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in SPECIAL if "vision" in t or "pad" in t],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    _write_processor(folder)
    return folder


def _write_processor(folder: Path) -> None:
    """The files of Qwen2.5-VL's processor; images of 28 x 28 up to 448 x 448 pixels."""
    import json

    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "Qwen2Tokenizer"
    config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 28 * 28,
        "max_pixels": 448 * 448,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=1))
