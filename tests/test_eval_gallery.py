"""report.html: what it holds, and in a real browser: filters, boxes, no error on the console."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest
from PIL import Image

from eval.gallery import outcome, record, surest, write_report
from eval.report import report_of
from eval.results import Box, Result, ResultFile, judged
from eval.shapes import ShapesVerifier
from tests.browser import MISSING, browser
from tests.test_eval_report import BROKEN, DONE, EDIT, result
from umm_reflect.errors import UserError
from umm_reflect.shapes.render import render
from umm_reflect.shapes.sampler import scene_for
from umm_reflect.shapes.sets import build_sets

PLAYED = {  # images (1: right), looks, how it stopped
    "right": ("1", (DONE,), "done"),
    "repaired": ("01", (EDIT, DONE), "done"),
    "damaged": ("10", (EDIT, DONE), "done"),
    "wrong": ("00", (EDIT, BROKEN), "malformed"),
}


def write_run(folder, count: int = 50, keep: bool = True) -> list[Result]:
    """A run of so many rows, its outcomes in turn, with real images, verdicts and boxes."""
    entries = build_sets().shapes553
    results = []
    for place in range(count):
        entry = entries[place * 11]
        images, looks, stop = list(PLAYED.values())[place % 4]
        about = {"family": entry.family, "tag": entry.row["tag"], "prompt": entry.row["prompt"]}
        one = result(entry.index, images, looks, stop, **about)
        pictures = [
            render(scene_for(entry.row, random.Random(place)))
            if right == "1"
            else Image.new("RGB", (128, 128), (235, 230, 220))
            for right in images
        ]
        verdicts = ShapesVerifier().score(pictures, [entry.row] * len(pictures))
        one = replace(one, images=tuple(map(judged, pictures, verdicts)))
        assert [image.correct for image in one.images] == [right == "1" for right in images]
        if keep:
            for number, image in enumerate(pictures):
                path = folder / one.trace_folder / f"image_{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path)
        results.append(one)
    with ResultFile(folder / "results.jsonl", resume=False) as file:
        file.append(results)
    summary = {"model": "nano & <co>", "model_sha256": {"ema.safetensors": "ab" * 32}}
    summary |= {"adapter": None, "profile": "ours", "note": "not comparable: --limit 50"}
    summary |= asdict(report_of(results, 1))
    (folder / "summary.json").write_text(json.dumps(summary))
    return results


def test_what_became_of_the_first_image_has_one_word_each():
    for name, (images, looks, stop) in PLAYED.items():
        assert outcome(result(0, images, looks, stop)) == name
    assert outcome(result(0, "10", (EDIT, EDIT), "max_rounds", kept=0)) == "right"


def test_the_page_knows_of_each_image_its_verdict_and_what_was_said():
    one = record(result(4, "00", (EDIT, BROKEN), "malformed"), lambda r, n: f"{r.row}/{n}.png")
    assert [image["file"] for image in one["images"]] == ["4/0.png", "4/1.png"]
    assert one["looks"] == [
        {"said": "4/10 edit", "edit": "Add a red circle.", "error": None},
        {"said": None, "edit": None, "error": "score_format"},
    ]
    assert (one["name"], one["outcome"], one["right"]) == ("4, seed 0", "wrong", False)


def test_the_surest_boxes_are_shown_where_there_are_too_many():
    faint = [Box("dog", (0, 0, 1, 1), 0.01 * i) for i in range(40)]
    words = Box("exit", (0, 0, 1, 1))
    assert surest([*faint, words]) == [words, *faint[:16:-1]]
    assert len(surest(faint)) == 24


def test_a_prompt_cannot_break_out_of_the_data_and_the_figures_are_in_the_page(tmp_path):
    write_run(tmp_path, 4)
    page = write_report(tmp_path, [result(prompt="</script><script>alert(1)</script>")]).read_text()
    assert page.count("</script>") == 2
    assert "nano &amp; &lt;co&gt;" in page
    assert "not comparable: --limit 50" in page
    assert "0.500" in page


def test_a_folder_without_a_summary_is_one_line(tmp_path):
    with pytest.raises(UserError, match="holds no finished run"):
        write_report(tmp_path)


# --- in a browser ---------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(bool(MISSING), reason=f"slow service: {MISSING} not installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    write_report(folder)
    with browser(tmp_path_factory.mktemp("browser")) as page:
        page.open(folder / "report.html")
        yield page


def prompts(page) -> int:
    return page.run("return document.querySelectorAll('article').length")


def count(page) -> str:
    return page.run("return document.getElementById('count').textContent")


@needs_browser
def test_filters_are_clicked_and_show_what_they_say_without_an_error(page, tmp_path):
    assert count(page) == "50 of 50"
    assert prompts(page) == 40
    page.click("#more")
    assert prompts(page) == 50
    for name, many in {"right": 13, "repaired": 13, "damaged": 12, "wrong": 12}.items():
        page.choose("[name=outcome]", name)
        tags = page.run("return [...document.querySelectorAll('.tag')].map(t => t.textContent)")
        assert tags == [name] * many
    page.choose("[name=outcome]", "")
    page.choose("[name=verdict]", "wrong")
    assert count(page) == "24 of 50"
    page.choose("[name=stop]", "malformed")
    assert count(page) == "12 of 50"
    page.click("button[type=reset]")
    assert page.run("return new Promise(r => setTimeout(() => r(location.hash), 50))") == ""
    page.choose("[name=family]", "counting")
    families = page.run("return [...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert len(families) == prompts(page) == 7
    assert all("counting" in text for text in families)
    page.click("button[type=reset]")
    page.type("[name=words]", "two")
    held = page.run("return [...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert held
    assert all("two" in text for text in held)
    page.click("button[type=reset]")
    assert page.console() == []


@needs_browser
def test_boxes_appear_on_demand_where_the_objects_are(page, tmp_path):
    boxes = "return [...document.querySelectorAll('.box')].filter(b => b.offsetParent).length"
    assert page.run(boxes) == 0
    page.click("[name=boxes]")
    assert page.run(boxes) > 20
    inside = """return [...document.querySelectorAll('.box')].every(b => {
        const p = b.parentElement.getBoundingClientRect(), r = b.getBoundingClientRect();
        return r.width > 3 && r.left >= p.left - 1 && r.right <= p.right + 1 &&
               r.top >= p.top - 1 && r.bottom <= p.bottom + 1; })"""
    assert page.run(inside)
    picture = Image.open(page.screenshot(tmp_path / "page.png"))
    colors = {color for _, color in picture.convert("RGB").getcolors(1 << 24)}
    assert {(47, 111, 222), (31, 157, 85), (207, 61, 61)} <= colors  # boxes, right, wrong
    page.click("[name=boxes]")
    assert page.run(boxes) == 0
    assert page.console() == []


@needs_browser
def test_a_selection_is_passed_on_in_the_address(page):
    address = page.run("return location.href.split('#')[0]")
    page.open("about:blank")
    page.open(f"{address}#outcome=damaged&boxes=on&foreign=1")
    assert count(page) == "12 of 50"
    assert page.run("return document.forms[0].boxes.checked") is True
    loaded = "return [...document.images].slice(0, 3).every(i => i.complete && i.naturalWidth > 0)"
    assert page.run(f"return new Promise(r => setTimeout(() => r((() => {{{loaded}}})()), 300))")
    assert page.console() == []


@needs_browser
def test_images_that_were_not_kept_are_grey_tiles_and_no_failed_load(tmp_path):
    write_run(tmp_path, 4, keep=False)
    write_report(tmp_path)
    with browser(tmp_path) as page:
        page.open(tmp_path / "report.html")
        assert page.run("return document.querySelectorAll('.none').length") == 7
        assert page.console() == []


@needs_browser
def test_the_console_does_tell_of_an_image_that_cannot_be_loaded(tmp_path):
    write_run(tmp_path, 1)
    write_report(tmp_path, find_image=lambda result, number: "gone.png")
    with browser(tmp_path) as page:
        page.open(tmp_path / "report.html")
        page.run("return new Promise(done => setTimeout(done, 300))")
        assert any("gone.png" in line for line in page.console())
