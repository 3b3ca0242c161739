"""Figures from results: every one worked out by hand, and intervals that treat a prompt as one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from eval.best_of import any_right, best_of, picked_right
from eval.bootstrap import REPLICATES, Estimate, bootstrap_weights, estimate
from eval.calibration import calibration_of
from eval.readme import RESULTS
from eval.report import difference, metrics, report_of, set_report, summary
from eval.results import (
    Box,
    Judged,
    Look,
    Result,
    ResultFile,
    boxes_of,
    judged,
    pixels_sha256,
    read_results,
    result_from_line,
)
from eval.sheets import pick
from eval.verdict import Verdict
from umm_reflect.errors import UserError

NANO_RESULTS = RESULTS / "local"
DONE, EDIT = Look("done", 10, ""), Look("edit", 4, "Add a red circle.")
BROKEN = Look(None, None, None, "score_format")


def result(row=0, images="1", looks=(DONE,), stop="done", **fields) -> Result:
    """images: '01' for a wrong first image and a right second one."""
    verdicts = tuple(Judged(i == "1", "as asked" if i == "1" else "circle missing") for i in images)
    defaults = {
        "edit_view": "local",
        "set": "shapes553",
        "row": row,
        "family": "counting",
        "tag": "counting",
        "prompt": "two circles",
        "seed": 0,
        "copy": 0,
        "stop": stop,
        "edits": len(images) - 1,
        "protocol_valid": all(look.error is None for look in looks),
        "kept": len(images) - 1,
        "images": verdicts,
        "looks": tuple(looks),
        "malformed": tuple(look.error for look in looks if look.error),
    }
    return Result(**{**defaults, **fields})


FOUR = [
    result(0, "1"),
    result(1, "01", (EDIT, DONE)),
    result(2, "10", (EDIT, BROKEN), stop="malformed"),
    result(3, "000", (EDIT, EDIT, DONE)),
]


def values(figures) -> dict[str, float | None]:
    return {name: figure.value for name, figure in figures.items()}


def test_four_trajectories_give_the_figures_that_a_person_works_out():
    found = values(summary(FOUR, max_rounds=2))
    assert found == {
        "accuracy_at_0": 0.5,
        "accuracy_at_1": 0.5,  # one repaired, one damaged
        "accuracy_at_2": 0.5,
        "accuracy_at_1_gated": 0.5,
        "accuracy_at_2_gated": 0.5,
        "images_at_0": 1.0,
        "images_at_1": 1.75,
        "images_at_2": 2.0,
        "final_accuracy": 0.5,
        "any_sample_right": 0.5,
        "repair": 0.5,
        "damage": 0.5,
        "repair_last": 0.5,
        "damage_last": 0.5,
        "protocol_valid": 0.75,
        "turns_valid": round(7 / 8, 6),
        "look_on_right": round(2 / 3, 6),
        "look_on_wrong": 0.75,
        "score_on_right": 8.0,
        "score_on_wrong": 5.5,
        "mean_edits": 1.0,
        "stop_done": 0.75,
        "stop_malformed": 0.25,
    }


def test_a_trajectory_that_stopped_keeps_its_last_image_at_larger_budgets():
    repaired = result(0, "01", (EDIT, DONE))
    assert [repaired.correct_at(k) for k in range(4)] == [False, True, True, True]


def test_the_final_image_is_the_one_that_is_handed_out_and_not_the_last():
    found = values(summary([result(0, "10", (EDIT, EDIT), "max_rounds", kept=0)], max_rounds=1))
    assert (found["final_accuracy"], found["accuracy_at_1"], found["damage"]) == (1.0, 0.0, 0.0)


def test_a_broken_protocol_is_wrong_from_the_first_edit_on_where_accuracy_is_gated():
    found = values(summary([result(0, "1", (BROKEN,), "malformed")], max_rounds=1))
    assert found["accuracy_at_0"] == found["accuracy_at_1"] == 1.0
    assert found["accuracy_at_1_gated"] == 0.0


def test_a_turn_that_was_sampled_anew_breaks_no_protocol_but_counts_among_the_turns():
    found = values(summary([result(malformed=("score_format",))], max_rounds=0))
    assert found["protocol_valid"] == 1.0
    assert found["turns_valid"] == 0.5


def test_a_figure_without_anything_to_count_has_no_value():
    figure = summary([result(0), result(1)], max_rounds=0)["repair"]
    assert figure == Estimate(None, None, None, 0)
    assert str(figure) == "-"


def test_a_score_is_the_mean_over_the_looks_and_a_look_at_nothing_counts_for_nothing():
    unseen = result(0, "01", (EDIT,), "max_rounds")
    found = summary([unseen], max_rounds=1)
    assert found["look_on_right"].n == 0
    assert found["score_on_wrong"].value == 4.0


# --- intervals ------------------------------------------------------------------------------------


def test_half_of_a_hundred_rows_has_the_interval_of_a_binomial():
    right = np.array([1.0] * 50 + [0.0] * 50)
    found = estimate(right, np.ones(100), bootstrap_weights(100))
    assert (found.value, found.n) == (0.5, 100)
    assert (found.low, found.high) == pytest.approx((0.40, 0.60), abs=0.011)  # +- 1.96 * 0.05


def test_more_seeds_of_rows_that_always_end_alike_do_not_narrow_the_interval():
    once = [result(row, "1" if row % 2 else "0") for row in range(40)]
    thrice = [replace(one, seed=seed) for seed in range(3) for one in once]
    narrow = summary(thrice, max_rounds=0)["final_accuracy"]
    wide = summary(once, max_rounds=0)["final_accuracy"]
    assert (narrow.low, narrow.high) == (wide.low, wide.high)
    assert wide.high - wide.low == pytest.approx(0.31, abs=0.03)  # 2 * 1.96 * sqrt(.25 / 40)
    assert (narrow.n, wide.n) == (120, 40)


def test_every_replicate_draws_as_many_rows_as_there_are_and_always_the_same():
    weights = bootstrap_weights(7)
    assert weights.shape == (REPLICATES, 7)
    assert (weights.sum(axis=1) == 7).all()
    assert (weights == bootstrap_weights(7)).all()


def test_one_row_has_no_interval():
    figure = summary([result()], max_rounds=0)["final_accuracy"]
    assert (figure.value, figure.low, figure.high) == (1.0, None, None)


def test_the_order_of_the_results_changes_nothing():
    assert summary(FOUR, 2) == summary(FOUR[::-1], 2)


# --- own scores and best of N ---------------------------------------------------------------------


def scored(row: int, score: float, right: bool, **fields) -> Result:
    return result(row, "1" if right else "0", (Look("done", score, ""),), **fields)


def test_own_scores_against_verdicts_give_the_figures_that_a_person_works_out():
    found = calibration_of([scored(0, 10, True), scored(1, 10, False), scored(2, 5, False)])
    bins = {b.score: (b.right.value, b.right.n) for b in found.bins}
    assert bins == {5.0: (0.0, 1), 10.0: (0.5, 2)}
    assert found.auroc.value == 0.75  # beats the 5, ties with the 10
    assert found.brier.value == round((0 + 1 + 0.25) / 3, 6)
    assert found.expected_error.value == 0.5  # |.5 - 1| twice, |0 - .5| once


def test_scores_that_tell_right_from_wrong_without_fail_have_an_area_of_one():
    found = calibration_of([scored(i, 10 if i % 2 else 2, bool(i % 2)) for i in range(20)])
    assert (found.auroc.value, found.auroc.low, found.auroc.high) == (1.0, 1.0, 1.0)


def test_where_nothing_was_looked_at_there_is_nothing_to_calibrate():
    found = calibration_of(
        [result(0, "1", (), "max_rounds"), result(1, "0", (BROKEN,), "malformed")]
    )
    assert found.bins == ()
    assert found.auroc.value is found.brier.value is found.expected_error.value is None


def test_best_of_n_is_the_mean_over_all_subsets():
    assert any_right([True, False, False], 1) == pytest.approx(1 / 3)
    assert any_right([True, False, False], 2) == pytest.approx(2 / 3)
    assert any_right([True, False, False], 3) == 1.0
    three = [(9, True), (9, False), (3, True)]  # pairs: tie .5, right 1, wrong 0
    assert picked_right(three, 1) == pytest.approx(2 / 3)
    assert picked_right(three, 2) == pytest.approx(0.5)
    assert picked_right(three, 3) == pytest.approx(0.5)


def test_best_of_n_takes_seeds_and_copies_as_draws_of_the_first_image():
    rows = [scored(0, 3, False), scored(0, 9, True, seed=1), scored(0, 5, False, copy=1)]
    rows += [scored(1, 3, False, seed=seed) for seed in range(4)]
    found = best_of(rows)
    assert [one.n for one in found] == [1, 2, 3]
    assert [one.any_right.value for one in found] == [round(1 / 6, 6), round(1 / 3, 6), 0.5]
    assert found[2].by_own_score.value == 0.5
    assert best_of([*rows, result(0, "1", (), seed=7)])[0].by_own_score is None


def test_a_prompt_counts_as_right_where_one_of_its_samples_is():
    rows = [result(0, "0"), result(0, "1", seed=1), result(1, "0"), result(1, "0", seed=1)]
    assert summary(rows, 0)["any_sample_right"].value == 0.5
    assert summary(rows, 0)["any_sample_right"].n == 2


def test_the_published_rates_are_of_the_last_image_and_not_of_the_kept_one():
    found = summary([result(0, "10", (EDIT, EDIT), "max_rounds", kept=0)], max_rounds=1)
    assert (found["damage"].value, found["damage_last"].value) == (0.0, 1.0)


def test_graded_scores_are_reported_where_verdicts_gave_them():
    half = Judged(False, "circle missing", 0.25)
    known = replace(FOUR[1], images=(half, Judged(True, "as asked", 1.0)))
    found = values(summary([known], max_rounds=1))
    assert (found["score_at_0"], found["score_at_1"]) == (0.25, 1.0)
    assert "score_at_0" not in summary(FOUR, 2)


# --- groups and pairs -----------------------------------------------------------------------------


def test_families_are_apart_and_single_objects_are_left_out_of_what_was_held_out():
    rows = [
        *(result(i, "1", family="single_object") for i in range(3)),
        *(result(i, "1" if i == 3 else "0", family="colors") for i in range(3, 7)),
    ]
    report = set_report(rows, max_rounds=0)
    assert {name: f["final_accuracy"].value for name, f in report.families.items()} == {
        "single_object": 1.0,
        "colors": 0.25,
    }
    assert report.all["final_accuracy"].value == round(4 / 7, 6)
    assert report.all["macro_final_accuracy"].value == 0.625
    assert report.all["macro_final_accuracy"].n == 2
    assert report.held_out["final_accuracy"].value == 0.25
    assert (report.rows, report.samples, report.seeds) == (7, 7, (0,))


def test_a_set_without_single_objects_has_no_second_total():
    assert set_report([result(0), result(1)], 0).held_out is None


def test_a_report_of_two_sets_at_once_is_refused():
    with pytest.raises(ValueError, match="one set"):
        set_report([result(), result(set="hard")], 0)


def test_sets_and_views_are_reported_apart_and_the_views_compared():
    local = [result(row, "0") for row in range(4)]
    full = [replace(result(row, "1" if row == 2 else "0"), edit_view="full") for row in range(4)]
    hard = [result(set="hard")]
    report = report_of([*local, *full, *hard], max_rounds=0)
    assert {name: list(views) for name, views in report.sets.items()} == {
        "shapes553": ["local", "full"],
        "hard": ["local"],
    }
    assert list(report.full_minus_local) == ["shapes553"]
    assert report.full_minus_local["shapes553"]["final_accuracy"].value == 0.25


def test_a_paired_difference_of_equal_runs_is_zero_without_doubt():
    first = [result(row, "1" if row % 3 else "0") for row in range(30)]
    second = [replace(one, edit_view="full") for one in first]
    assert difference(first, second, "final_accuracy", 0) == Estimate(0.0, 0.0, 0.0, 30)


def test_pairs_are_the_samples_that_both_runs_hold():
    first = [result(row, "0") for row in range(4)]
    second = [result(row, "1") for row in range(2, 6)]
    found = difference(first, second, "final_accuracy", 0)
    assert (found.value, found.n) == (1.0, 2)
    with pytest.raises(ValueError, match="no row and seed"):
        difference(first[:1], second, "final_accuracy", 0)


def test_the_names_of_the_figures_are_the_published_ones():
    assert [name for name in metrics(3) if name.startswith("accuracy")] == [
        *("accuracy_at_0", "accuracy_at_1", "accuracy_at_2", "accuracy_at_3"),
        *("accuracy_at_1_gated", "accuracy_at_2_gated", "accuracy_at_3_gated"),
    ]


# --- lines ----------------------------------------------------------------------------------------


def test_a_result_comes_back_from_its_line():
    for one in FOUR:
        line = one.to_line()
        assert line.count("\n") == 1
        assert result_from_line(line) == one


def test_what_a_judge_saw_is_kept_beside_the_results_which_hold_no_pixel(tmp_path):
    seen = Judged(False, "1 of 2", 0.25, "ab" * 32, (Box("red circle", (0.0, 0.1, 0.5, 1.0), 0.9),))
    one = replace(result(0, "0"), images=(seen,), verifier="cd" * 32)
    path = tmp_path / "results.jsonl"
    with ResultFile(path, resume=False) as file:
        file.append([one])
    assert read_results(path) == [one]
    assert path.read_text() == replace(one, images=(Judged(False, "1 of 2"),)).to_line()
    (tmp_path / "images.jsonl").unlink()
    assert read_results(path) == [replace(one, images=(Judged(False, "1 of 2"),), verifier=None)]


def test_images_of_results_that_were_not_written_are_forgotten_when_a_run_goes_on(tmp_path):
    path = tmp_path / "results.jsonl"
    images = tuple(replace(image, sha256="ab" * 32, score=0.5) for image in FOUR[1].images)
    both = [replace(FOUR[1], images=images), replace(FOUR[1], images=images, row=9)]
    with ResultFile(path, resume=False) as file:
        file.append(both)
    path.write_text(both[0].to_line())
    with ResultFile(path, resume=True) as file:
        assert file.results == both[:1]
        assert (tmp_path / "images.jsonl").read_text() == both[0].to_images_line()
        file.append(both[1:])
    assert read_results(path) == both


def test_an_images_line_of_another_number_of_images_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(FOUR[1].to_line())
    (tmp_path / "images.jsonl").write_text(replace(FOUR[1], images=()).to_images_line())
    with pytest.raises(UserError, match=r"images.jsonl, line 1, is damaged"):
        read_results(path)


def test_result_files_of_earlier_versions_stay_readable():
    old = (NANO_RESULTS / "results.jsonl").read_text().splitlines(keepends=True)
    assert [one.to_line() for one in read_results(NANO_RESULTS / "results.jsonl")] == old


def test_a_verdict_is_bound_to_the_pixels_of_its_image_and_boxes_are_shares_of_it():
    image = Image.new("RGB", (200, 100), "red")
    evidence = {"detections": [{"kind": "circle", "color": "red", "box": (50, 50, 100, 100)}]}
    one = judged(image, Verdict(False, 0.3, "1 of 2 circles", evidence))
    assert one.boxes == (Box("red circle", (0.25, 0.5, 0.5, 1.0)),)
    other = image.copy()
    other.putpixel((3, 3), (254, 0, 0))
    assert one.sha256 == pixels_sha256(image.convert("RGBA")) != pixels_sha256(other)


def test_boxes_are_shares_of_the_size_that_the_judge_saw_and_come_from_the_terms_of_a_sum_too():
    dog = {"kind": "dog", "score": 0.25, "box": [10, 10, 20, 50], "area": 400}
    word = {"text": "EXIT", "score": 0.9, "box": [0, 0, 50, 100]}
    detector = {"image": {"sha256": "", "size": [50, 100]}, "detections": [dog], "answers": []}
    terms = {"geneval": {"evidence": detector}, "ocr": {"evidence": {"words": [word]}}}
    for evidence, expected in (
        (detector, (Box("dog", (0.2, 0.1, 0.4, 0.5), 0.25),)),
        (
            {"terms": terms},
            (Box("dog", (0.2, 0.1, 0.4, 0.5), 0.25), Box("EXIT", (0.0, 0.0, 0.5, 0.5), 0.9)),
        ),
    ):
        assert boxes_of(Verdict(False, 0.1, "no dog", evidence), (100, 200)) == expected


def test_half_a_line_at_the_end_is_cut_off_when_a_run_goes_on(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(FOUR[0].to_line() + FOUR[1].to_line()[:40])
    assert read_results(path) == FOUR[:1]
    with ResultFile(path, resume=True) as file:
        file.append(FOUR[1:2])
        assert file.results == FOUR[:2]
    assert path.read_text() == FOUR[0].to_line() + FOUR[1].to_line()


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(FOUR[0].to_line() + '{"row": 3}\n')
    with pytest.raises(UserError, match="line 2, is damaged"):
        read_results(path)


# --- what is looked at ----------------------------------------------------------------------------


def test_the_sheets_hold_a_few_of_each_family_and_what_is_picked_stays_picked():
    wrong = [result(row, "0", family=f"f{row // 10}") for row in range(60)]
    repaired = [result(60 + row, "01", (EDIT, DONE), family="f0") for row in range(5)]
    picks = pick([*wrong, *repaired], families=6)
    assert [key[2] for key in picks.failures] == [10 * f + i for f in range(6) for i in range(4)]
    assert [key[2] for key in picks.gallery] == [60, 61]
    assert set(pick(wrong[:15], families=6).failures) <= set(picks.failures)
