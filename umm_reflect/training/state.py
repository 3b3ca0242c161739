"""The state of a run on disk, so that it goes on as if nothing had happened: masters, moments,
averages, the random generators, and how far it is; `settings`: what a resume must share.

    save_state(folder, optimizer, step, seconds)        # written aside and renamed
    step, seconds = load_state(folder, optimizer)
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from umm_reflect.errors import UserError
from umm_reflect.files import write_aside
from umm_reflect.training.optim import Optimizer

STATE = "state.safetensors"


def save_state(
    folder: Path, optimizer: Optimizer, step: int, seconds: float, settings: str = ""
) -> None:
    """Masters, moments and averages, written aside and renamed."""
    state = {name: t.cpu() for name, t in optimizer.state_dict().items()}
    state |= {f"rng/{name}": t for name, t in random_states().items()}
    about = {"step": str(step), "seconds": str(seconds), "settings": settings}
    write_aside(folder / STATE, to_bytes(state, metadata=about))


def random_states() -> dict[str, Tensor]:
    """The states of torch's own generators: which rows and which noise come next."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def load_state(folder: Path, optimizer: Optimizer, settings: str = "") -> tuple[int, float]:
    """(step, seconds used) of the saved state, which the optimizer takes over. Errors: UserError
    where there is none, or that of other settings."""
    path = folder / STATE
    if not path.exists():
        raise UserError(f"{path} is missing: there is nothing to resume", "Leave out --resume")
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
        if about.get("settings", "") != settings:
            raise UserError(
                f"{path} is of a run with other settings",
                "Begin anew (--force), or repeat the command as it was",
            )
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    set_random_states({n[4:]: state.pop(n) for n in [*state] if n.startswith("rng/")})
    optimizer.load_state_dict(state)
    return int(about["step"]), float(about["seconds"])
