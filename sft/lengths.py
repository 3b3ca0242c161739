"""How long the rows of a run are, kept beside it: what goes on after a stop reads no picture again.

    found = recall(path, sign(sources, settings))       # None: of other data, or other settings
    keep(path, signature, Lengths(uids, anchors, (measured, held_measured)))

A signature holds the name, size and time of every file of the data, and whatever else lengths
depend on. The file is JSON, written aside and renamed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sft.mixture import Measured
from umm_reflect.files import write_aside


@dataclass(frozen=True)
class Lengths:
    """records, anchors: uids of what may be used. measured: rows to learn from, and held out."""

    records: frozenset[str]
    anchors: frozenset[str]
    measured: tuple[Measured, Measured]


def sign(sources: Sequence[str], settings: Sequence[object]) -> str | None:
    """The signature of datasets and settings; None where a dataset is not on this machine."""
    digest = hashlib.sha256("\n".join(map(repr, settings)).encode())
    for source in map(Path, sources):
        if not source.exists():
            return None
        folder = source if source.is_dir() else source.parent  # its pictures lie beside a file
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                stat = path.stat()
                entry = (str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns)
                digest.update(repr(entry).encode())
        digest.update(source.name.encode())
    return digest.hexdigest()


def recall(path: Path, signature: str | None) -> Lengths | None:
    """What was kept under this signature. A damaged file counts as none."""
    if signature is None or not path.exists():
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["signature"] != signature:
            return None
        first, second = (
            Measured(
                {kind: np.array(tokens, np.int64) for kind, tokens in one["tokens"].items()},
                {kind: Counter(reasons) for kind, reasons in one["skipped"].items()},
            )
            for one in kept["measured"]
        )
        return Lengths(frozenset(kept["records"]), frozenset(kept["anchors"]), (first, second))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(path: Path, signature: str | None, lengths: Lengths) -> None:
    if signature is None:
        return
    content = {
        "signature": signature,
        "records": sorted(lengths.records),
        "anchors": sorted(lengths.anchors),
        "measured": [
            {
                "tokens": {kind: tokens.tolist() for kind, tokens in one.tokens.items()},
                "skipped": one.skipped,
            }
            for one in lengths.measured
        ],
    }
    write_aside(path, json.dumps(content))
