"""AWM and DiffusionNFT make the better of two kinds of images win on a two-layer model.

The whole trainer runs, as in test_rl_toy.py, on single images that are drawn without noise. What is
better is what the judge says: bright images with one judge, dark ones with the other.
"""

from __future__ import annotations

from typing import Any

import pytest

import rl.train_output
from eval.rewards import registry
from rl.preflight import Checks
from rl.train import Run
from tests.rl_runs import Toy, run, step_lines, toy_config, write_toy
from umm_reflect.settings import _overlaid
from umm_reflect.training.processes import Processes

STEPS = 16
PLAIN = {"noise_level": 0.0, "step_kind": "ode"}
SINGLE: dict[str, Any] = {
    "parameters": "gen",
    "images": "all",
    "rollout": {"single": True, "first": PLAIN, "edit": PLAIN},
    "times": {"count": 3, "steps": [0, 4]},
    "max_steps": STEPS,
    # winning takes the toy far from its start
    "watch": {name: {"high": None} for name in ("velocity_ratio", "flow_kl", "flat")},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "awm": {"objective": "awm", "advantage": {"scale_to": 1.0}},
    "awm with true ratios": {"objective": "awm", "awm": {"true_ratio": True}, "updates": 2},
    "nft": {"objective": "nft"},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(autouse=True)
def judged(monkeypatch):
    monkeypatch.setitem(registry.REWARDS, "bright", "tests.bright")
    monkeypatch.setattr(rl.train_output, "draw_curves", lambda *_: None)


def right_at_both_ends(toy: Toy, out, *, dark: bool = False, **changes: Any) -> tuple[float, float]:
    """The share of right images in the first two and in the last four rollouts of a run."""
    judge = {"reward": "bright", "set": [f"threshold={toy.threshold}", f"dark={dark}"]}
    config = toy_config(toy, out, **_overlaid(SINGLE, changes), judge=judge)
    assert run(config) == 0
    right = [line["rollout/final"] for line in step_lines(out)]
    assert len(right) == config.max_steps
    return sum(right[:2]) / 2, sum(right[-4:]) / 4


CASES = [(objective, False, seed) for objective in ("awm", "nft") for seed in (0, 1, 2)]
CASES += [("awm", True, 0), ("nft", True, 0), ("awm with true ratios", False, 0)]


@pytest.mark.parametrize(("objective", "dark", "seed"), CASES)
def test_the_images_win_that_the_judge_calls_right(toy, tmp_path, objective, dark, seed):
    changes = {"seed": seed, **OBJECTIVES[objective]}
    first, last = right_at_both_ends(toy, tmp_path / "run", dark=dark, **changes)
    assert first < 0.8
    assert last > 0.9


@pytest.mark.parametrize("objective", ["awm", "nft"])
def test_without_a_learning_rate_nothing_wins(toy, tmp_path, objective):
    still = {"max_steps": 6, "optimizer": {"lr": 0.0, "flow_lr": 0.0}}
    first, last = right_at_both_ends(toy, tmp_path / "run", **OBJECTIVES[objective], **still)
    assert abs(last - first) < 0.2
    assert last < 0.8


def test_preflight_plans_memory_for_the_states_that_matching_makes_itself(toy, tmp_path):
    found = []
    for count in (1, 3):
        times = {"times": {"count": count, "steps": [0, 4]}}
        settings = _overlaid(SINGLE, OBJECTIVES["awm"]) | times
        run = Run(toy_config(toy, tmp_path / "run", **settings), Processes())
        with run.judges():
            checks = Checks(run)
            assert all(finding.passed for finding in checks.all())
        found.append(checks.work.gen)
    # two more states of each of two images, of 32 x 32 pixels and 16 pixels a token side
    assert found[1] - found[0] == 2 * 2 * (2 * 2)
