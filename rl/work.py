"""How much a rollout has the model do, counted from what it left: for the MFU of the rollout phase.

    done = rollout_work(trajectories, first_settings, edit_settings, bagel.config, bagel.frame)
    operations = flops(sum(done.values(), Work()), bagel.config, Learns()).forward

Counted are the guidance branches of every denoising step, every sampled token, and each context
once, as the engine reads it (what siblings share is read once a process). The VAE is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent.types import Trajectory, Transition, Turn, View
from umm_reflect.config import BagelConfig
from umm_reflect.context import Context, Segment, TextSegment
from umm_reflect.draw import unconditional
from umm_reflect.flow import DrawSettings
from umm_reflect.layout import Frame, segment_blocks, segment_length
from umm_reflect.training.flops import Work


class _Counter:
    def __init__(self, config: BagelConfig, frame: Frame):
        self.config, self.frame = config, frame
        self.lengths: dict[int, tuple[Segment, int]] = {}
        self.read: set[tuple[int, ...]] = set()
        self.done = {"say": Work(), "draw": Work(), "read": Work()}

    def length(self, segment: Segment) -> int:
        """Tokens of a segment; a segment is known by itself, contexts share them."""
        if id(segment) not in self.lengths:
            self.lengths[id(segment)] = segment, segment_length(segment, self.config)
        return self.lengths[id(segment)][1]

    def context(self, context: Context) -> int:
        """Its length; what of it was not read before is counted."""
        before, names = 0, []
        for segment in context.segments:
            own = self.length(segment)
            names.append(id(segment))
            if (key := tuple(names)) not in self.read:
                self.read.add(key)
                self.done["read"] += self._read(segment, before, own)
            before += own
        return before

    def _read(self, segment: Segment, before: int, own: int) -> Work:
        pairs = own * before + own * (own + 1) // 2
        if isinstance(segment, TextSegment):
            return Work(und=own, pairs=pairs)
        vae = vit = patch_pairs = 0
        for block in segment_blocks(segment, 0, self.frame, self.config):
            inside = block.length - 2
            vae += inside if block.kind == "vae" else 0
            vit += inside if block.kind == "vit" else 0
            patch_pairs += inside**2 if block.kind == "vit" else 0
        pairs = own * (before + own)
        return Work(own - vae, vae, patches=vit, pairs=pairs, patch_pairs=patch_pairs)

    def turn(self, turn: Turn) -> None:
        if turn.context is None:
            return
        before, said = self.context(turn.context), len(turn.sampled_ids)
        length = len(turn.forced_ids) + said + 1
        pairs = length * before + length * (length + 1) // 2
        self.done["say"] += Work(und=length, scored=said, pairs=pairs)

    def drawing(self, transition: Transition, settings: DrawSettings) -> None:
        if transition.view is None:
            return
        height, width = reversed(transition.image.size)
        stride = self.config.latent_stride
        tokens = (height // stride) * (width // stride)
        times = settings.times
        guided = sum(settings.guided(t) for t in times[:-1])
        for context, steps in branches(transition.view, settings, settings.steps, guided):
            before = self.context(context)
            pairs = steps * (tokens + 2) * (before + tokens + 2)
            self.done["draw"] += Work(und=2 * steps, gen=tokens * steps, pairs=pairs)


def branches(
    view: View, settings: DrawSettings, steps: int, guided: int
) -> Iterable[tuple[Context, int]]:
    """The contexts that are run, and in how many steps."""
    yield view.conditional, steps
    run = unconditional(view.conditional, view.text_uncond, view.image_uncond, settings)
    for context in dict.fromkeys(run):
        if context is not None:
            yield context, guided


def rollout_work(
    trajectories: Iterable[Trajectory],
    first: DrawSettings,
    edit: DrawSettings,
    config: BagelConfig,
    frame: Frame,
) -> dict[str, Work]:
    """What these trajectories took to say, to draw and to read contexts; a first image that
    siblings share counts once."""
    counter, drawn = _Counter(config, frame), set()
    for trajectory in trajectories:
        for turn in trajectory.turns:
            counter.turn(turn)
        shared = trajectory.first
        if shared is not None and id(shared) not in drawn:
            drawn.add(id(shared))
            counter.drawing(shared, first if trajectory.source is None else edit)
        for step in trajectory.steps:
            if step.transition is not None:
                counter.drawing(step.transition, edit)
    return counter.done
