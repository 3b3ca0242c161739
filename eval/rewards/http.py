"""Reward `http`: any reward, behind a service of ours (umm-reflect serve-reward).

build({"reward": "http", "url": "http://10.0.0.2:18092", "token_file": "token.txt"})
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL.Image import Image

from eval.client import RewardClient
from eval.rewards.registry import Row, facts
from eval.server import read_token
from eval.transport import Patience
from eval.verdict import Verdict
from umm_reflect.errors import UserError


@dataclass(frozen=True)
class Settings:
    """chunk: images a request; wait: seconds for a service that loads."""

    url: str = "http://127.0.0.1:18092"
    token_file: str = ""
    chunk: int = 32
    connections: int = 4
    timeout: float = 600.0
    attempts: int = 10
    wait: float = 600.0

    def __post_init__(self) -> None:
        for name in ("chunk", "connections", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")


def build(settings: Settings) -> HttpReward:
    return HttpReward(settings)


class HttpReward:
    """Passes images on; the service has checked itself before it served."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.client = RewardClient(
            settings.url,
            read_token(Path(settings.token_file)) if settings.token_file else None,
            timeout=settings.timeout,
            patience=Patience(settings.attempts),
            chunk=settings.chunk,
            connections=settings.connections,
        )

    def score(self, images: Sequence[Image], rows: Sequence[Row]) -> list[Verdict]:
        return self.client.score(images, rows)

    def manifest(self) -> dict[str, Any]:
        served = self.client.manifest()
        return {**facts("http", self.settings), "served": served}

    def check(self) -> None:
        self.client.wait_ready(self.settings.wait)
        if not self.client.manifest()["manifest"].get("checked"):
            raise UserError(
                f"the service at {self.settings.url} was started with --no-check",
                "Start it without: it judges its self-test images first.",
            )

    def close(self) -> None:
        self.client.close()
