"""Pictures of the shapes world for the autoencoder: rendered in parallel, and measured after a
round trip.

    pictures = rendered(scenes(seed=0, split="train", count=20_000), size=128, workers=16)
    quality = measure(held_out, reconstructed)     # both [N, H, W, 3] uint8
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

from umm_reflect.shapes.render import coverage, render
from umm_reflect.shapes.sampler import sample_row, scene_for, violate
from umm_reflect.shapes.scene import COLORS, PALETTE, Scene

# Share of the scenes that miss their row in one thing (broken shapes and crowds among them).
FAULTY = 0.3
CHUNK = 50  # scenes a worker draws at a time
# A shape's inside begins so many pixels from its edge, at 128 pixels a side.
INSET = 2
SHEET_COLUMNS = 8
DIFFERENCE_GAIN = 8


def scene_by_lot(index: int, *, seed: int, split: Literal["train", "test"]) -> Scene:
    """Scene `index` of an endless list; odd ones are of the harder split."""
    rng = random.Random(f"autoencoder {seed} {split} {index}")
    hard = is_hard(index)
    row = sample_row(rng, split, hard=hard)
    scene = scene_for(row, rng, hard=hard)
    return violate(scene, row, rng)[0] if rng.random() < FAULTY else scene


def is_hard(index: int) -> bool:
    return index % 2 == 1


def picture_by_lot(
    index: int, *, seed: int, split: Literal["train", "test"], size: int
) -> np.ndarray:
    """The scene of `scene_by_lot`, drawn: [size, size, 3] uint8."""
    return np.asarray(render(scene_by_lot(index, seed=seed, split=split), size))


def rendered(
    count: int, *, seed: int, split: Literal["train", "test"], size: int, workers: int
) -> np.ndarray:
    """The first `count` pictures of the list, [count, size, size, 3] uint8, the same for any number
    of workers.

    About 1.5 ms a picture and core. Call it before the GPU is used: workers are forked where that
    is the custom.
    """
    draw = partial(picture_by_lot, seed=seed, split=split, size=size)
    pictures = np.empty((count, size, size, 3), np.uint8)
    if workers <= 1:
        for index in range(count):
            pictures[index] = draw(index)
        return pictures
    method = "fork" if sys.platform == "linux" else "spawn"
    with multiprocessing.get_context(method).Pool(workers) as pool:
        for index, picture in enumerate(pool.imap(draw, range(count), chunksize=CHUNK)):
            pictures[index] = picture
    return pictures


def psnr(originals: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio of each picture in dB, [N]; 8-bit pictures [N, H, W, 3]."""
    errors = (originals.astype(np.float32) - copies.astype(np.float32)) ** 2
    return 10 * np.log10(255**2 / np.maximum(errors.mean(axis=(1, 2, 3)), 1e-3))


def inside(scene: Scene, size: int) -> list[tuple[str, np.ndarray]]:
    """(color, mask [size, size]) of the flat inside of every shape: wholly covered by it, by no
    later shape, and INSET away from its edge."""
    from scipy.ndimage import binary_erosion

    layers = []
    for shape in scene.shapes:
        mask, (left, top) = coverage(shape, size)
        # pixels outside of the picture are cut off by pasting
        layer = Image.new("L", (size, size))
        layer.paste(mask, (left, top))
        layers.append(np.asarray(layer))
    found = []
    for index, shape in enumerate(scene.shapes):
        hidden = np.any([layer > 0 for layer in layers[index + 1 :]], axis=0)
        inner = (layers[index] == 255) & ~hidden
        inset = max(1, round(INSET * size / 128))
        found.append((shape.color, binary_erosion(inner, iterations=inset)))
    return found


def color_fidelity(
    scenes: Sequence[Scene], copies: np.ndarray
) -> tuple[dict[str, float], dict[str, float]]:
    """Per color, over the flat insides of its shapes: the share of pixels whose nearest palette
    color is the right one, and the mean distance of a channel in grey levels. Colors that do not
    occur are left out."""
    palette = np.array([PALETTE[color] for color in COLORS], np.float32)
    right: dict[str, list[np.ndarray]] = {color: [] for color in COLORS}
    levels: dict[str, list[np.ndarray]] = {color: [] for color in COLORS}
    for scene, copy in zip(scenes, copies, strict=True):
        for color, mask in inside(scene, copy.shape[0]):
            pixels = copy[mask].astype(np.float32)
            target = COLORS.index(color)
            nearest = ((pixels[:, None] - palette) ** 2).sum(-1).argmin(-1)
            right[color].append(nearest == target)
            levels[color].append(np.abs(pixels - palette[target]).mean(-1))

    def means(parts: dict[str, list[np.ndarray]]) -> dict[str, float]:
        whole = {color: np.concatenate(p) for color, p in parts.items() if p}
        return {color: float(values.mean()) for color, values in whole.items() if len(values)}

    return means(right), means(levels)


def comparison_sheet(originals: np.ndarray, copies: np.ndarray) -> Image.Image:
    """Three rows under titles: originals, copies, and their difference times DIFFERENCE_GAIN on
    grey."""
    originals, copies = originals[:SHEET_COLUMNS], copies[:SHEET_COLUMNS]
    difference = (copies.astype(int) - originals) * DIFFERENCE_GAIN + 128
    rows = {
        "original": originals,
        "through the autoencoder": copies,
        f"difference x {DIFFERENCE_GAIN}": difference.clip(0, 255).astype(np.uint8),
    }
    count, height, width = originals.shape[:3]
    gap, title = 4, 16
    sheet = Image.new(
        "RGB", (count * (width + gap) + gap, len(rows) * (height + title + gap)), "white"
    )
    pen = ImageDraw.Draw(sheet)
    for number, (name, pictures) in enumerate(rows.items()):
        top = number * (height + title + gap)
        pen.text((gap, top + 2), name, fill="black")
        for column, picture in enumerate(pictures):
            sheet.paste(Image.fromarray(picture), (gap + column * (width + gap), top + title))
    return sheet
