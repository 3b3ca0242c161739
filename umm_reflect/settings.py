"""Settings of a program: one frozen dataclass, filled from flags, then a YAML file, then defaults.

    @dataclass(frozen=True)
    class Config:
        prompt: Annotated[str, tyro.conf.Positional]
        '''What to draw.'''
        steps: int = 49
        '''Denoising steps of a picture.'''

    config = parse(Config, argv, "umm-reflect generate")

Every program that uses this understands, besides the fields as flags,

    --config FILE.yaml   keys are the flags' names (steps, draw.points, or draw: {points: ...})
    --show-config        print the resolved settings as such a file and stop
    --debug              show the traceback of an error

`save(config, path)` writes the resolved settings; the file can be fed back with --config.
A dataclass reports a bad value by a ValueError in its __post_init__: it becomes one line, exit 2.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import inspect
import io
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, TypeVar

import yaml

from umm_reflect.errors import UsageError
from umm_reflect.files import write_aside

Config = TypeVar("Config")

_HELP_OF_COMMON_FLAGS = """Also:
--config FILE.yaml  take settings from a file (keys are the flags' names; a flag wins)
--show-config       print the resolved settings as such a file and stop
--debug             show the traceback of an error"""


# --- flags ----------------------------------------------------------------------------------------


def parse(
    config_class: type[Config],
    argv: Sequence[str],
    prog: str,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    start: Mapping[str, Any] | None = None,
) -> Config:
    """The settings of one run: flag > --config file > preset or start > default.

    config_class: a frozen dataclass (nested dataclasses make dotted flags); docstrings under the
    fields are their help. presets: named starting points, chosen by --preset NAME. start: what the
    caller begins from. Errors: UsageError of one line for anything typed wrongly, in the file too.
    `--help` and `--show-config` print and raise SystemExit(0).
    """
    import tyro

    own, rest = _take_common_flags(argv, prog, presets)
    start = (presets or {}).get(own["preset"], {}) if start is None else start
    given = load_yaml(own["config"])
    default = from_mapping(config_class, _overlaid(start, given), own["config"] or own["preset"])
    common = _HELP_OF_COMMON_FLAGS
    if presets:
        common += f"\n--preset NAME       a starting point: {', '.join(presets)}"
    description = f"{inspect.cleandoc(config_class.__doc__ or '')}\n\n{common}"
    said = io.StringIO()
    try:
        with _wide_terminal(unless="-h" in rest or "--help" in rest), redirect_stderr(said):
            config = tyro.cli(
                config_class, prog=prog, args=rest, default=default, description=description
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        what, remedy = _one_line(said.getvalue(), config_class)
        raise UsageError(what, f"{remedy} See {prog} --help".strip()) from None
    except ValueError as error:
        raise UsageError(str(error), f"See {prog} --help") from error
    if own["show_config"]:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def _overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested mappings as one; what `above` says counts."""
    below, above = (
        _nested({str(key).replace("-", "_"): v for key, v in one.items()}) for one in (below, above)
    )
    both = {**below, **above}
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping):
            both[key] = _overlaid(below[key], value)
    return both


def _take_common_flags(
    argv: Sequence[str], prog: str, presets: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    own: dict[str, Any] = {"config": None, "preset": "", "show_config": False}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if word == "--":
            rest += [word, *words]
        elif name == "--config":
            own["config"] = value or next(words, None)
            if not own["config"]:
                raise UsageError("--config needs a file", f"{prog} --config settings.yaml")
        elif name == "--preset" and presets:
            own["preset"] = value or next(words, "")
            if own["preset"] not in presets:
                hint = nearest(own["preset"], presets)
                meant = f"Did you mean '{hint}'?" if hint else f"Choose of {', '.join(presets)}."
                raise UsageError(f"there is no preset '{own['preset']}'", meant)
        elif word == "--show-config":
            own["show_config"] = True
        elif word != "--debug":  # the command line itself acts on --debug
            rest.append(word)
    return own, rest


@contextmanager
def _wide_terminal(unless: bool) -> Iterator[None]:
    """Keeps tyro from wrapping its error text, which is taken apart below."""
    before = os.environ.get("COLUMNS")
    if not unless:
        os.environ["COLUMNS"] = "10000"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = before


def _one_line(box: str, config_class: type) -> tuple[str, str]:
    """tyro's error box as (what, remedy): its first part, without the frame."""
    sections: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines():
        text = line.strip(" │")
        if text and set(text) <= set("─-"):
            sections.append([])
        elif text and not text.startswith(("╭", "╰")):
            sections[-1].append(text)
    # Without UTF-8 tyro draws no frame and the title is a section of its own.
    framed = "╭" in box
    parts = sections if framed else sections[1:]
    message = " ".join(parts[0]) if parts else "the arguments were not understood"
    message = message.replace(f"Error parsing {config_class.__name__}: ", "")
    message = re.sub(r"\[/?bold\]", "", message).replace("Error parsing ", "")
    message = re.sub(r"^Missing from [^:]*: ", "missing: ", message)
    if match := re.match(r"Unrecognized options: (--[^\s,=]+)", message):
        flag = match[1]
        hint = nearest(flag[2:].replace("-", "_"), flag_names(config_class))
        return f"unknown flag {flag}", f"Did you mean --{_as_flag(hint)}?" if hint else ""
    if match := re.match(r"Unrecognized options: (.*)", message):
        return f"too many arguments: {match[1]}", "A prompt of several words needs quotes."
    return message[:1].lower() + message[1:], ""


def flag_names(config_class: type, prefix: str = "") -> list[str]:
    """['steps', 'draw.points', ...]: the names of all settings."""
    names = []
    for name, kind in _field_types(config_class).items():
        if inner := _dataclass_in(kind):
            names += flag_names(inner, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names + ([] if prefix else ["config", "show_config", "debug", "help"])


def _as_flag(name: str) -> str:
    return name.replace("_", "-")


def run_verb(
    argv: Sequence[str], prog: str, doc: str, verbs: Mapping[str, tuple[Callable[..., int], type]]
) -> int:
    """Run the verb in argv[0] with the settings in the rest; returns the exit code.

    doc: what help prints above the list. verbs: name -> (function of the settings, their class).
    Errors: UsageError for an unknown verb, and as `parse`.
    """
    verb, *rest = argv or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(f"usage: {prog} {{{','.join(verbs)}}} [arguments]\n\n{doc.strip()}\n")
        for name, (_, config) in verbs.items():
            print(f"  {name:<9}{(config.__doc__ or '').splitlines()[0]}")
        raise SystemExit(0 if argv else 2)
    if verb not in verbs:
        hint = nearest(verb, verbs)
        remedy = f"Did you mean '{hint}'?" if hint else f"Choose one of {', '.join(verbs)}."
        raise UsageError(f"{prog} has no verb '{verb}'", remedy)
    run, config_class = verbs[verb]
    return run(parse(config_class, rest, f"{prog} {verb}"))


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that is written most like `name`, if any is at all."""
    found = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


# --- files ----------------------------------------------------------------------------------------


def load_yaml(path: str | Path | None) -> dict[str, Any]:
    """The mapping in a YAML file; {} for None. Errors: UsageError of one line."""
    if path is None:
        return {}
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})", "Check --config.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UsageError(
            f"{path} is not YAML{where}", "--show-config prints a valid file."
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(
            f"{path} holds no 'key: value' lines", "--show-config prints a valid file."
        )
    return content


def to_mapping(config: Any) -> dict[str, Any]:
    """A dataclass as plain values that YAML and JSON can hold."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return to_mapping(value)
        if isinstance(value, enum.Enum):
            return value.value
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        return value

    return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}


def to_yaml(config: Any) -> str:
    """The settings as a file for --config."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True)


def save(config: Any, path: str | Path) -> Path:
    """Write the resolved settings for --config (aside, then renamed)."""
    return write_aside(path, to_yaml(config))


def from_mapping(
    config_class: type[Config], values: Mapping[str, Any], source: str, at: str = ""
) -> Config:
    """Defaults overlaid with `values`, unchecked: tyro builds and checks the real one from it.

    A field with neither is tyro's MISSING. Errors: UsageError for an unknown key (with the nearest
    name) or a value of the wrong type, with `source` and the key.
    """
    import tyro

    kinds = _field_types(config_class)
    given = _nested({str(key).replace("-", "_"): value for key, value in values.items()})
    for key in given:
        if key not in kinds:
            hint = nearest(key, kinds)
            raise UsageError(
                f"{source}: unknown key '{at}{key}'",
                f"Did you mean '{at}{hint}'?" if hint else f"Known: {', '.join(kinds)}.",
            )
    config = object.__new__(config_class)
    for field in dataclasses.fields(config_class):
        if not field.init:
            continue
        kind, inner = kinds[field.name], _dataclass_in(kinds[field.name])
        default: Any = tyro.MISSING
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name in given and inner and isinstance(given[field.name], Mapping):
            start = to_mapping(default) if dataclasses.is_dataclass(default) else {}
            value = from_mapping(
                inner, {**start, **given[field.name]}, source, f"{at}{field.name}."
            )
        elif field.name in given:
            value = _converted(kind, given[field.name], f"{source}: {at}{field.name}")
        else:
            value = default
        object.__setattr__(config, field.name, value)
    return config


def build(
    config_class: type[Config], values: Mapping[str, Any], source: str, at: str = ""
) -> Config:
    """The checked dataclass itself from plain values (a JSON object), as `from_mapping` reads them.

    Errors: UsageError for a key or a type; ValueError from the dataclass's own checks.
    """
    import tyro

    overlaid = from_mapping(config_class, values, source, at)
    complete = {name: getattr(overlaid, name) for name in _field_types(config_class)}
    if missing := [name for name, value in complete.items() if value is tyro.MISSING]:
        raise UsageError(f"{source}: {at}{missing[0]} is missing")
    return config_class(**complete)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """{'draw.points': 4} -> {'draw': {'points': 4}}."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        head, dot, tail = key.partition(".")
        if dot:
            nested[head] = {**nested.get(head, {}), tail: value}
        elif isinstance(value, Mapping) and isinstance(nested.get(head), Mapping):
            nested[head] = {**nested[head], **value}
        else:
            nested[head] = value
    return nested


def _field_types(config_class: type) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    return {f.name: hints[f.name] for f in dataclasses.fields(config_class) if f.init}


def _members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a plain type alone."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def _dataclass_in(kind: Any) -> type | None:
    return next((k for k in _members(kind) if dataclasses.is_dataclass(k)), None)


def _converted(kind: Any, value: Any, where: str) -> Any:
    try:
        return _as_type(kind, value)
    except TypeError:
        raise UsageError(f"{where} is {value!r}", f"Expected {_type_text(kind)}.") from None


def _as_type(kind: Any, value: Any) -> Any:
    """A YAML value as the type of its field; YAML's 1e-4, which is text, may be a number too."""
    for member in _members(kind):
        try:
            return _as_member(member, value)
        except (TypeError, ValueError):
            continue
    raise TypeError


def _as_member(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (None, type(None)):
        if value is None:
            return None
    elif origin is typing.Literal:
        if value in arguments:
            return value
    elif origin in (tuple, list):
        if isinstance(value, list | tuple):
            return _as_sequence(origin, arguments, value)
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    elif kind is bool or isinstance(value, bool):
        if isinstance(value, bool) and kind in (bool, Any):
            return value
    elif kind in (int, float):
        if isinstance(value, int | float | str) and (kind is float or float(value) == int(value)):
            return kind(value)
    elif kind in (str, Path):
        if isinstance(value, str | int | float):
            return kind(str(value))
    elif kind is Any or (isinstance(kind, type) and isinstance(value, kind)):
        return value
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    raise TypeError


def _as_sequence(origin: Any, arguments: tuple[Any, ...], value: Sequence[Any]) -> Any:
    if origin is list or (len(arguments) == 2 and arguments[1] is Ellipsis):
        return origin(_as_type(arguments[0], item) for item in value)
    if len(arguments) != len(value):
        raise TypeError
    return tuple(_as_type(kind, item) for kind, item in zip(arguments, value, strict=True))


def _type_text(kind: Any) -> str:
    names = []
    for member in _members(kind):
        if typing.get_origin(member) is typing.Literal:
            names += [str(choice) for choice in typing.get_args(member)]
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            names += [str(choice.value) for choice in member]
        elif member is type(None):
            names.append("null")
        else:
            plain = typing.get_origin(member) is None and isinstance(member, type)
            names.append(member.__name__ if plain else str(member))
    return " or ".join(names)
