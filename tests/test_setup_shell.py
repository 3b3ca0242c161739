"""The setup shell: what it says when something is missing, and that a second start does nothing.

No package is installed here: a stand-in for Python plays venv and pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
START = 'source "scripts/_setup.sh"; setup "$@"; echo "ready $PYTHON"'

# Answers the version check, makes a venv whose python is itself, and plays pip: $PIP_SAYS, $PIP_RC.
STAND_IN = """#!/bin/bash
case "$*" in
  "-c import sys, venv"*) exit "${TOO_OLD:-0}" ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip install "*)
    while [ "$1" != --log ]; do shift; done
    echo "pip $*" >>calls
    echo "$PIP_SAYS" >"$2"
    exit "${PIP_RC:-0}" ;;
  "-m umm_reflect "*) printf '%s\\n' "$@" >ran ;;
esac
"""

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="the setup shell is bash: slow services on Windows"
)


@pytest.fixture
def checkout(tmp_path):
    """A folder with the scripts, and `python3` as the stand-in."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "_setup.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    return tmp_path


def start(checkout: Path, *extra: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(checkout), "UMM_PYTHON": "python3"} | variables
    command = ["bash", "-c", START, "start", *extra]
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60
    )


def calls(checkout: Path) -> list[str]:
    return (checkout / "calls").read_text().splitlines()


def test_the_second_start_installs_nothing(checkout):
    first, second = start(checkout, "dev"), start(checkout, "dev")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert first.stdout == second.stdout == f"ready {checkout}/.venv/bin/python\n"
    assert second.stderr == ""
    assert len(calls(checkout)) == 1
    assert calls(checkout)[0].endswith("-c constraints.txt -e .[dev]")


def test_an_install_with_an_extra_serves_a_start_without_it(checkout):
    start(checkout, "dev")
    start(checkout)
    assert len(calls(checkout)) == 1
    start(checkout, "train")
    assert len(calls(checkout)) == 2


def test_new_arguments_for_pip_install_again_and_their_absence_does_not(checkout):
    for arguments in ("--pre", "--pre", "", "--no-cache-dir"):
        start(checkout, UMM_PIP_ARGS=arguments)
    assert len(calls(checkout)) == 2


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_changed_requirement_installs_again(checkout, changed):
    start(checkout)
    with open(checkout / changed, "a") as file:
        file.write("# changed\n")
    start(checkout)
    assert len(calls(checkout)) == 2


def test_pip_gets_the_arguments_that_a_person_adds(checkout):
    start(checkout, UMM_PIP_ARGS="--index-url http://mirror/simple --no-cache-dir")
    added = "-c constraints.txt --index-url http://mirror/simple --no-cache-dir -e ."
    assert calls(checkout)[0].endswith(added)


def test_reflect_passes_on_what_was_typed_and_nothing_else(checkout):
    shutil.copy(ROOT / "scripts" / "reflect.sh", checkout / "scripts")
    environment = {"PATH": os.environ["PATH"], "UMM_PYTHON": str(checkout / "bin" / "python3")}
    command = ["bash", str(checkout / "scripts" / "reflect.sh"), "a --model of a star", "--seed=1"]
    subprocess.run(command, cwd=checkout, env=environment, check=True, timeout=60)
    # no model: the default is looked for in the checkout too, and a trace holds no path of a home
    ran = (checkout / "ran").read_text().splitlines()
    assert ran == ["-m", "umm_reflect", "reflect", "a --model of a star", "--seed=1"]


FAILURES = {
    "disk": ("ERROR: [Errno 28] No space left on device", "The disk is full"),
    "network": ("WARNING: Retrying after: connection broken", "The package index was not reached"),
    "version": (
        "ERROR: No matching distribution found for torch",
        "A package has no build for this Python",
    ),
    "other": ("Starting new HTTPS connection\nERROR: something else", "the whole log is"),
}


@pytest.mark.parametrize(("said", "remedy"), FAILURES.values(), ids=FAILURES)
def test_a_failed_install_says_what_to_do_and_is_tried_again(checkout, said, remedy):
    done = start(checkout, PIP_SAYS=said, PIP_RC="1")
    assert done.returncode == 1
    assert "error: pip could not install the packages" in done.stderr
    assert remedy in done.stderr.splitlines()[-1]
    assert start(checkout).returncode == 0
    assert len(calls(checkout)) == 2


def test_an_old_python_is_refused_with_what_was_looked_at(checkout):
    done = start(checkout, TOO_OLD="1", UMM_PYTHON=str(checkout / "bin" / "python3"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: no Python >= 3.11 with venv was found (looked at: ")
    assert "UMM_PYTHON=/path/to/python" in done.stderr


def test_a_broken_environment_is_named_with_the_remedy(checkout):
    (checkout / ".venv").mkdir()
    done = start(checkout)
    assert done.returncode == 1
    assert "holds no working Python" in done.stderr
    assert "rm -rf" in done.stderr
