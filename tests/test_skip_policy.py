"""A skip without a good reason fails the suite: with xdist and without, for a test and a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")

PASSING = "def test_passes(): pass\n"
SKIPPED_TEST = "import pytest\ndef test_x(): pytest.skip('{}')\ndef test_y(): pass\n"
SKIPPED_FILE = "import pytest\npytest.skip('{}', allow_module_level=True)\n"


def run_suite(folder: Path, content: str, *arguments: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_it.py").write_text(content)
    (folder / "test_other.py").write_text(PASSING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
@pytest.mark.parametrize("content", [SKIPPED_TEST, SKIPPED_FILE], ids=["test", "file"])
def test_a_skip_for_another_reason_fails_the_suite_and_is_named(tmp_path, content, workers):
    code, output = run_suite(tmp_path, content.format("not today"), *workers)
    assert code == 1
    assert "not today" in output
    assert "skipped without a good reason" in output


def test_skips_for_good_reasons_pass(tmp_path):
    (tmp_path / "test_gpu.py").write_text(SKIPPED_FILE.format("needs a GPU"))
    (tmp_path / "test_slow.py").write_text(SKIPPED_TEST.format("slow services are off"))
    code, output = run_suite(tmp_path, SKIPPED_TEST.format("needs the shared data"))
    assert code == 0, output


def test_an_empty_parameter_list_is_a_skip_that_fails(tmp_path):
    content = "import pytest\n@pytest.mark.parametrize('x', [])\ndef test_x(x): pass\n"
    assert run_suite(tmp_path, content)[0] == 1
