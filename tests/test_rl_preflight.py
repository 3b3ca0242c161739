"""Preflight: it passes on a sound run, and each of eight one-line faults is caught and named.

The faults are put in by the tests; nothing of them is in the product.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch

import rl.credit
import rl.preflight
import rl.train
import umm_reflect.draw
import umm_reflect.flow
import umm_reflect.generate
from eval.rewards import registry
from rl.preflight import preflight
from rl.train import Run, main
from rl.types import Place
from tests.rl_runs import Toy, toy_config, write_toy
from umm_reflect.adapters import adapters_disabled
from umm_reflect.errors import UserError
from umm_reflect.settings import to_yaml
from umm_reflect.training.learner import Learner
from umm_reflect.training.processes import Processes

GUIDED = {"text_scale": 2.0, "image_scale": 1.5, "interval": [0.0, 1.0]}
ROLLOUT = {"group_size": 4, "temperature": 0.9, "edit": GUIDED}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory) -> Toy:
    return write_toy(tmp_path_factory.mktemp("random"), steps=0)


@pytest.fixture(autouse=True)
def judged(monkeypatch):
    monkeypatch.setitem(registry.REWARDS, "bright", "tests.bright")


def checked(toy: Toy, out: Path, **changes) -> str:
    """What preflight says of a run: "" where it passes."""
    run = Run(toy_config(toy, out, rollout=ROLLOUT, **changes), Processes())
    try:
        preflight(run)
    except UserError as error:
        return str(error)
    return ""


def failed(out: Path) -> set[str]:
    """The names of the checks that failed, as the file has them."""
    return {f["name"] for f in json.loads((out / "preflight.json").read_text()) if not f["passed"]}


@pytest.mark.parametrize("parameters", ["full", "lora-both"])
def test_a_sound_run_passes_and_replay_differs_by_less_than_1e_5(
    random_weights, tmp_path, parameters
):
    assert checked(random_weights, tmp_path, parameters=parameters) == ""
    findings = {f["name"]: f for f in json.loads((tmp_path / "preflight.json").read_text())}
    assert list(findings) == [
        *("schedule", "latents", "replay", "plain", "weights", "members", "reward", "memory"),
    ]
    numbers = findings["replay"]["numbers"]
    assert numbers["word"]["count"] > 50
    assert numbers["step"]["count"] >= 6
    assert 0 < numbers["word"]["max"] < 1e-5
    assert numbers["step"]["max"] < 1e-5
    assert len(numbers["step"]["by_time"]) == 3  # the times of a window of three steps
    assert findings["plain"]["numbers"]["largest"] == 0


def test_a_trained_run_passes_and_its_words_differ_by_less_than_1e_5_of_them(
    toy, tmp_path, monkeypatch
):
    """Its scores reach 22 and its log-probs -20: 1e-5 is five steps of fp32 there, and rounding
    alone is .7e-5 to 1.4e-5, by the CPU, the threads and the seed. So: relative above one."""
    real, words = rl.preflight.read, []

    def kept(*args):
        said, moves = real(*args)
        words.append(said)
        return said, moves

    monkeypatch.setattr(rl.preflight, "read", kept)
    assert checked(toy, tmp_path) == ""
    assert sum(len(said.old_S) for said in words) > 50
    for said in words:
        torch.testing.assert_close(said.logprob_S, said.old_S, atol=1e-5, rtol=1e-5)


def test_a_clip_that_is_narrower_than_what_kernels_differ_by_asks_for_the_learners_log_probs(
    toy, tmp_path
):
    narrow = {"text": {"clip_low": 1e-10, "clip_high": 1e-10}}
    said = checked(toy, tmp_path / "rollout", **narrow)
    assert failed(tmp_path / "rollout") == {"replay", "weights"}
    assert "words differ by more than the clip of 1e-10" in said
    assert "set old: learner" in said
    assert checked(toy, tmp_path / "learner", **narrow, old="learner") == ""


def test_single_images_pass_too(toy, tmp_path):
    config = toy_config(toy, tmp_path, rollout={**ROLLOUT, "single": True}, images="all")
    assert all(finding.passed for finding in preflight(Run(config, Processes())))


# --- eight faults ---------------------------------------------------------------------------------


def shifted_schedule(patch):
    real = umm_reflect.flow.schedule
    patch.setattr(umm_reflect.flow, "schedule", lambda points, shift: real(points, shift * 1.1))


def bf16_latents(patch):
    real = umm_reflect.draw.sde_step

    def rounded(*args):
        taken = real(*args)
        return taken._replace(x_next=taken.x_next.bfloat16().float())

    patch.setattr(umm_reflect.draw, "sde_step", rounded)


def adapter_not_bound(patch):
    real = Learner.inference

    @contextlib.contextmanager
    def unbound(self, averaged=False):
        with real(self, averaged) as bagel, adapters_disabled(bagel):
            yield bagel

    patch.setattr(Learner, "inference", unbound)


def guidance_branch_dropped(patch):
    patch.setattr("rl.replay.guide", lambda cond, text, image, settings: cond.float())


def reward_inverted(patch):
    real = rl.credit.score
    patch.setattr(rl.credit, "score", lambda *args: (-real(*args)[0], real(*args)[1]))


def same_noise_in_a_group(patch):
    patch.setattr(Place, "name", property(lambda place: place.group_name))


def wrong_temperature_in_replay(patch):
    from dataclasses import replace

    real = rl.preflight.lay_out

    def cooled(*args, **options):
        unit = real(*args, **options)
        words = replace(unit.words, temperature=unit.words.temperature * 0 + 1)
        return replace(unit, words=words)

    patch.setattr(rl.preflight, "lay_out", cooled)


def stale_cache(patch):
    real, kept = umm_reflect.generate.Engine, {}
    patch.setattr(
        umm_reflect.generate, "Engine", lambda bagel: kept.setdefault(id(bagel), real(bagel))
    )


FAULTS = {
    shifted_schedule: "schedule",
    bf16_latents: "latents",
    adapter_not_bound: "weights",
    guidance_branch_dropped: "replay",
    reward_inverted: "reward",
    same_noise_in_a_group: "members",
    wrong_temperature_in_replay: "replay",
    stale_cache: "weights",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught_and_named(toy, tmp_path, monkeypatch, fault):
    parameters = "lora-both" if fault is adapter_not_bound else "full"
    with monkeypatch.context() as patch:
        fault(patch)
        said = checked(toy, tmp_path, parameters=parameters)
    assert said.startswith("preflight failed: ")
    assert FAULTS[fault] in failed(tmp_path)
    assert f"{FAULTS[fault]} (" in said


def test_bf16_passes_and_its_bounds_still_catch_a_branch_and_a_temperature(
    toy, tmp_path, monkeypatch
):
    assert checked(toy, tmp_path / "sound", dtype="bfloat16") == ""
    for fault in (guidance_branch_dropped, wrong_temperature_in_replay):
        with monkeypatch.context() as patch:
            fault(patch)
            assert checked(toy, tmp_path / fault.__name__, dtype="bfloat16")
        assert "replay" in failed(tmp_path / fault.__name__)


def test_a_model_that_talks_on_is_cut_short(toy, tmp_path, monkeypatch):
    lengths = []
    real = rl.preflight.roll_out

    def counted(*args, **options):
        made = real(*args, **options)
        lengths.extend(len(t.sampled_ids) for one in made for t in one.trajectory.turns)
        return made

    monkeypatch.setattr(rl.preflight, "roll_out", counted)
    monkeypatch.setattr(rl.preflight, "WORDS", 3)
    assert checked(toy, tmp_path) == ""
    assert {n for n in lengths if n <= 3} == {3}  # as it speaks
    assert min(n for n in lengths if n > 3) > 20  # made to ask for edits


def test_a_judge_that_is_upside_down_is_named_before_a_model_is_loaded(toy, tmp_path, monkeypatch):
    from tests.bright import Bright

    real = Bright.score
    monkeypatch.setattr(Bright, "score", lambda self, i, r: real(self, i, r)[::-1])
    monkeypatch.setattr(rl.train, "load", None)
    with pytest.raises(UserError, match="bright does not tell good from bad"):
        Run(toy_config(toy, tmp_path), Processes())


# --- as a command ---------------------------------------------------------------------------------


def test_the_command_checks_and_trains_nothing(toy, tmp_path, capsys):
    out = tmp_path / "run"
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(toy_config(toy, out, rollout=ROLLOUT)))
    assert main(["preflight", "--config", str(config)]) == 0
    assert "preflight replay    ok" in capsys.readouterr().out
    assert not (out / "metrics.jsonl").exists()
    assert not (out / "resume").exists()


def test_a_run_that_fails_it_ends_before_its_first_update(toy, tmp_path, monkeypatch):
    reward_inverted(monkeypatch)
    config = toy_config(toy, tmp_path, rollout=ROLLOUT, preflight=True)
    with pytest.raises(UserError, match=r"preflight failed: reward \(right earns -"):
        rl.train.train(config, Processes())
    assert not (tmp_path / "metrics.jsonl").exists()
