"""What is wrong with a scene, and what mends it: faults with their ops, and the score.

A demand is either a prompt row (GenEval's schema in its exact reading: a clause takes every whole
object of its kind and colour, exact counts come from `exclude`, a malformed object fails) or an
edit of a source scene. `assess_row` and `assess_edit` list the faults of *any* scene, each with the
op that mends it. They do not care how the scene came about, so they also serve scenes that were
read from a model's own pictures. Mending the first fault and looking again, as often as it takes,
ends in a right scene.

The written rule of the score, out of 10; whatever is not right has at most 9:

    a row      10 x facts that hold / facts asked, rounded half up. An object asked for is one fact
               for its kind and one for its colour if that is asked; a position is one. An object
               too many, or a malformed one that has to go, costs one as well.
    an edit    5 for the change that was asked, and 5 x the share of the source's other objects that
               are as they were, rounded half up. A stray new object costs one of those.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from sft.shapes_ops import Crowded, Op, Verb, apply, find_room, swapped, turned
from sft.shapes_words import cell_of, is_unique, name_of, objects_of, place_of
from umm_reflect.shapes.sampler import is_clear
from umm_reflect.shapes.scene import COLORS, MIRRORED, Scene, Shape, relations

Sort = Literal[
    "malformed", "kind", "color", "missing", "extra", "unwanted", "relation", "place", "swap"
]

USUAL_SIZE = 0.28  # of a shape that is added to an empty scene
NEAR = 0.08  # two looks at one object find it this close


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, the op that mends it, and how many facts it costs.

    wanted: (kind, color or None), or for a relation its words ("left of the blue square",); ()
    where nothing is wanted.
    """

    sort: Sort
    op: Op
    wanted: tuple[str | None, ...] = ()
    facts: int = 1


@dataclass(frozen=True, slots=True)
class Assessment:
    """Score 0..10 by the written rule, and the faults in the order of saying and mending."""

    score: int
    faults: tuple[Fault, ...]


def is_satisfied(row: Mapping, scene: Scene) -> bool:
    """Whether the scene is what the row asks for, in the exact reading of GenEval's rules."""
    if any(shape.broken for shape in scene.shapes):
        return False
    taken = [scene.matching(c["class"], c.get("color")) for c in row["include"]]
    for clause, found in zip(row["include"], taken, strict=True):
        if len(found) < clause["count"]:
            return False
        if "position" in clause:
            relation, anchor = clause["position"]
            pairs = ((scene.shapes[s], scene.shapes[a]) for s in found for a in taken[anchor])
            if not all(relation in relations(subject, other) for subject, other in pairs):
                return False
    return all(
        len(scene.matching(c["class"], c.get("color"))) < c["count"] for c in row.get("exclude", ())
    )


def assess_row(row: Mapping, scene: Scene, rng: Random) -> Assessment:
    """What is wrong with the scene against a prompt row.

    Order of the faults: malformed objects, wrong kinds and colours, missing objects, objects too
    many, and, once the objects are right, positions. An object that nobody asked for becomes one
    that is missing, if one is. `rng` chooses among equal repairs. Raises Crowded.
    """
    planner = _RowPlanner(row, scene, rng)
    planner.mend_malformed()
    planner.mend_looks()
    planner.add_missing()
    planner.remove_extra()
    if not planner.faults:
        planner.mend_positions()
    faults = tuple(planner.faults)
    assert bool(faults) != is_satisfied(row, scene), (row, scene, faults)
    if not faults:
        return Assessment(10, ())
    asked = sum(c["count"] * (1 + ("color" in c)) + ("position" in c) for c in row["include"])
    lost = sum(fault.facts for fault in faults)
    if any(fault.sort in ("missing", "kind", "color") for fault in faults):
        lost += sum("position" in c for c in row["include"])  # cannot hold without its objects
    return Assessment(_out_of_ten(1 - lost / asked), faults)


def _out_of_ten(share: float) -> int:
    return min(9, math.floor(10 * max(0.0, share) + 0.5))


class _RowPlanner:
    """`shapes` is the scene as mended so far, by index; shapes that are added get indices past the
    scene's own."""

    def __init__(self, row: Mapping, scene: Scene, rng: Random):
        self.row, self.scene, self.rng = row, scene, rng
        self.shapes = {i: scene.shapes[i] for i in objects_of(scene)}
        self.faults: list[Fault] = []

    def found(self, clause: Mapping) -> list[int]:
        """Indices of the whole objects of the clause's kind and colour."""
        kind, color = clause["class"], clause.get("color")
        return [
            index
            for index, shape in self.shapes.items()
            if shape.kind == kind and not shape.broken and color in (None, shape.color)
        ]

    def missing(self) -> list[Mapping]:
        """The clause of each missing object, one entry an object."""
        clauses: list[Mapping] = []
        for clause in self.row["include"]:
            clauses += [clause] * max(0, clause["count"] - len(self.found(clause)))
        return clauses

    def extra(self) -> list[tuple[int, Mapping]]:
        """Objects that an exclude clause counts as too many, with the clause.

        Those go first that no include clause asks for, then those that words single out.
        """
        asked = {index for clause in self.row["include"] for index in self.found(clause)}
        extra: dict[int, Mapping] = {}
        for clause in self.row.get("exclude", ()):
            found = self.found(clause)
            own = [i for i in found if i < len(self.scene.shapes)]
            alone = {i for i in own if len(own) > 1 and is_unique(self.scene, i)}
            found.sort(key=lambda i: (i not in asked, i in alone))
            for index in found[clause["count"] - 1 :]:
                extra.setdefault(index, clause)
        return list(extra.items())

    def spare(self) -> list[int]:
        """Objects that may become what is missing: no clause asks for them, or too many are
        there."""
        taken = {index for clause in self.row["include"] for index in self.found(clause)}
        return sorted({i for i in self.shapes if i not in taken} | {i for i, _ in self.extra()})

    def change(self, sort: Sort, verb: Verb, index: int, clause: Mapping, facts: int, **to) -> None:
        self.shapes[index] = shape = replace(self.shapes[index], **to)
        wanted = (clause["class"], clause.get("color"))
        self.faults.append(Fault(sort, Op(verb, index, shape), wanted, facts))

    def drop(self, sort: Sort, index: int, wanted: tuple[str | None, ...] = ()) -> None:
        del self.shapes[index]
        self.faults.append(Fault(sort, Op("remove", index, None), wanted))

    def mend_malformed(self) -> None:
        for index in [i for i, shape in self.shapes.items() if shape.broken]:
            shape, missing = self.shapes[index], self.missing()
            if not missing:
                self.drop("malformed", index)
                continue
            clause = min(missing, key=lambda c: _distance(shape, c))
            kind, color = clause["class"], clause.get("color") or shape.color
            facts = 1 + ("color" in clause)
            looks = {
                "kind": kind,
                "color": color,
                "broken": 0.0,
                "rotation": turned(kind, self.rng),
            }
            self.change("malformed", "replace", index, clause, facts, **looks)

    def mend_looks(self) -> None:
        while (missing := self.missing()) and (spare := self.spare()):
            pairs = [
                (_distance(self.shapes[i], c), i, n) for i in spare for n, c in enumerate(missing)
            ]
            _, index, number = min(pairs)
            clause, shape = missing[number], self.shapes[index]
            kind, color = clause["class"], clause.get("color") or shape.color
            if shape.kind == kind:
                self.change("color", "recolor", index, clause, 1, color=color)
            else:
                facts = 1 + (color != shape.color)
                looks = {"kind": kind, "color": color, "rotation": turned(kind, self.rng)}
                self.change("kind", "replace", index, clause, facts, **looks)

    def add_missing(self) -> None:
        for clause in self.missing():
            kind, color = clause["class"], clause.get("color")
            alike = sorted({shape.color for shape in self.shapes.values() if shape.kind == kind})
            drawn = color or self.rng.choice(alike or COLORS)
            index = max(self.shapes, default=-1) + 1 + len(self.scene.shapes)
            sizes = [shape.size for shape in self.scene.shapes]
            size = self.rng.choice(sizes) if sizes else USUAL_SIZE
            new = Shape(kind, drawn, 0.5, 0.5, size, turned(kind, self.rng))
            self.shapes[index] = shape = self.room_for(new, None, self.side_of(clause))
            op = Op("add", None, shape)
            self.faults.append(Fault("missing", op, (kind, color), 1 + (color is not None)))

    def remove_extra(self) -> None:
        for index, clause in reversed(self.extra()):
            if index >= len(self.scene.shapes):
                raise Crowded("an object that was added is too many: the row contradicts itself")
            self.drop("extra", index, (clause["class"], clause.get("color")))

    def mend_positions(self) -> None:
        for clause in self.row["include"]:
            if "position" not in clause:
                continue
            relation, anchor = clause["position"]
            anchor_clause = self.row["include"][anchor]
            self.drop_misplaced(relation, clause, anchor_clause)
            self.drop_misplaced(MIRRORED[relation], anchor_clause, clause)
            anchors = self.found(anchor_clause)
            for index in self.found(clause):
                wrong = self.misplaced(relation, index, anchors)
                if wrong:
                    self.mend_position(relation, index, wrong[0], clause, anchor_clause)

    def misplaced(self, relation: str, index: int, anchors: Sequence[int]) -> list[int]:
        """The anchors to which the shape does not stand in the relation."""
        shape = self.shapes[index]
        return [a for a in anchors if relation not in relations(shape, self.shapes[a])]

    def drop_misplaced(self, relation: str, clause: Mapping, anchor_clause: Mapping) -> None:
        """Of more objects than a clause asks for, those on a wrong side are too many."""
        found, anchors = self.found(clause), self.found(anchor_clause)
        wrong = [index for index in found if self.misplaced(relation, index, anchors)]
        wrong.sort(key=lambda index: not is_unique(self.scene, index))
        for index in wrong[: len(found) - clause["count"]]:
            self.drop("extra", index, (clause["class"], clause.get("color")))

    def mend_position(
        self, relation: str, subject: int, anchor: int, clause: Mapping, anchor_clause: Mapping
    ) -> Op:
        """Move the subject, or the anchor where that has no room, or let the two change places."""
        a, b = self.shapes[subject], self.shapes[anchor]
        tries = (
            lambda: Op("move", subject, self.room_for(a, subject, self.side_of(clause))),
            lambda: self.swap(relation, subject, anchor),
            lambda: Op("move", anchor, self.room_for(b, anchor, self.side_of(anchor_clause))),
        )
        for attempt in tries:
            try:
                op = attempt()
            except Crowded:
                continue
            if op.index == anchor:
                words = f"{MIRRORED[relation]} the {name_of(a)}"
            else:
                words = f"{relation} the {name_of(b)}"
            self.shapes |= dict(zip(op.touched, op.results, strict=True))
            self.faults.append(Fault("relation", op, (words,)))
            return op
        raise Crowded(f"no room for a {name_of(a)} {relation} a {name_of(b)}")

    def swap(self, relation: str, subject: int, anchor: int) -> Op:
        op = swapped(self.shapes, subject, anchor)
        if relation not in relations(*op.results):
            raise Crowded("changing places does not bring the relation about")
        return op

    def side_of(self, clause: Mapping) -> Callable[[Shape], bool]:
        """A test of places for an object of this clause: whether the row's positions hold there."""
        include = self.row["include"]
        tests: list[tuple[str, list[Shape]]] = []
        if "position" in clause:
            relation, anchor = clause["position"]
            tests.append((relation, [self.shapes[i] for i in self.found(include[anchor])]))
        for other in include:
            if "position" in other and include[other["position"][1]] is clause:
                subjects = [self.shapes[i] for i in self.found(other)]
                tests.append((MIRRORED[other["position"][0]], subjects))

        def holds(shape: Shape) -> bool:
            for relation, others in tests:
                if not others and not _leaves_room(relation, shape):
                    return False
                if not all(is_clear(relation, shape, other) for other in others):
                    return False
            return True

        return holds

    def room_for(self, shape: Shape, moved: int | None, fits: Callable[[Shape], bool]) -> Shape:
        """The shape put where there is room now and later. moved: its index, if it is there."""
        others = {i: other for i, other in self.shapes.items() if i != moved}
        before = [o for i, o in enumerate(self.scene.shapes) if i != moved and o != others.get(i)]
        return find_room(shape, [*others.values(), *before], self.rng, fits, shrinks=moved is None)


def assess_edit(source: Scene, op: Op, scene: Scene, *, anywhere: bool = False) -> Assessment:
    """What is wrong with a scene that should be the source after the op, and nothing else changed.

    A shape that the op adds or moves may have any size and stand anywhere in the cell that was
    named (anywhere: in any cell); everything else is known by its looks and its place. Faults have
    the order kind and colour, place, missing, unwanted; ops put things where they were. Raises no
    Crowded: the places are those of the wanted scene.
    """
    wanted = list(apply(source, [op]).shapes)
    free = op.shape if op.verb in ("add", "move") else None

    def there(shape: Shape, target: Shape) -> bool:
        if target is free:
            return anywhere or cell_of(shape) == cell_of(target)
        return math.hypot(shape.x - target.x, shape.y - target.y) < NEAR

    def alike(shape: Shape, target: Shape) -> bool:
        return name_of(shape) == name_of(target)

    seen, open_targets = {i: scene.shapes[i] for i in objects_of(scene)}, list(wanted)
    pairs: list[tuple[int, Shape, str]] = []
    faults: list[Fault] = []
    if op.verb == "swap":
        before = [source.shapes[index] for index in op.touched]
        both = [i for s in before for i, o in seen.items() if there(o, s) and alike(o, s)]
        if len(both) == 2:
            faults.append(Fault("swap", swapped(seen, *both)))
            for index, target in zip(both, op.results, strict=True):
                del seen[index]
                open_targets.remove(target)
    tests = (
        ("right", lambda shape, target: there(shape, target) and alike(shape, target)),
        ("looks", there),
        ("place", alike),
    )
    for outcome, test in tests:
        for target in list(open_targets):
            index = next((i for i, shape in seen.items() if test(shape, target)), None)
            if index is not None:
                del seen[index]
                open_targets.remove(target)
                pairs.append((index, target, outcome))

    for index, target, outcome in pairs:
        shape = scene.shapes[index]
        looks = (target.kind, target.color)
        if outcome == "looks" and shape.broken:
            faults.append(Fault("malformed", Op("replace", index, _as(shape, target)), looks))
        elif outcome == "looks" and shape.kind == target.kind:
            new = replace(shape, color=target.color)
            faults.append(Fault("color", Op("recolor", index, new), looks))
        elif outcome == "looks":
            faults.append(Fault("kind", Op("replace", index, _as(shape, target)), looks))
    for index, target, outcome in pairs:
        if outcome == "place":
            new = replace(scene.shapes[index], x=target.x, y=target.y)
            faults.append(Fault("place", Op("move", index, new), (place_of(target),)))
    for target in open_targets:
        looks = (target.kind, target.color)
        faults.append(Fault("missing", Op("add", None, target), looks))
    for index, shape in seen.items():
        faults.append(Fault("malformed" if shape.broken else "unwanted", Op("remove", index, None)))

    if not faults:
        return Assessment(10, ())
    right = [target for _, target, outcome in pairs if outcome == "right"]
    stray, asked = len(seen), len(op.results)
    if op.verb == "remove":
        gone = source.shapes[op.index]
        left = sum(alike(shape, gone) and there(shape, gone) for shape in seen.values())
        done, stray = not left, stray - left
    else:
        done = sum(target in op.results for target in right) == asked
    others = len(wanted) - asked
    kept = sum(target not in op.results for target in right)
    share = max(0, kept - stray) / others if others else float(not stray)
    return Assessment(_out_of_ten(0.5 * done + 0.5 * share), tuple(faults))


def _as(shape: Shape, target: Shape) -> Shape:
    """The shape with the looks of the target, where it stands."""
    return replace(
        shape, kind=target.kind, color=target.color, rotation=target.rotation, broken=0.0
    )


def _distance(shape: Shape, clause: Mapping) -> int:
    """How far a shape is from what a clause asks: 1 its colour, 2 its kind, 3 both."""
    other_color = clause.get("color") not in (None, shape.color)
    return 2 * (shape.kind != clause["class"]) + other_color


def _leaves_room(relation: str, shape: Shape) -> bool:
    """Whether a column or row of cells is free for what the shape will be left of, above, ..."""
    column, row = cell_of(shape) % 3, cell_of(shape) // 3
    free = {"left of": column < 2, "right of": column > 0, "above": row < 2, "below": row > 0}
    return free[relation]
