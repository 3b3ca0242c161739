"""How fast text is said: eager steps against steps captured into CUDA graphs.

    python -m agent.decode_speed --rows 1,48,384 --tokens 100
    python -m agent.decode_speed --model /path/to/BAGEL-7B-MoT --rows 1,8 --output speed.json

Rows look at one image under prompts of several lengths and say the same forced texts both ways, so
that their log-probs can be compared. A first, shorter eager run warms up and samples the texts; the
timed captured run is the second one (the first sets libraries up). Times are those of whole calls
of `say`, captures and the reading of the forced prefix included; reading the contexts is not. On a
CPU the same static steps run without a graph.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.clocks import Stopwatch
from agent.config import NANO
from umm_reflect.files import write_aside
from umm_reflect.settings import parse

if TYPE_CHECKING:
    from umm_reflect.cache import KVCache
    from umm_reflect.generate import Said
    from umm_reflect.model import Bagel

PREFIX = "<think>\n[CURRENT_ROUND] Round#1\n[SCORE] "
REQUEST = "two red circles left of a blue square and a green star"
# Tokens of each text that are sampled; the rest repeats them.
SAMPLED = 24


@dataclass(frozen=True)
class Config:
    """Tokens a second of text, eager and captured, and how far their log-probs are apart."""

    model: str = NANO
    """A folder, a hub id or id@revision."""
    rows: str = "1,48,384"
    """How many texts at once; several numbers with commas."""
    tokens: int = 100
    """Tokens of each text."""
    uneven: bool = False
    """Texts of a quarter of the tokens up to all of them, so that rows finish."""
    device: str = "auto"
    """auto, cuda, cpu, mps or npu."""
    dtype: str = "auto"
    """auto, bfloat16, float16 or float32."""
    attn: str = "auto"
    """The attention kernel."""
    seed: int = 0
    """Of the texts."""
    output: Path | None = None
    """Also write the figures here."""

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"--tokens is {self.tokens}; give 2 or more")
        try:
            counts = self.counts
        except ValueError:
            counts = []
        if not counts or min(counts) < 1:
            raise ValueError(f"--rows is '{self.rows}'; give numbers with commas, like 1,48")

    @property
    def counts(self) -> list[int]:
        return [int(word) for word in self.rows.split(",")]


def measure(config: Config) -> dict[str, Any]:
    """Load and time; returns the figures as plain values."""
    import torch

    from umm_reflect import Bagel
    from umm_reflect.hub import resolve

    folder = resolve(config.model)
    bagel = Bagel.from_pretrained(
        folder, device=config.device, dtype=config.dtype, attn=config.attn
    )
    gpu = bagel.device.type == "cuda"
    return {
        "model": folder.name,
        "device": torch.cuda.get_device_name(bagel.device) if gpu else str(bagel.device),
        "torch": torch.__version__,
        "dtype": str(bagel.dtype).removeprefix("torch."),
        "tokens": config.tokens,
        "uneven": config.uneven,
        "runs": [_timed(bagel, folder, config, rows) for rows in config.counts],
    }


def _timed(bagel: Bagel, folder: Path, config: Config, rows: int) -> dict[str, Any]:
    watch = Stopwatch(bagel.device)
    caches = _caches(bagel, folder, rows)
    force = _texts(bagel, caches, config)
    bagel.capture = None
    with watch.part("eager") as eager:
        expected = _say(bagel, caches, config, force, capture=False)
    with watch.part("first captured") as first:
        _say(bagel, caches, config, force, capture=True)
    with watch.part("captured") as captured:
        said = _say(bagel, caches, config, force, capture=True)
    apart = [
        abs(a - b)
        for one, other in zip(said, expected, strict=True)
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    ]
    count = sum(map(len, force))
    return {
        "rows": rows,
        "context_tokens": [min(c.length for c in caches), max(c.length for c in caches)],
        "eager_tokens_per_second": count / eager.seconds,
        "captured_tokens_per_second": count / captured.seconds,
        "first_captured_seconds": first.seconds,
        "seconds": [eager.seconds, captured.seconds],
        "capture_seconds": _capture_seconds(bagel, caches, config),
        "fell_back": bagel.capture is False,
        "logprob_difference_largest": max(apart),
        "logprob_difference_mean": sum(apart) / len(apart),
    }


def _caches(bagel: Bagel, folder: Path, rows: int) -> list[KVCache]:
    """Rows as the agent has them: a system prompt, a request, and one image for all."""
    from PIL import Image

    from umm_reflect.context import Context
    from umm_reflect.generate import Engine
    from umm_reflect.hub import profile

    run = profile(folder)
    height, width = run.size
    image = run.transforms.segment(Image.new("RGB", (width, height), (90, 140, 200)))
    start = [bagel.tokens.segment(run.system_prompt)] if run.system_prompt else []
    words = REQUEST.split()
    requests = [bagel.tokens.segment(" ".join(words[: 3 + row % 9])) for row in range(rows)]
    contexts = [Context.of(*start, request, image) for request in requests]
    return Engine(bagel).caches(contexts)


def _texts(bagel: Bagel, caches: Sequence[KVCache], config: Config) -> list[list[int]]:
    """What each row is made to say: what it samples, over and over."""
    sampled = _say(bagel, caches, config, None, capture=False, most=min(SAMPLED, config.tokens))
    texts = []
    for row, said in enumerate(sampled):
        ids = [i for i in said.sampled_ids if i != bagel.frame.end] or [bagel.frame.start]
        length = config.tokens
        if config.uneven:
            length = max(1, length * (1 + 3 * row // max(1, len(caches) - 1)) // 4)
        texts.append((ids * length)[:length])
    return texts


def _say(
    bagel: Bagel,
    caches: Sequence[KVCache],
    config: Config,
    force: Sequence[Sequence[int]] | None,
    *,
    capture: bool,
    most: int | None = None,
) -> list[Said]:
    from umm_reflect.generate import say
    from umm_reflect.rng import stream

    return say(
        bagel,
        caches,
        forced=[tuple(bagel.tokens.encode(PREFIX))] * len(caches),
        temperature=1.0,
        max_tokens=most or config.tokens,
        generators=[stream(config.seed, row, 0, "say") for row in range(len(caches))],
        force=force,
        capture=capture and bagel.capture is not False,
    )


def _capture_seconds(bagel: Bagel, caches: Sequence[KVCache], config: Config) -> float | None:
    """Of one capture with the step that warms it up; None where nothing is captured."""
    import torch

    from umm_reflect.decode import StaticDecoder

    pieces = [(bagel.frame.start,)] * len(caches)
    with torch.inference_mode():
        decoder = StaticDecoder(bagel, caches, pieces, config.tokens, config.tokens)
        try:
            decoder.step(torch.full((len(caches),), bagel.frame.start, device=bagel.device))
            return decoder.captures[0] if decoder.captures else None
        finally:
            decoder.close()


def table(figures: dict[str, Any]) -> list[str]:
    """The figures as lines of text."""
    names = ("rows", "eager", "captured", "gain", "one capture", "log-probs apart: most, mean")
    widths = (6, 14, 14, 7, 13, 29)
    lines = [
        f"{figures['model']}, {figures['dtype']}, {figures['device']}, torch {figures['torch']}: "
        f"{figures['tokens']} tokens a text, tokens a second",
        "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)),
    ]
    for run in figures["runs"]:
        eager, captured = run["eager_tokens_per_second"], run["captured_tokens_per_second"]
        capture = run["capture_seconds"]
        most, mean = run["logprob_difference_largest"], run["logprob_difference_mean"]
        cells = (
            str(run["rows"]),
            f"{eager:.1f}",
            "fell back" if run["fell_back"] else f"{captured:.1f}",
            f"{captured / eager:.2f}x",
            "none" if capture is None else f"{1000 * capture:.1f} ms",
            f"{most:.2g}, {mean:.2g}",
        )
        lines.append("".join(f"{c:>{width}}" for c, width in zip(cells, widths, strict=True)))
    return lines


def main(argv: Sequence[str]) -> int:
    """The program: prints the table, returns 0; errors rise (see `cli.run_program`)."""
    config = parse(Config, argv, "python -m agent.decode_speed")
    figures = measure(config)
    print("\n".join(table(figures)))
    if config.output is not None:
        write_aside(config.output, json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
