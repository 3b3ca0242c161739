"""One RL step of the full-size model on random weights: how fast, how large, what limits it.

    python -m rl.full_size --folder runs/full-size --output runs/rl_full_size.json
    python -m rl.full_size --folder runs/full-size --output plan.json --plan-only
    python -m rl.full_size --folder runs/tiny --output tiny.json --shape tiny --size 32 --groups 1

Writes a checkpoint of BAGEL-7B-MoT's shape into --folder (29 GB of random weights; one that is
there is used as it is) and takes a step of each recipe with its published constants, but few
groups. Random weights say nothing sensible, so turns are forced to be legal and as long as asked,
and the reward is a hash of the pixels. First the step is laid out without a model: what it will
take. Then seconds, memory and share of the peak by phase, images per GPU second, and the recipe's
own number of groups extrapolated from them. The file is written anew after each recipe.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from agent import full_size
from agent.clocks import Part, Stopwatch
from agent.random_weights import write_random_checkpoint
from rl.plan_step import Plan, plan_step
from rl.rollout import RolloutPolicy
from rl.train import Run
from rl.train_config import Config as RunConfig
from rl.train_config import recipe
from rl.update import Updater
from rl.work import rollout_work
from umm_reflect.autoencoder import AutoEncoder
from umm_reflect.config import BagelConfig
from umm_reflect.device import give_back, resolve_device
from umm_reflect.files import human_size, write_aside
from umm_reflect.hub import profile as profile_of
from umm_reflect.hub import resolve
from umm_reflect.prefill import Engine
from umm_reflect.settings import build, parse
from umm_reflect.tokens import Tokens
from umm_reflect.training.flops import Learns, flops, mfu, peak_flops
from umm_reflect.training.learner import Learner
from umm_reflect.training.processes import Processes, start

RECIPES = ("pickscore-lora", "reflection")
# What is timed, by the name of its phase. A phase inside of another one is taken off it.
METHODS = {
    "rollout": (Run, "roll_out"),
    "say": (RolloutPolicy, "say"),
    "draw": (RolloutPolicy, "draw"),
    "read": (Engine, "caches"),
    "decode": (AutoEncoder, "decode_latents"),
    "judge": (Run, "judge"),
    "credit": (Run, "credit"),
    "update": (Updater, "__call__"),
    "lay out": (Updater, "_parts"),
    "compare": (Updater, "_compare"),
    "forward": (Updater, "_forward"),
    "backward": (Learner, "backward"),
    "step": (Learner, "step"),
}
# Of these the first call compiles kernels: their usual one is the median.
COMPILED = ("compare", "forward", "backward")


@dataclass(frozen=True)
class Config:
    """Plan and time one RL step of the full-size model with random weights."""

    output: Path
    """Where the figures go (JSON)."""
    folder: Path = Path("runs/full-size")
    """Where the random checkpoint is written (29 GB), or was written before."""
    shape: Literal["bagel-7b-mot", "tiny"] = "bagel-7b-mot"
    """The sizes of the random model."""
    model: str | None = None
    """Take this model in place of random weights."""
    recipes: tuple[str, ...] = RECIPES
    """Which ones, in this order (files of rl/recipes/ with the objective grpo)."""
    groups: int = 3
    """Groups of the measured step."""
    group_size: int | None = None
    """Members of a group; none: the recipe's."""
    rounds: int | None = None
    """Edits of a trajectory; none: the recipe's."""
    turn_tokens: int = 200
    """Tokens of each turn."""
    size: int | None = None
    """Side of the images in pixels; none: the recipe's."""
    points: int | None = None
    """Schedule points; none: the recipe's."""
    edit_view: Literal["local", "full"] | None = None
    """What an edit sees; none: what the checkpoint says (the random one: local)."""
    capture: bool = True
    """Say turns by captured CUDA graphs where that pays (umm_reflect/decode.py), not eagerly."""
    prompts: str = "geneval"
    """Where prompts come from, as for umm-reflect rl."""
    plan_only: bool = False
    """Lay the step out, and stop there: needs no weights."""
    tera: float = 450.0
    """TFLOP/s that the plan reckons with."""
    limit: float = 480.0
    """Seconds that there are; the plan says what to leave out where it takes longer."""
    tokenizer: Path = Path("pretrained/bagel-nano-shapes")
    """The folder whose tokenizer files the random checkpoint gets."""
    device: str = "auto"
    """auto, cuda, cpu, mps or npu."""
    seed: int = 0
    """Of the weights and of the run."""

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("turn_tokens", 1), ("tera", 1), ("limit", 1)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is {getattr(self, name)}; give {least} or more")
        for name in self.recipes:
            recipe(name)


def settings_of(name: str, config: Config, model: str) -> RunConfig:
    """The recipe with what is forced here. Errors: UsageError, as `train_config.recipe`."""
    values = recipe(name)
    rollout = {**values["rollout"], "groups": config.groups}
    for key, value in (
        ("group_size", config.group_size),
        ("max_rounds", config.rounds),
        ("size", config.size),
        ("edit_view", config.edit_view),
    ):
        rollout |= {} if value is None else {key: value}
    if config.points is not None:
        for drawing in ("first", "edit"):
            if drawing in rollout:
                rollout[drawing] = {**rollout[drawing], "points": config.points}
    if not rollout.get("single"):
        rollout["max_tokens"] = max(config.turn_tokens, rollout.get("max_tokens", 0))
    values |= {
        "model": model,
        "output_dir": str(config.output.with_suffix("")) + f"-{name}",
        "resume": "never",
        "prompts": config.prompts,
        "judge": {"reward": "synthetic"},
        "rollout": rollout,
        "updates": min(values.get("updates", 1), config.groups),
        "held_out": {"every": 0},
        "preflight": False,
        "force_turns": config.turn_tokens,
        "pictures_every": 0,
        "device": config.device,
        "seed": config.seed,
    }
    return build(RunConfig, values, f"recipe {name}")


# --- the measured step ----------------------------------------------------------------------------


class Meter(Stopwatch):
    """Also the largest memory on the device during each part, by its name."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.peaks: dict[str, int] = {}
        self._stack = [0]

    @contextmanager
    def part(self, name: str) -> Iterator[Part]:
        self._fold()
        self._stack.append(0)
        with super().part(name) as part:
            yield part
        self._fold()
        peak = self._stack.pop()
        self._stack[-1] = max(self._stack[-1], peak)
        self.peaks[name] = max(self.peaks.get(name, 0), peak)

    def _fold(self) -> None:
        if self.device.type == "cuda":
            self._stack[-1] = max(self._stack[-1], torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)


@contextmanager
def timed(meter: Meter) -> Iterator[None]:
    """Every call of METHODS is a part of the meter while the block runs."""
    kept = {name: owner.__dict__[method] for name, (owner, method) in METHODS.items()}

    def around(name: str):
        def call(self, *args, **options):
            with meter.part(name):
                return kept[name](self, *args, **options)

        return call

    for name, (owner, method) in METHODS.items():
        setattr(owner, method, around(name))
    try:
        yield
    finally:
        for name, (owner, method) in METHODS.items():
            setattr(owner, method, kept[name])


class MeasuredRun(Run):
    """A run whose step leaves nothing on the disk, and says what it did."""

    def measured(self, scored, done, clock, settled) -> dict[str, float]:
        self.scored, self.done = scored, done
        return super().measured(scored, done, clock, settled)

    def watch_over(self, values, judged) -> None:
        """Noise is what is expected here."""

    def leave(self, scored) -> None:
        """Nothing."""


def measure(settings: RunConfig, *, capture: bool) -> dict[str, Any]:
    """One step of a run: figures as plain values."""
    with start(settings.strategy, settings.device) as processes:
        return _measured(settings, processes, capture)


def _measured(settings: RunConfig, processes: Processes, capture: bool) -> dict[str, Any]:
    device = processes.device
    loading = Stopwatch(device)
    with loading.part("load") as load:
        run = MeasuredRun(settings, processes)
    run.learner.bagel.capture = None if capture else False
    meter = Meter(device)
    with run.judges(), timed(meter):
        values = run.step()
    bagel, rollout = run.learner.bagel, settings.rollout
    rolled = rollout_work(
        (one.trajectory for one in run.scored),
        *(rollout.first, rollout.edit, bagel.config, bagel.frame),
    )
    none, learned = Learns(), flops(run.done.learned, bagel.config, run.learns)
    work = {name: flops(done, bagel.config, none).forward for name, done in rolled.items()}
    work["compare"] = flops(run.done.compared, bagel.config, run.learns).forward
    work |= {"forward": learned.forward, "backward": learned.backward}
    figures = summed_up(meter.parts)
    gpu = device.type == "cuda"
    known = peak_flops(torch.cuda.get_device_name(device)) if gpu else None
    images = int(values["images"])
    return {
        "images": images,
        "trajectories": len(run.scored),
        "seconds": figures["seconds"],
        "usual_seconds": figures["usual"],
        "all_seconds": sum(figures["seconds"].values()),
        "images_per_gpu_second": images / sum(figures["seconds"].values()),
        "tflop": {name: n / 1e12 for name, n in work.items()},
        "mfu": {
            name: mfu(n, figures["usual"].get(name, 0.0), devices=1, peak=known)
            for name, n in work.items()
        },
        "peak_bytes": meter.peaks,
        "load_seconds": load.seconds,
        "updates": run.done.updates,
        "device": torch.cuda.get_device_name(device) if gpu else str(device),
        "torch": torch.__version__,
    }


def summed_up(parts: Sequence[Part]) -> dict[str, dict[str, float]]:
    """{"seconds": own ones by phase, "usual": those where each call takes what most of them do}."""
    own: dict[str, list[float]] = {}
    for part in parts:
        name = "compare" if part.inside == "compare" else part.name
        own.setdefault(name, []).append(part.own)
    seconds = {name: sum(each) for name, each in own.items()}
    usual = dict(seconds)
    for name in COMPILED:
        if len(each := [s for s in own.get(name, []) if s > 0]) > 2:
            usual[name] = min(seconds[name], statistics.median(each) * len(each))
    return {"seconds": seconds, "usual": usual}


def extrapolated(
    figures: Mapping[str, Any], plan: Plan, whole: Plan, updates: int
) -> dict[str, float]:
    """A step of the whole recipe, with so many updates: each phase grows as its operations do in
    the plans (the optimizer's with the updates), what has none with the images."""
    usual, images = figures["usual_seconds"], whole.images / plan.images
    seconds = {}
    for phase, spent in usual.items():
        factor = images
        if phase == "step":
            factor = updates / max(1, figures["updates"])
        elif phase == "say":
            factor = whole.seconds["say"] / plan.seconds["say"]
        elif phase in plan.tflop:
            factor = whole.tflop[phase] / plan.tflop[phase]
        seconds[phase] = factor * spent
    if "compare" in whole.tflop and "compare" not in plan.tflop:  # as fast as the other forwards
        share = whole.tflop["compare"] / plan.tflop["forward"]
        seconds["compare"] = share * usual["forward"]
    taken = sum(seconds.values())
    return {
        "trajectories": whole.trajectories,
        "images": whole.images,
        "seconds": taken,
        "seconds_by_phase": seconds,
        "images_per_gpu_second": whole.images / taken,
    }


# --- the report -----------------------------------------------------------------------------------


def plan_lines(name: str, plan: Plan, config: Config) -> list[str]:
    lines = [
        f"{name}: {plan.trajectories} trajectories, {plan.images} images; to expect at "
        f"{config.tera:g} TFLOP/s:"
    ]
    for phase, seconds in plan.seconds.items():
        tera = plan.tflop.get(phase)
        lines.append(f"  {phase:<10}{seconds:>8.1f} s" + (f"{tera:>12,.0f} TFLOP" if tera else ""))
    lines.append(f"  {'in all':<10}{plan.all_seconds:>8.1f} s; {plan.note}")
    for phase, size in plan.memory.items():
        lines.append(f"  {human_size(size):>10} at most in {phase}")
    return lines


def figure_lines(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{name}: {found['trajectories']} trajectories, {found['images']} images in "
        f"{found['all_seconds']:.1f} s, {found['images_per_gpu_second']:.3f} images/s "
        f"({found['device']}, torch {found['torch']})",
        f"  {'phase':<10}{'seconds':>9}{'usual':>9}{'TFLOP':>10}{'MFU':>7}{'memory':>12}",
    ]
    for phase in (p for p in METHODS if p in found["seconds"]):
        share, tera = found["mfu"].get(phase), found["tflop"].get(phase)
        memory = found["peak_bytes"].get(phase, 0)
        lines.append(
            f"  {phase:<10}{found['seconds'][phase]:>9.2f}{found['usual_seconds'][phase]:>9.2f}"
            + (f"{tera:>10,.1f}" if tera else " " * 10)
            + (f"{share:>7.1%}" if share else " " * 7)
            + (f"{human_size(memory):>12}" if memory else "")
        )
    size = found["published"]
    lines.append(
        f"  the whole recipe: {size['trajectories']} trajectories, {size['images']} images in "
        f"{size['seconds']:.0f} s, {size['images_per_gpu_second']:.3f} images per GPU second"
    )
    return lines


def main(argv: Sequence[str]) -> int:
    config = parse(Config, argv, "python -m rl.full_size")
    device = resolve_device(config.device)
    figures: dict[str, Any] = {"config": json.loads(json.dumps(asdict(config), default=str))}
    if config.model is None:
        shape, tokens = full_size.SHAPES[config.shape], config.tokenizer
        as_drawn = full_size.Config(config.folder, config.shape, size=config.size or 512)
        profile = full_size.run_profile(as_drawn)
    else:
        tokens = resolve(config.model)
        shape, profile = BagelConfig.from_folder(tokens), profile_of(tokens)
    tokenizer = Tokens.from_folder(tokens)

    def planned(name: str, own: Config) -> Plan:
        settings = settings_of(name, own, own.model or str(own.folder))
        return plan_step(settings, shape, tokenizer, profile, own.tera)

    plans = {name: planned(name, config) for name in config.recipes}
    for name, plan in plans.items():
        figures[name] = {"plan": asdict(plan)}
        print("\n".join(plan_lines(name, plan, config)), flush=True)
    expected = sum(plan.all_seconds for plan in plans.values())
    print(f"{expected:.0f} s for all, besides writing and loading", flush=True)
    if expected > config.limit:
        print(f"That is more than {config.limit:g} s. {_shorter(plans, planned, config)}")
    _write(config, figures)
    if config.plan_only:
        return 0
    if config.model is None:
        write_random_checkpoint(
            config.folder,
            shape,
            tokenizer=config.tokenizer,
            profile=profile,
            device=device,
            seed=config.seed,
        )
    for name in config.recipes:
        settings = settings_of(name, config, config.model or str(config.folder))
        found = measure(settings, capture=config.capture)
        published = build(RunConfig, recipe(name), name)
        whole = planned(
            name,
            replace(
                config,
                groups=published.rollout.groups,
                group_size=None,
                rounds=None,
            ),
        )
        updates = published.updates * published.passes
        found["published"] = extrapolated(found, plans[name], whole, updates)
        figures[name] |= found
        _write(config, figures)
        print("\n".join(figure_lines(name, found)), flush=True)
        gc.collect()
        give_back(device)
    return 0


def _shorter(plans: Mapping[str, Plan], planned, config: Config) -> str:
    """What other settings would take."""
    found = [f"--recipes {name}: {plan.all_seconds:.0f} s" for name, plan in plans.items()]
    for flag in ("groups", "rounds"):
        now = config.groups if flag == "groups" else config.rounds or 3
        for value in range(now - 1, 0, -1):
            other = replace(config, **{flag: value})
            taken = sum(planned(name, other).all_seconds for name in plans)
            found.append(f"--{flag} {value}: {taken:.0f} s")
    return "; ".join(found)


def _write(config: Config, figures: Mapping[str, Any]) -> None:
    write_aside(config.output, json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
