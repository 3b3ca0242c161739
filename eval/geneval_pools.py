"""Prompts to train on in GenEval's schema: none that the evaluation asks, none twice.

    pool = build_pool(every_row())             # the release's family sizes, of all possible rows
    pool.train[0]["prompt"]                    # "Create an image with an elephant right of a bus."
    pool.report["families"]["counting"]        # what there was, what was wanted, what was given
    split = held_out_objects()                 # train and dev without 20 classes, test of them only
    umm-reflect geneval pool OUT [--candidates FILE.jsonl] [--held-out-objects]

What a row asks is its `canonical_spec` (classes, counts, colours and relations, mirrored ones
alike, in any words and order): rows that share one with an evaluation row are left out and
reported, as are rows whose words are an evaluation prompt though their clauses say something else.

The release's sizes are caps here. Its 60 single_object rows are all among the 80 that the
evaluation asks, and its 702 counting rows repeat at most 320 texts: what a family lacks is shared
out among those that have rows to spare, in proportion to their sizes, and the report says so.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from eval.geneval_prompts import (
    CLASSES,
    FAMILY_SIZES,
    OPENING,
    Row,
    color_attr,
    colors,
    counting,
    official_rows,
    position,
    request,
    single_object,
    two_object,
)
from eval.geneval_rules import check_row
from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.shapes.prompts import Spec, canonical_spec
from umm_reflect.shapes.scene import COLORS

RELEASE_TRAIN = {
    "position": 1305,
    "color_attr": 559,
    "colors": 187,
    "counting": 702,
    "two_object": 187,
    "single_object": 60,
}
RELEASE_DEV = {
    "position": 50,
    "color_attr": 50,
    "colors": 50,
    "counting": 50,
    "two_object": 50,
    "single_object": 20,
}
RELEASE_SEED = 20260829
COUNTS = (2, 3, 4, 5, 6)  # what the training pool counts to; the evaluation stops at four

MOST_PAIRS = 20_000  # of coloured objects; more than any pool takes

# The objects that flow_grpo's geneval_unseen_objects keeps for its test.
HELD_OUT_CLASSES = tuple(
    """apple|baseball bat|bed|book|bowl|car|clock|cup|dog|elephant|fire hydrant|frisbee|microwave
    skateboard|skis|toilet|toothbrush|traffic light|umbrella|wine glass""".replace(
        "\n    ", "|"
    ).split("|")
)
HELD_OUT_TEST_ROWS = 256


@dataclass(frozen=True)
class Pool:
    """Rows to train on, rows to validate on, rows to test on (a held-out-object split only), and
    what was left out and why. No two rows, of whichever part, ask for the same."""

    train: tuple[Row, ...]
    dev: tuple[Row, ...]
    test: tuple[Row, ...]
    report: dict[str, Any]

    def save(self, folder: Path) -> list[Path]:
        """Write train.jsonl, dev.jsonl, test.jsonl (if there is one) and report.json."""
        parts = {"train": self.train, "dev": self.dev} | ({"test": self.test} if self.test else {})
        written = [
            write_aside(folder / f"{name}.jsonl", as_lines(rows)) for name, rows in parts.items()
        ]
        report = json.dumps(self.report, indent=1) + "\n"
        return [*written, write_aside(folder / "report.json", report)]


# --- candidates -----------------------------------------------------------------------------------


def every_row(classes: Sequence[str] = CLASSES) -> list[Row]:
    """One row for everything that can be asked about `classes`, in GenEval's six families; of the
    277,290 pairs of coloured objects MOST_PAIRS by lot.

    25,280 positions make 12,640 specs, since every one can be said in two ways. Which of the two,
    and which object of a pair comes first, is decided by the hash of the words, as by a coin.
    """
    hued = [kind for kind in classes if kind != "person"]
    pairs = list(itertools.combinations(classes, 2))
    rows = [single_object(kind) for kind in classes]
    rows += [_one_of(two_object(a, b), two_object(b, a)) for a, b in pairs]
    rows += [counting(kind, count) for kind in classes for count in COUNTS]
    rows += [colors(kind, color) for kind in hued for color in COLORS]
    for a, b in pairs:
        rows.append(_one_of(position(a, "left of", b), position(b, "right of", a)))
        rows.append(_one_of(position(b, "left of", a), position(a, "right of", b)))
        rows.append(_one_of(position(a, "above", b), position(b, "below", a)))
        rows.append(_one_of(position(b, "above", a), position(a, "below", b)))
    hues = itertools.permutations(COLORS, 2)
    both = list(itertools.product(itertools.combinations(hued, 2), hues))
    for (a, b), (first, second) in random.Random(0).sample(both, min(MOST_PAIRS, len(both))):
        one, other = (a, first), (b, second)
        rows.append(_one_of(color_attr(one, other), color_attr(other, one)))
    return rows


def _one_of(row: Row, same: Row) -> Row:
    coin = hashlib.sha256(row["prompt"].encode()).digest()[0] % 2
    return same if coin else row


def read_rows(path: Path) -> list[Row]:
    """Rows of a .jsonl file in GenEval's schema. Errors: UserError that names the line."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                raise ValueError("a row is {tag, include, [exclude,] prompt}")
            check_row(row, CLASSES)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        if row.get("tag") not in FAMILY_SIZES:
            names = ", ".join(FAMILY_SIZES)
            raise UserError(f"{path}, line {number}: tag {row.get('tag')!r} is none of {names}")
        rows.append(row)
    return rows


# --- what is left out -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """A candidate that asks what an evaluation row asks, by its clauses ("spec") or its words."""

    family: str
    prompt: str
    evaluation_prompt: str
    how: str

    def to_record(self) -> dict[str, str]:
        return {
            "family": self.family,
            "prompt": self.prompt,
            "evaluation_prompt": self.evaluation_prompt,
            "how": self.how,
        }


def find_overlaps(rows: Iterable[Row], evaluation: Sequence[Row]) -> list[Overlap]:
    """Every row that the evaluation asks too, in the order of `rows`."""
    return [found for row in rows if (found := _Asked(evaluation).find(row))]


class _Asked:
    """What an evaluation asks: its specs and its words."""

    def __init__(self, evaluation: Sequence[Row]):
        self.specs = {canonical_spec(row): row["prompt"] for row in evaluation}
        self.words = {_words(row["prompt"]): row["prompt"] for row in evaluation}

    def find(self, row: Row) -> Overlap | None:
        if (spec := canonical_spec(row)) in self.specs:
            return Overlap(row["tag"], row["prompt"], self.specs[spec], "spec")
        if (words := _words(row["prompt"])) in self.words:
            return Overlap(row["tag"], row["prompt"], self.words[words], "words")
        return None


def _words(prompt: str) -> str:
    """A prompt without how it opens, "exactly", case, spaces and full stop."""
    text = " ".join(prompt.lower().split()).rstrip(".")
    for opening in (OPENING, "create an image with "):
        text = text.removeprefix(opening)
    return text.removeprefix("exactly ")


# --- pools ----------------------------------------------------------------------------------------


def build_pool(
    candidates: Iterable[Row],
    *,
    train: Mapping[str, int] = RELEASE_TRAIN,
    dev: Mapping[str, int] = RELEASE_DEV,
    seed: int = RELEASE_SEED,
    evaluation: Sequence[Row] | None = None,
    say: Callable[[Row], str] = lambda row: request(row, exactly=True),
) -> Pool:
    """Draw a training and a dev set from candidates, both without what `evaluation` asks.

    train, dev: wanted rows of each family; families that lack some are made up for by the others.
    evaluation: rows to keep out, the official 553 unless given. say: the words of a row's prompt.
    The result depends on the set of candidates and the seed, not on the candidates' order.
    """
    asked = _Asked(official_rows() if evaluation is None else evaluation)
    counts: dict[str, dict[str, Any]] = {
        family: {"candidates": 0, "in_evaluation": 0, "duplicates": 0}
        for family in dict.fromkeys([*FAMILY_SIZES, *train, *dev])
    }
    overlaps: list[Overlap] = []
    usable: dict[str, list[Row]] = {family: [] for family in counts}
    seen: set[Spec] = set()
    for row in sorted(candidates, key=lambda row: (repr(canonical_spec(row)), row["prompt"])):
        count = counts[row["tag"]]
        count["candidates"] += 1
        if overlap := asked.find(row):
            count["in_evaluation"] += 1
            overlaps.append(overlap)
        elif (spec := canonical_spec(row)) in seen:
            count["duplicates"] += 1
        else:
            seen.add(spec)
            usable[row["tag"]].append(row)
    for family, rows in usable.items():
        random.Random(f"{seed}/{family}").shuffle(rows)

    available = {family: len(rows) for family, rows in usable.items()}
    of_dev = allot(dev, available)
    of_train = allot(train, {family: n - of_dev[family] for family, n in available.items()})
    parts: dict[str, list[Row]] = {"dev": [], "train": []}
    for family, rows in usable.items():
        end = of_dev[family] + of_train[family]
        parts["dev"] += rows[: of_dev[family]]
        parts["train"] += rows[of_dev[family] : end]
        counts[family] |= {"available": available[family]}
        for part, wanted, given in (("dev", dev, of_dev), ("train", train, of_train)):
            counts[family] |= {f"{part}_wanted": wanted.get(family, 0), part: given[family]}
    for part, rows in parts.items():
        random.Random(f"{seed}/{part}").shuffle(rows)
        parts[part] = [_finished(row, part, say(row)) for row in rows]
    report = {
        "schema": 1,
        "seed": seed,
        "families": counts,
        "short": {part: sum(wanted.values()) - len(parts[part])
                  for part, wanted in (("train", train), ("dev", dev))},
        "overlaps": [overlap.to_record() for overlap in overlaps],
        "sha256": {
            part: hashlib.sha256(as_lines(rows).encode()).hexdigest()
            for part, rows in parts.items()
        },
    }  # fmt: skip
    specs = [canonical_spec(row) for rows in parts.values() for row in rows]
    assert len(specs) == len(set(specs)), "two rows of the pool ask for the same"
    assert not set(specs) & set(asked.specs), "the pool asks what the evaluation asks"
    return Pool(tuple(parts["train"]), tuple(parts["dev"]), (), report)


def held_out_objects(
    classes: Sequence[str] = HELD_OUT_CLASSES,
    *,
    test_rows: int = HELD_OUT_TEST_ROWS,
    seed: int = RELEASE_SEED,
) -> Pool:
    """A pool whose training and dev rows name none of `classes`, and a test set of them alone.

    The test rows are shared evenly among the families, as far as these have rows. Training is kept
    clear of the 553 official rows too; the test, which nothing is trained on, need not be.
    Errors: ValueError for an unknown class.
    """
    if unknown := [kind for kind in classes if kind not in CLASSES]:
        raise ValueError(f"unknown class {unknown[0]!r}; GenEval's are {', '.join(CLASSES)}")
    pool = build_pool(every_row([kind for kind in CLASSES if kind not in classes]), seed=seed)
    share = {family: -(-test_rows // len(FAMILY_SIZES)) for family in FAMILY_SIZES}
    apart = build_pool(every_row(classes), train=share, dev={}, seed=seed, evaluation=[])
    test = tuple({**row, "split": "test"} for row in apart.train[:test_rows])
    report = {**pool.report, "held_out_classes": list(classes), "test_families": _tally(test)}
    report["sha256"] = {
        **pool.report["sha256"],
        "test": hashlib.sha256(as_lines(test).encode()).hexdigest(),
    }
    return Pool(pool.train, pool.dev, test, report)


def allot(wanted: Mapping[str, int], available: Mapping[str, int]) -> dict[str, int]:
    """How many rows each family gives, when what one lacks is shared out among the others.

    The shares are in proportion to what was wanted of a family, whole by largest remainder (of
    equal ones the smaller family's first). {"a": 4, "b": 2, "c": 1}, of which there are 1, 9 and 9
    -> {"a": 1, "b": 4, "c": 2}.
    """
    given = {family: min(wanted.get(family, 0), n) for family, n in available.items()}
    short = sum(wanted.values()) - sum(given.values())
    while short:
        room = {
            family: available[family] - given[family]
            for family in available
            if wanted.get(family, 0) and available[family] > given[family]
        }
        if not room:
            break
        total = sum(wanted[family] for family in room)
        exact = {family: Fraction(short * wanted[family], total) for family in room}
        share = {family: int(part) for family, part in exact.items()}
        order = sorted(room, key=lambda f: (share[f] - exact[f], wanted[f], f))
        for family in order[: short - sum(share.values())]:
            share[family] += 1
        for family, part in share.items():
            given[family] += min(part, room[family])
        short = sum(wanted.values()) - sum(given.values())
    return given


def as_lines(rows: Iterable[Row]) -> str:
    """Rows as the text of a .jsonl file."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def _finished(row: Row, split: str, words: str) -> Row:
    """A row of a pool: GenEval's keys, the prompt that is asked, the one that GenEval would ask."""
    spec = hashlib.sha256(repr(canonical_spec(row)).encode()).hexdigest()[:16]
    kept = {key: row[key] for key in ("tag", "include", "exclude") if key in row}
    return {
        "uid": f"{row['tag']}_{spec}",
        "split": split,
        **kept,
        "prompt": words,
        "official_prompt": row["prompt"],
    }


def _tally(rows: Iterable[Row]) -> dict[str, int]:
    tags = [row["tag"] for row in rows]
    return {family: tags.count(family) for family in FAMILY_SIZES if family in tags}
