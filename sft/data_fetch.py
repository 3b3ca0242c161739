"""Fetch the released training data from the hub, at one revision, checked file by file.

    python -m sft.data_fetch data/sft                      # about 100 GB; started again, it goes on
    python -m sft.data_fetch data/sft --revision COMMIT --dry-run

The revision is that of the first download unless one is given: it is written to source.json beside
the data with the sha256 of every file, printed, and kept to from then on. Each file is held to the
hash that the hub publishes for it, else to the recorded one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import tyro

from umm_reflect.errors import UsageError, UserError
from umm_reflect.files import human_size, write_aside
from umm_reflect.settings import parse

REPOSITORY = "YijiaFan/UMM-Reflection-SFT-Data"
WANTED = (
    "trajectory_parquet/*.parquet",
    "anchor/parquet/*.parquet",
    "anchor/base_anchor_allowlist.json",
    "README.md",
    "LICENSE*",
)
SOURCE = "source.json"


@dataclass(frozen=True)
class FetchConfig:
    """Fetch the released trajectories and anchors (about 100 GB), checked."""

    output_dir: Annotated[Path, tyro.conf.Positional] = Path("data/sft")
    """Folder for the data."""
    repository: str = REPOSITORY
    """Hub id of the dataset."""
    revision: str | None = None
    """Commit, tag or branch; otherwise that of the first download."""
    dry_run: bool = False
    """Only say what would be fetched."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of the dataset: its size, and its sha256 where the hub publishes one."""

    name: str
    size: int
    sha256: str | None


def main(argv: Sequence[str]) -> int:
    config = parse(FetchConfig, argv, "python -m sft.data_fetch")
    source = read_source(config.output_dir)
    pinned = source.get("revision")
    if source and source["repository"] != config.repository:
        raise UsageError(
            f"{config.output_dir} holds {source['repository']}, not {config.repository}",
            "Name another folder.",
        )
    revision, files = remote_files(config.repository, config.revision or pinned)
    if pinned and revision != pinned:
        raise UsageError(
            f"{config.output_dir} holds revision {pinned}, and {config.revision} is {revision}",
            "Name another folder, or leave --revision out.",
        )
    missing = [f for f in files if not is_here(config.output_dir / f.name, f.size)]
    total = sum(file.size for file in missing)
    print(f"{config.repository}@{revision}: {len(files)} files, {human_size(total)} to fetch")
    if config.dry_run:
        return 0
    fetch(config.repository, revision, config.output_dir, total)
    hashes = checked(config.output_dir, files, source.get("sha256", {}))
    content = {"repository": config.repository, "revision": revision, "sha256": hashes}
    write_aside(config.output_dir / SOURCE, json.dumps(content, indent=1) + "\n")
    print(f"{len(hashes)} files are as published; {config.output_dir / SOURCE} has their hashes")
    return 0


def read_source(folder: Path) -> dict[str, Any]:
    """What source.json says; {} where there is none. Errors: UserError for a damaged one."""
    path = folder / SOURCE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: content[name] for name in ("repository", "revision", "sha256")}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise UserError(
            f"{path} is damaged", "Remove it: the data are then checked anew."
        ) from None


def remote_files(repository: str, revision: str | None) -> tuple[str, list[RemoteFile]]:
    """The commit that a revision is, and its files that are wanted. Errors: UserError where the hub
    has no such dataset, or it holds no trajectories.
    """
    from huggingface_hub import HfApi

    from umm_reflect.hub import hub_errors

    with hub_errors(repository):
        info = HfApi().dataset_info(repository, revision=revision, files_metadata=True)
    files = [
        RemoteFile(f.rfilename, f.size or 0, f.lfs.sha256 if f.lfs else None)
        for f in info.siblings or []
        if any(fnmatch(f.rfilename, pattern) for pattern in WANTED)
    ]
    if not any(fnmatch(file.name, WANTED[0]) for file in files):
        raise UserError(
            f"{repository}@{info.sha} has no {WANTED[0]}", "Check --repository and --revision."
        )
    return str(info.sha), files


def is_here(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


def fetch(repository: str, revision: str, folder: Path, total: int) -> None:
    """Download what is missing; files that are whole stay. Errors: UserError."""
    from huggingface_hub import snapshot_download

    from umm_reflect.hub import check_disk, hub_errors

    check_disk(folder, total, repository)
    with hub_errors(repository):
        snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision,
            local_dir=folder,
            allow_patterns=list(WANTED),
        )


def checked(folder: Path, files: Sequence[RemoteFile], recorded: dict[str, str]) -> dict[str, str]:
    """The sha256 of every file. Errors: UserError that names each one that differs from what is
    published, else recorded.
    """
    from umm_reflect.files import sha256

    hashes, wrong = {}, []
    for file in files:
        path = folder / file.name
        found = sha256(path) if path.exists() else None
        expected = file.sha256 or recorded.get(file.name) or found
        if found is None or found != expected:
            wrong.append(f"{file.name} has sha256 {found}, expected {expected}")
            continue
        hashes[file.name] = found
    if wrong:
        raise UserError(
            f"{len(wrong)} of {len(files)} files in {folder} are damaged: {wrong[0]}",
            "Remove them and start again.",
        )
    return hashes


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
