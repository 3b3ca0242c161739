"""Replay: rollouts through the training forward, so that their log-probs carry gradients.

    units = [lay_out(scored, policy) for scored in ...]              # rl/replay_layout.py
    learner = Learner(..., forward=replay_step)
    for batch in batches(units, bagel, max_tokens=65536):            # rl/replay_batches.py
        batch = batch.to(bagel.device)
        out = learner.forward(batch, batch.times_I, batch.latent_BGC)
        words, moves = read(out, batch)
        logprob_N, mean_NnC, std = logprobs_of(moves)

One forward, with gradients through the contexts too, gives the log-prob of every word that was
chosen (over what was allowed, at the temperature of the rollout) and the velocity of every noised
state, all guidance branches of it, combined as `draw.Denoiser` does.

Legend: S scored words, K constrained ones, A allowed ids, V vocabulary, N noised states, n latent
tokens a state, C channels, I latent blocks; B, U, G as in `umm_reflect.packing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl.replay_batches import MoveGroup, ReplayBatch, batches, nothing
from rl.replay_layout import Flow, State, Unit, lay_out
from umm_reflect.flow import cps_mean_std, guide, sde_mean_std, transition_logprob
from umm_reflect.model import Bagel
from umm_reflect.packing import PackedBatch, packed_forward
from umm_reflect.training.learner import Step

__all__ = [
    "Flow",
    "Moves",
    "ReplayBatch",
    "ReplayOutput",
    "State",
    "Unit",
    "Words",
    "batches",
    "lay_out",
    "logprobs_of",
    "nothing",
    "read",
    "replay_step",
]

# The softmax over the vocabulary is made for this many words at a time, and made again in the
# backward pass: 150,000 fp32 numbers a word would otherwise be most of the memory.
WORDS_AT_ONCE = 512


# --- types ----------------------------------------------------------------------------------------


class ReplayOutput(NamedTuple):
    """logprob_S, entropy_S: of the words, fp32. velocity_BGC: raw ones of all latents, fp32."""

    logprob_S: Tensor
    entropy_S: Tensor
    velocity_BGC: Tensor


@dataclass(frozen=True)
class Words:
    """What was said. logprob_S carries the gradient; old_S: when it was sampled. unit_S, turn_S:
    whose, and in which of its turns."""

    logprob_S: Tensor
    entropy_S: Tensor
    old_S: Tensor
    ids_S: Tensor
    unit_S: Tensor
    turn_S: Tensor


@dataclass(frozen=True)
class Moves:
    """What was drawn, a state each. velocity: guided, fp32, carries the gradient. Times [N],
    tensors of latents [N, n, C]. groups: which sampler made which states."""

    velocity: Tensor
    x: Tensor
    x_next: Tensor
    t: Tensor
    t_next: Tensor
    old_logprob_N: Tensor
    unit_N: Tensor
    image_N: Tensor
    step_N: Tensor
    groups: tuple[MoveGroup, ...]


# --- the forward ----------------------------------------------------------------------------------


def _run_replay(
    bagel: Bagel, batch: PackedBatch, times_I: Tensor, x_BGC: Tensor, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """times_I: of each latent block (clean ones: 0); x_BGC: latents as they enter."""
    rows, gen = batch.cell_BG.shape
    time_BG = torch.where(batch.noised_BG, times_I[batch.image_BG], 0.0) if gen else x_BGC[..., 0]
    _, (hidden_U, hidden_G) = packed_forward(bagel, batch, x_BGC, time_BG, recompute=recompute)
    logits_SV = bagel.logits(hidden_U.index_select(0, batch.score_S))
    # a batch of another kind is one without words and states
    words = _word_logprobs(logits_SV, batch) if isinstance(batch, ReplayBatch) else None
    logprob_S, entropy_S = words or (logits_SV.float().sum(-1),) * 2
    velocity = bagel.velocity(hidden_G).float().unflatten(0, (rows, gen)) if gen else x_BGC
    return logprob_S, entropy_S.clone(), velocity.clone()


replay_step = Step(_run_replay, ReplayOutput)


def _word_logprobs(logits_SV: Tensor, batch: ReplayBatch) -> tuple[Tensor, Tensor]:
    """Log-prob of each word and entropy of its choice, as `say` has them."""
    logprobs, entropies = [], []
    pieces = [x.split(WORDS_AT_ONCE) for x in (logits_SV, batch.label_S, batch.temperature_S)]
    for logits, ids, temperature in zip(*pieces, strict=True):
        found = checkpoint(
            _free_words,
            logits,
            ids,
            temperature,
            batch.support,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        logprobs.append(found[0])
        entropies.append(found[1])
    logprob_S, entropy_S = torch.cat(logprobs), torch.cat(entropies)
    if not len(batch.choice_K):
        return logprob_S, entropy_S
    scores = logits_SV.index_select(0, batch.choice_K).float()
    scores = scores.gather(1, batch.choice_KA.clamp_min(0))
    closed = batch.choice_KA < 0
    scores = scores / batch.temperature_S[batch.choice_K, None]
    logprob_KA = scores.masked_fill(closed, -torch.inf).log_softmax(-1)
    terms = (logprob_KA.exp() * logprob_KA.masked_fill(closed, 0.0)).sum(-1)
    picked = logprob_KA.gather(1, batch.pick_K[:, None]).squeeze(1)
    return (
        logprob_S.index_copy(0, batch.choice_K, picked),
        entropy_S.index_copy(0, batch.choice_K, -terms),
    )


def _free_words(
    logits_SV: Tensor, ids_S: Tensor, temperature_S: Tensor, support: int
) -> tuple[Tensor, Tensor]:
    logprobs = (logits_SV[:, :support].float() / temperature_S[:, None]).log_softmax(-1)
    picked = logprobs.gather(1, ids_S[:, None]).squeeze(1)
    return picked, -(logprobs.exp() * logprobs).sum(-1)


# --- what came out --------------------------------------------------------------------------------


def read(out: ReplayOutput, batch: ReplayBatch) -> tuple[Words, Moves]:
    """What the objectives ask of a forward over a batch on the same device.

    Of several processes each backward pass has to reach the same weights: a loss is made of words
    and of states even where there are none (sums over nothing are connected, and give zeros).
    """
    words = Words(
        *(out.logprob_S, out.entropy_S, batch.old_S, batch.label_S, batch.unit_S, batch.turn_S)
    )
    n = batch.x_next_NnC.shape[1]
    cells = torch.arange(n, device=batch.start_N3.device)
    velocity, latent = out.velocity_BGC.flatten(0, 1), batch.latent_BGC.flatten(0, 1)

    def at(values: Tensor, start_N: Tensor) -> Tensor:
        places = (start_N[:, None] + cells).flatten()
        return values.index_select(0, places).unflatten(0, (len(start_N), n))

    guided = [at(velocity, batch.start_N3[:0, 0])]
    for group in batch.groups:
        start_N3 = batch.start_N3[group.start : group.end]
        cond = at(velocity, start_N3[:, 0])
        if group.text or group.image:
            text = at(velocity, start_N3[:, 1]) if group.text else None
            image = at(velocity, start_N3[:, 2]) if group.image else None
            cond = guide(cond, text, image, group.settings)
        guided.append(cond)
    moves = Moves(
        velocity=torch.cat(guided),
        x=at(latent, batch.start_N3[:, 0]),
        x_next=batch.x_next_NnC,
        t=batch.t_N,
        t_next=batch.t_next_N,
        old_logprob_N=batch.old_N,
        unit_N=batch.unit_N,
        image_N=batch.image_N,
        step_N=batch.step_N,
        groups=batch.groups,
    )
    return words, moves


def logprobs_of(moves: Moves) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob [N], mean [N, n, C], std [N, 1, 1]) of the steps that were taken, fp32."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for group in moves.groups:
        some = slice(group.start, group.end)
        own = group.settings
        state = moves.x[some], moves.velocity[some], moves.t[some], moves.t_next[some]
        if own.step_kind == "cps":
            mean, std = cps_mean_std(*state, own.noise_level)
        else:
            mean, std = sde_mean_std(*state, own.noise_level, own.sigma)
        kind = "cps" if own.step_kind == "cps" else "sde"
        found.append((transition_logprob(moves.x_next[some], mean, std, kind), mean, std))
    if not found:
        return moves.velocity.sum((-2, -1)), moves.velocity, moves.t[:, None, None]
    logprob, mean, std = (torch.cat(parts) for parts in zip(*found, strict=True))
    return logprob, mean, std
