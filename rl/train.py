"""Train on rewards: groups of rollouts, judged, and one step of both heads.

    umm-reflect rl --recipe nano --output-dir outputs/rl --max-steps 20
    umm-reflect rl preflight --recipe nano                 # the checks before the first update
    umm-reflect rl prepare ocr --input-dir ...             # prompt files (rl/prepare.py)
    torchrun --standalone --nproc-per-node 8 -m rl.train --recipe reflection --model SFT_MODEL

Killed or stopped, the same command goes on from the newest state. Writes into --output-dir:

    config.yaml          the settings, which --config takes back
    checkpoint           link to the newest of checkpoints/, folders that every command loads
                         (with --parameters lora-...: adapters, for --adapter); best: to the best
    resume/, best_state/ states to go on from
    metrics.jsonl, curve.png, pictures/, preflight.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl import train_output
from rl.copies import Copies
from rl.credit import credit
from rl.difficulty import Settled, Totals, resample
from rl.held_out import HeldOut
from rl.judge import Bench
from rl.prompts import Sampler, open_pool
from rl.replay import replay_step
from rl.reward import loopholes
from rl.rollout import draw_starts, roll_out, share_of
from rl.train_config import Config, config_of, differences, settings_of
from rl.train_output import Clock
from rl.types import Judged, Rollout, Scored
from rl.update import Done, Updater
from rl.watch import Watch, picture_signals
from umm_reflect.checkpoint import load
from umm_reflect.device import give_back
from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.hub import profile as profile_of
from umm_reflect.hub import resolve
from umm_reflect.push import pushed
from umm_reflect.settings import to_yaml
from umm_reflect.training import resume, trainable
from umm_reflect.training.flops import learns_of
from umm_reflect.training.folders import Origin
from umm_reflect.training.learner import Learner
from umm_reflect.training.metrics import MetricsLog, progress, tracker
from umm_reflect.training.processes import Processes, start
from umm_reflect.training.signals import noticed_signals

BEST = "best_state"
CURVES_EVERY = 10  # steps, and at each checkpoint


def train(config: Config, processes: Processes) -> int:
    """Run to the end, or to a signal; the exit code. Errors: UserError, on all processes."""
    state = resume.to_go_on_from(config.output_dir, config.resume)
    run = Run(config, processes)
    with run.judges():
        if state is not None:
            run.resume(state)
        elif config.preflight:
            run.preflight()
        return run.go()


@dataclass
class Position:
    """How far a run is: all that it goes on from, besides its weights. Changes once a step.

    taken: prompts. updates: of the weights. seconds: of training.
    """

    step: int = 0
    taken: int = 0
    updates: int = 0
    seconds: float = 0.0
    difficulty: Totals = field(default_factory=Totals)


class Stopped(Exception):
    """A signal came to one of the processes; number: which."""

    def __init__(self, number: int):
        super().__init__(f"signal {number}")
        self.number = number


class Run:
    """One run: what changes from step to step, and how a step goes."""

    def __init__(self, config: Config, processes: Processes):
        self.config, self.processes = config, processes
        # first what may fail within seconds: the judge, the prompts, the model's files
        if not config.judge.itself:
            self.bench = Bench(config.judge.settings, processes=processes.local_world)
            self.bench.check()
        self.sampler = Sampler(
            open_pool(config.prompts, rows=config.prompts_rows, seed=config.seed), config.seed
        )
        folder = resolve(config.model)
        profile = profile_of(folder, config.lora.adapter, tell=processes.main)
        # what edits see while it learns is what they are to see ever after
        view = config.rollout.edit_view or profile.edit_view
        self.origin = Origin(config.model, folder, replace(profile, edit_view=view))
        self.identity = train_output.identity(folder)
        rollout = config.rollout
        self.mine = share_of(processes.rank, processes.world, rollout)
        if not config.judge.itself:
            self.bench.start(len(self.mine))  # beside the loading of the model
        if processes.main:
            write_aside(config.output_dir / "config.yaml", to_yaml(replace(config, resume="auto")))
            for hole in () if config.single else loopholes(config.reward, rollout.max_rounds):
                print(f"note: this reward can be farmed: {hole}")

        bagel = load(folder, device=str(processes.device), dtype=config.dtype, attn=config.attn)
        trainable.apply(bagel, config.parameters, config.lora, config.frozen_parts)
        if processes.main:
            print(trainable.summary(bagel))
        self.learns = learns_of(bagel)
        self.learner = Learner(
            bagel,
            processes,
            config.strategy,
            config.optimizer,
            recompute=config.recompute,
            compile=config.compile,
            forward=replay_step,
        )
        if config.judge.itself:
            self.bench = train_output.own_bench(self.learner, self.origin, config)
        based = ("reference",) if config.reference == "base" else ()
        self.copies = Copies(
            self.learner,
            config.copies,
            base=[name for name in based if name in config.copies],
            saved=[name for name in ("slow", "old") if name in config.copies],
        )
        self.updater = Updater(config, self.learner, self.copies, self.origin.profile)
        self.held_out = None
        if config.held_out.on:
            self.held_out = HeldOut(config.held_out, self.origin.profile, processes, config.single)
        self.watch = Watch(config.watch)
        self.at = Position()
        self.noticed: list[int] = []
        self.log = self.tracker = None
        self.began, self.before = time.monotonic(), 0.0

    @contextmanager
    def judges(self) -> Iterator[None]:
        """Closes what judges in the end, with its processes and connections."""
        with self.bench, closing(self.held_out) if self.held_out else nullcontext():
            yield

    # --- the loop ---------------------------------------------------------------------------------

    def go(self) -> int:
        config, processes = self.config, self.processes
        first = self.at.step
        self.log = MetricsLog(config.output_dir, first + 1) if processes.main else None
        if processes.main:
            self.tracker = tracker(config.tracker, config.output_dir, config)
        bar = progress(config.max_steps - first, "rl") if processes.main else None
        self.began, self.before = time.monotonic(), self.at.seconds
        with noticed_signals() as self.noticed:
            try:
                if self.watch.best is None:
                    self.look()
                while self.at.step < config.max_steps and not self.out_of_time():
                    values = self.step()
                    if bar is not None:
                        bar.advance(1, **train_output.shown(values))
            except Stopped as stopped:
                self.save()
                return 128 + stopped.number
        self.save()
        if processes.main:
            print(f"{self.at.step} steps in {self.at.seconds:.0f} s: {config.output_dir}")
        return 0

    def step(self) -> dict[str, float]:
        """prompts → first images → rollouts → verdicts → rewards → advantages → replay, losses and
        one step of both heads → metrics. Stopped in any of them, nothing of it remains."""
        clock, step = Clock(), self.at.step
        self.stop_if_noticed()
        self.sampler.taken = self.at.taken
        with clock("rollout"):
            settled, rollouts = self.roll_out()
            give_back(self.processes.device)  # caches of contexts: the update needs the room
            self.stop_if_noticed()
        with clock("judge"):
            judged = self.judge(rollouts)
            self.stop_if_noticed()
        with clock("credit"):
            scored, values = self.credit(judged)
        with clock("update"):
            teaching = [one for one in scored if one.advantage is not None]
            done = self.updater(teaching, step, self.at.updates, self.is_noticed)
            if done is None:
                self.stop_if_noticed()
        assert done is not None
        seconds, updates = self.before + time.monotonic() - self.began, self.at.updates
        taken, totals = self.sampler.taken, settled.totals
        self.at = Position(step + 1, taken, updates + done.updates, seconds, totals)
        values |= done.metrics
        values |= self.measured(scored, done, clock, settled)
        self.write(values)
        self.watch_over(values, judged)
        self.leave(scored)
        return values

    def out_of_time(self) -> bool:
        """One clock for all processes."""
        if self.config.max_seconds is None:
            return False
        seconds = self.processes.gather(self.at.seconds)[0]
        return seconds >= self.config.max_seconds

    def is_noticed(self) -> bool:
        """Whether a process got a signal. Every process asks."""
        return bool(self.processes.any(bool(self.noticed)))

    def stop_if_noticed(self) -> None:
        raised = self.processes.any(bool(self.noticed), f"{(self.noticed or [0])[0]}")
        if raised:
            rank, number = raised[0]
            if self.processes.main:
                print(f"stopping: signal {number} on rank {rank}", file=sys.stderr)
            raise Stopped(int(number))

    # --- generate, judge, credit ------------------------------------------------------------------

    def roll_out(self) -> tuple[Settled, list[Rollout]]:
        """The groups of this step, and this process's rollouts. A signal ends it early: then they
        are not whole."""
        config, rollout = self.config, self.config.rollout
        names = {"step": self.at.step, "seed": config.seed, "batch_size": config.rollout_batch}
        prompts = self.sampler.take(rollout.groups)
        own = dict.fromkeys(group for group, _ in self.mine)
        profile = self.origin.profile

        def draw(asked, attempt: int):
            needed = {group: prompt for group, prompt in asked.items() if group in own}
            return draw_starts(bagel, profile, needed, rollout, attempt=attempt, **names)

        def judge(asked, starts) -> dict[int, bool]:
            needed = {group: prompt for group, prompt in asked.items() if group in own}
            found = self.processes.gather(self.bench.judge_firsts(needed, starts))
            return {group: right for part in found for group, right in part.items()}

        with self.drawing() as bagel, torch.no_grad():
            settled = Settled(tuple(prompts), {}, (), self.at.difficulty, 0)
            if rollout.forks:
                settled = resample(
                    *(prompts, config.difficulty, self.at.difficulty),
                    **{"take": self.sampler.take, "draw": draw, "judge": judge},
                )
            try:
                rollouts = roll_out(
                    *(bagel, profile, settled.prompts, rollout),
                    **names,
                    mine=self.mine,
                    starts=settled.starts if rollout.forks else None,
                    force_turns=config.force_turns,
                    on_batch=self.end_early,
                )
            except Stopped:
                rollouts = []
        return settled, rollouts

    def judge(self, rollouts: Sequence[Rollout]) -> list[Judged]:
        if not self.config.judge.itself:
            return self.bench.judge(rollouts)
        self.bench.reward.forget()
        with self.learner.inference(), torch.no_grad():
            return self.bench.judge(rollouts)

    def drawing(self):
        """The model that draws: the trained weights, or with NFT the old ones."""
        return train_output.drawing_model(self.learner, self.copies)

    def end_early(self, done: int, of: int) -> None:
        if self.noticed:
            raise Stopped(self.noticed[0])

    def credit(self, judged: Sequence[Judged]) -> tuple[list[Scored], dict[str, float]]:
        return credit(judged, len(self.mine), self.config, self.processes)

    # --- what is said of it -----------------------------------------------------------------------

    def measured(
        self, scored: Sequence[Scored], done: Done, clock: Clock, settled: Settled
    ) -> dict[str, float]:
        """Speed, and how hard the prompts were."""
        values = train_output.speed(
            scored, done, clock, self.config, self.learner, self.learns, self.processes
        )
        if settled.correct:
            values["difficulty/right_at_first"] = sum(settled.correct) / len(settled.correct)
            values["difficulty/replaced"] = float(settled.replaced)
        return values | {"lr": self.config.optimizer.lr * self.updater.rate(self.at.updates)}

    def write(self, values: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.log(self.at.step, **values)
        if self.tracker is not None:
            numbers = {n: v for n, v in values.items() if isinstance(v, int | float)}
            self.tracker(self.at.step, numbers)

    def watch_over(self, values: dict[str, float], judged: Sequence[Judged]) -> None:
        """Alarms of the collapse detector, and its return to the best checkpoint."""
        seen = {one.rollout.place.group: one.rollout.trajectory.images[-1] for one in judged}
        pictures = self.processes.gather(picture_signals([seen[g] for g in sorted(seen)]))
        signals = train_output.signals(values, pictures)
        report = self.watch.see(self.at.step, signals)
        for alarm in report.alarms if self.processes.main else ():
            print(f"alarm at step {self.at.step}: {alarm.reason}", file=sys.stderr)
        if report.alarms:
            self.write({"alarms": [alarm.to_record() for alarm in report.alarms]})
        if report.stop is not None:
            self.save()
            raise UserError(report.stop, "See metrics.jsonl and pictures/")
        if report.back_to is not None:
            self.go_back(report.back_to)

    def go_back(self, name: str) -> None:
        """The weights and moments of the best checkpoint; prompts and steps go on from here."""
        resume.load_resume(self.config.output_dir / BEST / name, self.copies)
        if self.processes.main:
            print(f"back to {name} after step {self.at.step}", file=sys.stderr)
        self.write({"back_to": name})

    def leave(self, scored: Sequence[Scored]) -> None:
        """What stays of a step: pictures, held-out numbers, checkpoints, each when it is due."""
        config, step = self.config, self.at.step
        if config.pictures_every and step % config.pictures_every == 0 and self.processes.main:
            train_output.gallery(scored, config.output_dir, step)
        if self.held_out is not None and step % config.held_out.every == 0:
            self.look()
        if step % config.save_every == 0 and step < config.max_steps:
            self.save()
        if step % CURVES_EVERY == 0:
            self.curves()

    def curves(self) -> None:
        if self.log is not None and self.at.step:
            train_output.draw_curves(self.log.path, self.config.output_dir)

    def look(self) -> None:
        """Held-out numbers of the weights as they are; the best ones are kept."""
        if self.held_out is None:
            return
        averaged = self.config.optimizer.ema_decay is not None
        values, shown = self.held_out.look(self.learner, averaged=averaged)
        self.write(values)
        metric = values.get("held_out/final", values["held_out/score"])
        name = f"step-{self.at.step:07d}"
        if self.processes.main:
            print(f"step {self.at.step}: " + "  ".join(train_output.brief(values)))
            train_output.stories(shown[:4], self.config.output_dir, self.at.step)
        if self.watch.evaluated(self.at.step, name, metric):
            train_output.save_model(self.learner, self.origin, self.config, self.at.step, name)
            train_output.link_best(self.processes, self.config.output_dir, name)
            resume.save_resume(
                *(self.config.output_dir / BEST, self.copies, self.at.step, self.extra()),
                keep=None,
            )

    # --- what stays -------------------------------------------------------------------------------

    def extra(self) -> dict[str, Any]:
        at = self.at
        return {
            "config": settings_of(self.config),
            "identity": self.identity,
            "pool": self.sampler.pool.sha256,
            "taken": at.taken,
            "updates": at.updates,
            "seconds": at.seconds,
            "difficulty": [at.difficulty.groups, at.difficulty.correct],
            "watch": self.watch.state(),
        }

    def save(self) -> None:
        """A folder that every command loads, and the state to go on from. Every process calls."""
        config, out = self.config, self.config.output_dir
        self.curves()
        best = self.watch.best.name if self.watch.best else None
        train_output.save_model(self.learner, self.origin, config, self.at.step, best)
        resume.save_resume(
            out / resume.STATES, self.copies, self.at.step, self.extra(), config.keep
        )
        resume.keep_only(out / BEST, train_output.bests(out, best), self.processes)

    def resume(self, state) -> None:
        """Errors: UserError for a state of other settings, another base model or other prompts."""
        extra = resume.read_extra(state)
        odd = differences(extra["config"], settings_of(self.config))
        if extra["identity"] != self.identity:
            odd.append(f"model: the weights in {self.origin.folder} are other ones")
        if extra["pool"] != self.sampler.pool.sha256:
            odd.append(f"prompts: {self.config.prompts} holds other ones")
        if odd:
            raise UserError(
                f"{state} is of a run with other settings: {'; '.join(odd)}",
                "Give the settings of that run (its config.yaml), or another --output-dir",
            )
        step, _ = resume.load_resume(state, self.copies)
        totals = Totals(*extra["difficulty"])
        self.at = Position(step, extra["taken"], extra["updates"], extra["seconds"], totals)
        self.watch = Watch(self.config.watch, extra["watch"])
        if self.processes.main:
            print(f"going on after step {step} ({state})")

    def preflight(self) -> None:
        from rl.preflight import preflight

        preflight(self)


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] == "prepare":
        from rl import prepare

        return prepare.main(argv[1:])
    alone = bool(argv) and argv[0] == "preflight"
    config = config_of(argv[alone:], "umm-reflect rl preflight" if alone else "umm-reflect rl")
    with start(config.strategy, config.device) as processes:
        if not alone:
            with pushed(config.push_to_hub, config.output_dir, processes) as done:
                done.code = train(config, processes)
            return done.code
        run = Run(config, processes)
        with run.judges():
            run.preflight()
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
