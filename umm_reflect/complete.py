"""A checkpoint of any kind becomes one complete model folder, checked, without loading it.

    python -m umm_reflect.complete outputs/sft/checkpoint --output-dir outputs/rl_init
    python -m umm_reflect.complete ckpts/0002969 --output-dir outputs/rl_init --base BAGEL

The checkpoint is a BAGEL folder, an adapter (merged into --base, see `merge.py`), or weights alone
as the released trainer saves them (`model.safetensors`, with configs, tokenizer and VAE from
--base). Files are hard links where the disk allows it, else copies, so that removing the checkpoint
takes nothing away.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from umm_reflect.checkpoint import VAE_WEIGHTS, WEIGHTS, TensorFiles, empty_bagel
from umm_reflect.errors import CheckpointError, UsageError
from umm_reflect.settings import parse

WEIGHTS_ALONE = "model.safetensors"
COPIED = (".json", ".txt", ".jinja", ".safetensors")


@dataclass(frozen=True)
class CompleteConfig:
    """Make one complete model folder out of a checkpoint."""

    checkpoint: Annotated[str, tyro.conf.Positional]
    """A model folder or hub id, an adapter, or a folder with model.safetensors alone."""
    output_dir: Path
    """A new or empty folder."""
    base: str | None = None
    """The model that an adapter or weights alone were trained from: a folder or hub id."""


def main(argv: Sequence[str]) -> int:
    config = parse(CompleteConfig, argv, "python -m umm_reflect.complete")
    from umm_reflect.hub import resolve

    out = config.output_dir
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UsageError(f"output-dir {out} is not empty", "Name a new folder.")
    alone = Path(config.checkpoint) / WEIGHTS_ALONE
    folder = alone.parent if alone.exists() else resolve(config.checkpoint)
    weights = alone if alone.exists() else folder / WEIGHTS
    needs_base = alone.exists() or (folder / "adapter_config.json").exists()
    if needs_base and config.base is None:
        what = "weights without configs" if alone.exists() else "an adapter"
        raise UsageError(f"{folder} is {what}", "Say what it was trained from: --base MODEL.")
    if not needs_base and config.base is not None:
        raise UsageError(f"{folder} is a whole model", "Leave --base out.")
    base = resolve(config.base) if config.base else folder
    if needs_base and not alone.exists():
        from umm_reflect.merge import merge

        merge(base, folder, out)
    else:
        complete(base, weights, out)
    print(out)
    return 0


def complete(base: Path, weights: Path, out: Path) -> None:
    """Fill `out` with the files of `base` and with `weights` as its weights. It appears when names
    and shapes of all tensors have been compared with the config.

    Errors: CheckpointError for what does not fit, or lacks a file; nothing is left behind then.
    """
    from umm_reflect.hub import missing_files, profile
    from umm_reflect.profile import save_profile

    aside = out.with_name(f".{out.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        own = weights.parent == base and weights.name == WEIGHTS
        for path in sorted(base.iterdir()):
            if not path.is_file() or not (path.suffix in COPIED or path.name == "README.md"):
                continue
            # another model's weights, and the card that speaks of them
            if own or not path.name.startswith((WEIGHTS.partition(".")[0], "README")):
                link(path, aside / path.name)
        if not own:
            link(weights, aside / WEIGHTS)
        if not (aside / "reflection.json").exists():
            save_profile(profile(base), aside)
        if missing := missing_files(aside):
            raise CheckpointError(f"{base} lacks {', '.join(missing)}", "Fetch it again.")
        check_tensors(aside)
        if out.is_dir():
            out.rmdir()
        os.rename(aside, out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def link(source: Path, target: Path) -> None:
    """A hard link to the file itself (not to a link to it), or a copy on another disk."""
    real = source.resolve()
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


def check_tensors(folder: Path) -> None:
    """CheckpointError unless weights and VAE have the names and shapes that the config says; reads
    the files' headers alone.
    """
    from umm_reflect.autoencoder import AutoEncoder, infer_vae_config
    from umm_reflect.merge import base_config

    files, vae_files = TensorFiles(folder, WEIGHTS), TensorFiles(folder, VAE_WEIGHTS)
    shapes, vae_shapes = files.shapes(), vae_files.shapes()
    config = base_config(folder, shapes)
    with torch.device("meta"):
        vae = AutoEncoder(infer_vae_config(vae_shapes, config.vae))
    for label, found, module in (
        (files.label, shapes, empty_bagel(config)),
        (vae_files.label, vae_shapes, vae),
    ):
        wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        odd = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        if odd:
            name = odd[0]
            raise CheckpointError(
                f"{label}: {len(odd)} tensors do not fit the config, {name} first "
                f"({found.get(name)}, expected {wanted.get(name)})",
                "Config and weights do not belong together",
            )


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
