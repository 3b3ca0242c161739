"""How a checkpoint wants to be run: `reflection.json` beside its weights.

    profile = load_profile("pretrained/bagel-nano-shapes/reflection.json")
    save_profile(profile, "out/reflection.json")

    {"schema": 1, "layout": "rl", "edit_view": "local", "size": [128, 128],
     "system_prompt": {"text": "..."},            or {"file": "prompt.txt", "sha256": "..."}
     "transforms": {"vae": [512, 256, 16], "vit": [490, 112, 14]},
     "draw": {"first": {"points": 50, "shift": 3.0, ...}, "edit": {...}},
     "say": {"temperature": 0.5, "max_tokens": 512, "max_rounds": 3}}

A key that is not known is an error: a setting that nothing reads would be a setting that is wrong.
Which profile a folder without this file gets is `hub.profile`'s answer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from umm_reflect.errors import CheckpointError, UsageError
from umm_reflect.files import write_aside
from umm_reflect.flow import DrawSettings
from umm_reflect.hub import PROFILE, read_prompt
from umm_reflect.images import MOVES, Transforms, mended_transforms, released_transforms
from umm_reflect.settings import build, nearest, to_mapping

SCHEMA = 1

Layout = Literal["rl", "sft"]
EditView = Literal["local", "full"]
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class SaySettings:
    """How a turn is said. max_tokens: sampled tokens of one turn; max_rounds: edits at most.

    sure_of_ten: the probability (among the legal scores, at temperature 1) from which on a score of
    10 may be said; a model that is less sure says one of the others, and why. 0: it always may.
    sure_of_ten_later: the same for looks at an edited image, which are harder; None: no other.
    glances: how many times the picture is looked at for that probability: as it is, and moved by
    a fortieth of its side right, left, down and up, in this order. Their mean counts.
    """

    temperature: float = 0.5
    max_tokens: int = 512
    max_rounds: int = 3
    sure_of_ten: float = 0.0
    sure_of_ten_later: float | None = None
    glances: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; give 0 (greedy) or more")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; give at least 1")
        if self.max_rounds < 0:
            raise ValueError(f"max_rounds is {self.max_rounds}; give 0 (no look at all) or more")
        for name in ("sure_of_ten", "sure_of_ten_later"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} is {value}; give 0 (off) to below 1")
        if not 1 <= self.glances <= len(MOVES) + 1:
            raise ValueError(f"glances is {self.glances}; give 1 to {len(MOVES) + 1}")
        if self.glances > 1 and not any(self.sure(later) for later in (False, True)):
            raise ValueError(
                f"glances is {self.glances}, but without sure_of_ten nothing asks how sure the "
                "model is"
            )

    def any_ten(self) -> SaySettings:
        """The same, but a score of 10 takes no certainty: what the model thinks of an image."""
        return replace(self, sure_of_ten=0.0, sure_of_ten_later=None, glances=1)

    def sure(self, later: bool) -> float:
        """What a 10 takes, at a look at an edited image (later) or at the first one."""
        own = self.sure_of_ten_later
        return own if later and own is not None else self.sure_of_ten


@dataclass(frozen=True)
class ReflectionProfile:
    """What a checkpoint was trained with and must be run with.

    layout      "rl": [system, request, image, turn ...]; "sft": a planning turn before the image
    edit_view   what an edit sees: "local" [image, edit text], "full" the running context
    size        (height, width) in pixels of a first image when none is asked for
    first, edit the sampler of a first image and of an edit
    """

    layout: Layout
    edit_view: EditView
    system_prompt: str
    transforms: Transforms
    size: tuple[int, int]
    first: DrawSettings = field(default_factory=DrawSettings)
    edit: DrawSettings = field(default_factory=DrawSettings)
    say: SaySettings = field(default_factory=SaySettings)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("layout", self.layout, get_args(Layout)),
            ("edit_view", self.edit_view, get_args(EditView)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
        if self.schema != SCHEMA:
            raise ValueError(f"schema is {self.schema}; this version reads schema {SCHEMA}")
        if len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(f"size is {list(self.size)}; give [height, width] in pixels")


def released_profile(system_prompt: str) -> ReflectionProfile:
    """What the published UMM-Reflection checkpoints were evaluated with, without noise.

    (The published evaluation also adds noise of level 0.8 in two steps of each picture:
    `flow.released_window_start`.)
    """
    transforms = released_transforms(vae=(512, 256, 8), vit=(490, 112, 7))
    return ReflectionProfile(
        layout="rl",
        edit_view="local",
        system_prompt=system_prompt,
        transforms=replace(transforms, truncate=False),  # its renderer rounds
        size=(512, 512),
    )


def differences(own: ReflectionProfile, other: ReflectionProfile) -> list[str]:
    """What is set otherwise, by name: ['edit_view local (not full)', 'system_prompt', ...]."""
    found = []
    for name, value in _leaves(to_mapping(own)).items():
        if value != (before := _leaves(to_mapping(other))[name]):
            found.append(name if name == "system_prompt" else f"{name} {value} (not {before})")
    return found


def _leaves(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """{'say': {'glances': 1}} -> {'say.glances': 1}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        deeper = isinstance(value, Mapping)
        found |= _leaves(value, f"{at}{name}.") if deeper else {at + name: value}
    return found


# --- reading --------------------------------------------------------------------------------------

_KEYS = ("schema", "layout", "edit_view", "system_prompt", "transforms", "size", "draw", "say")
_NEEDED = ("schema", "layout", "edit_view", "size")
_TRANSFORM_KEYS = ("vae", "vit", "root_area", "resize_twice", "truncate")
_TRANSFORM_KEYS += ("latent_stride", "vit_patch")


def load_profile(path: str | Path) -> ReflectionProfile:
    """Read a reflection.json. `path` is the file or the folder that holds it.

    Errors: CheckpointError of one line that names the file and the key.
    """
    path = Path(path)
    path = path / PROFILE if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", "Check the path.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not readable as JSON ({error})", "Mend it.") from None
    try:
        return _from_content(content, path)
    except UsageError as error:
        raise CheckpointError(error.what, error.remedy) from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}", "Mend it.") from None


def _from_content(content: Any, path: Path) -> ReflectionProfile:
    _check_keys(content, _KEYS, path, "")
    for key in _NEEDED:
        if key not in content:
            raise CheckpointError(f"{path} has no key '{key}'", "Every checkpoint has to say it.")
    draw = content.get("draw", {})
    _check_keys(draw, ("first", "edit"), path, "draw.")
    size = content["size"]
    if not isinstance(size, list) or not all(type(side) is int for side in size):
        raise ValueError(f"size is {size!r}; give [height, width] in pixels")
    return ReflectionProfile(
        schema=content["schema"],
        layout=content["layout"],
        edit_view=content["edit_view"],
        system_prompt=_system_prompt(content.get("system_prompt", {"text": ""}), path),
        transforms=_transforms(content.get("transforms", {}), path),
        size=tuple(size),
        first=_draw(draw.get("first", {}), path, "draw.first."),
        edit=_draw(draw.get("edit", draw.get("first", {})), path, "draw.edit."),
        say=build(SaySettings, content.get("say", {}), str(path), "say."),
    )


def _check_keys(content: Any, known: tuple[str, ...], path: Path, at: str) -> None:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: {at or 'it '}is no JSON object", "Mend it.")
    for key in content:
        if key not in known:
            hint = nearest(key, known)
            raise CheckpointError(
                f"{path}: unknown key '{at}{key}'",
                f"Did you mean '{at}{hint}'?" if hint else f"Known: {', '.join(known)}.",
            )


def _system_prompt(content: Any, path: Path) -> str:
    _check_keys(content, ("text", "file", "sha256"), path, "system_prompt.")
    for key, value in content.items():
        if not isinstance(value, str):
            raise ValueError(f"system_prompt.{key} is {value!r}, which is no text")
    if set(content) == {"text"}:
        return content["text"]
    if set(content) != {"file", "sha256"}:
        raise CheckpointError(
            f"{path}: system_prompt has the keys {', '.join(sorted(content)) or '(none)'}",
            "Give either text, or file and sha256.",
        )
    name = Path(content["file"])
    if name.is_absolute() or ".." in name.parts:
        raise CheckpointError(f"{path}: system_prompt.file leaves the folder", "Put it inside.")
    return read_prompt(path.parent / name, content["sha256"])


def _transforms(content: Any, path: Path) -> Transforms:
    _check_keys(content, _TRANSFORM_KEYS, path, "transforms.")
    rules = {}
    for block in ("vae", "vit"):
        if block in content:
            rule = content[block]
            if not isinstance(rule, list) or [type(n) for n in rule] != [int] * 3:
                raise ValueError(f"transforms.{block} is {rule!r}; give [max, min, stride]")
            rules[block] = tuple(rule)
    for key in ("root_area", "resize_twice", "truncate"):
        if type(content.get(key, False)) is not bool:
            raise ValueError(f"transforms.{key} is {content[key]!r}; give true or false")
    for key in ("latent_stride", "vit_patch"):
        if type(content.get(key, 1)) is not int or content.get(key, 1) < 1:
            raise ValueError(f"transforms.{key} is {content[key]!r}; give pixels, 1 or more")
    transforms = mended_transforms(**rules)
    if "root_area" in content:
        transforms = replace(
            transforms,
            vae=replace(transforms.vae, root_area=content["root_area"]),
            vit=replace(transforms.vit, root_area=content["root_area"]),
        )
    rest = _TRANSFORM_KEYS[3:]
    return replace(transforms, **{key: content[key] for key in rest if key in content})


def _draw(content: Any, path: Path, at: str) -> DrawSettings:
    if not isinstance(content, Mapping):
        raise ValueError(f"{at.rstrip('.')} is no JSON object")
    renamed = {("timestep_shift" if key == "shift" else key): v for key, v in content.items()}
    return build(DrawSettings, renamed, str(path), at)


# --- writing --------------------------------------------------------------------------------------


def save_profile(
    profile: ReflectionProfile, path: str | Path, prompt_file: str | None = None
) -> Path:
    """Write reflection.json (aside, then renamed). `path` is the file or its folder.

    prompt_file: name of a file in that folder which holds the system prompt; it is then named with
    its hash instead of written out. Errors: ValueError for transforms the schema cannot say.
    """
    path = Path(path)
    path = path / PROFILE if path.is_dir() else path
    if prompt_file is None:
        prompt: dict[str, Any] = {"text": profile.system_prompt}
    else:
        data = (path.parent / prompt_file).read_bytes()
        prompt = {"file": prompt_file, "sha256": hashlib.sha256(data).hexdigest()}
    content = {
        "schema": profile.schema,
        "layout": profile.layout,
        "edit_view": profile.edit_view,
        "size": list(profile.size),
        "system_prompt": prompt,
        "transforms": _transforms_content(profile.transforms),
        "draw": {"first": _draw_content(profile.first), "edit": _draw_content(profile.edit)},
        "say": to_mapping(profile.say),
    }
    if _from_content(content, path) != profile:
        raise ValueError(f"this profile cannot be written as {PROFILE}: {profile.transforms}")
    return write_aside(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _transforms_content(transforms: Transforms) -> dict[str, Any]:
    content: dict[str, Any] = {
        block: [rule.max_size, rule.min_size, rule.stride]
        for block, rule in (("vae", transforms.vae), ("vit", transforms.vit))
    }
    usual = mended_transforms()
    if not transforms.vae.root_area:
        content["root_area"] = False
    for key in _TRANSFORM_KEYS[3:]:
        if getattr(transforms, key) != getattr(usual, key):
            content[key] = getattr(transforms, key)
    return content


def _draw_content(settings: DrawSettings) -> dict[str, Any]:
    values = to_mapping(settings)
    return {("shift" if key == "timestep_shift" else key): v for key, v in values.items()}
