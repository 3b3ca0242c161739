"""The reward service as other programs meet it: many clients, a kill, nonsense, tokens, loading."""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from PIL import Image

from eval.client import RewardClient
from eval.pictures import as_png
from eval.rewards.registry import build
from eval.rewards.selftest import shape_pairs
from eval.shapes import ShapesVerifier
from eval.transport import Patience, Refused, ServiceError
from umm_reflect.errors import UserError
from umm_reflect.shapes.render import render
from umm_reflect.shapes.sampler import sample_row, scene_for

ROOT = Path(__file__).resolve().parent.parent
PAIR = shape_pairs()[0]
QUICK = Patience(attempts=12, first_pause=0.2, longest_pause=2.0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start(port: int, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "eval.server", "--reward", "shapes", "--set", "workers=1"]
    return subprocess.Popen(
        [*command, "--port", str(port), *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def serving(*more: str) -> Iterator[tuple[str, subprocess.Popen]]:
    port = free_port()
    process = start(port, *more)
    url = f"http://127.0.0.1:{port}"
    try:
        waiting = RewardClient(url, patience=QUICK)
        waiting.wait_ready(60)
        waiting.close()
        yield url, process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[str, subprocess.Popen]]:
    with serving("--max-wait", "0.02") as running:
        yield running


def samples(count: int, seed: int = 0) -> list[tuple[Image.Image, dict]]:
    """Different scenes with their rows; every second row is that of another scene."""
    rng = random.Random(seed)
    rows = [sample_row(rng, family="compound") for _ in range(count)]
    images = [render(scene_for(row, rng)) for row in rows]
    return [(image, dict(rows[i if i % 2 else i - 2])) for i, image in enumerate(images)]


def metrics(url: str) -> dict[str, float]:
    """The counters of a service, by name."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def record(verdict) -> dict:
    return verdict.to_record()


# --- many clients ---------------------------------------------------------------------------------


def test_a_thousand_items_of_eight_clients_are_neither_lost_nor_crossed(service):
    url, _ = service
    distinct = samples(125)
    alone = ShapesVerifier().score(*zip(*distinct, strict=True))
    expected = [record(verdict) for verdict in alone]
    assert len({json.dumps(one) for one in expected}) == 125

    def one_client(number: int) -> int:
        order = list(range(125))
        random.Random(number).shuffle(order)
        client = RewardClient(url, patience=QUICK, chunk=7)
        images, rows = zip(*(distinct[i] for i in order), strict=True)
        found = client.score(images, rows)
        client.close()
        assert [record(verdict) for verdict in found] == [expected[i] for i in order]
        return len(found)

    before = metrics(url)
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(one_client, range(8))) == 1_000
    after = metrics(url)
    assert (
        after['reward_items_total{outcome="judged"}']
        - before['reward_items_total{outcome="judged"}']
        == 1_000
    )
    # fewer than there were requests: items of several clients were judged together
    assert after["reward_batches_total"] - before["reward_batches_total"] < 8 * 18
    assert after["reward_pending_items"] == 0


def test_a_service_that_is_killed_and_started_again_is_gone_on_with():
    port = free_port()
    process = start(port)
    url = f"http://127.0.0.1:{port}"
    distinct = samples(60, seed=1)
    expected = [record(v) for v in ShapesVerifier().score(*zip(*distinct, strict=True))]
    patience = Patience(attempts=40, first_pause=0.2, longest_pause=1.0)
    client = RewardClient(url, patience=patience, chunk=2, connections=2)
    client.wait_ready(60)
    found: list = []
    images, rows = zip(*(distinct * 5), strict=True)
    scoring = threading.Thread(target=lambda: found.extend(client.score(images, rows)))
    scoring.start()
    time.sleep(0.7)
    assert scoring.is_alive(), "it was done before the kill"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    time.sleep(1.0)
    process = start(port)
    try:
        scoring.join(120)
        assert not scoring.is_alive()
        assert [record(verdict) for verdict in found] == expected * 5
    finally:
        process.kill()
        process.communicate()
        client.close()


def test_a_service_that_stays_away_names_what_is_pending():
    url = f"http://127.0.0.1:{free_port()}"
    client = RewardClient(url, patience=Patience(2, 0.01), chunk=2)
    rows = [{"prompt": "a star", "uid": f"row-{i}"} for i in range(40)]
    with pytest.raises(ServiceError, match=r"0 of 40 images .* pending: row-0, row-1.* 35 more"):
        client.score([Image.new("RGB", (8, 8))] * 40, rows)
    with pytest.raises(ServiceError, match=r"is not ready after 0 s: it does not answer"):
        client.wait_ready(0)
    client.close()


def test_another_judge_under_the_same_address_is_noticed(service):
    url, _ = service
    client = RewardClient(url, patience=QUICK)
    client.score([PAIR.good], [PAIR.row])
    client._judge = "0" * 64
    with pytest.raises(ServiceError, match="judges with another manifest than before"):
        client.score([PAIR.good], [PAIR.row])
    client.close()


# --- one request ----------------------------------------------------------------------------------


def item(name: str = "a", row: dict | None = None, image: bytes | None = None) -> dict:
    data = as_png(PAIR.good) if image is None else image
    row = PAIR.row if row is None else row
    return {"id": name, "row": row, "image": base64.b64encode(data).decode()}


def post(url: str, content: object, **more) -> httpx.Response:
    return httpx.post(f"{url}/score", json=content, timeout=60, **more)


def test_json_with_images_as_base64_is_served_too(service):
    answer = post(service[0], {"items": [item("x"), item("y")]})
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [result["id"] for result in results] == ["x", "y"]
    assert all(result["verdict"]["correct"] for result in results)


def test_one_bad_item_does_not_spoil_its_neighbours(service):
    good = item("good")
    cut = item("cut", image=as_png(PAIR.good)[:200])
    missing = item("missing", row={"tag": "colors", "prompt": "a red circle"})
    unknown = item("unknown", row={"include": [{"class": "dog", "count": 1}]})
    answer = post(service[0], {"items": [cut, missing, good, unknown]})
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [r.get("error", {}).get("kind") for r in results] == ["image", "row", None, "row"]
    assert "cut short or damaged" in results[0]["error"]["message"]
    assert "no include clause" in results[1]["error"]["message"]
    assert results[2]["verdict"]["correct"] is True
    assert "unknown class 'dog'" in results[3]["error"]["message"]


def test_items_that_are_all_bad_are_the_callers_fault(service):
    answer = post(service[0], {"items": [item(image=b"no picture")]})
    assert answer.status_code == 400
    assert "no PNG, JPEG, WEBP file" in answer.json()["error"]
    client = RewardClient(service[0], patience=QUICK)
    [verdict] = client.score([Image.new("RGB", (8, 8))], [{"prompt": "x"}])
    client.close()
    assert verdict.error.startswith("row: row has no include clause")


BAD = {
    "no json": b"{",
    "a list": b"[]",
    "no items": b'{"items": []}',
    "another key": json.dumps({"items": [item()], "x": 1}).encode(),
    "an item without row": b'{"items": [{"id": "a", "image": ""}]}',
    "an id twice": json.dumps({"items": [item("a"), item("a")]}).encode(),
    "a number as id": json.dumps({"items": [item(7)]}).encode(),
    "no base64": json.dumps({"items": [{**item(), "image": "***"}]}).encode(),
    "a clause of numbers": json.dumps({"items": [item(row={"include": [1, 2]})]}).encode(),
    "a count of text": json.dumps(
        {"items": [item(row={"include": [{"class": "star", "count": "2"}]})]}
    ).encode(),
    "513 items": json.dumps({"items": [item(str(i), image=b"x") for i in range(513)]}).encode(),
    "deep": b'{"items": ' + b"[" * 100_000,
    "latin": '{"items": "\u00e9"}'.encode("latin-1"),
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_a_malformed_request_is_400_with_the_reason(service, body):
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{service[0]}/score", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_a_pickle_is_refused_and_never_opened(service):
    class Opened:
        def __reduce__(self):
            return (print, ("opened",))

    body = pickle.dumps({"images": [b""], "meta_datas": [{}], "x": Opened()})
    for kind in ("application/octet-stream", "application/json", "multipart/form-data; boundary=x"):
        headers = {"Content-Type": kind}
        answer = httpx.post(f"{service[0]}/score", content=body, headers=headers)
        assert answer.status_code == 400
    assert "nothing is unpickled" in httpx.post(f"{service[0]}/score", content=body).text


def test_ten_thousand_items_are_sent_in_pieces(service):
    client = RewardClient(service[0], patience=QUICK, chunk=500)
    pixel = Image.new("RGB", (1, 1), "white")
    rows = [dict(PAIR.row)] * 10_000
    verdicts = client.score([pixel] * 10_000, rows)
    client.close()
    assert len(verdicts) == 10_000
    assert {verdict.correct for verdict in verdicts} == {False}


def resident(process: subprocess.Popen) -> int:
    """Bytes of memory that a process holds."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def nonsense(rng: random.Random, png: bytes) -> tuple[str, bytes]:
    """(content type, body) of something that is nearly a request, or not at all."""
    text = json.dumps({"items": [item(image=png), item("b", image=png[: rng.randrange(len(png))])]})
    multipart = (
        b'--x\r\nContent-Disposition: form-data; name="items"\r\n\r\n'
        b'{"items": [{"id": "a", "row": {}}]}\r\n'
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
        + png
        + b"\r\n--x--\r\n"
    )
    kind = rng.choice(("json", "json", "multipart", "multipart", "random"))
    if kind == "random":
        types = ("application/json", "text/plain", "", "multipart/form-data")
        return rng.choice(types), rng.randbytes(rng.randrange(600))
    body = bytearray(text.encode() if kind == "json" else multipart)
    for _ in range(rng.randint(1, 12)):
        action, place = rng.randrange(3), rng.randrange(len(body))
        if action == 0:
            body[place] = rng.randrange(256)
        elif action == 1:
            del body[place : place + rng.randint(1, 30)]
        else:
            body[place:place] = rng.choice(
                (b"null", b"[", b"}", b"1e999", b'"\\u0000"', b"\r\n--x")
            )
        if not body:
            body = bytearray(b"x")
    header = "application/json" if kind == "json" else "multipart/form-data; boundary=x"
    return header, bytes(body)


def test_two_thousand_malformed_bodies_break_nothing(service):
    url, process = service
    rng, png = random.Random(7), as_png(PAIR.good.resize((48, 48)))
    statuses: dict[int, int] = {}
    at_start = 0
    with httpx.Client(timeout=60) as client:
        for number in range(2_000):
            if number == 400:
                at_start = resident(process)
            kind, body = nonsense(rng, png)
            answer = client.post(f"{url}/score", content=body, headers={"Content-Type": kind})
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert set(statuses) <= {200, 400, 413}, statuses
        assert statuses[400] > 1_000
        assert resident(process) - at_start < 40 << 20
        assert client.get(f"{url}/health").status_code == 200
    assert metrics(url)['reward_items_total{outcome="fault_bug"}'] == 0
    assert process.poll() is None


# --- starting, tokens, ending ---------------------------------------------------------------------


def test_health_manifest_and_methods(service):
    url, _ = service
    health = httpx.get(f"{url}/health").json()
    assert (health["status"], health["reward"]) == ("ready", "shapes")
    served = httpx.get(f"{url}/manifest").json()
    assert served["manifest"]["settings"] == {"workers": 1}
    assert served["manifest"]["checked"] is True
    assert len(served["sha256"]) == 64
    assert httpx.get(f"{url}/score").status_code == 405
    assert httpx.get(f"{url}/docs").status_code == 404


def test_a_token_is_asked_of_everything_but_health(tmp_path):
    file = tmp_path / "token.txt"
    file.write_text("long-random-word\n")
    with serving("--token-file", str(file)) as (url, _):
        assert httpx.get(f"{url}/health").status_code == 200
        for path in ("/manifest", "/metrics"):
            assert httpx.get(url + path).status_code == 401
        assert post(url, {"items": [item()]}).status_code == 401
        wrong = RewardClient(url, "another", patience=QUICK)
        with pytest.raises(Refused, match="the token is missing or wrong"):
            wrong.score([PAIR.good], [PAIR.row])
        wrong.close()
        reward = build({"reward": "http", "url": url, "token_file": str(file)})
        reward.check()
        assert reward.score([PAIR.good], [PAIR.row])[0].correct
        assert reward.manifest()["served"]["manifest"]["reward"] == "shapes"
        reward.close()


def test_the_end_is_orderly_and_a_taken_port_is_named():
    with serving() as (url, process):
        taken = start(int(url.rpartition(":")[2]))
        said, _ = taken.communicate(timeout=60)
        assert taken.returncode == 1
        assert "cannot be listened on" in said
        process.terminate()
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 143
        assert "Traceback" not in said


def test_a_reward_that_fails_its_check_is_never_served():
    process = subprocess.run(
        [
            *(sys.executable, "-m", "eval.server", "--reward", "judge", "--port", "0"),
            *("--set", "url=http://127.0.0.1:9", "model=x", "attempts=1"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 1
    assert "serving" not in process.stdout
    assert process.stderr.startswith("error: the judge at http://127.0.0.1:9 answers nothing")


def test_a_host_that_others_reach_without_a_token_is_warned_of(monkeypatch, capsys):
    from eval import server, service

    monkeypatch.setattr(service.Service, "run", lambda self: 0)
    assert server.main(["--reward", "shapes", "--host", "0.0.0.0"]) == 0
    assert "warning: whoever reaches 0.0.0.0:18092" in capsys.readouterr().err
    assert server.main(["--reward", "shapes"]) == 0
    assert capsys.readouterr().err == ""


def test_an_empty_token_file_is_no_token(tmp_path):
    from eval.server import read_token

    (tmp_path / "t").write_text("\n")
    with pytest.raises(UserError, match="holds no token"):
        read_token(tmp_path / "t")
    assert read_token(None) is None


def test_a_picture_of_each_kind_arrives_as_it_was():
    out = io.BytesIO()
    PAIR.good.save(out, "JPEG", quality=95)
    with serving() as (url, _):
        answer = post(url, {"items": [item("jpeg", image=out.getvalue()), item("png")]})
    assert all(result["verdict"]["correct"] for result in answer.json()["results"])
