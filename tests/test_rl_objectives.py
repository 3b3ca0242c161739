"""The losses of RL against numbers worked out by hand, and the arithmetic of their steps.

python -m pytest tests/test_rl_objectives.py
"""

import math
from itertools import pairwise

import pytest
import torch

from rl.objectives import (
    FlowSettings,
    Guard,
    TextSettings,
    Totals,
    bounded_exp,
    flow_grpo,
    k3,
    merged,
    norm_ratio,
    report,
    text_grpo,
    transition_kl,
    velocity_kl,
    weights,
)
from umm_reflect.flow import (
    cps_mean_std,
    cps_step,
    euler_step,
    released_window_start,
    schedule,
    sde_mean_std,
    sde_step,
    transition_logprob,
)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- unit values of the steps ---------------------------------------------------------------------

# t, dt, std at a = 0.7, 1.0, 1.3, CPS std at a = 0.8: 15 points, shift 3
GOLDEN = {
    0: (1.000000, -0.025000, 0.7000, 1.0000, 1.3000, 0.9273),
    1: (0.975000, -0.027632, 0.7267, 1.0381, 1.3495, 0.9010),
    2: (0.947368, -0.030702, 0.5204, 0.7434, 0.9664, 0.8718),
    3: (0.916667, -0.034314, 0.4301, 0.6144, 0.7987, 0.8392),
    4: (0.882353, -0.038603, 0.3767, 0.5381, 0.6995, 0.8025),
    5: (0.843750, -0.043750, 0.3402, 0.4861, 0.6319, 0.7608),
    6: (0.800000, -0.050000, 0.3130, 0.4472, 0.5814, 0.7133),
    7: (0.750000, -0.057692, 0.2912, 0.4160, 0.5408, 0.6584),
    13: (0.187500, -0.187500, 0.1456, 0.2080, 0.2704, 0.0),
}


@pytest.mark.parametrize("step", GOLDEN)
def test_the_steps_have_the_golden_stds(step):
    t, dt, *stds, cps = GOLDEN[step]
    times, x = schedule(15, 3.0), torch.zeros(1, 64)
    now, then = times[step], times[step + 1]
    assert (now.item(), (then - now).item()) == pytest.approx((t, dt), abs=1e-6)
    found = [sde_mean_std(x, x, now, then, a)[1].item() for a in (0.7, 1.0, 1.3)]
    assert found == pytest.approx(stds, abs=6e-5)
    assert cps_mean_std(x, x, now, then, 0.8)[1].item() == pytest.approx(cps, abs=6e-5)


def test_a_fresh_transition_of_65536_numbers_has_log_prob_minus_one_half():
    x, v = randn(4, 1024, 64), randn(4, 1024, 64, seed=1)
    for step, (t, t_next) in enumerate(pairwise(schedule(15, 3.0))):
        fresh = sde_step(x, v, t, t_next, 0.7, randn(4, 1024, 64, seed=step + 2))
        assert fresh.logprob.tolist() == pytest.approx([-0.5] * 4, abs=0.011)


def test_the_dance_step_is_the_same_sde_with_a_constant_sigma():
    x, v, eta = randn(6, 64), randn(6, 64, seed=1), 0.3
    for t, t_next in list(pairwise(schedule(15, 3.0)))[1:]:
        dt = t_next - t
        score = -(x - (1 - t) * (x - t * v)) / t**2
        mean, std = sde_mean_std(x, v, t, t_next, eta, "constant")
        assert torch.allclose(mean, x + v * dt - 0.5 * eta**2 * score * dt, atol=2e-6)
        assert std.item() == pytest.approx(eta * math.sqrt(-dt), abs=1e-7)


def test_without_noise_both_stochastic_steps_are_eulers():
    x, v, noise = randn(2, 16, 64), randn(2, 16, 64, seed=1), randn(2, 16, 64, seed=2)
    for t, t_next in pairwise(schedule(15, 3.0)):
        euler = euler_step(x, v, t, t_next)
        assert torch.equal(sde_step(x, v, t, t_next, 0.0, noise).x_next, euler)
        assert torch.allclose(cps_step(x, v, t, t_next, 0.0, noise).x_next, euler, atol=2e-6)


def test_the_last_cps_step_adds_no_noise():
    x, v = randn(2, 16, 64), randn(2, 16, 64, seed=1)
    t, t_next = schedule(15, 3.0)[-2:]
    last = cps_step(x, v, t, t_next, 0.8, randn(2, 16, 64, seed=2))
    assert torch.allclose(last.x_next, x - t * v, atol=1e-6)
    assert last.logprob.tolist() == [0.0, 0.0]


def test_published_identities_give_the_published_windows():
    assert released_window_start(None, (0, 10), 2) == 6  # every first image
    assert [released_window_start((20260830, 1, i, 0), (0, 10), 2) for i in range(4)] == [
        0,
        6,
        4,
        1,
    ]
    assert released_window_start((20260830, 0, 0, 0), (0, 25), 2) == 8
    assert released_window_start((20260830, 0, 0, 1), (0, 25), 2) == 21


# --- weights --------------------------------------------------------------------------------------

# trajectory 0 says 2 turns of 1 and 3 tokens, trajectory 4 one turn of 2
UNIT = torch.tensor([0, 0, 0, 0, 4, 4])
TURN = torch.tensor([0, 1, 1, 1, 0, 0])


def test_released_weights_are_means_of_means_of_means():
    found = weights(UNIT, TURN, Totals.of(UNIT), "release")
    assert found.tolist() == pytest.approx([1 / 4, 1 / 12, 1 / 12, 1 / 12, 1 / 4, 1 / 4])


def test_token_weights_are_all_alike():
    assert weights(UNIT, TURN, Totals.of(UNIT), "token").tolist() == pytest.approx([1 / 6] * 6)


@pytest.mark.parametrize("reduction", ["release", "token"])
def test_weights_of_two_batches_sum_to_one_over_the_step(reduction):
    other_unit, other_turn = torch.tensor([7, 7, 9]), torch.tensor([0, 2, 1])
    totals = Totals.of(UNIT) + Totals.of(other_unit)
    assert totals == Totals(trajectories=4, items=9)
    parts = [weights(u, t, totals, reduction) for u, t in ((UNIT, TURN), (other_unit, other_turn))]
    assert torch.cat(parts).sum().item() == pytest.approx(1.0)


def test_the_order_of_the_tokens_does_not_matter():
    order = torch.tensor([5, 2, 0, 3, 4, 1])
    straight = weights(UNIT, TURN, Totals.of(UNIT), "release")
    assert torch.equal(
        weights(UNIT[order], TURN[order], Totals.of(UNIT), "release"), straight[order]
    )


def test_a_batch_without_tokens_has_no_weights():
    nothing = torch.zeros(0, dtype=torch.long)
    assert weights(nothing, nothing, Totals(2, 10), "release").shape == (0,)
    loss, sums = text_grpo(*(torch.zeros(0, requires_grad=True),) * 4, TextSettings())
    loss.backward()
    assert loss == 0
    assert report(merged([sums])) == {}


# --- text -----------------------------------------------------------------------------------------

HALF = torch.tensor([0.5, 0.5])


def logs(*probabilities):
    return torch.tensor(probabilities).log()


PLAIN = TextSettings()


def text(new, old, advantage, settings=PLAIN, **more):
    return text_grpo(new, old, torch.tensor(advantage), HALF, settings, **more)


def test_a_ratio_within_the_clip_is_the_plain_surrogate():
    loss, _ = text(logs(0.55, 0.45), logs(0.5, 0.5), [1.0, -1.0])
    assert loss.item() == pytest.approx((-1.1 + 0.9) / 2)


def test_a_ratio_beyond_the_clip_has_no_gradient_where_it_went_the_right_way():
    new = logs(0.65, 0.35).requires_grad_()
    loss, sums = text(new, logs(0.5, 0.5), [1.0, -1.0])
    assert loss.item() == pytest.approx((-1.2 + 0.8) / 2)  # ratios 1.3 and 0.7
    loss.backward()
    assert new.grad.tolist() == [0.0, 0.0]
    found = report(merged([sums]))
    assert found["clip_fraction"] == 1.0
    assert (found["clip_low"], found["clip_high"]) == (0.5, 0.5)


def test_a_ratio_beyond_the_clip_is_pulled_back_where_it_went_the_wrong_way():
    new = logs(0.65, 0.35).requires_grad_()
    loss, sums = text(new, logs(0.5, 0.5), [-1.0, 1.0])
    assert loss.item() == pytest.approx((1.3 - 0.7) / 2)
    loss.backward()
    assert new.grad.tolist() == pytest.approx([0.65, -0.35])  # -A r w
    assert report(merged([sums]))["clip_fraction"] == 0.0


def test_the_two_sides_of_the_clip_are_set_apart():
    settings = TextSettings(clip_low=0.2, clip_high=0.28)
    loss, _ = text(logs(0.65, 0.35), logs(0.5, 0.5), [1.0, -1.0], settings)
    assert loss.item() == pytest.approx((-1.28 + 0.8) / 2)


def test_on_policy_the_gradient_is_that_of_reinforce():
    new = logs(0.2, 0.7).requires_grad_()
    loss, sums = text(new, new.detach(), [2.0, -3.0])
    loss.backward()
    assert new.grad.tolist() == [-1.0, 1.5]  # -A w
    found = report(merged([sums]))
    assert (found["ratio"], found["ratio_max"], found["approx_kl"], found["drift_max"]) == (
        1,
        1,
        0,
        0,
    )


def test_the_gradient_does_not_flow_into_what_is_old():
    old, ref = logs(0.5, 0.5).requires_grad_(), logs(0.4, 0.4).requires_grad_()
    new = logs(0.5, 0.6).requires_grad_()
    text(new, old, [1.0, 1.0], TextSettings(kl=1.0), ref_S=ref)[0].backward()
    assert old.grad is None
    assert ref.grad is None
    assert new.grad is not None


def test_k3_has_the_sign_that_makes_its_mean_the_kl():
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (policy * (policy / reference).log()).sum()
    estimate = (policy * k3(policy.log(), reference.log())).sum()
    assert estimate.item() == pytest.approx(exact.item(), abs=1e-6)
    # the other way round, exp(new - ref) - 1 - (new - ref), as published
    published = (policy * k3(reference.log(), policy.log())).sum()
    assert (exact.item(), published.item()) == pytest.approx((0.3734, 0.4183), abs=1e-4)


def test_k3_stays_small_where_the_policy_has_learnt_to_like_a_token():
    assert k3(torch.tensor(0.0), torch.tensor(-45.0)).item() == pytest.approx(44.0)
    assert (k3(randn(100), randn(100, seed=1)) >= 0).all()


def test_the_kl_pulls_towards_the_reference():
    new = logs(0.6, 0.2).requires_grad_()
    loss, sums = text(new, new.detach(), [0.0, 0.0], TextSettings(kl=0.1), ref_S=logs(0.4, 0.4))
    loss.backward()
    assert new.grad[0] > 0 > new.grad[1]  # descent lowers the first and raises the second
    assert report(merged([sums]))["kl"] == pytest.approx(
        (k3(logs(0.6), logs(0.4)) + k3(logs(0.2), logs(0.4))).item() / 2
    )


def test_a_sampler_that_differs_from_the_learner_is_weighed_up_to_the_cap():
    settings = TextSettings(importance_cap=1.5)
    sampled = logs(0.25, 0.5)  # the learner's are 2 and 0.8 times these
    loss, sums = text(logs(0.5, 0.4), logs(0.5, 0.4), [1.0, 1.0], settings, sampled_S=sampled)
    assert loss.item() == pytest.approx(-(1.5 + 0.8) / 2)
    expected = (math.log(2) - math.log(0.8)) / 2
    assert report(merged([sums]))["mismatch"] == pytest.approx(expected)


def test_a_wild_ratio_stays_finite():
    assert bounded_exp(torch.tensor(1.0)).item() == pytest.approx(math.e)
    assert bounded_exp(torch.tensor(110.0)).item() == pytest.approx(101 * math.exp(10))
    new = torch.tensor([0.0, 0.0]).requires_grad_()
    loss, _ = text(new, torch.tensor([-500.0, -1.0]), [-1.0, -1.0])
    loss.backward()
    assert loss.isfinite()
    assert new.grad.isfinite().all()


def test_entropy_is_logged_over_tokens():
    _, sums = text(logs(0.5, 0.5), logs(0.5, 0.5), [1.0, 1.0], entropy_S=torch.tensor([0.2, 0.6]))
    assert report(merged([sums]))["entropy"] == pytest.approx(0.4)


def test_sums_of_batches_add_up_and_maxima_do_not():
    one = text(logs(0.5, 0.6), logs(0.5, 0.5), [1.0, 1.0])[1]
    other = text(logs(0.5, 0.4), logs(0.5, 0.5), [1.0, 1.0])[1]
    found = report(merged([one, other]))
    assert found["count"] == 4
    assert found["ratio"] == pytest.approx((1 + 1.2 + 1 + 0.8) / 4)
    assert found["ratio_max"] == pytest.approx(1.2)
    assert found["loss"] == pytest.approx(-2.0)


def test_sums_that_were_merged_merge_again_without_loss():
    counts = {"count": 2.0**24 + 1, "ratio": 0.1}
    assert merged([counts, {}]) == counts
    assert merged([]) == {}
    again = merged([counts, {"count": torch.tensor(1.0), "ratio": torch.tensor(0.5)}])
    assert again == {"count": 2.0**24 + 2, "ratio": 0.6}


# --- FlowGRPO -------------------------------------------------------------------------------------


def test_the_flow_loss_clips_at_one_part_in_a_hundred_thousand():
    old = torch.tensor([-0.5, -0.5])
    new = (old.double() + torch.tensor([4e-5, -4e-5])).float().requires_grad_()
    loss, sums = flow_grpo(new, old, torch.tensor([1.0, 1.0]), HALF, FlowSettings())
    loss.backward()
    assert report(merged([sums]))["clip_fraction"] == 0.5
    assert new.grad.tolist() == pytest.approx([0.0, -0.5], abs=1e-4)


def test_the_gradient_of_a_good_step_moves_its_mean_towards_what_was_drawn():
    x, v = randn(3, 16, 8), randn(3, 16, 8, seed=1).requires_grad_()
    taken = sde_step(x, v.detach(), 0.7, 0.6, 0.7, randn(3, 16, 8, seed=2))
    mean, std = sde_mean_std(x, v, 0.7, 0.6, 0.7)
    new = transition_logprob(taken.x_next, mean, std)
    advantage = torch.tensor([1.0, -1.0, 0.0])
    flow_grpo(new, taken.logprob, advantage, torch.full((3,), 1 / 3), FlowSettings())[0].backward()
    with torch.no_grad():
        after = transition_logprob(taken.x_next, *sde_mean_std(x, v - v.grad, 0.7, 0.6, 0.7))
    assert after[0] > taken.logprob[0]
    assert after[1] < taken.logprob[1]
    assert after[2] == taken.logprob[2]


def test_the_velocity_distance_is_a_mean_over_an_images_numbers():
    v, ref = torch.zeros(2, 2, 2), torch.tensor([[[1.0, 1], [1, 1]], [[2.0, 0], [0, 0]]])
    assert velocity_kl(v, ref).tolist() == [1.0, 1.0]
    assert norm_ratio(2 * ref, ref).tolist() == [2.0, 2.0]


def test_the_transition_kl_is_that_of_the_two_gaussians_of_the_step():
    x, v, ref = randn(2, 6, 8), randn(2, 6, 8, seed=1), randn(2, 6, 8, seed=2)
    mean, std = sde_mean_std(x, v, 0.7, 0.6, 0.7)
    other, _ = sde_mean_std(x, ref, 0.7, 0.6, 0.7)
    normal = torch.distributions.Normal
    exact = torch.distributions.kl_divergence(normal(mean, std), normal(other, std)).mean((1, 2))
    assert torch.allclose(transition_kl(mean, other, std), exact, atol=1e-6)
    # the published form divides by 2 sigma^2 alone: for this step a tenth of the KL
    assert std.square().item() == pytest.approx(0.49 * 0.7 / 0.3 * 0.1, abs=1e-6)


def test_a_step_without_noise_has_no_transition_kl():
    std = torch.tensor([0.0, 1.0])
    found = transition_kl(torch.ones(2, 2, 2), torch.zeros(2, 2, 2), std)
    assert found.tolist() == [0.0, 0.5]
    assert transition_kl(torch.ones(2, 2, 2), torch.zeros(2, 2, 2), std.view(2, 1, 1)).tolist() == [
        0.0,
        0.5,
    ]


def test_the_penalty_joins_the_loss_with_its_factor():
    same = torch.tensor([-0.5, -0.5])
    loss, sums = flow_grpo(
        same,
        same,
        torch.tensor([1.0, -1.0]),
        HALF,
        FlowSettings(kl=0.1),
        kl_N=torch.tensor([2.0, 4.0]),
    )
    assert loss.item() == pytest.approx(0.3)
    assert report(merged([sums]))["kl"] == 3.0
    halved = FlowSettings(kl=0.1, weight=0.5)
    loss, _ = flow_grpo(
        same, same, torch.tensor([1.0, -1.0]), HALF, halved, kl_N=torch.tensor([2.0, 4.0])
    )
    assert loss.item() == pytest.approx(0.15)


def test_the_guard_centres_and_scales_the_ratio():
    mean, old_mean = torch.full((1, 2, 2), 0.1), torch.zeros(1, 2, 2)
    guard = Guard(mean, old_mean, std=torch.tensor([0.5]), dt=torch.tensor([-0.04]))
    new, old = torch.tensor([-0.51]), torch.tensor([-0.5])
    settings = FlowSettings(guard=True, clip_low=1.0, clip_high=1.0)
    loss, _ = flow_grpo(new, old, torch.tensor([1.0]), torch.ones(1), settings, guard=guard)
    # b = 0.01 / (2 x 0.25) = 0.02; r = exp((-0.01 + 0.02) x 0.5)
    assert loss.item() == pytest.approx(-math.exp(0.005) / 0.04, rel=1e-5)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextSettings(clip_low=-0.1), "text clip_low is -0.1; give at least 0"),
        (lambda: TextSettings(reduction="sum"), "choose one of release, token"),
        (lambda: FlowSettings(kl_kind="reward"), "choose one of velocity, transition"),
        (lambda: FlowSettings(kl=math.inf), "flow kl is inf"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
