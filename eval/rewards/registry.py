"""Which rewards there are, and how one is built from a mapping (a YAML file, a command line).

    build({"reward": "ocr", "engine": "local"})
    build({"reward": "sum", "terms": [{"reward": "ocr", "weight": 0.8},
                                      {"reward": "pickscore", "weight": 0.2}]})

The module of a reward holds `Settings`, a frozen dataclass, and `build(settings) -> Reward`. It is
imported when the reward is built. The keys of the mapping are the fields of `Settings`; an unknown
one is an error with the nearest name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from PIL.Image import Image

from eval.verdict import Verdict
from umm_reflect.errors import UsageError
from umm_reflect.settings import build as build_settings
from umm_reflect.settings import load_yaml, nearest, to_mapping

Row = Mapping[str, Any]

REWARDS = {
    "shapes": "eval.rewards.shapes",
    "geneval": "eval.rewards.geneval",
    "ocr": "eval.rewards.ocr",
    "pickscore": "eval.rewards.pickscore",
    "spectra": "eval.rewards.spectra",
    "dv": "eval.rewards.dv",
    "judge": "eval.rewards.judge",
    "http": "eval.rewards.http",
    "synthetic": "eval.rewards.synthetic",
    "sum": "eval.rewards.weighted",
}


class Reward(Protocol):
    """A judge of images. It may hold weights on a device, or talk to a service.

    A reward with weights may also have `offload()`: they leave the device until the next score. One
    that judges in processes may have `start(images)`: so many will come, so these may start.
    """

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        """One verdict per image and row, in order; any number of them.

        Errors: ValueError for a row that this judge cannot serve, or unequal lengths; UserError
        when the judge itself fails. One image that could not be judged is `Verdict.failed`.
        """

    def manifest(self) -> dict[str, Any]:
        """What judges: settings, ids, hashes. JSON values; two equal manifests judge alike."""

    def check(self) -> None:
        """UserError, with the cause, unless good images score above bad ones here and now."""

    def close(self) -> None:
        """Give back what is held. Nothing may be scored afterwards."""


def build(mapping: Mapping[str, Any], source: str = "the reward") -> Reward:
    """The reward that a mapping describes: {"reward": NAME, and that one's settings}.

    Errors: UsageError for an unknown name, key or value; what the reward itself says.
    """
    settings = {str(key).replace("-", "_"): value for key, value in mapping.items()}
    name = settings.pop("reward", None)
    if name not in REWARDS:
        close = nearest(str(name), REWARDS)
        hint = f"Did you mean '{close}'?" if close else f"One of {', '.join(REWARDS)}."
        raise UsageError(f"{source}: there is no reward '{name}'", hint)
    module = importlib.import_module(REWARDS[name])
    try:
        return module.build(build_settings(module.Settings, settings, f"{source} ({name})"))
    except ValueError as error:
        raise UsageError(f"{source} ({name}): {error}") from error


def named(text: str, assignments: Sequence[str] = (), device: str | None = None) -> dict[str, Any]:
    """A mapping from what a person types: a name, or a YAML file, and KEY=VALUE settings.

    Errors: UsageError for an assignment without '=', or a file that is no mapping.
    """
    import yaml

    mapping: dict[str, Any] = {"reward": text}
    if text.endswith((".yaml", ".yml")):
        mapping = load_yaml(text)
        if "reward" not in mapping:
            raise UsageError(f"{text} names no reward", "Its first line is: reward: NAME")
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise UsageError(f"'{assignment}' is no KEY=VALUE", "For example --set engine=vlm")
        try:
            mapping[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            mapping[key.strip()] = value
    return mapping if device is None else {**mapping, "device": device}


def facts(
    name: str, settings: Any, packages: Sequence[str] = (), files: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A manifest: the reward's name and settings, versions of what it runs on, sha256 of files."""
    from umm_reflect import __version__

    versions = {"umm-reflect": __version__, "python": platform.python_version()}
    versions |= {package: importlib.metadata.version(package) for package in packages}
    return {
        "reward": name,
        "settings": to_mapping(settings),
        "versions": versions,
        "sha256": dict(files or {}),
    }


def same_length(images: Sequence[Image], rows: Sequence[Row]) -> None:
    """ValueError unless there is a row for each image."""
    if len(images) != len(rows):
        raise ValueError(f"{len(images)} images but {len(rows)} rows")


def prompt_of(row: Row) -> str:
    """The prompt of a row. Errors: ValueError when it has none."""
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"the row has no prompt (its keys: {', '.join(map(str, row)) or 'none'})")
    return prompt


def hashes(folder: Path, pattern: str = "*.safetensors") -> dict[str, str]:
    """sha256 of the weights in a folder, by file name."""
    from umm_reflect.hub import digest

    return {path.name: digest(path) for path in sorted(folder.glob(pattern))}
