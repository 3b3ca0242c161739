"""From a row and the evidence of an image to its three results: pure functions, no model, no image.

    official_correct(row, evidence)        # GenEval's yes or no (geneval_rules.py)
    cross_checked(row, evidence)           # the same, and BLIP agrees on two coloured objects
    graded(row, evidence, "ours")          # in [0, 1]: 1 if correct, below 0.5 otherwise
    verdict(row, evidence)                 # all of them, with the reason

`cross_checked` is what UMM-Reflection's reward calls strict: for a row of two coloured objects BLIP
has to find each more likely in its own colour than in the other's (a margin above 0). The margin is
not rounded to four digits here, so near ties are no exact ties.

A graded score has a preset. "release" is the published formula: it sees only what is above the
thresholds, so a missing object scores 0. "ours" rises with the scores of detections below the
threshold, with the probability of the right colour and as a subject nears its side.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, get_args

from eval.evidence import Evidence
from eval.geneval_rules import (
    COUNTING_THRESHOLD,
    DIRECTION_THRESHOLD,
    THRESHOLD,
    Detection,
    Row,
    along,
    assess,
    keep,
)
from eval.verdict import Verdict

Rule = Literal["official", "cross_checked"]
Preset = Literal["ours", "release"]
RULES, PRESETS = get_args(Rule), get_args(Preset)

FAILED = math.nextafter(0.5, 0.0)  # the most that a wrong image can score

# The families that the release's formula knows, and how many include clauses their rows have.
_CLAUSES = {
    "single_object": 1,
    "two_object": 2,
    "counting": 1,
    "colors": 1,
    "position": 2,
    "color_attr": 2,
}


def official_correct(row: Row, evidence: Evidence) -> bool:
    """GenEval's decision. Errors: ValueError for a row outside the schema, or a colour unseen."""
    return assess(row, evidence.detections, reading="official").correct


def cross_checked(row: Row, evidence: Evidence) -> bool:
    """GenEval's decision, and for two coloured objects BLIP's margins are above 0.

    Errors: as `official_correct`, and ValueError if BLIP was not asked.
    """
    return official_correct(row, evidence) and all(m > 0 for m in margins(row, evidence).values())


def graded(row: Row, evidence: Evidence, preset: Preset, rule: Rule = "official") -> float:
    """The score of an image in [0, 1]: exactly 1 where `rule` says yes, below 0.5 where it says no.

    Errors: as `cross_checked`; ValueError for a tag that the release's formula does not know.
    """
    correct = {"official": official_correct, "cross_checked": cross_checked}[rule](row, evidence)
    if correct:
        return 1.0
    if preset == "ours":
        return _ours(row, evidence, rule)
    return min(_released(row, evidence, rule), FAILED)


def verdict(
    row: Row, evidence: Evidence, *, rule: Rule = "official", preset: Preset = "ours"
) -> Verdict:
    """The opinion of one image by `rule`, graded by `preset`; the record holds all three results.

    `cross_checked` is None in the record where BLIP would have to be asked and was not.
    """
    assessment = assess(row, evidence.detections, reading="official")
    asked = not unanswered(row, evidence)
    checked = cross_checked(row, evidence) if asked or rule == "cross_checked" else None
    score = graded(row, evidence, preset, rule)
    reasons = list(assessment.reasons)
    if rule == "cross_checked":
        reasons += [
            f"BLIP does not see the {name} (margin {margin:+.2f})"
            for name, margin in margins(row, evidence).items()
            if margin <= 0
        ]
    record = {
        **evidence.to_record(),
        "rule": rule,
        "preset": preset,
        "official_correct": assessment.correct,
        "cross_checked": checked,
        "clauses": [clause.to_record() for clause in assessment.clauses],
    }
    return Verdict(score == 1.0, score, "; ".join(reasons) or "as asked", record)


# --- the second opinion ---------------------------------------------------------------------------


def questions(row: Row) -> list[tuple[str, str, str]]:
    """What BLIP is asked for a row: (class, its colour, the colour of the other object), twice for
    a row of two coloured objects and never for another. Errors: ValueError if they do not differ.
    """
    if row.get("tag") != "color_attr":
        return []
    pairs = [(str(c["class"]), c.get("color")) for c in row["include"]]  # type: ignore[index]
    kinds, hues = {kind for kind, _ in pairs}, {hue for _, hue in pairs}
    if len(pairs) != 2 or len(kinds) < 2 or len(hues) < 2 or None in hues:
        raise ValueError(f"a color_attr row has two objects of different colours, not {pairs}")
    (first, hue), (second, other) = pairs
    return [(first, str(hue), str(other)), (second, str(other), str(hue))]


def unanswered(row: Row, evidence: Evidence) -> list[tuple[str, str]]:
    """The (class, colour) that BLIP has yet to be asked about: of objects that are there."""
    return [
        (kind, color)
        for kind, *both in questions(row)
        if keep(evidence.detections, kind, THRESHOLD, 1)
        for color in both
        if evidence.answer(kind, color) is None
    ]


def margins(row: Row, evidence: Evidence) -> dict[str, float]:
    """'red dog' -> how much likelier BLIP finds the dog red than of the other object's colour.

    0 for an object that was not found, {} for rows that have no such question.
    Errors: ValueError if an object was found and BLIP was not asked.
    """
    if missing := unanswered(row, evidence):
        kind, color = missing[0]
        raise ValueError(f"the row asks for a {color} {kind}: ask BLIP about its colour first")
    found = {}
    for kind, color, other in questions(row):
        own, swapped = evidence.answer(kind, color), evidence.answer(kind, other)
        seen = keep(evidence.detections, kind, THRESHOLD, 1)
        found[f"{color} {kind}"] = own - swapped if seen and own is not None else 0.0
    return found


# --- graded scores --------------------------------------------------------------------------------


def _ours(row: Row, evidence: Evidence, rule: Rule) -> float:
    """The mean share of what is there, scaled into [0, 0.5). See geneval_rules._credit.

    With the second opinion the share of a coloured object falls by half of what its margin is below
    0, so that it keeps at least half.
    """
    found = assess(row, evidence.detections, reading="official")
    if rule == "cross_checked":
        worth = [1 + min(0.0, margin) / 2 for margin in margins(row, evidence).values()]
        worth += [1.0] * (len(found.shares) - len(worth))
        shares = tuple(s * w for s, w in zip(found.shares, worth, strict=True))
        found = replace(found, shares=shares, reasons=("not as asked",))
    return found.score()


def _released(row: Row, evidence: Evidence, rule: Rule) -> float:
    """The published formula for an image that is not right, before it is cut below 0.5.

    f is the share of what is there; the score is half of it. A detection is there above 0.3 or not
    at all, since the release's detector reports none below.
    """
    tag, include = str(row.get("tag")), list(row["include"])
    if len(include) != _CLAUSES.get(tag):
        raise ValueError(
            f"the release's formula knows no rows tagged {tag!r} with {len(include)} clauses; "
            "use the preset ours"
        )
    tops = [_top(evidence, clause["class"]) for clause in include]
    present = [float(top is not None) for top in tops]
    if tag == "counting":
        target = include[0]["count"]
        found = len(keep(evidence.detections, include[0]["class"], COUNTING_THRESHOLD))
        return 0.5 * max(0.0, 1 - abs(found - target) / target)
    if tag in ("single_object", "two_object"):
        return 0.5 * _mean(present)
    if tag == "colors":
        return 0.5 * (0.5 * present[0] + 0.5 * _sure(tops[0], include[0].get("color")))
    if tag == "position":
        share = 0.0
        anchor, subject = tops
        if anchor is not None and subject is not None and "position" in include[1]:
            relation = include[1]["position"][0]
            share = min(1.0, max(0.0, along(subject, anchor, relation) / DIRECTION_THRESHOLD))
        return 0.5 * (0.6 * _mean(present) + 0.4 * share)
    parts = []
    for top, clause, margin in zip(tops, include, margins(row, evidence).values(), strict=True):
        sure = _sure(top, clause["color"])
        if sure and (rule == "official" or margin > 0):
            parts.append(1.0)
        elif top is None:
            parts.append(0.0)
        else:
            parts.append(0.5 + 0.5 * _mean([sure, min(1.0, max(0.0, margin + 1))]))
    return 0.5 * _mean(parts)


def _top(evidence: Evidence, kind: str) -> Detection | None:
    kept = keep(evidence.detections, kind, THRESHOLD, 1)
    return kept[0] if kept else None


def _sure(top: Detection | None, color: str | None) -> float:
    """The probability of the likeliest colour if it is the right one, else 0."""
    if top is None or top.color != color or top.color_probabilities is None:
        return 0.0
    return max(top.color_probabilities)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
