"""SpectraReward through a real vLLM server equals transformers, started as the card says.

pytest --slow tests/test_spectra_server.py         # installs vLLM's CPU build the first time
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from eval.rewards.chat import picture_part
from eval.rewards.registry import build
from tests.qwen_vl import write_tiny_qwen_vl
from tests.spectra_reference import cases
from tests.vllm_environment import Unavailable, cpu_variables, vllm_environment
from umm_reflect.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]

ROOT = Path(__file__).resolve().parent.parent
INSTALL, START = 1500, 600  # seconds at most


@pytest.fixture(scope="module")
def environment():
    try:
        return vllm_environment(INSTALL)
    except Unavailable as why:
        pytest.skip(f"slow service: {why}")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_qwen_vl(tmp_path_factory.mktemp("vl") / "Tiny-VL")


@pytest.fixture(scope="module")
def expected(environment, model):
    out = model.parent / "expected.json"
    command = [str(environment.python), "tests/spectra_reference.py", str(model), str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def server(environment, model):
    """MODEL HOST PORT DATA_PARALLEL, as on the card, and the number type of the comparison."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log = model.parent / "server.log"
    card = ["bash", "scripts/serve_spectrareward.sh", str(model), "0.0.0.0", str(port), "1"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*card, "--dtype", "float32", "--max-model-len", "1024"],
            cwd=ROOT,
            env=cpu_variables() | {"VLLM": str(environment.vllm)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START
    try:
        while not _is_up(url):
            said = log.read_text()[-3000:]
            assert process.poll() is None, said
            assert time.monotonic() < end, f"not up after {START} s\n{said}"
            time.sleep(2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def close(verdicts, expected) -> bool:
    found = [v.evidence["logprobs"] for v in verdicts]
    return all(
        own == pytest.approx(other, abs=1e-4) for own, other in zip(found, expected, strict=True)
    )


def test_vllm_equals_transformers_token_by_token_started_and_asked_as_the_card_says(
    monkeypatch, tmp_path, server, model, expected
):
    # one test, so that several processes of pytest do not start a server each
    monkeypatch.setenv("SPECTRAREWARD_MODEL_ID", str(model))
    monkeypatch.setenv("SPECTRAREWARD_URL", server)
    reward = build({"reward": "spectra"})
    verdicts = reward.score(*cases())
    assert close(verdicts, expected)
    assert len({v.value for v in verdicts}) == len(verdicts)
    assert reward.manifest()["vllm"]

    remember_prefixes(server, str(model))
    assert close(reward.score(*cases()), expected)
    assert close(reward.score(*cases()), expected)

    with pytest.raises(UserError, match="does not tell good from bad"):
        reward.check()
    reward.close()
    other = build({"reward": "spectra", "model": "another"})
    with pytest.raises(UserError, match=r"serves .*Tiny-VL, not another"):
        other.check()
    other.close()
    assert score_by_command(tmp_path) == pytest.approx(verdicts[0].value, abs=1e-4)


def remember_prefixes(server: str, model: str) -> None:
    """Has every conversation twice, so that vLLM has all of their beginnings in its cache."""
    images, rows = cases()
    for _ in range(2):
        for image, row in zip(images, rows, strict=True):
            messages = [
                {"role": "user", "content": [picture_part(image)]},
                {"role": "assistant", "content": row["prompt"]},
            ]
            body = {"model": model, "messages": messages, "max_tokens": 1}
            more = {"add_generation_prompt": False, "continue_final_message": True}
            answer = httpx.post(f"{server}/v1/chat/completions", json=body | more, timeout=60)
            assert answer.status_code == 200, answer.text
    lines = httpx.get(f"{server}/metrics").text.splitlines()
    [hits] = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total{")]
    assert float(hits.rpartition(" ")[2]) > 0


def score_by_command(folder: Path) -> float:
    """The value that `umm-reflect reward score` writes for the first case."""
    images, rows = cases()
    images[0].save(folder / "a.png")
    words = ["reward", "score", str(folder / "a.png"), "--reward", "spectra"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "umm_reflect", *words),
            *("--prompt", rows[0]["prompt"], "--output-dir", str(folder / "out")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    [line] = (folder / "out" / "verdicts.jsonl").read_text().splitlines()
    return json.loads(line)["value"]
