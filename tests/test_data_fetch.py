"""Fetching the released data: one revision, every file by its hash; the hub is on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.released import PROMPT_FILE, write_released
from tests.test_hub import FakeHub

ROOT = Path(__file__).resolve().parent.parent
COMMITS = {"main": "1" * 40, "v2": "2" * 40}


class FakeDataHub(FakeHub):
    """The routes of the hub that a dataset needs; `main` and `v2` hold the same files."""

    large: dict[str, str]  # sha256 by name, of what the hub keeps apart

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        start = "/api/datasets/acme/data"
        if path == start or path.startswith(f"{start}/revision/"):
            revision = path.removeprefix(start).removeprefix("/revision/") or "main"
            commit = COMMITS.get(revision, revision)
            files = [
                {"rfilename": name, "size": len(data), **self.lfs(name, data)}
                for name, data in self.files.items()
            ]
            answer = {"id": "acme/data", "sha": commit, "siblings": files}
            return self.send(json.dumps(answer), body)
        if path.startswith(f"{start}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": self.oid(data)}
                for name, data in self.files.items()
            ]
            return self.send(json.dumps(entries), body)
        parts = path.removeprefix("/datasets/acme/data/resolve/").partition("/")
        if parts[2] in self.files:
            return self.send(self.files[parts[2]], body)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def lfs(self, name: str, data: bytes) -> dict:
        if name not in self.large:
            return {}
        return {"lfs": {"sha256": self.large[name], "size": len(data), "pointerSize": 130}}


@pytest.fixture
def served(tmp_path):
    """The class that answers, and a function that runs the fetching program against it."""
    source = write_released(tmp_path / "source")
    handler = type("Handler", (FakeDataHub,), {})
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    handler.files = {str(path.relative_to(source)): path.read_bytes() for path in files}
    handler.large = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in handler.files.items()
        if name.endswith(".parquet")
    }
    handler.files |= {"README.md": b"the card", "code.py": b"never fetched"}
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )

    yield handler, run
    server.shutdown()
    server.server_close()


def fetching(folder: Path, *arguments: str) -> list[str]:
    start = [sys.executable, "-m", "sft.data_fetch", str(folder), "--repository", "acme/data"]
    return [*start, *arguments]


def test_what_is_wanted_is_fetched_at_one_revision_and_read_as_data(served, tmp_path):
    handler, run = served
    out = tmp_path / "data"
    done = run(fetching(out, "--dry-run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"acme/data@{COMMITS['main']}: 5 files, ")
    assert not out.exists()
    done = run(fetching(out))
    assert done.returncode == 0, done.stderr
    assert "5 files are as published" in done.stdout
    assert not (out / "code.py").exists()
    source = json.loads((out / "source.json").read_text())
    assert source["revision"] == COMMITS["main"]
    assert source["sha256"].keys() == handler.files.keys() - {"code.py"}
    done = run([sys.executable, "-m", "umm_reflect", "data", "stats", str(out)])
    assert "rows read                   43" in done.stdout, done.stderr


def test_a_second_time_keeps_to_the_revision_of_the_first(served, tmp_path):
    _, run = served
    out = tmp_path / "data"
    assert run(fetching(out, "--revision", "v2")).returncode == 0
    done = run(fetching(out))
    assert done.returncode == 0
    assert done.stdout.startswith(f"acme/data@{COMMITS['v2']}: 5 files, 0 B to fetch")
    done = run(fetching(out, "--revision", "main"))
    assert done.returncode == 2
    assert f"holds revision {COMMITS['v2']}, and main is {COMMITS['main']}" in done.stderr


def test_a_file_that_changes_on_either_side_is_found(served, tmp_path):
    _, run = served
    out = tmp_path / "data"
    assert run(fetching(out)).returncode == 0
    shard = out / "trajectory_parquet" / "part-0.parquet"
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + b"x")
    done = run(fetching(out))
    assert done.returncode == 1
    assert "1 of 5 files" in done.stderr
    assert "trajectory_parquet/part-0.parquet has sha256" in done.stderr
    shard.write_bytes(good)
    card = out / "README.md"  # the hub publishes no sha256 of it: ours is kept
    card.write_bytes(b"the cArd")
    done = run(fetching(out))
    assert "README.md has sha256" in done.stderr
    assert "Remove them and start again." in done.stderr


def test_what_is_no_such_dataset_is_one_line(served, tmp_path):
    handler, run = served
    done = run([*fetching(tmp_path / "data")[:-1], "acme/other"])
    assert done.returncode == 1
    assert done.stderr.startswith("error: the hub shows no model acme/other")
    handler.files = {"README.md": b"the card"}
    done = run(fetching(tmp_path / "data"))
    assert done.returncode == 1
    assert "has no trajectory_parquet/*.parquet. Check --repository" in done.stderr


def test_the_script_fetches_then_checks_the_prompt_and_the_counts(served, tmp_path):
    """The counts are those of a small copy, so the script ends with what is wrong with them."""
    _, run = served
    out = tmp_path / "data"
    out.mkdir()
    (out / "controller_system_prompt.txt").write_text(PROMPT_FILE)
    script = ["bash", "scripts/sft/prepare_data.sh", str(out), "--repository", "acme/data"]
    command = ["env", f"PYTHON_BIN={sys.executable}", *script]
    done = run([*command, "--dry-run"])
    assert done.returncode == 0, done.stderr
    assert "5 files" in done.stdout
    done = run(command)
    assert done.returncode == 1
    assert "controller_system_prompt.txt has sha256" in done.stderr  # not the published prompt


def test_the_script_ends_at_counts_that_are_not_the_published_ones(served, tmp_path):
    _, run = served
    out, stand_in = tmp_path / "data", tmp_path / "python"
    stand_in.write_text(
        '#!/bin/bash\ncase "$*" in *"download prompt"*) exit 0 ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    stand_in.chmod(0o755)
    script = ["bash", "scripts/sft/prepare_data.sh", str(out), "--repository", "acme/data"]
    done = run(["env", f"PYTHON_BIN={stand_in}", *script])
    assert done.returncode == 1
    assert "this is not the released data: trajectories 40 instead of 29,529" in done.stderr
    assert "ready." not in done.stdout
