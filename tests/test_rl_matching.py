"""RL by flow matching (AWM, DiffusionNFT) against numbers worked out by hand.

python -m pytest tests/test_rl_matching.py
"""

import pytest
import torch

from rl.matching import (
    AwmSettings,
    NftSettings,
    TimeSettings,
    awm,
    decay,
    matching_times,
    nft,
    optimality,
    surrogate_logprob,
)
from rl.objectives import merged, report, velocity_kl
from umm_reflect.flow import schedule

HALF = torch.tensor([0.5, 0.5])


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- AWM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("uniform", -4.0),
        ("t", -2.0),
        ("t2", -1.0),
        ("huber", -0.5 * 2.0),
        ("ghuber", -0.5 * (4**0.25 - 1e-10**0.25) / 0.25),
    ],
)
def test_the_published_surrogates_of_a_matching_error_of_four(kind, expected):
    velocity, target = torch.full((1, 3, 2), 3.0), torch.ones(1, 3, 2)
    found = surrogate_logprob(velocity, target, torch.tensor([0.5]), kind)
    assert found.item() == pytest.approx(expected, abs=2e-5)


def test_awm_on_policy_has_a_ratio_of_one_and_the_gradient_of_the_surrogate():
    velocity, target = randn(2, 4, 3).requires_grad_(), randn(2, 4, 3, seed=1)
    t, advantage = torch.tensor([0.8, 0.5]), torch.tensor([1.0, -0.5])
    settings = AwmSettings(ref=0.0, slow=0.0)
    loss, sums = awm(velocity, target, t, advantage, HALF, settings)
    [found] = torch.autograd.grad(loss, velocity)
    plain = -(advantage * HALF * surrogate_logprob(velocity, target, t)).sum()
    [expected] = torch.autograd.grad(plain, velocity)
    assert torch.allclose(found, expected, atol=1e-6)
    assert report(merged([sums]))["ratio_max"] == 1.0


def test_awm_with_true_ratios_compares_with_the_policy_before_the_update():
    velocity, target, t = torch.full((1, 2, 2), 2.0), torch.zeros(1, 2, 2), torch.tensor([0.5])
    settings = AwmSettings(surrogate="t", true_ratio=True, clip=0.2, ref=0.0, slow=0.0)
    old = torch.tensor([-2.5])  # now -2: the ratio is exp(0.5), clipped at 1.2
    loss, _ = awm(velocity, target, t, torch.ones(1), torch.ones(1), settings, old_N=old)
    assert loss.item() == pytest.approx(-1.2)


def test_awms_penalties_hold_it_to_the_reference_and_to_its_slow_average():
    velocity, target, t = torch.full((1, 2, 2), 2.0), torch.full((1, 2, 2), 2.0), torch.ones(1)
    ref, slow = torch.ones(1, 2, 2), torch.full((1, 2, 2), 4.0)
    settings = AwmSettings(ref=0.003, slow=1.0)
    loss, _ = awm(
        velocity, target, t, torch.zeros(1), torch.ones(1), settings, ref_NnC=ref, slow_NnC=slow
    )
    assert loss.item() == pytest.approx(0.003 * 1 + 1.0 * 4)


def test_slow_weights_follow_at_the_published_pace():
    assert [decay("linear_to_0_3", s) for s in (0, 100, 300, 900)] == [0.0, 0.1, 0.3, 0.3]
    assert [decay("linear_to_0_5", s) for s in (0, 500, 900)] == [0.0, 0.5, 0.5]
    assert [decay("delayed_to_0_999", s) for s in (0, 75, 175, 900)] == [0.0, 0.0, 0.75, 0.999]
    assert decay("copy", 500) == 0.0


def test_matching_times_are_consecutive_steps_within_the_window():
    settings = TimeSettings(count=6, choice="window", steps=(0, 11))
    table, starts = schedule(16, 3.0).tolist(), set()
    for seed in range(60):
        times = matching_times(settings, 16, 3.0, torch.Generator().manual_seed(seed)).tolist()
        start = table.index(times[0])
        assert times == table[start : start + 6]
        starts.add(start)
    assert starts == {0, 1, 2, 3, 4, 5}


def test_stratified_times_leave_pure_noise_out_and_take_one_of_each_stretch():
    settings = TimeSettings(count=4, choice="stratified", steps=(0, 13))
    table = schedule(15, 3.0).tolist()
    seen = set()
    for seed in range(80):
        times = matching_times(settings, 15, 3.0, torch.Generator().manual_seed(seed)).tolist()
        steps = [table.index(t) for t in times]
        assert all(1 + 3 * k <= step < 4 + 3 * k for k, step in enumerate(steps))
        seen |= set(steps)
    assert seen == set(range(1, 13))


def test_more_times_than_steps_are_refused():
    with pytest.raises(ValueError, match="6 different times cannot be chosen of the steps 0 to 4"):
        matching_times(TimeSettings(), 5, 3.0, torch.Generator())


# --- NFT ------------------------------------------------------------------------------------------


def test_advantages_become_optimality_probabilities():
    advantage = torch.tensor([-9.0, -2.5, 0.0, 2.5, 9.0])
    assert optimality(advantage, 5.0).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert optimality(advantage, 5.0, "positive_only").tolist() == [0.5, 0.5, 0.5, 0.75, 1.0]
    assert optimality(advantage, 5.0, "negative_only").tolist() == [0.0, 0.25, 0.5, 0.5, 0.5]
    assert optimality(advantage, 5.0, "one_only").tolist() == pytest.approx(
        [0.5, 0.5, 0.5, 0.6, 0.6]
    )
    assert optimality(advantage, 5.0, "binary").tolist() == pytest.approx([0.4, 0.4, 0.5, 0.6, 0.6])


def test_the_nft_loss_by_hand():
    one = torch.ones(1, 2, 2)
    settings = NftSettings(beta=0.5, ref=0.1, clip=5.0)
    # x_t = 3, x0 = 0, t = 0.5, v = 4, v_old = 2: v+ = 3, v- = 1; errors 1.5 and 2.5, each over
    # its own size; rho = 0.75; 5 (0.75 x 1.5 + 0.25 x 2.5) / 0.5 + 0.1 x (4 - 1)^2
    loss, sums = nft(
        *(4 * one, 2 * one, 3 * one, torch.tensor([0.5]), 0 * one, torch.tensor([2.5])),
        *(torch.ones(1), settings),
        ref_NnC=one,
    )
    assert loss.item() == pytest.approx(5 * (0.75 * 1.5 + 0.25 * 2.5) / 0.5 + 0.9)
    found = report(merged([sums]))
    assert (found["plus"], found["minus"], found["rho"]) == pytest.approx((1.5, 2.5, 0.75))


def test_nft_has_no_gradient_through_the_size_of_the_error():
    one, settings = torch.ones(1, 1, 1), NftSettings(ref=0.0)
    velocity = (4 * one).requires_grad_()
    # x_t = 3, x0 = 0, t = 0.5, rho = 1: L+ = (3 - v/2)^2 / |3 - v/2| at v = 4
    loss, _ = nft(
        *(velocity, 2 * one, 3 * one, torch.tensor([0.5]), 0 * one, torch.tensor([5.0])),
        *(torch.ones(1), settings),
    )
    loss.backward()
    assert velocity.grad.item() == pytest.approx(5 * 2 * 1.0 * -0.5)  # 5 x 2 e (-t) / |e|


@pytest.mark.parametrize(("advantage", "closer"), [(5.0, True), (-5.0, False)])
def test_nft_pulls_towards_good_images_and_away_from_bad_ones(advantage, closer):
    x0, noise, t = randn(1, 4, 3), randn(1, 4, 3, seed=1), torch.tensor([0.6])
    x_t = 0.4 * x0 + 0.6 * noise
    velocity = randn(1, 4, 3, seed=2).requires_grad_()
    loss, _ = nft(
        *(velocity, velocity.detach(), x_t, t, x0, torch.tensor([advantage]), torch.ones(1)),
        NftSettings(ref=0.0),
    )
    loss.backward()
    before = velocity_kl(velocity, noise - x0)
    after = velocity_kl(velocity - 0.01 * velocity.grad, noise - x0)
    assert (after < before).item() is closer


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AwmSettings(surrogate="cosine"), "choose one of uniform, t, t2, huber, ghuber"),
        (lambda: AwmSettings(power=0.0), "awm power is 0.0; give more than 0"),
        (lambda: NftSettings(mode="some"), "choose one of all, positive_only"),
        (lambda: TimeSettings(count=12), "lower times.count or widen times.steps"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
