"""Rollouts in groups on a tiny random checkpoint: what siblings share, what each has alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from PIL import Image

from agent.types import StopReason
from rl.difficulty import Difficulty, Totals, keeps, resample
from rl.rollout import (
    RolloutPolicy,
    SameNoise,
    Start,
    draw_starts,
    own_images,
    plain_difference,
    roll_out,
    same_noise,
    share_of,
    window_of,
)
from rl.rollout_settings import LEARNING, NoiseWindow, RolloutSettings
from rl.types import Place, Prompt
from tests.tiny import write_tiny_checkpoint
from umm_reflect import Bagel
from umm_reflect.errors import UserError
from umm_reflect.flow import DrawSettings
from umm_reflect.hub import profile as profile_of

NOISY = DrawSettings(points=6, step_kind="sde", noise_level=0.7)
SETTINGS = RolloutSettings(
    groups=2,
    group_size=3,
    max_rounds=2,
    max_tokens=100,
    temperature=1.0,
    first=DrawSettings(points=3),
    edit=NOISY,
    window=NoiseWindow(2, (0, 5)),
    size=64,
    options=replace(LEARNING, same_edit_limit=0, min_change=0.0),
)
SINGLE = replace(SETTINGS, single=True, first=NOISY)
PROMPTS = [
    Prompt("a", "two red circles", {"prompt": "two red circles"}),
    Prompt("b", "a blue star", {"prompt": "a blue star"}),
]
EVERYONE = share_of(0, 1, SETTINGS)
FORCED = 90


@pytest.fixture(scope="module")
def bagel(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return Bagel.from_pretrained(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def profile(bagel):
    return replace(profile_of(bagel.folder), system_prompt="Look.")


@pytest.fixture(scope="module")
def rollouts(bagel, profile):
    return rolled(bagel, profile, SETTINGS, force_turns=FORCED)


def rolled(bagel, profile, settings, **more):
    more = {"step": 3, "seed": 1, "mine": EVERYONE, **more}
    return roll_out(bagel, profile, PROMPTS, settings, **more)


# --- trajectories ---------------------------------------------------------------------------------


def test_siblings_hold_one_first_image_and_edit_it_each_in_its_own_way(rollouts):
    assert [(r.place.group, r.place.member) for r in rollouts] == EVERYONE
    assert [r.prompt.uid for r in rollouts] == ["a", "a", "a", "b", "b", "b"]
    for group in (rollouts[:3], rollouts[3:]):
        firsts = {id(r.trajectory.first) for r in group}
        assert len(firsts) == 1
        assert len({r.trajectory.steps[0].transition.image.tobytes() for r in group}) == 3
    assert rollouts[0].trajectory.first != rollouts[3].trajectory.first


def test_a_last_look_follows_the_last_edit_and_each_turn_keeps_what_it_saw(rollouts):
    for rollout in rollouts:
        trajectory = rollout.trajectory
        assert trajectory.stop is StopReason.MAX_ROUNDS
        assert len(trajectory.images) == 3
        assert len(trajectory.steps) == 3
        assert trajectory.steps[2].transition is None
        assert trajectory.kept == 2
        assert trajectory.sample == f"step 3 group {rollout.place.group} member " + str(
            rollout.place.member
        )
        assert all(step.turn.context is not None for step in trajectory.steps)
        assert all(step.turn.temperature == 1.0 for step in trajectory.steps)


def test_edits_record_the_states_of_one_window_that_the_group_shares(rollouts):
    for group in (0, 1):
        start, length = window_of(SETTINGS, Place(3, group, 0), 1, seed=1)
        expected = NOISY.times[start : start + length + 1]
        for rollout in rollouts[3 * group : 3 * group + 3]:
            for step in rollout.trajectory.steps[:2]:
                transition = step.transition
                assert transition.times.tolist() == expected.tolist()
                assert transition.latents.shape == (3, 16, 16)
                assert transition.latents.dtype == torch.float32
                assert transition.logprobs.shape == (2,)
                assert transition.latent.shape == (16, 16)
                assert transition.view is not None
            assert rollout.trajectory.first.latents is None


def test_the_final_latent_is_the_one_that_was_decoded(bagel, rollouts):
    from umm_reflect.draw import decode
    from umm_reflect.images import to_pil
    from umm_reflect.prefill import Engine

    transition = rollouts[0].trajectory.steps[1].transition
    [pixels] = decode(Engine(bagel), [transition.latent], [(64, 64)])
    assert to_pil(pixels).tobytes() == transition.image.tobytes()


def test_sampled_turns_end_where_the_model_ends_them(bagel, profile):
    rollouts = rolled(bagel, profile, replace(SETTINGS, max_tokens=12))
    assert {r.trajectory.stop for r in rollouts} <= {StopReason.TOO_LONG, StopReason.MALFORMED}
    assert all(len(r.trajectory.turns) == 1 for r in rollouts)
    assert all(r.trajectory.steps[0].rejected == () for r in rollouts)
    assert len({r.trajectory.steps[0].turn.sampled_ids for r in rollouts}) == 6


@pytest.mark.parametrize("world", [2, 4])
def test_what_a_rollout_gets_does_not_depend_on_who_makes_it(bagel, profile, rollouts, world):
    parts = [share_of(rank, world, SETTINGS) for rank in range(world)]
    shared = []
    for part in parts:
        shared += rolled(bagel, profile, SETTINGS, mine=part, batch_size=2, force_turns=FORCED)
    assert [r.place for r in shared] == [r.place for r in rollouts]
    for ours, theirs in zip(shared, rollouts, strict=True):
        for a, b in zip(own_images(ours.trajectory), own_images(theirs.trajectory), strict=True):
            assert (a[1].latent - b[1].latent).abs().max() < 1e-3
        said = [[turn.said for turn in r.trajectory.turns] for r in (ours, theirs)]
        assert said[0] == said[1]


def test_a_repeat_is_equal_and_another_step_or_seed_is_not(bagel, profile, rollouts):
    def first_edit(rollouts):
        return rollouts[0].trajectory.steps[0].transition

    assert rolled(bagel, profile, SETTINGS, force_turns=FORCED) == rollouts
    for other in ({"step": 4}, {"seed": 2}):
        again = rolled(bagel, profile, SETTINGS, force_turns=FORCED, mine=[(0, 0)], **other)
        assert first_edit(again) != first_edit(rollouts)


def test_siblings_may_draw_first_images_of_their_own(bagel, profile):
    settings = replace(SETTINGS, share_first=False, max_tokens=12)
    rollouts = rolled(bagel, profile, settings)
    assert len({r.trajectory.first.image.tobytes() for r in rollouts}) == 6


def test_the_users_image_starts_an_editing_task(bagel, profile):
    source = Image.new("RGB", (64, 64), (200, 30, 30))
    prompts = [replace(PROMPTS[0], source=source), PROMPTS[1]]
    rollouts = roll_out(
        *(bagel, profile, prompts, replace(SETTINGS, max_rounds=1)),
        **{"step": 0, "seed": 0, "mine": EVERYONE, "force_turns": FORCED},
    )
    for rollout in rollouts[:3]:
        assert rollout.trajectory.first is None
        assert rollout.trajectory.images[0] is source
        assert [number for number, _ in own_images(rollout.trajectory)] == [1]
    assert [number for number, _ in own_images(rollouts[3].trajectory)] == [0, 1]
    contexts = [rollout.trajectory.turns[0].context for rollout in rollouts[:3]]
    given = [image for context in contexts for image in context.images_only()]
    assert len(given) == 3
    assert len(set(given)) == 1  # one segment, read once for all siblings


def test_in_layout_sft_siblings_share_a_plan_that_none_of_them_chose(bagel, profile):
    planning = replace(profile, layout="sft", edit_view="full")
    rollouts = rolled(bagel, planning, replace(SETTINGS, max_rounds=1), force_turns=FORCED)
    for group in (rollouts[:3], rollouts[3:]):
        assert len({id(r.trajectory.plan) for r in group}) == 1
        plan = group[0].trajectory.plan
        assert len(plan.sampled_ids) == FORCED
        assert not any(plan.chosen)
        assert all(any(step.turn.chosen) for r in group for step in r.trajectory.steps)
        assert group[0].trajectory.first.context.segments[-1].ids == tuple(
            bagel.tokens.encode(plan.said, allow_special=False)
        )
    assert rollouts[0].trajectory.plan.context != rollouts[3].trajectory.plan.context


def test_each_plans_for_itself_where_nothing_is_shared(bagel, profile):
    planning = replace(profile, layout="sft", edit_view="full")
    settings = replace(SETTINGS, max_rounds=1, share_first=False)
    rollouts = rolled(bagel, planning, settings, force_turns=FORCED)
    assert len({id(r.trajectory.plan) for r in rollouts}) == 6
    assert all(any(r.trajectory.plan.chosen) for r in rollouts)


# --- single images --------------------------------------------------------------------------------


def test_in_single_image_mode_each_member_draws_its_own_image_and_says_nothing(bagel, profile):
    rollouts = rolled(bagel, profile, SINGLE)
    assert len({r.trajectory.first.image.tobytes() for r in rollouts}) == 6
    for rollout in rollouts:
        assert rollout.trajectory.steps == ()
        assert len(rollout.trajectory.images) == 1
        assert rollout.trajectory.first.latents.shape == (3, 16, 16)
        start, length = window_of(SINGLE, rollout.place, 0, seed=1)
        times = NOISY.times[start : start + length + 1]
        assert rollout.trajectory.first.times.tolist() == times.tolist()


def test_plain_steps_leave_the_final_latent_and_no_window(bagel, profile):
    rollouts = rolled(bagel, profile, replace(SINGLE, first=DrawSettings(points=3)))
    for rollout in rollouts:
        assert rollout.trajectory.first.latents is None
        assert rollout.trajectory.first.latent.shape == (16, 16)


# --- windows --------------------------------------------------------------------------------------


def windows(shared, steps=range(40), groups=range(4), members=range(4), number=1):
    settings = replace(SETTINGS, window=NoiseWindow(2, (0, 5), shared), group_size=4)
    return {
        (s, g, m): window_of(settings, Place(s, g, m), number, seed=7)
        for s in steps
        for g in groups
        for m in members
    }


def test_a_group_shares_its_window_and_each_update_draws_it_anew():
    found = windows("group")
    assert all(found[s, g, m] == found[s, g, 0] for s, g, m in found)
    starts = Counter(found[s, g, 0][0] for s in range(40) for g in range(4))
    assert set(starts) == {0, 1, 2, 3}
    assert min(starts.values()) > 20  # 160 draws, 40 each on average
    assert any(found[s, 0, 0] != found[s, 1, 0] for s in range(40))


def test_all_groups_of_an_update_may_share_one_window():
    found = windows("step")
    assert all(found[s, g, m] == found[s, 0, 0] for s, g, m in found)
    assert len({found[s, 0, 0] for s in range(40)}) == 4


def test_the_published_windows_differ_by_trajectory_and_round_and_firsts_have_one():
    settings = replace(SETTINGS, edit=replace(NOISY, points=20), group_size=16)
    settings = replace(settings, window=NoiseWindow(2, (0, 10), "released"))

    def starts(number):
        return [window_of(settings, Place(0, 0, m), number, 20260830)[0] for m in range(8)]

    # sha256 of "...|20260830|1|trajectory|round", by the rule of flow.released_window_start
    from umm_reflect.flow import released_window_start

    expected = [released_window_start((20260830, 1, m, 0), (0, 10), 2) for m in range(8)]
    assert starts(1) == expected
    assert len(set(expected)) > 2
    assert starts(2) != starts(1)
    assert starts(0) == [6] * 8


def test_a_window_of_no_size_makes_all_steps_but_the_last_stochastic(bagel, profile):
    settings = replace(SINGLE, window=NoiseWindow(0, (0, 5)))
    [rollout] = rolled(bagel, profile, settings, mine=[(0, 0)])
    assert rollout.trajectory.first.logprobs.shape == (4,)


def test_members_with_different_windows_are_drawn_in_one_batch(bagel, profile, monkeypatch):
    from umm_reflect import generate

    batches, draw = [], generate.draw

    def counted(engine, requests, settings, **more):
        batches.append([own.window for own in settings])
        return draw(engine, requests, settings, **more)

    monkeypatch.setattr(generate, "draw", counted)
    settings = replace(SINGLE, window=NoiseWindow(1, (0, 5), "group"))
    rolled(bagel, profile, settings, step=1)
    first, second = (window_of(settings, Place(1, group, 0), 0, seed=1) for group in (0, 1))
    assert first != second
    assert batches == [[first] * 3 + [second] * 3]


# --- shares, checks, refusals ---------------------------------------------------------------------


def test_whole_groups_go_to_a_process_where_they_divide_and_members_otherwise():
    settings = replace(SETTINGS, groups=4, group_size=2)
    assert share_of(1, 2, settings) == [(2, 0), (2, 1), (3, 0), (3, 1)]
    assert [len(share_of(rank, 3, settings)) for rank in range(3)] == [2, 3, 3]
    assert [share_of(rank, 16, settings) for rank in range(3)] == [[], [(0, 0)], []]
    for world in (1, 2, 3, 5, 8, 16):
        parts = [share_of(rank, world, settings) for rank in range(world)]
        assert [which for part in parts for which in part] == [
            (g, m) for g in range(4) for m in range(2)
        ]


def test_a_process_without_a_share_rolls_out_nothing(bagel, profile):
    assert rolled(bagel, profile, SETTINGS, mine=[]) == []


def test_the_same_noise_in_a_group_stops_the_rollout(bagel, profile, monkeypatch, rollouts):
    assert same_noise(rollouts) == []
    monkeypatch.setattr(Place, "name", property(lambda place: f"{place.group_name} any member"))
    with pytest.raises(SameNoise, match="members 0 and 1 of group 0 drew the same image"):
        rolled(bagel, profile, SINGLE, batch_size=1)


def test_noise_0_is_plain_sampling(bagel, profile, monkeypatch):
    texts = [prompt.text for prompt in PROMPTS]
    assert plain_difference(bagel, profile, texts, SETTINGS, seed=0) == 0.0
    shifted = RolloutPolicy.settings_of

    def another_schedule(self, ask):
        return replace(shifted(self, ask), timestep_shift=2.5)

    monkeypatch.setattr(RolloutPolicy, "settings_of", another_schedule)
    assert plain_difference(bagel, profile, texts, SETTINGS, seed=0) > 0.01


def test_progress_is_told_after_each_batch_and_may_end_the_rollout(bagel, profile):
    told = []

    def on_batch(done, everything):
        told.append((done, everything))
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rolled(bagel, profile, SINGLE, batch_size=2, on_batch=on_batch)
    assert told == [(2, 6), (4, 6)]


def test_weights_that_give_no_numbers_are_named(bagel, profile, monkeypatch):
    def broken(*_, **__):
        raise FloatingPointError("a drawn picture is not finite")

    monkeypatch.setattr("rl.rollout.draw_once", broken)
    with pytest.raises(UserError, match="broke down: a drawn picture is not finite"):
        rolled(bagel, profile, SINGLE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "compared with each other; give 2 or more"),
        ({"groups": 0}, "groups is 0; give 1 or more"),
        ({"temperature": 0.0}, "temperature is 0.0; words to learn from need above 0"),
        ({"window": NoiseWindow(2, (0, 9))}, "ends at step 9, but edit has 5 steps"),
        ({"edit": replace(NOISY, window=(0, 2))}, "edit.window is .*give window.size and window"),
        ({"options": replace(LEARNING, retries=1)}, "options.retries is 1"),
        ({"options": replace(LEARNING, keep_best=True)}, "options.keep_best True"),
    ],
)
def test_settings_that_cannot_be_learned_from_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **changes)
    with pytest.raises(ValueError, match="does not fit the range 3 to 4"):
        NoiseWindow(2, (3, 4))


# --- difficulty -----------------------------------------------------------------------------------


def test_a_right_first_image_stays_while_the_share_over_the_run_allows_it():
    assert keeps([True, False, True], Totals(6, 1), 0.15) == [False, True, False]
    assert keeps([True, False, True], Totals(6, 0), 0.15) == [True, True, False]
    assert keeps([True] * 4, Totals(), 0.5) == [False, True, False, True]
    assert keeps([False] * 3, Totals(), 0.0) == [True] * 3
    assert keeps([True] * 3, Totals(), 1.0) == [True] * 3


def test_groups_that_start_right_get_other_prompts_until_the_attempts_are_used_up():
    right = {"a", "c", "new 0", "new 1", "new 2"}
    asked, fresh = [], iter(range(9))

    def prompt(name):
        return Prompt(name, name, {"prompt": name})

    def take(count):
        return [prompt(f"new {next(fresh)}") for _ in range(count)]

    def draw(prompts, attempt):
        asked.append((attempt, {g: p.uid for g, p in prompts.items()}))
        return {g: Start(p.uid) for g, p in prompts.items()}

    def judge(prompts, starts):
        return {g: starts[g].first in right for g in prompts}

    settled = resample(
        *([prompt("a"), prompt("b"), prompt("c")], Difficulty(0.0, 2), Totals(10, 2)),
        **{"take": take, "draw": draw, "judge": judge},
    )
    assert asked == [
        (0, {0: "a", 1: "b", 2: "c"}),
        (1, {0: "new 0", 2: "new 1"}),
        (2, {0: "new 2", 2: "new 3"}),
    ]
    assert [p.uid for p in settled.prompts] == ["new 2", "b", "new 3"]
    assert {g: start.first for g, start in settled.starts.items()} == {
        0: "new 2",
        1: "b",
        2: "new 3",
    }
    assert settled.correct == (True, False, False)
    assert settled.totals == Totals(13, 3)
    assert settled.replaced == 4


def test_starts_of_another_attempt_have_another_noise(bagel, profile):
    prompts = {0: PROMPTS[0]}
    drawn = [
        draw_starts(bagel, profile, prompts, SETTINGS, step=0, seed=0, attempt=attempt)
        for attempt in (0, 1)
    ]
    assert drawn[0][0].first != drawn[1][0].first
    given = rolled(bagel, profile, SETTINGS, starts=drawn[1], mine=[(0, 1)], force_turns=FORCED)
    assert given[0].trajectory.first is drawn[1][0].first
