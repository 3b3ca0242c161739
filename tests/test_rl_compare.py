"""Curves at equal GPU seconds and the table of an ablation, against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from eval.bootstrap import Estimate
from eval.compare import TOLD, Outcome
from eval.results import Candidate, Judged, Look
from rl import ablation, compare
from rl.ablation import AblationConfig, markdown, table_of
from rl.compare import CompareConfig, line_of, read_run, running_mean
from tests.test_eval_report import result
from umm_reflect.errors import UsageError, UserError

# --- curves ---------------------------------------------------------------------------------------


def write_run(folder: Path, rewards: list[float], speed: float, *, objective: str = "grpo") -> Path:
    """A look before the first step and after each; 40 images a step."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"objective: {objective}\n")
    lines = [{"step": 0, "seconds": 9.0, "held_out/first": 0.25, "held_out/q/0": 0.5}]
    for step, reward in enumerate(rewards, 1):
        numbers = {"reward_mean": reward, "images": 40.0, "images_per_gpu_second": speed}
        lines.append({"step": step, "seconds": 99.0 * step, "updates": 2.0, **numbers})
        lines.append({"step": step, "held_out/first": reward / 2})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_gpu_seconds_are_those_of_steps_and_looks_stand_where_they_were_taken(tmp_path):
    curve = read_run(write_run(tmp_path / "a", [0.2, 0.4], 10.0, objective="awm"))
    assert (curve.name, curve.objective, curve.seconds) == ("a", "awm", 8.0)
    assert curve.steps == ((4.0, 0.2, 40.0, 2.0), (8.0, 0.4, 40.0, 2.0))
    assert curve.looks == ((0.0, 0.25), (4.0, 0.1), (8.0, 0.2))


def test_a_run_is_cut_where_the_slowest_has_come_to(tmp_path):
    curve = read_run(write_run(tmp_path / "a", [k / 20 for k in range(1, 21)], 40.0))
    line = line_of(curve, 10.5)
    assert (line.steps, line.updates, line.images) == (10, 20, 400)
    assert (line.reward_first, line.reward_last) == (0.05, 0.5)
    assert (line.held_out_start, line.held_out_last) == (0.25, 0.25)
    assert line.images_per_gpu_second == 40.0
    whole = line_of(curve, curve.seconds)
    assert (whole.steps, whole.reward_first, whole.reward_last) == (20, 0.075, 0.975)


def test_where_the_judge_gives_no_yes_or_no_the_mean_score_of_first_images_is_drawn(tmp_path):
    run = write_run(tmp_path / "a", [0.5], 10.0)
    text = (run / "metrics.jsonl").read_text().replace("held_out/first", "held_out/edits")
    (run / "metrics.jsonl").write_text(text)
    assert read_run(run).looks == ((0.0, 0.5),)


def test_the_thick_line_is_the_mean_of_what_came_before():
    assert running_mean([1.0, 2.0, 6.0, 1.0], most=3) == [1.0, 1.5, 3.0, 3.0]


def test_the_command_leaves_a_picture_and_the_table_as_json_and_text(tmp_path, capsys):
    runs = [write_run(tmp_path / "fast", [0.1, 0.2, 0.3], 40.0)]
    runs.append(write_run(tmp_path / "slow", [0.1, 0.5], 20.0, objective="nft"))
    out = tmp_path / "out" / "curves.png"
    assert compare.main([*map(str, runs), "--output", str(out)]) == 0
    assert Image.open(out).size[0] > 1000
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["gpu_seconds"] == 3.0
    assert [(one["run"], one["steps"]) for one in record["runs"]] == [("fast", 3), ("slow", 1)]
    said = out.with_suffix(".txt").read_text()
    assert said == capsys.readouterr().out
    assert said.splitlines()[0] == "after 3 GPU seconds each"
    assert said.splitlines()[3].split() == [
        *("slow", "nft", "1", "2", "40", "20.000", "0.100", "0.100", "0.250", "0.050"),
    ]


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is no RL run: it has no metrics\.jsonl"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="has no training step"):
        read_run(write_run(tmp_path / "none", [], 1.0))
    with pytest.raises(ValueError, match="one folder name"):
        CompareConfig((tmp_path / "a" / "x", tmp_path / "b" / "x"))
    with pytest.raises(ValueError, match=r"name a \.png file"):
        CompareConfig((tmp_path,), Path("curves.jpg"))


# --- the table of an ablation ---------------------------------------------------------------------


def evaluated(patterns: str, folder: str = "run", rounds: int = 1, **facts) -> Outcome:
    """ "00 01 1": three rows, the first wrong before and after its edit, the last without one."""
    results = [result(row, pattern) for row, pattern in enumerate(patterns.split())]
    own = {"profile": "ours", "verifier": {"shapes553": "ab"}, "limit": None}
    own |= {"sets_sha256": {"shapes553": "1"}, **dict.fromkeys(TOLD)}
    return Outcome(Path(folder), results, rounds, {**own, **facts})


START = evaluated("00 00 01 1 10")


def test_an_arm_of_two_seeds_is_their_mean_and_each_stands_below():
    both = [evaluated("01 00 01 1 1", "eval-a"), evaluated("01 01 01 1 10", "eval-b")]
    found, best = table_of([("start", START), ("both", both[0]), ("both", both[1])], None)
    assert best is None
    assert [(one.name, one.runs) for one in found] == [
        *(("start", 1), ("both", 2), ("eval-a", 1), ("eval-b", 1)),
    ]
    start, arm, one, other = found
    assert start.figures["final_accuracy"].value == 0.4
    assert arm.figures["final_accuracy"].value == 0.8
    assert (arm.minus_start["final_accuracy"].value, arm.minus_start["accuracy_at_0"].value) == (
        *(0.4, 0.0),
    )
    assert (one.figures["repair"].value, other.figures["repair"].value) == (0.666667, 1.0)
    assert (start.figures["repair"].value, arm.figures["repair"].value) == (0.333333, 0.833333)
    assert (arm.repair_factor.value, arm.minus_start["repair"].value) == (2.5, 0.5)
    assert (arm.figures["damage"].value, arm.minus_start["damage"].value) == (0.25, -0.25)
    assert (start.images, arm.images, arm.samples) == (1.8, 1.7, 10)
    assert start.minus_start["final_accuracy"] == Estimate(0.0, 0.0, 0.0, 5)
    assert arm.minus_start["final_accuracy"].low < 0.4 < arm.minus_start["final_accuracy"].high


def test_an_interval_is_paired_what_is_hard_in_a_prompt_cancels():
    start = evaluated(" ".join(["1", "0"] * 10))
    same = table_of([("start", start), ("same", start)], None)[0][1]
    assert same.minus_start["final_accuracy"] == Estimate(0.0, 0.0, 0.0, 20)
    assert same.figures["final_accuracy"].low < 0.4


def with_candidates(patterns: str, scores: str) -> Outcome:
    """Of each row a first image with score 5 and one further, right, with the given score."""
    outcome = evaluated(patterns)
    look = [Look("done", float(score), None) for score in scores.split()]
    results = [
        replace(
            one,
            looks=(replace(one.looks[0], score=5.0), *one.looks[1:]),
            candidates=(Candidate(Judged(True, ""), seen),),
        )
        for one, seen in zip(outcome.results, look, strict=True)
    ]
    return replace(outcome, results=results)


def test_the_best_first_images_are_picked_by_the_own_score_and_compared_row_by_row():
    best = with_candidates("0 0 0 1 1", "9 1 5 1 1")  # right, wrong, a tie of both, right, right
    found, first_images = table_of([("start", START), ("arm", evaluated("1 0 0 1 0"))], best)
    assert (first_images.n, first_images.accuracy.value) == (2, 0.7)
    assert [one.minus_best_of.value for one in found] == [-0.3, -0.3]
    text = markdown(found, first_images)
    assert "Best of 2 first images of the start by the model's own score (local view): 70.0" in text


def test_an_arm_is_compared_with_the_start_in_its_own_view():
    full = [replace(one, edit_view="full") for one in evaluated("01 01 01 01 01").results]
    start = replace(START, results=[*START.results, *full])
    found, _ = table_of([("start", start), ("arm", replace(START, results=full))], None)
    assert [(one.name, one.view) for one in found] == [
        *(("start", "local"), ("start", "full"), ("arm", "full")),
    ]
    assert found[2].minus_start["final_accuracy"].value == 0.0
    with pytest.raises(UserError, match="evaluated in full, the start in local"):
        table_of([("start", START), ("arm", replace(START, results=full))], None)


def test_what_cannot_be_compared_is_refused():
    other = evaluated("1 1", sets_sha256={"shapes553": "2"})
    with pytest.raises(UsageError, match="measure different things: other prompts"):
        table_of([("start", START), ("arm", other)], None)
    with pytest.raises(UsageError, match="limit: None and 3"):
        table_of([("start", START), ("arm", evaluated("1 1 1", limit=3))], None)
    with pytest.raises(UserError, match="'arm' was not evaluated on the rows and seeds"):
        table_of([("start", START), ("arm", evaluated("1 1"))], None)
    with pytest.raises(UserError, match="has no candidates"):
        table_of([("start", START), ("arm", START)], START)
    with pytest.raises(ValueError, match="give the start first, then one arm or more"):
        AblationConfig(("start=a",))


def test_the_table_names_each_number_once_and_says_what_there_is_not():
    found, _ = table_of([("start", evaluated("1 1")), ("arm", evaluated("1 10"))], None)
    head, rule, start, arm = markdown(found, None).splitlines()
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    assert len(set(columns)) == len(columns) == rule.count("---") == arm.count("|") - 1
    cells = dict(zip(columns, (c.strip() for c in arm.strip("|").split("|")), strict=True))
    assert cells["repair"] == cells["repair, times start"] == "-"
    assert cells["damage"] == "50.0 (0.0 to 100.0)"
    assert cells["damage, minus start"] == "+50.0 (+0.0 to +100.0)"
    assert start.startswith("| start | local | 100.0 (100.0 to 100.0) |")


def test_the_command_reads_folders_and_writes_markdown_and_json(tmp_path, monkeypatch, capsys):
    asked = {"a": START, "b": evaluated("1 1 1 1 1")}
    monkeypatch.setattr(Outcome, "read", lambda folder: asked[folder.name])
    out = tmp_path / "table.md"
    assert ablation.main(["start=a", "b", "--output", str(out)]) == 0
    assert out.read_text() == capsys.readouterr().out
    record = json.loads(out.with_suffix(".json").read_text())
    assert [one["name"] for one in record["arms"]] == ["start", "b"]
    assert record["arms"][1]["minus_start"]["final_accuracy"]["value"] == 0.6
    assert record["best_of"] is None
