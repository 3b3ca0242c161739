"""The settings of an SFT run, and the starting points that `--preset` names.

    config = parse(Config, argv, "umm-reflect sft", PRESETS)

A run is a function of these, its data and the model: they are saved as config.yaml beside its
output, which --config takes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sft.loss import LossSettings
from sft.mixture import By, Dropout, Latents, Mixture
from sft.rows import Kind
from sft.weights import Weighting
from umm_reflect.device import DtypeName
from umm_reflect.training.learner import OptimizerSettings, Strategy
from umm_reflect.training.schedule import Piece, Schedule, single
from umm_reflect.training.trainable import LORA, LoraSettings, Preset, trained_parts

NANO = "pretrained/bagel-nano-shapes"


@dataclass(frozen=True)
class Weights:
    """How much of each kind; what it is a share of is said by `by`. 0: not used."""

    controller: float = 0.0
    """Trajectories: every turn (cross-entropy)."""
    transition: float = 0.0
    """Images: each from what an edit sees (flow matching)."""
    verifier: float = 0.0
    """Turns, one by one."""
    penultimate: float = 0.0
    """Turns that ask for the last edit."""
    anchor: float = 0.0
    """Prompts and their images."""
    whole: float = 0.0
    """Trajectories: every turn and every image in one running context."""


@dataclass(frozen=True)
class Packing:
    """Which rows a step learns from and how they are packed (sft/mixture.py)."""

    weights: Weights = field(default_factory=lambda: Weights(controller=1, transition=1, anchor=1))
    by: By = "rows"
    """The weights are shares of passes over the rows, of samples, or of tokens."""
    replacement: bool = False
    """Draw each row independently, in place of passes over all of them."""
    every_pack: Kind | None = None
    """A kind of which every pack gets one more row."""
    expected_tokens: int = 31_744
    """A pack is closed when it holds this many."""
    max_tokens: int = 32_768
    """And never holds more."""
    max_sample_tokens: int = 28_672
    """Longer rows are left out, and counted."""
    look_ahead: int = 64
    """A pack is closed after so many further rows at the latest."""
    dropout: Dropout = field(default_factory=lambda: Dropout(text_uncond=0.1, image_uncond=0.1))
    condition_latents: Latents = "mean"
    """Latents of images that a row looks at: the posterior's mean, or a sample of it."""

    def mixture(self) -> Mixture:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        weights = {kind: w for kind, w in asdict(self.weights).items() if w}
        return Mixture(**{**values, "weights": weights})


@dataclass(frozen=True)
class Rates:
    """How the learning rate goes over the run: from optimizer.lr, flat and then a cosine to 0, or
    in pieces.
    """

    warmup: int = 50
    """Steps in which it rises from 0."""
    decay: float = 1.0
    """The share of the run, at its end, in which it falls."""
    pieces: tuple[str, ...] = ()
    """In place of decay: "cosine 2e-6 2e-7 1410" (shape, from, to, until which step), one after
    another; "... 167363 samples" ends by samples seen."""

    def schedule(self, lr: float, steps: int) -> Schedule:
        """Errors: ValueError for a piece that is not understood."""
        if not self.pieces:
            return single(lr, steps, min(self.warmup, steps), self.decay)
        return Schedule(tuple(piece(text) for text in self.pieces), self.warmup)


def piece(text: str) -> Piece:
    """'cosine 2e-6 2e-7 1410' or 'constant 2e-7 2e-7 167363 samples' as a piece."""
    shape, *words = text.split() or [""]
    unit = words.pop() if words and words[-1] in ("updates", "samples") else "updates"
    try:
        start, end, until = float(words[0]), float(words[1]), int(words[2].replace("_", ""))
        if len(words) != 3:
            raise IndexError
    except (IndexError, ValueError):
        raise ValueError(
            f"{text!r} is no piece of a schedule; write 'cosine 2e-6 2e-7 1410': shape, the rate "
            "from and to, the step at which it ends"
        ) from None
    return Piece(until, shape, start, end, unit)


@dataclass(frozen=True)
class Validation:
    """What is looked at on the trajectories that are held out."""

    every: int = 200
    """Steps between two looks; 0: only at the end."""
    share: float = 0.02
    """Of the trajectories that are held out, by their uid."""
    packs: int = 32
    """At most so many packs of their rows."""
    pictures: int = 0
    """Prompts of which the whole loop is drawn as one picture."""


@dataclass(frozen=True)
class Config:
    """Train on trajectories: cross-entropy on turns, flow matching on images.

    Starts from --model, or goes on where --output-dir stopped. Several processes: torchrun, or
    scripts/sft/train_sft.sh.
    """

    data: tuple[str, ...] = ()
    """Folders, .jsonl files or hub ids."""
    model: str = NANO
    """A folder, a hub id or id@revision."""
    output_dir: Path = Path("outputs/sft")
    """Where checkpoints, metrics and curves go."""
    resume: str = "auto"
    """auto: go on from the newest state in the output folder; never: refuse one that holds any; or
    the folder of a state."""
    system_prompt: Path | None = None
    """A file; otherwise the model's own."""
    system_prompt_sha256: str | None = None
    """What its hash must be; for the release's rows the published one is."""
    expect: Literal["release"] | None = None
    """Refuse data whose counts are not the published ones."""
    max_bad: float = 0.01
    """Share of the trajectories that may turn out unusable."""
    weighting: Weighting = "ours"
    """Weights of a turn's tokens."""
    full_view: float = 0.0
    """Share of the transition and anchor rows that are drawn from all that came before; the others
    from the image and the edit (or the prompt) alone."""
    packing: Packing = field(default_factory=Packing)
    loss: LossSettings = field(default_factory=lambda: LossSettings(timestep_shift=3.0))
    parameters: Preset = "full"
    """What learns (umm_reflect/training/trainable.py)."""
    frozen: tuple[str, ...] = ("vit",)
    """Parts that stay as they are all the same."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))
    rates: Rates = field(default_factory=Rates)
    max_steps: int = 1000
    """Updates of the run."""
    max_seconds: float | None = None
    """End after so long; the rate falls with whichever of time and steps is further."""
    packs_per_step: int = 16
    """Packs of one update, over all processes."""
    packs_per_forward: int = 1
    """Packs that a process runs side by side, padded to one length."""
    strategy: Strategy = "auto"
    """none, ddp, fsdp2, deepspeed; auto: none for one process, fsdp2 for several."""
    recompute: bool = True
    """Run layers again in the backward pass, to save memory."""
    compile: bool = False
    """Fuse norms and rotations (a GPU)."""
    legacy_bf16: bool = False
    """No fp32 masters, as published: nearly all updates round away."""
    device: str = "auto"
    dtype: DtypeName = "auto"
    attn: str = "auto"
    """The attention kernel."""
    workers: int | None = None
    """Processes that read and lay out rows, for each training process; 0: none; default: cores."""
    keep_images_gb: float = 0.0
    """Encoded pictures that stay on the device, so that each is encoded once."""
    round_trip: float = 0.0
    """Share of the pictures that rows look at as the autoencoder gives them back."""
    validation: Validation = field(default_factory=Validation)
    save_every: int = 500
    """Steps between two checkpoints."""
    keep: int = 2
    """Checkpoints that stay."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    """Where metrics go besides metrics.jsonl."""
    push_to_hub: str | None = None
    """OWNER/NAME: the last checkpoint goes there in the end, into a private repository."""
    seed: int = 0
    dry_run: bool = False
    """Build one pack on the CPU, print what would run and what it would take, and stop."""

    def __post_init__(self) -> None:
        least: dict[str, float] = dict.fromkeys(
            ("max_steps", "packs_per_step", "packs_per_forward", "save_every", "keep", "log_every"),
            1,
        )
        least |= {"workers": 0, "keep_images_gb": 0}
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise ValueError(f"{name} is {given}; give {value} or more")
        for name in ("round_trip", "max_bad", "full_view"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a share from 0 to 1")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ValueError(f"max_seconds is {self.max_seconds}; give more than 0, or none")
        if self.max_seconds is not None and self.rates.pieces:
            raise ValueError("max_seconds goes with rates.decay, not with rates.pieces")
        trained_parts(self.parameters, self.frozen)
        if self.parameters not in LORA and self.lora != LoraSettings():
            raise ValueError(f"lora settings need parameters of {', '.join(LORA)}")
        self.packing.mixture()
        self.schedule()

    def schedule(self) -> Schedule:
        schedule = self.rates.schedule(self.optimizer.lr, self.max_steps)
        last = schedule.pieces[-1]
        if last.unit == "updates" and last.until < self.max_steps:
            raise ValueError(
                f"the schedule ends at step {last.until}, before max_steps {self.max_steps}"
            )
        return schedule


# --- presets --------------------------------------------------------------------------------------

# ours: the defaults: every row once a pass, conditions as at inference.  lora: the same on one GPU.
# release: the published run, both stages in one; its stop, 167,363 samples, was at step 2,969.
# nano: a gentle fine-tuning of the shipped model, on a CPU too.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "ours": {},
    "lora": {"parameters": "lora-both", "optimizer": {"lr": 1e-4}, "packs_per_step": 4},
    "release": {
        "weighting": "release",
        "loss": {"timestep_shift": 1.0},
        "packing": {
            "weights": {
                **{"controller": 4, "transition": 4, "verifier": 4},
                **{"penultimate": 1, "anchor": 1},
            },
            "by": "samples",
            "every_pack": "controller",
            "expected_tokens": 32_768,
            "max_tokens": 40_960,
            "dropout": {
                **{"text": 0.1, "vit": 0.3, "vae": 0.3},
                **{"text_uncond": 0.0, "image_uncond": 0.0},
            },
            "condition_latents": "sampled",
        },
        "optimizer": {"lr": 2e-6},
        "rates": {"pieces": ("cosine 2e-6 2e-7 1410", "constant 2e-7 2e-7 2969")},
        "max_steps": 2969,
        "save_every": 350,
    },
    "nano": {
        "loss": {"timestep_shift": 2.0},
        "packing": {
            "weights": {"controller": 0, "whole": 1},
            "expected_tokens": 1200,  # four looks, with 144 patches an image, take 1,500
            "max_tokens": 1664,
            "max_sample_tokens": 1664,
        },
        "frozen": (),
        "optimizer": {"lr": 1e-4, "eps": 1e-10},
        "rates": {"warmup": 5},
        "max_steps": 100,
        "packs_per_step": 4,
        "packs_per_forward": 64,
        "recompute": False,
        "keep_images_gb": 1.0,
        "validation": {"every": 50, "share": 0.1, "pictures": 2},
        "save_every": 100,
    },
}
