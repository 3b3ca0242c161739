"""Which device and number format to run on: the meaning of `auto`.

device = resolve_device("auto")            # cuda, else npu, else mps, else cpu
dtype = resolve_dtype("auto", device)      # bfloat16 where the device computes in it, else float32
"""

from __future__ import annotations

import importlib.util
from typing import Literal, get_args

import torch

from umm_reflect.errors import UsageError

DeviceName = Literal["auto", "cuda", "cpu", "mps", "npu"]
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def available_devices() -> list[str]:
    """Device types that work here, the best first; "cpu" is always the last."""
    found = []
    if torch.cuda.is_available():
        found.append("cuda")
    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu  # noqa: F401  (registers torch.npu)

        if torch.npu.is_available():
            found.append("npu")
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """The torch device for "auto", "cuda", "cuda:1", "cpu", "mps", "npu" or a device itself.

    Errors: UsageError that lists what is there, for a name or index that is not.
    """
    available = available_devices()
    if str(name) == "auto":
        return torch.device(available[0])
    kind, _, index = str(name).partition(":")
    if kind not in get_args(DeviceName) or (index and not index.isdecimal()):
        raise UsageError(
            f"there is no device '{name}'", f"Choose auto or one of {', '.join(available)}."
        )
    if kind not in available:
        raise UsageError(
            f"device '{name}' is not available here",
            f"Available: {', '.join(available)} (umm-reflect doctor tells more).",
        )
    count = {"cuda": torch.cuda.device_count, "npu": lambda: torch.npu.device_count()}
    if index and int(index) >= count.get(kind, lambda: 1)():
        n = count.get(kind, lambda: 1)()
        raise UsageError(f"device '{name}' does not exist", f"There are {n}, counted from 0.")
    return torch.device(str(name))


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 arithmetic of its own (not emulated)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "npu"


def resolve_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype for "auto", "bfloat16"/"bf16", "float16"/"fp16", "float32"/"fp32".

    auto is bfloat16 on CUDA (Ampere and later) and NPU, and float32 elsewhere: on the CPU that
    makes a repeat equal bit for bit, and older GPUs would emulate bfloat16.
    Errors: UsageError that lists the choices.
    """
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return torch.bfloat16 if computes_bfloat16(device) else torch.float32
    full = _SHORT_DTYPES.get(name, name)
    if full not in get_args(DtypeName):
        raise UsageError(f"there is no dtype '{name}'", f"One of {', '.join(get_args(DtypeName))}.")
    return getattr(torch, full)


def give_back(device: torch.device) -> None:
    """Memory that torch keeps for later tensors goes back to the device: between two phases that
    need differently shaped ones, and for whoever else is on it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
