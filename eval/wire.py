"""What a reward service and its client say to each other, checked on both sides.

    items = read_request(content_type, body)          # ValueError: the caller's fault
    part, files = write_request(images, rows, ids)    # multipart: JSON and PNG bytes

JSON and image bytes, nothing else: no pickle.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from eval.pictures import as_png

MAX_ITEMS = 512  # of one request; a client sends several
MAX_BODY = 256 << 20  # bytes of one request
MAX_ID = 200
TOKEN_HEADER = "Authorization"


@dataclass(frozen=True)
class Item:
    """One image to be judged, still encoded."""

    id: str
    row: dict[str, Any]
    image: bytes


def write_request(
    images: Sequence[Image], rows: Sequence[dict[str, Any]], ids: Sequence[str]
) -> dict[str, Any]:
    """httpx's arguments for a multipart request."""
    items = [{"id": i, "row": row} for i, row in zip(ids, rows, strict=True)]
    text = json.dumps({"items": items}, ensure_ascii=False, allow_nan=False)
    files = [("items", (None, text.encode(), "application/json"))]
    files += [("image", (f"{n}.png", as_png(image), "image/png")) for n, image in enumerate(images)]
    return {"files": files}


def read_json(body: bytes) -> list[Item]:
    """The items of a JSON request. Errors: ValueError that says which item and what."""
    return [
        Item(*common, _decoded(item, index))
        for index, (item, common) in enumerate(_items(body, {"id", "row", "image"}))
    ]


def read_multipart(text: bytes, images: Sequence[bytes]) -> list[Item]:
    """The items of a multipart request. Errors: as `read_json`."""
    items = _items(text, {"id", "row"})
    if len(items) != len(images):
        raise ValueError(f"{len(items)} items but {len(images)} image parts")
    return [Item(*common, data) for (_, common), data in zip(items, images, strict=True)]


def listed(names: Sequence[str], most: int = 5) -> str:
    """'a, b, c and 97 more'."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def name_of(row: Mapping[str, Any], index: int) -> str:
    """How an item is named to a person: its uid or id, else its place and prompt."""
    for key in ("uid", "id", "sample_id"):
        if row.get(key) not in (None, ""):
            return str(row[key])[:80]
    return f"#{index} '{str(row.get('prompt', ''))[:40]}'"


def _items(body: bytes, fields: set[str]) -> list[tuple[dict[str, Any], tuple[str, dict]]]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request is no JSON ({_line(error)})") from None
    if not isinstance(content, dict) or set(content) != {"items"}:
        raise ValueError('the request is no object with one key, {"items": [...]}')
    items = content["items"]
    if not isinstance(items, list) or not items:
        raise ValueError("items is no list, or an empty one")
    if len(items) > MAX_ITEMS:
        raise ValueError(f"{len(items)} items; send at most {MAX_ITEMS} in one request")
    checked = []
    for index, item in enumerate(items):
        if not isinstance(item, dict) or set(item) != fields:
            raise ValueError(f"items[{index}] must have exactly {', '.join(sorted(fields))}")
        name, row = item["id"], item["row"]
        if not isinstance(name, str) or not 0 < len(name) <= MAX_ID:
            raise ValueError(f"items[{index}].id must be text of 1 to {MAX_ID} letters")
        if not isinstance(row, dict):
            raise ValueError(f"items[{index}].row must be an object")
        check_row(row, f"items[{index}].row")
        checked.append((item, (name, row)))
    if len({name for _, (name, _) in checked}) < len(checked):
        raise ValueError("two items have the same id")
    return checked


def check_row(row: dict[str, Any], where: str) -> None:
    """The parts of a row that judges share have the right types. Errors: ValueError."""
    for key in ("tag", "prompt", "text"):
        if not isinstance(row.get(key), str | None):
            raise ValueError(f"{where}.{key} must be text")
    for part in ("include", "exclude"):
        clauses = row.get(part)
        if clauses is None:
            continue
        if not isinstance(clauses, list):
            raise ValueError(f"{where}.{part} must be a list of clauses")
        for index, clause in enumerate(clauses):
            at = f"{where}.{part}[{index}]"
            if not isinstance(clause, dict):
                raise ValueError(f"{at} must be an object")
            if not isinstance(clause.get("class"), str) or not clause["class"]:
                raise ValueError(f"{at}.class must be text")
            count = clause.get("count")
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1000:
                raise ValueError(f"{at}.count must be a whole number of 1 to 1000")
            if not isinstance(clause.get("color"), str | None):
                raise ValueError(f"{at}.color must be text")
            position = clause.get("position")
            if position is not None and not _is_position(position):
                raise ValueError(f"{at}.position must be [relation, index]")


def _is_position(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return (
        isinstance(value[0], str) and isinstance(value[1], int) and not isinstance(value[1], bool)
    )


def _decoded(item: dict[str, Any], index: int) -> bytes:
    try:
        return base64.b64decode(item["image"], validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ValueError(f"items[{index}].image is no base64") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
