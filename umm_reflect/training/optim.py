"""Muon for the matrices, AdamW for the rest, with fp32 master weights; every step can be CUDA-graph
captured.

    optimizer = Optimizer(model.named_parameters(), muon_lr=0.02, adamw_lr=2e-3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step(torch.tensor(lr_scale(step, total, warmup=200), device=device))
    weights = {**model.state_dict(), **optimizer.ema_state()}       # the average, to ship

The model holds working parameters (bf16 on a GPU, fp32 on a CPU). Masters, moments and the moving
average are fp32 and live in a few buckets: one stack per matrix shape for Muon, so that
Newton-Schulz runs once a shape, and two flat vectors for AdamW. Nothing here waits for the device:
step counters are tensors, and an update whose gradient is not finite changes nothing and is counted
in `skipped`.

Sources: Muon as published by Keller Jordan (momentum .95, Nesterov, quintic Newton-Schulz); AdamW,
Loshchilov and Hutter, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

MUON_MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# The average follows closely while it is young: decay min(ema_decay, (1 + t) / (10 + t)).
EMA_WARMUP = 10.0

Matrices = Callable[[str, nn.Parameter], bool]


def layer_matrices(name: str, parameter: nn.Parameter) -> bool:
    """The default choice for Muon: 2-D weights inside of the layers of the decoder and of the
    ViT."""
    return parameter.ndim == 2 and "layers." in name


def lr_scale(step: float, total: float, warmup: float = 0.0, decay_fraction: float = 1.0) -> float:
    """Factor on every learning rate at `step` (0-based) of `total`: linear warm-up, flat, cosine to
    zero.

    The warm-up takes `warmup` steps and ends at 1; the cosine takes the last `decay_fraction` of
    all steps and would reach 0 at step `total`. Where the two overlap the smaller one holds.
    Errors: ValueError.
    """
    if total <= 0 or warmup < 0 or not 0 <= decay_fraction <= 1:
        raise ValueError(
            f"a schedule needs total > 0, warmup >= 0 and decay_fraction in [0, 1], "
            f"got {total}, {warmup} and {decay_fraction}"
        )
    rising = 1.0 if warmup == 0 else min(1.0, (step + 1) / warmup)
    decay = decay_fraction * total
    into = step - (total - decay)
    if into <= 0:
        return rising
    falling = 0.0 if into >= decay else 0.5 * (1 + math.cos(math.pi * into / decay))
    return min(rising, falling)


def newton_schulz(matrices: Tensor, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """Each [rows, cols] of a stack [n, rows, cols] moved to the nearest matrix with singular values
    near 1.

    Runs in bf16 on a GPU and in the given dtype elsewhere; returns the given dtype. A zero matrix
    stays zero.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-20)
    if x.device.type != "cpu":
        x = x.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class _Bucket:
    """Parameters that are updated together. All tensors have the bucket's shape: [n, rows, cols]
    for Muon (one slice a parameter), [all numbers] for AdamW."""

    def __init__(
        self, items: Sequence[tuple[str, nn.Parameter]], *, muon: bool, decays: bool, average: bool
    ):
        self.names = [name for name, _ in items]
        self.parameters = [parameter for _, parameter in items]
        self.muon = muon
        self.decays = decays
        flat = [parameter.detach().float().reshape(-1) for parameter in self.parameters]
        self.master = torch.cat(flat)
        if muon:
            self.master = self.master.view(len(items), *matrix_shape(self.parameters[0]))
        self.grad = torch.zeros_like(self.master)
        # "momentum" of Muon, "first" and "second" moments of AdamW
        names = ("momentum",) if muon else ("first", "second")
        self.state = {name: torch.zeros_like(self.master) for name in names}
        if average:
            self.state["ema"] = self.master.clone()
        self.grads = self.views(self.grad)
        self.masters = self.views(self.master)

    def views(self, whole: Tensor) -> list[Tensor]:
        """The parts of a tensor of the bucket's shape, each shaped as its parameter."""
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = whole.view(-1).split(sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def gather(self) -> None:
        """The gradients in fp32; zeros where a parameter has none."""
        pairs = [
            (into, p.grad)
            for into, p in zip(self.grads, self.parameters, strict=True)
            if p.grad is not None
        ]
        if len(pairs) < len(self.parameters):
            self.grad.zero_()
        if pairs:
            torch._foreach_copy_([into for into, _ in pairs], [grad for _, grad in pairs])

    def tensors(self) -> dict[str, Tensor]:
        """All that a resume needs: "master/NAME", "first/NAME", ..."""
        whole = {"master": self.master, **self.state}
        return {
            f"{kind}/{name}": view
            for kind, tensor in whole.items()
            for name, view in zip(self.names, self.views(tensor), strict=True)
        }


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """A weight as Muon sees it: [out, all inputs]; a convolution's inputs are channels times
    places."""
    return parameter.shape[0], parameter.numel() // parameter.shape[0]


class Optimizer:
    """One process's optimizer over all parameters that require a gradient.

    matrices: which parameters Muon takes (at least 2-D; a convolution is seen as [out, rest]).
    adamw_lr, betas, eps: for the others. weight_decay: decoupled, on parameters of two and more
    dimensions. ema_decay: of the moving average of the masters, None for none. clip_norm: largest
    global gradient norm, None for no limit.

    `grad_norm` (before clipping), `step_count` and `skipped` are fp32 scalars on the device.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        muon_lr: float = 0.02,
        adamw_lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        ema_decay: float | None = 0.998,
        clip_norm: float | None = 1.0,
        matrices: Matrices = layer_matrices,
    ):
        items = [(name, p) for name, p in named_parameters if p.requires_grad]
        if not items:
            raise ValueError("no parameter requires a gradient: there is nothing to optimize")
        self.muon_lr, self.adamw_lr = muon_lr, adamw_lr
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.ema_decay, self.clip_norm = ema_decay, clip_norm
        groups: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in items:
            if matrices(name, parameter):
                if parameter.ndim < 2:
                    raise ValueError(f"Muon takes matrices, and {name} has one dimension")
                key = ("muon", *matrix_shape(parameter))
            else:
                key = ("adamw", parameter.ndim >= 2)
            groups.setdefault(key, []).append((name, parameter))
        self.buckets = [
            _Bucket(
                group,
                muon=key[0] == "muon",
                decays=key[0] == "muon" or bool(key[1]),
                average=ema_decay is not None,
            )
            for key, group in groups.items()
        ]
        device = items[0][1].device
        self.grad_norm = torch.zeros((), device=device)
        self.step_count = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients; by default in place (and made where missing), so that a captured
        graph finds them."""
        present = []
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                else:
                    present.append(parameter.grad)
        if present:
            torch._foreach_zero_(present)

    @torch.no_grad()
    def step(self, lr_scale: Tensor) -> None:
        """One update from the parameters' gradients, learning rates times `lr_scale` (a scalar on
        the device).

        If the global gradient norm is not finite, nothing changes but `skipped`.
        """
        for bucket in self.buckets:
            bucket.gather()
        norms = torch.stack([torch.linalg.vector_norm(bucket.grad) for bucket in self.buckets])
        norm = torch.linalg.vector_norm(norms)
        finite = norm.isfinite()
        go = finite.float()
        self.grad_norm.copy_(norm)
        self.skipped.add_(1 - go)
        self.step_count.add_(go)
        if self.clip_norm is None:
            factor = go
        else:
            factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num() * go
        lr_scale = lr_scale * go
        for bucket in self.buckets:
            # a zero factor leaves nothing of a bad gradient, once it holds no nan or infinity
            grad = bucket.grad.nan_to_num(0.0, 0.0, 0.0).mul_(factor)
            base = self.muon_lr if bucket.muon else self.adamw_lr
            if self.weight_decay and bucket.decays:
                bucket.master.mul_(1 - base * self.weight_decay * lr_scale)
            update = self._muon(bucket, grad, go) if bucket.muon else self._adamw(bucket, grad, go)
            bucket.master.sub_(update.mul_(base * lr_scale))
            if self.ema_decay is not None:
                decay = ((1 + self.step_count) / (EMA_WARMUP + self.step_count)).clamp(
                    max=self.ema_decay
                )
                bucket.state["ema"].lerp_(bucket.master, (1 - decay) * go)
        self._publish()

    @staticmethod
    def _muon(bucket: _Bucket, grad: Tensor, go: Tensor) -> Tensor:
        momentum = bucket.state["momentum"]
        momentum.lerp_(grad, (1 - MUON_MOMENTUM) * go)
        update = newton_schulz(grad.lerp_(momentum, MUON_MOMENTUM))
        rows, columns = bucket.master.shape[-2:]
        return update.mul_(max(1.0, rows / columns) ** 0.5)

    def _adamw(self, bucket: _Bucket, grad: Tensor, go: Tensor) -> Tensor:
        first, second = bucket.state["first"], bucket.state["second"]
        beta1, beta2 = self.betas
        first.lerp_(grad, (1 - beta1) * go)
        second.lerp_(grad.square_(), (1 - beta2) * go)
        steps = self.step_count.clamp(min=1)
        root = (second / (1 - beta2**steps)).sqrt_().add_(self.eps)
        return (first / (1 - beta1**steps)).div_(root)

    @torch.no_grad()
    def _publish(self) -> None:
        """Masters into the working parameters."""
        for bucket in self.buckets:
            torch._foreach_copy_(bucket.parameters, bucket.masters)

    def ema_state(self) -> dict[str, Tensor]:
        """The moving average per parameter, fp32 (the masters without one). Views: they change with
        the next step."""
        kind = "master" if self.ema_decay is None else "ema"
        state: dict[str, Tensor] = {}
        for bucket in self.buckets:
            whole = bucket.master if kind == "master" else bucket.state[kind]
            state.update(zip(bucket.names, bucket.views(whole), strict=True))
        return state

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a resume needs, as copies: "master/NAME", the moments, "ema/NAME", and three
        scalars."""
        state = {"step_count": self.step_count, "skipped": self.skipped}
        for bucket in self.buckets:
            state |= bucket.tensors()
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a saved state, in place, the working parameters too. Raises ValueError if names
        or shapes differ."""
        own = {"step_count": self.step_count, "skipped": self.skipped}
        for bucket in self.buckets:
            own |= bucket.tensors()
        if odd := sorted(own.keys() ^ state.keys()):
            raise ValueError(
                f"the saved optimizer state is of another model: {len(odd)} names differ, "
                f"{odd[0]} first"
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"the saved {name} is {list(state[name].shape)}, expected {list(tensor.shape)}"
                )
            tensor.copy_(state[name])
        self._publish()
