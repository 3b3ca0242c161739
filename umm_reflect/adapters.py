"""LoRA adapters in PEFT's layout on a BAGEL model: attach, load, save, switch off, merge.

    attach_lora(bagel, rank=32, alpha=64, experts="gen")          # to train; changes nothing yet
    save_adapter(bagel, "out/adapter", base_id="ByteDance-Seed/BAGEL-7B-MoT")

    load_adapter(bagel, "out/adapter")                            # a folder or a hub id
    with adapters_disabled(bagel): ...                            # the reference model
    merge_adapter(bagel)                                          # plain weights again

The wrapped modules are PEFT's own; a folder holds `adapter_config.json` and
`adapter_model.safetensors` with BAGEL's module names, so PEFT reads what is written here. One
adapter at a time. Whoever keeps an `Engine` calls its `forget()` after any of these: what it has
read was read with other weights.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from umm_reflect.errors import CheckpointError
from umm_reflect.files import write_aside
from umm_reflect.hub import resolve
from umm_reflect.model import Bagel

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer

Experts = Literal["gen", "und", "both"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ADAPTER = "default"  # PEFT's name for an adapter that has no other
PEFT_PREFIX = "base_model.model."
# What the module names of an adapter may lack, when it was trained on a part of the model alone.
ROOTS = ("", "language_model.", "language_model.model.")
MOST_NAMES = 5
SUFFIXES = {"gen": ("_moe_gen",), "und": ("",), "both": ("", "_moe_gen")}


def target_modules(experts: Experts) -> list[str]:
    """The projections and MLPs of the decoder layers that belong to an expert, as PEFT targets."""
    if experts not in get_args(Experts):
        raise ValueError(f"experts is {experts!r}; choose one of {', '.join(get_args(Experts))}")
    names = []
    for suffix in SUFFIXES[experts]:
        names += [f"self_attn.{name}_proj{suffix}" for name in "qkvo"]
        names += [f"mlp{suffix}.{name}_proj" for name in ("gate", "up", "down")]
    return names


def attach_lora(
    bagel: Bagel,
    rank: int,
    alpha: float,
    experts: Experts = "gen",
    dropout: float = 0.0,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Bagel:
    """Give every projection and MLP of an expert a trainable low-rank update: W + (alpha/rank) B A.

    B is zero, so that the model answers as before; A comes from `seed`. Everything else is frozen.
    dtype: of A and B (fp32 masters by default). Returns the same model. Errors: ValueError for bad
    numbers, and when the model has an adapter already.
    """
    from peft import LoraConfig

    if rank < 1 or alpha <= 0 or not 0 <= dropout < 1:
        raise ValueError(
            f"rank {rank} must be 1 or more, alpha {alpha} positive, dropout {dropout} in [0, 1)"
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_modules(experts),
        # the vision tower has projections of the same names
        exclude_modules=None if experts == "gen" else r"vit_model\..*",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(bagel, config, root="", dtype=dtype)
    return bagel


def load_adapter(
    bagel: Bagel,
    name: str | Path,
    *,
    trainable: bool = False,
    dtype: torch.dtype | None = None,
) -> Bagel:
    """Attach the adapter in a folder or on the hub. Returns the same model.

    Keys may begin with `base_model.model.` or not, and name modules from the whole model, from
    `language_model` or from `language_model.model`. dtype: of the low-rank weights; default the
    model's (trainable: fp32).

    Raises CheckpointError that names the first of: a file that is missing or damaged, a kind of
    adapter other than LoRA, a key that binds to nothing, a target that matches no module, a
    targeted module without weights, a shape that differs. The model is then as it was.
    Raises ValueError when the model has an adapter already.
    """
    folder = resolve(name)
    config, tensors = _read(folder)
    root, bound = _bind(bagel, tensors, folder)
    part = bagel.get_submodule(root.removesuffix("."))
    _check_targets(part, config, folder)
    matched = {root + name for name in _matched(part, config)}
    given = {module for module, _ in bound.values()}
    _refuse("lacks the weights of", sorted(matched - given), folder)
    _refuse("has weights of modules that it does not target:", sorted(given - matched), folder)
    default = torch.float32 if trainable else bagel.dtype
    _inject(bagel, config, root=root, dtype=dtype or default)
    try:
        _fill(bagel, {key: tensors[key] for key in bound}, bound, folder)
    except CheckpointError:
        remove_adapter(bagel)
        raise
    for _, parameter in adapter_parameters(bagel):
        parameter.requires_grad_(trainable)
    return bagel


def save_adapter(
    bagel: Bagel,
    folder: str | Path,
    base_id: str,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write `adapter_config.json` and `adapter_model.safetensors`, each aside and renamed.

    base_id: the model that the adapter belongs to (hub id, `id@revision` or folder). weights: what
    to store in place of the model's own, by their names in it (masters, averages). They keep their
    number type. Raises ValueError when the model has no adapter.
    """
    from safetensors.torch import save

    config = adapter_config(bagel)
    folder = Path(folder)
    state = {
        PEFT_PREFIX + name.replace(f".{ADAPTER}", ""): tensor.detach().cpu().contiguous()
        for name, tensor in (weights or dict(adapter_parameters(bagel))).items()
    }
    content = config.to_dict() | {"base_model_name_or_path": base_id, "inference_mode": True}
    wrapped = sorted(name for name, _ in adapter_layers(bagel))
    if _matched(bagel, config) != set(wrapped):  # the config speaks of a part of the model
        content |= {"target_modules": wrapped, "exclude_modules": None}
    write_aside(folder / WEIGHTS, save(state, metadata={"format": "pt"}))
    plain = {key: _plain(value) for key, value in content.items()}
    write_aside(folder / CONFIG, json.dumps(plain, indent=2, sort_keys=True) + "\n")
    return folder


@contextmanager
def adapters_disabled(bagel: Bagel) -> Iterator[Bagel]:
    """The model without its adapter while the block runs: the reference in RL and distillation."""
    layers = [layer for _, layer in adapter_layers(bagel)]
    trainable = [(p, p.requires_grad) for _, p in adapter_parameters(bagel)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield bagel
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, was in trainable:  # PEFT switches it along
            parameter.requires_grad_(was)


def merge_adapter(bagel: Bagel) -> Bagel:
    """Add the low-rank update to the weights (in fp32, rounded once) and take the wrappers off.

    Raises ValueError when the model has no adapter.
    """
    adapter_config(bagel)
    for _, layer in adapter_layers(bagel):
        base = layer.get_base_layer()
        dtype = base.weight.dtype
        for parameter in layer.parameters():
            parameter.data = parameter.data.float()
        layer.merge(safe_merge=True)
        base.to(dtype)
    return remove_adapter(bagel)


def remove_adapter(bagel: Bagel) -> Bagel:
    """Take the adapter off: the model as it was, or as merging left it."""
    for name, layer in list(adapter_layers(bagel)):
        owner, _, leaf = name.rpartition(".")
        setattr(bagel.get_submodule(owner), leaf, layer.get_base_layer())
    for root in ROOTS:
        part = bagel.get_submodule(root.removesuffix("."))
        if hasattr(part, "peft_config"):
            del part.peft_config
    return bagel


def has_adapter(bagel: Bagel) -> bool:
    """Whether an adapter is attached (then the state dict has PEFT's names, not BAGEL's)."""
    return next(adapter_layers(bagel), None) is not None


def adapter_layers(bagel: Bagel) -> Iterator[tuple[str, BaseTunerLayer]]:
    """The wrapped modules with BAGEL's names."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in bagel.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def adapter_parameters(bagel: Bagel) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights of the adapter: (`…q_proj_moe_gen.lora_A.default.weight`, parameter)."""
    for name, layer in adapter_layers(bagel):
        for leaf, parameter in _adapter_weights(layer):
            yield f"{name}.{leaf}", parameter


def _adapter_weights(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in layer.named_parameters() if not n.startswith("base_layer.")]


# --- attaching ------------------------------------------------------------------------------------


def _inject(bagel: Bagel, config: LoraConfig, *, root: str, dtype: torch.dtype) -> None:
    from peft import inject_adapter_in_model

    if has_adapter(bagel):
        raise ValueError(
            "the model has an adapter already: merge_adapter or remove_adapter comes first"
        )
    config = copy.deepcopy(config)
    config.inference_mode = False
    inject_adapter_in_model(config, bagel.get_submodule(root.removesuffix(".")), ADAPTER)
    for _, parameter in adapter_parameters(bagel):
        parameter.data = parameter.data.to(dtype)
    bagel.train(bagel.training)  # dropout of the new modules follows the model


def adapter_config(bagel: Bagel) -> LoraConfig:
    """The config of the attached adapter. Raises ValueError when there is none."""
    for root in ROOTS:
        configs = getattr(bagel.get_submodule(root.removesuffix(".")), "peft_config", None)
        if configs:
            return configs[ADAPTER]
    raise ValueError("the model has no adapter: attach_lora or load_adapter comes first")


# --- reading --------------------------------------------------------------------------------------


def _read(folder: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """The config and the tensors of an adapter folder."""
    from peft import LoraConfig, PeftConfig

    from umm_reflect.checkpoint import TensorFiles

    for name in (CONFIG, WEIGHTS):
        if not (folder / name).exists():
            raise CheckpointError(
                f"{folder} has no {name}", f"An adapter folder holds {CONFIG} and {WEIGHTS}"
            )
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} is not an adapter's config ({error})", "Fetch it again"
        ) from error
    if not isinstance(config, LoraConfig):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise CheckpointError(
            f"{folder / CONFIG} describes an adapter of kind {kind}", "Give a LoRA one"
        )
    if not config.target_modules:
        raise CheckpointError(f"{folder / CONFIG} has no target_modules", "Fetch it again")
    return config, dict(TensorFiles(folder, WEIGHTS).tensors(torch.device("cpu")))


def _bind(
    bagel: Bagel, tensors: Mapping[str, Tensor], folder: Path
) -> tuple[str, dict[str, tuple[str, str]]]:
    """Which part of the model the keys are relative to, and (module, leaf) of every key.

    The part is the one to which most keys bind; CheckpointError names those that do not.
    """
    known = {name for name, module in bagel.named_modules() if isinstance(module, nn.Linear)}
    best: tuple[str, dict[str, tuple[str, str]]] = ("", {})
    for root in ROOTS:
        bound = {}
        for key in tensors:
            module, lora, leaf = key.removeprefix(PEFT_PREFIX).partition(".lora_")
            if lora and root + module in known:
                bound[key] = (root + module, "lora_" + leaf)
        if len(bound) > len(best[1]):
            best = (root, bound)
    _refuse("has keys that bind to nothing:", [k for k in tensors if k not in best[1]], folder)
    return best


def _matched(part: nn.Module, config: LoraConfig) -> set[str]:
    """The modules of `part` that the config targets, by their names in it."""
    from peft.tuners.tuners_utils import check_target_module_exists

    names = [name for name, _ in part.named_modules() if name]
    bare = [name for name in names if ".base_layer" not in name and ".lora_" not in name]
    return {name for name in bare if check_target_module_exists(config, name)}


def _check_targets(part: nn.Module, config: LoraConfig, folder: Path) -> None:
    """CheckpointError for a target that matches no module."""
    targets = config.target_modules
    unmatched = []
    for target in [targets] if isinstance(targets, str) else sorted(targets):
        alone = copy.copy(config)
        alone.target_modules = target if isinstance(targets, str) else {target}
        if not _matched(part, alone):
            unmatched.append(target)
    _refuse("targets modules that this model lacks:", unmatched, folder)


def _fill(
    bagel: Bagel,
    tensors: Mapping[str, Tensor],
    bound: Mapping[str, tuple[str, str]],
    folder: Path,
) -> None:
    """Copy the tensors into the injected weights; every weight gets one."""
    places = dict(adapter_parameters(bagel))
    wanted = {name.replace(f".{ADAPTER}", ""): parameter for name, parameter in places.items()}
    given = {f"{module}.{leaf}": key for key, (module, leaf) in bound.items()}
    _refuse("has keys that bind to nothing:", [given[n] for n in given if n not in wanted], folder)
    _refuse("lacks", [name for name in wanted if name not in given], folder)
    wrong = [
        f"{key} {list(tensors[key].shape)} (expected {list(wanted[name].shape)})"
        for name, key in given.items()
        if tensors[key].shape != wanted[name].shape
    ]
    _refuse("has in another shape", wrong, folder)
    names = {name.replace(f".{ADAPTER}", ""): name for name in places}
    with torch.no_grad():
        for name, key in given.items():
            if wanted[name].is_meta:  # of a model without memory: the adapter has some
                owner, _, leaf = names[name].rpartition(".")
                real = nn.Parameter(tensors[key].to(wanted[name].dtype))
                setattr(bagel.get_submodule(owner), leaf, real)
            else:
                wanted[name].copy_(tensors[key])


def _refuse(verb: str, names: Sequence[str], folder: Path) -> None:
    if names:
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        raise CheckpointError(
            f"the adapter in {folder} {verb} {', '.join(names[:MOST_NAMES])}{more}",
            "It belongs to another model, or it is damaged",
        )


def _plain(value: Any) -> Any:
    """Sets become sorted lists, enums their values: a file that does not depend on hashing."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", value)
