"""A golden folder on disk: its manifest, tensors, cases, pictures and contexts.

Nothing here knows an id, a size or a grid side: they come from the manifest, from the tokenizer and
from the checkpoint's configs. A segment or a setting that this version does not know raises
`NotCovered`, which the report counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import PIL
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from umm_reflect.errors import UsageError, UserError
from umm_reflect.parity_implementations import (
    ContextPart,
    GoldenContext,
    Implementation,
    SizeRule,
    VAEPicture,
)
from umm_reflect.parity_report import NotCovered, Report
from umm_reflect.reference import Text, ViTImage

REMEDY = "Name a folder with manifest.json, its .safetensors files and a checkpoint folder"

# `Case` values are what JSON gives: the manifest is a foreign file that is checked as it is walked.
Case = Mapping[str, Any]


class Golden:
    """A folder of recorded inputs and outputs; tensors are read when asked for.

    Raises UsageError when the folder or its manifest is missing, UserError when unreadable.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UsageError(f"there is no golden folder {self.folder}", REMEDY)
        path = self.folder / "manifest.json"
        if not path.is_file():
            raise UsageError(f"{self.folder} has no manifest.json", REMEDY)
        try:
            self.manifest = json.loads(path.read_text(encoding="utf-8"))
            self.files: Mapping[str, Case] = self.manifest["files"]
            self.checkpoint = self.folder / self.manifest["conventions"]["checkpoint"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a golden manifest ({error!r})", REMEDY) from error
        if not self.checkpoint.is_dir():
            raise UsageError(
                f"{self.folder} has no checkpoint folder {self.checkpoint.name}", REMEDY
            )
        self._stored: dict[str, dict[str, Tensor]] = {}
        self.unreadable: dict[str, str] = {}
        for file in self.all_files():
            self._read(file)

    def _read(self, file: str) -> None:
        self._stored[file] = {}
        try:
            with safe_open(self.folder / file, "pt") as handle:
                self._stored[file] = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            self.unreadable[file] = str(error)

    def all_files(self) -> list[str]:
        """The manifest's files, then any other .safetensors file beside it."""
        beside = sorted(path.name for path in self.folder.glob("*.safetensors"))
        return [*self.files, *(name for name in beside if name not in self.files)]

    def described(self, file: str) -> Mapping[str, Case]:
        return self.files.get(file, {}).get("tensors", {})

    def cases(self, file: str) -> Mapping[str, Any]:
        return self.files.get(file, {}).get("cases", {})

    def tensors(self, file: str) -> Mapping[str, Tensor]:
        return self._stored[file]

    def noise(self, file: str, name: str) -> float | None:
        return self.described(file).get(name, {}).get("fp64_max_abs_diff")

    def meaning(self, file: str, name: str) -> str:
        return self.described(file).get(name, {}).get("meaning", "")

    def files_like(self, stem: str) -> list[str]:
        """Files whose name starts with `stem`, e.g. "misc"."""
        return [file for file in self.all_files() if file.startswith(stem)]

    def size_rule(self, name: str) -> SizeRule:
        """The transform "vae" or "vit" that the folder was made with."""
        rules = self.manifest["conventions"].get("transforms", {})
        if name not in rules:
            raise NotCovered(f"the manifest's conventions hold no transform {name!r}")
        return SizeRule(**rules[name])

    # -- pictures and contexts --------------------------------------------------------------

    def stored(self, reference: str) -> Tensor:
        """The tensor that a segment names, as "misc image.a_vae" (file stem, tensor name)."""
        stem, _, name = reference.rpartition(" ")
        for file in [f"{stem}.safetensors"] if stem else self.all_files():
            if name in self._stored.get(file, {}):
                return self._stored[file][name]
        raise NotCovered(f"a segment names the tensor {reference!r}, which no file holds")

    @property
    def pillow_levels(self) -> int:
        """How far a resized picture may be off, in 8-bit levels.

        Pillows round a few pixels differently: one level, unless this one recorded the folder.
        """
        recorded_with = self.manifest.get("produced_with", {}).get("pillow")
        return 0 if recorded_with == PIL.__version__ else 1

    def pictures(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """All stored pictures of a kind ("vae", "vit"), e.g. ("image.a_vit", [3, h, w])."""
        for file in self.all_files():
            for name, tensor in self._stored[file].items():
                if name.startswith("image.") and name.endswith(f"_{kind}"):
                    yield name, tensor

    def segment(self, segment: object, implementation: Implementation) -> list[ContextPart]:
        """The context part of one `{kind: value}` of a manifest's list."""
        if not isinstance(segment, Mapping) or len(segment) != 1:
            raise NotCovered(f"a context holds {segment!r:.60}, which is not a one-key segment")
        ((kind, value),) = segment.items()
        if kind == "text":
            return [Text(tuple(implementation.encode(value)))]
        if kind in ("text_ids", "ids"):
            return [text_of_ids(value, implementation)]
        if kind == "vit_image":
            return [ViTImage(self.stored(value))]
        if kind == "vae_image":
            return [VAEPicture(self.stored(value))]
        raise NotCovered(f"a context holds a segment of the unknown kind {kind!r}")

    def context(self, segments: Sequence[object], implementation: Implementation) -> GoldenContext:
        return [part for s in segments for part in self.segment(s, implementation)]

    def raw_context(
        self, segments: Sequence[object], implementation: Implementation
    ) -> GoldenContext:
        """The same from the raw pictures, through the implementation's own transforms."""
        parts: list[ContextPart] = []
        for segment in segments:
            ((kind, value),) = segment.items()
            if kind not in ("vae_image", "vit_image"):
                parts += self.segment(segment, implementation)
                continue
            stem, _, name = value.rpartition(" ")
            which = name.removeprefix("image.").rpartition("_")[0]
            picture = self.stored(f"{stem} image.raw_{which}".strip()).numpy()
            picture = implementation.resize(picture, self.size_rule("vae"))
            if kind == "vit_image":
                picture = implementation.resize(picture, self.size_rule("vit"))
            pixels = implementation.to_pixels(picture)
            parts.append(ViTImage(pixels) if kind == "vit_image" else VAEPicture(pixels))
        return parts


def text_of_ids(ids: Sequence[int], implementation: Implementation) -> Text:
    """A text segment of ids that may or may not carry their frame already."""
    start, end = implementation.special_ids["start"], implementation.special_ids["end"]
    if len(ids) >= 2 and ids[0] == start and ids[-1] == end:
        ids = ids[1:-1]
    return Text(tuple(ids))


def grid_of(position_ids: Tensor, side: int) -> tuple[int, int]:
    """(rows, columns) of a grid from its ids row*side + column."""
    columns = int((position_ids < side).sum())
    if columns == 0 or len(position_ids) % columns:
        raise NotCovered("position ids that are not those of a grid in the table's corner")
    return len(position_ids) // columns, columns


def packed_kv(parts: Sequence[Tensor]) -> Tensor:
    """KV [layers, 2, L, heads, d] of several contexts, one after the other on the token axis."""
    return torch.cat(list(parts), dim=2)


def compare_named(
    golden: Golden, report: Report, file: str, prefix: str, actual: Mapping[str, Tensor]
) -> None:
    """Compares each tensor `prefix + name` of the file that has an entry in `actual`."""
    tensors = golden.tensors(file)
    for name, value in actual.items():
        full = prefix + name
        if full in tensors and not report.has(file, full):
            noise = golden.noise(file, full)
            report.compare(file, full, tensors[full], value, noise=noise)
