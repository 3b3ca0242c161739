"""The measured step of the full-size recipes, at the tiny shape: plan, phases, figures.

pytest tests/test_rl_full_size.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent import full_size as agent_full_size
from agent.clocks import Part
from rl import full_size
from rl.memory import plan_run
from rl.plan_step import KEEP_BYTES, Plan
from rl.replay_batches import _rows
from tests.tiny import write_tiny_checkpoint
from umm_reflect.config import BAGEL_7B_MOT
from umm_reflect.errors import UsageError
from umm_reflect.training.flops import Work


def test_few_words_beside_long_drawings_are_not_padded_to_as_many_again():
    # single images of 512²: four blocks of 1026, a short prompt
    found = list(_rows([(28, 4096), (22, 4096), (25, 4096)], 32768))
    assert [(len(rows), size) for rows, size in found] == [(3, (128, 4096))]
    found = list(_rows([(9000, 20000)], 32768))
    assert [size for _, size in found] == [(9216, 20480)]


# --- the program ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[list[str], Path]:
    """The words of a small run, and what it has written."""
    root = tmp_path_factory.mktemp("full size")
    words = ["--folder", str(root / "random"), "--output", str(root / "out.json"), "--shape"]
    words += ["tiny", "--tokenizer", str(write_tiny_checkpoint(root / "tokenizer"))]
    words += ["--size", "32", "--groups", "2", "--group-size", "4", "--rounds", "1"]
    words += ["--turn-tokens", "160", "--points", "12", "--device", "cpu"]
    assert full_size.main(words) == 0
    return words, root


def test_both_recipes_take_a_step_and_draw_what_was_planned(run):
    figures = json.loads((run[1] / "out.json").read_text())
    images = {"pickscore-lora": 2 * 4, "reflection": 2 + 2 * 4}
    for name, count in images.items():
        found = figures[name]
        assert (found["images"], found["plan"]["images"]) == (count, count)
        assert (found["trajectories"], found["plan"]["trajectories"]) == (8, 8)
        assert found["images_per_gpu_second"] == pytest.approx(count / found["all_seconds"])
    assert figures["pickscore-lora"]["updates"] == 2
    assert figures["reflection"]["updates"] == 1
    assert not list((run[1] / "out-reflection").glob("resume/*"))


def test_the_plan_is_what_the_step_then_took(run):
    """A group's share of reading and what the words condition on differ by the prompts alone."""
    for name in full_size.RECIPES:
        found = json.loads((run[1] / "out.json").read_text())[name]
        for phase in ("draw", "forward", "backward"):
            planned, took = found["plan"]["tflop"][phase], found["tflop"][phase]
            if phase == "draw":
                assert took == pytest.approx(planned, rel=0.1)
            else:  # padding and layers that run again are planned too
                assert took < planned * 1.1


def test_every_second_of_a_step_belongs_to_one_phase(run):
    for name in full_size.RECIPES:
        found = json.loads((run[1] / "out.json").read_text())[name]
        phases = {"rollout", "draw", "read", "decode", "judge", "credit", "update", "lay out"}
        phases |= {"compare", "forward", "backward", "step"}
        phases |= {"say"}
        assert set(found["seconds"]) == phases - ({"say"} if name == "pickscore-lora" else set())
        assert all(seconds >= 0 for seconds in found["seconds"].values())
        assert sum(found["seconds"].values()) == pytest.approx(found["all_seconds"])


def test_the_methods_are_as_they_were_afterwards(run):
    from rl.rollout import RolloutPolicy

    assert RolloutPolicy.say.__qualname__ == "RolloutPolicy.say"


def test_a_plan_alone_writes_no_weights_and_says_what_is_too_long(run, tmp_path, capsys):
    words = [*run[0], "--folder", str(tmp_path / "none"), "--output", str(tmp_path / "plan.json")]
    assert full_size.main([*words, "--plan-only", "--limit", "100"]) == 0
    said = capsys.readouterr().out
    assert "reflection: 8 trajectories, 10 images; to expect at 450 TFLOP/s:" in said
    assert "That is more than 100 s. --recipes pickscore-lora: 40 s; --recipes reflection: " in said
    assert not (tmp_path / "none").exists()
    assert set(json.loads((tmp_path / "plan.json").read_text())["reflection"]) == {"plan"}


def test_the_full_size_fits_into_a_gpu_of_130_gib():
    profile = agent_full_size.run_profile(agent_full_size.Config(Path("unused")))
    for view in ("local", "full"):
        for name in ("pickscore-lora", "reflection"):
            config = full_size.Config(Path("out.json"), edit_view=view)
            settings = full_size.settings_of(name, config, "unused")
            plans = plan_run(
                settings,
                BAGEL_7B_MOT,
                profile,
                Work(und=15_000, gen=21_000, scored=800, patches=5_000),
                strategy="none",
                world=1,
                bf16=True,
                keep_bytes=KEEP_BYTES,
            )
            assert 27 << 30 < plans["update"].total < 60 << 30
            assert 27 << 30 < plans["rollout"].total < 130 << 30


def test_a_phase_grows_with_its_own_operations():
    def plan(groups: int) -> Plan:
        tflop = {"draw": 10.0 * groups, "forward": 2.0 * groups}
        tflop |= {"compare": 3.0 * groups} if groups > 1 else {}
        return Plan(4 * groups, 4 * groups, tflop, {"say": 5.0 * groups}, {}, "")

    usual = {"say": 5.0, "draw": 20.0, "forward": 1.0, "judge": 0.5, "step": 0.25}
    figures = {"usual_seconds": usual, "updates": 1}
    found = full_size.extrapolated(figures, plan(1), plan(8), updates=2)
    by_phase = {"say": 40.0, "draw": 160.0, "forward": 8.0, "judge": 4.0, "step": 0.5}
    assert found["seconds_by_phase"] == {**by_phase, "compare": 12.0}
    assert found["images_per_gpu_second"] == pytest.approx(32 / 224.5)


def test_the_usual_seconds_leave_out_what_only_the_first_call_took():
    parts = [Part("forward", "update", s, s) for s in (9.0, 1.0, 1.1, 0.9)]
    parts += [Part("forward", "compare", 4.0, 4.0), Part("compare", "update", 5.0, 1.0)]
    found = full_size.summed_up(parts)
    assert found["seconds"] == {"forward": 12.0, "compare": 5.0}
    assert found["usual"]["forward"] == pytest.approx(4 * 1.05)
    assert found["usual"]["compare"] == 5.0


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="--groups is 0; give 1 or more"):
        full_size.Config(Path("x"), groups=0)
    with pytest.raises(UsageError, match="there is no recipe 'reflexion'"):
        full_size.Config(Path("x"), recipes=("reflexion",))
