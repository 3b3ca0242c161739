"""HTTP to a service that may be slow, starting or dying: time-outs, and retries with an end.

    transport = Transport("http://127.0.0.1:18092", Patience(attempts=10), timeout=60)
    answer = transport.post("/score", {"json": body}, pending="items a, b, c")

An answer of 5xx (or 429), no connection, a connection that broke, a time-out: tried again after a
growing pause, `attempts` times in all, then `ServiceError` says what was still pending. An answer
of 4xx is the caller's fault: `Refused` at once, never again.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from umm_reflect.errors import UserError

if TYPE_CHECKING:
    import httpx

NOTICE_AFTER = 20.0  # seconds of waiting before a person is told


class ServiceError(UserError):
    """A service did not answer within its retries, or what it said cannot be used."""


class Refused(UserError):
    """A service answered 4xx: the request, the address or the token is wrong."""

    def __init__(self, what: str, remedy: str, status: int, body: str):
        super().__init__(what, remedy)
        self.status, self.body = status, body


@dataclass(frozen=True)
class Patience:
    """How often a request is tried, and the pauses (seconds) between: doubling up to the last."""

    attempts: int = 10
    first_pause: float = 0.5
    longest_pause: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; give at least 1")

    def pause(self, attempt: int) -> float:
        """Seconds to wait after the attempt of this number, counted from 0."""
        return min(self.longest_pause, self.first_pause * 2**attempt)


class Transport:
    """One service, for many threads at once."""

    def __init__(
        self,
        url: str,
        patience: Patience,
        timeout: float,
        headers: Mapping[str, str] | None = None,
        connections: int = 32,
    ):
        import httpx

        if not url.startswith(("http://", "https://")):
            raise ValueError(f"'{url}' is no address; it starts with http:// or https://")
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout}; give seconds above 0")
        self.url, self.patience = url.rstrip("/"), patience
        self._closed = threading.Event()
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            headers=dict(headers or {}),
            limits=httpx.Limits(max_connections=connections),
            trust_env=False,  # a proxy for the web is none for the machine next door
        )

    def post(self, path: str, content: Mapping[str, Any], pending: str) -> httpx.Response:
        """The answer, of 2xx. content: httpx's arguments (json=..., files=..., data=...)."""
        return self._try("POST", path, content, pending)

    def get(self, path: str, pending: str = "") -> httpx.Response:
        """The answer, of 2xx."""
        return self._try("GET", path, {}, pending or path)

    def once(self, path: str) -> httpx.Response | None:
        """Whatever a single GET brings, or None without an answer."""
        import httpx

        try:
            return self._http.get(self.url + path)
        except httpx.TransportError:
            return None

    def close(self) -> None:
        """Ends the pauses of every thread, which then raise, and the connections."""
        self._closed.set()
        self._http.close()

    def _try(self, method: str, path: str, content: Mapping[str, Any], pending: str):
        import httpx

        began, told, why = time.monotonic(), False, ""
        for attempt in range(self.patience.attempts):
            try:
                answer = self._http.request(method, self.url + path, **content)
            except httpx.TransportError as error:
                why = _described(error)
            else:
                if answer.is_success:
                    return answer
                why = f"it answered {answer.status_code}: {_brief(answer)}"
                if answer.status_code < 500 and answer.status_code != 429:
                    raise Refused(
                        f"{self.url}{path} refused the request ({why})",
                        "Check the address, the token and the settings.",
                        answer.status_code,
                        answer.text,
                    )
            if attempt + 1 == self.patience.attempts:
                break
            waited = time.monotonic() - began
            if waited > NOTICE_AFTER and not told:
                told = True
                print(f"waiting for {self.url} ({why}); pending: {pending}", file=sys.stderr)
            if self._closed.wait(self.patience.pause(attempt)):
                raise ServiceError(f"{self.url} was given up; pending: {pending}")
        raise ServiceError(
            f"{self.url}{path} did not serve the request in {self.patience.attempts} attempts "
            f"({time.monotonic() - began:.0f} s; at last {why}); pending: {pending}",
            "Start the service, or check the address.",
        )


def _described(error: Exception) -> str:
    import httpx

    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return " ".join(str(error).split()) or type(error).__name__


def _brief(answer: httpx.Response) -> str:
    return " ".join(answer.text.split())[:300] or "nothing"
