"""The local text reader: RapidOCR's PP-OCR networks on the CPU, one engine for each worker.

    engines = Engines(workers=0)                  # 0: one per core
    [words] = engines.read([image])               # Words with boxes, as they are read

The weights come with the package; nothing is fetched. Engines are made when the first image comes.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.judging import cores
from umm_reflect.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST = 8  # a strip is widened until one side is at most so many times the other
READ_SIDE = 512  # a smaller image is enlarged until its short side has this many pixels


@dataclass(frozen=True)
class Word:
    """One line of text that was found. box: (x0, y0, x1, y1) in pixels of the image."""

    text: str
    box: tuple[float, float, float, float]
    score: float


def weight_files() -> list[Path]:
    """The weights in the package. Errors: UserError when the package lacks them (or is absent)."""
    found = importlib.util.find_spec("rapidocr")
    if found is None or found.origin is None:
        raise UserError("rapidocr is not installed", "Install the extra: pip install -e '.[ocr]'")
    folder = Path(found.origin).parent / "models"
    files = [*folder.glob("*det*.onnx"), *folder.glob("*rec*.onnx"), *folder.glob("*cls*.onnx")]
    if len(files) < 3:
        raise UserError(
            f"{folder} lacks text reading weights",
            "Install a rapidocr that ships them: pip install 'rapidocr>=3.10'",
        )
    return files


class Engines:
    """As many readers as workers; each thread of the pool has one."""

    def __init__(self, workers: int = 0):
        self.files = weight_files()
        self._workers = workers or cores()
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(self._workers)

    def read(self, images: Sequence[Image]) -> list[list[Word]]:
        """The lines of text in each image, from top to bottom."""
        return list(self._pool.map(self._read_one, images))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _read_one(self, image: Image) -> list[Word]:
        if not hasattr(self._own, "engine"):
            self._own.engine = _engine()
        found = self._own.engine(np.asarray(_widened(image.convert("RGB")))[:, :, ::-1].copy())
        if found.txts is None:
            return []
        return [
            Word(text, (*corners.min(0).tolist(), *corners.max(0).tolist()), float(score))
            for text, corners, score in zip(found.txts, found.boxes, found.scores, strict=True)
        ]


def _widened(image: Image) -> Image:
    """A strip with white beside it: enlarged as it is, it would have millions of pixels."""
    from PIL import Image as pictures

    least = -(-max(image.size) // LONGEST)
    if min(image.size) >= least:
        return image
    wide = pictures.new("RGB", (max(image.width, least), max(image.height, least)), "white")
    wide.paste(image)
    return wide


def _engine() -> Any:
    from rapidocr import RapidOCR

    return RapidOCR(
        params={
            "Global.log_level": "critical",  # it notes every image without text
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            "Det.limit_side_len": READ_SIDE,
        }
    )
