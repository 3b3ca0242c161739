"""The RL trainer: what it leaves, every objective, bad settings, judges that break."""

from __future__ import annotations

import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rl.reward
import rl.train
import rl.train_output
import rl.update
from eval.rewards import registry
from eval.verdict import Verdict
from rl.advantage import PRESETS
from rl.objectives import TextSettings
from rl.train import Run, main
from rl.train_config import RECIPES, config_of
from rl.update import Updater
from tests.bright import Bright
from tests.rl_runs import Toy, run, step_lines, toy_config, write_toy
from tests.sft_runs import about, master_bytes
from tests.test_sft_scripts import STAND_IN
from umm_reflect import Bagel
from umm_reflect.errors import UsageError, UserError
from umm_reflect.flow import DrawSettings
from umm_reflect.hub import profile
from umm_reflect.settings import to_yaml
from umm_reflect.training.metrics import read_metrics
from umm_reflect.training.processes import Processes

SMALL = {"rollout": {"groups": 2, "group_size": 4}, "max_steps": 3}
PLAIN = {"step_kind": "ode", "noise_level": 0.0}
MATCHED = {
    "rollout": {**SMALL["rollout"], "single": True, "first": PLAIN, "edit": PLAIN},
    "images": "all",
    "times": {"count": 2, "steps": [0, 4]},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(autouse=True)
def judged(monkeypatch):
    monkeypatch.setitem(registry.REWARDS, "bright", "tests.bright")


@pytest.fixture
def no_curves(monkeypatch):
    monkeypatch.setattr(rl.train_output, "draw_curves", lambda *_: None)


# --- what a run leaves ----------------------------------------------------------------------------


def test_a_run_leaves_a_model_metrics_curves_pictures_and_its_settings(toy, tmp_path):
    held = {"prompts": "shapes553", "every": 2, "count": 2, "reward": "bright"}
    config = toy_config(toy, tmp_path / "run", **SMALL, pictures_every=3, held_out=held, keep=1)
    assert run(config) == 0
    out = tmp_path / "run"
    assert {p.name for p in (out / "pictures").iterdir()} == {
        *("rollouts-0000003.png", "held-out-0000000.png", "held-out-0000002.png"),
    }
    assert (out / "curve.png").stat().st_size > 10_000
    lines = step_lines(out)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for name in ("reward/final", "rollout/q/0", "rollout/q/1", "rollout/repair", "text/entropy"):
        assert name in lines[0]
    for name in ("text/ratio", "flow/ratio", "grad_norm", "images", "seconds/rollout"):
        assert lines[0][name] > 0
    assert lines[0]["text/ratio"] == pytest.approx(1, abs=1e-5)
    looks = [line for line in read_metrics(out / "metrics.jsonl") if "held_out/final" in line]
    assert [line["step"] for line in looks] == [0, 2]
    bagel = Bagel.from_pretrained(str(out / "checkpoint"), device="cpu", dtype="float32")
    start = Bagel.from_pretrained(str(toy.model), device="cpu", dtype="float32")
    moved = {n for n, p in bagel.named_parameters() if not torch.equal(p, start.get_parameter(n))}
    assert any("moe_gen" in name for name in moved)
    assert any("layers" in name and "moe_gen" not in name for name in moved)
    assert not any(name.startswith(("vit", "connector")) for name in moved)
    assert profile(out / "checkpoint") == profile(toy.model)
    assert (out / "best").resolve().name == f"step-000000{0 if _best(looks) == 0 else 2}"
    again = config_of(["--config", str(out / "config.yaml")], "test")
    assert again == config


def _best(looks: list[dict]) -> int:
    return max(range(len(looks)), key=lambda i: (looks[i]["held_out/final"], -i))


def test_an_adapter_is_written_and_loads(toy, tmp_path, no_curves):
    lora = {"parameters": "lora-both", "lora": {"rank": 4, "alpha": 8}, "reference": "base"}
    rollout = {**SMALL["rollout"], "edit_view": "local"}
    settings = {**SMALL, **lora, "rollout": rollout}
    config = toy_config(toy, tmp_path, **settings, flow={"kl": 0.1})
    assert run(config) == 0
    assert step_lines(tmp_path)[0]["flow/kl"] == 0  # the base is where it begins
    assert step_lines(tmp_path)[-1]["flow/kl"] > 0
    adapter = str(tmp_path / "checkpoint")
    with_it = Bagel.from_pretrained(str(toy.model), adapter=adapter, device="cpu", dtype="float32")
    assert any("lora_B" in name and p.abs().max() > 0 for name, p in with_it.named_parameters())
    assert profile(toy.model, adapter) == replace(profile(toy.model), edit_view="local")


# --- objectives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["awm", "nft"])
def test_matching_objectives_learn_and_resume_with_their_slow_weights(
    toy, tmp_path, no_curves, kind
):
    changes = {**MATCHED, "objective": kind, "max_steps": 4, "save_every": 1, "keep": 9}
    awm = {"slow": 1.0, "ref": 0.1, "true_ratio": True}
    config = toy_config(toy, tmp_path / "run", **changes, awm=awm)
    assert run(config) == 0
    lines = step_lines(tmp_path / "run")
    assert all(line["flow/loss"] is not None for line in lines if line["updates"])
    assert any("slow/" in name or "old/" in name for name in master_bytes(tmp_path / "run"))
    whole = master_bytes(tmp_path / "run")
    state = tmp_path / "run/resume/step-0000002"
    again = toy_config(toy, tmp_path / "again", **changes, awm=awm, resume=str(state))
    assert run(again) == 0
    assert about(tmp_path / "again")["step"] == 4
    assert master_bytes(tmp_path / "again") == whole


def test_several_passes_and_mini_batches_are_off_the_old_policy(toy, tmp_path, no_curves):
    config = toy_config(
        toy, tmp_path, **SMALL, old="learner", passes=2, updates=2, flow={"guard": True}, warmup=0
    )
    assert run(config) == 0
    lines = [line for line in step_lines(tmp_path) if line["zero_std_ratio"] == 0]
    assert lines
    assert lines[0]["updates"] == 4
    assert lines[0]["text/ratio_max"] > 1.001
    for head in ("text", "flow"):  # the old policy is the sampler, whatever has been learned since
        assert 0 <= lines[0][f"{head}/mismatch_max"] < 1e-4 < lines[0][f"{head}/drift_max"]


def test_in_a_single_update_the_learner_is_its_own_old_policy_without_another_forward(
    toy, tmp_path, no_curves
):
    config = toy_config(toy, tmp_path, **SMALL, old="learner")
    assert not config.compares_with_old
    assert replace(config, updates=2).compares_with_old
    matched = replace(config, objective="awm", rollout=replace(config.rollout, edit=DrawSettings()))
    assert not matched.compares_with_old
    assert replace(matched, updates=2).compares_with_old  # the ratios of words
    assert not replace(matched, updates=2, text=TextSettings(weight=0.0)).compares_with_old
    assert run(config) == 0
    lines = [line for line in step_lines(tmp_path) if line["zero_std_ratio"] == 0]
    assert lines
    for line in lines:
        assert line["text/ratio_max"] == line["flow/ratio_max"] == 1.0


def test_prompts_are_prepared_by_the_same_verb(tmp_path, capsys):
    assert main(["prepare", "shapes-hard", "--rows", "5", "--output-dir", str(tmp_path)]) == 0
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 5


def test_the_weights_themselves_judge(toy, tmp_path, no_curves):
    config = toy_config(toy, tmp_path, **{**MATCHED, "judge": {"itself": True}, "objective": "awm"})
    assert run(config) == 0
    assert step_lines(tmp_path)[0]["reward_mean"] < 0  # a mean log-likelihood


# --- judges ---------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_an_unreachable_reward_fails_within_ten_seconds_and_says_how_to_start_it(toy, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    judge = {"reward": "http", "set": [f"url={url}"]}
    began = time.monotonic()
    with pytest.raises(UserError, match="serve-reward") as refused:
        run(toy_config(toy, tmp_path, judge=judge))
    assert time.monotonic() - began < 10
    assert url in str(refused.value)


@pytest.mark.parametrize("fault", ["nan", "short", "silent"])
def test_a_judge_that_breaks_in_mid_run_ends_it_with_the_reason_and_the_state_stays(
    toy, tmp_path, monkeypatch, no_curves, fault
):
    real = Bright.score

    def broken(self, images, rows):
        verdicts = real(self, images, rows)
        if not (tmp_path / "resume/step-0000001").exists():
            return verdicts
        if fault == "nan":
            return [Verdict(None, 0.5, "", value=float("nan")) for _ in images]
        return verdicts[1:] if fault == "short" else [Verdict.failed("no answer")] * len(images)

    monkeypatch.setattr(Bright, "score", broken)
    said = {"nan": "nan", "short": "verdicts on", "silent": "were not judged"}[fault]
    with pytest.raises(UserError, match=said):
        run(toy_config(toy, tmp_path, **SMALL, save_every=1))
    assert about(tmp_path)["step"] == 1
    monkeypatch.setattr(Bright, "score", real)
    assert run(toy_config(toy, tmp_path, **SMALL, save_every=1)) == 0
    assert about(tmp_path)["step"] == 3


def test_a_constant_reward_changes_no_weight(toy, tmp_path, monkeypatch, no_curves):
    same = [Verdict(False, 0.25, "")]
    monkeypatch.setattr(Bright, "score", lambda self, images, rows: same * len(images))
    monkeypatch.setattr(Bright, "check", lambda self: None)
    flat = dict.fromkeys(("wrong_done", "wrong_cap", "edit_cost", "malformed"), 0.0)
    config = toy_config(toy, tmp_path, **SMALL, reward=flat, advantage={"malformed": None})
    assert run(config) == 0
    lines = step_lines(tmp_path)
    assert [line["updates"] for line in lines] == [0, 0, 0]
    assert [line["zero_std_ratio"] for line in lines] == [1, 1, 1]
    trained = Bagel.from_pretrained(str(tmp_path / "checkpoint"), device="cpu", dtype="float32")
    start = Bagel.from_pretrained(str(toy.model), device="cpu", dtype="float32")
    for name, p in trained.named_parameters():
        assert torch.equal(p, start.get_parameter(name)), name


def test_siblings_that_are_all_malformed_are_all_discouraged(toy, tmp_path, no_curves):
    rollout = {**SMALL["rollout"], "max_tokens": 4}
    assert run(toy_config(toy, tmp_path, rollout=rollout, max_steps=2)) == 0
    line = step_lines(tmp_path)[0]
    assert line["rollout/protocol_valid"] == 0
    assert line["advantage_mean"] == -0.5
    assert line["updates"] == 1


def test_an_update_in_which_nobody_chose_anything_moves_no_weight(
    toy, tmp_path, no_curves, monkeypatch
):
    real = rl.update.lay_out
    monkeypatch.setattr(
        rl.update, "lay_out", lambda *args, **k: real(*args, **{**k, "text": False, "flow": "none"})
    )
    config = toy_config(toy, tmp_path, **SMALL, optimizer={"weight_decay": 0.5})
    run_of_it = Run(config, Processes())
    before = [p.detach().clone() for p in run_of_it.learner.bagel.parameters()]
    with run_of_it.judges():
        assert run_of_it.go() == 0
    assert [line["updates"] for line in step_lines(tmp_path)] == [0, 0, 0]
    after = run_of_it.learner.bagel.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_loss_of_several_updates_is_the_mean_of_theirs():
    one, two = Processes(), torch.tensor(2.0)
    sums = [
        {"text/loss": torch.tensor(loss), "text/count": two, "text/kl": torch.ones(())}
        for loss in (1.0, 3.0)
    ]
    norms = [torch.tensor(4.0), torch.tensor(6.0)]
    found = Updater._metrics(SimpleNamespace(processes=one), sums, norms, 0)
    assert (found["text/loss"], found["text/kl"], found["grad_norm"]) == (2.0, 0.5, 5.0)


def test_a_model_that_learned_in_another_edit_view_is_run_in_it_ever_after(
    toy, tmp_path, no_curves
):
    held = {"prompts": "shapes553", "every": 1, "count": 1, "reward": "bright"}
    rollout = {**SMALL["rollout"], "edit_view": "local"}
    config = toy_config(toy, tmp_path, rollout=rollout, max_steps=1, held_out=held)
    assert profile(toy.model).edit_view == "full"
    run_of_it = Run(config, Processes())
    assert run_of_it.held_out.profile.edit_view == "local"
    with run_of_it.judges():
        assert run_of_it.go() == 0
    assert profile(tmp_path / "checkpoint").edit_view == "local"


# --- settings -------------------------------------------------------------------------------------

REFUSED = {
    "nothing learns": ({"text": {"weight": 0}, "flow": {"weight": 0}}, "nothing would be learned"),
    "more updates than groups": ({"updates": 9}, "updates is 9, but a rollout has 4 groups"),
    "passes off the rollout": ({"passes": 2}, "which needs old: learner"),
    "no noise": ({"rollout": {"edit": PLAIN}}, "without noise no step is a choice"),
    "noise with awm": ({"objective": "awm"}, "awm learns from drawings without noise"),
    "a cap on nothing": ({"text": {"importance_cap": 2.0}}, "set old: learner"),
    "dropout": ({"parameters": "lora-gen", "lora": {"dropout": 0.1}}, "leave it 0"),
    "shared first images": ({"images": "all"}, "do not learn from it"),
    "a base without adapters": ({"reference": "base"}, "reference base needs parameters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_go_together_are_refused_with_the_remedy(toy, tmp_path, case):
    changes, said = REFUSED[case]
    with pytest.raises((ValueError, UsageError), match=said):
        toy_config(toy, tmp_path, **changes)


def test_a_group_of_one_is_refused():
    with pytest.raises(UsageError, match="group_size is 1"):
        config_of(["--recipe", "nano", "--rollout.group-size", "1"], "test")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_is_whole_and_may_be_overruled(path):
    config = config_of(["--recipe", path.stem, "--max-steps", "7"], "test")
    assert config.max_steps == 7
    if config.objective == "grpo":  # bf16 ratios need one arithmetic
        assert config.old == "learner"
    assert config == config_of(["--recipe", str(path), "--max-steps", "7"], "test")


def test_the_recipes_are_those_of_the_readme_and_another_one_is_no_recipe():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {
        *("reflection", "reflection-release", "ocr-lora", "ocr-lora-npu", "pickscore-lora"),
        *("pickscore-full", "spectra-awm", "self-spectra-awm", "nft", "nano"),
        *("nano-single", "nano-awm", "nano-nft", "nano-trajectories-awm"),
    }
    with pytest.raises(UsageError, match=r"no recipe 'nanoo'\. Did you mean 'nano'"):
        config_of(["--recipe", "nanoo"], "test")


def test_published_constants_stand_in_the_recipes():
    release = config_of(["--recipe", "reflection-release"], "test")
    assert (release.rollout.groups, release.rollout.group_size) == (2, 16)
    assert release.rollout.edit.noise_level == 1.0
    assert release.rollout.window.shared == "released"
    assert (release.text.kl, release.flow.clip_high, release.optimizer.lr) == (1e-4, 0.1, 5e-6)
    pick = config_of(["--recipe", "pickscore-lora"], "test")
    assert (pick.rollout.groups, pick.rollout.first.noise_level, pick.updates) == (48, 1.3, 2)
    presets = {"reflection-release": "release", "nft": "nft"}
    presets |= dict.fromkeys(("spectra-awm", "self-spectra-awm"), "awm")
    named = ("ocr-lora", "ocr-lora-npu", "pickscore-lora", "pickscore-full")
    for name, preset in (presets | dict.fromkeys(named, "verl")).items():
        assert config_of(["--recipe", name], "test").advantage == PRESETS[preset], name
    assert release.reward == rl.reward.PRESETS["release"]
    spectra = config_of(["--recipe", "spectra-awm"], "test")
    assert (spectra.lora.rank, spectra.lora.alpha, spectra.guided) == (32, 64.0, False)


def test_the_command_trains(toy, tmp_path, no_curves, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(toy_config(toy, tmp_path / "run", **SMALL)))
    assert main(["--config", str(config), "--max-steps", "1"]) == 0
    assert "1 steps in" in capsys.readouterr().out


# --- scripts --------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("script", "variables", "asked"),
    [
        ("train_rl.sh", {}, ["--recipe", "nano"]),
        ("train_single.sh", {}, ["--recipe", "ocr-lora"]),
        (
            "train_rl.sh",
            {"RECIPE": "reflection", "RL_INIT_DIR": "some/model", "REWARD_URL": "http://a:1"},
            [
                *("--recipe", "reflection", "--model", "some/model"),
                *("--judge.reward", "http", "--judge.set", "url=http://a:1"),
            ],
        ),
    ],
)
def test_the_scripts_turn_their_variables_into_settings(tmp_path, script, variables, asked):
    import os

    stand_in, ran = tmp_path / "python", tmp_path / "ran"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    done = subprocess.run(
        ["bash", f"scripts/rl/{script}", "--max-steps", "2"],
        cwd=ROOT,
        env={**os.environ, "PYTHON_BIN": str(stand_in), "RAN": str(ran), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said = ran.read_text().splitlines()
    assert said[:3] == ["-m", "umm_reflect", "rl"]
    assert sorted(said[3:]) == sorted([*asked, "--max-steps", "2"])
