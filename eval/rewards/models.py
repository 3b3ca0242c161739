"""Networks of others for a judge: where they are, and that they were loaded whole.

folder = model_folder("yuvalkirstain/PickScore_v1")     # the hub's cache, checked, or a folder
folder = processor_folder("laion/CLIP-ViT-H-14-...")    # the small files only, not its weights
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umm_reflect.errors import CheckpointError

SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model")


def model_folder(name: str) -> Path:
    """The folder of a model: a folder as it is, a hub id from the cache, else downloaded.

    The hashes of the weights are checked, or recorded at the first download and enforced after.
    Errors: UserError or CheckpointError of one line.
    """
    from umm_reflect import hub

    if not hub.is_hub_id(name):
        return hub.resolve(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, revision = hub.split_name(name)
    try:
        wanted = list(hub.WANTED_FILES)
        folder = Path(
            snapshot_download(repo, revision=revision, allow_patterns=wanted, local_files_only=True)
        )
    except LocalEntryNotFoundError:
        return hub.fetch(name)
    if not _is_whole(folder):
        return hub.fetch(name)
    hub.check_hashes(repo, revision, folder)
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a cached model has its config and all of its weights."""
    if not (folder / "config.json").exists():
        return False
    index = folder / "model.safetensors.index.json"
    if index.exists():
        parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / part).exists() for part in parts)
    return any(folder.glob("*.safetensors"))


def processor_folder(name: str) -> Path:
    """The folder with a model's tokenizer and image settings; its weights are not fetched."""
    from umm_reflect import hub

    if not hub.is_hub_id(name):
        return hub.resolve(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, revision = hub.split_name(name)
    wanted = {"repo_id": repo, "revision": revision, "allow_patterns": list(SMALL_FILES)}
    try:
        return Path(snapshot_download(**wanted, local_files_only=True))
    except LocalEntryNotFoundError:
        with hub.hub_errors(repo):
            return Path(snapshot_download(**wanted))


def check_loaded(report: Mapping[str, Any], folder: Path) -> None:
    """transformers only warns of weights that are missing; here they are an error.

    report: from_pretrained(..., output_loading_info=True). Errors: CheckpointError.
    """
    faults = {
        kind: sorted(map(str, report.get(kind) or ()))
        for kind in ("missing_keys", "mismatched_keys", "error_msgs")
    }
    for kind, names in faults.items():
        if names:
            raise CheckpointError(
                f"{folder} does not fit its model: {len(names)} {kind.replace('_', ' ')}, "
                f"for example {names[0]}",
                "Fetch it again, or name the right model.",
            )
