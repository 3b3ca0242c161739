"""A stand-in for an OpenAI-compatible judge, for tests: answers, slowness and death by script.

    with judge_endpoint(lambda body: says("yes")) as (url, seen):
        ...                                        # seen: the bodies, in the order they came

The answering function returns a reply, a status number (that error), or raises to break the line.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = dict[str, Any] | int


def says(text: str | None, top: dict[str, float] | None = None) -> dict[str, Any]:
    """A chat completion with one choice. top: log-probs of the first token."""
    choice: dict[str, Any] = {"message": {"content": text}, "finish_reason": "stop"}
    if top is not None:
        entries = [{"token": token, "logprob": logprob} for token, logprob in top.items()]
        choice["logprobs"] = {"content": [{"token": text, "top_logprobs": entries}]}
    return {"choices": [choice]}


@contextmanager
def judge_endpoint(
    answer: Callable[[dict[str, Any]], Reply],
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            try:
                reply = answer({**body, "path": self.path})
            except ConnectionError:
                self.connection.close()
                return
            self.send_json(reply if isinstance(reply, int) else 200, reply)

        def do_GET(self) -> None:
            self.send_json(200, answer({"path": self.path}))

        def send_json(self, status: int, content: object) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):  # who asked has given up
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
