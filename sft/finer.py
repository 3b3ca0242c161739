"""A model whose pictures are looked at in finer detail: the same weights, more patches an image.

    python -m sft.finer outputs/nano/sft/checkpoint --side 168 --output-dir outputs/nano/finer

The ViT sees squares of 168 pixels in place of 112: its learned position table is interpolated to
the larger grid (bicubic, as image towers usually are), the model's own sin-cos table grows, and
`reflection.json` names the new size. Everything else stays. The model has to be trained on from
there, since its patches show shapes larger than before.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from umm_reflect.errors import UsageError
from umm_reflect.model import Bagel
from umm_reflect.profile import ReflectionProfile, save_profile
from umm_reflect.vit import PositionTable


@dataclass(frozen=True)
class FinerConfig:
    """Enlarge what the ViT sees."""

    model: Annotated[str, tyro.conf.Positional]
    """A folder or hub id whose pictures are squares for the ViT."""
    output_dir: Path
    """The new checkpoint folder."""
    side: int = 168
    """Of the square that the ViT sees, in pixels; a multiple of its patches, larger than before."""
    sure_of_ten: float | None = None
    """The least probability of a score of 10 that is said; otherwise as it was."""
    sure_of_ten_later: float | None = None
    """The same for edited images."""
    glances: int | None = None
    """How many times the image is looked at for it; otherwise as it was."""


def widened(bagel: Bagel, grid_side: int) -> Bagel:
    """The model with a ViT grid of grid_side x grid_side patches, in place.

    Raises ValueError for a side that is not larger.
    """
    old = bagel.config.vit.grid_side
    if grid_side <= old:
        raise ValueError(f"the grid has {old} patches a side already; give more than that")
    embeddings = bagel.vit_model.vision_model.embeddings
    table = embeddings.position_embedding.weight.detach()
    embeddings.position_embedding = nn.Embedding.from_pretrained(
        interpolated(table, grid_side), freeze=False
    )
    device = bagel.vit_pos_embed.pos_embed.device
    bagel.vit_pos_embed = PositionTable(grid_side, bagel.config.llm.hidden_size).to(device)
    bagel.config = bagel.config.with_sides(
        latent_grid_side=bagel.config.latent_grid_side, vit_grid_side=grid_side
    )
    return bagel


def interpolated(table: Tensor, side: int) -> Tensor:
    """[old², W] of a square grid -> [side², W], bicubic over rows and columns."""
    old = round(len(table) ** 0.5)
    grid = table.float().reshape(1, old, old, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, (side, side), mode="bicubic", align_corners=False)
    return grid.flatten(2)[0].T.contiguous().to(table.dtype)


def finer_profile(profile: ReflectionProfile, side: int) -> ReflectionProfile:
    """The same, with squares of `side` pixels for the ViT."""
    rule = replace(profile.transforms.vit, max_size=side, min_size=side)
    return replace(profile, transforms=replace(profile.transforms, vit=rule))


def main(argv: Sequence[str]) -> int:
    from umm_reflect.checkpoint import VAE_WEIGHTS, save
    from umm_reflect.hub import profile, resolve
    from umm_reflect.settings import parse

    config = parse(FinerConfig, argv, "python -m sft.finer")
    folder = resolve(config.model)
    own = profile(folder)
    rule = own.transforms.vit
    if rule.max_size != rule.min_size:
        raise UsageError(
            f"{folder}: the ViT sees {rule.min_size} to {rule.max_size} pixels",
            "Name a model with squares of one size.",
        )
    bagel = Bagel.from_pretrained(folder, device="cpu")
    vit = bagel.config.vit
    patch, held = vit.patch_size, vit.grid_side * vit.patch_size
    if config.side % patch or config.side <= held:
        raise UsageError(
            f"side {config.side} does not fit", f"Give a multiple of {patch} above {held}."
        )
    save(widened(bagel, config.side // patch), config.output_dir)
    shutil.copyfile(folder / VAE_WEIGHTS, config.output_dir / VAE_WEIGHTS)  # in its own precision
    names = ("sure_of_ten", "sure_of_ten_later", "glances")
    asked = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    say = replace(own.say, **asked)
    save_profile(replace(finer_profile(own, config.side), say=say), config.output_dir)
    print(f"{rule.max_size} -> {config.side} pixels: {config.output_dir}")
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
