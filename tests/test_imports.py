"""The structure of the repository, read from its source: who imports whom, and how long files are.

No dependency but the standard library (and pytest): nothing of ours is imported here.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each package of ours, and what of ours it may import besides itself.
MAY_IMPORT = {
    "umm_reflect": set(),
    "agent": {"umm_reflect"},
    "sft": {"umm_reflect", "agent"},
    "eval": {"umm_reflect", "agent"},
    "rl": {"umm_reflect", "agent", "eval"},
}
# Modules whose distribution has another name.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
# Present only where the vendor's torch is; never a dependency.
OPTIONAL_MODULES = {"torch_npu"}

MAX_LINES = 450
SHORT_FILES = {"agent/loop.py": 150, "agent/views.py": 80}


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(source: str) -> list[tuple[int, str]]:
    """(line, dotted module) of every import at any depth; a relative one as '.'."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, "." if node.level else node.module or ""))
    return found


def wrong_imports(package: str, source: str) -> list[str]:
    """What in `source`, a file of `package`, goes against the direction of the arrows."""
    wrong = []
    for line, module in imports(source):
        top = module.partition(".")[0]
        if module == ".":
            wrong.append(f"{line}: relative import; write the package's name")
        elif module == "eval":
            wrong.append(f"{line}: `import eval` hides the builtin; write from eval.x import y")
        elif top in MAY_IMPORT and top != package and top not in MAY_IMPORT[package]:
            wrong.append(f"{line}: {package} may not import {module}")
    return wrong


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_go_one_way(package):
    wrong = [
        f"{path.relative_to(ROOT)}:{what}"
        for path in python_files(package)
        for what in wrong_imports(package, path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_an_import_against_the_arrows_is_found_at_any_depth():
    source = "def f():\n    from eval.verdict import Verdict\n"
    assert wrong_imports("agent", source) == ["2: agent may not import eval.verdict"]
    assert wrong_imports("rl", source) == []
    assert wrong_imports("rl", "import sft.data\n") == ["1: rl may not import sft.data"]
    assert wrong_imports("umm_reflect", "from . import hub\n") != []
    assert wrong_imports("eval", "import eval\n") != []


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        requirements += extra
    declared = {re.match(r"[\w-]+", text)[0].lower() for text in requirements}
    undeclared = set()
    for path in python_files(*MAY_IMPORT, "scripts"):
        for _, module in imports(path.read_text(encoding="utf-8")):
            top = module.partition(".")[0]
            known = top in sys.stdlib_module_names or top in {*MAY_IMPORT, *OPTIONAL_MODULES}
            if not known and DISTRIBUTIONS.get(top, top).replace("_", "-").lower() not in declared:
                undeclared.add(f"{path.relative_to(ROOT)}: {top}")
    assert not undeclared, "declare in pyproject.toml:\n" + "\n".join(sorted(undeclared))


def test_no_file_is_too_long_to_read():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in python_files(*MAY_IMPORT, "scripts", "tests")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"more than {MAX_LINES} lines: {long}"


@pytest.mark.parametrize(("name", "most"), SHORT_FILES.items())
def test_the_files_that_everyone_reads_first_are_short(name, most):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most


def test_every_file_opens_with_what_it_is():
    silent = [
        str(path.relative_to(ROOT))
        for path in python_files(*MAY_IMPORT, "tests")
        if path.read_text(encoding="utf-8").strip()
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent, f"no text at the top: {silent}"
