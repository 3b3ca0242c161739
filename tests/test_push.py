"""Pushing a folder to the hub: private, whole, with a card; the hub is a list of what it was told.

pytest tests/test_push.py
"""

from __future__ import annotations

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError

from tests.tiny import write_tiny_checkpoint
from umm_reflect import push as pushing
from umm_reflect.adapters import attach_lora, save_adapter
from umm_reflect.checkpoint import load
from umm_reflect.errors import UsageError, UserError
from umm_reflect.push import open_repo, push, pushed
from umm_reflect.training.processes import Processes


class Hub:
    """Keeps what it is told; status: refuses everything with it."""

    def __init__(self, status: int | None = None):
        self.told, self.status = [], status

    def create_repo(self, repo, **options):
        if self.status is not None:
            response = httpx.Response(self.status, request=httpx.Request("POST", "http://hub"))
            raise HfHubHTTPError("no", response=response)
        self.told.append(("create", repo, options))

    def upload_file(self, *, path_or_fileobj, path_in_repo, repo_id):
        self.told.append(("file", path_in_repo, path_or_fileobj.decode()))

    def upload_folder(self, *, folder_path, repo_id):
        self.told.append(("folder", folder_path, repo_id))
        return f"https://hub/{repo_id}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("push") / "model")


def test_a_whole_model_goes_into_a_private_repository(model):
    hub = Hub()
    assert push(model, "me/tiny", hub) == "https://hub/me/tiny"
    assert hub.told == [
        ("create", "me/tiny", {"private": True, "exist_ok": True}),
        ("folder", str(model), "me/tiny"),
    ]


def test_a_folder_that_is_not_whole_is_refused_before_anything_is_sent(model, tmp_path):
    hub, part = Hub(), tmp_path / "part"
    part.mkdir()
    (part / "llm_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not whole: vit_config\.json, ema\.safetensors, ae"):
        push(part, "me/tiny", hub)
    (part / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not whole: adapter_model\.safetensors missing"):
        push(part, "me/tiny", hub)
    assert hub.told == []


def test_an_adapter_goes_with_a_card_that_names_its_base(model, tmp_path):
    bagel = load(model, device="cpu", dtype="float32", attn="auto")
    attach_lora(bagel, rank=2, alpha=4)
    folder, hub = save_adapter(bagel, tmp_path / "adapter", "some/base"), Hub()
    push(folder, "me/adapter", hub)
    (_, name, card), (what, *_) = hub.told[1:]
    assert (name, what) == ("README.md", "folder")
    assert card.startswith("# A LoRA adapter of some/base\n\nRank 2, alpha 4")
    assert "umm-reflect merge --model some/base" in card


@pytest.mark.parametrize("name", ["tiny", "me/tiny@v1", "./me/tiny"])
def test_what_is_no_name_of_a_repository_is_refused(name):
    with pytest.raises(UsageError, match="Give OWNER/NAME, without a revision"):
        open_repo(name, Hub())


def test_a_token_that_may_not_write_is_said_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(pushing, "_api", lambda: Hub(403))
    with (
        pytest.raises(UserError, match=r"does not let us write me/tiny \(403\)") as said,
        pushed("me/tiny", tmp_path, Processes()),
    ):
        raise AssertionError("the run has begun")
    assert "hf auth login" in str(said.value)


def test_a_run_that_went_to_its_end_is_pushed_and_one_that_was_stopped_is_not(
    model, tmp_path, monkeypatch
):
    hub = Hub()
    monkeypatch.setattr(pushing, "_api", lambda: hub)
    (tmp_path / "checkpoint").symlink_to(model)
    for code in (143, 0):
        with pushed("me/tiny", tmp_path, Processes()) as done:
            done.code = code
    assert [told[0] for told in hub.told] == ["create", "create", "create", "folder"]
    (tmp_path / "best").symlink_to(write_tiny_checkpoint(tmp_path / "other"))
    with pushed("me/tiny", tmp_path, Processes()) as done:
        done.code = 0
    assert hub.told[-1][1] == str(tmp_path / "other")
    with pushed(None, tmp_path, Processes()):
        pass
    assert len(hub.told) == 7
