"""umm-reflect eval in several processes: the same bytes, and what happens when one dies."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from agent.policy import ScriptedPolicy
from agent.types import Reflection
from eval.config import EvalConfig
from eval.run import evaluate
from eval.run import main as eval_main
from eval.sets import all_rows
from eval.work_queue import processes
from tests.test_eval_run import make_run
from tests.tiny import write_tiny_checkpoint
from umm_reflect.errors import UserError
from umm_reflect.shapes.render import render
from umm_reflect.shapes.sampler import scene_for


@pytest.fixture(autouse=True)
def own_hashes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def look(ask):
    row = int(ask.sample.split(":")[1])
    if row % 2 and ask.round == 0:
        return Reflection("It is empty.", 1, "edit", "Draw what was asked.")
    return Reflection("As asked.", 9, "done", "")


def paint(ask):
    row = int(ask.sample.split(":")[1])
    if row % 2 and ask.number == 0:
        return Image.new("RGB", (128, 128), "white")
    return render(scene_for(all_rows("shapes553")[row].row, random.Random(row)))


@dataclass
class Maker:
    """Policies of known behaviour, in any process.

    deaths: a folder with a file for each time that a process must die. fault: raise instead.
    """

    deaths: Path | None = None
    fault: str = ""

    def __call__(self, view):
        if self.fault:
            raise UserError(self.fault, "Mend it.")
        for file in sorted(self.deaths.iterdir()) if self.deaths else ():
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return ScriptedPolicy(look, paint)


def play(tmp_path, name, maker=None, **settings):
    how = {"limit": 12, "batch_size": 3, "workers": 1, "output_dir": tmp_path / name, **settings}
    evaluate(EvalConfig(**how), make_run(tmp_path), maker or Maker())
    return tmp_path / name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return play(tmp_path_factory.mktemp("alone"), "one")


def test_two_processes_write_the_bytes_of_one(tmp_path, alone):
    folder = play(tmp_path, "two", gpus=2)
    for file in ("results.jsonl", "summary.json"):
        assert (folder / file).read_bytes() == (alone / file).read_bytes()
    traces = {path.name for path in (folder / "shapes553-local/traces").iterdir()}
    assert traces == {path.name for path in (alone / "shapes553-local/traces").iterdir()}


def test_a_process_that_is_killed_is_replaced_and_its_batch_made_again(tmp_path, alone, capsys):
    (tmp_path / "deaths").mkdir()
    (tmp_path / "deaths/once").touch()
    folder = play(tmp_path, "two", Maker(tmp_path / "deaths"), gpus=2)
    assert "died (signal 9); another one takes its place" in capsys.readouterr().err
    assert (folder / "results.jsonl").read_bytes() == (alone / "results.jsonl").read_bytes()


def test_a_batch_that_kills_every_process_ends_the_run_which_can_go_on(tmp_path, alone):
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    for number in range(8):
        (deaths / str(number)).touch()
    with pytest.raises(UserError, match=r"the second one to die while it made batch \d"):
        play(tmp_path, "two", Maker(deaths), gpus=2)
    folder = play(tmp_path, "two", resume=True)
    assert (folder / "results.jsonl").read_bytes() == (alone / "results.jsonl").read_bytes()


def test_an_error_in_a_process_is_the_error_of_the_run(tmp_path):
    with pytest.raises(UserError, match="the checkpoint is damaged") as caught:
        play(tmp_path, "two", Maker(fault="the checkpoint is damaged"), gpus=2)
    assert caught.value.remedy == "Mend it."


def test_a_model_gives_the_same_file_twice_and_in_two_processes(tmp_path):
    tiny = write_tiny_checkpoint(tmp_path / "tiny")
    flags = f"shapes553 --model {tiny} --limit 2 --steps 2 --max-tokens 16 --device cpu".split()
    flags += ["--batch-size", "1"]
    found = []
    for name, more in (("one", []), ("again", []), ("two", ["--gpus", "2"])):
        assert eval_main([*flags, *more, "--output-dir", str(tmp_path / name)]) == 0
        found.append((tmp_path / name / "results.jsonl").read_bytes())
    assert found[0].count(b"\n") == 2
    assert found[0] == found[1] == found[2]


def test_on_a_cpu_as_many_processes_run_as_are_asked_for():
    assert processes(EvalConfig(device="cpu", gpus=3)) == 3
    assert processes(EvalConfig(device="cpu", gpus=0)) == 1
    with pytest.raises(ValueError, match="--gpus is -1"):
        EvalConfig(gpus=-1)
