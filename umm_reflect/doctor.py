"""What is installed, what the machine can do, what is missing; and what a model would need.

umm-reflect doctor [--json]                       # paste this into a bug report
umm-reflect doctor --plan --vram 24GiB --model ByteDance-Seed/BAGEL-7B-MoT
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from umm_reflect.errors import UsageError
from umm_reflect.files import human_size
from umm_reflect.settings import parse

CORE = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "huggingface-hub",
    "numpy",
    "pillow",
)
EXTRAS = {
    "train": ("accelerate", "datasets", "pyarrow"),
    "deepspeed": ("deepspeed",),
    "serve": ("gradio", "fastapi", "uvicorn", "python-multipart"),
    "ocr": ("rapidocr", "onnxruntime"),
    "vl": ("torchvision",),
    "vllm": ("vllm",),
    "dev": ("pytest", "pytest-xdist", "pytest-timeout", "ruff"),
}


@dataclass(frozen=True)
class DoctorConfig:
    """What is installed, what the machine can do, what is missing; with --plan, what fits."""

    json: bool = False
    """Print JSON instead of lines."""
    plan: bool = False
    """Print the memory plan of a reflect run, from the configs, without loading anything."""
    model: str = "pretrained/bagel-nano-shapes"
    """Model of the plan: a folder or a hub id."""
    vram: str | None = None
    """Memory to plan for, for example 24GiB; otherwise what the device has."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of the plan."""
    size: tuple[int, int] | None = None
    """Height and width of the pictures; otherwise the model's own."""
    batch_size: int = 1
    """Pictures at a time."""
    max_rounds: int | None = None
    """Edits at most; otherwise the model's own."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch-size is {self.batch_size}; give at least 1")
        if self.max_rounds is not None and self.max_rounds < 0:
            raise ValueError(f"max-rounds is {self.max_rounds}; give 0 or more")
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"size is {self.size}; give height and width in pixels")
        if self.vram is not None:
            parse_bytes(self.vram)


def main(argv: Sequence[str]) -> int:
    """Exit code 1 when a package of the core is missing, or when the plan does not fit."""
    config = parse(DoctorConfig, argv, "umm-reflect doctor")
    report = memory_report(config) if config.plan else machine_report()
    if config.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(plan_lines(report) if config.plan else machine_lines(report)))
    return 0 if report["ok"] else 1


def parse_bytes(text: str) -> int:
    """'24GiB', '24GB' or '24' (GiB) in bytes. Errors: ValueError that shows the form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"vram is {text!r}; give a size such as 24GiB")
    number, unit, binary = match.groups()
    power = "KMGT".index(unit.upper()) + 1 if unit else 3
    return int(float(number) * (1000 if unit and not binary else 1024) ** power)


# --- the machine ----------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine_report() -> dict[str, Any]:
    """Versions, devices, extras, models and disks as plain values; `ok`: the core is complete."""
    core = {package: _version(package) for package in CORE}
    report: dict[str, Any] = {
        "ok": None not in core.values(),
        "umm_reflect": _version("umm-reflect") or "not installed (run from a checkout)",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "core": core,
        "extras": {
            extra: {package: _version(package) for package in packages}
            for extra, packages in EXTRAS.items()
        },
        "devices": _devices() if core["torch"] else [],
        "cpu": {"cores": os.cpu_count(), "memory_bytes": host_memory()},
        "models": _models(),
        "disk": _disks(),
        "hub": {name: os.environ.get(name) for name in ("HF_HOME", "HF_ENDPOINT")}
        | {"offline": os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "ON", "YES")},
    }
    return report


def _devices() -> list[dict[str, Any]]:
    import torch

    from umm_reflect.device import available_devices, resolve_dtype

    devices = []
    for kind in available_devices():
        device = torch.device(kind)
        entry = {"device": kind, "dtype": str(resolve_dtype("auto", device)).removeprefix("torch.")}
        if kind != "cuda":
            devices.append(entry)
            continue
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            devices.append(
                entry
                | {
                    "device": f"cuda:{index}",
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "memory_bytes": total,
                    "free_bytes": free,
                    "cuda": torch.version.cuda or f"hip {torch.version.hip}",
                }
            )
    return devices


def host_memory() -> int | None:
    """Bytes of main memory, where the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _models() -> list[dict[str, Any]]:
    """The checkpoint folders under pretrained/, here and in the checkout, and what they lack."""
    from umm_reflect.hub import missing_files

    roots = {Path("pretrained").resolve(), Path(__file__).resolve().parent.parent / "pretrained"}
    folders = [f for root in sorted(roots) if root.is_dir() for f in sorted(root.iterdir())]
    return [
        {"folder": str(folder), "missing": missing_files(folder)}
        for folder in folders
        if folder.is_dir()
    ]


def _disks() -> dict[str, dict[str, Any]]:
    from huggingface_hub.constants import HF_HUB_CACHE

    disks = {}
    for name, place in (("here", Path.cwd()), ("hub cache", Path(HF_HUB_CACHE))):
        existing = next(p for p in (place, *place.parents) if p.exists())
        disks[name] = {"path": str(place), "free_bytes": shutil.disk_usage(existing).free}
    return disks


def machine_lines(report: dict[str, Any]) -> list[str]:
    lines = [
        f"umm-reflect {report['umm_reflect']}, Python {report['python']}, {report['platform']}",
        "",
        *(
            f"  {'ok     ' if version else 'MISSING'}  {package} {version or ''}".rstrip()
            for package, version in report["core"].items()
        ),
        "",
    ]
    for extra, packages in report["extras"].items():
        missing = [package for package, version in packages.items() if version is None]
        if missing:
            how = f"pip install -e '.[{extra}]'"
            lines.append(f"  extra {extra}: not here: {', '.join(missing)} ({how})")
        else:
            found = ", ".join(f"{package} {version}" for package, version in packages.items())
            lines.append(f"  extra {extra}: {found}")
    lines.append("")
    memory = report["cpu"]["memory_bytes"]
    for device in report["devices"]:
        text = f"  device {device['device']}: dtype auto = {device['dtype']}"
        if "name" in device:
            total, free = human_size(device["memory_bytes"]), human_size(device["free_bytes"])
            text += f", {device['name']}, {free} of {total} free, CUDA {device['cuda']}"
        elif device["device"] == "cpu":
            text += f", {report['cpu']['cores']} cores"
            text += f", {human_size(memory)} of memory" if memory else ""
        lines.append(text)
    lines += ["", *_model_lines(report["models"])]
    for name, disk in report["disk"].items():
        lines.append(f"  disk {name}: {human_size(disk['free_bytes'])} free at {disk['path']}")
    if not report["ok"]:
        lines += ["", "Install what is missing: bash scripts/test.sh, or pip install -e ."]
    return lines


def _model_lines(models: list[dict[str, Any]]) -> list[str]:
    if not models:
        return ["  no model under pretrained/ (umm-reflect download fetches one)"]
    return [
        f"  model {model['folder']}: "
        + (f"lacks {', '.join(model['missing'])}" if model["missing"] else "complete")
        for model in models
    ]


# --- the plan -------------------------------------------------------------------------------------


def memory_report(config: DoctorConfig) -> dict[str, Any]:
    """The memory plan as plain values; `ok`: it fits."""
    import torch

    from umm_reflect import hub
    from umm_reflect.config import BAGEL_7B_MOT, BagelConfig
    from umm_reflect.device import resolve_device, resolve_dtype
    from umm_reflect.memory import Run, plan_memory
    from umm_reflect.profile import released_profile

    if hub.split_name(config.model)[0] in hub.RELEASED:
        model, profile = BAGEL_7B_MOT, released_profile("")
    else:
        folder = hub.resolve(config.model, download=False)
        model, profile = BagelConfig.from_folder(folder), hub.profile(folder)
    device = resolve_device("auto")
    planned_for_gpu = config.vram is not None or device.type != "cpu"
    dtype = resolve_dtype(config.dtype, device)
    if config.dtype == "auto" and planned_for_gpu:
        dtype = torch.bfloat16
    size = config.size or profile.size
    seen = profile.transforms.vit.on_grid(model.vit.patch_size).size(*size)
    run = Run(
        size=size,
        batch_size=config.batch_size,
        rounds=profile.say.max_rounds if config.max_rounds is None else config.max_rounds,
        turn_tokens=profile.say.max_tokens,
        vit_tokens=(seen[0] // model.vit.patch_size) * (seen[1] // model.vit.patch_size),
        full_view=profile.edit_view == "full",
    )
    limit = model.latent_grid_side * model.latent_stride
    if max(size) > limit:
        raise UsageError(f"size {size[0]}x{size[1]} is too large", f"At most {limit} a side.")
    plan = plan_memory(model, run, dtype, cuda=planned_for_gpu)
    if config.vram is not None:
        available: int | None = parse_bytes(config.vram)
    elif device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = host_memory()
    return {
        "ok": available is None or plan.total <= available,
        "model": config.model,
        "dtype": str(dtype).removeprefix("torch."),
        "size": list(size),
        "batch_size": run.batch_size,
        "max_rounds": run.rounds,
        "edit_view": profile.edit_view,
        "parts_bytes": plan.parts,
        "weights_bytes": plan.weights,
        "total_bytes": plan.total,
        "available_bytes": available,
    }


def plan_lines(report: dict[str, Any]) -> list[str]:
    height, width = report["size"]
    lines = [
        f"{report['model']} in {report['dtype']}: {report['batch_size']} picture(s) of "
        f"{height}x{width}, up to {report['max_rounds']} edits, edit view {report['edit_view']}",
        "",
        *(f"  {human_size(n):>10}  {name}" for name, n in report["parts_bytes"].items()),
        f"  {human_size(report['total_bytes']):>10}  in all",
        "",
    ]
    available = report["available_bytes"]
    if available is None:
        return [*lines, "How much memory is here is not known; name it: --vram 24GiB"]
    room = available - report["total_bytes"]
    if room >= 0:
        return [*lines, f"Fits in {human_size(available)}, with {human_size(room)} to spare."]
    lines.append(f"Does not fit in {human_size(available)}: {human_size(-room)} too much.")
    if report["weights_bytes"] > available:
        lines.append("The weights alone are larger. " + _smaller_weights(report["dtype"]))
    else:
        lines.append("Smaller: --size, fewer at a time: --batch-size, fewer edits: --max-rounds.")
    return lines


def _smaller_weights(dtype: str) -> str:
    if dtype == "float32":
        return "--dtype bfloat16 halves them."
    return "Use a larger GPU, or the CPU where main memory holds them (--device cpu)."


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
