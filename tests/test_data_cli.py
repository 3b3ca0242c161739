"""`umm-reflect data`: what its five verbs write, print and refuse."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from sft.data_cli import main
from tests import released
from tests.tiny import write_tiny_checkpoint
from umm_reflect import cli
from umm_reflect.errors import CheckpointError, UsageError, UserError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "example"
    assert main(["example", str(folder)]) == 0
    return folder


def test_an_example_is_valid_and_a_broken_line_of_it_is_named(example, tmp_path, capsys):
    assert main(["check", str(example)]) == 0
    assert "8 of 8 rows are good, 0 are left out" in capsys.readouterr().out
    lines = (example / "trajectories.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    first["turns"][-1]["action"] = "stop"
    broken = example / "broken.jsonl"
    broken.write_text("\n".join([json.dumps(first), *lines[1:]]))
    try:
        report = tmp_path / "report.jsonl"
        assert cli.run_program(main, ["check", str(broken), "--report", str(report)]) == 1
        printed = capsys.readouterr()
        assert "broken.jsonl:1 (shapes-0000): action: turn" in printed.out
        assert "7 of 8 rows are good, 1 are left out" in printed.out
        assert printed.err.startswith("error: 1 of 8 rows break a rule, more than 0.00%")
        written = [json.loads(line) for line in report.read_text().splitlines()]
        assert [entry["rule"] for entry in written] == ["action", "last_not_done"]
        assert main(["check", str(broken), "--max-bad", "0.2"]) == 0
    finally:
        broken.unlink()


def test_a_set_that_is_not_the_released_one_fails_its_expectation(example):
    with pytest.raises(UserError, match="not the released data: trajectories 8 instead of 29,529"):
        main(["check", str(example), "--expect", "release"])


def test_stats_count_what_a_set_holds_and_becomes(tmp_path, capsys):
    released.write_released(tmp_path)
    assert main(["stats", str(tmp_path), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["rows"] == 225
    assert numbers["whole"] == 40
    assert numbers["images a trajectory"] == {"1": 7, "2": 14, "3": 13, "4": 6}
    assert numbers["scores"] == {"0": 40, "1.5": 26, "2.5": 12, "10": 40}
    assert numbers["subtypes"] == {"natural_repair": 33, "planned_progression": 7}
    assert main(["stats", str(tmp_path)]) == 0
    assert re.search(r"^transition +78$", capsys.readouterr().out, re.M)


def test_a_page_shows_segments_weights_and_noised_images(example, tiny, tmp_path, capsys):
    page = tmp_path / "row.html"
    arguments = ["show", str(example), "--model", str(tiny), "--out", str(page)]
    assert main([*arguments, "--uid", "shapes-0003"]) == 0
    printed = capsys.readouterr().out
    assert "whole row shapes-0003: edit" in printed
    assert "cross-entropy on" in printed
    assert "noised target (flow matching), hidden from what follows" in printed
    text = page.read_text()
    assert text.count("<section") == len(printed.splitlines()) - 2
    assert text.count('<img alt="" src="data:image/png;base64,') == printed.count("image, ")
    assert 'title="0.' in text
    assert "http" not in text
    assert main([*arguments, "--kind", "transition", "--row", "1"]) == 0
    assert "dropout may leave out its text" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"has 8 whole rows, and no row 8"):
        main([*arguments, "--row", "8"])
    with pytest.raises(UserError, match=r"has 0 whole rows of nobody"):
        main([*arguments, "--uid", "nobody"])


def test_the_prompt_of_the_release_must_have_the_published_hash(example, tiny, tmp_path):
    data = released.write_released(tmp_path / "data")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(released.PROMPT_FILE)
    arguments = ["show", str(data), "--model", str(tiny), "--out", str(tmp_path / "row.html")]
    arguments += ["--kind", "controller", "--system-prompt", str(prompt)]
    with pytest.raises(CheckpointError, match=r"prompt\.txt has sha256 .*, expected 69465424c93e"):
        main(arguments)
    own = hashlib.sha256(prompt.read_bytes()).hexdigest()
    assert main([*arguments, "--system-prompt-sha256", own]) == 0
    page = (tmp_path / "row.html").read_text()
    assert "At every turn give a think block, then [EDIT]." in page
    arguments[1] = str(example)
    assert main(arguments) == 0
    assert "A planned progression begins" in (tmp_path / "row.html").read_text()


def test_converting_goes_both_ways_and_counts_what_does_not_fit(example, tmp_path, capsys):
    lines = (example / "trajectories.jsonl").read_text().splitlines()
    plain = example / "plain.jsonl"
    plain.write_text(next(line for line in lines if json.loads(line)["task"] == "t2i"))
    try:
        with pytest.raises(UserError, match="no row could be converted"):
            main(["convert", str(plain), str(tmp_path / "x"), "--to", "release"])
    finally:
        plain.unlink()
    assert "1  left out: no turn asks for its first image" in capsys.readouterr().out
    there = ["convert", str(example), str(tmp_path / "y"), "--to", "release"]
    assert main([*there, "--add-plan"]) == 0
    printed = capsys.readouterr().out
    left = int(re.search(r"(\d+)  left out: an image is not learned", printed)[1])
    written = int(re.search(r"wrote (\d+) trajectories", printed)[1])
    assert left + written == 8
    assert main(["convert", str(tmp_path / "y"), str(tmp_path / "z")]) == 0
    assert main(["check", str(tmp_path / "z")]) == 0
    with pytest.raises(UserError, match="holds something already"):
        main(["convert", str(tmp_path / "y"), str(tmp_path / "z")])


def test_what_is_typed_wrongly_has_a_hint(example):
    with pytest.raises(UsageError, match=r"has no verb 'chek'. Did you mean 'check'\?"):
        main(["chek"])
    with pytest.raises(UsageError, match=r"unknown flag --max-bda"):
        main(["check", str(example), "--max-bda", "1"])
    with pytest.raises(UsageError, match=r"max-bad is 2.0; give a share between 0 and 1"):
        main(["check", str(example), "--max-bad", "2"])
