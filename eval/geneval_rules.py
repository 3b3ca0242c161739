"""GenEval's decision over detections: pure functions, no model, no image.

`judge(row, detections)` serves real detections (80 COCO classes, reading="official") and the
shapes world (reading="exact"). The rules are those of djghosh13/geneval, evaluate_images.py:

  each include clause takes the first `count` kept detections of its class, by score; too few
  fail it; with a colour, `count` of those taken must have it; with a position, every pair of a
  taken detection and one taken by the anchor clause must stand in the relation, and a failed
  anchor fails it. An exclude clause that finds `count` detections fails the image.

The exact reading differs in what a clause takes. Detections of the shapes world are certain, so
"most confident" means nothing there: a clause takes *all* detections of its class and, where it
has one, of its colour, and asks for at least `count`. "Two red circles and a blue circle" works.
Exact counts come from exclude clauses, which may carry a colour. A detection that is no known
kind (`MALFORMED`) fails every row: the image holds something that nobody asked for.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from eval.verdict import Verdict
from umm_reflect.shapes.scene import COLORS, RELATIONS

MALFORMED = "malformed"

THRESHOLD = 0.3  # score above which a detection counts
COUNTING_THRESHOLD = 0.9  # the same for rows tagged counting
MAX_OBJECTS = 16  # detections kept per class
POSITION_THRESHOLD = 0.1  # share of the summed box sizes that an offset must exceed
DIRECTION_THRESHOLD = 0.5  # share of the offset that must lie along the relation's axis

Reading = Literal["official", "exact"]
Row = Mapping[str, object]


@dataclass(frozen=True)
class Detection:
    """One object found in an image.

    kind: class name ("circle", "traffic light") or MALFORMED. color: one of COLORS, None if it
    was not classified. box: (x0, y0, x1, y1) in pixels, x1 and y1 past the end. score: 0..1.
    area: pixels, 0 if unknown. color_probabilities: over COLORS, for the graded score only.
    """

    kind: str
    color: str | None
    box: tuple[float, float, float, float]
    score: float = 1.0
    area: float = 0.0
    color_probabilities: tuple[float, ...] | None = None

    @property
    def centre(self) -> tuple[float, float]:
        """Centre of the box (x, y), pixels."""
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the box, pixels."""
        return self.box[2] - self.box[0], self.box[3] - self.box[1]

    def to_record(self) -> dict[str, object]:
        """The detection as a JSON-serialisable dict."""
        record: dict[str, object] = {
            "kind": self.kind,
            "color": self.color,
            "box": [round(float(v), 2) for v in self.box],
            "score": round(float(self.score), 4),
        }
        if self.area:
            record["area"] = round(float(self.area), 1)
        return record


@dataclass(frozen=True)
class _Clause:
    """An include or exclude clause, checked. `anchor` is the index of the anchor clause."""

    kind: str
    count: int
    color: str | None
    relation: str | None
    anchor: int | None

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}" if self.color else self.kind


@dataclass(frozen=True)
class _Outcome:
    """What became of an include clause. `taken` is None where the clause failed."""

    held: bool
    taken: tuple[Detection, ...] | None
    found: int
    credit: float
    reason: str


@dataclass(frozen=True)
class ClauseFinding:
    """What became of one include clause: how many were found, and what share of it is there."""

    clause: str
    held: bool
    found: int
    credit: float

    def to_record(self) -> dict[str, object]:
        """The finding as a JSON-serialisable dict."""
        return {
            "clause": self.clause,
            "held": self.held,
            "found": self.found,
            "credit": round(self.credit, 4),
        }


@dataclass(frozen=True)
class Assessment:
    """A row held against detections. `shares`: one per include clause, then one for each exclude
    clause that no include clause covers; what each is worth in [0, 1]."""

    clauses: tuple[ClauseFinding, ...]
    reasons: tuple[str, ...]
    shares: tuple[float, ...]
    malformed: int

    @property
    def correct(self) -> bool:
        return not self.reasons

    @property
    def reason(self) -> str:
        return "; ".join(self.reasons) or "as asked"

    def score(self) -> float:
        """1 if correct; otherwise the mean share, scaled into [0, 0.5)."""
        return 1.0 if self.correct else _failing_score(self.shares, self.malformed)


def judge(row: Row, detections: Sequence[Detection], *, reading: Reading = "official") -> Verdict:
    """Decide whether an image with these detections is what the row asks for.

    row: GenEval's schema, {tag, include, exclude?, prompt}; an exclude clause may carry a color.
    The verdict's score is 1 if correct, otherwise below 0.5 with a gradient (`_credit`).
    Raises ValueError for a row that does not follow the schema, and where a clause asks for the
    colour of a detection that was not classified.
    """
    found = assess(row, detections, reading=reading)
    evidence = {
        "reading": reading,
        "clauses": [clause.to_record() for clause in found.clauses],
        "detections": [d.to_record() for d in detections],
    }
    return Verdict(found.correct, found.score(), found.reason, evidence)


def assess(row: Row, detections: Sequence[Detection], *, reading: Reading) -> Assessment:
    """What `judge` decides from: the include clauses one by one, all reasons, all shares."""
    check_row(row)
    include = [_clause(c, i, "include") for i, c in _numbered(row, "include")]
    exclude = [_clause(c, i, "exclude") for i, c in _numbered(row, "exclude")]
    threshold = 0.0 if reading == "exact" else detection_threshold(row)
    kept = {
        kind: keep(detections, kind, threshold, None if reading == "exact" else MAX_OBJECTS)
        for kind in {c.kind for c in (*include, *exclude)}
    }

    outcomes: list[_Outcome] = []
    for clause in include:
        anchor = (
            None if clause.anchor is None else (include[clause.anchor], outcomes[clause.anchor])
        )
        spare = _spare(clause, include, kept, detections, threshold)
        outcomes.append(_judge_include(clause, kept[clause.kind], anchor, spare, reading))
    reasons = [o.reason for o in outcomes if not o.held]
    shares = [o.credit for o in outcomes]
    for clause in exclude:
        found = len(_of_color(kept[clause.kind], clause.color))
        if found < clause.count:
            continue
        asked = [i for i, c in enumerate(include) if _covers(clause, c)]
        reasons.append(_too_many(clause, found, bool(asked)))
        excess = max(0.0, 1 - (found - clause.count + 1) / max(1, clause.count - 1))
        for i in asked:
            shares[i] = min(shares[i], excess)
        if not asked:
            shares.append(excess)
    malformed = 0
    if reading == "exact":
        malformed = sum(d.kind == MALFORMED for d in detections)
        if malformed:
            noun = "an object has" if malformed == 1 else f"{malformed} objects have"
            reasons.append(f"{noun} no recognisable shape")
    clauses = tuple(
        ClauseFinding(c.name, o.held, o.found, o.credit)
        for c, o in zip(include, outcomes, strict=True)
    )
    return Assessment(clauses, tuple(reasons), tuple(shares), malformed)


def check_row(row: Row, classes: Sequence[str] = ()) -> None:
    """Raise ValueError, with the reason, unless `judge` can judge the row.

    classes: what a detector can find; a row that names another class is refused. (): any class.
    """
    clauses = [_clause(c, i, key) for key in ("include", "exclude") for i, c in _numbered(row, key)]
    if not clauses:
        raise ValueError(f"row has no include clause: {dict(row)}")
    for clause in clauses:
        if classes and clause.kind not in classes:
            close = difflib.get_close_matches(clause.kind, classes, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"no detector finds {clause.kind!r}, which the row names{hint}")


def detection_threshold(row: Row) -> float:
    """The score that a detection must exceed: 0.9 for counting rows, 0.3 for all others."""
    return COUNTING_THRESHOLD if row.get("tag") == "counting" else THRESHOLD


def keep(
    detections: Sequence[Detection],
    kind: str,
    threshold: float,
    limit: int | None = MAX_OBJECTS,
) -> list[Detection]:
    """Detections of one class above the threshold, best first, at most `limit` of them.

    GenEval's non-maximum suppression is off at its default overlap of 1, so there is none.
    """
    of_kind = [d for d in detections if d.kind == kind and d.score > threshold]
    return sorted(of_kind, key=lambda d: -d.score)[:limit]


def offset_direction(subject: Detection, anchor: Detection) -> tuple[float, float]:
    """GenEval's (dx, dy) of the subject as seen from the anchor, y growing downwards.

    Per axis the offset of the box centres shrinks towards zero by POSITION_THRESHOLD times both
    sizes; the result is divided by the norm of the offset before shrinking. (0, 0): no relation.
    """
    offset = [s - a for s, a in zip(subject.centre, anchor.centre, strict=True)]
    sizes = [s + a for s, a in zip(subject.size, anchor.size, strict=True)]
    shrunk = [
        math.copysign(max(abs(o) - POSITION_THRESHOLD * s, 0.0), o)
        for o, s in zip(offset, sizes, strict=True)
    ]
    if all(abs(s) < 1e-3 for s in shrunk):
        return 0.0, 0.0
    norm = math.hypot(*offset)
    return shrunk[0] / norm, shrunk[1] / norm


def relations_of(subject: Detection, anchor: Detection) -> set[str]:
    """Every relation in which the subject stands to the anchor: none, one or two of RELATIONS."""
    return {
        relation for relation in RELATIONS if along(subject, anchor, relation) > DIRECTION_THRESHOLD
    }


def along(subject: Detection, anchor: Detection, relation: str) -> float:
    """Signed share of the offset along the relation, in [-1, 1]; above 0.5 the relation holds."""
    dx, dy = offset_direction(subject, anchor)
    return {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[relation]


def _judge_include(
    clause: _Clause,
    kept: Sequence[Detection],
    anchor: tuple[_Clause, _Outcome] | None,
    spare: _Spare,
    reading: Reading,
) -> _Outcome:
    if reading == "official":
        taken = list(kept[: clause.count])
        matching = _of_color(taken, clause.color) if len(taken) == clause.count else taken
        found = len(matching)
    else:
        taken = matching = _of_color(kept, clause.color)
        found = len(matching)
    credit = _credit(clause, found, spare)
    if len(taken) < clause.count or found < clause.count:
        return _Outcome(False, None, found, credit, _missing(clause, found, spare))
    if clause.relation is None:
        return _Outcome(True, tuple(taken), found, credit, "")

    assert anchor is not None
    anchor_clause, anchor_outcome = anchor
    name = f"{clause.name} {_is(clause)} not {clause.relation} {anchor_clause.name}"
    if anchor_outcome.taken is None:
        return _Outcome(False, None, found, 0.6 * credit, f"{name} (which is not right)")
    component = min(along(s, a, clause.relation) for s in taken for a in anchor_outcome.taken)
    if component > DIRECTION_THRESHOLD:
        return _Outcome(True, tuple(taken), found, credit, "")
    closeness = (component + 1) / (DIRECTION_THRESHOLD + 1)  # 0: opposite side, 1: nearly there
    return _Outcome(False, None, found, credit * (0.6 + 0.4 * closeness), name)


@dataclass(frozen=True)
class _Spare:
    """Detections that nearly satisfy a clause and that no other clause claims."""

    other_color: tuple[Detection, ...]  # its class, another colour
    other_kind: tuple[Detection, ...]  # its colour, another class
    faint: tuple[Detection, ...]  # its class, below the threshold
    threshold: float


def _spare(
    clause: _Clause,
    include: Sequence[_Clause],
    kept: Mapping[str, Sequence[Detection]],
    detections: Sequence[Detection],
    threshold: float,
) -> _Spare:
    def claimed(d: Detection) -> bool:
        return any(c.kind == d.kind and c.color in (None, d.color) for c in include)

    own = kept[clause.kind]
    return _Spare(
        other_color=tuple(d for d in own if clause.color and not claimed(d)),
        other_kind=tuple(
            d
            for d in detections
            if clause.color
            and d.kind != clause.kind
            and d.color == clause.color
            and d.score > threshold
            and not claimed(d)
        ),
        faint=tuple(
            d for d in detections if threshold and d.kind == clause.kind and d.score <= threshold
        ),
        threshold=threshold,
    )


def _credit(clause: _Clause, found: int, spare: _Spare) -> float:
    """Share of a clause that is there, in [0, 1].

    Each instance found gives 1. An instance that is missing gives the best of what is left over:
    0.5 to 1 for the class in another colour (by the probability of the right one), half of that for
    one below the threshold, in proportion to its score, and 0.25 for another class in its colour.
    """

    def likeness(d: Detection) -> float:
        if clause.color is None:
            return 1.0
        if d.color_probabilities is None:
            return 0.5
        return 0.5 + 0.5 * d.color_probabilities[COLORS.index(clause.color)]

    offers = [likeness(d) for d in spare.other_color]
    offers += [0.5 * likeness(d) * d.score / spare.threshold for d in spare.faint]
    offers += [0.25 for _ in spare.other_kind]
    missing = max(0, clause.count - found)
    return (min(found, clause.count) + sum(sorted(offers, reverse=True)[:missing])) / clause.count


def _failing_score(shares: Sequence[float], malformed: int) -> float:
    """Mean credit, scaled into [0, 0.5); each malformed object takes a fifth off."""
    mean = sum(shares) / len(shares)
    return min(0.5 * mean * 0.8**malformed, math.nextafter(0.5, 0.0))


def _of_color(detections: Sequence[Detection], color: str | None) -> list[Detection]:
    if color is None:
        return list(detections)
    for d in detections:
        if d.color is None:
            raise ValueError(f"the row asks for a {color} {d.kind}: classify its colour first")
    return [d for d in detections if d.color == color]


def _covers(exclude: _Clause, include: _Clause) -> bool:
    """Whether what an include clause asks for counts towards an exclude clause."""
    return exclude.kind == include.kind and exclude.color in (None, include.color)


def _missing(clause: _Clause, found: int, spare: _Spare) -> str:
    if clause.count > 1:
        return f"{found} of {clause.count} {plural(clause.name)}"
    if spare.other_color:
        return f"{clause.kind} is {spare.other_color[0].color}, not {clause.color}"
    return f"{clause.name} missing"


def _too_many(clause: _Clause, found: int, wanted: bool) -> str:
    name = plural(clause.name) if found != 1 else clause.name
    if clause.count == 1:
        return f"{found} {name} instead of none"
    return f"{found} {name} instead of {'' if wanted else 'at most '}{clause.count - 1}"


def plural(name: str) -> str:
    """English plural of a class name, by ending: circles, crosses, benches."""
    return name + ("es" if name.endswith(("s", "x", "sh", "ch")) else "s")


def _is(clause: _Clause) -> str:
    return "is" if clause.count == 1 else "are"


def _numbered(row: Row, key: str) -> Sequence[tuple[int, Mapping[str, object]]]:
    value = row.get(key) or []
    if not isinstance(value, list | tuple) or not all(isinstance(c, Mapping) for c in value):
        raise ValueError(f"row[{key!r}] must be a list of clauses, got {value!r}")
    return list(enumerate(value))


def _clause(clause: Mapping[str, object], index: int, where: str) -> _Clause:
    kind, count = clause.get("class"), clause.get("count")
    color, position = clause.get("color"), clause.get("position")
    if not isinstance(kind, str) or type(count) is not int or count < 1:
        raise ValueError(f"{where}[{index}] needs a class and a count >= 1, got {dict(clause)}")
    if color is not None and color not in COLORS:
        raise ValueError(f"{where}[{index}] has colour {color!r}, not one of {', '.join(COLORS)}")
    if position is None:
        return _Clause(kind, count, color, None, None)
    if where == "exclude":
        raise ValueError(f"exclude[{index}] has a position; only include clauses may")
    if not isinstance(position, list | tuple) or len(position) != 2:
        raise ValueError(f"include[{index}] has position {position!r}, not [relation, anchor]")
    relation, anchor = position
    if relation not in RELATIONS:
        raise ValueError(f"include[{index}] has relation {relation!r}, not one of {RELATIONS}")
    if type(anchor) is not int or not 0 <= anchor < index:
        raise ValueError(f"include[{index}] has anchor {anchor!r}; it must be an earlier clause")
    return _Clause(kind, count, color, relation, anchor)
