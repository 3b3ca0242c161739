"""A trajectory survives the disk, whole or not at all, and its PNGs tell how they were made."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from agent import story, trace
from agent.loop import run_episodes
from agent.policy import ScriptedPolicy
from agent.types import Reflection
from umm_reflect.errors import UserError

WRONG = Reflection("One circle is missing.\nThe rest — “all” — is right.", 4, "edit", "Add one.")
RIGHT = Reflection("All is there.", 10, "done", "")
JUNK = "4/10\nno \x07 \ufffd form"
ABOUT = trace.About("pretrained/nano", "ab" * 32, settings={"steps": 12, "prompts_file": None})


def noise(number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (32, 48, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def run(script, layout="rl", source=None, edit_view="local"):
    policy = ScriptedPolicy(
        script, lambda ask: noise(ask.number), layout=layout, edit_view=edit_view, system_prompt="s"
    )
    [trajectory] = run_episodes(
        policy, ["two red circles"], max_rounds=3, sources=[source], seed=7, samples=["row 3"]
    )
    return policy, trajectory


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ([RIGHT], {}),
        ([WRONG, RIGHT], {}),
        ([JUNK, WRONG, JUNK, JUNK], {}),
        ([WRONG, RIGHT], {"source": noise(99)}),
        ([WRONG, RIGHT, RIGHT], {"layout": "sft"}),
        ([JUNK, JUNK], {"layout": "sft"}),
    ],
)
def test_what_is_saved_loads_back_equal(tmp_path, script, options):
    _, trajectory = run(script, **options)
    trace.save(trajectory, tmp_path / "t", ABOUT)
    assert trace.load(tmp_path / "t") == trajectory
    assert trace.load(tmp_path / "t" / "trace.json") == trajectory


@pytest.mark.parametrize("edit_view", ["local", "full"])
@pytest.mark.parametrize(
    "options", [{}, {"source": noise(99)}, {"layout": "sft"}], ids=["draw", "edit", "sft"]
)
def test_the_contexts_come_back_through_the_views(tmp_path, options, edit_view):
    policy, trajectory = run([WRONG, JUNK, RIGHT, RIGHT], edit_view=edit_view, **options)
    trace.save(trajectory, tmp_path / "t", ABOUT)
    loaded = trace.load(tmp_path / "t", policy)

    def shape(context):  # images are equal only to themselves: compare their pixels
        return context and [
            getattr(s, "ids", None) or s.vae_pixels.sum().item() for s in context.segments
        ]

    def contexts(t):
        turns = [*t.plan_rejected, *t.turns, *(r for s in t.steps for r in s.rejected)]
        drawn = [d for d in (t.first, *(s.transition for s in t.steps)) if d]
        views = [(d.view.conditional, d.view.text_uncond, d.view.image_uncond) for d in drawn]
        return [shape(turn.context) for turn in turns] + [[shape(c) for c in v] for v in views]

    assert contexts(loaded) == contexts(trajectory)
    assert all(shape(turn.context) for turn in loaded.turns)


def test_a_noise_window_comes_back_bit_for_bit(tmp_path):
    _, trajectory = run([WRONG, RIGHT])
    step = trajectory.steps[0]
    window = {
        "latents": torch.randn(3, 4, 64),
        "times": torch.tensor([1.0, 0.9, 0.8]),
        "logprobs": torch.tensor([-1.5, -2.25]),
    }
    noisy = replace(step, transition=replace(step.transition, **window))
    trajectory = replace(trajectory, steps=(noisy, *trajectory.steps[1:]))
    trace.save(trajectory, tmp_path / "t", ABOUT)
    loaded = trace.load(tmp_path / "t")
    assert loaded == trajectory
    assert torch.equal(loaded.steps[0].transition.latents, window["latents"])
    [file] = (tmp_path / "t").glob("*.window.safetensors")
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(UserError, match=rf"{file.name} is damaged .*Run it again"):
        trace.load(tmp_path / "t")


def test_equality_sees_one_level_of_one_pixel_and_one_token(tmp_path):
    _, one = run([WRONG, RIGHT])
    changed = one.first.image.copy()
    r, g, b = changed.getpixel((3, 4))
    changed.putpixel((3, 4), (r, g, b ^ 1))
    assert replace(one, first=replace(one.first, image=changed)) != one
    turn = one.steps[0].turn
    other = replace(turn, sampled_ids=(0, *turn.sampled_ids[1:]))
    assert replace(one, steps=(replace(one.steps[0], turn=other), *one.steps[1:])) != one
    slower = replace(turn, seconds=9.0)
    assert replace(one, steps=(replace(one.steps[0], turn=slower), *one.steps[1:])) == one


def test_the_json_says_what_a_reader_wants_to_know(tmp_path):
    _, trajectory = run([WRONG, RIGHT])
    trace.save(trajectory, tmp_path / "t", ABOUT)
    record = json.loads((tmp_path / "t" / "trace.json").read_text())
    assert record["schema"] == 1
    assert (record["prompt"], record["seed"], record["sample"]) == ("two red circles", 7, "row 3")
    assert (record["stop"], record["kept"]) == ("done", 1)
    assert record["about"]["model_sha256"] == "ab" * 32
    assert record["about"]["settings"] == {"steps": 12, "prompts_file": None}
    first = record["steps"][0]
    assert first["turn"]["outcome"]["score"] == 4
    assert first["turn"]["said"].endswith("</think>\n[EDIT] Add one.")
    assert first["transition"]["image"] == "image_1.png"


def test_each_png_carries_its_settings(tmp_path):
    _, trajectory = run([WRONG, RIGHT])
    trace.save(trajectory, tmp_path / "t", ABOUT, story=story.draw_story(trajectory))
    with Image.open(tmp_path / "t" / "image_1.png") as png:
        text = png.text
    assert text["prompt"] == "two red circles"
    assert (text["seed"], text["round"], text["edit"]) == ("7", "1", "Add one.")
    assert json.loads(text["settings"])["steps"] == 12
    for name in ("image_1.png", "story.png"):
        verb, settings = trace.read_settings(tmp_path / "t" / name)
        assert verb == "reflect"
        assert settings == {
            "steps": 12,
            "prompts_file": None,
            "prompt": "two red circles",
            "sample": "row 3",
        }


def test_a_foreign_png_carries_no_settings(tmp_path):
    noise(0).save(tmp_path / "a.png")
    with pytest.raises(UserError, match="carries no settings"):
        trace.read_settings(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read"):
        trace.read_settings(tmp_path / "b.png")


def test_a_failed_write_leaves_nothing_and_keeps_the_old_trace(tmp_path, monkeypatch):
    _, old = run([RIGHT])
    _, new = run([WRONG, RIGHT])
    trace.save(old, tmp_path / "t", ABOUT)
    write, written = trace.write_aside, []

    def full_disk(path, content):
        if len(written) == 2:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)
        return write(path, content)

    monkeypatch.setattr(trace, "write_aside", full_disk)
    with pytest.raises(OSError, match="No space left"):
        trace.save(new, tmp_path / "t", ABOUT)
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    assert trace.load(tmp_path / "t") == old


def test_a_new_trace_replaces_an_old_one_but_never_other_files(tmp_path):
    _, old = run([WRONG, RIGHT])
    _, new = run([RIGHT])
    trace.save(old, tmp_path / "t", ABOUT)
    trace.save(new, tmp_path / "t", ABOUT)
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == ["image_0.png", "trace.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="holds other files"):
        trace.save(new, tmp_path / "mine", ABOUT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{", "not readable as JSON"),
        ("[]", "schema None"),
        ('{"schema": 2}', "schema 2"),
        ('{"schema": 1}', "is damaged"),
    ],
)
def test_a_damaged_trace_is_one_line_that_names_it(tmp_path, content, message):
    if content is not None:
        (tmp_path / "trace.json").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        trace.load(tmp_path)
    assert "trace.json" in str(caught.value)


def test_a_story_has_a_panel_an_image_and_shows_the_pixels():
    _, one = run([RIGHT])
    _, three = run([WRONG, Reflection("Still.", 5, "edit", "Add another."), RIGHT])
    small, large = story.draw_story(one), story.draw_story(three)
    panel = story.PANEL + story.GAP
    assert large.width == 2 * story.MARGIN + 3 * panel - story.GAP
    assert small.width == 2 * story.MARGIN + 2 * panel - story.GAP
    green = tuple(bytes.fromhex(story.GREEN[1:]))
    framed = [
        any(large.getpixel((story.MARGIN + k * panel + 1, y)) == green for y in range(100, 500))
        for k in range(3)
    ]
    assert framed == [False, False, True]


def test_a_story_of_every_kind_of_end_can_be_drawn():
    endings = [
        run([WRONG, JUNK, JUNK])[1],
        run([WRONG, WRONG])[1],
        run([RIGHT, RIGHT], layout="sft")[1],
        run([RIGHT], source=noise(5))[1],
    ]
    for trajectory in endings:
        long = replace(trajectory, prompt="a word and " * 200 + "x" * 500)
        assert story.draw_story(long, footer="f" * 900).height < 1200
