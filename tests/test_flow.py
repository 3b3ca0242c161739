"""Schedule, steps, log-probs, guidance and loss against numbers worked out elsewhere.

python -m pytest tests/test_flow.py
"""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from umm_reflect.flow import (
    DrawSettings,
    cps_mean_std,
    cps_step,
    euler_step,
    flow_matching_errors,
    flow_matching_loss,
    guide,
    in_interval,
    interpolate,
    sample_times,
    schedule,
    sde_mean_std,
    sde_step,
    shift_times,
    transition_logprob,
    velocity_target,
)

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
needs_golden = pytest.mark.skipif(
    not (GOLDEN / "manifest.json").exists(), reason="shared data not present"
)

# (step, t, dt, std at a = 0.7, 1.0, 1.3, CPS std at a = 0.8) for 15 points and shift 3.
STEP_TABLE = [
    (0, 1.000000, -0.025000, 0.7000, 1.0000, 1.3000, 0.9273),
    (1, 0.975000, -0.027632, 0.7267, 1.0381, 1.3495, 0.9010),
    (2, 0.947368, -0.030702, 0.5204, 0.7434, 0.9664, 0.8718),
    (3, 0.916667, -0.034314, 0.4301, 0.6144, 0.7987, 0.8392),
    (4, 0.882353, -0.038603, 0.3767, 0.5381, 0.6995, 0.8025),
    (5, 0.843750, -0.043750, 0.3402, 0.4861, 0.6319, 0.7608),
    (6, 0.800000, -0.050000, 0.3130, 0.4472, 0.5814, 0.7133),
    (7, 0.750000, -0.057692, 0.2912, 0.4160, 0.5408, 0.6584),
    (13, 0.187500, -0.187500, 0.1456, 0.2080, 0.2704, 0.0000),
]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def manifest_cases(file):
    return json.loads((GOLDEN / "manifest.json").read_text())["files"][file]["cases"]


# --- times ----------------------------------------------------------------------------------------


def test_six_points_with_shift_three_are_these_times():
    expected = [1.0, 12 / 13, 9 / 11, 2 / 3, 3 / 7, 0.0]
    times = schedule(6, 3.0)
    assert times.dtype == torch.float32
    assert times.tolist() == pytest.approx(expected, abs=1e-7)


def test_shift_one_is_a_straight_line():
    assert schedule(5, 1.0).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_schedule_of_one_point_is_refused():
    with pytest.raises(ValueError, match="points is 1; give at least 2"):
        schedule(1, 3.0)


@needs_golden
def test_schedules_equal_the_originals_bit_for_bit():
    for case in manifest_cases("misc.safetensors")["schedules"]:
        times = schedule(case["num_timesteps"], case["timestep_shift"])
        assert torch.equal(times, torch.tensor(case["timesteps"]))
        assert len(times) - 1 == case["velocity_evaluations"]
        for text, count in case["evaluations_with_cfg"].items():
            interval = tuple(float(part) for part in text.strip("(]").split(","))
            assert sum(in_interval(t, interval) for t in times[:-1]) == count


def test_guidance_is_tested_on_the_shifted_time_with_an_open_lower_end():
    settings = DrawSettings(points=50)
    assert sum(settings.guided(t) for t in settings.times[:-1]) == 41
    settings = DrawSettings(interval=(0.5, 0.75))
    assert [settings.guided(t) for t in (0.5, 0.51, 0.75, 0.76)] == [False, True, True, False]
    assert not DrawSettings(text_scale=1.0).guided(0.9)


def test_training_times_are_shifted_sigmoids_of_a_normal():
    times = sample_times(20_000, 3.0, torch.Generator().manual_seed(1))
    plain = torch.sigmoid(randn(20_000, seed=1))
    assert torch.equal(times, shift_times(plain, 3.0))
    assert times.median().item() == pytest.approx(0.75, abs=0.01)  # 3 * 0.5 / (1 + 2 * 0.5)
    assert 0 < times.min() < times.max() < 1


# --- loss -----------------------------------------------------------------------------------------


def test_interpolation_runs_from_the_picture_to_the_noise():
    clean, noise = torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, -2.0]])
    assert interpolate(clean, noise, torch.tensor([[0.0]])).tolist() == [[1.0, 2.0]]
    assert interpolate(clean, noise, torch.tensor([[0.25]])).tolist() == [[2.0, 1.0]]
    assert velocity_target(clean, noise).tolist() == [[4.0, -4.0]]


def test_the_loss_is_a_weighted_mean_over_tokens():
    clean = torch.zeros(2, 2)
    noise = torch.tensor([[1.0, 1.0], [2.0, 0.0]])
    velocity = torch.tensor([[1.0, 3.0], [2.0, 4.0]])
    assert flow_matching_errors(velocity, noise, clean).tolist() == [2.0, 8.0]
    assert flow_matching_loss(velocity, noise, clean) == 5.0
    assert flow_matching_loss(velocity, noise, clean, torch.tensor([3.0, 1.0])) == 3.5
    assert flow_matching_loss(velocity, noise, clean, torch.zeros(2)) == 0.0


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", STEP_TABLE, ids=lambda row: f"step{row[0]}")
def test_step_stds_are_those_of_the_published_formulas(row):
    step, t, dt, *stds, cps_std = row
    times = schedule(15, 3.0)
    x = torch.zeros(1, 64)
    assert times[step].item() == pytest.approx(t, abs=1e-6)
    assert (times[step + 1] - times[step]).item() == pytest.approx(dt, abs=1e-6)
    for level, std in zip((0.7, 1.0, 1.3), stds, strict=True):
        found = sde_mean_std(x, x, times[step], times[step + 1], level)[1]
        assert found.item() == pytest.approx(std, abs=1e-4)
    found = cps_mean_std(x, x, times[step], times[step + 1], 0.8)[1]
    assert found.item() == pytest.approx(cps_std, abs=1e-4)


@pytest.mark.parametrize(
    ("points", "sigma", "expected"),
    [
        (50, "second_point", [12.04, 12.00, 8.40]),
        (50, "capped", [4.47, 4.46, 4.44]),
        (20, "second_point", [7.42, 7.35, 5.05]),
        (20, "capped", [4.47, 4.43, 4.39]),
    ],
)
def test_both_published_clamps_give_their_sigmas(points, sigma, expected):
    times = schedule(points, 3.0)
    x = torch.zeros(1, 64)
    found = [
        (sde_mean_std(x, x, t, t_next, 0.5, sigma)[1] / (t - t_next).sqrt()).item() / 0.5
        for t, t_next in list(pairwise(times))[:3]
    ]
    assert found == pytest.approx(expected, abs=0.01)


def test_a_fresh_step_has_log_prob_minus_one_half():
    x, v, noise = randn(1024, 64), randn(1024, 64, seed=1), randn(1024, 64, seed=2)
    times = schedule(15, 3.0)
    for sigma in ("second_point", "capped", "constant"):
        for t, t_next in pairwise(times):
            step = sde_step(x, v, t, t_next, 0.7, noise, sigma)
            assert step.logprob.item() == pytest.approx(-0.5, abs=0.011)


def test_no_noise_is_the_euler_step_bit_for_bit():
    x, v, noise = randn(2, 6, 64), randn(2, 6, 64, seed=1), randn(2, 6, 64, seed=2)
    for t, t_next in pairwise(schedule(15, 3.0)):
        euler = euler_step(x, v, t, t_next)
        assert torch.equal(euler, x - v * (t - t_next))
        step = sde_step(x, v, t, t_next, 0.0, noise)
        assert torch.equal(step.x_next, euler)
        assert step.logprob.tolist() == [0.0, 0.0]
        step = cps_step(x, v, t, t_next, 0.0, noise)
        assert torch.allclose(step.x_next, euler, atol=2e-6)
        assert step.logprob.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_drawn_steps_have_the_stated_mean_and_variance(kind):
    times = schedule(15, 3.0)
    t, t_next = times[4], times[5]
    x, v = torch.full((40_000, 1, 1), 0.8), torch.full((40_000, 1, 1), -0.3)
    noise = randn(40_000, 1, 1)
    if kind == "sde":
        step = sde_step(x, v, t, t_next, 1.0, noise)
        # By hand: x + [v + s² / 2t (x + (1-t) v)] dt with s² = t / (1-t) = 7.5
        expected_mean = 0.8 + (-0.3 + 7.5 / (2 * 15 / 17) * (0.8 - 2 / 17 * 0.3)) * -0.0386029
        expected_std = 0.5381
    else:
        step = cps_step(x, v, t, t_next, 0.8, noise)
        clean, eps = 0.8 + 15 / 17 * 0.3, 0.8 - 2 / 17 * 0.3
        expected_std = 0.84375 * math.sin(0.4 * math.pi)
        expected_mean = 0.15625 * clean + math.sqrt(0.84375**2 - expected_std**2) * eps
    assert step.mean[0].item() == pytest.approx(expected_mean, abs=1e-4)
    error = 4 * expected_std / math.sqrt(40_000)
    assert step.x_next.mean().item() == pytest.approx(expected_mean, abs=error)
    assert step.x_next.std().item() == pytest.approx(expected_std, rel=0.02)


@pytest.mark.parametrize("sigma", ["second_point", "capped", "constant"])
def test_the_sde_keeps_the_distribution_that_the_ode_transports(sigma):
    """Data N(0, 0.5²) with its exact velocity: any amount of noise must end at a std of 0.5."""
    spread = 0.5
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20_000, 1, 1, generator=generator)
    for t, t_next in pairwise(schedule(300, 3.0)):
        variance = (1 - t) ** 2 * spread**2 + t**2
        v = (t - (1 - t) * spread**2) / variance * x
        noise = torch.randn(x.shape, generator=generator)
        x = sde_step(x, v, t, t_next, 0.7, noise, sigma).x_next
    assert x.std().item() == pytest.approx(spread, rel=0.03)


def test_constant_sigma_is_the_dance_step():
    x, v = randn(6, 64), randn(6, 64, seed=1)
    t, t_next = torch.tensor(0.7), torch.tensor(0.6)
    mean, std = sde_mean_std(x, v, t, t_next, 0.3, "constant")
    score = -(x - (1 - t) * (x - t * v)) / t**2
    assert torch.allclose(mean, x + v * -0.1 - 0.5 * 0.3**2 * score * -0.1, atol=1e-6)
    assert std.item() == pytest.approx(0.3 * math.sqrt(0.1), abs=1e-6)


def test_cps_keeps_the_noise_on_schedule_and_ends_without_noise():
    t, t_next = torch.tensor(0.6), torch.tensor(0.4)
    noise = randn(50_000, 1, 1)
    clean, eps = torch.full_like(noise, 2.0), randn(50_000, 1, 1, seed=1)
    step = cps_step(interpolate(clean, eps, t), eps - clean, t, t_next, 0.8, noise)
    assert step.x_next.mean().item() == pytest.approx(0.6 * 2.0, abs=0.01)
    assert step.x_next.std().item() == pytest.approx(0.4, rel=0.02)
    last = cps_step(interpolate(clean, eps, t), eps - clean, t, 0.0, 0.8, noise)
    assert torch.allclose(last.x_next, clean, atol=1e-6)
    assert not last.logprob.any()


def test_the_gaussian_log_prob_is_torchs():
    x, v, noise = randn(3, 6, 64), randn(3, 6, 64, seed=1), randn(3, 6, 64, seed=2)
    for step in (
        sde_step(x, v, 0.7, 0.6, 0.7, noise, logprob="gaussian"),
        cps_step(x, v, 0.7, 0.6, 0.8, noise, logprob="gaussian"),
    ):
        normal = torch.distributions.Normal(step.mean, step.std)
        assert torch.allclose(step.logprob, normal.log_prob(step.x_next).mean((1, 2)), atol=1e-5)


def test_the_released_cps_log_prob_drops_the_variance():
    step = cps_step(randn(6, 64), randn(6, 64, seed=1), 0.7, 0.6, 0.8, randn(6, 64, seed=2))
    assert step.logprob.item() == pytest.approx(-(step.x_next - step.mean).square().mean().item())


def test_replaying_a_step_gives_its_log_prob_and_a_gradient_through_the_mean_only():
    x, noise = randn(2, 6, 64), randn(2, 6, 64, seed=2)
    v = randn(2, 6, 64, seed=1).requires_grad_()
    taken = sde_step(x, v.detach(), 0.7, 0.6, 0.7, noise)
    mean, std = sde_mean_std(x, v, 0.7, 0.6, 0.7)
    replayed = transition_logprob(taken.x_next, mean, std)
    assert torch.equal(replayed, taken.logprob)
    replayed.sum().backward()
    assert v.grad.abs().max() > 0
    assert not sde_step(x, v, 0.7, 0.6, 0.7, noise).x_next.requires_grad


def test_each_image_may_have_its_own_time():
    x, v, noise = randn(2, 6, 64), randn(2, 6, 64, seed=1), randn(2, 6, 64, seed=2)
    t, t_next = torch.tensor([1.0, 0.5]), torch.tensor([0.9, 0.3])
    both = sde_step(x, v, t, t_next, 0.7, noise)
    for i in range(2):
        alone = sde_step(x[i], v[i], t[i], t_next[i], 0.7, noise[i])
        assert torch.allclose(both.x_next[i], alone.x_next, atol=1e-6)
        assert torch.allclose(both.logprob[i], alone.logprob, atol=1e-6)


def test_half_precision_latents_are_stepped_in_fp32():
    x, v = randn(6, 64).bfloat16(), randn(6, 64, seed=1).bfloat16()
    assert euler_step(x, v, 0.7, 0.6).dtype == torch.float32
    assert sde_step(x, v, 0.7, 0.6, 0.7, randn(6, 64)).mean.dtype == torch.float32


# --- guidance -------------------------------------------------------------------------------------

COND = torch.tensor([[3.0, 4.0], [0.0, 5.0]])
TEXT = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
IMAGE = torch.tensor([[0.0, 4.0], [0.0, 5.0]])


def settings(**changes):
    return DrawSettings(**{"text_scale": 2.0, "image_scale": 1.0, **changes})


def test_text_guidance_without_renorm_extrapolates():
    assert guide(COND, TEXT, None, settings(renorm_min=1.0)).tolist() == [[3.0, 8.0], [0.0, 10.0]]


def test_channel_renorm_brings_each_token_back_to_its_conditional_norm():
    guided = guide(COND, TEXT, None, settings(renorm="channel"))
    ratio = 5 / math.sqrt(73)
    assert guided.flatten().tolist() == pytest.approx([3 * ratio, 8 * ratio, 0, 5], abs=1e-5)


def test_global_renorm_brings_the_image_back_as_a_whole():
    guided = guide(COND, TEXT, None, settings(renorm="global"))
    ratio = math.sqrt(50 / 173)
    assert guided.flatten().tolist() == pytest.approx([3 * ratio, 8 * ratio, 0, 10 * ratio])


def test_renorm_never_enlarges_and_stops_at_its_minimum():
    small = guide(COND, COND * 1.2, None, settings(renorm="channel"))
    assert torch.allclose(small, COND * 0.8)  # norm ratio 1.25 is clamped to 1
    floor = guide(COND, -COND, None, settings(renorm="global", renorm_min=0.5))
    assert torch.allclose(floor, COND * 3 * 0.5)  # norm ratio 1/3 is clamped to 0.5


def test_image_guidance_comes_before_the_renorm_except_for_text_channel():
    before = guide(COND, TEXT, IMAGE, settings(image_scale=3.0, renorm_min=1.0))
    assert before.tolist() == [[9.0, 16.0], [0.0, 20.0]]
    after = guide(COND, TEXT, IMAGE, settings(image_scale=3.0, renorm="text_channel"))
    text_part = guide(COND, TEXT, None, settings(renorm="channel"))
    assert torch.allclose(after, IMAGE + 3 * (text_part - IMAGE))


def test_a_text_scale_of_one_switches_all_guidance_off():
    assert torch.equal(guide(COND, TEXT, IMAGE, settings(text_scale=1.0, image_scale=2.0)), COND)


def test_a_folded_image_branch_equals_running_it_and_the_closed_form():
    for renorm in ("global", "channel", "text_channel"):
        both = settings(text_scale=4.0, image_scale=1.5, renorm=renorm)
        assert torch.equal(guide(COND, TEXT, None, both), guide(COND, TEXT, COND, both))
    closed = TEXT + (1 + 1.5 * (4.0 - 1)) * (COND - TEXT)
    folded = guide(COND, TEXT, None, settings(text_scale=4.0, image_scale=1.5, renorm_min=1.0))
    assert torch.allclose(folded, closed)


def test_a_folded_text_branch_leaves_text_guidance_without_effect():
    both = settings(text_scale=4.0, image_scale=2.0)
    assert torch.allclose(guide(COND, None, IMAGE, both), guide(COND, COND, IMAGE, both))


def test_each_image_has_its_own_norm_whether_packed_or_batched():
    one = settings(text_scale=4.0)
    a, b = [(randn(6, 64, seed=i), randn(6, 64, seed=i + 9)) for i in (1, 2)]
    alone = [guide(cond, text, None, one) for cond, text in (a, b)]
    cond, text = torch.stack([a[0], b[0]]), torch.stack([a[1], b[1]])
    assert torch.allclose(guide(cond, text, None, one), torch.stack(alone), atol=1e-6)
    packed = guide(cond.flatten(0, 1), text.flatten(0, 1), None, one, lengths=[6, 6])
    assert torch.equal(packed, torch.cat(alone))
    call = guide(cond.flatten(0, 1), text.flatten(0, 1), None, settings(norm_over="call"), [6, 6])
    assert not torch.allclose(call, torch.cat(alone))


@needs_golden
@pytest.mark.parametrize("file", ["gen_t2i", "gen_edit", "gen_batch"])
def test_guidance_reproduces_the_recorded_velocities_of_every_case(file):
    from safetensors.torch import load_file

    tensors = load_file(GOLDEN / f"{file}.safetensors")
    checked = 0
    for name, case in manifest_cases(f"{file}.safetensors").items():
        if "cfg_on_steps" not in case or f"{name}.v_cond" not in tensors:
            continue
        setting = DrawSettings(
            points=case["num_timesteps"],
            timestep_shift=case["timestep_shift"],
            text_scale=case["cfg_text_scale"],
            image_scale=case["cfg_img_scale"],
            interval=tuple(case["cfg_interval"]),
            renorm=case["cfg_renorm_type"],
            renorm_min=case["cfg_renorm_min"],
            norm_over=case.get("norm_over", "image"),
        )
        lengths = [height * width // 256 for height, width in case["image_sizes_hw"]]
        times = schedule(setting.points, setting.timestep_shift)
        assert [setting.guided(t) for t in times[:-1]] == case["cfg_on_steps"]
        for i, on in enumerate(case["cfg_on_steps"]):
            cond = tensors[f"{name}.v_cond"][i]
            text = tensors[f"{name}.v_text_uncond"][i]
            image = tensors.get(f"{name}.v_img_uncond")
            branches = [None if image is None else image[i]]
            if file == "gen_t2i" and name != "think":
                branches.append(None)  # equals the conditional branch: folding must not matter
            for branch in branches:
                found = guide(cond, text, branch, setting, lengths) if on else cond
                assert torch.allclose(found, tensors[f"{name}.v"][i], atol=1e-4)
                x_next = euler_step(tensors[f"{name}.x"][i], found, times[i], times[i + 1])
                if i + 1 < len(tensors[f"{name}.x"]):
                    assert torch.allclose(x_next, tensors[f"{name}.x"][i + 1], atol=1e-4)
                checked += 1
    assert checked >= 10
