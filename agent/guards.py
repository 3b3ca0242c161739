"""When a run goes nowhere: text that repeats itself, the same edit again, nothing that changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL.Image import Image

from agent.types import Options, ProtocolError, Step, StopReason, Turn

VISIBLE_LEVELS = 24  # of 255: less is what drawing an unchanged image anew already does


def repeats_itself(ids: Sequence[int], span: int = 96, longest: int = 24) -> bool:
    """Whether the last `span` tokens are one piece of at most `longest` tokens over and over."""
    if len(ids) < span:
        return False
    tail = list(ids[-span:])
    return any(tail[:-period] == tail[period:] for period in range(1, longest + 1))


def same_edits(edits: Sequence[str], limit: int) -> bool:
    """Whether the last `limit` edits are one, up to case, blanks and the final full stop."""
    last = {" ".join(edit.casefold().split()).rstrip(".") for edit in edits[-limit:]}
    return 0 < limit <= len(edits) and len(last) == 1


def visible_change(before: Image, after: Image) -> float:
    """The share of 2 x 2 cells, 0..1, in which some channel differs by more than VISIBLE_LEVELS.

    Images of different sizes differ wholly. Cells, since an edge that moved by a fraction of a
    pixel is no change.
    """
    if before.size != after.size:
        return 1.0
    cells = [
        np.asarray(image.convert("RGB").reduce(2), dtype=np.int16) for image in (before, after)
    ]
    return float((np.abs(cells[0] - cells[1]).max(axis=2) > VISIBLE_LEVELS).mean())


def stop_after_turn(steps: Sequence[Step], may_edit: bool, options: Options) -> StopReason | None:
    """Whether the last of these looks ends the trajectory. may_edit: an edit may still be drawn."""
    last = steps[-1].turn
    if last.reflection is None:
        return stop_after_plan(last)
    if last.reflection.action == "done":
        return StopReason.DONE
    if not may_edit:
        return StopReason.MAX_ROUNDS
    if same_edits([step.turn.reflection.edit for step in steps], options.same_edit_limit):
        return StopReason.REPEATED_EDIT
    return None


def stop_after_plan(plan: Turn) -> StopReason | None:
    """A malformed turn ends the trajectory; what a legal plan says does not."""
    if plan.error is ProtocolError.TRUNCATED:
        return StopReason.TOO_LONG
    if plan.error is ProtocolError.REPEATED_TEXT:
        return StopReason.REPEATED_TEXT
    return StopReason.MALFORMED if plan.error else None


def stop_after_edit(before: Image, after: Image, options: Options) -> StopReason | None:
    """Whether an edit that turned `before` into `after` ends the trajectory."""
    unchanged = options.min_change > 0 and visible_change(before, after) < options.min_change
    return StopReason.NO_VISIBLE_CHANGE if unchanged else None
