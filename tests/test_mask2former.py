"""The detector: mmdet's tensors renamed without gaps, its pixels and its boxes.

python -m pytest tests/test_mask2former.py

With mmdet 2.28.2 beside it (random weights, CPU) the same was compared by hand: its input differs
by at most one grey level (mean .12: OpenCV computes in fixed point), class probabilities by 3e-6,
mask logits by 1e-4; labels, boxes, areas and masks made from the same logits are equal.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from eval.conversion import CONVERSION, WEIGHTS, save_converted
from eval.detector_speed import noise
from eval.detectors import MAX_SIDE, Mask2FormerDetector, as_seen, by_size
from eval.mask2former_images import Mask, finish, prepare, scaled_size
from eval.mask2former_keys import convert, convert_tensors, full_size_config, merged_neighbours
from eval.random_models import detector_config, random_detector
from umm_reflect.errors import CheckpointError

TENSORS = Path(__file__).resolve().parents[2] / "shared/data/mask2former_swin_s_mmdet_tensors.json"
QKV = "backbone.stages.2.blocks.7.attn.w_msa.qkv.weight"
SWIN = "model.pixel_level_module.encoder.swin.encoder.layers."


# --- names ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mmdet():
    """Random tensors under the 649 names that mmdet writes."""
    if not TENSORS.exists():
        pytest.skip("shared data: the list of mmdet's tensors is not there")
    generator = torch.Generator().manual_seed(0)
    shapes = json.loads(TENSORS.read_text())
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def full_size():
    from transformers import Mask2FormerForUniversalSegmentation

    with torch.device("meta"):
        return Mask2FormerForUniversalSegmentation(full_size_config())


def test_every_tensor_of_mmdet_finds_its_place_and_every_place_its_tensor(mmdet, full_size):
    converted = convert_tensors(mmdet, full_size)
    assert len(mmdet) == 649
    # 24 blocks' and 9 layers' query, key and value apart (weights and biases), less 24 indices
    assert len(converted) == 649 - 24 + 2 * 2 * (24 + 9)
    left = set(full_size.state_dict()) - set(converted)
    assert left == {
        "criterion.empty_weight",
        "model.pixel_level_module.encoder.swin.layernorm.weight",
        "model.pixel_level_module.encoder.swin.layernorm.bias",
    }
    assert len({id(tensor) for tensor in converted.values()}) == len(converted)


def test_values_are_carried_over_unchanged_or_as_stated(mmdet, full_size):
    converted = convert_tensors(mmdet, full_size)
    rows = dict(zip("qkv", mmdet[QKV].split(384), strict=True))
    for name, tensor in rows.items():
        assert torch.equal(converted[f"{SWIN}2.blocks.7.attention.{name}_proj.weight"], tensor)
    assert torch.equal(converted["class_predictor.bias"], mmdet["panoptic_head.cls_embed.bias"])
    levels = mmdet["panoptic_head.pixel_decoder.level_encoding.weight"]
    assert torch.equal(converted["model.pixel_level_module.decoder.level_embed"], levels)
    old = mmdet["backbone.stages.0.downsample.norm.weight"]  # 96 channels at four places
    new = converted[f"{SWIN}0.downsample.norm.weight"]
    # places: mmdet (0,0) (0,1) (1,0) (1,1); transformers (0,0) (1,0) (0,1) (1,1)
    for channel in (0, 1, 95):
        assert [float(new[place * 96 + channel]) for place in range(4)] == [
            float(old[channel * 4 + place]) for place in (0, 2, 1, 3)
        ]


def test_merging_neighbours_gives_the_same_numbers_in_both_orders():
    grid = torch.randn(3, 2, 2)  # channels, rows, columns
    of_mmdet = grid.flatten(1).flatten()  # channel by channel, as unfold has it
    of_transformers = torch.cat([grid[:, 0, 0], grid[:, 1, 0], grid[:, 0, 1], grid[:, 1, 1]])
    assert torch.equal(merged_neighbours(of_mmdet), of_transformers)


def test_the_names_of_mmdet_three_lead_to_the_same_places(mmdet, full_size):
    def newer(name):
        if "transformer_decoder" in name:
            name = name.replace("attentions.0.attn.", "cross_attn.attn.")
            name = name.replace("attentions.1.attn.", "self_attn.attn.")
        name = name.replace("attentions.0.", "self_attn.") if "pixel_decoder" in name else name
        return re.sub(r"ffns\.0\.", "ffn.", name)

    renamed = {newer(name): tensor for name, tensor in mmdet.items()}
    assert len(set(renamed) - set(mmdet)) > 100
    old, new = convert_tensors(mmdet, full_size), convert_tensors(renamed, full_size)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (
            lambda t: without(t, "panoptic_head.cls_embed.bias"),
            "nothing fills class_predictor.bias",
        ),
        (lambda t: without(t, QKV), "nothing fills .*q_proj"),
        (lambda t: {**t, "panoptic_head.extra": torch.zeros(1)}, "panoptic_head.extra: unknown"),
        (lambda t: {**t, "backbone.norm4.bias": torch.zeros(1)}, "the model has no .*stage5"),
        (lambda t: {**t, QKV: torch.zeros(1152, 383)}, "shape 384x383, not 384x384"),
        (
            lambda t: {**t, "panoptic_head.transformer_decoder.layers.0.ffn.layers.1.bias": t[
                "panoptic_head.transformer_decoder.layers.0.ffns.0.layers.1.bias"
            ]},
            "filled twice",
        ),
    ],
)  # fmt: skip
def test_a_planted_missing_extra_or_wrong_tensor_fails_and_is_named(
    mmdet, full_size, plant, message
):
    with pytest.raises(CheckpointError, match=message):
        convert_tensors(plant(mmdet), full_size)


def test_a_whole_file_is_converted_loaded_and_held_to_its_hash(mmdet, tmp_path):
    path, folder = tmp_path / "published.pth", tmp_path / "mask2former"
    torch.save({"meta": {"epoch": 50, "CLASSES": ("person",)}, "state_dict": mmdet}, path)
    with pytest.raises(CheckpointError, match="expected 743b7d99015f"):
        convert(path, folder)
    assert not folder.exists()
    convert(path, folder, sha256=None)
    detector = Mask2FormerDetector.load(folder, device="cpu")
    bias = mmdet["panoptic_head.cls_embed.bias"]
    assert torch.equal(detector.model.class_predictor.bias, bias)
    record = json.loads((folder / CONVERSION).read_text())
    assert detector.identity()["sha256"] == record["sha256"]
    assert detector.identity()["source_sha256"] == record["source_sha256"]


def test_a_file_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "evil.pth"
    torch.save({"state_dict": {"a": Path("/")}}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of plain tensors"):
        convert(path, tmp_path / "out", sha256=None)
    path.write_bytes(b"not a file of torch")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        convert(path, tmp_path / "out", sha256=None)


@pytest.fixture
def tiny_folder(tmp_path):
    model = random_detector("tiny").model
    config = detector_config("tiny").to_json_string()
    weights = {k: v for k, v in model.state_dict().items() if k != "criterion.empty_weight"}
    source = {"source_sha256": "0", "transformers": "5.24.0"}
    return save_converted(weights, tmp_path / "tiny", config, source)


def test_weights_that_were_changed_after_the_conversion_are_refused(tiny_folder):
    assert Mask2FormerDetector.load(tiny_folder, device="cpu").source == "0"
    data = bytearray((tiny_folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (tiny_folder / WEIGHTS).write_bytes(data)
    with pytest.raises(CheckpointError, match="was written with"):
        Mask2FormerDetector.load(tiny_folder, device="cpu")


def test_weights_under_other_names_are_refused_with_what_to_do(tiny_folder):
    from safetensors.torch import load_file

    weights = load_file(tiny_folder / WEIGHTS)
    weights["renamed"] = weights.pop("class_predictor.weight")
    config = (tiny_folder / "config.json").read_text()
    save_converted(weights, tiny_folder, config, {"transformers": "4.57.3"})
    with pytest.raises(CheckpointError, match=r"renamed is unknown.*missing.*transformers 4\.57"):
        Mask2FormerDetector.load(tiny_folder, device="cpu")


def test_a_detector_of_other_classes_is_refused(tiny_folder):
    path = tiny_folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("id2label")
    config.pop("label2id")
    path.write_text(json.dumps({**config, "num_labels": 150}))
    with pytest.raises(CheckpointError, match="150 classes"):
        Mask2FormerDetector.load(tiny_folder, device="cpu")


# --- pixels in ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "scaled"),
    [
        ((512, 512), (800, 800)),
        ((1024, 1024), (800, 800)),
        ((500, 700), (800, 1120)),
        ((333, 700), (634, 1333)),
        ((97, 61), (1272, 800)),
        ((1, 1), (800, 800)),
        ((1, 2048), (1, 1333)),
    ],
)
def test_images_are_scaled_as_mmdet_scales_them(size, scaled):
    assert scaled_size(*size) == scaled


def test_the_input_is_padded_with_mid_grey_and_normalised():
    white = torch.full((1, 333, 700, 3), 255, dtype=torch.uint8)
    batch, inside = prepare(white)
    assert inside == (634, 1333)
    assert batch.shape == (1, 3, 640, 1344)
    red = batch[0, 0]
    assert float(red[633, 1332]) == pytest.approx((255 - 123.675) / 58.395)
    assert float(red[634, 0]) == float(red[0, 1333]) == pytest.approx((128 - 123.675) / 58.395)
    assert float(batch[0, 2, -1, -1]) == pytest.approx((128 - 103.53) / 57.375)


def test_resizing_does_not_smooth_and_rounds_to_whole_levels():
    stripes = torch.zeros(1, 1600, 1600, 3, dtype=torch.uint8)
    stripes[:, :, 1::2] = 255
    batch, _ = prepare(stripes)  # 1600 -> 800: each output lies midway between two columns
    levels = batch[0, 0] * 58.395 + 123.675
    assert torch.allclose(levels, torch.full_like(levels, 128.0), atol=1e-3)  # 127.5 to even


def test_large_images_are_reduced_and_turned_upright_first():
    assert as_seen(Image.new("L", (12_000, 3_000))).size == (MAX_SIDE, MAX_SIDE // 4)
    assert as_seen(Image.new("RGBA", (1, 1))).mode == "RGB"
    assert as_seen(Image.new("RGB", (12_000, 1))).size == (MAX_SIDE, 1)
    turned = Image.new("RGB", (30, 20))
    turned.getexif()[274] = 6  # lay on its side
    assert as_seen(turned).size == (20, 30)


# --- objects out ----------------------------------------------------------------------------------


def finished(classes, masks, **more):
    size = masks.shape[-2:]
    return finish(classes[None], masks[None], size, size, tuple(size), **more)[0]


def test_an_instance_has_mmdets_score_and_tight_box():
    classes = torch.full((1, 3), -50.0)
    classes[0, 1] = 0.0  # two classes and nothing; the second class is certain
    masks = torch.full((1, 6, 8), -4.0)
    masks[0, 1:4, 2:7] = 2.0
    (best,) = finished(classes, masks, floor=0.01)
    sure = 1 / (1 + np.exp(-2.0))
    assert (best.label, best.box, best.area) == (1, (2, 1, 7, 4), 15)
    assert best.score == pytest.approx(sure, rel=1e-5)
    assert best.mask.inside_box().all()


def test_a_query_may_be_of_two_classes_and_shares_its_mask():
    classes = torch.tensor([[2.0, 2.0, 1.0]])
    masks = torch.full((1, 4, 4), -1.0)
    masks[0, 0, 0] = masks[0, 3, 3] = 9.0
    first, second = finished(classes, masks)
    assert {first.label, second.label} == {0, 1}
    assert first.box == second.box == (0, 0, 4, 4)
    assert first.area == 2
    assert first.mask.inside_box().sum() == 2


def test_an_empty_mask_scores_nothing_and_the_floor_keeps_it_out():
    classes, masks = torch.tensor([[5.0, 0.0]]), torch.full((1, 4, 4), -1.0)
    assert finished(classes, masks) == []


def test_no_more_than_a_hundred_pairs_are_kept_and_the_best_come_first():
    classes = torch.randn(2, 81, generator=torch.Generator().manual_seed(0))
    found = finished(classes, torch.ones(2, 4, 4))
    assert len(found) == 100
    scores = [one.score for one in found]
    assert scores == sorted(scores, reverse=True)


def test_masks_are_cut_at_the_padding_before_they_are_resized():
    masks = torch.full((1, 1, 8, 8), -5.0)
    masks[..., :4] = 5.0  # the left half of the input
    found = finish(torch.tensor([[[9.0, 0.0]]]), masks, (32, 32), (32, 16), (64, 32))
    assert found[0][0].box == (0, 0, 32, 64)  # the image is the left half of the input


def test_a_mask_is_kept_as_one_bit_a_pixel_of_its_box():
    pixels = np.zeros((9, 11), bool)
    pixels[2:7, 3:10] = np.random.default_rng(0).random((5, 7)) > 0.5
    mask = Mask.of(pixels, (3, 2, 10, 7))
    assert len(mask.bits) == 5  # 35 bits
    assert (mask.inside_box() == pixels[2:7, 3:10]).all()


# --- the detector ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def detector():
    made = random_detector("tiny", batch_size=3)
    made.floor = 0.0
    return made


def test_images_of_several_sizes_keep_their_order_and_results_in_a_batch(detector):
    images = noise(4, 64)
    images[1] = images[1].resize((64, 40))
    together = detector.detect(images)
    for image, found in zip(images, together, strict=True):
        (alone,) = detector.detect([image])
        assert len(found) == len(alone) > 0
        for one, other in zip(found, alone, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-4)
        assert max(one.box[2] for one in found) <= image.width


def test_images_of_one_size_run_together():
    images = [Image.new("RGB", size) for size in ((8, 8), (9, 8), (8, 8), (8, 8), (9, 8))]
    assert list(by_size(images, 2)) == [[0, 2], [3], [1, 4]]


def test_a_picture_of_one_pixel_is_looked_at(detector):
    (found,) = detector.detect([Image.new("RGB", (1, 1), "red")])
    assert all(one.box in ((0, 0, 1, 1), (0, 0, 0, 0)) for one in found)


def test_weights_that_are_no_numbers_are_an_error():
    broken = random_detector("tiny")
    broken.model.class_predictor.bias.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="no numbers"):
        broken.detect([Image.new("RGB", (8, 8))])
