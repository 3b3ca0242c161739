"""The watch over a run: which numbers raise which alarm, and when a run goes back.

python -m pytest tests/test_rl_watch.py
"""

import json
import math

import numpy as np
import pytest
from PIL import Image

from rl.watch import SIGNALS, Best, Limit, Watch, WatchSettings, picture_signals

# Every step by itself, and at once: three steps in a row outside go back.
SHARP = {"smoothing": 1, "start": 1, "patience": 3}


def watch(**changes):
    return Watch(WatchSettings(**(SHARP | changes)))


def feed(watch, signal, values, first=0):
    return [watch.see(first + i, {signal: value}) for i, value in enumerate(values)]


# --- alarms ---------------------------------------------------------------------------------------


def test_a_healthy_run_raises_no_alarm():
    healthy = {
        "entropy": 0.4,
        "format": 0.99,
        "velocity_ratio": 1.05,
        "saturation": 0.5,
        "clipped": 0.1,
        "edges": 0.05,
        "diversity": 0.2,
        "clip_fraction": 0.3,
        "kl": 0.01,
        "flow_kl": 0.001,
        "flat": 0.2,
        "grad_norm": 0.3,
        "reward": 0.6,
    }
    assert set(healthy) == set(SIGNALS)
    over = Watch(WatchSettings())
    assert all(not over.see(step, healthy).alarms for step in range(20))


def test_an_alarm_says_the_signal_its_value_and_the_limit():
    [alarm] = watch().see(4, {"format": 0.7}).alarms
    assert (alarm.signal, alarm.value, alarm.step) == ("format", 0.7, 4)
    assert alarm.reason == "format: 0.7 is below 0.9"
    assert alarm.to_record() == {
        "signal": "format",
        "value": 0.7,
        "reason": "format: 0.7 is below 0.9",
        "steps": 1,
    }


def test_one_bad_step_is_smoothed_away():
    over = Watch(WatchSettings(smoothing=5))
    reports = feed(over, "format", [1.0, 1.0, 0.6, 1.0, 1.0, 1.0, 1.0])
    assert not any(report.alarms for report in reports)
    reports = feed(over, "format", [0.6, 0.6])
    assert [len(report.alarms) for report in reports] == [0, 1]  # means 0.92, 0.84
    assert reports[1].alarms[0].reason == "format: 0.84 is below 0.9 (mean of 5 steps)"


@pytest.mark.parametrize(
    ("signal", "healthy", "sick", "words"),
    [
        ("entropy", 0.5, 0.001, "below 0.05 x its start 0.5"),
        ("entropy", 0.5, 2.5, "above 4 x its start 0.5"),
        ("format", 1.0, 0.5, "below 0.9"),
        ("velocity_ratio", 1.0, 1.3, "above 1.2"),
        ("velocity_ratio", 1.0, 0.7, "below 0.8"),
        ("saturation", 0.4, 0.02, "below 0.3 x its start 0.4"),
        ("clipped", 0.05, 0.9, "above 3 x its start 0.05"),
        ("edges", 0.05, 0.0, "below 0.3 x its start 0.05"),
        ("edges", 0.05, 0.3, "above 3 x its start 0.05"),
        ("diversity", 0.2, 0.01, "below 0.3 x its start 0.2"),
        ("clip_fraction", 0.1, 0.95, "above 0.9"),
        ("kl", 0.01, 0.6, "above 0.5"),
        ("flow_kl", 0.01, 0.6, "above 0.5"),
        ("flat", 0.1, 1.0, "above 0.98"),
        ("grad_norm", 0.5, 0.0, "below 1e-12"),
        ("reward", 0.8, 0.4, "more than 0.3 below its best 0.8"),
    ],
)
def test_each_signal_has_its_alarm(signal, healthy, sick, words):
    over = watch()
    assert not over.see(0, {signal: healthy}).alarms
    [alarm] = over.see(1, {signal: sick}).alarms
    assert alarm.reason == f"{signal}: {sick:.3g} is {words}"


def test_a_share_that_starts_at_zero_may_move_within_its_margin():
    over = watch()
    reports = feed(over, "clipped", [0.0, 0.19, 0.21])
    assert [len(report.alarms) for report in reports] == [0, 0, 1]


def test_nothing_is_compared_with_a_start_that_is_not_known_yet():
    over = watch(start=3)
    reports = feed(over, "entropy", [9.0, 0.0, 0.0, 0.0])  # a start of 3
    assert [len(report.alarms) for report in reports] == [0, 0, 1, 1]


def test_what_was_not_measured_raises_nothing():
    over = watch()
    assert over.see(0, {"entropy": None}) == over.see(1, {})


def test_a_signal_that_no_rule_knows_is_refused():
    with pytest.raises(ValueError, match=r"no rule knows entropie; signals: entropy, format"):
        watch().see(0, {"entropie": 0.1})


# --- going back -----------------------------------------------------------------------------------


def test_three_bad_steps_go_back_to_the_best_checkpoint():
    over = watch()
    assert over.evaluated(10, "step-10", 0.6)
    assert over.evaluated(20, "step-20", 0.7)
    assert not over.evaluated(30, "step-30", 0.65)
    assert not over.evaluated(30, "equal", 0.7)
    assert over.best == Best("step-20", 20, 0.7)
    reports = feed(over, "format", [0.5, 0.5, 0.5], first=31)
    assert [report.back_to for report in reports] == [None, None, "step-20"]
    assert reports[2].stop is None
    assert over.returns == 1


def test_bad_steps_that_are_not_in_a_row_do_not_go_back():
    over = watch()
    over.evaluated(0, "start", 0.5)
    assert not any(r.back_to for r in feed(over, "format", [0.5, 0.5, 1.0, 0.5, 0.5, 1.0]))


def test_an_alarm_that_only_warns_never_goes_back():
    over = watch()
    over.evaluated(0, "start", 0.5)
    reports = feed(over, "flat", [1.0] * 10)
    assert [len(report.alarms) for report in reports] == [1] * 10
    assert not any(report.back_to or report.stop for report in reports)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_goes_back_at_once(value):
    over = watch()
    over.evaluated(0, "start", 0.5)
    report = over.see(7, {"kl": value})
    assert report.back_to == "start"
    assert report.alarms[0].reason == f"kl: {value} is no number"
    assert report.alarms[0].to_record()["value"] is None


def test_a_held_out_metric_that_falls_goes_back():
    over = watch()
    over.evaluated(10, "step-10", 0.7)
    over.evaluated(20, "step-20", 0.62)
    assert not over.see(21, {}).alarms
    over.evaluated(30, "step-30", 0.55)
    report = over.see(31, {})
    assert report.back_to == "step-10"
    assert report.alarms[0].reason == "held out: 0.55 is more than 0.1 below 0.7 of step-10"
    assert not over.see(32, {}).alarms


def test_without_a_checkpoint_to_go_back_to_the_run_stops_and_says_why():
    report = feed(watch(), "format", [0.5] * 3)[-1]
    assert report.back_to is None
    assert report.stop == (
        "collapse at step 2, with no evaluated checkpoint to go back to: format: 0.5 is below 0.9"
    )


def test_a_run_that_collapses_again_and_again_stops():
    over = watch(max_returns=1)
    over.evaluated(0, "start", 0.5)
    assert feed(over, "format", [0.5] * 3)[-1].back_to == "start"
    report = feed(over, "format", [0.5] * 3, first=3)[-1]
    assert report.stop.startswith("collapse at step 5 after 1 returns to earlier checkpoints")
    assert "The best one is start; try a lower learning rate" in report.stop


def test_after_a_return_the_run_has_its_patience_again_but_the_start_stays():
    over = watch()
    over.evaluated(0, "start", 0.5)
    reports = feed(over, "edges", [0.05, 0.9, 0.9, 0.9, 0.9, 0.9])
    assert [report.back_to for report in reports] == [None, None, None, "start", None, None]
    assert "x its start 0.05" in reports[-1].alarms[0].reason


def test_a_reward_that_was_hacked_is_no_measure_after_a_return():
    over = watch()
    over.evaluated(0, "start", 0.5)
    reports = feed(over, "reward", [0.5, 0.95, 0.1, 0.1, 0.1])
    assert reports[-1].back_to == "start"
    assert not any(report.alarms for report in feed(over, "reward", [0.5] * 5, first=5))


# --- resume ---------------------------------------------------------------------------------------


def test_a_resumed_watch_decides_as_one_that_never_stopped():
    rng = np.random.default_rng(0)
    steps = [
        {"format": float(f), "edges": float(e), "reward": float(r)}
        for f, e, r in zip(
            rng.uniform(0.7, 1, 60), rng.uniform(0, 0.3, 60), rng.uniform(0, 1, 60), strict=True
        )
    ]
    settings = WatchSettings(smoothing=2, start=2, patience=2, max_returns=9)
    straight, resumed = Watch(settings), Watch(settings)
    wanted, found = [], []
    for step, signals in enumerate(steps):
        for over in (straight, resumed):
            if step % 7 == 0:
                over.evaluated(step, f"step-{step}", signals["reward"])
        resumed = Watch(settings, json.loads(json.dumps(resumed.state())))
        wanted.append(straight.see(step, signals))
        found.append(resumed.see(step, signals))
    assert found == wanted
    assert sum(report.back_to is not None for report in wanted) > 1
    assert resumed.state() == straight.state()


def test_a_state_of_other_signals_is_refused():
    state = watch().state()
    del state["signals"]["kl"]
    with pytest.raises(ValueError, match="the saved watch knows other signals: kl"):
        Watch(WatchSettings(), state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WatchSettings(patience=0), "watch patience is 0; give at least 1"),
        (lambda: WatchSettings(reward_drop=0.0), "reward_drop is 0.0; give a number above 0"),
        (lambda: WatchSettings(max_returns=-1), "max_returns is -1"),
        (lambda: Limit(2.0, 1.0), "from 2.0 to 1.0 leaves nothing between"),
        (lambda: Limit(math.nan), "must be finite"),
        (lambda: watch().evaluated(0, "start", math.nan), "held-out metric of start is nan"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- pictures -------------------------------------------------------------------------------------


def picture(array):
    return Image.fromarray(np.asarray(array, dtype=np.uint8))


def test_blank_pictures_are_clipped_without_edges_and_all_alike():
    white = picture(np.full((16, 16, 3), 255))
    assert picture_signals([white, white]) == {
        "saturation": 0.0,
        "clipped": 1.0,
        "edges": 0.0,
        "diversity": 0.0,
    }


def test_colour_grids_and_differences_between_pictures_are_measured():
    red, black = np.zeros((16, 16, 3)), np.zeros((16, 16, 3))
    red[..., 0] = 200
    found = picture_signals([picture(red), picture(black)])
    assert found["saturation"] == 0.5
    assert found["clipped"] == 0.5
    assert found["diversity"] == pytest.approx(200 / 255 / 2 / 3, abs=1e-6)
    columns = np.zeros((16, 16, 3))
    columns[:, ::2] = 255
    assert picture_signals([picture(columns)])["edges"] == pytest.approx(0.5)  # of 1 and 0
    assert picture_signals([]) == {}


def test_noise_has_more_edges_than_a_smooth_picture():
    ramp = np.repeat(np.arange(0, 256, 4, dtype=np.uint8)[None, :, None], 64, 0).repeat(3, 2)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3))
    smooth, rough = (picture_signals([picture(a)])["edges"] for a in (ramp, noise))
    assert rough > 5 * smooth > 0
