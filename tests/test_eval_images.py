"""umm-reflect eval in two steps: draw now and judge later, and images of others."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace

import pytest
from PIL import Image

from agent.policy import ScriptedPolicy
from agent.types import Reflection
from eval import layout_geneval
from eval.config import EvalConfig
from eval.run import evaluate, predict
from eval.run import main as eval_main
from eval.sets import all_rows, rows_of
from tests.test_eval_run import make_run
from tests.test_eval_sets import coco_rows, picture
from umm_reflect.errors import UsageError, UserError
from umm_reflect.shapes.render import render
from umm_reflect.shapes.sampler import scene_for


class Painter(ScriptedPolicy):
    """Odd rows are empty at first and right after one edit; even rows are right at once."""

    def __init__(self):
        super().__init__(self.look, self.paint)

    def look(self, ask):
        if int(ask.sample.split(":")[1]) % 2 and ask.round == 0:
            return Reflection("It is empty.", 1, "edit", "Draw what was asked.")
        return Reflection("As asked.", 9, "done", "")

    def paint(self, ask):
        row = int(ask.sample.split(":")[1])
        if row % 2 and ask.number == 0:
            return Image.new("RGB", (128, 128), "white")
        return render(scene_for(all_rows("shapes553")[row].row, random.Random(row)))


def settings(folder, **more):
    return EvalConfig(limit=6, batch_size=4, workers=1, output_dir=folder, **more)


def run_of(tmp_path):
    run = make_run(tmp_path)
    return replace(run, facts={**run.facts, "profiles": {"local": {}}})


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn") / "images"
    predict(settings(folder, predict_only=True), run_of(folder), lambda view: Painter())
    return folder


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged") / "at-once"
    evaluate(settings(folder, log_samples=True), run_of(folder), lambda view: Painter())
    return folder


# --- our own images -------------------------------------------------------------------------------


def test_images_that_were_only_drawn_are_judged_later_to_the_same_bytes(drawn, judged, tmp_path):
    assert not (drawn / "results.jsonl").exists()
    assert eval_main(["--images", str(drawn), "--output-dir", str(tmp_path / "later")]) == 0
    for name in ("results.jsonl", "summary.json"):
        assert (tmp_path / "later" / name).read_bytes() == (judged / name).read_bytes()


def test_a_judged_run_that_kept_its_images_is_judged_again(judged, tmp_path):
    flags = ["--images", str(judged), "--output-dir", str(tmp_path / "again"), "--gpus", "2"]
    eval_main([*flags, "--batch-size", "3", "--device", "cpu"])
    again = (tmp_path / "again/results.jsonl").read_bytes()
    assert again == (judged / "results.jsonl").read_bytes()
    with pytest.raises(UsageError, match="both"):
        eval_main(["--images", str(judged), "--output-dir", str(judged)])


def test_drawing_goes_on_where_it_was_ended(drawn, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(drawn, folder)
    gone = sorted((folder / "shapes553-local/traces").iterdir())[-1]
    shutil.rmtree(gone)
    config = settings(folder, predict_only=True)
    with pytest.raises(UsageError, match="--resume"):
        predict(config, run_of(folder), lambda view: Painter())
    painter = Painter()
    predict(replace(config, resume=True), run_of(folder), lambda view: painter)
    assert (gone / "trace.json").exists()
    assert len({ask.sample for ask in painter.drawn}) == 3


def test_a_missing_image_is_named(drawn, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(drawn, folder)
    shutil.rmtree(folder / "shapes553-local/traces/0092-seed0")
    with pytest.raises(UserError, match=r"no images of shapes553 row 92, seed 0.*--predict-only"):
        eval_main(["--images", str(folder), "--output-dir", str(tmp_path / "out")])


# --- GenEval's layout -----------------------------------------------------------------------------


def test_what_is_handed_out_lies_in_genevals_layout_and_is_judged_from_there(drawn, tmp_path):
    official = drawn / "shapes553-local/official/seed0"
    found = layout_geneval.read(official)
    assert [asked.index for asked in found] == [e.index for e in rows_of("shapes553", 6)]
    assert found[1].images[0] == official / "00092/samples/00000.png"
    line = (official / "00092/metadata.jsonl").read_text()
    assert json.loads(line) == all_rows("shapes553")[92].row
    flags = ["shapes553", "--images", str(official), "--output-dir", str(tmp_path / "out")]
    eval_main(flags)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    figures = summary["sets"]["shapes553"]["given"]["all"]
    assert (figures["final_accuracy"]["value"], figures["mean_edits"]["value"]) == (1.0, 0.0)
    assert summary["comparable"] is False
    assert summary["note"] == "not comparable: 6 of the 553 rows of shapes553, given"


def test_images_of_others_are_judged_with_several_samples_and_longer_prompts(tmp_path):
    rows = coco_rows()
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    longer = [{**row, "prompt": f"A lovely photograph of {row['prompt']}"} for row in rows]
    white = Image.new("RGB", (128, 128), "white")
    layout_geneval.write(
        tmp_path / "images",
        [
            *((i, row, 0, picture(row)) for i, row in enumerate(longer)),
            *((i, row, 1, white) for i, row in enumerate(longer)),
        ],
    )
    (tmp_path / "images/00000/grid.png").write_bytes(b"not read")
    flags = [str(path), "--images", str(tmp_path / "images"), "--reward-set", "models=drawn"]
    eval_main([*flags, "--output-dir", str(tmp_path / "out")])
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["comparable"] is True
    assert summary["sets"]["three"]["given"]["all"]["final_accuracy"]["value"] == 0.5
    lines = [json.loads(line) for line in (tmp_path / "out/results.jsonl").open()]
    assert [(r["row"], r["copy"], r["images"][0]["correct"]) for r in lines] == [
        *((0, 0, True), (0, 1, False)),
        *((1, 0, True), (1, 1, False)),
        *((2, 0, True), (2, 1, False)),
    ]
    assert lines[0]["prompt"] == "A lovely photograph of a donut"
    white.save(tmp_path / "images/00002/samples/00000.png")
    (tmp_path / "out/results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines[:2]))
    with pytest.raises(UserError, match="made with another images_sha256"):
        eval_main([*flags, "--output-dir", str(tmp_path / "out"), "--resume"])


def test_folders_that_cannot_be_judged_are_one_line(tmp_path):
    out = ["--output-dir", str(tmp_path / "out")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no images of an evaluation"):
        eval_main(["--images", str(tmp_path / "empty"), *out])
    row = coco_rows()[0]
    white = Image.new("RGB", (8, 8))
    layout_geneval.write(tmp_path / "images", [(0, row, 0, white)])
    with pytest.raises(UserError, match=r"'a donut', which is no row of shapes553.*SET --images"):
        eval_main(["--images", str(tmp_path / "images"), *out])
    (tmp_path / "images/00000/samples/00000.png").unlink()
    with pytest.raises(UserError, match=r"00000 has no samples"):
        eval_main(["--images", str(tmp_path / "images"), *out])
    (tmp_path / "images/00000/metadata.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"is no row of GenEval's \(there is no prompt\)"):
        eval_main(["--images", str(tmp_path / "images"), *out])
    with pytest.raises(ValueError, match="give one"):
        EvalConfig(predict_only=True, images=tmp_path)


def test_the_adapter_of_bagel_lora_path_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("BAGEL_LORA_PATH", str(tmp_path / "no-such-adapter"))
    with pytest.raises(UserError, match="no-such-adapter"):
        eval_main(["--limit", "1", "--device", "cpu", "--output-dir", str(tmp_path / "out")])
