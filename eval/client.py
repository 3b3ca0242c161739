"""The other side of `umm-reflect serve-reward`: many images to a service, verdicts in order.

    client = RewardClient("http://10.0.0.2:18092", token=None)
    client.wait_ready(600)
    verdicts = client.score(images, rows)

Images go in requests of `chunk`, a few at a time. A service that is killed and started again is
waited for; what it had not answered is sent again. When it stays away, the error names what is
pending. A service that comes back as another judge (another manifest) is an error.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from PIL.Image import Image

from eval.transport import Patience, Refused, ServiceError, Transport
from eval.verdict import Verdict
from eval.wire import TOKEN_HEADER, listed, name_of, write_request

PAUSE = 1.0  # seconds between looks at a service that loads


class RewardClient:
    """One service. May be used from several threads."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = 600.0,
        patience: Patience | None = None,
        chunk: int = 32,
        connections: int = 4,
    ):
        headers = {TOKEN_HEADER: f"Bearer {token}"} if token else None
        self.patience, self.chunk = patience or Patience(), chunk
        self.transport = Transport(url, self.patience, timeout, headers, connections)
        self._pool = ThreadPoolExecutor(connections)
        self._lock = threading.Lock()
        self._judge: str | None = None

    def score(self, images: Sequence[Image], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        """One verdict for each image, in order; an item that is refused is `Verdict.failed`.

        Errors: ServiceError when the service stays away or is another one; Refused for a token or
        an address that is wrong.
        """
        if len(images) != len(rows):
            raise ValueError(f"{len(images)} images but {len(rows)} rows")
        parts = [slice(i, i + self.chunk) for i in range(0, len(images), self.chunk)]
        tasks = [
            self._pool.submit(self._chunk, part.start, images[part], rows[part]) for part in parts
        ]
        verdicts: list[Verdict] = []
        try:
            for task in tasks:
                verdicts += task.result()
        except ServiceError as error:
            names = [name_of(row, i) for i, row in enumerate(rows)][len(verdicts) :]
            raise ServiceError(
                f"{error.what.partition('; pending')[0]}; at least {len(verdicts)} of {len(rows)} "
                f"images were judged, pending: {listed(names)}",
                error.remedy,
            ) from error
        finally:
            for task in tasks:
                task.cancel()
        return verdicts

    def manifest(self) -> dict[str, Any]:
        """{"manifest": ..., "sha256": ...} of the service."""
        return self.transport.get("/manifest", "the manifest").json()

    def wait_ready(self, seconds: float) -> None:
        """Returns when the service serves. Errors: ServiceError with the reason after `seconds`."""
        end = time.monotonic() + seconds
        while True:
            answer = self.transport.once("/health")
            if answer is not None and answer.status_code == 200:
                return
            if time.monotonic() >= end:
                why = "it does not answer" if answer is None else f"it says {answer.text[:200]}"
                raise ServiceError(
                    f"{self.transport.url} is not ready after {seconds:.0f} s: {why}",
                    "Start it: umm-reflect serve-reward --reward NAME",
                )
            time.sleep(PAUSE)

    def close(self) -> None:
        self.transport.close()
        self._pool.shutdown(cancel_futures=True)

    def _chunk(self, start: int, images: Sequence[Image], rows: Sequence[Mapping[str, Any]]):
        """The verdicts of one request; items whose judge was away for a moment are sent again."""
        done: dict[int, Verdict] = {}
        for attempt in range(self.patience.attempts):
            left = [i for i in range(len(images)) if i not in done]
            sent = [images[i] for i in left], [dict(rows[i]) for i in left]
            ids = [str(start + i) for i in left]
            for i, result in zip(left, self._results(*sent, ids), strict=True):
                error = result.get("error")
                if error is None:
                    done[i] = Verdict.from_record(result["verdict"])
                elif error["kind"] in ("image", "row") or attempt + 1 == self.patience.attempts:
                    done[i] = Verdict.failed(f"{error['kind']}: {error['message']}")
            if len(done) == len(images):
                break
            time.sleep(self.patience.pause(attempt))
        return [done[i] for i in range(len(images))]

    def _results(self, images, rows, ids: Sequence[str]) -> list[dict[str, Any]]:
        pending = listed([name_of(row, int(i)) for i, row in zip(ids, rows, strict=True)])
        try:
            answer = self.transport.post("/score", write_request(images, rows, ids), pending)
            content = answer.json()
        except Refused as error:
            content = _json(error.body)
            if "results" not in content:
                raise
        results = content["results"]
        self._same_judge(content["manifest_sha256"])
        if [result.get("id") for result in results] != list(ids):
            raise ServiceError(f"{self.transport.url} answered for other items than were sent")
        return results

    def _same_judge(self, sha256: str) -> None:
        with self._lock:
            self._judge = self._judge or sha256
            if sha256 != self._judge:
                raise ServiceError(
                    f"{self.transport.url} judges with another manifest than before "
                    f"({sha256[:12]}, not {self._judge[:12]})",
                    "Start it with the settings and weights that it had.",
                )


def _json(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
