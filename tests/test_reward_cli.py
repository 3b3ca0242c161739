"""umm-reflect reward check and score, the annotated picture, and prompts read as rows."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from eval.annotate import TILE, annotated
from eval.prompt_spec import row_of
from eval.rewards.selftest import shape_pairs
from eval.verdict import Verdict
from tests.endpoint import judge_endpoint, says
from umm_reflect import cli

ROOT = Path(__file__).resolve().parent.parent


def run(*words: str) -> int:
    return cli.run_program(cli.main, ["reward", *words])


@pytest.fixture
def pictures(tmp_path):
    pair = shape_pairs()[0]
    paths = []
    for name, image in (("good", pair.good), ("bad", pair.bad)):
        paths.append(tmp_path / f"{name}.png")
        image.save(paths[-1])
    return [str(path) for path in paths]


# --- check ----------------------------------------------------------------------------------------


def test_check_of_a_working_reward_says_so(capsys):
    assert run("check", "--reward", "shapes", "--set", "workers=1") == 0
    assert "shapes: good images score above bad ones" in capsys.readouterr().out
    assert run("check", "--reward", "shapes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["reward"] == "shapes"


def test_check_of_a_blind_judge_says_why_and_fails(capsys):
    with judge_endpoint(lambda body: says("<Score>3</Score>")) as (url, _):
        assert run("check", "--reward", "judge", "--set", f"url={url}", "model=tiny") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: judge does not tell good from bad on its self-test")
    assert error.count("\n") == 1


TYPED = {
    "nothing": ([], 2, "usage: umm-reflect reward check"),
    "another action": (["judge"], 2, "there is no 'reward judge'. Choose check or score."),
    "an unknown reward": (["check", "--reward", "shape"], 2, "Did you mean 'shapes'?"),
    "a setting of another": (["check", "--reward", "shapes", "--device", "cpu"], 2, "'device'"),
    "no prompt": (["score", "x.png", "--reward", "shapes"], 2, "either --prompt or --rows"),
    "no file": (["score", "no.png", "--reward", "shapes", "--prompt", "x"], 1, "no.png"),
}


@pytest.mark.parametrize(("words", "code", "says"), TYPED.values(), ids=TYPED)
def test_what_is_typed_wrongly_is_one_line(words, code, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*words) == code
    assert says in capsys.readouterr().err


# --- score ----------------------------------------------------------------------------------------


def test_score_prints_a_table_and_writes_verdicts_and_a_picture(pictures, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["score", *pictures, "--reward", "shapes", "--prompt", "a photo of a red circle"]
    assert run(*words, "--output-dir", str(out)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["good.png", "right", "1.000", "as", "asked"]
    assert printed[2].split()[:3] == ["bad.png", "wrong", "0.250"]
    lines = [json.loads(line) for line in (out / "verdicts.jsonl").read_text().splitlines()]
    assert [line["correct"] for line in lines] == [True, False]
    assert lines[1]["reason"] == "circle is blue, not red"
    with Image.open(out / "annotated.png") as sheet:
        assert sheet.width == 2 * 20 + 2 * TILE + 24
    assert run(*words, "--output-dir", str(out)) == 2
    assert "holds verdicts. Use --overwrite" in capsys.readouterr().err
    assert run(*words, "--output-dir", str(out), "--overwrite") == 0


def test_score_takes_a_row_for_each_image_and_names_a_bad_line(pictures, tmp_path, capsys):
    rows, out = tmp_path / "rows.jsonl", ["--output-dir", str(tmp_path / "out")]
    rows.write_text("\n".join(json.dumps(pair.row) for pair in shape_pairs()[:2]) + "\n")
    words = ["score", *pictures, "--reward", "shapes", "--rows", str(rows), *out]
    assert run(*words) == 0
    assert "star missing" in capsys.readouterr().out
    rows.write_text("{}\n{\n")
    assert run(*words, "--overwrite") == 2
    assert "rows.jsonl:2 is no JSON" in capsys.readouterr().err
    rows.write_text("{}\n{}\n{}\n")
    assert run(*words, "--overwrite") == 2
    assert "2 images but 3 rows" in capsys.readouterr().err


def test_an_image_that_was_not_judged_is_shown_and_fails(pictures, tmp_path, capsys):
    with judge_endpoint(lambda body: says("[bold]no[/bold]")) as (url, _):
        words = ["score", pictures[0], "--reward", "judge", "--set", f"url={url}", "model=tiny"]
        assert run(*words, "--prompt", "a star", "--output-dir", str(tmp_path / "o")) == 1
    printed = capsys.readouterr().out
    assert "not judged" in printed
    assert "no grade in the answer '[bold]no[/bold]'" in printed


def test_a_damaged_picture_is_named_before_anything_is_judged(tmp_path, capsys):
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    words = ["score", str(tmp_path / "cut.png"), "--reward", "shapes", "--prompt", "a star"]
    assert run(*words, "--output-dir", str(tmp_path / "o")) == 1
    assert "cut.png: the picture is" in capsys.readouterr().err


def test_boxes_are_drawn_where_the_evidence_says_and_faint_ones_thinly():
    seen = [
        {"kind": "circle", "color": "red", "box": [40, 40, 160, 160], "score": 0.9},
        {"kind": "star", "color": "blue", "box": [200, 40, 300, 160], "score": 0.1},
        {"text": "OPEN", "box": [40, 250, 160, 300], "score": 0.99},
        {"kind": "moon", "color": None, "box": [0, 0, 0, 0], "score": 0.5},
    ]
    evidence = {"detections": [*seen[:2], seen[3]], "words": [seen[2]]}
    blank = Image.new("RGB", (TILE, TILE), "white")
    sheet = annotated([(blank, "a prompt", Verdict(True, 1.0, "as asked", evidence))])
    at = 20  # the margin
    assert sheet.getpixel((at + 41, at + 100)) == (255, 0, 0)
    assert sheet.getpixel((at + 42, at + 100)) == (255, 0, 0)
    assert sheet.getpixel((at + 200, at + 100)) == (0, 0, 255)
    assert sheet.getpixel((at + 202, at + 100)) == (255, 255, 255)
    assert sheet.getpixel((at + 41, at + 275)) == (47, 111, 222)
    assert sheet.getpixel((at + 1, at + 200)) == (31, 157, 85)  # the green frame
    term = {"weight": 1, "score": 1.0, "evidence": {"detections": [seen[0]]}}
    whole = Verdict(None, 1.0, "x", {"terms": {"shapes": term}})
    inked = annotated([(blank, "", whole)])
    assert inked.getpixel((at + 41, at + 100)) == (255, 0, 0)
    assert annotated([(Image.new("RGB", (1, 60)), "", Verdict.failed("x"))]).height > TILE


# --- prompts --------------------------------------------------------------------------------------

SPECS = [
    ("a photo of a bench", "single_object", [{"class": "bench", "count": 1}], 0),
    ("a photo of four benches", "counting", [{"class": "bench", "count": 4}], 5),
    ("Create an image with exactly two people.", "counting", [{"class": "person", "count": 2}], 3),
    ("an orange circle", "colors", [{"class": "circle", "count": 1, "color": "orange"}], 0),
    (
        "a photo of a dog and a traffic light",
        "two_object",
        [{"class": "dog", "count": 1}, {"class": "traffic light", "count": 1}],
        0,
    ),
    (
        "a photo of a red dog and a blue cup",
        "color_attr",
        [
            {"class": "dog", "count": 1, "color": "red"},
            {"class": "cup", "count": 1, "color": "blue"},
        ],
        0,
    ),
    (
        "a photo of a dog right of a cup",
        "position",
        [
            {"class": "cup", "count": 1},
            {"class": "dog", "count": 1, "position": ["right of", 0]},
        ],
        0,
    ),
]


@pytest.mark.parametrize(("prompt", "tag", "include", "exclude"), SPECS)
def test_a_prompt_in_genevals_words_is_its_row(prompt, tag, include, exclude):
    row = row_of(prompt)
    assert (row["tag"], row["include"], row["prompt"]) == (tag, include, prompt)
    excluded = [clause["count"] for clause in row.get("exclude", [])]
    assert excluded == ([exclude] if exclude else [])


def test_a_longer_list_is_a_compound_row():
    row = row_of("two red circles, a star and a blue square")
    assert row["tag"] == "compound"
    assert [clause["class"] for clause in row["include"]] == ["circle", "star", "square"]
    assert row["exclude"] == [{"class": "circle", "count": 3, "color": "red"}]


@pytest.mark.parametrize("prompt", ["", "sunset over the sea", "zero dogs", "0 dogs", 'a "sign"'])
def test_a_sentence_that_lists_nothing_is_no_row(prompt):
    assert row_of(prompt) is None


# --- the scripts ----------------------------------------------------------------------------------


def script(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / name), *words],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def stand_in(tmp_path):
    """A program that prints its arguments."""
    path = tmp_path / "program"
    path.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_the_line_of_the_adapters_card_starts_vllm(stand_in):
    card = ["Qwen/Qwen3-VL-30B-A3B-Instruct", "0.0.0.0", "18090", "8"]
    done = script("serve_spectrareward.sh", *card, VLLM=stand_in)
    words = done.stdout.split("\n")
    assert words[:2] == ["serve", "Qwen/Qwen3-VL-30B-A3B-Instruct"]
    for flag, value in (
        ("--served-model-name", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
        ("--host", "0.0.0.0"),
        ("--port", "18090"),
        ("--data-parallel-size", "8"),
    ):
        assert words[words.index(flag) + 1] == value
    assert "warning: whoever reaches 0.0.0.0:18090" in done.stderr
    done = script("serve_spectrareward.sh", *card, VLLM=stand_in, VLLM_API_KEY="x")
    assert done.stderr == ""


def test_the_spectrareward_script_has_local_defaults_and_passes_on_the_rest(stand_in):
    done = script("serve_spectrareward.sh", "m", "127.0.0.1", "1", "1", "--x", VLLM=stand_in)
    assert done.stdout.splitlines()[-1] == "--x"
    words = script("serve_spectrareward.sh", "m", VLLM=stand_in).stdout.split("\n")
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--port") + 1] == "18090"
    assert words[words.index("--data-parallel-size") + 1] == "1"


def test_the_spectrareward_script_names_what_is_wrong(stand_in):
    for words, said, code in (
        ([], "no model is named", 2),
        (["m", "h", "port"], "PORT is port", 2),
        (["m", "h", "1", "0"], "DATA_PARALLEL is 0", 2),
    ):
        done = script("serve_spectrareward.sh", *words, VLLM=stand_in)
        assert (done.returncode, said in done.stderr) == (code, True)
    done = script("serve_spectrareward.sh", "m", VLLM="/no/vllm")
    assert (done.returncode, "there is no program /no/vllm" in done.stderr) == (1, True)


def test_the_reward_script_starts_genevals_verifier_on_this_machine(stand_in):
    done = script("rl/serve_reward.sh", "--idle-offload", "60", PYTHON_BIN=stand_in)
    assert done.stdout.split() == [
        *("-m", "umm_reflect", "serve-reward", "--reward", "geneval", "--port", "18092"),
        *("--idle-offload", "60"),
    ]
    done = script(
        "rl/serve_reward.sh",
        PYTHON_BIN=stand_in,
        REWARD="ocr",
        REWARD_PORT="1",
        REWARD_DEVICE="cuda:1",
    )
    assert done.stdout.split()[3:] == [*("--reward", "ocr", "--port", "1", "--device", "cuda:1")]
