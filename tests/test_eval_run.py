"""umm-reflect eval from end to end: a policy of known behaviour, a resume, a tiny random model."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from PIL import Image

from agent import trace
from agent.policy import BagelPolicy, ForcedTurns, ScriptedPolicy
from agent.types import Reflection
from eval import run as eval_run
from eval.config import EvalConfig, batches, parse_seeds
from eval.judging import Judge
from eval.run import Run, evaluate
from eval.sets import rows_of
from tests.tiny import write_tiny_checkpoint
from umm_reflect.errors import UsageError, UserError
from umm_reflect.hub import profile
from umm_reflect.images import mended_transforms
from umm_reflect.profile import ReflectionProfile, save_profile
from umm_reflect.settings import parse
from umm_reflect.shapes.render import render
from umm_reflect.shapes.sampler import scene_for

TEN = [entry.index for entry in rows_of("shapes553", 10)]
JUNK = "I would rather not."

# What each of ten rows does: its images (1: right, 0: wrong), and what is said of them.
IMAGES = ["1", "1", "1", "10", "01", "01", "01", "001", "0", "0"]
LOOKS = [
    ["10 done"],
    ["10 done"],
    ["junk"],  # right, but the form is broken
    ["5 edit", "9 done"],  # damaged
    ["3 edit", "10 done"],
    ["3 edit", "10 done"],  # the first turn is sampled twice
    ["3 edit", "10 done"],
    ["4 edit", "5 edit", "10 done"],
    ["8 done"],  # wrongly accepted
    ["junk"],
]
RETRIED = 5


class Actor(ScriptedPolicy):
    """Plays IMAGES and LOOKS. breaks_at: raise in place of that call of `say`."""

    def __init__(self, breaks_at: int | None = None):
        super().__init__(self.look, self.paint)
        self.breaks_at = breaks_at

    def say(self, asks, **how):
        if self.breaks_at is not None:
            self.breaks_at -= 1
            if self.breaks_at < 0:
                raise KeyboardInterrupt
        return super().say(asks, **how)

    def place(self, sample: str) -> int:
        return TEN.index(int(sample.split(":")[1]))

    def look(self, ask):
        place = self.place(ask.sample)
        said = LOOKS[place][ask.round]
        if said == "junk" or (place == RETRIED and ask.round == 0 and ask.attempt == 0):
            return JUNK
        score, action = said.split()
        edit = f"Mend fault number {ask.round}." if action == "edit" else ""
        return Reflection("I see it.", int(score), action, edit)

    def paint(self, ask):
        place = self.place(ask.sample)
        if IMAGES[place][ask.number] == "1":
            row = rows_of("shapes553", 10)[place].row
            return render(scene_for(row, random.Random(place)))
        return Image.new("RGB", (128, 128), (235, 230, 225 - 60 * ask.number))


PROFILE = ReflectionProfile("rl", "local", "", mended_transforms(), (128, 128))
FACTS = {
    "model_sha256": {},
    "adapter_sha256": None,
    "profiles": {"local": {}, "full": {}},
    "sets_sha256": {},
}


def make_run(tmp_path, views=("local",)) -> Run:
    facts = {**FACTS, "device": "cpu", "dtype": "float32"}
    return Run(tmp_path, dict.fromkeys(views, PROFILE), facts)


def play(tmp_path, name="out", actor=None, views=("local",), **settings):
    """(folder, report) of ten rows that the actor plays."""
    how = {"limit": 10, "batch_size": 4, "workers": 1, "output_dir": tmp_path / name, **settings}
    actor = actor or Actor()
    report = evaluate(EvalConfig(**how), make_run(tmp_path, views), lambda view: actor)
    return how["output_dir"], report


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return play(tmp_path_factory.mktemp("played"))


# --- a policy of known behaviour ------------------------------------------------------------------


def test_the_summary_is_what_a_person_works_out_by_hand(played):
    folder, _ = played
    summary = json.loads((folder / "summary.json").read_text())
    figures = summary["sets"]["shapes553"]["local"]["all"]
    by_hand = {
        "accuracy_at_0": (0.4, 10),
        "accuracy_at_1": (0.6, 10),  # three repaired, one damaged
        "accuracy_at_2": (0.7, 10),
        "accuracy_at_3": (0.7, 10),
        "accuracy_at_1_gated": (0.5, 10),
        "accuracy_at_3_gated": (0.6, 10),
        "final_accuracy": (0.7, 10),
        "repair": (4 / 6, 6),
        "damage": (1 / 4, 4),
        "protocol_valid": (0.8, 10),
        "turns_valid": (14 / 19, 19),
        "look_on_right": (6 / 7, 7),
        "look_on_wrong": (5 / 7, 7),
        "score_on_right": (65 / 7, 7),
        "score_on_wrong": (35 / 7, 7),
        "mean_edits": (0.6, 10),
        "stop_done": (0.8, 10),
        "stop_malformed": (0.2, 10),
    }
    found = {name: (figures[name]["value"], figures[name]["n"]) for name in by_hand}
    assert found == {name: (round(value, 6), n) for name, (value, n) in by_hand.items()}
    assert {name for name in figures if name.startswith("stop_")} == {"stop_done", "stop_malformed"}
    assert figures["final_accuracy"]["low"] < 0.7 < figures["final_accuracy"]["high"]


def test_a_line_says_what_was_judged_and_said_and_holds_no_time(played):
    folder, _ = played
    lines = [json.loads(line) for line in (folder / "results.jsonl").open()]
    assert [line["row"] for line in lines] == TEN
    damaged = lines[3]
    assert [image["correct"] for image in damaged["images"]] == [True, False]
    assert damaged["images"][0]["reason"] == "as asked"
    assert "missing" in damaged["images"][1]["reason"] or "0 of" in damaged["images"][1]["reason"]
    assert [(look["action"], look["score"]) for look in damaged["looks"]] == [
        ("edit", 5),
        ("done", 9),
    ]
    assert lines[RETRIED]["protocol_valid"]
    assert len(lines[RETRIED]["malformed"]) == 1
    assert (lines[9]["stop"], lines[9]["protocol_valid"]) == ("malformed", False)
    assert "seconds" not in (folder / "results.jsonl").read_text()
    times = json.loads((folder / "timing.json").read_text())["batches"]
    assert sum(batch["samples"] for batch in times) == 10
    assert sum(batch["images"] for batch in times) == 16


def test_wrong_trajectories_can_be_looked_at_and_repeated(played):
    folder, _ = played
    traces = {path.name: trace.load(path) for path in (folder / "shapes553-local/traces").iterdir()}
    first_wrong = traces[f"{TEN[3]:04d}-seed0"]
    assert first_wrong.sample == f"shapes553:{TEN[3]}:{rows_of('shapes553', 10)[3].seed}"
    assert {f"{TEN[place]:04d}-seed0" for place in (3, 8, 9)} <= set(traces)
    for sheet in ("failures", "gallery"):
        assert Image.open(folder / f"shapes553-local/{sheet}.png").width > 300
    settings = trace.read_settings(
        folder / "shapes553-local/traces" / f"{TEN[3]:04d}-seed0/image_1.png"
    )[1]
    assert (settings["seed"], settings["edit_view"], settings["max_rounds"]) == (0, "local", 3)


def test_a_limited_run_is_stamped_as_not_comparable(played, tmp_path, monkeypatch, capsys):
    summary = json.loads((played[0] / "summary.json").read_text())
    assert summary["comparable"] is False
    assert summary["profile_is"]["our_reading"] == "all of it: the checkpoint's own settings"
    assert summary["note"] == "not comparable: --limit 10"
    ten = SimpleNamespace(shapes553=tuple(rows_of("shapes553", 10)))
    monkeypatch.setattr("eval.sets.build_sets", lambda: ten)
    folder, _ = play(tmp_path, limit=None)
    assert json.loads((folder / "summary.json").read_text())["comparable"] is True
    assert "compare with nothing" not in capsys.readouterr().out


def test_both_views_are_compared_on_the_same_rows(tmp_path, capsys):
    _, report = play(tmp_path, views=("local", "full"), edit_view="both")
    assert list(report.sets["shapes553"]) == ["local", "full"]
    difference = report.full_minus_local["shapes553"]["final_accuracy"]
    assert (difference.value, difference.low, difference.high, difference.n) == (0, 0, 0, 10)
    assert "full minus local" in capsys.readouterr().out


# --- resuming and batches -------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [0, 2, 4, 7])
def test_a_killed_run_that_goes_on_gives_the_same_bytes(tmp_path, played, calls):
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, actor=Actor(breaks_at=calls))
    results = tmp_path / "out/results.jsonl"
    before = results.read_text().count("\n")
    if before:
        with results.open("a") as file:  # and the machine went down while it wrote
            file.write('{"edit_view": "local", "set": "sha')
    actor = Actor()
    play(tmp_path, actor=actor, resume=True)
    assert results.read_bytes() == (played[0] / "results.jsonl").read_bytes()
    summary = tmp_path / "out/summary.json"
    assert summary.read_bytes() == (played[0] / "summary.json").read_bytes()
    assert len({ask.sample for ask in actor.drawn}) == 10 - before


def test_a_line_that_is_missing_is_made_again(tmp_path, played):
    folder, _ = play(tmp_path)
    path = folder / "results.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:-1]))
    play(tmp_path, resume=True)
    assert path.read_bytes() == (played[0] / "results.jsonl").read_bytes()


@pytest.mark.parametrize("batch_size", [1, 3, 10])
def test_the_batch_size_changes_no_byte(tmp_path, played, batch_size):
    folder, _ = play(tmp_path, batch_size=batch_size)
    for name in ("results.jsonl", "summary.json"):
        assert (folder / name).read_bytes() == (played[0] / name).read_bytes()


def test_results_are_neither_mixed_nor_written_over(tmp_path):
    folder, _ = play(tmp_path)
    with pytest.raises(UsageError, match="holds results"):
        play(tmp_path)
    with pytest.raises(UserError, match="made with another max_rounds"):
        play(tmp_path, resume=True, max_rounds=2)
    run = make_run(tmp_path)
    other = Run(tmp_path, run.profiles, {**run.facts, "model_sha256": {"ema.safetensors": "ab"}})
    config = EvalConfig(limit=10, output_dir=folder, resume=True)
    with pytest.raises(UserError, match="another model_sha256"):
        evaluate(config, other, lambda view: Actor())
    play(tmp_path, overwrite=True, max_rounds=1)
    summary = json.loads((folder / "summary.json").read_text())
    assert "accuracy_at_2" not in summary["sets"]["shapes553"]["local"]["all"]


def test_a_finished_run_is_reported_again_without_a_model(tmp_path):
    folder, _ = play(tmp_path)
    (folder / "summary.json").unlink()

    def none(view):
        raise AssertionError("nothing is left to generate")

    config = EvalConfig(limit=10, output_dir=folder, workers=1, resume=True)
    evaluate(config, make_run(tmp_path), none)
    assert (folder / "summary.json").exists()


def test_batches_are_of_one_seed_and_nearly_equal_and_hold_every_sample_once():
    config = EvalConfig(("compound", "hard"), seeds="0,7", samples_per_prompt=2, batch_size=512)
    made = list(batches(config, ["local"]))
    assert [len(batch) for batch in made] == [200, 200, 300, 300, 300, 300]
    assert all(len({(s.set, s.seed) for s in batch}) == 1 for batch in made)
    names = [(s.name, s.seed) for batch in made for s in batch]
    assert len(set(names)) == len(names) == 2 * 2 * 400
    first = made[0][0]
    assert first.name == f"compound:0:{first.entry.seed}"
    assert made[0][1].name == f"compound:0:{first.entry.seed}:1"


def test_a_limit_takes_rows_from_all_over_the_set():
    rows = rows_of("shapes553", 12)
    assert len({entry.family for entry in rows}) == 6
    assert len(rows_of("hard", 1000)) == 300


def test_many_processes_give_the_verdicts_of_one():
    entries = rows_of("shapes553", 40)
    rows = [entry.row for entry in entries for _ in range(2)]
    images = [
        render(scene_for(entry.row, random.Random(entry.index)))
        if right
        else Image.new("RGB", (128, 128), "white")
        for entry in entries
        for right in (True, False)
    ]
    with Judge(2) as many, Judge(1) as one:
        verdicts = many(images, rows)
        assert many._pool is not None
        assert verdicts == one(images, rows)
        for process in many._pool._processes.values():
            process.kill()
        with pytest.raises(UserError, match=r"one of 2 judging processes died.*fewer --workers"):
            many(images, rows)
    assert [verdict.correct for verdict in verdicts] == [True, False] * 40


# --- what was typed -------------------------------------------------------------------------------


def test_sets_and_seeds_are_read_from_the_command_line():
    words = ["shapes553", "hard", "--seeds", "0,1,2", "--edit-view=both", "--batch-size=256"]
    config = parse(EvalConfig, words, "umm-reflect eval")
    assert config.sets == ("shapes553", "hard")
    assert parse_seeds(config.seeds) == [0, 1, 2]
    assert (config.edit_view, config.batch_size, config.max_rounds) == ("both", 256, 3)
    assert parse(EvalConfig, [], "umm-reflect eval").sets == ("shapes553",)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("shapes554", "shapes554"),
        ("--seeds 0,0", "different whole numbers"),
        ("--seeds 1-3", "different whole numbers"),
        ("--limit 0", "--limit is 0"),
        ("--steps 0", "--steps is 0"),
        ("--batch-size 0", "--batch-size is 0"),
        ("hard hard", "name each once"),
        ("--resume --overwrite", "give one"),
    ],
)
def test_what_is_typed_wrongly_is_one_line(words, says):
    with pytest.raises(UsageError, match=says):
        parse(EvalConfig, words.split(), "umm-reflect eval")


# --- a model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def own_hashes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_random_model_is_evaluated_from_the_command_line(tiny, tmp_path, capsys):
    flags = f"compound --model {tiny} --limit 2 --steps 3 --max-tokens 16 --device cpu".split()
    assert eval_run.main([*flags, "--output-dir", str(tmp_path / "once")]) == 0
    assert "compound, edit view local: 2 rows, seeds 0" in capsys.readouterr().out
    once = (tmp_path / "once/results.jsonl").read_bytes()
    assert [json.loads(line)["row"] for line in once.splitlines()] == [0, 50]
    eval_run.main([*flags, "--batch-size", "1", "--output-dir", str(tmp_path / "again")])
    assert (tmp_path / "again/results.jsonl").read_bytes() == once
    facts = json.loads((tmp_path / "once/env.json").read_text())
    assert len(facts["model_sha256"]["ema.safetensors"]) == 64
    assert facts["profiles"]["local"]["first"]["points"] == 4
    assert set(facts["versions"]) >= {"umm-reflect", "torch", "numpy", "python"}
    config = parse(EvalConfig, ["--config", str(tmp_path / "once/config.yaml")], "eval")
    assert (config.sets, config.limit, config.resume) == (("compound",), 2, False)


def test_an_adapter_is_evaluated_in_the_edit_view_it_was_trained_in(tiny, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    save_profile(replace(profile(tiny), edit_view="full"), adapter)
    config = EvalConfig(model=str(tiny), device="cpu")
    assert list(Run.prepare(config).profiles) == ["local"]
    assert list(Run.prepare(replace(config, adapter=str(adapter))).profiles) == ["full"]


def test_real_edits_of_a_forced_model_are_drawn_and_judged(tiny, tmp_path):
    from umm_reflect import Bagel

    out, few = tmp_path / "out", {"limit": 1, "steps": 3, "max_rounds": 1, "device": "cpu"}
    config = EvalConfig(("hard",), model=str(tiny), edit_view="both", output_dir=out, **few)
    run = Run.prepare(config)
    bagel = Bagel.from_pretrained(str(tiny), device="cpu")
    policies = {v: ForcedTurns(BagelPolicy(bagel, p), 140) for v, p in run.profiles.items()}
    report = evaluate(config, run, policies.__getitem__)
    for view in ("local", "full"):
        figures = report.sets["hard"][view].all
        assert figures["protocol_valid"].value == 1.0
        assert figures["mean_edits"].value > 0
        assert figures["final_accuracy"].value == 0.0
