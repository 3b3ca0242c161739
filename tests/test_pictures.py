"""Pictures from anywhere: what is read, and what is refused before it costs anything."""

from __future__ import annotations

import io
import random
import struct
import time
import tracemalloc
import zlib

import pytest
from PIL import Image

from eval.pictures import MAX_PIXELS, as_png, read_file, read_picture


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png_header(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that claims to be so large, whatever it holds."""

    def chunk(name: bytes, content: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + crc

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", data or zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(kind, mode):
    image = Image.new("L", (20, 10), 200).convert("1" if mode == "1" else "L")
    if mode == "I;16":
        image = Image.new("I;16", (20, 10), 40_000)
    elif mode not in ("L", "1"):
        image = image.convert("RGB").convert(mode)
    try:
        data = encoded(image, kind)
    except (OSError, ValueError):
        return  # a format that has no such mode
    read = read_picture(data)
    assert (read.mode, read.size) == ("RGB", (20, 10))


def test_a_picture_is_turned_as_its_note_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert read_picture(encoded(Image.new("RGB", (20, 10)), "JPEG", exif=exif)).size == (10, 20)


def test_a_picture_of_one_pixel_is_a_picture():
    assert read_picture(encoded(Image.new("RGB", (1, 1), "red"))).getpixel((0, 0)) == (255, 0, 0)


def test_what_we_write_is_what_is_read():
    image = Image.effect_noise((31, 17), 60).convert("RGB")
    assert read_picture(as_png(image)).tobytes() == image.tobytes()


REFUSED = {
    "nothing": (b"", "the picture is empty"),
    "text": (b"hello", "no PNG, JPEG, WEBP file"),
    "a pickle": (b"\x80\x04K\x01.", "no PNG, JPEG, WEBP file"),
    "a gif": (encoded(Image.new("L", (4, 4)), "GIF"), "no PNG, JPEG, WEBP file"),
    "cut short": (
        encoded(Image.effect_noise((90, 90), 50))[:-700],
        "cut short or damaged",
    ),
    "a cut jpeg": (encoded(Image.effect_noise((90, 90), 50), "JPEG")[:900], "cut short or damaged"),
    "12,000 pixels a side": (png_header(12_000, 12_000), "12000 x 12000 pixels, more than"),
    "a bomb": (png_header(100_000, 100_000), "too large"),
    "no pixels": (png_header(0, 10), "no PNG"),
    "a strip": (png_header(1, 12_000), "one side is over 64 times the other"),
}


@pytest.mark.parametrize(("data", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_usable_picture_is_one_line(data, says):
    with pytest.raises(ValueError, match=says):
        read_picture(data)


def test_a_bomb_costs_nothing():
    inside = zlib.compress(bytes(200 << 20), 9)  # 200 MiB of zeros in 200 KiB
    data = png_header(60_000, 60_000, inside)
    tracemalloc.start()
    began = time.perf_counter()
    with pytest.raises(ValueError, match=r"too large|more than"):
        read_picture(data)
    seconds, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 1
    assert peak < 5 << 20


def test_a_wide_picture_within_the_limit_is_read():
    assert MAX_PIXELS > 12_000 * 2_000
    assert read_picture(encoded(Image.new("L", (12_000, 200)))).size == (12_000, 200)


def test_a_bad_file_is_named(tmp_path):
    (tmp_path / "x.png").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"x.png: the picture is no PNG"):
        read_file(tmp_path / "x.png")


def test_a_thousand_damaged_pictures_are_refused_or_read_and_nothing_else():
    rng = random.Random(0)
    image = Image.effect_noise((40, 40), 80).convert("RGB")
    sources = [encoded(image), encoded(image, "JPEG"), encoded(image, "WEBP")]
    refused = 0
    for number in range(1_000):
        data = bytearray(sources[number % 3])
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            read_picture(bytes(data[: rng.randint(1, len(data))]))
        except ValueError:
            refused += 1
    assert refused > 500
