"""The state of a run on disk, whole or absent, for any number of processes.

    save_resume(folder, learner, step, {"samples": 4096}, keep=2)   # every process calls it
    if (path := latest(folder)) is not None:
        step, extra = load_resume(folder, learner)        # the newest; or name one state

A state is a folder `step-0000350` with torch's distributed checkpoint (each process writes and
reads its shards; another number of processes or another strategy reads it too) and `about.json`.
It is written under another name and renamed, so that a killed process leaves the states before it.
Masters, moments, averages, counters and the random generators of each process are in it; frozen
weights are not. Several machines need a folder that all of them see.

On the CPU as many processes go on with as many threads as before: bits depend on it, since the sums
of a bias or a norm are made of one part a thread.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from umm_reflect.errors import CheckpointError, UserError
from umm_reflect.files import write_aside
from umm_reflect.training.learner import Learner
from umm_reflect.training.processes import Processes
from umm_reflect.training.state import random_states, set_random_states

ABOUT = "about.json"
STATES = "resume"  # the folder of states in a run's folder
NAME = re.compile(r"step-(\d{7,})")
WRITING, REMOVING = ".writing-", ".removing-"
RANDOM = "random"
# What a damaged file ends in, in one of the readers.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, UnpicklingError)


def save_resume(
    folder: str | Path, learner: Learner, step: int, extra: dict[str, Any], keep: int | None = 2
) -> Path:
    """Write the state after `step` updates into `folder` and remove all but the newest `keep`
    (None: none of them). States of later steps are of a run that was given up: they go too.

    extra: what else a run needs, as JSON. Every process calls it. Errors: UserError on all
    processes when one cannot write; nothing half-written stays then.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}; give 1 or more")
    folder, processes = Path(folder), learner.processes
    path = folder / f"step-{step:07d}"
    aside = folder / f"{WRITING}{path.name}"

    def begin() -> None:
        _remove_leftovers(folder)
        aside.mkdir(parents=True)

    def finish() -> None:
        about = {
            "step": step,
            "processes": processes.world,
            "strategy": learner.strategy,
            "threads": torch.get_num_threads(),
            "extra": extra,
        }
        write_aside(aside / ABOUT, json.dumps(about, indent=2) + "\n")
        if path.exists():
            _remove(path)
        os.rename(aside, path)
        whole = states(folder)
        now = whole.index(path) + 1
        for old in [*whole[: 0 if keep is None else max(0, now - keep)], *whole[now:]]:
            _remove(old)

    _on_main(processes, begin, folder)
    unseen = processes.any(not aside.is_dir(), "does not see it")
    if unseen:
        raise UserError(
            f"{aside} is not seen by rank {unseen[0][0]}", "Give a folder that all machines share"
        )
    try:
        _write(aside, learner)
    except dcp.CheckpointException as error:
        _on_main(processes, lambda: _remove_leftovers(folder), folder)
        rank, cause = next(iter(error.failures.items()))
        raise UserError(
            f"the state cannot be written to {folder} (rank {rank}: {cause[0]})",
            "Free some space, or write elsewhere",
        ) from error
    _on_main(processes, finish, folder)
    return path


def _write(aside: Path, learner: Learner) -> None:
    processes = learner.processes
    state = learner.state_dict()
    for kind, tensor in random_states().items():
        state[f"{RANDOM}/{processes.rank}/{kind}"] = tensor
    with _quiet():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(aside), **_group(processes))


def _group(processes: Processes) -> dict[str, Any]:
    return {"no_dist": True} if processes.world == 1 else {"process_group": processes.group}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that one process saves alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _on_main(processes: Processes, action: Callable[[], None], folder: Path) -> None:
    """Rank 0 acts; its failure is everybody's."""
    why = ""
    if processes.main:
        try:
            action()
        except OSError as error:
            why = str(error)
    if failed := processes.any(bool(why), why):
        raise UserError(
            f"the state cannot be written to {folder} ({failed[0][1]})",
            "Free some space, or write elsewhere",
        )


def states(folder: str | Path) -> list[Path]:
    """The whole states in a folder, the newest last."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    whole = [path for path in found if (path / ABOUT).is_file()]
    return sorted(whole, key=lambda path: int(path.name.removeprefix("step-")))


def keep_only(folder: str | Path, names: Collection[str], processes: Processes) -> None:
    """Remove the states in a folder that have other names. Every process calls it."""

    def others_go() -> None:
        for path in states(folder):
            if path.name not in names:
                _remove(path)

    _on_main(processes, others_go, Path(folder))


def latest(folder: str | Path) -> Path | None:
    """The newest whole state, None where there is none."""
    found = states(folder)
    return found[-1] if found else None


def to_go_on_from(out: str | Path, wanted: str) -> Path | None:
    """The state that a run in folder `out` goes on from. wanted: auto (the newest, if any), never,
    or a state's folder. Errors: UserError where `never` finds one, or the folder is no state."""
    found = latest(Path(out) / STATES)
    if wanted == "auto":
        return found
    if wanted == "never":
        if found is not None:
            raise UserError(
                f"{out} holds the state {found.name} of a run",
                "Choose another --output-dir, or go on with --resume auto",
            )
        return None
    if not (Path(wanted) / ABOUT).is_file():
        raise UserError(f"{wanted} is no state of a run", "Name RUN/resume/step-...")
    return Path(wanted)


def _remove(path: Path) -> None:
    """Out of sight first, so that nobody reads half of it."""
    gone = path.with_name(REMOVING + path.name)
    if gone.exists():
        shutil.rmtree(gone)
    os.rename(path, gone)
    shutil.rmtree(gone)


def _remove_leftovers(folder: Path) -> None:
    """What a killed process left."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith((WRITING, REMOVING)):
                shutil.rmtree(path)


def read_extra(path: Path) -> dict[str, Any]:
    """What `save_resume` was given as `extra` for this state. Errors: CheckpointError when it is
    damaged."""
    try:
        return dict(json.loads((path / ABOUT).read_text(encoding="utf-8"))["extra"])
    except UNREADABLE as error:
        raise CheckpointError(
            f"the state {path} cannot be read ({error})",
            "Remove that folder to take the one before",
        ) from error


def load_resume(folder: str | Path, learner: Learner) -> tuple[int, dict[str, Any]]:
    """(step, extra) of the newest state in a folder, or of the state that is named; the learner
    takes it over, and this process its number of threads. Every process calls it.

    Errors: UserError where there is none; CheckpointError when it is damaged or belongs to another
    model, adapter, optimizer or choice of trained weights.
    """
    folder = Path(folder)
    path = folder if NAME.fullmatch(folder.name) else latest(folder)
    if path is None or not (path / ABOUT).is_file():
        raise UserError(f"{folder} holds no state of a run", "There is nothing to resume")
    processes = learner.processes
    state = learner.state_dict()
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        step, extra = int(about["step"]), dict(about["extra"])
        reader = dcp.FileSystemReader(path)
        saved = {
            name: tuple(meta.size)
            for name, meta in reader.read_metadata().state_dict_metadata.items()
        }
        random = _random_to_load(saved, processes)
        _check(path, learner.state_shapes(), saved)
        with _quiet():
            dcp.load({**state, **random}, storage_reader=reader, **_group(processes))
    except CheckpointError:
        raise
    except (*UNREADABLE, dcp.CheckpointException) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"the state {path} cannot be read ({text})", "Remove that folder to take the one before"
        ) from error
    learner.load_state_dict(state)
    if random:
        set_random_states({name.rsplit("/", 1)[1]: tensor for name, tensor in random.items()})
    if processes.device.type == "cpu" and about["processes"] == processes.world:
        _take_threads(about.get("threads"), processes)
    return step, extra


def _take_threads(threads: int | None, processes: Processes) -> None:
    """threads: None in older states."""
    mine = torch.get_num_threads()
    if threads in (None, mine):
        return
    torch.set_num_threads(threads)
    if processes.main:
        print(f"note: going on with {threads} threads, as before, not {mine}", file=sys.stderr)


def _random_to_load(saved: dict[str, tuple], processes: Processes) -> dict[str, Tensor]:
    """Room for the generators of this process, if it had the same number of neighbours."""
    ranks = {name.split("/")[1] for name in saved if name.startswith(f"{RANDOM}/")}
    if len(ranks) != processes.world:
        return {}
    own = {f"{RANDOM}/{processes.rank}/{kind}": t for kind, t in random_states().items()}
    return {name: tensor for name, tensor in own.items() if saved.get(name) == tuple(tensor.shape)}


def _check(path: Path, wanted: dict[str, tuple], saved: dict[str, tuple]) -> None:
    remedy = "Resume with the settings of that run, or begin in another folder"
    names = {name for name in saved if not name.startswith(f"{RANDOM}/")}
    if odd := sorted(names ^ wanted.keys()):
        side = "has" if odd[0] in saved else "lacks"
        raise CheckpointError(
            f"the state {path} is of another training: it {side} {odd[0]}"
            + (f" and {len(odd) - 1} names more differ" if len(odd) > 1 else ""),
            remedy,
        )
    for name, shape in wanted.items():
        if shape != saved[name]:
            raise CheckpointError(
                f"the state {path} has {name} as {list(saved[name])}, expected {list(shape)}",
                remedy,
            )
