"""Advantages by hand: groups, leave-one-out, one std for the step, flat groups, malformed ones.

python -m pytest tests/test_rl_advantage.py
"""

import math
import random

import pytest

from rl.advantage import PRESETS, AdvantageSettings, advantages, statistics

NONE = [False] * 99


def of_group(rewards, settings, malformed=NONE):
    return advantages(rewards, [0] * len(rewards), malformed[: len(rewards)], settings)


def test_a_group_is_centred_and_divided_by_its_std():
    settings = AdvantageSettings(std_floor=0.0)
    assert of_group([0.0, 1.0], settings) == [-1.0, 1.0]
    assert of_group([1.0, 2.0, 3.0, 6.0], settings) == pytest.approx(
        [-2 / 3.5**0.5, -1 / 3.5**0.5, 0.0, 3 / 3.5**0.5]
    )


def test_each_group_is_compared_with_itself_alone():
    rewards, groups = [0.0, 10.0, 1.0, 12.0], ["a", "b", "a", "b"]
    found = advantages(rewards, groups, [False] * 4, AdvantageSettings(std_floor=0.0))
    assert found == [-1.0, -1.0, 1.0, 1.0]


def test_a_small_spread_is_divided_by_the_floor():
    found = of_group([1.0, 0.95], AdvantageSettings(std_floor=0.1))
    assert found == pytest.approx([0.25, -0.25])


def test_the_published_clip_is_one():
    found = of_group([1.0] + [0.0] * 15, PRESETS["release"])
    assert found[0] == 1.0
    assert found[1:] == pytest.approx([-(1 / 16) / (15**0.5 / 16)] * 15)


def test_flow_grpo_adds_an_epsilon_and_verl_divides_by_n_minus_one():
    assert of_group([0.0, 1.0], PRESETS["flow_grpo"]) == pytest.approx(
        [-0.5 / 0.5001, 0.5 / 0.5001]
    )
    std = 0.5**0.5 + 1e-4
    assert of_group([0.0, 1.0], PRESETS["verl"]) == pytest.approx([-0.5 / std, 0.5 / std])


def test_leave_one_out_compares_with_the_mean_of_the_others():
    settings = AdvantageSettings(kind="leave_one_out")
    assert of_group([0.0, 0.5, 1.0], settings) == pytest.approx([-0.75, 0.0, 0.75])


def test_global_std_keeps_the_groups_means_and_shares_the_scale():
    settings = AdvantageSettings(kind="global_std", std_floor=0.0)
    found = advantages([0.0, 2.0, 5.0, 5.5], [0, 0, 1, 1], [False] * 4, settings)
    mean = 12.5 / 4
    std = math.sqrt(sum((r - mean) ** 2 for r in (0.0, 2.0, 5.0, 5.5)) / 4)
    assert found == pytest.approx([-1 / std, 1 / std, -0.25 / std, 0.25 / std])


def test_awm_brings_the_clip_to_one():
    settings = AdvantageSettings(std_floor=0.0, clip=5.0, scale_to=1.0)
    found = of_group([1.0] + [0.0] * 99, settings, [False] * 100)
    assert found[0] == 1.0  # 9.95 clipped at 5
    assert found[1] == pytest.approx(-(0.01 / (0.01 * 0.99) ** 0.5) / 5)


# --- flat groups and malformed members ------------------------------------------------------------


def test_members_of_a_flat_group_are_left_out():
    rewards, groups = [0.25, 0.25, 0.0, 1.0], [0, 0, 1, 1]
    settings = AdvantageSettings(std_floor=0.0)
    assert advantages(rewards, groups, [False] * 4, settings) == [None, None, -1.0, 1.0]
    kept = AdvantageSettings(std_floor=0.0, skip_flat=False)
    assert advantages(rewards, groups, [False] * 4, kept) == [0.0, 0.0, -1.0, 1.0]


def test_sums_that_differ_in_the_last_bit_are_a_flat_group():
    assert of_group([0.1 + 0.2, 0.3], AdvantageSettings(std_floor=0.0)) == [None, None]


@pytest.mark.parametrize("kind", ["group", "leave_one_out", "global_std"])
def test_a_group_of_one_teaches_nothing(kind):
    settings = AdvantageSettings(kind=kind)
    assert advantages([0.7, 0.2], ["a", "b"], [False] * 2, settings) == [None, None]


def test_a_malformed_trajectory_is_never_encouraged():
    settings = AdvantageSettings(std_floor=0.1, clip=1.0, malformed=0.5)
    found = of_group([1.0, 0.0, 0.0, 0.0], settings, [True, False, False, True])
    assert found[0] == -0.5  # min(1, 0) - 0.5
    assert found[1] == found[2] == pytest.approx(-1 / 3**0.5)
    assert found[3] == -1.0  # -0.577 - 0.5, clipped


def test_all_siblings_malformed_are_all_discouraged_though_their_group_is_flat():
    assert of_group([0.2] * 4, AdvantageSettings(), [True] * 4) == [-0.5] * 4
    assert of_group([0.2] * 3, AdvantageSettings(), [True, False, False]) == [-0.5, None, None]
    assert of_group([0.2] * 3, PRESETS["release"], [True, False, False]) == [-0.5, 0.0, 0.0]


def test_without_the_rule_a_malformed_trajectory_is_like_any_other():
    settings = AdvantageSettings(std_floor=0.0, malformed=None)
    assert of_group([1.0, 0.0], settings, [True, False]) == [1.0, -1.0]
    assert of_group([0.0] * 2, settings, [True] * 2) == [None, None]


# --- the same everywhere --------------------------------------------------------------------------


def test_the_order_of_the_trajectories_does_not_change_a_bit():
    rng = random.Random(0)
    rows = [(rng.random(), g, rng.random() < 0.1) for g in range(6) for _ in range(16)]
    for settings in (*PRESETS.values(), AdvantageSettings(kind="leave_one_out")):
        straight = dict(zip(rows, advantages(*zip(*rows, strict=True), settings), strict=True))
        mixed = rng.sample(rows, len(rows))
        again = dict(zip(mixed, advantages(*zip(*mixed, strict=True), settings), strict=True))
        assert again == straight


def test_rewards_that_are_no_numbers_and_lists_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="the reward of trajectory 1 is nan"):
        of_group([0.0, math.nan], AdvantageSettings())
    with pytest.raises(ValueError, match="2 rewards, 1 groups and 2 marks"):
        advantages([0.0, 1.0], [0], [False] * 2, AdvantageSettings())
    assert advantages([], [], [], AdvantageSettings()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "batch"}, "choose one of group, leave_one_out, global_std"),
        ({"clip": 0.0}, "clip is 0.0; give a number above 0"),
        ({"std_floor": -1.0}, "std_floor is -1.0; give 0 or more"),
    ],
)
def test_settings_that_cannot_work_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        AdvantageSettings(**change)


# --- what is logged -------------------------------------------------------------------------------


def test_statistics_count_flat_groups_and_clipped_advantages():
    rewards, groups = [0.0, 1.0, 0.5, 0.5], [0, 0, 1, 1]
    settings = AdvantageSettings(std_floor=0.0, clip=1.0)
    values = advantages(rewards, groups, [False] * 4, settings)
    assert statistics(rewards, groups, values, settings) == {
        "reward_mean": 0.5,
        "reward_std": pytest.approx(0.125**0.5),
        "group_std": 0.25,
        "zero_std_ratio": 0.5,
        "skipped": 0.5,
        "advantage_mean": 0.0,
        "advantage_abs": 1.0,
        "advantage_positive": 0.5,
        "saturation": 1.0,
    }
    assert "saturation" not in statistics([0.5] * 2, [0, 0], [None] * 2, settings)
    assert statistics([], [], [], settings) == {}
