"""umm-reflect collect: which run becomes which line, and that the SFT stage reads the lines."""

from __future__ import annotations

import json
import random

import pytest
from PIL import Image

from agent.policy import ScriptedPolicy
from agent.types import Reflection
from eval.collect_cli import CollectConfig, collect, start
from eval.collect_cli import main as collect_main
from eval.collect_kinds import correction, edit_for
from eval.collect_prompts import Wanted, samples
from eval.rewards.registry import build
from eval.verdict import Verdict
from sft.data import read_dataset
from sft.data_cli import main as data_main
from sft.train import main as sft_main
from umm_reflect.errors import UsageError, UserError
from umm_reflect.hub import profile
from umm_reflect.shapes.prompts import clause, plain_row
from umm_reflect.shapes.render import render
from umm_reflect.shapes.sampler import scene_for
from umm_reflect.shapes.sets import build_sets

ROW = plain_row("counting", [clause("star", 2, "red")])
# What each of seven runs does: its images (1: right, 0: wrong), and what is said of them.
RUNS = {
    "accepted": ("1", ["10 done"]),
    "repaired": ("01", ["4 edit", "10 done"]),
    "wrong stop": ("0", ["9 done"]),
    "wrong look": ("10", ["3 edit", "9 done"]),
    "late stop": ("001", ["4 edit", "8 done"]),
    "unrepaired": ("0000", ["1 edit", "2 edit", "3 edit", "4 edit"]),
    "malformed": ("1", ["junk"]),
}
NAMES = list(RUNS)
WANTED = [Wanted(f"collect:{i}", "two red stars", dict(ROW)) for i in range(len(RUNS))]


class Actor(ScriptedPolicy):
    """Plays RUNS. breaks_at: raise in place of that call of `draw`."""

    def __init__(self, breaks_at: int | None = None):
        super().__init__(self.look, self.paint)
        self.breaks_at = breaks_at

    def draw(self, asks, **how):
        if self.breaks_at is not None:
            self.breaks_at -= 1
            if self.breaks_at < 0:
                raise KeyboardInterrupt
        return super().draw(asks, **how)

    def look(self, ask):
        said = RUNS[NAMES[int(ask.sample.split(":")[1])]][1][ask.round]
        if said == "junk":
            return "I would rather not."
        score, action = said.split()
        edit = f"Mend fault number {ask.round}." if action == "edit" else ""
        return Reflection("I see it.", int(score), action, edit)

    def paint(self, ask):
        if RUNS[NAMES[int(ask.sample.split(":")[1])]][0][ask.number] == "1":
            return render(scene_for(ROW, random.Random(7)))
        return Image.new("RGB", (128, 128), (235, 230, 225 - 60 * ask.number))


def play(folder, actor=None, reward=None, **settings):
    config = CollectConfig(output_dir=folder, batch_size=3, workers=1, **settings)
    start(config, {})
    actor = actor or Actor()
    own = profile("pretrained/bagel-nano-shapes")
    reward = reward or build({"reward": "shapes", "workers": 1})
    return collect(config, WANTED, reward, own, lambda: actor)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("played") / "out"
    return folder, play(folder)


def lines(folder, kind):
    return [json.loads(line) for line in (folder / f"{kind}.jsonl").open()]


def test_each_run_is_counted_under_what_became_of_it(played):
    folder, counts = played
    by_hand = {"accepted": 1, "repaired": 1, "corrected": 3, "unrepaired": 1, "malformed": 1}
    assert {kind: n for kind, n in counts.items() if n} == by_hand
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["samples"], summary["learned_from"]) == (7, 5)
    assert summary["right_first_images"] == 3
    log = [json.loads(line) for line in (folder / "log/verdicts.jsonl").open()]
    assert [entry["sample"] for entry in log] == [one.name for one in WANTED]
    assert log[1]["right"] == [False, True]
    assert log[1]["verdicts"][1]["evidence"]["detections"]


def test_a_repaired_run_teaches_its_looks_and_only_its_right_image(played):
    [line] = lines(played[0], "repaired")
    assert [image.get("learn", True) for image in line["images"]] == [False, True]
    assert [(turn["action"], turn.get("learn", True)) for turn in line["turns"]] == [
        ("edit", True),
        ("done", True),
    ]
    assert (line["prompt"], line["subtype"]) == ("two red stars", "repaired")
    assert "open" not in line


def test_a_bad_decision_is_replaced_by_what_the_judge_says(played):
    wrong_stop, wrong_look, late_stop = lines(played[0], "corrected")
    assert wrong_stop["turns"] == [
        {
            "thinking": "Asked: two red stars. 0 of 2 red stars.",
            "score": 0,
            "action": "edit",
            "edit": "add two red stars",
        }
    ]
    assert wrong_stop["open"] is True
    assert [image.get("learn", True) for image in wrong_stop["images"]] == [False]
    assert wrong_look["turns"] == [
        {"thinking": "Asked: two red stars. The image shows it.", "score": 10, "action": "done"}
    ]
    assert [image.get("learn", True) for image in wrong_look["images"]] == [True]
    assert [turn.get("learn", True) for turn in late_stop["turns"]] == [False, True]
    assert [image["learn"] for image in late_stop["images"]] == [False, False]


def test_the_sft_stage_reads_it_as_a_whole_and_by_kind(played, capsys):
    folder, _ = played
    assert data_main(["check", str(folder)]) == 0
    assert "5 of 5 rows are good" in capsys.readouterr().out
    found = read_dataset(folder)
    assert {record.subtype for record in found.records} == {"accepted", "repaired", "corrected"}
    assert len(read_dataset(folder / "corrected.jsonl").records) == 3
    words = ["--data", str(folder), "--dry-run", "--device", "cpu", "--workers", "0"]
    assert sft_main(words) == 0
    assert "4 trajectories to learn from, 1 held out" in capsys.readouterr().out


@pytest.mark.parametrize("calls", [0, 2, 5, 8])
def test_a_killed_run_that_goes_on_gives_the_same_files(tmp_path, played, calls):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        play(out, Actor(breaks_at=calls))
    if calls == 5:  # and the machine went down between a line and the log
        with (out / "accepted.jsonl").open("a") as file:
            file.write('{"uid": "collect-3-seed0"}\n{"uid": "col')
    play(out, resume=True)
    names = [p.relative_to(played[0]) for p in played[0].rglob("*.jsonl")]
    names += [p.relative_to(played[0]) for p in played[0].rglob("*.png")]
    assert len(names) == 4 + 1 + 2 + 1 + 1 + 2
    for name in names:
        assert (out / name).read_bytes() == (played[0] / name).read_bytes()


def test_data_is_neither_mixed_nor_written_over(tmp_path):
    play(tmp_path / "out")
    with pytest.raises(UsageError, match="holds collected data"):
        play(tmp_path / "out")
    with pytest.raises(UserError, match="another temperature"):
        play(tmp_path / "out", resume=True, temperature=0.5)
    play(tmp_path / "out", overwrite=True, temperature=0.5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    with pytest.raises(UserError, match="holds other files"):
        play(tmp_path / "mine", overwrite=True)


class Grader:
    """A judge without a yes or no: whether there is red in an image."""

    def score(self, images, rows):
        red = [sum(p[0] > 200 > 2 * p[1] for p in image.get_flattened_data()) for image in images]
        return [Verdict(None, 0.9 if n else 0.2, f"{n} red pixels", value=n) for n in red]


def test_a_judge_without_a_yes_or_no_needs_a_score_from_which_on_it_is_right(tmp_path):
    with pytest.raises(UsageError, match="says neither right nor wrong"):
        play(tmp_path / "a", reward=Grader())
    counts = play(tmp_path / "b", reward=Grader(), right_at=0.8)
    assert (counts["accepted"], counts["repaired"], counts["corrected"]) == (1, 1, 3)
    stop = lines(tmp_path / "b", "corrected")[0]["turns"][0]
    assert stop["thinking"] == "Asked: two red stars. The image does not show it."
    assert stop["edit"] == "change the image until it shows two red stars"


class Broken(Grader):
    def score(self, images, rows):
        return [Verdict.failed("no answer") for _ in images]


def test_an_image_that_was_not_judged_is_left_out_and_counted(tmp_path):
    counts = play(tmp_path / "out", reward=Broken())
    assert (counts["unjudged"], counts["malformed"]) == (6, 1)
    assert not list((tmp_path / "out").glob("*.jsonl"))


@pytest.mark.parametrize(
    ("reason", "edit"),
    [
        ("1 of 2 red stars", "add a red star"),
        ("0 of 3 vases; cow missing", "add three vases"),
        ("orange cow missing", "add an orange cow"),
        ("3 red stars instead of 2", "remove a red star"),
        ("5 vases instead of at most 2", "remove three vases"),
        ("1 vase instead of none", "remove every vase"),
        ("star is blue, not red", "turn the blue star red"),
        ("dog is not left of red cow", "move the dog so that it is left of the red cow"),
        ("an object has no recognisable shape", "remove the malformed shape"),
        ("the cow is made of plastic", "mend this: the cow is made of plastic"),
    ],
)
def test_a_reason_in_the_words_of_the_rules_becomes_an_instruction(reason, edit):
    row = {"include": [clause("star", 2, "red"), {"class": "vase", "count": 3}]}
    assert edit_for(reason, row) == edit


def test_a_prompt_with_tags_of_the_protocol_makes_no_line(tmp_path):
    said = correction("a [SCORE] of\nstars", Verdict(False, 0.3, ""), {}, right=False)
    assert said.thinking == "Asked: a [SCORE] of stars. The image does not show it."
    odd = [Wanted(one.name, one.prompt, {**ROW, "prompt": "an [EDIT] tag"}) for one in WANTED]
    config = CollectConfig(output_dir=tmp_path / "out", workers=1)
    start(config, {})
    own = profile("pretrained/bagel-nano-shapes")
    counts = collect(config, odd, build({"reward": "shapes", "workers": 1}), own, Actor)
    assert (counts["unsayable"], counts["corrected"], counts["accepted"]) == (3, 0, 1)


def test_prompts_by_lot_or_of_a_file_are_never_those_of_a_test(tmp_path):
    hard = samples("shapes-hard", 3, 2, 0, "shapes")
    assert [one.name for one in hard] == [
        *("collect:0", "collect:0:1", "collect:1", "collect:1:1", "collect:2", "collect:2:1"),
    ]
    assert hard[0].row == hard[1].row
    path = tmp_path / "prompts.txt"
    path.write_text("a cow\n\na dog\n")
    assert [one.row for one in samples(str(path), None, 1, 0, "ocr")] == [
        {"prompt": "a cow"},
        {"prompt": "a dog"},
    ]
    with pytest.raises(UserError, match="line 1: "):
        samples(str(path), None, 1, 0, "geneval")
    test = build_sets().shapes553[200].row
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n" + json.dumps({**test, "prompt": "other words"}) + "\n")
    with pytest.raises(UserError, match="line 2: a test set asks for this"):
        samples(str(rows), None, 1, 0, "shapes")
    path.write_text("a photo of a bench\n")
    with pytest.raises(UserError, match="line 1: a test set asks for this"):
        samples(str(path), None, 1, 0, "ocr")
    with pytest.raises(UsageError, match="does not exist"):
        samples(str(tmp_path / "none.txt"), None, 1, 0, "ocr")


def test_the_model_of_this_repository_collects_from_the_command_line(tmp_path, capsys):
    words = "--prompts shapes-hard --count 2 --steps 3 --max-rounds 1 --workers 1 --device cpu"
    out = tmp_path / "out"
    assert collect_main([*words.split(), "--output-dir", str(out)]) == 0
    assert f"of 2 trajectories to learn from: {out}" in capsys.readouterr().out
    before = (out / "log/verdicts.jsonl").read_bytes()
    assert before.count(b"\n") == 2
    assert collect_main([*words.split(), "--output-dir", str(out), "--resume"]) == 0
    assert (out / "log/verdicts.jsonl").read_bytes() == before
