"""The release's schema: what its rows become, and the name of every rule that a bad one breaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft import data_hub, data_release
from sft.data import Picture, Rule, expected, read_dataset, scan
from sft.data_convert import write_release
from sft.data_own import write_jsonl
from sft.data_release import read_row, split_controller
from tests import released
from umm_reflect.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return released.write_released(tmp_path_factory.mktemp("released"))


def read(row):
    return read_row(row, lambda step, sha: Picture(data=row["step_image_list"][step], sha256=sha))


def test_forty_trajectories_and_the_listed_anchors_are_read_without_a_complaint(folder):
    found = read_dataset(folder, "decode")
    assert found.violations == ()
    assert (found.schema, found.rows, found.bad) == ("release", 43, 0)
    assert [record.uid for record in found.records[:3]] == ["t2i-000", "edit-000", "t2i-001"]
    assert [record.uid for record in found.anchors] == ["anchor-0", "anchor-2", "anchor-4"]
    images = [image for record in found.records for image in record.images]
    assert len(images) == 39 + 39 + 20
    assert found.records[26].images[1].read() == released.png(7 * 13 + 1)


def test_the_edit_moves_out_of_the_think_block():
    record, problems = read(released.row(0, "edit"))
    assert problems == []
    assert [said.text for said in record.turns] == [
        "<think>\n[CURRENT_ROUND] Round#0\n[SCORE] 0/10\n[ACTION] edit\n"
        "[THINKING] I look,\nround 0.\n[SOURCE_IMAGE] given\n</think>\n[EDIT] Edit 0 of edit 0.",
        "<think>\n[CURRENT_ROUND] Round#1\n[SCORE] 10/10\n[ACTION] done\n"
        "[THINKING] I look,\nround 1.\n[SOURCE_IMAGE] Image #1\n</think>\n[EDIT] None",
    ]


def test_an_edit_that_the_stored_text_cut_off_is_whole_again():
    record, problems = read(released.row(3, "t2i"))
    assert problems == []
    assert record.turns[0].text.endswith(f"</think>\n[EDIT] {released.LONG}")
    assert record.payload_sources == ("render_truncated",)
    record, _ = read(released.row(4, "edit"))
    assert record.payload_sources == ("exact", "whitespace_normalized")
    assert record.turns[1].reflection.edit == "Make it  blue."


def test_a_planned_progression_begins_with_its_plan_and_leaves_repairs_out():
    record, problems = read(released.row(8, "t2i"))
    assert problems == []
    plan = "Milestone plan: m1: Edit 0 of t2i 8. | m2: Edit 1 of t2i 8."
    assert record.plan == plan
    assert f"\n[THINKING] {plan}\nI look,\nround 0.\n" in record.turns[0].text
    assert "Milestone" not in record.turns[1].text
    other, _ = read(released.row(8, "edit"))
    assert other.plan == ""


def test_the_stored_system_prompt_is_brought_up_to_date():
    assert (
        data_release.system_prompt(released.STORED_SYSTEM, released.PROMPT_FILE)
        == released.TRAINED_SYSTEM
    )
    has_it = f"{released.STORED_SYSTEM}\nA planned progression begins with its plan."
    assert data_release.system_prompt(has_it, released.PROMPT_FILE) == released.TRAINED_SYSTEM
    with pytest.raises(UserError, match="3 lines; line 3 and line 7"):
        data_release.system_prompt(released.STORED_SYSTEM, "a\nb\nc")
    with pytest.raises(UserError, match=r"no .or a second. format sentence"):
        data_release.system_prompt("Draw.", released.PROMPT_FILE)


@pytest.mark.parametrize(
    ("stored", "full", "source"),
    [
        ("Add a dog.", "Add a dog.", "exact"),
        ("Add a dog.", "Add  a\ndog.", "whitespace_normalized"),
        ("Add a", "Add a dog.", "render_truncated"),
        ("x" * 600, "x" * 700, "render_truncated"),
        ("x" * 601, "x" * 700, "other_mismatch"),
        ("Add a dog.", "Add a", "other_mismatch"),
        ("a dog.", "Add a dog.", "other_mismatch"),
    ],
)
def test_how_a_stored_edit_holds_the_whole_one(stored, full, source):
    assert data_release.payload_source(stored, full) == source


def test_a_plan_has_two_milestones_or_more_that_count_from_one():
    def step(kind, index):
        return {
            "transition_kind": kind,
            "milestone_index": index,
            "edit_instruction": f" e{index} ",
        }

    first, second = step("planned_initial", 1), step("planned_transition", 2)
    repair = step("corrective_repair", 1)
    plan = "Milestone plan: m1: e1 | m2: e2"
    assert data_release.milestone_plan([first, repair, second]) == plan
    for steps in ([first], [first, repair], [second, first], [first, step("planned_initial", 3)]):
        with pytest.raises(ValueError, match=r"milestones \[.*\]; expected 1, 2, ... and at least"):
            data_release.milestone_plan(steps)


def test_rounds_and_sources_are_those_of_the_running_agent():
    assert [expected("t2i", True, k) for k in range(3)] == [
        (0, "None"),
        (1, "Image #0"),
        (2, "Image #1"),
    ]
    assert [expected("t2i", False, k) for k in range(2)] == [(0, "Image #0"), (1, "Image #1")]
    assert [expected("edit", False, k) for k in range(2)] == [(0, "given"), (1, "Image #1")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hello", "it is not one think block"),
        ("<think>\n<think>\n</think>", "it holds a second think tag"),
        ("<think>\n[EDIT] x\n</think>", "it has 0 lines '[ACTION] edit|done'"),
        ("<think>\n[ACTION] edit\n</think>", "it has 0 [EDIT] fields"),
        ("<think>\n[ACTION] edit\n[EDIT] n/a\n</think>", "edit does not go with [EDIT] n/a"),
        ("<think>\n[ACTION] done\n[EDIT] More.\n</think>", "done does not go with [EDIT] More."),
    ],
)
def test_a_stored_turn_that_cannot_be_taken_apart_says_why(text, problem):
    assert split_controller(text) == problem


def test_an_edit_field_may_span_lines_and_stand_before_another_field():
    text = "<think>\n[ACTION] Edit\n[EDIT] one\ntwo\n[SOURCE_IMAGE] None\n</think>"
    assert split_controller(text) == (
        "<think>\n[ACTION] Edit\n[SOURCE_IMAGE] None\n</think>",
        "edit",
        "one\ntwo",
    )


ANCHOR_2 = data_release.normalized_hash("a photo of 2 red dogs")

# --- bad rows -------------------------------------------------------------------------------------


def changed(key: str, value, at: int | None = None):
    def change(row):
        if at is None:
            row[key] = value
        else:
            row[key] = [*row[key][:at], value, *row[key][at:][1:]]

    return change


def in_text(old: str, new: str, at: int):
    def change(row):
        assert old in row["think_list"][at]
        changed("think_list", row["think_list"][at].replace(old, new), at)(row)

    return change


def in_meta(at: int, **values):
    def change(row):
        meta = json.loads(row["meta_steps"])
        meta[at].update(values)
        row["meta_steps"] = json.dumps(meta)

    return change


def is_done_twice(row):
    changed("step_action_list", "done", 1)(row)
    text = row["think_list"][1].replace("[ACTION] edit", "[ACTION] done")
    changed("think_list", text.replace("[EDIT] Edit 1 of t2i 1.", "[EDIT] None"), 1)(row)


def ends_with_an_edit(row):
    changed("step_action_list", "edit", -1)(row)
    changed("think_list", row["think_list"][0].replace("Round#0", "Round#2"), 2)(row)


# Of trajectory t2i-001: step 0 draws image 0, step 1 draws image 1, step 2 is done; it has a plan.
BAD = {
    "no uid": (changed("uid", ""), {Rule.UID}),
    "unknown task": (changed("task", "video"), {Rule.TASK}),
    "empty prompt": (changed("user_prompt", "  "), {Rule.PROMPT}),
    "another version": (changed("system_prompt_version", "v0"), {Rule.SYSTEM_PROMPT}),
    "no format sentence": (changed("system_prompt", "Draw."), {Rule.SYSTEM_PROMPT}),
    "lists of two lengths": (changed("step_role_list", ["plan"]), {Rule.LENGTHS}),
    "a wrong count": (changed("n_images", 3), {Rule.LENGTHS}),
    "name without image": (changed("step_image_name_list", "img_2.png", 2), {Rule.IMAGE_PRESENCE}),
    "hash cut off": (changed("step_image_sha256", "abc", 0), {Rule.IMAGE_PRESENCE}),
    "wrong round": (changed("step_round_list", 5, 1), {Rule.ROUND}),
    "wrong source": (changed("step_source_image_list", "given", 0), {Rule.SOURCE_REFERENCE}),
    "wrong role": (changed("step_role_list", "edit", 0), {Rule.ROLE}),
    "unknown action": (changed("step_action_list", "undo", 1), {Rule.ACTION, Rule.IMAGE_PRESENCE}),
    "text of another action": (in_text("[ACTION] edit", "[ACTION] done", 1), {Rule.TEXT}),
    "last step an edit": (ends_with_an_edit, {Rule.LAST_NOT_DONE, Rule.IMAGE_PRESENCE}),
    "done twice": (is_done_twice, {Rule.LAST_NOT_DONE, Rule.ROLE, Rule.IMAGE_PRESENCE}),
    "loss elsewhere": (changed("step_need_loss", True, 0), {Rule.LOSS_FLAG}),
    "payload cut off": (in_meta(1, edit_instruction="Edit 1 of"), {Rule.PAYLOAD}),
    "no payload": (in_meta(1, edit_instruction=""), {Rule.PAYLOAD}),
    "meta of another action": (in_meta(1, action="done"), {Rule.ACTION}),
    "score above 10": (in_text("[SCORE] 1.5/10", "[SCORE] 11/10", 1), {Rule.TEXT}),
    "no thinking": (in_text("I look,\nround 1.", "", 1), {Rule.TEXT}),
    "milestones with a gap": (in_meta(1, milestone_index=3), {Rule.PLAN}),
    "unknown transition": (in_meta(1, transition_kind="leap"), {Rule.PLAN}),
    "meta is no JSON": (changed("meta_steps", "[{"), {Rule.UNREADABLE}),
    "a milestone in words": (in_meta(0, milestone_index="one"), {Rule.PLAN, Rule.UNREADABLE}),
    "a text is missing": (changed("think_list", None, 1), {Rule.UNREADABLE}),
    "source of a drawing": (changed("source_image_step_index", 0), {Rule.SOURCE_STEP}),
}


@pytest.mark.parametrize(("change", "rules"), BAD.values(), ids=BAD)
def test_every_rule_that_a_row_breaks_is_named(change, rules):
    row = released.row(1, "t2i")
    change(row)
    record, problems = read(row)
    assert record is None
    assert rules <= {rule for rule, _ in problems}


def test_one_row_can_break_several_rules_at_once():
    row = released.row(1, "edit")
    changed("uid", "")(row)
    changed("step_round_list", 7, 2)(row)
    changed("think_list", "a thought", 0)(row)
    record, problems = read(row)
    assert record is None
    assert problems == [
        (Rule.UID, "empty"),
        (Rule.SOURCE_STEP, "step 0 is not the given image"),
        (Rule.ROUND, "step 2: not 1"),
    ]


def test_bad_rows_and_bad_images_are_left_out_and_named_by_their_place(tmp_path):
    some = [released.row(index, "t2i") for index in range(6)]
    some[1]["uid"] = some[0]["uid"]
    some[3]["step_image_list"][0] = some[3]["step_image_list"][0][:60]
    some[4]["step_image_list"][1] = b""
    released.write_rows(some, tmp_path / "part.parquet", group=2)
    found = read_dataset(tmp_path, "decode")
    assert [(v.where, v.uid, v.rule) for v in found.violations] == [
        ("part.parquet row 1", "t2i-000", Rule.UID),
        ("part.parquet row 3", "t2i-003", Rule.IMAGE_HASH),
        ("part.parquet row 4", "t2i-004", Rule.IMAGE_MISSING),
    ]
    assert (found.rows, found.bad) == (6, 3)
    with pytest.raises(UserError, match=r"3 of 6 rows break a rule, more than 10.00%: part.parq"):
        found.refuse_more_than(0.1)
    assert found.refuse_more_than(0.5) is found


def test_an_anchor_of_another_prompt_or_none_at_all_is_named(tmp_path):
    released.write_released(tmp_path)
    path = tmp_path / "anchor" / "base_anchor_allowlist.json"
    listed = json.loads(path.read_text())
    listed["rows"][0]["normalized_prompt_sha256"] = "0" * 64
    listed["rows"][1]["uid"] = "anchor-9"
    path.write_text(json.dumps(listed))
    found = read_dataset(tmp_path)
    assert [(v.uid, v.rule) for v in found.violations] == [
        ("anchor-0", Rule.ANCHOR),
        ("anchor-9", Rule.ANCHOR),
    ]
    editing = [{"uid": "anchor-2", "task": "edit", "user_prompt": "A photo of 2 red dogs"}]
    rows = [("row 0", editing[0], lambda step: Picture(data=b"x"))]
    allowed = {"anchor-2": listed["rows"][0] | {"normalized_prompt_sha256": ANCHOR_2}}
    assert [r[3] for r in data_release.allowed_anchors(rows, allowed)] == [
        [(Rule.ANCHOR, "task 'edit'")]
    ]
    listed["pass"] = False
    path.write_text(json.dumps(listed))
    with pytest.raises(UserError, match="did not pass its own check"):
        read_dataset(tmp_path)


def test_a_shard_without_a_column_or_that_is_no_parquet_is_an_error_that_names_it(tmp_path):
    row = released.row(0, "t2i")
    del row["meta_steps"]
    released.write_rows([row], tmp_path / "part.parquet")
    with pytest.raises(UserError, match=r"part\.parquet has no column meta_steps"):
        read_dataset(tmp_path)
    (tmp_path / "part.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(UserError, match=r"part\.parquet is no readable Parquet file"):
        read_dataset(tmp_path)


# --- elsewhere and back ---------------------------------------------------------------------------


def test_streaming_reads_the_same_rows(folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    streamed = [*data_hub.stream_trajectories(str(folder)), *data_hub.stream_anchors(str(folder))]
    local = [reading for reading, _ in scan(folder, "none")]
    assert len(streamed) == 43
    for (_, uid, here, problems), (_, other_uid, there, _) in zip(streamed, local, strict=True):
        assert (uid, problems) == (other_uid, [])
        assert here.turns == there.turns
        assert [image.read() for image in here.images] == [i.read() for i in there.images]


def test_a_hub_id_that_cannot_be_read_is_one_line(monkeypatch):
    def fails(*args, **kwargs):
        raise FileNotFoundError("Couldn't find any data file at owner/data.")

    monkeypatch.setattr("datasets.load_dataset", fails)
    with pytest.raises(UserError, match=r"of owner/data cannot be read from the hub \(Couldn't"):
        read_dataset("owner/data")


def test_the_release_turned_into_jsonl_and_back_is_the_same(folder, tmp_path):
    def plain(found):
        return [
            (r.uid, r.task, r.prompt, r.turns, r.planned, r.system_prompt, r.subtype, r.plan)
            for r in found.records
        ]

    first = read_dataset(folder)
    write_jsonl(first.records, tmp_path / "jsonl")
    second = read_dataset(tmp_path / "jsonl", "decode")
    write_release(second.records, tmp_path / "back", shard_rows=15)
    third = read_dataset(tmp_path / "back", "decode")
    assert second.violations == third.violations == ()
    assert plain(first) == plain(second) == plain(third)
    pictures = [
        [image.read() for record in found.records for image in record.images]
        for found in (first, second, third)
    ]
    assert pictures[0] == pictures[1] == pictures[2]
    assert len(list((tmp_path / "back" / "trajectory_parquet").iterdir())) == 3
