"""What a prompt in GenEval's words asks for: its row, from the sentence alone.

    row_of("a photo of two red cars and a dog")
    # {"tag": "compound", "include": [{"class": "car", "count": 2, "color": "red"}, ...], "prompt": ...}
    row_of("a circle left of a square")                # a position row
    row_of("a cosy evening")                           # None: nothing that can be counted

For prompts that a person types; test sets carry their rows. Names are not looked up here: the judge
says which ones it knows.
"""  # noqa: E501  (a row is one line)

from __future__ import annotations

import re
from typing import Any

from umm_reflect.shapes.scene import COLORS, RELATIONS

NUMBERS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6}
IRREGULAR = {"people": "person", "knives": "knife", "mice": "mouse", "sheep": "sheep"}

_LEAD = re.compile(
    r"^(please )?(draw|paint|show|make|create|generate)?( me)? ?"
    r"((a|an) (photo|picture|image|drawing)( of| with| that shows)?)? ?",
)
_RELATION = re.compile(rf"^(.+?) (?:to the |on the )?({'|'.join(RELATIONS)}) (.+)$")
_CLAUSE = re.compile(
    rf"^(?:exactly )?({'|'.join(NUMBERS)}|\d) (?:({'|'.join(COLORS)}) )?([a-z][a-z -]*)$"
)


def row_of(prompt: str) -> dict[str, Any] | None:
    """A row in GenEval's schema, or None where the sentence is no list of things.

    Counts above 1 are exact (an exclude clause says so), as in GenEval's counting rows.
    """
    text = _LEAD.sub("", " ".join(prompt.lower().split()).rstrip(".! "), count=1)
    related = _RELATION.match(text)
    if related:
        subject, anchor = _clause(related[1]), _clause(related[3])
        if subject is None or anchor is None:
            return None
        include = [anchor, {**subject, "position": [related[2], 0]}]
        return {"tag": "position", "include": include, "prompt": prompt}
    include = [_clause(part) for part in re.split(r",? and |, ", text)]
    if None in include:
        return None
    counted = [c for c in include if c["count"] > 1]
    row: dict[str, Any] = {"tag": _tag(include), "include": include}
    if counted:
        row["exclude"] = [{**c, "count": c["count"] + 1} for c in counted]
    return {**row, "prompt": prompt}


def _clause(text: str) -> dict[str, Any] | None:
    found = _CLAUSE.match(text.strip())
    if found is None:
        return None
    count = NUMBERS.get(found[1]) or int(found[1])
    if not count:
        return None
    name = found[3].strip()
    clause: dict[str, Any] = {"class": _singular(name) if count > 1 else name, "count": count}
    return {**clause, "color": found[2]} if found[2] else clause


def _singular(name: str) -> str:
    if name in IRREGULAR:
        return IRREGULAR[name]
    if name.endswith(("sses", "uses", "xes", "ches", "shes")):
        return name[:-2]
    return name.removesuffix("s")


def _tag(include: list[dict[str, Any]]) -> str:
    colored, counted = (
        sum("color" in c for c in include),
        sum(c["count"] > 1 for c in include),
    )
    if len(include) == 1 and not (colored and counted):
        return "counting" if counted else "colors" if colored else "single_object"
    if len(include) == 2 and not counted and colored in (0, 2):
        return "color_attr" if colored else "two_object"
    return "compound"
