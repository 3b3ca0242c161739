"""Fetching what the GenEval verifier is made from: checked, whole or absent, never twice.

python -m pytest tests/test_verifier_files.py
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from umm_reflect import download, hub, verifier_files
from umm_reflect.errors import CheckpointError, UserError
from umm_reflect.verifier_files import BLIP_VQA, MASK2FORMER, fetch_verifier


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Two small files in the place of the published ones, and a hub that has everything."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    remotes = {}
    for name, remote in (("MASK2FORMER", MASK2FORMER), ("BLIP_VQA", BLIP_VQA)):
        data = f"the weights of {name}".encode()
        (tmp_path / name).write_bytes(data)
        changed = replace(
            remote, url=(tmp_path / name).as_uri(), sha256=hashlib.sha256(data).hexdigest()
        )
        monkeypatch.setattr(verifier_files, name, changed)
        remotes[name] = changed
    fetched = []
    monkeypatch.setattr(hub, "plan_fetch", lambda name: [("model.safetensors", 1000, True)])
    monkeypatch.setattr(hub, "fetch", fetched.append)
    monkeypatch.setattr(verifier_files, "_plan_tokenizer", lambda: [("vocab.txt", 0, False)])
    monkeypatch.setattr(verifier_files, "tokenizer_folder", lambda: fetched.append("the tokenizer"))
    return tmp_path, remotes, fetched


def test_everything_is_fetched_to_its_place_and_only_once(published, capsys):
    tmp_path, remotes, fetched = published
    assert download.main(["geneval"]) == 0
    folder = tmp_path / "cache" / "umm-reflect" / "geneval"
    assert capsys.readouterr().out.strip() == str(folder)
    assert (folder / MASK2FORMER.name).read_bytes() == b"the weights of MASK2FORMER"
    assert (folder / BLIP_VQA.name).read_bytes() == b"the weights of BLIP_VQA"
    assert fetched == [verifier_files.CLIP, "the tokenizer"]
    for remote in remotes.values():
        (tmp_path / remote.url.rpartition("/")[2]).unlink()
    assert fetch_verifier() == folder  # nothing is read from where it came
    assert "here already" in capsys.readouterr().err


def test_a_dry_run_says_how_large_it_is_and_fetches_nothing(published, capsys):
    tmp_path, _, fetched = published
    assert download.main(["geneval", "--dry-run", "--output-dir", str(tmp_path / "here")]) == 0
    said = capsys.readouterr().err
    assert f"26 B  {MASK2FORMER.name}" in said
    assert f"1000 B  {verifier_files.CLIP}" in said
    assert not (tmp_path / "here").exists()
    assert fetched == []


def test_a_file_with_another_hash_is_refused_and_not_kept(published):
    tmp_path, _, _ = published
    (tmp_path / "MASK2FORMER").write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="changed or cut off"):
        fetch_verifier()
    assert list((tmp_path / "cache" / "umm-reflect" / "geneval").iterdir()) == []


def test_a_damaged_file_in_its_place_is_fetched_again(published):
    _, remotes, _ = published
    folder = fetch_verifier()
    (folder / MASK2FORMER.name).write_bytes(b"cut off")
    assert fetch_verifier() == folder
    found = hashlib.sha256((folder / MASK2FORMER.name).read_bytes()).hexdigest()
    assert found == remotes["MASK2FORMER"].sha256


def test_a_network_that_is_not_there_is_an_error_that_says_where_to_put_the_file(published):
    tmp_path, _, _ = published
    (tmp_path / "BLIP_VQA").unlink()
    with pytest.raises(UserError, match=r"was not reached .* put the file \(sha256"):
        fetch_verifier()


def test_the_published_hashes_are_those_that_the_release_names():
    assert MASK2FORMER.url.endswith(MASK2FORMER.name)
    assert MASK2FORMER.sha256.startswith("743b7d99015f1224c6d57fd4b14d04b1")
    assert MASK2FORMER.sha256[:8] == MASK2FORMER.name[-12:-4]
    assert BLIP_VQA.sha256.startswith("7a7d546209f1ccfa8b3cd3a0138c53e0")


def test_a_judge_that_the_hubs_cache_holds_is_not_looked_up_again(tmp_path, monkeypatch):
    import huggingface_hub

    def cached(repo, *, revision, allow_patterns, local_files_only=False, **more):
        assert local_files_only, "the network was asked"
        return str(tmp_path / "judge")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"1")
    assert hub.resolve("openai/clip-vit-large-patch14") == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="is not here"):
        hub.resolve("openai/clip-vit-large-patch14", download=False)
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "model-1.safetensors").write_bytes(b"1")
    with pytest.raises(UserError, match="is not here"):
        hub.resolve("openai/clip-vit-large-patch14", download=False)
    (folder / "model-2.safetensors").write_bytes(b"2")
    assert hub.resolve("openai/clip-vit-large-patch14", download=False) == folder
