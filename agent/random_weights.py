"""A checkpoint folder of any BAGEL shape with random weights, written tensor by tensor.

    write_random_checkpoint(Path("runs/full"), BAGEL_7B_MOT, tokenizer=Path("pretrained/..."),
                            profile=profile, device=torch.device("cuda"), seed=0)

It is what time and memory are measured on where the real weights are not (`agent/full_size.py`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from umm_reflect.config import BagelConfig
from umm_reflect.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from umm_reflect.profile import ReflectionProfile


def write_random_checkpoint(
    folder: Path,
    shape: BagelConfig,
    *,
    tokenizer: Path,
    profile: ReflectionProfile,
    device: torch.device,
    seed: int,
) -> bool:
    """Write a complete folder unless it is there already; whether it was written.

    tokenizer: a folder whose tokenizer files are copied. device: where the random numbers are made.
    Everything is written aside and renamed. Errors: UsageError when the folder holds another model
    or the tokenizer does not fit; UserError when the disk is too small.
    """
    from umm_reflect.hub import check_disk
    from umm_reflect.profile import save_profile
    from umm_reflect.tokens import Tokens

    weights, vae = tensor_shapes(shape)
    if folder.exists():
        _check_written(folder, weights)
        return False
    tokens = Tokens.from_folder(tokenizer)
    if tokens.size > shape.llm.vocab_size:
        raise UsageError(
            f"the tokenizer in {tokenizer} has {tokens.size} ids, "
            f"the model {shape.llm.vocab_size} rows",
            "Name another --tokenizer.",
        )
    check_disk(folder, 2 * _count(weights) + 4 * _count(vae), str(folder))
    aside = folder.with_name(folder.name + ".writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        make = RandomTensors(device, seed)
        write_safetensors(aside / "ema.safetensors", weights, "BF16", make)
        write_safetensors(aside / "ae.safetensors", vae, "F32", make)
        shape.to_files(aside, bos_token_id=tokens.pad, eos_token_id=tokens.end)
        for name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"):
            if (tokenizer / name).exists():
                shutil.copyfile(tokenizer / name, aside / name)
        save_profile(profile, aside)
        os.rename(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return True


def _check_written(folder: Path, weights: Mapping[str, tuple[int, ...]]) -> None:
    from umm_reflect.checkpoint import WEIGHTS, TensorFiles

    if TensorFiles(folder, WEIGHTS).shapes() != dict(weights):
        raise UsageError(f"{folder} holds another model", "Name a folder that does not exist yet.")


def tensor_shapes(
    shape: BagelConfig,
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Names and shapes of ema.safetensors and of ae.safetensors."""
    import torch

    from umm_reflect.autoencoder import AutoEncoder
    from umm_reflect.model import Bagel

    with torch.device("meta"):
        modules = Bagel(shape), AutoEncoder(shape.vae)
    bagel, vae = ({n: tuple(t.shape) for n, t in m.state_dict().items()} for m in modules)
    return bagel, vae


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(prod, shapes.values()))


class RandomTensors:
    """Weights under which activations stay near one: standard deviation 1 / sqrt(fan-in)."""

    def __init__(self, device: torch.device, seed: int):
        import torch

        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        import torch

        from umm_reflect.vit import sincos_table

        if name.endswith("pos_embed"):
            return sincos_table(round(size[0] ** 0.5), size[1]).to(dtype)
        draw = torch.randn(size, generator=self.generator, device=self.device, dtype=dtype)
        if len(size) == 1:
            scale = "norm" in name and name.endswith("weight")
            return draw.mul_(0.02).add_(1.0 if scale else 0.0)
        if name.endswith("embed_tokens.weight"):
            return draw
        return draw.mul_((draw[0].numel()) ** -0.5)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    number: Literal["BF16", "F32"],
    make: Callable[[str, tuple[int, ...], torch.dtype], Tensor],
) -> None:
    """One safetensors file, a tensor at a time, so that memory never holds more than one.

    The format: the header's length (8 bytes, little-endian), a JSON header padded with blanks to a
    multiple of 8, then the tensors one after another.
    """
    import torch

    dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[number]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in shapes.items():
        start, end = end, end + prod(size) * dtype.itemsize
        header[name] = {"dtype": number, "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in shapes.items():
            tensor = make(name, size, dtype).cpu().contiguous()
            file.write(tensor.flatten().view(torch.uint8).numpy().data)
