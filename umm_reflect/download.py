"""Fetch a model and everything that running it needs, checked against its hashes.

    umm-reflect download rl                           # a short name, a hub id or id@revision
    umm-reflect download YijiaFan/UMM-Reflection-BAGEL-RL --output-dir pretrained/UMM-Reflection-BAGEL-RL
    umm-reflect download base --dry-run               # only say what would be fetched
    umm-reflect download prompt                       # the released checkpoints' system prompt
    umm-reflect download geneval                      # what the GenEval verifier is made from

Without --output-dir files go to the hub's cache, where every command finds them by id. A published
hash is checked; elsewhere the first hash is recorded, printed and enforced from then on.
"""  # noqa: E501  (a command line is one line)

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from umm_reflect.errors import UsageError
from umm_reflect.files import human_size
from umm_reflect.settings import parse

SHORT_NAMES = {
    "base": "ByteDance-Seed/BAGEL-7B-MoT",
    "sft": "YijiaFan/UMM-Reflection-BAGEL-SFT",
    "rl": "YijiaFan/UMM-Reflection-BAGEL-RL",
    "spectrareward": "huangrh9/Bagel-SpectraReward-AWM-Qwen3VL-30B-A3B",
}


@dataclass(frozen=True)
class DownloadConfig:
    """Fetch a model (or the released system prompt) and check it.

    Short names: base, sft, rl, spectrareward, prompt, geneval.
    """

    name: Annotated[str, tyro.conf.Positional]
    """Short name, hub id, or id@revision."""
    output_dir: Path | None = None
    """Folder to put the files in; otherwise the hub's cache."""
    dry_run: bool = False
    """Only list the files and their sizes."""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("name is empty; give a short name or a hub id")
        if self.output_dir is not None and self.output_dir.is_file():
            raise ValueError(f"output-dir {self.output_dir} is a file; name a folder")


def main(argv: Sequence[str]) -> int:
    config = parse(DownloadConfig, argv, "umm-reflect download")
    from umm_reflect import hub

    name = SHORT_NAMES.get(config.name, config.name)
    if name == "prompt":
        print(_fetch_prompt(config.output_dir))
        return 0
    if name == "geneval":
        from umm_reflect.verifier_files import fetch_verifier

        print(fetch_verifier(config.output_dir, dry_run=config.dry_run))
        return 0
    if not hub.is_hub_id(name):
        short = ", ".join([*SHORT_NAMES, "prompt", "geneval"])
        raise UsageError(
            f"'{name}' is no hub id (owner/model or owner/model@revision)",
            f"Short names: {short}.",
        )
    if config.dry_run:
        files = hub.plan_fetch(name, config.output_dir)
        for file, size, wanted in files:
            print(f"{human_size(size):>10}  {file}{'' if wanted else '  (here already)'}")
        total = sum(size for _, size, wanted in files if wanted)
        print(f"{human_size(total):>10}  to fetch for {name}")
        return 0
    folder = hub.fetch(name, config.output_dir)
    if hub.split_name(name)[0] in hub.RELEASED:
        _complete_release(folder, config.output_dir)
    print(folder)
    return 0


def _fetch_prompt(output_dir: Path | None) -> Path:
    from umm_reflect import hub

    path = (output_dir or hub.hashes_file().parent) / hub.PROMPT_NAME
    if path.exists():
        hub.read_prompt(path, hub.PROMPT_SHA256)
        return path
    return hub.fetch_prompt(path)


def _complete_release(folder: Path, output_dir: Path | None) -> None:
    """A released folder outside the cache gets its system prompt and reflection.json beside it."""
    from umm_reflect import hub
    from umm_reflect.profile import released_profile, save_profile

    path = _fetch_prompt(output_dir)
    if output_dir is not None and not (folder / hub.PROFILE).exists():
        prompt = hub.read_prompt(path, hub.PROMPT_SHA256)
        save_profile(released_profile(prompt), folder, prompt_file=hub.PROMPT_NAME)


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
