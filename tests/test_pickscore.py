"""PickScore on a tiny CLIP of random weights, against transformers' own logits, one by one."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from eval.rewards.registry import build
from umm_reflect.errors import CheckpointError, UserError

PROMPTS = ["a red circle", "two stars left of a moon", "a red circle", "red " * 200]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A CLIP of two small towers, with its processor."""
    folder = tmp_path_factory.mktemp("clip")
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4}
    config = CLIPConfig(
        text_config={
            **size,
            **heads,
            "vocab_size": len(words),
            "bos_token_id": len(words) - 2,
            "eos_token_id": len(words) - 1,
        },
        vision_config={**size, **heads, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    torch.manual_seed(0)
    model = CLIPModel(config)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    CLIPProcessor(CLIPImageProcessor(**sizes), tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def reward(folder):
    settings = {"model": str(folder), "processor": str(folder), "device": "cpu", "batch_size": 3}
    reward = build({"reward": "pickscore", **settings})
    yield reward
    reward.close()


def pictures() -> list[Image.Image]:
    return [
        Image.radial_gradient("L").resize((48, 48)).convert("RGB"),
        Image.new("RGB", (64, 40), "red"),
        Image.new("L", (1, 1), 30),
        Image.linear_gradient("L").convert("RGB"),
    ]


def test_batches_equal_the_librarys_logits_one_by_one(folder, reward):
    model, processor = CLIPModel.from_pretrained(folder), CLIPProcessor.from_pretrained(folder)
    expected = []
    for image, prompt in zip(pictures(), PROMPTS, strict=True):
        inputs = processor(
            text=[prompt],
            images=[image.convert("RGB")],
            truncation=True,
            max_length=77,
            return_tensors="pt",
        )
        with torch.inference_mode():
            expected.append(model(**inputs).logits_per_image.item() / 26)
    found = reward.score(pictures(), [{"prompt": prompt} for prompt in PROMPTS])
    assert [v.value for v in found] == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 4
    assert all(v.score == min(1, max(0, v.value)) and v.correct is None for v in found)


def test_equal_prompts_are_encoded_once(reward, monkeypatch):
    seen = []
    encode = reward._texts
    monkeypatch.setattr(reward, "_texts", lambda prompts: seen.append(prompts) or encode(prompts))
    reward.score(pictures(), [{"prompt": prompt} for prompt in PROMPTS])
    assert seen == [[PROMPTS[0], PROMPTS[1], PROMPTS[3]]]


def test_random_weights_fail_the_check_and_are_named_by_their_hash(folder, reward):
    with pytest.raises(UserError, match=r"pickscore does not tell .*sha256") as caught:
        reward.check()
    assert reward.manifest()["sha256"]["model.safetensors"] in str(caught.value)


def test_it_scores_again_after_it_was_offloaded(reward):
    rows = [{"prompt": "a star"}] * 4
    before = reward.score(pictures(), rows)
    reward.offload()
    assert reward.score(pictures(), rows) == before
    assert reward.score([], []) == []


def test_a_row_without_a_prompt_is_refused(reward):
    with pytest.raises(ValueError, match=r"no prompt .its keys: tag"):
        reward.score(pictures()[:1], [{"tag": "x"}])


def test_weights_that_lack_a_tensor_are_an_error_and_no_warning(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("visual_projection.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    settings = {"model": str(tmp_path), "processor": str(folder), "device": "cpu"}
    with pytest.raises(CheckpointError, match=r"CLIPModel: visual_projection.weight is missing"):
        build({"reward": "pickscore", **settings})
