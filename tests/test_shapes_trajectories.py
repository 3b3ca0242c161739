"""Trajectories of the shapes world say what is true of their scenes and change what they say."""

import random
import re
import time
from collections import Counter
from dataclasses import replace

import pytest

from agent.protocol import canonical, parse, parse_schema
from agent.types import Reflection
from eval.geneval_rules import MALFORMED, Detection, judge
from eval.shapes import ShapesVerifier
from sft.shapes import (
    ShapesTrajectory,
    contact_sheet,
    make_trajectory,
    reflect,
    scene_of,
    turns,
)
from sft.shapes_assess import assess_row, is_satisfied
from sft.shapes_words import PLACES, description, name_of, objects_of, parts_of, place_of
from umm_reflect.shapes.prompts import clause, plain_row
from umm_reflect.shapes.render import render
from umm_reflect.shapes.scene import COLORS, KINDS, Scene, Shape
from umm_reflect.shapes.sets import is_held_out


def shape(name: str, x: float, y: float, size: float = 0.25, **more) -> Shape:
    color, kind = name.split()
    return Shape(kind, color, x, y, size, **more)


@pytest.fixture(scope="module")
def trajectories() -> list[ShapesTrajectory]:
    rng = random.Random(2024)
    return [
        make_trajectory(rng, task=task, hard=hard)
        for _ in range(400)
        for task in ("t2i", "edit")
        for hard in (False, True)
    ]


def steps(trajectories):
    """(trajectory, k, scene looked at, reflection, next scene or None, faithful)."""
    for t in trajectories:
        for k, (scene, said) in enumerate(zip(t.looks, t.reflections, strict=True)):
            after = t.looks[k + 1] if k + 1 < len(t.looks) else None
            drawn = k + 1 - (t.source is not None)
            yield t, k, scene, said, after, after is not None and t.faithful[drawn]


# --- what is said -------------------------------------------------------------------------------


def claimed(thinking: str) -> Counter:
    """(name, place) of every object that the first sentence lists, read back from the words."""
    sentence = thinking.split(".")[0]
    if sentence in ("I see nothing", "The image is empty"):
        return Counter()
    listed = re.sub(r"^(I see|The image shows|The picture has|Visible:) ", "", sentence)
    places = "|".join(sorted(PLACES, key=len, reverse=True))
    looks = (
        rf"(?:malformed (?:{'|'.join(COLORS)}) shape|(?:{'|'.join(COLORS)}) (?:{'|'.join(KINDS)}))"
    )
    found = []
    for part in listed.split(", "):
        match = re.fullmatch(rf"(?:an? )?({looks}) (?:at the )?({places})", part)
        assert match, part
        found.append(match.groups())
    return Counter(found)


def test_thinking_lists_exactly_the_objects_of_the_scene_with_their_places(trajectories):
    for _, _, scene, said, _, _ in steps(trajectories):
        seen = [scene.shapes[i] for i in objects_of(scene)]
        truth = Counter((name_of(s), place_of(s)) for s in seen)
        assert claimed(said.thinking) == truth


def test_objects_are_listed_row_by_row_and_from_left_to_right():
    scene = Scene(
        (shape("red star", 0.8, 0.2), shape("blue ring", 0.2, 0.8), shape("pink moon", 0.2, 0.25))
    )
    row = plain_row("two_object", [clause("star"), clause("moon")])
    said, _ = reflect(row, scene, random.Random(0))
    sentence = said.thinking.split(".")[0]
    order = [sentence.index(name) for name in ("pink moon", "red star", "blue ring")]
    assert order == sorted(order)


def test_score_is_ten_exactly_when_done_and_the_last_turn_is_done(trajectories):
    for t in trajectories:
        assert [r.action for r in t.reflections] == ["edit"] * (len(t.looks) - 1) + ["done"]
        assert [r.score == 10 for r in t.reflections] == [r.action == "done" for r in t.reflections]
        assert all(isinstance(r.score, int) and 0 <= r.score <= 10 for r in t.reflections)


def test_done_is_said_exactly_at_scenes_that_the_row_accepts(trajectories):
    for t, _, scene, said, _, _ in steps(trajectories):
        if t.row is not None:
            assert (said.action == "done") == is_satisfied(t.row, scene)


def test_the_decision_agrees_with_the_rules_of_the_evaluation(trajectories):
    seen = Counter()
    for t, _, scene, said, _, _ in steps(trajectories):
        if t.row is None:
            continue
        detections = [
            Detection(MALFORMED if s.broken else s.kind, s.color, s.box()) for s in scene.shapes
        ]
        correct = judge(t.row, detections, reading="exact").correct
        assert correct == (said.action == "done"), (t.row, scene)
        seen[correct] += 1
    assert min(seen.values()) > 500


def test_rows_of_the_training_split_are_never_held_out(trajectories):
    rows = [t.row for t in trajectories if t.row is not None and t.row["tag"] != "single_object"]
    assert not any(is_held_out(row) for row in rows)


# --- what is done -------------------------------------------------------------------------------


def removed_and_new(before: Scene, after: Scene) -> tuple[list[Shape], list[Shape]]:
    gone = list((Counter(before.shapes) - Counter(after.shapes)).elements())
    new = list((Counter(after.shapes) - Counter(before.shapes)).elements())
    return gone, new


PLACE = "|".join(sorted(PLACES, key=len, reverse=True))
NOUN = rf"(?:malformed )?(?:{'|'.join(COLORS)}) (?:{'|'.join((*KINDS, 'shape'))})"
WHAT = rf"the (?:(?:leftmost|rightmost|topmost|lowest) )?{NOUN}(?: at the (?:{PLACE}))?"
INSTRUCTIONS = {
    "add": rf"(?:add|draw|put) an? (?P<new>{NOUN}) at the (?P<place>{PLACE})",
    "remove": rf"(?:remove|erase|delete) (?P<what>{WHAT})",
    "move": rf"(?:move|shift) (?P<what>{WHAT}) to the (?P<place>{PLACE})",
    "swap": rf"(?:swap|exchange) (?P<what>{WHAT}) and (?P<partner>{WHAT})",
    "replace": rf"(?:replace (?P<what>{WHAT}) with|turn (?P<old>{WHAT}) into) an? (?P<new>{NOUN})",
    "recolor": rf"(?:turn|make|change) (?P<what>{WHAT}) (?:to )?(?P<color>{'|'.join(COLORS)})",
}


def carry_out(edit: str, scene: Scene, after: Scene) -> Counter:
    """Read the words of an edit, check each against the scenes, and count the verbs."""
    verbs: Counter = Counter()
    gone, new = removed_and_new(scene, after)
    words = {f"the {description(scene, i)}": i for i in objects_of(scene)}
    rest = edit
    while rest:
        read = ((v, re.match(rf"{p}(?: and |$)", rest)) for v, p in INSTRUCTIONS.items())
        verb, match = next(((v, m) for v, m in read if m), (None, None))
        assert match, f"cannot read {rest!r} of {edit!r}"
        rest = rest[match.end() :]
        verbs[verb] += 1
        named = {k: v for k, v in match.groupdict().items() if v}
        what = named.get("what", named.get("old"))
        old = None
        if what:
            old = scene.shapes[words[what]]
            gone.remove(old)
            for part in parts_of(scene, words[what]):
                gone.remove(scene.shapes[part])
        if verb == "remove":
            continue
        if verb == "swap":
            other = scene.shapes[words[named["partner"]]]
            gone.remove(other)
            there = replace(old, x=other.x, y=other.y, size=other.size)
            here = replace(other, x=old.x, y=old.y, size=old.size)
            new.remove(there)
            new.remove(here)
            continue
        looks = named.get("new") or name_of(old)
        if verb == "recolor":
            looks = f"{named['color']} {old.kind}"
        made = [s for s in new if name_of(s) == looks]
        if verb in ("add", "move"):
            made = [s for s in made if place_of(s) == named["place"]]
        else:
            made = [s for s in made if (s.x, s.y, s.size) == (old.x, old.y, old.size)]
        if verb == "move":
            made = [s for s in made if s.size == old.size and s.rotation == old.rotation]
        assert made, (edit, scene, after)
        new.remove(made[0])
    assert not gone, f"{edit!r} also took {gone}"
    assert not new, f"{edit!r} also made {new}"
    return verbs


def test_an_edit_changes_exactly_what_it_says_and_leaves_all_else_identical(trajectories):
    verbs: Counter = Counter()
    for _, _, scene, said, after, faithful in steps(trajectories):
        if after is not None:
            assert scene.background == after.background
        if faithful:
            verbs += carry_out(said.edit, scene, after)
    assert set(verbs) == set(INSTRUCTIONS)


def test_edits_name_every_object_so_that_the_words_fit_only_one(trajectories):
    for _, _, scene, said, _, _ in steps(trajectories):
        for words in re.findall(WHAT, said.edit):
            matches = [i for i in objects_of(scene) if f"the {description(scene, i)}" == words]
            assert len(matches) == 1, (said.edit, scene)


def test_edits_that_fail_are_marked_and_mended_later(trajectories):
    failed = total = 0
    for t, _, _, _, after, faithful in steps(trajectories):
        if after is None:
            continue
        total += 1
        if not faithful:
            failed += 1
            assert t.reflections[-1].action == "done"
    assert 0.15 < failed / total < 0.3


def test_first_images_are_right_about_a_third_of_the_time_and_faults_are_mostly_single():
    rng = random.Random(9)
    made = [make_trajectory(rng) for _ in range(1500)]
    right = sum(t.reflections[0].action == "done" for t in made) / len(made)
    assert 0.3 < right < 0.42
    wrong = [t for t in made if t.reflections[0].action == "edit"]
    counts = Counter(len(assess_row(t.row, t.scenes[0], rng).faults) for t in wrong)
    assert counts[1] > 0.65 * len(wrong)
    assert counts[2] + counts[3] > 0.1 * len(wrong)


def test_a_sixth_of_all_edits_move_an_object():
    rng = random.Random(6)
    verbs: Counter = Counter()
    for _, _, scene, said, after, faithful in steps(
        make_trajectory(rng, task=task) for _ in range(300) for task in ("t2i",) * 4 + ("edit",)
    ):
        if faithful:
            verbs += carry_out(said.edit, scene, after)
    share = (verbs["move"] + verbs["swap"]) / verbs.total()
    assert 0.14 < share < 0.21
    assert all(verbs[verb] > 0.03 * verbs.total() for verb in INSTRUCTIONS)


def test_what_the_verifier_reads_in_the_picture_gives_the_same_words_and_the_same_decision():
    """Rendered, read from pixels, and looked at again: as with a model's own pictures."""
    rng, verifier = random.Random(13), ShapesVerifier()
    same = total = 0
    for t, _, scene, said, _, _ in steps(make_trajectory(rng, hard=i % 2 == 1) for i in range(80)):
        objects = [d.to_record() for d in verifier.read(render(scene, 128))]
        again, _ = reflect(t.row, scene_of(objects, 128), rng)
        assert again.action == said.action
        total += 1
        same += claimed(again.thinking) == claimed(said.thinking)
    assert same > 0.9 * total  # a centre on the border of two cells may be read into the other


# --- form ---------------------------------------------------------------------------------------


def test_every_turn_survives_the_protocol(trajectories):
    for t in trajectories:
        for k, (text, said) in enumerate(zip(turns(t), t.reflections, strict=True)):
            source = "given" if k == 0 and t.source is not None else f"Image #{k}"
            assert text == canonical(said, k, source)
            assert parse(text, k, source) == said
            assert parse_schema(text, k, source) == said


def test_editing_trajectories_look_at_the_source_first():
    t = make_trajectory(random.Random(3), task="edit")
    assert t.row is None
    assert t.looks == (t.source, *t.scenes)
    assert len(t.reflections) == len(t.scenes) + 1
    assert "[SOURCE_IMAGE] given" in next(turns(t))


def test_the_same_seed_gives_the_same_trajectory():
    first = [make_trajectory(random.Random(9), task=task) for task in ("t2i", "edit")]
    assert first == [make_trajectory(random.Random(9), task=task) for task in ("t2i", "edit")]


def test_a_given_row_is_kept_and_bad_arguments_are_refused():
    row = plain_row("counting", [clause("star", 3)])
    assert make_trajectory(random.Random(0), row=row).row == row
    with pytest.raises(ValueError, match="choose from t2i, edit"):
        make_trajectory(random.Random(0), task="draw")
    with pytest.raises(ValueError, match="no prompt row"):
        make_trajectory(random.Random(0), task="edit", row=row)


def test_five_hundred_trajectories_take_less_than_a_second_of_processor_time():
    rng = random.Random(1)
    start = time.process_time()
    for _ in range(250):
        make_trajectory(rng)
        make_trajectory(rng, task="edit")
    assert time.process_time() - start < 1.0


def test_the_contact_sheet_shows_every_look():
    made = [make_trajectory(random.Random(seed)) for seed in (1, 2)]
    sheet = contact_sheet(made, side=64)
    assert sheet.width >= 64 * max(len(t.looks) for t in made)
    assert len(sheet.getcolors(sheet.width * sheet.height)) > 10


def test_reflections_are_the_agents_type(trajectories):
    assert all(type(r) is Reflection for r in trajectories[0].reflections)


def test_careless_looks_pass_so_many_wrong_images_in_true_words():
    rng = random.Random(3)
    made = [make_trajectory(rng, careless=0.4) for _ in range(400)]
    wrong = passed = 0
    for trajectory in made:
        for scene, said in zip(trajectory.looks, trajectory.reflections, strict=True):
            if not is_satisfied(trajectory.row, scene):
                wrong += 1
                passed += said.action == "done"
                assert said.action == "edit" or (said.score, said.edit) == (10, "")
                seen = [scene.shapes[i] for i in objects_of(scene)]
                shown = Counter((name_of(s), place_of(s)) for s in seen)
                assert claimed(said.thinking) == shown
            else:
                assert said.action == "done"
    assert wrong > 200
    assert passed / wrong == pytest.approx(0.4, abs=0.08)
