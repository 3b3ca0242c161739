"""Published checkpoints of other libraries as our safetensors: read safely, renamed strictly.

    tensors = read_checkpoint(path, sha256=PUBLISHED)        # weights_only; UserError if it differs
    weights = rename(tensors, rules, model_shapes(model), optional)
    save_converted(weights, folder, config, source)          # a folder, its hash recorded in it
    check_converted(folder)                                  # and enforced from then on
    load_strictly(model, folder / "model.safetensors", optional)

A rule says what a name of the other library becomes. Where transformers has changed its names, a
rule lists all that it had and the model's own keys decide. A name without a rule, a shape that
differs, a target that is filled twice or not at all: each is an error that names it.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umm_reflect.errors import CheckpointError
from umm_reflect.files import sha256 as sha256_of
from umm_reflect.files import write_aside
from umm_reflect.hub import digest

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

WEIGHTS, CONFIG, CONVERSION = "model.safetensors", "config.json", "conversion.json"


@dataclass(frozen=True)
class Piece:
    """Where a tensor, or a part of it, goes: the names that it may have, and what is done to it."""

    names: tuple[str, ...]
    change: Callable[[Tensor], Tensor] = lambda tensor: tensor


@dataclass(frozen=True)
class Rule:
    """A pattern of names (a whole match) and what becomes of them: a function of the match that
    gives the pieces, or None for tensors that the other library computes and we need not."""

    pattern: str
    pieces: Callable[[re.Match[str]], Sequence[Piece]] | None


def to(*templates: str, change: Callable[[Tensor], Tensor] | None = None) -> Any:
    r"""The pieces of a rule without a split; templates as for `re.Match.expand` (\1, \g<name>)."""

    def pieces(match: re.Match[str]) -> Sequence[Piece]:
        names = tuple(match.expand(template) for template in templates)
        return [Piece(names, change) if change else Piece(names)]

    return pieces


def split(*parts: Sequence[str]) -> Any:
    """The pieces of a rule that cuts a tensor into equal parts along its first axis."""

    def pieces(match: re.Match[str]) -> Sequence[Piece]:
        def part(index: int) -> Callable[[Tensor], Tensor]:
            return lambda tensor: tensor.chunk(len(parts), 0)[index]

        return [
            Piece(tuple(match.expand(template) for template in templates), part(index))
            for index, templates in enumerate(parts)
        ]

    return pieces


# --- reading and renaming -------------------------------------------------------------------------


def read_checkpoint(path: Path, *, sha256: str | None) -> dict[str, Tensor]:
    """The tensors of a .pth or .safetensors file by name, on the CPU. Nothing in it is executed.

    sha256: what the file must have; None where nothing is published. A .pth may hold the tensors
    under "state_dict" or "model". Errors: CheckpointError.
    """
    import torch

    if not path.is_file():
        raise CheckpointError(f"{path} is missing", "Fetch it: umm-reflect download geneval")
    if sha256 is not None and (found := sha256_of(path)) != sha256:
        raise CheckpointError(f"{path} has sha256 {found}, expected {sha256}", "Fetch it again.")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        line = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is not a checkpoint of plain tensors ({line})") from error
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path} holds no tensors")
    strange = [name for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if strange:
        raise CheckpointError(f"{path} holds {strange[0]!r}, which is no tensor")
    return dict(content)


def rename(
    tensors: Mapping[str, Tensor],
    rules: Sequence[Rule],
    shapes: Mapping[str, torch.Size],
    optional: str,
) -> dict[str, Tensor]:
    """The tensors under the model's names.

    shapes: the model's own keys. optional: a pattern of those that nothing needs to fill.
    Errors: CheckpointError that lists every name that is left over, missing or of another shape.
    """
    done: dict[str, Tensor] = {}
    wrong: list[str] = []
    for name, tensor in tensors.items():
        found = next(((r, m) for r in rules if (m := re.fullmatch(r.pattern, name))), None)
        if found is None:
            wrong.append(f"{name}: unknown")
            continue
        rule, match = found
        for piece in rule.pieces(match) if rule.pieces else ():
            names = [target for target in piece.names if target in shapes]
            if len(names) != 1:
                wrong.append(f"{name}: the model has no {' or '.join(piece.names)}")
                continue
            value, target = piece.change(tensor), names[0]
            if value.shape != shapes[target]:
                sizes = f"{_size(value.shape)}, not {_size(shapes[target])}"
                wrong.append(f"{name}: for {target} shape {sizes}")
            elif target in done:
                wrong.append(f"{name}: {target} is filled twice")
            else:
                done[target] = value.contiguous()
    wrong += [
        f"nothing fills {target}"
        for target in shapes
        if target not in done
        and not re.fullmatch(optional, target)
        and not any(target in problem for problem in wrong)
    ]
    if wrong:
        more = f" (and {len(wrong) - 4} more)" if len(wrong) > 4 else ""
        raise CheckpointError("the checkpoint does not fit: " + "; ".join(wrong[:4]) + more)
    return done


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


# --- writing and loading --------------------------------------------------------------------------


def save_converted(
    weights: Mapping[str, Tensor], folder: Path, config: str, source: Mapping[str, str]
) -> Path:
    """Write model.safetensors and config.json, which transformers' from_pretrained reads too, and
    conversion.json: what the weights were made from (`source`), and the sha256 that they have."""
    from safetensors.torch import save

    data = save(dict(weights), metadata={"format": "pt"})
    record = {**source, "sha256": hashlib.sha256(data).hexdigest()}
    write_aside(folder / CONFIG, config)
    write_aside(folder / WEIGHTS, data)
    write_aside(folder / CONVERSION, json.dumps(record, indent=1) + "\n")
    return folder


def check_converted(folder: Path) -> dict[str, str]:
    """conversion.json, once the weights are found to be those that were written.

    Errors: CheckpointError.
    """
    remedy = "Convert again: umm-reflect geneval convert"
    try:
        record = json.loads((folder / CONVERSION).read_text(encoding="utf-8"))
        expected = str(record["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is no converted model ({error})", remedy) from error
    if not (folder / WEIGHTS).exists():
        raise CheckpointError(f"{folder / WEIGHTS} is missing", remedy)
    if (found := digest(folder / WEIGHTS)) != expected:
        raise CheckpointError(
            f"{folder / WEIGHTS} has sha256 {found}, and was written with {expected}", remedy
        )
    return record


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Errors: CheckpointError."""
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} is missing or damaged ({error})") from error


def load_strictly(model: nn.Module, path: Path, optional: str, remedy: str = "") -> None:
    """Fill a model in place from a safetensors file whose names are the model's own.

    optional: a pattern of names that the file may lack. Errors: CheckpointError that names what is
    missing, left over or of another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing or damaged ({error})", remedy) from error
    own = model.state_dict()
    wrong = [f"{name} is unknown" for name in tensors if name not in own]
    wrong += [
        f"{name} is missing"
        for name in own
        if name not in tensors and not re.fullmatch(optional, name)
    ]
    wrong += [
        f"{name} has shape {_size(tensors[name].shape)}, not {_size(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 4} more)" if len(wrong) > 4 else ""
        raise CheckpointError(f"{path} does not fit: {'; '.join(wrong[:4])}{more}", remedy)
    model.load_state_dict(tensors, strict=False)


def model_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The model's own keys and their shapes."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}
