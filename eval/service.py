"""The reward service itself (server.py holds its flags): routes, loading, counters.

Service(config, {"reward": "shapes"}, token=None).run()
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from eval.batching import Batcher, Busy, Fault, Outcome
from eval.pictures import read_picture
from eval.rewards.registry import build
from eval.wire import MAX_BODY, MAX_ITEMS, TOKEN_HEADER, Item, read_json, read_multipart
from umm_reflect.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from eval.rewards.registry import Reward
    from eval.server import ServeConfig

MAX_PIXELS = 1 << 29  # of all images of one request, 1.5 GiB: 512 of 1024 x 1024
BODIES_AT_ONCE = 8  # requests whose bytes and pixels are in memory before they wait in the queue
COME_AGAIN = {"Retry-After": "2"}


class Rejected(Exception):
    """A request that is answered without judging. status: of HTTP."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Service:
    """Loads a reward beside the running server, checks it, and judges what comes."""

    def __init__(self, config: ServeConfig, mapping: Mapping[str, Any], token: str | None):
        self.config, self.mapping, self.token = config, mapping, token
        self.reward: Reward | None = None
        self.batcher: Batcher | None = None
        self.failure: Exception | None = None
        self.manifest: dict[str, Any] = {}
        self.manifest_sha256 = ""
        self.requests: Counter[int] = Counter()
        self.began = time.monotonic()
        self._bodies = asyncio.Semaphore(BODIES_AT_ONCE)
        self._server: uvicorn.Server | None = None

    def run(self) -> int:
        """Serves until it is told to end. Errors: UserError when the port or the reward fails."""
        try:
            listener = listening(self.config.host, self.config.port)
        except OSError as error:
            raise UserError(
                f"{self.config.host}:{self.config.port} cannot be listened on ({error.strerror})",
                "Choose another --port, or end what has it.",
            ) from error
        host, port = listener.getsockname()[:2]
        print(f"listening on http://{host}:{port}; loading {self.mapping['reward']}", flush=True)
        settings = uvicorn.Config(
            self.app(),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=30,
            timeout_keep_alive=60,
        )
        self._server = uvicorn.Server(settings)
        self._server.run(sockets=[listener])
        if self.failure is not None:
            raise self.failure
        return 0

    def app(self) -> FastAPI:
        """The routes."""
        app = FastAPI(lifespan=self._life, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/score", self.score, methods=["POST"], response_model=None)
        app.add_api_route("/health", self.health, response_model=None)
        app.add_api_route("/manifest", self.show_manifest, response_model=None)
        app.add_api_route("/metrics", self.metrics, response_model=None)
        return app

    # --- loading ----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _life(self, app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._load())]
        if self.config.idle_offload:
            tasks.append(asyncio.create_task(self._rest()))
        yield
        for task in tasks:
            task.cancel()
        if self.batcher is not None:
            await self.batcher.stop()
        if self.reward is not None:
            self.reward.close()

    async def _load(self) -> None:
        try:
            reward = await asyncio.to_thread(self._built)
        except Exception as error:  # handed to run(), which raises it
            self.failure = error
            if self._server is not None:
                self._server.should_exit = True
            return
        c = self.config
        self.batcher = Batcher(reward, c.max_batch, c.max_wait, c.max_pending)
        self.batcher.start()
        self.reward = reward
        print(f"serving {self.mapping['reward']}", flush=True)

    def _built(self) -> Reward:
        reward = build(self.mapping)
        try:
            if self.config.check:
                reward.check()
            self.manifest = {**reward.manifest(), "checked": self.config.check}
        except BaseException:
            reward.close()
            raise
        text = json.dumps(self.manifest, sort_keys=True)
        self.manifest_sha256 = hashlib.sha256(text.encode()).hexdigest()
        return reward

    async def _rest(self) -> None:
        quiet = self.config.idle_offload
        while True:
            await asyncio.sleep(quiet / 4)
            batcher = self.batcher
            if batcher and not batcher.pending and time.monotonic() - batcher.last_work > quiet:
                await batcher.offload()

    # --- routes -----------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        state = {
            "status": "ready" if self.reward else "loading",
            "reward": self.mapping["reward"],
            "pending": self.batcher.pending if self.batcher else 0,
            "seconds": round(time.monotonic() - self.began, 1),
        }
        return JSONResponse(state, 200 if self.reward else 503, None if self.reward else COME_AGAIN)

    async def show_manifest(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        return JSONResponse({"manifest": self.manifest, "sha256": self.manifest_sha256})

    async def metrics(self, request: Request) -> Response:
        if self.token is not None and not self._has_token(request):
            return self._answer(401, {"error": "the token is missing or wrong"})
        counts = self.batcher.counts if self.batcher else Counter()
        lines = [
            f'reward_requests_total{{status="{status}"}} {n}'
            for status, n in sorted(self.requests.items())
        ]
        lines += [
            f'reward_items_total{{outcome="{outcome}"}} {counts[outcome]}'
            for outcome in ("judged", "unjudged", "fault_image", "fault_row", "fault_judge")
        ]
        lines += [
            f'reward_items_total{{outcome="fault_bug"}} {counts["fault_bug"]}',
            f"reward_batches_total {counts['batches']}",
            f"reward_offloads_total {counts['offloads']}",
            f"reward_judging_seconds_total {self.batcher.seconds if self.batcher else 0.0:.3f}",
            f"reward_pending_items {self.batcher.pending if self.batcher else 0}",
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def score(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        assert self.batcher is not None
        try:
            async with self._bodies:
                items = await _items(request)
                outcomes, images = await asyncio.to_thread(_pictures, items)
            good = [i for i, image in enumerate(images) if image is not None]
            self.batcher.counts["fault_image"] += len(items) - len(good)
            judged = await self.batcher.submit(
                [images[i] for i in good], [items[i].row for i in good]
            )
        except Rejected as error:
            return self._answer(error.status, {"error": str(error)})
        except Busy as error:
            return self._answer(503, {"error": str(error)})
        for i, outcome in zip(good, judged, strict=True):
            outcomes[i] = outcome
        return self._scored(items, outcomes)

    def _scored(self, items: Sequence[Item], outcomes: Sequence[Outcome]) -> Response:
        """200 with what became of each item; an error where it is the same for all of them."""
        results = [_result(item, outcome) for item, outcome in zip(items, outcomes, strict=True)]
        body = {"results": results, "manifest_sha256": self.manifest_sha256}
        kinds = {o.kind if isinstance(o, Fault) else "verdict" for o in outcomes}
        if "verdict" in kinds:
            return self._answer(200, body)
        message = next(o.message for o in outcomes if isinstance(o, Fault))
        if kinds <= {"image", "row"}:
            return self._answer(400, {"error": message, **body})
        if "bug" in kinds:
            return self._answer(500, {"error": message, **body})
        return self._answer(503, {"error": message, **body})

    def _refusal(self, request: Request) -> Response | None:
        if self.token is not None and not self._has_token(request):
            return self._answer(401, {"error": "the token is missing or wrong"})
        if self.reward is None:
            return self._answer(503, {"error": f"{self.mapping['reward']} is being loaded"})
        return None

    def _has_token(self, request: Request) -> bool:
        given = request.headers.get(TOKEN_HEADER, "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())

    def _answer(self, status: int, body: Mapping[str, Any]) -> Response:
        self.requests[status] += 1
        return JSONResponse(body, status, COME_AGAIN if status == 503 else None)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Named as TCP, or asyncio leaves small answers waiting for 40 ms."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


# --- requests -------------------------------------------------------------------------------------


async def _items(request: Request) -> list[Item]:
    """The items of a request. Errors: Rejected."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", "multipart/form-data"):
        raise Rejected(
            400, f"content type {kind or '(none)'} is not served; send application/json or "
            "multipart/form-data (nothing is unpickled here)",
        )  # fmt: skip
    body = await _body(request)
    try:
        if kind == "application/json":
            return await asyncio.to_thread(read_json, body)
        return await asyncio.to_thread(read_multipart, *await _parts(request, body))
    except ValueError as error:
        raise Rejected(400, str(error)) from None


async def _body(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY:
            raise Rejected(
                413, f"the request is larger than {MAX_BODY >> 20} MiB; send fewer items"
            )
        chunks.append(chunk)
    return b"".join(chunks)


async def _parts(request: Request, body: bytes) -> tuple[bytes, list[bytes]]:
    """(`items`, the images) of a multipart body. Errors: ValueError."""

    async def stream() -> AsyncIterator[bytes]:
        yield body

    parser = MultiPartParser(
        request.headers, stream(), max_files=MAX_ITEMS + 1, max_fields=4, max_part_size=MAX_BODY
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ValueError(f"the multipart body is malformed ({error.message})") from None
    except (KeyError, UnicodeDecodeError, LookupError) as error:
        raise ValueError(f"the multipart body is malformed ({error})") from None
    try:
        texts = [await _part(value) for name, value in form.multi_items() if name == "items"]
        images = [await _part(value) for name, value in form.multi_items() if name == "image"]
    finally:
        await form.close()
    if len(texts) != 1:
        raise ValueError(f"the multipart body has {len(texts)} parts named items; send one")
    return texts[0], images


async def _part(value: UploadFile | str) -> bytes:
    return value.encode() if isinstance(value, str) else await value.read()


def _pictures(items: Sequence[Item]) -> tuple[list[Outcome], list[Image | None]]:
    """(faults, images): where an image cannot be read, its fault; elsewhere one to be replaced."""
    outcomes: list[Outcome] = []
    images: list[Image | None] = []
    pixels = 0
    for item in items:
        try:
            image = read_picture(item.image)
        except ValueError as error:
            outcomes.append(Fault("image", str(error)))
            images.append(None)
            continue
        pixels += image.width * image.height
        if pixels > MAX_PIXELS:
            raise Rejected(
                413, f"the images have more than {MAX_PIXELS:,} pixels together; send fewer"
            )
        outcomes.append(Fault("judge", "it was not judged"))
        images.append(image)
    return outcomes, images


def _result(item: Item, outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Fault):
        return {"id": item.id, "error": {"kind": outcome.kind, "message": outcome.message}}
    return {"id": item.id, "verdict": outcome.to_record()}
