"""A model that sees more patches: the same weights, another grid, ready to be trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sft.finer import interpolated, main
from tests.tiny import write_tiny_checkpoint
from umm_reflect.checkpoint import load
from umm_reflect.cli import run_program
from umm_reflect.hub import profile
from umm_reflect.images import mended_transforms
from umm_reflect.profile import save_profile
from umm_reflect.vit import sincos_table


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("base") / "tiny")
    bagel = load(folder)
    patch, side = bagel.config.vit.patch_size, bagel.config.vit.grid_side
    own = profile(folder)
    square = mended_transforms(vae=(64, 64, 16), vit=(patch * side, patch * side, patch))
    save_profile(replace(own, transforms=replace(square, vit_patch=patch)), folder)
    return folder


def side_of(folder: Path) -> tuple[int, int]:
    config = load(folder).config.vit
    return config.grid_side, config.patch_size


def test_only_the_two_position_tables_and_the_sizes_change(base, tmp_path):
    old, patch = side_of(base)
    new = old + 3
    assert main([str(base), "--side", str(new * patch), "--output-dir", str(tmp_path / "f")]) == 0
    before, after = (load_file(folder / "ema.safetensors") for folder in (base, tmp_path / "f"))
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    learned = "vit_model.vision_model.embeddings.position_embedding.weight"
    computed = {
        "vit_pos_embed.pos_embed",
        "latent_pos_embed.pos_embed",
    }  # what is stored counts not
    assert changed - computed == {learned}
    assert len(after[learned]) == new**2
    bagel = load(tmp_path / "f")
    assert bagel.config.vit.grid_side == new
    assert torch.equal(
        bagel.vit_pos_embed.pos_embed, sincos_table(new, bagel.config.llm.hidden_size)
    )
    rule = profile(tmp_path / "f").transforms.vit
    assert rule.min_size == rule.max_size == new * patch
    assert (tmp_path / "f/ae.safetensors").read_bytes() == (base / "ae.safetensors").read_bytes()


def test_a_grid_that_rises_along_rows_and_columns_goes_on_rising():
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    table = torch.stack([rows, columns], -1).reshape(64, 2)
    grid = interpolated(table, 12).reshape(12, 12, 2)
    assert (grid[1:, :, 0] > grid[:-1, :, 0]).all()
    assert (grid[:, 1:, 1] > grid[:, :-1, 1]).all()
    assert grid[..., 0].mean() == pytest.approx(3.5, abs=1e-4)
    assert torch.allclose(grid[..., 0], grid[:, :1, 0].expand(12, 12), atol=1e-5)


def test_how_sure_it_has_to_be_is_written_where_it_is_asked_for(base, tmp_path):
    old, patch = side_of(base)
    asked = ["--sure-of-ten", "0.9", "--glances", "5", "--output-dir", str(tmp_path / "f")]
    main([str(base), "--side", str((old + 1) * patch), *asked])
    say = json.loads((tmp_path / "f/reflection.json").read_text())["say"]
    assert (say["sure_of_ten"], say["glances"]) == (0.9, 5)
    assert profile(tmp_path / "f").say.max_tokens == profile(base).say.max_tokens


@pytest.mark.parametrize("more", [0, 1])
def test_a_side_that_is_not_larger_or_no_multiple_of_the_patches_is_a_usage_error(
    base, tmp_path, capsys, more
):
    old, patch = side_of(base)
    side = old * patch + more  # as before; one pixel more
    code = run_program(main, [str(base), "--side", str(side), "--output-dir", str(tmp_path / "f")])
    assert code == 2
    assert f"multiple of {patch} above {old * patch}" in capsys.readouterr().err
    assert not (tmp_path / "f").exists()
