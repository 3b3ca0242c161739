"""The kit under the trainers: Muon and AdamW on fp32 masters, the schedule, the log, the curves."""

import io
import json
import math

import pytest
import torch
from torch import nn

from umm_reflect.training.metrics import MetricsLog, plot_curves, progress, read_metrics, series
from umm_reflect.training.optim import Optimizer, layer_matrices, lr_scale, newton_schulz

ONE = torch.tensor(1.0)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def tiny(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = Tiny().to(dtype)
    return model, Optimizer(model.named_parameters(), **options)


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        ids = torch.arange(7)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids).float(), (ids + 1) % 7)
        loss.backward()
        optimizer.step(torch.tensor(lr_scale(step, 60, warmup=5, decay_fraction=0.5)))
        losses.append(loss.item())
    return losses


# --- schedule ------------------------------------------------------------------------------------


def test_the_schedule_warms_up_stays_flat_and_falls_as_a_cosine_to_zero():
    scale = [lr_scale(step, 100, warmup=10, decay_fraction=0.4) for step in range(101)]
    assert scale[0] == pytest.approx(0.1)
    assert scale[4] == pytest.approx(0.5)
    assert scale[9:61] == [1.0] * 52
    assert scale[70] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert scale[80] == pytest.approx(0.5)
    assert scale[100] == 0.0


def test_the_schedule_is_zero_after_its_end_and_flat_without_a_decay():
    assert lr_scale(150, 100, decay_fraction=0.4) == 0.0
    assert lr_scale(99, 100, decay_fraction=0.0) == 1.0
    assert lr_scale(0, 1, warmup=0) == 1.0


@pytest.mark.parametrize(
    "bad", [(0, 0, 0, 0.5), (0, 10, -1, 0.5), (0, 10, 0, 1.5), (0, 10, 0, -0.1)]
)
def test_an_impossible_schedule_is_an_error(bad):
    with pytest.raises(ValueError, match="a schedule needs"):
        lr_scale(*bad)


# --- optimizer -----------------------------------------------------------------------------------


def test_adamw_takes_the_steps_of_torch():
    torch.manual_seed(1)
    ours = nn.Linear(5, 3)
    theirs = nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    mine = Optimizer(
        ours.named_parameters(), adamw_lr=0.01, betas=(0.9, 0.95), eps=1e-8, clip_norm=None
    )
    reference = torch.optim.AdamW(
        theirs.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    for _ in range(5):
        x = torch.randn(8, 5)
        for model, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
        mine.step(ONE)
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_muon_takes_the_steps_of_its_published_form():
    torch.manual_seed(2)
    weight = nn.Parameter(torch.randn(6, 3))
    start = weight.detach().clone()
    optimizer = Optimizer(
        [("layers.weight", weight)], muon_lr=0.1, clip_norm=None, matrices=lambda name, p: True
    )
    buffer = torch.zeros(6, 3)
    expected = start.clone()
    for _ in range(3):
        grad = torch.randn(6, 3)
        weight.grad = grad.clone()
        optimizer.step(ONE)
        buffer = 0.95 * buffer + 0.05 * grad
        nesterov = 0.05 * grad + 0.95 * buffer
        x = (nesterov / nesterov.norm()).T
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        expected -= 0.1 * math.sqrt(6 / 3) * x.T
    assert torch.allclose(weight, expected, atol=1e-5)


def test_newton_schulz_brings_singular_values_near_one_and_keeps_zero():
    torch.manual_seed(0)
    stack = torch.cat([torch.randn(3, 32, 16), torch.zeros(1, 32, 16)])
    out = newton_schulz(stack)
    values = torch.linalg.svdvals(out[:3])
    assert values.min() > 0.6
    assert values.max() < 1.25
    assert torch.equal(out[3], torch.zeros(32, 16))


def test_layer_matrices_go_to_muon_and_everything_else_to_adamw():
    model, optimizer = tiny()
    muon = [name for bucket in optimizer.buckets if bucket.muon for name in bucket.names]
    assert muon == ["layers.0.weight", "layers.1.weight"]
    assert {name for b in optimizer.buckets if not b.muon for name in b.names} == {
        "embed.weight",
        "layers.0.bias",
        "layers.1.bias",
        "head.weight",
    }
    assert not layer_matrices("lm_head.weight", model.head.weight)


def test_a_convolution_may_go_to_muon():
    conv = nn.Conv2d(4, 8, 3, bias=False)
    before = conv.weight.detach().clone()
    optimizer = Optimizer([("conv", conv.weight)], matrices=lambda name, p: p.ndim == 4)
    conv(torch.randn(1, 4, 6, 6)).sum().backward()
    optimizer.step(ONE)
    assert optimizer.buckets[0].master.shape == (1, 8, 36)
    assert not torch.equal(conv.weight, before)


def test_training_lowers_the_loss_in_fp32_and_in_bf16():
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer = tiny(dtype, adamw_lr=0.03)
        losses = train(model, optimizer, 60)
        assert losses[-1] < 0.3 * losses[0]
        assert all(p.dtype == dtype for p in model.parameters())
        assert int(optimizer.step_count) == 60
        assert int(optimizer.skipped) == 0


def test_masters_keep_updates_that_bf16_would_lose():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = Optimizer([("w", weight)], adamw_lr=1e-4, clip_norm=None, ema_decay=None)
    for _ in range(100):
        weight.grad = torch.ones(1, dtype=torch.bfloat16)
        optimizer.step(ONE)
    # 100 steps of 1e-4; a single one is far below bf16's spacing of 2**-8 at 1
    assert float(optimizer.ema_state()["w"]) == pytest.approx(0.99, abs=1e-4)
    assert float(weight.detach()) == pytest.approx(0.99, abs=0.003)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad):
    model, optimizer = tiny()
    train(model, optimizer, 3)
    before = optimizer.state_dict()
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad.normal_()
    model.layers[0].weight.grad[1, 2] = bad  # 1e30 squared is not finite either
    optimizer.step(ONE)
    after = optimizer.state_dict()
    assert int(after.pop("skipped")) == 1
    assert int(before.pop("skipped")) == 0
    assert all(torch.equal(before[name], after[name]) for name in before)
    losses = train(model, optimizer, 2, first=3)
    assert all(math.isfinite(loss) for loss in losses)


def test_the_gradient_is_clipped_to_its_global_norm():
    weights = {name: nn.Parameter(torch.zeros(1)) for name in ("a", "b")}
    optimizer = Optimizer(weights.items(), clip_norm=1.0)
    weights["a"].grad, weights["b"].grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step(ONE)
    assert float(optimizer.grad_norm) == pytest.approx(5.0)
    state = optimizer.state_dict()
    # first moment = (1 - 0.9) * clipped gradient
    assert float(state["first/a"]) == pytest.approx(0.1 * 0.6, rel=1e-4)
    assert float(state["first/b"]) == pytest.approx(0.1 * 0.8, rel=1e-4)


def test_the_average_follows_with_a_decay_that_warms_up():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Optimizer([("w", weight)], adamw_lr=1.0, clip_norm=None, ema_decay=0.2)
    expected, value = 0.0, 0.0
    for decay in (2 / 11, 0.2, 0.2):  # (1 + t) / (10 + t) is 2/11, 3/12, 4/13
        weight.grad = torch.ones(1)
        optimizer.step(ONE)
        value -= 1.0
        expected = decay * expected + (1 - decay) * value
    assert float(weight.detach()) == pytest.approx(-3.0, abs=1e-4)
    assert float(optimizer.ema_state()["w"]) == pytest.approx(expected, abs=1e-4)


def test_weight_decay_acts_on_matrices_only():
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = Optimizer({"m": matrix, "v": vector}.items(), adamw_lr=0.1, weight_decay=0.5)
    optimizer.zero_grad()
    optimizer.step(ONE)
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2))


def test_a_resume_is_equal_bit_for_bit():
    model, optimizer = tiny()
    train(model, optimizer, 10)
    saved = optimizer.state_dict()
    train(model, optimizer, 10, first=10)

    other, resumed = tiny()
    train(other, resumed, 2)
    resumed.load_state_dict(saved)
    train(other, resumed, 10, first=10)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    ours, theirs = optimizer.state_dict(), resumed.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_state_of_another_model_is_refused():
    _, optimizer = tiny()
    state = optimizer.state_dict()
    del state["master/head.weight"]
    with pytest.raises(ValueError, match=r"master/head\.weight"):
        optimizer.load_state_dict(state)


def test_frozen_parameters_are_left_alone_and_absent_gradients_count_as_zero():
    model = Tiny()
    model.head.weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model.named_parameters())
    model.layers[0](torch.ones(1, 4)).sum().backward()
    optimizer.step(ONE)
    assert "head.weight" not in optimizer.ema_state()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"layers.0.weight", "layers.0.bias"}


def test_no_trainable_parameter_is_an_error():
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        Optimizer([("w", nn.Parameter(torch.ones(1), requires_grad=False))])


# --- metrics -------------------------------------------------------------------------------------


def test_the_log_is_one_json_object_a_line_at_once(tmp_path):
    log = MetricsLog(tmp_path / "run")
    log.log(0, loss=torch.tensor(0.5), lr=0.1, by_color={"red": 1.0})
    log.log(1, loss=float("nan"), note="odd")
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [line.pop("seconds") >= 0 for line in lines] == [True, True]
    assert lines == [
        {"step": 0, "loss": 0.5, "lr": 0.1, "by_color": {"red": 1.0}},
        {"step": 1, "loss": None, "note": "odd"},
    ]


def test_a_resumed_log_drops_what_will_come_again_and_a_torn_line(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(5):
            log.log(step, loss=step)
    with log.path.open("a") as file:
        file.write('{"step": 5, "lo')
    assert [line["step"] for line in read_metrics(log.path)] == [0, 1, 2, 3, 4]
    with MetricsLog(tmp_path, from_step=3) as log:
        log.log(3, loss=30)
    assert series(read_metrics(log.path), "loss") == ([0, 1, 2, 3], [0.0, 1.0, 2.0, 30.0])


def test_a_bad_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 1}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_curves_are_drawn_as_panels_that_leave_out_what_is_not_there(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(200):
            log.log(step, loss=100 / (step + 1), grad_norm=1.0, deep={"a": step})
    groups = {"loss": ["loss"], "deep": ["deep.a"], "absent": ["nothing"]}
    picture = plot_curves(log.path, tmp_path / "curve.png", groups, title="a run")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    plot_curves(log.path, tmp_path / "all.png")
    with pytest.raises(ValueError, match="no values of nothing"):
        plot_curves(log.path, tmp_path / "none.png", {"nothing": ["nothing"]})
    assert not (tmp_path / "none.png").exists()


def test_progress_prints_lines_now_and_then_where_there_is_no_terminal():
    stream = io.StringIO()
    with progress(10, "training", every=0.0, stream=stream) as bar:
        bar.advance(4, loss=0.25)
    assert stream.getvalue().startswith("training: 4/10")
    assert stream.getvalue().endswith("loss 0.25\n")
    quiet = io.StringIO()
    with progress(10, "training", every=60.0, stream=quiet) as bar:
        bar.advance(4, loss=0.25)
    assert quiet.getvalue() == ""
