"""umm-reflect collect: a model's own images, judged, as trajectories to learn from.

    umm-reflect collect --prompts shapes-hard --count 2000 --output-dir data/own
    umm-reflect collect --model DIR --reward geneval --prompts pool.jsonl --output-dir data/own
    umm-reflect collect --reward ocr --prompts prompts.txt --output-dir data/own
    umm-reflect collect ... --output-dir data/own --resume       # after it was killed
    umm-reflect sft --data data/own                              # or data/own/repaired.jsonl

The model draws, looks and edits as in `reflect`; a reward judges every image; collect_kinds.py says
what may be learned from that. Writes, a batch at a time:

    accepted.jsonl, repaired.jsonl, corrected.jsonl, images/     our own data, for sft and data
    log/verdicts.jsonl    every sample: its kind, what was said, the verdicts with their evidence
    log/config.yaml, log/facts.json, summary.json                what ran, and the counts

Test prompts are refused. (`python -m eval.collect` is another thing: readings of many images of the
shapes world in two files, of which `sft.shapes_own` makes looks in that world's own words.)
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agent.config import NANO, ReflectConfig, loop_options, resolved_profile
from eval.binding import lasting
from eval.collect_kinds import LEARNED, Found, Kind, is_right, line_of, sort_out
from eval.collect_prompts import Wanted, samples
from eval.config import in_batches
from umm_reflect.errors import UsageError, UserError
from umm_reflect.files import write_aside
from umm_reflect.settings import load_yaml, parse, save, to_mapping

if TYPE_CHECKING:
    from PIL.Image import Image

    from agent.policy import Policy
    from agent.types import Trajectory
    from eval.rewards.registry import Reward
    from eval.verdict import Verdict

HOW_FAST = ("batch_size", "workers", "device", "dtype", "attn", "output_dir", "resume", "overwrite")
LOG, CONFIG, FACTS = Path("log/verdicts.jsonl"), Path("log/config.yaml"), Path("log/facts.json")
SUMMARY, IMAGES = "summary.json", "images"


@dataclass(frozen=True)
class CollectConfig:
    """Draw, look and edit, have every image judged, and keep what may be learned from."""

    prompts: str = "shapes"
    """shapes or shapes-hard: training prompts by lot. A .jsonl file: a row a line, as the reward
    takes it ({"prompt": ..., "include": ...}). Another file: a prompt a line."""
    count: int | None = None
    """How many prompts: of a file the first ones, otherwise 256."""
    samples_per_prompt: int = 1
    """How many trajectories of each prompt."""
    model: str = NANO
    """A folder, a hub id or id@revision."""
    adapter: str | None = None
    """A LoRA adapter on top: a folder or a hub id."""
    reward: str = "shapes"
    """Who judges: a reward's name or a YAML file."""
    reward_set: tuple[str, ...] = ()
    """Settings of the judge: KEY=VALUE ..."""
    right_at: float | None = None
    """For a judge that says neither right nor wrong: the score, 0 to 1, from which on it is."""
    max_rounds: int | None = None
    """How many edits may be drawn."""
    temperature: float | None = None
    """Of the text; 0 takes the most likely token."""
    text_scale: float | None = None
    """Guidance toward the text; a weaker one makes more mistakes to learn from."""
    steps: int | None = None
    """Denoising steps of each image."""
    edit_view: Literal["local", "full"] | None = None
    """What an edit sees."""
    seed: int = 0
    """Names prompts by lot and every random draw: another one gives other data."""
    batch_size: int = 8
    """How many samples run together: 8 suits a CPU, 256 or more a large GPU."""
    workers: int = 0
    """Processes that judge; 0: one per core."""
    output_dir: Path = Path("outputs/collected")
    """Where the data goes."""
    resume: bool = False
    """Go on with what --output-dir holds."""
    overwrite: bool = False
    """Replace what --output-dir holds."""
    device: str = "auto"
    """auto, cuda, cpu, mps or npu."""
    dtype: str = "auto"
    """auto, bfloat16, float16 or float32."""
    attn: str = "auto"
    """The attention kernel."""

    def __post_init__(self) -> None:
        least = {"count": 1, "samples_per_prompt": 1, "max_rounds": 1, "batch_size": 1}
        for name, value in {**least, "workers": 0}.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise ValueError(f"--{name.replace('_', '-')} is {given}; give {value} or more")
        if self.right_at is not None and not 0 < self.right_at <= 1:
            raise ValueError(f"--right-at is {self.right_at}; give a share above 0, at most 1")
        if self.resume and self.overwrite:
            raise ValueError("--resume goes on with data and --overwrite drops it; give one")
        self.reflect_config()

    def reflect_config(self) -> ReflectConfig:
        """The settings with which `umm-reflect reflect` makes the same trajectories."""
        same = "model adapter seed max_rounds temperature text_scale steps edit_view device dtype"
        return ReflectConfig(**{n: getattr(self, n) for n in same.split()}, attn=self.attn)


def main(argv: Sequence[str]) -> int:
    """umm-reflect collect: returns 0; errors as in `umm_reflect.errors`."""
    config = parse(CollectConfig, argv, "umm-reflect collect")
    from eval.judges import with_place
    from eval.rewards.registry import build, named
    from umm_reflect import hub
    from umm_reflect.device import resolve_device, resolve_dtype

    wanted = samples(
        config.prompts, config.count, config.samples_per_prompt, config.seed, config.reward
    )
    mapping = with_place(named(config.reward, config.reward_set), config.workers, None)
    folder = hub.resolve(config.model)
    adapter = hub.resolve(config.adapter) if config.adapter else None
    profile = resolved_profile(hub.profile(folder, adapter), config.reflect_config())
    device = resolve_device(config.device)
    facts = {
        "computed_on": f"{device.type}, {resolve_dtype(config.dtype, device)}",
        "model_sha256": _sha256s(folder),
        "adapter_sha256": _sha256s(adapter) if adapter else None,
        "prompts_sha256": hashlib.sha256(
            json.dumps([[one.name, one.prompt, one.row] for one in wanted]).encode()
        ).hexdigest(),
    }
    with closing(build(mapping, "the judge")) as reward:
        start(config, {**facts, "judge": lasting(reward.manifest())})
        collect(config, wanted, reward, profile, Loaded(config, folder, profile))
    return 0


def _sha256s(folder: Path) -> dict[str, str]:
    from umm_reflect.hub import digest

    return {path.name: digest(path) for path in sorted(folder.glob("*.safetensors"))}


class Loaded:
    """The model, loaded when the first policy is asked for: a finished run needs none."""

    def __init__(self, config: CollectConfig, folder: Path, profile):
        self.config, self.folder, self.profile = config, folder, profile
        self._bagel = None

    def __call__(self) -> Policy:
        from agent.policy import BagelPolicy
        from umm_reflect import Bagel

        if self._bagel is None:
            how = {name: getattr(self.config, name) for name in ("adapter", "device", "dtype")}
            self._bagel = Bagel.from_pretrained(str(self.folder), attn=self.config.attn, **how)
        return BagelPolicy(self._bagel, self.profile)


# --- the run --------------------------------------------------------------------------------------


def collect(
    config: CollectConfig, wanted: Sequence[Wanted], reward: Reward, profile, make_policy
) -> Counter[str]:
    """Make what is missing, judge it, write it; returns how many samples are of each kind.

    make_policy: called for each batch, since a policy remembers images.
    """
    from umm_reflect.training.metrics import progress

    folder = config.output_dir
    kinds = _settle(folder)
    # a batch that was cut off is made again as a whole, so that its shape is the same
    whole = list(in_batches(wanted, config.batch_size))
    missing = [batch for batch in whole if not {one.name for one in batch} <= kinds.keys()]
    with progress(len(wanted), "collecting") as bar:
        bar.advance(len(wanted) - sum(map(len, missing)))
        for batch in missing:
            runs = _run(config, batch, profile, make_policy())
            owners = [
                (image, o.row) for t, o in zip(runs, batch, strict=True) for image in t.images
            ]
            verdicts = iter(reward.score([i for i, _ in owners], [row for _, row in owners]))
            judged = [(t, list(islice(verdicts, len(t.images)))) for t in runs]
            fresh = [
                (one, *j) for one, j in zip(batch, judged, strict=True) if one.name not in kinds
            ]
            kinds |= _keep(config, fresh)
            counts = Counter(kinds.values())
            bar.advance(len(batch), **{str(kind): counts[kind] for kind in LEARNED})
    return _report(folder, wanted, kinds)


def _run(config: CollectConfig, batch: Sequence[Wanted], profile, policy) -> list[Trajectory]:
    from agent.loop import run_episodes

    try:
        return run_episodes(
            policy,
            [one.prompt for one in batch],
            max_rounds=profile.say.max_rounds,
            max_tokens=profile.say.max_tokens,
            options=loop_options(config.reflect_config()),
            seed=config.seed,
            samples=[one.name for one in batch],
        )
    except FloatingPointError as error:
        raise UserError(str(error), "Check the checkpoint.") from error


def _keep(
    config: CollectConfig, fresh: Sequence[tuple[Wanted, Trajectory, list[Verdict]]]
) -> dict[str, str]:
    """Write a batch: images, then the lines of each kind, and last the log, which says that all of
    a sample is there. Returns name -> kind."""
    folder, lines, log, kinds = config.output_dir, {kind: [] for kind in LEARNED}, [], {}
    for one, trajectory, verdicts in fresh:
        try:
            right = [is_right(verdict, config.right_at) for verdict in verdicts]
        except ValueError as error:
            raise UsageError(
                f"the {config.reward} judge says neither right nor wrong",
                "Give --right-at: from which score on, 0 to 1, an image is right.",
            ) from error
        found = sort_out(trajectory, right)
        if found.kind in LEARNED:
            uid = f"{one.name.replace(':', '-')}-seed{config.seed}"
            pictures = [_png(image) for image in trajectory.images[: found.last + 1]]
            files = [
                {"file": f"{IMAGES}/{uid}_{k}.png", "sha256": hashlib.sha256(data).hexdigest()}
                for k, data in enumerate(pictures)
            ]
            line = line_of(trajectory, found, verdicts, one.row, uid, files)
            if line is None:
                found = Found(Kind.UNSAYABLE, found.last)
            else:
                for entry, data in zip(files, pictures, strict=True):
                    write_aside(folder / entry["file"], data)
                lines[found.kind].append(line)
        kinds[one.name] = str(found.kind)
        log.append(_log_entry(one, trajectory, verdicts, right, found))
    for kind, entries in lines.items():
        _append(folder / f"{kind}.jsonl", entries)
    _append(folder / LOG, log)
    return kinds


def _log_entry(
    one: Wanted,
    trajectory: Trajectory,
    verdicts: Sequence[Verdict],
    right: Sequence[bool | None],
    found: Found,
) -> dict[str, Any]:
    turns = [
        {"said": turn.said} if turn.error is None else {"error": turn.error}
        for turn in trajectory.turns
    ]
    return {
        "sample": one.name,
        "kind": found.kind,
        "prompt": one.prompt,
        "row": one.row,
        "stop": trajectory.stop,
        "turns": turns,
        "right": right,
        "verdicts": [verdict.to_record() for verdict in verdicts],
    }


def _png(image: Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


# --- the folder -----------------------------------------------------------------------------------


def start(config: CollectConfig, facts: dict[str, Any]) -> None:
    """Make the folder ready. Errors: UsageError where it holds data and neither --resume nor
    --overwrite is given, UserError where it holds that of other settings or something else."""
    folder = config.output_dir
    if folder.exists() and any(folder.iterdir()):
        if not (folder / FACTS).exists():
            raise UserError(f"{folder} holds other files", "Choose another --output-dir.")
        if config.overwrite:
            for name in (IMAGES, LOG.parent):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in (*(f"{kind}.jsonl" for kind in LEARNED), SUMMARY):
                (folder / name).unlink(missing_ok=True)
        elif not config.resume:
            raise UsageError(
                f"{folder} holds collected data",
                "Go on with --resume, or --overwrite, or --output-dir OTHER.",
            )
        else:
            before = {**load_yaml(folder / CONFIG), **json.loads((folder / FACTS).read_text())}
            before["judge"] = lasting(before.get("judge"))
            now = json.loads(json.dumps({**to_mapping(config), **facts}))
            other = [n for n, v in now.items() if n not in HOW_FAST and before.get(n) != v]
            if other:
                raise UserError(
                    f"the data in {folder} was made with another {', '.join(other)}",
                    "Resume with the settings of its log/config.yaml, or take another folder.",
                )
    save(replace(config, resume=False, overwrite=False), folder / CONFIG)
    write_aside(folder / FACTS, json.dumps(facts, indent=1) + "\n")


def _settle(folder: Path) -> dict[str, str]:
    """What is whole: name -> kind, by the log. What a killed run left beside that is taken out."""
    entries = _whole_lines(folder / LOG)
    kinds = {entry["sample"]: entry["kind"] for entry in entries}
    _rewrite(folder / LOG, entries)
    for kind in LEARNED:
        uids = {e["sample"].replace(":", "-") for e in entries if e["kind"] == kind}
        lines = _whole_lines(folder / f"{kind}.jsonl")
        kept = [line for line in lines if line["uid"].rpartition("-seed")[0] in uids]
        _rewrite(folder / f"{kind}.jsonl", kept)
    return kinds


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def _rewrite(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    if entries or path.exists():
        write_aside(path, "".join(map(_line, entries)))


def _append(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """The lines are on the disk when this returns; no file for none."""
    if not entries:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write("".join(map(_line, entries)).encode())
        file.flush()
        os.fsync(file.fileno())


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


def _report(folder: Path, wanted: Sequence[Wanted], kinds: dict[str, str]) -> Counter[str]:
    """Put the lines in the order of the samples, write summary.json, print the counts."""
    place = {one.name: number for number, one in enumerate(wanted)}
    by_uid = {name.replace(":", "-"): number for name, number in place.items()}
    for path in (folder / f"{kind}.jsonl" for kind in LEARNED):
        lines = _whole_lines(path)
        _rewrite(path, sorted(lines, key=lambda e: by_uid[e["uid"].rpartition("-seed")[0]]))
    _rewrite(folder / LOG, sorted(_whole_lines(folder / LOG), key=lambda e: place[e["sample"]]))
    counts = Counter({str(kind): 0 for kind in Kind})
    counts.update(kinds.values())
    right = [entry["right"][0] for entry in _whole_lines(folder / LOG)]
    summary = {
        "samples": len(kinds),
        "learned_from": sum(counts[kind] for kind in LEARNED),
        "right_first_images": right.count(True),
        "kinds": dict(counts),
    }
    write_aside(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
    for kind in Kind:
        if counts[kind] or kind in LEARNED:
            print(f"{counts[kind]:8,}  {kind}" + ("" if kind in LEARNED else " (left out)"))
    print(f"{summary['learned_from']} of {len(kinds)} trajectories to learn from: {folder}")
    return counts


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
