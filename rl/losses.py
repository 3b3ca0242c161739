"""The loss of one replay batch under a run's settings: words by GRPO, images by FlowGRPO, AWM or
NFT.

    before = Before()                                  # filled without gradients, before the update
    before.take_old((words, moves, steps, out))
    loss, sums = batch_loss(words, moves, steps, advantages, totals, before, config)

advantages: of the list of units, which `unit_S` and `unit_N` point into. The objectives themselves
are in `rl.objectives` and `rl.matching`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rl.matching import awm, nft, surrogate_logprob
from rl.objectives import (
    Guard,
    Totals,
    flow_grpo,
    norm_ratio,
    text_grpo,
    transition_kl,
    velocity_kl,
    weights,
)
from rl.replay import Moves, Words

if TYPE_CHECKING:
    from rl.train_config import Config

Steps = tuple[Tensor, Tensor, Tensor]  # of `replay.logprobs_of`


@dataclass
class Before:
    """What other weights make of the same batch. Log-probs of words [S] and of steps [N], means and
    velocities [N, n, C]; None where nobody asks."""

    old_S: Tensor | None = None
    old_N: Tensor | None = None
    old_mean: Tensor | None = None
    old_velocity: Tensor | None = None
    ref_S: Tensor | None = None
    ref_mean: Tensor | None = None
    ref_velocity: Tensor | None = None
    slow_velocity: Tensor | None = None

    def take_old(self, found) -> None:
        words, moves, steps, _ = found
        self.old_S, self.old_velocity = words.logprob_S, moves.velocity
        if steps is not None:
            self.old_N, self.old_mean, _ = steps

    def take_ref(self, found) -> None:
        words, moves, steps, _ = found
        self.ref_S, self.ref_velocity = words.logprob_S, moves.velocity
        if steps is not None:
            self.ref_mean = steps[1]

    def take_slow(self, found) -> None:
        self.slow_velocity = found[1].velocity


def batch_loss(
    words: Words,
    moves: Moves,
    steps: Steps | None,
    advantages: Tensor,
    totals: Mapping[str, Totals],
    before: Before,
    config: Config,
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """This batch's part of the loss, and the sums to be logged, named "text/..." and "flow/..."."""
    total = words.logprob_S.new_zeros(())
    logged: list[dict[str, Tensor]] = []
    for head, trains, loss_of in (
        ("text", config.trains_text, _text),
        ("flow", config.trains_flow, _flow),
    ):
        if not trains:
            continue
        loss, sums = loss_of(words, moves, steps, advantages, totals[head], before, config)
        total = total + loss
        logged.append({f"{head}/{name}": value for name, value in sums.items()})
    return total, logged


def _text(words, moves, steps, advantages, totals, before, config):
    settings = config.text
    return text_grpo(
        words.logprob_S,
        _old(words.logprob_S, words.old_S, before.old_S, config),
        advantages[words.unit_S],
        weights(words.unit_S, words.turn_S, totals, settings.reduction),
        settings,
        ref_S=before.ref_S if settings.kl else None,
        entropy_S=words.entropy_S.detach(),
        sampled_S=words.old_S if config.old == "learner" else None,
    )


def _old(now: Tensor, sampled: Tensor, before: Tensor | None, config: Config) -> Tensor:
    """The old log-probs by `config.old`."""
    if config.old == "rollout":
        return sampled
    return now.detach() if before is None else before


def _flow(words, moves: Moves, steps, advantages, totals, before: Before, config):
    settings = config.of_flow
    advantage = advantages[moves.unit_N]
    weight = weights(moves.unit_N, moves.image_N, totals, settings.reduction)
    if config.objective == "grpo":
        loss, sums = _steps_taken(moves, steps, advantage, weight, before, config)
    else:
        loss, sums = _matched(moves, advantage, weight, before, config)
    sums["velocity"] = moves.velocity.detach().square().mean((-2, -1)).sqrt().sum()
    if before.ref_velocity is not None:
        sums["norm_ratio"] = norm_ratio(moves.velocity, before.ref_velocity).sum()
    return loss, sums


def _steps_taken(moves: Moves, steps, advantage, weight, before: Before, config):
    settings = config.flow
    logprob, mean, std = steps
    kl = guard = None
    if settings.kl:
        kl = (
            velocity_kl(moves.velocity, before.ref_velocity)
            if settings.kl_kind == "velocity"
            else transition_kl(mean, before.ref_mean, std)
        )
    if settings.guard:
        guard = Guard(mean, before.old_mean, std, moves.t_next - moves.t)
    old = _old(logprob, moves.old_logprob_N, before.old_N, config)
    sampled = moves.old_logprob_N if config.old == "learner" else None
    columns = logprob, old, advantage, weight
    return flow_grpo(*columns, settings, kl_N=kl, guard=guard, sampled_N=sampled)


def _matched(moves: Moves, advantage, weight, before: Before, config):
    clean = moves.x_next
    if config.objective == "nft":
        return nft(
            *(moves.velocity, before.old_velocity, moves.x, moves.t, clean, advantage, weight),
            config.nft,
            ref_NnC=before.ref_velocity if config.nft.ref else None,
        )
    settings = config.awm
    target = (moves.x - clean) / moves.t[:, None, None]  # noise - clean
    old = None
    if settings.true_ratio:
        kind = settings.surrogate, settings.power
        old = surrogate_logprob(before.old_velocity, target, moves.t, *kind)
    return awm(
        *(moves.velocity, target, moves.t, advantage, weight),
        settings,
        old_N=old,
        ref_NnC=before.ref_velocity if settings.ref else None,
        slow_NnC=before.slow_velocity if settings.slow else None,
    )
