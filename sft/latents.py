"""Pictures on the device: encoded once, kept while there is room, put into each batch.

    store = ImageStore(bagel.vae, bagel.config, transforms, device, room=4e9)
    batch, times_I, noise_BGC = store.batch(parcel)

A parcel brings the pixels of pictures that the store lacks. The autoencoder gives the moments of
their posterior, from which each use takes its mean or its own sample; patches stay 8-bit levels.
What exceeds the room is encoded again each time it comes. On a CPU pictures are encoded one by
one, so that what is kept equals what would be encoded anew, bit for bit.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from sft.batches import Fresh, ImageKey, Parcel
from umm_reflect.autoencoder import AutoEncoder
from umm_reflect.config import BagelConfig
from umm_reflect.packing import PackedBatch
from umm_reflect.rng import stream_seed

# Pixels that are encoded at once on an accelerator: its memory at full resolution is 256 bytes each
AT_ONCE = 4 * 2**20


@dataclass(frozen=True)
class Kept:
    """A picture. target: moments [2 z, h, w] from which it is drawn; seen: those of what a row
    looks at, the same but for a round trip; patches: uint8 [n, P] of what a row looks at.
    """

    target: Tensor
    seen: Tensor
    patches: Tensor

    @property
    def bytes(self) -> int:
        both = (self.target,) if self.seen is self.target else (self.target, self.seen)
        return sum(t.numel() * t.element_size() for t in (*both, self.patches))


class ImageStore:
    """room: bytes of pictures that are kept. round_trip: share of the pictures (by lot, the same
    each time) that rows look at as the autoencoder gives them back, as it does with drawn ones.
    """

    def __init__(
        self,
        vae: AutoEncoder,
        config: BagelConfig,
        device: torch.device,
        *,
        room: float = 0.0,
        round_trip: float = 0.0,
        seed: int = 0,
    ):
        self.vae, self.config, self.device = vae, config, device
        self.room, self.round_trip, self.seed = room, round_trip, seed
        self.kept: dict[ImageKey, Kept] = {}
        self.used = 0

    @torch.no_grad()
    def batch(self, parcel: Parcel) -> tuple[PackedBatch, Tensor, Tensor, dict[str, Tensor]]:
        """(batch, times_I, noise_BGC, the parcel's further arrays) on the device."""
        arrays = parcel.arrays(self.device)
        here = self._with(parcel.fresh, arrays)
        names = PackedBatch.__dataclass_fields__
        own = {name: _wide(t) for name, t in arrays.items() if name in names}
        extra = {name: t for name, t in arrays.items() if name not in names}
        rows, width = own["cell_BG"].shape
        channels = self.config.latent_dim
        latent = torch.zeros(rows * width, channels, device=self.device)
        noise = torch.zeros(rows * width, channels, device=self.device)
        if parcel.latents:
            sampled = extra.pop("sampled_K").long()
            tokens = self._latents(parcel, here, extra.pop("posterior"), sampled)
            latent.index_copy_(0, extra.pop("latent_T").long(), tokens)
            noise.index_copy_(0, extra["noised_T"].long(), extra.pop("noise_TC"))
        patches = [here[key].patches for key in parcel.patches]
        batch = PackedBatch(
            **own,
            patches_VP=_pixels(torch.cat(patches)) if patches else torch.zeros(0, 1),
            patch_lengths=parcel.patch_lengths,
            latent_BGC=latent.view(rows, width, channels),
            num_images=len(parcel.latents),
        )
        return batch, extra.pop("time_I"), noise.view(rows, width, channels), extra

    def _with(self, fresh: Sequence[Fresh], arrays: dict[str, Tensor]) -> Mapping[ImageKey, Kept]:
        """All pictures that are kept, and those of this parcel."""
        encoded: dict[ImageKey, Kept] = {}
        for i, group in enumerate(fresh):
            levels, patches = arrays.pop(f"vae {i}"), arrays.pop(f"vit {i}")
            new = [k for k, key in enumerate(group.keys) if key not in self.kept]
            height, width = levels.shape[1:3]
            at_once = 1 if self.device.type == "cpu" else max(1, AT_ONCE // (height * width))
            for start in range(0, len(new), at_once):
                some = new[start : start + at_once]
                keys = [group.keys[k] for k in some]
                encoded |= self._encoded(keys, levels[some], patches[some], group.cells)
        room = self.room - self.used
        for key, one in encoded.items():
            if one.bytes > room:
                return ChainMap(encoded, self.kept)
            self.kept[key] = one
            self.used, room = self.used + one.bytes, room - one.bytes
        return self.kept

    def _encoded(
        self,
        keys: Sequence[ImageKey],
        levels_NHWC: Tensor,
        patches: Tensor,
        cells: tuple[int, int],
    ) -> dict[ImageKey, Kept]:
        # contiguous: on a CPU, group norms of channels-last tensors lose precision
        pixels = _pixels(rearrange(levels_NHWC, "n h w c -> n c h w").contiguous())
        targets = self._moments(pixels)
        found = {
            key: Kept(target, target, patch)
            for key, target, patch in zip(keys, targets, patches, strict=True)
        }
        lots = [k for k, key in enumerate(keys) if self._lot(key) < self.round_trip]
        if lots:
            seen = self._given_back(targets[lots])
            for k, picture, moments in zip(lots, seen, self._moments(seen), strict=True):
                cut = self._patches(picture, cells)
                found[keys[k]] = replace(found[keys[k]], seen=moments, patches=cut)
        return found

    def _moments(self, pixels: Tensor) -> Tensor:
        return torch.cat(self.vae.moments(pixels), dim=1)

    def _given_back(self, moments: Tensor) -> Tensor:
        """[n, 3, H, W] the pictures as the autoencoder draws them, in 8-bit levels."""
        scale, shift = self.vae.config.scale_factor, self.vae.config.shift_factor
        drawn = self.vae.decode(scale * (moments.chunk(2, dim=1)[0] - shift)).clamp(-1, 1)
        return (drawn * 127.5).round() / 127.5

    def _patches(self, picture: Tensor, cells: tuple[int, int]) -> Tensor:
        """Its patches as 8-bit levels, after torch's bicubic filter in place of Pillow's."""
        patch = self.config.vit.patch_size
        sides = [count * patch for count in cells]
        small = F.interpolate(picture[None], sides, mode="bicubic", antialias=True)[0]
        levels = (small.clamp(-1, 1) * 127.5 + 127.5).round().to(torch.uint8)
        return rearrange(levels, "c (h p) (w q) -> (h w) (p q c)", p=patch, q=patch)

    def _lot(self, key: ImageKey) -> float:
        return stream_seed(self.seed, "/".join(map(str, key)), 0, "round trip") / 2**64

    def _latents(
        self, parcel: Parcel, here: Mapping[ImageKey, Kept], noise: Tensor, sampled: Tensor
    ) -> Tensor:
        """[T, C] the latent tokens of all blocks, block after block. sampled: which are samples."""
        moments = [
            here[key].target if noised else here[key].seen
            for key, noised in zip(parcel.latents, parcel.noised, strict=True)
        ]
        if len({one.shape for one in moments}) == 1:  # one call instead of one a block
            mean, logvar = torch.stack(moments).chunk(2, dim=1)
            std = torch.exp(0.5 * logvar.index_select(0, sampled))
            mean = mean.index_add(0, sampled, std * noise.view_as(std))
            return self._tokens(mean).flatten(0, 1)
        tokens, start = [], 0
        for one, is_sampled in zip(moments, parcel.sampled, strict=True):
            mean, logvar = one.chunk(2)
            if is_sampled:
                own = noise[start : start + mean.numel()].view_as(mean)
                mean = mean + torch.exp(0.5 * logvar) * own
                start += mean.numel()
            tokens.append(self._tokens(mean[None])[0])
        return torch.cat(tokens)

    def _tokens(self, z: Tensor) -> Tensor:
        """[n, tokens, C] of posterior values [n, z, h, w]."""
        latents = self.vae.config.scale_factor * (z - self.vae.config.shift_factor)
        p = self.config.latent_patch_size
        return rearrange(latents, "n z (r p) (c q) -> n (r c) (p q z)", p=p, q=p)


def _wide(t: Tensor) -> Tensor:
    """Indexes as int64, as `packing.collate` makes them."""
    return t.long() if t.dtype == torch.int32 else t


def _pixels(levels: Tensor) -> Tensor:
    """8-bit levels → [-1, 1], by the operations of `images.to_tensor`."""
    return levels.float().div(255).sub(0.5).div(0.5)
