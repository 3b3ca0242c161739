"""What the tests of the training kit share: a tiny model, batches that are functions of a step, one
update, and several processes that run one function.

    results = run_processes(my_function, 2, tmp_path)     # my_function(processes, tmp_path) on each
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sft.loss import PRESETS, counts, loss
from tests.tiny import TINY, write_tiny_checkpoint
from umm_reflect import Bagel
from umm_reflect.context import ImageSegment
from umm_reflect.model import Bagel as Model
from umm_reflect.packing import PackedBatch, Piece, collate, pack_row
from umm_reflect.training.learner import Learner, OptimizerSettings
from umm_reflect.training.processes import Processes, start

# eps above the noise in gradients that are zero but for rounding (biases of ViT keys)
SETTINGS = OptimizerSettings(lr=2e-3, eps=1e-5)
TEXTS = ("two red circles", "One is missing. Add a circle.", "make the sky darker", "a star")


def tiny_bagel(folder: Path, dtype: str = "float32", trained: bool = True) -> Model:
    """The tiny checkpoint; all of it trained, unless told otherwise."""
    if not (folder / "ema.safetensors").exists():
        write_tiny_checkpoint(folder)
    bagel = Bagel.from_pretrained(str(folder), device="cpu", dtype=dtype)
    return bagel.requires_grad_(trained)


def batch_of(bagel: Model, seed: int, kind: str = "both") -> tuple[PackedBatch, Tensor, Tensor]:
    """(batch, times, noise) of one row. kind: both | text (turns alone) | draw (no ViT patches)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    text = [bagel.tokens.segment(TEXTS[(seed + k) % len(TEXTS)]) for k in range(2)]
    image = ImageSegment(latent=normal(4, 4, 4), vit_pixels=normal(3, 28, 28))
    examples = {
        "text": [[Piece(text[0]), Piece(text[1], learn=True)]],
        "draw": [[Piece(text[0]), Piece(image, learn=True)]],
        "both": [
            [Piece(text[0]), Piece(image, learn=True), Piece(image), Piece(text[1], learn=True)],
            [Piece(text[1]), Piece(replace(image), learn=True)],
        ],
    }[kind]
    row = pack_row(examples, bagel.frame, TINY)
    latents = [normal(4, TINY.latent_dim) for _ in row.vae_images]
    batch = collate([row], latents, [normal(4, 588) for _ in row.vit_images])
    return batch, torch.rand(batch.num_images, generator=generator), normal(*batch.latent_BGC.shape)


Batches = list[tuple[PackedBatch, Tensor, Tensor]]


def update(learner: Learner, batches: Batches, lr_factor: float = 1.0) -> Tensor:
    """One update from this process's batches: [2], cross-entropy and flow loss of all of them."""
    processes = learner.processes
    total = processes.sum(sum(counts(batch) for batch, _, _ in batches))
    seen = torch.zeros(2)
    for k, (batch, times, noise) in enumerate(batches):
        out = learner.forward(batch, times, noise)
        losses = loss(out, batch, noise, total, PRESETS["release"], processes=processes.world)
        learner.backward(losses.total, last=k == len(batches) - 1)
        seen += torch.stack([losses.ce, losses.mse])
    learner.step(lr_factor)
    return processes.sum(seen)


def learner_of(
    bagel: Model,
    processes: Processes | None = None,
    strategy: str = "auto",
    settings: OptimizerSettings = SETTINGS,
    **options,
) -> Learner:
    options = {"recompute": False, "compile": False, **options}
    return Learner(bagel, processes or start(), strategy, settings, **options)


# --- several processes ----------------------------------------------------------------------------


def run_processes(
    function: Callable, world: int, *args, a_machine: int | None = None, timeout: float = 120.0
) -> list:
    """What function(processes, *args) returns on each of `world` gloo processes, by rank, on
    pretended machines of `a_machine` each. Raises the errors with their tracebacks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.learning", "torch.distributed.checkpoint"])
    port = free_port()
    folder = tempfile.TemporaryDirectory()
    paths = [Path(folder.name) / f"{rank}.pt" for rank in range(world)]
    settings = [environment(rank, world, port, a_machine or world) for rank in range(world)]
    children = [
        context.Process(target=_child, args=(path, function, variables, args))
        for path, variables in zip(paths, settings, strict=True)
    ]
    for child in children:
        child.start()
    try:
        for child in children:
            child.join(timeout)
            assert not child.is_alive(), f"a process still runs after {timeout:.0f} s"
    finally:
        for child in children:
            child.kill()
    results = [torch.load(path, weights_only=False) for path in paths if path.exists()]
    folder.cleanup()
    errors = [error for _, error in results if error]
    assert not errors, "\n".join(errors)
    assert len(results) == world, f"only {len(results)} of {world} came back"
    return [value for value, _ in results]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(rank: int, world: int, port: int, a_machine: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % a_machine),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(a_machine),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _child(path: Path, function: Callable, variables: dict[str, str], args: tuple) -> None:
    os.environ |= variables
    torch.set_num_threads(1)
    try:
        with start(device="cpu") as processes:
            torch.save((function(processes, *args), ""), path)
    except BaseException:
        torch.save((None, f"rank {variables['RANK']}: {traceback.format_exc()}"), path)
        raise
