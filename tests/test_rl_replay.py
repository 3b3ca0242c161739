"""Replay of rollouts on a tiny random checkpoint: it gives the log-probs that were recorded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from agent.loop import run_episodes
from agent.policy import BagelPolicy, ForcedTurns
from agent.types import OURS
from rl.replay import batches, lay_out, logprobs_of, read, replay_step
from rl.types import Place, Prompt, Rollout
from tests.tiny import write_tiny_checkpoint
from umm_reflect import Bagel
from umm_reflect.flow import DrawSettings
from umm_reflect.hub import profile as profile_of

PROMPTS = ["two red circles and a blue square", "a star"]
SDE = DrawSettings(
    points=6, noise_level=0.7, window=(1, 2), step_kind="sde", text_scale=3.0, image_scale=1.5
)
TRAINED = replace(OURS, min_change=0, retries=0, keep_best=False, same_edit_limit=0)


@pytest.fixture(scope="module")
def bagel(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return Bagel.from_pretrained(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def profile(bagel):
    plain = profile_of(bagel.folder)
    transforms = replace(plain.transforms, vae=replace(plain.transforms.vae, min_size=64))
    return replace(
        plain,
        size=(64, 64),
        transforms=transforms,
        first=replace(SDE, window=(0, 2), text_scale=2.0),
        edit=SDE,
        system_prompt="Look.",
    )


def rollouts(policy, prompts=PROMPTS, forced=90, sources=None, **options):
    speaker = ForcedTurns(policy, forced) if forced else policy
    trajectories = run_episodes(
        speaker,
        prompts,
        **{"max_rounds": 2, "options": TRAINED, "sources": sources, "seed": 3} | options,
    )
    return [
        Rollout(Place(0, 0, i), Prompt(str(i), t.prompt, {}, t.source), t)
        for i, t in enumerate(trajectories)
    ]


def replay(bagel, units, max_tokens=100_000):
    """[(words, moves)] of every batch."""
    with torch.no_grad():
        return [
            read(replay_step(bagel, batch, batch.times_I, batch.latent_BGC, False), batch)
            for batch in batches(units, bagel, max_tokens=max_tokens)
        ]


def assert_replayed(bagel, policy, made, *, words, moves, **options):
    units = [lay_out(rollout, policy, **options) for rollout in made]
    seen = [0, 0]
    for said, drawn in replay(bagel, units):
        seen[0] += len(said.old_S)
        seen[1] += len(drawn.old_logprob_N)
        torch.testing.assert_close(said.logprob_S, said.old_S, atol=1e-5, rtol=1e-5)
        logprob, _, _ = logprobs_of(drawn)
        torch.testing.assert_close(logprob, drawn.old_logprob_N, atol=1e-5, rtol=1e-5)
    assert seen == [words, moves]


def chosen(made):
    return sum(sum(turn.chosen) for r in made for turn in r.trajectory.turns)


@pytest.mark.parametrize("edit_view", ["local", "full"])
@pytest.mark.parametrize("layout", ["rl", "sft"])
def test_replay_gives_the_log_probs_of_the_rollout(bagel, profile, layout, edit_view):
    policy = BagelPolicy(bagel, replace(profile, layout=layout, edit_view=edit_view))
    made = rollouts(policy)
    turns = 4 if layout == "sft" else 3
    assert [len(r.trajectory.turns) for r in made] == [turns, turns]
    # two prompts, two edits and a first image each, two steps a window
    assert_replayed(bagel, policy, made, words=chosen(made), moves=8, flow="edits")
    assert_replayed(bagel, policy, made, words=chosen(made), moves=12, flow="all")
    assert_replayed(bagel, policy, made, words=0, moves=4, text=False, flow="first")
    assert_replayed(bagel, policy, made, words=chosen(made), moves=0, flow="none")
