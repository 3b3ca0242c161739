"""Our schema in Parquet, anchors and open trajectories in it, and datasets of the shapes world."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from eval.shapes import ShapesVerifier
from sft import shapes_trajectories
from sft.data import Record, Rule, read_dataset, schema_of
from sft.data_cli import main
from sft.data_convert import example_records, misfit
from sft.data_own import write_jsonl, write_parquet, write_tables
from sft.rows import Layer, Row, expand
from sft.shapes_trajectories import Config, files, generate
from tests.letters import LETTERS
from umm_reflect.errors import UserError
from umm_reflect.images import mended_transforms
from umm_reflect.shapes.prompts import clause, plain_row
from umm_reflect.shapes.render import render
from umm_reflect.shapes.scene import Scene, Shape

TRANSFORMS = mended_transforms(vae=(32, 32, 16), vit=(28, 28, 14))


def content(record: Record) -> tuple:
    """All that a record says, its pictures as their bytes and whether they are learned."""
    bare = replace(record, images=())
    return bare, [(picture.read(), picture.learn) for picture in record.images]


# --- Parquet --------------------------------------------------------------------------------------


def test_parquet_gives_back_what_was_written_as_jsonl_does(tmp_path):
    records = example_records(6)
    write_jsonl(records, tmp_path / "lines")
    write_parquet(records[:4], tmp_path / "table" / "trajectories-0.parquet")
    write_parquet(records[4:], tmp_path / "table" / "trajectories-1.parquet")
    assert schema_of(tmp_path / "table") == "parquet"
    lines, table = read_dataset(tmp_path / "lines"), read_dataset(tmp_path / "table")
    assert (table.rows, table.bad) == (6, 0)
    assert [content(r) for r in table.records] == [content(r) for r in lines.records]
    assert [[p.size for p in r.images] for r in table.records] == [
        [p.size for p in r.images] for r in lines.records
    ]
    assert all(p.data is None for r in table.records for p in r.images)


def test_convert_writes_tables_that_read_back(tmp_path, capsys):
    write_jsonl(example_records(5), tmp_path / "lines")
    words = [str(tmp_path / "lines"), str(tmp_path / "tables"), "--to", "parquet"]
    assert main(["convert", *words]) == 0
    assert "wrote 5 trajectories" in capsys.readouterr().out
    assert write_tables(example_records(5), tmp_path / "small", rows=2) == 5
    assert len(list((tmp_path / "small").iterdir())) == 3
    for name in ("tables", "small"):
        found = read_dataset(tmp_path / name)
        assert [content(r) for r in found.records] == [content(r) for r in example_records(5)]


def test_processes_read_the_same_records(tmp_path):
    for k in range(3):
        some = [replace(r, uid=f"{k}-{r.uid}") for r in example_records(3, seed=k)]
        write_parquet(some, tmp_path / f"trajectories-{k}.parquet")
    one, several = read_dataset(tmp_path), read_dataset(tmp_path, processes=2)
    assert one.records == several.records
    assert len(one.records) == 9


def test_a_uid_that_two_files_use_is_a_violation_with_processes_too(tmp_path):
    for k in range(2):
        write_parquet(example_records(2), tmp_path / f"trajectories-{k}.parquet")
    for processes in (0, 2):
        found = read_dataset(tmp_path, processes=processes)
        assert [v.rule for v in found.violations] == [Rule.UID, Rule.UID]
        assert len(found.records) == 2


def test_a_picture_that_was_changed_in_a_table_is_found_by_its_hash(tmp_path):
    import pyarrow
    from pyarrow.parquet import read_table, write_table

    path = tmp_path / "trajectories-0.parquet"
    write_parquet(example_records(2), path)
    rows = read_table(path).to_pylist()
    rows[1]["images"][0] = rows[0]["images"][0]
    write_table(pyarrow.Table.from_pylist(rows, read_table(path).schema), path)
    found = read_dataset(tmp_path)
    assert [v.rule for v in found.violations] == [Rule.IMAGE_HASH]


# --- anchors and open trajectories ----------------------------------------------------------------


def entry(**changes) -> dict:
    looked = {"thinking": "One.", "score": 3, "action": "edit", "edit": "Add a dot."}
    made = {"uid": "a", "task": "t2i", "prompt": "two dots", "images": ["a.png"]}
    return {**made, "turns": [looked], **changes}


def written(tmp_path, *entries):
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    lines = [json.dumps(e) for e in entries]
    (tmp_path / "trajectories.jsonl").write_text("\n".join(lines))
    return read_dataset(tmp_path)


def test_a_line_with_a_prompt_and_an_image_alone_is_an_anchor(tmp_path):
    found = written(tmp_path, entry(turns=[]), entry(uid="b", turns=[], images=["a.png", "a.png"]))
    assert [record.uid for record in found.anchors] == ["a"]
    assert found.records == ()
    assert {v.rule for v in found.violations} == {Rule.LENGTHS, Rule.LAST_NOT_DONE}
    rows = expand(found.records, found.anchors, ["anchor", "whole", "transition"])
    assert {kind: len(some) for kind, some in rows.items()} == {
        "anchor": 1,
        "whole": 0,
        "transition": 0,
    }


def test_only_an_open_trajectory_may_end_with_an_edit(tmp_path):
    found = written(tmp_path, entry(), entry(uid="b", open=True))
    assert [(v.uid, v.rule) for v in found.violations] == [("a", Rule.LAST_NOT_DONE)]
    (record,) = found.records
    assert record.open
    assert misfit(record) != ""


def test_a_look_at_a_collected_image_learns_its_words_and_no_pixel(tmp_path):
    image = {"file": "a.png", "learn": False}
    (record,) = written(tmp_path, entry(images=[image], open=True)).records
    rows = expand([record], (), ["whole", "transition", "controller", "penultimate"])
    assert {kind: len(some) for kind, some in rows.items()} == {
        "whole": 1,
        "transition": 0,
        "controller": 1,
        "penultimate": 0,
    }
    pieces = Layer(LETTERS, TRANSFORMS).lay(rows["whole"][0]).pieces
    assert [type(p.segment).__name__ for p in pieces] == [
        "TextSegment",
        "ImageSegment",
        "TextSegment",
    ]
    assert [p.learn for p in pieces] == [False, False, True]


def test_a_share_of_the_rows_that_draw_has_the_full_view(tmp_path):
    records = example_records(12)
    rows = expand(records, (), ["transition"])["transition"]
    local, full, half = (
        Layer(LETTERS, TRANSFORMS, "Draw.", full_view=share) for share in (0.0, 1.0, 0.5)
    )
    views = [half.view(row) for row in rows]
    assert 0.25 < views.count("full") / len(rows) < 0.75
    for row, view in list(zip(rows, views, strict=True))[:6]:
        want = (full if view == "full" else local).lay(row).pieces
        have = half.lay(row).pieces
        assert [p.segment.ids for p in have if hasattr(p.segment, "ids")] == [
            p.segment.ids for p in want if hasattr(p.segment, "ids")
        ]
    anchor = Row("anchor", "x", Record("x", "t2i", "a dot", (), records[0].images[:1]), 0)
    texts = [p.segment.ids for p in full.lay(anchor).pieces[:-1]]
    assert [LETTERS.decode(ids) for ids in texts] == ["Draw.", "a dot"]


# --- the shapes world -----------------------------------------------------------------------------


def test_many_processes_write_the_same_files_as_one_and_go_on_where_they_stopped(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(shapes_trajectories, "PER_FILE", {"looks": 3, "drawings": 4, "own": 2})
    one = Config(tmp_path / "one", trajectories=7, drawings=6, workers=1)
    assert generate(one) == 13
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == [
        "trajectories-drawings-0-00000.parquet",
        "trajectories-drawings-0-00001.parquet",
        "trajectories-looks-0-00000.parquet",
        "trajectories-looks-0-00001.parquet",
        "trajectories-looks-0-00002.parquet",
    ]
    two = replace(one, output_dir=tmp_path / "two", workers=2)
    generate(two)
    (tmp_path / "two" / names[2]).unlink()
    assert generate(two) == 3
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    found = read_dataset(tmp_path / "one", "decode")
    assert (len(found.records), len(found.anchors), found.bad) == (7, 6, 0)
    assert generate(replace(one, seed=1)) == 13
    assert read_dataset(tmp_path / "one").bad == 0


def test_collected_images_become_open_trajectories_and_anchors(tmp_path):
    row = plain_row("color_attr", [clause("star", 1, "red"), clause("moon", 1, "green")])
    star, moon = Shape("star", "red", 0.25, 0.3, 0.3), Shape("moon", "green", 0.7, 0.7, 0.3)
    scenes = [Scene((star, moon)), Scene((star, replace(moon, color="blue")))]
    images = [render(scene, 128) for scene in scenes]
    lines = []
    for k, verdict in enumerate(ShapesVerifier().score(images, [row] * 2)):
        lines.append(
            {
                **{"row": row, "prompt": row["prompt"], "images": [k], "turns": []},
                **{"verdicts": [verdict.to_record()], "source": "model"},
            }
        )
    (tmp_path / "own").mkdir()
    np.save(tmp_path / "own" / "images.npy", np.stack([np.asarray(i) for i in images]))
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (tmp_path / "own" / "records.jsonl").write_text(text)
    config = Config(tmp_path / "out", trajectories=0, collected=(tmp_path / "own",), workers=1)
    assert generate(config) >= 4
    found = read_dataset(tmp_path / "out", "decode")
    assert found.bad == 0
    assert [anchor.prompt for anchor in found.anchors] == [row["prompt"]]
    own = [r for r in found.records if r.prompt == row["prompt"]]
    right, *wrong = sorted(own, key=lambda r: r.uid)
    assert [said.reflection.action for said in right.turns] == ["done"]
    assert [image.learn for image in right.images] == [False]
    assert len(wrong) == 2
    for record in wrong:
        assert record.open
        assert record.turns[0].reflection.action == "edit"
        assert not record.images[0].learn


def test_a_folder_without_collected_images_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no records.jsonl. Name a folder of eval.collect"):
        files(Config(tmp_path / "out", collected=(tmp_path,)))
