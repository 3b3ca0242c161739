"""`scripts/sft/train_sft.sh`: how it starts one process, many, and many machines; what it refuses.

A stand-in for Python writes down what it is asked for.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "scripts" / "accelerate"
VARIABLES = (
    *("NNODES", "NODE_RANK", "NPROC", "MASTER_ADDR", "MASTER_PORT", "RUN_DIR", "LAUNCHER"),
    *("ACCELERATE_CONFIG", "OMP_NUM_THREADS"),
)

STAND_IN = """#!/bin/bash
case "$*" in
  "-c import torch"*) echo "${FAKE_GPUS:-0}" ;;
  *) printf '%s\\n' "$@" >"$RAN"; echo "$OMP_NUM_THREADS" >"$RAN.threads"; exit "${RC:-0}" ;;
esac
"""


@pytest.fixture
def start(tmp_path):
    """Runs the script with some variables; returns (what Python was asked for, the process)."""
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def run(*arguments: str, **variables: str) -> tuple[list[str], subprocess.CompletedProcess]:
        ran = tmp_path / "ran"
        ran.unlink(missing_ok=True)
        clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        environment = clean | {"PYTHON_BIN": str(stand_in), "RAN": str(ran)} | variables
        done = subprocess.run(
            ["bash", "scripts/sft/train_sft.sh", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return ran.read_text().splitlines() if ran.exists() else [], done

    return run


# --- how processes are started --------------------------------------------------------------------


def test_without_a_gpu_or_with_one_a_single_process_runs(start):
    for gpus in ("0", "1"):
        asked, done = start("--data", "some data", FAKE_GPUS=gpus)
        assert done.returncode == 0, done.stderr
        assert asked == ["-m", "umm_reflect", "sft", "--data", "some data"]


def test_all_gpus_of_a_machine_are_used_and_need_no_port(start):
    asked, _ = start("--preset", "lora", FAKE_GPUS="8")
    assert asked == [
        *("-m", "torch.distributed.run", "--nproc-per-node", "8"),
        *("--standalone", "--local-addr", "127.0.0.1"),
        *("-m", "umm_reflect", "sft", "--preset", "lora"),
    ]
    asked, _ = start(FAKE_GPUS="8", NPROC="2", MASTER_PORT="29600")
    assert asked[2:] == [
        *("--nproc-per-node", "2", "--nnodes", "1", "--node-rank", "0"),
        *("--master-addr", "127.0.0.1", "--master-port", "29600", "-m", "umm_reflect", "sft"),
    ]


def test_every_machine_is_told_its_rank_and_where_the_first_one_is(start):
    asked, _ = start(FAKE_GPUS="8", NNODES="3", NODE_RANK="2", MASTER_ADDR="10.0.0.1")
    assert asked[2:-3] == [
        *("--nproc-per-node", "8", "--nnodes", "3", "--node-rank", "2"),
        *("--master-addr", "10.0.0.1", "--master-port", "29500"),
    ]
    # one GPU a machine is still a run of several processes
    asked, _ = start(FAKE_GPUS="1", NNODES="2", MASTER_ADDR="10.0.0.1")
    assert asked[:4] == ["-m", "torch.distributed.run", "--nproc-per-node", "1"]


def test_the_run_folder_becomes_the_output_folder(start):
    asked, _ = start("--data", "x", RUN_DIR="runs/one two")
    assert asked[3:] == ["--data", "x", "--output-dir", "runs/one two"]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("ddp", "ddp"), ("fsdp2", "fsdp2"), ("zero2", "deepspeed"), ("zero3", "deepspeed")],
)
def test_accelerate_starts_the_processes_with_the_strategy_of_its_config(start, name, strategy):
    asked, done = start(
        *("--data", "x"),
        **{"LAUNCHER": "accelerate", "ACCELERATE_CONFIG": name, "FAKE_GPUS": "4"},
        **{"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"},
    )
    assert done.returncode == 0, done.stderr
    assert asked == [
        *("-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{name}.yaml")),
        *("--num_processes", "8", "--num_machines", "2", "--machine_rank", "1"),
        *("--main_process_ip", "10.0.0.1", "--main_process_port", "29500"),
        *("-m", "umm_reflect", "sft", "--data", "x", "--strategy", strategy),
    ]


def test_a_strategy_that_is_given_stays_and_a_config_may_be_a_file(start, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: MULTI_GPU\n")
    asked, _ = start("--strategy=ddp", LAUNCHER="accelerate", ACCELERATE_CONFIG=str(own))
    assert asked[3] == str(own)
    assert asked[-3:] == ["umm_reflect", "sft", "--strategy=ddp"]
    asked, _ = start(LAUNCHER="accelerate", ACCELERATE_CONFIG="npu", NPROC="8")
    assert asked[-2:] == ["umm_reflect", "sft"]  # the trainer chooses


def test_cores_are_shared_out_unless_the_number_of_threads_is_given(start, tmp_path):
    start(NPROC="4096")
    assert (tmp_path / "ran.threads").read_text() == "1\n"
    start(NPROC="2", OMP_NUM_THREADS="5")
    assert (tmp_path / "ran.threads").read_text() == "5\n"


def test_the_exit_code_of_the_processes_is_the_scripts(start):
    for gpus in ("1", "2"):
        _, done = start(FAKE_GPUS=gpus, RC="7")
        assert done.returncode == 7


# --- what is refused ------------------------------------------------------------------------------

REFUSED = {
    "a word for a number": ({"NPROC": "eight"}, "NPROC is 'eight'. Give a whole number, 1 or more"),
    "no process": ({"NPROC": "0"}, "NPROC is '0'. Give a whole number, 1 or more"),
    "too many": ({"NPROC": "4", "FAKE_GPUS": "2"}, "NPROC is 4, but this machine shows 2 GPU(s)"),
    "a rank too high": ({"NODE_RANK": "1"}, "NODE_RANK is 1 with 1 machine(s)"),
    "no address": ({"NNODES": "2"}, "MASTER_ADDR is not set. Name machine 0"),
    "a bad port": ({"MASTER_PORT": "-1"}, "MASTER_PORT is '-1'. Give a whole number"),
    "another launcher": ({"LAUNCHER": "slurm"}, "there is no LAUNCHER slurm. Choose torchrun or"),
    "a config alone": ({"ACCELERATE_CONFIG": "zero3"}, "goes with another launcher. Set LAUNCHER"),
    "no such config": (
        {"LAUNCHER": "accelerate", "ACCELERATE_CONFIG": "zero1"},
        "there is no ACCELERATE_CONFIG zero1. Give a file, or one of: ddp fsdp2 npu zero2 zero3",
    ),
    "no such python": ({"PYTHON_BIN": "/no/python"}, "/no/python cannot import torch"),
}


@pytest.mark.parametrize(("variables", "line"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_started_is_one_line_and_nothing_runs(start, variables, line):
    asked, done = start(**variables)
    assert done.returncode == 2
    assert f"error: {line}" in done.stderr or line in done.stderr
    assert asked == []


def test_two_output_folders_are_refused(start):
    for flag in (["--output-dir", "a"], ["--output-dir=a"]):
        _, done = start(*flag, RUN_DIR="b")
        assert done.returncode == 2
        assert "RUN_DIR and --output-dir are both given" in done.stderr


# --- signals --------------------------------------------------------------------------------------

# A launcher with two processes, each of which takes a second to save.
LAUNCHER = """#!/bin/bash
case "$*" in "-c import torch"*) echo 2; exit ;; esac
process() {
  trap 'sleep 1; echo saved >>"$RAN.saved"; exit 0' TERM
  echo up >>"$RAN.up"
  while true; do sleep 0.05; done
}
trap 'echo killed >>"$RAN.killed"; exit 9' TERM
process & process &
wait
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_processes_and_their_launcher_waits_until_they_have_saved(
    tmp_path, sent
):
    launcher = tmp_path / "python"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment = clean | {"PYTHON_BIN": str(launcher), "RAN": str(tmp_path / "ran")}
    running = subprocess.Popen(
        ["bash", "scripts/sft/train_sft.sh"],
        cwd=ROOT,
        env=environment,
        # a shell's background jobs ignore SIGINT, and so would what tests start from there
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    up = tmp_path / "ran.up"
    for _ in range(200):
        if up.exists() and up.read_text().count("up") == 2:
            break
        time.sleep(0.05)
    running.send_signal(sent)
    assert running.wait(timeout=20) == 0
    assert (tmp_path / "ran.saved").read_text() == "saved\nsaved\n"
    assert not (tmp_path / "ran.killed").exists()


# --- launch files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_every_launch_file(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    kinds = {"ddp": "MULTI_GPU", "fsdp2": "MULTI_GPU", "npu": "MULTI_NPU"}
    assert config.distributed_type.value == kinds.get(path.stem, "DEEPSPEED")
    content = yaml.safe_load(path.read_text())
    if path.stem.startswith("zero"):
        assert content["deepspeed_config"]["zero_stage"] == int(path.stem[-1])
    assert path.stem in path.read_text().partition("compute_environment")[0]


# --- for real -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_real_processes_train_and_leave_a_checkpoint(tmp_path):
    """Everything but the GPUs: the script, torchrun, gloo, FSDP2, the trainer."""
    from tests.tiny import write_tiny_checkpoint
    from umm_reflect.checkpoint import load

    base = write_tiny_checkpoint(tmp_path / "base")
    example = [sys.executable, "-m", "umm_reflect", "data", "example", str(tmp_path / "data")]
    subprocess.run(example, cwd=ROOT, check=True, timeout=60, capture_output=True)
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    variables = {"NPROC": "2", "RUN_DIR": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            *("bash", "scripts/sft/train_sft.sh", "--data", str(tmp_path / "data")),
            *("--model", str(base), "--preset", "nano", "--max-steps", "1", "--workers", "0"),
            *("--packs-per-step", "2", "--validation.pictures", "0", "--device", "cpu"),
        ],
        cwd=ROOT,
        env=clean | variables | {"PYTHON_BIN": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    load(tmp_path / "run" / "checkpoint", device="cpu")
