"""The release's schema from a hub id, row after row through `datasets`, without a copy on disk.

    for where, uid, record, problems in stream_trajectories("YijiaFan/UMM-Reflection-SFT-Data"): ...

A name is an id or id@revision. Records hold the bytes of their pictures: a caller that keeps many
of them keeps many pictures (`read_dataset(..., keep_pictures=False)` drops them).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft.data import Picture, Reading
from sft.data_release import (
    ALLOWLIST,
    ANCHOR_COLUMNS,
    COLUMNS,
    IMAGES,
    AnchorRow,
    allowed_anchors,
    read_allowlist,
    read_row,
)
from umm_reflect.errors import UserError


def stream_trajectories(name: str) -> Iterator[Reading]:
    """The rows of `trajectory_parquet`. Errors: UserError where the hub does not give them."""
    for number, values in enumerate(_rows(name, "trajectory_parquet/*.parquet", COLUMNS)):

        def picture(step: int, sha: str, row=values) -> Picture:
            return Picture(data=_bytes(row, step), sha256=sha)

        record, problems = read_row(values, picture)
        yield f"{name} row {number}", str(values.get("uid") or ""), record, problems


def stream_anchors(name: str) -> Iterator[Reading]:
    """The anchors that the list of the same repository allows; none where it has no such list."""
    path = _allowlist(name)
    if path is None:
        return

    def rows() -> Iterator[AnchorRow]:
        for number, values in enumerate(_rows(name, "anchor/parquet/*.parquet", ANCHOR_COLUMNS)):

            def picture(step: int, row=values) -> Picture:
                return Picture(data=_bytes(row, step))

            yield f"{name} anchor row {number}", values, picture

    yield from allowed_anchors(rows(), read_allowlist(path))


def _bytes(row: dict[str, Any], step: int) -> bytes:
    cell = row[IMAGES][step]
    return (cell["bytes"] if isinstance(cell, dict) else cell) or b""


def _rows(name: str, files: str, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    repo, _, revision = name.partition("@")
    try:
        rows = load_dataset(
            repo, data_files=files, split="train", streaming=True, revision=revision or None
        )
        yield from rows.select_columns([*columns, IMAGES])
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{files} of {name} cannot be read from the hub ({error})",
            "Check the id and the network, or name a folder.",
        ) from None


def _allowlist(name: str) -> Path | None:
    repo, _, revision = name.partition("@")
    if Path(repo).is_dir():
        path = Path(repo) / "anchor" / ALLOWLIST
        return path if path.exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(
            hf_hub_download(
                repo, f"anchor/{ALLOWLIST}", repo_type="dataset", revision=revision or None
            )
        )
    except EntryNotFoundError:
        return None
    except OSError as error:
        raise UserError(
            f"the list of anchors of {name} cannot be fetched ({error})", "Check the network."
        ) from None
