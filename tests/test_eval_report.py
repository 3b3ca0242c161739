"""Figures from results: every one worked out by hand, and intervals that treat a prompt as one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eval.report import (
    REPLICATES,
    Estimate,
    bootstrap_weights,
    difference,
    estimate,
    metrics,
    report_of,
    set_report,
    summary,
)
from eval.results import Judged, Look, Result, ResultFile, read_results, result_from_line
from eval.sheets import pick
from umm_reflect.errors import UserError

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
        "final_accuracy": 0.5,
        "repair": 0.5,
        "damage": 0.5,
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
