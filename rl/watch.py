"""Watches a run for collapse: alarms with a reason, and when to go back to the best checkpoint.

    watch = Watch(WatchSettings())
    report = watch.see(step, {"entropy": 0.4, "format": 0.99, "reward": 0.61})
    for alarm in report.alarms:
        print(alarm.reason)              # "format: 0.71 is below 0.9 (mean of 5 steps)"
    if report.back_to:                   # load that checkpoint's weights; the watch starts afresh
        ...
    watch.evaluated(step, "step-40", 0.73)     # a checkpoint was saved and has this held-out metric
    saved = watch.state()                      # plain numbers for a resume file: Watch(..., saved)

Nothing here reads a model, a clock or a file: the same numbers give the same decisions, also after
a resume. Signals are optional; a rule without its signal is silent. `picture_signals` measures
images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from PIL.Image import Image, Resampling


@dataclass(frozen=True)
class Limit:
    """What the running mean of a signal may be; None: no limit on that side."""

    low: float | None = None
    high: float | None = None
    relative: bool = False
    """The limits are multiples of the mean at the start of the run."""
    margin: float = 0.0
    """A relative limit is passed only by more than this (for signals that start near 0)."""
    returns: bool = False
    """Passing it for long goes back to the best checkpoint; else it is only said."""

    def __post_init__(self) -> None:
        given = [side for side in (self.low, self.high) if side is not None]
        if not all(map(math.isfinite, (*given, self.margin))) or self.margin < 0:
            raise ValueError(f"limits {given} with margin {self.margin} must be finite numbers")
        if len(given) == 2 and given[0] > given[1]:
            raise ValueError(f"a limit from {self.low} to {self.high} leaves nothing between")

    def broken(self, value: float, start: float | None) -> str | None:
        """ "below 0.9", "above 3 x its start 0.12", or None. start: the signal's mean at the
        start of the run, None while that is not known."""
        if self.relative and start is None:
            return None
        unit = abs(start) if self.relative and start is not None else 1.0
        for side, limit, sign in (("below", self.low, -1), ("above", self.high, 1)):
            if limit is None:
                continue
            margin = self.margin if self.relative else 0.0
            if sign * (value - limit * unit) > margin:
                return f"{side} {limit:g}" + (f" x its start {start:.3g}" if self.relative else "")
        return None


@dataclass(frozen=True)
class WatchSettings:
    """The signals and their limits. A step's value is smoothed before it is compared."""

    smoothing: int = 5
    """Steps that the running mean is over."""
    start: int = 5
    """Steps at the start of the run that relative limits compare with."""
    patience: int = 3
    """Steps in a row outside a limit before the run goes back."""
    max_returns: int = 2
    """Returns to the best checkpoint; the next one stops the run."""
    reward_drop: float | None = 0.3
    """How far the smoothed reward may fall below its best before the run goes back."""
    held_out_drop: float | None = 0.1
    """How far the held-out metric may fall below its best before the run goes back."""

    entropy: Limit = Limit(0.05, 4.0, relative=True, margin=0.02)
    """Of the distributions that words are sampled from."""
    format: Limit = Limit(0.9, returns=True)
    """Share of trajectories without a malformed turn."""
    velocity_ratio: Limit = Limit(0.8, 1.2, returns=True)
    """|v| / |v_ref|, of the trained model against the reference."""
    saturation: Limit = Limit(0.3, 3.0, relative=True, margin=0.05, returns=True)
    """Mean saturation of the colours."""
    clipped: Limit = Limit(None, 3.0, relative=True, margin=0.2, returns=True)
    """Share of pixels that are black or white."""
    edges: Limit = Limit(0.3, 3.0, relative=True, margin=0.01, returns=True)
    """Mean difference of neighbouring pixels: 0 in a blank image, high in an over-sharp one."""
    diversity: Limit = Limit(0.3, None, relative=True, returns=True)
    """How much the images of different prompts differ."""
    clip_fraction: Limit = Limit(None, 0.9)
    """Share of tokens and steps whose gradient the ratio clip took."""
    kl: Limit = Limit(None, 0.5, returns=True)
    """Of words, to the reference or to the rollout's policy."""
    flow_kl: Limit = Limit(None, 0.5, returns=True)
    """Of images, to the reference."""
    flat: Limit = Limit(None, 0.98)
    """Share of groups whose members all earn the same: nothing to learn from."""
    grad_norm: Limit = Limit(1e-12, None)
    """Of the update: 0 is a run in which nothing happens."""

    def __post_init__(self) -> None:
        for name in ("smoothing", "start", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"watch {name} is {getattr(self, name)}; give at least 1")
        if self.max_returns < 0:
            raise ValueError(f"watch max_returns is {self.max_returns}; give 0 or more")
        for name in ("reward_drop", "held_out_drop"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"watch {name} is {value}; give a number above 0")

    @property
    def limits(self) -> dict[str, Limit]:
        """By signal."""
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Limit)}


SIGNALS = (*WatchSettings().limits, "reward")


@dataclass(frozen=True)
class Alarm:
    """A limit that is passed. steps: for how many steps in a row."""

    step: int
    signal: str
    value: float
    reason: str
    returns: bool
    steps: int

    def to_record(self) -> dict[str, Any]:
        """For the metrics file; a value that is no number is None."""
        value = self.value if math.isfinite(self.value) else None
        return {"signal": self.signal, "value": value, "reason": self.reason, "steps": self.steps}


@dataclass(frozen=True)
class Report:
    """What a step gave. back_to: the checkpoint to go back to. stop: why the run must end."""

    alarms: tuple[Alarm, ...] = ()
    back_to: str | None = None
    stop: str | None = None


@dataclass(frozen=True)
class Best:
    """The checkpoint with the highest held-out metric; the earlier of equals."""

    name: str
    step: int
    value: float


@dataclass
class _Signal:
    """recent: the last values. first: those that make up the start of the run."""

    recent: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    streak: int = 0


class Watch:
    """The state of the watch over a run. saved: what `state` gave, to go on from there."""

    def __init__(self, settings: WatchSettings, saved: Mapping[str, Any] | None = None):
        self.settings = settings
        self.best: Best | None = None
        self.returns = 0
        self._best_reward: float | None = None
        self._signals = {name: _Signal() for name in SIGNALS}
        self._held_out: Alarm | None = None
        if saved is not None:
            self._load(saved)

    def see(self, step: int, signals: Mapping[str, float | None]) -> Report:
        """Take in one step's signals (None: not measured) and say what to do.

        Going back resets the running means, not what the start of the run looked like. Errors:
        ValueError for a signal that no rule knows.
        """
        if unknown := sorted(set(signals) - set(SIGNALS)):
            raise ValueError(f"no rule knows {', '.join(unknown)}; signals: {', '.join(SIGNALS)}")
        alarms = [self._held_out] if self._held_out else []
        self._held_out = None
        for name, value in signals.items():
            if value is not None and (alarm := self._take(step, name, float(value))):
                alarms.append(alarm)
        if not (grave := [alarm for alarm in alarms if self._is_grave(alarm)]):
            return Report(tuple(alarms))
        why = "; ".join(alarm.reason for alarm in grave)
        if self.best is None:
            stop = f"collapse at step {step}, with no evaluated checkpoint to go back to: {why}"
            return Report(tuple(alarms), stop=stop)
        if self.returns >= self.settings.max_returns:
            stop = (
                f"collapse at step {step} after {self.returns} returns to earlier checkpoints: "
                f"{why}. The best one is {self.best.name}; try a lower learning rate"
            )
            return Report(tuple(alarms), stop=stop)
        self.returns += 1
        for signal in self._signals.values():
            signal.recent, signal.streak = [], 0
        self._best_reward = None  # it may have been a hacked one, which no honest step reaches
        return Report(tuple(alarms), back_to=self.best.name)

    def evaluated(self, step: int, name: str, value: float) -> bool:
        """A checkpoint and its held-out metric (higher is better). Whether it is the best so far.

        A fall below the best by more than held_out_drop is an alarm of the next `see`.
        """
        if not math.isfinite(value):
            raise ValueError(f"the held-out metric of {name} is {value}")
        if self.best is None or value > self.best.value:
            self.best = Best(name, step, value)
            return True
        drop = self.settings.held_out_drop
        if drop is not None and self.best.value - value > drop:
            reason = (
                f"held out: {value:.3g} is more than {drop:g} below {self.best.value:.3g} of "
                f"{self.best.name}"
            )
            self._held_out = Alarm(step, "held_out", value, reason, True, self.settings.patience)
        return False

    def _is_grave(self, alarm: Alarm) -> bool:
        return alarm.returns and alarm.steps >= self.settings.patience

    def _take(self, step: int, name: str, value: float) -> Alarm | None:
        """The alarm that a signal's new value raises, if any."""
        signal, settings = self._signals[name], self.settings
        if not math.isfinite(value):
            reason = f"{name}: {value} is no number"
            return Alarm(step, name, value, reason, True, settings.patience)
        signal.recent = [*signal.recent, value][-settings.smoothing :]
        if len(signal.first) < settings.start:
            signal.first.append(value)
        if len(signal.recent) < settings.smoothing:
            return None
        mean = math.fsum(signal.recent) / len(signal.recent)
        broken, returns = self._broken(name, mean)
        signal.streak = signal.streak + 1 if broken else 0
        if broken is None:
            return None
        of = f" (mean of {settings.smoothing} steps)" if settings.smoothing > 1 else ""
        reason = f"{name}: {mean:.3g} is {broken}{of}"
        return Alarm(step, name, mean, reason, returns, signal.streak)

    def _broken(self, name: str, mean: float) -> tuple[str | None, bool]:
        if name != "reward":
            limit, first = self.settings.limits[name], self._signals[name].first
            whole = len(first) == self.settings.start
            return limit.broken(mean, math.fsum(first) / len(first) if whole else None), (
                limit.returns
            )
        best = self._best_reward = max(
            mean, mean if self._best_reward is None else self._best_reward
        )
        drop = self.settings.reward_drop
        if drop is None or best - mean <= drop:
            return None, True
        return f"more than {drop:g} below its best {best:.3g}", True

    def state(self) -> dict[str, Any]:
        """All of it as plain numbers and texts (JSON)."""
        best, held_out = self.best, self._held_out
        return {
            "best": None if best is None else [best.name, best.step, best.value],
            "returns": self.returns,
            "best_reward": self._best_reward,
            "held_out": None
            if held_out is None
            else [held_out.step, held_out.value, held_out.reason],
            "signals": {
                name: [list(signal.recent), list(signal.first), signal.streak]
                for name, signal in self._signals.items()
            },
        }

    def _load(self, saved: Mapping[str, Any]) -> None:
        if odd := sorted(set(saved["signals"]) ^ set(SIGNALS)):
            raise ValueError(f"the saved watch knows other signals: {', '.join(odd)}")
        self.best = None if saved["best"] is None else Best(*saved["best"])
        self.returns, self._best_reward = saved["returns"], saved["best_reward"]
        if saved["held_out"] is not None:
            step, value, reason = saved["held_out"]
            self._held_out = Alarm(step, "held_out", value, reason, True, self.settings.patience)
        for name, (recent, first, streak) in saved["signals"].items():
            self._signals[name] = _Signal(list(recent), list(first), streak)


# --- pictures -------------------------------------------------------------------------------------

_DARK, _BRIGHT = 5, 250  # of 255: a pixel that is black or white
_THUMBNAIL = (8, 8)


def picture_signals(images: Sequence[Image]) -> dict[str, float]:
    """saturation, clipped, edges, diversity of a step's images, each from 0 to 1; {} of none.

    Give one image of each group (the last one of its first member, say), so that diversity is that
    between prompts; of a single image it is left out.
    """
    if not images:
        return {}
    rows, thumbnails = [], []
    for image in images:
        rgb = np.asarray(image.convert("RGB"), dtype=np.float32)
        high, low = rgb.max(-1), rgb.min(-1)
        saturation = np.where(high > 0, (high - low) / np.maximum(high, 1), 0).mean()
        clipped = ((low >= _BRIGHT) | (high <= _DARK)).mean()
        grey = rgb.mean(-1) / 255
        steps = [np.abs(np.diff(grey, axis=axis)) for axis in (0, 1)]
        edges = np.concatenate([step.ravel() for step in steps])
        rows.append((saturation, clipped, edges.mean() if edges.size else 0.0))
        thumbnail = image.convert("RGB").resize(_THUMBNAIL, Resampling.BOX)
        thumbnails.append(np.asarray(thumbnail, dtype=np.float32) / 255)
    names = ("saturation", "clipped", "edges")
    found = dict(zip(names, np.mean(rows, axis=0, dtype=np.float64).tolist(), strict=True))
    if len(images) > 1:
        found["diversity"] = float(np.stack(thumbnails).std(axis=0).mean())
    return found
