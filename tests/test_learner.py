"""The learner in one process: masters in fp32, what an update does and does not, LoRA, weights that
are given away, batches that lack a part, schedules."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sft.loss import PRESETS, counts, loss
from tests.learning import batch_of, learner_of, tiny_bagel, update
from tests.tiny import TINY
from umm_reflect import Bagel
from umm_reflect.adapters import adapter_parameters, attach_lora
from umm_reflect.checkpoint import save
from umm_reflect.packing import training_forward
from umm_reflect.training.learner import OptimizerSettings, empty_batch
from umm_reflect.training.masters import Masters
from umm_reflect.training.optim import Optimizer
from umm_reflect.training.parts import with_all_parts
from umm_reflect.training.processes import Processes, start
from umm_reflect.training.schedule import Piece, Schedule, release, single


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_bagel(folder)
    return folder


def masters_of(*tensors: Tensor, settings: OptimizerSettings, bf16_only: bool = False) -> Masters:
    names = [f"layers.{i}.weight" for i in range(len(tensors))]
    masters = list(tensors) if bf16_only else [t.float() for t in tensors]
    return Masters(names, list(tensors), masters, [t.shape for t in tensors], settings)


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lr", "lost"), [(2e-6, 0.96), (2e-7, 0.998)])
def test_bf16_alone_rounds_nearly_every_update_away_and_fp32_masters_none(lr, lost):
    generator = torch.Generator().manual_seed(0)
    weights = (0.02 * torch.randn(1000, 1000, generator=generator)).bfloat16()
    gradient = torch.randn(1000, 1000, generator=generator)
    settings = OptimizerSettings(lr=lr, clip_norm=None)
    before = weights.clone()

    alone = masters_of(weights.clone(), settings=settings, bf16_only=True)
    alone.step([gradient.bfloat16()], 1.0)
    unchanged = (alone.masters[0] == before).float().mean().item()
    assert unchanged == pytest.approx(lost, abs=0.01 if lr == 2e-6 else 0.001)

    kept = masters_of(weights.clone(), settings=settings)
    kept.step([gradient.clone()], 1.0)
    moved = (kept.masters[0] - before.float()).abs()
    assert (moved > 0).float().mean().item() > 0.9999
    assert moved.median().item() == pytest.approx(lr, rel=0.01)


def test_many_small_updates_add_up_in_the_working_copy():
    weights = torch.full((4, 4), 0.02, dtype=torch.bfloat16)
    masters = masters_of(weights, settings=OptimizerSettings(lr=2e-6, clip_norm=None))
    for _ in range(100):
        masters.step([torch.ones(4, 4)], 1.0)
    torch.testing.assert_close(
        masters.masters[0], torch.full((4, 4), 0.02002 - 2e-4), atol=5e-6, rtol=0
    )
    assert (weights == masters.masters[0].bfloat16()).all()


@pytest.mark.parametrize("fused", [True, False])
def test_an_update_is_torchs_adamw_after_clipping(fused):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (2, 2)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    settings = OptimizerSettings(lr=0.1, eps=1e-8, weight_decay=0.3, clip_norm=0.5)
    mine = masters_of(*[t.clone() for t in start], settings=settings)
    mine._fused = fused
    theirs = [torch.nn.Parameter(t.clone()) for t in start]
    groups = [
        {"params": [p for p in theirs if p.ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in theirs if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        grads = [torch.randn(shape, generator=generator) for shape in shapes]
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        for group in groups:
            group["lr"] = 0.1 * 0.5**step
        reference.step()
        report = mine.step(grads, 0.5**step)
        assert report.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    for p, master in zip(theirs, mine.masters, strict=True):
        torch.testing.assert_close(master, p.detach(), atol=1e-6, rtol=1e-5)


def test_muon_and_the_average_are_those_of_the_optimizer_of_pretraining(folder):
    settings = OptimizerSettings(
        "muon", lr=2e-3, muon_lr=0.02, eps=1e-5, weight_decay=0.1, ema_decay=0.9
    )
    bagel, other = tiny_bagel(folder), tiny_bagel(folder)
    learner = learner_of(bagel, settings=settings)
    optimizer = Optimizer(
        other.named_parameters(),
        muon_lr=0.02,
        adamw_lr=2e-3,
        eps=1e-5,
        weight_decay=0.1,
        ema_decay=0.9,
    )
    for step in range(3):
        batch, times, noise = batch_of(bagel, step)
        update(learner, [(batch, times, noise)], 0.7)
        out = training_forward(other, batch, times, noise)
        loss(out, batch, noise, counts(batch), PRESETS["release"]).total.backward()
        optimizer.step(torch.tensor(0.7))
        optimizer.zero_grad()
    average = dict(learner.ema_weights(dtype=torch.float32, trained_only=True))
    for name, p in other.named_parameters():
        torch.testing.assert_close(dict(bagel.named_parameters())[name], p, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(average[name], optimizer.ema_state()[name], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing(folder, bad, name):
    settings = OptimizerSettings(name, lr=1e-3, ema_decay=0.9)
    bagel = tiny_bagel(folder)
    learner = learner_of(bagel, settings=settings)
    update(learner, [batch_of(bagel, 0)])
    before = {key: tensor.clone() for key, tensor in learner.state_dict().items()}
    batch, times, noise = batch_of(bagel, 1)
    out = learner.forward(batch, times, noise)
    learner.backward(bad * out.ce_S.sum(), last=True)
    report = learner.step(1.0)
    assert not report.applied
    assert not report.grad_norm.isfinite()
    assert all(torch.equal(tensor, before[key]) for key, tensor in learner.state_dict().items())
    update(learner, [batch_of(bagel, 2)])
    assert learner.state_dict()["step_count"] == 2
    assert all(tensor.isfinite().all() for tensor in learner.state_dict().values())


def test_gradients_of_a_bf16_model_are_added_up_in_fp32(folder):
    """256 times 1 and a 1 that bf16 would lose: 257."""
    bagel = tiny_bagel(folder, "bfloat16")
    learner = learner_of(bagel, settings=OptimizerSettings(lr=0.0, clip_norm=None))
    weight = bagel.llm2vae.bias
    for factor in (256.0, 1.0):
        learner.backward(factor * weight.sum(), last=factor == 1.0)
    assert weight.grad is None
    norm = learner.step(1.0).grad_norm.item()
    assert norm == pytest.approx(257 * weight.numel() ** 0.5, rel=1e-6)


def test_batches_of_an_update_add_up_to_one(folder):
    bagel, other = tiny_bagel(folder), tiny_bagel(folder)
    apart, together = learner_of(bagel), learner_of(other)
    for step in range(3):
        batches = [batch_of(bagel, 3 * step + k) for k in range(3)]
        update(apart, batches)
        total = sum(counts(batch) for batch, _, _ in batches)
        sums = []
        for batch, times, noise in batches:
            out = together.forward(batch, times, noise)
            sums.append(loss(out, batch, noise, total, PRESETS["release"]).total)
        together.backward(sum(sums), last=True)
        together.step(1.0)
    for (name, one), (_, two) in zip(apart.weights(), together.weights(), strict=True):
        torch.testing.assert_close(one, two, msg=name)


# --- what is trained ------------------------------------------------------------------------------


def test_only_what_requires_a_gradient_is_trained(folder):
    bagel = tiny_bagel(folder, trained=False)
    bagel.connector.requires_grad_(True)
    learner = learner_of(bagel)
    assert learner.trainable == [
        f"connector.{n}.{kind}" for n in ("fc1", "fc2") for kind in ("weight", "bias")
    ]
    before = {name: tensor.clone() for name, tensor in bagel.state_dict().items()}
    update(learner, [batch_of(bagel, 0)])
    changed = {n for n, t in bagel.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == set(learner.trainable)
    with pytest.raises(ValueError, match="nothing to train"):
        learner_of(bagel.requires_grad_(False))


def test_lora_trains_bf16_copies_of_fp32_masters_and_leaves_the_base(folder):
    bagel = attach_lora(tiny_bagel(folder, "bfloat16", trained=False), rank=2, alpha=4)
    first = {name: p.detach().clone() for name, p in adapter_parameters(bagel)}
    base = bagel.language_model.model.layers[0].self_attn.q_proj_moe_gen.base_layer.weight.clone()
    learner = learner_of(bagel, recompute=True)
    assert {p.dtype for p in bagel.parameters()} == {torch.bfloat16}
    state = learner.state_dict()
    for name, tensor in first.items():  # not rounded by the copy
        assert torch.equal(state[f"master/{name}"], tensor)
    for step in range(2):
        update(learner, [batch_of(bagel, step)])
    update(learner, [batch_of(bagel, 5, "text")])  # touches nothing that is trained
    assert learner.state_dict()["step_count"] == 3
    layer = bagel.language_model.model.layers[0].self_attn.q_proj_moe_gen
    assert torch.equal(layer.base_layer.weight, base)
    weights = dict(learner.weights(dtype=torch.float32, trained_only=True))
    assert list(weights) == learner.trainable
    assert all(not torch.equal(weights[n], first[n]) for n in first)


def test_the_published_way_without_masters_leaves_most_weights_as_they_were(folder):
    shares = {}
    for legacy in (True, False):
        bagel = tiny_bagel(folder, "bfloat16")
        before = [p.detach().clone() for p in bagel.parameters()]
        learner = learner_of(bagel, settings=OptimizerSettings(lr=2e-7), legacy_bf16=legacy)
        update(learner, [batch_of(bagel, 0)])
        state = learner.state_dict()
        assert state["master/llm2vae.weight"].dtype == (torch.bfloat16 if legacy else torch.float32)
        after = [state[f"master/{name}"].float() for name in learner.trainable]
        same = [(b.float() == a).sum().item() for b, a in zip(before, after, strict=True)]
        shares[legacy] = sum(same) / sum(p.numel() for p in before)
    assert shares[True] > 0.99
    assert shares[False] < 0.55  # rows of tokens that do not occur have no gradient


# --- weights --------------------------------------------------------------------------------------


def test_weights_are_those_of_a_checkpoint_that_loads(folder, tmp_path):
    bagel = tiny_bagel(folder, "bfloat16")
    learner = learner_of(bagel, settings=OptimizerSettings(lr=1e-2, ema_decay=0.5))
    for step in range(3):
        update(learner, [batch_of(bagel, step)])
    for which in ("weights", "ema_weights"):
        weights = dict(getattr(learner, which)())
        assert list(weights) == list(bagel.state_dict())
        again = Bagel.from_pretrained(
            str(save(bagel, tmp_path / which, weights=weights)), device="cpu", dtype="bfloat16"
        )
        stored = {n: t for n, t in again.state_dict().items() if "pos_embed" not in n}
        assert all(torch.equal(tensor, weights[name]) for name, tensor in stored.items())
    assert any(not torch.equal(weights[n], t) for n, t in learner.weights())
    with pytest.raises(ValueError, match="no moving average"):
        next(learner_of(tiny_bagel(folder)).ema_weights())


def test_inference_with_averages_gives_the_weights_back(folder):
    bagel = tiny_bagel(folder)
    learner = learner_of(bagel, settings=OptimizerSettings(lr=1e-2, ema_decay=0.5))
    for step in range(3):
        update(learner, [batch_of(bagel, step)])
    trained = {name: t.clone() for name, t in bagel.state_dict().items()}
    average = dict(learner.ema_weights(dtype=torch.float32))
    with learner.inference(averaged=True) as model:
        assert not model.training
        assert all(torch.equal(t, average[name]) for name, t in model.state_dict().items())
    assert bagel.training
    assert all(torch.equal(t, trained[name]) for name, t in bagel.state_dict().items())


# --- batches that lack a part ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "draw", "both"])
def test_added_parts_change_no_loss_and_give_every_weight_a_gradient(folder, kind):
    bagel = tiny_bagel(folder)
    batch, times, noise = batch_of(bagel, 0, kind)
    whole, times_too, noise_too = with_all_parts(batch, times, noise, TINY)
    plain = training_forward(bagel, batch, times, noise)
    padded = training_forward(bagel, whole, times_too, noise_too)
    torch.testing.assert_close(padded.ce_S, plain.ce_S)
    losses = loss(padded, whole, noise_too, counts(whole), PRESETS["release"])
    expected = loss(plain, batch, noise, counts(batch), PRESETS["release"])
    torch.testing.assert_close(losses.total, expected.total)
    losses.total.backward()
    assert [name for name, p in bagel.named_parameters() if p.grad is None] == []


def test_an_empty_batch_adds_nothing(folder):
    bagel = tiny_bagel(folder)
    batch = empty_batch(TINY)
    assert counts(batch).tolist() == [0, 0]
    whole, times, noise = with_all_parts(batch, torch.zeros(0), batch.latent_BGC, TINY)
    out = training_forward(bagel, whole, times, noise)
    losses = loss(out, whole, noise, torch.tensor([3.0, 5.0]), PRESETS["release"])
    losses.total.backward()
    assert losses.total == 0
    assert all((p.grad == 0).all() for p in bagel.parameters())
    alone = learner_of(tiny_bagel(folder))
    update(alone, [batch_of(bagel, 0), (batch, torch.zeros(0), batch.latent_BGC)])
    assert alone.state_dict()["step_count"] == 1


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "sgd"}, "the optimizer is 'sgd'; choose adamw or muon"),
        ({"lr": -1.0}, "lr is -1.0; give 0 or more"),
        ({"lr": math.nan}, "lr is nan"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\)"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0; give a number above 0, or none"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0"),
        ({"flow_lr": -1e-6}, "flow_lr is -1e-06; give 0 or more, or none"),
        ({"name": "muon", "flow_lr": 1e-6}, "flow_lr goes with adamw"),
    ],
)
def test_impossible_settings_of_the_optimizer_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerSettings(**settings)


def test_a_strategy_that_does_not_fit_the_processes_is_named(folder):
    bagel = tiny_bagel(folder)
    with pytest.raises(ValueError, match="strategy is 'fsdp'; choose one of auto, none, ddp"):
        learner_of(bagel, strategy="fsdp")
    with pytest.raises(ValueError, match="strategy none is for one process, and there are 4"):
        learner_of(bagel, Processes(world=4), "none")
    with pytest.raises(ValueError, match=r"fsdp2 needs a group: processes = start\('fsdp2'\)"):
        learner_of(bagel, Processes(), "fsdp2")


# --- schedules ------------------------------------------------------------------------------------


def test_the_published_schedule_is_two_pieces_of_one_run():
    schedule = release()
    rates = {step: schedule.lr(step) for step in (0, 24, 49, 50, 730, 1409, 1410, 2968, 5000)}
    assert rates[0] == pytest.approx(4e-8)
    assert rates[24] == pytest.approx(1e-6)
    assert rates[49] == rates[50] == pytest.approx(2e-6)
    assert rates[730] == pytest.approx(1.1e-6)  # half of the cosine
    assert rates[1409] == pytest.approx(2e-7, rel=1e-4)
    assert rates[1410] == rates[2968] == rates[5000] == 2e-7
    assert schedule.factor(730, 2e-6) == pytest.approx(0.55)
    assert not schedule.over(2968)
    assert schedule.over(2969)


def test_a_piece_may_end_with_the_samples():
    schedule = Schedule(
        (Piece(10, "linear", 1.0, 0.5), Piece(167_363, "constant", 0.5, 0.5, "samples"))
    )
    assert [schedule.lr(step, 16 * step) for step in (0, 5, 9, 10, 5000)] == [
        1.0,
        0.75,
        0.55,
        0.5,
        0.5,
    ]
    assert not schedule.over(10_000, 167_362)
    assert schedule.over(10_000, 167_363)


def test_a_single_rate_is_flat_and_then_falls_to_zero():
    schedule = single(0.1, total=100, warmup=10, decay_fraction=0.5)
    assert [schedule.lr(step) for step in (0, 9, 10, 49, 50)] == pytest.approx(
        [0.01, 0.1, 0.1, 0.1, 0.1]
    )
    assert schedule.lr(75) == pytest.approx(0.05)
    assert schedule.lr(100) == 0.0
    assert single(0.1, total=100, decay_fraction=0.0).lr(99) == 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule(()), "needs at least one piece"),
        (lambda: Piece(5, "step", 1, 1), "shape of a piece is 'step'; choose one of cosine"),
        (lambda: Piece(0, "linear", 1, 1), "a piece ends at 0"),
        (lambda: Piece(5, "linear", 1, -1), "end of a piece is -1"),
        (lambda: Piece(5, "constant", 1, 2), "a constant piece goes from 1 to 2"),
        (
            lambda: Schedule((Piece(5, "linear", 1, 0), Piece(5, "linear", 1, 0))),
            "a piece until 5 updates follows one until 5",
        ),
        (
            lambda: Schedule((Piece(5, "linear", 1, 0), Piece(9, "cosine", 1, 0, "samples"))),
            "where it begins is not known",
        ),
        (lambda: Schedule((Piece(5, "linear", 1, 0),), warmup=6), "a warm-up of 6 is longer"),
    ],
)
def test_an_impossible_schedule_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- on a GPU -------------------------------------------------------------------------------------


def on_gpu(folder: Path, processes: Processes, strategy: str, settings: OptimizerSettings):
    """(learner, one update's inputs) of a bf16 model."""
    bagel = Bagel.from_pretrained(str(folder), device="cuda", dtype="bfloat16").requires_grad_(True)
    learner = learner_of(bagel, processes, strategy, settings, recompute=True)
    batch, times, noise = batch_of(bagel, 0)
    return learner, (batch.to("cuda"), times.cuda(), noise.cuda())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_update_waits_for_no_gpu(folder, name):
    settings = OptimizerSettings(name, lr=1e-3, ema_decay=0.9)
    learner, inputs = on_gpu(folder, Processes(device=torch.device("cuda")), "none", settings)
    for step in range(3):
        out = learner.forward(*inputs)
        learner.backward(out.ce_S.mean() + out.velocity_BGC.square().mean(), last=True)
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            report = learner.step(1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert report.applied


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_wrapped_models_learn_as_plain_ones_on_a_gpu(folder, strategy):
    curves = []
    for which in ("none", strategy):
        with start(which, "cuda") as processes:
            learner, inputs = on_gpu(folder, processes, which, OptimizerSettings(lr=1e-3, eps=1e-5))
            losses = []
            for _ in range(10):
                out = learner.forward(*inputs)
                losses.append(out.ce_S.mean() + out.velocity_BGC.square().mean())
                learner.backward(losses[-1], last=True)
                learner.step(1.0)
            curves.append(torch.stack(losses).detach().cpu())
    torch.testing.assert_close(curves[0], curves[1], atol=0.02, rtol=0)
    assert curves[0][-1] < 0.9 * curves[0][0]
