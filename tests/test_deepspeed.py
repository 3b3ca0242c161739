"""DeepSpeed ZeRO-2 and ZeRO-3 on the CPU (gloo): the losses of one plain process, and states that
every strategy reads.

DeepSpeed is an extra: without it these tests are not there, but for the one of its error.
"""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

import pytest
import torch

from tests.learning import batch_of, learner_of, run_processes, tiny_bagel, update
from umm_reflect.adapters import attach_lora
from umm_reflect.decode import _obstacle
from umm_reflect.errors import UserError
from umm_reflect.training.learner import OptimizerSettings
from umm_reflect.training.processes import Processes, start
from umm_reflect.training.resume import load_resume, save_resume

INSTALLED = importlib.util.find_spec("deepspeed") is not None
STEPS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_bagel(folder)
    return folder


def go_on(processes: Processes, folder: Path, out: Path, strategy: str, first: int, end: int):
    """Load what is there, train on two batches an update (one of texts), save."""
    bagel = tiny_bagel(folder)
    learner = learner_of(bagel, processes, strategy, recompute=True)
    if first:
        assert load_resume(out, learner)[0] == first
    losses = []
    for step in range(first, end):
        batches = [batch_of(bagel, 2 * step + k, ("both", "text")[k]) for k in range(2)]
        mine = batches[processes.rank :: processes.world]
        losses.append(update(learner, mine, 1 / (1 + step)).tolist())
    save_resume(out, learner, end, {})
    weights = dict(learner.weights(dtype=torch.float32))
    return torch.tensor(losses), weights, learner.module


def zero(processes: Processes, folder: Path, out: Path, stage: int, first: int, end: int) -> dict:
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}
    losses, weights, engine = go_on(processes, folder, out, "deepspeed", first, end)
    matrix = engine.module.bagel.connector.fc1.weight
    return {
        "losses": losses,
        "weights": weights,
        "wrapped": type(engine).__name__,
        "stage": engine.zero_optimization_stage(),
        "here": matrix.ds_tensor.numel() if stage == 3 else matrix.numel(),
    }


if INSTALLED:

    @pytest.mark.parametrize("stage", [2, 3])
    def test_two_processes_learn_as_one_and_states_go_to_other_strategies(folder, tmp_path, stage):
        plain = [go_on(Processes(), folder, tmp_path / "plain", "none", *span) for span in SPANS]
        out = tmp_path / "moved"
        parts = [go_on(Processes(), folder, out, "none", *SPANS[0])[0]]
        one, two = run_processes(zero, 2, folder, out, stage, *SPANS[1])
        for result in (one, two):
            assert result["wrapped"] == "DeepSpeedEngine"
            assert result["stage"] == stage
            assert result["here"] == (24 * 32 // 2 if stage == 3 else 24 * 32)
        assert not two["weights"]
        for name, tensor in plain[1][1].items():
            torch.testing.assert_close(one["weights"][name], tensor, atol=2e-5, rtol=0, msg=name)
        parts += [one["losses"], go_on(Processes(), folder, out, "none", *SPANS[2])[0]]
        expected = torch.cat([losses for losses, _, _ in plain])
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("stage", [2, 3])
    def test_bf16_lora_fp32_masters_a_nan_and_drawing(folder, stage):
        [result] = run_processes(details, 1, folder, stage)
        assert result["losses"][-1].sum() < result["losses"][0].sum()
        assert result["dtypes"] == {torch.bfloat16}
        assert result["masters"] == {torch.float32}
        assert result["applied"] == [True] * 3 + [False, True]
        assert result["norms"][3] == math.inf
        assert result["moved"] == (False, True)
        assert result["whole"]
        assert result["obstacle"] == ("the weights are sharded" if stage == 3 else None)
else:

    def test_without_deepspeed_the_error_says_what_to_install(folder):
        with start("deepspeed", "cpu") as processes, pytest.raises(UserError, match="deepspeed"):
            learner_of(tiny_bagel(folder), processes, "deepspeed")


SPANS = ((0, 2), (2, 2 + STEPS), (2 + STEPS, 4 + STEPS))


def details(_: Processes, folder: Path, stage: int) -> dict:
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}
    bagel = tiny_bagel(folder, "bfloat16", trained=False)
    attach_lora(bagel, rank=2, alpha=4, experts="both")
    settings = OptimizerSettings(lr=1e-2, eps=1e-8)
    with start("deepspeed", "cpu") as processes:
        learner = learner_of(bagel, processes, "deepspeed", settings)
        batch = batch_of(bagel, 0)
        losses, applied, norms = [], [], []
        for step in range(5):
            before = dict(learner.weights(dtype=torch.float32, trained_only=True))
            out = learner.forward(*batch)
            loss = out.ce_S.mean() + out.velocity_BGC.square().mean()
            learner.backward(loss * (math.nan if step == 3 else 1.0), last=True)
            report = learner.step(1.0)
            losses.append(torch.stack([out.ce_S.mean().detach()]))
            applied.append(bool(report.applied))
            norms.append(report.grad_norm.item())
            after = dict(learner.weights(dtype=torch.float32, trained_only=True))
            moved = any(not torch.equal(after[name], before[name]) for name in after)
            if step == 3:
                moved_by_nan = moved
        with learner.inference() as model:
            whole = all(p.numel() > 0 for p in model.parameters())
            obstacle = _obstacle(model)
        learner.forward(*batch)
        state = learner.state_dict()
    return {
        "losses": losses,
        "dtypes": {p.dtype for p in bagel.parameters()},
        "masters": {tensor.dtype for tensor in state.values()},
        "applied": applied,
        "norms": norms,
        "moved": (moved_by_nan, moved),
        "whole": whole,
        "obstacle": obstacle,
    }
