"""Two runs side by side: differences worked out by hand, and comparisons that are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from eval.bootstrap import Estimate
from eval.compare import TOLD, Outcome, compare, main, pair_of, sign_flip_p
from eval.readme import RESULTS
from eval.report import metrics
from tests.test_eval_report import result
from umm_reflect.errors import UsageError, UserError

FINAL = metrics(0)["final_accuracy"]


def run_of(pattern: str, **fields) -> list:
    """'0110': the results of four rows."""
    return [result(row, right, **fields) for row, right in enumerate(pattern)]


def outcome(results, **facts) -> Outcome:
    own = {
        "profile": "ours",
        "verifier": {"shapes553": "ab"},
        "limit": None,
        "sets_sha256": {"shapes553": "1"},
    }
    told = dict.fromkeys(TOLD)
    return Outcome(Path("run"), results, 0, {**own, **told, **facts})


def test_a_pair_is_what_a_person_counts():
    pair = pair_of("shapes553", ("local",) * 2, run_of("00111"), run_of("11101"), 0)
    figure = pair.figures["final_accuracy"]
    assert (figure.first, figure.second, figure.difference.value) == (0.6, 0.8, 0.2)
    assert (pair.gained, pair.lost, pair.only_first, pair.only_second) == (2, 1, 0, 0)
    assert [(one.row, one.right_first, one.right_second) for one in pair.changed] == [
        *((3, 1, 0), (0, 0, 1), (1, 0, 1)),
    ]
    assert figure.difference.low < 0 < figure.difference.high


def test_the_sign_flip_test_gives_the_p_of_a_coin():
    assert sign_flip_p(run_of("00000"), run_of("11111"), FINAL) == 0.0625  # 2 / 2^5
    assert sign_flip_p(run_of("00001"), run_of("00010"), FINAL) == 1.0
    assert sign_flip_p(run_of("0101"), run_of("0101"), FINAL) == 1.0
    few = sign_flip_p(run_of("0" * 30), run_of("1" * 30), FINAL)
    assert few == pytest.approx(1 / 10001, abs=1e-6)
    assert sign_flip_p(run_of("0" * 20 + "1" * 20), run_of("1" * 20 + "0" * 20), FINAL) == 1.0


def test_seeds_of_a_prompt_flip_together():
    first = [r for seed in range(5) for r in run_of("0", seed=seed)]
    second = [r for seed in range(5) for r in run_of("1", seed=seed)]
    assert sign_flip_p(first, second, FINAL) == 1.0


def test_samples_that_one_run_lacks_count_nowhere():
    pair = pair_of("shapes553", ("local",) * 2, run_of("0011"), run_of("011"), 0)
    assert pair.figures["final_accuracy"].first == round(1 / 3, 6)
    assert (pair.only_first, pair.only_second) == (1, 0)


def test_two_views_are_compared_where_each_run_has_one():
    full = [replace(one, edit_view="full") for one in run_of("11")]
    (pair,) = compare(outcome(run_of("01")), outcome(full))
    assert pair.views == ("local", "full")
    both = [*run_of("01"), *full]
    assert [pair.views for pair in compare(outcome(both), outcome(full))] == [("full", "full")]


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"profile": "release"}, "profile: ours and release"),
        ({"verifier": {"shapes553": "cd"}}, "verifier: .*ab.* and .*cd"),
        ({"limit": 12}, "limit: None and 12"),
    ],
)
def test_runs_that_measure_different_things_are_refused_unless_one_insists(facts, says):
    first, second = outcome(run_of("01")), outcome(run_of("11"), **facts)
    with pytest.raises(UsageError, match=says):
        compare(first, second)
    assert compare(first, second, anyway=True)[0].gained == 1


def test_a_judge_of_a_set_that_the_other_run_lacks_is_no_difference():
    more = outcome(run_of("11"), verifier={"shapes553": "ab", "geneval553": "ef"})
    assert compare(outcome(run_of("01")), more)[0].gained == 1


def test_the_macro_difference_is_the_mean_of_those_of_the_families():
    many = [result(row, "0", family="counting") for row in range(30)]
    few = [result(row, "0", family="colors") for row in range(30, 40)]
    better = [result(row, "1", family="colors") for row in range(30, 40)]
    pair = pair_of("shapes553", ("local",) * 2, [*many, *few], [*many, *better], 0)
    macro = pair.figures["macro_final_accuracy"]
    assert (macro.first, macro.second) == (0.0, 0.5)
    assert macro.difference == Estimate(0.5, 0.5, 0.5, 2)
    assert pair.figures["final_accuracy"].difference.value == 0.25


def test_other_prompts_under_the_same_name_are_refused_always():
    other = outcome(run_of("11"), sets_sha256={"shapes553": "2"})
    with pytest.raises(UserError, match="other prompts"):
        compare(outcome(run_of("01")), other, anyway=True)


def test_runs_without_a_set_in_common_are_refused():
    with pytest.raises(UserError, match="share no set"):
        compare(outcome(run_of("01")), outcome(run_of("01", set="hard")))


# --- the command ----------------------------------------------------------------------------------


def test_the_kept_results_of_both_views_are_compared_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "compared.json"
    folders = [str(RESULTS / view) for view in ("local", "full")]
    assert main([*folders, "--show", "2", "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "shapes553, edit view local against full" in printed
    assert "of 3 right" in printed
    record = json.loads(out.read_text())
    pair, *others = record["pairs"]
    assert len(others) == 2
    right = [json.loads((RESULTS / f"{v}/summary.json").read_text()) for v in ("local", "full")]
    values = [
        summary["sets"]["shapes553"][view]["all"]["final_accuracy"]["value"]
        for summary, view in zip(right, ("local", "full"), strict=True)
    ]
    figure = pair["figures"]["final_accuracy"]
    assert [figure["first"], figure["second"]] == values
    assert figure["difference"]["value"] == pytest.approx(values[1] - values[0], abs=1e-6)
    assert 0 < figure["p"] <= 1


def test_a_run_compared_with_itself_has_no_difference(tmp_path):
    folder = RESULTS / "local"
    pair, *_ = compare(Outcome.read(folder), Outcome.read(folder))
    assert pair.figures["final_accuracy"].difference == Estimate(0.0, 0.0, 0.0, 1659)
    assert pair.changed == ()


def test_a_folder_without_a_run_is_one_line(tmp_path):
    with pytest.raises(UserError, match="holds no finished run"):
        Outcome.read(tmp_path)
    shutil.copytree(RESULTS / "local", tmp_path / "copy")
    (tmp_path / "copy/results.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no results"):
        Outcome.read(tmp_path / "copy")
