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
            tokens = self._latents(parcel, here, extra.pop("posterior"))
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
        new = [(i, one) for i, one in enumerate(fresh) if one.key not in self.kept]
        pixels = {i: arrays.pop(f"vae {i}") for i in range(len(fresh))}
        patches = {i: arrays.pop(f"vit {i}") for i in range(len(fresh))}
        encoded: dict[ImageKey, Kept] = {}
        for group in self._groups(new, pixels):
            levels = torch.stack([pixels[i] for i, _ in group])
            # contiguous: on a CPU, group norms of channels-last tensors lose precision
            whole = _pixels(rearrange(levels, "n h w c -> n c h w").contiguous())
            targets = self._moments(whole)
            for (i, one), target in zip(group, targets, strict=True):
                encoded[one.key] = Kept(target, target, patches[i].clone())
            self._round_trips(group, whole, encoded)
        room = self.room - self.used
        for key, one in encoded.items():
            if one.bytes > room:
                return ChainMap(encoded, self.kept)
            self.kept[key] = one
            self.used, room = self.used + one.bytes, room - one.bytes
        return self.kept

    def _groups(self, new, pixels) -> list[list]:
        """Pictures of one size, as many as are encoded at once."""
        sizes: dict[torch.Size, list] = {}
        for i, one in new:
            sizes.setdefault(pixels[i].shape, []).append((i, one))
        groups = []
        for (height, width, _), some in sizes.items():
            count = 1 if self.device.type == "cpu" else max(1, AT_ONCE // (height * width))
            groups += [some[k : k + count] for k in range(0, len(some), count)]
        return groups

    def _moments(self, pixels: Tensor) -> Tensor:
        return torch.cat(self.vae.moments(pixels), dim=1)

    def _round_trips(self, group, pixels: Tensor, encoded: dict[ImageKey, Kept]) -> None:
        """What rows look at, for those pictures whose lot it is, after the autoencoder."""
        chosen = [k for k, (_, one) in enumerate(group) if self._lot(one.key) < self.round_trip]
        if not chosen:
            return
        targets = torch.stack([encoded[group[k][1].key].target for k in chosen])
        scale, shift = self.vae.config.scale_factor, self.vae.config.shift_factor
        means = targets.chunk(2, dim=1)[0]
        again = self.vae.decode(scale * (means - shift)).clamp(-1, 1)
        again = (again * 127.5).round() / 127.5
        seen, patch = self._moments(again), self.config.vit.patch_size
        for moments, picture, k in zip(seen, again, chosen, strict=True):
            _, one = group[k]
            sides = [cells * patch for cells in one.cells]
            small = F.interpolate(picture[None], sides, mode="bicubic", antialias=True)[0]
            levels = (small.clamp(-1, 1) * 127.5 + 127.5).round().to(torch.uint8)
            cut = rearrange(levels, "c (h p) (w q) -> (h w) (p q c)", p=patch, q=patch)
            encoded[one.key] = replace(encoded[one.key], seen=moments, patches=cut)

    def _lot(self, key: ImageKey) -> float:
        return stream_seed(self.seed, "/".join(map(str, key)), 0, "round trip") / 2**64

    def _latents(self, parcel: Parcel, here: Mapping[ImageKey, Kept], noise: Tensor) -> Tensor:
        """[T, C] the latent tokens of all blocks, block after block."""
        blocks = [
            here[key].target if noised else here[key].seen
            for key, noised in zip(parcel.latents, parcel.noised, strict=True)
        ]
        sizes = {block.shape for block in blocks}
        place, drawn = 0, []
        for block, sampled in zip(blocks, parcel.sampled, strict=True):
            drawn.append(place if sampled else -1)
            place += block.numel() // 2 * sampled
        if len(sizes) == 1:  # one batch instead of one call a block
            return self._tokens(blocks, drawn, noise).flatten(0, 1)
        return torch.cat(
            [self._tokens([b], [at], noise)[0] for b, at in zip(blocks, drawn, strict=True)]
        )

    def _tokens(self, blocks: list[Tensor], drawn: list[int], noise: Tensor) -> Tensor:
        """[n, tokens, C] of blocks of one size. drawn: where the noise of each begins, or -1."""
        mean, logvar = torch.stack(blocks).chunk(2, dim=1)
        sampled = [k for k, at in enumerate(drawn) if at >= 0]
        if sampled:
            size = mean[0].numel()
            first = drawn[sampled[0]]
            own = noise[first : first + len(sampled) * size].view(len(sampled), *mean.shape[1:])
            std = torch.exp(0.5 * logvar)
            which = torch.tensor(sampled).to(self.device, non_blocking=True)
            mean = mean.index_add(0, which, std.index_select(0, which) * own)
        latents = self.vae.config.scale_factor * (mean - self.vae.config.shift_factor)
        p = self.config.latent_patch_size
        return rearrange(latents, "n z (r p) (c q) -> n (r c) (p q z)", p=p, q=p)


def _wide(t: Tensor) -> Tensor:
    """Indexes as int64, as `packing.collate` makes them."""
    return t.long() if t.dtype == torch.int32 else t


def _pixels(levels: Tensor) -> Tensor:
    """8-bit levels → [-1, 1], by the operations of `images.to_tensor`."""
    return levels.float().div(255).sub(0.5).div(0.5)
