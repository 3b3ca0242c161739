"""From folders of trajectories to the steps of a run: rows, lengths, the plan, what is held out.

    prepared = prepare(config, processes)
    packs = share(prepared.sampler.step(120), rank, world)

Rank 0 reads every picture's header and measures every row; the others read the texts and are told
the rest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from sft import lengths
from sft.batches import Reader, Task
from sft.data import Found, Record, read_dataset, schema_of, split
from sft.feed import default_workers
from sft.latents import ImageStore
from sft.lengths import Lengths
from sft.mixture import Measured, Mixture, Sampler, pack_once, share
from sft.packs import measure
from sft.rows import Kind, Layer, Row, check_release_counts, expand
from sft.train_config import Config
from umm_reflect import hub
from umm_reflect.checkpoint import read_config
from umm_reflect.config import BagelConfig
from umm_reflect.errors import UsageError, UserError
from umm_reflect.layout import Frame
from umm_reflect.profile import ReflectionProfile
from umm_reflect.tokens import Tokens
from umm_reflect.training.processes import Processes

LENGTHS = "lengths.json"  # in the output folder
# Packs that are counted before a run, to say what it will see: a few seconds.
PLANNED_PACKS = 60_000
# The numbers of held-out rows begin here, so that no random stream is shared with a training row.
HELD_OUT_FROM = 1 << 40


@dataclass(frozen=True)
class Prepared:
    """What a run learns from. reader, held_out: make parcels of rows to learn and to look at."""

    folder: Path
    config: BagelConfig
    profile: ReflectionProfile
    records: int
    held: tuple[Record, ...]
    sampler: Sampler
    held_packs: tuple
    reader: Reader
    held_out: Reader
    workers: int

    def lines(self, steps: int) -> Iterator[str]:
        """For a terminal: what there is, and what so many steps see of it."""
        yield f"{self.records:,} trajectories to learn from, {len(self.held):,} held out"
        planned = max(1, min(steps, PLANNED_PACKS // self.sampler.packs_per_step))
        if planned < steps:
            yield f"the first {planned:,} of {steps:,} steps:"
        yield from self.sampler.coverage(planned).lines()
        for kind in self.sampler.empty:
            there = len(self.sampler.tokens.get(kind, ()))
            why = f"none of {there:,} rows can be used" if there else "the data hold no such row"
            yield f"{kind}: {why}; the other kinds make up for it"


def prepare(config: Config, processes: Processes) -> Prepared:
    """Errors: UserError for data that is missing, bad or not what is expected; CheckpointError for
    the model's folder.
    """
    if not config.data:
        raise UsageError("no data is named", "umm-reflect sft --data FOLDER")
    folder = hub.resolve(config.model)
    model, tokens = read_config(folder), Tokens.from_folder(folder)
    frame = Frame(tokens.start, tokens.end, tokens.image_start, tokens.image_end)
    workers = config.workers
    if workers is None:
        workers = default_workers(_local_world(processes))
    profile = _profile(config, folder, tell=processes.main)
    mixture = config.packing.mixture()
    kinds = [kind for kind, weight in mixture.weights.items() if weight]
    kinds += [mixture.every_pack] if mixture.every_pack not in (None, *kinds) else []
    settings = [model, profile, config.weighting, config.full_view, kinds, config.validation.share]
    settings += [config.seed, tokens.tokenizer.to_str()]
    path, signature = config.output_dir / LENGTHS, None
    known: Lengths | None = None
    if processes.main:
        signature = lengths.sign(config.data, settings)
        known = lengths.recall(path, signature)
    found = _read(config, processes, workers, known)
    planner = Layer(
        tokens,
        profile.transforms,
        profile.system_prompt,
        config.weighting,
        full_view=config.full_view,
        stand_ins=True,
    )
    learn, held = split(found.records, config.validation.share, config.seed)
    rows = expand(learn, found.anchors, kinds)
    held_rows = expand(held, (), [kind for kind in kinds if kind != "anchor"])

    def measure_all() -> tuple[Measured, Measured]:
        if known is not None:
            return known.measured
        both = [measure(some, planner, frame, model, workers) for some in (rows, held_rows)]
        if not config.dry_run:
            uids = (frozenset(r.uid for r in some) for some in (found.records, found.anchors))
            lengths.keep(path, signature, Lengths(*uids, tuple(both)))
        return tuple(both)

    measured, held_measured = _told(processes, measure_all)

    def reader(some: Mapping[Kind, list[Row]], mixture: Mixture) -> Reader:
        return Reader(some, planner, frame, model, mixture, config.loss, config.seed)

    return Prepared(
        folder=folder,
        config=model,
        profile=profile,
        records=len(learn) + len(found.anchors),
        held=tuple(held),
        sampler=Sampler(mixture, measured, config.seed, config.packs_per_step),
        held_packs=_held_packs(held_measured, mixture, config.validation.packs),
        reader=reader(rows, mixture),
        held_out=reader(held_rows, replace(mixture, dropout=type(mixture.dropout)())),
        workers=workers,
    )


def _local_world(processes: Processes) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", processes.world))


def _read(config: Config, processes: Processes, workers: int, known: Lengths | None) -> Found:
    """All datasets as one, without what breaks a rule; the same on all processes. known: what an
    earlier start found, so that pictures need not be read.
    """
    headers = processes.main and known is None
    threads = max(1, workers)
    found = [
        read_dataset(source, "headers" if headers else "none", workers=threads, processes=workers)
        for source in config.data
    ]
    for one, source in zip(found, config.data, strict=True):
        one.refuse_more_than(config.max_bad)
        if config.expect:
            check_release_counts(one)
        if one.bad and processes.main:
            print(f"{source}: {one.bad} of {one.rows} rows break a rule and are left out")
    both = _joined(found, "records"), _joined(found, "anchors")

    def uids() -> list[frozenset[str]]:
        if known is not None:
            return [known.records, known.anchors]
        return [frozenset(record.uid for record in some) for some in both]

    good = _told(processes, uids)
    records, anchors = (
        tuple(record for record in some if record.uid in mine)
        for some, mine in zip(both, good, strict=True)
    )
    if not (records or anchors):
        raise UserError("no row can be used", "umm-reflect data check names every problem.")
    return replace(found[0], records=records, anchors=anchors)


def _joined(found: list[Found], name: str) -> list[Record]:
    """Of several datasets; uids carry the dataset's number, as two may use the same."""
    if len(found) == 1:
        return list(getattr(found[0], name))
    return [
        replace(record, uid=f"{number}/{record.uid}")
        for number, one in enumerate(found)
        for record in getattr(one, name)
    ]


def _told(processes: Processes, make):
    """What rank 0 makes, on all processes."""
    if processes.world == 1:
        return make()
    box = [make() if processes.main else None]
    dist.broadcast_object_list(box, src=0, group=processes.group)
    return box[0]


def _profile(config: Config, folder: Path, *, tell: bool) -> ReflectionProfile:
    """How the model is run, with the system prompt that it is trained with. A prompt file of the
    release's data must have the published hash, unless another one is given.
    """
    from sft.data_cli import read_system_prompt

    profile = hub.profile(folder, config.lora.adapter, tell=tell)
    if config.system_prompt is None:
        return profile
    schemas = {schema_of(source) for source in config.data}
    text = read_system_prompt(config.system_prompt, config.system_prompt_sha256, schemas)
    return replace(profile, system_prompt=text)


def _held_packs(measured: Measured, mixture: Mixture, most: int) -> tuple:
    """Packs of the held-out rows, spread over all of them where there are too many."""
    packs = pack_once(measured, mixture)
    chosen = packs if len(packs) <= most else packs[:: -(-len(packs) // most)]
    return tuple(
        tuple(replace(drawn, number=HELD_OUT_FROM + drawn.number) for drawn in pack)
        for pack in chosen
    )


def forwards(packs: int, processes: Processes, together: int) -> int:
    """How many forwards every process makes for so many packs."""
    return math.ceil(math.ceil(packs / processes.world) / together)


def tasks(
    prepared: Prepared, config: Config, processes: Processes, store: ImageStore, first: int
) -> Iterator[Task]:
    """The tasks of this process from step `first` on, `forwards` of them a step, without end."""
    together = config.packs_per_forward
    count = forwards(config.packs_per_step, processes, together)
    step = first
    while True:
        mine = share(prepared.sampler.step(step), processes.rank, processes.world)
        for k in range(count):
            packs = mine[k * together : (k + 1) * together]
            yield prepared.reader.task(packs, store.kept)
        step += 1


def held_out_tasks(prepared: Prepared, config: Config, processes: Processes) -> Iterable[Task]:
    """The held-out rows of this process, as many tasks on each."""
    mine = share(prepared.held_packs, processes.rank, processes.world)
    together = config.packs_per_forward
    for k in range(forwards(len(prepared.held_packs), processes, together)):
        packs = mine[k * together : (k + 1) * together]
        yield prepared.held_out.task(packs, {}, decisions=True)
