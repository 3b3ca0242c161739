"""Train on trajectories: the SFT stage, on one process or many.

    umm-reflect sft --data data/mine --output-dir outputs/sft --preset nano --max-steps 20
    umm-reflect reflect "two red circles" --model outputs/sft/checkpoint
    torchrun --standalone --nproc-per-node 8 -m sft.train --preset release --data data/sft ...

Killed or stopped, the same command goes on from the newest state. Writes into --output-dir:

    config.yaml          the settings, which --config takes back
    checkpoint           link to the newest of checkpoints/, folders that every command loads
                         (with --parameters lora-...: adapters, for --adapter)
    resume/              states to go on from      metrics.jsonl, curve.png      pictures/
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from sft import train_data
from sft.batches import Parcel
from sft.data import Quarantine, Violation
from sft.feed import feed
from sft.latents import ImageStore
from sft.loss import Tally, loss, tallied_by
from sft.train_config import PRESETS, Config
from sft.train_data import Prepared, prepare
from sft.train_output import curves, save_model, settings_text
from sft.validate import HeldOut, draw_stories
from umm_reflect.checkpoint import load
from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.push import pushed
from umm_reflect.training import resume, trainable
from umm_reflect.training.flops import Work, flops, learns_of, mfu, peak_flops
from umm_reflect.training.folders import NEWEST
from umm_reflect.training.learner import Learner
from umm_reflect.training.metrics import (
    MetricsLog,
    memory_used,
    plot_curves,
    progress,
    tracker,
)
from umm_reflect.training.processes import Processes, start
from umm_reflect.training.signals import noticed_signals


def train(config: Config, processes: Processes) -> int:
    """Run to the end, or to a signal; the exit code. Errors: UserError, on all processes."""
    out = config.output_dir
    state = resume.to_go_on_from(out, config.resume)
    prepared = prepare(config, processes)
    if processes.main:
        for line in prepared.lines(config.max_steps):
            print(line)
        write_aside(out / "config.yaml", settings_text(config))
    looks = train_data.held_out_tasks(prepared, config, processes)
    held = [*feed(prepared.held_out, looks, prepared.workers)]

    bagel = load(
        prepared.folder, device=str(processes.device), dtype=config.dtype, attn=config.attn
    )
    trainable.apply(bagel, config.parameters, config.lora, config.frozen)
    if processes.main:
        print(trainable.summary(bagel))
    run = Run(config, processes, prepared, bagel, HeldOut(held))
    if state is not None:
        run.resume(state)
    return run.go()


@dataclass
class Sums:
    """What adds up between two lines of metrics, without waiting for the device."""

    tally: Tally
    grad_norm: Tensor
    skipped: Tensor
    steps: int = 0
    work: Work = field(default_factory=Work)
    waited: float = 0.0

    @classmethod
    def zero(cls, device: torch.device) -> Sums:
        zero = torch.zeros((), device=device)
        return cls(Tally.zero(device), zero, zero.clone())


class Run:
    """One run: what changes from step to step, and how a step goes."""

    def __init__(
        self, config: Config, processes: Processes, prepared: Prepared, bagel, held_out: HeldOut
    ):
        self.config, self.processes, self.prepared = config, processes, prepared
        self.learns, self.held_out = learns_of(bagel), held_out
        self.learner = Learner(
            bagel,
            processes,
            config.strategy,
            config.optimizer,
            recompute=config.recompute,
            compile=config.compile,
            legacy_bf16=config.legacy_bf16,
        )
        self.store = ImageStore(
            bagel.vae,
            bagel.config,
            processes.device,
            room=config.keep_images_gb * 1e9,
            round_trip=config.round_trip,
            seed=config.seed,
        )
        self.schedule = config.schedule()
        self.quarantine = Quarantine(prepared.records, config.max_bad)
        self.sums = Sums.zero(processes.device)
        self.step = 0
        self.lr = 0.0
        self.seconds = 0.0  # of training, those before a resume too
        self.drawn: Counter[str] = Counter()

    def resume(self, state: Path) -> None:
        """Errors: UserError for a state of other data or another packing."""
        self.step, extra = resume.load_resume(state, self.learner)
        if extra["fingerprint"] != self.prepared.sampler.fingerprint():
            raise UserError(
                f"{state} belongs to other data, another packing or another seed",
                "Give the settings of that run (its config.yaml), or another --output-dir",
            )
        self.seconds, self.drawn = extra["seconds"], Counter(extra["drawn"])
        if self.processes.main:
            print(f"going on after step {self.step} ({state})")

    # --- the loop ---------------------------------------------------------------------------------

    def go(self) -> int:
        config, processes = self.config, self.processes
        self.first = self.step
        self.bar = progress(config.max_steps - self.first, "sft") if processes.main else None
        from_step = self.first + 1
        self.log = MetricsLog(config.output_dir, from_step) if processes.main else None
        self.tracker = (
            tracker(config.tracker, config.output_dir, config) if processes.main else None
        )
        self.began = self.logged = time.monotonic()
        waiting = train_data.tasks(self.prepared, config, processes, self.store, self.first)
        pin = processes.device.type == "cuda"
        parcels = feed(self.prepared.reader, waiting, self.prepared.workers, pin=pin)
        # closing ends the workers, whatever happens
        with noticed_signals() as noticed, closing(parcels):
            stopped = self.steps(parcels, noticed)
        if stopped:
            self.save()
            return 128 + stopped
        self.save()  # before the last look, which may fail
        if not (config.validation.every and self.step % config.validation.every == 0):
            self.look()
        if processes.main:
            print(f"{self.step} steps in {self.used():.0f} s: {config.output_dir / NEWEST}")
        return 0

    def steps(self, parcels: Iterator[Parcel], noticed: list[int]) -> int:
        """All steps; the number of the signal that ended them early, or 0."""
        config, processes = self.config, self.processes
        each = train_data.forwards(config.packs_per_step, processes, config.packs_per_forward)
        while self.step < config.max_steps and self.share() < 1:
            part = self.fetch(parcels, each, noticed)
            if isinstance(part, int):
                return part
            self.update(part)
            if self.step % config.log_every == 0 or self.step == config.max_steps:
                values = self.report()
                if self.bar is not None:
                    self.bar.advance(self.step - self.first - self.bar.done, **shown(values))
            if config.validation.every and self.step % config.validation.every == 0:
                self.look()
            if self.step % config.save_every == 0 and self.step < config.max_steps:
                self.save()
        return 0

    def used(self) -> float:
        return self.seconds + time.monotonic() - self.began

    def share(self) -> float:
        """How far the run is, by steps or by time."""
        seconds = self.config.max_seconds
        by_time = self.used() / seconds if seconds else 0.0
        if seconds and self.processes.world > 1:  # one clock for all
            clock = torch.tensor(by_time if self.processes.main else 0.0)
            by_time = float(self.processes.sum(clock))
        return max(by_time, self.step / self.config.max_steps)

    def fetch(
        self, parcels: Iterator[Parcel], count: int, noticed: list[int]
    ) -> list[Parcel] | int:
        """The parcels of the next step; or the number of a signal, when a process got one. One
        process's error is everybody's."""
        began, problem, part = time.monotonic(), None, []
        try:
            part = list(islice(parcels, count))
            for parcel in part:
                for _, uid, rule, detail in parcel.bad:
                    self.quarantine.add(Violation("training", uid, rule, detail))
        except UserError as error:
            problem = error
        self.sums.waited += time.monotonic() - began
        why = f"signal {noticed[0]}" if noticed else str(problem) if problem else ""
        raised = self.processes.any(bool(why), why)
        if problem and not noticed:
            raise problem
        for rank, text in raised:
            if not text.startswith("signal "):
                raise UserError(f"rank {rank} failed: {text}", "The other processes end with it")
        if not raised:
            return part
        if self.processes.main:
            print(f"stopping: {raised[0][1]} on rank {raised[0][0]}", file=sys.stderr)
        return int(raised[0][1].split()[1])

    def update(self, parcels: Sequence[Parcel]) -> None:
        """One step: forwards and backwards, then all weights."""
        world, sums = self.processes.world, self.sums
        counts = torch.tensor([p.counts for p in parcels], dtype=torch.float64).sum(0).float()
        total = self.processes.sum(counts)
        for parcel in parcels:
            batch, times, noise, more = self.store.batch(parcel)
            out = self.learner.forward(batch, times, noise)
            losses = loss(out, batch, noise, total, self.config.loss, processes=world)
            self.learner.backward(losses.total, last=parcel is parcels[-1])
            kinds = more["kind_S"], more["kind_BG"]
            sums.tally = sums.tally + tallied_by(out, batch, noise, times, *kinds)
            sums.work = sums.work + parcel.work
            self.drawn.update(drawn.kind for drawn in parcel.drawn)
        self.lr = self.rate()
        report = self.learner.step(self.lr / self.config.optimizer.lr)
        sums.grad_norm = report.grad_norm
        sums.skipped = sums.skipped + ~report.applied
        sums.steps += 1
        self.step += 1

    def rate(self) -> float:
        """The learning rate of the coming update."""
        config, samples = self.config, sum(self.drawn.values()) * self.processes.world
        if not config.max_seconds:
            return self.schedule.lr(self.step, samples)
        warm = min(1.0, (self.step + 1) / max(1, config.rates.warmup))
        at = int(self.share() * config.max_steps)
        return warm * self.schedule.lr(max(at, config.rates.warmup), samples)

    # --- what is said of it -----------------------------------------------------------------------

    def report(self) -> dict[str, float]:
        """A line of metrics on what was summed up. Errors: FloatingPointError, on all processes,
        when a loss is no number."""
        config, sums, processes = self.config, self.sums, self.processes
        if not sums.steps:
            return {}
        tally = Tally.from_flat(processes.sum(sums.tally.flat()))
        values = tally.report()
        if not all(map(float("inf").__gt__, map(abs, values.values()))):
            bad = [name for name, value in values.items() if not abs(value) < float("inf")]
            newest = resume.latest(config.output_dir / resume.STATES)
            raise FloatingPointError(
                f"the loss is no number in steps {self.step - sums.steps + 1} to {self.step} "
                f"({', '.join(bad[:4])}): those updates were not made; the newest state is "
                f"{newest}. Lower the rate, or check the data"
            )
        now, seconds = time.monotonic(), time.monotonic() - self.logged
        self.logged = now
        amounts = torch.tensor(
            [
                *vars(sums.work).values(),
                *(self.drawn[kind] for kind in self.prepared.sampler.rates),
            ],
            dtype=torch.float64,
        )
        amounts = processes.sum(amounts).tolist()
        done = Work(*map(int, amounts[: len(vars(Work()))]))
        kinds = dict(zip(self.prepared.sampler.rates, amounts[len(vars(Work())) :], strict=True))
        values |= {
            "lr": self.lr,
            "grad_norm": float(sums.grad_norm),
            "skipped": float(sums.skipped),
            "steps_per_second": sums.steps / seconds,
            "tokens_per_second": done.tokens / seconds,
            "waited": sums.waited / seconds,
            "bad_rows": float(len(self.quarantine.violations)),
            "samples": sum(kinds.values()),
        }
        share = mfu(
            flops(done, self.prepared.config, self.learns).model,
            seconds,
            devices=processes.world,
            peak=peak_of(processes.device),
        )
        values |= {} if share is None else {"mfu": share}
        values |= memory_used(processes.device)
        for kind, count in kinds.items():
            values[f"{kind}/passes"] = count / len(self.prepared.sampler.usable[kind])
        if values["skipped"] > sums.steps / 2:
            raise FloatingPointError(
                f"gradients are no numbers in {values['skipped']:.0f} of {sums.steps} steps before "
                f"step {self.step}: lower the rate"
            )
        if self.step == sums.steps and values["grad_norm"] == 0:
            raise UserError(
                "no gradient reaches a weight that learns", "Choose other rows, or --parameters"
            )
        self.sums = Sums.zero(processes.device)
        self.write(values)
        return values

    def write(self, values: dict[str, float]) -> None:
        if self.log is not None:
            self.log.log(self.step, **values)
        if self.tracker is not None:
            self.tracker(self.step, values)

    def look(self) -> None:
        """Held-out numbers, pictures of the loop, and the curves so far."""
        config = self.config
        if self.held_out.parcels:
            values = self.held_out.look(self.learner, self.store, config.loss)
            self.write(values)
            if self.processes.main:
                print(f"step {self.step}: " + "  ".join(brief(values)))
        if config.validation.pictures and self.prepared.held:
            path = config.output_dir / "pictures" / f"step-{self.step:07d}.png"
            averaged = config.optimizer.ema_decay is not None
            count = config.validation.pictures
            draw_stories(
                self.learner,
                self.prepared.profile,
                self.prepared.held,
                count,
                path,
                averaged=averaged,
            )
        if self.log is not None:
            plot_curves(self.log.path, config.output_dir / "curve.png", curves(self.log.path))
        self.logged = time.monotonic()

    # --- what stays -------------------------------------------------------------------------------

    def save(self) -> None:
        """A folder that every command loads, and the state to go on from. Every process calls."""
        config, out = self.config, self.config.output_dir
        self.report()
        save_model(self.learner, self.prepared, config, self.step)
        extra = {
            "fingerprint": self.prepared.sampler.fingerprint(),
            "seconds": self.used(),
            "drawn": dict(self.drawn),
        }
        resume.save_resume(out / resume.STATES, self.learner, self.step, extra, config.keep)
        self.logged = time.monotonic()


# --- helpers --------------------------------------------------------------------------------------


def shown(values: dict[str, float]) -> dict[str, float]:
    """What a progress line has room for."""
    names = ("ce", "mse", "lr", "tokens_per_second", "mfu")
    return {name: values[name] for name in names if name in values}


def brief(values: dict[str, float]) -> Iterator[str]:
    """Of the held-out numbers the two losses and the decisions."""
    for name, value in values.items():
        short = name.removeprefix("held_out/")
        if short in ("ce", "mse") or short.endswith(("score_accuracy", "action_accuracy")):
            yield f"{name} {value:.4g}"


def peak_of(device: torch.device) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def main(argv: Sequence[str]) -> int:
    from umm_reflect.settings import parse

    config = parse(Config, argv, "umm-reflect sft", PRESETS)
    if config.dry_run:
        from sft.train_plan import dry_run

        return dry_run(config)
    with (
        start(config.strategy, config.device) as processes,
        pushed(config.push_to_hub, config.output_dir, processes) as done,
    ):
        done.code = train(config, processes)
    return done.code


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
