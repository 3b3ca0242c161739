"""The measured step of the full-size recipes, at the tiny shape: plan, phases, figures.

pytest tests/test_rl_full_size.py
"""

from __future__ import annotations

from rl.replay_batches import _rows


def test_few_words_beside_long_drawings_are_not_padded_to_as_many_again():
    # single images of 512²: four blocks of 1026, a short prompt
    found = list(_rows([(28, 4096), (22, 4096), (25, 4096)], 32768))
    assert [(len(rows), size) for rows, size in found] == [(3, (128, 4096))]
    found = list(_rows([(9000, 20000)], 32768))
    assert [size for _, size in found] == [(9216, 20480)]
