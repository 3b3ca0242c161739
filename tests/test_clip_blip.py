"""CLIP's colours and BLIP's answers against the library's own path, on tiny random weights.

python -m pytest tests/test_clip_blip.py
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from eval.blip_vqa import BlipVqa, convert, convert_tensors, question
from eval.clip_colors import GREY, TEMPLATES, ClipColors, centre_square, normalised, on_grey
from eval.conversion import WEIGHTS
from eval.detector_speed import noise
from eval.detectors import Found
from eval.mask2former_images import Mask
from eval.random_models import AnyTokens, blip_config, clip_config, random_weights
from umm_reflect.errors import CheckpointError
from umm_reflect.shapes.scene import COLORS

CPU = torch.device("cpu")


def crops(many):
    sizes = [(40, 30), (200, 60), (14, 92), (64, 64), (1, 7), (301, 299)]
    return [image.resize(sizes[i % len(sizes)]) for i, image in enumerate(noise(many, 64))]


# --- CLIP -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip():
    from transformers import CLIPModel

    return random_weights(CLIPModel(clip_config("tiny"))).eval()


def tokens_of(model):
    words, ends = model.config.text_config.vocab_size, model.config.text_config.eos_token_id
    return AnyTokens(words, ends)


@pytest.fixture(scope="module")
def colors(clip):
    return ClipColors(clip, tokens_of(clip), device=CPU, batch_size=4, weights=None)


def test_the_probabilities_are_those_of_the_librarys_own_forward(clip, colors):
    (picture,) = noise(1, 56)
    sentences = [t.format(c=c, k="bench") for c in COLORS for t in TEMPLATES]
    tokens = tokens_of(clip)(sentences)
    with torch.inference_mode():
        out = clip(pixel_values=normalised([picture], CPU), **tokens)
    texts = out.text_embeds / out.text_embeds.norm(dim=-1, keepdim=True)
    means = torch.stack([texts[i : i + 3].mean(0) for i in range(0, 30, 3)])
    means = means / means.norm(dim=-1, keepdim=True)
    image = out.image_embeds / out.image_embeds.norm(dim=-1, keepdim=True)
    expected = (100 * image @ means.T).softmax(-1)[0]
    (found,) = colors.probabilities([picture], ["bench"])
    assert found == pytest.approx(expected.tolist(), abs=1e-5)
    assert sum(found) == pytest.approx(1)
    assert max(found) > 0.2


def test_the_three_sentences_are_genevals():
    assert [t.format(c="orange", k="cow") for t in TEMPLATES] == [
        "a photo of a orange cow",
        "a photo of a orange-colored cow",
        "a photo of a orange object",
    ]


def test_crops_are_prepared_as_the_librarys_processor_prepares_them():
    # (apart from an odd rest, which the library cuts one pixel before torchvision and we do)
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    for crop in crops(6):
        theirs = processor(images=crop, return_tensors="pt")["pixel_values"]
        ours = normalised([centre_square(crop, 56)], CPU)
        assert float((theirs - ours).abs().max()) < 1.01 / 255 / 0.26  # one grey level


def test_a_thin_crop_costs_no_more_than_a_square_one():
    assert centre_square(Image.new("RGB", (1, 4000), "red"), 224).size == (224, 224)
    assert centre_square(Image.new("RGB", (4000, 1), "red"), 224).getpixel((9, 9)) == (255, 0, 0)


def test_only_the_middle_of_a_long_crop_is_seen():
    crop = Image.new("RGB", (300, 100), "blue")
    crop.paste("red", (100, 0, 200, 100))
    middle = np.asarray(centre_square(crop, 50))[:, 5:45]
    assert (middle == (255, 0, 0)).all()


def test_a_batch_gives_what_single_crops_give(colors):
    some = crops(6)
    kinds = ["bench", "dog", "bench", "cat", "dog", "dog"]
    together = colors.probabilities(some, kinds)
    for crop, kind, row in zip(some, kinds, together, strict=True):
        assert colors.probabilities([crop], [kind])[0] == pytest.approx(row, abs=1e-5)


def test_another_activation_is_refused(clip):
    from transformers import CLIPModel

    config = clip_config("tiny")
    config.vision_config.hidden_act = "gelu"
    with pytest.raises(CheckpointError, match=r"'gelu'.*quick_gelu"):
        ClipColors(CLIPModel(config), tokens_of(clip), device=CPU, batch_size=1, weights="")


def test_a_tokenizer_without_its_files_is_refused(clip, tmp_path):
    from transformers import CLIPTokenizer

    clip.save_pretrained(tmp_path)
    CLIPTokenizer().save_pretrained(tmp_path)  # what a missing vocabulary loads as
    with pytest.raises(CheckpointError, match="its tokenizer knows"):
        ClipColors.load(tmp_path, device="cpu")


def test_a_folder_is_loaded_and_one_with_a_missing_weight_is_refused(clip, tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import CLIPTokenizer

    words = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    words |= {f"w{i}": i for i in range(2, clip.config.text_config.vocab_size)}
    clip.save_pretrained(tmp_path)
    CLIPTokenizer(vocab=words, merges=[]).save_pretrained(tmp_path)
    loaded = ClipColors.load(tmp_path, device="cpu")
    assert torch.equal(loaded.model.visual_projection.weight, clip.visual_projection.weight)
    assert len(loaded.identity()["sha256"]) == 64
    weights = load_file(tmp_path / WEIGHTS)
    del weights["visual_projection.weight"]
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"visual_projection\.weight is missing"):
        ClipColors.load(tmp_path, device="cpu")


def test_an_object_stands_on_grey_where_its_pixels_are_known():
    image = Image.new("RGB", (8, 8), "green")
    image.paste("red", (2, 2, 5, 5))
    pixels = np.zeros((8, 8), bool)
    pixels[2:5, 2:4] = True  # the object's own pixels: two of its three columns
    box = (2, 2, 5, 5)
    crop = np.asarray(on_grey(image, Found("dog", 0.9, box, 6, Mask.of(pixels, box))))
    assert crop.shape == (3, 3, 3)
    assert (crop[:, :2] == (255, 0, 0)).all()
    assert (crop[:, 2] == GREY).all()
    assert on_grey(image, Found("dog", 0.9, box, 9)).getpixel((2, 2)) == (255, 0, 0)


# --- BLIP -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blip():
    from transformers import BlipForQuestionAnswering

    return random_weights(BlipForQuestionAnswering(blip_config("tiny"))).eval()


@pytest.fixture(scope="module")
def vqa(blip):
    return BlipVqa(blip, AnyTokens(30524, 102), device=CPU, batch_size=2, weights=None)


def test_the_answer_is_that_of_the_librarys_own_generation(blip, vqa):
    (picture,) = noise(1, 32)
    tokens = AnyTokens(30524, 102)(["red dog?"])
    tokens["input_ids"][:, 0] = 30523
    out = blip.generate(
        **tokens,
        pixel_values=normalised([picture], CPU),
        max_new_tokens=1,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    yes, no = out.scores[0][0, [2748, 2053]].tolist()
    expected = 1 / (1 + np.exp(no - yes))
    assert vqa.yes([picture], ["red dog?"]) == pytest.approx([expected], abs=1e-5)


def test_questions_are_lower_case_without_double_spaces():
    assert question("red", "dog") == "red dog?"
    assert question("Red", " Wine  Glass") == "red wine glass?"


def test_a_batch_of_questions_gives_what_single_ones_give(vqa):
    some = crops(3)
    asked = [(some[0], "red dog?"), (some[1], "red dog?"), (some[0], "blue dog?")]
    asked += [(some[2], "a cat?"), (some[1], "a cat?")]
    together = vqa.yes(*map(list, zip(*asked, strict=True)))
    assert len(set(together)) == 5
    for (crop, text), answer in zip(asked, together, strict=True):
        assert vqa.yes([crop], [text]) == pytest.approx([answer], abs=1e-5)


def test_an_image_about_which_much_is_asked_is_looked_at_once(vqa, monkeypatch):
    looked = []
    see = vqa._see
    monkeypatch.setattr(vqa, "_see", lambda crops: looked.append(len(crops)) or see(crops))
    picture = crops(1)[0]
    vqa.yes([picture] * 4, ["red dog?", "blue dog?", "red cat?", "blue cat?"])
    assert looked == [1]


def test_a_vocabulary_without_yes_and_no_is_refused(blip):
    class Empty(AnyTokens):
        def convert_tokens_to_ids(self, token):
            return self.unk_token_id

    with pytest.raises(CheckpointError, match="yes and no"):
        BlipVqa(blip, Empty(30524, 102), device=CPU, batch_size=1, weights=None)


def salesforce(name):
    """transformers' name -> BLIP's own, written backwards and apart from the converter."""
    name = name.replace("vision_model.embeddings.class_embedding", "visual_encoder.cls_token")
    name = name.replace("vision_model.embeddings.position_embedding", "visual_encoder.pos_embed")
    name = name.replace(
        "vision_model.embeddings.patch_embedding.", "visual_encoder.patch_embed.proj."
    )
    name = name.replace("vision_model.post_layernorm.", "visual_encoder.norm.")
    name = name.replace("vision_model.encoder.layers.", "visual_encoder.blocks.")
    if name.startswith("visual_encoder"):
        name = name.replace("self_attn.projection", "attn.proj").replace("self_attn", "attn")
        name = re.sub(r"layer_norm([12])", r"norm\1", name)
    return name


def test_blips_own_names_are_converted_without_gaps(blip):
    own = {salesforce(name): tensor for name, tensor in blip.state_dict().items()}
    own["text_encoder.embeddings.position_ids"] = torch.arange(512)[None]
    assert "visual_encoder.blocks.1.attn.qkv.weight" in own
    converted = convert_tensors(own, blip)
    # the decoder's last matrix and bias are others under a second name
    assert len(converted) == len(blip.state_dict()) - 2
    assert all(torch.equal(v, blip.state_dict()[k]) for k, v in converted.items())
    with pytest.raises(CheckpointError, match="differs from"):
        convert_tensors({**own, "text_decoder.cls.predictions.bias": torch.ones(30524)}, blip)
    with pytest.raises(CheckpointError, match=r"visual_encoder\.extra: unknown"):
        convert_tensors({**own, "visual_encoder.extra": torch.zeros(1)}, blip)
    del own["visual_encoder.norm.bias"]
    with pytest.raises(CheckpointError, match=r"nothing fills vision_model\.post_layernorm\.bias"):
        convert_tensors(own, blip)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A tokenizer of BERT's size that knows what is asked here."""
    from transformers import BertTokenizer

    known = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]", 2053: "no"}
    known |= {2748: "yes", 2417: "red", 3899: "dog", 1029: "?"}
    vocab = {known.get(i, f"[unused{i}]"): i for i in range(30522)}
    folder = tmp_path_factory.mktemp("bert")
    BertTokenizer(vocab=vocab).save_pretrained(folder)
    return folder


def test_a_whole_file_of_blip_is_converted_with_its_tokenizer_and_loaded(
    blip, bert, tmp_path, monkeypatch
):
    import eval.blip_vqa as module

    def small(side):
        assert side == 32  # from the number of positions: 1 + (32 / 16) squared
        return blip_config("tiny")

    monkeypatch.setattr(module, "full_size_config", small)
    path, folder = tmp_path / "blip.pth", tmp_path / "blip-vqa"
    own = {salesforce(name): tensor for name, tensor in blip.state_dict().items()}
    torch.save({"model": own}, path)
    with pytest.raises(CheckpointError, match="expected 7a7d546209f1"):
        convert(path, folder, tokenizer=bert)
    convert(path, folder, tokenizer=bert, sha256=None)
    loaded = BlipVqa.load(folder, device="cpu")
    ids = loaded.tokenizer(["red dog?"])["input_ids"]
    assert list(ids[0]) == [101, 2417, 3899, 1029, 102]
    assert torch.equal(loaded.model.vision_model.post_layernorm.bias, (
        blip.vision_model.post_layernorm.bias))  # fmt: skip
    assert 0 < loaded.yes([Image.new("RGB", (9, 9))], ["red dog?"])[0] < 1
    record = json.loads((folder / "conversion.json").read_text())
    assert loaded.identity()["sha256"] == record["sha256"]
