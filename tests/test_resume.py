"""States of a run: a resume is the run itself, kill -9 at any moment leaves one that loads, what is
half-written is no state, and one that does not belong is named."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.learning import batch_of, learner_of, run_processes, tiny_bagel, update
from umm_reflect.adapters import adapter_parameters, attach_lora
from umm_reflect.errors import CheckpointError, UserError
from umm_reflect.training.learner import Learner, OptimizerSettings
from umm_reflect.training.processes import Processes
from umm_reflect.training.resume import ABOUT, latest, load_resume, save_resume, states

SETTINGS = OptimizerSettings(
    "muon", lr=1e-3, muon_lr=0.01, eps=1e-5, weight_decay=0.1, ema_decay=0.9
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_bagel(folder)
    return folder


def new(folder: Path, dtype: str = "float32", settings: OptimizerSettings = SETTINGS) -> Learner:
    return learner_of(tiny_bagel(folder, dtype), settings=settings)


def train(learner: Learner, first: int, end: int) -> list[list[float]]:
    """Updates `first` to `end`; their losses."""
    return [
        update(learner, [batch_of(learner.bagel, step)], 1 / (1 + step)).tolist()
        for step in range(first, end)
    ]


def equal(one: Learner, two: Learner) -> bool:
    first, second = one.state_dict(), two.state_dict()
    assert first.keys() == second.keys()
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items()) and all(
        torch.equal(p, q)
        for p, q in zip(one.bagel.parameters(), two.bagel.parameters(), strict=True)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(folder, tmp_path, dtype):
    through = new(folder, dtype)
    train(through, 0, 3)
    save_resume(tmp_path, through, 3, {"samples": 12, "kinds": {"whole": 3}})
    drawn = torch.rand(4)  # the generators go on from where they were, too
    losses = train(through, 3, 6)

    resumed = new(folder, dtype)
    assert load_resume(tmp_path, resumed) == (3, {"samples": 12, "kinds": {"whole": 3}})
    assert torch.equal(torch.rand(4), drawn)
    assert train(resumed, 3, 6) == losses
    assert equal(resumed, through)


def test_a_resumed_lora_is_bit_equal_too(folder, tmp_path):
    def lora() -> Learner:
        bagel = attach_lora(tiny_bagel(folder, "bfloat16", trained=False), rank=2, alpha=4)
        return learner_of(bagel, settings=OptimizerSettings(lr=1e-3))

    through = lora()
    train(through, 0, 2)
    path = save_resume(tmp_path, through, 2, {})
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    masters = {f"master/{name}" for name, _ in adapter_parameters(through.bagel)}
    assert {name for name in saved if name.startswith("master/")} == masters  # nothing of the base
    train(through, 2, 4)
    resumed = lora()
    load_resume(tmp_path, resumed)
    train(resumed, 2, 4)
    assert equal(resumed, through)


@pytest.fixture
def threads():
    """Sets the number of this process's threads, for the test alone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_resume_takes_over_the_number_of_threads_that_bits_depend_on(
    folder, tmp_path, threads, capsys
):
    threads(2)
    through = new(folder)
    train(through, 0, 1)
    save_resume(tmp_path, through, 1, {})
    train(through, 1, 6)
    threads(1)
    resumed = new(folder)
    load_resume(tmp_path, resumed)
    assert torch.get_num_threads() == 2
    assert "with 2 threads, as before, not 1" in capsys.readouterr().err
    train(resumed, 1, 6)
    assert equal(resumed, through)


def test_the_newest_states_are_kept_and_the_newest_is_taken(folder, tmp_path):
    learner = new(folder)
    assert latest(tmp_path / "none") is None
    for step in (1, 2, 10, 9_999_999, 10_000_000):
        save_resume(tmp_path, learner, step, {"step": step}, keep=3)
    assert [path.name for path in states(tmp_path)] == [
        "step-0000010",
        "step-9999999",
        "step-10000000",
    ]
    assert load_resume(tmp_path, learner) == (10_000_000, {"step": 10_000_000})
    assert load_resume(tmp_path / "step-0000010", learner) == (10, {"step": 10})
    save_resume(tmp_path, learner, 10, {"again": True}, keep=3)
    assert load_resume(tmp_path / "step-0000010", learner) == (10, {"again": True})
    with pytest.raises(ValueError, match="keep is 0"):
        save_resume(tmp_path, learner, 3, {}, keep=0)


def test_states_after_the_one_that_is_saved_are_of_a_run_that_was_given_up(folder, tmp_path):
    learner = new(folder)
    for step in (1, 5, 7, 9):
        save_resume(tmp_path, learner, step, {}, keep=None)
    save_resume(tmp_path, learner, 6, {}, keep=2)  # gone on from 5
    assert [path.name for path in states(tmp_path)] == ["step-0000005", "step-0000006"]


def test_what_is_half_written_is_no_state_and_goes_with_the_next_save(folder, tmp_path):
    learner = new(folder)
    save_resume(tmp_path, learner, 5, {})
    for name in (".writing-step-0000006", ".removing-step-0000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ABOUT).write_text("{}")
    (tmp_path / "step-0000007").mkdir()  # a folder of somebody else
    assert latest(tmp_path).name == "step-0000005"
    save_resume(tmp_path, learner, 6, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-000000{k}" for k in (5, 6, 7)
    ]


# --- kill -9 --------------------------------------------------------------------------------------


def run_until_killed(folder: Path, out: Path, end: int) -> None:
    """Go on from the newest state, save after every update; a digest of the end."""
    learner = new(folder)
    done = load_resume(out, learner)[0] if latest(out) else 0
    for step in range(done, end):
        train(learner, step, step + 1)
        save_resume(out, learner, step + 1, {"step": step + 1}, keep=1)


def test_kill_9_at_random_moments_ends_in_the_same_bits(folder, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.learning", "torch.distributed.checkpoint"])
    rng, killed, seen, end = random.Random(0), 0, set(), 16
    out = tmp_path / "killed"
    for _ in range(200):
        child = context.Process(target=run_until_killed, args=(folder, out, end))
        child.start()
        before = latest(out)
        while child.is_alive() and latest(out) == before:  # it has begun to save
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.15))
        if killed % 3 == 2:  # inside of a save, however long a step takes
            while child.is_alive() and not any(out.glob(".writing-*")):
                time.sleep(0.002)
        child.kill()
        child.join()
        killed += child.exitcode == -9
        seen |= {path.name.split("-")[0] for path in out.iterdir()}
        newest = latest(out)
        assert newest is not None
        about = json.loads((newest / ABOUT).read_text())
        assert about["extra"] == {"step": about["step"]}
        if about["step"] == end:
            break
    assert killed >= 5
    assert ".writing" in seen  # a save was hit
    resumed, through = new(folder), new(folder)
    assert load_resume(out, resumed)[0] == end
    train(through, 0, end)
    assert equal(resumed, through)


# --- other numbers of processes -------------------------------------------------------------------


def go_on(processes: Processes, folder: Path, out: Path, strategy: str, first: int, end: int):
    """Load what is there, train on two batches an update, save; the losses."""
    bagel = tiny_bagel(folder)
    learner = learner_of(bagel, processes, strategy, SETTINGS)
    if first:
        assert load_resume(out, learner)[0] == first
    losses = []
    for step in range(first, end):
        batches = [batch_of(bagel, 2 * step + k) for k in range(2)]
        losses.append(update(learner, batches[processes.rank :: processes.world]).tolist())
    save_resume(out, learner, end, {})
    return torch.tensor(losses)


def test_one_process_saves_two_resume_and_back(folder, tmp_path):
    expected = go_on(Processes(), folder, tmp_path / "through", "none", 0, 8)
    out = tmp_path / "moved"
    parts = [go_on(Processes(), folder, out, "none", 0, 2)]
    for first, strategy in ((2, "fsdp2"), (4, "ddp")):
        one, two = run_processes(go_on, 2, folder, out, strategy, first, first + 2)
        assert torch.equal(one, two)
        parts.append(one)
    parts.append(go_on(Processes(), folder, out, "none", 6, 8))
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-6, rtol=1e-6)
    about = json.loads((latest(out) / ABOUT).read_text())
    threads = torch.get_num_threads()
    assert about == {
        **{"step": 8, "processes": 1, "strategy": "none", "threads": threads, "extra": {}},
    }


# --- what does not belong -------------------------------------------------------------------------


def test_a_state_of_another_training_is_named(folder, tmp_path):
    save_resume(tmp_path, new(folder), 1, {})
    other = new(folder, settings=OptimizerSettings(lr=1e-3))
    with pytest.raises(
        CheckpointError, match=r"of another training: it has ema/connector.fc1.bias"
    ):
        load_resume(tmp_path, other)
    bagel = attach_lora(tiny_bagel(folder, trained=False), rank=2, alpha=4)
    save_resume(tmp_path / "lora", learner_of(bagel), 1, {})
    bagel = attach_lora(tiny_bagel(folder, trained=False), rank=3, alpha=4)
    with pytest.raises(
        CheckpointError, match=r"lora_A.default.weight as \[2, 32\], expected \[3, 32\]"
    ):
        load_resume(tmp_path / "lora", learner_of(bagel))


def test_without_a_state_there_is_nothing_to_resume(folder, tmp_path):
    with pytest.raises(UserError, match=r"holds no state of a run\. There is nothing to resume"):
        load_resume(tmp_path, new(folder))
    with pytest.raises(UserError, match="step-0000001 holds no state"):
        load_resume(tmp_path / "step-0000001", new(folder))


@pytest.mark.parametrize("damage", ["about", "metadata", "cut", "gone"])
def test_a_damaged_state_is_named_and_the_one_before_can_be_taken(folder, tmp_path, damage):
    learner = new(folder)
    first = save_resume(tmp_path, learner, 1, {})
    path = save_resume(tmp_path, learner, 2, {})
    file = {"about": ABOUT, "metadata": ".metadata"}.get(damage, "__0_0.distcp")
    content = (path / file).read_bytes()
    (path / file).write_bytes(content[: len(content) // 2])
    if damage == "gone":
        (path / file).unlink()
    with pytest.raises(CheckpointError, match=r"step-0000002 cannot be read .*Remove that folder"):
        load_resume(tmp_path, learner)
    assert load_resume(first, learner) == (1, {})


def test_a_folder_that_cannot_be_written_is_one_line(folder, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot be written to .*file.* Free some space"):
        save_resume(tmp_path / "file", new(folder), 1, {})


def test_a_full_disk_while_saving_is_one_line_and_leaves_the_state_before(
    folder, tmp_path, monkeypatch
):
    learner = new(folder)
    save_resume(tmp_path, learner, 1, {})

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", full)
    with pytest.raises(UserError, match=r"cannot be written to .*No space left on device"):
        save_resume(tmp_path, learner, 2, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]
