"""Scores are bound to what was scored: to the pixels of each image and to what judged them.

    python -m eval.binding outputs/eval              # says what is stale; exit code 1 if any is
    python -m eval.binding outputs/eval --drop       # and takes it out, for eval --resume

A result is stale where
  - an image file beside it has other pixels than those that were judged, or is missing among
    others of its trajectory, or there is one more than was judged;
  - another verifier judged it than the one that is asked for: the manifest of a reward names its
    rule, its settings and the hashes of its weights, and `verifier_sha256` is the hash of that.
Images that were not kept, and lines of earlier versions without hashes, cannot be checked; they are
counted. A line whose rounds do not add up is refused when it is read (`Result.check_whole`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from eval.results import IMAGES, Result, candidate_place, pixels_sha256, read_results
from umm_reflect.errors import UserError
from umm_reflect.files import write_aside

# Keys of a manifest, at any depth, that say where and how fast it judges, not what it says.
HOW_FAST = (
    *("device", "batch_size", "cache_bytes", "chunk", "workers", "concurrency", "connections"),
    *("attempts", "timeout", "wait", "url", "token_file", "versions"),
)


@dataclass(frozen=True)
class Stale:
    """A result that does not hold any longer, and why."""

    result: Result
    why: str


@dataclass(frozen=True)
class Binding:
    """fresh and stale are all results, in their order; unchecked: images without a file or hash."""

    fresh: tuple[Result, ...]
    stale: tuple[Stale, ...]
    checked: int
    unchecked: int


def verifier_sha256(manifest: Mapping[str, Any]) -> str:
    """What judges, as one hash: of the manifest without HOW_FAST, as sorted JSON."""
    kept = json.dumps(lasting(manifest), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(kept.encode()).hexdigest()


def lasting(value: Any) -> Any:
    """A manifest, or a part of one, without HOW_FAST: what a resume compares."""
    if isinstance(value, Mapping):
        return {str(k): lasting(v) for k, v in value.items() if k not in HOW_FAST}
    if isinstance(value, list | tuple):
        return [lasting(one) for one in value]
    return value


def check(
    folder: Path, results: Sequence[Result], verifiers: Mapping[str, str] | None = None
) -> Binding:
    """Hold the results of a run against the images in its folder.

    verifiers: set -> `verifier_sha256` of what is to judge it; a set that is not named may have
    been judged by anything.
    """
    fresh, stale, checked, unchecked = [], [], 0, 0
    for result in results:
        wanted = (verifiers or {}).get(result.set)
        why = None
        if wanted is not None and result.verifier != wanted:
            by = result.verifier[:12] if result.verifier else "a verifier that was not recorded"
            why = f"judged by {by}, not by {wanted[:12]}"
        paths = [_image(folder, result, number) for number in range(len(result.images))]
        kept = [path.exists() for path in paths]
        for number, (path, image) in enumerate(zip(paths, result.images, strict=True)):
            if not path.exists() or image.sha256 is None:
                unchecked += 1
                if any(kept) and not path.exists():
                    why = why or f"image {number} is missing"
                continue
            checked += 1
            why = why or _replaced(path, image.sha256, number)
        for number, one in enumerate(result.candidates, start=1):
            path = folder / candidate_place(result.key, number) / "image_0.png"
            if not path.exists() or one.image.sha256 is None:
                unchecked += 1
                continue
            checked += 1
            found = _replaced(path, one.image.sha256, 0)
            why = why or (found and f"candidate {number}: {found}")
        if _image(folder, result, len(paths)).exists():
            why = why or f"there is an image {len(paths)}, which was not judged"
        if why is None:
            fresh.append(result)
        else:
            stale.append(Stale(result, why))
    return Binding(tuple(fresh), tuple(stale), checked, unchecked)


def _image(folder: Path, result: Result, number: int) -> Path:
    return folder / result.trace_folder / f"image_{number}.png"


def _replaced(path: Path, sha256: str, number: int) -> str | None:
    try:
        with Image.open(path) as image:
            found = pixels_sha256(image)
    except (OSError, SyntaxError) as error:
        return f"image {number} cannot be read ({error})"
    if found == sha256:
        return None
    return f"image {number} is not the one that was judged ({found[:12]}, not {sha256[:12]})"


def drop_stale(folder: Path, binding: Binding) -> None:
    """Write results.jsonl and images.jsonl without what is stale, so that a resumed run makes it
    again. (`ResultFile.sort` then puts the lines in their order.)"""
    known = [one for one in binding.fresh if one.verifier or one.images[0].sha256]
    lines = "".join(one.to_images_line() for one in known)
    write_aside(folder / "results.jsonl", "".join(one.to_line() for one in binding.fresh))
    write_aside(folder / IMAGES, lines)


def recorded_verifiers(folder: Path) -> dict[str, str]:
    """Set -> hash of what judged it, by the `judges` of env.json; {} where it names none."""
    path = folder / "env.json"
    try:
        judges = json.loads(path.read_text(encoding="utf-8")).get("judges", {})
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise UserError(f"{path} cannot be read ({error})", "Run it again.") from error
    return {name: verifier_sha256(manifest) for name, manifest in judges.items()}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.binding", description="Are the scores of a run those of its images?"
    )
    parser.add_argument("folder", type=Path, help="its output folder")
    parser.add_argument("--drop", action="store_true", help="take stale results out")
    options = parser.parse_args(argv)
    results = read_results(options.folder / "results.jsonl")
    if not results:
        raise UserError(f"{options.folder} holds no results", "Name an --output-dir of eval.")
    bound = any(result.verifier for result in results)
    verifiers = recorded_verifiers(options.folder) if bound else None
    binding = check(options.folder, results, verifiers)
    for one in binding.stale:
        print(f"stale: {' '.join(map(str, one.result.key))}: {one.why}")
    print(
        f"{len(binding.fresh)} of {len(results)} results hold; {binding.checked} images checked, "
        f"{binding.unchecked} not kept or without a hash"
    )
    if options.drop and binding.stale:
        drop_stale(options.folder, binding)
        print(f"dropped {len(binding.stale)}; make them again with eval --resume")
    return int(bool(binding.stale))


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
