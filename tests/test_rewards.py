"""Rewards by name: settings, published formulas, answers that cannot be used, sums of several."""

from __future__ import annotations

import math
import time

import pytest
from PIL import Image

from eval.rewards.chat import rendered, template_text
from eval.rewards.dv import combined, probability_of_yes
from eval.rewards.ocr import edit_distance, target_of, verdict_of
from eval.rewards.registry import REWARDS, build, named
from eval.rewards.selftest import Pair, described_pairs, require, shape_pairs
from eval.rewards.weighted import terms_of
from eval.transport import Refused, ServiceError
from eval.verdict import Verdict
from tests.endpoint import judge_endpoint, says
from umm_reflect.errors import UsageError, UserError

GREY = Image.new("RGB", (40, 30), (128, 128, 128))
HOLDS_NO_JUDGE = {"attempts": 2, "timeout": 5}


def judge(url: str, **more):
    return build({"reward": "judge", "url": url, "model": "tiny", **HOLDS_NO_JUDGE, **more})


# --- verdicts and the registry --------------------------------------------------------------------


def test_a_verdict_without_an_opinion_has_no_reward():
    failed = Verdict.failed("no grade in the answer 'maybe'")
    with pytest.raises(ValueError, match=r"no reward .no grade in the answer 'maybe'"):
        _ = failed.reward
    assert Verdict(None, 0.2, "x", value=-3.5).reward == -3.5
    assert Verdict(None, 0.2, "x").reward == 0.2


def test_a_verdict_survives_its_record():
    for verdict in (
        Verdict(True, 1.0, "as asked", {"words": []}),
        Verdict(None, 0.1, "x", {}, value=-2.25),
        Verdict.failed("gone"),
    ):
        assert Verdict.from_record(verdict.to_record()) == verdict
    assert set(Verdict(True, 1.0, "as asked").to_record()) == {
        *("correct", "score", "reason", "evidence")
    }
    with pytest.raises(ValueError, match="no record of a verdict"):
        Verdict.from_record({"score": 0.5})


WRONG = {
    "name": ({"reward": "ocrr"}, "no reward 'ocrr'. Did you mean 'ocr'?"),
    "nothing": ({}, "there is no reward 'None'. One of shapes, geneval"),
    "key": ({"reward": "ocr", "egine": "vlm"}, "unknown key 'egine'. Did you mean 'engine'?"),
    "type": ({"reward": "shapes", "workers": "many"}, "workers is 'many'. Expected int"),
    "value": ({"reward": "shapes", "workers": -1}, "workers is -1"),
    "no judge": ({"reward": "judge"}, "needs the url of an endpoint"),
    "weight": (
        {"reward": "sum", "terms": [{"reward": "shapes", "weight": 0}]},
        "term shapes has weight 0",
    ),
    "twice": (
        {"reward": "sum", "terms": [{"reward": "shapes", "weight": 1}] * 2},
        "give each its own `name`",
    ),
    "pattern": (
        {"reward": "judge", "url": "http://x", "model": "y", "pattern": "grade"},
        "has 0 groups",
    ),
    "template": (
        {"reward": "judge", "url": "http://x", "model": "y", "template": "none"},
        "there is no template none; ours are dv, judge, ocr",
    ),
    "address": ({"reward": "http", "url": "here:18092"}, "'here:18092' is no address"),
    "spectra": ({"reward": "spectra", "backend": "vllm"}, "needs url"),
}


@pytest.mark.parametrize(("mapping", "says"), WRONG.values(), ids=WRONG)
def test_a_reward_that_is_described_wrongly_is_one_line(mapping, says):
    with pytest.raises(UsageError) as caught:
        build(mapping)
    assert says in str(caught.value)


def test_a_reward_is_named_by_a_word_or_a_file_and_settings_are_typed(tmp_path):
    assert named("ocr", ["workers=2", "engine=local"]) == {
        "reward": "ocr",
        "workers": 2,
        "engine": "local",
    }
    file = tmp_path / "mine.yaml"
    file.write_text("reward: shapes\nworkers: 1\n")
    assert named(str(file), ["workers=3"], "cuda:1") == {
        "reward": "shapes",
        "workers": 3,
        "device": "cuda:1",
    }
    with pytest.raises(UsageError, match="'engine' is no KEY=VALUE"):
        named("ocr", ["engine"])
    file.write_text("workers: 1\n")
    with pytest.raises(UsageError, match="names no reward"):
        named(str(file))


def test_every_reward_of_the_table_is_a_module_of_ours():
    assert {module.rpartition(".")[0] for module in REWARDS.values()} == {"eval.rewards"}


# --- shapes ---------------------------------------------------------------------------------------


def test_the_shapes_reward_checks_itself_and_knows_its_classes():
    reward = build({"reward": "shapes", "workers": 1})
    reward.check()
    pair = shape_pairs()[0]
    assert [v.correct for v in reward.score([pair.good, pair.bad], [pair.row] * 2)] == [True, False]
    with pytest.raises(ValueError, match="unknown class 'dog'"):
        reward.score([pair.good], [{"include": [{"class": "dog", "count": 1}]}])
    with pytest.raises(ValueError, match="1 images but 2 rows"):
        reward.score([pair.good], [pair.row] * 2)
    with pytest.raises(ValueError, match="no include clause"):
        reward.score([pair.good], [{"prompt": "a star"}])
    reward.close()


def test_a_judge_that_cannot_tell_good_from_bad_is_refused_with_the_numbers():
    class Blind:
        def score(self, images, rows):
            return [Verdict(None, 0.5, "grey") for _ in images]

    class Reversed:
        def score(self, images, rows):
            return [Verdict(None, i % 2 * 0.5, "odd") for i in range(len(images))]

    class Mute:
        def score(self, images, rows):
            return [Verdict.failed("no answer") for _ in images]

    pairs = shape_pairs()
    with pytest.raises(UserError, match=r"x does not tell .*: every image scores the same.*Mend"):
        require(Blind(), pairs, "x", "Mend it.")
    with pytest.raises(UserError, match=r"4 of 4 pairs.*scores 0 \(odd\).* 0.5 \(odd\)"):
        require(Reversed(), pairs, "x", "Mend it.")
    with pytest.raises(UserError, match=r"8 of 8 self-test images were not judged \(no answer\)"):
        require(Mute(), pairs, "x", "Mend it.")


# --- text -----------------------------------------------------------------------------------------

READINGS = [
    ("Hello", "Hello", 1.0),
    ("Hello", "say hello there", 1.0),  # a part of what was read, case aside
    ("New York", "NEWYORK", 1.0),  # white space aside
    ("Hello", "Hallo", 0.8),  # one letter of five
    ("Hello", "", 0.0),
    ("Hi", "completely different", 0.0),  # the distance is capped at the target's length
    ("abcd", "abc", 0.75),
    ("", "", 1.0),  # no text is asked for
    ("", "x", 0.0),
]


@pytest.mark.parametrize(("target", "read", "score"), READINGS)
def test_what_was_read_is_scored_as_published(target, read, score):
    verdict = verdict_of(target, read, {})
    assert verdict.score == pytest.approx(score)
    assert verdict.correct is (score == 1.0)


def test_the_target_is_the_first_quoted_text_or_the_rows_own():
    assert target_of({"prompt": 'a sign "A b" and "C"'}) == "A b"
    assert target_of({"prompt": "a sign that says “Open”"}) == "Open"
    assert target_of({"prompt": 'a "B"', "text": "C"}) == "C"
    assert target_of({"prompt": 'a sign ""'}) == ""
    with pytest.raises(ValueError, match="has no text in double quotes"):
        target_of({"prompt": "a sign"})
    with pytest.raises(ValueError, match="no prompt"):
        target_of({"tag": "ocr"})


def test_edit_distances_worked_out_by_hand():
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == 3
    assert edit_distance("abc", "abc") == 0


def test_the_vlm_reader_asks_as_published_at_temperature_0():
    with judge_endpoint(lambda body: says(" Hello \n")) as (url, seen):
        reward = build({"reward": "ocr", "engine": "vlm", "url": url, "model": "tiny"})
        verdicts = reward.score([GREY, GREY], [{"prompt": '"hello"'}, {"prompt": '"hallo"'}])
        reward.close()
    assert [v.score for v in verdicts] == [1.0, pytest.approx(0.8)]
    body = seen[0]
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.0, 1.0, 4096)
    assert body["messages"][0] == {"role": "system", "content": "You are a helpful assistant."}
    picture, text = body["messages"][1]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert text["text"] == (
        "Please output only the text content from the image without any additional descriptions "
        "or formatting."
    )


# --- a grading judge ------------------------------------------------------------------------------

GRADES = [
    ("All there. <Score>5</Score>", 1.0),
    ("One is missing. <Score> 2.5 </Score>", 0.5),
    ("<Score>1</Score> no, <Score>3</Score>", 0.6),  # the last one counts
    ("<Score>0</Score>", 0.0),
]


@pytest.mark.parametrize(("answer", "score"), GRADES)
def test_a_grade_becomes_a_score_of_0_to_1(answer, score):
    with judge_endpoint(lambda body: says(answer)) as (url, seen):
        reward = judge(url)
        [verdict] = reward.score([GREY], [{"prompt": "a star"}])
        reward.close()
    assert verdict.score == pytest.approx(score)
    assert verdict.correct is None
    assert verdict.evidence["answer"] == answer
    assert 'request: "a star"' in seen[0]["messages"][0]["content"][1]["text"]


@pytest.mark.parametrize("answer", ["", "very good", "<Score>9</Score>", "<Score></Score>", None])
def test_an_answer_without_a_grade_is_counted_and_never_0(answer):
    with judge_endpoint(lambda body: says(answer)) as (url, _):
        reward = judge(url)
        [verdict] = reward.score([GREY], [{"prompt": "a star"}])
        reward.close()
    assert verdict.error is not None
    with pytest.raises(ValueError, match="no reward"):
        _ = verdict.reward


def test_another_rubric_and_pattern_are_settings(tmp_path):
    rubric = tmp_path / "rubric.j2"
    rubric.write_text("{{ row.tag }}: {{ prompt }}, up to {{ highest }}")
    with judge_endpoint(lambda body: says("Final Score: 8")) as (url, seen):
        reward = judge(
            url, template=str(rubric), pattern=r"Final Score:\s*([0-9.]+)", lowest=0, highest=10
        )
        [verdict] = reward.score([GREY], [{"prompt": "a star", "tag": "single_object"}])
        reward.close()
    assert verdict.score == pytest.approx(0.8)
    text = seen[0]["messages"][0]["content"][1]["text"]
    assert text == "single_object: a star, up to 10.0"


def test_a_prompt_cannot_run_code_in_a_template():
    with pytest.raises(ValueError, match="cannot be filled in"):
        rendered("{{ prompt.__class__.__mro__ }}", prompt="x")
    assert "{{ 7 * 7 }}" in rendered(
        template_text("judge"), prompt="{{ 7 * 7 }}", lowest=0, highest=5
    )
    with pytest.raises(ValueError, match="'colour' is undefined"):
        rendered("{{ colour }}")


# --- a judge that fails ---------------------------------------------------------------------------


def test_one_slow_item_is_not_judged_and_the_others_are():
    def answer(body):
        if "slow" in body["messages"][0]["content"][1]["text"]:
            time.sleep(2.0)
        return says("<Score>5</Score>")

    with judge_endpoint(answer) as (url, _):
        reward = judge(url, timeout=0.5, concurrency=2)
        rows = [{"prompt": p} for p in ("a star", "a slow star", "a moon")]
        verdicts = reward.score([GREY] * 3, rows)
        reward.close()
    assert [v.error is None for v in verdicts] == [True, False, True]
    assert "no answer in time" in verdicts[1].error


def test_a_dying_judge_is_asked_again_and_a_broken_line_is_no_verdict():
    calls = []

    def answer(body):
        calls.append(1)
        if len(calls) == 1:
            return 500
        if len(calls) == 2:
            raise ConnectionError
        return says("<Score>4</Score>")

    with judge_endpoint(answer) as (url, _):
        reward = judge(url, attempts=3, concurrency=1)
        [verdict] = reward.score([GREY], [{"prompt": "a star"}])
        reward.close()
    assert verdict.score == pytest.approx(0.8)
    assert len(calls) == 3


def test_a_dead_judge_names_what_is_pending_and_soon():
    reward = judge("http://127.0.0.1:9", concurrency=2)
    rows = [{"prompt": "a star", "uid": f"item-{i}"} for i in range(10_000)]
    began = time.monotonic()
    with pytest.raises(ServiceError, match=r"answers nothing; pending: item-0, item-1.* 9995 more"):
        reward.score([GREY] * 10_000, rows)
    assert time.monotonic() - began < 20
    reward.close()


def test_a_wrong_model_name_or_key_ends_it_at_once():
    with judge_endpoint(lambda body: 404) as (url, seen):
        reward = judge(url, attempts=5, concurrency=1)
        with pytest.raises(Refused, match="answered 404"):
            reward.score([GREY], [{"prompt": "a star"}])
        reward.close()
    assert len(seen) == 1


def test_a_judge_that_sees_nothing_fails_its_check():
    with judge_endpoint(lambda body: says("<Score>3</Score>")) as (url, _):
        reward = judge(url)
        with pytest.raises(UserError, match=r"every image scores the same.*See whether tiny sees"):
            reward.check()
        reward.close()


# --- questions ------------------------------------------------------------------------------------


def choice(text, top=None):
    return says(text, top)["choices"][0]


def test_the_probability_of_yes_comes_from_the_first_token():
    top = {"Yes": math.log(0.6), " yes": math.log(0.1), "No": math.log(0.2), "It": math.log(0.1)}
    assert probability_of_yes(choice("Yes", top)) == pytest.approx(0.7 / 0.9)
    assert probability_of_yes(choice("No, it is not.")) == 0.0  # no log-probs: the words
    assert probability_of_yes(choice("Yes.", {"It": 0.0})) == 1.0
    assert probability_of_yes(choice("perhaps", {"It": 0.0})) is None
    assert probability_of_yes(choice("")) is None


def test_questions_are_combined_as_published():
    q = {"semantic_questions": [0.9, 0.3], "quality_questions": [0.6]}
    assert combined(q, "geometric") == pytest.approx(math.sqrt(0.6 * 0.6))
    assert combined(q, "mean") == pytest.approx(0.6)
    assert combined(q, "binary") == pytest.approx(math.sqrt(0.5))
    assert combined({"semantic_questions": [0.9, 0.3]}, "geometric") == pytest.approx(0.6)


def test_each_question_is_asked_by_itself_and_invalid_ones_are_not():
    def answer(body):
        text = body["messages"][0]["content"][1]["text"]
        p = 0.9 if "two" in text else 0.4
        return says("Yes", {"Yes": math.log(p), "No": math.log(1 - p)})

    row = {
        "prompt": "two stars",
        "semantic_questions": [
            {"question": "Are there two stars?", "tag": "Count", "is_valid": True},
            {"question": "Are they blue?", "is_valid": False},
        ],
        "quality_questions": [{"question": "Is it sharp?"}],
    }
    with judge_endpoint(answer) as (url, seen):
        reward = build({"reward": "dv", "url": url, "model": "tiny"})
        [verdict] = reward.score([GREY], [row])
        reward.close()
    assert verdict.score == pytest.approx(math.sqrt(0.9 * 0.4))
    assert verdict.reason == "1 of 2 yes; least: Is it sharp? (0.40)"
    assert len(seen) == 2
    assert (seen[0]["top_logprobs"], seen[0]["max_tokens"], seen[0]["temperature"]) == (5, 10, 0.0)


def test_an_answer_that_is_neither_yes_nor_no_leaves_no_verdict():
    with judge_endpoint(lambda body: says("It depends", {"It": 0.0})) as (url, _):
        reward = build({"reward": "dv", "url": url, "model": "tiny"})
        [verdict] = reward.score([GREY], [described_pairs()[0].row])
        with pytest.raises(ValueError, match="no semantic_questions"):
            reward.score([GREY], [{"prompt": "a star"}])
        reward.close()
    assert "is answered by 'It depends'" in verdict.error


# --- sums -----------------------------------------------------------------------------------------


def test_a_sum_weighs_its_terms_and_keeps_each():
    pair: Pair = shape_pairs()[0]
    with judge_endpoint(lambda body: says("<Score>4</Score>")) as (url, _):
        terms = [
            {"reward": "shapes", "weight": 0.5, "workers": 1},
            {"reward": "judge", "weight": 2, "name": "taste", "url": url, "model": "tiny"},
        ]
        reward = build({"reward": "sum", "terms": terms})
        good, bad = reward.score([pair.good, pair.bad], [pair.row] * 2)
        manifest = reward.manifest()
        reward.close()
    assert terms_of(good) == {"shapes": 1.0, "taste": 0.8}
    assert terms_of(bad) == {"shapes": 0.25, "taste": 0.8}
    assert good.reward == pytest.approx(0.5 + 1.6)
    assert good.score == pytest.approx((0.5 + 1.6) / 2.5)
    assert bad.reward == pytest.approx(0.125 + 1.6)
    assert set(manifest["terms"]) == {"shapes", "taste"}


def test_a_sum_without_one_of_its_terms_is_no_reward():
    pair = shape_pairs()[0]
    with judge_endpoint(lambda body: says("no idea")) as (url, _):
        terms = [
            {"reward": "shapes", "weight": 1, "workers": 1},
            {"reward": "judge", "weight": 1, "url": url, "model": "tiny"},
        ]
        reward = build({"reward": "sum", "terms": terms})
        [verdict] = reward.score([pair.good], [pair.row])
        reward.close()
    assert verdict.error == "judge: no grade in the answer 'no idea'"
    assert terms_of(verdict) == {"shapes": 1.0}
