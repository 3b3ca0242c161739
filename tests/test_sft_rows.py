"""Rows of every kind: literal columns, literal pieces, and the same bytes on a second run."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agent.protocol import canonical
from agent.types import Reflection
from sft.data import Found, Picture, Record, Said, read_dataset
from sft.rows import (
    RELEASE_KINDS,
    Layer,
    Row,
    check_release_counts,
    columns,
    counts,
    expand,
    rows_of,
)
from sft.weights import weighted_ids
from tests import released
from tests.letters import LETTERS
from tests.tiny import TINY
from umm_reflect.errors import UserError
from umm_reflect.images import mended_transforms
from umm_reflect.layout import Frame
from umm_reflect.packing import NO_LABEL, pack_row

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Found:
    return read_dataset(released.write_released(tmp_path_factory.mktemp("released")))


# --- columns --------------------------------------------------------------------------------------


def test_the_counts_of_the_fixture_are_those_worked_out_by_hand(found):
    assert counts(found) == {
        "trajectories": 40,
        "t2i": 20,
        "edit": 20,
        "controller": 40,
        "transition": 78,
        "t2i_initial": 20,
        "t2i_transition": 19,
        "edit_transition": 39,
        "verifier": 78,
        "verifier to edit": 38,
        "verifier to done": 40,
        "penultimate": 26,
        "anchor": 3,
        "rows": 225,
        "payload exact": 74,
        "payload render_truncated": 2,
        "payload whitespace_normalized": 2,
    }


def test_data_that_is_not_the_released_set_names_every_count(found):
    with pytest.raises(UserError, match=r"trajectories 40 instead of 29,529; .*rows 225 instead"):
        check_release_counts(found)


def test_the_rows_of_a_drawing_task_are_what_the_description_says(found):
    record = found.records[2]
    assert record.uid == "t2i-001"
    texts = [said.text for said in record.turns]
    rows = {row.kind: row for row in rows_of(record)}
    by_kind = [(row.kind, row.uid) for row in rows_of(record)]
    assert by_kind == [
        ("controller", "t2i-001"),
        ("transition", "t2i_initial::t2i-001::0000"),
        ("verifier", "verifier::t2i-001::0000::edit"),
        ("penultimate", "verifier::t2i-001::0000::edit"),
        ("transition", "t2i_transition::t2i-001::0001"),
        ("verifier", "verifier::t2i-001::0001::done"),
        ("whole", "t2i-001"),
    ]
    common = {
        "uid": "t2i-001",
        "task": "t2i",
        "trajectory_subtype": "planned_progression",
        "user_prompt": "Prompt 1 (t2i).",
        "system_prompt": released.TRAINED_SYSTEM,
    }
    plan = "Milestone plan: m1: Edit 0 of t2i 1. | m2: Edit 1 of t2i 1."
    assert columns(rows["controller"], released.PROMPT_FILE) == {
        **common,
        "response_list": texts,
        "response_action_list": ["edit", "edit", "done"],
        "response_round_list": [0, 1, 2],
        "response_source_image_list": ["None", "Image #0", "Image #1"],
        "response_image_step_list": [0, 1, -1],
        "source_image_step_index": -1,
        "milestone_plan_text": plan,
    }
    first = Row("transition", "t2i_initial::t2i-001::0000", record, 0)
    assert columns(first) == {
        "pair_uid": "t2i_initial::t2i-001::0000",
        "uid": "t2i-001",
        "task": "t2i",
        "pair_type": "t2i_initial",
        "payload": "Edit 0 of t2i 1.",
        "source_step_index": -1,
        "target_step_index": 0,
        "target_image_sha256": hashlib.sha256(released.png(7)).hexdigest(),
    }
    assert columns(rows["penultimate"], released.PROMPT_FILE) == {
        "state_uid": "verifier::t2i-001::0000::edit",
        **common,
        "prefix_response_list": texts[:1],
        "prefix_round_list": [0],
        "prefix_source_image_list": ["None"],
        "prefix_image_step_list": [0],
        "target_response": texts[1],
        "target_action": "edit",
        "target_round_index": 1,
        "target_source_image": "Image #0",
        "current_step_index": 0,
        "is_penultimate": True,
    }


def test_the_rows_of_an_editing_task_count_the_source_as_image_0(found):
    record = found.records[3]
    assert [row.uid for row in rows_of(record) if row.kind in ("transition", "verifier")] == [
        "edit_transition::edit-001::0001",
        "verifier::edit-001::0001::edit",
        "edit_transition::edit-001::0002",
        "verifier::edit-001::0002::done",
    ]
    last = Row("verifier", "", record, 2)
    row = columns(last, released.PROMPT_FILE)
    assert row["prefix_image_step_list"] == [1, 2]
    assert row["prefix_source_image_list"] == ["given", "Image #1"]
    assert (row["target_source_image"], row["target_round_index"]) == ("Image #2", 2)
    assert (row["target_action"], row["is_penultimate"]) == ("done", False)
    assert columns(Row("transition", "", record, 1))["source_step_index"] == 0
    assert columns(Row("transition", "", record, 2))["payload"] == "Edit 1 of edit 1."


def test_rows_of_the_release_need_the_system_prompt_that_mends_theirs(found):
    with pytest.raises(UserError, match=r"need the released system prompt. Give --system-prompt"):
        columns(Row("controller", "", found.records[0]))


def dump(folder: Path) -> str:
    """A hash of all rows of a folder, column by column."""
    read = read_dataset(folder)
    rows = expand(read.records, read.anchors)
    lines = [
        json.dumps([kind, columns(row, released.PROMPT_FILE)])
        for kind, some in rows.items()
        for row in some
    ]
    assert len(lines) == 225
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_a_second_run_in_another_process_gives_the_same_bytes(tmp_path):
    released.write_released(tmp_path / "one")
    script = f"from tests.test_sft_rows import dump; from pathlib import Path; print(dump(Path({str(tmp_path / 'one')!r})))"  # noqa: E501
    other = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert dump(tmp_path / "one") == other.stdout.strip()


def test_rows_come_in_the_order_of_their_uids(found):
    rows = expand(found.records[::-1], found.anchors)
    for some in rows.values():
        assert [row.uid for row in some] == sorted(row.uid for row in some)
    assert list(rows) == ["controller", "transition", "verifier", "penultimate", "anchor"]
    with pytest.raises(ValueError, match=r"unknown kind 'rows'; choose from controller"):
        expand([], kinds=["rows"])


# --- pieces ---------------------------------------------------------------------------------------

TRANSFORMS = mended_transforms(vae=(32, 16, 16), vit=(28, 14, 14))


def shown(laid) -> list[str]:
    """The pieces in few signs: text or I (latents and patches), * learned, (d) droppable."""
    out = []
    for piece, droppable in zip(laid.pieces, laid.droppable, strict=True):
        segment = piece.segment
        if hasattr(segment, "ids"):
            text = LETTERS.decode(segment.ids)
            name = (
                text.split("\n")[1].removeprefix("[CURRENT_ROUND] ") if "<think>" in text else text
            )
        else:
            level = (segment.vae_pixels if segment.has_vae else segment.vit_pixels)[0, 0, 0]
            blocks = (
                "I" if segment.has_vae and segment.has_vit else "vae" if segment.has_vae else "vit"
            )
            name = f"{blocks}{round((float(level) + 1) * 127.5)}"
            name = name.replace(blocks, "N") if piece.learn else name
        out.append(name + "*" * piece.learn + (f"({droppable})" if droppable else ""))
    return out


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer(LETTERS, TRANSFORMS, released.PROMPT_FILE)


SYSTEM = released.TRAINED_SYSTEM + "(text)"


def lay(layer, found, kind, uid, branch="conditional"):
    rows = expand(found.records, found.anchors, [kind])[kind]
    return layer.lay(next(row for row in rows if row.uid == uid), branch)


def test_every_kind_of_row_is_the_sequence_of_the_published_table(layer, found):
    def pieces(kind, uid):
        return shown(lay(layer, found, kind, uid))

    prompt = "Prompt 1 (t2i).(text)"
    assert pieces("controller", "t2i-001") == [
        *(SYSTEM, prompt, "Round#0*", "I7", "Round#1*", "I8", "Round#2*"),
    ]
    request = "Prompt 1 (edit).(text)"
    assert pieces("controller", "edit-001") == [
        *(SYSTEM, "I7", request, "Round#0*", "I8", "Round#1*", "I9", "Round#2*"),
    ]
    assert pieces("transition", "t2i_initial::t2i-001::0000") == ["Edit 0 of t2i 1.(text)", "N7*"]
    assert pieces("transition", "t2i_transition::t2i-001::0001") == [
        *("vae7(vae)", "vit7(vit)", "Edit 1 of t2i 1.(text)", "N8*"),
    ]
    assert pieces("transition", "edit_transition::edit-001::0002") == [
        *("vae8(vae)", "vit8(vit)", "Edit 1 of edit 1.(text)", "N9*"),
    ]
    assert pieces("verifier", "verifier::t2i-001::0001::done") == [
        *(SYSTEM, prompt, "Round#0", "I7", "Round#1", "I8", "Round#2*"),
    ]
    assert pieces("penultimate", "verifier::edit-001::0001::edit") == [
        *(SYSTEM, "I7", request, "Round#0", "I8", "Round#1*"),
    ]
    assert pieces("anchor", "anchor-2") == ["A Photo of 2 (red) dogs!(text)", "N2*"]


def test_a_whole_trajectory_is_one_sequence_that_learns_every_turn_and_image(layer, found):
    assert shown(lay(layer, found, "whole", "t2i-001")) == [
        *(released.TRAINED_SYSTEM, "Prompt 1 (t2i).", "Round#0*", "N7*", "I7", "Round#1*"),
        *("N8*", "I8", "Round#2*"),
    ]
    assert shown(lay(layer, found, "whole", "edit-001")) == [
        *(released.TRAINED_SYSTEM, "I7", "Prompt 1 (edit).", "Round#0*", "N8*", "I8"),
        *("Round#1*", "N9*", "I9", "Round#2*"),
    ]


def test_the_branches_of_guidance_are_those_of_the_agent(layer, found):
    uid = "t2i_transition::t2i-001::0001"
    assert shown(lay(layer, found, "transition", uid, "text_uncond")) == [
        *("vae7(vae)", "vit7(vit)", "N8*"),
    ]
    assert shown(lay(layer, found, "transition", uid, "image_uncond")) == [
        *("Edit 1 of t2i 1.(text)", "N8*"),
    ]
    first = "t2i_initial::t2i-001::0000"
    assert shown(lay(layer, found, "transition", first, "text_uncond")) == ["N7*"]
    with pytest.raises(ValueError, match="a controller row is not drawn and has no branch"):
        lay(layer, found, "controller", "t2i-001", "text_uncond")


def test_the_full_view_draws_an_edit_in_the_running_context(found):
    layer = Layer(LETTERS, TRANSFORMS, released.PROMPT_FILE, edit_view="full")
    assert shown(lay(layer, found, "transition", "t2i_transition::t2i-001::0001")) == [
        *(SYSTEM, "Prompt 1 (t2i).(text)", "Round#0(text)", "vae7(vae)", "vit7(vit)"),
        *("Round#1(text)", "N8*"),
    ]


def test_what_is_not_to_be_learned_carries_no_loss_and_gives_no_row(tmp_path):
    look = Reflection("One.", 5, "edit", "Add one."), Reflection("Two.", 10, "done", "")
    turns = [Said(canonical(r, k, f"Image #{k}"), r, learn=k == 1) for k, r in enumerate(look)]
    images = (Picture(data=released.png(1), learn=False), Picture(data=released.png(2)))
    record = Record("x", "t2i", "two", tuple(turns), images)
    assert [row.uid for row in rows_of(record)] == [
        *("x", "t2i_transition::x::0001", "verifier::x::0001::done", "x"),
    ]
    layer = Layer(LETTERS, TRANSFORMS)
    rows = {row.kind: row for row in rows_of(record)}
    whole = ["two", "I1", "Round#0", "N2*", "I2", "Round#1*"]
    assert shown(layer.lay(rows["whole"])) == whole
    assert shown(layer.lay(rows["controller"])) == ["two(text)", "I1", "Round#0", "I2", "Round#1*"]


def test_a_first_image_that_no_turn_asked_for_is_drawn_from_the_prompt():
    said = Reflection("Right.", 10, "done", "")
    turn = Said(canonical(said, 0, "Image #0"), said)
    record = Record("x", "t2i", "one dog", (turn,), (Picture(data=released.png(1)),))
    row = next(row for row in rows_of(record) if row.kind == "transition")
    assert columns(row)["payload"] == "one dog"
    assert shown(Layer(LETTERS, TRANSFORMS, "Look.").lay(row)) == ["one dog(text)", "N1*"]


def test_a_laid_row_packs_and_its_halves_take_the_places_of_the_whole_image(layer, found):
    t = LETTERS
    frame = Frame(t.start, t.end, t.image_start, t.image_end)
    laid = lay(layer, found, "transition", "t2i_transition::t2i-001::0001")
    row = pack_row([laid.pieces], frame, TINY)
    assert row.sizes == (4 + 6 + len("Edit 1 of t2i 1.") + 2, 4 + 4, 4)
    order = np.argsort(row.order_L)
    position = row.position_L[order].tolist()
    assert position[:12] == [0] * 6 + [1] * 6
    assert row.noised_G.tolist() == [False] * 4 + [True] * 4
    assert (row.label_U == NO_LABEL).all()
    whole = pack_row([lay(layer, found, "whole", "edit-001").pieces], frame, TINY)
    turns = found.records[3].turns
    assert (whole.label_U != NO_LABEL).sum() == sum(len(s.text) + 1 for s in turns)
    assert int(whole.noised_G.sum()) == 8
    total = sum(weighted_ids(t, s.text, "release")[1][k] for s in turns for k in range(len(s.text)))
    total += sum(1 / math.sqrt(len(s.text) + 1) for s in turns)
    assert torch.isclose(torch.tensor(whole.weight_U).sum(), torch.tensor(total).float())


@pytest.mark.parametrize("twice", [False, True])
def test_stand_ins_have_the_sizes_of_the_pictures_they_stand_for(found, twice):
    transforms = replace(TRANSFORMS, resize_twice=twice)
    real, plan = (
        Layer(LETTERS, transforms, released.PROMPT_FILE, stand_ins=stand_ins)
        for stand_ins in (False, True)
    )
    for some in expand(found.records[:4], found.anchors, RELEASE_KINDS).values():
        for row in some:
            pairs = zip(real.lay(row).pieces, plan.lay(row).pieces, strict=True)
            for here, there in pairs:
                assert (here.learn, here.weights) == (there.learn, there.weights)
                for name in ("vae_pixels", "vit_pixels"):
                    pixels = getattr(here.segment, name, None)
                    other = getattr(there.segment, name, None)
                    assert (pixels is None) == (other is None)
                    assert pixels is None or pixels.shape == other.shape
                    assert other is None or other.is_meta
