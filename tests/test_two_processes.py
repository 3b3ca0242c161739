"""Two gloo processes against one: equal losses, what wraps the model, unequal ranks, failures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.learning import batch_of, learner_of, run_processes, tiny_bagel, update
from umm_reflect.training.processes import Processes

STEPS = 10


def trained(processes: Processes, folder: Path, strategy: str, kinds: tuple[str, ...]) -> dict:
    """Ten updates over four batches each, shared out; losses, what wrapped the model, weights."""
    bagel = tiny_bagel(folder)
    learner = learner_of(bagel, processes, strategy, recompute=True)
    losses = []
    for step in range(STEPS):
        batches = [batch_of(bagel, 4 * step + k, kinds[k % len(kinds)]) for k in range(4)]
        losses.append(update(learner, batches[processes.rank :: processes.world]).tolist())
    weights = dict(learner.weights(dtype=torch.float32))
    return {
        "losses": torch.tensor(losses),
        "wrapped": type(learner.module).__name__,
        "ddp": isinstance(learner.module, DistributedDataParallel),
        "sharded": all(isinstance(p, DTensor) for p in bagel.parameters()),
        "weights": weights,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_bagel(folder)
    return folder


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kinds", [("both",), ("both", "text")], ids=["equal", "a rank of texts"])
def test_two_processes_learn_as_one(folder, strategy, kinds):
    alone = trained(Processes(), folder, "none", kinds)
    first, second = run_processes(trained, 2, folder, strategy, kinds)
    for result in (first, second):
        assert result["ddp"] == (strategy == "ddp")
        assert result["sharded"] == (strategy == "fsdp2")
        torch.testing.assert_close(result["losses"], alone["losses"], atol=1e-5, rtol=0)
    assert alone["losses"][-1].sum() < 0.6 * alone["losses"][0].sum()
    assert not second["weights"]
    for name, tensor in alone["weights"].items():
        torch.testing.assert_close(first["weights"][name], tensor, atol=2e-5, rtol=0)
