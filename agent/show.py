"""Rounds on the terminal as they happen: the text of a turn as it is said, a bar while drawing.

    with Printer([prompt]) as printer:
        run_episodes(policy, [prompt], max_rounds=3, watcher=printer)

Off a terminal (a file, a pipe) there is no bar and no colour, the words are the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING

from agent.types import Turn, Watcher

if TYPE_CHECKING:
    from PIL.Image import Image

# What stands at the beginning of a line of a turn, and what is shown for it (None: hide the line).
LABELS = {
    "[ACTION] ": "action ",
    "[THINKING] ": "",
    "[SOURCE_IMAGE] ": None,
    "</think>": None,
    "[EDIT] ": "edit ",
}
STYLES = {"[ACTION] ": "bold", "[THINKING] ": "dim", "[EDIT] ": "bold blue"}


class Printer(Watcher):
    """Prints a run. names: what the prompts of a batch are called; a single one streams."""

    def __init__(self, names: Sequence[str]):
        from rich.console import Console

        self.console = Console(highlight=False, soft_wrap=True)
        self.names = names
        self.wants_tokens = len(names) == 1
        self._turn: TurnText | None = None
        self._bar = None
        self._began = time.perf_counter()

    def __enter__(self) -> Printer:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_bar()

    def on_token(self, index: int, text: str) -> None:
        if self._turn is None:
            self._turn = TurnText()
            self._write("", "  score ")
        for field, piece in self._turn.feed(text):
            self._write(field, piece)

    def on_turn(self, index: int, turn: Turn) -> None:
        if self._turn is not None:
            for field, piece in self._turn.rest():
                self._write(field, piece)
            self.console.print()
            self._turn = None
        elif turn.reflection:
            said = turn.reflection
            edit = f": {said.edit}" if said.edit else ""
            self._line(index, f"round {turn.round}  {said.score}/10  {said.action}{edit}")
        if turn.error:
            self._line(index, f"  not a legal turn ({turn.error})", "red")

    def on_step(self, step: int, total: int) -> None:
        if not self.console.is_terminal:
            return
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (TextColumn("  drawing"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=step)
        if step == total:
            self._end_bar()

    def on_image(self, index: int, number: int, image: Image) -> None:
        self._end_bar()
        at = f"{time.perf_counter() - self._began:.1f} s"
        self._line(index, f"image {number}  {image.width}x{image.height}  {at}", "bold")

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, index: int, text: str, style: str = "") -> None:
        name = f"{self.names[index]}  " if len(self.names) > 1 else ""
        self.console.print(name + text, style=style or None, markup=False)

    def _write(self, field: str, text: str) -> None:
        self.console.print(text, style=STYLES.get(field), markup=False, end="")
        sys.stdout.flush()


class TurnText:
    """Takes the raw text of a turn piece by piece and gives what to show: (field, text) pairs.

    Tags become labels, lines that hold nothing new are left out, each field starts a line.
    """

    def __init__(self) -> None:
        self.field = ""  # the forced prefix ends with the tag of the score
        self._hidden = False
        self._line: str | None = None  # the beginning of a line that may still become a tag

    def feed(self, text: str) -> list[tuple[str, str]]:
        shown: list[tuple[str, str]] = []
        for letter in text:
            if letter == "\n":
                shown += self.rest()
                self._line = ""
            elif self._line is not None:
                self._line += letter
                shown += self._begin_line(self._line)
            elif not self._hidden:
                shown.append((self.field, letter if letter.isprintable() else "\ufffd"))
        fields = groupby(shown, key=lambda piece: piece[0])
        return [(field, "".join(piece for _, piece in pieces)) for field, pieces in fields]

    def rest(self) -> list[tuple[str, str]]:
        """What is still held back, when the line or the text ends."""
        held, self._line = self._line, None
        return [(self.field, f"\n  {held}")] if held else []

    def _begin_line(self, line: str) -> list[tuple[str, str]]:
        if any(tag.startswith(line) and tag != line for tag in LABELS):
            return []
        self._line = None
        if line not in LABELS:
            self._hidden = False
            return [(self.field, f"\n  {line}")]
        self.field, label = line, LABELS[line]
        self._hidden = label is None
        return [] if label is None else [(line, f"\n  {label}")]
