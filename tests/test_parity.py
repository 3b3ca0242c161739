"""Reference and fast path against the golden folder, and parity against deliberate mistakes.

Without ../shared/golden the fast path is held to the reference on a random tiny checkpoint alone;
that comparison runs in any case.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from umm_reflect import attention, draw, flow, layout, packing, parity, reference
from umm_reflect.cli import run_program
from umm_reflect.parity_fast import FastImplementation
from umm_reflect.parity_golden import Golden
from umm_reflect.parity_implementations import ReferenceImplementation
from umm_reflect.parity_report import Report, State
from umm_reflect.reference import ViTImage

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="shared data: there is no ../shared/golden"
)


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden(GOLDEN)


@pytest.fixture(scope="module")
def fast(golden: Golden) -> FastImplementation:
    return FastImplementation(golden.checkpoint)


@pytest.fixture(scope="module")
def naive(golden: Golden) -> ReferenceImplementation:
    return ReferenceImplementation(golden.checkpoint)


def failures(report: Report, largest: float = 0.0) -> list[str]:
    """Names that differ by more than `largest`; a crash is no measured difference."""
    failed = report.of(State.FAILED)
    assert not [r.note for r in failed if "Error" in r.note]
    return [r.name for r in failed if r.difference > largest]


# --- the golden folder ----------------------------------------------------------------------------


@needs_golden
@pytest.mark.parametrize("implementation", ["fast", "reference"])
def test_every_tensor_and_case_of_the_golden_folder_agrees_and_none_is_left_out(
    implementation, golden, request, capsys, tmp_path
):
    out = tmp_path / "parity.json"
    arguments = [str(GOLDEN), "--implementation", implementation, "--json", str(out)]
    assert parity.main(arguments) == 0
    printed = capsys.readouterr().out
    assert ", 0 failed, 0 not covered (" in printed
    found = json.loads(out.read_text())
    assert (found["failed"], found["not_covered"]) == (0, 0)
    named = {(r["file"], r["name"]) for r in found["records"]}
    listed = {(file, name) for file in golden.files for name in golden.described(file)}
    assert len(listed) >= 200
    assert listed <= named
    inputs = {r["name"] for r in found["records"] if r["state"] == "given"}
    assert inputs <= {
        "image.raw_a",
        "image.raw_b",
        "time.t",
        "rope.positions",
        "vit_patchify.in",
        "latent_patchify.in",
        "padded.pixels",
        "latent_random",
        "in.packed_text_ids",
        "in.packed_vit_tokens",
        "in.packed_timesteps",
        "in.ce_loss_indexes",
        "in.padded_images",
        "shift1.noise",
        "shift3.noise",
    }
    norms = golden.cases("train.safetensors")["grad_norms_shift1"]["norms"]
    table = golden.cases("misc.safetensors")["resize_table"]
    for prefix, values in (("grad_norms.shift1", norms), ("resize_table", table)):
        compared = [r for r in found["records"] if r["name"].startswith(f"cases.{prefix}.")]
        assert len(compared) == len(values) > 100
    assert found["compared"] == len(found["records"]) - len(inputs)


# --- deliberate mistakes --------------------------------------------------------------------------


@needs_golden
def test_markers_through_the_generation_expert_fail_by_far_more_than_rounding(
    golden, naive, monkeypatch
):
    right = reference.Reference.lay_out

    def wrong(self, blocks):
        laid_out = right(self, blocks)
        gen = laid_out.gen.clone()
        for number, block in enumerate(blocks):
            gen[laid_out.block_of == number] |= isinstance(block, reference.VAEImage)
        return replace(laid_out, gen=gen)

    monkeypatch.setattr(reference.Reference, "lay_out", wrong)
    report = parity.run(golden, naive, ["gen_t2i.safetensors", "train.safetensors"])
    assert {"nocfg.v", "nocfg.x", "global.v_cond", "shift1.mse"} <= set(failures(report, 0.1))


@needs_golden
def test_looked_at_patches_through_the_generation_expert_fail(golden, naive, monkeypatch):
    right = reference.Reference.lay_out

    def wrong(self, blocks):
        laid_out = right(self, blocks)
        gen = laid_out.gen.clone()
        for number, block in enumerate(blocks):
            gen[laid_out.block_of == number] |= isinstance(block, ViTImage)
        return replace(laid_out, gen=gen)

    monkeypatch.setattr(reference.Reference, "lay_out", wrong)
    report = parity.run(golden, naive, ["und.safetensors"])
    assert "kv_after_image" in failures(report, 0.1)


@needs_golden
def test_one_position_for_each_image_token_fails(golden, fast, monkeypatch):
    monkeypatch.setattr(
        layout.Block,
        "positions",
        property(lambda block: np.arange(block.position, block.position + block.length)),
    )
    report = parity.run(golden, fast, ["und.safetensors", "gen_t2i.safetensors"])
    assert {"kv_after_image", "step_logits", "nocfg.v"} <= set(failures(report, 0.1))


@needs_golden
def test_noised_pictures_that_later_tokens_can_see_fail(golden, fast, monkeypatch):
    def wrong(order_q, order_k, block_q, block_k, full_k, noise_k):
        return attention.allowed(
            order_q, order_k, block_q, block_k, full_k, torch.zeros_like(noise_k)
        )

    monkeypatch.setattr(packing, "allowed", wrong)
    report = parity.run(golden, fast, ["train.safetensors"])
    assert {"in.attention_mask", "shift1.hidden", "shift3.ce"} <= set(failures(report, 0.1))


@needs_golden
@pytest.mark.parametrize("renorm", ["global", "channel", "text_channel"])
def test_another_renorm_than_the_asked_one_fails_in_every_other_case(
    renorm, golden, fast, monkeypatch
):
    def wrong(cond, text_uncond, image_uncond, settings, lengths=None):
        settings = replace(settings, renorm=renorm)
        return flow.guide(cond, text_uncond, image_uncond, settings, lengths)

    monkeypatch.setattr(draw, "guide", wrong)
    report = parity.run(golden, fast, ["gen_edit.safetensors"])
    failed = set(failures(report, 0.01))
    asked = {"global", "channel", "text_channel"}
    assert {f"{other}.v" for other in asked - {renorm}} <= failed
    assert f"{renorm}.v" not in failed
    assert "nocfg.v" not in failed


@needs_golden
def test_an_end_point_too_many_in_the_schedule_fails(golden, fast, monkeypatch):
    monkeypatch.setattr(fast, "schedule", lambda n, s: flow.schedule(n + 1, s)[:-1])
    report = parity.run(golden, fast, ["misc.safetensors"])
    names = [r.name for r in report.of(State.FAILED)]
    assert "cases.schedules.0" in names
    assert "cases.schedules.4" in names


@needs_golden
def test_a_crash_fails_what_it_touches_and_the_rest_is_still_compared(golden, fast, monkeypatch):
    def broken(latent):
        raise RuntimeError("no decoder here")

    monkeypatch.setattr(fast, "vae_decode", broken)
    report = parity.run(golden, fast, ["vae.safetensors"])
    failed = {r.name: r.note for r in report.of(State.FAILED)}
    assert failed == dict.fromkeys(["decoded", "decoded_random"], "RuntimeError: no decoder here")
    assert {r.name for r in report.of(State.EQUAL)} >= {"moments", "latent", "padded.latent"}


def test_a_tensor_of_nan_is_not_equal_to_anything():
    report = Report()
    report.compare("a.safetensors", "x", torch.zeros(2), torch.tensor([0.0, float("nan")]))
    assert report.exit_code == 1


# --- other folders of the format ------------------------------------------------------------------


class Copy:
    """A golden folder of our own to change; only the files that are named are kept."""

    def __init__(self, folder: Path, files: list[str]):
        self.folder = folder
        for name in files:
            shutil.copy(GOLDEN / name, folder / name)
            (folder / name).chmod(0o644)
        shutil.copytree(GOLDEN / "tiny_bagel", folder / "tiny_bagel")
        self.manifest = json.loads((GOLDEN / "manifest.json").read_text())
        self.manifest["files"] = {name: self.manifest["files"][name] for name in files}

    def run(self, implementation) -> Report:
        (self.folder / "manifest.json").write_text(json.dumps(self.manifest))
        return parity.run(Golden(self.folder), implementation)

    def add(self, file: str, name: str, tensor: torch.Tensor) -> None:
        path = self.folder / file
        save_file({**load_file(path), name: tensor}, path)
        described = {"shape": list(tensor.shape), "dtype": "float32", "meaning": "a new thing"}
        self.manifest["files"][file]["tensors"][name] = described


def not_covered(report: Report) -> list[str]:
    return [r.name for r in report.of(State.NOT_COVERED)]


@needs_golden
def test_tensors_that_parity_does_not_know_are_counted_and_named(tmp_path, fast):
    copy = Copy(tmp_path, ["misc.safetensors", "vae.safetensors"])
    copy.add("vae.safetensors", "half_decoded", torch.zeros(2, 3))
    save_file({"left_over": torch.zeros(1)}, tmp_path / "beside.safetensors")
    report = copy.run(fast)
    assert not_covered(report) == ["half_decoded", "left_over"]
    assert not report.of(State.FAILED)
    assert report.exit_code == 1
    assert "0 failed, 2 not covered" in report.summary()
    lines = "\n".join(report.lines())
    assert "not covered: vae.safetensors half_decoded: an unknown tensor" in lines


@needs_golden
def test_a_drawing_file_and_its_cases_may_have_any_name(tmp_path, fast):
    copy = Copy(tmp_path, ["misc.safetensors", "gen_batch.safetensors"])
    (tmp_path / "gen_batch.safetensors").rename(tmp_path / "gen_pairs.safetensors")
    listed = copy.manifest["files"].pop("gen_batch.safetensors")
    copy.manifest["files"]["gen_pairs.safetensors"] = listed
    for part in ("cases", "tensors"):
        renamed = {
            key.replace("global", "both.at_once"): value for key, value in listed[part].items()
        }
        listed[part] = renamed
    path = tmp_path / "gen_pairs.safetensors"
    stored = load_file(path)
    save_file({k.replace("global", "both.at_once"): v for k, v in stored.items()}, path)
    report = copy.run(fast)
    assert report.exit_code == 0, report.lines()
    assert ("gen_pairs.safetensors", "both.at_once.v") in {(r.file, r.name) for r in report.records}


@needs_golden
def test_contexts_are_walked_wherever_a_case_holds_them(tmp_path, fast):
    copy = Copy(tmp_path, ["misc.safetensors", "gen_edit.safetensors", "und.safetensors"])
    edit = copy.manifest["files"]["gen_edit.safetensors"]["cases"]
    edit["global"]["contexts"] = edit["contexts"]
    edit["channel_contexts"] = {**edit["contexts"], "cfg_img": [[edit["contexts"]["cfg_img"][0]]]}
    for key in ("nocfg", "text_channel", "text_channel_full"):
        edit[key] |= {k: edit["contexts"][k] for k in ("conditional", "cfg_text", "cfg_img")}
    und = copy.manifest["files"]["und.safetensors"]["cases"]
    picture, question = {"vit_image": "misc image.a_vit"}, {"text_ids": [1]}
    question["text_ids"] = und["after_text"]["question_ids"]
    und["after_image"]["segments"] = [picture]
    und["after_text"]["segments"] = und["generate"]["segments"] = [picture, question]
    report = copy.run(fast)
    # The text-to-image picture's settings lie in a file that this folder does not hold.
    assert not_covered(report) == ["e2e_t2i.uint8"]
    assert not report.of(State.FAILED)


@needs_golden
def test_an_unknown_setting_or_segment_is_counted_and_never_a_crash(tmp_path, fast):
    copy = Copy(tmp_path, ["misc.safetensors", "gen_t2i.safetensors"])
    cases = copy.manifest["files"]["gen_t2i.safetensors"]["cases"]
    stored = load_file(GOLDEN / "gen_t2i.safetensors")
    for kind in ("x", "v", "timesteps"):
        for case in ("odd", "local", "sung", "drawn"):
            copy.add("gen_t2i.safetensors", f"{case}.{kind}", stored[f"nocfg.{kind}"])
    cases["odd"] = {**cases["nocfg"], "cfg_text_scale": 4.0, "cfg_zero_steps": 2}
    cases["local"] = {**cases["nocfg"], "cfg_renorm_type": "local"}
    cases["sung"] = {**cases["nocfg"], "contexts": {"conditional": [{"song": "la"}]}}
    cases["drawn"] = {**cases["nocfg"], "cfg_zero_steps": 0}
    report = copy.run(fast)
    assert not report.of(State.FAILED)
    names = not_covered(report)
    # Of the case with an unknown setting that matters, only what differs is left uncovered.
    assert {"cases.odd.cfg_zero_steps", "odd.v", "odd.x"} <= set(names)
    assert "odd.timesteps" not in names
    assert {"local.x", "local.v", "sung.v", "cases.drawn.cfg_zero_steps"} <= set(names)
    assert "drawn.v" not in names
    assert report.exit_code == 1


@needs_golden
def test_a_cut_file_a_missing_file_and_a_missing_tensor_are_failures(tmp_path, fast):
    copy = Copy(tmp_path, ["misc.safetensors", "vit.safetensors", "vae.safetensors"])
    cut = (tmp_path / "vit.safetensors").read_bytes()[:5000]
    (tmp_path / "vit.safetensors").write_bytes(cut)
    (tmp_path / "vae.safetensors").unlink()
    copy.manifest["files"]["misc.safetensors"]["tensors"]["gone"] = {"shape": [1]}
    report = copy.run(fast)
    failed = [(r.file, r.name) for r in report.of(State.FAILED)]
    assert failed == [
        ("misc.safetensors", "gone"),
        ("vit.safetensors", "(the file)"),
        ("vae.safetensors", "(the file)"),
    ]


def test_a_folder_that_is_not_there_is_one_line_and_exit_code_two(tmp_path, capsys):
    assert run_program(parity.main, [str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "there is no golden folder" in said
    assert "Name a folder with manifest.json" in said


def test_a_manifest_that_is_none_is_one_line_and_exit_code_one(tmp_path, capsys):
    (tmp_path / "manifest.json").write_text("[]")
    assert run_program(parity.main, [str(tmp_path)]) == 1
    assert "is not a golden manifest" in capsys.readouterr().err
