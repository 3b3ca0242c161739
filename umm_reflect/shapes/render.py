"""Draw a scene of the shapes world at any size: anti-aliased, exact, under a millisecond at 128 px.

Each shape is drawn as a mask at four times the size (only its own box), averaged down and used to
blend its colour over the background. The same scene gives the same bytes, always.

    render(scene, 128).save("scene.png")
"""

import math

import numpy as np
from PIL import Image, ImageDraw

from umm_reflect.shapes.scene import PALETTE, RING_HOLE, Background, Scene, Shape, outline, place

SUPERSAMPLING = 4

# Direction in degrees (0 = right, 90 = down) in which a broken shape lacks a wedge: for each kind
# one that leaves a single piece which looks like no other kind.
BROKEN_TOWARDS = {
    "circle": -40.0,
    "square": -40.0,
    "triangle": 145.0,
    "star": -18.0,
    "ring": -40.0,
    "cross": 0.0,
    "heart": -45.0,
    "moon": -85.0,
}
TEXTURES = ("stripes", "checks", "dots", "clouds")
TEXTURE_AMPLITUDE = 9.0  # grey levels either way


def render(scene: Scene, size: int = 128) -> Image.Image:
    """An RGB picture of size x size pixels; later shapes cover earlier ones."""
    if size < 8:
        raise ValueError(f"a scene needs at least 8 pixels a side, got {size}")
    picture = background(scene.background, size)
    for shape in scene.shapes:
        mask, corner = coverage(shape, size)
        picture.paste(PALETTE[shape.color], (*corner, *(np.add(corner, mask.size).tolist())), mask)
    return picture


def coverage(shape: Shape, size: int) -> tuple[Image.Image, tuple[int, int]]:
    """The share of each pixel that a shape covers ("L", 0..255) within its box, and that box's left
    top corner in pixels of a picture of size x size; the box may reach outside the picture."""
    outer = shape.points() * size
    corner = np.floor(outer.min(axis=0)).astype(int) - 1
    width, height = np.ceil(outer.max(axis=0)).astype(int) + 1 - corner

    def fill(points: np.ndarray, value: int) -> None:
        # PIL cuts these down to whole numbers, which name the fine pixel that holds the point.
        fine = (points - corner) * SUPERSAMPLING
        draw.polygon(fine.ravel().tolist(), fill=value)

    mask = Image.new("L", (int(width) * SUPERSAMPLING, int(height) * SUPERSAMPLING))
    draw = ImageDraw.Draw(mask)
    fill(outer, 255)
    if shape.kind == "ring":
        fill(place(outline("ring") * RING_HOLE, shape) * size, 0)
    if shape.broken:
        towards = math.radians(BROKEN_TOWARDS[shape.kind])
        turn = towards + np.linspace(-1, 1, 9) * math.pi * shape.broken
        wedge = np.concatenate([[(0.0, 0.0)], 1.5 * np.stack([np.cos(turn), np.sin(turn)], 1)])
        fill(place(wedge, shape) * size, 0)
    return mask.reduce(SUPERSAMPLING), (int(corner[0]), int(corner[1]))


def background(spec: Background, size: int) -> Image.Image:
    """The picture before any shape."""
    if spec.kind != "texture":
        return Image.new("RGB", (size, size), spec.rgb)
    waves = TEXTURE_AMPLITUDE * texture(spec.seed, size)
    levels = np.add.outer(waves, np.array(spec.rgb, float))
    return Image.fromarray(np.clip(np.rint(levels), 0, 255).astype(np.uint8))


def texture(seed: int, size: int) -> np.ndarray:
    """A pattern in [-1, 1], [size, size] float64, chosen and placed by the seed."""
    lots = np.random.default_rng(seed)
    name = TEXTURES[lots.integers(len(TEXTURES))]
    angle, phase_x, phase_y, period = lots.uniform((0, 0, 0, 0.07), (math.pi, 1, 1, 0.16))
    y, x = np.meshgrid(*[(np.arange(size) + 0.5) / size] * 2, indexing="ij", copy=False)
    cos, sin = math.cos(angle), math.sin(angle)
    along = np.sin(2 * math.pi * ((x * cos + y * sin) / period + phase_x))
    if name == "stripes":
        return along
    if name == "clouds":
        coarse = Image.fromarray(lots.uniform(-1, 1, (8, 8)).astype(np.float32))
        return np.clip(
            np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC), float), -1, 1
        )
    across = np.sin(2 * math.pi * ((y * cos - x * sin) / period + phase_y))
    if name == "checks":
        return np.clip(4 * along * across, -1, 1)
    return np.clip(6 * (along + across) - 6, -1, 1)
