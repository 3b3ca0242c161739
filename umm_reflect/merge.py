"""A base model and an adapter become one full BAGEL folder that every command loads.

    umm-reflect merge --model BASE --adapter out/adapter --output-dir out/merged

The weights go from file to file, a matrix at a time (the sum in fp32, rounded once); everything
else is copied, so that tensors without an update stay as they are, byte for byte. Then one forward
over text and pictures is computed three times in fp32: by the base, by base + adapter, and by what
was written, which must differ from the first and equal the second but for rounding. Only then does
the folder get its name. Memory holds one copy of the weights, at the check.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from umm_reflect.adapters import adapter_config, adapter_layers, adapters_disabled, load_adapter
from umm_reflect.checkpoint import TABLES, VAE_WEIGHTS, WEIGHTS, TensorFiles, empty_bagel
from umm_reflect.config import BagelConfig
from umm_reflect.errors import UsageError, UserError
from umm_reflect.model import Bagel
from umm_reflect.settings import parse
from umm_reflect.streamed import Spec, write_streamed

# Of the adapter's effect on the outputs, how much rounding may take away.
MOST_LOST = 0.5
COPIED = (".json", ".txt", ".jinja")


@dataclass(frozen=True)
class MergeConfig:
    """Add a LoRA adapter to a model's weights and write a complete model folder, checked."""

    model: str
    """The base: the folder or hub id that the adapter was trained on."""
    adapter: str
    """The adapter: a PEFT folder or hub id."""
    output_dir: Path
    """A new or empty folder for the merged model."""
    dtype: Literal["base", "float32"] = "base"
    """Number format of the merged matrices: the base's own (the release: bfloat16), or float32."""
    device: Literal["auto", "cuda", "cpu", "mps", "npu"] = "auto"
    """Where the check runs."""
    push_to_hub: str | None = None
    """OWNER/NAME: what came out goes there in the end, into a private repository."""


@dataclass(frozen=True)
class Check:
    """Distances between outputs, relative to the base's. effect: of the adapter. error: between
    base + adapter and what was written. moved: between the base and what was written.
    """

    effect: float
    error: float
    moved: float

    @property
    def lost(self) -> float:
        """The share of the effect that is not in the merged weights."""
        return self.error / self.effect

    def refuse(self) -> None:
        """UserError unless the merged model differs from the base and equals base + adapter."""
        if self.effect == 0:
            raise UserError(
                "the adapter changes nothing: the model answers as without it",
                "It was not trained; give another one.",
            )
        if self.moved == 0:
            raise UserError(
                "the merged weights answer as the base does: rounding took the whole update away",
                "Keep the adapter beside the base, or give --dtype float32.",
            )
        if not self.lost <= MOST_LOST:
            raise UserError(
                f"the merged weights differ from base + adapter by {self.lost:.0%} of what the "
                f"adapter does (at most {MOST_LOST:.0%})",
                "The update is too small for the base's number format: keep the adapter beside "
                "the base, or give --dtype float32.",
            )


def main(argv: Sequence[str]) -> int:
    config = parse(MergeConfig, argv, "umm-reflect merge")
    from umm_reflect.device import resolve_device
    from umm_reflect.hub import resolve
    from umm_reflect.push import open_repo, push

    out = config.output_dir
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UsageError(f"output-dir {out} is not empty", "Name a new folder.")
    device = resolve_device(config.device)
    if config.push_to_hub is not None:
        open_repo(config.push_to_hub)
    base, adapter = resolve(config.model), resolve(config.adapter)
    check = merge(base, adapter, out, dtype=config.dtype, device=device)
    print(
        f"the adapter moves the outputs by {check.effect:.2e} of their size; in the merged weights "
        f"{check.lost:.2%} of that is lost to rounding"
    )
    print(out)
    if config.push_to_hub is not None:
        print(push(out, config.push_to_hub))
    return 0


def merge(
    base: Path,
    adapter: Path,
    out: Path,
    *,
    dtype: Literal["base", "float32"] = "base",
    device: torch.device | str = "cpu",
) -> Check:
    """Write base + adapter to `out`, which is new or empty; it appears when it has been checked.

    Errors: CheckpointError for a folder that is no model or no adapter of it, UserError where the
    disk is too small or the check fails; nothing is left behind then.
    """
    from umm_reflect.hub import check_disk, profile
    from umm_reflect.profile import load_profile, save_profile

    if (base / "adapter_config.json").exists() and not (base / "llm_config.json").exists():
        raise UserError(f"{base} is an adapter, not a model", "Give the base as --model.")
    if not (adapter / "adapter_config.json").exists():
        raise UserError(f"{adapter} has no adapter_config.json", "Give a PEFT folder as --adapter.")
    own = adapter / "reflection.json"
    how = load_profile(own) if own.exists() else profile(base)
    merger = Merger(base, adapter, dtype)
    check_disk(out, merger.nbytes + 2**30, "the merged model")
    aside = out.with_name(f".{out.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        merger.write(aside / WEIGHTS)
        copy_rest(base, aside)
        if own.exists() or not (aside / "reflection.json").exists():
            save_profile(how, aside)
        check = compare(base, adapter, aside, torch.device(device))
        check.refuse()
        (aside / "README.md").write_text(card(merger, check), encoding="utf-8")
        if out.is_dir():
            out.rmdir()
        os.rename(aside, out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return check


# --- writing --------------------------------------------------------------------------------------


class Merger:
    """The merged tensors of a model, one at a time. Everything that does not fit is an error here,
    before anything is written.
    """

    def __init__(self, base: Path, adapter: Path, dtype: Literal["base", "float32"] = "base"):
        self.files = TensorFiles(base, WEIGHTS)
        self.shapes = self.files.shapes()
        # the modules without memory; the adapter's weights are real
        self.bagel = empty_bagel(base_config(base, self.shapes))
        load_adapter(self.bagel, adapter, dtype=torch.float32)
        self.layers = dict(adapter_layers(self.bagel))
        stored = self.files.dtypes()
        self.specs = {name: Spec(stored[name], shape) for name, shape in self.shapes.items()}
        for name in self.layers:
            leaf = f"{name}.weight"
            if leaf not in self.specs:
                raise UserError(f"{self.files.label} lacks {leaf}", "It is no whole checkpoint.")
            if dtype == "float32":
                self.specs[leaf] = Spec(torch.float32, self.shapes[leaf])

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def write(self, path: Path) -> None:
        write_streamed(path, self.specs, self.tensors())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """In the base's order; what has an update is the sum in fp32."""
        for name, tensor in self.files.tensors(torch.device("cpu")):
            layer = self.layers.get(name.removesuffix(".weight"))
            yield name, tensor if layer is None else self._sum(layer, tensor)

    @staticmethod
    def _sum(layer: nn.Module, weight: Tensor) -> Tensor:
        """PEFT's own merge of one matrix, which knows every kind of LoRA."""
        linear = layer.get_base_layer()
        empty = linear.weight
        linear.weight = nn.Parameter(weight.float(), requires_grad=False)
        layer.merge(safe_merge=True)
        merged = linear.weight.detach()
        layer.merged_adapters.clear()
        linear.weight = empty
        return merged


def base_config(base: Path, shapes: dict[str, tuple[int, ...]]) -> BagelConfig:
    """The config of a folder with the grid sides of its tensors."""
    sides = [round(shapes[name][0] ** 0.5) for name in TABLES if name in shapes]
    if len(sides) != len(TABLES):
        raise UserError(f"{base} lacks {' or '.join(TABLES)}", "It is no whole BAGEL checkpoint.")
    return BagelConfig.from_folder(base).with_sides(
        latent_grid_side=sides[0], vit_grid_side=sides[1]
    )


def copy_rest(base: Path, out: Path) -> None:
    """Configs, tokenizer, prompt and VAE; not the weights, their index, or the base's card."""
    for path in sorted(base.iterdir()):
        if not path.is_file() or path.name.startswith(("ema.", "adapter_")):
            continue
        vae = path.name.startswith(VAE_WEIGHTS.partition(".")[0] + ".")
        if vae or path.suffix in COPIED:
            shutil.copyfile(path, out / path.name)


def card(merger: Merger, check: Check) -> str:
    """README.md of a merged folder."""
    config = adapter_config(merger.bagel)
    return (
        "# A BAGEL with a LoRA adapter merged in\n\n"
        f"Made by `umm-reflect merge`: rank {config.r}, alpha {config.lora_alpha:g}, "
        f"{len(merger.layers)} matrices; the adapter names its base "
        f"`{config.base_model_name_or_path}`.\n"
        f"It moves the outputs by {check.effect:.3g} of their size; {check.lost:.2%} of that is "
        "lost to rounding.\n"
    )


# --- checking -------------------------------------------------------------------------------------


def compare(base: Path, adapter: Path, merged: Path, device: torch.device) -> Check:
    """Real forwards of the base, of base + adapter and of the merged weights, computed in fp32."""
    bagel = load_stored(base, device)
    load_adapter(bagel, adapter, dtype=torch.float32)
    with adapters_disabled(bagel):
        plain = outputs(bagel)
    with_adapter = outputs(bagel)
    del bagel
    whole = outputs(load_stored(merged, device))
    return Check(
        effect=distance(with_adapter, plain, plain),
        error=distance(whole, with_adapter, plain),
        moved=distance(whole, plain, plain),
    )


def load_stored(folder: Path, device: torch.device) -> Bagel:
    """The model without VAE and tokenizer, in the widest number format of its matrices."""
    from umm_reflect.checkpoint import load_model

    stored = TensorFiles(folder, WEIGHTS).dtypes()
    wide = any(stored[name] == torch.float32 for name in stored if name not in TABLES)
    return load_model(folder, device=device, dtype=torch.float32 if wide else torch.bfloat16)


def outputs(bagel: Bagel) -> list[Tensor]:
    """Logits of a turn, and the velocity of a picture, after a text and another picture; fp32.

    Drawn numbers stand for pixels and ids: what counts is that every weight has its part.
    """
    from umm_reflect.context import ImageSegment, TextSegment
    from umm_reflect.layout import Frame
    from umm_reflect.packing import Piece, collate, pack_row, training_forward

    config, draw = bagel.config, torch.Generator().manual_seed(0)
    ids = torch.randint(config.llm.vocab_size, (28,), generator=draw).tolist()
    side, stride = min(4, config.latent_grid_side), config.latent_patch_size
    patches = min(3, config.vit.grid_side) * config.vit.patch_size
    picture = ImageSegment(
        latent=torch.zeros(config.vae.z_channels, side * stride, side * stride),
        vit_pixels=torch.zeros(3, patches, patches),
    )
    example = (
        Piece(TextSegment(tuple(ids[:12]))),
        Piece(picture),
        Piece(TextSegment(tuple(ids[12:24])), learn=True),
        Piece(picture, learn=True),
    )
    row = pack_row([example], Frame(*ids[24:]), config)
    latents = [torch.randn(side * side, config.latent_dim, generator=draw) for _ in row.vae_images]
    count = (patches // config.vit.patch_size) ** 2
    pixels = torch.rand(count, 3 * config.vit.patch_size**2, generator=draw) * 2 - 1
    batch = collate([row], latents, [pixels])
    noise = torch.randn(batch.latent_BGC.shape, generator=draw)
    times = torch.full((batch.num_images,), 0.5)
    device = bagel.device
    with torch.no_grad(), computing_in_fp32(bagel):
        out = training_forward(bagel, batch.to(device), times.to(device), noise.to(device))
        logits = bagel.logits(out.hidden[0].index_select(0, batch.score_S.to(device)))
    return [logits.float().cpu(), out.velocity_BGC[batch.noised_BG.to(device)].float().cpu()]


@contextmanager
def computing_in_fp32(bagel: Bagel) -> Iterator[None]:
    """The decoder's matrices stay as they are stored and become fp32 one at a time, while they are
    used; all the small rest is fp32 from here on.
    """
    for part in (bagel.time_embedder, bagel.vae2llm, bagel.llm2vae, bagel.vit_model):
        part.float()
    bagel.connector.float()
    handles = []
    for name, parameter in bagel.language_model.named_parameters():
        if parameter.ndim < 2 and ".lora_" not in name:
            parameter.data = parameter.data.float()

    def widen(module: nn.Module, _: object) -> None:
        module.stored = module.weight.data
        module.weight.data = module.stored.float()

    def narrow(module: nn.Module, _: object, __: object) -> None:
        module.weight.data = module.stored
        del module.stored

    for module in bagel.language_model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and module.weight.dtype != torch.float32:
            handles.append(module.register_forward_pre_hook(widen))
            handles.append(module.register_forward_hook(narrow, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def distance(these: Sequence[Tensor], those: Sequence[Tensor], unit: Sequence[Tensor]) -> float:
    """Root of the summed squares of each output's distance, relative to the unit's size."""
    parts = [
        float((a - b).norm() / u.norm()) ** 2 for a, b, u in zip(these, those, unit, strict=True)
    ]
    return sum(parts) ** 0.5


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
