"""One image without a look at it: from a prompt, or from the user's image and an instruction.

    [trajectory] = draw_once(policy, ["a red circle"], seed=0)
    [trajectory] = draw_once(policy, ["make it blue"], sources=[image])

What comes back is a trajectory without steps, so it is saved and shown like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent import views
from agent.types import DrawAsk, StopReason, Trajectory, Watcher

if TYPE_CHECKING:
    from PIL.Image import Image

    from agent.policy import Policy


def draw_once(
    policy: Policy,
    prompts: Sequence[str],
    *,
    sources: Sequence[Image | None] | None = None,
    seed: int = 0,
    samples: Sequence[int | str] | None = None,
    watcher: Watcher | None = None,
) -> list[Trajectory]:
    """Draw each prompt, or edit its source by it, as one batch; in the order of the prompts.

    A first image is the one that the loop would start from (without a plan), noise and all.
    """
    watcher = watcher or Watcher()
    sources = [None] * len(prompts) if sources is None else sources
    samples = range(len(prompts)) if samples is None else samples
    asks = []
    for i, (prompt, source, sample) in enumerate(zip(prompts, sources, samples, strict=True)):
        seen = views.start(policy, prompt, source)
        if source is None:
            view = views.first_image_view(seen, policy.edit_view)
        else:
            view = views.direct_edit_view(seen)
        asks.append(DrawAsk(view, int(source is not None), seed, sample, source, i))
    drawn = policy.draw(asks, on_step=watcher.on_step)
    trajectories = []
    for ask, prompt, first in zip(asks, prompts, drawn, strict=True):
        watcher.on_image(ask.index, ask.number, first.image)
        parts = (prompt, ask.base, None, first, (), StopReason.MAX_ROUNDS, ask.number)
        trajectories.append(Trajectory(*parts, seed, ask.sample))
    return trajectories
