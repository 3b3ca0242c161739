"""A checkpoint of any kind becomes one complete model folder: `scripts/rl/make_rl_init.sh`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.test_merge import make_adapter
from tests.tiny import write_tiny_checkpoint
from umm_reflect import complete as completing
from umm_reflect.checkpoint import load
from umm_reflect.cli import run_program
from umm_reflect.complete import complete
from umm_reflect.hub import profile

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A checkpoint of ours, with a card."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", seed=1)
    (folder / "README.md").write_text("the card")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("base") / "tiny")
    (folder / "README.md").write_text("the base's card")
    return folder


def run(*arguments: object) -> int:
    return run_program(completing.main, [str(word) for word in arguments])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "ema.safetensors")


def test_a_model_folder_becomes_another_that_loads_and_outlives_it(model, tmp_path):
    source = shutil.copytree(model, tmp_path / "checkpoint")
    assert run(source, "--output-dir", tmp_path / "init") == 0
    before = weights(source)
    same = (tmp_path / "init" / "ema.safetensors").stat()
    assert same.st_ino == (source / "ema.safetensors").stat().st_ino  # no second copy on the disk
    shutil.rmtree(source)
    bagel = load(tmp_path / "init", device="cpu")
    assert torch.equal(bagel.vae2llm.weight, before["vae2llm.weight"].float())
    assert (tmp_path / "init" / "README.md").read_text() == "the card"


def test_a_link_to_the_newest_checkpoint_is_followed_to_its_files(model, tmp_path):
    (tmp_path / "newest").symlink_to(model)
    (tmp_path / "parts").mkdir()
    for path in model.iterdir():
        (tmp_path / "parts" / path.name).symlink_to(path)
    for name in ("newest", "parts"):
        assert run(tmp_path / name, "--output-dir", tmp_path / f"from-{name}") == 0
        assert not any(path.is_symlink() for path in (tmp_path / f"from-{name}").iterdir())
        load(tmp_path / f"from-{name}", device="cpu")


def test_weights_alone_take_all_the_rest_from_the_base(model, base, tmp_path, capsys):
    (tmp_path / "alone").mkdir()
    shutil.copy(model / "ema.safetensors", tmp_path / "alone" / "model.safetensors")
    assert run(tmp_path / "alone", "--output-dir", tmp_path / "out") == 2
    assert "is weights without configs. Say what it was trained from: --base MODEL." in (
        capsys.readouterr().err
    )
    assert run(tmp_path / "alone", "--output-dir", tmp_path / "out", "--base", base) == 0
    found = weights(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(model).items())
    assert not (tmp_path / "out" / "README.md").exists()
    assert profile(tmp_path / "out") == profile(base)
    load(tmp_path / "out", device="cpu")


def test_an_adapter_is_merged_into_the_base(base, tmp_path, capsys):
    adapter = make_adapter(base, tmp_path / "adapter", 0.3)
    assert run(adapter, "--output-dir", tmp_path / "out") == 2
    assert "is an adapter. Say what it was trained from" in capsys.readouterr().err
    assert run(adapter, "--output-dir", tmp_path / "out", "--base", base) == 0
    before, after = weights(base), weights(tmp_path / "out")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == 28


def test_where_a_disk_takes_no_links_files_are_copied(model, tmp_path, monkeypatch):
    def no_link(source, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    complete(model, model / "ema.safetensors", tmp_path / "out")
    assert (tmp_path / "out" / "ema.safetensors").stat().st_nlink == 1
    assert (tmp_path / "out" / "ema.safetensors").read_bytes() == (
        model / "ema.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("a tensor", "1 tensors do not fit the config, vae2llm.bias first (None, expected (32,))"),
        ("a shape", "1 tensors do not fit the config, vae2llm.bias first ((3,), expected (32,))"),
        ("a file", "lacks ae.safetensors. Fetch it again."),
    ],
)
def test_what_is_damaged_is_named_and_nothing_is_left(model, tmp_path, capsys, change, line):
    source = shutil.copytree(model, tmp_path / "checkpoint")
    tensors = weights(source)
    if change == "a tensor":
        del tensors["vae2llm.bias"]
    elif change == "a shape":
        tensors["vae2llm.bias"] = torch.zeros(3)
    else:
        (source / "ae.safetensors").unlink()
    save_file(tensors, source / "ema.safetensors")
    assert run(source, "--output-dir", tmp_path / "out") == 1
    assert line in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}


def test_places_that_make_no_sense_are_refused(model, base, tmp_path, capsys):
    assert run(model, "--output-dir", base) == 2
    assert "is not empty. Name a new folder." in capsys.readouterr().err
    assert run(model, "--output-dir", tmp_path / "out", "--base", base) == 2
    assert "is a whole model. Leave --base out." in capsys.readouterr().err
    assert run(tmp_path / "no", "--output-dir", tmp_path / "out") == 1
    assert "there is no folder" in capsys.readouterr().err


def script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/rl/make_rl_init.sh", *map(str, arguments)]
    environment = os.environ | {"PYTHON_BIN": sys.executable}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_script_makes_what_rl_starts_from(model, base, tmp_path):
    done = script(model, tmp_path / "init")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'init'}\n"
    load(tmp_path / "init", device="cpu")
    adapter = make_adapter(base, tmp_path / "adapter", 0.3)
    done = script(adapter, tmp_path / "merged", "--base", base)
    assert done.returncode == 0, done.stderr
    load(tmp_path / "merged", device="cpu")


@pytest.mark.parametrize("arguments", [(), ("a",), ("a", "b", "c"), ("a", "b", "--bas", "d")])
def test_the_script_shows_how_it_is_called(arguments):
    done = script(*arguments)
    assert done.returncode == 2
    assert done.stderr == (
        "usage: bash scripts/rl/make_rl_init.sh CHECKPOINT OUTPUT [--base MODEL]\n"
    )
