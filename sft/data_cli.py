"""Data to train on: write an example, check it, count it, look at a row, change the schema.

    umm-reflect data example data/mine                     # eight rows of the shapes world
    umm-reflect data check data/mine                       # every row, every rule, every pixel
    umm-reflect data stats data/mine
    umm-reflect data show data/mine --kind whole --out row.html
    umm-reflect data convert data/mine data/mine-parquet --to release --add-plan

A dataset is a folder (or .jsonl file, or hub id) in the release's schema, in ours, or traces of the
agent; sft/data_own.py shows a line of ours.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sft.data import Found, ImageCheck, Record, Violation, read_dataset, scan
from umm_reflect.errors import UserError
from umm_reflect.settings import run_verb

SHOWN = 20  # violations that are printed; a report has all of them
PROG = "umm-reflect data"


@dataclass(frozen=True)
class ExampleConfig:
    """Write valid rows of the shapes world as JSONL with pictures: a start for data of your own."""

    output_dir: Annotated[Path, tyro.conf.Positional] = Path("data/example")
    """A new or empty folder."""
    rows: int = 8
    """How many trajectories; every fourth one is an editing task."""
    seed: int = 0
    """Other numbers give other trajectories."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows is {self.rows}; give at least 1")


@dataclass(frozen=True)
class CheckConfig:
    """Check every row by every rule; exit code 1 when more than the allowed share breaks one."""

    source: Annotated[str, tyro.conf.Positional]
    """Folder, .jsonl file or hub id."""
    images: ImageCheck = "decode"
    """How closely images are read: every pixel, hash and header, or not at all."""
    max_bad: float = 0.0
    """Share of the rows that may break a rule."""
    workers: int = 2
    """Threads that read and decode images; processes, for files of our own Parquet."""
    expect: Literal["release"] | None = None
    """Also compare the counts with the published ones."""
    report: Path | None = None
    """Write every violation there, one JSON object a line."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad <= 1:
            raise ValueError(f"max-bad is {self.max_bad}; give a share between 0 and 1")
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}; give at least 1")


@dataclass(frozen=True)
class StatsConfig:
    """Count what a dataset holds and what it becomes."""

    source: Annotated[str, tyro.conf.Positional]
    """Folder, .jsonl file or hub id."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class ShowConfig:
    """Write a page that shows what a row becomes: segments, weights of tokens, noised images."""

    source: Annotated[str, tyro.conf.Positional]
    """Folder or .jsonl file."""
    kind: Literal["controller", "transition", "verifier", "penultimate", "anchor", "whole"] = (
        "whole"
    )
    """Which kind of row."""
    row: int = 0
    """Its number among the rows of that kind, in the order of their uids."""
    uid: str | None = None
    """Or its uid (of a trajectory: its first row)."""
    out: Path = Path("row.html")
    """Where the page goes."""
    model: str = "pretrained/bagel-nano-shapes"
    """Whose tokenizer, image sizes and edit view are used (folder or hub id)."""
    system_prompt: Path | None = None
    """The system prompt's file; otherwise the model's own."""
    system_prompt_sha256: str | None = None
    """What its hash must be; for the release's rows the published one is."""
    weighting: Literal["release", "ours"] = "release"
    """The weights of tokens."""


@dataclass(frozen=True)
class ConvertConfig:
    """Read one schema, write another: rows that break a rule are left out and counted."""

    source: Annotated[str, tyro.conf.Positional]
    """Folder, .jsonl file or hub id."""
    output_dir: Annotated[Path, tyro.conf.Positional]
    """A new or empty folder."""
    to: Literal["jsonl", "parquet", "release"] = "jsonl"
    """JSONL with pictures, the same in Parquet, or the release's Parquet."""
    add_plan: bool = False
    """Give drawing tasks the turn before the first image that the release's schema wants."""


def main(argv: Sequence[str]) -> int:
    verbs: dict[str, tuple[Callable[..., int], type]] = {
        "check": (check, CheckConfig),
        "stats": (stats, StatsConfig),
        "show": (show, ShowConfig),
        "convert": (convert, ConvertConfig),
        "example": (example, ExampleConfig),
    }
    return run_verb(argv, PROG, __doc__, verbs)


def example(config: ExampleConfig) -> int:
    from sft.data_convert import write_example

    count = write_example(config.output_dir, config.rows, config.seed)
    print(f"wrote {count} trajectories to {config.output_dir}")
    return 0


def check(config: CheckConfig) -> int:
    found = read_dataset(
        config.source,
        config.images,
        workers=config.workers,
        processes=config.workers,
        keep_pictures=False,
    )
    if config.report:
        from umm_reflect.files import write_aside

        lines = [json.dumps(vars_of(v), ensure_ascii=False) for v in found.violations]
        write_aside(config.report, "".join(f"{line}\n" for line in lines))
    for violation in found.violations[:SHOWN]:
        print(violation)
    if len(found.violations) > SHOWN:
        print(f"... and {len(found.violations) - SHOWN} more (--report FILE has all)")
    for rule, count in Counter(v.rule for v in found.violations).most_common():
        print(f"{count:8,}  {rule}")
    print(f"{found.rows - found.bad:,} of {found.rows:,} rows are good, {found.bad:,} are left out")
    found.refuse_more_than(config.max_bad)
    if config.expect:
        from sft.rows import check_release_counts

        check_release_counts(found)
        print("the counts are the published ones")
    return 0


def vars_of(violation: Violation) -> dict[str, str]:
    """A violation as plain JSON."""
    return {
        "where": violation.where,
        "uid": violation.uid,
        "rule": str(violation.rule),
        "detail": violation.detail,
    }


def stats(config: StatsConfig) -> int:
    found = read_dataset(config.source, "none", keep_pictures=False)
    numbers = statistics(found)
    if config.json:
        print(json.dumps(numbers))
        return 0
    for name, value in numbers.items():
        if isinstance(value, dict):
            shown = "  ".join(f"{key}: {count:,}" for key, count in value.items()) or "none"
            print(f"{name:<28}{shown}")
        else:
            print(f"{name:<28}{value:,}" if isinstance(value, int) else f"{name:<28}{value}")
    return 0


def statistics(found: Found) -> dict[str, int | str | dict[str, int]]:
    """Counts of rows, and how turns, scores, images and lengths of texts are spread."""
    from sft.rows import counts

    records = found.records
    turns = [said for record in records for said in record.turns]
    lengths = sorted(len(said.text) for said in turns) or [0]
    scores = Counter(f"{said.reflection.score:g}" for said in turns)

    def spread(values: Counter) -> dict[str, int]:
        return {str(key): values[key] for key in sorted(values, key=lambda k: (float(k), k))}

    return {
        "schema": found.schema,
        "rows read": found.rows,
        "rows left out": found.bad,
        **counts(found),
        "whole": sum(bool(record.turns) for record in records),
        "images a trajectory": spread(Counter(str(len(record.images)) for record in records)),
        "turns a trajectory": spread(Counter(str(len(record.turns)) for record in records)),
        "scores": spread(scores),
        "characters a turn": {
            "median": lengths[len(lengths) // 2],
            "longest": lengths[-1],
        },
        "subtypes": dict(Counter(record.subtype or "none" for record in records).most_common()),
    }


def show(config: ShowConfig) -> int:
    from sft.data_show import html_page, summary
    from sft.rows import Layer, Row, expand
    from umm_reflect import hub
    from umm_reflect.files import write_aside
    from umm_reflect.tokens import Tokens

    found = read_dataset(config.source, "none")
    rows: list[Row] = expand(found.records, found.anchors, [config.kind])[config.kind]
    if config.uid is not None:
        rows = [row for row in rows if config.uid in (row.uid, row.record.uid)]
    place = 0 if config.uid is not None else config.row
    if not 0 <= place < len(rows):
        raise UserError(
            f"{config.source} has {len(rows)} {config.kind} rows"
            + (f" of {config.uid}" if config.uid is not None else f", and no row {place}"),
            "umm-reflect data stats counts them.",
        )
    folder = hub.resolve(config.model)
    profile = hub.profile(folder)
    prompt = profile.system_prompt
    if config.system_prompt is not None:
        prompt = read_system_prompt(
            config.system_prompt, config.system_prompt_sha256, [found.schema]
        )
    tokens = Tokens.from_folder(folder)
    layer = Layer(tokens, profile.transforms, prompt, config.weighting, profile.edit_view)
    laid = layer.lay(rows[place])
    for line in summary(rows[place], laid):
        print(line)
    write_aside(config.out, html_page(rows[place], laid, tokens))
    print(f"wrote {config.out}")
    return 0


def read_system_prompt(path: Path, sha256: str | None, schemas: Collection[str]) -> str:
    """The text of a prompt file. Its hash must be `sha256`; without it, for the release's rows, the
    published one.

    Errors: CheckpointError where the file is missing or has another hash.
    """
    from umm_reflect import hub
    from umm_reflect.files import sha256 as hash_of

    if sha256 is None:
        of_release = not {"release", "hub"}.isdisjoint(schemas)
        sha256 = hub.PROMPT_SHA256 if of_release or not path.exists() else hash_of(path)
    return hub.read_prompt(path, sha256)


def convert(config: ConvertConfig) -> int:
    from sft.data_convert import misfit, with_plan, write_release
    from sft.data_own import write_jsonl, write_tables

    left_out: Counter[str] = Counter()

    def good() -> Iterator[Record]:
        for (_, _, record, problems), anchor in scan(config.source, "headers"):
            if anchor:
                left_out["anchor (a prompt and an image are no trajectory)"] += 1
                continue
            if record is None:
                left_out[f"breaks the rule {problems[0][0]}"] += 1
                continue
            if config.add_plan:
                record = with_plan(record)
            why = misfit(record) if config.to == "release" else ""
            if why:
                left_out[why] += 1
                continue
            yield record

    writers = {"jsonl": write_jsonl, "parquet": write_tables, "release": write_release}
    count = writers[config.to](good(), config.output_dir)
    for why, number in left_out.most_common():
        print(f"{number:8,}  left out: {why}")
    print(f"wrote {count:,} trajectories to {config.output_dir}")
    if not count:
        raise UserError("no row could be converted", "umm-reflect data check names every problem.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
