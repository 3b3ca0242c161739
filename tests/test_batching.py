"""Images of many requests in one batch: faults stay with their item, memory, quiet, the end."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest
from PIL import Image

from eval import service as service_module
from eval.batching import Batcher, Busy, Fault, outcomes_of
from eval.rewards.selftest import shape_pairs
from eval.server import ServeConfig
from eval.service import Service
from eval.verdict import Verdict
from eval.wire import read_json, write_request
from umm_reflect.errors import UserError

PIXEL = Image.new("RGB", (1, 1))


class Stub:
    """A reward whose verdict is the row's number; `limit`: images that fit into its memory."""

    def __init__(self, limit: int = 1000, seconds: float = 0.0):
        self.limit, self.seconds = limit, seconds
        self.sizes: list[int] = []
        self.offloads = 0

    def score(self, images, rows):
        self.sizes.append(len(images))
        time.sleep(self.seconds)
        if len(images) > self.limit:
            raise MemoryError("too many")
        for row in rows:
            if "bad" in row:
                raise ValueError("the row is bad")
            if "bug" in row:
                raise KeyError("bug")
            if "dead" in row:
                raise UserError("the judge is dead")
        return [Verdict(None, row["n"] / 100, "x") for row in rows]

    def manifest(self):
        return {"reward": "stub"}

    def check(self):
        pass

    def offload(self):
        self.offloads += 1

    def close(self):
        pass


def rows(count: int, **more) -> list[dict]:
    return [{"n": n, **(more if n == 3 else {})} for n in range(count)]


def numbers(outcomes) -> list[object]:
    return [o.kind if isinstance(o, Fault) else round(o.score * 100) for o in outcomes]


# --- one batch ------------------------------------------------------------------------------------


def test_a_bad_row_is_found_and_its_neighbours_are_judged(capsys):
    assert numbers(outcomes_of(Stub(), [PIXEL] * 6, rows(6, bad=1))) == [0, 1, 2, "row", 4, 5]
    assert numbers(outcomes_of(Stub(), [PIXEL] * 2, rows(2))) == [0, 1]
    assert capsys.readouterr().err == ""


def test_a_batch_that_does_not_fit_is_halved_until_it_does():
    stub = Stub(limit=2)
    assert numbers(outcomes_of(stub, [PIXEL] * 8, rows(8))) == list(range(8))
    assert stub.sizes == [8, 4, 2, 2, 4, 2, 2]


def test_a_dead_judge_and_a_bug_are_faults_of_all_and_a_bug_is_logged(capsys):
    assert numbers(outcomes_of(Stub(), [PIXEL] * 4, rows(4, dead=1))) == ["judge"] * 4
    assert capsys.readouterr().err == ""
    found = outcomes_of(Stub(), [PIXEL] * 4, rows(4, bug=1))
    assert numbers(found) == ["bug"] * 4
    assert "KeyError" in capsys.readouterr().err
    assert "Traceback" not in found[0].message


# --- the queue ------------------------------------------------------------------------------------


def test_requests_that_come_together_are_judged_together_and_answered_apart():
    async def main() -> tuple[list, list[int]]:
        stub = Stub()
        batcher = Batcher(stub, max_batch=64, max_wait=0.05, max_pending=100)
        batcher.start()
        many = await asyncio.gather(
            *(batcher.submit([PIXEL] * 3, [{"n": 10 * k + i} for i in range(3)]) for k in range(5))
        )
        await batcher.stop()
        return [numbers(outcomes) for outcomes in many], stub.sizes

    answers, sizes = asyncio.run(main())
    assert answers == [[10 * k, 10 * k + 1, 10 * k + 2] for k in range(5)]
    assert sizes == [15]


def test_a_full_queue_says_so_and_a_batch_has_a_size():
    async def main() -> list[int]:
        stub = Stub(seconds=0.05)
        batcher = Batcher(stub, max_batch=4, max_wait=0.0, max_pending=10)
        batcher.start()
        first = asyncio.create_task(batcher.submit([PIXEL] * 9, rows(9)))
        await asyncio.sleep(0.01)
        with pytest.raises(Busy, match="wait already"):
            await batcher.submit([PIXEL] * 9, rows(9))
        assert numbers(await first) == list(range(9))
        await batcher.stop()
        return stub.sizes

    assert asyncio.run(main()) == [4, 4, 1]


def test_what_waits_at_the_end_is_told_so():
    async def main() -> list:
        batcher = Batcher(Stub(seconds=0.3), max_batch=2, max_wait=0.0, max_pending=10)
        batcher.start()
        waiting = asyncio.create_task(batcher.submit([PIXEL] * 4, rows(4)))
        await asyncio.sleep(0.05)
        await batcher.stop()
        return numbers(await asyncio.wait_for(waiting, 5))

    assert asyncio.run(main()) == ["judge"] * 4


# --- the service around it ------------------------------------------------------------------------


def run_service(monkeypatch, build, talk, **settings):
    """What `talk(client)` returns, of a service whose reward `build()` makes."""
    monkeypatch.setattr(service_module, "build", lambda mapping: build())
    service = Service(ServeConfig("stub", **settings), {"reward": "stub"}, None)
    app = service.app()

    async def main():
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            return await talk(client)

    return asyncio.run(main()), service


async def score(client: httpx.AsyncClient, row: dict) -> httpx.Response:
    return await client.post("/score", **write_request([PIXEL], [row], ["a"]))


async def until_ready(client: httpx.AsyncClient) -> None:
    while (await client.get("/health")).status_code != 200:
        await asyncio.sleep(0.01)


def test_while_it_loads_it_says_so_and_then_serves(monkeypatch):
    may_load = threading.Event()

    def build():
        may_load.wait(10)
        return Stub()

    async def talk(client):
        health = await client.get("/health")
        early = await score(client, {"n": 50})
        may_load.set()
        await until_ready(client)
        return health, early, await score(client, {"n": 50})

    (health, early, late), _ = run_service(monkeypatch, build, talk)
    assert (health.status_code, health.json()["status"]) == (503, "loading")
    assert (early.status_code, early.json()["error"]) == (503, "stub is being loaded")
    assert early.headers["Retry-After"] == "2"
    assert late.json()["results"][0]["verdict"]["score"] == 0.5


def test_a_reward_that_fails_to_load_is_remembered_as_the_reason(monkeypatch):
    def build():
        raise UserError("the weights are damaged")

    async def talk(client):
        await asyncio.sleep(0.05)
        return (await client.get("/health")).status_code

    status, service = run_service(monkeypatch, build, talk)
    assert status == 503
    assert str(service.failure) == "the weights are damaged"


def test_after_a_quiet_period_the_weights_leave_the_device_once(monkeypatch):
    stub = Stub()

    async def talk(client):
        await until_ready(client)
        await score(client, {"n": 1})
        await asyncio.sleep(0.5)
        rested = stub.offloads
        again = await score(client, {"n": 2})
        return rested, again.status_code, (await client.get("/metrics")).text

    (rested, status, metrics), _ = run_service(monkeypatch, lambda: stub, talk, idle_offload=0.1)
    assert (rested, status) == (1, 200)
    assert "reward_offloads_total 1" in metrics


def test_a_judge_that_is_away_is_503_and_a_bug_is_500_without_its_trace(monkeypatch):
    async def talk(client):
        await until_ready(client)
        return [await score(client, {"n": 3, name: 1}) for name in ("dead", "bug", "bad")]

    (dead, bug, bad), _ = run_service(monkeypatch, Stub, talk)
    assert (dead.status_code, dead.json()["error"]) == (503, "the judge is dead")
    assert (bug.status_code, bug.json()["error"]) == (
        500,
        "the judge failed (KeyError); see its log",
    )
    assert (bad.status_code, bad.json()["error"]) == (400, "the row is bad")


# --- bits -----------------------------------------------------------------------------------------


def test_numbers_that_json_lacks_are_refused_before_they_are_sent():
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_request([PIXEL], [{"x": float("nan")}], ["a"])
    with pytest.raises(ValueError, match="no base64"):
        read_json(b'{"items": [{"id": "a", "row": {}, "image": "\\u00e9"}]}')


def test_the_self_test_rows_are_rows_of_the_shapes_world():
    assert [pair.row["tag"] for pair in shape_pairs()] == [
        *("colors", "single_object", "counting", "compound")
    ]
