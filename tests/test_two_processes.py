"""Two gloo processes against one: equal losses, what wraps the model, unequal ranks, failures."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.learning import (
    SETTINGS,
    batch_of,
    environment,
    free_port,
    learner_of,
    run_processes,
    tiny_bagel,
    update,
)
from tests.tiny import TINY
from umm_reflect.adapters import attach_lora
from umm_reflect.context import Context
from umm_reflect.decode import _obstacle as obstacle
from umm_reflect.errors import UsageError
from umm_reflect.generate import DrawRequest, DrawSettings, Engine, draw, say
from umm_reflect.rng import stream
from umm_reflect.training import processes as processes_module
from umm_reflect.training.learner import OptimizerSettings, empty_batch
from umm_reflect.training.processes import Processes, start
from umm_reflect.training.resume import load_resume, save_resume

ROOT = Path(__file__).resolve().parents[1]
STEPS = 10
MUON = OptimizerSettings("muon", lr=1e-3, muon_lr=0.01, eps=1e-5, weight_decay=0.1, ema_decay=0.9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_bagel(folder)
    return folder


# --- equal losses ---------------------------------------------------------------------------------

CASES = {
    # settings, LoRA, dtype, kinds of batches by turns: the second process has every second one
    "full": (SETTINGS, False, "float32", ("both",)),
    "muon, an average, a rank of texts": (MUON, False, "float32", ("both", "text")),
    "LoRA, a rank of texts": (SETTINGS, True, "float32", ("draw", "text", "both", "text")),
    "LoRA in bf16": (SETTINGS, True, "bfloat16", ("both",)),
}


def trained(processes: Processes, folder: Path, strategy: str) -> dict[str, dict]:
    return {case: trained_on(processes, folder, strategy, *CASES[case]) for case in CASES}


def trained_on(processes, folder, strategy, settings, lora: bool, dtype: str, kinds) -> dict:
    """Ten updates over four batches each, shared out; losses, what wrapped the model, weights."""
    bagel = tiny_bagel(folder, dtype, trained=not lora)
    if lora:
        attach_lora(bagel, rank=2, alpha=4, seed=processes.rank)  # rank 0's is the start
    learner = learner_of(bagel, processes, strategy, settings, recompute=True)
    losses = []
    for step in range(STEPS):
        batches = [batch_of(bagel, 4 * step + k, kinds[k % len(kinds)]) for k in range(4)]
        losses.append(update(learner, batches[processes.rank :: processes.world]).tolist())
    weights = dict(learner.weights(dtype=torch.float32))
    if settings.ema_decay:
        weights |= {f"ema/{n}": t for n, t in learner.ema_weights(dtype=torch.float32)}
    return {
        "losses": torch.tensor(losses),
        "ddp": isinstance(learner.module, DistributedDataParallel),
        "sharded": all(isinstance(p, DTensor) for p in bagel.parameters()),
        "here": sum(getattr(p, "_local_tensor", p).numel() for p in bagel.parameters()),
        "weights": weights,
    }


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, dict]:
    return trained(Processes(), folder, "none")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_learn_as_one(folder, alone, strategy):
    results = run_processes(trained, 2, folder, strategy)
    for case, expected in alone.items():
        first, second = (result[case] for result in results)
        bf16 = CASES[case][2] == "bfloat16"
        for result in (first, second):
            assert result["ddp"] == (strategy == "ddp")
            assert result["sharded"] == (strategy == "fsdp2")
            # in bf16 a master that differs in its last bit may round otherwise
            close = 2e-3 if bf16 else 1e-5
            torch.testing.assert_close(result["losses"], expected["losses"], atol=close, rtol=0)
        copies = 2 if strategy == "ddp" else 1
        assert first["here"] + second["here"] == copies * expected["here"]
        assert not second["weights"]
        assert first["weights"].keys() == expected["weights"].keys()
        for name, tensor in expected["weights"].items():
            close = 1e-4 if bf16 else 2e-5
            torch.testing.assert_close(first["weights"][name], tensor, atol=close, rtol=0, msg=name)


def test_one_process_learns_in_these_cases_at_all(folder, alone):
    start = {n: t.float() for n, t in tiny_bagel(folder).state_dict().items()}
    end = alone["full"]["weights"]
    assert all(
        (end[n] - t).abs().max() > 0.01 for n, t in start.items() if n.endswith("proj.weight")
    )
    low_rank = {n: t for n, t in alone["LoRA, a rank of texts"]["weights"].items() if "lora_B" in n}
    assert len(low_rank) == 14
    assert all(tensor.abs().max() > 0.005 for tensor in low_rank.values())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_process_may_be_wrapped_too(folder, alone, strategy):
    with start(strategy, "cpu") as processes:
        result = trained_on(processes, folder, strategy, *CASES["full"])
    assert result["ddp" if strategy == "ddp" else "sharded"]
    torch.testing.assert_close(result["losses"], alone["full"]["losses"], atol=1e-5, rtol=0)


def on_two_machines(processes: Processes, folder: Path, out: Path) -> dict:
    """Four processes, two a machine: three updates over eight batches each, then a state."""
    bagel = tiny_bagel(folder)
    learner = learner_of(bagel, processes, "auto", MUON)
    losses = []
    for step in range(3):
        batches = [batch_of(bagel, 8 * step + k) for k in range(8)]
        losses.append(update(learner, batches[processes.rank :: processes.world]).tolist())
    save_resume(out, learner, 3, {})
    return {
        "losses": torch.tensor(losses),
        "placements": {str(p.placements) for p in bagel.parameters() if isinstance(p, DTensor)},
        "weights": dict(learner.weights(dtype=torch.float32)),
    }


def test_each_machine_holds_the_weights_once(folder, tmp_path):
    expected = on_two_machines(Processes(), folder, tmp_path / "one")
    first, *others = run_processes(on_two_machines, 4, folder, tmp_path / "four", a_machine=2)
    for result in (first, *others):
        assert result["placements"] == {"(Replicate(), Shard(dim=0))"}
        torch.testing.assert_close(result["losses"], expected["losses"], atol=1e-5, rtol=0)
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(first["weights"][name], tensor, atol=2e-5, rtol=0, msg=name)
    resumed = learner_of(tiny_bagel(folder), settings=MUON)
    assert load_resume(tmp_path / "four", resumed) == (3, {})
    for name, tensor in resumed.weights(dtype=torch.float32):
        assert torch.equal(tensor, first["weights"][name])


# --- numbers --------------------------------------------------------------------------------------


def numbers(processes: Processes, folder: Path, strategy: str) -> dict:
    """What is reduced of a bf16 model, an empty rank, a rank with a gradient of nan."""
    bagel = tiny_bagel(folder, "bfloat16")
    settings = OptimizerSettings(lr=0.0, betas=(0.0, 0.95), clip_norm=None)
    learner = learner_of(bagel, processes, strategy, settings)
    batch, times, noise = batch_of(bagel, 0, "draw")  # four latent tokens
    factor = [64.0, 0.25][processes.rank]
    for last in (False, True):
        out = learner.forward(batch, times, noise)
        learner.backward(factor * out.velocity_BGC.sum() + 0.0 * out.ce_S.sum(), last)
    report = learner.step(1.0)
    first = learner.state_dict()["first/llm2vae.bias"]
    first = first.full_tensor() if isinstance(first, DTensor) else first.clone()

    nothing = empty_batch(TINY)
    mine = [(batch, times, noise), (nothing, torch.zeros(0), nothing.latent_BGC)][processes.rank]
    losses = update(learner, [mine])

    out = learner.forward(batch, times, noise)
    bad = math.nan if processes.rank else 1.0
    learner.backward(bad * (out.velocity_BGC.sum() + out.ce_S.sum()), last=True)
    broken = learner.step(1.0)
    return {
        "first": first,
        "dtypes": {p.dtype for p in bagel.parameters()},
        "masters": {t.dtype for t in learner.state_dict().values()},
        "norm": report.grad_norm.item(),
        "losses": losses,
        "applied": (bool(report.applied), bool(broken.applied)),
        "steps": int(learner.state_dict()["step_count"]),
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_gradients_are_reduced_in_fp32_and_a_nan_of_one_is_nobodys_update(folder, strategy):
    one, two = run_processes(numbers, 2, folder, strategy)
    for result in (one, two):
        # the mean of 2 * 4 * 64 and 2 * 4 * 0.25: 514 is no bf16 number
        assert result["first"].tolist() == [257.0] * TINY.latent_dim
        assert result["masters"] == {torch.float32}
        assert result["norm"] == one["norm"] > 257 * 4
        assert result["applied"] == (True, False)
        assert result["steps"] == 2
        assert torch.equal(result["losses"], one["losses"])
        assert one["losses"][1] > 0  # of the rank that had a batch


# --- drawing in between ---------------------------------------------------------------------------


def drawn(processes: Processes, folder: Path, strategy: str) -> torch.Tensor:
    """Every rank draws another number of pictures; then they train on together."""
    bagel = tiny_bagel(folder)
    learner = learner_of(bagel, processes, strategy, MUON)
    settings = DrawSettings(points=3, text_scale=1.0, image_scale=1.0)
    context = Context.of(bagel.tokens.segment("a star"))
    pictures = []
    for averaged in (False, True):
        with learner.inference(averaged) as model:
            assert not any(isinstance(p, DTensor) for p in model.parameters())
            for _ in range(1 + processes.rank):
                request = DrawRequest(context, None, None, (32, 32), stream(0, 0, 0, "draw"))
                [picture] = draw(Engine(model), [request], settings)
            pictures.append(picture.pixels)
        for step in range(2):
            update(learner, [batch_of(bagel, 2 * step + processes.rank)])
    if strategy == "fsdp2":
        assert all(isinstance(p, DTensor) for p in bagel.parameters())
    return torch.stack(pictures)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_each_process_draws_what_it_likes_between_updates(folder, strategy):
    one, two = run_processes(drawn, 2, folder, strategy)
    assert torch.equal(one, two)
    [alone] = drawn(Processes(), folder, "none")[:1]
    torch.testing.assert_close(one[0], alone, atol=1e-4, rtol=0)
    assert not torch.allclose(one[0], one[1], atol=1e-3)  # the average has moved


def spoken(processes: Processes, folder: Path, strategy: str) -> tuple[list, list[str | None]]:
    """What static steps say before and after an update, another number of texts on every rank; and
    why nothing would be captured: at first, after a forward without gradients, and inside."""
    bagel = tiny_bagel(folder)
    learner = learner_of(bagel, processes, strategy, MUON)
    obstacles, texts = [obstacle(bagel)], []
    with torch.no_grad():
        learner.forward(*batch_of(bagel, 0))  # FSDP2 keeps its last unit gathered
    obstacles.append(obstacle(bagel))
    for step in range(2):
        with learner.inference() as model:
            obstacles.append(obstacle(model))
            caches = Engine(model).caches([Context.of(bagel.tokens.segment("a star"))])
            for _ in range(1 + processes.rank):
                [text] = say(
                    *(model, caches),
                    forced=[()],
                    force=[list(range(10, 30))],
                    temperature=1.0,
                    max_tokens=20,
                    generators=[stream(0, 0, 0, "say")],
                    capture=True,
                )
            texts.append(text.logprobs)
        update(learner, [batch_of(bagel, 2 * step + processes.rank)])
    return texts, obstacles


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_gathered_weights_may_be_captured_and_sharded_ones_not(folder, strategy):
    (one, obstacles), (two, others) = run_processes(spoken, 2, folder, strategy)
    sharded = "the weights are sharded" if strategy == "fsdp2" else None
    assert obstacles == others == [sharded, sharded, None, None]
    assert one == two
    assert one[0] == pytest.approx(spoken(Processes(), folder, "none")[0][0], abs=1e-4)
    assert one[0] != pytest.approx(one[1], abs=1e-3)  # the update is seen


# --- failures -------------------------------------------------------------------------------------


def failing(rank: int, port: int, log: Path, how: str) -> None:
    """Rank 1 fails while rank 0 waits for it in a collective."""
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    os.environ |= environment(rank, 2, port, 2)
    processes_module.GRACE_SECONDS = 0.5
    with start(device="cpu") as processes:
        processes.sum(torch.ones(1))
        if rank == 0:
            processes.sum(torch.ones(1))
            raise AssertionError("the sum of one is no sum")
        if how == "hangs":
            processes.fail("it cannot go on")
            time.sleep(100)
        if how == "raises":
            raise RuntimeError("the data is gone")
        os.kill(os.getpid(), 9)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "rank 0 ends because of rank 1: RuntimeError: the data is gone"),
        ("hangs", "rank 0 ends because of rank 1: it cannot go on"),
        ("is killed", "[Cc]onnection (closed|reset)"),
    ],
)
def test_one_failed_process_ends_the_other_which_names_it(tmp_path, how, said):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.learning", "torch.distributed.checkpoint"])
    port, logs = free_port(), [tmp_path / "0", tmp_path / "1"]
    children = [context.Process(target=failing, args=(r, port, logs[r], how)) for r in (0, 1)]
    began = time.monotonic()
    for child in children:
        child.start()
    children[0].join(60)
    seconds = time.monotonic() - began
    children[1].kill()
    assert children[0].exitcode == 1
    assert seconds < 30
    assert re.search(said, logs[0].read_text())


SCRIPT = """
import sys
from pathlib import Path
import torch
from umm_reflect.training.processes import start

with start(device="cpu") as processes:
    total = processes.sum(torch.tensor(1.0 + processes.rank)).item()
    failed = processes.any(processes.rank == 1, "has no data")
    Path(sys.argv[1], str(processes.rank)).write_text(f"{total} {failed}")
    if processes.rank == 1:
        raise RuntimeError("stumbled")
    processes.barrier()
"""


def test_torchrun_starts_them_and_ends_them_all(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    began = time.monotonic()
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(tmp_path / "script.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode != 0
    assert time.monotonic() - began < 60
    for rank in "01":
        assert (tmp_path / rank).read_text() == "3.0 [(1, 'has no data')]"
    assert "stumbled" in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is no number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not set"),
    ],
)
def test_an_environment_that_does_not_fit_is_named(monkeypatch, changes, message):
    for name in environment(0, 1, 1, 1):
        monkeypatch.delenv(name, raising=False)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        start(device="cpu")
    with pytest.raises(UsageError, match=r"RANK|WORLD_SIZE|MASTER|for one process"):
        start("none", "cpu")
    with pytest.raises(UsageError, match=r"RANK|WORLD_SIZE|there is no strategy 'zero'"):
        start("zero", "cpu")


def test_without_a_launcher_there_is_one_process(monkeypatch):
    for name in environment(0, 1, 1, 1):
        monkeypatch.delenv(name, raising=False)
    with start(device="cpu") as alone:
        assert (alone.rank, alone.world, alone.main) == (0, 1, True)
        assert alone.any(True, "why") == [(0, "why")]
        assert alone.any(False, "why") == []
        one = torch.ones(2)
        assert alone.sum(one).tolist() == [1, 1]
        assert alone.sum(one) is not one
