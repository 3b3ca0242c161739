"""Batches that lack a part, made whole, so that every process of a group runs the same modules.

    batch, times_I, noise_BGC = with_all_parts(batch, times_I, noise_BGC, bagel.config)
    nothing = empty_batch(bagel.config)          # for a process that has no data left

Collectives of DDP, FSDP2 and DeepSpeed need gradients for the same weights on every process, also
where one has texts alone. Legend as in `umm_reflect.packing`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from umm_reflect.config import BagelConfig
from umm_reflect.packing import PackedBatch


def empty_batch(config: BagelConfig) -> PackedBatch:
    """One row of one padding token, on the CPU: for a process that has nothing left to learn from.
    It adds nothing to any loss."""
    patch = 3 * config.vit.patch_size**2
    none = torch.zeros(0, dtype=torch.long)
    ones = torch.zeros(1, 1, dtype=torch.long)
    gen = torch.zeros(1, 0, dtype=torch.long)
    return PackedBatch(
        ids_BU=ones,
        position_BL=ones,
        order_BL=ones,
        block_BL=ones - 1,
        sample_BL=ones - 1,
        full_BL=ones.bool(),
        noise_BL=ones.bool(),
        score_S=none,
        label_S=none,
        weight_S=torch.zeros(0),
        patch_V=none,
        patch_cell_V=none,
        patches_VP=torch.zeros(0, patch),
        patch_lengths=[],
        latent_BGC=torch.zeros(1, 0, config.latent_dim),
        cell_BG=gen,
        noised_BG=gen.bool(),
        image_BG=gen,
        num_images=0,
    )


def with_all_parts(
    batch: PackedBatch, times_I: Tensor, noise_BGC: Tensor, config: BagelConfig
) -> tuple[PackedBatch, Tensor, Tensor]:
    """The batch with a padding latent token in each row where it has no latents, and a black patch
    that enters nowhere where it has none: every process then runs the same modules and gets
    gradients (zeros) for the same weights, as the collectives of DDP and FSDP2 need it."""
    rows, width = batch.ids_BU.shape
    device = batch.ids_BU.device
    changes: dict[str, object] = {}
    if not batch.patch_lengths:
        changes["patch_V"] = torch.tensor([rows * width], device=device)
        changes["patch_cell_V"] = torch.zeros(1, dtype=torch.long, device=device)
        changes["patches_VP"] = torch.zeros(1, 3 * config.vit.patch_size**2, device=device)
        changes["patch_lengths"] = [1]
    if not batch.cell_BG.shape[1]:
        padding = {"position": 0, "order": 0, "block": -1, "sample": -1, "full": 0, "noise": 0}
        for name, value in padding.items():
            have = getattr(batch, f"{name}_BL")
            changes[f"{name}_BL"] = torch.cat([have, have.new_full((rows, 1), value)], 1)
        for name in ("cell_BG", "noised_BG", "image_BG"):
            changes[name] = getattr(batch, name).new_zeros(rows, 1)
        changes["latent_BGC"] = batch.latent_BGC.new_zeros(rows, 1, config.latent_dim)
        noise_BGC = noise_BGC.new_zeros(rows, 1, config.latent_dim)
        times_I = times_I if times_I.numel() else times_I.new_zeros(1)
    return (replace(batch, **changes) if changes else batch), times_I, noise_BGC
