"""Further copies of the trained weights: the reference, the policy of the rollout, a slow average.

    copies = Copies(learner, {"reference": START, "slow": START})
    with copies.in_place("reference"):            # every process enters and leaves
        out = learner.forward(...)
    copies.follow("slow", keep=0.3)               # copy <- keep copy + (1 - keep) trained
    save_resume(folder, copies, step, extra)      # the learner's state and the copies' with it

A copy holds this process's part of the masters and nothing of the frozen weights. With adapters a
reference with `base=True` has them at zero: the model that they were attached to. References are
the run's start and are not saved: they are taken again before a state is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from umm_reflect.errors import UserError
from umm_reflect.training.learner import Learner

# The half of a low-rank update that makes it nothing when it is zero.
SECOND_HALF = ".lora_B."


class Copies:
    """names: copies that begin as the trained weights are now. base: those of them whose adapters
    begin at nothing. saved: those that a state holds.

    It stands in for its learner where a state is saved and loaded. Errors: UserError under
    deepspeed, which keeps its weights to itself.
    """

    def __init__(
        self,
        learner: Learner,
        names: Sequence[str],
        *,
        base: Sequence[str] = (),
        saved: Sequence[str] = (),
    ):
        self.learner, self.processes, self.strategy = learner, learner.processes, learner.strategy
        self._saved = tuple(saved)
        self._copies: dict[str, list[Tensor]] = {}
        if not names:
            return
        if self.strategy == "deepspeed":
            raise UserError(
                f"deepspeed keeps no further copies of the weights ({', '.join(names)})",
                "Choose the strategy fsdp2, or settings without a reference and slow weights",
            )
        for name in names:
            self._copies[name] = [master.detach().clone() for master in self._masters]
        for name in base:
            self._without_adapters(name)

    @property
    def _masters(self) -> list[Tensor]:
        return self.learner._layout.masters.masters

    @property
    def _parameters(self) -> list[Tensor]:
        return self.learner._layout.masters.parameters

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    def _without_adapters(self, name: str) -> None:
        if not any(SECOND_HALF in entry for entry in self.learner.trainable):
            return
        for entry, copy in zip(self.learner.trainable, self._copies[name], strict=True):
            if SECOND_HALF in entry:
                copy.zero_()

    @contextmanager
    def in_place(self, name: str) -> Iterator[None]:
        """The model computes with this copy while the block runs; nothing is stepped inside."""
        kept = [p.detach().clone() for p in self._parameters]
        self._put(self._copies[name])
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self._parameters, values)
        self.learner._layout.forget_gathered()

    @torch.no_grad()
    def follow(self, name: str, keep: float) -> None:
        """copy <- keep copy + (1 - keep) trained; 0 makes it equal to the trained weights."""
        masters = [master.float() for master in self._masters]
        if keep == 0:
            torch._foreach_copy_(self._copies[name], masters)
        else:
            torch._foreach_lerp_(self._copies[name], masters, 1 - keep)

    def tensors(self, name: str) -> list[Tensor]:
        """This process's part of a copy, in the order of `learner.trainable`."""
        return self._copies[name]

    # --- state ------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Tensor]:
        layout = self.learner._layout
        return {
            f"{name}/{entry}": layout.saved(i, self._copies[name][i])
            for name in self._saved
            for i, entry in enumerate(self.learner.trainable)
        }

    def state_dict(self) -> dict[str, Tensor]:
        """As `Learner.state_dict`, with the saved copies."""
        return {**self.learner.state_dict(), **self._state()}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `Learner.state_shapes`."""
        own = {name: tuple(tensor.shape) for name, tensor in self._state().items()}
        return {**self.learner.state_shapes(), **own}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """As `Learner.load_state_dict`."""
        for name, tensor in self._state().items():
            tensor.copy_(state[name])
        own = self._state().keys()
        self.learner.load_state_dict({n: t for n, t in state.items() if n not in own})
