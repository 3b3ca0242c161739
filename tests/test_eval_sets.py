"""The test sets, the release's manifest, and the GenEval path from prompt to report."""

from __future__ import annotations

import hashlib
import json
import random

import pytest

from agent.policy import BagelPolicy, ForcedTurns, ScriptedPolicy
from agent.types import Reflection
from eval import run as eval_run
from eval.config import EvalConfig
from eval.drawn import DRAWN
from eval.geneval_manifest import manifest_rows, manifest_text, window_start
from eval.geneval_prompts import official_rows
from eval.run import Run, evaluate
from eval.sets import all_rows, request_of, rows_of
from tests.test_eval_run import make_run
from tests.tiny import write_tiny_checkpoint
from umm_reflect.errors import UsageError, UserError
from umm_reflect.settings import parse
from umm_reflect.shapes.render import render
from umm_reflect.shapes.sampler import scene_for


@pytest.fixture(autouse=True)
def own_hashes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


# --- what is asked --------------------------------------------------------------------------------


def test_the_rows_of_the_release_have_its_published_hash():
    rows = manifest_rows()
    canonical = json.dumps(rows, sort_keys=True, separators=(",", ":")).encode()
    published = "338eb3b8a835714d39fbcf3bb6f9f6c27f388afa439501c34dbf6af4f2c1b48b"
    assert hashlib.sha256(canonical).hexdigest() == published
    assert list(rows[0]) == [
        *("slot", "sample_id", "official_index", "family", "prompt", "official_prompt", "seed"),
        *("geneval_metadata", "verification_contract"),
    ]
    assert (rows[0]["sample_id"], rows[0]["seed"]) == ("official553_color_attr_0453", 20260830)
    assert [rows[slot]["seed"] - 20260830 for slot in (0, 1, 2, 551, 552)] == [0, 0, 1, 275, 276]
    assert rows[0]["prompt"] == "Create an image with a purple wine glass and a black apple."
    counting = next(row for row in rows if row["family"] == "counting")
    assert counting["verification_contract"][0]["kind"] == "count_exact"
    assert json.loads(manifest_text())["n"] == 553


def test_the_noise_windows_of_edits_are_the_published_ones():
    assert window_start(0, 0, repair_rng_step=0) == 8
    assert window_start(0, 1, repair_rng_step=0) == 21
    assert window_start(0, 0, repair_rng_step=500) == 14


def test_the_official_rows_are_a_set_and_each_carries_its_published_seed():
    rows = all_rows("geneval553")
    assert [entry.row for entry in rows] == official_rows()
    seeds = {row["official_index"]: row["seed"] for row in manifest_rows()}
    assert [entry.seed for entry in rows] == [seeds[i] for i in range(553)]
    bench = rows[0].row
    assert request_of("geneval553", bench, raw=True) == "a photo of a bench"
    assert request_of("geneval553", bench, raw=False) == "Create an image with a bench."
    assert len({entry.family for entry in rows_of("geneval553", 6)}) == 6


def test_the_list_of_sets_tells_sizes_judges_and_hashes(capsys):
    assert eval_run.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert "geneval553  553 rows, judged by geneval" in said
    assert "shapes553   553 rows, judged by shapes" in said
    assert "--profile official" in said
    assert "our reading: the sampler: GenEval sets none for this model" in said
    assert "hard553     553 rows, judged by shapes" in said
    assert "single_object 80, two_object 99, counting 80, colors 94, position 100" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("geneval533", "did you mean geneval553"),
        ("mine.jsonl", r"mine\.jsonl does not exist"),
        ("geneval553 --reward-set rule", "no KEY=VALUE"),
    ],
)
def test_a_set_that_is_not_there_is_one_line(words, says):
    with pytest.raises(UsageError, match=says):
        parse(EvalConfig, words.split(), "umm-reflect eval").reward_mapping("geneval553")


def test_a_line_of_a_file_that_is_no_row_is_named(tmp_path):
    path = tmp_path / "mine.jsonl"
    good = json.dumps(official_rows()[0])
    for bad, says in [
        ('{"tag": "colors"}', "there is no prompt"),
        ('{"prompt": "a cow"}', "there is no tag"),
        ('{"tag": "x", "prompt": "a cow"}', "no include clause"),
        ("[]", "there is no prompt"),
    ]:
        path.write_text(f"{good}\n{bad}\n")
        all_rows.__globals__["_file_rows"].cache_clear()
        with pytest.raises(UserError, match=rf"line 2, is no row of a test set: .*{says}"):
            all_rows(str(path))


def test_the_published_judge_goes_with_the_published_profile():
    ours = EvalConfig(("geneval553",)).reward_mapping("geneval553")
    release = EvalConfig(("geneval553",), profile="release").reward_mapping("geneval553")
    assert ours == {"reward": "geneval"}
    assert release == {"reward": "geneval", "rule": "cross_checked", "preset": "release"}
    assert EvalConfig().reward_mapping("shapes553") == {"reward": "shapes"}


# --- GenEval from end to end, without its weights -------------------------------------------------

SHAPE_OF = {coco: shape for shape, coco in DRAWN.items()}


def coco_rows() -> list[dict]:
    """A row of each kind, over classes that the stand-in detector sees."""
    return [
        {"tag": "single_object", "include": [{"class": "donut", "count": 1}], "prompt": "a donut"},
        {"tag": "counting", "include": [{"class": "tv", "count": 2}], "prompt": "two tvs"},
        {
            "tag": "colors",
            "include": [{"class": "kite", "count": 1, "color": "red"}],
            "prompt": "a red kite",
        },
    ]


def picture(row: dict):
    include = [{**clause, "class": SHAPE_OF[clause["class"]]} for clause in row["include"]]
    return render(scene_for({**row, "include": include}, random.Random(3)))


def test_drawn_objects_are_detected_judged_and_reported_under_geneval_rules(tmp_path):
    rows = coco_rows()
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wrong = picture({"include": [{"class": "apple", "count": 1}], "tag": "single_object"})

    def paint(ask):
        index = int(ask.sample.split(":")[1])
        return wrong if index == 1 and ask.number == 0 else picture(rows[index])

    def look(ask):
        again = ask.sample.startswith("three:1:") and ask.round == 0
        if again:
            return Reflection("An apple.", 2, "edit", "Draw two tvs.")
        return Reflection("As asked.", 10, "done", "")

    out = tmp_path / "out"
    config = EvalConfig((str(path),), reward_set=("models=drawn",), output_dir=out)
    report = evaluate(config, make_run(tmp_path), lambda view: ScriptedPolicy(look, paint))
    figures = report.sets["three"]["local"].all
    assert (figures["accuracy_at_0"].value, figures["final_accuracy"].value) == (0.666667, 1.0)
    lines = [json.loads(line) for line in (out / "results.jsonl").open()]
    assert [line["family"] for line in lines] == ["single_object", "counting", "colors"]
    assert [image["correct"] for image in lines[1]["images"]] == [False, True]
    judge = json.loads((out / "env.json").read_text())["judges"]["three"]
    assert judge["reward"] == "geneval"
    assert judge["models"]["detector"]["name"] == "drawn shapes (a stand-in without weights)"
    other = EvalConfig(
        config.sets,
        reward_set=("models=drawn",),
        output_dir=out,
        resume=True,
    )
    (out / "results.jsonl").write_text("")
    env = json.loads((out / "env.json").read_text())
    env["judges"]["three"]["models"]["detector"]["sha256"] = "ab"
    (out / "env.json").write_text(json.dumps(env))
    with pytest.raises(UserError, match="another judge has judged"):
        evaluate(other, make_run(tmp_path), lambda view: ScriptedPolicy(look, paint))


def test_random_weights_are_drawn_detected_judged_and_reported(tmp_path):
    from umm_reflect import Bagel

    tiny, out = write_tiny_checkpoint(tmp_path / "tiny"), tmp_path / "out"
    few = {"limit": 6, "steps": 3, "max_rounds": 1, "device": "cpu"}
    config = EvalConfig(
        ("geneval553",), model=str(tiny), reward_set=("models=drawn",), output_dir=out, **few
    )
    run = Run.prepare(config)
    bagel = Bagel.from_pretrained(str(tiny), device="cpu")
    report = evaluate(
        config, run, lambda view: ForcedTurns(BagelPolicy(bagel, run.profiles[view]), 140)
    )
    figures = report.sets["geneval553"]["local"]
    assert figures.rows == 6
    assert figures.all["protocol_valid"].value == 1.0
    assert figures.all["mean_edits"].value > 0
    assert figures.all["final_accuracy"].value == 0.0
    lines = [json.loads(line) for line in (out / "results.jsonl").open()]
    assert {line["family"] for line in lines} == set(figures.families)
    assert lines[0]["prompt"].startswith("Create an image with ")
    assert all(image["reason"] for line in lines for image in line["images"])
