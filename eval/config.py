"""The settings of `umm-reflect eval`, and the samples that they ask for, in order.

config = parse(EvalConfig, argv, "umm-reflect eval")
for batch in batches(config, views=["local"]):      # lists of Sample: one view, set and seed
    ...
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from agent.config import NANO, ReflectConfig
from eval.results import Sample
from eval.sets import check_name, request_of, reward_of, rows_of, short_name
from umm_reflect.settings import to_mapping

if TYPE_CHECKING:
    from agent.types import EditView

# What may differ when a run is resumed: it decides how fast the results come, not what they are.
# (Device and number format are compared as they were resolved.)
HOW_FAST = ("batch_size", "workers", "gpus", "device", "dtype", "output_dir", "resume", "overwrite")
HOW_FAST += ("log_samples",)


@dataclass(frozen=True)
class EvalConfig:
    """Generate test sets, judge every image, and write the figures with their intervals.

    What is None comes from the model. Writes results.jsonl, summary.json, timing.json, config.yaml,
    env.json, and for each set and edit view pictures to look at. --list tells of the sets.
    """

    sets: Annotated[tuple[str, ...], tyro.conf.Positional] = ("shapes553",)
    """One or more of shapes553, compound, hard, hard553, geneval553, or files of rows (.jsonl)."""
    model: str = NANO
    """A folder, a hub id or id@revision."""
    adapter: str | None = None
    """A LoRA adapter on top: a folder or a hub id."""
    seeds: str = "0"
    """Sampling seeds, with commas: 0,1,2."""
    samples_per_prompt: int | None = None
    """How many samples of each row and seed: 1, or GenEval's 4 under its profile."""
    best_of: int | None = None
    """Also draw so many first images of each sample, look once at each, and hand out the one with
    the highest own score: what as many images give without edits."""
    limit: int | None = None
    """Only so many rows of each set, spread over it: for a try, never comparable."""
    edit_view: Literal["local", "full", "both"] | None = None
    """What an edit sees; both: two runs, and their paired difference."""
    max_rounds: int | None = None
    """How many edits may be drawn: 3, or none under GenEval's profile."""
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
    layout: Literal["rl", "sft"] | None = None
    """sft: the model plans before the first image."""
    profile: Literal["ours", "release", "official"] = "ours"
    """release: loop and sampler as published; official: GenEval's own protocol, without edits."""
    arm: Literal["base", "sft", "rl"] | None = None
    """Which model of a comparison this is; release: edits of an rl arm have noise of their own."""
    repair_rng_step: int | None = None
    """release: this number in the windows of edits, instead of the arm's (0, or 500 for rl)."""
    raw_prompt: bool = False
    """geneval553: ask "a photo of a bench", not "Create an image with a bench."."""
    reward: str | None = None
    """Who judges: a reward's name or a YAML file; otherwise shapes or geneval, as the set asks."""
    reward_set: tuple[str, ...] = ()
    """Settings of the judge: KEY=VALUE ..."""
    steps: int | None = None
    """Denoising steps of each image."""
    text_scale: float | None = None
    """Guidance toward the text; 1 is off."""
    image_scale: float | None = None
    """Guidance toward the image; 1 is off."""
    predict_only: bool = False
    """Draw and keep every image, judge none: --images does that later."""
    images: Path | None = None
    """Judge the images of this folder: one of --predict-only, or in GenEval's layout."""
    log_samples: bool = False
    """Keep every trajectory with its images, not only those on the sheets."""
    batch_size: int = 8
    """How many samples run together: 8 suits a CPU, 256 or more a large GPU."""
    gpus: int = 1
    """Processes that generate, one on each GPU (0: all GPUs); on a CPU, so many side by side."""
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
        official = self.profile == "official"
        for name, value in {"samples_per_prompt": (1, 4), "max_rounds": (3, 0)}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value[official])
        least = {
            "repair_rng_step": 0,
            "samples_per_prompt": 1,
            "best_of": 2,
            "limit": 1,
            "max_rounds": 0,
            "batch_size": 1,
        }
        for name, value in {**least, "workers": 0, "gpus": 0}.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise ValueError(f"--{name.replace('_', '-')} is {given}; give {value} or more")
        for name in self.sets:
            check_name(name)
        if not self.sets or len(set(map(short_name, self.sets))) < len(self.sets):
            raise ValueError(f"the sets are {' '.join(self.sets) or '(none)'}; name each once")
        if self.resume and self.overwrite:
            raise ValueError("--resume goes on with results and --overwrite drops them; give one")
        if self.predict_only and self.images:
            raise ValueError("--predict-only draws images and --images judges them; give one")
        if self.best_of and not self.max_rounds:
            raise ValueError("--best-of compares with edits: give --max-rounds 1 or more")
        if self.repair_rng_step is not None and self.profile != "release":
            raise ValueError("--repair-rng-step is a part of --profile release")
        parse_seeds(self.seeds)
        self.reflect_config(0)

    def reflect_config(self, seed: int, edit_view: EditView | None = None) -> ReflectConfig:
        """The settings with which `umm-reflect reflect` makes the same trajectories (the noise of
        `release` aside, which it does not draw)."""
        same = "model adapter max_rounds max_tokens temperature layout steps"
        same += " sure_of_ten sure_of_ten_later glances text_scale image_scale device dtype attn"
        given = {name: getattr(self, name) for name in same.split()}
        loop = "release" if self.profile == "release" else "ours"
        return ReflectConfig(seed=seed, edit_view=edit_view, profile=loop, **given)

    def request(self, sample: Sample) -> str:
        """What the model is asked for a sample."""
        return request_of(
            sample.set, sample.entry.row, raw=self.raw_prompt or self.profile == "official"
        )

    def reward_mapping(self, set_name: str) -> dict[str, Any]:
        """The judge of a set, as `rewards.registry.build` takes it. Errors: UsageError."""
        from eval.rewards.registry import named

        mapping = named(self.reward or reward_of(set_name), self.reward_set)
        if mapping["reward"] == "geneval" and self.profile == "release":
            mapping = {"rule": "cross_checked", "preset": "release", **mapping}
        return mapping


def parse_seeds(text: str) -> list[int]:
    """'0,1,2' -> [0, 1, 2]. Errors: ValueError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise ValueError(f"--seeds is '{text}'; give different whole numbers, as in 0,1,2")
    return [int(word) for word in words]


def what_is_run(config: EvalConfig) -> dict[str, Any]:
    """The settings that a resumed run must share."""
    return {name: value for name, value in to_mapping(config).items() if name not in HOW_FAST}


def batches(config: EvalConfig, views: Sequence[str]) -> Iterator[list[Sample]]:
    """All samples, in the order of results.jsonl, in batches of one view, set and seed.

    The batches of a seed are of nearly equal size, and the same whether a run is resumed or not.
    """
    for view in views:
        for name in config.sets:
            entries = rows_of(name, config.limit)
            for seed in parse_seeds(config.seeds):
                samples = [
                    Sample(view, short_name(name), entry, seed, copy)
                    for entry in entries
                    for copy in range(config.samples_per_prompt)
                ]
                yield from in_batches(samples, config.batch_size)


def in_batches(samples: Sequence[Sample], most: int) -> Iterator[list[Sample]]:
    """Batches of nearly equal size, none larger than `most`."""
    count = -(-len(samples) // most)
    bounds = [i * len(samples) // count for i in range(count + 1)]
    for start, end in itertools.pairwise(bounds):
        yield list(samples[start:end])
