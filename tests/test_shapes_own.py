"""Looks at a model's own images: what is said, what is mended, and that nothing else changes."""

import random

import numpy as np

from eval.shapes import ShapesVerifier
from sft.shapes_own import OwnLook, mend, moved, own_looks, row_for
from umm_reflect.shapes.prompts import clause, plain_row
from umm_reflect.shapes.render import render
from umm_reflect.shapes.scene import Scene, Shape
from umm_reflect.shapes.sets import is_held_out

STAR = Shape("star", "red", 0.25, 0.3, 0.3)
MOON = Shape("moon", "blue", 0.7, 0.7, 0.3)
ROW = plain_row("color_attr", [clause("star", 1, "red"), clause("moon", 1, "green")])


def pixels(*shapes):
    return np.asarray(render(Scene(shapes), 128))


def record(*images, turns=()):
    verdicts = ShapesVerifier().score([render(scene, 128) for scene in images], [ROW] * len(images))
    return {
        "row": ROW,
        "prompt": ROW["prompt"],
        "turns": list(turns),
        "source": "model",
        "verdicts": [verdict.to_record() for verdict in verdicts],
    }


def test_mending_changes_the_wrong_object_and_no_pixel_elsewhere():
    before, after = Scene((STAR, MOON)), Scene((STAR, Shape("moon", "green", 0.7, 0.7, 0.3)))
    image = pixels(STAR, MOON)
    mended = mend(image, before, after)
    assert (mended == np.asarray(render(after, 128))).all()
    changed = np.argwhere((mended != image).any(-1))
    assert changed.min() > 128 * 0.5  # the star's quarter is as it was


def test_what_touches_another_object_is_not_mended():
    near = Shape("moon", "blue", 0.42, 0.3, 0.3)
    assert mend(pixels(STAR, near), Scene((STAR, near)), Scene((STAR,))) is None


def test_a_textured_background_is_not_painted_over():
    noise = np.random.default_rng(0).integers(0, 60, (128, 128, 3), dtype=np.uint8)
    assert mend(pixels(STAR, MOON) // 2 + noise, Scene((STAR, MOON)), Scene((STAR,))) is None


def test_a_wrong_image_is_looked_at_twice_and_its_mended_copy_is_right():
    wrong = Scene((STAR, MOON))
    looks = [
        look
        for look in own_looks(record(wrong), [pixels(STAR, MOON)], random.Random(1))
        if look.prompt == ROW["prompt"]
    ]
    assert len(looks) == 2
    for look in looks:
        assert look.edits[0].endswith(("green", "green moon"))
        assert look.learned == (True,) * len(look.turns)
        assert look.drawn[0] is False
        assert len(look.images) == len(look.turns) == len(look.edits)
    final = next(look for look in looks if look.edits[-1] is None)
    assert "[SCORE] 10/10\n[ACTION] done" in final.turns[-1]
    assert ShapesVerifier().score([render(wrong, 128)], [ROW])[0].correct is False


def test_what_the_model_had_said_comes_before_but_is_not_learned():
    wrong, right = Scene((STAR,)), Scene((STAR, Shape("moon", "green", 0.7, 0.7, 0.3)))
    said = {"said": "<think>what the model said</think>", "edit": "add a green moon"}
    images = [pixels(*wrong.shapes), pixels(*right.shapes)]
    last = [
        look
        for look in own_looks(record(wrong, right, turns=[said]), images, random.Random(0))
        if look.turns[0] == said["said"]
    ]
    assert [look.learned for look in last] == [(False, True)]
    assert "Round#1" in last[0].turns[1]
    assert last[0].edits == ("add a green moon", None)


def test_a_prompt_made_from_a_scene_asks_for_what_it_shows_or_misses_it_by_one_thing():
    scene = Scene((STAR, MOON, Shape("moon", "blue", 0.2, 0.8, 0.2)))
    picture = render(scene, 128)
    for seed in range(40):
        rng = random.Random(seed)
        for changed in (False, True):
            row = row_for(scene, rng, changed=changed)
            if row is None:
                continue
            assert not is_held_out(row)
            assert ShapesVerifier().score([picture], [row])[0].correct is not changed


def test_a_moved_look_says_the_same_of_images_that_lose_nothing_but_background():
    image = np.full((128, 128, 3), 200, np.uint8)
    image[40:60, 50:80] = (255, 0, 0)
    look = OwnLook("p", (image,), ("t",), (None,), (True,), (False,))
    rng = random.Random(0)
    places = set()
    for _ in range(40):
        [again] = moved(look, rng).images
        rows, columns = np.nonzero((again == (255, 0, 0)).all(-1))
        assert len(rows) == 20 * 30
        assert again.shape == image.shape
        places.add((int(rows.min()), int(columns.min())))
    assert len(places) > 20
    assert all(abs(top - 40) <= 5 and abs(left - 50) <= 5 for top, left in places)
    at_the_edge = image.copy()
    at_the_edge[:, 0] = at_the_edge[:, -1] = at_the_edge[0] = at_the_edge[-1] = (0, 0, 255)
    stays = OwnLook("p", (at_the_edge,), ("t",), (None,), (True,), (False,))
    moves = [moved(stays, rng).images[0] for _ in range(20)]
    assert all(np.array_equal(one, at_the_edge) for one in moves)
