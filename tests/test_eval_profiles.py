"""The profiles of an evaluation: what each of them sets, and the published noise windows."""

from __future__ import annotations

import hashlib
import json

import pytest

from agent.types import DrawAsk
from eval.config import EvalConfig
from eval.profiles import ReleasePolicy, repair_rng_step, sampling, window_range
from eval.results import Sample
from eval.run import main as eval_main
from eval.sets import all_rows
from tests.tiny import write_tiny_checkpoint
from umm_reflect import Bagel
from umm_reflect.errors import UsageError
from umm_reflect.images import mended_transforms
from umm_reflect.profile import ReflectionProfile

OWN = ReflectionProfile("rl", "local", "", mended_transforms(), (128, 128))


@pytest.fixture(autouse=True)
def own_hashes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def test_the_release_samples_as_published():
    config = EvalConfig(("geneval553",), profile="release")
    found = sampling(config, OWN, "local", drawable=1024)
    first, edit = found.first, found.edit
    assert (found.size, first.points, first.text_scale, first.image_scale) == (
        *((512, 512), 50, 3.0, 1.5),
    )
    assert (first.step_kind, first.noise_level, first.sigma) == ("sde", 0.8, "second_point")
    assert (first.window, edit.noise_level, edit.window[1]) == ((12, 2), 0.8, 2)
    assert (found.say.temperature, found.say.max_tokens, config.max_rounds) == (0.5, 512, 3)
    assert sampling(config, OWN, "local", drawable=128).size == (128, 128)


def test_genevals_own_protocol_asks_in_its_words_for_four_images_without_edits():
    config = EvalConfig(("geneval553",), profile="official")
    found = sampling(config, OWN, "local", drawable=1024)
    assert (config.samples_per_prompt, config.max_rounds) == (4, 0)
    assert (found.size, found.first.text_scale, found.first.image_scale) == ((1024, 1024), 4.0, 1.0)
    assert found.first.noise_level == 0
    sample = Sample("local", "geneval553", all_rows("geneval553")[0], 0)
    assert config.request(sample) == "a photo of a bench"
    assert EvalConfig().request(sample) == "Create an image with a bench."
    assert EvalConfig(profile="official", max_rounds=2).max_rounds == 2


def test_ours_is_the_checkpoints_own_and_flags_win():
    assert sampling(EvalConfig(), OWN, "local", drawable=1024).first == OWN.first
    config = EvalConfig(profile="release", text_scale=5.0, temperature=0.0)
    found = sampling(config, OWN, "full", drawable=1024)
    assert (found.first.text_scale, found.say.temperature, found.edit_view) == (5.0, 0.0, "full")


def test_arms_have_edit_noise_of_their_own():
    steps = [repair_rng_step(EvalConfig(profile="release", arm=a)) for a in ("base", "sft", "rl")]
    assert steps == [0, 0, 500]
    assert repair_rng_step(EvalConfig(profile="release", arm="rl", repair_rng_step=7)) == 7
    with pytest.raises(ValueError, match="part of --profile release"):
        EvalConfig(repair_rng_step=7)


def test_few_steps_have_windows_in_their_first_half():
    assert window_range(50) == (0, 25)
    assert window_range(20) == (0, 10)
    with pytest.raises(UsageError, match=r"does not fit .* Give more --steps"):
        sampling(EvalConfig(profile="release", steps=2), OWN, "local", drawable=128)


def test_every_edit_of_a_model_has_its_published_window(tiny):
    config = EvalConfig(("geneval553",), profile="release")
    profile = sampling(config, OWN, "local", drawable=128)
    policy = ReleasePolicy(
        Bagel.from_pretrained(str(tiny), device="cpu"), profile, repair_rng_step=0
    )
    purple = Sample("local", "geneval553", all_rows("geneval553")[453], 0)  # slot 0
    ask = DrawAsk(None, 1, 0, purple.name, base=object())
    assert policy.start_of(ask) == 8
    assert policy.start_of(DrawAsk(None, 2, 0, purple.name, base=object())) == 21
    assert policy.start_of(DrawAsk(None, 0, 0, purple.name)) == -1
    policy.repair_rng_step = 500
    assert policy.start_of(ask) == 14


def test_the_release_profile_runs_and_leaves_its_manifest(tiny, tmp_path):
    out = tmp_path / "out"
    flags = f"geneval553 --model {tiny} --profile release --arm rl --limit 2 --steps 4".split()
    flags += ["--max-tokens", "16", "--device", "cpu", "--reward-set", "models=drawn"]
    assert eval_main([*flags, "--output-dir", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["profile"], summary["arm"]) == ("release", "rl")
    env = json.loads((out / "env.json").read_text())
    assert env["repair_rng_step"] == 500
    assert env["profiles"]["local"]["first"]["noise_level"] == 0.8
    assert env["judges"]["geneval553"]["settings"]["rule"] == "cross_checked"
    rows = json.loads((out / "geneval553_eval_manifest.json").read_text())["rows"]
    canonical = json.dumps(rows, sort_keys=True, separators=(",", ":")).encode()
    published = "338eb3b8a835714d39fbcf3bb6f9f6c27f388afa439501c34dbf6af4f2c1b48b"
    assert hashlib.sha256(canonical).hexdigest() == published
    with pytest.raises(UsageError, match=r"--profile|release"):
        eval_main(["--repair-rng-step", "1", "--output-dir", str(out)])
