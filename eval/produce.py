"""One batch of samples: trajectories and the verdicts of all their images, in this process.

    produce = Producer(config, Generator(config, run, Loader(config, run)))
    made = produce(batch)                 # made.results, made.trajectories, made.seconds
    produce.placed(1, of=4)               # the same for process 1 of 4, on GPU 1

What is here can be pickled as long as nothing was made with it: work_queue.py sends it to other
processes, and there the weights are loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from agent.config import loop_options
from eval.binding import verifier_sha256
from eval.candidates import candidate_names, look_once
from eval.config import EvalConfig
from eval.judges import Judges
from eval.prepare import Run
from eval.results import Result, Sample, result_of
from umm_reflect.errors import UserError

if TYPE_CHECKING:
    from agent.policy import Policy
    from agent.types import EditView, Trajectory, Turn

MakePolicy = Callable[["EditView"], "Policy"]  # called for each batch: policies remember images


class Source(Protocol):
    """Where trajectories come from: a model, or files."""

    def __call__(self, batch: Sequence[Sample]) -> list[Trajectory]: ...

    def candidates(self, batch: Sequence[Sample], n: int) -> list[list[Trajectory]]:
        """Candidates 1 to n - 1 of each sample, see candidates.py."""

    def on(self, device: str) -> Source:
        """The same on another device."""


@dataclass
class Loader:
    """Loads the model when the first policy is asked for: a finished run needs none."""

    config: EvalConfig
    run: Run
    _loaded: list = field(default_factory=list, repr=False)

    def __call__(self, view: EditView) -> Policy:
        from agent.policy import BagelPolicy
        from eval.profiles import ReleasePolicy, repair_rng_step
        from umm_reflect import Bagel

        config = self.config
        if not self._loaded:
            how = {"device": config.device, "dtype": config.dtype, "attn": config.attn}
            folder = str(self.run.folder)
            self._loaded.append(Bagel.from_pretrained(folder, adapter=config.adapter, **how))
        profile = self.run.profiles[view]
        if config.profile == "release":
            step = repair_rng_step(config)
            return ReleasePolicy(self._loaded[0], profile, repair_rng_step=step)
        return BagelPolicy(self._loaded[0], profile)

    def on(self, device: str) -> Loader:
        return Loader(replace(self.config, device=device), self.run)


@dataclass
class Generator:
    """Trajectories of a model: the loop over one batch."""

    config: EvalConfig
    run: Run
    make_policy: MakePolicy

    def __call__(self, batch: Sequence[Sample]) -> list[Trajectory]:
        from agent.loop import run_episodes

        names = [sample.name for sample in batch]
        return self._run(run_episodes, batch, names, max_rounds=self.config.max_rounds)

    def candidates(self, batch: Sequence[Sample], n: int) -> list[list[Trajectory]]:
        """One batch for each number, so that it takes no more memory than the trajectories."""
        names = [candidate_names(sample.name, n) for sample in batch]
        made = [self._run(look_once, batch, some) for some in zip(*names, strict=True)]
        return [list(some) for some in zip(*made, strict=True)]

    def _run(
        self, loop: Callable, batch: Sequence[Sample], names: Sequence[str], **how
    ) -> list[Trajectory]:
        view, seed = batch[0].edit_view, batch[0].seed
        try:
            return loop(
                self.make_policy(view),
                [self.config.request(sample) for sample in batch],
                max_tokens=self.run.profiles[view].say.max_tokens,
                options=loop_options(self.config.reflect_config(seed, view)),
                seed=seed,
                samples=names,
                **how,
            )
        except FloatingPointError as error:
            raise UserError(str(error), "Check the checkpoint.") from error

    def on(self, device: str) -> Generator:
        maker = self.make_policy
        return replace(self, make_policy=maker.on(device) if hasattr(maker, "on") else maker)


@dataclass(frozen=True)
class Made:
    """What became of a batch; no results where only images are wanted.

    candidates: of each sample, none without --best-of. seconds: generate, judge. judges: their
    manifests, by set.
    """

    results: list[Result]
    trajectories: list[Trajectory]
    candidates: list[list[Trajectory]]
    seconds: dict[str, float]
    judges: dict[str, dict[str, Any]]


class Producer:
    """Generates a batch and judges every image of it. Use it in a `with`."""

    def __init__(self, config: EvalConfig, source: Source, *, device: str | None = None):
        self.config, self.source, self.device = config, source, device
        self._judges: Judges | None = None

    def __call__(self, batch: Sequence[Sample]) -> Made:
        began = time.perf_counter()
        trajectories = self.source(batch)
        candidates: list[list[Trajectory]] = [[] for _ in batch]
        if self.config.best_of:
            candidates = self.source.candidates(batch, self.config.best_of)
        seconds = {"generate": time.perf_counter() - began}
        if self.config.predict_only:
            return Made([], trajectories, candidates, seconds, {})
        if self._judges is None:
            self._judges = Judges(self.config, device=self.device or self.config.device)
        began = time.perf_counter()
        results = _judge(self._judges, trajectories, candidates, batch)
        seconds["judge"] = time.perf_counter() - began
        return Made(results, trajectories, candidates, seconds, self._judges.manifests())

    def placed(self, place: int, of: int) -> Producer:
        """The same for one process of several: its own GPU, its share of the cores for judging."""
        from eval.judging import cores
        from umm_reflect.device import resolve_device

        workers = self.config.workers or max(1, cores() // of)
        kind = resolve_device(self.config.device).type
        device = kind if kind in ("cpu", "mps") else f"{kind}:{place}"
        config = replace(self.config, workers=workers)
        return Producer(config, self.source.on(device), device=device)

    def close(self) -> None:
        if self._judges is not None:
            self._judges.__exit__(None, None, None)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _judge(
    judges: Judges,
    trajectories: Sequence[Trajectory],
    candidates: Sequence[Sequence[Trajectory]],
    batch: Sequence[Sample],
) -> list[Result]:
    """Every image of every trajectory is judged, all of them in one go."""
    owners = [
        (image, sample.entry.row)
        for trajectory, more, sample in zip(trajectories, candidates, batch, strict=True)
        for image in (*trajectory.images, *(one.images[0] for one in more))
    ]
    images, rows = [image for image, _ in owners], [row for _, row in owners]
    verdicts = iter(judges(images, rows, batch[0].set))
    verifier = verifier_sha256(judges.manifests()[batch[0].set])
    results = []
    for trajectory, more, sample in zip(trajectories, candidates, batch, strict=True):
        own = [next(verdicts) for _ in trajectory.images]
        beside = [(one, next(verdicts)) for one in more]
        results.append(result_of(trajectory, own, sample, verifier, beside))
    return results


def without_contexts(trajectory: Trajectory) -> Trajectory:
    """The same trajectory without what each head saw: small enough to send to another process."""

    def turn(one: Turn) -> Turn:
        return replace(one, context=None)

    def drawn(one):
        return one and replace(one, view=None, segment=None)

    return replace(
        trajectory,
        plan=trajectory.plan and turn(trajectory.plan),
        plan_rejected=tuple(map(turn, trajectory.plan_rejected)),
        first=drawn(trajectory.first),
        steps=tuple(
            replace(
                step,
                turn=turn(step.turn),
                transition=drawn(step.transition),
                rejected=tuple(map(turn, step.rejected)),
            )
            for step in trajectory.steps
        ),
    )
