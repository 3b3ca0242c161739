"""The settings of reflect, generate and edit, and what they change in a checkpoint's own.

config = parse(ReflectConfig, argv, "umm-reflect reflect")
profile = resolved_profile(hub.profile(folder), config)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from umm_reflect.errors import UsageError

if TYPE_CHECKING:
    from agent.types import Options
    from umm_reflect.config import BagelConfig
    from umm_reflect.hub import ReflectionProfile

NANO = "pretrained/bagel-nano-shapes"


@dataclass(frozen=True)
class DrawConfig:
    """What to draw, with which model, and where to put it. What is None comes from the model."""

    prompt: Annotated[str, tyro.conf.Positional] = ""
    """What to draw, or what to change in --image."""
    image: Path | None = None
    """The image to start from."""
    model: str = NANO
    """A folder, a hub id or id@revision."""
    adapter: str | None = None
    """A LoRA adapter on top: a folder or a hub id."""
    seed: int = 0
    """Together with the sample this names every random draw."""
    sample: int | str = 0
    """The number of the (first) prompt."""
    steps: int | None = None
    """Denoising steps of each image."""
    size: str | None = None
    """WIDTHxHEIGHT, or one number for a square; with --image, which keeps its shape, the limits."""
    text_scale: float | None = None
    """Guidance toward the text; 1 is off."""
    image_scale: float | None = None
    """Guidance toward the image; 1 is off."""
    prompts_file: Path | None = None
    """A file with one prompt a line, instead of PROMPT."""
    batch_size: int = 8
    """How many prompts of the file run together; the results do not depend on it."""
    output_dir: Path = Path("outputs")
    """Where the folder of each run goes."""
    device: str = "auto"
    """auto, cuda, cpu, mps or npu."""
    dtype: str = "auto"
    """auto, bfloat16, float16 or float32."""
    attn: str = "auto"
    """The attention kernel."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; give {least} or more")
        if self.size is not None:
            parse_size(self.size)


@dataclass(frozen=True)
class ReflectConfig(DrawConfig):
    """Draw an image, look at it, say what is wrong, edit it, until it is right.

    --from IMAGE.png repeats the run that wrote this image; other flags change it.
    """

    max_rounds: int | None = None
    """How many edits may be drawn."""
    max_tokens: int | None = None
    """How long one turn may be."""
    temperature: float | None = None
    """Of the text; 0 takes the most likely token."""
    sure_of_ten: float | None = None
    """The least probability of a score of 10 that is said; 0: any."""
    sure_of_ten_later: float | None = None
    """The same for edited images; otherwise as --sure-of-ten, where that is given."""
    glances: int | None = None
    """How many times the image is looked at for it: as it is, and moved a little (1 to 5)."""
    edit_view: Literal["local", "full"] | None = None
    """What an edit sees: the current image and the edit text, or everything so far."""
    layout: Literal["rl", "sft"] | None = None
    """sft: the model plans before the first image."""
    profile: Literal["ours", "release"] = "ours"
    """release: as published (no final look, the last image is kept, no retry, no guards)."""
    retries: int | None = None
    """New samples of a malformed turn."""
    same_edit_limit: int | None = None
    """Stop when the same edit is asked for this many times in a row; 0: never."""
    capture: bool = True
    """On a GPU, say texts by captured CUDA graphs, which differ from eager steps by rounding."""
    forced_turns: int | None = None
    """For measurements on random weights: legal turns of this many tokens that ask for an edit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"max_rounds": 0, "max_tokens": 1, "temperature": 0, "retries": 0}
        least |= {"same_edit_limit": 0, "forced_turns": 1}
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and not given >= value:
                raise ValueError(f"--{name.replace('_', '-')} is {given}; give {value} or more")


@dataclass(frozen=True)
class EditConfig(DrawConfig):
    """Change an image by one instruction, without looking at the result."""


@dataclass(frozen=True)
class GenerateConfig(DrawConfig):
    """Draw one image from a prompt, without looking at it."""


def parse_size(text: str) -> tuple[int, int]:
    """'512' -> (512, 512), '768x512' (width x height) -> (512, 768). Errors: ValueError."""
    match = re.fullmatch(r"(\d+)(?:[xX](\d+))?", text.strip())
    if match is None or 0 in (size := (int(match[2] or match[1]), int(match[1]))):
        raise ValueError(f"--size is '{text}'; give WIDTHxHEIGHT in pixels, or one number")
    return size


def resolved_profile(profile: ReflectionProfile, config: DrawConfig) -> ReflectionProfile:
    """The checkpoint's profile with what was asked for on the command line. Errors: UsageError.

    A size holds for first images and for edits; a user's image keeps its proportions within it.
    """
    drawing = {"text_scale": config.text_scale, "image_scale": config.image_scale}
    if config.steps is not None:
        drawing["points"] = config.steps + 1
    changes: dict[str, Any] = {}
    try:
        for kind in ("first", "edit"):
            given = {name: value for name, value in drawing.items() if value is not None}
            changes[kind] = replace(getattr(profile, kind), **given)
        if isinstance(config, ReflectConfig):
            names = ("max_rounds", "max_tokens", "temperature")
            names += ("sure_of_ten", "sure_of_ten_later", "glances")
            said = {n: getattr(config, n) for n in names if getattr(config, n) is not None}
            own = profile.say
            if config.sure_of_ten is not None:  # for every look, unless more is said
                glances = own.glances if config.sure_of_ten else 1
                every = {"sure_of_ten": config.sure_of_ten, "sure_of_ten_later": None}
                own = replace(own, **every, glances=glances)
            changes["say"] = replace(own, **said)
            for name in ("edit_view", "layout"):
                changes[name] = getattr(config, name) or getattr(profile, name)
        if config.size is not None:
            height, width = changes["size"] = parse_size(config.size)
            sides = {"max_size": max(height, width), "min_size": min(height, width)}
            rule = replace(profile.transforms.vae, **sides)
            changes["transforms"] = replace(profile.transforms, vae=rule)
    except ValueError as error:
        raise UsageError(str(error), "See --help.") from error
    return replace(profile, **changes)


def loop_options(config: ReflectConfig) -> Options:
    """The named options of the loop with what was asked for on the command line.

    Forced turns repeat words and edits that may change nothing: no guard ends them.
    """
    from agent.types import PROFILES

    given: dict[str, Any] = {}
    if config.forced_turns:
        given |= {"stop_repeated_text": False, "same_edit_limit": 0, "min_change": 0.0}
    asked = {"retries": config.retries, "same_edit_limit": config.same_edit_limit}
    given |= {name: value for name, value in asked.items() if value is not None}
    return replace(PROFILES[config.profile], **given)


def vocabulary_note(
    prompts: Sequence[str], model: BagelConfig, *, editing: bool = False
) -> str | None:
    """One line about words that the shapes model has never seen; None for other models."""
    from umm_reflect.config import NANO as NANO_CONFIG

    if model.llm != NANO_CONFIG.llm:
        return None
    from umm_reflect.shapes.prompts import unknown_words
    from umm_reflect.shapes.scene import COLORS, KINDS

    found = (word for prompt in prompts for word in unknown_words(prompt, editing=editing))
    unknown = list(dict.fromkeys(found))
    if not unknown:
        return None
    return (
        f"note: this model does not know {', '.join(unknown[:8])}; it draws {', '.join(KINDS)} in "
        f"{', '.join(COLORS)}, one to six of them, left of, right of, above or below each other"
    )
