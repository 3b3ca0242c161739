"""umm-reflect serve-reward: a reward behind HTTP, for trainers and evaluations elsewhere.

    umm-reflect serve-reward --reward geneval --port 18092
    umm-reflect serve-reward --reward reward.yaml --host 0.0.0.0 --token-file token.txt
    curl http://127.0.0.1:18092/health

POST /score   {"items": [{"id": "a", "row": {...}, "image": BASE64}, ...]} as JSON, or multipart:
              `items` without images, and a file part `image` for each, in order (PNG, JPEG, WebP).
              200: {"results": [{"id", "verdict": {...}} or {"id", "error": {"kind", "message"}}],
              "manifest_sha256"}, in order. 400: the caller's fault, nothing was judged. 401: the
              token. 413: too large. 503: loading, or too busy, with a reason; try again.
GET /health   200 when it serves, 503 with the reason while it loads. No token is asked for.
GET /manifest what judges: settings, hashes, versions. GET /metrics: counters, for Prometheus.

The reward is checked on its self-test images before anything is served (--no-check leaves that
out); if it fails, the service says why and ends. Nothing is unpickled, in either direction.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from umm_reflect.errors import UserError
from umm_reflect.settings import parse

PROG = "umm-reflect serve-reward"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServeConfig:
    """Serve a reward over HTTP on this machine."""

    reward: str
    """A reward's name, or a YAML file with its settings."""
    set: tuple[str, ...] = ()
    """Settings of the reward: KEY=VALUE ..."""
    device: str | None = None
    """Where its networks run, for example cuda:1; otherwise what its settings say."""
    host: str = "127.0.0.1"
    """Where to listen; another address than this machine's own should have a token."""
    port: int = 18092
    """0: any free one, which is printed."""
    token_file: Path | None = None
    """A file with a secret that callers must send."""
    max_batch: int = 64
    """Images judged together, from all requests."""
    max_wait: float = 0.01
    """Seconds that a batch waits for more images."""
    max_pending: int = 8192
    """Images that may wait; beyond that callers are asked to come again."""
    idle_offload: float = 0.0
    """Seconds of quiet after which the weights leave the device; 0: never."""
    check: bool = True
    """Judge the self-test images first."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port is {self.port}; give 0 to 65535")
        for name in ("max_batch", "max_pending"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name.replace('_', '-')} is {getattr(self, name)}; give 1 or more"
                )
        if self.max_wait < 0 or self.idle_offload < 0:
            raise ValueError("max-wait and idle-offload are seconds, 0 or more")


def main(argv: Sequence[str]) -> int:
    config = parse(ServeConfig, argv, PROG)
    from eval.rewards.registry import named
    from eval.service import Service

    mapping = named(config.reward, config.set, config.device)
    token = read_token(config.token_file)
    if config.host not in LOCAL_HOSTS and token is None:
        print(
            f"warning: whoever reaches {config.host}:{config.port} can use this service; "
            "--token-file asks them for a secret",
            file=sys.stderr,
        )
    return Service(config, mapping, token).run()


def read_token(path: Path | None) -> str | None:
    """The secret in a file. Errors: UserError for an empty file; OSError."""
    if path is None:
        return None
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise UserError(f"{path} holds no token", "Write a long random word into it.")
    return token


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
