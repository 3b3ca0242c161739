"""What must hold before the first update; a run that fails here would train on noise.

    umm-reflect rl preflight --recipe nano
    findings = preflight(run)                # UserError that names each check that failed

    schedule    the sampler's times are the published table, bit for bit, in rollout and replay
    latents     recorded states are fp32
    replay      replayed log-probs are the rollout's: words by token, steps by timestep
    plain       without noise a rollout is plain sampling
    weights     changed weights change what is sampled, and replay follows: the sampler sees what
                is trained, and nothing that was read with other weights is used again
    members     siblings differ
    reward      the judge tells good from bad; right images earn a higher advantage than wrong ones
    memory      what the run will hold, against what the device has

Two members of one group are rolled out, once as the model speaks and once made to ask for edits, so
that both heads are seen whatever the model would have said. Findings go to preflight.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from agent.policy import ForcedTurns
from eval.verdict import Verdict
from rl.copies import Copies
from rl.memory import plan_run
from rl.prompts import Sampler
from rl.replay import batches, lay_out, logprobs_of, read
from rl.rollout import RolloutPolicy, SameNoise, own_images, plain_difference, roll_out, window_of
from rl.types import Judged, Rollout
from umm_reflect.errors import UserError
from umm_reflect.files import human_size, write_aside
from umm_reflect.flow import DrawSettings
from umm_reflect.rng import stream
from umm_reflect.training.flops import Work

if TYPE_CHECKING:
    from rl.train import Run

FILE = "preflight.json"
STEP = -1  # names the random streams: no update's rollouts have them
ROUNDS = 2
# Tokens of a turn as the model speaks: enough for the choice of its score and some free words.
# (A turn that does not end by then is malformed, and is scored all the same.)
WORDS = 64
# How far weights are moved for a moment: of their own spread, or of this where they are all alike.
MOVED, SMALLEST = 0.05, 0.02


@dataclass(frozen=True)
class Bounds:
    """The largest and mean |difference| of log-probs that kernels may make."""

    word: float
    word_mean: float
    step: float


# About eight times what the shipped nano shows. fp32, on a CPU: 3e-5, 1e-6, 1e-7. bf16, on an H200:
# .37, .011 (331 words), 1.3e-4. The largest word is a rare one, whose logit is far from the others;
# a step is a mean over all latent numbers, and varies little.
BOUNDS = {torch.float32: Bounds(2e-4, 1e-5, 1e-5), torch.bfloat16: Bounds(3.0, 0.09, 1e-3)}


@dataclass(frozen=True)
class Finding:
    """said: one line, with the numbers."""

    name: str
    passed: bool
    said: str
    numbers: dict[str, Any] = field(default_factory=dict)


def preflight(run: Run) -> list[Finding]:
    """All checks. Every process calls it and makes the same ones. Errors: UserError with the names
    of those that failed, and what each found."""
    found = Checks(run).all()
    failed = [finding for finding in found if not finding.passed]
    if run.processes.main:
        for finding in found:
            print(
                f"preflight {finding.name:<9} {'ok  ' if finding.passed else 'FAIL'} {finding.said}"
            )
        content = json.dumps([asdict(finding) for finding in found], indent=2) + "\n"
        write_aside(run.config.output_dir / FILE, content)
    everywhere = [f"{f.name} ({f.said})" for f in failed]
    if raised := run.processes.any(bool(failed), "; ".join(everywhere)):
        raise UserError(
            f"preflight failed: {raised[0][1]}",
            "Nothing was trained. --no-preflight goes on all the same, at your risk",
        )
    return found


class Checks:
    """The checks of one run."""

    def __init__(self, run: Run):
        self.run, self.config, self.learner = run, run.config, run.learner
        self.profile = run.origin.profile
        changes = {"groups": 1, "group_size": 2, "max_rounds": ROUNDS}
        self.forced = None
        if not self.config.single:
            policy = RolloutPolicy(run.learner.bagel, self.profile, self.config.rollout)
            self.forced = ForcedTurns.shortest(policy)
            changes["max_tokens"] = min(WORDS, self.config.rollout.max_tokens)
        self.settings = replace(self.config.rollout, **changes)
        self.prompts = Sampler(run.sampler.pool, self.config.seed).take(1)

    def all(self) -> list[Finding]:
        try:
            rollouts = self.rollouts()
        except SameNoise as error:
            return [Finding("members", False, str(error))]
        found = [self.schedule(rollouts), self.latents(rollouts), self.replay(rollouts)]
        found += [self.plain(), *self.weights(rollouts), self.members(rollouts)]
        return [*found, self.reward(rollouts), self.memory(rollouts)]

    def rollouts(self) -> list[Rollout]:
        """The two members as the model speaks, then made to ask for edits."""
        names = {"step": STEP, "seed": self.config.seed, "mine": [(0, 0), (0, 1)]}
        with self.run.drawing() as bagel, torch.no_grad():
            made = roll_out(bagel, self.profile, self.prompts, self.settings, **names)
            if self.forced is not None:
                roomy = replace(self.settings, max_tokens=self.forced)
                rolled = {**names, "force_turns": self.forced}
                made += roll_out(bagel, self.profile, self.prompts, roomy, **rolled)
        return made

    # --- times and numbers ------------------------------------------------------------------------

    def schedule(self, rollouts: Sequence[Rollout]) -> Finding:
        wrong = []
        for kind in ("first", "edit"):
            settings: DrawSettings = getattr(self.settings, kind)
            if not torch.equal(settings.times, table(settings)):
                wrong.append(f"{kind}: {settings.points} points are not the table")
        for rollout in rollouts:
            for number, transition in own_images(rollout.trajectory):
                if transition.times is None:
                    continue
                settings = self._settings(number, rollout)
                window = window_of(self.settings, rollout.place, number, self.config.seed)
                first, steps = window or (0, settings.steps - 1)
                if not torch.equal(transition.times, table(settings)[first : first + steps + 1]):
                    wrong.append(f"image {number}: recorded times are not the window's")
        said = wrong[0] if wrong else f"{self.settings.edit.points} points, bit for bit"
        return Finding("schedule", not wrong, said)

    def _settings(self, number: int, rollout: Rollout) -> DrawSettings:
        first = number == 0 and rollout.trajectory.source is None
        return self.settings.first if first else self.settings.edit

    def latents(self, rollouts: Sequence[Rollout]) -> Finding:
        """Numbers that all fit into 16 bits were rounded on the way."""
        images = [t for rollout in rollouts for _, t in own_images(rollout.trajectory)]
        states = [one.latent for one in images]
        states += [state for one in images if one.latents is not None for state in one.latents]
        rounded = sum(
            t.dtype != torch.float32 or torch.equal(t, t.bfloat16().float()) for t in states
        )
        said = f"{rounded} of {len(states)} recorded states are rounded below fp32"
        return Finding("latents", not rounded and bool(states), said)

    # --- replay -----------------------------------------------------------------------------------

    def replay(self, rollouts: Sequence[Rollout], name: str = "replay") -> Finding:
        numbers = self._differences(rollouts)
        bounds = BOUNDS.get(self.learner.bagel.dtype, BOUNDS[torch.bfloat16])
        words, steps = numbers["word"], numbers["step"]
        parts, passed = [], True
        if words["count"]:
            passed &= words["max"] <= bounds.word and words["mean"] <= bounds.word_mean
            parts.append(
                f"{words['count']} words differ by {words['max']:.2g} at most and "
                f"{words['mean']:.2g} in the mean (bounds {bounds.word:g}, {bounds.word_mean:g})"
            )
        if steps["count"]:
            passed &= steps["max"] <= bounds.step
            worst = max(steps["by_time"], key=steps["by_time"].get)
            parts.append(
                f"{steps['count']} steps by {steps['max']:.2g} at most, at t = {worst} (bound "
                f"{bounds.step:g})"
            )
        if why := self._clipped(words, steps):
            passed = False
            parts.append(why)
        return Finding(name, passed, "; ".join(parts) or "nothing is replayed", numbers)

    def _clipped(self, words: dict[str, Any], steps: dict[str, Any]) -> str:
        """What ratios against the rollout would lose to the clip before anything was learned."""
        config = self.config
        if config.old != "rollout":
            return ""
        heads = []
        if config.trains_text and words["count"]:
            heads.append(("words", words["mean"], config.text))
        if config.trains_flow and config.objective == "grpo" and steps["count"]:
            heads.append(("steps", steps["max"], config.flow))
        for what, apart, settings in heads:
            clip = min(settings.clip_low, settings.clip_high)
            if apart > clip:
                return (
                    f"{what} differ by more than the clip of {clip:g}, which would take gradients "
                    "before anything has changed: set old: learner, or a wider clip"
                )
        return ""

    @torch.no_grad()
    def _differences(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """|log-prob replayed - log-prob of the rollout|, of words and of steps."""
        config, device = self.config, self.run.processes.device
        units = [
            lay_out(
                rollout, self.run.updater.policy, text=not config.single, flow="all", guided=True
            )
            for rollout in rollouts
        ]
        words, steps, times = [torch.zeros(0)], [torch.zeros(0)], [torch.zeros(0)]
        found = batches(units, self.learner.bagel, max_tokens=config.tokens_per_forward)
        learned = [self.run.updater.unit(rollout) for rollout in rollouts]
        packed = batches(learned, self.learner.bagel, max_tokens=config.tokens_per_forward)
        self.work = max((batch.work for batch in packed), key=lambda w: w.tokens, default=Work())
        for batch in found:
            batch = batch.to(device)
            out = self.learner.forward(batch, batch.times_I, batch.latent_BGC)
            said, moves = read(out, batch)
            words.append((said.logprob_S - said.old_S).abs().cpu())
            steps.append((logprobs_of(moves)[0] - moves.old_logprob_N).abs().cpu())
            times.append(moves.t.cpu())
        word, step, time = torch.cat(words), torch.cat(steps), torch.cat(times)
        by_time = {f"{float(t):.4f}": float(step[time == t].max()) for t in time.unique()}
        return {"word": summed_up(word), "step": {**summed_up(step), "by_time": by_time}}

    def plain(self) -> Finding:
        texts = [prompt.text for prompt in self.prompts]
        with self.run.drawing() as bagel, torch.no_grad():
            largest = plain_difference(
                bagel, self.profile, texts, self.settings, seed=self.config.seed
            )
        said = f"without noise latents differ from plain sampling by {largest:.3g}"
        return Finding("plain", largest == 0, said, {"largest": largest})

    # --- the sampler sees the weights -------------------------------------------------------------

    def weights(self, before: Sequence[Rollout]) -> list[Finding]:
        """Weights are moved for a moment; the rollouts before have filled whatever is cached."""
        if self.learner.strategy == "deepspeed":
            said = "not checked: deepspeed keeps its weights to itself"
            return [Finding("weights", True, said)]
        copies = Copies(self.learner, ["moved"])
        for i, tensor in enumerate(copies.tensors("moved")):
            generator = stream(self.config.seed, "preflight", i, "moved weights")
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.device)
            spread = tensor.std() if tensor.numel() > 1 else tensor.new_zeros(())
            tensor.add_(noise * MOVED * spread.clamp_min(SMALLEST))
        with copies.in_place("moved"):
            kept, self.run.copies = self.run.copies, copies  # draw with the moved ones
            try:
                after = self.rollouts()
            finally:
                self.run.copies = kept
            again = self.replay(after, "weights")
        moved = {"flow": latents_moved(before, after), "text": words_moved(before, after)}
        trained = {"flow": self.config.trains_flow, "text": self.config.trains_text}
        still = [head for head, does in trained.items() if does and not moved[head] > 0]
        said = "; ".join(
            f"{what} moved by {moved[head]:.2g}"
            for head, what in (("flow", "latents"), ("text", "log-probs"))
            if trained[head]
        )
        if still:
            said = f"changed weights do not reach the sampler: {said}"
            return [Finding("weights", False, said, moved)]
        if not again.passed:
            said = f"after a change of the weights replay is not the rollout: {again.said}"
            return [Finding("weights", False, said, again.numbers)]
        return [Finding("weights", True, f"changed weights reach the sampler: {said}", moved)]

    # --- groups, rewards, memory ------------------------------------------------------------------

    def members(self, rollouts: Sequence[Rollout]) -> Finding:
        """`roll_out` has refused equal images; here they are said to be apart."""
        one, other = rollouts[-2:]
        pairs = zip(own_images(one.trajectory), own_images(other.trajectory), strict=False)
        apart = [float((a.latent - b.latent).abs().max()) for (_, a), (_, b) in pairs if a is not b]
        said = f"images of siblings differ by {min(apart, default=0.0):.2g} or more"
        return Finding("members", bool(apart) and min(apart) > 0, said)

    def reward(self, rollouts: Sequence[Rollout]) -> Finding:
        try:
            with self.run.drawing(), torch.no_grad():  # the weights themselves may judge
                self.run.bench.check()
        except UserError as error:
            return Finding("reward", False, str(error))
        pair = []
        for rollout, verdict in zip(
            rollouts[-2:],
            (Verdict(True, 1.0, "as if right"), Verdict(False, 0.0, "as if wrong")),
            strict=True,
        ):
            count = len(rollout.trajectory.images)
            pair.append(Judged(rollout, (Verdict(False, 0.0, ""),) * (count - 1) + (verdict,)))
        (right, wrong), _ = self.run.credit(pair)
        values = [right.advantage or 0.0, wrong.advantage or 0.0]
        said = (
            f"right earns {right.reward:.3g}, wrong {wrong.reward:.3g}; advantages "
            f"{values[0]:.3g} and {values[1]:.3g}"
        )
        return Finding("reward", values[0] > 0 > values[1], said)

    def memory(self, rollouts: Sequence[Rollout]) -> Finding:
        config, processes, learner = self.config, self.run.processes, self.learner
        tokens = max(1, self.work.tokens)
        scale = max(1, config.tokens_per_forward // tokens)
        work = Work(*(scale * n for n in vars(self.work).values()))
        plans = plan_run(
            config,
            learner.bagel.config,
            self.profile,
            work,
            strategy=learner.strategy,
            world=processes.world,
            bf16=learner.bagel.dtype == torch.bfloat16,
            keep_bytes=self.run.updater.policy.engine.keep_bytes,
        )
        said = " and ".join(f"{human_size(p.total)} in a {name}" for name, p in plans.items())
        said, fits = f"{said}, each process", True
        if processes.device.type == "cuda":
            have = torch.cuda.get_device_properties(processes.device).total_memory
            said += f", of {human_size(have)}"
            if plans["rollout"].total > have:
                said, fits = f"{said}: lower rollout_batch", False
            if plans["update"].total > have:
                said, fits = f"{said}: lower tokens_per_forward, or set recompute", False
        return Finding("memory", fits, said, {name: dict(p.parts) for name, p in plans.items()})


# --- helpers --------------------------------------------------------------------------------------


def table(settings: DrawSettings) -> torch.Tensor:
    """The published schedule, written out once more: t = s u / (1 + (s - 1) u)."""
    u = torch.linspace(1, 0, settings.points, dtype=torch.float32)
    return settings.timestep_shift * u / (1 + (settings.timestep_shift - 1) * u)


def summed_up(values: torch.Tensor) -> dict[str, float]:
    if not values.numel():
        return {"count": 0, "max": 0.0, "mean": 0.0}
    return {"count": len(values), "max": float(values.max()), "mean": float(values.mean())}


def _largest(pairs: Sequence[tuple[Any, Any]], apart: Callable[[Any, Any], float]) -> float:
    return max((apart(a, b) for a, b in pairs), default=0.0)


def latents_moved(before: Sequence[Rollout], after: Sequence[Rollout]) -> float:
    """The largest difference of a latent number between two sets of rollouts."""
    pairs = [
        (a.latent, b.latent)
        for one, other in zip(before, after, strict=True)
        for (_, a), (_, b) in zip(
            own_images(one.trajectory), own_images(other.trajectory), strict=False
        )
    ]
    return _largest(pairs, lambda a, b: float((a - b).abs().max()))


def words_moved(before: Sequence[Rollout], after: Sequence[Rollout]) -> float:
    """The largest difference of the log-prob of a word that both sets of rollouts say there."""
    pairs = []
    for one, other in zip(before, after, strict=True):
        for a, b in zip(one.trajectory.turns, other.trajectory.turns, strict=False):
            if a.sampled_ids == b.sampled_ids:
                pairs += zip(a.logprobs, b.logprobs, strict=True)
            else:
                pairs.append((0.0, 1.0))  # other words were said
    return _largest(pairs, lambda a, b: abs(a - b))
