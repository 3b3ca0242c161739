"""Random streams are told apart by their names and by nothing else.

python -m pytest tests/test_rng.py
"""

import torch

from umm_reflect.rng import stream, stream_seed


def test_the_seed_of_a_name_never_changes():
    # sha256 of '[0, 12, 1, "latent"]', first 8 bytes: a change here changes every picture.
    assert stream_seed(0, 12, 1, "latent") == 0xC69904B6DC49130B
    assert stream_seed(7, "official553_0001", 0, "say") == 0x0F30EE2D3E163036


def test_equal_names_give_equal_draws_whatever_was_drawn_before():
    first = torch.randn(5, generator=stream(3, 1, 0, "latent"))
    torch.randn(100)
    assert torch.equal(first, torch.randn(5, generator=stream(3, 1, 0, "latent")))


def test_every_part_of_the_name_counts():
    names = [
        (0, 1, 0, "latent"),
        (1, 1, 0, "latent"),
        (0, 2, 0, "latent"),
        (0, "1", 0, "latent"),
        (0, 1, 1, "latent"),
        (0, 1, 0, "say"),
        (0, 11, 0, "latent"),
        (0, 1, 10, "latent"),
    ]
    assert len({stream_seed(*name) for name in names}) == len(names)
    assert len({torch.rand((), generator=stream(*name)).item() for name in names}) == len(names)


def test_streams_are_on_the_cpu():
    assert stream(0, 0, 0, "latent").device.type == "cpu"


def test_two_streams_are_not_correlated():
    a = torch.randn(20_000, generator=stream(0, 0, 0, "latent"))
    b = torch.randn(20_000, generator=stream(0, 1, 0, "latent"))
    assert abs((a * b).mean().item()) < 0.03
