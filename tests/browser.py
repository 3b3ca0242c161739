"""Headless Chromium for tests, driven through ChromeDriver's own HTTP interface (WebDriver).

    with browser(tmp_path) as page:
        page.open(path)
        page.run("return document.title")
        page.click("#more"); page.choose("[name=family]", "counting"); page.console()

Needs Debian's packages chromium and chromium-driver; `MISSING` says what is not there.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--disable-dev-shm-usage"),
)
MISSING = " and ".join(name for name in ("chromium", "chromedriver") if not shutil.which(name))


class Page:
    """One window. Selectors are CSS."""

    def __init__(self, client: httpx.Client, session: str):
        self._client, self._at = client, f"/session/{session}"

    def _post(self, command: str, **body: Any) -> Any:
        answer = self._client.post(f"{self._at}/{command}", json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def open(self, path: str | Path) -> None:
        self._post("url", url=path if "://" in str(path) else Path(path).resolve().as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self._post("execute/sync", script=script, args=list(arguments))

    def _element(self, selector: str) -> str:
        found = self._post("element", using="css selector", value=selector)
        return next(iter(found.values()))

    def click(self, selector: str) -> None:
        self._post(f"element/{self._element(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self._post(f"element/{self._element(selector)}/value", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Click an option of a <select>, as a person does."""
        self.click(f'{selector} option[value="{value}"]')

    def screenshot(self, path: Path) -> Path:
        answer = self._client.get(f"{self._at}/screenshot").json()["value"]
        path.write_bytes(base64.b64decode(answer))
        return path

    def console(self) -> list[str]:
        """What the page wrote to the console since the last call, failed loads among it."""
        return [entry["message"] for entry in self._post("se/log", type="browser")]


@contextmanager
def browser(profile: Path, size: tuple[int, int] = (1280, 1000)) -> Iterator[Page]:
    """A window on a new, empty profile in the folder `profile`."""
    command = ["chromedriver", "--port=0", f"--log-path={profile / 'driver.log'}"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        started = next(line for line in driver.stdout if "started successfully on port" in line)
        port = int(started.rstrip().rstrip(".").rsplit(" ", 1)[1])
        own = f"--user-data-dir={profile / 'profile'}", f"--window-size={size[0]},{size[1]}"
        wanted = {
            "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": [*FLAGS, *own]}
        }
        wanted["goog:loggingPrefs"] = {"browser": "ALL"}
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False
        ) as client:
            body = {"capabilities": {"alwaysMatch": wanted}}
            answer = client.post("/session", json=body).json()["value"]
            assert "sessionId" in answer, answer
            try:
                yield Page(client, answer["sessionId"])
            finally:
                client.delete(f"/session/{answer['sessionId']}")
    finally:
        driver.terminate()
        driver.wait(timeout=20)
