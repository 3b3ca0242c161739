"""The console command: its table, its speed, and what a person sees when something goes wrong."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from umm_reflect import cli
from umm_reflect.errors import CheckpointError, UsageError, UserError

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, **options)


# --- the table ------------------------------------------------------------------------------------


def test_help_answers_in_half_a_second_without_torch():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = run("-X", "importtime", "-m", "umm_reflect", "--help")
        seconds.append(time.perf_counter() - start)
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "umm_reflect.cli" in imported
    assert not imported & {"torch", "numpy", "tyro", "yaml", "transformers"}
    assert min(seconds) < 0.5


def test_help_lists_the_verbs_that_exist_and_no_other(capsys, monkeypatch):
    monkeypatch.setitem(cli.VERBS, "dream", cli.Verb("umm_reflect.dream:main", "not written yet"))
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "  doctor " in text
    assert "  download " in text
    assert "dream" not in text


def test_every_listed_verb_has_its_function():
    for name, verb in cli.available().items():
        module, _, function = verb.target.partition(":")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in defined, f"{name}: {verb.target} does not exist"


@pytest.mark.parametrize("verb", cli.available())
def test_every_verb_explains_itself(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, "--help"])
    assert stop.value.code == 0
    assert f"umm-reflect {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "remedy"), [("doctr", "Did you mean 'doctor'?"), ("zzz", "Choose one of")]
)
def test_an_unknown_verb_names_the_nearest_one(typed, remedy, capsys):
    assert cli.run_program(cli.main, [typed]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: there is no verb '{typed}'. {remedy}")
    assert error.count("\n") == 1


def test_no_verb_shows_the_help_and_is_a_usage_error(capsys):
    assert cli.main([]) == 2
    assert "usage: umm-reflect VERB" in capsys.readouterr().err


# --- errors ---------------------------------------------------------------------------------------


def failing(error: BaseException):
    def program(argv: list[str]) -> int:
        raise error

    return program


ERRORS = {
    "a user error": (UserError("it broke", "Mend it."), 1, "error: it broke. Mend it."),
    "a usage error": (UsageError("no such flag", "See --help"), 2, "error: no such flag. See"),
    "a checkpoint": (CheckpointError("cut short", "Fetch it."), 1, "error: cut short. Fetch it."),
    "a full disk": (
        OSError(errno.ENOSPC, "No space left on device", "/out/trace.json"),
        1,
        "error: no space left on device: /out/trace.json. Free some space",
    ),
    "no permission": (PermissionError(errno.EACCES, "Permission denied", "/out"), 1, "error: perm"),
    "a missing file": (FileNotFoundError(errno.ENOENT, "No such file", "/x"), 1, "error: no such"),
    "a bad value": (ValueError("steps is 0;\ngive 1"), 1, "error: steps is 0; give 1"),
    "little memory": (MemoryError(), 1, "error: out of memory"),
    "a missing extra": (
        ModuleNotFoundError("No module named 'gradio'", name="gradio"),
        1,
        "error: gradio is not installed. Install the extra: pip install -e '.[serve]'",
    ),
    "little memory on the CPU": (
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        1,
        "error: out of memory",
    ),
    "broken weights": (FloatingPointError("a picture is not finite"), 1, "error: a picture is not"),
    "a file as a folder": (FileExistsError(errno.EEXIST, "File exists", "/x"), 1, "error: file ex"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "interrupted; nothing half-written"),
}


@pytest.mark.parametrize(("error", "code", "line"), ERRORS.values(), ids=ERRORS)
def test_what_fails_outside_the_code_is_one_line_and_an_exit_code(error, code, line, capsys):
    assert cli.run_program(failing(error), []) == code
    printed = capsys.readouterr().err
    assert printed.startswith(line)
    assert printed.count("\n") == 1


def test_debug_shows_the_traceback_too_and_is_not_passed_on(capsys):
    seen = []

    def program(argv: list[str]) -> int:
        seen.append(argv)
        raise UserError("it broke")

    assert cli.run_program(program, ["a", "--debug", "--", "--debug"]) == 1
    assert seen == [["a", "--", "--debug"]]
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert printed.endswith("error: it broke\n")


@pytest.mark.parametrize("error", [TypeError("ours"), AssertionError("ours"), KeyError("ours")])
def test_a_bug_of_ours_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        cli.run_program(failing(error), [])


def test_a_module_of_ours_that_is_missing_is_a_bug_and_no_extra():
    with pytest.raises(ModuleNotFoundError):
        cli.run_program(failing(ModuleNotFoundError("agent.x", name="agent.x")), [])


def test_output_that_the_disk_cannot_take_is_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "umm_reflect", "--help"]
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no space left on device")
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_error():
    script = "from umm_reflect.cli import run_program\nimport sys\n"
    script += "sys.exit(run_program(lambda a: print('x\\n' * 10**6) or 0, []))"
    command = f'"{sys.executable}" -c "$SCRIPT" | head -1'
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=os.environ | {"SCRIPT": script},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "x\n"
    assert done.stderr == ""


def test_sigterm_unwinds_so_that_files_aside_are_removed(tmp_path):
    script = f"""
import sys, time
from pathlib import Path
from umm_reflect.cli import run_program
def program(argv):
    aside = Path({str(tmp_path)!r}) / "aside"
    aside.touch()
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        aside.unlink()
sys.exit(run_program(program, []))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 143
    assert error == "ended by SIGTERM; nothing half-written is left behind\n"
    assert list(tmp_path.iterdir()) == []
