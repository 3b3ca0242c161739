"""Names of models, hashes, profiles; the hub is a small server on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from umm_reflect import hub
from umm_reflect.config import BAGEL_7B_MOT, NANO
from umm_reflect.errors import CheckpointError, UserError
from umm_reflect.flow import DrawSettings
from umm_reflect.images import MENDED, mended_transforms
from umm_reflect.profile import (
    ReflectionProfile,
    SaySettings,
    load_profile,
    released_profile,
    save_profile,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def model(tmp_path):
    """A folder that looks like a BAGEL checkpoint."""
    folder = tmp_path / "model"
    folder.mkdir()
    NANO.to_files(folder, bos_token_id=0, eos_token_id=1)
    (folder / "tokenizer.json").write_text("{}")
    for name in ("ema.safetensors", "ae.safetensors"):
        save_file({"x": torch.zeros(2)}, folder / name)
    return folder


# --- names ----------------------------------------------------------------------------------------


def test_a_folder_is_taken_as_it_is(model):
    assert hub.resolve(model) == model
    assert hub.resolve(str(model)) == model


WRONG_NAMES = {
    "missing": ("/nowhere/model", "there is no folder /nowhere/model. Check the path"),
    "a release": ("pretrained/UMM-Reflection-BAGEL-SFT", "Fetch it with: umm-reflect download Yij"),
    "empty": ("", "the model's name is empty"),
    "a word": ("bagel", "there is no folder bagel"),
}


@pytest.mark.parametrize(("name", "message"), WRONG_NAMES.values(), ids=WRONG_NAMES)
def test_a_wrong_name_says_what_to_do(name, message):
    with pytest.raises(CheckpointError) as error:
        hub.resolve(name)
    assert message in str(error.value)


def test_a_foreign_folder_and_a_file_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no model folder"):
        hub.resolve(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        hub.resolve(tmp_path / "file")


def test_an_id_may_carry_a_revision_and_a_release_is_pinned():
    assert hub.split_name("a/b@main") == ("a/b", "main")
    assert hub.split_name("a/b") == ("a/b", None)
    revision = "265d1d48ec8e850a29d3a1f208c2a2ec3cd7577b"
    assert hub.split_name("ByteDance-Seed/BAGEL-7B-MoT") == (
        "ByteDance-Seed/BAGEL-7B-MoT",
        revision,
    )
    assert hub.is_hub_id("a/b.c-d@v1")
    assert not hub.is_hub_id("pretrained/b")
    assert not hub.is_hub_id("a/b/c")
    assert not hub.is_hub_id("./a")


def test_what_a_folder_lacks_is_named(model):
    assert hub.missing_files(model) == []
    (model / "ae.safetensors").unlink()
    (model / "tokenizer.json").unlink()
    assert hub.missing_files(model) == ["ae.safetensors", "tokenizer.json"]
    index = {"weight_map": {"x": "part-1.safetensors", "y": "part-2.safetensors"}}
    (model / "ema.safetensors").rename(model / "part-1.safetensors")
    (model / "ema.safetensors.index.json").write_text(json.dumps(index))
    assert hub.missing_files(model)[0] == "part-2.safetensors"
    (model / "ema.safetensors.index.json").write_text('{"weight_map": 3}')
    assert hub.missing_files(model)[0] == "ema.safetensors.index.json (it is damaged)"


# --- hashes ---------------------------------------------------------------------------------------


def test_the_first_hash_is_recorded_and_then_enforced(model, capsys):
    hub.check_hashes("a/b", None, model)
    assert capsys.readouterr().err.count("recorded a/b@main:") == 2
    hub.check_hashes("a/b", None, model)
    assert capsys.readouterr().err == ""
    save_file({"x": torch.ones(2)}, model / "ema.safetensors")
    with pytest.raises(CheckpointError, match=r"ema.safetensors has sha256 .* expected .*"):
        hub.check_hashes("a/b", None, model)
    hub.check_hashes("a/b", "v2", model)  # another revision is another file


def test_a_published_hash_is_enforced_at_once(model):
    with pytest.raises(CheckpointError, match="expected 52e1e11193f26471dc253d0b65089a2aa024a68c"):
        hub.check_hashes("YijiaFan/UMM-Reflection-BAGEL-SFT", None, model)


def test_a_digest_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hub.digest(path) == expected
    monkeypatch.setattr(hub, "sha256", lambda path: "read again")
    assert hub.digest(path) == expected
    path.write_bytes(b"abcd")
    assert hub.digest(path) == "read again"


def test_a_digest_needs_no_writable_home(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    (tmp_path / "x").write_bytes(b"abc")
    assert hub.digest(tmp_path / "x").startswith("ba7816bf")
    assert "is not kept (Not a directory)" in capsys.readouterr().err


def test_a_damaged_record_is_one_line(tmp_path):
    hub.hashes_file().parent.mkdir(parents=True)
    hub.hashes_file().write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        hub.digest(ROOT / "pyproject.toml")


def test_a_cached_model_is_whole_with_all_its_parts(tmp_path):
    assert not hub._is_whole_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not hub._is_whole_model(tmp_path)
    (tmp_path / "model-1.safetensors").write_text("")
    assert hub._is_whole_model(tmp_path)
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert not hub._is_whole_model(tmp_path)
    assert hub.resolve(str(tmp_path)) == tmp_path


# --- profiles -------------------------------------------------------------------------------------

PROFILE = ReflectionProfile(
    layout="sft",
    edit_view="full",
    system_prompt="Look.\nThen say.",
    transforms=mended_transforms(vae=(128, 64, 16), vit=(112, 56, 14)),
    size=(128, 96),
    first=DrawSettings(points=20, text_scale=4.0),
    edit=DrawSettings(points=10, noise_level=0.7, window=(0, 2), step_kind="sde"),
    say=SaySettings(temperature=0.0, max_tokens=100, max_rounds=5),
)


@pytest.mark.parametrize("profile", [PROFILE, released_profile("p")], ids=["mended", "released"])
def test_a_profile_reads_back_equal(profile, tmp_path):
    assert load_profile(save_profile(profile, tmp_path)) == profile


def test_the_written_profile_has_the_documented_keys(tmp_path):
    content = json.loads(save_profile(PROFILE, tmp_path).read_text())
    assert list(content) == [
        "schema",
        "layout",
        "edit_view",
        "size",
        "system_prompt",
        "transforms",
        "draw",
        "say",
    ]
    assert content["transforms"] == {"vae": [128, 64, 16], "vit": [112, 56, 14]}
    assert content["draw"]["first"]["shift"] == 3.0
    assert content["draw"]["edit"]["window"] == [0, 2]
    assert content["system_prompt"] == {"text": "Look.\nThen say."}


def test_a_prompt_file_is_named_with_its_hash_and_checked(tmp_path):
    (tmp_path / "prompt.txt").write_text("Look.\nThen say.\n")
    path = save_profile(PROFILE, tmp_path, prompt_file="prompt.txt")
    assert json.loads(path.read_text())["system_prompt"]["file"] == "prompt.txt"
    assert load_profile(tmp_path) == PROFILE
    (tmp_path / "prompt.txt").write_text("Do something else.\n")
    with pytest.raises(CheckpointError, match=r"prompt.txt has sha256"):
        load_profile(tmp_path)
    (tmp_path / "prompt.txt").unlink()
    with pytest.raises(CheckpointError, match=r"prompt.txt is missing"):
        load_profile(tmp_path)


WRONG_PROFILES = {
    "a key": ({"layuot": "rl"}, "unknown key 'layuot'. Did you mean 'layout'?"),
    "a draw key": ({"draw": {"first": {"pionts": 3}}}, "unknown key 'draw.first.pionts'. Did you"),
    "a draw part": ({"draw": {"second": {}}}, "unknown key 'draw.second'"),
    "a say key": ({"say": {"max_token": 3}}, "Did you mean 'say.max_tokens'?"),
    "a transform": ({"transforms": {"vae": [1, 2]}}, "transforms.vae is [1, 2]; give [max, min"),
    "a view": ({"edit_view": "wide"}, "edit_view is 'wide'; choose one of local, full"),
    "a schema": ({"schema": 2}, "schema is 2; this version reads schema 1"),
    "a size": ({"size": [128]}, "size is [128]; give [height, width]"),
    "a bound": ({"draw": {"first": {"points": 1}}}, "points is 1; give at least 2"),
    "a prompt": ({"system_prompt": {"file": "x"}}, "Give either text, or file and sha256."),
    "a prompt of no words": (
        {"system_prompt": {"text": 5}},
        "system_prompt.text is 5, which is",
    ),
    "a switch": ({"transforms": {"truncate": "no"}}, "transforms.truncate is 'no'; give true or"),
    "a stride": ({"transforms": {"vit_patch": 0}}, "transforms.vit_patch is 0; give pixels, 1 or"),
    "a way out": ({"system_prompt": {"file": "../x", "sha256": ""}}, "leaves the folder"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_PROFILES.values(), ids=WRONG_PROFILES)
def test_a_wrong_profile_is_one_line_that_names_file_and_key(change, message, tmp_path):
    path = save_profile(PROFILE, tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError) as error:
        load_profile(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_profile_that_is_missing_a_key_or_is_no_json_is_one_line(tmp_path):
    path = save_profile(PROFILE, tmp_path)
    content = json.loads(path.read_text())
    del content["edit_view"]
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="has no key 'edit_view'"):
        load_profile(path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        load_profile(path)


def test_a_folder_without_profile_gets_the_local_view_and_sizes_that_it_holds(model):
    profile = hub.profile(model)
    assert (profile.layout, profile.edit_view, profile.system_prompt) == ("rl", "local", "")
    assert profile.size == (128, 128)
    assert (profile.transforms.vae.max_size, profile.transforms.vit.max_size) == (128, 112)
    whole = hub.plain_profile(BAGEL_7B_MOT)
    assert whole.size == (512, 512)
    assert whole.transforms == MENDED


def test_the_profile_beside_the_weights_wins(model):
    save_profile(PROFILE, model)
    assert hub.profile(model) == PROFILE


def test_the_adapters_own_profile_counts_and_what_differs_is_one_line(model, tmp_path, capsys):
    save_profile(PROFILE, model)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert hub.profile(model, adapter) == PROFILE  # it has none
    save_profile(PROFILE, adapter)
    assert hub.profile(model, adapter) == PROFILE
    assert capsys.readouterr().err == ""
    say = replace(PROFILE.say, max_rounds=1)
    own = replace(PROFILE, edit_view="local", system_prompt="Draw.", say=say)
    path = save_profile(own, adapter)
    assert hub.profile(model, str(adapter)) == own
    assert capsys.readouterr().err == (
        f"note: {path} counts: edit_view local (not full), system_prompt, "
        f"say.max_rounds 1 (not {PROFILE.say.max_rounds})\n"
    )
    assert hub.profile(model, adapter, tell=False) == own
    assert hub.profile(model) == PROFILE
    assert capsys.readouterr().err == ""


def test_a_known_hash_gives_the_released_profile(model, monkeypatch):
    monkeypatch.setattr(hub, "RELEASED_MIN_BYTES", 0)
    assert not hub.is_released(model)
    known = hub.Released(None, hashlib.sha256((model / hub.WEIGHTS).read_bytes()).hexdigest())
    monkeypatch.setitem(hub.RELEASED, "YijiaFan/UMM-Reflection-BAGEL-SFT", known)
    monkeypatch.setattr(hub, "PROMPT_SHA256", hashlib.sha256(b"Look.\n").hexdigest())
    (model / hub.PROMPT_NAME).write_bytes(b"Look.\n")
    profile = hub.profile(model)
    assert profile == released_profile("Look.")
    assert profile.edit_view == "local"
    assert (profile.transforms.vae.max_size, profile.transforms.vit.max_size) == (512, 490)
    assert profile.say == SaySettings(temperature=0.5, max_tokens=512, max_rounds=3)


def test_the_release_whose_hash_is_unpublished_is_known_by_its_name(model, monkeypatch):
    monkeypatch.setattr(hub, "RELEASED_MIN_BYTES", 0)
    named = model.rename(model.parent / "UMM-Reflection-BAGEL-RL")
    assert hub.is_released(named)
    snapshot = model.parent / "models--YijiaFan--UMM-Reflection-BAGEL-RL" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    named.rename(snapshot)
    assert hub.is_released(snapshot)


@pytest.mark.skipif(
    not (ROOT.parent / "shared" / "data" / hub.PROMPT_NAME).exists(), reason="needs the shared data"
)
def test_the_released_prompt_is_recognised_by_its_hash():
    text = hub.read_prompt(ROOT.parent / "shared" / "data" / hub.PROMPT_NAME, hub.PROMPT_SHA256)
    assert len(text.encode()) == 2058
    assert not text.endswith("\n")


# --- the hub --------------------------------------------------------------------------------------

COMMIT = "c" * 40


class FakeHub(BaseHTTPRequestHandler):
    """The few routes of the hub's interface that a snapshot needs, for one model."""

    files: dict[str, bytes]

    def log_message(self, *arguments) -> None: ...

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/acme/tiny/revision/"):
            return self.send(json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": []}), body)
        if path.startswith("/api/models/acme/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": self.oid(data)}
                for name, data in self.files.items()
            ]
            return self.send(json.dumps(entries), body)
        name = path.removeprefix(f"/acme/tiny/resolve/{COMMIT}/")
        if name in self.files:
            return self.send(self.files[name], body)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        return self.end_headers()

    @staticmethod
    def oid(data: bytes) -> str:
        return hashlib.sha1(data).hexdigest()

    def send(self, data: str | bytes, body: bool) -> None:
        data = data.encode() if isinstance(data, str) else data
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{self.oid(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub_command(model, tmp_path):
    """Runs `umm-reflect` against a hub on the loopback that serves `model` as acme/tiny."""
    handler = type("Handler", (FakeHub,), {})
    handler.files = {path.name: path.read_bytes() for path in model.iterdir()}
    handler.files["weights.bin"] = b"a pickle, never fetched"
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(*arguments: str, script: str | None = None, **variables: str):
        where = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}"}
        where |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
        start = ["-c", script] if script else ["-m", "umm_reflect"]
        return subprocess.run(
            [sys.executable, *start, *arguments],
            cwd=ROOT,
            env=os.environ | where | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )

    yield run
    server.shutdown()
    server.server_close()


def test_download_says_the_size_then_fetches_checks_and_is_found_again(hub_command, tmp_path):
    done = hub_command("download", "acme/tiny", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "ema.safetensors" in done.stdout
    assert "weights.bin" not in done.stdout
    done = hub_command("download", "acme/tiny")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert hub.missing_files(folder) == []
    assert not (folder / "weights.bin").exists()
    assert "fetching acme/tiny: " in done.stderr
    assert "recorded acme/tiny@main:ema.safetensors sha256 " in done.stderr
    script = "from umm_reflect.hub import resolve; print(resolve('acme/tiny'))"
    again = hub_command(script=script, HF_HUB_OFFLINE="1")
    assert again.stdout.strip() == str(folder), again.stderr


def test_download_puts_files_into_a_folder(hub_command, tmp_path):
    done = hub_command("download", "acme/tiny@main", "--output-dir", str(tmp_path / "here"))
    assert done.returncode == 0, done.stderr
    assert hub.missing_files(tmp_path / "here") == []


def test_an_id_that_the_hub_does_not_have_is_one_line(hub_command):
    done = hub_command("download", "acme/other")
    assert done.returncode == 1
    assert done.stderr == (
        "error: the hub shows no model acme/other (it may be private or gated). "
        "Check the name, or log in: hf auth login\n"
    )


def test_an_unreachable_hub_is_one_line(hub_command):
    done = hub_command("download", "acme/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: acme/tiny is not in the cache and the")
    assert "Traceback" not in done.stderr


def test_a_disk_that_is_too_small_is_told_before_the_download(tmp_path):
    with pytest.raises(UserError, match=r"a/b needs 1024.0 TiB, but .* free. Free some space"):
        hub.check_disk(tmp_path / "not" / "yet", 2**50, "a/b")
