"""The plan of a run: worked examples of packs, shares of kinds, passes, and steps in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from sft.mixture import (
    PRESETS,
    Coverage,
    Drawn,
    Dropout,
    KindCoverage,
    Measured,
    Mixture,
    Pack,
    Sampler,
    pack_once,
    share,
)
from umm_reflect.errors import UserError


def sampler(mixture: Mixture, tokens: dict[str, list[int]], seed: int = 0, packs: int = 4):
    return Sampler(mixture, Measured({k: np.array(t) for k, t in tokens.items()}), seed, packs)


def random_lengths(seed: int = 0, **counts: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(seed)
    return {kind: rng.integers(5, 60, n).tolist() for kind, n in counts.items()}


def small(**changes) -> Mixture:
    """A mixture in tens of tokens."""
    base = Mixture(
        weights={"controller": 1, "transition": 1, "anchor": 1},
        expected_tokens=9,
        max_tokens=10,
        max_sample_tokens=10,
    )
    return replace(base, **changes)


def names(packs: list[Pack]) -> list[list[tuple[str, int]]]:
    return [[(d.kind[0], d.number) for d in pack] for pack in packs]


THREE = {"controller": [6], "transition": [5], "anchor": [3]}


# --- packs ----------------------------------------------------------------------------------------


def test_rows_go_best_fit_into_open_packs():
    # 6 opens a pack, 5 another; 3 completes the fuller one, the next 6 opens one, the 5 completes
    packs = sampler(small(), THREE).step(0)
    assert names(packs) == [
        [("c", 0), ("a", 2)],
        [("t", 1), ("t", 4)],
        [("c", 3), ("a", 5)],
        [("c", 6), ("a", 8)],
    ]
    assert packs[1][1] == Drawn("transition", 0, 4, 5)


def test_a_pack_that_nothing_completes_is_closed_after_the_look_ahead():
    packs = sampler(small(weights={"controller": 1}, look_ahead=2), {"controller": [6]}).step(0)
    assert names(packs) == [[("c", 0)], [("c", 1)], [("c", 2)], [("c", 3)]]


def test_every_pack_gets_one_more_row_of_the_kind_that_it_must_hold():
    mixture = small(weights={"transition": 1}, every_pack="controller", max_tokens=12)
    packs = sampler(mixture, {"controller": [4], "transition": [3]}).step(0)
    # opened for a transition (number 0), the controller (1) goes first; one more makes 10
    assert names(packs)[:2] == [[("c", 1), ("t", 0), ("t", 2)], [("c", 4), ("t", 3), ("t", 5)]]


def test_where_the_extra_row_leaves_no_room_both_have_packs_of_their_own():
    mixture = small(weights={"transition": 1}, every_pack="controller")
    packs = sampler(mixture, {"controller": [9], "transition": [10]}).step(0)
    assert names(packs) == [[("c", 1)], [("t", 0)], [("c", 3)], [("t", 2)]]


RANDOM = {"controller": 70, "transition": 110, "verifier": 90, "penultimate": 40, "anchor": 7}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("every", [None, "controller"])
def test_no_row_that_was_drawn_is_lost_and_no_pack_overflows(seed, every):
    weights = {"controller": 4, "transition": 4, "verifier": 4, "penultimate": 1, "anchor": 1}
    mixture = Mixture(weights, "samples", False, every, 100, 120, 70, look_ahead=20)
    packs = list(islice(sampler(mixture, random_lengths(seed, **RANDOM), seed).plan(), 900))
    numbers = sorted(d.number for pack in packs for d in pack)
    last = numbers[-1]
    assert len(set(numbers)) == len(numbers)
    # all but the youngest, which wait in open packs for at most the look-ahead (and its extras)
    settled = [n for n in numbers if n < last - 25]
    assert settled == list(range(len(settled)))
    assert len(settled) > 2000
    assert all(sum(d.tokens for d in pack) <= 120 for pack in packs)
    if every:  # two of the longest rows fit in one pack here
        assert all(any(d.kind == every for d in pack) for pack in packs)


def test_packs_are_nearly_full():
    tokens = random_lengths(**RANDOM)
    mixture = replace(
        PRESETS["ours"], expected_tokens=97, max_tokens=100, max_sample_tokens=100, look_ahead=64
    )
    packs = list(islice(sampler(mixture, tokens).plan(), 1000))
    assert sum(d.tokens for pack in packs for d in pack) > 0.96 * 100 * 1000


def test_rows_for_validation_are_each_packed_once():
    tokens = {k: np.array(v) for k, v in random_lengths(**RANDOM).items()}
    tokens["controller"][3], tokens["anchor"][0] = 0, 101
    mixture = Mixture({"controller": 1, "anchor": 1}, "rows", False, None, 90, 100, 100)
    packs = pack_once(Measured(tokens), mixture)
    rows = Counter((d.kind, d.index) for pack in packs for d in pack)
    assert set(rows.values()) == {1}
    assert len(rows) == 70 + 7 - 2
    assert all(sum(d.tokens for d in pack) <= 100 for pack in packs)
    assert sorted(d.number for pack in packs for d in pack) == list(range(75))


# --- shares of kinds ------------------------------------------------------------------------------


def drawn(mixture: Mixture, tokens, count: int, seed: int = 0) -> list[Drawn]:
    """The first `count` rows of the plan, in the order in which they were drawn."""
    rows = []
    for pack in sampler(mixture, tokens, seed).plan():
        rows += pack
        if len(rows) > count + 200:
            return sorted(rows, key=lambda d: d.number)[:count]
    raise AssertionError


def wide(**changes) -> Mixture:
    return small(expected_tokens=90, max_tokens=100, max_sample_tokens=100, **changes)


LENGTHS = {"controller": [20] * 30, "transition": [10] * 60, "anchor": [5] * 3}


def test_proportions_of_samples_are_exact():
    weights = {"controller": 4, "transition": 3, "anchor": 1}
    rows = drawn(wide(weights=weights), LENGTHS, 800)
    assert Counter(d.kind for d in rows) == {"controller": 400, "transition": 300, "anchor": 100}
    first = Counter(d.kind for d in rows[:8])  # and evenly spread
    assert first == {"controller": 4, "transition": 3, "anchor": 1}


def test_a_rare_kind_comes_in_the_middle_of_its_stretch():
    rows = drawn(wide(weights={"controller": 9, "anchor": 1}), LENGTHS, 40)
    assert [d.number for d in rows if d.kind == "anchor"] == [5, 15, 25, 35]


def test_proportions_of_tokens_are_exact():
    weights = {"controller": 2, "transition": 1, "anchor": 1}
    rows = drawn(wide(weights=weights, by="tokens"), LENGTHS, 400)
    # 2/20 : 1/10 : 1/5 samples
    assert Counter(d.kind for d in rows) == {"controller": 100, "transition": 100, "anchor": 200}
    tokens = Counter()
    for d in rows:
        tokens[d.kind] += d.tokens
    assert tokens == {"controller": 2000, "transition": 1000, "anchor": 1000}


def test_proportions_of_rows_are_passes_and_one_pass_holds_every_row_once():
    rows = drawn(wide(by="rows"), LENGTHS, 93)
    assert len({(d.kind, d.index) for d in rows}) == 93
    rows = drawn(wide(by="rows", weights={"controller": 1, "transition": 2}), LENGTHS, 150)
    assert Counter(d.kind for d in rows) == {"controller": 30, "transition": 120}


def test_each_pass_holds_every_row_once_in_another_order():
    rows = [d.index for d in drawn(wide(weights={"transition": 1}), LENGTHS, 180)]
    passes = [rows[:60], rows[60:120], rows[120:]]
    assert all(sorted(one) == list(range(60)) for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    other = [d.index for d in drawn(wide(weights={"transition": 1}), LENGTHS, 60, seed=1)]
    assert sorted(other) == list(range(60))
    assert other != passes[0]


def test_with_replacement_rows_come_up_by_chance():
    rows = drawn(wide(weights={"transition": 1}, replacement=True), LENGTHS, 6000)
    first = [d.index for d in rows[:60]]
    assert 25 < len(set(first)) < 50  # about 60 (1 - 1/e) = 38
    often = Counter(d.index for d in rows)
    assert len(often) == 60
    assert max(often.values()) < 150


# --- steps ----------------------------------------------------------------------------------------


def fresh(seed: int = 0, packs: int = 6) -> Sampler:
    mixture = replace(
        PRESETS["release"], expected_tokens=85, max_tokens=100, max_sample_tokens=70, look_ahead=9
    )
    return sampler(mixture, random_lengths(**RANDOM), seed, packs)


def test_a_step_is_the_same_whichever_steps_came_before():
    through = fresh()
    steps = [through.step(k) for k in range(40)]
    assert [len(packs) for packs in steps] == [6] * 40
    for number in (39, 0, 17, 17, 18):
        assert fresh().step(number) == steps[number]
        assert through.step(number) == steps[number]
    assert fresh(seed=1).step(3) != steps[3]


def test_any_number_of_processes_shares_the_same_packs():
    packs = fresh().step(5)
    for world in (1, 2, 3, 4, 6, 8):
        parts = [share(packs, rank, world) for rank in range(world)]
        assert sorted((p for part in parts for p in part), key=packs.index) == packs
    assert [len(share(packs, rank, 4)) for rank in range(4)] == [2, 2, 1, 1]
    with pytest.raises(ValueError, match="rank is 2 of 2 processes; give 0 to 1"):
        share(packs, 2, 2)


def test_the_number_of_packs_a_step_only_cuts_the_plan_elsewhere():
    one = [pack for k in range(12) for pack in fresh(packs=2).step(k)]
    assert one == [pack for k in range(3) for pack in fresh(packs=8).step(k)]


def test_a_fingerprint_changes_with_what_the_plan_depends_on():
    here = fresh().fingerprint()
    assert len(here) == 16
    assert here == fresh().fingerprint()
    assert here != fresh(seed=1).fingerprint()
    assert here != fresh(packs=7).fingerprint()
    longer = random_lengths(**RANDOM)
    longer["anchor"][2] += 1
    assert here != sampler(fresh().mixture, longer, packs=6).fingerprint()
    other = replace(fresh().mixture, dropout=Dropout())
    assert here != sampler(other, random_lengths(**RANDOM), packs=6).fingerprint()


def test_steps_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="step is -1; give 0 or more"):
        fresh().step(-1)
    with pytest.raises(ValueError, match="packs_per_step is 0; give 1 or more"):
        fresh(packs=0)


# --- what is left out -----------------------------------------------------------------------------


def test_rows_that_no_pack_may_hold_are_left_out_and_counted_by_reason():
    measured = Measured(
        {"controller": np.array([4, 11, 0, 10]), "anchor": np.array([12])},
        {"controller": Counter({"image_missing": 1})},
    )
    plan = Sampler(small(), measured, 0, 50)
    assert plan.skipped == {
        "controller": {"image_missing": 1, "longer than max_sample_tokens": 1},
        "anchor": {"longer than max_sample_tokens": 1},
    }
    assert plan.empty == ("transition", "anchor")
    assert {d.index for pack in plan.step(0) for d in pack} == {0, 3}
    with pytest.raises(UserError, match="no row of transition, anchor can be used"):
        Sampler(small(weights={"transition": 1, "anchor": 1}), measured, 0, 1)


def test_coverage_is_counted_kind_by_kind():
    coverage = sampler(small(), THREE, packs=3).coverage(1)
    assert coverage.packs == 3
    assert coverage.kinds == {
        "controller": KindCoverage(1, 2, 12, 1, {}),
        "transition": KindCoverage(1, 2, 10, 1, {}),
        "anchor": KindCoverage(1, 2, 6, 1, {}),
    }
    packs = [(Drawn("anchor", 1, 0, 5), Drawn("anchor", 1, 1, 5))]
    counted = Coverage.of(packs, {"anchor": 4, "whole": 0}, {"anchor": {"image_hash": 2}})
    assert list(counted.lines()) == [
        "anchor: 2 samples (100.0%), 10 tokens (100.0%), 0.50 passes over 4 rows, 3 never seen; "
        "left out: 2 image_hash",
        "whole: 0 samples (0.0%), 0 tokens (0.0%), 0.00 passes over 0 rows, 0 never seen",
        "1 packs of 10 tokens and 2.00 samples on average",
    ]


def test_the_published_mixture_covers_the_kinds_as_the_published_packer_does():
    # a tenth of the published rows, with plausible lengths at 1024 px; all in tens of tokens
    rng = np.random.default_rng(0)
    images = rng.choice([1, 2, 3], 2953, p=[0.31, 0.42, 0.27])
    running = (150 + images * 530).tolist()
    tokens = {
        "controller": running,
        "transition": rng.choice([450, 930], 5802, p=[0.26, 0.74]).tolist(),
        "verifier": (rng.choice([1, 2], 5802) * 500 + 150).tolist(),
        "penultimate": (rng.choice([1, 2], 2053) * 500 + 150).tolist(),
        "anchor": [412] * 127,
    }
    mixture = replace(
        PRESETS["release"], expected_tokens=3277, max_tokens=4096, max_sample_tokens=2867
    )
    coverage = sampler(mixture, tokens, packs=16).coverage(297)
    shares = {kind: c.samples / coverage.samples for kind, c in coverage.kinds.items()}
    # from the facts: .49, .20, .20, .05, .05, with 3.4 to 3.5 samples a pack
    assert shares["controller"] == pytest.approx(0.49, abs=0.03)
    assert shares["transition"] == pytest.approx(0.20, abs=0.02)
    assert shares["verifier"] == pytest.approx(0.20, abs=0.02)
    assert shares["penultimate"] == pytest.approx(0.05, abs=0.01)
    assert coverage.samples / coverage.packs == pytest.approx(3.5, abs=0.4)


# --- settings -------------------------------------------------------------------------------------


def test_the_presets_are_the_published_settings_and_ours():
    release, ours = PRESETS["release"], PRESETS["ours"]
    assert dict(release.weights) == {
        "controller": 4,
        "transition": 4,
        "verifier": 4,
        "penultimate": 1,
        "anchor": 1,
    }
    caps = (release.expected_tokens, release.max_tokens, release.max_sample_tokens)
    assert caps == (32_768, 40_960, 28_672)
    assert (release.by, release.every_pack) == ("samples", "controller")
    assert release.dropout == Dropout(text=0.1, vit=0.3, vae=0.3)
    assert (release.condition_latents, ours.condition_latents) == ("sampled", "mean")
    assert not ours.dropout.independent
    assert ours.dropout.text_uncond > 0
    assert ours.dropout.image_uncond > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"rows": 1}}, "unknown kind 'rows'; choose from controller"),
        ({"every_pack": "pairs"}, "unknown kind 'pairs'; choose from"),
        ({"weights": {"anchor": -1}}, r"the weight of anchor is -1; give 0"),
        ({"weights": {"anchor": float("nan")}}, r"the weight of anchor is nan"),
        ({"weights": {"anchor": 0}}, "a mixture needs a kind with a weight above 0"),
        ({"by": "steps"}, "by is 'steps'; choose one of rows, samples, tokens"),
        ({"condition_latents": "mode"}, "condition_latents is 'mode'; choose one of mean, sampled"),
        ({"expected_tokens": 11}, "expected_tokens is 11 and max_tokens 10"),
        ({"max_sample_tokens": 11}, r"max_sample_tokens is 11; give 1 to max_tokens \(10\)"),
        ({"look_ahead": -1}, "look_ahead is -1"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_to_give(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text": 1.1}, "dropout text is 1.1; give a probability from 0 to 1"),
        ({"text_uncond": 0.6, "image_uncond": 0.6}, "give at most 1 together"),
        ({"vae": 0.3, "text_uncond": 0.1}, "not both"),
    ],
)
def test_dropout_that_cannot_be_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Dropout(**values)
