"""What a training run will hold in memory and on disk, before anything is loaded.

    run = TrainingRun(work=work(rows), preset="lora-both", strategy="fsdp2", world=8)
    plan = plan_training(BAGEL_7B_MOT, run)                     # bytes of one process by part
    print("\\n".join(plan_lines(BAGEL_7B_MOT, run, available=140 * 2**30)))

    python -m umm_reflect.training.plan MODEL PRESET PROCESSES  # for packs of 32,768 tokens

Weights, masters, moments, averages and gradients are counted on modules without memory.
Activations are what autograd keeps for the backward pass of the largest pack of a process, an
estimate that a test holds to what it keeps on the CPU; kernels' workspaces and fragments are not
in it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from umm_reflect.config import BagelConfig
from umm_reflect.files import human_size
from umm_reflect.memory import RUNTIME_BYTES, MemoryPlan, parameter_counts
from umm_reflect.packing import MAX_DENSE
from umm_reflect.training.flops import Learns, Work
from umm_reflect.training.trainable import (
    LORA,
    RANK,
    LoraSettings,
    apply,
    counts,
)

Strategy = Literal["none", "ddp", "fsdp2", "deepspeed"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
# What the communication library holds beside tensors.
COMMUNICATION_BYTES = 2**30
# DeepSpeed's buckets of gradients under way, in numbers.
BUCKET = 500_000_000
# Pictures that `AutoEncoder.encode_images` takes at once.
ENCODED_AT_ONCE = 8


@dataclass(frozen=True)
class TrainingRun:
    """work: of the largest pack of one process; longest: tokens of its longest row (None: all).

    preset, rank, frozen: as in `trainable`. world: processes. copies: of the weights under fsdp2
    (`sharding.copies`: one a machine where that fits). bf16: working weights and activations
    (False: fp32, as on a CPU). legacy_bf16: masters and moments too, as the release was trained.
    zero_stage: of DeepSpeed. picture: height and width of what the VAE encodes.
    draws: the run renders trajectories now and then, for which sharded weights are gathered.
    """

    work: Work
    preset: str = "full"
    rank: int = RANK
    frozen: tuple[str, ...] = ()
    strategy: Strategy = "none"
    world: int = 1
    copies: int = 1
    optimizer: Literal["adamw", "muon"] = "adamw"
    ema: bool = False
    recompute: bool = True
    bf16: bool = True
    legacy_bf16: bool = False
    zero_stage: Literal[2, 3] = 2
    longest: int | None = None
    picture: tuple[int, int] | None = None
    draws: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"strategy {self.strategy!r} is none of {', '.join(STRATEGIES)}: choose one"
            )
        if self.world < 1:
            raise ValueError(f"a run has {self.world} processes; give 1 or more")
        if self.copies < 1 or self.world % self.copies:
            raise ValueError(f"{self.copies} copies do not divide {self.world} processes")

    @property
    def item(self) -> int:
        """Bytes of a working number."""
        return 2 if self.bf16 else 4

    @property
    def learns(self) -> Learns:
        return Learns.of_preset(self.preset, self.rank, self.frozen)


@dataclass(frozen=True)
class Sizes:
    """Numbers in weights. trained: those that learn; frozen: the rest. matrices: of the trained
    ones, those that Muon takes. layer: of one decoder layer; outside: in no layer at all.
    """

    trained: int
    frozen: int
    matrices: int
    layer: int
    layer_trained: int
    outside: int
    vae: int

    @property
    def all(self) -> int:
        return self.trained + self.frozen


@functools.cache
def sizes(
    config: BagelConfig, preset: str, rank: int = RANK, frozen: tuple[str, ...] = ()
) -> Sizes:
    """Counted on the model itself, on the meta device. Errors: ValueError, as `trainable.apply`."""
    from umm_reflect.checkpoint import empty_bagel
    from umm_reflect.training.optim import layer_matrices

    bagel = empty_bagel(config)
    apply(bagel, preset, LoraSettings(rank=rank) if preset in LORA else None, frozen)
    found = counts(bagel)
    parameters = list(bagel.named_parameters())
    layer = [(n, p) for n, p in parameters if n.startswith("language_model.model.layers.0.")]
    inside = [p for n, p in parameters if ".layers." in n]
    return Sizes(
        trained=found.all_trainable,
        frozen=found.everything - found.all_trainable,
        matrices=sum(p.numel() for n, p in parameters if p.requires_grad and layer_matrices(n, p)),
        layer=sum(p.numel() for _, p in layer),
        layer_trained=sum(p.numel() for _, p in layer if p.requires_grad),
        outside=found.everything - sum(p.numel() for p in inside),
        vae=parameter_counts(config)["vae"],
    )


def plan_training(config: BagelConfig, run: TrainingRun) -> MemoryPlan:
    """Bytes of one process at its fullest, by part; `total` is their sum.

    Errors: ValueError for a preset that does not exist or trains nothing.
    """
    size = sizes(config, run.preset, run.rank, run.frozen)
    item = run.item
    cut = run.world // run.copies if run.strategy == "fsdp2" else run.world
    sharded = run.strategy == "fsdp2" or (run.strategy == "deepspeed" and run.zero_stage == 3)
    optimizer_cut = cut if run.strategy in ("fsdp2", "deepspeed") else 1
    weights_cut = cut if sharded else 1

    parts: dict[str, int] = {}
    # an fp32 weight is its own master, as a sharded one always is
    own_masters = run.legacy_bf16 or not run.bf16 or run.strategy == "fsdp2"
    working = size.frozen if own_masters else size.all
    parts["weights: frozen and working copies"] = working * item // weights_cut
    master = 2 if run.legacy_bf16 else 4
    parts["weights: masters"] = size.trained * master // optimizer_cut
    parts["weights: vae"] = size.vae * item
    muon = size.matrices if run.optimizer == "muon" else 0
    parts["optimizer moments"] = (2 * size.trained - muon) * master // optimizer_cut
    if run.ema:
        parts["moving average"] = size.trained * 4 // optimizer_cut
    parts["gradients"] = size.trained * master // optimizer_cut
    # what is there at one time: a step, or the pictures before it, or the whole model that draws
    step = _under_way(config, run, size, sharded) | activations(config, run)
    others = [{"encoding pictures": _encoding(config, run)}]
    if run.draws and sharded:
        others.append({"whole weights, to draw": size.all * item})
    parts |= max(step, *others, key=lambda some: sum(some.values()))
    if run.bf16:
        parts["runtime"] = RUNTIME_BYTES + (COMMUNICATION_BYTES if run.world > 1 else 0)
    return MemoryPlan({name: n for name, n in parts.items() if n})


def _under_way(config: BagelConfig, run: TrainingRun, size: Sizes, sharded: bool) -> dict[str, int]:
    """Weights that are gathered and gradients that are not yet where they belong."""
    if sharded and run.world > 1:
        # the layer that runs, the next one (or a vocabulary matrix), and what is in no unit
        vocabulary = config.llm.vocab_size * config.llm.hidden_size
        rest = size.outside - 2 * vocabulary
        return {
            "gathered weights": (size.layer + max(size.layer, vocabulary) + rest) * run.item,
            "gradients before they are scattered": size.layer_trained * (run.item + 4),
        }
    if run.strategy == "deepspeed":
        return {"buckets of gradients": 2 * min(BUCKET, size.trained) * 4}
    own = run.strategy == "none" and (run.legacy_bf16 or not run.bf16)
    # gradients as the backward pass makes them, before they join the fp32 sums
    return {} if own else {"gradients of a pack": size.trained * run.item}


def activations(config: BagelConfig, run: TrainingRun) -> dict[str, int]:
    """What the forward pass keeps for the backward, by part, at its fullest."""
    llm, work, item, learns = config.llm, run.work, run.item, run.learns
    layer = sum(
        tokens * _layer_numbers(config, part in learns.full, _has_lora(learns, part), run.rank)
        for part, tokens in (("und", work.und), ("gen", work.gen))
    )
    hidden = work.tokens * llm.hidden_size
    gradients = work.tokens * (2 * llm.hidden_size + 2 * llm.intermediate_size)
    rotations = 2 * work.tokens * llm.head_dim * 4
    kept = (llm.num_layers * hidden + layer) if run.recompute else llm.num_layers * layer
    parts = {"activations: layers": kept * item + rotations}
    parts["activations: gradients of a layer"] = gradients * item
    # logits once in the working format; their fp32 copy, log-probabilities and gradient
    parts["activations: scored tokens"] = work.scored * llm.vocab_size * (item + 8)
    parts["activations: scored tokens"] += work.scored * llm.hidden_size * item
    parts["activations: vision tower"] = _tower(config, run) * item
    rows = run.longest or work.tokens
    if rows <= MAX_DENSE:
        parts["attention mask"] = rows * work.tokens * (1 + item)
    return parts


def _has_lora(learns: Learns, part: str) -> bool:
    return any(expert == part for expert, _ in learns.lora)


def _layer_numbers(config: BagelConfig, trained: bool, lora: bool, rank: int) -> int:
    """Numbers a token keeps in one decoder layer."""
    llm = config.llm
    width, inner = llm.hidden_size, llm.intermediate_size
    heads, keys = llm.num_heads * llm.head_dim, llm.num_kv_heads * llm.head_dim
    kept = 2 * width  # what the two norms read
    kept += heads + keys  # queries and keys before their norms
    kept += 2 * heads + 2 * keys  # what attention reads, and its output
    kept += 3 * inner  # gate before and after its SiLU, up
    if trained or lora:
        kept += 2 * width + inner + heads  # inputs of the linear maps
    if lora:
        kept += 7 * rank
    return kept


def _tower(config: BagelConfig, run: TrainingRun) -> int:
    """Numbers that the ViT and the connector keep, or hold for a moment where they are frozen."""
    vit, patches, full = config.vit, run.work.patches, run.learns.full
    layer = 9 * vit.hidden_size + 2 * vit.intermediate_size
    bridge = vit.hidden_size + 3 * config.llm.hidden_size
    if "vit" in full:
        return patches * (vit.num_layers * layer + bridge)
    return patches * (bridge if "connector" in full else layer)


def _encoding(config: BagelConfig, run: TrainingRun) -> int:
    """What the VAE holds while it encodes, at full resolution."""
    side = config.latent_grid_side * config.latent_stride
    height, width = run.picture or (side, side)
    pictures = run.work.gen * config.latent_stride**2 // (height * width)
    pictures = min(ENCODED_AT_ONCE, max(1, pictures))
    return pictures * 4 * height * width * 2 * config.vae.ch * run.item


# --- disk and text --------------------------------------------------------------------------------


def checkpoint_bytes(config: BagelConfig, run: TrainingRun) -> dict[str, int]:
    """What one save takes on disk: the folder that every command loads, and the resume state."""
    size = sizes(config, run.preset, run.rank, run.frozen)
    if run.preset in LORA:
        folder = {"adapter folder": size.trained * 4}
    else:
        folder = {"model folder": size.all * 2 + size.vae * 4}
    numbers = 3 * size.trained - (size.matrices if run.optimizer == "muon" else 0)
    master = 2 if run.legacy_bf16 else 4
    state = numbers * master + (size.trained * 4 if run.ema else 0)
    return folder | {"resume state": state}


def plan_lines(
    config: BagelConfig, run: TrainingRun, available: int | None = None, keep: int = 2
) -> list[str]:
    """The plan as text, with what other strategies would take. keep: checkpoints that stay."""
    plan = plan_training(config, run)
    size = sizes(config, run.preset, run.rank, run.frozen)
    lines = [
        f"{run.preset}: {size.trained:,} of {size.all:,} numbers learn; {_way(run)}; "
        f"{run.work.tokens:,} tokens a pack",
        "",
        *(f"  {human_size(n):>10}  {name}" for name, n in plan.parts.items()),
        f"  {human_size(plan.total):>10}  in all, each process",
        "",
    ]
    if available is not None:
        room, have = available - plan.total, human_size(available)
        if room >= 0:
            lines.append(f"Fits in {have}, with {human_size(room)} to spare.")
        else:
            lines.append(f"Does not fit in {have}: {human_size(-room)} too much.")
            lines.append(_smaller(config, run, available))
        lines.append("")
    lines.append("Other ways to run it, each process:")
    for other in _others(run):
        total = plan_training(config, other).total
        lines.append(f"  {human_size(total):>10}  {_way(other)}")
    saved = checkpoint_bytes(config, run)
    each = " + ".join(f"{name} {human_size(n)}" for name, n in saved.items())
    lines += ["", f"On disk: {each}; {keep} kept: {human_size(keep * sum(saved.values()))}"]
    return lines


def _way(run: TrainingRun) -> str:
    """'fsdp2 over 8 processes, layers run again'."""
    name = f"deepspeed ZeRO-{run.zero_stage}" if run.strategy == "deepspeed" else run.strategy
    over = f"{name} over {run.world} process{'es' if run.world > 1 else ''}"
    if run.strategy == "fsdp2" and run.copies > 1:
        over += f" in {run.copies} copies"
    again = "layers run again" if run.recompute else "all activations kept"
    return f"{'one process' if run.strategy == 'none' else over}, {again}"


def _others(run: TrainingRun) -> list[TrainingRun]:
    """The other strategies that this world allows, and the other choice of recomputation."""
    runs = []
    if run.world == 1:
        ways = [replace(run, strategy="none")]
    else:
        ways = [replace(run, strategy="ddp"), replace(run, strategy="fsdp2")]
        ways += [replace(run, strategy="deepspeed", zero_stage=stage) for stage in (2, 3)]
    for way in ways:
        runs += [replace(way, recompute=again) for again in (True, False)]
    return [other for other in runs if other != run]


def _smaller(config: BagelConfig, run: TrainingRun, available: int) -> str:
    """What to change so that it fits."""
    if not run.recompute:
        return "Run layers again (recompute)."
    fixed = sum(
        n
        for name, n in plan_training(config, run).parts.items()
        if not name.startswith(("activations", "attention", "encoding"))
    )
    if fixed <= available:
        return "Pack fewer tokens."
    if run.world > 1 and run.strategy != "fsdp2":
        return "Shard the weights: strategy fsdp2."
    if run.preset not in LORA:
        return f"Use more processes, or train less: one of {', '.join(LORA)}."
    return "Use more processes with strategy fsdp2, or a larger device."


def main(argv: Sequence[str]) -> int:
    from umm_reflect.config import BAGEL_7B_MOT
    from umm_reflect.errors import UsageError
    from umm_reflect.hub import RELEASED, resolve, split_name

    if len(argv) != 3 or not argv[2].isdecimal():
        raise UsageError("give a model, a preset and a number of processes", "BAGEL lora-gen 1")
    model, preset, world = argv
    released = split_name(model)[0] in RELEASED
    config = BAGEL_7B_MOT if released else BagelConfig.from_folder(resolve(model, download=False))
    work = Work(und=12_288, gen=20_480, scored=2_048, patches=6_000)
    strategy: Strategy = "fsdp2" if int(world) > 1 else "none"
    run = TrainingRun(work, preset, strategy=strategy, world=int(world))
    print("\n".join(plan_lines(config, run)))
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
