"""What the SFT trainer refuses, by name, before it costs anything; its presets and its dry run."""

from __future__ import annotations

import json

import pytest

import sft.train
from sft.train import main
from sft.train_config import PRESETS, Config, piece
from tests.sft_runs import Folders, run, step_lines, tiny_config, write_folders
from umm_reflect.errors import UsageError, UserError
from umm_reflect.settings import parse, save
from umm_reflect.training.schedule import Piece


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("sft"))


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr(sft.train, "plot_curves", lambda *_: None)


# --- what is refused ------------------------------------------------------------------------------


def test_a_corrupt_picture_in_row_three_is_named_and_may_be_allowed(tmp_path):
    folders = write_folders(tmp_path)
    line = (folders.data / "trajectories.jsonl").read_text().splitlines()[2]
    picture = folders.data / json.loads(line)["images"][0]["file"]
    picture.write_bytes(picture.read_bytes()[:40])
    with pytest.raises(UserError, match=r"1 of 8 rows break a rule.*trajectories.jsonl:3"):
        run(tiny_config(folders, tmp_path / "run"))
    assert run(tiny_config(folders, tmp_path / "run", max_bad=0.2, max_steps=1)) == 0


def test_a_picture_that_breaks_while_training_runs_is_left_out_until_there_are_too_many(
    tmp_path, monkeypatch
):
    folders = write_folders(tmp_path)
    prepare = sft.train.prepare

    def and_then_break(config, processes):
        prepared = prepare(config, processes)
        for file in list(folders.data.glob("images/shapes-0002*")):
            file.write_bytes(b"gone")
        return prepared

    monkeypatch.setattr(sft.train, "prepare", and_then_break)
    assert run(tiny_config(folders, tmp_path / "few", max_bad=0.3, max_steps=8)) == 0
    assert step_lines(tmp_path / "few")[-1]["bad_rows"] > 0


def test_a_model_that_does_not_exist_is_an_error(folders, tmp_path):
    with pytest.raises(UserError, match="no-such-model"):
        run(tiny_config(folders, tmp_path / "run", model=str(tmp_path / "no-such-model")))


def test_a_state_of_other_data_or_settings_is_refused(folders, tmp_path):
    run(tiny_config(folders, tmp_path / "run", max_steps=1))
    with pytest.raises(UserError, match="belongs to other data, another packing or another seed"):
        run(tiny_config(folders, tmp_path / "run", max_steps=2, seed=1))
    with pytest.raises(UserError, match="holds the state step-0000001"):
        run(tiny_config(folders, tmp_path / "run", max_steps=2, resume="never"))
    with pytest.raises(UserError, match="is no state of a run"):
        run(tiny_config(folders, tmp_path / "run", max_steps=2, resume=str(tmp_path)))


def test_without_data_the_command_says_how_to_name_it(tmp_path):
    with pytest.raises(UsageError, match="no data is named"):
        main(["--output-dir", str(tmp_path / "run")])


def test_a_mistyped_key_names_the_one_that_was_meant(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("packing:\n  max_token: 5\n")
    with pytest.raises(UsageError, match=r"unknown key 'packing.max_token'.*'packing.max_tokens'"):
        main(["--config", str(path)])


def test_what_does_not_fit_together_is_refused_before_anything_is_read():
    for changes, message in (
        ({"max_steps": 0}, "max_steps is 0"),
        ({"round_trip": 2.0}, "round_trip is 2.0"),
        ({"lora": {"rank": 4}}, "lora settings need parameters"),
        ({"parameters": "gen", "frozen": ("gen", "latents")}, "trains nothing"),
        (
            {"rates": {"warmup": 0, "pieces": ("cosine 1e-4 0 10",)}},
            "ends at step 10, before max_steps",
        ),
        ({"max_seconds": 5.0, "rates": {"pieces": ("constant 1 1 1000",)}}, "rates.decay"),
    ):
        with pytest.raises(UsageError, match=message):
            parse(Config, ["--preset", "it"], "umm-reflect sft", {"it": changes})


# --- settings -------------------------------------------------------------------------------------


def test_the_release_preset_is_the_published_run():
    config = parse(Config, ["--preset", "release"], "umm-reflect sft", PRESETS)
    mixture = config.packing.mixture()
    assert mixture.weights == {
        **{"controller": 4, "transition": 4, "verifier": 4},
        **{"penultimate": 1, "anchor": 1},
    }
    assert (mixture.expected_tokens, mixture.max_tokens, mixture.max_sample_tokens) == (
        *(32_768, 40_960),
        28_672,
    )
    assert (mixture.dropout.text, mixture.dropout.vit, mixture.dropout.vae) == (0.1, 0.3, 0.3)
    assert (mixture.every_pack, mixture.by, mixture.condition_latents) == (
        *("controller", "samples"),
        "sampled",
    )
    assert (config.loss.timestep_shift, config.weighting, config.frozen) == (
        *(1.0, "release"),
        ("vit",),
    )
    assert (config.optimizer.betas, config.optimizer.eps) == ((0.9, 0.95), 1e-15)
    assert (config.packs_per_step, config.max_steps, config.full_view) == (16, 2969, 0.0)
    rates = [config.schedule().lr(step) for step in (0, 49, 50, 1409, 1410, 2968)]
    assert rates == pytest.approx([4e-8, 2e-6, 2e-6, 2e-7, 2e-7, 2e-7], rel=1e-3)


def test_a_piece_of_a_schedule_is_read_from_words():
    assert piece("cosine 2e-6 2e-7 1410") == Piece(1410, "cosine", 2e-6, 2e-7)
    assert piece("constant 2e-7 2e-7 167_363 samples") == Piece(
        167_363, "constant", 2e-7, 2e-7, "samples"
    )
    for text in ("cosine 2e-6 2e-7", "cosine a b 10", "cosine 1 2 3 4", ""):
        with pytest.raises(ValueError, match="is no piece of a schedule"):
            piece(text)


def test_a_dry_run_prints_what_would_run_and_writes_nothing(folders, tmp_path, capsys):
    config = tiny_config(folders, tmp_path / "run")
    path = tmp_path / "config.yaml"
    save(config, path)
    assert main(["--config", str(path), "--dry-run"]) == 0
    said = capsys.readouterr().out
    for words in ("trajectories to learn from", "The first forward", "numbers learn", "in all"):
        assert words in said
    assert not (tmp_path / "run").exists()
