"""The weight of every token of a turn, against the published table and our own."""

from __future__ import annotations

import math
from itertools import groupby

import pytest

from agent.protocol import canonical
from agent.types import Reflection
from sft.weights import weighted_ids
from tests.letters import LETTERS
from tests.tiny import train_tokenizer
from umm_reflect.tokens import Tokens

EDIT = canonical(Reflection("A é red,\none.", 4, "edit", "Add it."), 0, "Image #0")
DONE = canonical(Reflection("Right.", 10, "done", ""), 1, "Image #1")


def runs(text: str, weighting: str, scale: float = 1.0) -> list[tuple[str, float]]:
    """Runs of equal weight, as text, with the end token last."""
    ids, weights = weighted_ids(LETTERS, text, weighting)
    assert LETTERS.decode(ids) == text
    pairs = zip((*ids, LETTERS.end), (round(w * scale, 6) for w in weights), strict=True)
    grouped = groupby(pairs, key=lambda pair: pair[1])
    return [(LETTERS.decode([i for i, _ in run]), weight) for weight, run in grouped]


def test_the_published_weights_of_an_edit_turn_token_by_token():
    scale = math.sqrt(len(EDIT.encode()) + 1)
    assert runs(EDIT, "release", scale) == [
        ("<think>", 2),
        ("\n", 1),
        ("[CURRENT_ROUND]", 2),
        (" Round#0\n", 1),
        ("[SCORE]", 2),
        (" 4/10\n", 1),
        ("[ACTION]", 2),
        (" ", 1),
        ("edit", 3),
        ("\n", 1),
        ("[THINKING]", 2),
        (" A é red,\none.\n", 1),
        ("[SOURCE_IMAGE]", 2),
        (" ", 1),
        ("Image #0", 2),
        ("\n", 1),
        ("</think>\n", 2),
        ("[EDIT]", 3),
        (" ", 1),
        ("A", 3),
        ("dd it.", 2),
        ("<|im_end|>", 1),
    ]


def test_the_none_of_a_done_turn_weighs_one():
    scale = math.sqrt(len(DONE) + 1)
    assert runs(DONE, "release", scale)[-5:] == [
        ("Image #1", 2),
        ("\n", 1),
        ("</think>\n", 2),
        ("[EDIT]", 3),
        (" None<|im_end|>", 1),
    ]


def test_a_token_counts_for_the_heaviest_span_that_it_touches():
    tokens = Tokens(train_tokenizer())
    text = canonical(Reflection("One.", 4, "edit", "the sky."), 0, "Image #0")
    ids, weights = weighted_ids(tokens, text, "release")
    scale = math.sqrt(len(ids) + 1)
    named = [
        (tokens.decode([i]), round(w * scale, 6)) for i, w in zip(ids, weights[:-1], strict=True)
    ]
    said = ["".join(token for token, _ in named[:k]) for k in range(len(named))]
    first = next(k for k, before in enumerate(said) if before.endswith("[EDIT]"))
    assert named[first] == (" the", 3)  # its blank is not part of the edit
    assert named[first + 1] == (" sky", 2)


def test_our_own_weights_leave_out_what_the_loop_writes():
    assert runs(EDIT, "ours")[:3] == [
        ("<think>\n[CURRENT_ROUND] Round#0\n[SCORE] ", 0),
        ("4/10\n[ACTION] edit", 4),
        (
            "\n[THINKING] A é red,\none.\n[SOURCE_IMAGE] Image #0\n</think>\n[EDIT] Add it."
            "<|im_end|>",
            1,
        ),
    ]
    with pytest.raises(ValueError, match="unknown weighting 'plain'; choose from release, ours"):
        weighted_ids(LETTERS, EDIT, "plain")
