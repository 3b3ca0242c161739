"""What a run leaves besides figures: pages, plots, and scores that are bound to their images."""

from __future__ import annotations

import json

from PIL import Image

from eval.run import main as eval_main
from tests.test_eval_run import play
from umm_reflect.cli import run_program


def test_a_run_leaves_a_page_a_plot_and_the_hash_of_every_image_and_of_its_judge(tmp_path):
    folder, _ = play(tmp_path)
    assert "<html" in (folder / "report.html").read_text()
    with Image.open(folder / "curve.png") as plot:
        assert plot.width > 800
    lines = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
    assert len(lines) == 10
    assert len({line["verifier"] for line in lines}) == 1
    assert all(len(image["sha256"]) == 64 for line in lines for image in line["images"])


def test_an_image_that_is_replaced_after_scoring_is_made_and_judged_again(tmp_path, capsys):
    folder, _ = play(tmp_path, log_samples=True)
    names = ("results.jsonl", "images.jsonl")
    before = [(folder / name).read_bytes() for name in names]
    images = sorted(folder.glob("shapes553-local/traces/*/image_0.png"))
    with Image.open(images[3]) as image:
        other = Image.new("RGB", image.size, (200, 20, 20))
    other.save(images[3])
    play(tmp_path, log_samples=True, resume=True)
    assert capsys.readouterr().err.count("stale, made again") == 1
    assert [(folder / name).read_bytes() for name in names] == before
    with Image.open(images[3]) as image:
        assert image.tobytes() != other.tobytes()


def test_compare_is_a_word_of_eval(tmp_path, capsys):
    folders = [str(play(tmp_path, name)[0]) for name in ("a", "b")]
    assert run_program(eval_main, ["compare", *folders]) == 0
    assert "right only in the second: 0, only in the first: 0 samples" in capsys.readouterr().out
