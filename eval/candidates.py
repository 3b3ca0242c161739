"""More first images of a prompt, each looked at once: what `umm-reflect eval --best-of N` draws.

    names = candidate_names("shapes553:0:17", 4)      # of three more; the first is the run's own
    look_once(policy, prompts, seed=0, samples=names, max_tokens=512, options=OURS)

Candidate 0 is the first image of the trajectory itself, with its first look. The others are drawn
and looked at just so, under random streams of their own names, so that they depend neither on the
batch nor on N: best of 8 holds the candidates of best of 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent.loop import Episode, speak
from agent.types import Options, Trajectory, Watcher

if TYPE_CHECKING:
    from agent.policy import Policy


def candidate_names(sample: str, n: int) -> list[str]:
    """The names of candidates 1 to n - 1 of a sample."""
    return [f"{sample}:best{number}" for number in range(1, n)]


def look_once(
    policy: Policy,
    prompts: Sequence[str],
    *,
    seed: int,
    samples: Sequence[str],
    max_tokens: int,
    options: Options,
) -> list[Trajectory]:
    """Draw a first image of each prompt and say one turn of it; no edit is drawn. As one batch."""
    watcher = Watcher()
    named = enumerate(zip(prompts, samples, strict=True))
    episodes = [Episode(policy, i, prompt, None, name, seed) for i, (prompt, name) in named]
    if policy.layout == "sft":
        speak(policy, episodes, max_tokens, options, watcher, may_edit=True)
    firsts = policy.draw([episode.draw_ask() for episode in episodes])
    for episode, first in zip(episodes, firsts, strict=True):
        episode.add_image(first, options)
    live = [episode for episode in episodes if episode.stop is None]
    speak(policy, live, max_tokens, options, watcher, may_edit=False)
    return [episode.finish(options) for episode in episodes]
