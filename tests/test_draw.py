"""Drawing in batches: company changes no picture, branches that equal another are not run, and
every random number has its place.

The bits of a repeat, another order and a fresh engine are equal; across batch sizes at most one
level in a thousandth of the pixels changes. On a tiny random model, and in short, with the words
and the verdicts, on the nano checkpoint where it is.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import umm_reflect.draw
from agent.loop import run_episodes
from agent.policy import BagelPolicy
from tests.counted import counted, ragged
from tests.tiny import write_tiny_checkpoint
from umm_reflect import Bagel
from umm_reflect.batch import _plain_groups
from umm_reflect.context import Context
from umm_reflect.draw import Denoiser, fitting_parts
from umm_reflect.errors import UsageError
from umm_reflect.flow import sde_step
from umm_reflect.generate import Drawn, DrawRequest, DrawSettings, Engine, draw, say
from umm_reflect.layout import Row, vae_block
from umm_reflect.rng import stream

ROOT = Path(__file__).resolve().parents[1]
NANO = ROOT / "pretrained" / "bagel-nano-shapes"
GUIDED = DrawSettings(points=5, text_scale=4.0, image_scale=1.5, interval=(0.0, 1.0))
NOISY = replace(GUIDED, noise_level=0.7, window=(1, 2), step_kind="sde")


@pytest.fixture(scope="module")
def bagel(tmp_path_factory) -> Bagel:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)
    return Bagel.from_pretrained(folder, device="cpu", dtype="float32")


def requests(bagel: Bagel, order=range(4)) -> list[DrawRequest]:
    """One of every form: a first image, edits of two sizes, and nothing at all."""
    first, edit, other, _ = ragged(bagel)
    forms = [
        (first, Context(), None, (32, 48)),
        (edit, edit.prefix(2), edit.texts_only(), (48, 48)),
        (other, other.images_only(), other.texts_only(), (32, 48)),
        (Context(), None, None, (48, 32)),
    ]
    return [DrawRequest(*forms[i], stream(7, i, 0, "draw")) for i in order]


def assert_equal_bits(one: list[Drawn], other: list[Drawn]) -> None:
    for a, b in zip(one, other, strict=True):
        for name in ("pixels", "latent", "latents", "times", "logprobs"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert a.image.tobytes() == b.image.tobytes()


def changed_pixels(pairs) -> tuple[int, float]:
    """(largest difference in levels, share of pixels that differ) over pairs of pictures."""
    differences = [
        np.abs(np.asarray(a, int) - np.asarray(b, int)).max(-1).reshape(-1) for a, b in pairs
    ]
    together = np.concatenate(differences)
    return int(together.max()), float((together > 0).mean())


# --- company --------------------------------------------------------------------------------------


def test_a_repeat_another_order_and_a_fresh_engine_draw_the_same_bits(bagel):
    engine = Engine(bagel)
    once = draw(engine, requests(bagel), NOISY)
    assert [d.logprobs.shape for d in once] == [(2,)] * 4
    assert_equal_bits(draw(engine, requests(bagel), NOISY), once)
    assert_equal_bits(draw(Engine(bagel), requests(bagel), NOISY), once)
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        other = draw(Engine(bagel), requests(bagel, order), NOISY)
        assert_equal_bits(other, [once[i] for i in order])


def fingerprint(folder: str) -> str:
    """The bits of a batch that was said and drawn, with everything loaded anew."""
    model = Bagel.from_pretrained(folder, device="cpu", dtype="float32")
    engine, contexts = Engine(model), ragged(model)
    said = say(
        model,
        engine.caches(contexts),
        forced=[()] * len(contexts),
        temperature=1.0,
        max_tokens=8,
        generators=[stream(7, i, 0, "say") for i in range(len(contexts))],
    )
    drawn = draw(engine, requests(model), NOISY)
    parts = [repr(said).encode(), *(d.pixels.numpy().tobytes() for d in drawn)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_another_process_says_and_draws_the_same_bits(bagel):
    code = f"from tests.test_draw import fingerprint; print(fingerprint({str(bagel.folder)!r}))"
    there = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == fingerprint(str(bagel.folder))


def test_another_batch_size_changes_one_level_in_a_thousandth_of_the_pixels_at_most(bagel):
    # of many pictures, since one pixel of a small one is more than a thousandth
    forms, seeds = [0, 1, 2, 0, 1, 2], range(6)

    def named(seeds) -> list[DrawRequest]:
        batch = zip(seeds, requests(bagel, [forms[s] for s in seeds]), strict=True)
        return [replace(request, generator=stream(8, s, 0, "draw")) for s, request in batch]

    together = draw(Engine(bagel), named(seeds), GUIDED)
    alone = [draw(Engine(bagel), named([s]), GUIDED)[0] for s in seeds]
    most, share = changed_pixels((a.image, b.image) for a, b in zip(together, alone, strict=True))
    assert most <= 1
    assert share <= 0.001
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a.pixels, b.pixels, atol=1e-4, rtol=1e-4)


def test_forwards_a_step_do_not_grow_with_the_batch(bagel):
    for rows in ([1], [0, 1, 2, 3], [0, 1, 2, 3] * 3):
        batch, engine = requests(bagel, rows), Engine(bagel)
        branches = [(r.conditional, r.text_uncond, r.image_uncond) for r in batch]
        engine.caches([context for row in branches for context in row if context])
        with counted(bagel) as counts:
            draw(engine, batch, GUIDED)
        assert counts.forwards == 4  # 5 points are 4 steps: all pictures and branches in one each


# --- branches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "settings", "rows"),
    [
        (0, GUIDED, 2),  # no image in sight: without images it is the main branch
        (1, GUIDED, 3),
        (3, GUIDED, 1),
        (1, replace(GUIDED, image_scale=1.0), 2),
        (1, replace(GUIDED, text_scale=1.0, image_scale=1.0), 1),
        (1, replace(GUIDED, interval=(0.9, 0.95)), 1),
    ],
)
def test_branches_that_equal_another_or_weigh_nothing_are_not_run(bagel, form, settings, rows):
    [request] = requests(bagel, [form])
    height, width = request.size
    with counted(bagel) as counts:
        draw(Engine(bagel), [request], settings)
    assert counts.gen[-4:] == [rows * height * width // 256] * 4
    assert counts.und[-4:] == [rows * 2] * 4  # markers


def test_steps_outside_of_the_interval_run_the_main_branch_alone(bagel):
    settings = replace(GUIDED, interval=(0.6, 0.95))
    assert [settings.guided(t) for t in settings.times[:4]] == [False, True, True, False]
    with counted(bagel) as counts:
        draw(Engine(bagel), requests(bagel, [1]), settings)
    assert counts.gen[-4:] == [9, 27, 27, 9]


def test_an_equal_context_is_folded_as_none_is(bagel):
    [request], [equal], [both] = (requests(bagel, [0]) for _ in range(3))
    equal = replace(equal, image_uncond=Context(request.conditional.segments))
    with counted(bagel) as counts:
        drawn = [draw(Engine(bagel), [one], GUIDED) for one in (request, equal)]
    assert counts.gen.count(2 * 6) == 2 * 4  # two rows in every step of both
    assert_equal_bits(*drawn)
    with counted(bagel) as counts:  # here the two unconditional branches are one row
        draw(Engine(bagel), [replace(both, image_uncond=Context())], GUIDED)
    assert counts.gen[-4:] == [2 * 6] * 4


def test_a_folded_branch_weighs_as_if_it_had_been_run(bagel):
    """v = u_t + s_eff (v - u_t) with s_eff = 1 + s_img (s_text - 1), where nothing is renormed."""
    settings = replace(GUIDED, points=2, renorm_min=1.0)
    alike = replace(settings, text_scale=1 + 1.5 * (4.0 - 1), image_scale=1.0)
    [folded], [plain] = (
        draw(Engine(bagel), requests(bagel, [0]), chosen) for chosen in (settings, alike)
    )
    torch.testing.assert_close(folded.latent, plain.latent, atol=1e-5, rtol=1e-5)


# --- noise ----------------------------------------------------------------------------------------


def test_noise_comes_from_the_requests_own_generator_step_by_step(bagel):
    settings = replace(NOISY, text_scale=1.0, image_scale=1.0)
    [drawn] = draw(Engine(bagel), requests(bagel, [0]), settings)
    generator = stream(7, 0, 0, "draw")
    torch.randn(6, 16, generator=generator)  # the first state
    for k in range(2):
        noise = torch.randn(6, 16, generator=generator)
        x, t, t_next = drawn.latents[k], drawn.times[k], drawn.times[k + 1]
        # the log-prob depends on the noise alone: -1/2 of its mean square
        assert drawn.logprobs[k].item() == pytest.approx(
            -noise.square().mean().item() / 2, abs=1e-4
        )
        # a step is linear in v, so v is known, and then the step is
        zero, one = (
            sde_step(x, torch.full_like(x, v), t, t_next, 0.7, noise).x_next for v in (0.0, 1.0)
        )
        v = (drawn.latents[k + 1] - zero) / (one - zero)
        assert v.abs().max() < 20
    assert drawn.times.tolist() == settings.times[1:4].tolist()


def test_noise_level_zero_draws_the_plain_picture(bagel):
    plain = draw(Engine(bagel), requests(bagel), GUIDED)
    zero = draw(Engine(bagel), requests(bagel), replace(NOISY, noise_level=0.0))
    for a, b in zip(plain, zero, strict=True):
        assert torch.equal(a.pixels, b.pixels)


def test_requests_of_one_batch_may_have_windows_of_their_own(bagel):
    own = [replace(NOISY, window=(0, 1)), replace(NOISY, window=(2, 2))]
    first, second = draw(Engine(bagel), requests(bagel, [0, 2]), own)
    assert (len(first.logprobs), len(second.logprobs)) == (1, 2)
    assert first.times.tolist() == NOISY.times[:2].tolist()
    assert second.times.tolist() == NOISY.times[2:5].tolist()


# --- progress and faults --------------------------------------------------------------------------


def test_progress_is_told_and_what_cannot_be_drawn_is_refused(bagel):
    told: list[tuple[int, int]] = []
    draw(Engine(bagel), requests(bagel, [0]), GUIDED, on_step=lambda *step: told.append(step))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert draw(Engine(bagel), [], GUIDED) == []
    [request] = requests(bagel, [0])
    with pytest.raises(UsageError, match="width 136 is not a size"):
        draw(Engine(bagel), [replace(request, size=(32, 136))], GUIDED)


def test_a_picture_that_is_not_finite_is_an_error(tmp_path):
    folder = write_tiny_checkpoint(tmp_path)
    broken = Bagel.from_pretrained(folder, device="cpu", dtype="float32")
    with torch.no_grad():
        broken.llm2vae.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        draw(Engine(broken), requests(broken, [0]), GUIDED)


# --- the trained nano model -----------------------------------------------------------------------


if (NANO / "ema.safetensors").is_file():

    def test_the_nano_model_gives_equal_words_verdicts_and_pictures_in_any_company():
        from eval.shapes import ShapesVerifier
        from umm_reflect.hub import profile as profile_of
        from umm_reflect.shapes.sets import build_sets

        model = Bagel.from_pretrained(str(NANO), device="cpu", dtype="float32")
        profile = profile_of(NANO)
        short = {name: replace(getattr(profile, name), points=9) for name in ("first", "edit")}
        profile = replace(profile, **short)
        rows = [entry.row for entry in build_sets().compound[:3]]

        def run(order):
            return run_episodes(
                BagelPolicy(model, profile),
                [rows[i]["prompt"] for i in order],
                max_rounds=1,
                max_tokens=profile.say.max_tokens,
                seed=3,
                samples=order,
            )

        together = run([0, 1, 2])
        assert run([2, 0, 1]) == [together[i] for i in (2, 0, 1)]
        verifier, pairs = ShapesVerifier(), []
        for i, expected in enumerate(together):
            [alone] = run([i])
            assert [t.text for t in alone.turns] == [t.text for t in expected.turns]
            assert alone.stop == expected.stop
            pairs += zip(alone.images, expected.images, strict=True)
            one, other = (
                verifier.score(t.images, [rows[i]] * len(t.images)) for t in (alone, expected)
            )
            assert [v.correct for v in one] == [v.correct for v in other]
        assert len(pairs) >= 3
        most, share = changed_pixels(pairs)
        assert most <= 1
        assert share <= 0.001


def test_requests_whose_keys_do_not_fit_are_drawn_in_parts_to_the_same_bits(bagel, monkeypatch):
    alone = [draw(Engine(bagel), [request], NOISY)[0] for request in requests(bagel)]
    llm = bagel.config.llm
    monkeypatch.setattr(umm_reflect.draw, "DRAW_BYTES", 1)
    assert fitting_parts(bagel.config, requests(bagel), 4) == [[0], [1], [2], [3]]
    seen = []
    parted = draw(Engine(bagel), requests(bagel), NOISY, on_step=lambda *at: seen.append(at))
    assert_equal_bits(parted, alone)
    assert seen == [(n // 4, 4) for n in range(1, 17)]
    # two branches of a picture of 2 x 3 cells between two marks
    empty = DrawRequest(Context(), Context(), None, (32, 48), stream(7, 0, 0, "draw"))
    token = 2 * llm.num_layers * llm.num_kv_heads * llm.head_dim * 4
    monkeypatch.setattr(umm_reflect.draw, "DRAW_BYTES", 4 * (2 * 3 + 2) * token)
    assert fitting_parts(bagel.config, [empty] * 5, 4) == [[0, 1], [2, 3], [4]]


def test_branches_of_a_kind_are_neighbours_so_that_siblings_make_one_group_a_branch(bagel):
    _, edit, *_ = ragged(bagel)
    request = DrawRequest(edit, edit.prefix(2), edit.texts_only(), (48, 48), stream(7, 0, 0, "x"))
    flow = Denoiser(Engine(bagel), [request] * 5, GUIDED)
    assert [(g.start, g.end) for g in flow.all_rows.attend.groups] == [(0, 5), (5, 10), (10, 15)]
    assert flow.row_of[3] == (3, 8, 13)
    assert flow.owner == [0, 1, 2, 3, 4] * 3


def test_long_rows_of_many_lengths_need_no_mask_on_a_gpu_and_short_ones_do(bagel):
    def groups(side: int) -> int:
        block = vae_block(None, (side, side), bagel.frame, 0, noised=True)
        rows = [Row((block,), past) for past in range(20)]
        return len(_plain_groups(rows, torch.device("cuda")))

    assert (groups(32), groups(8)) == (20, 0)  # pictures of 512² and of 128²


def test_stochastic_steps_of_one_kind_are_one_call(bagel, monkeypatch):
    """384 siblings would wait for 384 times thirty launches."""
    import umm_reflect.draw

    shapes = []

    def counted_step(x, *rest):
        shapes.append(tuple(x.shape))
        return sde_step(x, *rest)

    monkeypatch.setattr(umm_reflect.draw, "sde_step", counted_step)
    first, _, _, _ = ragged(bagel)
    sizes = [(32, 48), (32, 48), (48, 48), (32, 48)]
    asked = [
        DrawRequest(first, Context(), None, size, stream(7, i, 0, "draw"))
        for i, size in enumerate(sizes)
    ]
    windows = [replace(NOISY, window=window) for window in ((0, 2), (0, 2), (0, 2), (1, 2))]
    drawn = draw(Engine(bagel), asked, windows)
    channels = bagel.config.latent_dim
    assert shapes == [
        *((2, 6, channels), (1, 9, channels)),  # step 0
        *((3, 6, channels), (1, 9, channels)),
        (1, 6, channels),  # step 2: the last one's window alone
    ]
    assert [len(one.logprobs) for one in drawn] == [2, 2, 2, 2]
    assert drawn[3].latents.shape == (3, 6, channels)
