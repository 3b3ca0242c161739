"""RL makes the better of two choices win, of the head that learns: words, images, or both.

The whole trainer runs on a two-layer BAGEL that says either of two turns (tests/rl_runs.py).
"""

from __future__ import annotations

import pytest

import rl.train_output
from eval.rewards import registry
from tests.rl_runs import Toy, run, step_lines, toy_config, write_toy

STEPS = 20
ARMS = {
    "words": {"parameters": "und", "flow": {"weight": 0}},
    "images": {"parameters": "gen", "text": {"weight": 0}},
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
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else 0.0


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("arm", ARMS)
def test_the_better_choice_wins(toy, tmp_path, arm, seed):
    config = toy_config(toy, tmp_path / "run", max_steps=STEPS, seed=seed, **ARMS[arm])
    assert run(config) == 0
    lines = step_lines(tmp_path / "run")
    first, last = lines[:2], lines[-4:]
    edits = mean(last, "rollout/edits")
    bright = mean(last, "rollout/final") / max(edits, 1e-9)
    if arm != "images":
        assert mean(first, "rollout/stop/done") > 0.1
        assert mean(last, "rollout/stop/done") < 0.1
        assert edits > 0.8
    if arm != "words":
        assert mean(first, "rollout/final") / mean(first, "rollout/edits") < 0.8
        assert bright > 0.85
    if arm != "images":
        assert mean(last, "reward_mean") > mean(first, "reward_mean")
