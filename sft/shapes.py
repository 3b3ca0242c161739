"""Trajectories of the shapes world: images as scenes, and true words about them.

    trajectory = make_trajectory(random.Random(0))                 # a prompt, its images and turns
    trajectory = make_trajectory(random.Random(0), task="edit")    # a source, a request, ...
    python -m sft.shapes --show 5 --out trajectories.png           # look at some

After the first image (right one time in three) every look lists what is seen and what is asked,
gives the score of the written rule (shapes_assess.py), and stops or asks for one edit; the next
image has that edit and is otherwise unchanged. Some edits fail and are mended in the next round.
The last look is "done", at a right image. Words: shapes_text.py; faults: shapes_faults.py.
"""

import argparse
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from agent.protocol import canonical
from agent.types import Reflection
from sft import shapes_faults, shapes_text
from sft.shapes_assess import Assessment, assess_edit, assess_row, is_satisfied
from sft.shapes_ops import Crowded, Op, apply, find_room, swapped, turned
from sft.shapes_words import cell_of, is_unique, name_of
from umm_reflect.shapes.prompts import Row, phrase
from umm_reflect.shapes.sampler import sample_row, scene_for
from umm_reflect.shapes.scene import COLORS, KINDS, Scene, Shape

if TYPE_CHECKING:
    from PIL.Image import Image

Task = Literal["t2i", "edit"]
Split = Literal["train", "test"]

RIGHT_FIRST = 0.35  # first images that satisfy their prompt
STRAY = 0.1  # of the right ones that also hold something nobody asked for, where the row allows it
MORE_POSITIONS = 0.15  # prompts that are drawn from that family on purpose: moving is hard to learn
FAILED_EDIT = 0.25  # edits that go wrong
NO_PLACE = 0.35  # requests to add something that leave open where
MAX_LOOKS = 4
OVERLOOKED = Assessment(10, ())  # what a careless look makes of a wrong image
# Of training: the harder split among drawings and trajectories, its crowded scenes among those
# drawings, editing tasks among the trajectories.
HARD_DRAWINGS, HARD_LOOKS, HARD_SCENES = 0.06, 0.2, 0.3
EDITING = 0.2
TWO_EDITS = 0.3  # turns with more than one fault whose edit mends two (twice as often with three)
EDIT_WEIGHTS = {
    "recolor": 0.22,
    "remove": 0.18,
    "add": 0.2,
    "move": 0.24,
    "replace": 0.12,
    "swap": 0.05,
}


@dataclass(frozen=True, slots=True)
class ShapesTrajectory:
    """`reflections[k]` looks at `looks[k]` and its edit draws `looks[k + 1]`; the last is done.

    row: what a prompt asks for, None in an editing task. prompt: the user's words. source: the
    user's image of an editing task, else None. scenes: the images drawn. faithful: for each of them
    whether it is what its prompt (the first image of a prompt) or its edit asked for, so that
    drawing may be learned from it. wanted: the scene that an editing task asks for (what it adds or
    moves may stand anywhere in its cell), else None.
    """

    row: Row | None
    prompt: str
    source: Scene | None
    scenes: tuple[Scene, ...]
    reflections: tuple[Reflection, ...]
    faithful: tuple[bool, ...]
    wanted: Scene | None = None

    def __post_init__(self) -> None:
        assert len(self.reflections) == len(self.looks), "every image is looked at once"
        assert len(self.faithful) == len(self.scenes)

    @property
    def looks(self) -> tuple[Scene, ...]:
        """The images in the order of looking: the source, if there is one, then those drawn."""
        return self.scenes if self.source is None else (self.source, *self.scenes)


def make_trajectory(
    rng: random.Random,
    split: Split = "train",
    hard: bool = False,
    task: Task = "t2i",
    row: Row | None = None,
    careless: float = 0.0,
) -> ShapesTrajectory:
    """A trajectory by lot. split, hard: as in `sampler.sample_row`. row: the prompt row, if given.
    careless: the share of looks at a wrong image that say "done", as of someone who overlooks it
    (prompts only).

    Raises ValueError for an unknown task, or a row with task "edit".
    """
    if task not in ("t2i", "edit"):
        raise ValueError(f"unknown task {task!r}; choose from t2i, edit")
    if task == "edit" and row is not None:
        raise ValueError("an editing task has no prompt row")
    while True:
        made = (
            _editing(rng, split, hard)
            if task == "edit"
            else _drawing(rng, split, hard, row, careless)
        )
        if made is not None:
            return made


def training_trajectory(rng: random.Random, careless: float = 0.0) -> ShapesTrajectory:
    """A trajectory to train on, its task and split by lot. careless: as in `make_trajectory`."""
    task = "edit" if rng.random() < EDITING else "t2i"
    return make_trajectory(rng, hard=rng.random() < HARD_LOOKS, task=task, careless=careless)


def training_drawing(rng: random.Random) -> tuple[str, Scene]:
    """A prompt and a scene of it to train on."""
    hard = rng.random() < HARD_DRAWINGS
    row = sample_row(rng, hard=hard)
    scene = scene_for(row, rng, hard=hard and rng.random() < HARD_SCENES)
    return phrase(row, rng), scene


def reflect(row: Row, scene: Scene, rng: random.Random) -> tuple[Reflection, Scene | None]:
    """A true look at any scene for a prompt row, and the scene after its edit (None if done).

    Raises Crowded where the scene has no room for what it lacks, or where no words single out what
    is wrong.
    """
    said, after, _ = look(scene, row["prompt"], assess_row(row, scene, rng), rng)
    return said, after


def reflect_on_edit(
    source: Scene, op: Op, request: str, scene: Scene, rng: random.Random
) -> tuple[Reflection, Scene | None]:
    """As `reflect`, for a scene that should be the source after an op that a user requested."""
    assessment = assess_edit(source, op, scene)
    said, after, _ = look(scene, shapes_text.bare_request(request), assessment, rng)
    return said, after


def scene_of(objects: Iterable[Mapping], side: float) -> Scene | None:
    """The scene of an image that a verifier read, so that `reflect` can look at a model's own one.

    objects: {"kind", "color", "box"} of each (`Detection.to_record`), boxes in pixels of an image
    `side` wide; a kind that the world does not have is malformed. Turns are not known, sizes about.
    None where an object has no one colour, since no words name it, or is a single pixel.
    """
    shapes = []
    for found in objects:
        left, top, right, bottom = (edge / side for edge in found["box"])
        if found["color"] is None:
            return None
        whole = found["kind"] in KINDS
        unit = Shape(found["kind"] if whole else "circle", found["color"], 0.0, 0.0, 1.0)
        x0, y0, x1, y1 = unit.box()
        size = max((right - left) / (x1 - x0), (bottom - top) / (y1 - y0))
        if size <= 0:  # a single pixel
            return None
        x, y, broken = (left + right) / 2, (top + bottom) / 2, 0.0 if whole else 0.5
        shapes.append(replace(unit, x=x, y=y, size=size, broken=broken))
    return Scene(tuple(shapes))


def look(
    scene: Scene, request: str, assessment: Assessment, rng: random.Random, last_edit: str = ""
) -> tuple[Reflection, Scene | None, tuple[Op, ...]]:
    """A true look at a scene: what is said, the scene after its edit (None if done), and the ops of
    the edit.

    last_edit: an edit text that failed, so that it is not repeated. Raises Crowded as `reflect`.
    """
    faults = assessment.faults
    parts = (
        shapes_text.seen(scene, rng),
        shapes_text.asked(request, rng),
        shapes_text.differences(scene, faults, rng),
    )
    thinking = " ".join(parts)
    if not faults:
        return Reflection(thinking, assessment.score, "done", ""), None, ()
    ops = (faults[0].op,)
    if len(faults) > 1 and rng.random() < TWO_EDITS * min(2, len(faults) - 1):
        second = faults[1].op
        known = all(index < len(scene.shapes) for index in second.touched)
        if known and not set(second.touched) & set(ops[0].touched):
            ops = (*ops, second)
    if not all(is_unique(scene, index) for op in ops for index in op.touched):
        raise Crowded("no words single out the object to change")
    while (edit := shapes_text.payload(scene, ops, rng)) == last_edit:
        pass  # what failed is asked for in other words
    return Reflection(thinking, assessment.score, "edit", edit), apply(scene, ops), ops


def _drawing(
    rng: random.Random, split: Split, hard: bool, row: Row | None, careless: float
) -> ShapesTrajectory | None:
    if row is None:
        positions = not hard and rng.random() < MORE_POSITIONS
        row = sample_row(rng, split, hard=hard, family="position" if positions else None)
    good = scene_for(row, rng, hard=hard)
    first: Scene | None = good
    if rng.random() >= RIGHT_FIRST:
        first = shapes_faults.spoil_first(row, good, rng)
    elif rng.random() < STRAY:
        stray = shapes_faults.add_stray(good, rng)
        first = stray if stray and is_satisfied(row, stray) else good
    if first is None:
        return None
    rounds = _rounds(first, row["prompt"], lambda scene: assess_row(row, scene, rng), rng, careless)
    if rounds is None:
        return None
    scenes, reflections, faithful = rounds
    return ShapesTrajectory(
        row, phrase(row, rng), None, scenes, reflections, (first is good, *faithful)
    )


def _editing(rng: random.Random, split: Split, hard: bool) -> ShapesTrajectory | None:
    source = scene_for(sample_row(rng, split, hard=hard), rng, hard=hard)
    try:
        op = request_op(source, rng)
    except Crowded:
        return None
    anywhere = op.verb == "add" and rng.random() < NO_PLACE
    prompt = shapes_text.edit_request(source, op, rng, anywhere=anywhere)
    request = shapes_text.bare_request(prompt)
    rounds = _rounds(
        source, request, lambda scene: assess_edit(source, op, scene, anywhere=anywhere), rng
    )
    if rounds is None:
        return None
    scenes, reflections, faithful = rounds
    wanted = apply(source, [op])
    return ShapesTrajectory(None, prompt, source, scenes[1:], reflections, faithful, wanted)


def _rounds(
    first: Scene,
    request: str,
    assess: Callable[[Scene], Assessment],
    rng: random.Random,
    careless: float = 0.0,
) -> tuple[tuple[Scene, ...], tuple[Reflection, ...], tuple[bool, ...]] | None:
    """Looks and edits from a first image to "done": scenes, reflections, whether each edit was
    carried out. None where that takes more than MAX_LOOKS or an edit cannot be made or said."""
    scenes, reflections, faithful = [first], [], []
    try:
        while len(scenes) <= MAX_LOOKS:
            last_edit = reflections[-1].edit if reflections else ""
            assessment = assess(scenes[-1])
            if assessment.faults and careless and rng.random() < careless:
                assessment = OVERLOOKED
            said, after, ops = look(scenes[-1], request, assessment, rng, last_edit)
            reflections.append(said)
            if after is None:
                return tuple(scenes), tuple(reflections), tuple(faithful)
            fails = len(ops) == 1 and rng.random() < FAILED_EDIT
            failed = shapes_faults.spoil_edit(scenes[-1], ops[0], rng) if fails else None
            scenes.append(after if failed is None else failed)
            faithful.append(failed is None)
    except Crowded:
        return None
    return None


def request_op(source: Scene, rng: random.Random) -> Op:
    """What a user may ask of an image: an op on objects that words single out. Raises Crowded."""
    verb = rng.choices(list(EDIT_WEIGHTS), list(EDIT_WEIGHTS.values()))[0]
    if verb == "add" or not source.shapes:
        kind = rng.choice(KINDS)
        size = rng.choice([shape.size for shape in source.shapes] or [0.28])
        new = Shape(kind, rng.choice(COLORS), 0.5, 0.5, size, turned(kind, rng))
        return Op("add", None, find_room(new, source.shapes, rng))
    alone = [i for i in range(len(source.shapes)) if is_unique(source, i)]
    if not alone:
        raise Crowded("no words single out an object")
    index = rng.choice(alone)
    shape = source.shapes[index]
    if verb == "remove":
        return Op("remove", index, None)
    if verb == "recolor":
        color = rng.choice([c for c in COLORS if c != shape.color])
        return Op("recolor", index, source.changing(index, color=color).shapes[index])
    if verb == "replace":
        kind = rng.choice([k for k in KINDS if k != shape.kind])
        color = shape.color if rng.random() < 0.4 else rng.choice(COLORS)
        looks = {"kind": kind, "color": color, "rotation": turned(kind, rng)}
        return Op("replace", index, source.changing(index, **looks).shapes[index])
    if verb == "swap":
        partners = [i for i in alone if cell_of(source.shapes[i]) != cell_of(shape)]
        partners = [i for i in partners if name_of(source.shapes[i]) != name_of(shape)]
        if not partners:
            raise Crowded("nothing to swap with")
        return swapped(dict(enumerate(source.shapes)), index, rng.choice(partners))
    others = [s for i, s in enumerate(source.shapes) if i != index]
    cells = [cell for cell in range(9) if cell != cell_of(shape)]
    return Op("move", index, find_room(shape, others, rng, cells=cells, shrinks=False))


def turns(trajectory: ShapesTrajectory) -> Iterator[str]:
    """The canonical text of each turn, in order; the source of an editing task is `given`."""
    for k, reflection in enumerate(trajectory.reflections):
        given = k == 0 and trajectory.source is not None
        yield canonical(reflection, k, "given" if given else f"Image #{k}")


def contact_sheet(trajectories: list[ShapesTrajectory], side: int = 256) -> "Image":
    """A picture for people: one row a trajectory, under each image the turn that looked at it."""
    import textwrap

    from PIL import Image, ImageDraw, ImageFont

    from umm_reflect.shapes.render import render

    font, head, gap, words = ImageFont.load_default(13), 26, 16, 190
    columns = max(len(t.looks) for t in trajectories)
    high = head + side + words + gap
    sheet = Image.new("RGB", (gap + columns * (side + gap), high * len(trajectories)), "white")
    pen = ImageDraw.Draw(sheet)
    for line, trajectory in enumerate(trajectories):
        top = line * high + 6
        task = "edit: " if trajectory.source is not None else ""
        pen.text(
            (gap, top), f"{task}{trajectory.prompt}", fill="black", font=ImageFont.load_default(17)
        )
        for k, (scene, said) in enumerate(
            zip(trajectory.looks, trajectory.reflections, strict=True)
        ):
            left = gap + k * (side + gap)
            sheet.paste(render(scene, side), (left, top + head))
            lines = [f"{said.score}/10  {said.action}", *textwrap.wrap(said.thinking, 40)]
            lines += textwrap.wrap(f"> {said.edit}", 40) if said.edit else []
            pen.multiline_text(
                (left, top + head + side + 5), "\n".join(lines), fill="black", font=font
            )
    return sheet


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sft.shapes", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--show", type=int, default=5, help="how many trajectories")
    parser.add_argument("--out", default="trajectories.png", help="picture to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hard", action="store_true", help="the harder split")
    parser.add_argument("--task", choices=["t2i", "edit", "both"], default="both")
    args = parser.parse_args(argv)
    if args.show < 1:
        parser.error("--show must be at least 1")
    rng = random.Random(args.seed)
    tasks = {"both": ("t2i", "edit")}.get(args.task, (args.task,))
    made = [
        make_trajectory(rng, hard=args.hard, task=tasks[i % len(tasks)]) for i in range(args.show)
    ]
    for trajectory in made:
        print(f"# {trajectory.prompt}")
        for turn in turns(trajectory):
            print(turn)
    contact_sheet(made).save(args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
