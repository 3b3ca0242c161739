"""Train the nano model on the shapes world: joint pre-training, then reflection fine-tuning, the
same program.

    python -m sft.pretrain --output-dir out/pretrain --tokenizer out/tokenizer --vae out/vae
    python -m sft.pretrain --init out/pretrain/checkpoint --output-dir out/reflect ...

One process; the losses, layout and packing are those of every other model. A step is one CUDA
graph on a GPU: rows by lot, forward and backward of `draw` and `look` rows, one update of all
weights. Data is drawn on all cores first (and kept), then lives on the device. Writes
metrics.jsonl, curve.png, samples.png and a checkpoint folder of averaged weights; `--resume` goes
on from the last state.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sft.shapes_data import SIZE, VIT_SIZE, RowStore, ShardPlan, load_store, make_shards
from sft.vae import read_vae_config
from umm_reflect.checkpoint import (
    attach_tokens,
    attach_vae,
    load_model,
    load_vae,
    place_tables,
    save,
)
from umm_reflect.config import NANO
from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.flow import DrawSettings, flow_matching_errors, shift_times
from umm_reflect.images import mended_transforms
from umm_reflect.model import Bagel, compile_operations
from umm_reflect.packing import PackedBatch, training_forward
from umm_reflect.profile import ReflectionProfile, SaySettings, save_profile
from umm_reflect.tokens import Tokens
from umm_reflect.training.signals import noticed_signals
from umm_reflect.training.state import load_state, save_state

SYSTEM_PROMPT = "You draw shapes, look at the picture and correct it until it is right."
CURVES = {
    "flow matching, first images": ["draw_flow"],
    "flow matching, edits": ["edit_flow"],
    "cross-entropy of turns": ["ce"],
    "right tokens": ["token_accuracy", "decision_accuracy"],
    "steps a second": ["steps_per_second"],
    "gradient norm": ["grad_norm"],
}
METRICS = ("draw_flow", "edit_flow", "ce", "token_accuracy", "decision_accuracy")


@dataclass(frozen=True)
class Config:
    """init: checkpoint folder to start from. seconds, max_steps: whichever comes first.

    draw_rows, look_rows: rows of each kind in a step; own_rows, kept_rows: further ones made of the
    images in the folders `collected` (of eval.collect): looks, and right ones to draw again.
    *_weight: of the losses (the first picture's has weight 1). draw_shards and look_shards of 4,000
    pictures and 1,000 trajectories are drawn, of seeds from first_shard on; the last look shard is
    held out.
    """

    output_dir: str
    tokenizer: str
    vae: str
    data: str = "outputs/nano/data"
    collected: tuple[str, ...] = ()
    init: str | None = None
    resume: bool = False
    seconds: float = 420.0
    max_steps: int = 100_000
    seed: int = 0
    device: str = "auto"
    draw_rows: int = 160
    look_rows: int = 32
    own_rows: int = 0
    kept_rows: int = 0
    edit_weight: float = 0.7
    text_weight: float = 0.5
    muon_lr: float = 0.02
    adamw_lr: float = 2e-3
    warmup: int = 200
    decay: float = 0.35
    ema: float = 0.998
    compile: bool = False
    log_every: int = 100
    save_every: float = 150.0
    timestep_shift: float = 2.0
    first_shard: int = 0
    draw_shards: int = 45
    look_shards: int = 70
    shard_pictures: int = 4000
    shard_trajectories: int = 1000
    workers: int = 0

    def __post_init__(self) -> None:
        if self.look_shards < 2:
            raise ValueError(f"look_shards is {self.look_shards}; give at least 2, one is held out")
        if (self.own_rows + self.kept_rows > 0) != bool(self.collected):
            raise ValueError(
                "own_rows or kept_rows and collected (folders of eval.collect) go together"
            )
        if not 0 <= self.decay <= 1:
            raise ValueError(
                f"decay is {self.decay}; give the share of the run that decays, 0 to 1"
            )


def plans(config: Config, kind: str) -> list[ShardPlan]:
    """The shards of a kind of rows, in the order in which they are wanted."""
    common = (config.tokenizer, SYSTEM_PROMPT, config.data)
    if kind in ("draw", "look"):
        count, size = config.look_shards, config.shard_trajectories
        if kind == "draw":
            count, size = config.draw_shards, config.shard_pictures
        seeds = range(config.first_shard, config.first_shard + count)
        return [ShardPlan(kind, seed, size, *common) for seed in seeds]
    found = []
    for folder in config.collected:
        lines = (Path(folder) / "records.jsonl").read_text(encoding="utf-8").count("\n")
        size = config.shard_trajectories
        found += [ShardPlan(kind, n, size, *common, folder) for n in range(-(-lines // size))]
    return found


def new_model(seed: int, device: torch.device, dtype: torch.dtype) -> Bagel:
    """A nano model at the start: linear maps of variance 1 / width, outputs of each sub-block
    zero.
    """
    torch.manual_seed(seed)
    bagel = Bagel(NANO)
    for name, p in bagel.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "llm2vae.weight")) or (
            "o_proj_moe_gen" in name
        ):
            torch.nn.init.zeros_(p)
        elif p.dim() == 2:
            torch.nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(p)
    bagel.to(device, dtype)
    place_tables(bagel, device)
    return bagel


def load_trained_vae(folder: Path, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """The autoencoder that `sft.vae` wrote, with its own latent scale and shift."""
    config = replace(NANO, vae=read_vae_config(folder))
    return load_vae(folder, config, device=device, dtype=dtype)


def nano_profile() -> ReflectionProfile:
    """How the nano checkpoints are run: text guidance 2 above t = .3, 24 steps, short turns."""
    settings = DrawSettings(
        points=25, timestep_shift=2.0, text_scale=2.0, image_scale=1.0, interval=(0.3, 1.0)
    )
    return ReflectionProfile(
        layout="rl",
        edit_view="full",
        system_prompt=SYSTEM_PROMPT,
        transforms=mended_transforms(vae=(SIZE, SIZE, 16), vit=(VIT_SIZE, VIT_SIZE, 14)),
        size=(SIZE, SIZE),
        first=settings,
        edit=settings,
        say=SaySettings(temperature=0.3, max_tokens=160, max_rounds=3),
    )


class Losses:
    """The losses of one step and their running means."""

    def __init__(self, config: Config, device: torch.device):
        self.config = config
        self.sums = torch.zeros(len(METRICS), device=device)

    def __call__(self, bagel: Bagel, draw: PackedBatch | None, look: PackedBatch) -> Tensor:
        config, total, seen = self.config, 0.0, {}
        if draw is not None:
            seen["draw_flow"], _ = self._forward(bagel, draw)
            total = total + seen["draw_flow"]
        seen["edit_flow"], out = self._forward(bagel, look)
        weight = look.weight_S
        seen["ce"] = (out.ce_S * weight).sum() / weight.sum().clamp(min=1)
        total = total + config.edit_weight * seen["edit_flow"] + config.text_weight * seen["ce"]
        right = out.right_S.float()
        seen["token_accuracy"] = (right * (weight > 0)).sum() / (weight > 0).sum().clamp(min=1)
        seen["decision_accuracy"] = (right * (weight > 1)).sum() / (weight > 1).sum().clamp(min=1)
        zero = total.new_zeros(())
        self.sums += torch.stack([seen.get(name, zero).detach().float() for name in METRICS])
        return total

    def _forward(self, bagel: Bagel, batch: PackedBatch):
        device = batch.ids_BU.device
        raw = torch.randn(batch.num_images, device=device)
        times = shift_times(torch.sigmoid(raw), self.config.timestep_shift)
        noise = torch.randn(batch.latent_BGC.shape, device=device)
        out = training_forward(bagel, batch, times, noise)
        errors = flow_matching_errors(out.velocity_BGC, noise, batch.latent_BGC)
        mask = batch.noised_BG
        return (errors * mask).sum() / mask.sum().clamp(min=1), out

    def take(self, steps: int) -> dict[str, float]:
        """Means since the last call (one transfer)."""
        values = (self.sums / steps).tolist()
        self.sums.zero_()
        return dict(zip(METRICS, values, strict=True))


def make_step(bagel: Bagel, optimizer, losses: Losses, stores, config: Config, device):
    """A function that makes one update with the learning rates scaled by a device tensor; a CUDA
    graph on a GPU.
    """
    draw_store, look_store = stores
    scale = torch.zeros((), device=device)

    def lot(store: RowStore, rows: int, own_rows: int) -> PackedBatch:
        others = len(store) - store.own
        picked = torch.randint(0, others, (rows,), device=device)
        if own_rows:
            own = torch.randint(others, len(store), (own_rows,), device=device)
            picked = torch.cat([picked, own])
        return store.batch(picked)

    def step() -> None:
        draw = lot(draw_store, config.draw_rows, config.kept_rows)
        look = lot(look_store, config.look_rows, config.own_rows)
        loss = losses(bagel, draw, look)
        loss.backward()
        optimizer.step(scale)
        optimizer.zero_grad()

    if device.type != "cuda":
        return step, scale
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay, scale


@torch.no_grad()
def held_out(
    bagel: Bagel, store: RowStore, config: Config, device: torch.device
) -> dict[str, float]:
    """Means of the metrics over the held-out rows, in a fixed random order (bins are sorted)."""
    losses, batches = Losses(config, device), 0
    torch.manual_seed(1)
    order = torch.randperm(len(store)).to(device)
    for rows in order.split(32):
        losses(bagel, None, store.batch(rows))
        batches += 1
    return {f"held_out_{k}": v for k, v in losses.take(batches).items() if k != "draw_flow"}


def train(config: Config) -> Path:
    from umm_reflect.device import resolve_device, resolve_dtype
    from umm_reflect.settings import to_yaml
    from umm_reflect.training.metrics import MetricsLog, plot_curves
    from umm_reflect.training.optim import Optimizer

    out = Path(config.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    write_aside(out / "config.yaml", to_yaml(config))
    log = MetricsLog(out)
    began = time.time()
    workers = config.workers or max(1, (os.cpu_count() or 2) - 1)
    pool = ProcessPoolExecutor(workers)  # before the GPU is touched: the workers are forks
    draw_paths = make_shards(plans(config, "draw"), pool)
    *look_plans, test_plan = plans(config, "look")
    look_paths = make_shards(look_plans, pool)
    own_paths = make_shards(plans(config, "own") if config.own_rows else [], pool)
    kept_paths = make_shards(plans(config, "kept") if config.kept_rows else [], pool)
    test_paths = make_shards([test_plan], pool)

    device = resolve_device(config.device)
    dtype = resolve_dtype("auto", device)
    vae = load_trained_vae(Path(config.vae), device, dtype)
    if config.init:
        bagel = load_model(Path(config.init), device=device, dtype=dtype)
    else:
        bagel = new_model(config.seed, device, dtype)
    attach_vae(bagel, vae)
    attach_tokens(bagel, Tokens.from_folder(config.tokenizer), Path(config.tokenizer))
    for p in bagel.parameters():
        p.requires_grad_(True)
    stores = (
        load_store(itertools.chain(draw_paths, kept_paths), "draw", vae, device),
        load_store(itertools.chain(look_paths, own_paths), "look", vae, device),
    )
    test = load_store(test_paths, "look", vae, device)
    pool.shutdown()
    print(f"data drawn on {workers} cores and encoded in {time.time() - began:.0f} s", flush=True)

    if config.compile:
        compile_operations()
    optimizer = Optimizer(
        list(bagel.named_parameters()),
        muon_lr=config.muon_lr,
        adamw_lr=config.adamw_lr,
        ema_decay=config.ema,
    )
    losses = Losses(config, device)
    torch.manual_seed(config.seed)
    run, scale = make_step(bagel, optimizer, losses, stores, config, device)
    steps = run_steps(config, run, scale, losses, optimizer, log, device)

    average = optimizer.ema_state()
    for name, p in bagel.named_parameters():
        p.data.copy_(average[name])
    result = held_out(bagel, test, config, device)
    log.log(steps, **result)
    print("  ".join(f"{name} {value:.4f}" for name, value in result.items()))
    folder = save(bagel, out / "checkpoint", vae_dtype=torch.bfloat16)
    save_profile(nano_profile(), folder)
    sample_sheet(bagel, out / "samples.png")
    plot_curves(out / "metrics.jsonl", out / "curve.png", CURVES)
    return folder


def run_steps(config, run, scale, losses, optimizer, log, device) -> int:
    """Steps until the time or the count is used up; the schedule follows whichever share is
    further.

    The state is saved every `save_every` seconds, at the end and on SIGTERM.
    """
    from umm_reflect.training.optim import lr_scale

    out = Path(config.output_dir)
    step, used = load_state(out, optimizer) if config.resume else (0, 0.0)
    began = last = saved = time.time()
    logged = skipped = 0
    elapsed = factor = 0.0

    def note() -> None:
        """The means since the last time."""
        nonlocal last, logged, skipped
        means = losses.take(logged)
        before, skipped = skipped, int(optimizer.skipped)
        rate, last = logged / (time.time() - last), time.time()
        norm = float(optimizer.grad_norm)
        log.log(
            step,
            lr_scale=factor,
            steps_per_second=rate,
            skipped=skipped,
            grad_norm=norm,
            **means,
        )
        if skipped - before > logged / 2:
            raise FloatingPointError(f"gradients are not finite at step {step}: lower the rates")
        if step % (10 * config.log_every) == 0:
            shown = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
            print(f"step {step}  {elapsed:.0f} s  {rate:.1f}/s  {shown}", flush=True)
        logged = 0

    with noticed_signals() as noticed:
        while not noticed:
            if step % 20 == 0 and device.type == "cuda":
                torch.cuda.synchronize()
            elapsed = used + time.time() - began
            share = max(elapsed / config.seconds, step / config.max_steps)
            if share >= 1:
                break
            # the schedule runs over 10,000 parts of the run, so that time can be the budget
            factor = lr_scale(share * 10_000, 10_000, 0, config.decay)
            scale.fill_(factor * min(1.0, (step + 1) / config.warmup))
            run()
            step += 1
            logged += 1
            if logged == config.log_every:
                note()
            if time.time() - saved > config.save_every:
                save_state(out, optimizer, step, elapsed)
                saved = time.time()
    if logged:
        note()
    save_state(out, optimizer, step, used + time.time() - began)
    if noticed:
        raise UserError(f"stopped by signal {noticed[0]} at step {step}", "Go on with --resume")
    return step


def sample_sheet(bagel: Bagel, path: Path, count: int = 24) -> None:
    """Pictures of held-out-free training prompts, to be looked at."""
    from PIL import Image, ImageDraw

    from umm_reflect.context import Context
    from umm_reflect.generate import DrawRequest, Engine, draw
    from umm_reflect.rng import stream
    from umm_reflect.shapes.sampler import sample_row

    rng = random.Random(0)
    prompts = [sample_row(rng)["prompt"] for _ in range(count)]
    requests = [
        DrawRequest(
            Context.of(bagel.tokens.segment(prompt)),
            Context(),
            None,
            (128, 128),
            stream(0, i, 0, "draw"),
        )
        for i, prompt in enumerate(prompts)
    ]
    drawn = draw(Engine(bagel.eval()), requests, nano_profile().first)
    sheet = Image.new("RGB", (6 * 200, (count + 5) // 6 * 230), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (prompt, picture) in enumerate(zip(prompts, drawn, strict=True)):
        x, y = i % 6 * 200, i // 6 * 230
        sheet.paste(picture.image.resize((192, 192)), (x + 4, y + 4))
        pen.text((x + 4, y + 200), prompt[:34], fill="black")
    sheet.save(path)


def main(argv: list[str] | None = None) -> int:
    from umm_reflect.settings import parse

    train(parse(Config, sys.argv[1:] if argv is None else argv, "python -m sft.pretrain"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
