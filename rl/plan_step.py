"""What one RL step will take, laid out without a model: operations, seconds, memory.

    plan = plan_step(config, BAGEL_7B_MOT, tokens, profile, tera=450)
    plan.tflop["draw"], plan.all_seconds, plan.memory["rollout"]

One group goes through the loop itself, made to speak, on blank images, and is laid out for replay:
the counts are those of the real step, padding of the replay included, the VAE not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
from PIL import Image

from agent import protocol
from agent.types import Ask, DrawAsk, Options, Transition, Turn
from rl.memory import plan_run
from rl.replay import batches, lay_out
from rl.rollout import RolloutPolicy, roll_out
from rl.train_config import Config
from rl.types import Prompt
from rl.work import rollout_work
from umm_reflect.checkpoint import empty_bagel
from umm_reflect.config import BagelConfig
from umm_reflect.generate import Said
from umm_reflect.layout import Frame
from umm_reflect.profile import ReflectionProfile
from umm_reflect.tokens import Tokens
from umm_reflect.training.flops import Flops, Learns, Work, flops
from umm_reflect.training.trainable import RANK

PROMPT = Prompt("plan", "Create an image with two red circles and a blue square.", {})
# A token of a batch, as of the one row that was measured on an H200 by eager steps (10 to 13 a
# second; captured ones say one of 48 rows in .02 s); and a guess at what compiling the attention of
# long rows takes in a step.
TOKEN_SECONDS, COMPILE_SECONDS = 0.09, 40.0
KEEP_BYTES = 35 << 30  # a quarter of its memory, as rollouts have it


@dataclass(frozen=True)
class Plan:
    """tflop, seconds: by phase. memory: bytes at most, by what is going on."""

    trajectories: int
    images: int
    tflop: dict[str, float]
    seconds: dict[str, float]
    memory: dict[str, int]
    note: str

    @property
    def all_seconds(self) -> float:
        return sum(self.seconds.values())


class BlankPolicy(RolloutPolicy):
    """Says what it is made to say and draws blank images, with all records of a rollout."""

    drawn = 0

    def say(self, asks: Sequence[Ask], *, max_tokens, options: Options, on_token=None, force=None):
        turns: list[Turn] = []
        for ask, ids in zip(asks, force or [], strict=True):
            n = len(ids)
            said = Said(tuple(ids), (0.0,) * n, (None,) * n, (True,) * n, False)
            prefix = tuple(self.bagel.tokens.encode(protocol.prefix(ask.round)))
            turns.append(self._turn(ask, prefix, said, options, 0.0))
        return turns

    def draw(self, asks: Sequence[DrawAsk], *, on_step=None) -> list[Transition]:
        made = []
        for ask in asks:
            start = self._start(ask.sample) if ask.base is None else None
            made.append(start.first if start else self._blank(ask))
        return made

    def _blank(self, ask: DrawAsk) -> Transition:
        config, settings = self.bagel.config, self.settings_of(ask)
        height, width = self._size(ask.base)
        cells = (height // config.latent_stride) * (width // config.latent_stride)
        self.drawn += 1  # each image is another one
        latent = torch.full((1, 1), float(self.drawn)).expand(cells, config.latent_dim)
        window = {}
        if settings.noise_level:
            first, steps = settings.window or (0, settings.steps - 1)
            window = {
                "latents": latent.expand(steps + 1, cells, config.latent_dim),
                "times": settings.times[first : first + steps + 1],
                "logprobs": torch.zeros(steps),
            }
        image = Image.new("RGB", (width, height))
        segment = self.image(image)
        return Transition(image, **window, view=ask.view, segment=segment, latent=latent)


def plan_step(
    config: Config, model: BagelConfig, tokens: Tokens, profile: ReflectionProfile, tera: float
) -> Plan:
    """Errors: ValueError for a size that the model cannot draw, or turns too short to be legal."""
    bagel = empty_bagel(model)
    bagel.tokens = tokens
    bagel.frame = Frame(tokens.start, tokens.end, tokens.image_start, tokens.image_end)
    rollout = replace(config.rollout, groups=1)
    members = [(0, member) for member in range(rollout.group_size)]
    force = config.force_turns or 200
    names = {"step": 0, "seed": config.seed, "mine": members, "who": BlankPolicy}
    made = roll_out(bagel, profile, [PROMPT], rollout, force_turns=force, **names)
    trajectories = [one.trajectory for one in made]

    many = config.rollout.groups
    learns = Learns.of_preset(config.parameters, config.lora.rank or RANK, config.frozen_parts)
    rolled = rollout_work(trajectories, rollout.first, rollout.edit, model, bagel.frame)
    operations = {
        name: many * flops(done, model, Learns()).forward for name, done in rolled.items()
    }
    policy = BlankPolicy(bagel, profile, rollout)
    units = [
        lay_out(
            one,
            policy,
            text=config.trains_text,
            flow=config.images if config.trains_flow else "none",
            guided=config.guided,
        )
        for one in made
    ]
    cells = {}

    def blank(images):
        for image in images:
            height, width = (s // model.latent_stride for s in image.vae_pixels.shape[-2:])
            cells[image] = torch.zeros(height * width, model.latent_dim)
        return [cells[image] for image in images]

    found = batches(units, bagel, max_tokens=config.tokens_per_forward, latents_of=blank)
    real, padded = Flops(), Flops()
    for batch in found:
        rows, width = batch.ids_BU.shape
        whole = replace(batch.work, und=rows * width, gen=rows * batch.cell_BG.shape[1])
        real += flops(batch.work, model, learns)
        padded += flops(whole, model, learns)
    compared = len(config.copies) + config.compares_with_old
    again = padded.layers if config.recompute else 0
    operations |= {
        "compare": many * compared * padded.forward,
        "forward": many * config.passes * padded.forward,
        "backward": many * config.passes * (padded.backward + again),
    }
    tflop = {name: n / 1e12 for name, n in operations.items() if n}
    seconds = {name: n / tera for name, n in tflop.items()}
    turns = sum(len(t.sampled_ids) for t in trajectories[0].turns)
    runs = ceil(many * rollout.group_size / config.rollout_batch)
    if turns:
        seconds["say"] = TOKEN_SECONDS * turns * runs
    seconds["compile"] = COMPILE_SECONDS
    largest = max((batch.work for batch in found), key=lambda work: work.tokens, default=Work())
    memory = plan_run(
        config,
        model,
        profile,
        largest,
        strategy="none",
        world=1,
        bf16=True,
        keep_bytes=KEEP_BYTES,
    )
    first = 1 if rollout.forks else 0
    images = many * (first + sum(len(t.images) - first for t in trajectories))
    return Plan(
        many * rollout.group_size,
        images,
        tflop,
        seconds,
        {name: plan.total for name, plan in memory.items()},
        f"{len(found)} forwards of up to {largest.tokens:,} tokens a group and pass, "
        f"{padded.forward / max(1, real.forward) - 1:.0%} padding",
    )
