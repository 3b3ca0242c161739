"""One sequence layout, one forward: prefill in pieces, prefill at once, the packed training forward
and the replay of what was sampled agree within 1e-5 (tiny random model, CPU, fp32).

Between the paths only the batch differs: its padding, its mask, what is cached and what is new.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.tiny import write_tiny_checkpoint
from umm_reflect import Bagel
from umm_reflect.attention import Attend
from umm_reflect.context import Context, ImageSegment, TextSegment
from umm_reflect.draw import Denoiser
from umm_reflect.flow import sde_mean_std, transition_logprob
from umm_reflect.generate import DrawRequest, DrawSettings, Engine, draw, say
from umm_reflect.images import patchify_pixels, unpatchify_latent
from umm_reflect.packing import Piece, collate, pack_row, training_forward
from umm_reflect.rng import stream

NAMES = ["text", "two texts", "look", "latents", "picture", "mixed", "ends with an edit"]


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5, absolute below one and relative above."""
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def bagel(tmp_path_factory) -> Bagel:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)
    return Bagel.from_pretrained(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def contexts(bagel) -> dict[str, Context]:
    generator = torch.Generator().manual_seed(5)

    def pixels(height: int, width: int) -> Tensor:
        return torch.rand(3, height, width, generator=generator) * 2 - 1

    text = bagel.tokens.segment
    asked, edit = text("two red circles and a blue square"), text("make the sky darker")
    first = ImageSegment(vae_pixels=pixels(48, 64), vit_pixels=pixels(42, 56))
    second = ImageSegment(vae_pixels=pixels(32, 32), vit_pixels=pixels(28, 28))
    return {
        "text": Context.of(asked),
        "two texts": Context.of(asked, edit),
        "look": Context.of(ImageSegment(vit_pixels=pixels(28, 70)), edit),
        "latents": Context.of(asked, ImageSegment(vae_pixels=pixels(64, 32))),
        "picture": Context.of(first),
        "mixed": Context.of(asked, first, text("One is missing."), second, text("")),
        "ends with an edit": Context.of(second, edit),
    }


@dataclass
class Read:
    """What one sequence became: KV in sequence order [layers, 2, n, K, D] and final hidden states
    of its understanding and its generation tokens, each in order."""

    kv: Tensor
    hidden_UD: Tensor
    hidden_GD: Tensor


def read(bagel: Bagel, context: Context, *, pieces: bool) -> Read:
    """A context through a fresh engine, segment by segment or all at once."""
    engine, hidden = Engine(bagel), []
    hook = bagel.register_forward_hook(lambda module, given, out: hidden.append(out))
    try:
        if pieces:
            for end in range(1, len(context)):
                engine.caches([context.prefix(end)])
        [cache] = engine.caches([context])
    finally:
        hook.remove()
    assert len(hidden) == (len(context) if pieces else 1)
    kv = torch.cat([link.chunk for link in cache.links()], dim=2)
    return Read(kv, *(torch.cat(part) for part in zip(*hidden, strict=True)))


def train(bagel, rows, times=None, noise=None):
    """Examples in rows, through the training forward: (rows, batch, output, keys and values).

    keys and values: [layers, 2, B, L, K, D]. times: one an image; noise: [n, C] for each image.
    """
    engine = Engine(bagel)
    packed = [pack_row(examples, bagel.frame, bagel.config) for examples in rows]
    latents = engine.latent_tokens([image for row in packed for image in row.vae_images])
    patches = [patchify_pixels(i.vit_pixels, 14) for row in packed for i in row.vit_images]
    batch = collate(packed, latents, patches)
    noise_BGC = torch.zeros_like(batch.latent_BGC)
    for index in range(batch.num_images if noise else 0):
        row = next(b for b in range(len(packed)) if index in batch.image_BG[b])
        mine = (batch.image_BG[row] == index) & batch.noised_BG[row]
        if mine.any():
            noise_BGC[row, mine] = noise[index]
    times = torch.zeros(batch.num_images) if times is None else torch.as_tensor(times)
    layers: list[Tensor] = []
    call = Attend.__call__

    def recording(self, layer, q_parts, k_parts, v_parts):
        layers.append(torch.stack([self._rows(k_parts), self._rows(v_parts)]))
        return call(self, layer, q_parts, k_parts, v_parts)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Attend, "__call__", recording)
        out = training_forward(bagel, batch, times, noise_BGC)
    return packed, batch, out, torch.stack(layers)


def example_of(batch, out, kv, row: int, example: int) -> Read:
    """One example of a packed batch, its tokens put back into sequence order."""
    width = batch.ids_BU.shape[1]
    mine = (batch.sample_BL[row] == example).nonzero().squeeze(1)
    ordered = mine[batch.order_BL[row, mine].argsort()]
    hidden = [part.unflatten(0, (len(batch.ids_BU), -1))[row] for part in out.hidden]
    und, gen = mine[mine < width], mine[mine >= width] - width
    return Read(kv[:, :, row, ordered], hidden[0][und], hidden[1][gen])


def assert_same_read(actual: Read, expected: Read) -> None:
    assert_near(actual.kv, expected.kv)
    assert_near(actual.hidden_UD, expected.hidden_UD)
    assert_near(actual.hidden_GD, expected.hidden_GD)


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_pieces_equals_prefill_at_once(bagel, contexts, name):
    pieces, whole = (read(bagel, contexts[name], pieces=p) for p in (True, False))
    assert whole.kv.shape[2] == len(whole.hidden_UD) + len(whole.hidden_GD) > 0
    assert_same_read(pieces, whole)


def test_a_ragged_batch_reads_as_each_context_alone_does(bagel, contexts):
    caches = Engine(bagel).caches([contexts[name] for name in NAMES])
    for name, cache in zip(NAMES, caches, strict=True):
        kv = torch.cat([link.chunk for link in cache.links()], dim=2)
        assert_near(kv, read(bagel, contexts[name], pieces=False).kv)


def test_packed_training_reads_as_prefill_does_whatever_else_is_in_the_row(bagel, contexts):
    rows = [NAMES[:3], NAMES[3:6], NAMES[6:]]
    examples = [[[Piece(s) for s in contexts[name]] for name in row] for row in rows]
    _, batch, out, kv = train(bagel, examples)
    for b, row in enumerate(rows):
        for e, name in enumerate(row):
            alone = read(bagel, contexts[name], pieces=False)
            assert_same_read(example_of(batch, out, kv, b, e), alone)


# --- saying and its replay ------------------------------------------------------------------------


def sampled(bagel, contexts, temperature: float, **more):
    """A turn on each context, with a constrained field of ten first tokens and the logits that
    each token was chosen from: (forced ids, said, logits [tokens, vocabulary] a row)."""
    forced = [tuple(bagel.tokens.encode(f"<think>\n{'[SCORE] ' * k}")) for k in range(len(NAMES))]
    steps: list[Tensor] = []
    said = say(
        bagel,
        Engine(bagel).caches([contexts[name] for name in NAMES]),
        forced=forced,
        choices={k: {} for k in range(40, 50)},
        temperature=temperature,
        max_tokens=12,
        generators=[stream(3, name, 0, "say") for name in NAMES],
        on_logits=lambda logits: steps.append(logits.clone()),
        **more,
    )
    logits = [[] for _ in NAMES]
    for step, values in enumerate(steps):
        live = [r for r, s in enumerate(said) if len(s.sampled_ids) > step]
        for r, row in zip(live, values, strict=True):
            logits[r].append(row)
    return forced, said, [torch.stack(row) for row in logits]


def turn_of(bagel, forced, said) -> tuple[Piece, int]:
    """The turn as a scored piece, and how many of its labels were sampled."""
    ended = said.sampled_ids[-1] == bagel.frame.end
    ids = (*forced, *said.sampled_ids[: -1 if ended else None])
    return Piece(TextSegment(ids), learn=True), len(said.sampled_ids)


def test_replayed_turns_have_the_logits_and_log_probs_that_they_were_sampled_with(bagel, contexts):
    temperature = 0.7
    forced, said, logits = sampled(bagel, contexts, temperature)
    turns = [turn_of(bagel, f, s) for f, s in zip(forced, said, strict=True)]
    examples = [
        [*(Piece(s) for s in contexts[name]), turn]
        for name, (turn, _) in zip(NAMES, turns, strict=True)
    ]
    _, batch, out, _ = train(bagel, [examples[:4], examples[4:]])
    replayed = bagel.logits(out.hidden[0][batch.score_S])
    lengths = [len(turn.segment.ids) + 1 for turn, _ in turns]
    for r, part in enumerate(replayed.split(lengths)):
        count, skip = turns[r][1], len(forced[r])
        part = part[skip : skip + count]
        assert_near(part, logits[r])
        ratio = []
        for k, (token, legal) in enumerate(zip(said[r].sampled_ids, said[r].allowed, strict=True)):
            scores = part[k, : bagel.tokens.size] / temperature
            if legal is not None:
                scores = scores[list(legal)]
                token = legal.index(token)
            ratio.append((scores.log_softmax(-1)[token] - said[r].logprobs[k]).exp().item())
        assert ratio == pytest.approx([1.0] * count, abs=1e-5)


def test_cross_entropy_of_the_training_forward_is_minus_the_log_prob_at_temperature_one(
    bagel, contexts
):
    forced, said, _ = sampled(bagel, contexts, 1.0, support=bagel.config.llm.vocab_size)
    turns = [turn_of(bagel, f, s) for f, s in zip(forced, said, strict=True)]
    examples = [
        [*(Piece(s) for s in contexts[name]), turn]
        for name, (turn, _) in zip(NAMES, turns, strict=True)
    ]
    _, _, out, _ = train(bagel, [examples])
    start = 0
    for prefix, answer, (turn, count) in zip(forced, said, turns, strict=True):
        first = start + len(prefix) + 1  # the first sampled token chose among ten
        free = out.ce_S[first : start + len(prefix) + count]
        assert_near(-free, torch.tensor(answer.logprobs[1:]))
        start += len(turn.segment.ids) + 1
    assert start == len(out.ce_S)


# --- drawing and its replay -----------------------------------------------------------------------


def branches(contexts) -> list[tuple[Context, Context | None, Context | None, tuple[int, int]]]:
    """(conditional, without text, without images, size) of requests of every form."""
    edit, mixed = contexts["ends with an edit"], contexts["mixed"]
    return [
        (contexts["text"], Context(), None, (48, 64)),
        (edit, edit.images_only(), edit.texts_only(), (32, 32)),
        (mixed, mixed.prefix(4), mixed.texts_only(), (32, 48)),
        (Context(), None, None, (16, 16)),
    ]


def target(bagel, x: Tensor, size: tuple[int, int]) -> Piece:
    """A noised target whose state at any time is x: clean picture and noise are both x."""
    height, width = (side // bagel.config.vae.downsample for side in size)
    return Piece(ImageSegment(latent=unpatchify_latent(x, height, width)), learn=True)


@pytest.mark.parametrize("t", [1.0, 0.62, 0.05])
def test_velocities_of_all_guidance_branches_equal_those_of_the_training_forward(
    bagel, contexts, t
):
    asked = branches(contexts)
    requests = [DrawRequest(*b, stream(0, i, 0, "draw")) for i, b in enumerate(asked)]
    flow = Denoiser(Engine(bagel), requests, DrawSettings(image_scale=2.0))
    states = flow.noise()
    with torch.no_grad():
        velocities = flow.branch_velocities(states, torch.tensor(t), guided=True)
    examples, owner, expected = [], [], []
    for r, ((*views, size), places) in enumerate(zip(asked, flow.row_of, strict=True)):
        for view, place in zip(views, places, strict=True):
            if view is not None:
                pieces = [Piece(s) for s in view]
                examples.append([*pieces, target(bagel, states[r], size)])
                owner.append(r)
                expected.append(velocities[place])
    assert len(examples) == len(velocities) == 4 + 1 + 2 + 2
    rows = [examples[:4], examples[4:]]
    noise, times = [], []
    for example, r in zip(examples, owner, strict=True):
        for piece in example:
            if isinstance(piece.segment, ImageSegment) and piece.segment.has_vae:
                noise.append(states[r])
                times.append(t if piece.learn else 0.9)  # a clean picture ignores its time
    _, batch, out, _ = train(bagel, rows, times, noise)
    found = []
    for b in range(2):
        for image in batch.image_BG[b][batch.noised_BG[b]].unique():
            found.append(out.velocity_BGC[b, (batch.image_BG[b] == image) & batch.noised_BG[b]])
    for actual, wanted in zip(found, expected, strict=True):
        assert_near(actual, wanted)


@pytest.mark.parametrize("name", ["text", "ends with an edit", "mixed"])
def test_replayed_stochastic_steps_have_the_log_probs_that_they_were_drawn_with(
    bagel, contexts, name
):
    settings = DrawSettings(
        points=5, text_scale=1.0, noise_level=0.7, window=(1, 2), step_kind="sde"
    )
    request = DrawRequest(contexts[name], None, None, (32, 48), stream(1, name, 0, "draw"))
    [drawn] = draw(Engine(bagel), [request], settings)
    assert drawn.latents.shape == (3, 6, 16)
    examples = [
        [*(Piece(s) for s in contexts[name]), target(bagel, x, (32, 48))] for x in drawn.latents[:2]
    ]
    clean = sum(isinstance(s, ImageSegment) and s.has_vae for s in contexts[name])
    noise, times = [], []
    for x, t in zip(drawn.latents[:2], drawn.times[:2].tolist(), strict=True):
        noise += [x] * (clean + 1)
        times += [0.0] * clean + [t]
    _, batch, out, _ = train(bagel, [examples], times, noise)
    velocities = out.velocity_BGC[batch.noised_BG].unflatten(0, (2, 6))
    for k in range(2):
        mean, std = sde_mean_std(
            drawn.latents[k], velocities[k], drawn.times[k], drawn.times[k + 1], 0.7
        )
        replayed = transition_logprob(drawn.latents[k + 1], mean, std)
        assert (replayed - drawn.logprobs[k]).exp().item() == pytest.approx(1, abs=1e-5)


# --- a whole trajectory ---------------------------------------------------------------------------


def test_one_packed_trajectory_holds_every_turn_and_every_picture_as_the_agent_met_them(
    bagel, contexts
):
    """[prompt, picture 0 noised and clean, turn, picture 1 noised and clean, turn] against the
    calls of the loop, in the full view."""
    asked, first, _, second, _ = contexts["mixed"].segments
    text = bagel.tokens.segment
    turns = [text("One circle is missing: add a red one."), text("done")]
    times = [0.8, 0.0, 0.3, 0.0]
    engine = Engine(bagel)
    noise = [
        torch.randn(x.shape, generator=stream(0, k, 0, "noise"))
        for k, x in enumerate(engine.latent_tokens([first, first, second, second]))
    ]
    pieces = [
        Piece(asked),
        Piece(first, learn=True),
        Piece(first),
        Piece(turns[0], learn=True),
        Piece(second, learn=True),
        Piece(second),
        Piece(turns[1], learn=True),
    ]
    beside = [Piece(turns[0]), Piece(turns[1])]
    _, batch, out, _ = train(bagel, [[pieces, beside]], times, noise)

    start, context = 0, Context.of(asked)
    for k, (image, turn) in enumerate(zip((first, second), turns, strict=True)):
        [clean] = engine.latent_tokens([image])
        x = (1 - times[2 * k]) * clean + times[2 * k] * noise[2 * k]
        size = tuple(image.vae_pixels.shape[-2:])
        request = DrawRequest(context, None, None, size, stream(0, 0, 0, "draw"))
        flow = Denoiser(engine, [request], DrawSettings())
        with torch.no_grad():
            [velocity] = flow.branch_velocities([x], torch.tensor(times[2 * k]), guided=False)
        assert_near(out.velocity_BGC[0, batch.image_BG[0] == 2 * k], velocity)

        context += image
        ids = (*turn.ids, bagel.frame.end)
        [said] = say(
            bagel,
            engine.caches([context]),
            forced=[()],
            temperature=1.0,
            max_tokens=len(ids),
            generators=[stream(0, 0, 0, "say")],
            force=[ids],
            support=bagel.config.llm.vocab_size,
        )
        assert said.sampled_ids == ids
        assert_near(-out.ce_S[start : start + len(ids)], torch.tensor(said.logprobs))
        start += len(ids)
        context += turn
    assert start == len(out.ce_S)
