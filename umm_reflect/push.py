"""A model folder or an adapter goes to the Hugging Face hub: a private repository, card and all.

    open_repo("me/bagel-rl")                    # before hours of training: may it be written?
    push(Path("outputs/rl/checkpoint"), "me/bagel-rl")

What is pushed is what every command loads; a folder that lacks something is refused. A repository
that is there already stays as public or private as it is. Log in before: hf auth login.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from umm_reflect.errors import UsageError, UserError
from umm_reflect.hub import hub_errors, is_hub_id, missing_files, split_name

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from umm_reflect.training.processes import Processes

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
CARD = "README.md"


def open_repo(repo: str, api: HfApi | None = None) -> None:
    """Make the repository, private, unless it is there. Errors: UsageError for what is no id;
    UserError where the hub does not let us."""
    if not is_hub_id(repo) or split_name(repo)[1] is not None:
        raise UsageError(f"--push-to-hub is '{repo}'", "Give OWNER/NAME, without a revision.")
    with _named(repo):
        (api or _api()).create_repo(repo, private=True, exist_ok=True)


def push(folder: Path, repo: str, api: HfApi | None = None) -> str:
    """Upload a whole folder; the address of the commit. Errors: UserError for a folder that lacks
    files, before anything is sent; as `open_repo`."""
    folder = folder.resolve()  # RUN/checkpoint is a link
    is_adapter = (folder / ADAPTER[0]).exists()
    missing = missing_files(folder)
    if is_adapter:
        missing = [name for name in ADAPTER if not (folder / name).exists()]
    if missing:
        raise UserError(f"{folder} is not whole: {', '.join(missing)} missing", "Push a whole one.")
    api = api or _api()
    open_repo(repo, api)
    with _named(repo):
        if is_adapter and not (folder / CARD).exists():
            card = adapter_card(folder).encode()
            api.upload_file(path_or_fileobj=card, path_in_repo=CARD, repo_id=repo)
        done = api.upload_folder(folder_path=str(folder), repo_id=repo)
    return str(done)


class Done:
    """code: the exit code of a run; 0 is what is pushed."""

    code: int = 1


@contextmanager
def pushed(repo: str | None, out: Path, processes: Processes) -> Iterator[Done]:
    """Around a training run: the repository is opened before it, and gets RUN/best or, where there
    is none, RUN/checkpoint after a run that went to its end. None: nothing happens."""
    done = Done()
    if repo is not None and processes.main:
        open_repo(repo)
    yield done
    if repo is not None and processes.main and done.code == 0:
        best = out / "best"
        print(push(best if best.exists() else out / "checkpoint", repo))


def adapter_card(folder: Path) -> str:
    """What an adapter belongs to, and how it is used."""
    config = json.loads((folder / ADAPTER[0]).read_text(encoding="utf-8"))
    base = config["base_model_name_or_path"]
    return (
        f"# A LoRA adapter of {base}\n\n"
        f"Rank {config['r']}, alpha {config['lora_alpha']}. Run it beside its base, or make one "
        "model of both:\n\n"
        f"    umm-reflect reflect PROMPT --model {base} --adapter FOLDER\n"
        f"    umm-reflect merge --model {base} --adapter FOLDER --output-dir MERGED\n"
    )


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi()


@contextmanager
def _named(repo: str) -> Iterator[None]:
    """Errors of the hub as lines that say what to do; a missing log-in above all."""
    from huggingface_hub import errors

    try:
        with hub_errors(repo):
            yield
    except errors.LocalTokenNotFoundError as error:
        raise UserError(f"{repo} needs a log-in", "hf auth login") from error
    except UserError as error:
        status = getattr(getattr(error.__cause__, "response", None), "status_code", None)
        if status not in (401, 403):
            raise
        what = f"the hub does not let us write {repo} ({status})"
        raise UserError(what, "hf auth login, with a token that may write") from error
