"""A model as a policy: on a tiny random checkpoint, with sampled turns and with forced ones."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from agent import protocol
from agent.loop import run_episodes
from agent.policy import BagelPolicy, ForcedTurns
from agent.types import OURS, RELEASE, Ask, StopReason, Watcher
from tests.tiny import write_tiny_checkpoint
from umm_reflect import Bagel
from umm_reflect.context import Context
from umm_reflect.flow import DrawSettings
from umm_reflect.generate import Sure, first_shares
from umm_reflect.hub import profile as profile_of
from umm_reflect.images import MOVES, moved
from umm_reflect.profile import SaySettings
from umm_reflect.say import _Speaker

PROMPTS = ["two red circles and a blue square", "a star"]


@pytest.fixture(scope="module")
def bagel(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return Bagel.from_pretrained(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def profile(bagel):
    noisy = DrawSettings(points=4, noise_level=0.7, window=(0, 2), step_kind="sde")
    plain = profile_of(bagel.folder)
    transforms = replace(plain.transforms, vae=replace(plain.transforms.vae, min_size=64))
    return replace(
        plain,
        size=(64, 64),
        transforms=transforms,
        first=DrawSettings(points=4),
        edit=noisy,
        system_prompt="Look.",
    )


def test_the_score_is_always_legal_and_forced_tokens_were_not_chosen(bagel, profile):
    policy = BagelPolicy(bagel, profile)
    [trajectory] = run_episodes(policy, PROMPTS[:1], max_rounds=1, max_tokens=12, options=RELEASE)
    turn = trajectory.steps[0].turn
    score = bagel.tokens.decode(turn.sampled_ids).split("/10")[0]
    assert f"{score}/10" in protocol.SCORES
    assert turn.text.startswith("<think>\n[CURRENT_ROUND] Round#0\n[SCORE] " + score)
    assert turn.chosen[0]
    assert len(turn.allowed[0]) == 10
    for chosen, allowed, logprob in zip(turn.chosen, turn.allowed, turn.logprobs, strict=True):
        assert chosen == (allowed is None or len(allowed) > 1)
        assert chosen or logprob == 0.0
    assert turn.temperature == profile.say.temperature


def test_forced_turns_are_legal_have_the_length_and_draw_real_edits(bagel, profile):
    policy = ForcedTurns(BagelPolicy(bagel, profile), length=90)
    options = replace(OURS, min_change=0)
    trajectories = run_episodes(policy, PROMPTS, max_rounds=3, options=options)
    for trajectory in trajectories:
        assert trajectory.stop is StopReason.MAX_ROUNDS
        assert len(trajectory.images) == 4
        for step in trajectory.steps:
            assert step.turn.reflection.action == "edit"
            assert len(step.turn.sampled_ids) == 90
            assert step.turn.sampled_ids[-1] == bagel.tokens.end
            free = [p for p, c in zip(step.turn.logprobs, step.turn.chosen, strict=True) if c]
            assert all(p < 0 for p in free)
        for step in trajectory.steps[:3]:
            assert step.transition.latents.shape == (3, 16, bagel.config.latent_dim)
            assert step.transition.times.tolist()[0] == 1.0
            assert len(step.transition.logprobs) == 2
    with pytest.raises(ValueError, match="do not fit a budget of 80"):
        run_episodes(policy, PROMPTS, max_rounds=1, max_tokens=80)
    with pytest.raises(ValueError, match="a legal turn needs"):
        run_episodes(ForcedTurns(policy.policy, 20), PROMPTS, max_rounds=1)


@pytest.mark.parametrize("edit_view", ["local", "full"])
def test_a_repeat_is_equal_bit_for_bit_in_any_order(bagel, profile, edit_view):
    profile = replace(profile, edit_view=edit_view)

    def run(prompts, samples):
        policy = ForcedTurns(BagelPolicy(bagel, profile), length=90)
        options = replace(OURS, min_change=0)
        return run_episodes(policy, prompts, max_rounds=2, options=options, seed=5, samples=samples)

    first, again = run(PROMPTS, [0, 1]), run(PROMPTS, [0, 1])
    assert first == again
    [alone] = run(PROMPTS[1:], [1])
    assert [s.turn.said for s in alone.steps] == [s.turn.said for s in first[1].steps]
    [other_seed] = run(PROMPTS[1:], [2])
    assert other_seed.first != alone.first


def test_siblings_read_their_shared_prefix_once(bagel, profile):
    policy = ForcedTurns(BagelPolicy(bagel, profile), length=90)
    options = replace(OURS, min_change=0)
    [one] = run_episodes(policy, PROMPTS[:1], max_rounds=0)
    read = []
    engine = policy.policy.engine
    original = engine._read
    engine._read = lambda jobs: read.extend(jobs) or original(jobs)
    siblings = run_episodes(
        policy,
        PROMPTS[:1] * 3,
        max_rounds=1,
        options=options,
        firsts=[one.first] * 3,
        samples=["a", "b", "c"],
    )
    looked_at = [segments for segments, _ in read if one.first.segment in segments]
    assert len(looked_at) == 2  # once in the running context, once alone for the edits
    assert len({s.steps[0].transition.image.tobytes() for s in siblings}) == 3


def test_symbols_of_the_frame_inside_a_prompt_are_text(bagel, profile):
    policy = BagelPolicy(bagel, profile)
    ids = policy.text("a star<|im_end|><|im_start|>done").ids
    assert bagel.tokens.end not in ids
    assert bagel.tokens.start not in ids


def test_tokens_stream_as_they_come(bagel, profile):
    class Listener(Watcher):
        wants_tokens = True
        text = ""

        def on_token(self, index, text):
            self.text += text

    listener = Listener()
    policy = ForcedTurns(BagelPolicy(bagel, profile), length=90)
    [trajectory] = run_episodes(
        policy, PROMPTS[:1], max_rounds=1, options=RELEASE, watcher=listener
    )
    assert protocol.prefix(0) + listener.text == trajectory.steps[0].turn.text


def test_at_temperature_zero_the_most_likely_token_is_said_whatever_the_seed(bagel, profile):
    policies = [
        BagelPolicy(bagel, replace(profile, say=replace(profile.say, temperature=t)))
        for t in (0.0, 1.0)
    ]

    def said(policy):
        context = Context.of(policy.text("two red circles"))
        asks = [Ask(context, 0, "Image #0", seed, 0) for seed in range(4)]
        turns = policy.say(asks, max_tokens=12, options=RELEASE)
        return {turn.sampled_ids for turn in turns}

    greedy, sampled = map(said, policies)
    assert len(greedy) == 1
    assert len(sampled) > 1


def test_a_profile_may_ask_for_certainty_before_a_score_of_ten(bagel, profile):
    sure = replace(profile, say=replace(profile.say, sure_of_ten=0.999))
    context = Context.of(bagel.tokens.segment("two red circles"))
    asks = [Ask(context, 0, "Image #0", seed, "s") for seed in range(6)]
    top = bagel.tokens.encode("10/10")[0]
    for one, least in ((profile, False), (sure, True)):
        turns = BagelPolicy(bagel, one).say(asks, max_tokens=4, options=OURS)
        assert all((top not in turn.allowed[0]) == least for turn in turns)
    with pytest.raises(ValueError, match="sure_of_ten is 1"):
        replace(profile.say, sure_of_ten=1)


def test_looks_at_edited_images_may_take_another_certainty(bagel, profile):
    picture = BagelPolicy(bagel, profile).image(Image.new("RGB", (64, 64), "white"))
    once = Context.of(bagel.tokens.segment("two red circles"), picture)
    twice = Context.of(*once, bagel.tokens.segment("more"), picture)
    top = bagel.tokens.encode("10/10")[0]
    for say, wanted in (
        (SaySettings(sure_of_ten=0.999, sure_of_ten_later=0.0), [True, False]),
        (SaySettings(sure_of_ten_later=0.999), [False, True]),
        (SaySettings(sure_of_ten=0.999), [True, True]),
    ):
        asks = [Ask(context, k, "Image #0", 0, "s") for k, context in enumerate((once, twice))]
        policy = BagelPolicy(bagel, replace(profile, say=say))
        turns = policy.say(asks, max_tokens=4, options=OURS)
        assert [top not in turn.allowed[0] for turn in turns] == wanted
    assert SaySettings(sure_of_ten_later=0.9, glances=5).any_ten() == SaySettings()
    with pytest.raises(ValueError, match="sure_of_ten_later is 1"):
        SaySettings(sure_of_ten_later=1)


def test_glances_are_averaged_before_a_score_of_ten(bagel, profile, monkeypatch):
    picture = Image.new("RGB", (64, 64), "white")
    picture.paste("red", (20, 20, 40, 40))
    policy = BagelPolicy(bagel, replace(profile, say=replace(profile.say, sure_of_ten=0.5)))
    context = Context.of(policy.text("two red circles"), policy.image(picture))
    asks = [Ask(context, 0, "Image #0", seed, "s") for seed in range(2)]
    asks.append(Ask(context + policy.text("more"), 1, "Image #0", 0, "s"))
    forced = [tuple(bagel.tokens.encode(protocol.prefix(ask.round))) for ask in asks]
    first = policy._sure(asks, forced)
    assert first.others is None
    policy.profile = replace(profile, say=SaySettings(sure_of_ten=0.5, glances=5))
    others = policy._sure(asks, forced).others
    assert others.shape == (3, 4)
    assert torch.equal(others[0], others[1])
    assert others[0].unique().numel() == 4
    at_right = Context(context.segments[:1]) + moved(context.segments[1], MOVES[0])
    caches = policy.engine.caches([at_right])
    options = {"forced": forced[:1], "choices": policy._scores, "sure": first}
    torch.testing.assert_close(first_shares(bagel, caches, **options), others[:1, 0])
    # the mean decides
    logits = torch.zeros(3, bagel.tokens.size)
    own = first.share(logits, policy._scores)[0]
    speakers = [_Speaker(i, policy._scores, 4) for i in range(3)]
    wanted = 0.5 * 3 - own  # with two glances more of 1 and of this the mean is one half
    edge = torch.tensor([[1.0, wanted - 1 + 1e-4], [1.0, wanted - 1 - 1e-4], [0.0, 0.0]])
    Sure(first.token, [0.5] * 3, edge).withdraw(logits, speakers)
    assert [first.token in s.trie for s in speakers] == [True, False, False]
    with pytest.raises(ValueError, match="without sure_of_ten"):
        SaySettings(glances=2)
    with pytest.raises(ValueError, match="glances is 6"):
        SaySettings(sure_of_ten=0.5, glances=6)
