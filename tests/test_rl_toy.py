"""RL makes the better of two choices win, of the head that learns: words, images, or both.

The whole trainer runs on a two-layer BAGEL that says either of two turns (tests/rl_runs.py).
"""

from __future__ import annotations

from typing import Any

import pytest

import rl.train_output
from eval.rewards import registry
from tests.rl_runs import Toy, run, step_lines, toy_config, write_toy

STEPS = 22
ARMS: dict[str, dict[str, Any]] = {
    "words": {"parameters": "und", "flow": {"weight": 0}},
    "images": {"parameters": "gen", "rollout": {"single": True}, "images": "all"},
    "both": {"parameters": "full"},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(autouse=True)
def judged(monkeypatch):
    monkeypatch.setitem(registry.REWARDS, "bright", "tests.bright")
    monkeypatch.setattr(rl.train_output, "draw_curves", lambda *_: None)


def mean(lines: list[dict], name: str) -> float:
    return sum(line.get(name, 0.0) for line in lines) / len(lines)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("arm", ["words", "both"])
def test_the_edit_wins_over_giving_up_and_where_images_learn_the_bright_one(
    toy, tmp_path, arm, seed
):
    config = toy_config(toy, tmp_path / "run", max_steps=STEPS, seed=seed, **ARMS[arm])
    assert run(config) == 0
    lines = step_lines(tmp_path / "run")
    first, last = lines[:2], lines[-4:]
    assert mean(first, "rollout/stop/done") > 0.25
    assert mean(last, "rollout/stop/done") < 0.1
    bright = [mean(some, "rollout/final") / mean(some, "rollout/edits") for some in (first, last)]
    assert bright[1] > 0.9 if arm == "both" else bright[1] < 0.9
    assert mean(last, "reward_mean") > mean(first, "reward_mean")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_bright_image_wins_where_only_images_learn(toy, tmp_path, seed):
    config = toy_config(toy, tmp_path / "run", max_steps=STEPS, seed=seed, **ARMS["images"])
    assert run(config) == 0
    lines = step_lines(tmp_path / "run")
    assert mean(lines[:2], "rollout/final") < 0.8
    assert mean(lines[-4:], "rollout/final") > 0.9
    assert "text/loss" not in lines[-1]
