"""Which weights of a BAGEL learn: presets by name, parts that stay frozen, new or old LoRA.

    names = apply(bagel, "full", frozen=("vit",))            # as the released checkpoints did
    names = apply(bagel, "lora-both", LoraSettings(rank=32))
    names = apply(bagel, "lora-gen", LoraSettings(adapter="out/adapter"))     # go on with that one
    print(summary(bagel))                                     # trainable numbers by part

    python -m umm_reflect.training.trainable MODEL lora-gen   # the same, without loading weights

`apply` sets `requires_grad` on every parameter; whoever builds an optimizer asks that alone. Low-
rank weights are made in fp32, and an adapter that is gone on with keeps its fp32 numbers: a trainer
takes its masters from them before it makes bf16 working copies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from umm_reflect.adapters import (
    Experts,
    adapter_config,
    adapter_parameters,
    attach_lora,
    has_adapter,
    load_adapter,
    remove_adapter,
)
from umm_reflect.errors import UsageError
from umm_reflect.model import Bagel
from umm_reflect.settings import nearest

# und, gen: projections, MLPs and norms of an expert. latents: into and out of the decoder, and the
# embedding of times. The VAE and the position tables never learn.
Part = Literal["und", "gen", "embeddings", "lm_head", "latents", "vit", "connector"]
PARTS: tuple[Part, ...] = get_args(Part)

Preset = Literal["full", "llm", "und", "gen", "lora-und", "lora-gen", "lora-both"]
FULL: dict[str, tuple[Part, ...]] = {
    "full": PARTS,
    "llm": ("und", "gen", "embeddings", "lm_head"),
    "und": ("und", "embeddings", "lm_head", "connector"),
    "gen": ("gen", "latents"),
}
LORA: dict[str, Experts] = {"lora-und": "und", "lora-gen": "gen", "lora-both": "both"}
PRESETS: tuple[Preset, ...] = get_args(Preset)

RANK = 32


@dataclass(frozen=True)
class LoraSettings:
    """rank, alpha, dropout: None takes those of `adapter`; without one 32, twice the rank and 0.

    seed: of the random half of new weights. adapter: a folder or hub id to go on with.
    """

    rank: int | None = None
    alpha: float | None = None
    dropout: float | None = None
    seed: int = 0
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"the LoRA rank is {self.rank}; give 1 or more")
        if self.alpha is not None and self.alpha <= 0:
            raise ValueError(f"the LoRA alpha is {self.alpha}; give a number above 0")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"the LoRA dropout is {self.dropout}; give 0 or more, below 1")


def part_of(name: str) -> Part:
    """The part that a parameter belongs to, by its name in the model (an adapter's too)."""
    if name.startswith("vit_model."):
        return "vit"
    if name.startswith("connector."):
        return "connector"
    if name.startswith(("vae2llm.", "llm2vae.", "time_embedder.")):
        return "latents"
    if name.startswith("language_model.lm_head."):
        return "lm_head"
    if name.startswith("language_model.model.embed_tokens."):
        return "embeddings"
    assert name.startswith("language_model.model."), f"{name} belongs to no part"
    return "gen" if "_moe_gen" in name else "und"


def trained_parts(preset: str, frozen: Sequence[str] = ()) -> tuple[Part, ...]:
    """The parts of which a preset trains something: all of it, or for LoRA low-rank updates.

    Errors: ValueError for an unknown name (with the nearest), and where nothing is left.
    """
    if preset not in PRESETS:
        raise ValueError(_unknown("preset of trainable weights", preset, PRESETS))
    for name in frozen:
        if name not in PARTS:
            raise ValueError(_unknown("part of the model", name, PARTS))
    if preset in LORA:
        parts: Iterable[Part] = ("und", "gen") if LORA[preset] == "both" else (LORA[preset],)
    else:
        parts = FULL[preset]
    left = tuple(part for part in parts if part not in frozen)
    if not left:
        raise ValueError(
            f"preset {preset!r} without {', '.join(frozen)} trains nothing: freeze less, or choose "
            f"another of {', '.join(PRESETS)}"
        )
    return left


def _unknown(what: str, name: str, choices: Sequence[str]) -> str:
    hint = nearest(name, choices)
    remedy = f"did you mean {hint!r}?" if hint else f"choose of {', '.join(choices)}"
    return f"there is no {what} {name!r}: {remedy}"


def apply(
    bagel: Bagel,
    preset: str,
    lora: LoraSettings | None = None,
    frozen: Sequence[str] = (),
) -> list[str]:
    """Make exactly the weights of a preset trainable, attaching LoRA where the preset says so.

    lora: read by lora-* presets only. frozen: parts that stay as they are though the preset trains
    them. Returns the names of the trainable parameters, in the model's order.

    Errors: ValueError for unknown names, LoRA settings without a LoRA preset, numbers that differ
    from those of the adapter to go on with, a preset that matches nothing, an adapter that is
    attached already; `CheckpointError` for an adapter that does not fit.
    """
    parts = trained_parts(preset, frozen)
    if has_adapter(bagel):
        raise ValueError(
            "the model has an adapter attached already: merge it, or load the model without it "
            "and go on with it by LoraSettings(adapter=...)"
        )
    if preset in LORA:
        lora = lora or LoraSettings()
        if lora.adapter is None:
            _attach(bagel, LORA[preset], lora)
        else:
            _go_on(bagel, lora)
        learns = {id(p) for _, p in adapter_parameters(bagel)}
    else:
        if lora is not None and lora != LoraSettings():
            raise ValueError(
                f"LoRA settings are given, but preset {preset!r} trains weights in full: choose "
                f"one of {', '.join(LORA)}"
            )
        learns = {id(p) for p in bagel.parameters()}
    names = []
    for name, parameter in bagel.named_parameters():
        parameter.requires_grad_(id(parameter) in learns and part_of(name) in parts)
        if parameter.requires_grad:
            names.append(name)
    if not names:
        raise ValueError(
            f"preset {preset!r} matches none of the model's weights: the adapter "
            f"{lora.adapter if lora else None} has nothing in {', '.join(parts)}"
        )
    return names


def _attach(bagel: Bagel, experts: Experts, lora: LoraSettings) -> None:
    rank = RANK if lora.rank is None else lora.rank
    alpha = 2.0 * rank if lora.alpha is None else lora.alpha
    attach_lora(bagel, rank, alpha, experts, lora.dropout or 0.0, seed=lora.seed)


def _go_on(bagel: Bagel, lora: LoraSettings) -> None:
    """Attach the adapter that is named, in fp32, with its own rank and alpha."""
    load_adapter(bagel, lora.adapter, trainable=True)
    own = adapter_config(bagel)
    for name, wanted, found in (
        ("rank", lora.rank, own.r),
        ("alpha", lora.alpha, own.lora_alpha),
        ("dropout", lora.dropout, own.lora_dropout),
    ):
        if wanted is not None and wanted != found:
            remove_adapter(bagel)
            raise ValueError(
                f"the LoRA {name} is {wanted}, but {lora.adapter} was made with {found}: leave it "
                "out to go on with that one"
            )


# --- counts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """Numbers in trainable and in all parameters, by part; an adapter's count with its expert."""

    trainable: Mapping[Part, int]
    total: Mapping[Part, int]

    @property
    def all_trainable(self) -> int:
        return sum(self.trainable.values())

    @property
    def everything(self) -> int:
        return sum(self.total.values())


def counts(bagel: nn.Module) -> Counts:
    """From `requires_grad` as it stands; works on the meta device too."""
    trainable, total = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    for name, parameter in bagel.named_parameters():
        part = part_of(name)
        total[part] += parameter.numel()
        trainable[part] += parameter.numel() if parameter.requires_grad else 0
    return Counts(trainable, total)


def summary(bagel: nn.Module) -> str:
    """One line a part, and their sum: "gen   28,311,552 of 7,072,...  trained"."""
    found = counts(bagel)
    lines = [
        f"  {part:<10}  {found.trainable[part]:>16,} of {found.total[part]:>16,}" for part in PARTS
    ]
    share = found.all_trainable / max(1, found.everything)
    lines.append(
        f"  {'in all':<10}  {found.all_trainable:>16,} of {found.everything:>16,} numbers are "
        f"trained ({share:.2%})"
    )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    from umm_reflect.checkpoint import empty_bagel
    from umm_reflect.config import BAGEL_7B_MOT, BagelConfig
    from umm_reflect.hub import RELEASED, resolve, split_name

    if len(argv) != 2:
        raise UsageError("give a model and a preset", f"Presets: {', '.join(PRESETS)}")
    model, preset = argv
    released = split_name(model)[0] in RELEASED
    config = BAGEL_7B_MOT if released else BagelConfig.from_folder(resolve(model, download=False))
    bagel = empty_bagel(config)
    apply(bagel, preset)
    print(summary(bagel))
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
