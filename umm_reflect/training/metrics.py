"""What a run tells while it runs: a JSONL file, a picture of its curves, a progress line.

with MetricsLog(folder) as log, progress(total, "pre-training") as bar:
    for step in range(total):
        log.log(step, loss=..., lr=...)          # one line in folder/metrics.jsonl
        bar.advance(loss=...)
plot_curves(log.path, folder / "curve.png", {"loss": ["loss"], "held out": ["psnr"]})

python -m umm_reflect.training.metrics RUN/metrics.jsonl curve.png      # one panel a number
"""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from umm_reflect.files import write_aside

if TYPE_CHECKING:
    import torch

FILE = "metrics.jsonl"
# Curves of more points than this get a smoothed line over the pale raw one.
SMOOTHED_FROM = 80
SMOOTHING = 0.03
COLUMNS = 3


class MetricsLog:
    """`metrics.jsonl` in a folder: one object a line with `step`, `seconds` since the start, and
    values.

    from_step: a resumed run's first step; lines of that step and later ones, which it will write
    again, are dropped (None keeps all). A line that a killed run left half-written is dropped too.
    """

    def __init__(self, folder: str | Path, from_step: int | None = None):
        self.path = Path(folder) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = read_metrics(self.path) if self.path.exists() else []
        if from_step is not None:
            kept = [line for line in kept if line["step"] < from_step]
        write_aside(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._before = kept[-1].get("seconds", 0.0) if kept else 0.0
        self._start = time.monotonic()
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, **values: Any) -> None:
        """Append one line. Values are numbers (tensors of one number too), texts, or lists and
        mappings of them; a number that is not finite becomes null."""
        seconds = round(self._before + time.monotonic() - self._start, 3)
        line = {"step": step, "seconds": seconds, **{k: _plain(v) for k, v in values.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value.detach() if hasattr(value, "detach") else value)
    return float(f"{number:.6g}") if math.isfinite(number) else None


def memory_used(device: torch.device) -> dict[str, float]:
    """Peaks of this process in GiB so far: `host_gib` (resident, pages of mapped files too) and on
    a GPU `gpu_gib` (what the allocator holds)."""
    import resource

    import torch

    unit = 1 if sys.platform == "darwin" else 1024
    used = {"host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if device.type == "cuda":
        used["gpu_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
    return used


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines; a last line that a killed run cut off is left out. Raises ValueError for any
    other bad line."""
    lines = []
    texts = Path(path).read_text(encoding="utf-8").split("\n")
    for number, text in enumerate(texts, 1):
        if not text:
            continue
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            if number == len(texts):
                continue
            raise ValueError(f"{path}, line {number} is no JSON object: {error}") from error
    return lines


def series(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one number; "a.b" looks into a mapping. Lines that lack it or hold null
    are left out."""
    steps, values = [], []
    for line in lines:
        value: Any = line
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, int | float):
            steps.append(line["step"])
            values.append(float(value))
    return steps, values


def plot_curves(
    jsonl: str | Path,
    png: str | Path,
    groups: Mapping[str, Sequence[str]] | None = None,
    *,
    title: str = "",
) -> Path:
    """Small multiples over steps, one panel a group: {"panel title": ["key", "other.key"]};
    default: one a number.

    A panel whose values are all positive and span over a factor of 20 is logarithmic; one without
    values is left out. Written aside and renamed. Raises ValueError if no panel has a value.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(jsonl)
    if groups is None:
        keys = dict.fromkeys(key for line in lines for key in line)
        groups = {key: [key] for key in keys if key not in ("step", "seconds")}
    panels = []
    for name, keys in groups.items():
        curves = [(key, *series(lines, key)) for key in keys]
        if curves := [curve for curve in curves if curve[1]]:
            panels.append((name, curves))
    if not panels:
        raise ValueError(f"{jsonl} holds no values of {', '.join(groups) or 'any kind'}")
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.0 * rows + 0.3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, (name, curves) in zip(axes, panels, strict=False):
        _panel(axis, name, curves)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return write_aside(png, picture.getvalue())


def _panel(axis: Any, name: str, curves: Sequence[tuple[str, list[int], list[float]]]) -> None:
    for key, steps, values in curves:
        if len(values) > SMOOTHED_FROM:
            (raw,) = axis.plot(steps, values, linewidth=0.6, alpha=0.3)
            axis.plot(steps, smoothed(values), linewidth=1.5, color=raw.get_color(), label=key)
        else:
            marker = "o" if len(values) < 25 else None
            axis.plot(steps, values, linewidth=1.5, marker=marker, markersize=3, label=key)
    every = [value for _, _, values in curves for value in values]
    if min(every) > 0 and max(every) > 20 * min(every):
        axis.set_yscale("log")
    last = ", ".join(f"{values[-1]:.4g}" for _, _, values in curves)
    axis.set_title(f"{name}  (last: {last})" if len(curves) <= 3 else name, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.set_xlabel("step", fontsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axis.legend(fontsize=7, frameon=False)


def smoothed(values: Sequence[float]) -> list[float]:
    """An exponential average over about SMOOTHING of the curve, without the pull of its start."""
    keep = 1 - 1 / max(1.0, SMOOTHING * len(values))
    total = weight = 0.0
    out = []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(total / weight)
    return out


class Progress:
    """See `progress`. `advance(n, loss=...)` moves it on; values are plain numbers (a tensor would
    wait for the GPU)."""

    def __init__(self, total: float, label: str, every: float, stream: TextIO):
        self.total, self.label, self.every, self.stream = total, label, every, stream
        self.done = 0.0
        self._start = self._said = time.monotonic()
        self._bar = None
        if stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, file=stream, dynamic_ncols=True, leave=True)

    def advance(self, n: float = 1, **values: float) -> None:
        self.done += n
        if self._bar is not None:
            self._bar.update(n)
            if values:
                self._bar.set_postfix({k: f"{v:.4g}" for k, v in values.items()}, refresh=False)
            return
        now = time.monotonic()
        if now - self._said >= self.every:
            self._said = now
            self._say(values)

    def _say(self, values: Mapping[str, float]) -> None:
        seconds = time.monotonic() - self._start
        pace = f"{self.done / seconds:.3g}/s" if seconds > 0 else ""
        numbers = "".join(f"  {key} {value:.4g}" for key, value in values.items())
        print(
            f"{self.label}: {self.done:.0f}/{self.total:.0f}  {seconds:.0f} s  {pace}{numbers}",
            file=self.stream,
            flush=True,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def progress(
    total: float, label: str, *, every: float = 15.0, stream: TextIO | None = None
) -> Progress:
    """A tqdm bar on a terminal, elsewhere one line every `every` seconds; on stderr unless `stream`
    is given.

    total: in whatever `advance` counts (steps, seconds).
    """
    return Progress(total, label, every, sys.stderr if stream is None else stream)


def tracker(
    kind: Literal["none", "tensorboard", "wandb"], folder: Path, config: Any
) -> Callable[[int, Mapping[str, float]], Any] | None:
    """A function of (step, values) that sends metrics on; None without a tracker. config: the
    settings dataclass of the run, which wandb shows."""
    if kind == "none":
        return None
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(folder / "tensorboard")
        return lambda step, values: [writer.add_scalar(n, v, step) for n, v in values.items()]
    import wandb

    from umm_reflect.settings import to_mapping

    wandb.init(project="umm-reflect", dir=str(folder), config=to_mapping(config))
    return lambda step, values: wandb.log(dict(values), step=step)


if __name__ == "__main__":
    plot_curves(sys.argv[1], sys.argv[2])
