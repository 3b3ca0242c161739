"""A policy of known behaviour plays a hundred prompts, and every figure is worked out by hand.

The loop, the rendered images, the verifier, the results and the report are the real ones; only what
is said and drawn is scripted. What the hundred do is the table SCRIPT.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from PIL import Image

from agent.config import ReflectConfig, loop_options
from agent.loop import run_episodes
from agent.policy import ScriptedPolicy
from agent.types import Reflection
from eval.report import report_of
from eval.results import ResultFile, Sample, read_results, result_of
from eval.shapes import ShapesVerifier
from umm_reflect.shapes.render import render
from umm_reflect.shapes.sampler import scene_for
from umm_reflect.shapes.sets import build_sets


@dataclass(frozen=True)
class Act:
    """What `many` prompts do: their images (1: right) and what is said of each."""

    many: int
    images: str
    looks: tuple[str, ...]


SCRIPT = (
    Act(30, "01", ("3 edit", "10 done")),  # repaired by one edit
    Act(10, "001", ("3 edit", "4 edit", "10 done")),  # repaired by two
    Act(3, "10", ("5 edit", "9 done")),  # damaged
    Act(2, "1", ("junk",)),  # malformed, over a right image
    Act(3, "0", ("junk",)),  # malformed, over a wrong one
    Act(30, "1", ("10 done",)),  # right at once
    Act(12, "0", ("8 done",)),  # stops early: a wrong image is accepted
    Act(10, "0000", ("2 edit",) * 4),  # edits until no round is left
)
ACTS = [act for act in SCRIPT for _ in range(act.many)]
ROWS = [build_sets().shapes553[place * 553 // 100] for place in range(100)]
BLANK = (235, 230, 225)


def act_of(sample: str) -> tuple[int, Act]:
    row = int(sample.split(":")[1])
    place = next(i for i, entry in enumerate(ROWS) if entry.index == row)
    return place, ACTS[place]


def say(ask) -> str | Reflection:
    said = act_of(ask.sample)[1].looks[ask.round]
    if said == "junk":
        return "I would rather not."
    score, action = said.split()
    edit = f"Mend fault number {ask.round}." if action == "edit" else ""
    return Reflection("I see it.", int(score), action, edit)


def paint(ask) -> Image.Image:
    place, act = act_of(ask.sample)
    if act.images[ask.number] == "1":
        return render(scene_for(ROWS[place].row, random.Random(place)))
    return Image.new("RGB", (128, 128), (*BLANK[:2], BLANK[2] - 60 * ask.number))


@pytest.fixture(scope="module")
def results():
    assert len(ACTS) == len({entry.index for entry in ROWS}) == 100
    samples = [Sample("local", "shapes553", entry, 0) for entry in ROWS]
    trajectories = run_episodes(
        ScriptedPolicy(say, paint),
        [str(entry.row["prompt"]) for entry in ROWS],
        max_rounds=3,
        max_tokens=300,
        options=loop_options(ReflectConfig()),
        seed=0,
        samples=[sample.name for sample in samples],
    )
    judge = ShapesVerifier()
    return [
        result_of(one, judge.score(one.images, [sample.entry.row] * len(one.images)), sample)
        for one, sample in zip(trajectories, samples, strict=True)
    ]


@pytest.fixture(scope="module")
def report(results):
    return report_of(results, max_rounds=3).sets["shapes553"]["local"]


def test_what_was_played_is_what_the_script_says(results):
    for act, one in zip(ACTS, results, strict=True):
        assert "".join("01"[image.correct] for image in one.images) == act.images
        assert len(one.looks) == len(act.looks)


BY_HAND = {  # (how many, out of how many)
    # right at first: 3 that will be damaged, 2 that are malformed, 30
    "accuracy_at_0": (35, 100),
    "accuracy_at_1": (35 - 3 + 30, 100),
    "accuracy_at_2": (35 - 3 + 30 + 10, 100),
    "accuracy_at_3": (72, 100),
    # the two malformed ones over a right image count as wrong
    "accuracy_at_1_gated": (60, 100),
    "accuracy_at_2_gated": (70, 100),
    "accuracy_at_3_gated": (70, 100),
    "images_at_0": (100, 100),
    "images_at_1": (100 + 30 + 10 + 3 + 10, 100),
    "images_at_2": (153 + 10 + 10, 100),
    "images_at_3": (173 + 10, 100),
    "final_accuracy": (72, 100),
    "any_sample_right": (72, 100),
    "repair": (40, 65),
    "damage": (3, 35),
    "repair_last": (40, 65),
    "damage_last": (3, 35),
    "protocol_valid": (95, 100),
    # turns: 30 x 2, 10 x 3, 3 x 2, 30, 12, 10 x 4 legal; each junk is sampled twice
    "turns_valid": (178, 178 + 10),
    "look_on_right": (40 + 30, 40 + 30 + 3),
    "look_on_wrong": (30 + 20 + 40, 30 + 20 + 40 + 3 + 12),
    "score_on_right": (70 * 10 + 3 * 5, 73),
    "score_on_wrong": (40 * 3 + 10 * 4 + 3 * 9 + 12 * 8 + 40 * 2, 105),
    "mean_edits": (30 + 20 + 3 + 30, 100),
    "stop_done": (85, 100),
    "stop_malformed": (5, 100),
    "stop_max_rounds": (10, 100),
}


def test_every_figure_is_what_a_person_works_out_by_hand(report):
    found = {
        name: (figure.value, figure.n)
        for name, figure in report.all.items()
        if not name.startswith(("macro_", "score_at_"))
    }
    assert found == {name: (round(part / n, 6), n) for name, (part, n) in BY_HAND.items()}


def test_a_macro_accuracy_is_the_mean_of_those_of_the_six_families(report):
    shares = [figures["accuracy_at_3_gated"].value for figures in report.families.values()]
    assert len(shares) == 6
    macro = report.all["macro_accuracy_at_3_gated"]
    assert macro.value == pytest.approx(sum(shares) / 6, abs=1e-6)
    assert sum(figures["final_accuracy"].n for figures in report.families.values()) == 100


def test_intervals_hold_their_figure_and_are_as_wide_as_a_binomial_of_so_many(report):
    for name in ("accuracy_at_0", "final_accuracy", "repair", "protocol_valid"):
        figure = report.all[name]
        spread = 1.96 * (figure.value * (1 - figure.value) / figure.n) ** 0.5
        assert figure.low < figure.value < figure.high
        assert figure.high - figure.low == pytest.approx(2 * spread, abs=0.03)


def test_the_calibration_is_what_a_person_works_out_by_hand(report):
    found = report.calibration
    bins = {one.score: (one.right.value, one.right.n) for one in found.bins}
    assert bins == {
        **{2: (0.0, 40), 3: (0.0, 40), 4: (0.0, 10), 5: (1.0, 3)},
        **{8: (0.0, 12), 9: (0.0, 3), 10: (1.0, 70)},
    }
    # the 70 tens beat all 105 wrong ones, the 3 fives all but the 15 above them
    assert found.auroc.value == round((70 * 105 + 3 * 90) / (73 * 105), 6)
    squares = 40 * 0.04 + 40 * 0.09 + 10 * 0.16 + 3 * 0.25 + 12 * 0.64 + 3 * 0.81
    assert found.brier.value == round(squares / 178, 6)
    gaps = 40 * 0.2 + 40 * 0.3 + 10 * 0.4 + 3 * 0.5 + 12 * 0.8 + 3 * 0.9
    assert found.expected_error.value == round(gaps / 178, 6)


def test_the_files_give_the_same_report(results, report, tmp_path):
    with ResultFile(tmp_path / "results.jsonl", resume=False) as file:
        file.append(results)
    read = read_results(tmp_path / "results.jsonl")
    assert read == results
    assert report_of(read, max_rounds=3).sets["shapes553"]["local"] == report
