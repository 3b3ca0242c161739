"""What `umm-reflect sft --dry-run` prints: the rows, the first pack, what learns, what it takes.

    for line in plan(config): print(line)

Nothing is trained and no weight is read: the data are read and measured, one forward's packs are
built on the CPU, and the memory is planned from the model's sizes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from sft.batches import Parcel
from sft.mixture import share
from sft.train_config import Config
from sft.train_data import Prepared, forwards, prepare
from umm_reflect.device import resolve_device, resolve_dtype
from umm_reflect.doctor import host_memory
from umm_reflect.files import human_size
from umm_reflect.training.plan import TrainingRun, plan_lines
from umm_reflect.training.processes import Processes
from umm_reflect.training.trainable import RANK


def dry_run(config: Config) -> int:
    for line in plan(config):
        print(line)
    return 0


def plan(config: Config) -> Iterator[str]:
    """Errors: as `prepare`."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    alone = Processes()
    prepared = prepare(config, alone)
    yield f"model {config.model}, data {', '.join(config.data)}"
    yield from prepared.lines(config.max_steps)
    yield ""
    others = replace(alone, world=world)
    packs = share(prepared.sampler.step(0), 0, world)[: config.packs_per_forward]
    parcel = prepared.reader(prepared.reader.task(packs, {}))
    yield from _first(parcel, len(packs), prepared)
    yield ""
    each = forwards(config.packs_per_step, others, config.packs_per_forward)
    yield (
        f"A step: {config.packs_per_step} packs over {world} process"
        f"{'es' if world > 1 else ''}, {each} forward{'s' if each > 1 else ''} on each; "
        f"{config.max_steps:,} steps, {prepared.workers} workers a process"
    )
    for piece in config.schedule().pieces:
        yield (
            f"  {piece.shape} from {piece.start:g} to {piece.end:g} until {piece.until:,} "
            f"{piece.unit}"
        )
    yield ""
    yield from _memory(config, prepared, parcel, world)


def _first(parcel: Parcel, packs: int, prepared: Prepared) -> Iterator[str]:
    work, kinds = parcel.work, Counter(drawn.kind for drawn in parcel.drawn)
    yield f"The first forward: {packs} pack{'s' if packs > 1 else ''}, " + ", ".join(
        f"{count} {kind}" for kind, count in kinds.items()
    )
    scored, noised = work.scored, int(parcel.counts[1])
    yield (
        f"  {work.und:,} tokens of the understanding expert (of them {work.patches:,} patches, "
        f"{scored:,} scored), {work.gen:,} latents (of them {noised:,} to draw)"
    )
    yield (
        f"  {len(parcel.latents)} images enter as latents, {len(parcel.patches)} as patches; "
        f"{human_size(parcel.buffer.numel())} to the device"
    )
    for drawn, uid, rule, detail in parcel.bad:
        yield f"  left out: {drawn.kind} of {uid}: {rule}: {detail}"


def _memory(config: Config, prepared: Prepared, parcel: Parcel, world: int) -> Iterator[str]:
    strategy = config.strategy
    if strategy == "auto":
        strategy = "fsdp2" if world > 1 else "none"
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    rows = parcel.fields["sample_BL"][1]
    run = TrainingRun(
        work=parcel.work,
        preset=config.parameters,
        rank=config.lora.rank or RANK,
        frozen=config.frozen,
        strategy=strategy,
        world=world,
        optimizer=config.optimizer.name,
        ema=config.optimizer.ema_decay is not None,
        recompute=config.recompute,
        bf16=dtype != torch.float32,
        legacy_bf16=config.legacy_bf16,
        longest=rows[1],
    )
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = host_memory()
    yield from plan_lines(prepared.config, run, available, config.keep)
