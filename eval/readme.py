"""Put measured figures into README.md and the model card: no number there is typed by hand.

    python -m eval.readme            # rewrites the blocks between <!-- figures:NAME --> marks
    python -m eval.readme --check    # exit code 1 when a block differs from its result file

The figures come from files that commands wrote: `umm-reflect eval` (results/*/summary.json),
`python -m agent.full_size` (full_size.json), `python -m agent.decode_speed`, `python -m
eval.detector_speed`, `umm-reflect sft` (metrics.jsonl), and the scripts of scripts/rl, all kept
under pretrained/.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from umm_reflect.files import write_aside

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "pretrained" / "bagel-nano-shapes"
FILES = (ROOT / "README.md", NANO / "README.md")
RESULTS = NANO / "results"
SFT = (
    (
        "BAGEL-7B, LoRA of both experts, pictures of 512²",
        "pretrained/results/sft_lora_512_h200.jsonl",
    ),
    (
        "BAGEL-7B, LoRA of both experts, pictures of 1024²",
        "pretrained/results/sft_lora_1024_h200.jsonl",
    ),
    ("nano, all weights", "pretrained/bagel-nano-shapes/results/sft/metrics.jsonl"),
)
FULL_SIZE = ROOT / "pretrained" / "results" / "full_size_h200.json"
DECODE = ROOT / "pretrained" / "results" / "decode_speed_nano_h200.json"
VERIFIER = ROOT / "pretrained" / "results" / "verifier_speed_h200.json"
RL = ROOT / "pretrained" / "results" / "rl_full_size_h200.json"
# Folders of scripts/rl/compare_objectives.sh and scripts/rl/nano.sh.
OBJECTIVES = ROOT / "pretrained" / "results" / "objectives_nano_h200"
REFLECTION = ROOT / "pretrained" / "results" / "rl_nano_h200"
MARK = re.compile(r"(<!-- figures:([\w-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)

LINES = {
    "accuracy_at_0": "first image right",
    "accuracy_at_1": "right within one edit",
    "accuracy_at_2": "right within two edits",
    "accuracy_at_3": "right within three edits",
    "final_accuracy": "image handed out right",
    "repair": "wrong first images that end right",
    "damage": "right first images that end wrong",
    "look_on_right": "looks at right images that say done",
    "look_on_wrong": "looks at wrong images that say edit",
    "protocol_valid": "turns all in legal form",
}


def evaluation() -> str:
    """One column a test set and edit view, one line a figure, with 95 % intervals."""
    paths = sorted(RESULTS.glob("*/summary.json"))
    if not paths:
        raise ValueError(f"{RESULTS} holds no results: run umm-reflect eval and put them there")
    columns = [
        (name, view, result)
        for path in paths
        for name, views in json.loads(path.read_text(encoding="utf-8"))["sets"].items()
        for view, result in views.items()
        if isinstance(result, dict) and "all" in result
    ]
    order = ("shapes553", "compound", "hard")
    columns.sort(key=lambda column: (order.index(column[0]), column[1] != "local"))
    head = [f"{name}, {view}" for name, view, _ in columns]
    sizes = [f"{r['rows']} prompts, seeds {', '.join(map(str, r['seeds']))}" for *_, r in columns]
    lines = [
        "| | " + " | ".join(head) + " |",
        "|---" * (len(head) + 1) + "|",
        "| | " + " | ".join(sizes) + " |",
    ]
    for key, label in LINES.items():
        cells = [_percent(result["all"].get(key)) for *_, result in columns]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _percent(estimate: dict | None, sign: str = "") -> str:
    """sign: "+" for differences."""
    if not estimate or estimate["value"] is None:
        return "-"
    value, low, high = (100 * estimate[k] for k in ("value", "low", "high"))
    return f"{value:{sign}.1f} ({low:{sign}.1f} to {high:{sign}.1f})"


def full_size() -> str:
    """What a full-size model costs: seconds and memory of one run on random weights."""
    told = json.loads(FULL_SIZE.read_text(encoding="utf-8"))
    gib = 2**30
    pictures = [p for p in told["parts"] if p["name"].startswith("picture")]
    turns = [p for p in told["parts"] if p["name"].startswith("turn")]
    tokens = told["turn_tokens"]
    edits = [p["seconds"] for p in pictures[1:]]
    speed = [n / t["own"] for n, t in zip(tokens, turns, strict=True)]
    steps = "captured steps" if told.get("captured") else "eager steps"
    rows = [
        ("load 29.2 GB (from the page cache)", f"{told['load_seconds']:.1f} s"),
        ("host memory while loading", f"{told['host_grown_by_weights']:.2f} x the weights"),
        ("peak GPU memory", f"{told['gpu_peak_reserved_bytes'] / gib:.1f} GiB"),
        ("first image (two branches, cold start)", f"{pictures[0]['seconds']:.1f} s"),
        ("an edit (three branches)", f"{min(edits):.1f} to {max(edits):.1f} s"),
        ("a guided step", f"{told['step']['guided']['tflop_per_second']:.0f} TFLOP/s"),
        (f"text, {steps}", f"{min(speed):.0f} to {max(speed):.0f} tokens/s"),
    ]
    lines = [f"| {told['device']}, {told['size']}², {told['points']} points | |", "|---|---|"]
    return "\n".join(lines + [f"| {what} | {figure} |" for what, figure in rows]) + "\n"


def decode() -> str:
    """How fast nano speaks by eager steps and by captured ones, and how far log-probs are apart."""
    told = json.loads(DECODE.read_text(encoding="utf-8"))
    lines = [
        f"| nano, {told['device']}, {told['dtype']}, texts of {told['tokens']} tokens "
        "| eager steps | captured steps | log-probs apart: at most, in the mean |",
        "|---|---|---|---|",
    ]
    for run in told["runs"]:
        eager, captured = run["eager_tokens_per_second"], run["captured_tokens_per_second"]
        most, mean = run["logprob_difference_largest"], run["logprob_difference_mean"]
        lines.append(
            f"| {run['rows']} at a time | {eager:,.0f} tokens/s | {captured:,.0f} tokens/s "
            f"| {most:.2g}, {mean:.2g} |"
        )
    return "\n".join(lines) + "\n"


def sft() -> str:
    """How fast the SFT trainer ran: medians over the second half of each run's lines of metrics."""
    lines = ["| one NVIDIA H200 | tokens/s | MFU | GPU memory |", "|---|---|---|---|"]
    for name, path in SFT:
        told = [json.loads(line) for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
        steps = [line for line in told if "tokens_per_second" in line]
        late = steps[len(steps) // 2 :]
        speed, share = (median(line[k] for line in late) for k in ("tokens_per_second", "mfu"))
        held = f"{max(line['gpu_gib'] for line in steps):.1f} GiB"
        lines.append(f"| {name} | {speed:,.0f} | {share:.0%} | {held} |")
    return "\n".join(lines) + "\n"


def verifier() -> str:
    """How fast the GenEval verifier is with random weights."""
    told = json.loads(VERIFIER.read_text(encoding="utf-8"))
    size, batch = told["image"][0], told["batch_size"]
    rows = [
        ("detector, images/s", told["detector_images_per_second"]),
        ("CLIP, crops/s", told["clip_crops_per_second"]),
        ("BLIP-VQA, questions/s", told["blip_questions_per_second"]),
        ("all three, images/s (two coloured objects)", told["verifier_images_per_second"]),
    ]
    lines = [
        f"| {told['device']}, {size}², fp32 | {batch} at a time | one at a time |",
        "|---|---|---|",
    ]
    lines += [f"| {n} | {v['batched']:.1f} | {v['one_at_a_time']:.1f} |" for n, v in rows]
    return "\n".join(lines) + "\n"


def rl() -> str:
    """How fast an RL step of the full-size model is, by phase, and the whole recipe by these."""
    told = json.loads(RL.read_text(encoding="utf-8"))
    found = {name: told[name] for name in told["config"]["recipes"]}
    turns = told["config"]["turn_tokens"]

    def seconds(of: dict, phase: str) -> str:
        return f"{of['seconds'].get(phase, 0.0):.1f} s"

    def drawn(of: dict) -> str:
        return f"{seconds(of, 'draw')} ({of['mfu']['draw']:.0%} of the peak)"

    def learned(of: dict) -> str:
        return f"{sum(of['seconds'][phase] for phase in ('compare', 'forward', 'backward')):.1f} s"

    def memory(of: dict) -> str:
        return f"{max(of['peak_bytes'].values()) / 2**30:.0f} GiB"

    def whole(of: dict) -> str:
        size = of["published"]
        return (
            f"{size['images']} images, {size['seconds'] / 60:.0f} minutes, "
            f"**{size['images_per_gpu_second']:.2f}** a GPU second"
        )

    rows: list[tuple[str, Callable[[dict], str]]] = [
        ("trajectories, images drawn", lambda of: f"{of['trajectories']}, {of['images']}"),
        (f"saying turns of {turns} tokens (captured steps)", lambda of: seconds(of, "say")),
        ("drawing", drawn),
        ("replay: old log-probs, forward and backward, compiling included", learned),
        ("the step", lambda of: f"{of['all_seconds']:.0f} s"),
        ("images a GPU second", lambda of: f"{of['images_per_gpu_second']:.2f}"),
        ("GPU memory at most", memory),
        ("the recipe's own size, extrapolated by operations", whole),
    ]
    lines = [f"| one {next(iter(found.values()))['device']} | " + " | ".join(found) + " |"]
    lines.append("|---" * (len(found) + 1) + "|")
    lines += [f"| {what} | {' | '.join(map(cell, found.values()))} |" for what, cell in rows]
    return "\n".join(lines) + "\n"


def objectives() -> str:
    """FlowGRPO, AWM and NFT on single images of nano: first images before and after."""
    arms = _arms(OBJECTIVES / "first_images.json")
    told = json.loads((OBJECTIVES / "curves.json").read_text(encoding="utf-8"))
    start = _percent(arms["start"]["figures"]["accuracy_at_0"])
    lines = [
        "| one NVIDIA H200, five runs side by side | updates, images | images a GPU second "
        f"| first images right on hard553 (before: {start}) | difference |",
        "|---" * 5 + "|",
    ]
    for run in told["runs"]:
        arm, speed = arms[run["run"]], f"{run['images_per_gpu_second']:.0f}"
        lines.append(
            f"| {run['run']} | {run['updates']}, {run['images']:,} | {speed} "
            f"| {_percent(arm['figures']['accuracy_at_0'])} "
            f"| {_percent(arm['minus_start']['accuracy_at_0'], '+')} |"
        )
    return "\n".join(lines) + "\n"


def reflection() -> str:
    """What RL on whole trajectories changes in nano, by arm, against its start on equal noise."""
    arms = json.loads((REFLECTION / "ablation.json").read_text(encoding="utf-8"))["arms"]
    names = ("accuracy_at_0", "final_accuracy", "repair", "damage")
    names += ("look_on_right", "look_on_wrong")
    heads = ("first image", "handed out", "repaired", "damaged", "right seen", "wrong seen")
    heads += ("handed out, minus the start", "repaired, times the start")
    lines = ["| arm | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for arm in arms:
        own = [f"{100 * arm['figures'][name]['value']:.1f}" for name in names]
        gain, factor, label = "", "", f"{arm['name'].removeprefix('eval-')}, {arm['view']} view"
        if arm["name"] != "start":
            gain = _percent(arm["minus_start"]["final_accuracy"], "+")
            of = arm["repair_factor"]
            factor = f"{of['value']:.1f} ({of['low']:.1f} to {of['high']:.1f})"
            label += f", {arm['runs']} seeds" if arm["runs"] > 1 else ""
        lines.append(f"| {label} | " + " | ".join([*own, gain, factor]) + " |")
    return "\n".join(lines) + "\n"


def _arms(path: Path) -> dict[str, dict]:
    return {a["name"]: a for a in json.loads(path.read_text(encoding="utf-8"))["arms"]}


BLOCKS: dict[str, Callable[[], str]] = {
    "evaluation": evaluation,
    "full-size": full_size,
    "decode": decode,
    "sft": sft,
    "verifier": verifier,
    "rl": rl,
    "objectives": objectives,
    "reflection": reflection,
}


def filled(text: str) -> str:
    """The text with every marked block made anew. Raises ValueError for an unknown block."""

    def block(match: re.Match) -> str:
        name = match.group(2)
        if name not in BLOCKS:
            raise ValueError(f"no figures are called {name!r}; known: {', '.join(BLOCKS)}")
        return match.group(1) + BLOCKS[name]() + match.group(3)

    return MARK.sub(block, text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.readme", description="Fill in figures.")
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args(argv).check
    stale = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            stale.append(path)
            if not check:
                write_aside(path, filled(text))
    for path in stale:
        name = path.relative_to(ROOT)
        print(f"{name} differs from its result files" if check else f"{name} rewritten")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
