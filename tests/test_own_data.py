"""Our own schemas: JSONL and its nasty rows, traces of the agent; held-out split and quarantine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from agent import trace
from agent.loop import run_episodes
from agent.policy import ScriptedPolicy
from agent.types import Reflection
from sft.data import (
    BadRow,
    Picture,
    Quarantine,
    Record,
    Rule,
    Violation,
    read_dataset,
    schema_of,
    split,
)
from sft.data_convert import example_records, with_plan, write_example
from sft.data_own import safe_name, write_jsonl
from umm_reflect.errors import UserError


def line(uid: str, **changes) -> dict:
    made = {
        "uid": uid,
        "task": "t2i",
        "prompt": "two red circles",
        "images": ["a.png", "b.png"],
        "turns": [
            {"thinking": "One circle.", "score": 5, "action": "edit", "edit": "Add a circle."},
            {"thinking": "Two circles.", "score": 10, "action": "done"},
        ],
    }
    return {**made, **changes}


def turns(**changes) -> list[dict]:
    first, last = line("")["turns"]
    return [{**first, **changes}, last]


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("a", "b"):
        Image.new("RGB", (40, 30), "red").save(tmp_path / f"{name}.png")
    (tmp_path / "corrupt.png").write_bytes((tmp_path / "a.png").read_bytes()[:50])
    Image.new("L", (20_000, 8)).save(tmp_path / "wide.png")
    return tmp_path


def write(folder: Path, lines: list) -> Path:
    texts = [entry if isinstance(entry, str) else json.dumps(entry) for entry in lines]
    (folder / "trajectories.jsonl").write_text("\n".join(texts) + "\n")
    return folder


def test_twelve_nasty_rows_are_named_by_line_and_rule(folder):
    nasty = [
        line("good"),
        json.dumps(line("cut"))[:100],
        line("corrupt", images=["corrupt.png", "b.png"]),
        line("wide", images=["wide.png", "b.png"]),
        line("action", turns=turns(action="undo")),
        line("unfinished", turns=[*turns()[:1], turns()[0]]),
        line("payload", turns=turns(edit="")),
        line("missing", images=["a.png", "nowhere.png"]),
        line("absolute", images=["/tmp/a.png", "../b.png"]),
        line("good", prompt="again"),
        line("score", turns=turns(score=11)),
        line("key", promt="two", task="video"),
    ]
    found = read_dataset(write(folder, nasty), "decode")
    assert [record.uid for record in found.records] == ["good"]
    assert (found.rows, found.bad) == (12, 11)
    assert [(v.where.partition(":")[2], v.uid, v.rule) for v in found.violations] == [
        ("2", "", Rule.UNREADABLE),
        ("3", "corrupt", Rule.IMAGE_CORRUPT),
        ("4", "wide", Rule.IMAGE_TOO_LARGE),
        ("5", "action", Rule.ACTION),
        ("6", "unfinished", Rule.LAST_NOT_DONE),
        ("7", "payload", Rule.PAYLOAD),
        ("8", "missing", Rule.IMAGE_MISSING),
        ("9", "absolute", Rule.PATH),
        ("9", "absolute", Rule.PATH),
        ("10", "good", Rule.UID),
        ("11", "score", Rule.TEXT),
        ("12", "key", Rule.UNKNOWN_KEY),
        ("12", "key", Rule.TASK),
    ]
    text = [str(violation) for violation in found.violations]
    assert text[2].startswith("trajectories.jsonl:4 (wide): image_too_large: image 0: 20000x8 px")
    assert text[10] == "trajectories.jsonl:11 (score): text: score_range: turn 0"
    assert text[11].endswith("unknown_key: 'promt'; did you mean 'prompt'?")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"images": ["a.png"]}, Rule.LENGTHS),
        ({"task": "edit", "images": ["a.png"], "turns": turns()[1:]}, Rule.NO_IMAGE),
        ({"task": "edit", "plan": turns()[0]}, Rule.TASK),
        ({"prompt": ""}, Rule.PROMPT),
        ({"uid": 3}, Rule.UID),
        ({"turns": turns(thinking="")}, Rule.TEXT),
        ({"turns": turns(score="5")}, Rule.TEXT),
        ({"turns": turns(edit="Use [SCORE] 3")}, Rule.TEXT),
        ({"turns": turns(text="<think>\nother\n</think>")}, Rule.TEXT),
        ({"turns": "none"}, Rule.UNREADABLE),
        ({"turns": turns(lern=False)}, Rule.UNKNOWN_KEY),
        ({"prompt": "half \ud83d"}, Rule.UNREADABLE),
        ({"turns": turns(thinking="half \udc00")}, Rule.UNREADABLE),
        ({"images": ["a\0.png", "b.png"]}, Rule.IMAGE_MISSING),
        ({"images": [".", "b.png"]}, Rule.IMAGE_MISSING),
        ({"images": [None, "b.png"]}, Rule.UNREADABLE),
        ({"turns": turns(edit=["Add one."])}, Rule.TEXT),
        ({"turns": turns(score=float("nan"))}, Rule.TEXT),
        ({"images": [{"file": "a.png", "sha256": "0" * 64}, "b.png"]}, Rule.IMAGE_HASH),
    ],
)
def test_every_other_rule_of_a_line_has_its_name(folder, changes, rule):
    found = read_dataset(write(folder, [{**line("x"), **changes}]))
    assert found.records == ()
    assert rule in {violation.rule for violation in found.violations}


@pytest.mark.parametrize("text", ["[" * 100_000, "3", "null", '{"uid": "x"}', "\\x80"])
def test_a_line_that_is_no_trajectory_at_all_is_unreadable(folder, text):
    found = read_dataset(write(folder, [text, text.replace("x", "y")]))
    assert [violation.rule for violation in found.violations] == [Rule.UNREADABLE] * 2


def test_a_very_large_square_is_refused_before_it_is_decoded(folder):
    Image.new("1", (20_000, 20_000)).save(folder / "square.png")
    found = read_dataset(write(folder, [line("x", images=["square.png", "b.png"])]), "decode")
    assert [v.rule for v in found.violations] == [Rule.IMAGE_TOO_LARGE]


def test_a_picture_that_goes_bad_after_the_check_is_an_error_that_says_so(folder):
    record = read_dataset(write(folder, [line("x")])).records[0]
    assert record.images[0].load().size == (40, 30)
    (folder / "a.png").unlink()
    with pytest.raises(BadRow, match=r"image_missing: a\.png does not exist") as raised:
        record.images[0].load()
    assert raised.value.rule is Rule.IMAGE_MISSING


def test_an_image_is_measured_as_it_lies_when_it_is_upright(folder):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 30)).save(folder / "side.jpg", exif=exif)
    record = read_dataset(write(folder, [line("x", images=["side.jpg", "b.png"])])).records[0]
    assert [image.size for image in record.images] == [(40, 30), (30, 40)]
    assert record.images[0].load().size == (30, 40)


def test_threads_change_neither_order_nor_findings(folder):
    lines = [
        line(f"u{k}", images=["a.png", "corrupt.png" if k % 3 == 0 else "b.png"]) for k in range(30)
    ]
    write(folder, lines)
    one, four = (read_dataset(folder, "decode", workers=workers) for workers in (1, 4))
    assert one == four
    assert len(one.violations) == 10


def test_rows_that_turn_out_bad_while_a_run_goes_on_end_it_only_when_they_are_many():
    quarantine = Quarantine(total=200, max_bad=0.01)
    for uid in ("a", "a", "b"):
        quarantine.add(Violation("row", uid, Rule.IMAGE_CORRUPT, "cut short"))
    with pytest.raises(UserError, match=r"3 of 200 rows turned out bad, more than 1.00%"):
        quarantine.add(Violation("row", "c", Rule.IMAGE_CORRUPT, "cut short"))


def test_the_example_reads_back_as_it_was_made_and_moves_with_its_folder(tmp_path):
    assert write_example(tmp_path / "made") == 8
    (tmp_path / "made").rename(tmp_path / "moved")
    found = read_dataset(tmp_path / "moved", "decode")
    assert found.violations == ()
    made = example_records()
    assert [(r.uid, r.task, r.prompt, r.turns) for r in found.records] == [
        (r.uid, r.task, r.prompt, r.turns) for r in made
    ]
    assert [r.task for r in made].count("edit") == 2
    for here, there in zip(found.records, made, strict=True):
        assert [i.learn for i in here.images] == [i.learn for i in there.images]
        assert [i.read() for i in here.images] == [i.data for i in there.images]
    text = (tmp_path / "moved" / "trajectories.jsonl").read_text()
    assert str(tmp_path) not in text


def test_a_folder_that_holds_something_is_not_written_into(tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(UserError, match="holds something already"):
        write_example(tmp_path)


def test_a_plan_is_added_before_the_first_image_and_names_move_by_one():
    record = example_records(1)[0]
    planned = with_plan(record)
    assert planned.turns[0].reflection == Reflection(
        "I draw what is asked for.", 0, "edit", record.prompt
    )
    assert "[SOURCE_IMAGE] None\n" in planned.turns[0].text
    assert "Round#1\n" in planned.turns[1].text
    assert [said.reflection for said in planned.turns[1:]] == [s.reflection for s in record.turns]
    assert with_plan(planned) is planned


def test_a_uid_becomes_a_safe_file_name():
    assert safe_name("shapes-0001") == "shapes-0001"
    assert safe_name("../a/b").startswith("_a_b-")
    assert safe_name("a/b") != safe_name("a_b")


# --- traces ---------------------------------------------------------------------------------------


WRONG = Reflection("One circle.", 4, "edit", "Add a circle.")
RIGHT = Reflection("Two circles.", 10, "done", "")


def run(script: list, folder: Path, layout="rl", source=None, rounds: int = 3) -> None:
    policy = ScriptedPolicy(
        script,
        lambda ask: Image.new("RGB", (32, 32), (50 * ask.number, 0, 0)),
        layout=layout,
        system_prompt="Look.",
    )
    [trajectory] = run_episodes(policy, ["two red circles"], max_rounds=rounds, sources=[source])
    trace.save(trajectory, folder, trace.About("scripted"))


def test_the_runs_of_the_agent_are_data(tmp_path):
    run([WRONG, RIGHT], tmp_path / "draw")
    run([WRONG, RIGHT], tmp_path / "edit", source=Image.new("RGB", (48, 32), "blue"))
    run([WRONG, WRONG, RIGHT], tmp_path / "plan", layout="sft")
    run(["no form", WRONG, RIGHT], tmp_path / "again")  # its first try is left out
    found = read_dataset(tmp_path, "decode")
    assert (found.schema, found.violations) == ("traces", ())
    about = {r.uid: (r.task, r.planned, len(r.images), len(r.turns)) for r in found.records}
    assert about == {
        "again": ("t2i", False, 2, 2),
        "draw": ("t2i", False, 2, 2),
        "edit": ("edit", False, 2, 2),
        "plan": ("t2i", True, 2, 3),
    }
    edit = found.records[2]
    assert edit.turns[0].text.endswith("[SOURCE_IMAGE] given\n</think>\n[EDIT] Add a circle.")
    assert edit.images[0].load().size == (48, 32)
    write_jsonl(found.records, tmp_path / "jsonl")
    assert [r.turns for r in read_dataset(tmp_path / "jsonl").records] == [
        r.turns for r in found.records
    ]
    assert [r.uid for r in read_dataset(tmp_path / "draw").records] == ["draw"]


def test_a_run_that_did_not_end_well_is_left_out_with_the_reason(tmp_path):
    run(["no form", "no form"], tmp_path / "a")
    run([WRONG, RIGHT], tmp_path / "b", rounds=0)
    run([WRONG, RIGHT], tmp_path / "c")
    (tmp_path / "c" / "trace.json").write_text("{")
    run([WRONG, RIGHT], tmp_path / "d")
    (tmp_path / "d" / "image_1.png").unlink()
    found = read_dataset(tmp_path)
    assert found.records == ()
    assert [(v.where, v.rule) for v in found.violations] == [
        ("a", Rule.MALFORMED_TURN),
        ("a", Rule.LAST_NOT_DONE),
        ("b", Rule.LAST_NOT_DONE),
        ("c", Rule.UNREADABLE),
        ("d", Rule.IMAGE_MISSING),
    ]


def split_shares(records, share):
    train, held_out = split(records, share)
    return len(train), len(held_out)


# --- the held-out split ---------------------------------------------------------------------------


def records(count: int) -> list[Record]:
    return [Record(f"uid-{k}", "t2i", "x", (), (Picture(),)) for k in range(count)]


def test_whole_trajectories_are_held_out_by_their_uid():
    some = records(100)
    train, held_out = split(some, 0.1)
    assert (len(train), len(held_out)) == (90, 10)
    assert {r.uid for r in train} | {r.uid for r in held_out} == {r.uid for r in some}
    backwards = split(some[::-1], 0.1)
    assert {r.uid for r in backwards[1]} == {r.uid for r in held_out}
    assert {r.uid for r in split(some, 0.1, seed=1)[1]} != {r.uid for r in held_out}
    more = split(records(110), 0.1)[1]
    assert len({r.uid for r in more} & {r.uid for r in held_out}) >= 8


def test_a_small_set_holds_out_one_and_never_all():
    assert split_shares(records(8), 0.02) == (7, 1)
    assert split_shares(records(2), 0.9) == (1, 1)
    assert split_shares(records(1), 0.5) == (1, 0)
    assert split_shares(records(8), 0) == (8, 0)
    with pytest.raises(ValueError, match=r"held-out share is 1; give 0 or more"):
        split(records(8), 1)


def test_what_is_no_dataset_says_what_one_is(tmp_path):
    with pytest.raises(UserError, match=r"holds no trajectories. Expected trajectory_parquet"):
        schema_of(tmp_path)
    with pytest.raises(UserError, match=r"does not exist. Name a folder"):
        schema_of(tmp_path / "nowhere")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no rows"):
        read_dataset(tmp_path)


def test_what_is_not_learned_stays_so(folder):
    entry = line("x", images=["a.png", {"file": "b.png", "learn": False}], turns=turns(learn=False))
    record = read_dataset(write(folder, [entry])).records[0]
    assert [image.learn for image in record.images] == [True, False]
    assert [said.learn for said in record.turns] == [False, True]
    write_jsonl([replace(record, uid="y")], folder / "again")
    again = read_dataset(folder / "again").records[0]
    assert again.turns == record.turns
    assert [image.learn for image in again.images] == [True, False]
