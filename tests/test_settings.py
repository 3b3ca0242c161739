"""Settings: a flag beats the file, the file beats the default, a typo is one line with a hint."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro
import yaml

from umm_reflect import settings
from umm_reflect.errors import UsageError


class Stop(enum.StrEnum):
    DONE = "done"
    LATE = "late"


@dataclass(frozen=True)
class Draw:
    points: int = 50
    """Schedule points."""
    scale: float = 3.0
    """Guidance scale."""
    interval: tuple[float, float] = (0.4, 1.0)
    """Where guidance is on."""


@dataclass(frozen=True)
class Config:
    """A program."""

    prompt: Annotated[str | None, tyro.conf.Positional] = None
    """What to draw."""
    steps: int = 4
    """Denoising steps."""
    learning_rate: float = 1e-3
    """Step size."""
    mode: Literal["local", "full"] = "local"
    """What an edit sees."""
    stop: Stop = Stop.DONE
    """An enum."""
    size: tuple[int, int] | None = None
    """Height and width."""
    quiet: bool = False
    """A switch."""
    folders: tuple[Path, ...] = ()
    """Some folders."""
    draw: Draw = field(default_factory=lambda: Draw(points=20))
    """The sampler."""

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; give at least 1")


@dataclass(frozen=True)
class Needy:
    name: str
    """It has no default."""
    seed: int = 0


def parse(*argv: str, cls=Config):
    return settings.parse(cls, argv, "prog")


@pytest.fixture
def config_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_without_arguments_the_defaults_hold():
    assert parse() == Config()


def test_a_flag_beats_the_file_and_the_file_beats_the_default(config_file):
    path = config_file("steps: 8\nmode: full\nprompt: a ring\n")
    assert parse("--config", path) == Config(prompt="a ring", steps=8, mode="full")
    assert parse(f"--config={path}", "--steps", "9", "a cross") == Config(
        prompt="a cross", steps=9, mode="full"
    )


def test_values_of_a_file_get_the_types_of_the_fields(config_file):
    path = config_file(
        "learning-rate: 1e-4\nsize: [128, 64]\nquiet: true\nstop: late\nfolders: [a, b]\n"
        "draw:\n  scale: 4\n  interval: [0, 1]\n"
    )
    config = parse("--config", path)
    assert config.learning_rate == 0.0001
    assert config.size == (128, 64)
    assert config.quiet is True
    assert config.stop is Stop.LATE
    assert config.folders == (Path("a"), Path("b"))
    assert config.draw == Draw(points=20, scale=4.0, interval=(0.0, 1.0))


def test_dotted_keys_are_the_flags_names(config_file):
    path = config_file("draw.points: 7\ndraw.scale: 2\n")
    assert parse("--config", path).draw == Draw(points=7, scale=2.0)
    assert parse("--config", path, "--draw.points", "8").draw == Draw(points=8, scale=2.0)


def test_the_shown_config_can_be_fed_back(capsys, tmp_path):
    argv = ["a star", "--steps", "3", "--size", "64", "32", "--draw.scale", "2", "--folders", "x"]
    with pytest.raises(SystemExit) as stop:
        parse(*argv, "--show-config")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    path = settings.save(parse(*argv), tmp_path / "run" / "config.yaml")
    assert path.read_text() == shown
    assert yaml.safe_load(shown)["draw"] == {"points": 20, "scale": 2.0, "interval": [0.4, 1.0]}
    assert parse("--config", str(path)) == parse(*argv)


WRONG_FILES = {
    "a key": ("stpes: 4", "unknown key 'stpes'. Did you mean 'steps'?"),
    "a nested key": ("draw: {pionts: 4}", "unknown key 'draw.pionts'. Did you mean 'draw.points'?"),
    "a far key": ("zzzz: 4", "unknown key 'zzzz'. Known: prompt, steps,"),
    "a type": ("steps: many", "steps is 'many'. Expected int."),
    "a fraction": ("steps: 1.5", "steps is 1.5. Expected int."),
    "a choice": ("mode: wide", "mode is 'wide'. Expected local or full."),
    "an enum": ("stop: never", "stop is 'never'. Expected done or late."),
    "a switch": ("quiet: 1", "quiet is 1. Expected bool."),
    "a pair": ("size: [1, 2, 3]", "size is [1, 2, 3]. Expected tuple[int, int] or null."),
    "a list": ("- 1", "holds no 'key: value' lines"),
    "no YAML": ("a: [", "is not YAML at line 1"),
}


@pytest.mark.parametrize(("text", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_is_a_usage_error_that_names_it(text, message, config_file):
    path = config_file(text)
    with pytest.raises(UsageError) as error:
        parse("--config", path)
    assert str(error.value).startswith(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


WRONG_FLAGS = {
    "a flag": (["--stpes", "3"], "unknown flag --stpes. Did you mean --steps?"),
    "a nested flag": (["--draw.pionts", "3"], "Did you mean --draw.points?"),
    "a far flag": (["--zzzz"], "unknown flag --zzzz. See prog --help"),
    "a type": (["--steps", "x"], "--steps: invalid literal for int"),
    "a choice": (["--mode", "wide"], "invalid choice 'wide'"),
    "a bound": (["--steps", "0"], "steps is 0; give at least 1. See prog --help"),
    "words": (["two", "red", "circles"], "too many arguments: red, circles. A prompt"),
    "no file": (["--config"], "--config needs a file"),
    "a missing file": (["--config", "/nowhere.yaml"], "/nowhere.yaml cannot be read"),
}


@pytest.mark.parametrize(("argv", "message"), WRONG_FLAGS.values(), ids=WRONG_FLAGS)
def test_a_wrong_flag_is_one_line(argv, message, capsys):
    with pytest.raises(UsageError) as error:
        parse(*argv)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert capsys.readouterr().err == ""


def test_a_wrong_flag_is_one_line_in_a_terminal_without_unicode_too():
    script = "from umm_reflect.cli import entry; entry()"
    for encoding in ("utf-8", "ascii"):
        done = subprocess.run(
            [sys.executable, "-c", script, "doctor", "--jsno"],
            env=os.environ | {"PYTHONIOENCODING": encoding},
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert done.stderr.startswith("error: unknown flag --jsno. Did you mean --json? See ")


def test_a_bound_that_the_file_breaks_is_found_too(config_file):
    with pytest.raises(UsageError, match="steps is 0; give at least 1"):
        parse("--config", config_file("steps: 0"))


def test_a_field_without_default_must_come_from_somewhere(config_file):
    with pytest.raises(UsageError, match="missing: --name"):
        parse(cls=Needy)
    assert parse("--config", config_file("name: x"), cls=Needy) == Needy("x")
    assert parse("--name", "y", cls=Needy) == Needy("y")


def test_build_makes_a_checked_dataclass_from_plain_values():
    assert settings.build(Draw, {"points": 3}, "f.json") == Draw(points=3)
    with pytest.raises(UsageError, match=r"f.json: unknown key 'draw.point'. Did you mean"):
        settings.build(Draw, {"point": 3}, "f.json", "draw.")
    with pytest.raises(UsageError, match=r"f.json: name is missing"):
        settings.build(Needy, {}, "f.json")
    with pytest.raises(ValueError, match="steps is 0"):
        settings.build(Config, {"steps": 0}, "f.json")
