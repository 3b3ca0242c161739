"""The model's own images, judged: the files that `sft.shapes_data` reads."""

import json
from dataclasses import replace

import numpy as np
import pytest

from eval import collect
from tests.tiny import write_tiny_checkpoint
from umm_reflect.cli import run_program
from umm_reflect.hub import profile
from umm_reflect.profile import save_profile
from umm_reflect.shapes.sets import is_held_out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    own = profile(folder)
    save_profile(replace(own, size=(32, 48), first=replace(own.first, points=3)), folder)
    return folder


def collected(tiny, folder, batch_size, *more):
    words = [
        "--model",
        str(tiny),
        "--count",
        "5",
        "--batch-size",
        str(batch_size),
        "--workers",
        "1",
    ]
    words += ["--device", "cpu", "--text-scales", "2.0", "--output-dir", str(folder), *more]
    assert run_program(collect.main, words) == 0
    lines = (folder / "records.jsonl").read_text().splitlines()
    return np.load(folder / "images.npy"), [json.loads(line) for line in lines]


def test_images_and_records_belong_together_and_do_not_depend_on_the_batch(tiny, tmp_path):
    images, records = collected(tiny, tmp_path / "a", 2)
    assert images.shape == (5, 32, 48, 3)
    assert images.dtype == np.uint8
    keys = {"row", "prompt", "source", "text_scale", "images", "turns", "verdicts"}
    assert [set(record) for record in records] == [keys] * 5
    assert [record["images"] for record in records] == [[0], [1], [2], [3], [4]]
    assert not any(is_held_out(record["row"]) for record in records)
    again, same = collected(tiny, tmp_path / "b", 5)
    for one, other in zip(records, same, strict=True):
        assert (one["row"], one["prompt"]) == (other["row"], other["prompt"])
        assert one["verdicts"][0]["correct"] == other["verdicts"][0]["correct"]
    assert (np.abs(again.astype(int) - images).max(axis=-1) > 1).mean() <= 0.001


def test_a_trajectory_keeps_what_was_said_between_its_images(tiny, tmp_path, monkeypatch):
    """Random weights ask for no edit that can be read, so a script speaks for them."""
    from agent import policy
    from agent.types import Reflection

    said = [
        Reflection("It is empty.", 0, "edit", "add a red star"),
        Reflection("A star.", 10, "done", ""),
    ]

    class Scripted(policy.ScriptedPolicy):
        def __init__(self, bagel, profile):
            super().__init__(said)

    monkeypatch.setattr(policy, "BagelPolicy", Scripted)
    images, records = collected(tiny, tmp_path / "a", 2, "--rounds", "2")
    assert len(images) == 10
    assert [record["images"] for record in records] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    for record in records:
        assert len(record["verdicts"]) == 2
        [turn] = record["turns"]
        assert turn["edit"] == "add a red star"
        assert turn["said"].endswith("[EDIT] add a red star")


def test_an_unknown_model_is_one_line(tmp_path, capsys):
    words = ["--model", str(tmp_path / "none"), "--output-dir", str(tmp_path / "out")]
    assert run_program(collect.main, words) == 1
    assert capsys.readouterr().err.startswith("error: there is no folder ")
