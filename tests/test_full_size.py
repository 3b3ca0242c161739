"""The timing of a run on random weights, at the tiny shape: the folder, the parts, the figures.

pytest tests/test_full_size.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from agent import full_size
from agent.clocks import HostMemory, Stopwatch
from agent.random_weights import RandomTensors, write_safetensors
from tests.tiny import train_tokenizer, write_tiny_checkpoint
from umm_reflect.errors import UsageError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tokenizer") / "tiny")


def config(folder: Path, tokenizer: Path, **changes) -> full_size.Config:
    small = {"rounds": 2, "turn_tokens": 140, "size": 32, "points": 4, "device": "cpu"}
    return full_size.Config(folder, "tiny", tokenizer, **(small | changes))


@pytest.fixture(scope="module")
def figures(tokenizer, tmp_path_factory) -> dict:
    return full_size.measure(config(tmp_path_factory.mktemp("run") / "random", tokenizer))


def test_a_run_draws_an_edit_a_round_with_turns_of_the_asked_for_length(figures):
    assert figures["pictures"] == 3
    assert figures["turn_tokens"] == [140, 140]
    assert figures["write_seconds"] > 0
    assert not figures["captured"]  # a CPU has no graphs
    assert figures["load_seconds"] > 0
    outer = [part["name"] for part in figures["parts"] if part["inside"] == "reflect"]
    assert outer == ["picture 0", "turn 1", "picture 1", "turn 2", "picture 2"]
    inner = {
        (part["name"], part["inside"]) for part in figures["parts"] if part["inside"] != "reflect"
    }
    assert {
        ("prefill", "turn 1"),
        ("ViT and connector", "prefill"),
        ("VAE encode", "prefill"),
        ("VAE decode", "picture 2"),
    } <= inner


def test_the_parts_of_a_run_add_up(figures):
    parts = figures["parts"]
    (whole,) = (part for part in parts if part["name"] == "reflect")
    run = parts[: parts.index(whole) + 1]
    assert sum(part["own"] for part in run) == pytest.approx(whole["seconds"], rel=1e-6)
    assert all(part["own"] >= 0 for part in parts)


def test_the_flops_of_a_step_are_those_of_its_products(figures):
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96  # q k v o, gate up down
    tokens = 2 * 2 + 2
    text = len(train_tokenizer().encode("Add circle number 2.").ids) + 2
    seen = (tokens + 8 * 8 + 2 + text) + tokens  # the image's two blocks, the edit text, itself
    attention = 2 * 64 * tokens * seen
    ends = 4 * 2 * 64 * 64 + 256 * 64 + 64 * 64  # into and out of the model, time
    macs = 2 * (tokens * layer + attention) + ends
    assert figures["step"]["unguided"]["tflop"] * 1e12 == pytest.approx(2 * macs)
    assert figures["step"]["unguided"]["branches"] == 1
    assert figures["step"]["guided"]["branches"] == 3


def test_the_table_names_every_part(figures):
    lines = full_size.table(figures)
    assert lines[0].startswith("tiny, random weights, torch.float32, cpu, torch ")
    assert lines[1].startswith("3 pictures of 32x32, 3 steps each; ")
    names = [line[:20].strip() for line in lines[3:18]]
    assert names == [
        *("write the weights", "load", "picture 0", "turn 1", "picture 1", "turn 2", "picture 2"),
        *("reflect", "prefill", "VAE encode", "VAE decode", "ViT and connector"),
        *("one guided step", "one unguided step", ""),
    ]


def test_the_program_uses_a_folder_that_is_there_and_writes_its_figures(
    tokenizer, tmp_path, capsys
):
    folder, out = tmp_path / "random", tmp_path / "figures.json"
    words = ["--folder", str(folder), "--shape", "tiny", "--tokenizer", str(tokenizer)]
    words += ["--rounds", "1", "--turn-tokens", "140", "--size", "32", "--points", "2"]
    words += ["--device", "cpu", "--cold", "--json", str(out)]
    assert full_size.main(words) == 0
    written = (folder / "ema.safetensors").stat().st_mtime_ns
    assert full_size.main(words) == 0
    assert (folder / "ema.safetensors").stat().st_mtime_ns == written
    assert json.loads(out.read_text())["write_seconds"] is None
    assert "(were there)" in capsys.readouterr().out
    with pytest.raises(UsageError, match="holds another model"):
        full_size.main([*words, "--shape", "bagel-7b-mot"])


def test_the_program_refuses_what_cannot_run(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="--size is 512; give a multiple of 16 up to 128"):
        config(tmp_path / "x", tokenizer, size=512)
    with pytest.raises(ValueError, match="--rounds is 0; give 1 or more"):
        config(tmp_path / "x", tokenizer, rounds=0)


def test_the_writer_writes_what_the_library_reads(tmp_path):
    shapes = {"a": (2, 3), "b": (5,), "c.weight": (1, 1, 3, 3)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    for number, dtype in (("F32", torch.float32), ("BF16", torch.bfloat16)):
        path = tmp_path / f"{number}.safetensors"
        write_safetensors(path, shapes, number, lambda name, shape, kind: tensors[name].to(kind))
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == set(shapes)
            assert file.metadata() == {"format": "pt"}
            for name, tensor in tensors.items():
                assert torch.equal(file.get_tensor(name), tensor.to(dtype))


def test_random_weights_keep_activations_near_one():
    make = RandomTensors(torch.device("cpu"), seed=0)
    weight = make("x.q_proj.weight", (64, 400), torch.float32)
    assert weight.std().item() == pytest.approx(0.05, rel=0.05)
    scale = make("x.q_norm.weight", (400,), torch.float32)
    assert scale.mean().item() == pytest.approx(1.0, abs=0.01)
    assert make("x.q_proj.bias", (400,), torch.float32).abs().max() < 0.1


def test_a_stopwatch_takes_the_inner_parts_off_the_outer_one():
    watch = Stopwatch(torch.device("cpu"))
    with watch.part("outer"), watch.part("inner"):
        pass
    inner, outer = watch.parts
    assert (inner.name, inner.inside, outer.name, outer.inside) == ("inner", "outer", "outer", "")
    assert outer.own == pytest.approx(outer.seconds - inner.seconds)


def test_host_memory_counts_what_is_held_for_a_moment():
    if not Path("/proc/self/status").exists():
        assert HostMemory().grown == 0
        return
    with HostMemory() as host:
        block = torch.ones(16 << 20)  # 64 MiB
        assert block.sum() > 0
        del block
    assert host.grown >= 60 << 20
    assert host.process_peak >= 60 << 20
