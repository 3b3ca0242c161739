"""The settings of an RL run, and the recipes that `--recipe` names.

    config = config_of(["--recipe", "nano", "--max-steps", "4"], "umm-reflect rl")

A run is a function of these, its seed and the model: they are saved as config.yaml beside its
output, which --config takes back. A recipe is a file of rl/recipes/, or any YAML file, with some of
these keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eval.rewards.registry import named
from rl.advantage import AdvantageSettings
from rl.difficulty import Difficulty
from rl.held_out import HeldOutSettings
from rl.judge import JudgeSettings
from rl.matching import AwmSettings, NftSettings, TimeSettings
from rl.objectives import FlowSettings, TextSettings
from rl.reward import RewardSettings
from rl.rollout_settings import RolloutSettings
from rl.watch import WatchSettings
from umm_reflect.attention import BACKENDS
from umm_reflect.device import DtypeName
from umm_reflect.errors import UsageError
from umm_reflect.settings import load_yaml, nearest, parse, to_mapping
from umm_reflect.training.learner import OptimizerSettings, Strategy
from umm_reflect.training.trainable import LORA, LoraSettings, Preset, trained_parts

RECIPES = Path(__file__).resolve().parent / "recipes"
NANO = "pretrained/bagel-nano-shapes"
# What a resumed run may have otherwise than the run before: how long it is and what it leaves.
MAY_CHANGE = (
    *("output_dir", "resume", "max_steps", "max_seconds", "save_every", "keep", "pictures_every"),
    *("tracker", "held_out", "preflight", "device", "attn", "strategy", "tokens_per_forward"),
    *("rollout_batch", "compile", "recompute", "push_to_hub"),
)


@dataclass(frozen=True)
class Judge:
    """Who judges the images of rollouts."""

    reward: str = "shapes"
    """A name (umm-reflect reward --help lists them) or a YAML file that begins with one."""
    set: tuple[str, ...] = ()
    """KEY=VALUE settings of it, for example url=http://10.0.0.9:18092."""
    itself: bool = False
    """The weights under training judge, by how likely the prompt is to them (Self-SpectraReward);
    nobody else is needed."""
    attempts: int = 2
    """How often an image is sent before it counts as not judged."""
    unjudged: float = 0.0
    """Share of an update's images that may stay without a verdict; their trajectories are left
    out."""

    def __post_init__(self) -> None:
        self.settings  # noqa: B018  says what is wrong

    @property
    def settings(self) -> JudgeSettings:
        """Errors: UsageError for what is no setting."""
        if self.itself:
            return JudgeSettings({"reward": "spectra"}, self.attempts, self.unjudged)
        return JudgeSettings(named(self.reward, self.set), self.attempts, self.unjudged)


@dataclass(frozen=True)
class Config:
    """Train on rewards: groups of rollouts, judged, and one step of both heads.

    --recipe NAME or FILE.yaml: a starting point (reflection, reflection-release, ocr-lora,
    ocr-lora-npu, pickscore-lora, pickscore-full, spectra-awm, self-spectra-awm, nft, nano,
    nano-trajectories-awm, and on single images nano-single, nano-awm, nano-nft). Several
    processes: torchrun, or scripts/rl/train_rl.sh. `umm-reflect rl preflight ...` checks alone,
    `umm-reflect rl prepare ...` writes prompt files.
    """

    model: str = NANO
    """A folder, a hub id or id@revision: the SFT model to start from."""
    output_dir: Path = Path("outputs/rl")
    """Where checkpoints, metrics, curves and pictures go."""
    resume: str = "auto"
    """auto: go on from the newest state in the output folder; never: refuse one that holds any; or
    the folder of a state."""
    prompts: str = "shapes"
    """What is asked for: shapes, shapes-hard, compound (mixed: shapes-hard:3,shapes:1), geneval,
    geneval-unseen, or a .jsonl, .parquet or .txt file."""
    prompts_rows: int | None = None
    """Of the built-in world so many different prompts, of a file the first so many; otherwise no
    end, and all."""
    judge: Judge = field(default_factory=Judge)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    rollout_batch: int = 64
    """Trajectories that a process runs side by side."""
    difficulty: Difficulty = field(default_factory=Difficulty)
    reward: RewardSettings = field(default_factory=RewardSettings)
    advantage: AdvantageSettings = field(default_factory=AdvantageSettings)
    text: TextSettings = field(default_factory=TextSettings)
    objective: Literal["grpo", "awm", "nft"] = "grpo"
    """How images are learned: steps of their noise window (grpo, settings in flow), or by matching
    what was drawn without noise (awm, nft)."""
    images: Literal["edits", "first", "all"] = "edits"
    """Which drawings are learned from; with rollout.single the first (and only) ones."""
    guided: bool = True
    """Guidance in the velocity that is trained, as in the rollout; else the conditional branch."""
    flow: FlowSettings = field(default_factory=FlowSettings)
    awm: AwmSettings = field(default_factory=AwmSettings)
    nft: NftSettings = field(default_factory=NftSettings)
    times: TimeSettings = field(default_factory=TimeSettings)
    """Of awm and nft: at which times an image is noised again."""
    old: Literal["rollout", "learner"] = "rollout"
    """Where the old log-probs come from: as they were sampled, or from the trainer's own forward
    before the first update (in a single update: that of the loss, so every ratio is 1)."""
    updates: int = 1
    """Updates a rollout: its groups are dealt to so many mini-batches."""
    passes: int = 1
    """How many times a rollout is gone through; more than one needs old: learner."""
    reference: Literal["start", "base"] = "start"
    """What a KL holds to: the trained weights as the run began, or the model without adapters."""
    parameters: Preset = "full"
    """What learns (umm_reflect/training/trainable.py)."""
    frozen: tuple[str, ...] = ("vit", "connector", "embeddings", "lm_head")
    """Parts that stay as they are all the same."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    optimizer: OptimizerSettings = field(
        default_factory=lambda: OptimizerSettings(lr=5e-6, betas=(0.9, 0.999), eps=1e-8)
    )
    warmup: int = 0
    """Updates in which the rates rise from 0."""
    max_steps: int = 1000
    """Rollouts of the run."""
    max_seconds: float | None = None
    """End after so long, if that is earlier."""
    tokens_per_forward: int = 32_768
    """Tokens that a forward of the replay holds at most (a trajectory stays in one)."""
    strategy: Strategy = "auto"
    """none, ddp, fsdp2, deepspeed; auto: none for one process, fsdp2 for several."""
    recompute: bool = True
    """Run layers again in the backward pass, to save memory."""
    compile: bool = False
    """Fuse norms and rotations (a GPU)."""
    device: str = "auto"
    dtype: DtypeName = "auto"
    attn: str = "auto"
    """The attention kernel."""
    watch: WatchSettings = field(default_factory=WatchSettings)
    held_out: HeldOutSettings = field(default_factory=HeldOutSettings)
    preflight: bool = True
    """Check before the first update that replay equals rollout, that the judge judges, and more."""
    force_turns: int | None = None
    """Make the model say legal turns of so many tokens: for speed tests of random weights."""
    save_every: int = 50
    """Steps between two checkpoints."""
    keep: int = 2
    """Checkpoints that stay, besides the best one."""
    pictures_every: int = 20
    """Steps between two galleries of rollouts; 0: none."""
    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    """Where metrics go besides metrics.jsonl."""
    push_to_hub: str | None = None
    """OWNER/NAME: the best checkpoint (without held-out looks, the last one) goes there in the end,
    into a private repository."""
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"updates": 1, "passes": 1, "warmup": 0, "max_steps": 1, "rollout_batch": 1}
        least |= {"tokens_per_forward": 1, "save_every": 1, "keep": 1, "pictures_every": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} is {getattr(self, name)}; give {value} or more")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ValueError(f"max_seconds is {self.max_seconds}; give more than 0, or none")
        if self.attn not in BACKENDS:
            raise ValueError(f"attn is {self.attn!r}; choose one of {', '.join(BACKENDS)}")
        trained_parts(self.parameters, self.frozen_parts)
        if self.parameters not in LORA and self.lora != LoraSettings():
            raise ValueError(f"lora settings need parameters of {', '.join(LORA)}")
        self._check_objectives()

    def _check_objectives(self) -> None:
        rollout = self.rollout
        if not self.trains_text and not self.trains_flow:
            raise ValueError("neither words nor images have a weight: nothing would be learned")
        if self.passes > 1 and self.objective == "grpo" and self.old != "learner":
            raise ValueError(f"passes is {self.passes}, which needs old: learner")
        if self.updates > rollout.groups:
            raise ValueError(
                f"updates is {self.updates}, but a rollout has {rollout.groups} groups to deal out"
            )
        if self.lora.dropout:
            raise ValueError(
                f"lora.dropout is {self.lora.dropout}: replay would not be the rollout; leave it 0"
            )
        guided = self.rollout.edit.text_scale > 1 or self.rollout.first.text_scale > 1
        if self.objective == "grpo" and not self.guided and guided and self.old == "rollout":
            raise ValueError(
                "guided is false, but rollouts are guided (text_scale above 1): their log-probs "
                "are not the conditional branch's; roll out with text_scale 1, or set old: learner"
            )
        if self.text.importance_cap is not None and self.old == "rollout":
            raise ValueError(
                "text.importance_cap weighs the learner's log-probs against the sampler's, but old "
                "is rollout, where they are the same: set old: learner"
            )
        if self.reference == "base" and self.parameters not in LORA:
            raise ValueError(f"reference base needs parameters of {', '.join(LORA)}")
        if rollout.single and self.images != "all":
            raise ValueError(
                f"images is {self.images}, but single images are all learned from: set it to all"
            )
        if self.difficulty.share is not None and not rollout.forks:
            raise ValueError("difficulty.share needs siblings that share a first image")
        drawings = {"edits": ["edit"], "first": ["first"], "all": ["first", "edit"]}[self.images]
        drawings = ["first"] if rollout.single else drawings
        for name in drawings if self.trains_flow else ():
            noisy = getattr(rollout, name).noise_level > 0
            if self.objective == "grpo" and not noisy:
                raise ValueError(
                    f"rollout.{name}.noise_level is 0: without noise no step is a choice; give it "
                    "noise, or set flow.weight to 0"
                )
            if self.objective != "grpo" and noisy:
                raise ValueError(
                    f"{self.objective} learns from drawings without noise: set "
                    f"rollout.{name}.noise_level to 0"
                )
        if self.trains_flow and self.images != "edits" and rollout.forks:
            raise ValueError(
                "siblings that share their first image do not learn from it: set images to edits, "
                "or rollout.share_first to false"
            )

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        """`frozen` without what the preset does not train."""
        known = trained_parts(self.parameters)
        return tuple(part for part in self.frozen if part in known)

    @property
    def single(self) -> bool:
        return self.rollout.single

    @property
    def of_flow(self) -> FlowSettings | AwmSettings | NftSettings:
        """The settings of the objective that images are learned by."""
        return {"grpo": self.flow, "awm": self.awm, "nft": self.nft}[self.objective]

    @property
    def trains_text(self) -> bool:
        return self.text.weight > 0 and not self.single

    @property
    def trains_flow(self) -> bool:
        return self.of_flow.weight > 0

    @property
    def copies(self) -> tuple[str, ...]:
        """Which further weights are kept (rl/copies.py)."""
        kl = self.trains_text and self.text.kl > 0
        of_images = self.flow.kl if self.objective == "grpo" else self.of_flow.ref
        kl |= self.trains_flow and of_images > 0
        wanted = {
            "reference": kl,
            "slow": self.trains_flow and self.objective == "awm" and self.awm.slow > 0,
            "old": self.trains_flow and self.objective == "nft",
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    @property
    def compares_with_old(self) -> bool:
        """Whether the policy before the update is run over every batch. In a single update it is
        the policy of the loss itself, so that no other forward is needed."""
        grpo = self.objective == "grpo"
        ratios = self.trains_text or grpo
        several = self.updates * self.passes > 1
        if self.old == "learner" and several and ratios:
            return True
        asks = self.flow.guard if grpo else self.objective == "nft" or self.awm.true_ratio
        return self.trains_flow and asks

    @property
    def lora_run(self) -> bool:
        return self.parameters in LORA


def differences(before: dict[str, Any], now: dict[str, Any], at: str = "") -> list[str]:
    """Where two runs differ that should be one: ["rollout.group_size: 16 then, 8 now"]."""
    found = []
    for name in sorted(before.keys() | now.keys()):
        if not at and name in MAY_CHANGE:
            continue
        a, b = before.get(name), now.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{at}{name}.")
        elif a != b:
            found.append(f"{at}{name}: {a} then, {b} now")
    return found


def settings_of(config: Config) -> dict[str, Any]:
    """The settings as plain values, as JSON holds them."""
    import json

    return json.loads(json.dumps(to_mapping(config)))


def config_of(argv: Sequence[str], prog: str) -> Config:
    """flag > --config file > recipe > default. Errors: UsageError for a recipe that is not there,
    and as `settings.parse`."""
    name, rest = "", []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == "--recipe":
            name = value if equals else next(words, "")
            if not name:
                raise UsageError("--recipe needs a name or a file", "For example --recipe nano")
        else:
            rest.append(word)
    return parse(Config, rest, prog, start=recipe(name) if name else {})


def recipe(name: str) -> dict[str, Any]:
    """The settings of a recipe, by its name or its file."""
    if name.endswith((".yaml", ".yml")):
        return load_yaml(name)
    known = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    if name not in known:
        close = nearest(name, known)
        hint = f"Did you mean '{close}'?" if close else f"Choose of {', '.join(known)}, or a file."
        raise UsageError(f"there is no recipe '{name}'", hint)
    return load_yaml(RECIPES / f"{name}.yaml")
