"""How fast and how large a reflection run of the full-size model is, on random weights.

    python -m agent.full_size --folder runs/full-size --json full_size.json
    python -m agent.full_size --folder runs/tiny --shape tiny --size 64 --points 3 --device cpu

Writes a complete checkpoint folder of BAGEL-7B-MoT's shape (29 GB of random bf16 weights; needs no
download), loads it, runs one `reflect` with forced legal turns under the released profile (prompt
to picture, then look, say and edit each round), and prints the seconds of each part and the memory.
Random weights say nothing sensible, so the turns are forced; the pictures are noise. A folder that
is complete is used as it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agent.clocks import HostMemory, Part, Stopwatch
from agent.random_weights import write_random_checkpoint
from umm_reflect.config import BAGEL_7B_MOT, NANO
from umm_reflect.files import human_size, write_aside
from umm_reflect.settings import parse

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.utils.flop_counter import FlopCounterMode

    from agent.types import Trajectory
    from umm_reflect.draw import Denoiser
    from umm_reflect.generate import Engine
    from umm_reflect.model import Bagel
    from umm_reflect.profile import ReflectionProfile

SHAPES = {
    "bagel-7b-mot": BAGEL_7B_MOT,
    "tiny": replace(
        NANO,
        llm=replace(
            NANO.llm,
            hidden_size=64,
            num_layers=2,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=96,
        ),
        vit=replace(NANO.vit, hidden_size=48, num_layers=1, intermediate_size=64),
        vae=replace(NANO.vae, ch=8),
    ),
}
PROMPT = "two red circles and a blue square"
# As long as the released system prompt, which is fetched and never kept here.
SYSTEM_PROMPT_CHARACTERS = 2059
SYSTEM_SENTENCE = "Look at the picture, say what is right and what is wrong, and name one change. "
STEP_REPEATS = 5


@dataclass(frozen=True)
class Config:
    """Time one reflection run of a model with random weights, part by part."""

    folder: Path
    """Where the random checkpoint is written (29 GB), or was written before."""
    shape: Literal["bagel-7b-mot", "tiny"] = "bagel-7b-mot"
    """The model's sizes."""
    tokenizer: Path = Path("pretrained/bagel-nano-shapes")
    """The folder whose tokenizer files are copied; it may have fewer ids than the model rows."""
    rounds: int = 3
    """Edits that are drawn."""
    turn_tokens: int = 200
    """Tokens of each turn."""
    size: int = 512
    """Side of the pictures in pixels."""
    points: int = 50
    """Schedule points of each picture (one more than its denoising steps)."""
    cold: bool = False
    """Push the weights out of the page cache before loading, so that the disk is timed too."""
    device: str = "auto"
    """auto, cuda, cpu, mps or npu."""
    dtype: str = "auto"
    """auto, bfloat16, float16 or float32."""
    attn: str = "auto"
    """The attention kernel."""
    capture: bool = True
    """Say turns by captured CUDA graphs where that pays (umm_reflect/decode.py), not eagerly."""
    seed: int = 0
    """Of the weights and of the run."""
    json: Path | None = None
    """Also write the figures here."""

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("turn_tokens", 1), ("size", 16), ("points", 2)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is {getattr(self, name)}; give {least} or more")
        shape = SHAPES[self.shape]
        most = shape.latent_grid_side * shape.latent_stride
        if self.size % shape.latent_stride or self.size > most:
            raise ValueError(
                f"--size is {self.size}; give a multiple of {shape.latent_stride} up to {most}"
            )


# --- the run --------------------------------------------------------------------------------------


def run_profile(config: Config) -> ReflectionProfile:
    """The released profile, with a system prompt of the released length and the asked-for size."""
    from umm_reflect.images import released_transforms
    from umm_reflect.profile import SaySettings, released_profile

    shape = SHAPES[config.shape]
    drawable = shape.latent_grid_side * shape.latent_stride
    visible = shape.vit.grid_side * shape.vit.patch_size
    transforms = released_transforms(
        vae=(min(512, drawable), min(256, config.size), 8), vit=(min(490, visible), 112, 7)
    )
    text = SYSTEM_SENTENCE * (SYSTEM_PROMPT_CHARACTERS // len(SYSTEM_SENTENCE) + 1)
    profile = released_profile(text[:SYSTEM_PROMPT_CHARACTERS])
    return replace(
        profile,
        transforms=replace(transforms, truncate=False),
        size=(config.size, config.size),
        first=replace(profile.first, points=config.points),
        edit=replace(profile.edit, points=config.points),
        say=SaySettings(max_tokens=config.turn_tokens, max_rounds=config.rounds),
    )


def measure(config: Config) -> dict[str, Any]:
    """Write, load, run; returns the figures (seconds, bytes) as plain values."""
    import torch

    from umm_reflect.device import resolve_device

    device = resolve_device(config.device)
    watch = Stopwatch(device)
    with watch.part("write") as write:
        written = write_random_checkpoint(
            config.folder,
            SHAPES[config.shape],
            tokenizer=config.tokenizer,
            profile=run_profile(config),
            device=device,
            seed=config.seed,
        )
    if config.cold:
        drop_from_page_cache(config.folder / "ema.safetensors")
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with HostMemory() as host, watch.part("load") as load:
        bagel = load_bagel(config)
    weights = (config.folder / "ema.safetensors").stat().st_size
    loaded = torch.cuda.memory_allocated(device) if gpu else 0
    trajectory, engine = run_reflect(config, bagel, watch)
    peaks = gpu_peaks(device)
    return {
        "shape": config.shape,
        "device": torch.cuda.get_device_name(device) if gpu else str(device),
        "torch": torch.__version__,
        "dtype": str(bagel.dtype),
        "pictures": len(trajectory.images),
        "turn_tokens": [len(step.turn.sampled_ids) for step in trajectory.steps],
        "prompt_tokens": len(bagel.tokens.encode(run_profile(config).system_prompt)),
        "size": config.size,
        "points": config.points,
        "captured": gpu and bagel.capture is None,
        "weights_bytes": weights,
        "write_seconds": write.seconds if written else None,
        "load_seconds": load.seconds,
        "load_cold": config.cold,
        "host_peak_bytes": host.process_peak,
        "host_grown_bytes": host.grown,
        "host_anonymous_bytes": host.anonymous,
        "host_file_backed_bytes": host.file_backed,
        "host_grown_by_weights": host.grown / weights,
        "gpu_loaded_bytes": loaded,
        **peaks,
        "step": denoising_step(config, engine, trajectory, watch),
        "parts": [asdict(part) for part in watch.parts if part.name not in ("write", "load")],
    }


def load_bagel(config: Config) -> Bagel:
    from umm_reflect import Bagel

    bagel = Bagel.from_pretrained(
        config.folder, device=config.device, dtype=config.dtype, attn=config.attn
    )
    bagel.capture = None if config.capture else False
    return bagel


def drop_from_page_cache(path: Path) -> None:
    """Ask the system to forget the file's pages (Linux; nothing happens elsewhere)."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_reflect(config: Config, bagel: Bagel, watch: Stopwatch) -> tuple[Trajectory, Engine]:
    """One prompt through the loop with forced turns, as the released system runs it, timed."""
    from agent.loop import run_episodes
    from agent.policy import BagelPolicy, ForcedTurns
    from agent.types import RELEASE, StopReason

    policy = BagelPolicy(bagel, run_profile(config))
    forced = ForcedTurns(policy, config.turn_tokens)
    count = {"turn": 0, "picture": -1}

    def number(kind: str, text: str) -> str:
        count[kind] += 1
        return text.format(count[kind])

    watch.wrap(forced, "say", lambda: number("turn", "turn {}"))
    watch.wrap(forced, "draw", lambda: number("picture", "picture {}"))
    watch.wrap(policy.engine, "caches", lambda: "prefill")
    watch.wrap(bagel, "embed_patches", lambda: "ViT and connector")
    watch.wrap(bagel.vae, "encode_images", lambda: "VAE encode")
    watch.wrap(bagel.vae, "decode_latents", lambda: "VAE decode")
    budgets = {"max_rounds": config.rounds, "max_tokens": config.turn_tokens}
    with watch.part("reflect"):
        (trajectory,) = run_episodes(forced, [PROMPT], **budgets, options=RELEASE, seed=config.seed)
    assert trajectory.stop is StopReason.MAX_ROUNDS, trajectory.stop
    assert len(trajectory.images) == config.rounds + 1, len(trajectory.images)
    return trajectory, policy.engine


def gpu_peaks(device: torch.device) -> dict[str, int]:
    """Peak bytes on the GPU since the load began: of tensors, and reserved by the allocator."""
    import torch

    if device.type != "cuda":
        return {"gpu_peak_allocated_bytes": 0, "gpu_peak_reserved_bytes": 0}
    return {
        "gpu_peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "gpu_peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def denoising_step(
    config: Config, engine: Engine, trajectory: Trajectory, watch: Stopwatch
) -> dict[str, dict[str, float]]:
    """Seconds, counted FLOPs and TFLOP/s of one warm step of the last edit, guided and not."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from umm_reflect.draw import Denoiser, DrawRequest

    settings = run_profile(config).edit
    view = trajectory.steps[-1].transition.view
    size = trajectory.images[-1].size[::-1]
    noise = torch.Generator().manual_seed(config.seed)
    request = DrawRequest(
        view.conditional, view.text_uncond, view.image_uncond, size, generator=noise
    )
    figures = {}
    with torch.inference_mode():
        flow = Denoiser(engine, [request], settings)
        x = flow.noise()
        for name, t in (("guided", 1.0), ("unguided", settings.interval[0])):
            t = torch.tensor(t)
            flow.velocity(x, t)
            with watch.part(f"{STEP_REPEATS} {name} steps") as part:
                for _ in range(STEP_REPEATS):
                    flow.velocity(x, t)
            flops = _counted(FlopCounterMode(display=False), flow, x, t)
            seconds = part.seconds / STEP_REPEATS
            rows = len(flow.owner) if name == "guided" else 1
            figures[name] = {
                "branches": rows,
                "seconds": seconds,
                "tflop": flops / 1e12,
                "tflop_per_second": flops / seconds / 1e12,
            }
    return figures


def _counted(counter: FlopCounterMode, flow: Denoiser, x: list[Tensor], t: Tensor) -> int:
    """FLOPs of the matrix products of one step (two a multiply-add)."""
    plans = [rows.attend for rows in (flow.all_rows, flow.plain_rows)]
    backends = [plan.backend for plan in plans]
    for plan in plans:  # the counter does not know every fused kernel
        plan.backend = "math"
    with counter:
        flow.velocity(x, t)
    for plan, backend in zip(plans, backends, strict=True):
        plan.backend = backend
    return counter.get_total_flops()


# --- the report -----------------------------------------------------------------------------------


def table(figures: Mapping[str, Any]) -> list[str]:
    """The figures as lines of text."""
    parts, tokens = [Part(**part) for part in figures["parts"]], figures["turn_tokens"]
    rows = [
        ("write the weights", _seconds(figures["write_seconds"], "(were there)"), ""),
        (
            "load",
            _seconds(figures["load_seconds"]),
            f"{human_size(figures['weights_bytes'])} of weights"
            + (", not in the page cache" if figures["load_cold"] else ""),
        ),
    ]
    steps = figures["points"] - 1
    for part in (p for p in parts if p.inside == "reflect"):
        inner = [p for p in parts if p.inside == part.name or p.name == part.name]
        note = ""
        if part.name.startswith("turn"):
            said = tokens[int(part.name.split()[1]) - 1]
            note = f"{said} tokens in {part.own:.2f} s: {said / part.own:.1f} tokens/s"
        elif part.name.startswith("picture"):
            note = f"{steps} steps in {part.own:.2f} s: {1000 * part.own / steps:.1f} ms a step"
        prefill = sum(p.seconds for p in inner if p.name == "prefill")
        rows.append((part.name, _seconds(part.seconds), f"prefill {prefill:.2f} s, {note}"))
    rows += [(p.name, _seconds(p.seconds), "all of the run") for p in parts if p.name == "reflect"]
    for name in ("prefill", "VAE encode", "VAE decode", "ViT and connector"):
        each = [p.seconds for p in parts if p.name == name and p.inside]
        note = f"{len(each)} times: " + ", ".join(f"{1000 * s:.0f}" for s in each) + " ms"
        rows.append((name, _seconds(sum(each)), note))
    for name, step in figures["step"].items():
        note = f"{step['tflop']:.3g} TFLOP, {step['tflop_per_second']:.3g} TFLOP/s"
        rows.append(
            (f"one {name} step", _seconds(step["seconds"]), f"{step['branches']} branches, {note}")
        )
    lines = [
        f"{figures['shape']}, random weights, {figures['dtype']}, {figures['device']}, "
        f"torch {figures['torch']}",
        f"{figures['pictures']} pictures of {figures['size']}x{figures['size']}, {steps} steps "
        f"each; a system prompt of {figures['prompt_tokens']} tokens",
        "",
        *(f"{name:<20}{seconds:>12}  {note}".rstrip() for name, seconds, note in rows),
        "",
        f"host memory grew by {human_size(figures['host_grown_bytes'])} at its peak while loading "
        f"({figures['host_grown_by_weights']:.2f} x the weights; "
        f"{human_size(figures['host_anonymous_bytes'])} anonymous, "
        f"{human_size(figures['host_file_backed_bytes'])} pages of mapped files); the process had "
        f"{human_size(figures['host_peak_bytes'])} at most",
    ]
    if figures["gpu_peak_allocated_bytes"]:
        names = ("loaded", "peak_allocated", "peak_reserved")
        sizes = (
            f"{human_size(figures[f'gpu_{n}_bytes'])} {n.replace('_', ' ').removeprefix('peak ')}"
            for n in names
        )
        lines.append(f"GPU memory: {', '.join(sizes)} (the last two at their peak)")
    return lines


def _seconds(value: float | None, absent: str = "") -> str:
    return absent if value is None else f"{value:.3f} s"


def main(argv: Sequence[str]) -> int:
    """The program: prints the table, returns 0; errors rise (see `cli.run_program`)."""
    config = parse(Config, argv, "python -m agent.full_size")
    figures = measure(config)
    print("\n".join(table(figures)))
    if config.json is not None:
        write_aside(config.json, json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
