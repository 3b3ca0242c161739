"""What may be asked of the sampler, which steps are noisy, and where noise windows start.

python -m pytest tests/test_draw_settings.py
"""

import math

import pytest
import torch

from umm_reflect.flow import DrawSettings, released_window_start, sample_window_start


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": 1}, "points is 1; give at least 2"),
        ({"points": 0}, "points is 0; give at least 2"),
        ({"timestep_shift": 0.0}, "timestep_shift is 0.0; give a number above 0"),
        ({"text_scale": -1.0}, "text_scale is -1.0; give 0 or more"),
        ({"image_scale": math.nan}, "image_scale is nan"),
        ({"interval": (0.9, 0.4)}, "interval is"),
        ({"renorm": "local"}, "renorm is 'local'; choose one of global, channel, text_channel"),
        ({"renorm_min": 2.0}, "renorm_min is 2.0"),
        ({"step_kind": "euler"}, "step_kind is 'euler'; choose one of ode, sde, cps"),
        ({"sigma": "big"}, "sigma is 'big'; choose one of second_point, capped, constant"),
        ({"noise_level": 0.7}, "'ode', which adds no noise"),
        ({"noise_level": -0.7, "step_kind": "sde"}, "noise_level is -0.7"),
        ({"noise_level": 1.5, "step_kind": "cps"}, "'cps' takes 0 to 1"),
        ({"window": (-1, 2)}, "window is"),
        ({"points": 20, "window": (18, 2)}, "20 points have the steps 0 to 18"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_they_are_made(change, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        DrawSettings(**change)


def test_only_the_window_is_stochastic_and_the_last_step_never_without_one():
    windowed = DrawSettings(points=6, noise_level=0.8, window=(1, 2), step_kind="sde")
    assert [windowed.stochastic(i) for i in range(5)] == [False, True, True, False, False]
    everywhere = DrawSettings(points=6, noise_level=0.8, step_kind="sde")
    assert [everywhere.stochastic(i) for i in range(5)] == [True, True, True, True, False]
    assert not any(DrawSettings(points=6, window=(1, 2)).stochastic(i) for i in range(5))


@pytest.mark.parametrize(
    ("identity", "window_range", "start"),
    [
        ((20260830, 0, 0, 0), (0, 25), 8),
        ((20260830, 0, 0, 1), (0, 25), 21),
        ((20260830, 500, 0, 0), (0, 25), 14),
        ((20260830, 1, 0, 0), (0, 10), 0),
        ((20260830, 1, 31, 2), (0, 10), 5),
        (None, (0, 25), 12),
        (None, (0, 10), 6),
    ],
)
def test_released_windows_start_where_they_were_published(identity, window_range, start):
    assert released_window_start(identity, window_range) == start


def test_our_own_windows_are_uniform_over_all_that_fit():
    generator = torch.Generator().manual_seed(0)
    starts = [sample_window_start((2, 7), 2, generator) for _ in range(400)]
    assert set(starts) == {2, 3, 4, 5}
    with pytest.raises(ValueError, match="a window of 3 steps does not fit the range"):
        sample_window_start((0, 2), 3, generator)
