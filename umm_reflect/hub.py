"""A model named by folder, hub id or `id@revision` becomes a folder; and how that folder is run.

    folder = resolve("pretrained/bagel-nano-shapes")
    folder = resolve("ByteDance-Seed/BAGEL-7B-MoT")    # from the cache, else downloaded; checked
    profile(folder)                                    # reflection.json, by hash, or plain
    profile(folder, adapter)                           # the adapter's reflection.json, else that

Weights are checked against the hashes published with them. Where none is known, the hash of the
first download is recorded (`hashes_file()`), printed, and enforced from then on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from umm_reflect.config import BagelConfig
from umm_reflect.errors import CheckpointError, UserError
from umm_reflect.files import human_size, sha256, write_aside

if TYPE_CHECKING:
    from umm_reflect.profile import ReflectionProfile

WEIGHTS = "ema.safetensors"
PROFILE = "reflection.json"
# What makes a model or an adapter; nothing that runs code or unpickles is fetched.
WANTED_FILES = ("*.safetensors", "*.json", "*.txt", "*.md", "*.jinja")


@dataclass(frozen=True)
class Released:
    """A published checkpoint: its pinned revision and the sha256 of its weights, where known."""

    revision: str | None
    weights_sha256: str | None


# All three are run with `released_profile`.
RELEASED = {
    "ByteDance-Seed/BAGEL-7B-MoT": Released(
        "265d1d48ec8e850a29d3a1f208c2a2ec3cd7577b",
        "0b41c43835fd737b8c948e604870da522c091dcf151f3e8d55f84781765ee1a3",
    ),
    "YijiaFan/UMM-Reflection-BAGEL-SFT": Released(
        None, "52e1e11193f26471dc253d0b65089a2aa024a68ce218cd916ea911b38eddc370"
    ),
    "YijiaFan/UMM-Reflection-BAGEL-RL": Released(None, None),
}
# A smaller file is none of them, so it need not be hashed to know.
RELEASED_MIN_BYTES = 20_000_000_000

PROMPT_NAME = "controller_system_prompt.txt"
PROMPT_SHA256 = "69465424c93e1d082661cb6e1bb927266c4439f0492fe28bea4643c8bbe52c84"
PROMPT_URL = (
    "https://raw.githubusercontent.com/waltstephen/UMM-Reflection/"
    "85107969869b2b82be69efd8475761a7870bc733/assets/prompts/controller_system_prompt.txt"
)


# --- names ----------------------------------------------------------------------------------------


def split_name(name: str) -> tuple[str, str | None]:
    """'id@revision' -> ('id', 'revision'); 'id' -> ('id', its pinned revision or None)."""
    repo, at, revision = name.partition("@")
    pinned = RELEASED[repo].revision if repo in RELEASED else None
    return repo, revision if at else pinned


def is_hub_id(name: str) -> bool:
    """'owner/model', perhaps with '@revision', and no folder of the checkout: 'pretrained/x'."""
    repo = name.partition("@")[0]
    well_formed = re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", repo) is not None
    return well_formed and not Path(repo.partition("/")[0]).is_dir() and "pretrained/" not in repo


def resolve(name: str | Path, *, download: bool = True) -> Path:
    """The local folder of a model or adapter: a folder as it is, a hub id through the hub's cache.

    A folder is looked for from here and from the checkout. A hub id that the cache holds is not
    looked up again; `umm-reflect download` is what asks for something newer. HF_HOME, HF_ENDPOINT
    and HF_HUB_OFFLINE are respected. download=False: only what is here already.
    Errors: CheckpointError or UserError of one line.
    """
    text = str(name)
    if not text.strip():
        raise CheckpointError("the model's name is empty", "Give a folder or a hub id.")
    checkout = Path(__file__).resolve().parent.parent
    for folder in (Path(text).expanduser(), checkout / text):
        if folder.is_dir():
            _check_kind(folder)
            return folder
        if folder.exists():
            raise CheckpointError(f"{folder} is a file", "Name the folder that holds it.")
    if not is_hub_id(text):
        raise CheckpointError(f"there is no folder {text}", _where_to_get(text))
    return _from_hub(text, download)


def _where_to_get(name: str) -> str:
    repo = next((r for r in RELEASED if Path(name).name == r.partition("/")[2]), None)
    if repo:
        return f"Fetch it with: umm-reflect download {repo} --output-dir {name}"
    return f"Check the path, or give a hub id, for example {next(iter(RELEASED))}."


def _check_kind(folder: Path) -> None:
    marks = ("llm_config.json", "adapter_config.json", "config.json")
    if not any((folder / mark).exists() for mark in marks):
        raise CheckpointError(
            f"{folder} is no model folder (it has neither {marks[0]} nor {marks[1]})",
            "Name a complete BAGEL folder or a PEFT adapter, or fetch one: umm-reflect download",
        )


def missing_files(folder: Path) -> list[str]:
    """The files that a BAGEL folder lacks, by name; [] when it is complete."""
    missing = [n for n in ("llm_config.json", "vit_config.json") if not (folder / n).exists()]
    for weights in (WEIGHTS, "ae.safetensors"):
        index = folder / f"{weights}.index.json"
        if index.exists() and not (folder / weights).exists():
            try:
                shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError):
                missing.append(f"{index.name} (it is damaged)")
                continue
            missing += sorted(shard for shard in shards if not (folder / shard).exists())
        elif not (folder / weights).exists():
            missing.append(weights)
    has_bpe = (folder / "vocab.json").exists() and (folder / "merges.txt").exists()
    if not (folder / "tokenizer.json").exists() and not has_bpe:
        missing.append("tokenizer.json")
    return missing


# --- the hub --------------------------------------------------------------------------------------


def _from_hub(name: str, download: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, revision = split_name(name)
    try:
        folder = Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=list(WANTED_FILES), local_files_only=True
            )
        )
        whole = (folder / "adapter_config.json").exists() or not missing_files(folder)
        if whole or _is_whole_model(folder):
            check_hashes(repo, revision, folder)
            return folder
    except LocalEntryNotFoundError:
        pass
    if not download:
        raise UserError(f"{name} is not here", f"Fetch it with: umm-reflect download {name}")
    return fetch(name)


def _is_whole_model(folder: Path) -> bool:
    """Whether a folder is a model in transformers' layout (a judge's, say) with all its weights."""
    if not (folder / "config.json").exists() or (folder / "llm_config.json").exists():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / shard).exists() for shard in shards)


def plan_fetch(name: str, output_dir: Path | None = None) -> list[tuple[str, int, bool]]:
    """(file, bytes, whether it is still to be fetched) of everything `fetch` would bring."""
    from huggingface_hub import snapshot_download

    repo, revision = split_name(name)
    with hub_errors(repo):
        files = snapshot_download(
            repo,
            revision=revision,
            local_dir=output_dir,
            allow_patterns=list(WANTED_FILES),
            dry_run=True,
        )
    return [(file.filename, file.file_size or 0, file.will_download) for file in files]


def fetch(name: str, output_dir: Path | None = None) -> Path:
    """Download a model or adapter (into the hub's cache, or a folder), check it, return its folder.

    Says first how large it is. Errors: UserError when it cannot be had, does not fit on the disk
    or differs from its hash.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    repo, revision = split_name(name)
    total = sum(size for _, size, wanted in plan_fetch(name, output_dir) if wanted)
    target = Path(output_dir or HF_HUB_CACHE)
    check_disk(target, total, repo)
    print(f"fetching {repo}: {human_size(total)} into {target}", file=sys.stderr)
    with hub_errors(repo):
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                local_dir=output_dir,
                allow_patterns=list(WANTED_FILES),
            )
        )
    check_hashes(repo, revision, folder)
    return folder


def check_disk(target: Path, n_bytes: int, what: str) -> None:
    """UserError unless `n_bytes` fit on the disk of `target` (which need not exist yet)."""
    import shutil

    existing = next(p for p in (target.absolute(), *target.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if n_bytes > free:
        raise UserError(
            f"{what} needs {human_size(n_bytes)}, but {existing} has {human_size(free)} free",
            "Free some space, or choose another place (--output-dir, or HF_HOME).",
        )


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turns what the hub's client raises into a UserError of one line."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, ConnectionError) as error:
        raise _explained(repo, error) from error
    except errors.DryRunError as error:  # hides why the hub was not read
        raise _explained(repo, error.__cause__ or error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "hf_xet"):
            raise _explained(repo, error) from error
        raise


def _explained(repo: str, error: BaseException) -> UserError:
    from huggingface_hub import errors

    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{repo} has no such revision", "Check what follows the @.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(
            f"the hub shows no model {repo} (it may be private or gated)",
            "Check the name, or log in: hf auth login",
        )
    return UserError(
        f"{repo} is not in the cache and the hub was not reached",
        "Check the network (HF_ENDPOINT, HF_HUB_OFFLINE), or give a folder.",
    )


# --- hashes ---------------------------------------------------------------------------------------


def hashes_file() -> Path:
    """Where hashes are recorded: under XDG_STATE_HOME, else ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "umm-reflect" / "hashes.json"


def _recorded() -> dict[str, dict]:
    path = hashes_file()
    if not path.exists():
        return {"first_seen": {}, "files": {}}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {"first_seen": content["first_seen"], "files": content["files"]}
    except (json.JSONDecodeError, KeyError, TypeError):
        raise UserError(f"{path} is damaged", "Remove it: hashes are then recorded anew.") from None


def digest(path: Path) -> str:
    """sha256 of a file, remembered by its place, size and time so that it is read only once."""
    real = path.resolve()
    stat = real.stat()
    recorded = _recorded()
    known = recorded["files"].get(str(real))
    if known and known[:2] == [stat.st_size, stat.st_mtime_ns]:
        return known[2]
    if stat.st_size > 1_000_000_000:
        print(f"checking {path.name} ({human_size(stat.st_size)}), once", file=sys.stderr)
    found = sha256(real)
    recorded["files"][str(real)] = [stat.st_size, stat.st_mtime_ns, found]
    try:
        write_aside(hashes_file(), json.dumps(recorded, indent=1) + "\n")
    except OSError as error:  # only costs time: the next run reads the file again
        print(f"note: {hashes_file()} is not kept ({error.strerror})", file=sys.stderr)
    return found


def check_hashes(repo: str, revision: str | None, folder: Path) -> None:
    """Compare a downloaded folder's weights with the published or the first-seen hashes.

    Errors: CheckpointError that names the file and both hashes.
    """
    for path in sorted(folder.glob("*.safetensors")):
        published = None
        if path.name == WEIGHTS and repo in RELEASED and revision == RELEASED[repo].revision:
            published = RELEASED[repo].weights_sha256
        check_hash(path, f"{repo}@{revision or 'main'}:{path.name}", published)


def check_hash(path: Path, key: str, published: str | None) -> None:
    """One file against its published hash, else against the one recorded under `key`."""
    found = digest(path)
    recorded = _recorded()
    first_seen = recorded["first_seen"].get(key)
    if published is None and first_seen is None:
        recorded["first_seen"][key] = found
        write_aside(hashes_file(), json.dumps(recorded, indent=1) + "\n")
        print(f"recorded {key} sha256 {found}; enforced from now on", file=sys.stderr)
        return
    expected = published or first_seen
    if found != expected:
        remedy = "Remove the file and fetch it again"
        if published is None:
            remedy += f"; if the release has really changed, remove its line in {hashes_file()}"
        raise CheckpointError(f"{path} has sha256 {found}, expected {expected}", f"{remedy}.")


# --- profiles -------------------------------------------------------------------------------------


def profile(
    folder: str | Path, adapter: str | Path | None = None, *, tell: bool = True
) -> ReflectionProfile:
    """How this checkpoint is run, with the adapter (a folder or hub id) on top if one is named.

    What an adapter's own reflection.json says counts, and one line (unless not tell) names what
    differs from its base's. Without that file:
    1. reflection.json beside the weights; 2. the released profile for a folder whose weights have
    a released hash (or come from, or are named like, a release whose hash is not published);
    3. otherwise layout rl, the local edit view, no system prompt, the mended transforms, and
    pictures of 512 px a side or what the position table holds.
    """
    from umm_reflect.profile import differences, load_profile, released_profile

    if adapter is not None and (path := resolve(adapter) / PROFILE).exists():
        own = load_profile(path)
        if tell and (changed := differences(own, profile(folder))):
            print(f"note: {path} counts: {', '.join(changed)}", file=sys.stderr)
        return own
    folder = Path(folder)
    if (folder / PROFILE).exists():
        return load_profile(folder / PROFILE)
    if is_released(folder):
        return released_profile(released_prompt(folder))
    return plain_profile(BagelConfig.from_folder(folder))


def plain_profile(config: BagelConfig) -> ReflectionProfile:
    """The profile of a checkpoint that nothing is known of: sizes that its position tables hold."""
    from umm_reflect.images import mended_transforms
    from umm_reflect.profile import ReflectionProfile

    drawable = config.latent_grid_side * config.latent_stride
    visible = config.vit.grid_side * config.vit.patch_size
    transforms = mended_transforms(
        vae=(min(1024, drawable), min(512, drawable), config.latent_stride),
        vit=(min(980, visible), min(224, visible), config.vit.patch_size),
    )
    transforms = replace(
        transforms, latent_stride=config.latent_stride, vit_patch=config.vit.patch_size
    )
    side = min(512, drawable)
    return ReflectionProfile("rl", "local", "", transforms, (side, side))


def is_released(folder: Path) -> bool:
    """Whether the weights in `folder` are one of the published checkpoints."""
    weights = folder / WEIGHTS
    if not weights.exists() or weights.stat().st_size < RELEASED_MIN_BYTES:
        return False
    places = {folder.name, *(part.replace("--", "/") for part in folder.resolve().parts)}
    for repo, released in RELEASED.items():
        unpublished = released.weights_sha256 is None
        if unpublished and places & {repo.partition("/")[2], f"models/{repo}"}:
            return True
    hashes = {released.weights_sha256 for released in RELEASED.values()}
    first_seen = _recorded()["first_seen"]
    hashes |= {first_seen.get(f"{repo}@main:{WEIGHTS}") for repo in RELEASED}
    return digest(weights) in hashes - {None}


def released_prompt(folder: Path | None = None) -> str:
    """The system prompt of the published checkpoints: beside the weights, else kept, else fetched.

    Errors: UserError when it is not here and cannot be fetched, CheckpointError when it differs.
    """
    kept = hashes_file().parent / PROMPT_NAME
    places: Iterable[Path] = [*([folder / PROMPT_NAME] if folder else []), kept]
    found = next((place for place in places if place.exists()), None)
    return read_prompt(found or fetch_prompt(kept), PROMPT_SHA256)


def read_prompt(path: Path, expected_sha256: str) -> str:
    """A system prompt file without its last line break. Errors: CheckpointError if it differs."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing", "Fetch it with: umm-reflect download prompt"
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if found != expected_sha256:
        raise CheckpointError(
            f"{path} has sha256 {found}, expected {expected_sha256}", "Fetch it again."
        )
    return data.decode().removesuffix("\n")


def fetch_prompt(path: Path) -> Path:
    """Download the released system prompt to `path`, checked before it is written."""
    try:
        with urllib.request.urlopen(PROMPT_URL, timeout=30) as answer:
            data = answer.read(100_000)
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise UserError(
            f"the system prompt of the released checkpoints cannot be fetched ({error})",
            f"Put {PROMPT_NAME} (sha256 {PROMPT_SHA256[:12]}...) beside the weights: {PROMPT_URL}",
        ) from error
    if hashlib.sha256(data).hexdigest() != PROMPT_SHA256:
        raise UserError("the fetched system prompt differs from its hash", f"See {PROMPT_URL}")
    return write_aside(path, data)
