"""Pictures: PIL to tensors and back, resize rules, patches, and what the position grids can hold.

Two named profiles of the same transforms: `RELEASED` does what BAGEL does (area ratio where its
root was meant, every input resized twice, pixels truncated), `MENDED` does what was meant::

    segment = MENDED.segment(load_image("in.png"), enters_as="vae+vit")
    to_pil(pixels).save("out.png")

Sizes are (height, width) in pixels everywhere, PIL's own (width, height) never leaves this file.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from umm_reflect.context import ImageSegment
from umm_reflect.errors import UsageError, UserError

EntersAs = Literal["vae+vit", "vit", "vae"]

LATENT_STRIDE = 16  # pixels per latent token: VAE / 8, then 2 x 2 patches
VIT_PATCH = 14
MAX_PIXELS = 14 * 14 * 9 * 1024

# --- reading and writing --------------------------------------------------------------------------


def load_image(source: str | Path | bytes) -> Image.Image:
    """An RGB picture from a file or from the bytes of one: turned upright, transparency on white.

    Errors: UserError when it is missing, no picture, cut short, or too large to be one.
    """
    name = "the picture" if isinstance(source, bytes) else str(source)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            return to_rgb(image)
    except FileNotFoundError:
        raise UserError(f"{name} does not exist", "Check the path of the image.") from None
    except IsADirectoryError:
        raise UserError(f"{name} is a folder", "Name an image inside it.") from None
    except UnidentifiedImageError:
        raise UserError(f"{name} is not a picture", "Give a PNG, JPEG or WebP file.") from None
    except Image.DecompressionBombError:
        raise UserError(f"{name} has too many pixels", "Scale it down first.") from None
    except (OSError, SyntaxError, ValueError) as error:  # what PIL raises for damaged files
        raise UserError(f"{name} cannot be read ({error})", "The file may be damaged.") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright by its EXIF tag, transparent parts on white, 16-bit grey scaled to 8 bits, RGB."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def to_tensor(image: Image.Image) -> Tensor:
    """[3, H, W] fp32 in [-1, 1]: (x / 255 - 0.5) / 0.5."""
    pixels_HWC = torch.from_numpy(np.array(image.convert("RGB")))
    return pixels_HWC.permute(2, 0, 1).contiguous().float().div(255).sub(0.5).div(0.5)


def to_uint8(pixels: Tensor, truncate: bool = False) -> Tensor:
    """[..., H, W] uint8 levels of pixels in [-1, 1]; rounded, or truncated as the original does."""
    levels = (pixels.float() * 0.5 + 0.5).clamp(0, 1) * 255
    return (levels if truncate else levels.round()).to(torch.uint8)


def to_pil(pixels: Tensor, truncate: bool = False) -> Image.Image:
    """A picture from [3, H, W] in about [-1, 1]; values outside are clamped."""
    if pixels.dim() != 3 or pixels.shape[0] != 3:
        raise ValueError(f"pixels have the shape {tuple(pixels.shape)}; expected [3, H, W]")
    return Image.fromarray(to_uint8(pixels, truncate).permute(1, 2, 0).contiguous().cpu().numpy())


# --- resizing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResizeRule:
    """Which size a picture is brought to before it enters.

    The long side goes down to `max_size`, the short side up to `min_size`, both to multiples of
    `stride`, with at most `max_pixels` pixels (shared by the pictures of one example).
    root_area: scale by the root of the area ratio. The original scales both sides by the ratio
    itself, which shrinks more than it has to (False reproduces that).
    """

    max_size: int
    min_size: int
    stride: int
    max_pixels: int = MAX_PIXELS
    root_area: bool = True

    def __post_init__(self):
        if not 0 < self.stride <= self.max_size or not 0 < self.min_size <= self.max_size:
            raise ValueError(
                f"resize rule (max {self.max_size}, min {self.min_size}, stride {self.stride}): "
                "give 0 < min <= max and 0 < stride <= max"
            )
        if self.max_pixels < self.stride**2:
            raise ValueError(f"max_pixels {self.max_pixels} is less than one {self.stride}² cell")

    def size(self, height: int, width: int, images: int = 1) -> tuple[int, int]:
        """(height, width) after the rule, multiples of `stride`."""
        scale = min(self.max_size / max(height, width), 1.0)
        scale = max(scale, self.min_size / min(height, width))
        height, width = self._scaled(height, width, scale)
        limit = self.max_pixels / images
        if height * width > limit:
            ratio = limit / (height * width)
            if self.root_area:
                height, width = self._scaled(height, width, math.sqrt(ratio), math.floor)
            else:
                height, width = self._scaled(height, width, ratio)
        if max(height, width) > self.max_size:
            height, width = self._scaled(height, width, self.max_size / max(height, width))
        return height, width

    def resize(self, image: Image.Image, images: int = 1) -> Image.Image:
        """The picture at its new size, PIL bicubic (which low-passes when it shrinks)."""
        height, width = self.size(image.height, image.width, images)
        if (width, height) == image.size:
            return image
        return image.resize((width, height), Image.Resampling.BICUBIC)

    def on_grid(self, multiple: int) -> ResizeRule:
        """The same rule with sizes that are multiples of `multiple` too.

        The released agent's strides, 8 and 7, are half of what latent tokens and ViT patches
        need; for its 512 px squares nothing changes, other sizes would lose a row or not fit.
        """
        stride = math.lcm(self.stride, multiple)
        return self if stride == self.stride else replace(self, stride=stride)

    def _scaled(self, height: int, width: int, scale: float, cells=round) -> tuple[int, int]:
        def side(pixels: int) -> int:
            return max(self.stride, cells(round(pixels * scale) / self.stride) * self.stride)

        return side(height), side(width)


@dataclass(frozen=True)
class Transforms:
    """What happens to a picture on its way into the model, and to drawn pixels on their way out.

    resize_twice: the VAE's rule first, then each block's rule on what came out, as in BAGEL
    truncate: drawn pixels are truncated to 8 bits instead of rounded
    """

    vae: ResizeRule
    vit: ResizeRule
    resize_twice: bool = False
    truncate: bool = False
    latent_stride: int = LATENT_STRIDE
    vit_patch: int = VIT_PATCH

    def segment(self, image: Image.Image, enters_as: EntersAs = "vae+vit") -> ImageSegment:
        """The picture as a context segment; `enters_as` says which blocks it has."""
        if enters_as not in get_args(EntersAs):
            raise ValueError(f"enters_as is {enters_as!r}; choose one of {get_args(EntersAs)}")
        vae, vit = self.resized(image)
        return ImageSegment(
            vae_pixels=to_tensor(vae) if "vae" in enters_as else None,
            vit_pixels=to_tensor(vit) if "vit" in enters_as else None,
        )

    def resized(self, image: Image.Image) -> tuple[Image.Image, Image.Image]:
        """The picture as its latent block takes it, and as its patches are cut from it."""
        image = to_rgb(image)
        vae, vit = self.vae.on_grid(self.latent_stride), self.vit.on_grid(self.vit_patch)
        if self.resize_twice:
            image = vae.resize(image)
        return vae.resize(image), vit.resize(image)

    def sizes(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(height, width) of the latent block's pixels and of the patches' for an upright picture.

        What `segment` makes of such a picture, without its pixels.
        """
        vae, vit = self.vae.on_grid(self.latent_stride), self.vit.on_grid(self.vit_patch)
        if self.resize_twice:
            height, width = vae.size(height, width)
        return vae.size(height, width), vit.size(height, width)

    def drawn_size(self, image: Image.Image) -> tuple[int, int]:
        """(height, width) of an edit of this picture: its size as the VAE sees it."""
        image = ImageOps.exif_transpose(image)
        return self.vae.on_grid(self.latent_stride).size(image.height, image.width)


def released_transforms(
    vae: tuple[int, int, int] = (1024, 512, 16), vit: tuple[int, int, int] = (980, 224, 14)
) -> Transforms:
    """BAGEL's own transforms, quirks and all; vae and vit are (max, min, stride)."""
    return Transforms(
        vae=ResizeRule(*vae, root_area=False),
        vit=ResizeRule(*vit, root_area=False),
        resize_twice=True,
        truncate=True,
    )


def mended_transforms(
    vae: tuple[int, int, int] = (1024, 512, 16), vit: tuple[int, int, int] = (980, 224, 14)
) -> Transforms:
    """The same sizes with the quirks mended: root of the area ratio, one resize, rounding."""
    return Transforms(vae=ResizeRule(*vae), vit=ResizeRule(*vit))


RELEASED = released_transforms()
MENDED = mended_transforms()

# --- patches and grids ----------------------------------------------------------------------------


def patchify(image_CHW: Tensor, patch: int) -> Tensor:
    """[C, H, W] -> [(H/p)(W/p), p*p*C], row-major; inside a token: row, column, channel."""
    height, width = image_CHW.shape[-2:]
    if height % patch or width % patch:
        raise ValueError(f"{height}x{width} cannot be cut into patches of {patch}: use multiples")
    return rearrange(image_CHW, "c (h p) (w q) -> (h w) (p q c)", p=patch, q=patch)


# Where a glance finds the picture: (down, right), in shares of its sides.
MOVES = ((0.0, 0.025), (0.0, -0.025), (0.025, 0.0), (-0.025, 0.0))


def moved(segment: ImageSegment, move: tuple[float, float]) -> ImageSegment:
    """The picture moved by whole pixels; its own border fills what comes in.

    Errors: ValueError for a segment of a latent alone.
    """
    if segment.has_vae and segment.vae_pixels is None:
        raise ValueError("a latent cannot be moved; give the picture's pixels")

    def shifted(pixels_CHW: Tensor | None) -> Tensor | None:
        if pixels_CHW is None:
            return None
        for axis, share in zip((1, 2), move, strict=True):
            side = pixels_CHW.shape[axis]
            places = (torch.arange(side) - round(share * side)).clamp(0, side - 1)
            pixels_CHW = pixels_CHW.index_select(axis, places.to(pixels_CHW.device))
        return pixels_CHW

    return ImageSegment(shifted(segment.vae_pixels), shifted(segment.vit_pixels))


def patchify_pixels(pixels_CHW: Tensor, patch: int = VIT_PATCH) -> Tensor:
    """ViT patches: [3, H, W] -> [(H/14)(W/14), 588]; see `patchify`."""
    return patchify(pixels_CHW, patch)


def patchify_latent(latent_CHW: Tensor, patch: int = 2) -> Tensor:
    """Latent tokens: [16, h, w] -> [(h/2)(w/2), 64]; see `patchify`."""
    return patchify(latent_CHW, patch)


def unpatchify_latent(tokens_NC: Tensor, height: int, width: int, patch: int = 2) -> Tensor:
    """[(h/2)(w/2), 64] -> [16, h, w]; height and width are the latent's."""
    rows, cols = height // patch, width // patch
    if (rows * patch, cols * patch) != (height, width) or tokens_NC.shape[0] != rows * cols:
        raise ValueError(
            f"{tokens_NC.shape[0]} tokens do not make a latent of {height}x{width} "
            f"({rows}x{cols} tokens of {patch}x{patch})"
        )
    return rearrange(tokens_NC, "(h w) (p q c) -> c (h p) (w q)", h=rows, w=cols, p=patch, q=patch)


def grid_positions(rows: int, cols: int, side: int, interpolate: bool = False) -> Tensor:
    """[rows*cols] int64 rows of a position table over a side x side grid.

    row * side + column, in the grid's top left corner; with interpolate (which no release uses)
    the grid is spread over the whole table: cell floor(row * side / rows), likewise columns.
    Errors: ValueError where the grid does not fit (the original would silently wrap around).
    """
    if not (0 < rows <= side and 0 < cols <= side):
        raise ValueError(f"a grid of {rows}x{cols} does not fit a position table of {side}x{side}")
    row, col = torch.arange(rows), torch.arange(cols)
    if interpolate:
        row, col = row * side // rows, col * side // cols
    return (row[:, None] * side + col).flatten()


def check_drawn_size(
    height: int, width: int, latent_grid_side: int, latent_stride: int = LATENT_STRIDE
) -> None:
    """UsageError unless a picture of this size can be drawn; it names the limits of the model."""
    top = latent_grid_side * latent_stride
    for name, side in (("height", height), ("width", width)):
        if side % latent_stride or not latent_stride <= side <= top:
            near = min(max(round(side / latent_stride), 1), latent_grid_side) * latent_stride
            raise UsageError(
                f"{name} {side} is not a size that this model can draw",
                f"Give multiples of {latent_stride} from {latent_stride} to {top}; "
                f"the nearest is {near}.",
            )
