"""What a judged run of a model's own teaches it: nothing, or one line of training data. Pure.

    found = sort_out(trajectory, right=[False, True])          # the judge's yes or no of each image
    found.kind, found.last                                     # Kind.REPAIRED, 1
    line = line_of(trajectory, found, verdicts, row, "own-7", images)

A look decides well when it says "done" at a right image and "edit" at a wrong one. Looks are gone
through in order, up to the first that decides badly or says "done":

    accepted    the first image is right, and the model says so
    repaired    wrong, and the model says so until an edit makes it right, and says that too
    corrected   the first bad decision is replaced by the judge's; what was said before stands as a
                condition and is not learned. A wrong stop becomes an edit that is not drawn
    unrepaired  every decision was good, but no edit made it right      (left out, as what follows)
    malformed   a look that cannot be read came before any of this
    unjudged    the judge had no opinion of an image that counts
    unsayable   the corrected turn cannot be written in the protocol (the prompt holds its tags)

Images that are not right are conditions as well: nothing is learned from drawing them. A line is in
the format of our own JSONL data (one trajectory, see `umm-reflect data --help`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agent.protocol import canonical, parse_schema
from agent.types import Reflection, Trajectory
from eval.geneval_rules import plural
from eval.verdict import Verdict
from umm_reflect.shapes.prompts import NUMBERS

LONGEST_REASON = 300  # characters: a turn has a budget


class Kind(StrEnum):
    """What became of a trajectory; the first three are training data."""

    ACCEPTED = "accepted"
    REPAIRED = "repaired"
    CORRECTED = "corrected"
    UNREPAIRED = "unrepaired"
    MALFORMED = "malformed"
    UNJUDGED = "unjudged"
    UNSAYABLE = "unsayable"


LEARNED = (Kind.ACCEPTED, Kind.REPAIRED, Kind.CORRECTED)


@dataclass(frozen=True)
class Found:
    """last: the number of the look that ends the line, and of its image."""

    kind: Kind
    last: int


def is_right(verdict: Verdict, right_at: float | None) -> bool | None:
    """The judge's yes or no; where it has none, whether the score is `right_at` or more.

    None without an opinion. Errors: ValueError for a judge without a yes or no and no `right_at`.
    """
    if verdict.error is not None:
        return None
    if verdict.correct is not None:
        return verdict.correct
    if right_at is None:
        raise ValueError("this judge has no yes or no; say from which score on an image is right")
    return verdict.score >= right_at


def sort_out(trajectory: Trajectory, right: Sequence[bool | None]) -> Found:
    """Which kind a trajectory is. right: of each of its images, see `is_right`."""
    for k, step in enumerate(trajectory.steps):
        said = step.turn.reflection
        if said is None:
            return Found(Kind.MALFORMED, k)
        if right[k] is None:
            return Found(Kind.UNJUDGED, k)
        done = said.action == "done"
        if done != right[k]:
            return Found(Kind.CORRECTED, k)
        if done:
            return Found(Kind.REPAIRED if k else Kind.ACCEPTED, k)
    malformed = trajectory.plan is not None and trajectory.plan.error is not None
    return Found(Kind.MALFORMED if malformed else Kind.UNREPAIRED, len(trajectory.steps) - 1)


def line_of(
    trajectory: Trajectory,
    found: Found,
    verdicts: Sequence[Verdict],
    row: Mapping[str, Any],
    uid: str,
    images: Sequence[dict[str, str]],
) -> dict[str, Any] | None:
    """The line of one of the LEARNED kinds; None if it is unsayable.

    images: {"file", "sha256"} of the images up to `found.last`.
    """
    kind, last = found.kind, found.last
    corrected = kind is Kind.CORRECTED
    turns = [_entry(s.turn.reflection, learn=not corrected) for s in trajectory.steps[: last + 1]]
    right_last = kind is not Kind.CORRECTED
    if corrected:
        right_last = trajectory.steps[last].turn.reflection.action == "edit"
        said = correction(row["prompt"], verdicts[last], row, right=right_last)
        number = last + (trajectory.plan is not None)
        text = canonical(said, number, source := f"Image #{last}")
        if parse_schema(text, number, source) != said:
            return None
        turns[last] = _entry(said)
    drawn: list[dict[str, Any]] = [{**entry, "learn": False} for entry in images]
    if right_last:
        drawn[last] = dict(images[last])
    plan = trajectory.plan and {"plan": _entry(trajectory.plan.reflection, learn=not corrected)}
    return {
        "uid": uid,
        "task": "t2i",
        "prompt": trajectory.prompt,
        "images": drawn,
        **(plan or {}),
        "turns": turns,
        "subtype": str(kind),
        **({"open": True} if turns[last]["action"] == "edit" else {}),
    }


def _entry(said: Reflection, *, learn: bool = True) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "thinking": said.thinking,
        "score": said.score,
        "action": said.action,
    }
    if said.edit:
        entry["edit"] = said.edit
    return entry if learn else {**entry, "learn": False}


# --- what the judge would have said ---------------------------------------------------------------


def correction(prompt: str, verdict: Verdict, row: Mapping[str, Any], *, right: bool) -> Reflection:
    """The turn that decides as the judge does, in its words where it has any.

    correction("two red circles", Verdict(False, 0.25, "1 of 2 red circles"), row, right=False)
    # "Asked: two red circles. 1 of 2 red circles.", score 3, edit "add a red circle"
    """
    request = _one_line(prompt).rstrip(".")
    if right:
        return Reflection(f"Asked: {request}. The image shows it.", 10, "done", "")
    score = min(9, int(10 * verdict.score + 0.5))
    reason = _one_line(verdict.reason)[:LONGEST_REASON].rstrip(". ")
    if verdict.correct is None or not reason:  # a bare number is no reason
        thinking = f"Asked: {request}. The image does not show it."
        return Reflection(thinking, score, "edit", f"change the image until it shows {request}")
    thinking = f"Asked: {request}. {reason[0].upper()}{reason[1:]}."
    return Reflection(thinking, score, "edit", edit_for(reason, row))


def edit_for(reason: str, row: Mapping[str, Any]) -> str:
    """An instruction that mends the first fault of a reason in the words of `geneval_rules`; other
    words are repeated. row: its clauses say how the objects are called."""
    names = [
        " ".join(filter(None, (clause.get("color"), clause["class"])))
        for key in ("include", "exclude")
        for clause in row.get(key) or ()
    ]
    one_of = {plural(name): name for name in names}

    def many(count: int, name: str) -> str:
        if count == 1:
            return _a(one_of.get(name, name))
        return f"{NUMBERS[count] if count < len(NUMBERS) else count} {name}"

    for part in reason.split("; "):
        if found := re.fullmatch(r"(\d+) of (\d+) (.+)", part):
            return f"add {many(int(found[2]) - int(found[1]), found[3])}"
        if found := re.fullmatch(r"(.+) missing", part):
            return f"add {_a(found[1])}"
        if found := re.fullmatch(r"\d+ (.+) instead of none", part):
            return f"remove every {one_of.get(found[1], found[1])}"
        if found := re.fullmatch(r"(\d+) (.+) instead of (?:at most )?(\d+)", part):
            return f"remove {many(int(found[1]) - int(found[3]), found[2])}"
        if found := re.fullmatch(r"(.+) is (\w+), not (\w+)", part):
            return f"turn the {found[2]} {found[1]} {found[3]}"
        if found := re.fullmatch(r"(.+?) (?:is|are) not (\w+(?: of)?) (.+)", part):
            anchor = found[3].removesuffix(" (which is not right)")
            return f"move the {found[1]} so that it is {found[2]} the {anchor}"
        if part.endswith("no recognisable shape"):
            return "remove the malformed shape"
    return f"mend this: {reason}"


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
