"""What a parity run found: one record per compared thing, the worst of each group, the count.

    report = Report()
    report.compare("text.safetensors", "single.logits", expected, actual, noise=1.3e-5)
    report.print(); report.exit_code

Every thing ends in exactly one of four states: compared and equal, compared and failed, given (an
input that has nothing to be compared with), or not covered. Nothing leaves the list silently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

TOLERANCE = 1e-4
NAMES_A_LINE = 12
NOISE_FACTOR = 20  # times the fp64 noise floor that the manifest records


class NotCovered(Exception):
    """The golden folder asks for something that this version does not know; the text says what."""


class State(StrEnum):
    EQUAL = "equal"
    FAILED = "failed"
    GIVEN = "given"
    NOT_COVERED = "not covered"


@dataclass(frozen=True)
class Record:
    """One tensor or one value of a case, e.g. file "text.safetensors", name "single.logits".

    `difference` and `tolerance` are in the tensor's unit; `note` says why it is not equal.
    """

    file: str
    name: str
    state: State
    difference: float = 0.0
    tolerance: float = 0.0
    note: str = ""

    @property
    def group(self) -> str:
        stem = self.file.removesuffix(".safetensors")
        parts = self.name.split(".")
        if len(parts) == 1:
            return stem
        depth = 2 if parts[0] in ("cases", "conventions") or "grad" in parts[:2] else 1
        return ".".join([stem, *parts[:depth]])

    @property
    def ratio(self) -> float:
        if math.isnan(self.difference):
            return math.inf
        if self.tolerance == 0:
            return 0.0 if self.difference == 0 else math.inf
        return self.difference / self.tolerance


def tolerance_of(noise: float | None) -> float:
    """max(1e-4, 20 x the fp64 noise floor), as the golden folder asks."""
    return max(TOLERANCE, NOISE_FACTOR * (noise or 0.0))


@dataclass
class Report:
    """Collects records; `seen` are the (file, name) pairs that have one."""

    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def adopt(self, record: Record) -> None:
        """Takes a record over as it is; a second one of the same name is a bug of a check."""
        assert (record.file, record.name) not in self._seen, f"{record.name} was recorded twice"
        self._seen.add((record.file, record.name))
        self.records.append(record)

    def has(self, file: str, name: str) -> bool:
        return (file, name) in self._seen

    def given(self, file: str, name: str) -> None:
        self.adopt(Record(file, name, State.GIVEN))

    def not_covered(self, file: str, name: str, note: str) -> None:
        self.adopt(Record(file, name, State.NOT_COVERED, note=note))

    def failed(self, file: str, name: str, note: str) -> None:
        self.adopt(Record(file, name, State.FAILED, math.inf, note=note))

    def difference(
        self, file: str, name: str, difference: float, tolerance: float, note: str = ""
    ) -> None:
        """Records a measured difference; a NaN fails."""
        state = State.EQUAL if difference <= tolerance else State.FAILED
        self.adopt(Record(file, name, state, difference, tolerance, note))

    def compare(
        self,
        file: str,
        name: str,
        expected: Tensor,
        actual: Tensor,
        *,
        noise: float | None = None,
        tolerance: float | None = None,
    ) -> None:
        """Compares tensors of one shape: integers exactly, floats within their tolerance.

        noise: the tensor's fp64 noise floor; tolerance: overrides what follows from it.
        """
        if tuple(expected.shape) != tuple(actual.shape):
            note = f"shape {list(actual.shape)}, not {list(expected.shape)}"
            return self.failed(file, name, note)
        if tolerance is None:
            tolerance = tolerance_of(noise) if expected.is_floating_point() else 0.0
        gap = (expected.double() - actual.detach().cpu().double()).abs()
        self.difference(file, name, float(gap.max()) if gap.numel() else 0.0, tolerance)

    def equal(self, file: str, name: str, expected: object, actual: object) -> None:
        """Compares values (strings, numbers, lists of them) exactly."""
        same = expected == actual
        note = "" if same else f"{actual!r:.120}, not {expected!r:.120}"
        self.difference(file, name, 0.0 if same else math.inf, 0.0, note)

    @contextmanager
    def guard(self, file: str, names: Sequence[str]) -> Iterator[None]:
        """Turns an error inside into records of all `names` that have none yet.

        `NotCovered` makes them not covered; any other error is a failure of the implementation,
        recorded with its text, so that one broken part never hides the others.
        """
        try:
            yield
        except NotCovered as error:
            for name in names:
                if not self.has(file, name):
                    self.not_covered(file, name, str(error))
        except Exception as error:
            for name in names:
                if not self.has(file, name):
                    self.failed(file, name, f"{type(error).__name__}: {error}")

    # -- the outcome ------------------------------------------------------------------------

    def of(self, *states: State) -> list[Record]:
        return [record for record in self.records if record.state in states]

    @property
    def exit_code(self) -> int:
        """0 only when something was compared, nothing failed and everything is covered."""
        bad = self.of(State.FAILED, State.NOT_COVERED)
        return 0 if not bad and self.of(State.EQUAL) else 1

    def groups(self) -> dict[str, list[Record]]:
        groups: dict[str, list[Record]] = {}
        for record in self.records:
            groups.setdefault(record.group, []).append(record)
        return groups

    def lines(self) -> list[str]:
        """The report as text: the worst of each group, then what failed, is missing, the count."""
        width = max([len(group) for group in self.groups()], default=5)
        lines = [f"{'group':{width}} compared  worst difference (tolerance) in"]
        for group, records in self.groups().items():
            compared = [r for r in records if r.state in (State.EQUAL, State.FAILED)]
            if not compared:
                lines.append(f"{group:{width}} {0:8}  -")
                continue
            worst = max(compared, key=lambda record: record.ratio)
            mark = "" if all(r.state is State.EQUAL for r in compared) else "  FAILED"
            lines.append(
                f"{group:{width}} {len(compared):8}  {worst.difference:.1e} "
                f"({worst.tolerance:.1e}) {worst.name}{mark}"
            )
        for state in (State.FAILED, State.NOT_COVERED):
            lines += self._listed(state)
        lines.append(self.summary())
        return lines

    def _listed(self, state: State) -> list[str]:
        """One line a record; those of one file with one and the same note share a line."""
        together: dict[tuple[str, str], list[Record]] = {}
        for r in self.of(state):
            measured = f"differs by {r.difference:.2e}, tolerance {r.tolerance:.1e}"
            note = r.note or (measured if state is State.FAILED else "")
            together.setdefault((r.file, note), []).append(r)
        lines = []
        for (file, note), records in together.items():
            names = ", ".join(r.name for r in records[:NAMES_A_LINE])
            more = len(records) - NAMES_A_LINE
            rest = f" and {more} more" if more > 0 else ""
            lines.append(f"{state}: {file} {names}{rest}: {note}")
        return lines

    def summary(self) -> str:
        compared = len(self.of(State.EQUAL, State.FAILED))
        return (
            f"{compared} compared, {len(self.of(State.FAILED))} failed, "
            f"{len(self.of(State.NOT_COVERED))} not covered "
            f"({len(self.of(State.GIVEN))} inputs taken as given)"
        )

    def write_json(self, path: Path, implementation: str) -> None:
        """All records and the counts as JSON, written aside and renamed."""
        content = {
            "implementation": implementation,
            "compared": len(self.of(State.EQUAL, State.FAILED)),
            "failed": len(self.of(State.FAILED)),
            "not_covered": len(self.of(State.NOT_COVERED)),
            "given": len(self.of(State.GIVEN)),
            # JSON has no infinity: a difference without a number is null.
            "records": [
                {k: None if v in (math.inf,) or v != v else v for k, v in asdict(r).items()}
                for r in self.records
            ],
        }
        aside = path.with_name(path.name + ".partial")
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)


def as_tensor(values: object) -> Tensor:
    """Numbers of a manifest (fp64 unless all are integers) as a tensor."""
    tensor = torch.tensor(values)
    return tensor.double() if tensor.is_floating_point() else tensor
