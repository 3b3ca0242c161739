"""Frozen models of transformers for judges: found by folder or hub id, loaded without gaps.

folder = hub.resolve("openai/clip-vit-large-patch14")      # a folder, a hub id or id@revision
folder = processor_folder("laion/CLIP-ViT-H-14-...")       # the small files only, not its weights
model = pretrained(CLIPModel, folder)                      # fp32; a missing key is an error
weights_sha256(folder)                                     # for the manifest
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from umm_reflect import hub
from umm_reflect.errors import CheckpointError

# What files of older releases hold besides weights: numbers that are computed.
_COMPUTED = r".*position_ids|.*relative_position_index"
_SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model")


def processor_folder(name: str) -> Path:
    """The folder with a model's tokenizer and image settings; its weights are not fetched."""
    if not hub.is_hub_id(name):
        return hub.resolve(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, revision = hub.split_name(name)
    wanted = {"repo_id": repo, "revision": revision, "allow_patterns": list(_SMALL_FILES)}
    try:
        return Path(snapshot_download(**wanted, local_files_only=True))
    except LocalEntryNotFoundError:
        with hub.hub_errors(repo):
            return Path(snapshot_download(**wanted))


def pretrained(
    model_class: Any, folder: Path, dtype: Any = None, *, may_hold_more: bool = False, **options
) -> Any:
    """A model in evaluation mode, fp32 unless `dtype` says otherwise. may_hold_more: keys that the
    class does not know are left aside. options: of `from_pretrained`.

    Errors: CheckpointError for a key that is missing, left over or of another shape.
    """
    import torch
    from safetensors import SafetensorError

    try:
        model, info = model_class.from_pretrained(
            folder,
            dtype=dtype or torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        line = " ".join(str(error).split())[:200]
        what = f"{folder} does not load as a {model_class.__name__} ({line})"
        raise CheckpointError(what, "Give a complete folder or a hub id.") from error
    wrong = [f"{key} is missing" for key in info["missing_keys"]]
    wrong += [f"{key} is unknown" for key in info["unexpected_keys"] if not may_hold_more]
    wrong += [f"{key} has another shape" for key, *_ in info.get("mismatched_keys", ())]
    wrong = [text for text in wrong if not re.fullmatch(_COMPUTED, text.split(" ", 1)[0])]
    if wrong:
        more = f" (and {len(wrong) - 4} more)" if len(wrong) > 4 else ""
        raise CheckpointError(
            f"{folder} does not fit a {model_class.__name__}: {'; '.join(wrong[:4])}{more}",
            "Give a complete folder or a hub id.",
        )
    return model.eval()


def weights_sha256(folder: Path) -> str:
    """One hash of all weights in a folder: of its file, or of the hashes of its shards in order."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file", "Give a complete folder.")
    hashes = [hub.digest(file) for file in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
