"""Read and write checkpoint folders in the BAGEL layout. Whatever does not fit is an error that
names the tensor.

    bagel = load("pretrained/bagel-nano-shapes", device="auto", dtype="auto")
    save(bagel, "out/checkpoint")

Modules are built on the meta device and filled by assignment, tensor by tensor, straight onto the
target device, so that host memory never holds a second copy. The position tables are computed
(fp32), not read; grid sides and the VAE's shape come from the tensors.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from umm_reflect.attention import BACKENDS
from umm_reflect.config import BagelConfig
from umm_reflect.errors import CheckpointError, UsageError, UserError
from umm_reflect.files import make_readable
from umm_reflect.layout import Frame
from umm_reflect.model import Bagel
from umm_reflect.streamed import DTYPES
from umm_reflect.tokens import Tokens
from umm_reflect.vit import sincos_table

WEIGHTS = "ema.safetensors"
VAE_WEIGHTS = "ae.safetensors"
TABLES = ("latent_pos_embed.pos_embed", "vit_pos_embed.pos_embed")
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "generation_config.json",
    "preprocessor_config.json",
)
# Names listed in an error before "and N more".
MOST_NAMES = 5


class TensorFiles:
    """The tensors of one safetensors file, or of the shards that an index lists, read one by
    one.
    """

    def __init__(self, folder: Path, name: str):
        self.label = str(folder / name)
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            paths = [folder / name]
        elif index.exists():
            shards = _weight_map(index).values()
            paths = [folder / shard for shard in dict.fromkeys(shards)]
            self.label = str(index)
        else:
            raise CheckpointError(
                f"{folder} has no {name} (nor {name}.index.json)",
                "Name a complete BAGEL checkpoint folder, or fetch one with: umm-reflect download",
            )
        self._where: dict[str, Path] = {}
        for path in paths:
            with self._open(path) as file:
                self._where.update(dict.fromkeys(file.keys(), path))

    @staticmethod
    def _open(path: Path, device: str = "cpu"):
        try:
            return safe_open(path, framework="pt", device=device)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing", "Fetch the checkpoint again") from None
        except RuntimeError as error:  # torch's own, where the address space is limited
            raise CheckpointError(
                f"{path} cannot be mapped into memory ({error})",
                "Raise the limit (ulimit -v, vm.overcommit_memory), or take a machine with more",
            ) from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is not a readable safetensors file ({error})",
                "It may be truncated: fetch it again",
            ) from error

    def names(self) -> list[str]:
        return list(self._where)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for path in dict.fromkeys(self._where.values()):
            with self._open(path) as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return shapes

    def dtypes(self) -> dict[str, torch.dtype]:
        """The number type that each tensor is stored in."""
        dtypes = {}
        for path in dict.fromkeys(self._where.values()):
            with self._open(path) as file:
                for name in file.keys():  # noqa: SIM118
                    kind = file.get_slice(name).get_dtype()
                    if kind not in DTYPES:
                        raise CheckpointError(
                            f"{path}: {name} is stored as {kind}", f"One of {', '.join(DTYPES)}"
                        )
                    dtypes[name] = DTYPES[kind]
        return dtypes

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """All tensors in file order, on the device."""
        for path in dict.fromkeys(self._where.values()):
            with self._open(path, str(device)) as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)


def load(
    name: str | Path,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    attn: str = "auto",
    adapter: str | Path | None = None,
    vae_dtype: torch.dtype | None = None,
) -> Bagel:
    """Load a checkpoint for inference or training.

    name: folder, hub id or `id@revision`. device: auto|cuda|cpu|mps|npu. dtype: auto (bf16 on an
    accelerator, fp32 on a CPU) or a torch dtype. attn: one of `attention.BACKENDS`. adapter: a
    PEFT LoRA folder or id. vae_dtype: the VAE's; default: the model's.

    Returns a `Bagel` in eval mode with `vae`, `tokens`, `frame` and `folder` set. Errors:
    CheckpointError for files, UsageError for a device, dtype or attn that is not there.
    """
    from umm_reflect.device import resolve_device, resolve_dtype
    from umm_reflect.hub import resolve

    if attn not in BACKENDS:
        raise UsageError(f"there is no attention kernel '{attn}'", f"One of {', '.join(BACKENDS)}.")
    folder = resolve(name)
    target = resolve_device(device)
    number = resolve_dtype(dtype, target)
    tokens = Tokens.from_folder(folder)
    bagel = load_model(folder, device=target, dtype=number)
    bagel.attn = attn
    attach_vae(bagel, load_vae(folder, bagel.config, device=target, dtype=vae_dtype or number))
    if tokens.size > bagel.config.llm.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {folder} has {tokens.size} ids, "
            f"the model {bagel.config.llm.vocab_size} rows",
            "Tokenizer and weights do not belong together",
        )
    attach_tokens(bagel, tokens, folder)
    if adapter is not None:
        from umm_reflect.adapters import load_adapter

        load_adapter(bagel, adapter)
    return bagel


def attach_vae(bagel: Bagel, vae: nn.Module) -> None:
    """Hang the autoencoder on the model, outside of its parameters and state dict."""
    object.__setattr__(bagel, "vae", vae)
    bagel.config = replace(bagel.config, vae=vae.config)


def attach_tokens(bagel: Bagel, tokens: Tokens, folder: Path | None) -> None:
    """Give the model its tokenizer and the ids of its frame."""
    bagel.tokens = tokens
    bagel.frame = Frame(tokens.start, tokens.end, tokens.image_start, tokens.image_end)
    bagel.folder = folder


def load_model(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Bagel:
    """The transformer, ViT and heads from `ema.safetensors`, checked against the config; no
    tokenizer, no VAE.
    """
    files = TensorFiles(folder, WEIGHTS)
    shapes = files.shapes()
    bagel = empty_bagel(_config(folder, files, shapes))
    fill(bagel, files, shapes, device=device, dtype=dtype, skip=TABLES)
    place_tables(bagel, device)
    return bagel.eval()


def read_config(folder: Path) -> BagelConfig:
    """What `load` would give a folder's model as config, from the headers of its files.

    Errors: CheckpointError for files that are missing or no checkpoint.
    """
    from umm_reflect.autoencoder import infer_vae_config

    files = TensorFiles(folder, WEIGHTS)
    config = _config(folder, files, files.shapes())
    vae = infer_vae_config(TensorFiles(folder, VAE_WEIGHTS).shapes(), config.vae)
    return replace(config, vae=vae)


def _config(folder: Path, files: TensorFiles, shapes: Mapping[str, tuple[int, ...]]) -> BagelConfig:
    config = BagelConfig.from_folder(folder)
    sides = {name: _side(shapes, name, files.label) for name in TABLES}
    return config.with_sides(latent_grid_side=sides[TABLES[0]], vit_grid_side=sides[TABLES[1]])


def load_vae(
    folder: Path, config: BagelConfig, *, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """The autoencoder from `ae.safetensors`, its shape from the tensors."""
    from umm_reflect.autoencoder import AutoEncoder, infer_vae_config

    files = TensorFiles(folder, VAE_WEIGHTS)
    shapes = files.shapes()
    vae_config = infer_vae_config(shapes, config.vae)
    with torch.device("meta"), _no_initialisation():
        vae = AutoEncoder(vae_config)
    fill(vae, files, shapes, device=device, dtype=dtype)
    return vae.eval()


def empty_bagel(config: BagelConfig) -> Bagel:
    """A model without memory (meta device): for inventories, and to be filled."""
    with torch.device("meta"), _no_initialisation():
        return Bagel(config)


@contextmanager
def _no_initialisation() -> Iterator[None]:
    """Skip random initial values: a meta module holds none, and their imports cost a second."""
    reset = {cls: cls.reset_parameters for cls in (nn.Linear, nn.Embedding, nn.LayerNorm)}
    reset |= {cls: cls.reset_parameters for cls in (nn.Conv2d, nn.GroupNorm)}
    try:
        for cls in reset:
            cls.reset_parameters = lambda self: None
        yield
    finally:
        for cls, function in reset.items():
            cls.reset_parameters = function


def place_tables(bagel: Bagel, device: torch.device) -> None:
    """Compute the two fixed position tables in fp32."""
    for table in (bagel.latent_pos_embed, bagel.vit_pos_embed):
        table.pos_embed = sincos_table(table.side, table.width).to(device)


def fill(
    module: nn.Module,
    files: TensorFiles,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    skip: tuple[str, ...] = (),
) -> None:
    """Assign every tensor of `files` to the meta module; raises CheckpointError unless names and
    shapes match.
    """
    wanted = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    _refuse("lacks", [n for n in wanted if n not in shapes], files.label)
    _refuse("has, unknown to this model,", [n for n in shapes if n not in wanted], files.label)
    wrong = [
        f"{n} {list(shapes[n])} (expected {list(wanted[n])})"
        for n in wanted
        if shapes[n] != wanted[n]
    ]
    _refuse("has in another shape", wrong, files.label)
    owners = dict(module.named_modules())
    for name, tensor in files.tensors(device):
        if name in skip:
            continue
        owner, leaf = name.rpartition(".")[::2]
        value = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
        setattr(owners[owner], leaf, value)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name → shard, as an index file says."""
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{index} is not a readable index ({error!r})", "Fetch it again"
        ) from error


def _refuse(verb: str, names: list[str], label: str) -> None:
    if names:
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        raise CheckpointError(
            f"{label} {verb} {len(names)} tensors: {', '.join(names[:MOST_NAMES])}{more}",
            "Config and weights do not belong together, or the file is damaged",
        )


def _side(shapes: Mapping[str, tuple[int, ...]], name: str, label: str) -> int:
    if name not in shapes:
        raise CheckpointError(f"{label} lacks {name}", "It is not a complete BAGEL checkpoint")
    rows = shapes[name][0]
    side = round(rows**0.5)
    if side * side != rows:
        raise CheckpointError(
            f"{label}: {name} has {rows} rows, which is no square grid", "The file is damaged"
        )
    return side


def save(
    bagel: Bagel,
    folder: str | Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
    vae_dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a complete folder: configs, bf16 `ema.safetensors`, `ae.safetensors`, tokenizer,
    `reflection.json`.

    Everything is written aside and renamed, so that a killed run leaves the old folder or the new
    one (at worst under its name with ".old"); an error leaves nothing aside. weights: tensors to
    store in place of the model's (an average). Tokenizer files, the card and `reflection.json` are
    copied from the folder that the model came from. Raises ValueError while an adapter is attached.
    """
    from umm_reflect.adapters import has_adapter

    if has_adapter(bagel):
        raise ValueError("an adapter is attached: save_adapter it, or merge_adapter first")
    folder = Path(folder)
    aside = folder.with_name(folder.name + ".writing")
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    try:
        _write_folder(bagel, aside, weights, vae_dtype)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if folder.exists():
        old = folder.with_name(folder.name + ".old")
        if old.exists():
            shutil.rmtree(old)
        os.rename(folder, old)
        os.rename(aside, folder)
        shutil.rmtree(old)
    else:
        os.rename(aside, folder)
    return folder


def _write_folder(
    bagel: Bagel, aside: Path, weights: Mapping[str, Tensor] | None, vae_dtype: torch.dtype
) -> None:
    vae: nn.Module = bagel.vae
    config = replace(bagel.config, vae=vae.config)
    config.to_files(aside, bos_token_id=bagel.tokens.pad, eos_token_id=bagel.tokens.end)
    source = getattr(bagel, "folder", None)
    for name in (*TOKENIZER_FILES, "reflection.json", "README.md"):
        if source is not None and (Path(source) / name).exists():
            shutil.copyfile(Path(source) / name, aside / name)
    state = dict(weights if weights is not None else bagel.state_dict())
    save_tensors(state, aside / WEIGHTS)
    save_tensors(vae.state_dict(), aside / VAE_WEIGHTS, vae_dtype)


def save_tensors(
    state: Mapping[str, Tensor], path: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """One safetensors file in `dtype`. Errors: UserError where it cannot be written."""
    tensors = {n: t.detach().to("cpu", dtype).contiguous() for n, t in state.items()}
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise UserError(
            f"{path} cannot be written ({error})", "Free some space, or write elsewhere"
        ) from error
    make_readable(path)  # the library's files are the owner's alone
