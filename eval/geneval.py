"""The GenEval verifier: images and rows in, verdicts with their evidence out.

    verifier = GenEvalVerifier.load(device="cuda:0")       # the converted weights, see below
    verdicts = verifier.score(images, rows)                # rows in GenEval's schema
    evidence = verifier.read(images, rows)                 # the same without a decision

detect (detectors.py) -> colours (clip_colors.py), answers (blip_vqa.py) -> Evidence -> verdict
(geneval_scores.py). Everything is batched over the images of a call. What was seen in an image is
kept by the hash of its pixels, in bounded memory, so an image that many rows or calls share is
looked at once.

The weights come with `umm-reflect download geneval` and `umm-reflect geneval convert`.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image

from eval.clip_colors import on_grey, plain_crop
from eval.detectors import Detector, Found, as_seen
from eval.evidence import Answer, Evidence, color_of
from eval.geneval_prompts import CLASSES
from eval.geneval_rules import MAX_OBJECTS, THRESHOLD, Detection, Row, check_row
from eval.geneval_scores import Preset, Rule, questions, verdict
from eval.verdict import Verdict
from umm_reflect.errors import CheckpointError
from umm_reflect.verifier_files import BLIP_VQA, CLIP, MASK2FORMER, verifier_folder

if TYPE_CHECKING:
    import torch

LOOKED_AT = 3  # best instances of a class whose colour is read, if a row asks for no more
AT_ONCE = 256  # images whose pixels and masks are in memory together
CACHE_BYTES = 256 * 1024 * 1024
CONVERTED = {"mask2former": MASK2FORMER, "blip-vqa": BLIP_VQA}  # folder: what it is made from


class Colors(Protocol):
    """Tells the colour of an object in a crop."""

    def probabilities(
        self, crops: Sequence[Image.Image], kinds: Sequence[str]
    ) -> list[tuple[float, ...]]: ...

    def identity(self) -> dict[str, Any]: ...

    def move(self, device: torch.device) -> None: ...


class Vqa(Protocol):
    """Answers yes-or-no questions about crops."""

    def yes(self, crops: Sequence[Image.Image], questions: Sequence[str]) -> list[float]: ...

    def identity(self) -> dict[str, Any]: ...

    def move(self, device: torch.device) -> None: ...


@dataclass
class _Seen:
    """What is known of one image. Colours and answers are added when a row asks for them."""

    found: list[Found]
    colors: dict[int, tuple[float, ...]] = field(default_factory=dict)  # by place in found
    answers: dict[tuple[int, str], float] = field(default_factory=dict)  # by place and colour

    @property
    def n_bytes(self) -> int:
        masks = sum(len(found.mask.bits) for found in self.found if found.mask)
        return 512 + 256 * len(self.found) + masks


class GenEvalVerifier:
    """Judges images by GenEval's rule, with or without the second opinion; see the file's top."""

    def __init__(
        self,
        detector: Detector,
        colors: Colors,
        vqa: Vqa | None,
        *,
        rule: Rule = "official",
        preset: Preset = "ours",
        device: torch.device | None = None,
        cache_bytes: int = CACHE_BYTES,
    ):
        """rule: which yes or no counts. preset: how a no is graded. vqa: may be None where neither
        of the two asks it. device: where the models are, to return to after `offload`.

        Errors: ValueError where BLIP is asked for and there is none.
        """
        self.asks = rule == "cross_checked" or preset == "release"
        if self.asks and vqa is None:
            raise ValueError(f"rule {rule} with preset {preset} asks BLIP, and there is none")
        self.detector, self.colors, self.vqa = detector, colors, vqa
        self.rule, self.preset = rule, preset
        self.device = device
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[str, _Seen] = OrderedDict()
        self._lock = threading.RLock()
        self._away = False

    @classmethod
    def load(
        cls,
        *,
        rule: Rule = "official",
        preset: Preset = "ours",
        detector: str = "",
        clip: str = CLIP,
        blip: str = "",
        device: str | torch.device = "auto",
        batch_size: int = 16,
        cache_bytes: int = CACHE_BYTES,
    ) -> GenEvalVerifier:
        """detector, blip: folders that `geneval convert` wrote, "" for its own place; blip may be a
        hub id, and is loaded only if it is asked. clip: a hub id or folder.

        Errors: CheckpointError or UserError of one line.
        """
        from eval.blip_vqa import BlipVqa
        from eval.clip_colors import ClipColors
        from eval.detectors import Mask2FormerDetector
        from umm_reflect.device import resolve_device

        where = resolve_device(device)
        asks = rule == "cross_checked" or preset == "release"
        found = Mask2FormerDetector.load(
            Path(detector) if detector else converted("mask2former"),
            device=where,
            batch_size=batch_size,
        )
        colors = ClipColors.load(clip, device=where)
        vqa = BlipVqa.load(blip or converted("blip-vqa"), device=where) if asks else None
        return cls(
            found,
            colors,
            vqa,
            rule=rule,
            preset=preset,
            device=where,
            cache_bytes=cache_bytes,
        )

    # --- judging ----------------------------------------------------------------------------------

    def score(self, images: Sequence[Image.Image], rows: Sequence[Row]) -> list[Verdict]:
        """One verdict per image and row. Errors: ValueError for a row that cannot be judged, or
        unequal lengths; FloatingPointError when a model gives no numbers."""
        return [
            verdict(row, evidence, rule=self.rule, preset=self.preset)
            for row, evidence in zip(rows, self.read(images, rows), strict=True)
        ]

    def read(self, images: Sequence[Image.Image], rows: Sequence[Row]) -> list[Evidence]:
        """What was seen of each row's objects in its image: enough to judge it by either rule."""
        if len(images) != len(rows):
            raise ValueError(f"{len(images)} images but {len(rows)} rows")
        for row in rows:
            self.check_row(row)
        evidence: list[Evidence] = []
        for start in range(0, len(images), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            with self._lock:
                evidence += self._read(images[part], rows[part])
        return evidence

    def _read(self, images: Sequence[Image.Image], rows: Sequence[Row]) -> list[Evidence]:
        if self._away:
            self._move(self.device)
            self._away = False
        upright = [as_seen(image) for image in images]
        keys = [_pixels_sha256(image) for image in upright]
        seen = self._detect(dict(zip(keys, upright, strict=True)))
        jobs = [
            (image, seen[key], row) for image, key, row in zip(upright, keys, rows, strict=True)
        ]
        self._read_colors(jobs)
        if self.asks:
            self._ask(jobs)
        evidence = [
            _evidence(image, key, seen[key], row)
            for image, key, row in zip(upright, keys, rows, strict=True)
        ]
        self._remember(seen)
        return evidence

    def check_row(self, row: Row) -> None:
        """ValueError, with the reason, for a row that cannot be judged."""
        check_row(row, CLASSES)
        if self.asks:
            questions(row)

    def _detect(self, images: dict[str, Image.Image]) -> dict[str, _Seen]:
        """By key: from memory, or looked at now (each image once)."""
        fresh = [key for key in images if key not in self._cache]
        found = self.detector.detect([images[key] for key in fresh]) if fresh else []
        seen = {key: _Seen(objects) for key, objects in zip(fresh, found, strict=True)}
        return {key: seen[key] if key in seen else self._cache[key] for key in images}

    def _read_colors(self, jobs: Sequence[tuple[Image.Image, _Seen, Row]]) -> None:
        todo: dict[tuple[int, int], tuple[_Seen, int, Image.Image]] = {}
        for image, seen, row in jobs:
            for index in _colored(row, seen.found):
                if index not in seen.colors and (id(seen), index) not in todo:
                    todo[id(seen), index] = (seen, index, on_grey(image, seen.found[index]))
        kinds = [seen.found[index].kind for seen, index, _ in todo.values()]
        crops = [crop for _, _, crop in todo.values()]
        shares = self.colors.probabilities(crops, kinds) if todo else []
        for (seen, index, _), row in zip(todo.values(), shares, strict=True):
            seen.colors[index] = row

    def _ask(self, jobs: Sequence[tuple[Image.Image, _Seen, Row]]) -> None:
        from eval.blip_vqa import question

        assert self.vqa is not None
        todo: dict[tuple[int, int, str], tuple[_Seen, int, str, Image.Image]] = {}
        crops: dict[tuple[int, int], Image.Image] = {}
        for image, seen, row in jobs:
            for kind, *both in questions(row):
                index = _best(seen.found, kind)
                if index is None:
                    continue
                for color in both:
                    if (index, color) not in seen.answers:
                        crop = crops.setdefault(
                            (id(seen), index), plain_crop(image, seen.found[index])
                        )
                        todo[id(seen), index, color] = (seen, index, color, crop)
        if not todo:
            return
        asked = [question(color, seen.found[i].kind) for seen, i, color, _ in todo.values()]
        answers = self.vqa.yes([crop for *_, crop in todo.values()], asked)
        for (seen, index, color, _), yes in zip(todo.values(), answers, strict=True):
            seen.answers[index, color] = yes

    def _remember(self, seen: dict[str, _Seen]) -> None:
        """Keep what was seen, the latest last, and forget the oldest beyond the bound."""
        for key, entry in seen.items():
            self._cache[key] = entry
            self._cache.move_to_end(key)
        total = sum(entry.n_bytes for entry in self._cache.values())
        while self._cache and total > self._cache_bytes:
            total -= self._cache.popitem(last=False)[1].n_bytes

    # --- the models -------------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any]:
        """What decides the verdicts: rule, preset, thresholds, models with their hashes."""
        models = {"detector": self.detector.identity(), "colors": self.colors.identity()}
        if self.asks and self.vqa is not None:
            models["answers"] = self.vqa.identity()
        return {"rule": self.rule, "preset": self.preset, "models": models}

    def offload(self) -> None:
        """The weights leave the device until the next image."""
        import torch

        with self._lock:
            if self.device is None or self.device.type == "cpu" or self._away:
                return
            self._move(torch.device("cpu"))
            self._away = True
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _move(self, device: torch.device | None) -> None:
        for model in (self.detector, self.colors, self.vqa):
            if model is not None and device is not None:
                model.move(device)


def converted(name: str) -> Path:
    """The folder of a converted model in its own place. Errors: CheckpointError if it is not there
    (with what to do)."""
    folder = verifier_folder() / name
    if (folder / "model.safetensors").exists():
        return folder
    fetched = (verifier_folder() / CONVERTED[name].name).exists()
    first = "" if fetched else "umm-reflect download geneval, then "
    raise CheckpointError(
        f"the verifier's {name} is not in {verifier_folder()}",
        f"Run: {first}umm-reflect geneval convert",
    )


# --- of one image and row -------------------------------------------------------------------------


def _pixels_sha256(image: Image.Image) -> str:
    return hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()


def _places(found: Sequence[Found], kind: str) -> list[int]:
    """Where the instances of a class are, best first."""
    places = [index for index, one in enumerate(found) if one.kind == kind]
    return sorted(places, key=lambda index: -found[index].score)


def _best(found: Sequence[Found], kind: str) -> int | None:
    """The most confident instance above the threshold."""
    places = _places(found, kind)
    return places[0] if places and found[places[0]].score > THRESHOLD else None


def _colored(row: Row, found: Sequence[Found]) -> list[int]:
    """The instances whose colour a row needs: of each coloured clause the best few, faint ones too.

    A rule that excludes a colour looks at all that a class may have.
    """
    wanted: dict[int, None] = {}
    for key in ("include", "exclude"):
        for clause in row.get(key) or ():
            if clause.get("color"):
                many = max(clause["count"], LOOKED_AT) if key == "include" else MAX_OBJECTS
                wanted |= dict.fromkeys(_places(found, clause["class"])[:many])
    return list(wanted)


def _evidence(image: Image.Image, key: str, seen: _Seen, row: Row) -> Evidence:
    """What a row's verdict rests on: its classes with faint instances, of others the sure ones."""
    clauses = [*(row.get("include") or ()), *(row.get("exclude") or ())]
    named = {clause["class"] for clause in clauses}
    kept: list[int] = []
    for kind in dict.fromkeys([*sorted(named), *(found.kind for found in seen.found)]):
        places = _places(seen.found, kind)
        if kind not in named:
            places = [i for i in places if seen.found[i].score > THRESHOLD]
        kept += places[:MAX_OBJECTS]
    detections = tuple(_detection(seen, index) for index in kept)
    answers = tuple(
        Answer(seen.found[index].kind, color, yes)
        for (index, color), yes in seen.answers.items()
        if index in kept
    )
    return Evidence(image.size, detections, answers, key)


def _detection(seen: _Seen, index: int) -> Detection:
    found, colors = seen.found[index], seen.colors.get(index)
    color = None if colors is None else color_of(colors)
    return Detection(found.kind, color, found.box, found.score, found.area, colors)
