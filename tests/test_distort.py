"""Distorted scenes: what is drawn, what the verifier says of it, and what becomes of it."""

import json
import random

import numpy as np
import pytest

from eval import distort
from eval.shapes import ShapesVerifier
from sft.shapes_own import is_well_drawn, own_looks
from umm_reflect.cli import run_program
from umm_reflect.shapes.scene import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_an_outline_keeps_its_extent_when_it_is_resampled(kind):
    points = distort.resampled(kind)
    assert points.shape == (distort.POINTS, 2)
    original = distort.outline(kind)
    assert points.min(0) == pytest.approx(original.min(0), abs=0.06)
    assert points.max(0) == pytest.approx(original.max(0), abs=0.06)


def test_a_spiked_star_has_its_points_and_a_distorted_outline_stays_finite():
    radius = np.linalg.norm(distort.spiked(6, 0.4), axis=1)
    peaks = (radius > np.roll(radius, 1)) & (radius > np.roll(radius, -1)) & (radius > 0.9)
    assert peaks.sum() == 6
    rng = random.Random(0)
    for _ in range(200):
        points = distort.distorted(rng.choice(KINDS), rng)
        assert points.shape == (distort.POINTS, 2)
        assert np.abs(points).max() < 2


def test_files_are_those_of_collect_and_do_not_depend_on_the_number_of_processes(tmp_path):
    for workers in (1, 2):
        words = ["--count", "300", "--workers", str(workers), "--seed", "3"]
        words += ["--output-dir", str(tmp_path / str(workers))]
        assert run_program(distort.main, words) == 0
    one, two = (tmp_path / name / "records.jsonl" for name in "12")
    assert one.read_bytes() == two.read_bytes()
    images = np.load(tmp_path / "1" / "images.npy")
    assert images.shape == (300, 128, 128, 3)
    records = [json.loads(line) for line in one.read_text().splitlines()]
    correct = [record["verdicts"][0]["correct"] for record in records]
    assert 0.35 < np.mean(correct) < 0.7  # both kinds, so that the limit between them is seen
    assert not any(is_well_drawn(record) for record in records)  # looked at, never drawn
    again = ShapesVerifier()
    for record in records[::50]:
        [verdict] = again.score(
            [distort.Image.fromarray(images[record["images"][0]])], [record["row"]]
        )
        assert verdict.correct == record["verdicts"][0]["correct"]
    looks = [
        o for r in records[:50] for o in own_looks(r, [images[r["images"][0]]], random.Random(1))
    ]
    assert len(looks) > 50


def test_a_sheet_is_drawn_and_nonsense_is_refused(tmp_path, capsys):
    assert run_program(distort.main, ["--show", str(tmp_path / "sheet.png")]) == 0
    assert (tmp_path / "sheet.png").exists()
    assert run_program(distort.main, ["--count", "0"]) != 0
    assert "count must be 1 or more" in capsys.readouterr().err
