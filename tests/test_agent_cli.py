"""reflect, generate and edit as a person runs them, on a tiny random checkpoint."""

import json
import random
from dataclasses import replace

import pytest
from PIL import Image

from agent import cli, config, trace
from agent.show import TurnText
from sft.shapes import make_trajectory
from tests.tiny import write_tiny_checkpoint
from umm_reflect import Bagel, adapters
from umm_reflect.cli import run_program
from umm_reflect.config import NANO, BagelConfig
from umm_reflect.files import sha256
from umm_reflect.hub import profile
from umm_reflect.profile import SaySettings, save_profile


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def program(verb, *words):
        small = ("--model", str(tiny), "--steps", "2", "--size", "64")
        return run_program(cli.main, [verb, *words, *small])

    return program


def test_a_run_leaves_a_trace_and_a_story_and_says_where(run, tmp_path, capsys):
    assert run("reflect", "two red circles", "--max-tokens", "20") == 0
    folder = tmp_path / "outputs" / "two-red-circles-seed0"
    names = {path.name for path in folder.iterdir()}
    assert names == {"trace.json", "story.png", "image_0.png"}
    printed = capsys.readouterr().out
    assert "image 0  64x64" in printed
    last = printed.strip().splitlines()[-1]
    assert "outputs/two-red-circles-seed0/trace.json" in last
    assert "outputs/two-red-circles-seed0/story.png" in last
    about = trace.read_record(folder)["about"]
    assert about["settings"]["steps"] == 2
    assert about["sampler"]["first"]["points"] == 3
    assert about["sampler"]["loop"]["retries"] == 1
    assert len(about["model_sha256"]) == 64


def test_captured_graphs_are_switched_off_by_a_flag(run, monkeypatch):
    seen, load = [], cli.Run.load
    monkeypatch.setattr(cli.Run, "load", lambda self: (load(self), seen.append(self.bagel.capture)))
    for words in ([], ["--no-capture"]):
        assert run("reflect", "two red circles", "--max-tokens", "2", *words) == 0
    assert run("generate", "two red circles") == 0
    assert seen == [None, False, None]


def test_a_run_repeats_from_any_of_its_images(run, tmp_path):
    words = ("two red circles", "--max-tokens", "20", "--seed", "3", "--sample", "7")
    assert run("reflect", *words) == 0
    folder = tmp_path / "outputs" / "two-red-circles-seed3-sample0007"
    first = trace.load(folder)
    image = str(folder / "image_0.png")
    assert run_program(cli.main, ["reflect", "--from", image, "--output-dir", "again"]) == 0
    assert trace.load(tmp_path / "again" / folder.name) == first


def test_a_file_of_prompts_runs_in_batches_that_change_nothing(run, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("\ufeffa star\n\n two rings \r\na moon\n", newline="")
    common = ("--prompts-file", "p.txt", "--max-tokens", "20")
    assert run("reflect", *common, "--batch-size", "2", "--output-dir", "a") == 0
    assert run("reflect", *common, "--batch-size", "1", "--output-dir", "b") == 0
    names = ["0000-a-star-seed0", "0001-two-rings-seed0", "0002-a-moon-seed0"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    for name in names:
        a, b = (trace.load(tmp_path / where / name) for where in "ab")
        assert [turn.text for turn in a.turns] == [turn.text for turn in b.turns]
        assert (a.prompt, a.stop, a.sample) == (b.prompt, b.stop, b.sample)
    printed = capsys.readouterr().out
    assert "0001-two-rings-seed0  " in printed  # in company every line says whose it is,
    assert "\n0001-two-rings-seed0\nimage 0  64x64" in printed  # alone the first one does


def test_generate_and_edit_draw_one_image_each(run, tmp_path, capsys):
    assert run("generate", "a star") == 0
    star = tmp_path / "outputs" / "a-star-seed0" / "image_0.png"
    assert star.exists()
    assert run("edit", "make it blue", "--image", str(star)) == 0
    edited = tmp_path / "outputs" / "make-it-blue-seed0"
    trajectory = trace.load(edited)
    assert [image.size for image in trajectory.images] == [(64, 64), (64, 64)]
    assert trajectory.kept == 1
    again = ["edit", "--from", str(edited / "image_1.png"), "--output-dir", "again"]
    assert run_program(cli.main, again) == 0
    assert trace.load(tmp_path / "again" / edited.name) == trajectory
    assert "image: outputs/make-it-blue-seed0/image_1.png" in capsys.readouterr().out


def test_forced_turns_draw_every_round(run, tmp_path, capsys):
    words = ("x", "--forced-turns", "90", "--max-rounds", "2", "--profile", "release")
    assert run("reflect", *words) == 0
    trajectory = trace.load(tmp_path / "outputs" / "x-seed0")
    assert len(trajectory.images) == 3
    assert "3 images in " in capsys.readouterr().out
    assert cli.timing_line(trajectory).endswith(
        f", 2 turns of 180 tokens in {sum(t.seconds for t in trajectory.turns):.1f} s"
    )


def test_no_guard_ends_forced_turns(run, tmp_path):
    assert run("reflect", "x", "--forced-turns", "170", "--max-rounds", "3") == 0
    trajectory = trace.load(tmp_path / "outputs" / "x-seed0")
    assert [len(turn.sampled_ids) for turn in trajectory.turns] == [170] * 4
    assert len(trajectory.images) == 4


def test_a_run_replaces_itself_and_no_other_run(run, tmp_path):
    outputs = tmp_path / "outputs"

    def names():
        return sorted(path.name for path in outputs.iterdir())

    short = ("--max-tokens", "20")
    assert run("reflect", "a star", *short) == 0
    assert run("reflect", "a star", *short) == 0
    assert names() == ["a-star-seed0"]
    assert run("generate", "a star") == 0
    assert run("reflect", "a star", *short, "--text-scale", "2") == 0
    assert names() == ["a-star-seed0", "a-star-seed0-2", "a-star-seed0-3"]
    assert trace.read_record(outputs / "a-star-seed0-2")["about"]["verb"] == "generate"
    assert (outputs / "a-star-seed0" / "story.png").exists()
    for color in ("red", "blue", "red"):
        Image.new("RGB", (64, 64), color).save("in.png")
        assert run("edit", "turn it", "--image", "in.png") == 0
    assert names()[3:] == ["turn-it-seed0", "turn-it-seed0-2"]
    (outputs / "turn-it-seed0" / "trace.json").write_text("{")
    (outputs / "my-notes-seed0").mkdir()
    (outputs / "my-notes-seed0" / "notes.txt").write_text("mine")
    assert run("edit", "turn it", "--image", "in.png") == 0
    assert run("generate", "my notes") == 0
    assert names()[3:] == [
        *("my-notes-seed0", "my-notes-seed0-2"),
        *("turn-it-seed0", "turn-it-seed0-2", "turn-it-seed0-3"),
    ]


def test_an_adapter_is_looked_for_before_anything_is_loaded_and_its_hash_is_kept(
    run, tiny, tmp_path, capsys
):
    assert run("generate", "a star", "--adapter", "nowhere") == 1
    printed = capsys.readouterr()
    assert printed.err == (
        "error: there is no folder nowhere. Check the path, or give a hub id, for example "
        "ByteDance-Seed/BAGEL-7B-MoT.\n"
    )
    assert printed.out == ""
    bagel = Bagel.from_pretrained(str(tiny), device="cpu")
    folder = adapters.save_adapter(adapters.attach_lora(bagel, 2, 4), tmp_path / "lora", "tiny")
    assert run("generate", "a star", "--adapter", str(folder)) == 0
    about = trace.read_record(tmp_path / "outputs" / "a-star-seed0")["about"]
    assert about["adapter_sha256"] == sha256(folder / "adapter_model.safetensors")
    assert run("generate", "a star") == 0
    about = trace.read_record(tmp_path / "outputs" / "a-star-seed0-2")["about"]
    assert about["adapter_sha256"] is None


def test_an_adapter_is_run_as_its_own_profile_says(run, tiny, tmp_path, capsys):
    bagel = Bagel.from_pretrained(str(tiny), device="cpu")
    folder = adapters.save_adapter(adapters.attach_lora(bagel, 2, 4), tmp_path / "lora", "tiny")
    save_profile(replace(profile(tiny), edit_view="full"), folder)
    assert run("generate", "a star", "--adapter", str(folder)) == 0
    told = f"note: {folder / 'reflection.json'} counts: edit_view full (not local)\n"
    assert capsys.readouterr().err == told
    about = trace.read_record(tmp_path / "outputs" / "a-star-seed0")["about"]
    assert about["sampler"]["edit_view"] == "full"


def test_a_users_image_goes_through_the_loop(run, tmp_path):
    Image.new("RGB", (80, 60), (250, 240, 10)).save(tmp_path / "in.png")
    assert run("reflect", "a star", "--image", "in.png", "--max-tokens", "20") == 0
    trajectory = trace.load(tmp_path / "outputs" / "a-star-seed0")
    assert trajectory.source.size == (80, 60)
    assert trajectory.first is None


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["reflect"], 2, "the prompt is empty"),
        (["reflect", "  "], 2, "the prompt is empty"),
        (["reflect", "x", "--steps", "0"], 2, "--steps is 0; give 1 or more"),
        (["reflect", "x", "--size", "big"], 2, "--size is 'big'"),
        (["reflect", "x", "--max-rounds", "-1"], 2, "--max-rounds is -1"),
        (["reflect", "x", "--max-round", "1"], 2, "did you mean --max-rounds"),
        (["reflect", "x", "--prompts-file", "p"], 2, "there is a prompt and a --prompts-file"),
        (["reflect", "--prompts-file", "none.txt"], 1, "none.txt"),
        (["reflect", "x", "--model", "nowhere"], 1, "there is no folder nowhere"),
        (["reflect", "--from", "none.png"], 1, "none.png does not exist"),
        (["reflect", "--from"], 2, "--from needs an image"),
        (["edit", "x"], 2, "there is no image to edit"),
        (["generate", "x", "--image", "a.png"], 2, "generate starts from no image"),
        (["paint"], 2, "which verb"),
    ],
)
def test_bad_usage_is_one_line(words, code, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_program(cli.main, words) == code
    error = capsys.readouterr().err
    assert error.lower().startswith("error: ")
    assert message.lower() in error.lower()
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["circle " * 10000], 2, "tokens. Give at most 2048"),
        (["\udcff red"], 2, "the prompt holds bytes that are no UTF-8 text"),
        (["x", "--attn", "fast"], 2, "there is no attention kernel 'fast'. One of auto, "),
        (["x", "--image", "."], 1, ". is a folder. Name an image inside it"),
        (["x", "--image", "none.png"], 1, "none.png does not exist"),
        (["x", "--image", "text.png"], 1, "text.png is not a picture"),
        (["x", "--size", "65"], 2, "Give multiples of 16 from 16 to 128"),
        (["x", "--size", "64x1024"], 2, "height 1024 is not a size"),
        (["x", "--size", "8"], 2, "give 0 < min <= max"),
    ],
)
def test_bad_input_is_one_line(tiny, words, code, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.png").write_text("no picture")
    assert run_program(cli.main, ["reflect", *words, "--model", str(tiny)]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_prompt_from_outside_the_shapes_world_gets_one_line():
    line = config.vocabulary_note(["two red circles", "a CAT on the table"], NANO)
    assert line.startswith("note: this model does not know cat, table; it draws circle, ")
    for word in ("heart", "purple", "left of", "six"):
        assert f" {word}" in line
    assert "\n" not in line
    assert config.vocabulary_note(["two red circles and a blue square"], NANO) is None
    assert "does not know röda, cirklar;" in config.vocabulary_note(["Röda cirklar"], NANO)


def test_instructions_to_edit_have_words_of_their_own():
    rng, words = random.Random(3), set()
    for _ in range(200):
        trajectory = make_trajectory(rng, task="edit")
        assert config.vocabulary_note([trajectory.prompt], NANO, editing=True) is None
        words |= set(trajectory.prompt.lower().split())
    assert {"remove", "swap", "turn"} <= words
    assert "does not know remove;" in config.vocabulary_note(["remove a star"], NANO)
    line = config.vocabulary_note(["remove the cat"], NANO, editing=True)
    assert "does not know cat;" in line


def test_other_models_get_no_vocabulary_line(tiny):
    assert config.vocabulary_note(["a cat"], BagelConfig.from_folder(tiny)) is None


def test_a_certainty_that_is_asked_for_holds_for_every_look_and_none_needs_no_glances(tiny):
    own = SaySettings(sure_of_ten=0.8, sure_of_ten_later=0.9, glances=5)
    shipped = replace(profile(tiny), say=own)

    def say(**flags) -> SaySettings:
        return config.resolved_profile(shipped, config.ReflectConfig(prompt="a", **flags)).say

    assert say() == own
    assert say(glances=3) == replace(own, glances=3)
    assert say(sure_of_ten=0.5) == SaySettings(sure_of_ten=0.5, glances=5)
    assert say(sure_of_ten=0.5, sure_of_ten_later=0.6) == replace(
        own, sure_of_ten=0.5, sure_of_ten_later=0.6
    )
    assert say(sure_of_ten_later=0.6) == replace(own, sure_of_ten_later=0.6)
    assert say(sure_of_ten=0) == SaySettings()


def test_a_size_that_was_asked_for_holds_for_edits_too(tiny):
    asked = config.ReflectConfig(prompt="x", size="48x32", steps=5, max_rounds=1, temperature=0)
    resolved = config.resolved_profile(profile(tiny), asked)
    assert resolved.size == (32, 48)
    assert resolved.transforms.drawn_size(Image.new("RGB", (48, 32))) == (32, 48)
    assert resolved.transforms.drawn_size(Image.new("RGB", (400, 400))) == (48, 48)
    assert resolved.transforms.drawn_size(Image.new("RGB", (900, 600))) == (32, 48)
    assert (resolved.first.points, resolved.edit.points) == (6, 6)
    assert (resolved.say.max_rounds, resolved.say.temperature) == (1, 0)


def test_the_profile_release_switches_every_addition_off():
    options = config.loop_options(config.ReflectConfig(prompt="x", profile="release"))
    assert [options.final_look, options.keep_best, options.stop_at_line] == [False] * 3
    assert (options.retries, options.same_edit_limit, options.min_change) == (0, 0, 0.0)
    assert options.accept_truncated


def test_settings_can_be_shown_and_fed_back(capsys, tmp_path):
    with pytest.raises(SystemExit):
        cli.reflect_main(["--show-config", "--seed", "9"])
    shown = capsys.readouterr().out
    assert "seed: 9" in shown
    (tmp_path / "c.yaml").write_text(shown)
    with pytest.raises(SystemExit):
        cli.reflect_main(["--config", str(tmp_path / "c.yaml"), "--show-config"])
    assert capsys.readouterr().out == shown


def test_the_text_of_a_turn_is_shown_without_its_tags():
    raw = (
        "4/10\n[ACTION] edit\n[THINKING] One is [missing].\nSo add it.\n[SOURCE_IMAGE] Image #0\n"
        "</think>\n[EDIT] Add a star."
    )
    expected = "4/10\n  action edit\n  One is [missing].\n  So add it.\n  edit Add a star."
    for size in (1, 3, 7, 200):
        text = TurnText()
        pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
        shown = [p for piece in pieces for _, p in text.feed(piece)]
        assert "".join([*shown, *(p for _, p in text.rest())]) == expected


def test_a_text_that_ends_inside_a_tag_is_shown_to_its_end():
    text = TurnText()
    shown = text.feed("4/10\n[ACT") + text.rest()
    assert "".join(piece for _, piece in shown) == "4/10\n  [ACT"


def test_folder_names_tell_runs_apart():
    assert cli._folder_name("Two red circles!", 0, 4, False) == "two-red-circles-seed4"
    assert cli._folder_name("a star", 12, 0, True) == "0012-a-star-seed0"
    assert cli._folder_name("a star", "row/3", 0, False) == "a-star-seed0-samplerow-3"
    long = [cli._folder_name("a star and " * 9 + end, 0, 0, False) for end in ("x", "y")]
    assert long[0] != long[1]
    assert cli._folder_name("星", 0, 0, False).startswith("image-")


def test_the_settings_in_a_png_are_plain_json(run, tmp_path):
    assert run("generate", "a star") == 0
    with Image.open(tmp_path / "outputs" / "a-star-seed0" / "image_0.png") as png:
        assert json.loads(png.text["settings"])["prompt"] == "a star"
        assert json.loads(png.text["sampler"])["first"]["points"] == 3
