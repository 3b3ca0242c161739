"""The doctor: what it reports of a machine, and the memory plan, worked out by hand."""

from __future__ import annotations

import json

import pytest
import torch

from umm_reflect import cli, doctor
from umm_reflect.config import BAGEL_7B_MOT, NANO
from umm_reflect.device import resolve_device, resolve_dtype
from umm_reflect.errors import UsageError
from umm_reflect.memory import Run, parameter_counts, plan_memory

GIB = 2**30


def doctor_json(capsys, *arguments: str) -> tuple[int, dict]:
    code = cli.run_program(doctor.main, ["--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_the_machine_report_has_versions_devices_extras_models_and_disks(capsys):
    code, report = doctor_json(capsys)
    assert code == 0
    assert report["core"]["torch"] == torch.__version__
    extras = {"train", "deepspeed", "serve", "ocr", "vl", "vllm", "dev"}
    assert set(report["extras"]) == extras
    assert report["devices"][-1]["device"] == "cpu"
    assert report["devices"][-1]["dtype"] == "float32"
    assert report["disk"]["here"]["free_bytes"] > 0


def test_a_missing_core_package_is_named_and_fails(capsys, monkeypatch):
    found = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda p: None if p == "peft" else found(p))
    assert cli.run_program(doctor.main, []) == 1
    assert "MISSING  peft" in capsys.readouterr().out


def test_the_lines_say_what_is_missing_and_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda p: None if p == "gradio" else "1.0")
    assert cli.run_program(doctor.main, []) == 0
    printed = capsys.readouterr().out
    assert "extra serve: not here: gradio (pip install -e '.[serve]')" in printed
    assert "extra vllm: vllm 1.0" in printed


def test_the_released_model_has_14_607_billion_parameters():
    counts = dict(parameter_counts(BAGEL_7B_MOT))
    vae = counts.pop("vae")
    assert round(sum(counts.values()) / 1e9, 3) == 14.607
    assert vae == 83_819_683
    # one expert: 28 layers of attention with its norms, the MLP and the layer norms
    layer = 3584 * 3584 * 2 + 2 * 3584 * 512 + 3584 + 2 * 512 + 2 * 128
    layer += 3 * 3584 * 18944 + 2 * 3584
    around = (64 * 3584 + 3584) + (3584 * 64 + 64) + (256 * 3584 + 3584) + (3584 * 3584 + 3584)
    assert counts["generation"] == 28 * layer + 3584 + around + 64 * 64 * 3584  # + positions


def test_the_plan_of_the_released_model_at_512_counts_its_cache_by_hand():
    run = Run(size=(512, 512), rounds=3, turn_tokens=512, vit_tokens=1225)
    plan = plan_memory(BAGEL_7B_MOT, run, torch.bfloat16)
    # 2253 tokens an image, four images, three turns of 514, 600 of prompts; 56 KiB a token
    assert plan.parts["conversation cache"] == (4 * 2253 + 3 * 514 + 600) * 57344
    # three edits: each an image, and its text (at most a turn) twice
    assert plan.parts["cache of what edits see"] == 3 * (2253 + 2 * 514) * 57344
    assert 27.2 < plan.weights / GIB < 27.5
    assert plan.weights < plan.total < 36 * GIB


def test_a_larger_run_never_takes_less():
    small = plan_memory(NANO, Run(size=(128, 128)), torch.float32, cuda=False)
    for run in (
        Run(size=(128, 128), batch_size=2),
        Run(size=(128, 128), rounds=4),
        Run(size=(128, 128), full_view=True),
    ):
        assert plan_memory(NANO, run, torch.float32, cuda=False).total >= small.total


def test_a_size_off_the_grid_is_refused():
    with pytest.raises(ValueError, match="give multiples of 16 pixels"):
        plan_memory(NANO, Run(size=(100, 128)), torch.float32)


PLANS = [("24GiB", 1, "Does not fit in 24.0 GiB"), ("80GB", 0, "Fits in 74.5 GiB")]


@pytest.mark.parametrize(("vram", "code", "line"), PLANS)
def test_the_plan_of_a_release_needs_no_download_and_tells_whether_it_fits(
    vram, code, line, capsys, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    arguments = ["--plan", "--vram", vram, "--model", "ByteDance-Seed/BAGEL-7B-MoT"]
    assert cli.run_program(doctor.main, arguments) == code
    assert line in capsys.readouterr().out


def test_the_plan_of_a_folder_takes_its_own_size(capsys, tmp_path):
    NANO.to_files(tmp_path, bos_token_id=0, eos_token_id=1)
    code, report = doctor_json(capsys, "--plan", "--model", str(tmp_path), "--vram", "1")
    assert code == 0
    assert report["size"] == [128, 128]
    assert report["total_bytes"] == sum(report["parts_bytes"].values())
    assert report["available_bytes"] == GIB


def test_a_size_beyond_the_position_table_is_a_usage_error(capsys, tmp_path):
    NANO.to_files(tmp_path, bos_token_id=0, eos_token_id=1)
    arguments = ["--plan", "--model", str(tmp_path), "--size", "256", "256"]
    assert cli.run_program(doctor.main, arguments) == 2
    assert "size 256x256 is too large. At most 128 a side." in capsys.readouterr().err


SIZES = [("24GiB", 24 * GIB), ("24", 24 * GIB), ("1.5g", 1.5 * 10**9), ("512 MiB", GIB // 2)]


@pytest.mark.parametrize(("text", "expected"), SIZES)
def test_memory_sizes_are_read_as_people_write_them(text, expected):
    assert doctor.parse_bytes(text) == expected


def test_a_memory_size_that_is_none_is_a_usage_error(capsys):
    assert cli.run_program(doctor.main, ["--plan", "--vram", "much"]) == 2
    assert "vram is 'much'; give a size such as 24GiB" in capsys.readouterr().err


def test_devices_and_dtypes_resolve_and_wrong_ones_list_the_choices():
    cpu = torch.device("cpu")
    assert resolve_device("cpu") == cpu
    assert resolve_dtype("auto", cpu) is torch.float32
    assert resolve_dtype("bf16", cpu) is torch.bfloat16
    assert resolve_dtype(torch.float16, cpu) is torch.float16
    with pytest.raises(UsageError, match=r"no device 'gpu'.*auto or one of"):
        resolve_device("gpu")
    with pytest.raises(UsageError, match=r"no dtype 'int7'.*bfloat16"):
        resolve_dtype("int7", cpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_here_says_what_is():
    with pytest.raises(UsageError, match=r"device 'cuda:0' is not available here.*Available: "):
        resolve_device("cuda:0")
