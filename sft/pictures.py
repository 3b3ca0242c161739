"""One picture of a dataset: where its bytes are, and what it must keep to be learned from.

    image = picture.load()                       # decoded, upright, RGB; read anew each time
    picture = picture.examined("headers")        # hash and size are right, and noted

Bytes lie in a file, in a cell of a Parquet file, or came with the row.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from umm_reflect.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

ImageCheck = Literal["decode", "headers", "none"]

MAX_SIDE = 8192  # pixels; more is no picture to learn from, and 20,000 px would fill the memory

# The names of the column that holds images, in the release's schema and in ours.
IMAGE_COLUMNS = {"step_image_list", "images"}


class Rule(StrEnum):
    """What a row must keep. The value is the name that `umm-reflect data check` prints."""

    UNREADABLE = "unreadable"  # no JSON, a missing field, a value of another type
    UNKNOWN_KEY = "unknown_key"
    UID = "uid"  # empty, or used by an earlier row
    TASK = "task"  # neither t2i nor edit
    PROMPT = "prompt"  # empty
    SYSTEM_PROMPT = "system_prompt"  # of another version, or without its format sentence
    LENGTHS = "lengths"  # the lists of a row do not have one length, or the counts differ
    IMAGE_PRESENCE = "image_presence"  # name, hash and size of an image disagree, or it is not due
    SOURCE_STEP = "source_step"  # the source of an editing task is not as it must be
    ROUND = "round"
    SOURCE_REFERENCE = "source_reference"  # not the image that is current
    ROLE = "role"
    ACTION = "action"  # unknown, or the text says another one
    LAST_NOT_DONE = "last_not_done"  # a trajectory ends with exactly one done
    NO_IMAGE = "no_image"  # nothing was drawn
    LOSS_FLAG = "loss_flag"  # not exactly at the last image that was drawn
    TEXT = "text"  # a turn is not of the protocol; the detail begins with the protocol's code
    PAYLOAD = "payload"  # the text's edit is not the one that the row holds, nor its beginning
    PLAN = "plan"  # the milestones of a planned progression
    MALFORMED_TURN = "malformed_turn"  # a trace holds a turn that the agent could not read
    IMAGE_MISSING = "image_missing"
    IMAGE_CORRUPT = "image_corrupt"
    IMAGE_TOO_LARGE = "image_too_large"
    IMAGE_HASH = "image_hash"
    PATH = "path"  # absolute, or outside the folder of the data
    ANCHOR = "anchor"  # disagrees with the list of allowed anchors


Problem = tuple[Rule, str]


class BadRow(UserError):
    """A row (or the image of one) that cannot be used, with the rule that it breaks."""

    def __init__(self, rule: Rule, detail: str):
        super().__init__(f"an image cannot be used: {rule}: {detail}", "See umm-reflect data check")
        self.rule, self.detail = rule, detail


@dataclass(frozen=True)
class Picture:
    """Where the bytes of an image are; they are read anew each time.

    file: an image file, or with `cell` a Parquet file: (row group, row in it, place in the list).
    data: the bytes themselves, where they came over the wire or with their row.
    size: (height, width), upright, once it was examined.
    """

    file: str = ""
    cell: tuple[int, int, int] | None = None
    sha256: str = ""
    learn: bool = True
    data: bytes | None = None
    size: tuple[int, int] | None = None

    def read(self) -> bytes:
        """The encoded bytes. Errors: OSError for a missing file, ValueError for an empty cell."""
        if self.data is not None:
            return self.data
        if self.cell is None:
            return Path(self.file).read_bytes()
        group, row, place = self.cell
        value = image_column(self.file, group)[row][place].as_py()
        value = value.get("bytes") if isinstance(value, dict) else value
        if not value:
            raise ValueError("the cell is empty")
        return value

    def load(self) -> Image:
        """The decoded picture, upright, RGB. Errors: BadRow with the rule that it breaks."""
        from umm_reflect.images import load_image

        data, _ = self._checked()
        try:
            return load_image(data)
        except UserError as error:
            raise BadRow(Rule.IMAGE_CORRUPT, error.what) from None

    def examined(self, check: ImageCheck) -> Picture:
        """Itself with its size noted, without bytes that lie on the disk. "headers": hash and size
        are checked; "decode": every pixel too.

        Errors: BadRow with the rule that it breaks.
        """
        if check == "none":
            return self
        if check == "decode":
            self.load()
        size = self._checked()[1]
        return replace(self, size=size, data=None if self.cell else self.data)

    def _checked(self) -> tuple[bytes, tuple[int, int]]:
        """The bytes and (height, width), once hash and size are right."""
        from PIL import Image

        try:
            data = self.read()
        except (OSError, ValueError, IndexError) as error:
            why = "does not exist" if isinstance(error, FileNotFoundError) else str(error)
            raise BadRow(Rule.IMAGE_MISSING, f"{Path(self.file).name} {why}") from None
        if self.sha256 and hashlib.sha256(data).hexdigest() != self.sha256:
            raise BadRow(Rule.IMAGE_HASH, f"{len(data)} bytes with another sha256 than is noted")
        try:
            height, width = upright_size(data)
        except Image.DecompressionBombError as error:
            raise BadRow(Rule.IMAGE_TOO_LARGE, str(error).split(",")[0]) from None
        except (OSError, SyntaxError, ValueError) as error:
            raise BadRow(Rule.IMAGE_CORRUPT, str(error).replace("\n", " ")[:200]) from None
        if max(height, width) > MAX_SIDE:
            what = f"{width}x{height} px; at most {MAX_SIDE} a side"
            raise BadRow(Rule.IMAGE_TOO_LARGE, what)
        return data, (height, width)


def upright_size(data: bytes) -> tuple[int, int]:
    """(height, width) of an encoded image after it is turned upright, from its header."""
    from PIL import ExifTags, Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(io.BytesIO(data)) as image:
            on_its_side = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
            return image.size if on_its_side else (image.height, image.width)


@lru_cache(maxsize=2)
def image_column(file: str, group: int):
    """The images of one row group, all in memory; the last two groups are kept.

    For one image out of many. A scan takes images with their rows, a few at a time.
    """
    parquet = _opened(file)
    (column,) = IMAGE_COLUMNS & set(parquet.schema_arrow.names)
    return parquet.read_row_group(group, columns=[column], use_threads=False)[column]


@lru_cache(maxsize=32)
def _opened(file: str):
    """A Parquet file, whose footer is read once; its pages are mapped as they are asked for."""
    from pyarrow.parquet import ParquetFile

    return ParquetFile(file, memory_map=True)
