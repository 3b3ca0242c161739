"""How much each token of a turn that is learned counts in the cross-entropy.

    ids, weights = weighted_ids(tokens, said.text, "release")      # one weight a label: ids, end

release   the published ones: 1, more where the turn is decided, all over the root of how many
          labels the turn has (spans below; a token counts for the heaviest span that it touches)
ours      0 for what the loop writes itself, 4 for score and action, 1 for the rest
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

from umm_reflect.tokens import Tokens

Weighting = Literal["release", "ours"]
Spans = list[tuple[int, int, float]]  # (first character, one past the last, weight)

_TAGS = re.compile(
    r"</?think>|^\[(?:CURRENT_ROUND|SCORE|ACTION|THINKING|SOURCE_IMAGE)\]", re.MULTILINE
)
_ACTION = re.compile(r"^\[ACTION\][ \t]*(\S+)", re.MULTILINE)
_SOURCE = re.compile(r"^\[SOURCE_IMAGE\][ \t]*([^\n]+)", re.MULTILINE)
_EDIT = "</think>\n[EDIT] "
DECISION = 4.0  # of "ours"


def release_spans(text: str) -> tuple[Spans, int | None]:
    """The spans of a canonical turn that weigh more than 1, and where its edit begins (None: done).

    Source: the published training code's table.
    """
    head = text.index(_EDIT)
    inside = text[: head + len("</think>")]
    spans: Spans = [(m.start(), m.end(), 2.0) for m in _TAGS.finditer(inside)]
    spans += [(*m.span(1), 3.0) for m in _ACTION.finditer(inside)]
    spans += [(*m.span(1), 2.0) for m in _SOURCE.finditer(inside)]
    newline = len(inside)
    spans += [(newline, newline + 1, 2.0), (newline + 1, newline + 1 + len("[EDIT]"), 3.0)]
    payload = head + len(_EDIT)
    if text[payload:] == "None":
        return spans, None
    return [*spans, (payload, len(text), 2.0)], payload


def ours_spans(text: str) -> Spans:
    """The forced prefix weighs nothing, score and action 4."""
    score = text.index("[SCORE] ") + len("[SCORE] ")
    action = text.index("\n[ACTION]")
    thinking = text.index("\n[THINKING]")
    return [(0, score, 0.0), (score, action, DECISION), (action, thinking, DECISION)]


def weighted_ids(
    tokens: Tokens, text: str, weighting: Weighting
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The ids of a canonical turn, and one weight for each of its labels (the ids, then the end).

    Special tokens in the text are characters, as in everything that the agent reads.
    Errors: ValueError for a text that is no canonical turn, or an unknown weighting.
    """
    if weighting not in ("release", "ours"):
        raise ValueError(f"unknown weighting {weighting!r}; choose from release, ours")
    if _EDIT not in text:
        raise ValueError(f"no turn of the protocol: {text[:80]!r}")
    ids, offsets = tokens.encode_with_offsets(text, allow_special=False)
    if weighting == "ours":
        spans = ours_spans(text)
        weights = [_first(spans, place) for place in offsets]
        return ids, (*weights, 1.0)
    spans, payload = release_spans(text)
    weights = [max([1.0, *_hits(spans, place)]) for place in offsets]
    if payload is not None:
        first = next(i for i, (_, end) in enumerate(offsets) if end > payload)
        weights[first] = 3.0
    scale = math.sqrt(len(ids) + 1)
    return ids, tuple(weight / scale for weight in (*weights, 1.0))


def _hits(spans: Spans, place: tuple[int, int]) -> list[float]:
    start, end = place
    return [weight for first, last, weight in spans if start < last and end > first]


def _first(spans: Spans, place: tuple[int, int]) -> float:
    """By the token's end, so that a token that reaches into the next span belongs there."""
    return next((weight for _, last, weight in spans if place[1] <= last), 1.0)


class Decision(IntEnum):
    """What of a turn a token belongs to."""

    NONE = 0
    SCORE = 1
    ACTION = 2


_SCORE = re.compile(r"^\[SCORE\][ \t]*([^\n/]+)", re.MULTILINE)


def decisions(tokens: Tokens, ids: Sequence[int]) -> list[Decision]:
    """For each id of a canonical turn whether it is part of its score (without "/10") or action."""
    text = tokens.decode(ids)
    again, offsets = tokens.encode_with_offsets(text, allow_special=False)
    assert tuple(ids) == again, "a turn does not read back as its ids"
    found = []
    spans = [
        (pattern.search(text), what)
        for pattern, what in ((_SCORE, Decision.SCORE), (_ACTION, Decision.ACTION))
    ]
    for start, end in offsets:
        touched = [w for m, w in spans if m and start < m.end(1) and end > m.start(1)]
        found.append(touched[0] if touched else Decision.NONE)
    return found
