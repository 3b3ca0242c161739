"""The bench: every image of an update's rollouts is judged, each once, by any reward.

    with Bench(JudgeSettings({"reward": "shapes"})) as bench:
        bench.check()                            # good images score above bad ones, here and now
        judged = bench.judge(rollouts)           # one verdict an image

The siblings of a group hold one first image, so it is judged once; what was judged while groups
were chosen (difficulty.py) is not judged again. Every reward of `eval.rewards.registry` serves, the
one behind HTTP too: that one waits for a service that is started again and sends again what had not
been answered. A service that does not answer at all when the run starts is an error within seconds.

An image without a verdict (`Verdict.error`) is sent again `attempts` times in all; then the run
stops, unless no more than `unjudged` of an update's images are such: their trajectories come back
with the error in place, and `unjudged(judged)` tells them from the rest.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from eval.rewards.registry import build
from eval.verdict import Verdict
from rl.types import Judged, Prompt, Rollout
from umm_reflect.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from eval.rewards.registry import Reward, Row
    from rl.rollout import Start

REACHABLE_WITHIN = 5.0  # seconds for the first answer of a service, of any kind
POOLED = ("shapes", "ocr")  # rewards that judge in processes, one a core unless told otherwise


@dataclass(frozen=True)
class JudgeSettings:
    """Who judges, and what becomes of images that could not be judged.

    reward: a mapping as `eval.rewards.registry.build` takes it. attempts: how often an image is
    sent before it counts as not judged. unjudged: the share of an update's images, 0 to 1, that may
    be such; beyond it the run stops.
    """

    reward: dict[str, Any] = field(default_factory=lambda: {"reward": "shapes"})
    attempts: int = 2
    unjudged: float = 0.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; give 1 or more")
        if not 0 <= self.unjudged < 1:
            raise ValueError(f"unjudged is {self.unjudged}; give 0 or more, below 1")


class JudgeError(UserError):
    """The judge failed, or what it returned is no list of verdicts."""


class Bench:
    """A reward, and the verdicts of first images that are still to be asked for."""

    def __init__(
        self, settings: JudgeSettings, *, processes: int = 1, reward: Reward | None = None
    ):
        """processes: of this machine that judge side by side; they share its cores. reward: one
        that is there already (the weights under training), in place of what `settings` name.

        Errors: UsageError for a reward that there is not, or a setting of it; what it says itself.
        """
        self.settings = settings
        self.name = str(settings.reward.get("reward"))
        self.reward = reward or build(shared_out(settings.reward, processes))
        self._known: dict[tuple[int, str], tuple[Image, Verdict]] = {}

    def check(self) -> None:
        """UserError unless the judge is there and scores good images above bad ones."""
        for url, start in addresses(self.reward):
            if not answers(url, REACHABLE_WITHIN):
                raise JudgeError(f"there is no answer from {url} (reward '{self.name}')", start)
        self.reward.check()

    def start(self, images: int) -> None:
        """Batches of so many images will come: what takes time to start may start."""
        if hasattr(self.reward, "start"):
            self.reward.start(images)

    def judge(self, rollouts: Sequence[Rollout]) -> list[Judged]:
        """The same rollouts in order, with a verdict on each image. Errors: JudgeError; what the
        reward raises when a service stays away."""
        asked: dict[tuple[int, str], tuple[Image, Row]] = {}
        keys = []
        for rollout in rollouts:
            prompt = rollout.prompt
            keys.append([(id(image), prompt.uid) for image in rollout.trajectory.images])
            for key, image in zip(keys[-1], rollout.trajectory.images, strict=True):
                if key not in self._known:
                    asked[key] = (image, prompt.row)
        verdicts = {key: verdict for key, (_, verdict) in self._known.items()}
        found = self.verdicts([i for i, _ in asked.values()], [row for _, row in asked.values()])
        verdicts.update(zip(asked, found, strict=True))
        self._known.clear()
        return [
            Judged(rollout, tuple(verdicts[key] for key in own))
            for rollout, own in zip(rollouts, keys, strict=True)
        ]

    def judge_firsts(
        self, prompts: Mapping[int, Prompt], starts: Mapping[int, Start]
    ) -> dict[int, bool]:
        """Group -> whether its first image (in an editing task the user's) is right, of the groups
        whose image is here. The verdicts are kept for the next `judge`."""
        images = {
            group: starts[group].first.image if prompt.source is None else prompt.source
            for group, prompt in prompts.items()
            if prompt.source is not None or group in starts
        }
        found = self.verdicts(list(images.values()), [prompts[group].row for group in images])
        for (group, image), verdict in zip(images.items(), found, strict=True):
            if verdict.correct is None and verdict.error is None:
                raise JudgeError(
                    f"reward '{self.name}' has no yes or no, so nobody can say which first images "
                    "are right already",
                    "Leave out the share of right first images, or take another reward.",
                )
            if verdict.error is None:
                self._known[id(image), prompts[group].uid] = (image, verdict)
        return {g: verdict.correct is True for g, verdict in zip(images, found, strict=True)}

    def verdicts(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        """One verdict an image, in order; those without an opinion were asked for again."""
        verdicts = self._scored(images, rows)
        for _ in range(self.settings.attempts - 1):
            failed = [i for i, verdict in enumerate(verdicts) if verdict.error is not None]
            if not failed:
                break
            again = self._scored([images[i] for i in failed], [rows[i] for i in failed])
            for i, verdict in zip(failed, again, strict=True):
                verdicts[i] = verdict
        errors = [verdict.error for verdict in verdicts if verdict.error is not None]
        if len(errors) > self.settings.unjudged * len(images):
            raise JudgeError(
                f"{len(errors)} of {len(images)} images were not judged by reward '{self.name}', "
                f"after {self.settings.attempts} attempts ({errors[0]})",
                "Mend the judge and go on with --resume, or allow a share of them (unjudged).",
            )
        return verdicts

    def _scored(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        """What the reward returns, if it is what a reward returns."""
        if not images:
            return []
        try:
            verdicts = list(self.reward.score(images, rows))
        except (ValueError, AssertionError) as error:  # a row it cannot serve; a score that is NaN
            raise JudgeError(
                f"reward '{self.name}' failed: {error}",
                "Check that the prompts are of the kind that this reward judges.",
            ) from error
        if len(verdicts) != len(images):
            raise JudgeError(
                f"reward '{self.name}' returned {len(verdicts)} verdicts on {len(images)} images",
                "Each image needs one, in order.",
            )
        for image, verdict in enumerate(verdicts):
            if not isinstance(verdict, Verdict):
                raise JudgeError(
                    f"reward '{self.name}' returned {type(verdict).__name__} for image {image}",
                    "A reward returns eval.verdict.Verdict.",
                )
            if verdict.error is None and not math.isfinite(verdict.reward):
                raise JudgeError(
                    f"reward '{self.name}' gave image {image} the reward {verdict.reward}",
                    "The weights or the number type of the judge are broken.",
                )
        return verdicts

    def manifest(self) -> dict[str, Any]:
        """What judges, as JSON values: two equal manifests judge alike."""
        return self.reward.manifest()

    def close(self) -> None:
        self.reward.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def unjudged(judged: Judged) -> str | None:
    """Why some image of it has no verdict, or None: such a trajectory is left out of its group."""
    return next((v.error for v in judged.verdicts if v.error is not None), None)


def shared_out(mapping: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """The mapping with the cores of the machine shared among processes that judge side by side,
    where it does not say how many workers there are."""
    from eval.judging import cores

    shared = dict(mapping)
    if shared.get("reward") in POOLED and processes > 1:
        shared["workers"] = shared.get("workers") or max(1, cores() // processes)
    if "terms" in shared:
        shared["terms"] = [shared_out(term, processes) for term in shared["terms"]]
    return shared


# --- is it there ----------------------------------------------------------------------------------


def addresses(reward: Reward) -> list[tuple[str, str]]:
    """(url, how to start what serves there) of every service that a reward talks to."""
    if hasattr(reward, "rewards"):  # a sum
        return [found for term in reward.rewards.values() for found in addresses(term)]
    url = getattr(getattr(reward, "settings", None), "url", "")
    if not url:
        return []
    name = type(reward).__name__
    start = {
        "HttpReward": "umm-reflect serve-reward --reward NAME",
        "VllmSpectra": "scripts/serve_spectrareward.sh",
    }.get(name, "vllm serve MODEL")
    return [(url, f"Start it there ({start}), or give another address: reward.url, REWARD_URL.")]


def answers(url: str, seconds: float) -> bool:
    """Whether anything there speaks HTTP, whatever it says (a service that loads does)."""
    import httpx

    heard = threading.Event()

    def ask() -> None:
        try:
            httpx.get(f"{url.rstrip('/')}/health", timeout=seconds, trust_env=False)
        except httpx.TransportError:
            return
        heard.set()

    # a thread, since looking up a name that nobody knows has no time-out
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds + 1.0)
    return heard.is_set()
