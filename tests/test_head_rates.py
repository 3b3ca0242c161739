"""A learning rate for what speaks and one for what draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.learning import batch_of, learner_of, tiny_bagel, update
from umm_reflect.training.learner import OptimizerSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_bagel(folder)
    return folder


def test_each_head_has_its_own_learning_rate(folder):
    """AdamW's first step moves a number by its rate, whatever the gradient's size."""
    bagel = tiny_bagel(folder)
    before = {name: p.detach().clone() for name, p in bagel.named_parameters()}
    settings = OptimizerSettings(lr=1e-3, flow_lr=4e-3, eps=1e-12)
    learner = learner_of(bagel, settings=settings)
    update(learner, [batch_of(bagel, 0)], 0.5)
    layer = "language_model.model.layers.0."
    for name, rate in (
        (layer + "mlp.up_proj.weight", 5e-4),
        ("language_model.lm_head.weight", 5e-4),
        ("vit_model.vision_model.post_layernorm.weight", 5e-4),
        (layer + "mlp_moe_gen.up_proj.weight", 2e-3),
        (layer + "self_attn.q_proj_moe_gen.bias", 2e-3),
        ("llm2vae.weight", 2e-3),
        ("time_embedder.mlp.0.weight", 2e-3),
    ):
        moved = (bagel.get_parameter(name) - before[name]).abs()
        assert moved.max().item() == pytest.approx(rate, rel=1e-2), name


def test_equal_rates_of_both_heads_are_one_rate_bit_for_bit(folder):
    learned = []
    for flow_lr in (None, 2e-3):
        bagel = tiny_bagel(folder)
        settings = OptimizerSettings(lr=2e-3, eps=1e-5, weight_decay=0.1, flow_lr=flow_lr)
        learner = learner_of(bagel, settings=settings)
        for step in range(2):
            update(learner, [batch_of(bagel, step)])
        learned.append(dict(learner.state_dict()))
    for name, tensor in learned[0].items():
        assert torch.equal(tensor, learned[1][name]), name
