"""The FLUX autoencoder: pictures to latents and back. State-dict keys are those of ae.safetensors.

    vae = AutoEncoder(infer_vae_config({key: t.shape for key, t in state.items()}))
    latent = vae.encode(pixels)          # [B, 3, H, W] in [-1, 1] -> [B, 16, H/8, W/8]
    pixels = vae.decode(latent)

Pictures of one call have one size and nothing is padded: GroupNorm and the middle attention would
see the padding. `encode_images` takes a list of any sizes and runs one call a size. Works in fp32
and bf16, with contiguous or channels-last weights; what comes out is fp32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from umm_reflect.config import FLUX_VAE, VAEConfig
from umm_reflect.errors import CheckpointError

NORM_EPS = 1e-6


def _norm(channels: int, groups: int) -> nn.GroupNorm:
    if channels % groups:
        raise ValueError(
            f"{channels} VAE channels cannot be split into {groups} groups: "
            "set num_groups in vae_config to a divisor of all channel counts"
        )
    return nn.GroupNorm(groups, channels, eps=NORM_EPS)


class ResBlock(nn.Module):
    """Norm, swish, conv, twice, plus a shortcut: [B, c_in, H, W] -> [B, c_out, H, W]."""

    def __init__(self, c_in: int, c_out: int, groups: int):
        super().__init__()
        self.norm1 = _norm(c_in, groups)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2 = _norm(c_out, groups)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        if c_in != c_out:
            self.nin_shortcut = nn.Conv2d(c_in, c_out, 1)
        self.has_shortcut = c_in != c_out

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (self.nin_shortcut(x) if self.has_shortcut else x) + h


class AttnBlock(nn.Module):
    """Single-head attention over all positions of one picture, with a residual."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.norm = _norm(channels, groups)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        height, width = x.shape[-2:]
        # [B, C, H, W] -> [B, one head, H*W, C]
        q, k, v = (f(h).flatten(2).transpose(1, 2)[:, None] for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous())
        return x + self.proj_out(h[:, 0].transpose(1, 2).unflatten(2, (height, width)))


class Downsample(nn.Module):
    """Half the size: one zero on the right and the bottom, then a 3x3 conv of stride 2."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Twice the size: nearest neighbour, then a 3x3 conv."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """One resolution: res blocks, then a resampler that the ends of the chain lack."""

    def __init__(self, c_in: int, c_out: int, blocks: int, groups: int):
        super().__init__()
        widths = [c_in] + [c_out] * blocks
        self.block = nn.ModuleList(
            ResBlock(before, after, groups) for before, after in pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        for resample in ("downsample", "upsample"):
            if hasattr(self, resample):
                x = getattr(self, resample)(x)
        return x


class Middle(nn.Module):
    """Res block, attention, res block at the coarsest resolution."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.block_1 = ResBlock(channels, channels, groups)
        self.attn_1 = AttnBlock(channels, groups)
        self.block_2 = ResBlock(channels, channels, groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """[B, 3, H, W] -> [B, 2*z, H/8, W/8]: mean and log-variance on the channel axis."""

    def __init__(self, config: VAEConfig):
        super().__init__()
        widths = [config.ch, *(config.ch * m for m in config.ch_mult)]
        groups = config.num_groups
        self.conv_in = nn.Conv2d(config.in_channels, config.ch, 3, padding=1)
        self.down = nn.ModuleList()
        for c_in, c_out in pairwise(widths):
            level = Level(c_in, c_out, config.num_res_blocks, groups)
            if len(self.down) < len(config.ch_mult) - 1:
                level.downsample = Downsample(c_out)
            self.down.append(level)
        self.mid = Middle(widths[-1], groups)
        self.norm_out = _norm(widths[-1], groups)
        self.conv_out = nn.Conv2d(widths[-1], 2 * config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """[B, z, h, w] -> [B, 3, 8h, 8w]. `up` is indexed by resolution: the last one runs first."""

    def __init__(self, config: VAEConfig):
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult]
        groups = config.num_groups
        self.conv_in = nn.Conv2d(config.z_channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1], groups)
        self.up = nn.ModuleList()
        for index, c_out in enumerate(widths):
            c_in = widths[min(index + 1, len(widths) - 1)]
            level = Level(c_in, c_out, config.num_res_blocks + 1, groups)
            if index > 0:
                level.upsample = Upsample(c_out)
            self.up.append(level)
        self.norm_out = _norm(widths[0], groups)
        self.conv_out = nn.Conv2d(widths[0], config.out_ch, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class AutoEncoder(nn.Module):
    """Encoder and decoder with the latent scaling of the release.

    A scaled latent is scale_factor * (z - shift_factor); everything outside this class sees only
    scaled latents.
    """

    def __init__(self, config: VAEConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def moments(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of z (not scaled), each [B, z, H/8, W/8] fp32.

        pixels: [B, 3, H, W] in [-1, 1], H and W multiples of `downsample`.
        """
        height, width = pixels.shape[-2:]
        if height % self.config.downsample or width % self.config.downsample:
            raise ValueError(
                f"pictures of {height}x{width} cannot be encoded: "
                f"use multiples of {self.config.downsample}"
            )
        moments = self.encoder(pixels.to(self._dtype)).float()
        return moments.chunk(2, dim=1)

    def encode(self, pixels: Tensor, generators: Sequence[torch.Generator] | None = None) -> Tensor:
        """Scaled latents [B, z, H/8, W/8] fp32: the posterior mean.

        generators: one CPU generator a picture; then z is sampled from the posterior, each picture
        from its own stream.
        """
        z, logvar = self.moments(pixels)
        if generators is not None:
            noise = [
                torch.randn(one.shape, generator=generator)
                for one, generator in zip(z, generators, strict=True)
            ]
            z = z + torch.exp(0.5 * logvar) * torch.stack(noise).to(z.device)
        return self.config.scale_factor * (z - self.config.shift_factor)

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, 8h, 8w] fp32, about [-1, 1] and not clamped, of scaled latents."""
        z = latents.float() / self.config.scale_factor + self.config.shift_factor
        return self.decoder(z.to(self._dtype)).float()

    def encode_images(
        self,
        pixels: Sequence[Tensor],
        generators: Sequence[torch.Generator] | None = None,
        batch_size: int = 8,
    ) -> list[Tensor]:
        """`encode` for pictures [3, H, W] of any sizes, in their order; one call a size."""
        return _by_size(pixels, generators, batch_size, self.encode)

    def decode_latents(self, latents: Sequence[Tensor], batch_size: int = 8) -> list[Tensor]:
        """`decode` for latents [z, h, w] of any sizes, in their order; one call a size."""
        return _by_size(latents, None, batch_size, lambda batch, _: self.decode(batch))

    @property
    def _dtype(self) -> torch.dtype:
        return self.encoder.conv_in.weight.dtype


def _by_size(
    items: Sequence[Tensor],
    generators: Sequence[torch.Generator] | None,
    batch_size: int,
    run: Callable[[Tensor, Sequence[torch.Generator] | None], Tensor],
) -> list[Tensor]:
    groups: dict[torch.Size, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(item.shape, []).append(index)
    results: dict[int, Tensor] = {}
    for indexes in groups.values():
        for start in range(0, len(indexes), batch_size):
            batch = indexes[start : start + batch_size]
            streams = None if generators is None else [generators[i] for i in batch]
            output = run(torch.stack([items[i] for i in batch]), streams)
            results.update(zip(batch, output, strict=True))
    return [results[index] for index in range(len(items))]


def infer_vae_config(
    shapes: Mapping[str, Sequence[int]], fallback: VAEConfig = FLUX_VAE
) -> VAEConfig:
    """The config that these tensors (key -> shape) belong to.

    Channels, multipliers, blocks and levels are read from the shapes. What no shape shows (scale,
    shift, groups, resolution) is taken from `fallback`: config.json's values, else FLUX's.
    Errors: CheckpointError that names the first tensor that is missing or odd.
    """

    def shape(key: str) -> Sequence[int]:
        if key not in shapes:
            raise CheckpointError(
                f"the autoencoder has no tensor {key}",
                "Take the ae.safetensors of a BAGEL release.",
            )
        return shapes[key]

    def count(pattern: str) -> int:
        return len({m[1] for m in map(re.compile(pattern).match, shapes) if m})

    ch, in_channels = shape("encoder.conv_in.weight")[:2]
    levels = count(r"encoder\.down\.(\d+)\.")
    blocks = count(r"encoder\.down\.0\.block\.(\d+)\.")
    widths = [shape(f"encoder.down.{i}.block.0.conv1.weight")[0] for i in range(levels)]
    odd = [width for width in widths if width % ch]
    if odd or not widths:
        raise CheckpointError(
            f"the autoencoder's level widths {widths} are not multiples of its first one, {ch}",
            "This is not a FLUX autoencoder.",
        )
    return VAEConfig(
        resolution=fallback.resolution,
        in_channels=in_channels,
        out_ch=shape("decoder.conv_out.weight")[0],
        ch=ch,
        ch_mult=tuple(width // ch for width in widths),
        num_res_blocks=blocks,
        z_channels=shape("decoder.conv_in.weight")[1],
        downsample=2 ** (levels - 1),
        scale_factor=fallback.scale_factor,
        shift_factor=fallback.shift_factor,
        num_groups=fallback.num_groups,
    )
