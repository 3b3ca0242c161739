"""The trainer on a tiny model: what it learns, what it leaves, what it refuses."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file

import sft.batches
import sft.train
from sft.data import read_dataset
from sft.train import main
from sft.train_data import prepare
from sft.validate import decisions_right
from tests.learning import run_processes
from tests.sft_runs import (
    Folders,
    metrics,
    run,
    run_on,
    step_lines,
    tiny_config,
    weights,
    write_folders,
)
from umm_reflect import Bagel
from umm_reflect.errors import UserError
from umm_reflect.hub import profile
from umm_reflect.packing import TrainingOutput
from umm_reflect.profile import save_profile
from umm_reflect.settings import load_yaml
from umm_reflect.training.processes import Processes


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("sft"))


@pytest.fixture(autouse=True)
def no_curves(request, monkeypatch):
    """Curves take longer than everything else here; one test draws them."""
    if "curves" not in request.node.name:
        monkeypatch.setattr(sft.train, "plot_curves", lambda *_: None)


@pytest.fixture(scope="module")
def straight(folders, tmp_path_factory):
    """Where a run of five steps went through."""
    out = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft.train, "plot_curves", lambda *_: None)
        run(tiny_config(folders, out, max_steps=5))
    return out


# --- what is learned ------------------------------------------------------------------------------


def test_eight_steps_lower_both_losses_and_leave_a_model_curves_and_a_picture(folders, tmp_path):
    config = tiny_config(
        folders,
        tmp_path / "run",
        max_steps=8,
        validation={"every": 8, "share": 0.2, "pictures": 1},
        optimizer={"lr": 1e-2},
    )
    assert run(config) == 0
    lines = step_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert sum(line["ce"] for line in lines[-3:]) < 0.8 * sum(line["ce"] for line in lines[:3])
    assert sum(line["mse"] for line in lines[-3:]) < sum(line["mse"] for line in lines[:3])
    assert lines[0]["lr"] == pytest.approx(1e-2)
    assert {"whole/ce", "whole/mse", "transition/mse", "tokens_per_second"} <= lines[0].keys()
    (held,) = [line for line in metrics(tmp_path / "run") if "held_out/ce" in line]
    assert 0 <= held["held_out/whole/action_accuracy"] <= 1
    assert 0 <= held["held_out/whole/score_accuracy"] <= 1

    out = tmp_path / "run"
    bagel = Bagel.from_pretrained(out / "checkpoint", device="cpu", dtype="float32")
    before = Bagel.from_pretrained(folders.model, device="cpu", dtype="float32")
    changed = [
        not torch.equal(a, b) for a, b in zip(bagel.parameters(), before.parameters(), strict=True)
    ]
    assert sum(changed) > 0.9 * len(changed)
    assert profile(out / "checkpoint") == profile(folders.model)
    assert (out / "checkpoint" / "ae.safetensors").read_bytes() == (
        folders.model / "ae.safetensors"
    ).read_bytes()
    assert (out / "curve.png").exists()
    assert (out / "pictures" / "step-0000008.png").exists()


def test_the_saved_settings_give_the_same_run_again(straight, tmp_path):
    saved = load_yaml(straight / "config.yaml")
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(saved | {"output_dir": str(tmp_path / "again")}))
    assert main(["--config", str(path)]) == 0
    assert weights(tmp_path / "again") == weights(straight)


def test_forwards_side_by_side_or_one_after_another_learn_the_same(folders, tmp_path):
    for name, together in (("alone", 1), ("together", 4)):
        config = tiny_config(
            folders, tmp_path / name, max_steps=3, packs_per_step=4, packs_per_forward=together
        )
        run(config)
    alone, together = (step_lines(tmp_path / name) for name in ("alone", "together"))
    for one, other in zip(alone, together, strict=True):
        for key in ("ce", "mse", "whole/token_ce", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=2e-4), key
        assert one["samples"] == other["samples"]


def test_two_processes_give_the_losses_of_one_also_with_unequal_shares(folders, tmp_path):
    # three packs on two processes: the second one makes an empty forward in every step
    changes = {"packs_per_step": 3, "packs_per_forward": 1, "max_steps": 3}
    run(tiny_config(folders, tmp_path / "one", **changes))
    both = tiny_config(folders, tmp_path / "two", strategy="fsdp2", **changes)
    lines, nothing = run_processes(run_on, 2, both)
    assert nothing == []
    wanted = step_lines(tmp_path / "one")
    for one, two in zip(wanted, [line for line in lines if "lr" in line], strict=True):
        for key in ("ce", "mse", "whole/ce", "transition/mse"):
            assert one[key] == pytest.approx(two[key], abs=1e-5), key
        assert one["samples"] == two["samples"]
    held = [
        [line for line in some if "held_out/ce" in line]
        for some in (metrics(tmp_path / "one"), lines)
    ]
    assert held[0][0]["held_out/ce"] == pytest.approx(held[1][0]["held_out/ce"], abs=1e-5)


def test_one_process_that_fails_ends_all_of_them_by_name(folders, tmp_path):
    config = tiny_config(folders, tmp_path / "run", packs_per_forward=1, max_steps=3)
    with pytest.raises(AssertionError) as failed:
        run_processes(run_with_a_failure, 2, config)
    text = str(failed.value)
    assert "rank 1: " in text
    assert "the disk is gone" in text
    assert "rank 1 failed: the disk is gone" in text  # what rank 0 says
    assert not (tmp_path / "run" / "checkpoint").exists()


def run_with_a_failure(processes, config) -> None:
    """The data of rank 1 fail in the second step."""
    read, calls = sft.batches.Reader.__call__, []

    def failing(self, task):
        calls.append(task)
        if processes.rank == 1 and not task.decisions and len(calls) > 2:
            raise UserError("the disk is gone", "Mount it")
        return read(self, task)

    sft.batches.Reader.__call__ = failing
    run_on(processes, config)


def test_lora_leaves_an_adapter_and_goes_on_with_it(folders, tmp_path):
    changes = {"parameters": "lora-both", "lora": {"rank": 4}, "max_steps": 2}
    run(tiny_config(folders, tmp_path / "run", **changes))
    adapter = tmp_path / "run" / "checkpoint"
    assert {path.name for path in adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "reflection.json",
    }
    assert profile(folders.model, adapter) == profile(folders.model)
    assert json.loads((adapter / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(folders.model)
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    assert any(t.abs().max() > 0 for name, t in tensors.items() if "lora_B" in name)
    Bagel.from_pretrained(folders.model, device="cpu", dtype="float32", adapter=adapter)
    own = replace(profile(adapter), system_prompt="Draw.")  # as if it was trained with that
    save_profile(own, adapter)
    more = {**changes, "lora": {"adapter": str(adapter)}}
    run(tiny_config(folders, tmp_path / "more", **more))
    assert profile(tmp_path / "more" / "checkpoint") == own
    again = load_file(tmp_path / "more" / "checkpoint" / "adapter_model.safetensors")
    assert again.keys() == tensors.keys()


def test_averages_are_what_is_written_where_there_are_any(folders, straight, tmp_path):
    run(tiny_config(folders, tmp_path / "mean", max_steps=5, optimizer={"ema_decay": 0.9}))
    assert step_lines(straight)[-1]["ce"] == step_lines(tmp_path / "mean")[-1]["ce"]
    assert weights(straight) != weights(tmp_path / "mean")


def test_texts_alone_train_too(folders, tmp_path):
    weights_of = {"whole": 0, "transition": 0, "anchor": 0, "controller": 0, "verifier": 1}
    config = tiny_config(folders, tmp_path / "run", packing={"weights": weights_of})
    assert run(config) == 0
    line = step_lines(tmp_path / "run")[-1]
    assert "verifier/ce" in line
    assert "mse" not in line


# --- what is kept ---------------------------------------------------------------------------------


def test_the_newest_checkpoints_stay_and_a_link_names_the_last(folders, tmp_path):
    run(tiny_config(folders, tmp_path / "run", max_steps=5, save_every=1, keep=2))
    for name in ("checkpoints", "resume"):
        found = sorted(path.name for path in (tmp_path / "run" / name).iterdir())
        assert [n for n in found if not n.startswith(".")] == ["step-0000004", "step-0000005"]
    assert os.readlink(tmp_path / "run" / "checkpoint") == "checkpoints/step-0000005"


def test_a_signal_saves_and_the_next_start_goes_on(folders, straight, tmp_path, monkeypatch):
    update = sft.train.Run.update

    def stopping(self, parcels):
        update(self, parcels)
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sft.train.Run, "update", stopping)
    config = tiny_config(folders, tmp_path / "stopped", max_steps=5)
    assert run(config) == 128 + signal.SIGTERM
    assert os.readlink(tmp_path / "stopped" / "checkpoint") == "checkpoints/step-0000002"
    monkeypatch.setattr(sft.train.Run, "update", update)
    assert run(config) == 0
    assert weights(tmp_path / "stopped") == weights(straight)
    lines = step_lines(tmp_path / "stopped")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for one, other in zip(lines, step_lines(straight), strict=True):
        measured = {name for name in one if "second" in name or "gib" in name} | {"waited"}
        for name in one.keys() - measured:
            assert one[name] == other[name], name


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_last_good_checkpoint(
    folders, tmp_path, monkeypatch
):
    batch = sft.train.ImageStore.batch
    seen = []

    def spoiled(self, parcel):
        made, times, noise, more = batch(self, parcel)
        seen.append(parcel)
        return made, times, noise * (float("nan") if len(seen) > 5 else 1.0), more

    # one forward a step, and the held-out look comes at the end alone: the sixth is step 6
    config = tiny_config(
        folders, tmp_path / "run", max_steps=8, save_every=2, log_every=3, packs_per_forward=2
    )
    monkeypatch.setattr(sft.train.ImageStore, "batch", spoiled)
    with pytest.raises(
        FloatingPointError, match=r"no number in steps 5 to 6 \(.*mse.*step-0000004"
    ):
        run(config)
    assert os.readlink(tmp_path / "run" / "checkpoint") == "checkpoints/step-0000004"
    for tensor in load_file(tmp_path / "run" / "checkpoint" / "ema.safetensors").values():
        assert tensor.isfinite().all()


# --- decisions ------------------------------------------------------------------------------------


def test_a_decision_is_right_when_all_of_its_tokens_are():
    nothing = torch.zeros(0)
    # two turns of kind 5 ("whole"): score of two tokens and action each, then one of kind 0
    right = torch.tensor([True, False, True, True, True, False, True])
    out = TrainingOutput(nothing, right, nothing, (nothing, nothing), (nothing, nothing))
    more = {
        "part_S": torch.tensor([1, 1, 2, 1, 1, 2, 2]),
        "turn_S": torch.tensor([0, 0, 0, 1, 1, 1, 2]),
        "kind_S": torch.tensor([5, 5, 5, 5, 5, 5, 0]),
    }
    found = decisions_right(out, more)
    assert found[5].tolist() == [[1, 2], [1, 2]]  # scores: one of two; actions: one of two
    assert found[0].tolist() == [[0, 0], [1, 1]]  # no score, one action


def test_held_out_trajectories_are_not_trained_on(folders, tmp_path):
    prepared = prepare(tiny_config(folders, tmp_path / "run"), Processes())
    held = {record.uid for record in prepared.held}
    learned = {row.record.uid for rows in prepared.reader.rows.values() for row in rows}
    assert len(held) == 2
    assert held.isdisjoint(learned)
    assert held | learned == {r.uid for r in read_dataset(folders.data, "none").records}
