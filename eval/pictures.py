"""A picture from bytes that nobody vouches for: PNG, JPEG or WebP, of a size that can be judged.

    image = read_picture(data)             # RGB, upright; ValueError says what is wrong with it
    data = as_png(image)

What is refused: other formats, more than MAX_PIXELS (before anything is unpacked, so that a
decompression bomb costs nothing), a side more than MAX_ASPECT times the other, a file that is cut
short or damaged.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path

from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 1 << 25  # 33.5 million: 5,792 x 5,792
MAX_ASPECT = 64  # a strip of 1 x 12,000 becomes hundreds of millions of pixels in a judge's resize

_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError)


def read_picture(data: bytes) -> Image.Image:
    """Encoded bytes -> RGB, turned upright by its EXIF note. Errors: ValueError of one line."""
    if not data:
        raise ValueError("the picture is empty (0 bytes)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked here
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise ValueError(f"the picture is no {', '.join(FORMATS)} file") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"the picture is too large: {error}") from None
    except _DAMAGED as error:
        raise ValueError(f"the picture is damaged ({_line(error)})") from None
    check_size(*image.size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except (*_DAMAGED, KeyError, TypeError, OverflowError) as error:  # of a damaged EXIF note, say
        raise ValueError(f"the picture is cut short or damaged ({_line(error)})") from None


def check_size(width: int, height: int) -> None:
    """ValueError for a picture that no judge here takes."""
    if width < 1 or height < 1:
        raise ValueError(f"the picture has {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"the picture has {width} x {height} pixels, more than {MAX_PIXELS:,}: make it smaller"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(
            f"the picture is {width} x {height}: one side is over {MAX_ASPECT} times the other"
        )


def read_file(path: str | Path) -> Image.Image:
    """The picture in a file. Errors: ValueError that names it; OSError when it cannot be read."""
    try:
        return read_picture(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def as_png(image: Image.Image) -> bytes:
    """A picture as PNG bytes: what a judge elsewhere gets is what a judge here would see."""
    out = io.BytesIO()
    image.convert("RGB").save(out, "PNG", compress_level=1)
    return out.getvalue()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
