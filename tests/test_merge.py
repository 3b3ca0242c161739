"""`umm-reflect merge`: what it writes, that it is checked by real forwards, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import TINY, write_tiny_checkpoint
from umm_reflect import merge as merging
from umm_reflect.adapters import adapter_parameters, attach_lora, load_adapter, save_adapter
from umm_reflect.checkpoint import empty_bagel, load, load_model, save_tensors
from umm_reflect.cli import run_program
from umm_reflect.errors import CheckpointError, UserError
from umm_reflect.hub import plain_profile, profile
from umm_reflect.merge import Merger, merge, outputs
from umm_reflect.model import Bagel
from umm_reflect.profile import save_profile
from umm_reflect.streamed import Spec, write_streamed


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("adapter") / "both", 0.3)


def make_adapter(base: Path, folder: Path, size: float, experts: str = "both") -> Path:
    """A low-rank update of rank 4 and scale 2. size: of B, random in place of zeros."""
    bagel = attach_lora(load(base, device="cpu", dtype="float32"), 4, 8.0, experts)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in adapter_parameters(bagel):
        if ".lora_B." in name:
            parameter.data = size * torch.randn(parameter.shape, generator=draw)
    return save_adapter(bagel, folder, "tiny")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- what is written ------------------------------------------------------------------------------


def test_a_merged_folder_is_a_complete_model_that_answers_as_base_and_adapter(
    base, adapter, tmp_path
):
    check = merge(base, adapter, tmp_path / "out", dtype="float32")
    assert check.effect > 0.1
    assert check.lost < 1e-4
    assert names_in(tmp_path / "out") == names_in(base) | {"README.md", "reflection.json"}
    merged = load(tmp_path / "out", device="cpu", dtype="float32")
    both = load(base, device="cpu", dtype="float32", adapter=adapter)
    for mine, theirs in zip(outputs(merged), outputs(both), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-4)
    assert merged.tokens.encode("two red circles") == both.tokens.encode("two red circles")


def test_a_matrix_is_the_sum_in_fp32_rounded_once_and_all_else_stays_byte_for_byte(
    base, adapter, tmp_path
):
    merge(base, adapter, tmp_path / "out")
    before, after = (load_file(folder / "ema.safetensors") for folder in (base, tmp_path / "out"))
    low = load_file(adapter / "adapter_model.safetensors")
    changed = set()
    for name, weight in before.items():
        assert after[name].dtype == weight.dtype
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in low:
            update = 2.0 * low[f"{key}.lora_B.weight"] @ low[f"{key}.lora_A.weight"]
            assert torch.equal(after[name], (weight.float() + update).bfloat16())
            changed.add(name)
        else:
            assert torch.equal(after[name], weight)
    assert len(changed) == 2 * 2 * 7  # layers, experts, projections
    assert (base / "ae.safetensors").read_bytes() == (
        tmp_path / "out" / "ae.safetensors"
    ).read_bytes()


def test_a_base_in_shards_becomes_one_file(base, adapter, tmp_path):
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    for path in base.iterdir():
        if path.name != "ema.safetensors":
            (sharded / path.name).write_bytes(path.read_bytes())
    tensors = load_file(base / "ema.safetensors")
    halves = [dict(list(tensors.items())[k::2]) for k in (0, 1)]
    for number, half in enumerate(halves):
        save_file(half, sharded / f"ema-{number}.safetensors")
    where = {name: f"ema-{number}.safetensors" for number in (0, 1) for name in halves[number]}
    (sharded / "ema.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    merge(sharded, adapter, tmp_path / "out")
    merge(base, adapter, tmp_path / "other")
    assert names_in(tmp_path / "out") == names_in(tmp_path / "other")
    files = [(tmp_path / name / "ema.safetensors").read_bytes() for name in ("out", "other")]
    assert files[0] == files[1]


def test_how_the_model_is_run_comes_from_the_adapter_else_from_the_base(base, adapter, tmp_path):
    merge(base, adapter, tmp_path / "plain")
    assert profile(tmp_path / "plain") == profile(base)
    trained = tmp_path / "trained"
    trained.mkdir()
    for path in adapter.iterdir():
        (trained / path.name).write_bytes(path.read_bytes())
    other = replace(plain_profile(load(base, device="cpu").config), system_prompt="Draw.")
    save_profile(other, trained)
    merge(base, trained, tmp_path / "own")
    assert profile(tmp_path / "own").system_prompt == "Draw."


def test_the_command_prints_where_it_wrote_and_what_rounding_took(base, adapter, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["--model", str(base), "--adapter", str(adapter), "--output-dir", str(out)]
    assert run_program(merging.main, [*argv, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.endswith(f"{out}\n")
    assert "is lost to rounding" in text
    assert "rank 4, alpha 8, 28 matrices" in (out / "README.md").read_text()


# --- the check ------------------------------------------------------------------------------------


def test_the_check_computes_in_fp32_and_leaves_the_stored_weights_alone(base):
    bagel = merging.load_stored(base, torch.device("cpu"))
    head = bagel.language_model.lm_head.weight
    before = head.detach().clone()
    found = outputs(bagel)
    assert head.dtype == torch.bfloat16
    assert torch.equal(head, before)
    exact = outputs(load(base, device="cpu", dtype="float32"))
    for mine, theirs in zip(found, exact, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=5e-2)  # inputs of the towers are bf16
        assert mine.dtype == torch.float32


def wrong_sum(layer, weight: torch.Tensor) -> torch.Tensor:
    """Twice the update."""
    return weight.float() + 2 * layer.get_delta_weight("default")


@pytest.mark.parametrize(
    ("replacement", "line"),
    [
        (lambda layer, weight: weight, "answer as the base does"),
        (wrong_sum, r"differ from base \+ adapter by \d+% of what the adapter does"),
    ],
)
def test_weights_that_are_not_the_sum_are_caught_and_nothing_is_left(
    base, adapter, tmp_path, monkeypatch, replacement, line
):
    monkeypatch.setattr(Merger, "_sum", staticmethod(replacement))
    with pytest.raises(UserError, match=line):
        merge(base, adapter, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_untrained_adapter_changes_nothing_and_is_refused(base, tmp_path):
    zero = make_adapter(base, tmp_path / "zero", 0.0)
    with pytest.raises(UserError, match="the adapter changes nothing"):
        merge(base, zero, tmp_path / "out")
    assert names_in(tmp_path) == {"zero"}


def test_an_update_below_the_rounding_of_bf16_is_refused_and_fp32_keeps_it(base, tmp_path):
    small = make_adapter(base, tmp_path / "small", 1e-4)
    with pytest.raises(UserError, match="give --dtype float32"):
        merge(base, small, tmp_path / "out")
    check = merge(base, small, tmp_path / "out", dtype="float32")
    assert check.lost < 0.05


@pytest.mark.parametrize("experts", ["gen", "und"])
def test_an_adapter_of_one_expert_is_merged_into_that_one(base, tmp_path, experts):
    one = make_adapter(base, tmp_path / "one", 0.3, experts)
    assert merge(base, one, tmp_path / "out").lost < 0.2
    before, after = (load_file(folder / "ema.safetensors") for folder in (base, tmp_path / "out"))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == 14
    assert all(("_moe_gen" in name) == (experts == "gen") for name in changed)


# --- bad input ------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_refused_before_any_work(base, adapter, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("x")
    argv = ["--model", str(base), "--adapter", str(adapter), "--output-dir", str(tmp_path)]
    assert run_program(merging.main, argv) == 2
    assert "is not empty. Name a new folder." in capsys.readouterr().err
    assert names_in(tmp_path) == {"mine.txt"}


def test_base_and_adapter_in_the_wrong_places_are_told_apart(base, adapter, tmp_path):
    with pytest.raises(UserError, match="is an adapter, not a model"):
        merge(adapter, adapter, tmp_path / "out")
    with pytest.raises(UserError, match=r"has no adapter_config.json. Give a PEFT folder"):
        merge(base, base, tmp_path / "out")


def test_a_path_that_does_not_exist_is_an_error(adapter, tmp_path, capsys):
    argv = ["--model", str(tmp_path / "no"), "--adapter", str(adapter), "--output-dir"]
    assert run_program(merging.main, [*argv, str(tmp_path / "out")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_of_another_model_is_refused_by_name(base, adapter, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors = {name: torch.cat([t, t], dim=1) for name, t in tensors.items()}
    save_file(tensors, other / "adapter_model.safetensors")
    (other / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"has in another shape .* \(expected"):
        merge(base, other, tmp_path / "out")
    assert names_in(tmp_path) == {"other"}


def test_what_a_killed_merge_left_is_replaced(base, adapter, tmp_path):
    (tmp_path / ".out.writing").mkdir()
    (tmp_path / ".out.writing" / "half").write_text("x")
    merge(base, adapter, tmp_path / "out")
    assert names_in(tmp_path) == {"out"}
    assert "half" not in names_in(tmp_path / "out")


def test_an_adapter_on_a_model_without_memory_keeps_its_numbers(base, adapter):
    real = load(base, device="cpu", dtype="float32")
    empty = empty_bagel(real.config)
    for bagel in (real, empty):
        load_adapter(bagel, adapter, dtype=torch.float32)
    pairs = zip(adapter_parameters(real), adapter_parameters(empty), strict=True)
    for (name, mine), (same, theirs) in pairs:
        assert name == same
        assert torch.equal(mine, theirs)
    assert isinstance(empty, Bagel)
    assert empty.vae2llm.weight.is_meta


# --- memory ---------------------------------------------------------------------------------------

PEAK = """
import re, sys
from pathlib import Path
from tests.test_merge import merge
base, adapter, small, small_adapter, out = map(Path, sys.argv[1:])
def peak():  # of this program alone; getrusage begins with what its parent held
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
merge(small, small_adapter, out / "small")
before = peak()
merge(base, adapter, out / "large")
print(peak() - before)
"""


def make_large(folder: Path) -> tuple[Path, Path]:
    """A model of 320 MB in 16 layers, and an adapter of it."""
    llm = replace(TINY.llm, hidden_size=512, num_layers=16, intermediate_size=2560)
    config = replace(TINY, llm=replace(llm, num_heads=8, num_kv_heads=4, head_dim=64))
    base = folder / "base"
    base.mkdir()
    config.to_files(base, bos_token_id=1, eos_token_id=2)
    state = empty_bagel(config).state_dict()
    specs = {name: Spec(torch.bfloat16, tuple(t.shape)) for name, t in state.items()}
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(4_000_000, generator=draw)
    weights = (
        (name, numbers[: s.nbytes // 2].view(s.shape) / s.shape[-1] ** 0.5)
        for name, s in specs.items()
    )
    write_streamed(base / "ema.safetensors", specs, weights)
    save_tensors({"x": torch.zeros(1)}, base / "ae.safetensors")
    bagel = load_model(base, device=torch.device("cpu"), dtype=torch.bfloat16)
    attach_lora(bagel, 2, 4.0, "both")
    for name, parameter in adapter_parameters(bagel):
        if ".lora_B." in name:
            parameter.data = 0.1 * torch.ones(parameter.shape)
    return base, save_adapter(bagel, folder / "adapter", "large")


def test_host_memory_holds_at_most_one_and_a_third_copies_of_the_weights(base, adapter, tmp_path):
    large, low = make_large(tmp_path)
    one_copy = (large / "ema.safetensors").stat().st_size
    assert one_copy > 300e6
    (tmp_path / "out").mkdir()
    paths = [large, low, base, adapter, tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, paths)],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert 0.5 * one_copy < int(done.stdout) < 1.3 * one_copy
