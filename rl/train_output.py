"""What an RL run tells and leaves: seconds by phase, MFU, curves, galleries, folders.

clock = Clock()
with clock("rollout"): ...
values = speed(scored, done, clock, config, learner, learns, processes)
save_model(learner, origin, config, step, best)     # RUN/checkpoints/step-..., RUN/checkpoint
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl.copies import Copies
from rl.judge import Bench
from rl.rollout import own_images
from rl.train_config import Config
from rl.types import Scored
from rl.work import rollout_work
from umm_reflect.files import write_aside
from umm_reflect.training import resume
from umm_reflect.training.flops import Learns, Work, flops, mfu, peak_flops
from umm_reflect.training.folders import CHECKPOINTS, Origin, link_newest, save_folder
from umm_reflect.training.learner import Learner
from umm_reflect.training.metrics import memory_used, plot_curves, read_metrics
from umm_reflect.training.processes import Processes
from umm_reflect.training.resume import STATES

if TYPE_CHECKING:
    from PIL import Image

    from agent.types import Trajectory
    from rl.update import Done

# Of each weights file so many pieces of so many bytes tell one model from another.
PIECES, PIECE = 16, 1 << 16
# The names that the collapse detector knows, and ours.
SIGNALS = {
    "entropy": "text/entropy",
    "format": "rollout/protocol_valid",
    "velocity_ratio": "flow/norm_ratio",
    "clip_fraction": "flow/clip_fraction",
    "kl": "text/kl",
    "flow_kl": "flow/kl",
    "flat": "zero_std_ratio",
    "grad_norm": "grad_norm",
    "reward": "reward_mean",
}
PANELS: dict[str, tuple[str, ...]] = {
    "reward": ("reward_mean",),
    "right": ("rollout/first", "rollout/final"),
    "repaired, damaged": ("rollout/repair", "rollout/damage", "rollout/wrong_done"),
    "held out: right": ("held_out/first", "held_out/final"),
    "held out: repaired, damaged": ("held_out/repair", "held_out/damage"),
    "held out: looks": ("held_out/look_right", "held_out/look_wrong"),
    "score": ("rollout/score", "held_out/score"),
    "edits": ("rollout/edits", "held_out/edits"),
    "legal": ("rollout/protocol_valid", "held_out/protocol_valid"),
    "groups without spread": ("zero_std_ratio",),
    "entropy of words": ("text/entropy",),
    "words: ratio's largest": ("text/ratio_max",),
    "images: ratio's largest": ("flow/ratio_max",),
    "learner from sampler": ("text/mismatch_max", "flow/mismatch_max"),
    "clipped": ("text/clip_fraction", "flow/clip_fraction"),
    "distance from the rollout": ("text/approx_kl", "flow/approx_kl"),
    "KL to the reference": ("text/kl", "flow/kl"),
    "gradient norm": ("grad_norm",),
    "tokens of a trajectory": ("rollout/tokens",),
    "images a GPU second": ("images_per_gpu_second",),
}


class Clock:
    """Seconds by phase; phases do not overlap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent


@contextmanager
def drawing_model(learner: Learner, copies: Copies) -> Iterator:
    """The whole weights that rollouts are drawn with: the trained ones, or the old ones where the
    objective has such (NFT)."""
    with copies.in_place("old") if "old" in copies else nullcontext(), learner.inference() as bagel:
        yield bagel


def own_bench(learner: Learner, origin: Origin, config: Config) -> Bench:
    """The weights under training as the judge of what they draw."""
    from eval.rewards.spectra import Settings
    from eval.rewards.spectra_self import SelfSpectra

    settings = Settings(backend="self", model=config.model)
    reward = SelfSpectra(learner.bagel, origin.profile.transforms, settings, origin.folder)
    return Bench(config.judge.settings, reward=reward)


def identity(folder: Path) -> str:
    """What tells the base weights in a folder from others, without reading all of them."""
    seen = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        seen.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for piece in range(PIECES):
                file.seek(size * piece // PIECES)
                seen.update(file.read(PIECE))
    return seen.hexdigest()


# --- numbers --------------------------------------------------------------------------------------


def speed(
    scored: Sequence[Scored],
    done: Done,
    clock: Clock,
    config: Config,
    learner: Learner,
    learns: Learns,
    processes: Processes,
) -> dict[str, float]:
    """Seconds by phase of rank 0, images a GPU second, tokens, MFU of rollout and update (where the
    device's peak is known), memory."""
    bagel, trajectories = learner.bagel, [one.trajectory for one in scored]
    drawn = {id(t): t for trajectory in trajectories for _, t in own_images(trajectory)}
    rolled = rollout_work(
        trajectories, config.rollout.first, config.rollout.edit, bagel.config, bagel.frame
    )
    done_by = {
        "rollout": flops(sum(rolled.values(), Work()), bagel.config, Learns()).forward,
        "update": flops(done.learned, bagel.config, learns).model
        + flops(done.compared, bagel.config, learns).forward,
    }
    mine = {"images": len(drawn), "tokens": done.learned.tokens, **done_by}
    parts = processes.gather(mine)
    total = {name: sum(part[name] for part in parts) for name in mine}
    values = {f"seconds/{phase}": spent for phase, spent in clock.seconds.items()}
    whole = sum(clock.seconds.values())
    values |= {
        "images": float(total["images"]),
        "images_per_gpu_second": total["images"] / whole / processes.world,
        "update_tokens_per_second": total["tokens"] / max(clock.seconds["update"], 1e-9),
    }
    device = processes.device
    known = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    for phase in done_by:
        seconds = clock.seconds[phase]
        share = mfu(total[phase], seconds, devices=processes.world, peak=known)
        values |= {} if share is None else {f"mfu/{phase}": share}
    return values | memory_used(device)


def signals(
    values: Mapping[str, float], pictures: Sequence[Mapping[str, float]]
) -> dict[str, float | None]:
    """What the collapse detector looks at. pictures: of each process."""
    found = {signal: values.get(name) for signal, name in SIGNALS.items()}
    if found["kl"] is None:
        found["kl"] = values.get("text/approx_kl")
    for name in dict.fromkeys(name for part in pictures for name in part):
        some = [part[name] for part in pictures if name in part]
        found[name] = sum(some) / len(some)
    return found


def shown(values: Mapping[str, float]) -> dict[str, float]:
    """What a progress line has room for."""
    names = ("reward_mean", "rollout/first", "rollout/final", "rollout/repair", "seconds/rollout")
    names += ("seconds/update",)
    return {name.rpartition("/")[2]: values[name] for name in names if name in values}


def brief(values: Mapping[str, float]) -> Iterator[str]:
    """Of the held-out numbers those that say how it goes."""
    for name in ("score", "first", "final", "repair", "damage", "protocol_valid"):
        if (value := values.get(f"held_out/{name}")) is not None:
            yield f"{name} {value:.3f}"


def draw_curves(metrics: Path, out: Path) -> None:
    """curve.png of what the run has logged so far."""
    names = dict.fromkeys(name for line in read_metrics(metrics) for name in line)
    panels = {title: list(keys) for title, keys in PANELS.items()}
    for title, prefix in (
        ("reward by term", "reward/"),
        ("score after k edits", "rollout/q/"),
        ("held out: right after k edits", "held_out/accuracy/"),
        ("seconds", "seconds/"),
        ("share of the peak", "mfu/"),
    ):
        panels[title] = [name for name in names if name.startswith(prefix)]
    plot_curves(metrics, out / "curve.png", panels)


# --- pictures -------------------------------------------------------------------------------------


def gallery(scored: Sequence[Scored], out: Path, step: int, most: int = 4) -> None:
    """pictures/rollouts-...png: of the first group the rollouts from best to worst, and why."""
    if not scored:
        return
    first = min(one.place.group for one in scored)
    group = sorted((one for one in scored if one.place.group == first), key=lambda one: -one.reward)
    places = sorted({round(i * (len(group) - 1) / max(1, most - 1)) for i in range(most)})
    drawn = []
    for place in places:
        one = group[place]
        terms = "  ".join(f"{name} {value:+.2f}" for name, value in one.terms.items())
        drawn.append((one.trajectory, f"reward {one.reward:.3f}: {terms}"))
    _write_sheet(drawn, out / "pictures" / f"rollouts-{step:07d}.png")


def stories(trajectories: Sequence[Trajectory], out: Path, step: int) -> None:
    """pictures/held-out-...png."""
    drawn = [(trajectory, "held out") for trajectory in trajectories]
    _write_sheet(drawn, out / "pictures" / f"held-out-{step:07d}.png")


def _write_sheet(drawn: Sequence[tuple[Trajectory, str]], path: Path) -> None:
    """Stories one under another."""
    from PIL import Image

    from agent.story import draw_story

    sheets: list[Image.Image] = [draw_story(trajectory, footer) for trajectory, footer in drawn]
    if not sheets:
        return
    size = max(s.width for s in sheets), sum(s.height for s in sheets)
    sheet, top = Image.new("RGB", size, "white"), 0
    for story in sheets:
        sheet.paste(story, (0, top))
        top += story.height
    data = io.BytesIO()
    sheet.save(data, "PNG")
    write_aside(path, data.getvalue())


# --- folders --------------------------------------------------------------------------------------


def bests(out: Path, now: str | None) -> set[str]:
    """The best checkpoint now, and those of the states that a run may go on from: a collapse goes
    back to one of them."""
    known = [resume.read_extra(state)["watch"]["best"] for state in resume.states(out / STATES)]
    return {best[0] for best in known if best} | ({now} if now else set())


def save_model(
    learner: Learner, origin: Origin, config: Config, step: int, best: str | None
) -> None:
    """checkpoints/step-...; the best ones stay. Where weights are averaged, the averages."""
    save_folder(
        learner,
        origin,
        config.output_dir,
        step,
        lora=config.lora_run,
        averaged=config.optimizer.ema_decay is not None,
        keep=config.keep,
        also_keep=bests(config.output_dir, best),
    )


def link_best(processes: Processes, out: Path, name: str) -> None:
    """RUN/best points at the checkpoint of that name."""
    if processes.main:
        link_newest(out, out / CHECKPOINTS / name, "best")
