"""The shapes world: rows, words, held-out sets, scenes, near misses and pictures.

python -m pytest tests/test_shapes_world.py
"""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageDraw

from umm_reflect.shapes import prompts, sampler, scene, sets
from umm_reflect.shapes.prompts import canonical_spec, clause, plain_row, position_row
from umm_reflect.shapes.render import coverage, render
from umm_reflect.shapes.sampler import Fault, satisfies, scene_for, violate
from umm_reflect.shapes.scene import COLORS, KINDS, PALETTE, Background, Scene, Shape, relations


def drawn(family: str, many: int, hard: bool = False) -> list[tuple[prompts.Row, Scene]]:
    rng = random.Random(family)
    rows = [sampler.sample_row(rng, family=family) for _ in range(many)]
    return [(row, scene_for(row, rng, hard=hard)) for row in rows]


# --- rows and words ------------------------------------------------------------------------------


def test_rows_have_genevals_schema_and_plain_words():
    counting = plain_row("counting", [clause("cross", 3)])
    assert json.dumps(counting) == (
        '{"tag": "counting", "include": [{"class": "cross", "count": 3}], '
        '"exclude": [{"class": "cross", "count": 4}], "prompt": "three crosses"}'
    )
    position = position_row(clause("moon"), clause("star"), "left of")
    assert json.dumps(position) == (
        '{"tag": "position", "include": [{"class": "moon", "count": 1}, '
        '{"class": "star", "count": 1, "position": ["left of", 0]}], '
        '"prompt": "a star left of a moon"}'
    )
    parts = [clause("circle", 2, "red"), clause("square", 1, "blue")]
    assert plain_row("compound", parts) == {
        "tag": "compound",
        "include": [
            {"class": "circle", "count": 2, "color": "red"},
            {"class": "square", "count": 1, "color": "blue"},
        ],
        "exclude": [{"class": "circle", "count": 3}, {"class": "square", "count": 2}],
        "prompt": "two red circles and a blue square",
    }
    attributes = [clause("ring", 1, "orange"), clause("heart", 1, "white")]
    assert plain_row("color_attr", attributes)["prompt"] == "an orange ring and a white heart"
    assert "exclude" not in plain_row("color_attr", attributes)


def test_three_objects_and_a_relation_are_a_compound_row_with_exact_counts():
    parts = [clause("square", 1, "blue"), clause("circle", 1, "red"), clause("star", 1, "green")]
    row = position_row(parts[0], parts[1], "above", parts[2:])
    assert row["prompt"] == "a red circle above a blue square, and a green star"
    assert row["tag"] == "compound"
    assert row["exclude"] == [{"class": k, "count": 2} for k in ("square", "circle", "star")]


def test_canonical_specs_ignore_order_and_mirror_relations():
    def place(anchor: str, subject: str, relation: str) -> prompts.Spec:
        return canonical_spec(position_row(clause(anchor), clause(subject), relation))

    assert place("moon", "star", "left of") == place("star", "moon", "right of")
    assert place("moon", "star", "below") == place("star", "moon", "above")
    assert place("moon", "star", "left of") != place("star", "moon", "left of")
    assert place("moon", "star", "left of") != place("moon", "star", "above")
    assert place("moon", "star", "below") == (
        (("moon", 1, ""), ("star", 1, "")),
        (("moon", "above", "star"),),
    )
    a, b = clause("ring", 1, "red"), clause("heart", 1, "pink")
    swapped = clause("ring", 1, "pink"), clause("heart", 1, "red")
    spec = canonical_spec(plain_row("color_attr", [a, b]))
    assert spec == canonical_spec(plain_row("color_attr", [b, a]))
    assert spec != canonical_spec(plain_row("color_attr", swapped))


def test_what_the_world_does_not_have_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="unknown kind 'cat'; choose from circle"):
        clause("cat")
    with pytest.raises(ValueError, match="unknown color 'teal'"):
        clause("star", 1, "teal")
    with pytest.raises(ValueError, match=r"count must be in 1\.\.6, got 7"):
        clause("star", 7)
    with pytest.raises(ValueError, match="different kinds"):
        plain_row("compound", [clause("star", 2, "red"), clause("star", 1, "blue")])
    with pytest.raises(ValueError, match="unknown relation 'near'"):
        position_row(clause("star"), clause("moon"), "near")
    with pytest.raises(ValueError, match="unknown family 'ocr'"):
        prompts.draw_row(random.Random(0), "ocr")


def test_paraphrases_are_many_stay_in_the_vocabulary_and_keep_every_named_thing():
    rng = random.Random(5)
    assert len(prompts.VOCABULARY) < 150
    for family in prompts.FAMILIES:
        texts = set()
        for _ in range(300):
            row = prompts.draw_row(rng, family)
            text = prompts.phrase(row, rng)
            texts.add(text)
            assert prompts.unknown_words(text) == []
            heard = prompts.words(text)
            for part in row["include"]:
                name = part["class"] if part["count"] == 1 else prompts.plural(part["class"])
                assert heard.count(name) == 1, (text, row)
                if "color" in part:
                    assert part["color"] in heard
                if part["count"] > 1:
                    assert {prompts.NUMBERS[part["count"]], str(part["count"])} & set(heard)
        assert len(texts) > 60
    row = position_row(clause("moon"), clause("star"), "left of")
    assert len({prompts.phrase(row, rng) for _ in range(400)}) > 100


def test_unknown_words_are_named_once_in_order():
    assert prompts.unknown_words("A red cat, two cats and a red dog") == ["cat", "cats", "dog"]


def test_relation_words_say_the_relation_they_stand_for():
    """Every relation form names subject and anchor so that reading it literally gives the row."""
    for relation, forms in prompts._RELATION_FORMS.items():
        near = {"left of": "left", "right of": "right", "above": "top", "below": "bottom"}[relation]
        for form in forms:
            if " and " in form and " with " not in form:
                side = form.split("{s} ")[1].split(" and ")[0]
                assert side.endswith(near), form


# --- sets ----------------------------------------------------------------------------------------


def test_set_sizes_and_order_are_genevals():
    built = sets.build_sets()
    tags = [entry.row["tag"] for entry in built.shapes553]
    assert Counter(tags) == {
        "single_object": 80,
        "two_object": 99,
        "counting": 80,
        "colors": 94,
        "position": 100,
        "color_attr": 100,
    }
    assert list(dict.fromkeys(tags)) == list(prompts.TAGS[:6])
    assert [entry.index for entry in built.shapes553] == list(range(553))
    assert [len(built.compound), len(built.hard), len(built.hard553)] == [100, 300, 553]
    entries = [*built.shapes553, *built.compound, *built.hard553]
    assert len({entry.seed for entry in entries}) == len(entries)


def test_the_sets_are_the_same_in_every_process():
    built = sets.build_sets()
    prompts_at = {i: built.shapes553[i].row["prompt"] for i in (80, 179, 259, 353, 453)}
    assert prompts_at == {
        80: "a moon and a triangle",
        179: "four stars",
        259: "an orange triangle",
        353: "a star right of a moon",
        453: "a purple ring and a black star",
    }
    assert built.compound[0].row["prompt"] == "four yellow triangles and a brown square"
    assert built.hard[0].row["prompt"] == "six pink hearts"


def test_hard553_is_hard_and_253_rows_of_which_no_compound_or_relation_comes_twice():
    built = sets.build_sets()
    assert built.hard553[:300] == built.hard
    assert [entry.index for entry in built.hard553] == list(range(553))
    more = built.hard553[300:]
    assert list(Counter(entry.family for entry in more).values()) == [84, 85, 84]
    assert [more[i].row["prompt"] for i in (0, 84, 169)] == [
        "five red rings",
        "three orange crosses, a blue star and two black moons",
        "a blue moon below a red square, and an orange circle",
    ]
    specs = Counter(canonical_spec(e.row) for e in built.hard553 if e.family != "hard_counting")
    assert set(specs.values()) == {1}
    assert len(specs) == 185 + 184


def test_as_many_specs_are_held_out_as_stated_and_every_part_remains_for_training():
    built = sets.build_sets()
    specs = {
        tag: {canonical_spec(e.row) for e in built.shapes553 if e.row["tag"] == tag}
        for tag in prompts.TAGS[:6]
    }
    assert {tag: len(found) for tag, found in specs.items()} == {
        "single_object": 8,
        "two_object": 8,
        "counting": 8,
        "colors": 20,
        "position": 28,
        "color_attr": 100,
    }
    assert len({canonical_spec(e.row) for e in built.compound}) == 100
    assert Counter(e.family for e in built.hard) == dict.fromkeys(prompts.HARD_FAMILIES, 100)
    assert len(sets.held_out()) == 8 + 8 + 20 + 28 + 100 + 100 + 44 + 185 + 184
    assert {kind for ((kind, _, _),), _ in specs["counting"]} == set(KINDS)
    assert Counter(c for ((_, _, c),), _ in specs["colors"]) == dict.fromkeys(COLORS, 2)


def test_ten_thousand_training_rows_hold_no_held_out_spec():
    rng = random.Random(11)
    rows = [sampler.sample_row(rng, hard=i % 4 == 0) for i in range(10_000)]
    assert not [row for row in rows if canonical_spec(row) in sets.held_out()]
    seen = {canonical_spec(row) for row in rows}
    # All that is not held out of the small families does get trained.
    assert sum(len(counts) == 1 and counts[0][1] in (2, 3, 4) for counts, _ in seen) == 24 - 8
    related = [c for c, r in seen if len(r) == 1 and len(c) == 2]
    assert sum({color for _, _, color in c} == {""} for c in related) == 112 - 28
    assert sum("" not in {color for _, _, color in c} for c in related) > 100
    assert sum(len(c) == 1 and c[0][1] == 1 and c[0][2] != "" for c, _ in seen) == 80 - 20
    pairs = sum(len(c) == 2 and not r and {e[1:] for e in c} == {(1, "")} for c, r in seen)
    assert pairs == 28 - 8


def test_test_rows_are_held_out_but_for_single_object():
    rng = random.Random(2)
    for family in prompts.FAMILIES:
        row = sampler.sample_row(rng, "test", family=family)
        assert sets.is_held_out(row) == (family != "single_object")
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        sampler.sample_row(rng, "dev")  # type: ignore[arg-type]


# --- scenes --------------------------------------------------------------------------------------


def test_relations_follow_genevals_box_rule():
    anchor = Shape("square", "red", 0.5, 0.5, 0.2)
    at = {
        (0.2, 0.5): {"left of"},
        (0.8, 0.52): {"right of"},
        (0.5, 0.2): {"above"},
        (0.48, 0.8): {"below"},
        (0.2, 0.2): {"left of", "above"},  # shrunk offset .272 of a distance of .424, both axes
        (0.5, 0.5): set(),
        (0.52, 0.49): set(),  # closer than a tenth of the sizes
    }
    for (x, y), expected in at.items():
        assert relations(Shape("square", "blue", x, y, 0.2), anchor) == expected


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("family", prompts.FAMILIES)
def test_a_scene_satisfies_its_row_and_a_near_miss_does_not(family: str, hard: bool):
    rng = random.Random(3)
    seen, offered = set(), set()
    for row, good in drawn(family, 250, hard):
        assert satisfies(good, row)
        assert len(good.shapes) == sum(part["count"] for part in row["include"])
        bad, change = violate(good, row, rng)
        seen.add(change.fault)
        offered |= set(sampler.faults(row))
        assert not satisfies(bad, row)
        assert set(change.before) == set(good.shapes) - set(bad.shapes)
        assert set(change.after) == set(bad.shapes) - set(good.shapes)
        assert bad.background == good.background
        assert len(change.before) <= 2
    assert seen == offered


def test_default_scenes_keep_shapes_apart_inside_and_on_plain_grey():
    for family in prompts.FAMILIES:
        for _, made in drawn(family, 120):
            for index, shape in enumerate(made.shapes):
                assert scene.is_apart(shape, made.shapes[:index], sampler.GAP - 1e-9)
                left, top, right, bottom = shape.box()
                assert min(left, top, 1 - right, 1 - bottom) >= sampler.MARGIN - 1e-9
                assert abs(shape.rotation) <= scene.MAX_ROTATION[shape.kind]
            assert made.background.kind == "plain"
            assert len(set(made.background.rgb)) == 1


def test_relations_hold_by_a_margin_and_alone():
    for hard in (False, True):
        for row, made in drawn("position", 300, hard):
            relation = row["include"][1]["position"][0]
            assert relations(made.shapes[1], made.shapes[0]) == {relation}


def test_hard_scenes_are_smaller_touch_at_times_and_use_every_background():
    hard = [made for _, made in drawn("hard_compound", 300, hard=True)]
    easy = [made for _, made in drawn("hard_compound", 300)]
    mean = [np.mean([s.size for made in group for s in made.shapes]) for group in (hard, easy)]
    assert mean[0] < 0.85 * mean[1]
    assert {made.background.kind for made in hard} == {"plain", "tint", "texture"}
    near = 0
    for made in hard:
        pairs = [(a, b) for i, a in enumerate(made.shapes) for b in made.shapes[:i]]
        near += min(scene.gap(a, b) for a, b in pairs) < sampler.HARD_GAP - 1e-9
    assert 0.3 < near / len(hard) < 0.5


def test_only_faults_that_break_the_row_are_offered():
    two = plain_row("two_object", [clause("star"), clause("moon")])
    assert sampler.faults(two) == [Fault.MISSING, Fault.KIND, Fault.BROKEN]
    rng = random.Random(0)
    with pytest.raises(ValueError, match="extra is no fault of a two_object row"):
        violate(scene_for(two, rng), two, rng, Fault.EXTRA)
    three = plain_row("counting", [clause("star", 3)])
    bad, change = violate(scene_for(three, rng), three, rng, Fault.EXTRA)
    assert [len(bad.shapes), change.before, change.after] == [4, (), (bad.shapes[3],)]


def test_distractors_are_of_other_kinds_and_break_nothing():
    rng = random.Random(4)
    row = plain_row("compound", [clause("star", 2, "red"), clause("moon", 1, "blue")])
    made = scene_for(row, rng, distractors=2)
    assert satisfies(made, row)
    assert len(made.shapes) == 5
    assert not {"star", "moon"} & {shape.kind for shape in made.shapes[3:]}
    with pytest.raises(ValueError, match="at most 6 shapes, not 7"):
        scene_for(row, rng, distractors=4)


def test_the_same_lots_give_the_same_rows_and_scenes():
    def run(seed: int) -> list[object]:
        rng = random.Random(seed)
        row = sampler.sample_row(rng)
        made = scene_for(row, rng, hard=True)
        return [row, made, violate(made, row, rng), prompts.phrase(row, rng)]

    assert [run(seed) for seed in range(50)] == [run(seed) for seed in range(50)]


def test_a_malformed_shape_is_refused():
    for wrong, message in (
        ({"kind": "blob"}, "unknown kind 'blob'"),
        ({"color": "teal"}, "unknown color 'teal'"),
        ({"size": 0.0}, "size must be positive"),
        ({"broken": 0.9}, "broken must be in"),
    ):
        with pytest.raises(ValueError, match=message):
            Shape(**{"kind": "star", "color": "red", "x": 0.5, "y": 0.5, "size": 0.2, **wrong})


# --- pictures ------------------------------------------------------------------------------------


def test_colors_are_far_from_each_other_and_from_every_plain_background():
    greys = [(level,) * 3 for level in range(scene.PLAIN_LEVELS[0], scene.PLAIN_LEVELS[1] + 1)]
    for color in COLORS:
        others = [PALETTE[other] for other in COLORS if other != color]
        assert min(math.dist(PALETTE[color], other) for other in others) >= 100
        assert min(math.dist(PALETTE[color], grey) for grey in greys) >= 90
    assert scene.nearest_colors("red")[0] == "brown"


def test_the_same_scene_gives_the_same_bytes_and_inside_and_outside_are_exact():
    made = Scene(
        (Shape("circle", "red", 0.25, 0.5, 0.3), Shape("ring", "blue", 0.7, 0.5, 0.4)),
        Background("plain", (170, 170, 170)),
    )
    picture = render(made)
    assert picture.mode == "RGB"
    assert picture.size == (128, 128)
    assert picture.tobytes() == render(made).tobytes()
    assert picture.getpixel((32, 64)) == PALETTE["red"]
    assert picture.getpixel((2, 2)) == (170, 170, 170)
    assert picture.getpixel((90, 64)) == (170, 170, 170)  # the hole of the ring
    assert picture.getpixel((69, 64)) == PALETTE["blue"]
    assert render(made, 40).size == (40, 40)
    with pytest.raises(ValueError, match="at least 8 pixels"):
        render(made, 4)


def test_a_later_shape_covers_an_earlier_one_and_the_edge_of_the_picture_clips():
    made = Scene((Shape("square", "red", 0.5, 0.5, 0.5), Shape("circle", "green", 0.5, 0.5, 0.2)))
    assert render(made).getpixel((64, 64)) == PALETTE["green"]
    corner = render(Scene((Shape("circle", "black", 0.0, 1.0, 0.4),)))
    assert corner.getpixel((0, 127)) == PALETTE["black"]


@pytest.mark.parametrize("kind", KINDS)
def test_coverage_has_the_area_and_the_middle_of_the_outline(kind: str):
    for rotation in (0.0, scene.MAX_ROTATION[kind]):
        shape = Shape(kind, "red", 0.503, 0.497, 0.4, rotation)
        mask, corner = coverage(shape, 128)
        share = np.asarray(mask, float) / 255
        x, y = (shape.points() * 128).T
        cross = x * np.roll(y, -1) - np.roll(x, -1) * y
        area = abs(cross.sum()) / 2 * (1 - scene.RING_HOLE**2 if kind == "ring" else 1)
        assert share.sum() == pytest.approx(area, rel=0.03)
        middle_x = ((x + np.roll(x, -1)) * cross).sum() / (3 * cross.sum())
        middle_y = ((y + np.roll(y, -1)) * cross).sum() / (3 * cross.sum())
        rows, columns = np.indices(share.shape) + 0.5
        assert (share * columns).sum() / share.sum() + corner[0] == pytest.approx(
            middle_x, abs=0.12
        )
        assert (share * rows).sum() / share.sum() + corner[1] == pytest.approx(middle_y, abs=0.12)


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.minimum(a, b).sum() / np.maximum(a, b).sum())


def test_kinds_and_broken_shapes_look_unlike_every_other_kind_at_any_turn():
    """Soft overlap of masks scaled to one box: at most 0.86 between different kinds, and between a
    broken shape and any whole one."""

    def look(shape: Shape) -> np.ndarray:
        mask, _ = coverage(shape, 256)
        return np.asarray(mask.crop(mask.getbbox()).resize((48, 48)), float) / 255

    def turned(kind: str, broken: float = 0.0) -> list[np.ndarray]:
        most = scene.MAX_ROTATION[kind]
        turns = np.linspace(-most, most, 7) if most else [0.0]
        return [look(Shape(kind, "red", 0.5, 0.5, 0.5, float(t), broken)) for t in turns]

    whole = {kind: turned(kind) for kind in KINDS}
    for kind in KINDS:
        for other in KINDS:
            if other != kind:
                worst = max(overlap(a, b) for a in whole[kind] for b in whole[other])
                assert worst < 0.86, (kind, other, worst)
        for broken in (0.24, 0.32):
            for other in KINDS:
                worst = max(overlap(a, b) for a in turned(kind, broken) for b in whole[other])
                assert worst < 0.86, (kind, broken, other, worst)


def test_textures_are_soft_and_differ_by_seed():
    pictures = [
        np.asarray(render(Scene((), Background("texture", (180, 170, 160), seed))), int)
        for seed in range(12)
    ]
    assert max(abs(p - (180, 170, 160)).max() for p in pictures) <= 9
    assert len({p.tobytes() for p in pictures}) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_shape_is_one_piece_and_smaller(kind: str):
    whole, _ = coverage(Shape(kind, "red", 0.5, 0.5, 0.5), 256)
    for broken in np.linspace(0.24, 0.32, 5):
        mask, _ = coverage(Shape(kind, "red", 0.5, 0.5, 0.5, broken=float(broken)), 256)
        inked = (np.asarray(mask) > 40).astype(np.uint8)
        assert 0.4 < np.asarray(mask, float).sum() / np.asarray(whole, float).sum() < 0.9
        picture = Image.fromarray(inked).copy()
        rows, columns = np.nonzero(inked)
        ImageDraw.floodfill(picture, (int(columns[-1]), int(rows[-1])), 2)
        assert (np.asarray(picture) == 1).sum() == 0
