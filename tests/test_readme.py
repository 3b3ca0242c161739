"""README and model card: their figures are those of the result files, their commands exist."""

import re
import shlex

from eval.readme import FILES, ROOT, filled
from umm_reflect.cli import VERBS

README = ROOT / "README.md"


def test_every_figure_is_what_its_result_file_says():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "<!-- figures:" in text
        assert filled(text) == text, f"{path.name} is stale: python -m eval.readme"


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.split(" #")[0].strip() for line in joined.splitlines() if line.strip()]


def test_every_command_of_the_readme_names_a_script_a_module_or_a_verb_that_exists():
    seen = 0
    for command in commands():
        words = shlex.split(command)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if not words or words[0] in ("git", "cd", "source", "export"):
            continue
        seen += 1
        if words[0] == "bash":
            assert (ROOT / words[1]).exists(), command
        elif words[0] == "umm-reflect":
            assert words[1] in VERBS or words[1].startswith("--"), command
        elif words[:2] == ["python", "-m"]:
            path = ROOT / words[2].replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), command
        else:
            raise AssertionError(f"unknown kind of command: {command}")
    assert seen >= 8


def test_every_local_link_and_picture_exists():
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (ROOT / target).exists(), target
