"""Files that are whole or absent: written aside and renamed; and their hashes.

write_aside(folder / "trace.json", text)
sha256(folder / "ema.safetensors")
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


def write_aside(path: str | Path, content: str | bytes) -> Path:
    """Write beside `path` and rename over it, so that a reader never meets half a file.

    Makes the folders above it. Errors: OSError as the system gives it (a full disk, no permission);
    nothing is left behind then.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        make_readable(aside)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    return path


def make_readable(path: str | Path) -> None:
    """Give a file the permissions that a new one has here (temporary files are the owner's)."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(path, 0o666 & ~mask)


def sha256(path: str | Path) -> str:
    """Hex digest of a file's bytes (about a second per GB)."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def human_size(n_bytes: float) -> str:
    """1536 -> '1.5 KiB'; binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"
