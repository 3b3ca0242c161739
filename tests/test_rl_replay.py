"""Replay of rollouts on a tiny random checkpoint: it gives the log-probs that were recorded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from agent import views
from agent.loop import run_episodes
from agent.policy import BagelPolicy, ForcedTurns
from agent.types import OURS, DrawAsk, ProtocolError, StopReason, Trajectory
from rl.replay import State, batches, lay_out, logprobs_of, nothing, read, replay_step
from rl.types import Place, Prompt, Rollout
from tests.learning import learner_of, run_processes, tiny_bagel
from tests.tiny import write_tiny_checkpoint
from umm_reflect import Bagel
from umm_reflect.flow import DrawSettings
from umm_reflect.hub import profile as profile_of
from umm_reflect.training.learner import OptimizerSettings
from umm_reflect.training.processes import Processes
from umm_reflect.training.trainable import LoraSettings, apply

PROMPTS = ["two red circles and a blue square", "a star"]
SDE = DrawSettings(
    points=6, noise_level=0.7, window=(1, 2), step_kind="sde", text_scale=3.0, image_scale=1.5
)
LOOP = replace(OURS, min_change=0, retries=0, keep_best=False, same_edit_limit=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def bagel(folder):
    return Bagel.from_pretrained(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def profile(bagel):
    return tiny_profile(bagel)


def tiny_profile(bagel, **changes):
    plain = profile_of(bagel.folder)
    transforms = replace(plain.transforms, vae=replace(plain.transforms.vae, min_size=64))
    first = replace(SDE, window=(0, 2), text_scale=2.0)
    own = {"size": (64, 64), "transforms": transforms, "first": first, "edit": SDE}
    return replace(plain, **{**own, "system_prompt": "Look."} | changes)


def picture(seed: int, side: int = 64) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), np.uint8)
    return Image.fromarray(levels)


def rollouts(speaker, prompts=PROMPTS, sources=None, **options):
    trajectories = run_episodes(
        speaker,
        prompts,
        **{"max_rounds": 1, "options": LOOP, "sources": sources, "seed": 3} | options,
    )
    return [rollout_of(trajectory, i) for i, trajectory in enumerate(trajectories)]


def rollout_of(trajectory, member=0):
    prompt = Prompt(str(member), trajectory.prompt, {}, trajectory.source)
    return Rollout(Place(0, 0, member), prompt, trajectory)


def direct_edit(policy, seed=0):
    """A user's image that was edited without a word: one drawing with all three branches."""
    source = picture(seed)
    view = views.direct_edit_view(views.start(policy, "make the sky darker", source))
    [drawn] = policy.draw([DrawAsk(view, 1, seed, "direct", source)])
    end = StopReason.MAX_ROUNDS
    return rollout_of(Trajectory("make the sky darker", source, None, drawn, (), end, 1))


def replayed(bagel, units, max_tokens=100_000):
    """[(words, moves)] of every batch."""
    with torch.no_grad():
        return [
            read(replay_step(bagel, batch, batch.times_I, batch.latent_BGC, False), batch)
            for batch in batches(units, bagel, max_tokens=max_tokens)
        ]


def near(actual, expected):
    """Within 1e-5, absolute below one and relative above."""
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def assert_replayed(bagel, policy, made, *, words, moves, **options):
    units = [lay_out(rollout, policy, **options) for rollout in made]
    seen = [0, 0]
    for said, drawn in replayed(bagel, units):
        seen[0] += len(said.old_S)
        seen[1] += len(drawn.old_logprob_N)
        near(said.logprob_S, said.old_S)
        near(logprobs_of(drawn)[0], drawn.old_logprob_N)
    assert seen == [words, moves]


def chosen(made):
    return sum(sum(turn.chosen) for rollout in made for turn in rollout.trajectory.turns)


# --- replay is the rollout ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "edit_view", "rounds"),
    [("rl", "local", 1), ("rl", "full", 2), ("sft", "local", 1), ("sft", "full", 1)],
)
def test_replay_gives_the_log_probs_of_the_rollout(bagel, profile, layout, edit_view, rounds):
    policy = BagelPolicy(bagel, replace(profile, layout=layout, edit_view=edit_view))
    made = rollouts(ForcedTurns(policy, 90), max_rounds=rounds)
    turns = rounds + 1 + (layout == "sft")  # a final look, and the plan
    assert [len(r.trajectory.turns) for r in made] == [turns, turns]
    words = chosen(made)
    edits = 2 * rounds * 2  # prompts, edits, steps of the window
    assert_replayed(bagel, policy, made, words=words, moves=edits, flow="edits")
    assert_replayed(bagel, policy, made, words=words, moves=edits + 4, flow="all")
    assert_replayed(bagel, policy, made, words=0, moves=4, text=False, flow="first")
    assert_replayed(bagel, policy, made, words=words, moves=0, flow="none")


def test_a_full_view_trajectory_is_two_examples_and_its_latents_stand_once(bagel, profile):
    policy = BagelPolicy(bagel, replace(profile, edit_view="full"))
    [made] = rollouts(ForcedTurns(policy, 90), PROMPTS[:1], max_rounds=2)
    unit = lay_out(made, policy)
    running, texts = unit.chains  # the second: what the image-unconditional branch sees
    kinds = [(b.kind, b.mode, b.num_gen) for b in running.blocks]
    noised, clean = ("vae", "noise", 16), ("vae", "full", 16)
    look, text, last = ("vit", "full", 0), ("text", "causal", 0), ("text", "aside", 0)
    assert kinds == [
        *(text, text, clean, look),
        *(noised, noised, text, noised, noised),  # before the turn, after it
        *(clean, look, noised, noised, text, noised, noised),
        *(clean, look, last),
    ]
    assert running.moves == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]
    assert [b.mode for b in texts.blocks if b.kind == "vae"] == ["noise"] * 4
    assert len(unit.states) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"image_scale": 1.0},
        {"text_scale": 1.0},
        {"interval": (0.9, 1.0)},  # the second step of the window is not guided
        {"renorm": "channel"},
        {"renorm": "text_channel", "renorm_min": 0.2},
        {"step_kind": "cps", "noise_level": 0.8},
        {"sigma": "constant", "noise_level": 0.3},
        {"sigma": "capped", "window": (0, 3)},
    ],
    ids=str,
)
def test_replay_draws_as_the_sampler_did(bagel, profile, changes):
    policy = BagelPolicy(bagel, replace(profile, edit=replace(SDE, **changes)))
    made = [direct_edit(policy, seed) for seed in range(2)]
    steps = policy.profile.edit.window[1]
    assert_replayed(bagel, policy, made, words=0, moves=2 * steps)


def test_an_editing_task_is_replayed_from_the_users_image(bagel, profile):
    policy = BagelPolicy(bagel, profile)
    made = rollouts(ForcedTurns(policy, 90), PROMPTS[:1], [picture(1)])
    assert made[0].trajectory.first is None
    assert_replayed(bagel, policy, made, words=chosen(made), moves=2)
    assert lay_out(made[0], policy).states[0].image == 1


def test_two_branches_that_are_equal_are_one_block_of_replay(bagel, profile):
    policy = BagelPolicy(bagel, profile)
    seen = views.start(policy, "make the sky darker", picture(0))
    view = views.direct_edit_view(seen)
    view = replace(view, image_uncond=view.text_uncond)
    [drawn] = policy.draw([DrawAsk(view, 1, 0, "direct", picture(0))])
    made = rollout_of(Trajectory("", picture(0), None, drawn, (), StopReason.MAX_ROUNDS, 1))
    assert_replayed(bagel, policy, [made], words=0, moves=2)
    [chain] = lay_out(made, policy).chains
    assert [b.mode for b in chain.blocks if b.kind == "vae"] == ["full"] + ["noise"] * 4


def test_without_guidance_the_conditional_velocity_alone_is_replayed(bagel, profile):
    policy = BagelPolicy(bagel, profile)
    made = direct_edit(policy)
    plain = BagelPolicy(bagel, replace(profile, edit=replace(SDE, text_scale=1.0)))
    [(_, drawn)] = replayed(bagel, [lay_out(made, policy, guided=False)])
    [(_, same)] = replayed(bagel, [lay_out(made, plain)])
    torch.testing.assert_close(drawn.velocity, same.velocity, atol=0, rtol=0)
    assert (logprobs_of(drawn)[0] - drawn.old_logprob_N).abs().max() > 1e-3


# --- turns that are not what later ones see -------------------------------------------------------


def test_a_truncated_turn_is_scored_as_it_was_said(bagel, profile):
    policy = BagelPolicy(bagel, profile)
    made = rollouts(policy, max_tokens=12)
    assert [r.trajectory.stop for r in made] == [StopReason.TOO_LONG] * 2
    assert made[0].trajectory.steps[0].turn.error is ProtocolError.TRUNCATED
    assert_replayed(bagel, policy, made, words=chosen(made), moves=0)


class Rambling(ForcedTurns):
    """Says a line more than is read, and does not end."""

    def _ids(self, ask):
        return super()._ids(ask)[:-1] + self.policy.bagel.tokens.encode("\nOne more line")


def test_what_was_said_beyond_the_canonical_text_is_scored_and_not_seen(bagel, profile):
    policy = BagelPolicy(bagel, replace(profile, edit_view="full"))
    more = len(bagel.tokens.encode("\nOne more line"))
    options = replace(LOOP, accept_truncated=True)
    made = rollouts(Rambling(policy, 90), max_tokens=89 + more, options=options)
    first = made[0].trajectory.steps[0].turn
    assert first.reflection
    assert len(first.sampled_ids) == 89 + more
    assert bagel.tokens.end not in first.sampled_ids
    assert_replayed(bagel, policy, made, words=chosen(made), moves=4)
    [aside, _] = [b for b in lay_out(made[0], policy).chains[0].blocks if b.mode == "aside"]
    assert aside.next_position == aside.position
    assert bagel.tokens.decode(aside.ids).endswith("One more lin")  # the last is only predicted


def test_exactly_the_chosen_tokens_are_scored(bagel, profile):
    policy = BagelPolicy(bagel, profile)
    [made] = rollouts(ForcedTurns(policy, 90), PROMPTS[:1])
    unit = lay_out(made, policy, flow="none")
    turn = made.trajectory.turns[0]
    assert len(bagel.tokens.encode("0/10")) == 4
    assert turn.chosen == (True, False, False, False) + (True,) * 86
    assert tuple(unit.words.ids[:87]) == (turn.sampled_ids[0], *turn.sampled_ids[4:])
    # 0/10, then 1/10, where 10/10 was possible
    assert {k: len(ids) for k, ids in unit.words.allowed.items()} == {0: 10, 87: 10, 88: 2}
    [batch] = batches([unit], bagel, max_tokens=1)
    at = batch.score_S.tolist()
    ids = batch.ids_BU.flatten()[at].tolist()
    frame = bagel.tokens.encode("<think>\n[CURRENT_ROUND] Round#0\n[SCORE] ")
    assert ids[0] == frame[-1]  # the score is predicted from the forced prefix
    assert ids[2:10] == batch.label_S[1:9].tolist()  # every free word from the one before it
    assert batch.turn_S.tolist() == [0] * 87 + [1] * 88


# --- batches --------------------------------------------------------------------------------------


def test_batches_of_any_size_give_the_same_and_hold_each_trajectory_once(bagel, profile):
    policy = BagelPolicy(bagel, profile)
    units = [lay_out(direct_edit(policy, seed), policy) for seed in range(5)]
    made = rollouts(policy, max_tokens=12)
    units += [lay_out(rollout, policy) for rollout in made]
    found, words_of = [], []
    for limit in (1, 1000, 100_000):
        logprobs, said = {}, {}
        for words, moves in replayed(bagel, units, limit):
            for unit, step, logprob in zip(
                moves.unit_N.tolist(), moves.step_N.tolist(), logprobs_of(moves)[0], strict=True
            ):
                assert logprobs.setdefault((unit, step), logprob) is logprob
            for unit in set(words.unit_S.tolist()):
                assert unit not in said
                said[unit] = words.logprob_S[words.unit_S == unit]
        assert sorted(logprobs) == [(unit, step) for unit in range(5) for step in range(2)]
        assert sorted(said) == [5, 6]
        found.append(torch.stack([logprobs[k] for k in sorted(logprobs)]))
        words_of.append(torch.cat([said[5], said[6]]))
    sizes = [len(replayed(bagel, units, limit)) for limit in (1, 1000, 100_000)]
    assert sizes[0] > sizes[1] > sizes[2] == 1
    for k in (1, 2):
        near(found[k], found[0])
        near(words_of[k], words_of[0])


def test_states_of_ones_own_replace_those_of_the_window(bagel, profile):
    policy = BagelPolicy(bagel, profile)
    made = direct_edit(policy)
    clean, noise = torch.randn(16, 16), torch.randn(16, 16)
    unit = lay_out(
        made, policy, guided=False, states=lambda rollout: [State.noised(1, clean, noise, 0.25)]
    )
    [(_, moves)] = replayed(bagel, [unit])
    torch.testing.assert_close(moves.x[0], 0.75 * clean + 0.25 * noise)
    torch.testing.assert_close(moves.x_next[0], clean)
    assert (moves.t.tolist(), moves.t_next.tolist()) == ([0.25], [0.0])
    assert moves.velocity.shape == (1, 16, 16)


def test_nothing_is_a_batch_without_words_and_states(bagel):
    batch = nothing(bagel)
    words, moves = read(replay_step(bagel, batch, batch.times_I, batch.latent_BGC, False), batch)
    assert len(words.logprob_S) == len(moves.velocity) == len(logprobs_of(moves)[0]) == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"edit": replace(SDE, norm_over="call")}, "norm_over is 'call'"),
        ({"first": SDE, "edit": replace(SDE, norm_over="call")}, "choose 'image'"),
    ],
)
def test_what_cannot_be_replayed_is_refused(bagel, profile, changes, problem):
    made = direct_edit(BagelPolicy(bagel, profile))
    with pytest.raises(ValueError, match=problem):
        lay_out(made, BagelPolicy(bagel, replace(profile, **changes)))
    with pytest.raises(ValueError, match="flow is 'some'; choose one of none, edits"):
        lay_out(made, BagelPolicy(bagel, profile), flow="some")


def test_drawings_of_several_sizes_in_one_trajectory_are_refused(bagel, profile):
    policy = BagelPolicy(bagel, profile)
    made = direct_edit(policy)
    other = BagelPolicy(bagel, replace(profile, size=(32, 48)))
    start = views.start(other, "a star", None)
    [first] = other.draw([DrawAsk(views.first_image_view(start, "local"), 0, 0, "small")])
    edit = made.trajectory.first
    [step] = rollouts(policy, PROMPTS[:1], max_tokens=4)[0].trajectory.steps
    steps = (replace(step, transition=edit),)
    mixed = Trajectory("a star", None, None, first, steps, StopReason.MAX_ROUNDS, 1)
    with pytest.raises(ValueError, match="the drawings of a trajectory differ in size"):
        lay_out(rollout_of(mixed), policy, flow="all")
    assert len(lay_out(rollout_of(mixed), policy, flow="edits").states) == 2


def test_a_turn_at_temperature_0_and_one_without_its_context_are_refused(bagel, profile):
    policy = BagelPolicy(bagel, profile)
    [made] = rollouts(policy, PROMPTS[:1], max_tokens=4)
    step = made.trajectory.steps[0]
    for changes, problem in (
        ({"temperature": 0.0}, "nothing is chosen"),
        ({"context": None}, "takes fresh rollouts"),
    ):
        turn = replace(step.turn, **changes)
        steps = (replace(step, turn=turn),)
        changed = replace(made, trajectory=replace(made.trajectory, steps=steps))
        with pytest.raises(ValueError, match=problem):
            lay_out(changed, policy)


# --- learning -------------------------------------------------------------------------------------


def step_loss(learner, batch):
    """REINFORCE on everything with a different weight a unit, summed over what is in the batch."""
    out = learner.forward(batch, batch.times_I, batch.latent_BGC)
    words, moves = read(out, batch)
    said = (words.logprob_S * (1 + words.unit_S)).sum()
    return said / 100 + (logprobs_of(moves)[0] * (1 + moves.unit_N)).sum()


def gradients(bagel, policy, made, **options):
    bagel.requires_grad_(True)
    learner = learner_of(bagel, forward=replay_step, recompute=True)
    units = [lay_out(rollout, policy, **options) for rollout in made]
    for batch in batches(units, bagel, max_tokens=100_000):
        learner.backward(step_loss(learner, batch), last=True)
    found = {
        n: p.grad.abs().sum().item() for n, p in bagel.named_parameters() if p.grad is not None
    }
    bagel.requires_grad_(False)
    bagel.zero_grad()
    bagel.eval()
    return found


def test_words_and_states_give_gradients_to_both_experts_through_their_contexts(folder, profile):
    bagel = Bagel.from_pretrained(folder, device="cpu", dtype="float32")
    policy = BagelPolicy(bagel, profile)
    layer = "language_model.model.layers.0.mlp{}.up_proj.weight"
    said = gradients(bagel, policy, rollouts(policy, max_tokens=6))
    drawn = gradients(bagel, policy, [direct_edit(policy)])
    for found in (said, drawn):
        assert found[layer.format("")] > 0
        assert found[layer.format("_moe_gen")] > 0
    assert said["language_model.lm_head.weight"] > 0
    assert said.get("llm2vae.weight", 0) == 0
    assert drawn["llm2vae.weight"] > 0


def test_a_fresh_adapter_changes_nothing_and_learns_alone_in_both_experts(folder, profile):
    bagel = Bagel.from_pretrained(folder, device="cpu", dtype="float32")
    policy = BagelPolicy(bagel, profile)
    made = [direct_edit(policy), *rollouts(policy, PROMPTS[:1], max_tokens=6)]
    apply(bagel, "lora-both", LoraSettings(rank=2))
    words = chosen(made)
    assert_replayed(bagel, policy, made, words=words, moves=2)
    learner = learner_of(bagel, forward=replay_step)
    [batch] = batches([lay_out(m, policy) for m in made], bagel, max_tokens=100_000)
    learner.backward(step_loss(learner, batch), last=True)
    learns = {n for n, p in bagel.named_parameters() if p.grad is not None and p.grad.any()}
    assert all("lora" in name for name in learns)
    assert {"_moe_gen" in name for name in learns} == {True, False}
    learner.step(1.0)
    [(said, _)] = replayed(bagel, [lay_out(m, policy) for m in made])
    assert (said.logprob_S - said.old_S).abs().max() > 1e-4


def several(processes, folder, strategy):
    bagel = tiny_bagel(folder)
    policy = BagelPolicy(bagel, tiny_profile(bagel))
    made = [direct_edit(policy, seed) for seed in range(3)]
    made += rollouts(policy, max_tokens=6)
    settings = OptimizerSettings(lr=1e-3, eps=1e-5, flow_lr=2e-3)
    learner = learner_of(bagel, processes, strategy, settings, forward=replay_step)
    mine = list(range(processes.rank, 5, processes.world))
    units = [lay_out(made[i], policy) for i in mine]
    own = batches(units, bagel, max_tokens=1, latents_of=policy.engine.latent_tokens)
    total = torch.zeros(())
    for k in range(5):  # every process makes as many forwards
        batch = own[k] if k < len(own) else nothing(bagel)
        batch.unit_S = batch.unit_S * processes.world + processes.rank
        batch.unit_N = batch.unit_N * processes.world + processes.rank
        loss = step_loss(learner, batch)
        total += loss.detach()
        learner.backward(loss * processes.world, last=k == 4)
    report = learner.step(1.0)
    with learner.inference() as whole:
        weights = {n: p.detach().clone() for n, p in whole.named_parameters()}
    wrapped = type(learner.module).__name__
    return processes.sum(total), report.grad_norm, weights, wrapped


@pytest.mark.parametrize(
    ("strategy", "wrapper"), [("fsdp2", "FSDPStepped"), ("ddp", "DistributedDataParallel")]
)
def test_two_processes_learn_what_one_learns(folder, strategy, wrapper):
    loss, norm, weights, wrapped = several(Processes(), folder, "none")
    assert wrapped == "Stepped"
    for theirs in run_processes(several, 2, folder, strategy):
        other_loss, other_norm, other_weights, other_wrapped = theirs
        assert other_wrapped == wrapper
        near(other_loss, loss)
        near(other_norm, norm)
        for name, tensor in weights.items():
            torch.testing.assert_close(other_weights[name], tensor, atol=2e-5, rtol=1e-4)
