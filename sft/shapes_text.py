"""The sentences of the shapes world's trajectories: what is seen, asked and different; edits.

The thinking of one turn has three parts, always in this order, so that a model looks before it
judges. Only the wording within a part varies:

    "I see a red circle at the top left, a blue square at the right."     every object, as one reads
    "Asked: two red circles and a blue square."
    "One red circle is missing."                                          or "Everything matches."

An edit can be understood without the conversation: it names its object by colour and kind, adds a
place where that is not unique, and names the goal place.
"""

from collections.abc import Sequence
from random import Random

from sft.shapes_assess import Fault
from sft.shapes_ops import Op
from sft.shapes_words import (
    NUMBERS,
    article,
    description,
    name_of,
    noun,
    place_of,
    reading_order,
)
from umm_reflect.shapes.scene import Scene


def seen(scene: Scene, rng: Random) -> str:
    """The first part of the thinking: every object with its place, in reading order.

    With more than five objects the short form ("red circle top left") keeps the turn within its
    length.
    """
    names = [(name_of(s), place_of(s)) for s in (scene.shapes[i] for i in reading_order(scene))]
    if not names:
        return rng.choice(("I see nothing.", "The image is empty."))
    if len(names) > 5:
        listed = ", ".join(f"{name} {place}" for name, place in names)
    else:
        listed = ", ".join(f"{article(name)} at the {place}" for name, place in names)
    return f"{rng.choice(('I see', 'The image shows', 'The picture has', 'Visible:'))} {listed}."


def asked(request: str, rng: Random) -> str:
    """The second part of the thinking: the request in few words."""
    return f"{rng.choice(('Asked:', 'The request:', 'Wanted:'))} {request}."


RIGHT = (
    "Everything matches.",
    "All of it is there.",
    "That is right.",
    "Nothing is wrong.",
    "It matches the request.",
)


def differences(scene: Scene, faults: Sequence[Fault], rng: Random) -> str:
    """The third part of the thinking. Like faults are counted together; at most three are named."""
    if not faults:
        return rng.choice(RIGHT)
    groups: dict[tuple, list[Fault]] = {}
    for fault in faults:
        key = (fault.sort, fault.wanted) if fault.sort in ("missing", "extra") else (id(fault),)
        groups.setdefault(key, []).append(fault)
    said = [_difference(scene, group, rng) for group in groups.values()][:3]
    text = " and ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said)
    return text[0].upper() + text[1:] + "."


def _difference(scene: Scene, group: Sequence[Fault], rng: Random) -> str:
    fault, count = group[0], len(group)
    be = "is" if count == 1 else "are"
    if fault.sort == "missing":
        words = f"{NUMBERS[count]} {noun(*fault.wanted, count)}"
        return rng.choice((f"{words} {be} missing", f"{words} {be} not there"))
    if fault.sort == "extra":
        words = f"{NUMBERS[count]} {noun(*fault.wanted, count)}"
        return rng.choice((f"{words} too many", f"there {be} {words} too many"))
    shape = scene.shapes[fault.op.index]
    what = f"the {description(scene, fault.op.index)}"
    if fault.sort == "malformed":
        return rng.choice((f"{what} is no real object", f"{what} is not whole"))
    if fault.sort == "color":
        return rng.choice(
            (f"{what} should be {fault.wanted[1]}", f"{what} is not {fault.wanted[1]}")
        )
    if fault.sort == "kind":
        return f"{what} should be {article(noun(*fault.wanted))}"
    if fault.sort == "relation":
        return rng.choice(
            (f"{what} should be {fault.wanted[0]}", f"{what} is not {fault.wanted[0]}")
        )
    if fault.sort == "swap":
        other = f"the {description(scene, fault.op.partner)}"
        return f"{what} and {other} have not changed places"
    if fault.sort == "place":
        return f"{what} is at the {place_of(shape)}, not at the {fault.wanted[0]}"
    assert fault.sort == "unwanted", fault.sort
    return rng.choice((f"{what} should not be there", f"{what} has to go"))


def payload(scene: Scene, ops: Sequence[Op], rng: Random) -> str:
    """The [EDIT] text of the ops: "remove the red star and add a blue ring at the left"."""
    return " and ".join(_instruction(scene, op, rng) for op in ops)


def _instruction(scene: Scene, op: Op, rng: Random) -> str:
    if op.verb == "add":
        verb = rng.choice(("add", "add", "draw", "put"))
        return f"{verb} {article(name_of(op.shape))} at the {place_of(op.shape)}"
    what = f"the {description(scene, op.index)}"
    if op.verb == "remove":
        return f"{rng.choice(('remove', 'remove', 'erase', 'delete'))} {what}"
    if op.verb == "move":
        return f"{rng.choice(('move', 'move', 'shift'))} {what} to the {place_of(op.shape)}"
    if op.verb == "swap":
        other = f"the {description(scene, op.partner)}"
        return f"{rng.choice(('swap', 'swap', 'exchange'))} {what} and {other}"
    if op.verb == "recolor":
        color = op.shape.color
        return rng.choice(
            (f"turn {what} {color}", f"make {what} {color}", f"change {what} to {color}")
        )
    assert op.verb == "replace", op.verb
    new = article(name_of(op.shape))
    return rng.choice((f"replace {what} with {new}", f"turn {what} into {new}"))


def edit_request(scene: Scene, op: Op, rng: Random, *, anywhere: bool = False) -> str:
    """What a user asks for by the op: an instruction, at times by kind alone, at times politely.

    anywhere: an object to add is named without a place.
    """
    words = _instruction(scene, op, rng)
    if anywhere:
        words = words.removesuffix(f" at the {place_of(op.shape)}")
    if op.index is not None and rng.random() < 0.4:
        shape = scene.shapes[op.index]
        if not shape.broken and sum(other.kind == shape.kind for other in scene.shapes) == 1:
            words = words.replace(f"the {name_of(shape)}", f"the {shape.kind}", 1)
    form = rng.random()
    if form < 0.15:
        return f"Please {words}."
    return words[0].upper() + words[1:] + "." if form < 0.5 else words


def bare_request(request: str) -> str:
    """An editing request as the thinking repeats it: no "please", no capital, no full stop."""
    words = request.removeprefix("Please ").rstrip(".")
    return words[0].lower() + words[1:]
