"""One update: credited rollouts are replayed, both heads' losses add up, and one step is taken.

    updater = Updater(config, learner, copies, profile)
    done = updater(scored, step, stopped)           # stopped() on every process: end here?
    done.metrics, done.work                         # None where it was stopped before any step

All gradients of a mini-batch are of one snapshot of the weights. What a loss compares with (the
policy before the update, a reference, a slow average) is computed for all batches before the first
step. Every process makes the same number of forwards: one that has fewer batches takes empty ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl.copies import Copies
from rl.losses import Before, batch_loss
from rl.matching import decay, matching_times
from rl.objectives import Totals, merged, report
from rl.replay import ReplayBatch, State, Unit, batches, lay_out, logprobs_of, nothing, read
from rl.rollout import RolloutPolicy, own_images
from rl.train_config import Config
from rl.types import Rollout, Scored
from umm_reflect.profile import ReflectionProfile
from umm_reflect.rng import stream
from umm_reflect.training.flops import Work
from umm_reflect.training.learner import Learner


@dataclass
class Done:
    """What an update was. metrics: the same on every process. learned, compared: the work of this
    process's forwards with and without a backward pass."""

    metrics: dict[str, float] = field(default_factory=dict)
    learned: Work = field(default_factory=Work)
    compared: Work = field(default_factory=Work)
    updates: int = 0


@dataclass
class Part:
    """A replay batch, the advantages of its units' list, and what its losses compare with."""

    batch: ReplayBatch
    advantages: Tensor
    before: Before = field(default_factory=Before)


class Updater:
    """profile: of the checkpoint; rollouts were sampled from it."""

    def __init__(
        self, config: Config, learner: Learner, copies: Copies, profile: ReflectionProfile
    ):
        self.config, self.learner, self.copies = config, learner, copies
        self.processes = learner.processes
        self.policy = RolloutPolicy(learner.bagel, profile, config.rollout)

    def __call__(
        self, scored: Sequence[Scored], step: int, updates: int, stopped: Callable[[], bool]
    ) -> Done | None:
        """scored: this process's, of groups that teach (the others may have none). updates: made so
        far, for the warm-up. None: stopped before anything has changed."""
        config, done = self.config, Done()
        groups = sorted(set().union(*self.processes.gather({s.place.group for s in scored})))
        chunks = [groups[i :: config.updates] for i in range(min(config.updates, len(groups)))]
        dealt = [[s for s in scored if s.place.group in set(chunk)] for chunk in chunks]
        parts = [self._parts(chunk, step) for chunk in dealt]
        self._compare(parts, done)
        sums: list[dict[str, Tensor]] = []
        norms: list[Tensor] = []
        skipped = 0
        for _ in range(config.passes):
            for chunk in parts:
                totals = self._totals(chunk)
                if not any(head.items for head in totals.values()):
                    continue  # nobody has a word or a state: not even the moments may move weights
                for part in chunk:
                    if stopped() and not done.updates:
                        return None
                    last = part is chunk[-1]
                    sums += self._backward(part, totals, last, done)
                step_report = self.learner.step(self.rate(updates + done.updates))
                norms.append(step_report.grad_norm)
                skipped += int(~step_report.applied)
                done.updates += 1
        self._follow(step)
        done.metrics = self._metrics(sums, norms, skipped)
        return done

    # --- what is replayed -------------------------------------------------------------------------

    def _parts(self, scored: Sequence[Scored], step: int) -> list[Part]:
        """This process's batches of one mini-batch, as many as any process has."""
        config, bagel = self.config, self.learner.bagel
        units = [self.unit(one) for one in scored]
        found = batches(units, bagel, max_tokens=config.tokens_per_forward)
        advantages = torch.tensor([one.advantage for one in scored] or [0.0])
        parts = [Part(batch, advantages) for batch in found]
        most = max(self.processes.gather(len(parts)))
        return parts + [Part(nothing(bagel), advantages) for _ in range(most - len(parts))]

    def unit(self, one: Scored | Rollout) -> Unit:
        """A rollout laid out as this run learns from it."""
        config = self.config
        return lay_out(
            one,
            self.policy,
            text=config.trains_text,
            flow=config.images if config.trains_flow else "none",
            guided=config.guided,
            states=None if config.objective == "grpo" else self._states,
        )

    def _states(self, rollout: Rollout) -> list[State]:
        """Drawings noised again at times that siblings share."""
        config, place = self.config, rollout.place
        states = []
        for number, transition in own_images(rollout.trajectory):
            first = number == 0 and rollout.trajectory.source is None
            settings = config.rollout.first if first else config.rollout.edit
            times = matching_times(
                config.times,
                settings.points,
                settings.timestep_shift,
                stream(config.seed, place.group_name, number, "matching times"),
            )
            generator = stream(config.seed, place.name, number, "matching noise")
            clean = transition.latent
            for t in times:
                noise = torch.randn(clean.shape, generator=generator)
                states.append(State.noised(number, clean, noise, float(t)))
        return states

    # --- what losses compare with -----------------------------------------------------------------

    @torch.no_grad()
    def _compare(self, parts: Sequence[Sequence[Part]], done: Done) -> None:
        config = self.config
        if config.compares_with_old:
            name = "old" if "old" in self.copies else None
            self._each(parts, done, name, lambda before, found: before.take_old(found))
        if "reference" in self.copies:
            self._each(parts, done, "reference", lambda before, found: before.take_ref(found))
        if "slow" in self.copies:
            self._each(parts, done, "slow", lambda before, found: before.take_slow(found))

    def _each(self, parts, done: Done, name: str | None, take) -> None:
        """A forward of every batch with a copy of the weights (None: as they are)."""
        if name is not None:
            with self.copies.in_place(name):
                self._each(parts, done, None, take)
            return
        for chunk in parts:
            for part in chunk:
                take(part.before, self._forward(part.batch))
                done.compared += part.batch.work

    def _forward(self, batch: ReplayBatch):
        """(words, moves, (log-probs, means, stds), the raw output) of a batch."""
        batch = batch.to(self.processes.device)
        out = self.learner.forward(batch, batch.times_I, batch.latent_BGC)
        words, moves = read(out, batch)
        steps = logprobs_of(moves) if self.config.objective == "grpo" else None
        return words, moves, steps, out

    # --- gradients --------------------------------------------------------------------------------

    def _totals(self, chunk: Sequence[Part]) -> dict[str, Totals]:
        """What each head learns from in this mini-batch, on all processes."""
        mine = {"text": Totals(), "flow": Totals()}
        for part in chunk:
            mine["text"] += Totals.of(part.batch.unit_S)
            mine["flow"] += Totals.of(part.batch.unit_N)
        all_of_them = self.processes.gather(mine)
        return {name: sum((m[name] for m in all_of_them), Totals()) for name in mine}

    def _backward(self, part: Part, totals, last: bool, done: Done) -> list[dict[str, Tensor]]:
        words, moves, steps, out = self._forward(part.batch)
        advantages = part.advantages.to(out.logprob_S.device)
        loss, sums = batch_loss(words, moves, steps, advantages, totals, part.before, self.config)
        # every process's graph reaches every module, whatever its batch holds
        touched = 0.0 * (out.logprob_S.sum() + out.velocity_BGC.sum())
        self.learner.backward((loss + touched) * self.processes.world, last=last)
        done.learned += part.batch.work
        return sums

    def rate(self, updates: int) -> float:
        """The factor of the learning rates in the update after so many."""
        return min(1.0, (updates + 1) / max(1, self.config.warmup))

    def _follow(self, step: int) -> None:
        """Slow weights and the policy of the rollouts follow what was learned."""
        if "slow" in self.copies:
            self.copies.follow("slow", decay(self.config.awm.slow_decay, step))
        if "old" in self.copies:
            self.copies.follow("old", decay(self.config.nft.old_decay, step))

    def _metrics(self, sums, norms, skipped: int) -> dict[str, float]:
        mine = merged(sums)
        found: dict[str, dict[str, float]] = {}
        for name, value in merged(filter(None, self.processes.gather(mine))).items():
            head, _, what = name.partition("/")
            found.setdefault(head, {})[what] = value
        metrics = {f"{h}/{n}": v for h, part in found.items() for n, v in report(part).items()}
        for name in metrics.keys() & {"text/loss", "flow/loss"}:  # each update's is whole
            metrics[name] /= len(norms)
        if norms:
            metrics["grad_norm"] = float(torch.stack(norms).mean())
        return {**metrics, "skipped_updates": float(skipped), "updates": float(len(norms))}
