"""Train the autoencoder of the nano model on pictures of the shapes world.

    python -m sft.vae --output-dir runs/vae --seconds 45                 # one GPU; 43 dB is good
    python -m sft.vae --output-dir runs/vae-try --max-steps 20 --images 64 --batch-size 4 --size 32

Loss: L1 + 4 MSE + 3e-4 KL, all means, pixels in [-1, 1]. After training one shift and one scale,
over all latents of the training pictures, are put into the config, so that scaled latents have mean
0 and variance 1.

Writes, each whole or not at all: ae.safetensors (bf16, the moving average), vae_config.json (last:
the folder is finished then), report.json, config.yaml, curve.png, reconstructions.png; and
metrics.jsonl as it goes. A run that is ended by SIGTERM, or is killed, is continued by the same
command from state.safetensors.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save as to_bytes
from torch import Tensor

from sft.vae_pictures import (
    color_fidelity,
    comparison_sheet,
    is_hard,
    psnr,
    rendered,
    scene_by_lot,
)
from umm_reflect.autoencoder import AutoEncoder
from umm_reflect.checkpoint import VAE_WEIGHTS
from umm_reflect.config import NANO, VAEConfig
from umm_reflect.device import DeviceName, resolve_device, resolve_dtype
from umm_reflect.errors import CheckpointError
from umm_reflect.files import write_aside
from umm_reflect.settings import parse, save, to_yaml
from umm_reflect.training.metrics import MetricsLog, plot_curves, progress
from umm_reflect.training.optim import Optimizer, lr_scale
from umm_reflect.training.signals import noticed_signals
from umm_reflect.training.state import STATE, load_state, save_state

PROG = "python -m sft.vae"
CONFIG_FILE = "vae_config.json"
LOG_EVERY = 20  # steps; the device is waited for at these
SIDE_STREAM_RUNS = 3  # before a graph is captured
WATCHED = 64  # held-out pictures that are looked at during training
LOSS_NAMES = ("loss", "l1", "mse", "kl")
CURVES = {
    "loss": ["loss"],
    "L1 (pixels in [-1, 1])": ["l1"],
    "KL per latent number (nats)": ["kl"],
    "held-out PSNR (dB)": ["psnr"],
    "gradient norm": ["grad_norm"],
}


@dataclass(frozen=True)
class Config:
    """Train the nano model's autoencoder on rendered scenes of the shapes world."""

    output_dir: Path
    """Folder for weights, config, log and pictures."""
    seconds: float | None = 45.0
    """Training time, rendering apart; None: only max-steps counts."""
    max_steps: int | None = None
    """Stop after so many steps, if that comes first."""
    batch_size: int = 64
    images: int = 20_000
    """Distinct training pictures; half of them of the harder split."""
    held_out: int = 512
    """Pictures of held-out scenes to measure on."""
    size: int = NANO.vae.resolution
    """Side of the pictures in pixels."""
    channels: int = NANO.vae.ch
    """Width of the finest level; the others are multiples of it."""
    optimizer: Literal["adamw", "muon"] = "muon"
    """muon: for all convolutions but the first and last ones; adamw: for everything."""
    adamw_lr: float = 2e-3
    muon_lr: float = 0.01
    warmup: int = 100
    """Steps of the linear warm-up."""
    decay_fraction: float = 0.7
    """Part of the run, at its end, over which the learning rate falls as a cosine."""
    ema_decay: float = 0.998
    mse_weight: float = 4.0
    kl_weight: float = 3e-4
    seed: int = 0
    device: DeviceName = "auto"
    channels_last: bool = True
    workers: int | None = None
    """Processes that render; default: one a core."""
    eval_every: int = 250
    """Steps between two looks at held-out pictures."""
    save_every: float = 30.0
    """Seconds between two saves to resume from."""
    force: bool = False
    """Train anew in a folder that holds a finished or an unfinished run."""

    def __post_init__(self) -> None:
        if self.seconds is None and self.max_steps is None:
            raise ValueError("give seconds or max-steps: without both the training has no end")
        for name in ("seconds", "max_steps", "batch_size", "images", "held_out", "eval_every"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name.replace('_', '-')} must be positive, got {value}")
        if self.size % NANO.vae.downsample or self.size < 2 * NANO.vae.downsample:
            raise ValueError(
                f"size {self.size} must be a multiple of {NANO.vae.downsample}, from "
                f"{2 * NANO.vae.downsample} on"
            )
        if self.channels % NANO.vae.num_groups or self.channels <= 0:
            raise ValueError(
                f"channels {self.channels} must be a multiple of {NANO.vae.num_groups} (groups of "
                "its norms)"
            )


# --- one step ------------------------------------------------------------------------------------


def to_pixels(pictures: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, 3, H, W] uint8 -> [-1, 1]."""
    return (pictures.float() / 127.5 - 1).to(dtype)


def to_pictures(pixels: Tensor) -> Tensor:
    """About [-1, 1] -> uint8, rounded."""
    return ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def losses(vae: AutoEncoder, pixels: Tensor, noise: Tensor, config: Config) -> Tensor:
    """[4] fp32: the loss and its parts (L1, MSE, KL), each a mean.

    pixels: [B, 3, H, W] fp32; noise: standard normal, [B, z, h, w], for the sample of the
    posterior.
    """
    mean, logvar = vae.moments(pixels)
    logvar = logvar.clamp(-30, 20)
    copies = vae.decode(mean + torch.exp(0.5 * logvar) * noise)
    l1, mse = F.l1_loss(copies, pixels), F.mse_loss(copies, pixels)
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return torch.stack([l1 + config.mse_weight * mse + config.kl_weight * kl, l1, mse, kl])


def is_inner_convolution(name: str, parameter: Tensor) -> bool:
    ends = ("coder.conv_in.weight", "coder.conv_out.weight")
    return parameter.ndim == 4 and not name.endswith(ends)


class Trainer:
    """Model, optimizer and training pictures on the device, and the step, which is one CUDA graph
    on a GPU.

    pictures: [N, 3, H, W] uint8. `values` holds the parts of the last step's loss, [4] on the
    device.
    """

    def __init__(self, config: Config, pictures: Tensor, device: torch.device):
        self.config = config
        self.device = device
        torch.manual_seed(config.seed)
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        self.vae = AutoEncoder(replace(NANO.vae, resolution=config.size, ch=config.channels))
        self.vae.to(device=device, dtype=resolve_dtype("auto", device), memory_format=layout)
        self.optimizer = Optimizer(
            self.vae.named_parameters(),
            muon_lr=config.muon_lr,
            adamw_lr=config.adamw_lr,
            ema_decay=config.ema_decay,
            matrices=lambda name, p: config.optimizer == "muon" and is_inner_convolution(name, p),
        )
        self.pictures = pictures.to(device).contiguous(memory_format=layout)
        side = config.size // NANO.vae.downsample
        self._index = torch.zeros(config.batch_size, dtype=torch.long, device=device)
        self._noise = torch.zeros(config.batch_size, NANO.vae.z_channels, side, side, device=device)
        self._scale = torch.zeros((), device=device)
        self._random = torch.Generator(device)
        self.values = torch.zeros(len(LOSS_NAMES), device=device)
        self._graph = self._capture() if device.type == "cuda" else None

    def step(self, number: int, scale: float) -> None:
        """Step `number`; batch and noise are functions of the seed and the number."""
        self._random.manual_seed(1_000_003 * self.config.seed + number)
        self._index.random_(len(self.pictures), generator=self._random)
        self._noise.normal_(generator=self._random)
        self._scale.fill_(scale)
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def report(self) -> dict[str, float]:
        """The last step's losses, gradient norm and how many steps were skipped so far."""
        values = dict(zip(LOSS_NAMES, self.values.tolist(), strict=True))
        grad_norm, skipped = self.optimizer.grad_norm.item(), self.optimizer.skipped.item()
        return {**values, "grad_norm": grad_norm, "skipped": skipped}

    def _run(self) -> None:
        self.optimizer.zero_grad()
        parts = losses(self.vae, to_pixels(self.pictures[self._index]), self._noise, self.config)
        parts[0].backward()
        self.optimizer.step(self._scale)
        self.values.copy_(parts.detach())

    def _capture(self) -> torch.cuda.CUDAGraph:
        torch.backends.cudnn.benchmark = True
        before = self.optimizer.state_dict()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(SIDE_STREAM_RUNS):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        self.optimizer.load_state_dict(before)
        return graph


@torch.no_grad()
def reconstruct(vae: AutoEncoder, pictures: Tensor, batch_size: int = 64) -> np.ndarray:
    """Pictures [N, 3, H, W] uint8 through posterior mean and decoder: [N, H, W, 3] uint8."""
    device = next(vae.parameters()).device
    copies = [
        to_pictures(vae.decode(vae.encode(to_pixels(batch.to(device))))).cpu()
        for batch in pictures.split(batch_size)
    ]
    return channels_last(torch.cat(copies))


def channels_last(pictures: Tensor) -> np.ndarray:
    """[N, 3, H, W] -> [N, H, W, 3]."""
    return pictures.permute(0, 2, 3, 1).numpy()


@torch.no_grad()
def latent_moments(vae: AutoEncoder, pictures: Tensor, batch_size: int = 64) -> tuple[float, float]:
    """Mean and standard deviation over all numbers of all latents (posterior means, not scaled)."""
    device = next(vae.parameters()).device
    count, total, squares = 0, 0.0, 0.0
    for batch in pictures.split(batch_size):
        mean = vae.moments(to_pixels(batch.to(device)))[0].double()
        count += mean.numel()
        total += mean.sum().item()
        squares += mean.square().sum().item()
    return total / count, (squares / count - (total / count) ** 2) ** 0.5


# --- the run -------------------------------------------------------------------------------------


def projected_total(config: Config, step: int, elapsed: float) -> float:
    """Steps that the whole run will have, by what is known at `step` after `elapsed` seconds of
    training."""
    totals = []
    if config.max_steps is not None:
        totals.append(float(config.max_steps))
    if config.seconds is not None:
        pace = step / elapsed if step and elapsed > 0 else float(config.warmup + 1)
        totals.append(max(step + 1.0, pace * config.seconds))
    return min(totals)


def is_over(config: Config, step: int, elapsed: float) -> bool:
    by_time = config.seconds is not None and elapsed >= config.seconds
    return by_time or (config.max_steps is not None and step >= config.max_steps)


def train(trainer: Trainer, held_out: Tensor, stopped: list[int]) -> bool:
    """Run the steps that are left; False if a signal in `stopped` ended it early (the state is
    saved then)."""
    config = trainer.config
    out, step, elapsed = config.output_dir, 0, 0.0
    if (out / STATE).exists():
        step, elapsed = load_state(out, trainer.optimizer, identity(config))
        print(f"continuing after step {step} of {out}", file=sys.stderr)
    start = time.monotonic() - elapsed
    saved = time.monotonic()
    total = projected_total(config, step, elapsed)
    unit = "steps" if config.seconds is None else "seconds"
    with (
        MetricsLog(config.output_dir, from_step=step) as log,
        progress(config.seconds or config.max_steps or 0, f"autoencoder, {unit}") as bar,
    ):
        while not is_over(config, step, elapsed):
            scale = lr_scale(step, total, config.warmup, config.decay_fraction)
            trainer.step(step, scale)
            step += 1
            look = step % config.eval_every == 0 or is_over(config, step, time.monotonic() - start)
            if step % LOG_EVERY and not look and not stopped:
                continue
            values = trainer.report()  # waits for the device, so that the clock is right
            elapsed = time.monotonic() - start
            total = projected_total(config, step, elapsed)
            if look:
                values["psnr"] = float(
                    psnr(channels_last(held_out), reconstruct(trainer.vae, held_out)).mean()
                )
            log.log(step - 1, **values, lr_scale=scale)
            bar.advance((step if unit == "steps" else elapsed) - bar.done, loss=values["loss"])
            if is_over(config, step, elapsed):
                break
            if stopped or time.monotonic() - saved > config.save_every:
                save_state(out, trainer.optimizer, step, elapsed, identity(config))
                saved = time.monotonic()
            if stopped:
                return False
    return True


def identity(config: Config) -> str:
    """The settings that a resumed run must share."""
    free = ("output_dir", "workers", "force", "save_every", "device")
    lines = to_yaml(config).splitlines()
    return "\n".join(line for line in lines if line.split(":")[0] not in free)


def finish(trainer: Trainer, held_out: Tensor) -> dict:
    """Write weights, config, report and pictures; returns the report."""
    config, folder = trainer.config, trainer.config.output_dir
    vae = AutoEncoder(trainer.vae.config)
    vae.load_state_dict(trainer.optimizer.ema_state())
    vae.to(trainer.device, torch.bfloat16)  # as it is shipped
    weights = {name: t.cpu().contiguous() for name, t in vae.state_dict().items()}
    vae.to(next(trainer.vae.parameters()).dtype)
    mean, deviation = latent_moments(vae, trainer.pictures)
    vae.config = replace(
        vae.config, shift_factor=round(mean, 6), scale_factor=round(1 / deviation, 6)
    )
    copies = reconstruct(vae, held_out)
    originals = channels_last(held_out)
    decibels = psnr(originals, copies)
    hard = np.array([is_hard(index) for index in range(len(copies))])
    scenes = [scene_by_lot(i, seed=config.seed, split="test") for i in range(len(copies))]
    right, levels = color_fidelity(scenes, copies)
    report = {
        "parameters": sum(p.numel() for p in vae.parameters()),
        "steps": int(trainer.optimizer.step_count),
        "skipped_steps": int(trainer.optimizer.skipped),
        "held_out_pictures": len(copies),
        "psnr": float(decibels.mean()),
        "psnr_plain": float(decibels[~hard].mean()),
        "psnr_hard": float(decibels[hard].mean()) if hard.any() else None,
        "psnr_worst": float(decibels.min()),
        "flat_area_pixels_of_the_right_color": right,
        "flat_area_error_in_levels": levels,
        "shift_factor": vae.config.shift_factor,
        "scale_factor": vae.config.scale_factor,
    }
    write_aside(folder / VAE_WEIGHTS, to_bytes(weights))
    picture = io.BytesIO()
    comparison_sheet(originals, copies).save(picture, "PNG")
    write_aside(folder / "reconstructions.png", picture.getvalue())
    plot_curves(folder / "metrics.jsonl", folder / "curve.png", CURVES, title="nano autoencoder")
    write_aside(folder / "report.json", json.dumps(report, indent=2) + "\n")
    write_aside(folder / CONFIG_FILE, json.dumps(asdict(vae.config), indent=2) + "\n")
    (folder / STATE).unlink(missing_ok=True)
    return report


def read_vae_config(folder: str | Path) -> VAEConfig:
    """The config that a finished run wrote, with its shift and scale. Errors: CheckpointError."""
    path = Path(folder) / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error})", f"Train the autoencoder first: {PROG}"
        ) from error
    return VAEConfig(**{**content, "ch_mult": tuple(content["ch_mult"])})


def run(config: Config) -> int:
    """The whole program after its settings are known; returns the exit code."""
    folder = config.output_dir
    if config.force:
        for name in (CONFIG_FILE, STATE):
            (folder / name).unlink(missing_ok=True)
    if (folder / CONFIG_FILE).exists():
        print(f"{folder} holds a finished autoencoder; --force trains anew")
        return 0
    device = resolve_device(config.device)
    folder.mkdir(parents=True, exist_ok=True)
    save(config, folder / "config.yaml")
    start = time.monotonic()
    workers = config.workers or os.cpu_count() or 1
    pictures, held_out = (
        torch.from_numpy(
            rendered(count, seed=config.seed, split=split, size=config.size, workers=workers)
        ).permute(0, 3, 1, 2)
        for count, split in ((config.images, "train"), (config.held_out, "test"))
    )
    seconds = time.monotonic() - start
    print(
        f"rendered {config.images + config.held_out} pictures in {seconds:.1f} s", file=sys.stderr
    )
    trainer = Trainer(config, pictures, device)
    with noticed_signals() as stopped:
        if not train(trainer, held_out[:WATCHED], stopped):
            print(f"stopped; the same command continues {folder}", file=sys.stderr)
            return 128 + stopped[0]
    report = finish(trainer, held_out)
    print(
        f"{report['steps']} steps, held-out PSNR {report['psnr']:.2f} dB (plain "
        f"{report['psnr_plain']:.2f}, worst picture {report['psnr_worst']:.2f}), "
        f"{report['parameters'] / 1e6:.2f} M parameters: {folder}"
    )
    return 0


def main(argv: list[str]) -> int:
    return run(parse(Config, argv, PROG))


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    raise SystemExit(run_program(main, sys.argv[1:]))
