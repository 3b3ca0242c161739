"""Looks at a model's own images: true words about what a judge read in them, and mended copies.

    for look in own_looks(record, images, rng):       # a line of eval.collect, and its images
        look.images, look.turns, look.learned, look.drawn

An own image that is wrong is mended in its pixels: what the edit takes away is painted over with
the background, what it adds is rendered into the picture, and nothing else changes. So the edit is
learned at the mistakes that the model makes, with a target that is exact.

The same image is looked at for other prompts too (what it happens to show, or nearly that): if it
always came with its own prompt, the words of the prompt would tell what to see in it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from agent.protocol import canonical
from sft.shapes import FAILED_EDIT, MAX_LOOKS, look, scene_of
from sft.shapes_assess import assess_row
from sft.shapes_faults import spoil_edit
from sft.shapes_ops import Crowded
from umm_reflect.shapes.prompts import Clause, Row, clause, phrase, plain_row
from umm_reflect.shapes.render import coverage
from umm_reflect.shapes.scene import COLORS, KINDS, PALETTE, Scene, Shape
from umm_reflect.shapes.sets import is_held_out

WRONG_TWICE = 2  # looks at a wrong image for its own prompt
OTHER_PROMPT = 0.6  # images that are also looked at for a prompt made from what they show
CHANGED = 0.6  # of those prompts that miss it by a count, a colour or a kind
RIM = 4  # pixels around a box that is painted over: edges are soft
KEPT_RIM = 1
WELL_DRAWN = 0.4  # the least score of an object in an own image that is drawn again
PLAIN = 4.0  # grey levels that a plain background strays from its median
MOVE = 5  # pixels at most that `moved` moves the images by, along each axis


@dataclass(frozen=True)
class OwnLook:
    """`turns[k]` looks at `images[k]` ([H, W, 3] uint8). learned: whether a turn is to be learned
    (what the model itself had said before is not). drawn: whether an image is one to learn drawing
    from (a mended one). edits: of each turn, None for "done"."""

    prompt: str
    images: tuple[np.ndarray, ...]
    turns: tuple[str, ...]
    edits: tuple[str | None, ...]
    learned: tuple[bool, ...]
    drawn: tuple[bool, ...]


def collected(folder: Path, start: int, count: int) -> Iterator[tuple[dict, list[np.ndarray]]]:
    """Some of the records of eval.collect or eval.distort, each with its images [H, W, 3] uint8."""
    lines = (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()
    images = np.load(folder / "images.npy", mmap_mode="r")
    for line in lines[start : start + count]:
        record = json.loads(line)
        yield record, [np.asarray(images[i]) for i in record["images"]]


def own_looks(
    record: Mapping, images: Sequence[np.ndarray], rng: random.Random
) -> Iterator[OwnLook]:
    """True looks at every image of one own trajectory, each after what the model had said before.

    record: {"row", "prompt", "verdicts" (one an image), "turns" ({"said", "edit"}, one an edit),
    "source" (who drew it: "model" or "renderer")}.
    An image that cannot be put into words, or where words and verdict disagree, yields nothing.
    """
    said = tuple(turn["said"] for turn in record["turns"])
    edits = tuple(turn["edit"] for turn in record["turns"])
    for k, verdict in enumerate(record["verdicts"]):
        scene = scene_of(verdict["evidence"]["detections"], images[k].shape[1])
        if scene is None:
            continue
        before = (tuple(images[: k + 1]), said[:k], edits[:k])
        correct = verdict["correct"]
        for _ in range(1 if correct else WRONG_TWICE):
            found = _look(record["row"], record["prompt"], scene, *before, rng)
            if found is not None and (found[1] == "done") == correct:
                yield found[0]
        if k == 0 and rng.random() < OTHER_PROMPT:
            row = row_for(scene, rng, changed=rng.random() < CHANGED)
            found = row and _look(row, phrase(row, rng), scene, *before, rng)
            if found:
                yield found[0]


def is_well_drawn(record: Mapping) -> bool:
    """Whether a first image is the model's own, right, and each object in it whole enough to draw
    again."""
    verdict = record["verdicts"][0]
    objects = verdict["evidence"]["detections"]
    whole = verdict["correct"] and min(found["score"] for found in objects) >= WELL_DRAWN
    return record["source"] == "model" and whole


def _look(
    row: Row,
    prompt: str,
    scene: Scene,
    images: tuple[np.ndarray, ...],
    said: tuple[str, ...],
    edits: tuple[str | None, ...],
    rng: random.Random,
) -> tuple[OwnLook, str] | None:
    """A look at the last image and, as long as that can be mended, at what becomes of it; with the
    first look's action. Some edits fail, as in `sft.shapes`."""
    turns, drawn, action = list(said), [False] * len(images), None
    images, edits = list(images), list(edits)
    while len(turns) < MAX_LOOKS:
        last_edit = (edits[-1] if edits else None) or ""
        try:
            reflection, after, ops = look(
                scene, row["prompt"], assess_row(row, scene, rng), rng, last_edit
            )
        except Crowded:
            break
        k = len(turns)
        turns.append(canonical(reflection, k, f"Image #{k}"))
        edits.append(reflection.edit if reflection.action == "edit" else None)
        action = action or reflection.action
        if after is None:
            break
        fails = len(ops) == 1 and rng.random() < FAILED_EDIT
        failed = spoil_edit(scene, ops[0], rng) if fails else None
        scene_before, scene = scene, after if failed is None else failed
        better = mend(images[-1], scene_before, scene)
        if better is None:
            break
        images.append(better)
        drawn.append(failed is None)
    if action is None:
        return None
    images, drawn = images[: len(turns)], drawn[: len(turns)]
    learned = [k >= len(said) for k in range(len(turns))]
    return OwnLook(prompt, *map(tuple, (images, turns, edits, learned, drawn))), action


def moved(look: OwnLook, rng: random.Random) -> OwnLook:
    """The same look with all images moved by the same few pixels: what is said of them stays true.

    The look as it is where the move would lose more than background at an edge of an image.
    """
    down, right = rng.randint(-MOVE, MOVE), rng.randint(-MOVE, MOVE)
    for image in look.images:
        lost = [_lost(image, down), _lost(image.swapaxes(0, 1), right)]
        if any(np.ptp(part, axis=(0, 1)).max(initial=0) > 2 * PLAIN for part in lost if part.size):
            return look
    return replace(look, images=tuple(_shifted(image, down, right) for image in look.images))


def _lost(image: np.ndarray, by: int) -> np.ndarray:
    """The rows that leave the image when it moves down by so many pixels, and one more."""
    return image[:0] if by == 0 else image[-by - 1 :] if by > 0 else image[: 1 - by]


def _shifted(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """[H, W, 3]; what comes in is the edge's own color."""
    padded = np.pad(image, ((MOVE, MOVE), (MOVE, MOVE), (0, 0)), mode="edge")
    height, width = image.shape[:2]
    return padded[MOVE - down :, MOVE - right :][:height, :width]


# --- prompts for an image that is there -----------------------------------------------------------


def row_for(scene: Scene, rng: random.Random, *, changed: bool) -> Row | None:
    """A row that asks for the whole objects of a scene, or nearly (changed: one thing is
    different).

    None where no row can: no object, more than four of a kind or three kinds, a request that is
    held out.
    """
    groups: dict[str, list[Shape]] = {}
    for shape in scene.shapes:
        if not shape.broken:
            groups.setdefault(shape.kind, []).append(shape)
    if not groups or len(groups) > 3 or max(map(len, groups.values())) > 4:
        return None
    clauses = []
    for kind, shapes in groups.items():
        colors = {shape.color for shape in shapes}
        color = colors.pop() if len(colors) == 1 and rng.random() < 0.8 else None
        clauses.append(clause(kind, len(shapes), color))
    rng.shuffle(clauses)
    if changed:
        which = rng.randrange(len(clauses))
        clauses[which] = _other(clauses[which], set(groups), rng)
    row = plain_row("counting" if len(clauses) == 1 else "compound", clauses)
    return None if is_held_out(row) else row


def _other(part: Clause, kinds: set[str], rng: random.Random) -> Clause:
    """The clause with another count, colour or kind."""
    kind, count, color = part["class"], part["count"], part.get("color")
    way = rng.choice(("count", "color", "kind") if color else ("count", "kind"))
    if way == "count":
        return clause(kind, rng.choice([n for n in (count - 1, count + 1) if 1 <= n <= 5]), color)
    if way == "color":
        return clause(kind, count, rng.choice([c for c in COLORS if c != color]))
    return clause(rng.choice([k for k in KINDS if k not in kinds]), count, color)


# --- mending in pixels ----------------------------------------------------------------------------


def mend(image: np.ndarray, scene: Scene, after: Scene) -> np.ndarray | None:
    """The image with what the step from `scene` to `after` changes, and nothing else.

    None where that cannot be done cleanly: no plain background, or what goes lies too close to what
    stays.
    """
    gone = [shape for shape in scene.shapes if shape not in after.shapes]
    new = [shape for shape in after.shapes if shape not in scene.shapes]
    kept = [shape for shape in scene.shapes if shape in after.shapes]
    size = image.shape[1]
    objects = np.zeros(image.shape[:2], bool)
    for shape in scene.shapes:
        objects[_window(shape, size, RIM)] = True
    if objects.mean() > 0.9:
        return None
    ground = np.median(image[~objects], axis=0)
    if np.abs(image[~objects].astype(np.float32) - ground).mean() > PLAIN:
        return None
    stays = np.zeros_like(objects)
    for shape in kept:
        stays[_window(shape, size, KEPT_RIM)] = True
    picture = image.copy()
    for shape in gone:
        window = _window(shape, size, RIM)
        if stays[window].any():
            return None
        picture[window] = ground.astype(np.uint8)
    canvas = Image.fromarray(picture)
    for shape in new:
        mask, corner = coverage(shape, size)
        canvas.paste(PALETTE[shape.color], (*corner, *(np.add(corner, mask.size).tolist())), mask)
    return np.asarray(canvas)


def _window(shape: Shape, size: int, rim: int) -> tuple[slice, slice]:
    """The pixels of a shape's box and a rim around it."""
    left, top, right, bottom = (side * size for side in shape.box())
    across = slice(max(0, int(left) - rim), max(0, int(right) + 1 + rim))
    down = slice(max(0, int(top) - rim), max(0, int(bottom) + 1 + rim))
    return down, across
