"""The settings of `umm-reflect eval`, and the samples that they ask for, in order.

config = parse(EvalConfig, argv, "umm-reflect eval")
for batch in batches(config, views=["local"]):      # lists of Sample: one view, set and seed
    ...
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from agent.config import NANO, ReflectConfig
from eval.results import Sample
from umm_reflect.settings import to_mapping
from umm_reflect.shapes.sets import EvalRow, build_sets

if TYPE_CHECKING:
    from agent.types import EditView

SetName = Literal["shapes553", "compound", "hard"]

# What may differ when a run is resumed: it decides how fast the results come, not what they are.
# (Device and number format are compared as they were resolved.)
HOW_FAST = ("batch_size", "workers", "device", "dtype", "output_dir", "resume", "overwrite")


@dataclass(frozen=True)
class EvalConfig:
    """Generate test sets, judge every image, and write the figures with their intervals.

    What is None comes from the model. Writes results.jsonl, summary.json, timing.json, config.yaml,
    env.json, and for each set and edit view pictures to look at.
    """

    sets: Annotated[tuple[SetName, ...], tyro.conf.Positional] = ("shapes553",)
    """One or more test sets."""
    model: str = NANO
    """A folder, a hub id or id@revision."""
    adapter: str | None = None
    """A LoRA adapter on top: a folder or a hub id."""
    seeds: str = "0"
    """Sampling seeds, with commas: 0,1,2."""
    samples_per_prompt: int = 1
    """How many samples of each row and seed."""
    limit: int | None = None
    """Only so many rows of each set, spread over it: for a try, never comparable."""
    edit_view: Literal["local", "full", "both"] | None = None
    """What an edit sees; both: two runs, and their paired difference."""
    max_rounds: int = 3
    """How many edits may be drawn."""
    max_tokens: int | None = None
    """How long one turn may be."""
    temperature: float | None = None
    """Of the text; 0 takes the most likely token."""
    layout: Literal["rl", "sft"] | None = None
    """sft: the model plans before the first image."""
    profile: Literal["ours", "release"] = "ours"
    """release: the loop as published (no final look, the last image is kept, no retry)."""
    steps: int | None = None
    """Denoising steps of each image."""
    text_scale: float | None = None
    """Guidance toward the text; 1 is off."""
    image_scale: float | None = None
    """Guidance toward the image; 1 is off."""
    batch_size: int = 8
    """How many samples run together: 8 suits a CPU, 256 or more a large GPU."""
    workers: int = 0
    """Processes that judge; 0: one per core."""
    output_dir: Path = Path("outputs/eval")
    """Where the results go."""
    resume: bool = False
    """Go on with the results that --output-dir holds."""
    overwrite: bool = False
    """Replace the results that --output-dir holds."""
    device: str = "auto"
    """auto, cuda, cpu, mps or npu."""
    dtype: str = "auto"
    """auto, bfloat16, float16 or float32."""
    attn: str = "auto"
    """The attention kernel."""

    def __post_init__(self) -> None:
        least = {"samples_per_prompt": 1, "limit": 1, "max_rounds": 0, "batch_size": 1}
        for name, value in {**least, "workers": 0}.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise ValueError(f"--{name.replace('_', '-')} is {given}; give {value} or more")
        if not self.sets or len(set(self.sets)) < len(self.sets):
            raise ValueError(f"the sets are {' '.join(self.sets) or '(none)'}; name each once")
        if self.resume and self.overwrite:
            raise ValueError("--resume goes on with results and --overwrite drops them; give one")
        parse_seeds(self.seeds)
        self.reflect_config(0)

    def reflect_config(self, seed: int, edit_view: EditView | None = None) -> ReflectConfig:
        """The settings with which `umm-reflect reflect` makes the same trajectories."""
        same = "model adapter max_rounds max_tokens temperature layout profile steps text_scale"
        same += " image_scale device dtype attn"
        given = {name: getattr(self, name) for name in same.split()}
        return ReflectConfig(seed=seed, edit_view=edit_view, **given)


def parse_seeds(text: str) -> list[int]:
    """'0,1,2' -> [0, 1, 2]. Errors: ValueError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise ValueError(f"--seeds is '{text}'; give different whole numbers, as in 0,1,2")
    return [int(word) for word in words]


def what_is_run(config: EvalConfig) -> dict[str, Any]:
    """The settings that a resumed run must share."""
    return {name: value for name, value in to_mapping(config).items() if name not in HOW_FAST}


def rows_of(name: str, limit: int | None) -> list[EvalRow]:
    """The rows of a set; with a limit, so many of them at equal distances."""
    rows = getattr(build_sets(), name)
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[i * len(rows) // limit] for i in range(limit)]


def set_sha256(name: str) -> str:
    """The hash of a whole set: its rows in order, as JSON."""
    rows = [[r.index, r.family, r.seed, r.row] for r in getattr(build_sets(), name)]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def batches(config: EvalConfig, views: Sequence[str]) -> Iterator[list[Sample]]:
    """All samples, in the order of results.jsonl, in batches of one view, set and seed.

    The batches of a seed are of nearly equal size, and the same whether a run is resumed or not.
    """
    for view in views:
        for name in config.sets:
            entries = rows_of(name, config.limit)
            for seed in parse_seeds(config.seeds):
                samples = [
                    Sample(view, name, entry, seed, copy)
                    for entry in entries
                    for copy in range(config.samples_per_prompt)
                ]
                count = -(-len(samples) // config.batch_size)
                bounds = [i * len(samples) // count for i in range(count + 1)]
                for start, end in itertools.pairwise(bounds):
                    yield samples[start:end]
