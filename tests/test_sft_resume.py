"""An SFT run that is killed goes on as if nothing had happened: bit-equal weights and states.

Each kill hits a process of its own, at a moment that is drawn by lot or in the middle of a save.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

import sft.train
import sft.train_data
from sft.train_config import Config
from tests.learning import run_processes
from tests.sft_runs import (
    Folders,
    about,
    kill_by_lot,
    master_bytes,
    metrics,
    run,
    run_on,
    step_lines,
    tiny_config,
    weights,
    write_folders,
)
from umm_reflect.training import folders as folders_module
from umm_reflect.training import resume
from umm_reflect.training.processes import Processes

STEPS = 6
CHANGES = {"max_steps": STEPS, "save_every": 1, "optimizer": {"ema_decay": 0.9}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("sft"))


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr(sft.train, "plot_curves", lambda *_: None)


@pytest.fixture(scope="module")
def straight(folders, tmp_path_factory) -> Path:
    """Where a run went through without a stop."""
    out = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft.train, "plot_curves", lambda *_: None)
        run(tiny_config(folders, out, **CHANGES))
    return out


def same_end(out: Path, straight: Path) -> None:
    assert weights(out) == weights(straight)
    assert master_bytes(out) == master_bytes(straight)
    assert about(out)["step"] == STEPS
    assert about(out)["extra"]["drawn"] == about(straight)["extra"]["drawn"]
    lines, wanted = step_lines(out), step_lines(straight)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for key in ("ce", "mse", "grad_norm", "lr", "samples"):
        assert [line[key] for line in lines] == [line[key] for line in wanted]


def test_kill_9_at_moments_drawn_by_lot_changes_nothing(folders, straight, tmp_path):
    config = tiny_config(folders, tmp_path / "run", **CHANGES)
    lot, preload = random.Random(7), ["tests.learning", "tests.sft_runs"]
    kills = kill_by_lot(run_alone, config, lot, preload=preload, most=5, late=0.4)
    assert kills >= 2
    run(config)
    same_end(tmp_path / "run", straight)


def run_alone(config: Config) -> None:
    torch.set_num_threads(1)
    sft.train.plot_curves = lambda *_: None
    run(config)


def test_a_start_that_goes_on_reads_no_picture_until_data_or_settings_change(
    folders, tmp_path, monkeypatch
):
    reads, read = [], sft.train_data.read_dataset

    def noted(source, images, **options):
        reads.append(images)
        return read(source, images, **options)

    monkeypatch.setattr(sft.train_data, "read_dataset", noted)
    data = tmp_path / "data"
    shutil.copytree(folders.data, data)
    prepared = []
    for change in ({}, {}, {"seed": 1}, {}):
        config = tiny_config(folders, tmp_path / "run", **{"data": [str(data)], **change})
        if len(reads) == 3:
            (data / "trajectories.jsonl").touch()
        prepared.append(sft.train_data.prepare(config, Processes()))
    assert reads == ["headers", "none", "headers", "headers"]
    first, again, _, last = prepared
    for other in (again, last):
        assert other.sampler.fingerprint() == first.sampler.fingerprint()
        assert other.held_packs == first.held_packs
    (tmp_path / "run" / "lengths.json").write_text("damaged")
    sft.train_data.prepare(config, Processes())
    assert reads[-1] == "headers"


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


@pytest.mark.parametrize("at", ["model folder", "rename", "state", "after the state"])
def test_a_run_that_ends_inside_of_a_save_goes_on_from_the_one_before(
    folders, straight, tmp_path, monkeypatch, at
):
    places = {
        "model folder": (folders_module, "save_profile"),
        "rename": (folders_module.os, "replace"),
        "state": (resume, "_write"),
        "after the state": (resume, "write_aside"),
    }
    module, name = places[at]
    real, calls = getattr(module, name), []

    def dying(*args, **kwargs):
        if "step-0000003" in str(args):
            calls.append(args)
            raise Killed
        return real(*args, **kwargs)

    config = tiny_config(folders, tmp_path / "run", **CHANGES)
    monkeypatch.setattr(module, name, dying)
    with pytest.raises(Killed):
        run(config)
    assert calls
    monkeypatch.setattr(module, name, real)
    assert about(tmp_path / "run")["step"] == 2
    assert run(config) == 0
    same_end(tmp_path / "run", straight)
    left = [p.name for p in (tmp_path / "run").rglob("*") if "writing" in p.name]
    assert left == []


def test_one_process_saves_and_two_go_on_and_back(folders, straight, tmp_path, monkeypatch):
    update = sft.train.Run.update

    def stopping(self, parcels):
        update(self, parcels)
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    out = tmp_path / "run"
    config = tiny_config(folders, out, **CHANGES, strategy="auto")
    monkeypatch.setattr(sft.train.Run, "update", stopping)
    assert run(config) == 143
    monkeypatch.setattr(sft.train.Run, "update", update)
    run_processes(run_until_four, 2, config)
    assert about(out)["processes"] == 2
    assert about(out)["step"] == 4
    assert run(config) == 0
    wanted = step_lines(straight)
    for have, want in zip(step_lines(out), wanted, strict=True):
        for key in ("ce", "mse"):
            assert have[key] == pytest.approx(want[key], abs=1e-5)
    assert [line["step"] for line in metrics(out) if "lr" in line] == [1, 2, 3, 4, 5, 6]


def run_until_four(processes, config) -> None:
    """Two processes, stopped by a signal to one of them after step 4."""
    sft.train.plot_curves = lambda *_: None
    update = sft.train.Run.update

    def stopping(self, parcels):
        update(self, parcels)
        if self.step == 4 and processes.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    sft.train.Run.update = stopping
    run_on(processes, config)
