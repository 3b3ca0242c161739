"""The model's own first images, judged: the files that `sft.shapes_data` reads."""

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


def collected(tiny, folder, batch_size):
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
    words += ["--device", "cpu", "--text-scales", "2.0", "--output-dir", str(folder)]
    assert run_program(collect.main, words) == 0
    lines = (folder / "records.jsonl").read_text().splitlines()
    return np.load(folder / "images.npy"), [json.loads(line) for line in lines]


def test_images_and_records_belong_together_and_do_not_depend_on_the_batch(tiny, tmp_path):
    images, records = collected(tiny, tmp_path / "a", 2)
    assert images.shape == (5, 32, 48, 3)
    assert images.dtype == np.uint8
    assert [set(record) for record in records] == [{"row", "prompt", "text_scale", "verdict"}] * 5
    assert not any(is_held_out(record["row"]) for record in records)
    again, same = collected(tiny, tmp_path / "b", 5)
    for one, other in zip(records, same, strict=True):
        assert (one["row"], one["prompt"]) == (other["row"], other["prompt"])
        assert one["verdict"]["correct"] == other["verdict"]["correct"]
    assert (np.abs(again.astype(int) - images).max(axis=-1) > 1).mean() <= 0.001


def test_an_unknown_model_is_one_line(tmp_path, capsys):
    words = ["--model", str(tmp_path / "none"), "--output-dir", str(tmp_path / "out")]
    assert run_program(collect.main, words) == 1
    assert capsys.readouterr().err.startswith("error: there is no folder ")
