"""The bench: images judged once, and judges that are broken, away or silent."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from PIL import Image

from agent.types import Step, StopReason, Trajectory, Transition, Turn
from eval.rewards.registry import REWARDS
from eval.rewards.selftest import shape_pairs
from eval.verdict import Verdict
from rl.judge import Bench, JudgeError, JudgeSettings, addresses, shared_out, unjudged
from rl.rollout import Start
from rl.types import Place, Prompt, Rollout
from umm_reflect.errors import UserError

ROW = {"prompt": "a red circle"}
PROMPT = Prompt("circle", "a red circle", ROW)


class Scripted:
    """A reward that returns what it is told to and remembers what it was asked."""

    def __init__(self, answer=lambda image, row: Verdict(True, 1.0, "right")):
        self.answer, self.asked, self.checked = answer, [], False

    def score(self, images, rows):
        self.asked += [(image, row["prompt"]) for image, row in zip(images, rows, strict=True)]
        return [self.answer(image, row) for image, row in zip(images, rows, strict=True)]

    def check(self):
        self.checked = True

    def close(self):
        pass


def bench_of(reward, **settings):
    bench = Bench(JudgeSettings({"reward": "shapes", "workers": 1}, **settings))
    bench.close()
    bench.reward = reward
    return bench


def picture(level):
    return Image.new("RGB", (4, 4), (level,) * 3)


def rollout(member, first, edits, prompt=PROMPT):
    turn = Turn(0, (), (), (), (), (), "", outcome=None, said=None)
    steps = tuple(Step(turn, Transition(image)) for image in edits)
    trajectory = Trajectory(
        prompt.text, prompt.source, None, first, steps, StopReason.MAX_ROUNDS, len(edits)
    )
    return Rollout(Place(0, 0, member), prompt, trajectory)


def test_a_first_image_that_siblings_share_is_judged_once():
    first, edits = Transition(picture(0)), [picture(level) for level in (1, 2, 3)]
    reward = Scripted(lambda image, row: Verdict(None, image.getpixel((0, 0))[0] / 255, ""))
    rollouts = [rollout(0, first, edits[:2]), rollout(1, first, edits[2:]), rollout(2, first, [])]
    judged = bench_of(reward).judge(rollouts)
    assert [image.getpixel((0, 0))[0] for image, _ in reward.asked] == [0, 1, 2, 3]
    levels = [[round(v.score * 255) for v in one.verdicts] for one in judged]
    assert levels == [[0, 1, 2], [0, 3], [0]]
    assert [one.rollout for one in judged] == rollouts


def test_one_image_for_two_prompts_is_judged_for_each():
    shared, other = Transition(picture(0)), replace(PROMPT, uid="b", row={"prompt": "a star"})
    reward = Scripted()
    bench_of(reward).judge([rollout(0, shared, []), rollout(1, shared, [], other)])
    assert [prompt for _, prompt in reward.asked] == ["a red circle", "a star"]


def test_what_was_judged_while_groups_were_chosen_is_not_judged_again():
    start, source = Start(Transition(picture(0))), picture(9)
    editing = replace(PROMPT, uid="edit", source=source)
    reward = Scripted(
        lambda image, row: (
            Verdict(False, 0.2, "") if image is source else Verdict(True, 1.0, "right")
        )
    )
    bench = bench_of(reward)
    assert bench.judge_firsts({0: PROMPT, 1: editing, 2: PROMPT}, {0: start}) == {0: True, 1: False}
    assert len(reward.asked) == 2
    rollouts = [rollout(0, start.first, [picture(1)]), rollout(1, None, [picture(2)], editing)]
    judged = bench.judge(rollouts)
    assert len(reward.asked) == 4
    assert judged[0].verdicts[0].correct is True
    assert judged[1].verdicts[0].correct is False
    bench.judge(rollouts)
    assert len(reward.asked) == 8  # another update knows nothing of the last one


def test_a_reward_without_yes_or_no_cannot_say_which_first_images_are_right():
    bench = bench_of(Scripted(lambda *_: Verdict(None, 0.5, "")))
    with pytest.raises(JudgeError, match="has no yes or no"):
        bench.judge_firsts({0: PROMPT}, {0: Start(Transition(picture(0)))})


def failing(times):
    """Fails each image so many times, then judges it."""
    seen = {}

    def answer(image, row):
        seen[id(image)] = seen.get(id(image), 0) + 1
        failed = seen[id(image)] <= times
        return Verdict.failed("it timed out") if failed else Verdict(True, 1.0, "right")

    return Scripted(answer)


def test_an_image_without_a_verdict_is_sent_again_and_then_stops_the_run():
    one = [rollout(0, Transition(picture(0)), [picture(1)])]
    reward = failing(1)
    judged = bench_of(reward, attempts=2).judge(one)
    assert [verdict.correct for verdict in judged[0].verdicts] == [True, True]
    assert len(reward.asked) == 4
    with pytest.raises(JudgeError, match=r"2 of 2 images were not judged.*2 attempts.*timed out"):
        bench_of(failing(2), attempts=2).judge(one)


def test_a_share_of_images_without_a_verdict_may_be_allowed():
    bad = picture(5)
    reward = Scripted(
        lambda image, row: (
            Verdict.failed("no answer") if image is bad else Verdict(True, 1.0, "right")
        )
    )
    rollouts = [rollout(0, Transition(picture(0)), [bad]), rollout(1, Transition(picture(1)), [])]
    judged = bench_of(reward, unjudged=0.4).judge(rollouts)
    assert [unjudged(one) for one in judged] == ["no answer", None]
    with pytest.raises(JudgeError, match="1 of 3 images were not judged"):
        bench_of(reward, unjudged=0.3).judge(rollouts)


def broken(kind):
    reward = Scripted()
    nan = float("nan")
    reward.score = {
        "nan": lambda images, rows: [Verdict(None, nan, "") for _ in images],
        "nan value": lambda images, rows: [Verdict(None, 0.5, "", value=nan) for _ in images],
        "short": lambda images, rows: [Verdict(True, 1.0, "")] * (len(images) - 1),
        "number": lambda images, rows: [0.5] * len(images),
    }[kind]
    return reward


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nan", "reward 'shapes' failed: score nan is not finite"),
        ("nan value", "reward 'shapes' failed: value nan is not finite"),
        ("short", "returned 1 verdicts on 2 images"),
        ("number", "returned float for image 0"),
    ],
)
def test_what_is_no_list_of_verdicts_is_a_named_error(kind, message):
    with pytest.raises(JudgeError, match=message):
        bench_of(broken(kind)).judge([rollout(0, Transition(picture(0)), [picture(1)])])


def test_prompts_of_another_kind_than_the_judge_knows_are_a_named_error():
    with Bench(JudgeSettings({"reward": "shapes", "workers": 1})) as bench:
        row = {"tag": "single_object", "include": [{"class": "cow", "count": 1}], "prompt": "a cow"}
        with pytest.raises(JudgeError, match="unknown class 'cow'"):
            bench.verdicts([picture(0)], [row])


def test_the_shapes_judge_passes_its_check_and_tells_good_from_bad():
    with Bench(JudgeSettings({"reward": "shapes", "workers": 1})) as bench:
        bench.check()
        pairs = shape_pairs()
        good = bench.verdicts([pair.good for pair in pairs], [pair.row for pair in pairs])
        assert all(verdict.correct for verdict in good)
        assert bench.manifest()["reward"] == "shapes"


def test_a_service_that_is_not_there_is_an_error_within_ten_seconds_that_says_how_to_start_it():
    for url in ("http://127.0.0.1:9", "http://nobody.invalid:80"):
        bench = Bench(JudgeSettings({"reward": "http", "url": url}))
        began = time.monotonic()
        with pytest.raises(UserError, match=r"no answer from http.*umm-reflect serve-reward"):
            bench.check()
        assert time.monotonic() - began < 10
        bench.close()


def test_a_service_that_accepts_and_never_answers_is_found_out_too():
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        bench = Bench(JudgeSettings({"reward": "http", "url": url}))
        began = time.monotonic()
        with pytest.raises(UserError, match="no answer"):
            bench.check()
        assert time.monotonic() - began < 10
        bench.close()


def test_every_address_of_a_sum_is_asked():
    terms = [
        {"reward": "http", "url": "http://127.0.0.1:9", "weight": 1.0},
        {"reward": "shapes", "workers": 1, "weight": 1.0},
        {"reward": "judge", "url": "http://127.0.0.1:10", "model": "m", "weight": 1.0},
    ]
    bench = Bench(JudgeSettings({"reward": "sum", "terms": terms}))
    found = addresses(bench.reward)
    assert [url for url, _ in found] == ["http://127.0.0.1:9", "http://127.0.0.1:10"]
    assert "vllm serve MODEL" in found[1][1]
    bench.close()


def test_processes_of_one_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr("eval.judging.cores", lambda: 16)
    assert shared_out({"reward": "shapes"}, 4) == {"reward": "shapes", "workers": 4}
    assert shared_out({"reward": "shapes", "workers": 3}, 4)["workers"] == 3
    assert shared_out({"reward": "shapes"}, 1) == {"reward": "shapes"}
    assert shared_out({"reward": "pickscore"}, 4) == {"reward": "pickscore"}
    nested = shared_out({"reward": "sum", "terms": [{"reward": "shapes"}]}, 8)
    assert nested["terms"] == [{"reward": "shapes", "workers": 2}]


def test_the_bench_takes_any_reward_of_the_registry_and_no_other():
    assert "http" in REWARDS
    with pytest.raises(UserError, match="there is no reward 'shape'"):
        Bench(JudgeSettings({"reward": "shape"}))
    with pytest.raises(ValueError, match="unjudged is 1"):
        JudgeSettings(unjudged=1)
