"""scripts/eval/geneval553.sh: what it starts, with the released variables."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "eval" / "geneval553.sh"


@pytest.fixture
def python(tmp_path):
    """An interpreter that prints its arguments, one a line."""
    path = tmp_path / "python"
    path.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)
    return path


def start(python, *flags, **variables):
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env = {**kept, "PYTHON_BIN": str(python), **variables}
    return subprocess.run(
        ["bash", str(SCRIPT), *flags], env=env, capture_output=True, text=True, check=False
    )


def test_an_arm_and_a_model_suffice(python):
    done = start(python, ARM="sft", MODEL_DIR="pretrained/SFT")
    assert done.stdout.split() == [
        *("-m", "umm_reflect", "eval", "geneval553", "--model", "pretrained/SFT", "--arm", "sft"),
        *("--profile", "release", "--gpus", "0", "--output-dir", "outputs/geneval553/sft"),
        "--resume",
    ]


def test_every_released_variable_is_read(python, tmp_path):
    adapter = tmp_path / "step-40"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    done = start(
        python,
        *("--r0-only", "--limit", "6"),
        ARM="rl",
        MODEL_DIR="models/SFT",
        CHECKPOINT=str(adapter),
        NUM_GPUS="4",
        OUTPUT_ROOT="runs",
        REPAIR_RNG_STEP="7",
        GENERATE_EXTRA_ARGS="--raw-prompt --seeds 1",
        PROFILE="release",
    )
    assert done.stdout.split() == [
        *("-m", "umm_reflect", "eval", "geneval553", "--model", "models/SFT"),
        *("--adapter", str(adapter), "--arm", "rl", "--profile", "release", "--gpus", "4"),
        *("--output-dir", "runs/rl-step-40-rawprompt-r0only", "--resume"),
        *("--raw-prompt", "--seeds", "1", "--max-rounds", "0", "--limit", "6"),
        *("--repair-rng-step", "7"),
    ]
    (adapter / "adapter_config.json").rename(adapter / "ema.safetensors")
    done = start(python, ARM="rl", MODEL_DIR="m", CHECKPOINT=str(adapter), LABEL="mine")
    assert f"--model\n{adapter}\n" in done.stdout
    assert "outputs/geneval553/mine" in done.stdout


def test_a_sharded_checkpoint_is_told_how_to_convert_and_not_opened(python, tmp_path):
    (tmp_path / ".metadata").write_bytes(b"a pickle")
    done = start(python, ARM="rl", MODEL_DIR="m", CHECKPOINT=str(tmp_path))
    assert done.returncode == 2
    assert "dcp_to_torch_save" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"MODEL_DIR": "m"}, "ARM is ''. Set ARM=base, ARM=sft or ARM=rl"),
        ({"ARM": "rll", "MODEL_DIR": "m"}, "ARM is 'rll'"),
        ({"ARM": "rl"}, "MODEL_DIR is not set"),
        ({"ARM": "rl", "MODEL_DIR": "m", "NUM_GPUS": "all"}, "NUM_GPUS is 'all'"),
        ({"ARM": "rl", "MODEL_DIR": "m", "CHECKPOINT": "/none"}, "CHECKPOINT /none holds neither"),
    ],
)
def test_a_wrong_variable_is_one_line(python, variables, says):
    done = start(python, **variables)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_flags_are_ones_that_eval_reads(python):
    from eval.config import EvalConfig
    from umm_reflect.settings import parse

    done = start(python, "--r0-only", "--raw-prompt", ARM="rl", MODEL_DIR="m", REPAIR_RNG_STEP="7")
    config = parse(EvalConfig, done.stdout.split()[3:], "umm-reflect eval")
    assert (config.sets, config.arm, config.profile) == (("geneval553",), "rl", "release")
    assert (config.max_rounds, config.raw_prompt, config.repair_rng_step) == (0, True, 7)
    assert (config.gpus, config.resume) == (0, True)
