"""The GenEval verifier around its models: batching, memory, bad input, and the self-test.

python -m pytest tests/test_geneval_verifier.py
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from eval import detector_speed, geneval_cli
from eval.clip_colors import GREY
from eval.detector_speed import noise
from eval.detectors import MAX_SIDE, Found
from eval.drawn import DrawnColors, DrawnDetector, DrawnVqa
from eval.evidence import Evidence
from eval.geneval import GenEvalVerifier, converted
from eval.geneval_check import ball, check, photograph
from eval.geneval_prompts import color_attr, colors, counting, position, single_object, two_object
from eval.geneval_scores import verdict
from eval.random_models import random_verifier
from eval.rewards.registry import build
from umm_reflect.errors import CheckpointError, UsageError, UserError
from umm_reflect.shapes.render import render
from umm_reflect.shapes.scene import COLORS, Scene, Shape


def drawn(*shapes, side=256):
    """Shapes of (kind, colour, x) on a row."""
    parts = tuple(Shape(kind, color, x, 0.5, 0.25) for kind, color, x in shapes)
    return render(Scene(parts), side)


BALL_AND_APPLE = drawn(("circle", "red", 0.25), ("heart", "blue", 0.75))
ROWS = {  # of a red sports ball to the left of a blue apple
    True: [
        single_object("sports ball"),
        two_object("apple", "sports ball"),
        counting("sports ball", 1),
        colors("apple", "blue"),
        position("sports ball", "left of", "apple"),
        position("apple", "right of", "sports ball"),
        color_attr(("sports ball", "red"), ("apple", "blue")),
    ],
    False: [
        single_object("donut"),
        two_object("apple", "donut"),
        counting("sports ball", 2),
        colors("apple", "red"),
        position("sports ball", "above", "apple"),
        color_attr(("sports ball", "blue"), ("apple", "red")),
    ],
}


def verifier(**options):
    return GenEvalVerifier(DrawnDetector(), DrawnColors(), DrawnVqa(), **options)


class Counting(DrawnDetector):
    """Notes how many images it was shown at once."""

    def __init__(self):
        self.shown = []

    def detect(self, images):
        self.shown.append(len(images))
        return super().detect(images)


class Fixed(DrawnDetector):
    """Sees the same in every image but an empty one."""

    def __init__(self, *found, source=None, everywhere=False):
        self.found, self.everywhere = list(found), everywhere
        if source is not None:
            self.source = source

    def detect(self, images):
        empty = [image.getextrema() == tuple((level, level) for level in GREY) for image in images]
        return [[] if e and not self.everywhere else self.found for e in empty]


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["official", "cross_checked"])
@pytest.mark.parametrize("preset", ["ours", "release"])
def test_rows_are_judged_by_what_is_drawn(rule, preset):
    judge = verifier(rule=rule, preset=preset)
    for correct, rows in ROWS.items():
        for opinion in judge.score([BALL_AND_APPLE] * len(rows), rows):
            assert opinion.correct is correct
            assert opinion.evidence["rule"] == rule


def test_a_verdict_can_be_reached_again_from_its_evidence_alone():
    judge = verifier(rule="cross_checked", preset="release")
    rows = ROWS[True] + ROWS[False]
    for row, opinion in zip(rows, judge.score([BALL_AND_APPLE] * len(rows), rows), strict=True):
        record = json.loads(json.dumps(opinion.to_record()))
        again = Evidence.from_record(record["evidence"])
        assert verdict(row, again, rule="cross_checked", preset="release") == opinion


def test_evidence_keeps_what_is_faint_for_the_rows_classes_only():
    box = (0.0, 0.0, 4.0, 4.0)
    seen = [Found("dog", s, box, 16) for s in (0.8, 0.2)] + [Found("cat", 0.2, box, 16)]
    seen += [Found("bus", 0.4, box, 16)]
    judge = GenEvalVerifier(Fixed(*seen), DrawnColors(), None)
    (evidence,) = judge.read([Image.new("RGB", (8, 8))], [single_object("dog")])
    kept = [(one.kind, one.score, one.color) for one in evidence.detections]
    assert kept == [("dog", 0.8, None), ("dog", 0.2, None), ("bus", 0.4, None)]
    assert evidence.size == (8, 8)
    (coloured,) = judge.read([Image.new("RGB", (8, 8))], [colors("dog", "red")])
    assert all(one.color is not None for one in coloured.detections if one.kind == "dog")
    assert len(coloured.detections[0].color_probabilities) == len(COLORS)


def test_blip_is_not_asked_where_nothing_depends_on_it():
    class Mute(DrawnVqa):
        def yes(self, crops, questions):
            raise AssertionError("asked")

    row = color_attr(("sports ball", "red"), ("apple", "blue"))
    judge = GenEvalVerifier(DrawnDetector(), DrawnColors(), Mute())
    assert judge.score([BALL_AND_APPLE], [row])[0].correct is True
    with pytest.raises(AssertionError, match="asked"):
        GenEvalVerifier(DrawnDetector(), DrawnColors(), Mute(), preset="release").score(
            [BALL_AND_APPLE], [row]
        )
    with pytest.raises(ValueError, match="there is none"):
        GenEvalVerifier(DrawnDetector(), DrawnColors(), None, rule="cross_checked")


# --- batches and memory ---------------------------------------------------------------------------


def test_an_image_that_many_rows_share_is_looked_at_once():
    detector = Counting()
    judge = GenEvalVerifier(detector, DrawnColors(), DrawnVqa())
    rows = ROWS[True]
    judge.score([BALL_AND_APPLE.copy() for _ in rows], rows)
    judge.score([BALL_AND_APPLE], [single_object("donut")])
    assert detector.shown == [1]
    other = drawn(("circle", "green", 0.5))
    judge.score([other, BALL_AND_APPLE, other], [single_object("donut")] * 3)
    assert detector.shown == [1, 1]


def test_memory_of_images_is_bounded_and_the_oldest_is_forgotten():
    detector = Counting()
    judge = GenEvalVerifier(detector, DrawnColors(), None, cache_bytes=3000)
    row = single_object("sports ball")
    images = [drawn(("circle", color, 0.5), side=64) for color in COLORS]
    for image in images:
        judge.score([image], [row])
    assert sum(entry.n_bytes for entry in judge._cache.values()) <= 3000
    assert 0 < len(judge._cache) < len(images)
    detector.shown.clear()
    judge.score([images[-1]], [row])
    assert detector.shown == []
    judge.score([images[0]], [row])
    assert detector.shown == [1]


def test_ten_thousand_items_are_judged_a_part_at_a_time():
    detector = Counting()
    judge = GenEvalVerifier(detector, DrawnColors(), None)
    right, wrong = drawn(("circle", "red", 0.5), side=64), drawn(("star", "red", 0.5), side=64)
    opinions = judge.score([right, wrong] * 5000, [single_object("sports ball")] * 10_000)
    assert [opinion.correct for opinion in opinions] == [True, False] * 5000
    assert detector.shown == [2]


def test_without_memory_the_results_are_the_same():
    rows = ROWS[True] + ROWS[False]
    images = [BALL_AND_APPLE] * len(rows)
    assert verifier(cache_bytes=0).score(images, rows) == verifier().score(images, rows)


@pytest.fixture(scope="module")
def random_models():
    return random_verifier("tiny", batch_size=4, cache_bytes=1 << 26)


def test_with_real_networks_a_batch_gives_what_single_images_give(random_models):
    images = noise(4, 48)
    images[2] = images[2].resize((60, 40))
    found = random_models.detector.detect(images)
    rows = [color_attr((seen[0].kind, "red"), (seen[-1].kind, "blue")) for seen in found]
    rows = [
        row if len({c["class"] for c in row["include"]}) == 2 else single_object("dog")
        for row in rows
    ]
    together = random_models.read(images, rows)
    random_models._cache.clear()
    for image, row, evidence in zip(images, rows, together, strict=True):
        (alone,) = random_models.read([image], [row])
        assert [one.kind for one in alone.detections] == [one.kind for one in evidence.detections]
        for one, other in zip(alone.detections, evidence.detections, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-4)
            if one.color_probabilities:
                assert one.color_probabilities == pytest.approx(other.color_probabilities, abs=1e-3)


def test_threads_may_share_a_verifier():
    judge = verifier()
    pictures = [drawn(("circle", color, 0.5), side=64) for color in COLORS]
    rows = [colors("sports ball", color) for color in COLORS]

    def one(index):
        right = index % len(COLORS)
        wrong = (right + 1) % len(COLORS)
        opinions = judge.score([pictures[right]] * 2, [rows[right], rows[wrong]])
        return [opinion.correct for opinion in opinions]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(40))) == [[True, False]] * 40


def test_weights_leave_the_device_and_come_back_for_the_next_image(monkeypatch):
    judge = verifier(device=torch.device("meta"))
    moves = []
    for model in (judge.detector, judge.colors, judge.vqa):
        monkeypatch.setattr(model, "move", lambda device: moves.append(device.type))
    judge.offload()
    judge.offload()
    assert moves == ["cpu"] * 3
    judge.score([BALL_AND_APPLE], ROWS[True][:1])
    judge.score([BALL_AND_APPLE], ROWS[True][:1])
    assert moves == ["cpu"] * 3 + ["meta"] * 3


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no include clause"),
        ({"tag": "colors", "include": "dog"}, "list of clauses"),
        ({"tag": "colors", "include": ["dog"]}, "list of clauses"),
        ({"tag": "colors", "include": [{"class": "dog"}]}, "count >= 1"),
        ({"tag": "colors", "include": [{"class": "dog", "count": True}]}, "count >= 1"),
        ({"tag": "x", "include": [{"class": "doggo", "count": 1}]}, "did you mean 'dog'"),
        ({"tag": "x", "include": [{"class": "zzz", "count": 1}]}, "no detector finds 'zzz'"),
        ({"tag": "x", "include": [{"class": "dog", "count": 1, "position": 5}]}, "not .relation"),
        ({"tag": "color_attr", "include": [{"class": "dog", "count": 1}]}, "two objects"),
    ],
)
def test_a_row_that_cannot_be_judged_is_refused_before_anything_is_looked_at(row, message):
    detector = Counting()
    judge = GenEvalVerifier(detector, DrawnColors(), DrawnVqa(), rule="cross_checked")
    with pytest.raises(ValueError, match=message):
        judge.score([BALL_AND_APPLE], [row])
    assert detector.shown == []


def test_images_and_rows_must_be_as_many():
    with pytest.raises(ValueError, match="1 images but 2 rows"):
        verifier().score([BALL_AND_APPLE], ROWS[True][:2])
    assert verifier().score([], []) == []


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (12_000, 40)])
def test_odd_sizes_are_judged_with_real_networks(random_models, size):
    image = Image.new("RGB", size, "red")
    (opinion,) = random_models.score([image], [color_attr(("dog", "red"), ("cat", "blue"))])
    assert opinion.correct is False
    assert max(opinion.evidence["image"]["size"]) <= MAX_SIDE


def test_images_of_every_mode_are_judged():
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "I;16"):
        assert verifier().score([Image.new(mode, (64, 64))], ROWS[True][:1])[0].correct is False


# --- the self-test --------------------------------------------------------------------------------


def test_the_self_test_passes_and_says_what_it_saw():
    lines = check(verifier(rule="cross_checked"))
    assert [line.partition(":")[0] for line in lines] == ["detector", "colours", "answers"]
    assert "10 of 10" in lines[1]


def test_the_photograph_and_the_balls_are_what_the_self_test_needs():
    assert photograph().size == (512, 600)
    assert ball("red").getpixel((256, 256)) == (215, 20, 30)


BOX = (0.0, 0.0, 300.0, 300.0)
BALL = Found("sports ball", 0.95, BOX, 9.0)


def broken(detector=None, colors=None, vqa=None):
    return GenEvalVerifier(
        detector or DrawnDetector(),
        colors or DrawnColors(),
        vqa or DrawnVqa(),
        rule="cross_checked",
    )


class OneColour(DrawnColors):
    def probabilities(self, crops, kinds):
        return [(1.0, *[0.0] * 9) for _ in crops]


class SaysYes(DrawnVqa):
    def yes(self, crops, questions):
        return [0.5 for _ in crops]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"detector": Fixed()}, "finds no sports ball .*nothing at all"),
        ({"detector": Fixed(Found("cat", 0.9, BOX, 9.0))}, "it finds cat 0.90"),
        ({"detector": Fixed(Found("sports ball", 0.3, BOX, 9.0))}, "best 0.30"),
        ({"detector": Fixed(BALL, everywhere=True)}, "in an empty picture"),
        ({"detector": Fixed(BALL, source="0" * 64)}, "not made from mmdet's published"),
        ({"colors": OneColour()}, "1 of 10 colours rightly .orange as red"),
        ({"vqa": SaysYes()}, "the right colour for 0 of 10"),
    ],
)
def test_a_broken_part_is_refused_with_the_cause(model, message):
    with pytest.raises(UserError, match=message):
        check(broken(**model))


def test_random_weights_do_not_pass_the_self_test(random_models):
    with pytest.raises(UserError, match="not made from mmdet's published checkpoint"):
        check(random_models)
    with pytest.raises(UserError, match=r"the detector finds (no|a) person"):
        check(random_models, other_weights=True)


# --- the reward -----------------------------------------------------------------------------------


def test_the_reward_is_built_by_name_checked_and_scores(capsys):
    reward = build({"reward": "geneval", "models": "drawn", "rule": "cross_checked"})
    reward.check()
    assert "detector: sports ball" in capsys.readouterr().out
    scores = [v.score for v in reward.score([BALL_AND_APPLE] * 2, [ROWS[r][0] for r in ROWS])]
    assert scores == [1.0, 0.0]
    manifest = json.loads(json.dumps(reward.manifest()))
    assert manifest["settings"]["rule"] == "cross_checked"
    assert set(manifest["models"]) == {"detector", "colors", "answers"}
    reward.offload()
    reward.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "strict"}, "rule"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"modells": "drawn"}, "modells"),
    ],
)
def test_wrong_settings_of_the_reward_are_named(settings, message):
    with pytest.raises(UsageError, match=message):
        build({"reward": "geneval", "models": "drawn", **settings})


def test_weights_that_were_never_fetched_are_an_error_with_the_two_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="download geneval, then umm-reflect geneval convert"):
        converted("mask2former")
    with pytest.raises(CheckpointError, match="geneval convert"):
        build({"reward": "geneval", "device": "cpu"})
    with pytest.raises(UserError, match="Fetch it: umm-reflect download geneval"):
        geneval_cli.main(["convert"])


def test_the_speed_program_runs_on_a_cpu_with_tiny_models(tmp_path, capsys):
    out = tmp_path / "speed.json"
    words = "--weights tiny --images 2 --size 48 --batch-size 2 --repeats 1 --device cpu"
    assert detector_speed.main([*words.split(), "--output", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == figures
    for part in ("detector_images", "clip_crops", "blip_questions", "verifier_images"):
        rates = figures[f"{part}_per_second"]
        assert rates["batched"] > 0
        assert rates["one_at_a_time"] > 0
    assert figures["objects_an_image"] > 0
