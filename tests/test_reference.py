"""The fast path against the naive reference on a random tiny checkpoint."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file

from tests.recorder import record_golden
from tests.tiny import write_tiny_checkpoint
from umm_reflect import parity
from umm_reflect.parity_fast import FastImplementation
from umm_reflect.parity_golden import Golden
from umm_reflect.parity_implementations import (
    Branches,
    Guidance,
    ReferenceImplementation,
    TrainLatents,
    TrainText,
    VAEPicture,
)
from umm_reflect.reference import Text, ViTImage


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[FastImplementation, ReferenceImplementation]:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)
    return FastImplementation(folder), ReferenceImplementation(folder)


@pytest.fixture(scope="module")
def contexts(pair) -> dict[str, list]:
    generator = torch.Generator().manual_seed(5)
    picture = torch.rand(3, 48, 64, generator=generator) * 2 - 1
    looked_at = torch.rand(3, 42, 56, generator=generator) * 2 - 1
    asked = Text(tuple(pair[1].encode("two red circles and a blue square")))
    edit = Text(tuple(pair[1].encode("make the sky darker")))
    both = [VAEPicture(picture), ViTImage(looked_at)]
    return {
        "text": [asked],
        "two texts": [asked, edit],
        "look": [ViTImage(looked_at), edit],
        "edit": [asked, *both, edit],
        "ends with latents": [asked, both[0]],
        "pictures": [*both],
        "empty": [],
    }


def assert_same(actual, expected, tolerance: float = 2e-5) -> None:
    """Every tensor field of two records agrees."""
    for field in fields(expected):
        left, right = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(right, torch.Tensor):
            assert torch.allclose(left, right, atol=tolerance, rtol=tolerance), field.name
        elif isinstance(right, list) and right and isinstance(right[0], torch.Tensor):
            for one, other in zip(left, right, strict=True):
                assert torch.allclose(one, other, atol=tolerance, rtol=tolerance), field.name
        elif not isinstance(right, dict):
            assert left == right, field.name


def test_the_tiny_checkpoint_is_the_same_for_one_seed_and_another_for_another(tmp_path):
    one, same, other = (
        load_file(write_tiny_checkpoint(tmp_path / name, seed) / "ema.safetensors")
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    key = "language_model.model.layers.1.mlp_moe_gen.up_proj.weight"
    assert not torch.equal(one[key], other[key])


def test_ragged_prefill_equals_the_reference_for_text_image_and_mixed_contexts(pair, contexts):
    fast, naive = pair
    batch = [contexts[name] for name in ("two texts", "look", "edit", "ends with latents", "empty")]
    for actual, expected in zip(fast.prefill(batch), naive.prefill(batch), strict=True):
        assert (actual.length, actual.position) == (expected.length, expected.position)
        assert torch.allclose(actual.kv, expected.kv, atol=2e-5)
        if expected.length:
            assert torch.allclose(actual.hidden, expected.hidden, atol=2e-5)
            assert torch.allclose(actual.logits, expected.logits, atol=1e-4)


@pytest.mark.parametrize("name", ["text", "look", "edit"])
def test_greedy_text_equals_the_reference(name, pair, contexts):
    fast, naive = pair
    words, logits = fast.greedy(contexts[name], 8)
    expected_words, expected_logits = naive.greedy(contexts[name], 8)
    assert words == expected_words
    assert torch.allclose(logits, expected_logits, atol=1e-4)


@pytest.mark.parametrize("renorm", ["global", "channel", "text_channel"])
def test_drawing_two_pictures_with_guidance_equals_the_reference(renorm, pair, contexts):
    fast, naive = pair
    branches = [
        Branches(contexts["edit"], contexts["pictures"], contexts["two texts"]),
        Branches(contexts["text"], contexts["empty"], contexts["text"]),
    ]
    guidance = Guidance(
        points=4,
        shift=3.0,
        text_scale=4.0,
        image_scale=1.5,
        interval=(0.7, 1.0),
        renorm=renorm,
        renorm_min=0.2,
        norm_over="image",
    )
    grids = [(3, 4), (2, 2)]
    x = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(7))
    drawn = fast.draw(branches, grids, x, guidance)
    expected = naive.draw(branches, grids, x, guidance)
    assert expected.on == [True, True, False]
    assert not torch.equal(expected.guided[0], expected.cond[0])
    assert_same(drawn, expected)


def test_packed_training_equals_the_reference_sample_by_sample_in_losses_and_gradients(
    pair, contexts
):
    fast, naive = pair
    generator = torch.Generator().manual_seed(11)

    def latents(grid, raw_time):
        n = grid[0] * grid[1]
        tokens, noise = torch.randn(2, n, 16, generator=generator)
        return TrainLatents(tokens, grid, raw_time, noise)

    def scored(text, end_label=None):
        ids = tuple(naive.encode(text))
        labels = dict(enumerate((*ids, naive.special_ids["end"])))
        if end_label is not None:
            labels[len(ids) + 1] = end_label
        return TrainText(ids, labels)

    looked_at = contexts["look"][0]
    target = latents((3, 4), 0.3)
    clean = TrainLatents(target.tokens, target.grid, float("-inf"), target.noise)
    samples = [
        [TrainText(tuple(naive.encode("a star")), {}), latents((2, 2), -0.7)],
        [looked_at, scored("one is missing")],
        [
            target,
            clean,
            looked_at,
            scored("remove the ring", end_label=naive.special_ids["image_start"]),
            latents((2, 3), 1.1),
        ],
    ]
    actual, expected = fast.train(samples, shift=3.0), naive.train(samples, shift=3.0)
    assert_same(actual, expected)
    for name, gradient in expected.gradients.items():
        found = actual.gradients.get(name)
        if gradient is None:
            assert found is None, name
        else:
            assert torch.allclose(found, gradient, atol=2e-5, rtol=1e-3), name


# --- a golden folder of our own -------------------------------------------------------------------


def test_parity_reads_any_golden_folder_of_the_format(tmp_path):
    golden = Golden(record_golden(tmp_path))
    report = parity.run(golden, FastImplementation(golden.checkpoint))
    assert report.exit_code == 0, "\n".join(report.lines())
    groups = set(report.groups())
    assert {"gen_story.two", "gen_story.local", "gen_story.all_rounds", "und.story"} <= groups
    assert {"train.shift2", "text.again", "manifest.json.conventions.special_ids"} <= groups
