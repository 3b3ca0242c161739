"""A safetensors file written tensor by tensor, so that memory never holds more than one of them.

    specs = {name: Spec(torch.bfloat16, (4, 4)) for name in names}
    write_streamed("out/ema.safetensors", specs, ((name, tensor) for ...))    # in any order

The library's own writer wants all tensors at once. The format (its documentation): the header's
length as 8 bytes, a JSON header with the place of every tensor, then their bytes without gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from umm_reflect.errors import UserError

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Spec:
    """What a tensor will be: its number type and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_streamed(
    path: str | Path, specs: Mapping[str, Spec], tensors: Iterable[tuple[str, Tensor]]
) -> Path:
    """Write every tensor to its place, in whatever order they come; each is cast to its `Spec`.

    The file is written where `path` says: whoever needs it whole or absent writes aside. Errors:
    UserError where it cannot be written; ValueError for a name that is unknown, missing or given
    twice, or another shape.
    """
    path = Path(path)
    # wide numbers first, so that every tensor lies at a multiple of its number's size
    order = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    places: dict[str, int] = {}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        spec = specs[name]
        places[name] = end
        end += spec.nbytes
        header[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [places[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    missing = set(specs)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(start + end)
            for name, tensor in tensors:
                if name not in missing:
                    raise ValueError(f"{name} is no tensor of {path.name}, or it came twice")
                spec = specs[name]
                if tuple(tensor.shape) != spec.shape:
                    raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(spec.shape)}")
                missing.discard(name)
                file.seek(start + places[name])
                flat = tensor.detach().to("cpu", spec.dtype).contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror})", "Free some space, or write elsewhere"
        ) from error
    if missing:
        raise ValueError(f"{path.name} lacks {len(missing)} tensors, {min(missing)} first")
    return path
