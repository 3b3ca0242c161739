"""Scores that no longer hold are found: each test breaks a finished run in one way."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from PIL import Image

from eval.binding import check, drop_stale, lasting, main, verifier_sha256
from eval.results import ResultFile, read_results
from eval.run import Env
from tests.test_eval_gallery import write_run
from umm_reflect.errors import UserError

MANIFEST = {
    "reward": "geneval",
    "settings": {"rule": "official", "device": "cuda:0", "batch_size": 16},
    "versions": {"torch": "2.11.0"},
    "sha256": {"detector": "ab" * 32},
    "models": {"detector": {"sha256": "ab" * 32}},
}
SWAPPED = {**MANIFEST, "sha256": {"detector": "cd" * 32}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    results = write_run(folder, 8)
    bound = [replace(one, verifier=verifier_sha256(MANIFEST)) for one in results]
    with ResultFile(folder / "results.jsonl", resume=False) as file:
        file.append(bound)
    (folder / "env.json").write_text(json.dumps({"judges": {"shapes553": MANIFEST}}))
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def results_of(folder):
    return read_results(folder / "results.jsonl")


def whys(folder, **how) -> list[str]:
    return [one.why for one in check(folder, results_of(folder), **how).stale]


def test_a_run_as_it_was_made_holds(run, capsys):
    assert main([str(run)]) == 0
    assert "8 of 8 results hold; 14 images checked, 0 not kept" in capsys.readouterr().out


def test_swapped_detector_weights_make_every_score_stale(run):
    (run / "env.json").write_text(json.dumps({"judges": {"shapes553": SWAPPED}}))
    assert main([str(run)]) == 1
    wanted = {"shapes553": verifier_sha256(SWAPPED)}
    found = whys(run, verifiers=wanted)
    assert len(found) == 8
    assert "judged by" in found[0]


def test_where_and_how_fast_is_no_part_of_what_judges():
    elsewhere = {**MANIFEST, "versions": {}, "settings": {"rule": "official", "device": "cpu"}}
    assert verifier_sha256(elsewhere) == verifier_sha256(MANIFEST)
    stricter = {**MANIFEST, "settings": {"rule": "cross_checked"}}
    assert len({verifier_sha256(m) for m in (MANIFEST, SWAPPED, stricter)}) == 3


def test_an_image_that_was_replaced_after_scoring_is_found_and_dropped(run, capsys):
    results = results_of(run)
    path = run / results[1].trace_folder / "image_1.png"
    with Image.open(path) as image:
        changed = image.copy()
    changed.putpixel((5, 5), (1, 2, 3))
    changed.save(path)
    assert main([str(run), "--drop"]) == 1
    printed = capsys.readouterr().out
    assert "image 1 is not the one that was judged" in printed
    assert "7 of 8 results hold" in printed
    assert results_of(run) == [results[0], *results[2:]]
    assert main([str(run)]) == 0


def test_a_file_written_anew_with_the_same_pixels_still_holds(run):
    path = run / results_of(run)[0].trace_folder / "image_0.png"
    with Image.open(path) as image:
        image.convert("RGBA").save(path, compress_level=1)
    assert whys(run) == []


def test_a_damaged_or_missing_or_further_image_is_found(run):
    results = results_of(run)
    folders = [run / result.trace_folder for result in results]
    (folders[0] / "image_0.png").write_bytes(b"PNG")
    (folders[1] / "image_0.png").unlink()
    shutil.copy(folders[2] / "image_0.png", folders[2] / "image_2.png")
    found = whys(run)
    assert "image 0 cannot be read" in found[0]
    assert found[1:] == ["image 0 is missing", "there is an image 2, which was not judged"]


def test_a_line_that_lost_half_of_its_rounds_is_refused_by_everything_that_reads_it(run):
    path = run / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["images"] = lines[1]["images"][:1]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=r"line 2, is damaged.*1 images, but 1 edits were drawn"):
        results_of(run)
    lines[1] |= {"edits": 0, "kept": 0}  # whoever cut it was careful
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=r"line 2, is damaged.*2 looks at 1 images"):
        results_of(run)
    lines[1]["looks"] = lines[1]["looks"][:1]  # more careful still
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="the look that says so is missing"):
        results_of(run)
    lines[1]["stop"] = "max_rounds"  # the most careful: images.jsonl tells
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=r"images.jsonl, line 2, is damaged"):
        results_of(run)
    (run / "images.jsonl").unlink()  # and without it the image that nobody judged
    assert whys(run) == ["there is an image 1, which was not judged"]


def test_images_that_were_not_kept_are_counted_and_not_called_stale(run):
    for result in results_of(run)[:4]:
        shutil.rmtree(run / result.trace_folder)
    binding = check(run, results_of(run))
    assert (binding.stale, binding.checked, binding.unchecked) == ((), 7, 7)


def test_what_is_made_again_stands_where_it_stood(run):
    before = {name: (run / name).read_bytes() for name in ("results.jsonl", "images.jsonl")}
    results = results_of(run)
    (run / results[3].trace_folder / "image_1.png").unlink()
    drop_stale(run, check(run, results))
    with ResultFile(run / "results.jsonl", resume=True) as file:
        file.append([results[3]])
        assert (run / "results.jsonl").read_bytes() != before["results.jsonl"]
        file.sort([result.key for result in results])
        assert file.results == results
    for name, data in before.items():
        assert (run / name).read_bytes() == data


def test_a_resume_is_not_refused_for_where_and_how_fast_it_is_judged(tmp_path):
    path = tmp_path / "env.json"
    settings = {"url": "http://one", "timeout": 9.0, "template": "dv"}
    before = {"reward": "dv", "settings": settings, "versions": {"numpy": "1"}}
    path.write_text(json.dumps({"judges": {"three": before}}))  # as it was recorded earlier
    elsewhere = {"reward": "dv", "settings": {"url": "http://two", "template": "dv"}}
    Env(path, {}).note_judges({"three": lasting(elsewhere)})
    other = {"reward": "dv", "settings": {"template": "another"}}
    with pytest.raises(UserError, match="another judge has judged the results of three"):
        Env(path, {}).note_judges({"three": lasting(other)})
