"""How much memory a run takes, from the sizes in the configs: nothing is loaded.

    plan = plan_memory(BAGEL_7B_MOT, Run(size=(512, 512)), torch.bfloat16)
    print(plan.total, plan.parts)

Weights are counted exactly, caches for turns and edit texts of full length; working memory is an
estimate for the SDPA kernels.
`umm-reflect doctor --plan` prints it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from umm_reflect.config import BagelConfig

# What a CUDA process holds besides tensors: context, kernels, workspaces.
RUNTIME_BYTES = 700 * 2**20
# A system prompt and a request, in tokens, unless told otherwise.
PROMPT_TOKENS = 600


@dataclass(frozen=True)
class Run:
    """What is run: pictures of `size` (height, width), a batch of them, `rounds` edits each."""

    size: tuple[int, int] = (512, 512)
    batch_size: int = 1
    rounds: int = 3
    turn_tokens: int = 512
    vit_tokens: int | None = None  # tokens of a picture that is looked at; None: as many as fit
    full_view: bool = False
    keep_bytes: int | None = None  # of `prefill.Engine`; None: whatever was read stays


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part; `total` is their sum."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def weights(self) -> int:
        return sum(n for name, n in self.parts.items() if name.startswith("weights"))


@functools.cache
def parameter_counts(config: BagelConfig) -> Mapping[str, int]:
    """Numbers in the weights by part, counted on modules without memory (the meta device)."""
    from umm_reflect.autoencoder import AutoEncoder
    from umm_reflect.model import Bagel

    counts = dict.fromkeys(("understanding", "generation", "vision tower", "vae"), 0)
    with torch.device("meta"):
        bagel, vae = Bagel(config), AutoEncoder(config.vae)
    for name, tensor in bagel.state_dict().items():
        if "moe_gen" in name or name.startswith(("vae2llm", "llm2vae", "time_", "latent_pos")):
            counts["generation"] += tensor.numel()
        elif name.startswith(("vit_", "connector")):
            counts["vision tower"] += tensor.numel()
        else:
            counts["understanding"] += tensor.numel()
    counts["vae"] = sum(tensor.numel() for tensor in vae.state_dict().values())
    return MappingProxyType(counts)


def plan_memory(config: BagelConfig, run: Run, dtype: torch.dtype, cuda: bool = True) -> MemoryPlan:
    """The largest memory at any time of a `reflect` run, in bytes by part.

    Errors: ValueError for a size that is no multiple of the model's latent stride.
    """
    item = torch.empty(0, dtype=dtype).element_size()
    llm, stride = config.llm, config.latent_stride
    if run.size[0] % stride or run.size[1] % stride:
        raise ValueError(f"size {run.size[0]}x{run.size[1]}: give multiples of {stride} pixels")
    latent_tokens = (run.size[0] // stride) * (run.size[1] // stride) + 2
    patch, side = config.vit.patch_size, config.vit.grid_side
    most = min(run.size[0] // patch, side) * min(run.size[1] // patch, side)
    image_tokens = latent_tokens + (most if run.vit_tokens is None else run.vit_tokens) + 2
    text_tokens = PROMPT_TOKENS + run.rounds * (run.turn_tokens + 2)
    conversation = text_tokens + (run.rounds + 1) * image_tokens
    # What an edit is drawn from is read apart from the conversation: in the local view the image,
    # the edit text after it and alone; in the full view all texts alone.
    edit_text = run.turn_tokens + 2
    apart = text_tokens if run.full_view else run.rounds * (image_tokens + 2 * edit_text)
    # Drawing an edit: the conditional row, without its text, and its texts alone.
    seen = conversation if run.full_view else image_tokens + edit_text
    rows = 3

    from umm_reflect.draw import DECODE_PIXELS, DRAW_BYTES

    token_bytes = 2 * llm.num_layers * llm.num_kv_heads * llm.head_dim * item
    drawing = rows * (seen + latent_tokens)
    # more pictures than fit are drawn in parts
    together = min(run.batch_size, max(1, DRAW_BYTES // (drawing * token_bytes)))
    layer = 6 * llm.hidden_size + 3 * llm.intermediate_size
    pixels = run.size[0] * run.size[1]
    widest = 2 * config.vae.ch  # channels at full resolution inside the VAE
    parts = {f"weights: {name}": count * item for name, count in parameter_counts(config).items()}
    parts["conversation cache"] = run.batch_size * conversation * token_bytes
    seen_by_edits = run.batch_size * apart * token_bytes
    if run.keep_bytes is not None:
        seen_by_edits = min(seen_by_edits, max(0, run.keep_bytes - parts["conversation cache"]))
    parts["cache of what edits see"] = seen_by_edits
    speaking = run.batch_size * conversation
    parts["cache while drawing or speaking"] = max(together * drawing, speaking) * token_bytes
    parts["working memory"] = max(
        together * rows * latent_tokens * layer * item,
        max(pixels, min(run.batch_size * pixels, DECODE_PIXELS)) * 4 * widest * item,
        run.batch_size * llm.vocab_size * 4 * 2,
    )
    if cuda:
        parts["runtime"] = RUNTIME_BYTES
    return MemoryPlan(parts)
