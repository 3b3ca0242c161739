"""Scripted policies drive the loop through every end that it can come to."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agent import guards, protocol
from agent.loop import run_episodes
from agent.policy import ScriptedPolicy
from agent.types import OURS, RELEASE, Options, ProtocolError, Reflection, StopReason, Watcher

WRONG = Reflection("One circle is missing.", 4, "edit", "Add a red circle.")
WRONG_TOO = Reflection("Now the square is missing.", 6, "edit", "Add a blue square.")
WORSE = Reflection("The circles are gone.", 1, "edit", "Draw two red circles.")
RIGHT = Reflection("All is there.", 10, "done", "")
JUNK = "4/10\nI would rather not."


def run(script, prompts=("two red circles",), max_rounds=3, **options):
    policy = script if isinstance(script, ScriptedPolicy) else ScriptedPolicy(script)
    settings = options.pop("settings", OURS)
    return policy, run_episodes(policy, prompts, max_rounds=max_rounds, options=settings, **options)


def test_a_right_first_image_is_done_at_once():
    policy, [trajectory] = run([RIGHT])
    assert trajectory.stop is StopReason.DONE
    assert trajectory.kept == 0
    assert len(trajectory.images) == 1
    assert trajectory.steps[0].transition is None
    assert len(policy.drawn) == 1


def test_a_wrong_image_is_edited_until_it_is_right():
    policy, [trajectory] = run([WRONG, WRONG_TOO, RIGHT])
    assert trajectory.stop is StopReason.DONE
    assert [step.turn.reflection for step in trajectory.steps] == [WRONG, WRONG_TOO, RIGHT]
    assert trajectory.scores == [4, 6, 10]
    assert trajectory.kept == 2
    assert [ask.number for ask in policy.drawn] == [0, 1, 2]
    assert [ask.source for ask in policy.said] == ["Image #0", "Image #1", "Image #2"]


def test_the_next_turn_sees_the_canonical_text_and_not_what_was_sampled():
    messy = (
        "4/10\n[ACTION]  EDIT\n[THINKING]  One circle is missing. \n</think>\n"
        "[EDIT] Add a red circle."
    )
    policy, [trajectory] = run([messy, RIGHT])
    turn = trajectory.steps[0].turn
    assert turn.said == protocol.canonical(WRONG, 0, "Image #0")
    assert turn.text == protocol.prefix(0) + messy
    assert bytes(turn.sampled_ids[:-1]).decode() == messy
    seen = policy.said[1].context.segments
    assert [bytes(s.ids).decode() for s in seen if hasattr(s, "ids")] == [
        "two red circles",
        turn.said,
    ]


def test_the_budget_of_rounds_ends_a_run_after_a_final_look():
    policy, [trajectory] = run([WRONG, WRONG_TOO, WORSE, WRONG], max_rounds=2)
    assert trajectory.stop is StopReason.MAX_ROUNDS
    assert trajectory.scores == [4, 6, 1]
    assert trajectory.steps[-1].transition is None
    assert len(policy.drawn) == 3


def test_the_best_image_by_its_own_score_is_kept():
    _, [ours] = run([WRONG, WRONG_TOO, WORSE], max_rounds=2)
    assert ours.kept == 1
    assert ours.final is ours.images[1]
    _, [last] = run([WRONG, WRONG_TOO, WORSE], max_rounds=2, settings=Options(keep_best=False))
    assert last.kept == 2


def test_done_keeps_the_image_it_was_said_of_whatever_its_score():
    low = Reflection("Good enough.", 3, "done", "")
    _, [trajectory] = run([WRONG, low])
    assert trajectory.kept == 1


def test_an_image_that_nobody_looked_at_is_kept_over_those_found_wrong():
    _, [trajectory] = run([WRONG, JUNK, JUNK])
    assert trajectory.stop is StopReason.MALFORMED
    assert trajectory.scores == [4, None]
    assert trajectory.kept == 1


def test_the_released_loop_never_looks_at_its_last_image():
    policy, [trajectory] = run([WRONG, WRONG, WRONG], max_rounds=3, settings=RELEASE)
    assert trajectory.stop is StopReason.MAX_ROUNDS
    assert len(policy.said) == 3
    assert len(policy.drawn) == 4
    assert trajectory.kept == 3


def test_no_rounds_means_a_single_drawing():
    policy, [trajectory] = run([], max_rounds=0)
    assert trajectory.stop is StopReason.MAX_ROUNDS
    assert trajectory.steps == ()
    assert policy.said == []


def test_a_malformed_turn_is_sampled_again_once_and_recorded():
    policy, [trajectory] = run([JUNK, WRONG, JUNK, JUNK])
    first, second = trajectory.steps
    assert first.turn.reflection == WRONG
    assert [turn.error for turn in first.rejected] == [ProtocolError.MALFORMED_THINK]
    assert second.turn.error is ProtocolError.MALFORMED_THINK
    assert len(second.rejected) == 1
    assert trajectory.stop is StopReason.MALFORMED
    assert [ask.attempt for ask in policy.said] == [0, 1, 0, 1]
    assert [ask.round for ask in policy.said] == [0, 0, 1, 1]


def test_the_released_loop_ends_at_the_first_malformed_turn():
    policy, [trajectory] = run([JUNK], settings=RELEASE)
    assert trajectory.stop is StopReason.MALFORMED
    assert len(policy.said) == 1
    assert trajectory.kept == 0


@pytest.mark.parametrize("script", ["", "4/10", "</think>", "<think>", "\x00\ufffd", "[EDIT] None"])
def test_odd_answers_end_with_an_image_and_a_reason(script):
    _, [trajectory] = run([script, script])
    assert trajectory.stop is StopReason.MALFORMED
    assert trajectory.final.size == (32, 32)


def test_endless_text_is_too_long():
    endless = "4/10\n[ACTION] edit\n[THINKING] " + " ".join(str(n) for n in range(999))
    _, [trajectory] = run([endless, endless], max_tokens=300)
    assert trajectory.stop is StopReason.TOO_LONG
    assert trajectory.steps[0].turn.error is ProtocolError.TRUNCATED
    assert len(trajectory.steps[0].turn.sampled_ids) == 300


def test_text_that_repeats_itself_has_its_own_reason():
    loops = "4/10\n[ACTION] edit\n[THINKING] " + "again and " * 60
    _, [trajectory] = run([loops, loops])
    assert trajectory.stop is StopReason.REPEATED_TEXT


def test_the_release_reads_a_turn_that_was_cut_off():
    whole = protocol.canonical(WRONG, 0, "Image #0").removeprefix(protocol.prefix(0))
    cut = len(whole)  # the end token no longer fits
    _, [release] = run([whole], max_rounds=1, max_tokens=cut, settings=RELEASE)
    assert release.steps[0].turn.reflection == WRONG
    _, [ours] = run([whole, whole], max_rounds=1, max_tokens=cut)
    assert ours.stop is StopReason.TOO_LONG


def test_text_after_the_edit_line_is_malformed_in_the_release_and_cut_in_ours():
    junk = protocol.canonical(RIGHT, 0, "Image #0").removeprefix(protocol.prefix(0)) + "\n---\n"
    _, [release] = run([junk], settings=RELEASE)
    assert release.stop is StopReason.MALFORMED
    assert release.steps[0].turn.error is ProtocolError.DONE_NOT_NONE
    _, [ours] = run([junk])
    assert ours.stop is StopReason.DONE


def test_the_same_edit_twice_in_a_row_ends_a_run():
    same = Reflection("Still missing.", 5, "edit", "add a red  circle")
    policy, [trajectory] = run([WRONG, same])
    assert trajectory.stop is StopReason.REPEATED_EDIT
    assert len(policy.drawn) == 2
    assert trajectory.kept == 1
    _, [patient] = run([WRONG, same, RIGHT], settings=Options(same_edit_limit=3))
    assert patient.stop is StopReason.DONE


def test_an_edit_that_changes_nothing_ends_a_run():
    grey = Image.new("RGB", (32, 32), (99, 99, 99))
    _, [trajectory] = run(ScriptedPolicy([WRONG, RIGHT], [grey, grey.copy()]))
    assert trajectory.stop is StopReason.NO_VISIBLE_CHANGE
    assert len(trajectory.images) == 2


def test_a_visible_change_is_told_from_noise():
    rng = np.random.default_rng(0)
    base = rng.integers(60, 200, (128, 128, 3)).astype(np.uint8)
    noisy = np.clip(base + rng.integers(-8, 9, base.shape), 0, 255).astype(np.uint8)
    dotted = noisy.copy()
    dotted[60:68, 60:68] = (255, 0, 0)
    images = [Image.fromarray(pixels) for pixels in (base, noisy, dotted)]
    assert guards.visible_change(images[0], images[1]) == 0
    assert guards.visible_change(images[0], images[2]) == 16 / 64**2
    assert guards.visible_change(images[0], images[0].resize((64, 64))) == 1


def test_finished_prompts_cost_nothing_more():
    scripts = {0: [RIGHT], 1: [WRONG, RIGHT], 2: [WRONG, WRONG_TOO, RIGHT]}
    policy = ScriptedPolicy(lambda ask: scripts[ask.sample].pop(0))
    _, trajectories = run(policy, ("a", "b", "c"))
    assert [len(t.images) for t in trajectories] == [1, 2, 3]
    assert [ask.index for ask in policy.said] == [0, 1, 2, 1, 2, 2]
    assert [ask.index for ask in policy.drawn] == [0, 1, 2, 1, 2, 2]


def test_a_prompt_gets_the_same_alone_and_in_company():
    script = [WRONG, WRONG_TOO, RIGHT]
    _, together = run(ScriptedPolicy(script), ("a", "b"), samples=["x", "y"])
    _, [alone] = run(ScriptedPolicy(script), ("b",), samples=["y"])
    assert together[1] == alone
    assert together[0] != alone


def test_editing_starts_from_the_users_image():
    photo = Image.new("RGB", (48, 32), (200, 10, 10))
    policy, [trajectory] = run([WRONG, RIGHT], ("make the circle blue",), sources=[photo])
    assert trajectory.first is None
    assert trajectory.images[0] is photo
    assert [ask.source for ask in policy.said] == ["given", "Image #1"]
    assert "[SOURCE_IMAGE] given\n" in trajectory.steps[0].turn.said
    assert policy.drawn[0].base is photo
    assert policy.drawn[0].number == 1
    assert trajectory.kept == 1


def test_drawing_and_editing_share_a_batch():
    photo = Image.new("RGB", (32, 32), (200, 10, 10))
    policy, [drawn, edited] = run([RIGHT], ("a star", "make it blue"), sources=[None, photo])
    assert drawn.first is not None
    assert edited.first is None
    assert len(policy.drawn) == 1


def test_the_sft_layout_plans_before_the_first_image():
    plan = Reflection("Draw both circles.", 0, "edit", "Two red circles on white.")
    policy, [trajectory] = run(ScriptedPolicy([plan, WRONG, RIGHT], layout="sft"))
    assert trajectory.plan.reflection == plan
    assert trajectory.plan.said.startswith("<think>\n[CURRENT_ROUND] Round#0\n[SCORE] 0/10")
    assert "[SOURCE_IMAGE] None" in trajectory.plan.said
    assert [(ask.round, ask.source) for ask in policy.said] == [
        (0, "None"),
        (1, "Image #0"),
        (2, "Image #1"),
    ]
    first = policy.drawn[0].view.conditional.segments
    assert bytes(first[0].ids).decode() == "Two red circles on white."
    assert trajectory.turns[0] is trajectory.plan
    assert len(trajectory.turns) == 3


def test_a_malformed_plan_still_gives_an_image_of_the_prompt():
    policy, [trajectory] = run(ScriptedPolicy([JUNK, JUNK], layout="sft"))
    assert trajectory.stop is StopReason.MALFORMED
    assert bytes(policy.drawn[0].view.conditional.segments[0].ids).decode() == "two red circles"
    assert len(trajectory.images) == 1
    assert len(trajectory.plan_rejected) == 1


def test_siblings_share_one_first_image():
    _, [one] = run([RIGHT])
    policy, siblings = run(
        [RIGHT], ("two red circles",) * 3, firsts=[one.first] * 3, samples=["a", "b", "c"]
    )
    assert policy.drawn == []
    segments = {ask.context.segments[-1] for ask in policy.said}
    assert segments == {one.first.segment}
    assert [s.sample for s in siblings] == ["a", "b", "c"]


def test_a_watcher_hears_everything_in_order():
    heard = []

    class Listener(Watcher):
        wants_tokens = True

        def on_token(self, index, text):
            heard.append(("token", index, text[:4]))

        def on_turn(self, index, turn):
            heard.append(("turn", index, turn.error or turn.reflection.action))

        def on_step(self, step, total):
            heard.append(("step", step, total))

        def on_image(self, index, number, image):
            heard.append(("image", index, number))

    run([JUNK, WRONG, RIGHT], watcher=Listener())
    assert heard == [
        ("step", 1, 1),
        ("image", 0, 0),
        ("token", 0, "4/10"),
        ("turn", 0, "malformed_think"),
        ("token", 0, "4/10"),
        ("turn", 0, "edit"),
        ("step", 1, 1),
        ("image", 0, 1),
        ("token", 0, "10/1"),
        ("turn", 0, "done"),
    ]


def test_bad_budgets_are_refused():
    with pytest.raises(ValueError, match="max_rounds -1"):
        run([RIGHT], max_rounds=-1)
    with pytest.raises(ValueError, match="retries -1"):
        Options(retries=-1)


def test_the_files_that_everyone_reads_stay_short():
    agent = Path(protocol.__file__).parent
    assert len((agent / "loop.py").read_text().splitlines()) <= 150
    assert len((agent / "views.py").read_text().splitlines()) <= 80
