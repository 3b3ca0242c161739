"""An RL run that is killed or told to stop goes on as if nothing had happened, on one process or
two; a state of other settings is refused with the difference.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import rl.judge
import rl.train
import rl.train_output
import rl.update
from eval.rewards import registry
from rl.train import Run
from rl.train_config import Config
from tests.learning import run_processes
from tests.rl_runs import Toy, quick, run, step_lines, toy_config, write_toy
from tests.sft_runs import about, kill_by_lot, master_bytes, state_bytes
from tests.tiny import write_tiny_checkpoint
from umm_reflect.errors import UserError
from umm_reflect.profile import load_profile, save_profile

STEPS = 5
CHANGES = {
    "max_steps": STEPS,
    "save_every": 1,
    "rollout": {"groups": 3, "group_size": 2},
    "prompts_rows": 3,
    "optimizer": {"ema_decay": 0.9, "eps": 1e-4},  # above the noise in gradients
    "text": {"kl": 0.01},
    "flow": {"kl": 0.01},
}
SAME = ("reward_mean", "advantage_abs", "text/loss", "flow/loss", "text/kl", "grad_norm", "images")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(autouse=True)
def judged(monkeypatch):
    monkeypatch.setitem(registry.REWARDS, "bright", "tests.bright")
    monkeypatch.setattr(rl.train_output, "draw_curves", lambda *_: None)


@pytest.fixture(scope="module")
def straight(toy, tmp_path_factory) -> Path:
    """Where a run went through without a stop."""
    out = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.REWARDS, "bright", "tests.bright")
        patch.setattr(rl.train_output, "draw_curves", lambda *_: None)
        assert run(toy_config(toy, out, **CHANGES)) == 0
    return out


def weights(out: Path) -> bytes:
    return (out / "checkpoint" / "ema.safetensors").read_bytes()


def same_end(out: Path, straight: Path) -> None:
    assert weights(out) == weights(straight)
    assert master_bytes(out) == master_bytes(straight)
    mine, other = about(out)["extra"], about(straight)["extra"]
    for name in ("taken", "updates", "watch", "difficulty"):
        assert mine[name] == other[name]
    assert about(out)["step"] == STEPS
    lines, wanted = step_lines(out), step_lines(straight)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for key in SAME:
        assert [line.get(key) for line in lines] == [line.get(key) for line in wanted]


# --- kill -9 --------------------------------------------------------------------------------------


def run_alone(config: Config) -> None:
    torch.set_num_threads(1)
    quick()
    run(config)


def test_kill_9_at_moments_drawn_by_lot_changes_nothing(toy, straight, tmp_path):
    config = toy_config(toy, tmp_path / "run", **CHANGES)
    lot, preload = random.Random(3), ["tests.rl_runs"]
    kills = kill_by_lot(run_alone, config, lot, preload=preload, most=3, late=0.3)
    assert kills >= 2
    assert run(config) == 0
    same_end(tmp_path / "run", straight)


# --- SIGTERM in each phase ------------------------------------------------------------------------

PHASES = {
    "rollout": (rl.train, "roll_out"),
    "judge": (rl.judge.Bench, "judge"),
    "credit": (rl.train.Run, "credit"),
    "laying out": (rl.update, "batches"),
    "replay": (rl.update.Updater, "_forward"),
    "backward": (rl.update.Updater, "_backward"),
    "metrics": (rl.train_output, "speed"),
    "save": (rl.train_output, "save_model"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_a_phase_saves_and_ends_with_143_and_the_run_goes_on(
    toy, straight, tmp_path, monkeypatch, phase
):
    module, name = PHASES[phase]
    real, calls = getattr(module, name), []

    def told(*args, **options):
        calls.append(1)
        if (tmp_path / "resume" / "step-0000002").exists() and len(calls) > 1:
            monkeypatch.setattr(module, name, real)
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **options)

    config = toy_config(toy, tmp_path, **CHANGES)
    monkeypatch.setattr(module, name, told)
    assert run(config) == 143
    saved = 3 if phase in ("backward", "metrics", "save") else 2  # its last backward pass
    assert about(tmp_path)["step"] == saved
    assert [line["step"] for line in step_lines(tmp_path)] == list(range(1, saved + 1))
    assert run(config) == 0
    same_end(tmp_path, straight)


# --- collapse -------------------------------------------------------------------------------------


def test_a_collapse_goes_back_to_the_best_checkpoint_with_its_moments(toy, tmp_path, monkeypatch):
    held = {"prompts": "shapes553", "every": 2, "count": 1, "reward": "bright"}
    values = iter([0.5, 0.9, 0.7])
    real = rl.train.HeldOut.look

    def look(self, learner, averaged):
        numbers, shown = real(self, learner, averaged=averaged)
        return {**numbers, "held_out/final": next(values)}, shown

    see, states = rl.train.Watch.see, {}

    def collapse(self, step, signals):
        report = see(self, step, signals)
        return replace(report, back_to=self.best.name) if step == 3 else report

    go_back = rl.train.Run.go_back

    def kept(self, name):
        go_back(self, name)
        states[name] = {n: t.clone() for n, t in self.copies.state_dict().items()}

    monkeypatch.setattr(rl.train.HeldOut, "look", look)
    monkeypatch.setattr(rl.train.Watch, "see", collapse)
    monkeypatch.setattr(rl.train.Run, "go_back", kept)
    changes = {**CHANGES, "max_steps": 4, "save_every": 2, "keep": 3}
    assert run(toy_config(toy, tmp_path, **changes, held_out=held)) == 0
    assert list(states) == ["step-0000002"]
    saved = tmp_path / "best_state/step-0000002"
    assert about_state(saved)["watch"]["best"][0] == "step-0000002"
    assert {n: t.numpy().tobytes() for n, t in states["step-0000002"].items()} == state_bytes(saved)
    assert (tmp_path / "best").resolve().name == "step-0000002"


def test_after_a_crash_the_run_goes_back_to_the_best_checkpoint_that_its_state_knows(
    toy, tmp_path, monkeypatch
):
    """Later bests of the run that crashed do not displace it, nor the folders that follow it."""
    held = {"prompts": "shapes553", "every": 1, "count": 1, "reward": "bright"}
    values = iter([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, *[0.0] * 9])
    real = rl.train.HeldOut.look

    def look(self, learner, averaged):
        numbers, shown = real(self, learner, averaged=averaged)
        return {**numbers, "held_out/final": next(values)}, shown

    monkeypatch.setattr(rl.train.HeldOut, "look", look)
    changes = {**CHANGES, "max_steps": 8, "save_every": 2, "keep": 1}
    config = toy_config(toy, tmp_path, **changes, held_out=held)
    see = rl.train.Watch.see

    def crash(self, step, signals):
        if step == 6:
            raise KeyboardInterrupt
        return see(self, step, signals)

    with monkeypatch.context() as patch:
        patch.setattr(rl.train.Watch, "see", crash)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    assert about(tmp_path)["extra"]["watch"]["best"][0] == "step-0000004"  # 5 was better

    def collapse(self, step, signals):
        report = see(self, step, signals)
        return replace(report, back_to=self.best.name) if step == 5 else report

    monkeypatch.setattr(rl.train.Watch, "see", collapse)
    assert run(replace(config, max_steps=5)) == 0
    assert (tmp_path / "checkpoint").resolve().is_dir()
    kept = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert kept == {"step-0000004", "step-0000005"}
    assert [path.name for path in (tmp_path / "best_state").glob("step-*")] == ["step-0000004"]


def about_state(path: Path) -> dict:
    return json.loads((path / "about.json").read_text())["extra"]


# --- what is refused ------------------------------------------------------------------------------


def test_a_state_of_other_settings_is_refused_with_the_difference(toy, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run", symlinks=True)
    longer = {**CHANGES, "max_steps": STEPS + 1}
    other = toy_config(
        toy,
        tmp_path / "run",
        **{**longer, "rollout": {"groups": 3, "group_size": 4}, "reward": {"gain": 0.1}},
    )
    with pytest.raises(UserError) as refused:
        run(other)
    assert "reward.gain: 0.3 then, 0.1 now; rollout.group_size: 2 then, 4 now" in str(refused.value)
    assert run(toy_config(toy, tmp_path / "run", **longer)) == 0  # longer is no difference
    assert about(tmp_path / "run")["step"] == STEPS + 1


def test_a_state_of_another_base_model_or_other_prompts_is_refused(toy, tmp_path, straight):
    shutil.copytree(straight, tmp_path / "run", symlinks=True)
    copy = shutil.copytree(toy.model.parent, tmp_path / "toy")
    moved = Toy(copy / "model", copy / "prompts.jsonl", toy.threshold)
    profile = load_profile(moved.model)
    write_tiny_checkpoint(moved.model, seed=1)
    save_profile(profile, moved.model)
    lines = moved.prompts.read_text().splitlines()
    moved.prompts.write_text("\n".join(lines[::-1]) + "\n")
    config = toy_config(moved, tmp_path / "run", **{**CHANGES, "max_steps": STEPS + 1})
    with pytest.raises(UserError, match=r"the weights in .* are other ones") as refused:
        run(config)
    assert "prompts.jsonl holds other ones" in str(refused.value)


def test_a_folder_that_holds_a_run_is_refused_where_a_new_one_is_wanted(toy, straight):
    with pytest.raises(UserError, match="holds the state step-0000005 of a run"):
        run(toy_config(toy, straight, **CHANGES, resume="never"))


# --- two processes --------------------------------------------------------------------------------


def on_two(processes, config: Config) -> dict:
    """A sharded run as one of two processes: what it logged, and its credited rollouts."""
    quick()
    torch.set_num_threads(1)
    seen: list = []
    credit = Run.credit

    def kept(self, judged):
        scored, values = credit(self, judged)
        seen.extend(
            (self.at.step, s.place.group, s.place.member, s.reward, s.advantage) for s in scored
        )
        return scored, values

    Run.credit = kept
    try:
        run = Run(config, processes)
        whole = all(isinstance(p, DTensor) for p in run.learner.bagel.parameters())
        state = rl.train.resume.to_go_on_from(config.output_dir, config.resume)
        if state is not None:
            run.resume(state)
        code = run.go()
    finally:
        Run.credit = credit
    return {"sharded": whole, "code": code, "seen": seen, "mine": run.mine}


def test_two_sharded_processes_give_the_rewards_and_advantages_of_one(toy, straight, tmp_path):
    alone = on_two(rl.train.start("none", "cpu"), toy_config(toy, tmp_path / "one", **CHANGES))
    assert not alone["sharded"]
    pair = run_processes(on_two, 2, toy_config(toy, tmp_path / "two", **CHANGES))
    assert [one["sharded"] for one in pair] == [True, True]
    assert [len(one["mine"]) for one in pair] == [3, 3]  # a group is split between them
    together = sorted(entry for one in pair for entry in one["seen"])
    for mine, wanted in zip(together, sorted(alone["seen"]), strict=True):
        assert mine[:4] == wanted[:4]
        assert mine[4] == pytest.approx(wanted[4], abs=1e-9)
    lines, wanted = step_lines(tmp_path / "two"), step_lines(tmp_path / "one")
    for name in ("text/loss", "flow/loss", "text/kl", "flow/kl", "grad_norm"):
        values = [line.get(name) for line in lines]
        assert values == pytest.approx([line.get(name) for line in wanted], abs=1e-5), name
    # what two processes have saved, one goes on from, and the other way round
    longer = {**CHANGES, "max_steps": STEPS + 1}
    assert run(toy_config(toy, tmp_path / "two", **longer, strategy="none")) == 0
    last = step_lines(tmp_path / "two")[-1]
    assert run(toy_config(toy, tmp_path / "one", **longer)) == 0
    assert last["text/loss"] == pytest.approx(
        step_lines(tmp_path / "one")[-1]["text/loss"], abs=1e-4
    )


def test_the_state_says_all_that_a_run_goes_on_from(straight):
    extra = json.loads((straight / "resume/step-0000005/about.json").read_text())["extra"]
    assert extra["taken"] == 3 * STEPS
    assert extra["updates"] == STEPS
    assert set(extra) == {
        *("config", "identity", "pool", "taken", "updates", "seconds", "difficulty", "watch"),
    }
