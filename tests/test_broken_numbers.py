"""Weights that are no numbers, devices without fp64: the sampling of text says so, or goes on."""

import pytest
import torch

from tests.tiny import write_tiny_checkpoint
from umm_reflect import Bagel
from umm_reflect import say as saying
from umm_reflect.cache import EMPTY


@pytest.fixture(scope="module")
def bagel(tmp_path_factory):
    return Bagel.from_pretrained(
        write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")), device="cpu", dtype="float32"
    )


def speak(bagel, **options):
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    return saying.say(
        bagel,
        [EMPTY, EMPTY],
        forced=[(3,), (4, 5)],
        max_tokens=6,
        generators=generators,
        **{"temperature": 1.0, "choices": {7: {8: {}}, 9: {}}, **options},
    )


@pytest.mark.parametrize("greedy", [False, True])
def test_logits_that_are_no_numbers_end_the_run_with_a_reason(bagel, greedy, monkeypatch):
    broken = bagel.logits
    monkeypatch.setattr(bagel, "logits", lambda hidden: broken(hidden) * torch.nan)
    with pytest.raises(FloatingPointError, match=r"no probability.*--dtype float32"):
        speak(bagel, greedy=greedy)


def test_a_choice_on_the_cpu_for_a_device_without_doubles_is_the_same_choice(bagel, monkeypatch):
    here = speak(bagel)
    monkeypatch.setattr(saying, "NO_DOUBLES", ("cpu",))
    assert speak(bagel) == here
    assert [said.sampled_ids[0] in (7, 9) for said in here] == [True, True]
