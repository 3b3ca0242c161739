"""scripts/rl/nano.sh and compare_objectives.sh: what they start, and that they end with a table.

A stand-in for Python writes down what it is asked for; one arm is run in earnest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NANO = "pretrained/bagel-nano-shapes"

# A line a call: MODULE ARGUMENTS. Calls that hold $FAIL say why, and fail.
STAND_IN = """#!/bin/bash
shift
echo "$*" >>"$RAN"
if [ -n "$FAIL" ] && [[ "$*" == *"$FAIL"* ]]; then echo "no room on the GPU"; exit 7; fi
"""


@pytest.fixture
def start(tmp_path):
    """Runs a script with the stand-in; returns (the calls by what they write into, the process)."""
    stand_in, work = tmp_path / "python", tmp_path / "work"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def run(script: str, *arguments: str, fail: str = ""):
        ran = tmp_path / "ran"
        given = [*("--python", str(stand_in), "--work", str(work)), *arguments]
        done = subprocess.run(
            ["bash", f"scripts/rl/{script}", *given],
            cwd=ROOT,
            env={**os.environ, "RAN": str(ran), "FAIL": fail},
            capture_output=True,
            text=True,
            timeout=60,
        )
        lines = ran.read_text().splitlines() if ran.exists() else []
        calls = {}
        for line in lines:
            words = line.replace(f"{work}/", "").split()
            flag = "--output-dir" if "--output-dir" in words else "--output"
            calls[words[words.index(flag) + 1]] = words
        assert len(calls) == len(lines)
        return calls, done

    return run


def value(words: list[str], flag: str) -> str | None:
    """The last value of a flag, which is the one that counts."""
    places = [i for i, word in enumerate(words) if word == flag]
    return words[places[-1] + 1] if places else None


def test_every_arm_is_trained_evaluated_and_compared(start):
    calls, done = start("nano.sh", "--model", "start", "--seconds", "9", "--", "--updates", "3")
    assert done.returncode == 0, done.stderr
    runs = ["both-1", "both-2", "both-3", "words-1", "images-1", "other-view-1"]
    trained = {name: words for name, words in calls.items() if words[0] == "rl.train"}
    assert sorted(trained) == sorted(runs)
    for name, words in trained.items():
        assert value(words, "--model") == "start"
        assert value(words, "--recipe") == "nano"
        assert value(words, "--max-seconds") == "9"
        assert value(words, "--seed") == name[-1]
        assert words[-2:] == ["--updates", "3"]
        view = "local" if name == "other-view-1" else "full"
        assert value(words, "--rollout.edit-view") == view
        assert value(words, "--flow.weight") == ("0" if name == "words-1" else None)
        assert value(words, "--text.weight") == ("0" if name == "images-1" else None)
        assert ("--no-preflight" in words) == (name not in ("both-1", "other-view-1"))

    evaluated = {name: words for name, words in calls.items() if words[0] == "eval.run"}
    assert sorted(evaluated) == sorted(f"eval-{n}" for n in [*runs, "start", "best-of-4"])
    for name, words in evaluated.items():
        assert words[1] == "hard553"
        assert value(words, "--seeds") == "0"
        view = {"eval-start": "both", "eval-other-view-1": "local"}.get(name, "full")
        assert value(words, "--edit-view") == view
        run = name.removeprefix("eval-")
        of_start = name in ("eval-start", "eval-best-of-4")
        assert value(words, "--model") == ("start" if of_start else f"{run}/checkpoint")
        assert value(words, "--best-of") == ("4" if name == "eval-best-of-4" else None)

    assert calls["ablation.md"] == [
        *("rl.ablation", "start=eval-start", "both=eval-both-1", "both=eval-both-2"),
        *("both=eval-both-3", "words=eval-words-1", "images=eval-images-1"),
        *("other-view=eval-other-view-1", "--best-of", "eval-best-of-4"),
        *("--output", "ablation.md"),
    ]
    assert calls["curves.png"] == ["rl.compare", *runs, "--output", "curves.png"]


def test_stages_and_arms_are_chosen(start):
    calls, done = start("nano.sh", "--stages", "eval", "--arms", "words", "--seeds", "5,6")
    assert done.returncode == 0, done.stderr
    assert sorted(calls) == ["eval-start", "eval-words-5"]
    assert value(calls["eval-start"], "--model") == NANO
    assert value(calls["eval-start"], "--edit-view") == "full"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--arms", "both,wrds"], "there is no arm 'wrds'. Choose of both, words, images"),
        (["--stages", "tain"], "there is no stage 'tain'. Choose of train, eval, table"),
        (["--modle", "x"], "unknown argument --modle. Known: --arms, --model"),
    ],
)
def test_what_is_no_argument_is_refused_before_anything_runs(start, arguments, says):
    calls, done = start("nano.sh", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert not calls


def test_a_run_that_fails_ends_the_script_after_the_others_and_is_named(start):
    calls, done = start("nano.sh", "--arms", "both,words", "--seeds", "1", fail="work/words-1 ")
    assert done.returncode == 1
    assert "error: words-1 ended with code 7. The end of" in done.stderr
    assert "no room on the GPU" in done.stderr
    assert sorted(calls) == ["both-1", "words-1"]


def test_three_objectives_start_alike_and_differ_in_their_recipe_alone(start):
    calls, done = start(
        *("compare_objectives.sh", "--model", "start", "--seconds", "9", "--seed", "4"),
        *("--limit", "8", "--", "--warmup", "1"),
    )
    assert done.returncode == 0, done.stderr
    runs = ["nano-single", "nano-awm", "nano-nft"]
    for name in runs:
        words = calls[name]
        assert words[:3] == ["rl.train", "--recipe", name]
        same = [word for word in words if word != name]
        assert same == [word for word in calls["nano-single"] if word != "nano-single"]
        assert (value(words, "--model"), value(words, "--seed")) == ("start", "4")
        assert words[-2:] == ["--warmup", "1"]
        of_run = calls[f"eval-{name}"]
        assert value(of_run, "--model") == f"{name}/checkpoint"
        assert (value(of_run, "--max-rounds"), value(of_run, "--limit")) == ("0", "8")
    assert calls["curves.png"] == ["rl.compare", *runs, "--output", "curves.png"]
    assert calls["first_images.md"][:3] == [
        *("rl.ablation", "start=eval-start", "nano-single=eval-nano-single"),
    ]


@pytest.mark.slow
def test_one_arm_runs_in_earnest_and_ends_with_its_table(tmp_path):
    small = ["--rollout.groups", "1", "--rollout.group-size", "2", "--rollout.max-rounds", "1"]
    small += ["--updates", "1", "--no-preflight", "--held-out.every", "0", "--pictures-every", "0"]
    small += ["--rollout.edit.points", "9", "--rollout.first.points", "9"]
    done = subprocess.run(
        [
            *("bash", "scripts/rl/nano.sh", "--python", sys.executable, "--work", str(tmp_path)),
            *("--arms", "words", "--seeds", "1", "--seconds", "1", "--limit", "1", "--", *small),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "ablation.json").read_text())
    assert [(one["name"], one["view"], one["samples"]) for one in record["arms"]] == [
        *(("start", "full", 1), ("words", "full", 1)),
    ]
    [line] = json.loads((tmp_path / "curves.json").read_text())["runs"]
    assert (line["run"], line["steps"]) == ("words-1", 1)
    assert (tmp_path / "words-1" / "checkpoint" / "ema.safetensors").exists()
