"""Rewards by hand, and an exhaustive search for what the default reward pays for.

python -m pytest tests/test_rl_reward.py
"""

import math
from itertools import product

import pytest
from PIL import Image

from agent.types import ProtocolError, Reflection, Step, StopReason, Trajectory, Transition, Turn
from eval.verdict import Verdict
from rl.reward import PRESETS, RewardSettings, loopholes, score, trajectory_reward
from rl.types import Judged, Place, Prompt, Rollout

DONE, CAP, BROKEN = StopReason.DONE, StopReason.MAX_ROUNDS, StopReason.MALFORMED
OURS, RELEASE = PRESETS["ours"], PRESETS["release"]
ROUNDS = 4
LEVELS = (0.0, 0.1, 0.25, 0.45, 0.499, 1.0)


def total(path, stop, settings, edits=None):
    """A path's reward; an image is right if its quality is 1."""
    edits = len(path) - 1 if edits is None else edits
    terms = trajectory_reward(path, [q == 1 for q in path], stop, edits, settings)
    return sum(terms.values())


def every_path(edits):
    return product(LEVELS, repeat=edits + 1)


def legal_ends(path, settings):
    """All legal ends of a path: done, or an edit asked for when no round is left."""
    ends = [total(path, DONE, settings)]
    if len(path) - 1 == ROUNDS:
        ends.append(total(path, CAP, settings, edits=len(path)))
    return ends


# --- the published reward -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "stop", "expected"),
    [
        ((1.0,), DONE, 1.000),
        ((1.0, 1.0, 1.0, 1.0), CAP, 1.000),
        ((1.0, 0.25), CAP, -0.125),
        ((1.0, 0.25, 1.0), DONE, 0.850),
        ((0.25,), DONE, -0.250),
        ((0.25, 0.25, 0.25, 0.25), CAP, 0.250),
        ((0.25, 1.0), DONE, 1.225),
        ((0.25, 0.45, 1.0), DONE, 1.285),
        ((0.25, 1.0, 0.25, 1.0), CAP, 1.300),
    ],
)
def test_the_published_reward_has_its_worked_values(path, stop, expected):
    assert total(path, stop, RELEASE) == pytest.approx(expected, abs=1e-9)


def test_the_published_reward_pays_more_for_breaking_and_mending_again():
    assert total((0.25, 1.0, 0.25, 1.0), CAP, RELEASE) == pytest.approx(1.300)
    assert total((0.25, 1.0), DONE, RELEASE) == pytest.approx(1.225)
    holes = loopholes(RELEASE, 3)
    assert any("a detour beats the direct repair" in hole for hole in holes)
    assert any("going on with a right image earns as much as stopping" in hole for hole in holes)


def test_without_its_bonus_on_progress_the_published_reward_still_pays_for_idle_edits():
    [hole] = [h for h in loopholes(RewardSettings(edit_cost=0.0), 2) if "right image" in h]
    assert hole == (
        "going on with a right image earns as much as stopping: 1 → 1, done earns 1.000, "
        "1, done 1.000"
    )


# --- ours -----------------------------------------------------------------------------------------


def test_no_detour_beats_the_direct_repair():
    tried = 0
    for edits in range(2, ROUNDS + 1):
        for path in every_path(edits):
            if path[0] == 1:
                continue
            direct = total((path[0], 1.0), DONE, OURS)
            assert max(legal_ends(path, OURS)) < direct, path
            tried += 1
    assert tried == 5 * (6**2 + 6**3 + 6**4)


def test_a_path_that_ends_where_one_edit_would_have_led_earns_less_than_that_edit():
    for edits in range(2, ROUNDS + 1):
        for path in every_path(edits):
            shorter = total((path[0], path[-1]), DONE, OURS)
            assert total(path, DONE, OURS) < shorter, path


def test_stopping_with_a_right_image_beats_every_way_of_going_on():
    for before in range(ROUNDS + 1):
        for start in every_path(before):
            if start[-1] != 1:
                continue
            stopped = total(start, DONE, OURS)
            for more in range(1, ROUNDS - before + 1):
                for rest in product(LEVELS, repeat=more):
                    assert max(legal_ends(start + rest, OURS)) < stopped, (start, rest)
            if (
                before == ROUNDS
            ):  # nothing is drawn any more: to ask for an edit is worse all the same
                assert total(start, CAP, OURS, edits=ROUNDS + 1) < stopped


def test_going_on_with_a_wrong_image_beats_a_wrong_done_even_if_every_further_edit_fails():
    for before in range(ROUNDS + 1):
        for start in every_path(before):
            if start[-1] == 1:
                continue
            failed = start + (start[-1],) * (ROUNDS - before)
            gone_on = total(failed, CAP, OURS, edits=ROUNDS + 1)
            assert gone_on > total(start, DONE, OURS), start


def test_a_wrong_done_costs_more_than_a_wrong_cap_and_all_edits():
    assert OURS.wrong_done > OURS.wrong_cap + (ROUNDS + 1) * OURS.edit_cost


def test_a_malformed_end_never_beats_a_legal_one():
    for edits in range(ROUNDS + 1):
        for path in every_path(edits):
            assert total(path, BROKEN, OURS) < min(legal_ends(path, OURS)), path


def test_our_default_has_no_loophole_and_each_kind_of_one_is_found():
    assert [loopholes(OURS, rounds) for rounds in (0, 1, 2, 3, 4, 6)] == [[]] * 6
    found = {
        "a detour beats the direct repair": RewardSettings(sustained=0.2),
        "going on with a right image": RewardSettings(edit_cost=0.0),
        "a wrong done earns as much": RewardSettings(wrong_done=0.25),
        "a malformed turn beats": RewardSettings(malformed=0.1),
    }
    for sentence, settings in found.items():
        holes = loopholes(settings, 3)
        assert [hole.startswith(sentence) for hole in holes] == [True], holes


def test_more_rounds_can_make_a_wrong_done_pay():
    assert loopholes(RewardSettings(edit_cost=0.1), 2) == []
    [hole] = loopholes(RewardSettings(edit_cost=0.1), 3)  # 0.5 = 0.1 + 4 x 0.1
    assert hole == (
        "a wrong done earns as much as trying on in vain: 0, done earns -0.500, 3 failed edits "
        "and the end of the rounds -0.500"
    )


def test_loopholes_agree_with_a_search_of_all_paths():
    for gain, sustained, cost in product((0.0, 0.3, 0.7), (0.0, 0.2), (0.05, 0.12)):
        settings = RewardSettings(gain=gain, sustained=sustained, edit_cost=cost)
        searched = any(
            max(legal_ends(path, settings)) > total((path[0], 1.0), DONE, settings) + 1e-9
            for edits in (2, 3, 4)
            for path in product((0.0, 0.25, 0.45, 1.0), repeat=edits + 1)
            if path[0] != 1
        )
        reported = any("detour" in hole for hole in loopholes(settings, ROUNDS))
        assert reported == searched, settings


# --- terms ----------------------------------------------------------------------------------------


def test_the_terms_of_a_repair_after_a_decline_are_these():
    terms = trajectory_reward((0.25, 0.0, 1.0), (False, False, True), DONE, 2, OURS)
    assert terms == pytest.approx({"final": 1.0, "gain": 0.3, "loss": -0.125, "edits": -0.1})


def test_the_end_of_the_rounds_and_a_wrong_done_are_two_terms():
    wrong = ((0.25,), (False,))
    assert trajectory_reward(*wrong, DONE, 0, OURS) == {"final": 0.25, "wrong_done": -0.5}
    for stop in (CAP, StopReason.REPEATED_EDIT, StopReason.NO_VISIBLE_CHANGE):
        terms = trajectory_reward(*wrong, stop, 1, OURS)
        assert terms == {"final": 0.25, "wrong_cap": -0.1, "edits": -0.05}


@pytest.mark.parametrize(
    "stop", [StopReason.MALFORMED, StopReason.TOO_LONG, StopReason.REPEATED_TEXT]
)
def test_every_malformed_end_costs_the_same_and_no_wrong_stop_besides(stop):
    terms = trajectory_reward((0.25,), (False,), stop, 0, OURS)
    assert terms == {"final": 0.25, "malformed": -0.6}


def test_the_format_bonus_is_the_share_of_legal_turns():
    settings = RewardSettings(format=0.5)
    assert trajectory_reward((1.0, 1.0), (True, True), DONE, 1, settings)["format"] == 0.5
    assert trajectory_reward((1.0, 1.0), (True, True), BROKEN, 1, settings)["format"] == 0.25
    assert trajectory_reward((1.0,), (True,), BROKEN, 0, settings).get("format", 0) == 0


def test_where_nothing_is_right_or_wrong_only_the_quality_counts():
    assert trajectory_reward((0.8,), (None,), DONE, 0, OURS) == {"final": 0.8}


@pytest.mark.parametrize("change", [{"gain": -0.1}, {"loss": math.nan}, {"edit_cost": math.inf}])
def test_terms_that_are_no_numbers_from_zero_on_are_refused(change):
    with pytest.raises(ValueError, match=f"reward {next(iter(change))} is .*; give 0"):
        RewardSettings(**change)
    with pytest.raises(ValueError, match="nothing would ask for a right image"):
        RewardSettings(final=0.0)


def test_more_images_than_edits_and_odd_qualities_are_refused():
    with pytest.raises(ValueError, match="2 images come from more than the 0 edits asked for"):
        trajectory_reward((0.0, 1.0), (False, True), DONE, 0, OURS)
    with pytest.raises(ValueError, match="not all finite"):
        trajectory_reward((math.nan,), (None,), DONE, 0, OURS)


# --- judged trajectories --------------------------------------------------------------------------

PICTURE = Image.new("RGB", (8, 8))


def turn(k, outcome):
    said = "said" if isinstance(outcome, Reflection) else None
    return Turn(k, (), (), (), (), (), "", outcome, said)


def judged(outcomes, verdicts, stop, kept=None):
    drawn = len(verdicts) - 1
    steps = tuple(
        Step(turn(k, outcome), Transition(PICTURE) if k < drawn else None)
        for k, outcome in enumerate(outcomes)
    )
    kept = drawn if kept is None else kept
    trajectory = Trajectory("p", None, None, Transition(PICTURE), steps, stop, kept)
    return Judged(Rollout(Place(0, 0, 0), Prompt("u", "p", {}), trajectory), tuple(verdicts))


EDIT, STOP = Reflection("t", 4, "edit", "Add a circle."), Reflection("t", 10, "done", "")
WRONG, RIGHT = Verdict(False, 0.25, "1 of 2"), Verdict(True, 1.0, "2 of 2")


def test_a_judged_repair_has_the_reward_of_its_path():
    reward, terms = score(judged([EDIT, STOP], [WRONG, RIGHT], DONE), OURS)
    assert terms == pytest.approx({"final": 1.0, "gain": 0.225, "edits": -0.05})
    assert reward == pytest.approx(1.175)


def test_an_edit_that_no_round_was_left_for_is_paid_for():
    reward, terms = score(judged([EDIT, EDIT], [WRONG, WRONG], CAP), OURS)
    assert terms == pytest.approx({"final": 0.25, "wrong_cap": -0.1, "edits": -0.1})
    assert reward == pytest.approx(0.05)


def test_a_malformed_turn_is_no_edit():
    bad = judged([EDIT, ProtocolError.ACTION_COUNT], [WRONG, RIGHT], BROKEN)
    assert score(bad, OURS)[1] == pytest.approx(
        {"final": 1.0, "gain": 0.225, "edits": -0.05, "malformed": -0.6}
    )


def test_a_single_image_is_rewarded_with_its_verdict():
    likelihood = Verdict(None, 0.1, "log-likelihood", value=-2.3)
    assert score(judged([], [likelihood], CAP), OURS) == (-2.3, {"final": -2.3})
    assert score(judged([], [WRONG], CAP), OURS) == (0.25, {"final": 0.25})


def test_an_image_without_a_verdict_has_no_reward():
    lost = Verdict.failed("the judge did not answer")
    with pytest.raises(ValueError, match="the judge did not answer"):
        score(judged([EDIT, STOP], [WRONG, lost], DONE), OURS)


def test_another_image_than_the_last_cannot_be_handed_out():
    with pytest.raises(ValueError, match="set keep_best to false"):
        score(judged([EDIT, STOP], [RIGHT, WRONG], CAP, kept=0), OURS)
