"""The timing of text: both ways say the same forced texts, and the figures are written."""

from __future__ import annotations

import json

import pytest

from agent import decode_speed
from tests.tiny import write_tiny_checkpoint


@pytest.mark.parametrize("uneven", [False, True])
def test_both_ways_say_the_same_and_the_figures_are_written(tmp_path, capsys, uneven):
    folder = write_tiny_checkpoint(tmp_path / "tiny", seed=1)
    words = ["--model", str(folder), "--rows", "1,5", "--tokens", "18", "--device", "cpu"]
    words += ["--output", str(tmp_path / "speed.json"), *(["--uneven"] if uneven else [])]
    assert decode_speed.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny, float32, cpu, torch ")
    assert [line.split()[0] for line in lines[1:]] == ["rows", "1", "5"]
    figures = json.loads((tmp_path / "speed.json").read_text())
    for run in figures["runs"]:
        assert run["captured_tokens_per_second"] > 0
        assert run["logprob_difference_largest"] < 1e-5
        assert run["capture_seconds"] is None  # a CPU has no graphs
        assert not run["fell_back"]


@pytest.mark.parametrize("rows", ["", "1,x", "0"])
def test_row_counts_that_are_none_are_refused(rows):
    with pytest.raises(ValueError, match="give numbers with commas"):
        decode_speed.Config(rows=rows)
