"""curve.png: the points that are drawn, and that it is drawn with what a run has."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from PIL import Image

from eval.curves import best_of_points, draw_curves, main, scaling_points
from eval.readme import RESULTS
from eval.report import report_of, set_report
from tests.test_eval_report import FOUR, result, scored
from umm_reflect.errors import UserError


def test_the_scaling_curve_is_accuracy_against_the_images_that_were_drawn():
    points = scaling_points(set_report(FOUR, 2))
    assert [(x, e.value) for x, e in points] == [(1.0, 0.5), (1.75, 0.5), (2.0, 0.5)]


def test_best_of_n_is_drawn_by_own_score_and_by_a_perfect_judge():
    report = set_report([scored(0, 3, True), scored(0, 9, False, seed=1)], 0)
    assert [(x, e.value) for x, e in best_of_points(report, perfect=True)] == [(1, 0.5), (2, 1.0)]
    assert [(x, e.value) for x, e in best_of_points(report, perfect=False)] == [(1, 0.5), (2, 0)]


def test_a_run_without_a_look_or_a_second_sample_is_drawn_too():
    unseen = report_of([result(0, "1", (), "max_rounds")], 0)
    image = draw_curves(unseen)
    assert image.size == (1320, 550)
    one_look = report_of([scored(0, 9, True)], 0)
    assert np.asarray(draw_curves(one_look)).std() > 0


def test_the_same_report_gives_the_same_picture():
    report = report_of(FOUR, 2)
    assert draw_curves(report).tobytes() == draw_curves(report).tobytes()


def test_the_kept_results_are_drawn_from_the_command_line(tmp_path, capsys):
    shutil.copytree(RESULTS / "local", tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 0
    assert "curve.png" in capsys.readouterr().out
    colors = Image.open(tmp_path / "run/curve.png").convert("RGB").getcolors(1 << 24)
    assert (47, 111, 222) in {color for _, color in colors}
    with pytest.raises(UserError, match="holds no results"):
        main([str(tmp_path)])
