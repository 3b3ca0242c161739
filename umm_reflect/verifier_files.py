"""The published files behind the GenEval verifier: where they come from, their hashes, their place.

    umm-reflect download geneval [--dry-run]         # all of them, checked
    umm-reflect geneval convert                      # what the verifier loads (eval/)

The checkpoints of mmdet and BLIP go to `verifier_folder()` (or --output-dir), CLIP and BERT's
tokenizer to the hub's cache. A file that is here with the right hash is not fetched again.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from umm_reflect import hub
from umm_reflect.errors import CheckpointError, UserError
from umm_reflect.files import human_size

_CHUNK = 1 << 20  # bytes
_PATIENCE = 60  # seconds without a byte


@dataclass(frozen=True)
class Remote:
    """A file at a fixed address."""

    name: str
    url: str
    sha256: str


MASK2FORMER = Remote(
    "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco_20220504_001756-743b7d99.pth",
    "https://download.openmmlab.com/mmdetection/v2.0/mask2former/"
    "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco/"
    "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco_20220504_001756-743b7d99.pth",
    "743b7d99015f1224c6d57fd4b14d04b15cc8ec72ae7ee7831e7c71d8873b7a54",
)
BLIP_VQA = Remote(
    "model_base_vqa_capfilt_large.pth",
    "https://storage.googleapis.com/sfr-vision-language-research/BLIP/models/"
    "model_base_vqa_capfilt_large.pth",
    "7a7d546209f1ccfa8b3cd3a0138c53e0d1e95e4a4bc280bef8f67e20fe4925ae",
)
CLIP = "openai/clip-vit-large-patch14"
BERT = "google-bert/bert-base-uncased"  # its tokenizer alone
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")


def verifier_folder() -> Path:
    """Where the verifier's files are kept: under XDG_CACHE_HOME, else ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "umm-reflect" / "geneval"


def fetch_verifier(folder: Path | None = None, *, dry_run: bool = False) -> Path:
    """Fetch and check everything; says first what and how large it is. Returns the folder.

    Errors: UserError when something cannot be had or does not fit on the disk, CheckpointError when
    a file differs from its published hash.
    """
    folder = folder or verifier_folder()
    missing = [
        remote
        for remote in (MASK2FORMER, BLIP_VQA)
        if not (folder / remote.name).exists() or hub.digest(folder / remote.name) != remote.sha256
    ]
    sizes = {remote: _size(remote) for remote in missing}
    on_hub = [
        *((CLIP, size, wanted) for _, size, wanted in hub.plan_fetch(CLIP)),
        *((BERT, size, wanted) for _, size, wanted in _plan_tokenizer()),
    ]
    for remote in (MASK2FORMER, BLIP_VQA):
        what = human_size(sizes[remote]) if remote in sizes else "here already"
        print(f"{what:>12}  {remote.name}", file=sys.stderr)
    for name in (CLIP, BERT):
        total = sum(size for where, size, wanted in on_hub if where == name and wanted)
        print(f"{human_size(total) if total else 'here already':>12}  {name}", file=sys.stderr)
    if dry_run:
        return folder
    hub.check_disk(folder, sum(sizes.values()), "the GenEval verifier")
    for remote in missing:
        _fetch(remote, folder)
    hub.fetch(CLIP)
    tokenizer_folder()
    return folder


def tokenizer_folder() -> Path:
    """The folder with BERT's tokenizer, from the cache or the hub. Errors: UserError."""
    from huggingface_hub import snapshot_download

    with hub.hub_errors(BERT):
        return Path(snapshot_download(BERT, allow_patterns=list(TOKENIZER_FILES)))


def _plan_tokenizer() -> list[tuple[str, int, bool]]:
    from huggingface_hub import snapshot_download

    with hub.hub_errors(BERT):
        files = snapshot_download(BERT, allow_patterns=list(TOKENIZER_FILES), dry_run=True)
    return [(file.filename, file.file_size or 0, file.will_download) for file in files]


def _size(remote: Remote) -> int:
    request = urllib.request.Request(remote.url, method="HEAD")
    with _reaching(remote), urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
        return int(answer.headers.get("Content-Length") or 0)


def _fetch(remote: Remote, folder: Path) -> None:
    """Write the file aside, check it, and only then give it its name."""
    folder.mkdir(parents=True, exist_ok=True)
    found = hashlib.sha256()
    handle, aside = tempfile.mkstemp(dir=folder, prefix=f".{remote.name}.", suffix=".part")
    try:
        with (
            os.fdopen(handle, "wb") as file,
            _reaching(remote),
            urllib.request.urlopen(remote.url, timeout=_PATIENCE) as answer,
        ):
            while data := answer.read(_CHUNK):
                found.update(data)
                file.write(data)
        if found.hexdigest() != remote.sha256:
            raise CheckpointError(
                f"{remote.url} has sha256 {found.hexdigest()}, expected {remote.sha256}",
                "It was changed or cut off on the way: try again.",
            )
        os.replace(aside, folder / remote.name)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


@contextmanager
def _reaching(remote: Remote) -> Iterator[None]:
    """Turns a network that does not answer into a UserError that says where the file can be put."""
    try:
        yield
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise UserError(
            f"{remote.url} was not reached ({error})",
            f"Check the network, or put the file (sha256 {remote.sha256[:12]}...) into "
            f"{verifier_folder()}.",
        ) from error
