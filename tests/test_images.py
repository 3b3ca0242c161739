"""Resize rules, transforms, patches and what unreadable pictures lead to.

python -m pytest tests/test_images.py
"""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from umm_reflect.context import ImageSegment
from umm_reflect.errors import UsageError, UserError
from umm_reflect.images import (
    MENDED,
    RELEASED,
    ResizeRule,
    Transforms,
    check_drawn_size,
    grid_positions,
    load_image,
    moved,
    patchify_latent,
    patchify_pixels,
    released_transforms,
    to_pil,
    to_rgb,
    to_tensor,
    unpatchify_latent,
)

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
needs_golden = pytest.mark.skipif(
    not (GOLDEN / "manifest.json").exists(), reason="shared data not present"
)


@pytest.fixture(scope="module")
def misc():
    from safetensors.torch import load_file

    return load_file(GOLDEN / "misc.safetensors")


def noise_image(height, width, mode="RGB"):
    channels = len(mode)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels, mode=None if channels > 1 else "L")


def png(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


# --- sizes ----------------------------------------------------------------------------------------


@needs_golden
def test_the_released_rule_gives_every_recorded_size():
    manifest = json.loads((GOLDEN / "manifest.json").read_text())
    table = manifest["files"]["misc.safetensors"]["cases"]["resize_table"]
    assert len(table) >= 104
    for row in table:
        rule = ResizeRule(
            row["max_size"], row["min_size"], row["stride"], row["max_pixels"], root_area=False
        )
        found = rule.size(row["in_h"], row["in_w"], row["img_num"])
        assert found == (row["out_h"], row["out_w"]), row


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (1024, 1024, (1024, 1024)),
        (200, 300, (512, 768)),
        (1080, 1920, (576, 1024)),
        (1920, 1080, (1024, 576)),
        (10, 10, (512, 512)),
        (520, 520, (512, 512)),  # 32.5 cells: half to even
    ],
)
def test_ordinary_sizes_are_the_same_in_both_profiles(height, width, expected):
    assert RELEASED.vae.size(height, width) == expected
    assert MENDED.vae.size(height, width) == expected


def test_the_mended_rule_shrinks_by_the_root_and_the_released_one_by_the_area_ratio():
    # 1024² pixels where half of 1,806,336 is allowed: the ratio is 0.8613, its root 0.928.
    assert RELEASED.vae.size(1024, 1024, images=2) == (880, 880)
    assert MENDED.vae.size(1024, 1024, images=2) == (944, 944)
    assert 944 * 944 <= 1806336 / 2 < 960 * 960
    # 601 px would be rounded up to 608, above a fifth of the limit.
    assert MENDED.vae.size(1024, 1024, images=5) == (592, 592)
    assert 592 * 592 <= 1806336 / 5 < 608 * 608


def test_mended_sizes_always_keep_the_limits():
    rule = ResizeRule(1024, 512, 16)
    for height, width in [(3000, 40), (17, 5000), (1, 1), (4096, 4096), (1023, 513)]:
        new_height, new_width = rule.size(height, width)
        assert new_height % 16 == new_width % 16 == 0
        assert 16 <= min(new_height, new_width) <= max(new_height, new_width) <= 1024
        assert new_height * new_width <= rule.max_pixels


def test_the_released_agents_strides_are_made_to_fit_the_grids():
    agent = released_transforms((512, 256, 8), (490, 112, 7))
    segment = agent.segment(noise_image(512, 512))
    assert segment.vae_pixels.shape == (3, 512, 512)
    assert segment.vit_pixels.shape == (3, 490, 490)
    # Strides 8 and 7 alone would give 264 x 512 (16.5 latent tokens) and 252 x 490 of that.
    assert agent.vae.size(264, 512) == (264, 512)
    segment = agent.segment(noise_image(264, 512))
    assert segment.vae_pixels.shape == (3, 256, 512)
    assert segment.vit_pixels.shape == (3, 252, 490)


@pytest.mark.parametrize("bad", [(0, 0, 16), (512, 1024, 16), (512, 256, 0), (512, 256, 1024)])
def test_impossible_rules_are_refused(bad):
    with pytest.raises(ValueError, match="resize rule"):
        ResizeRule(*bad)


# --- pixels ---------------------------------------------------------------------------------------


@needs_golden
@pytest.mark.parametrize("name", ["a", "b"])
def test_the_released_transforms_give_the_recorded_tensors(misc, name):
    tiny = Transforms(
        vae=ResizeRule(96, 64, 16, root_area=False),
        vit=ResizeRule(98, 56, 14, root_area=False),
        resize_twice=True,
        truncate=True,
    )
    image = Image.fromarray(misc[f"image.raw_{name}"].numpy())
    resized = torch.from_numpy(np.array(tiny.vae.resize(image))).int()
    assert (resized - misc[f"image.{name}_resized"].int()).abs().max() <= 1
    segment = tiny.segment(image)
    # another Pillow than the recording one may round a pixel the other way, in each of two resizes
    for pixels, kind, levels in ((segment.vae_pixels, "vae", 1), (segment.vit_pixels, "vit", 2)):
        assert torch.allclose(pixels, misc[f"image.{name}_{kind}"], atol=levels * 2.1 / 255)
    recorded = Image.fromarray(misc[f"image.{name}_resized"].numpy())
    assert torch.equal(to_tensor(recorded), misc[f"image.{name}_vae"])
    assert tiny.drawn_size(image) == tuple(misc[f"image.{name}_resized"].shape[:2])


def test_the_profiles_differ_in_the_picture_that_the_vit_sees():
    small = noise_image(100, 100)
    assert RELEASED.segment(small, "vit").vit_pixels.shape == (3, 518, 518)  # by way of 512 x 512
    assert MENDED.segment(small, "vit").vit_pixels.shape == (3, 224, 224)


def test_enters_as_chooses_the_blocks():
    image = noise_image(64, 64)
    both, vit, vae = (MENDED.segment(image, how) for how in ("vae+vit", "vit", "vae"))
    assert (both.has_vae, both.has_vit) == (True, True)
    assert (vit.has_vae, vit.has_vit) == (False, True)
    assert (vae.has_vae, vae.has_vit) == (True, False)
    with pytest.raises(ValueError, match="enters_as is 'text'; choose one of"):
        MENDED.segment(image, "text")


def test_levels_survive_the_way_to_a_tensor_and_back():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    pixels = to_tensor(Image.fromarray(grey))
    assert (pixels.min(), pixels.max(), pixels.dtype) == (-1.0, 1.0, torch.float32)
    assert np.array_equal(np.asarray(to_pil(pixels)), grey)


def test_drawn_pixels_are_clamped_and_rounded_or_truncated():
    values = [-1.5, -1.0, 0.0, 0.005, 1.0, 1.5]  # 0.0 is level 127.5, 0.005 level 128.1
    pixels = torch.tensor(values).expand(3, 1, 6)
    assert np.asarray(to_pil(pixels))[0, :, 0].tolist() == [0, 0, 128, 128, 255, 255]
    truncated = np.asarray(to_pil(pixels, truncate=True))[0, :, 0].tolist()
    assert truncated == [0, 0, 127, 128, 255, 255]
    with pytest.raises(ValueError, match="expected"):
        to_pil(torch.zeros(1, 3, 4, 4))


def test_transparent_parts_become_white():
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert list(to_rgb(image).tobytes()) == [255, 0, 0, 255, 255, 255]
    palette = image.convert("RGB").quantize(2)
    palette.info["transparency"] = palette.getpixel((1, 0))
    assert list(to_rgb(palette).tobytes()) == [255, 0, 0, 255, 255, 255]


def test_sixteen_bit_grey_is_scaled_not_clipped():
    deep = Image.fromarray(np.array([[0, 32768, 65535]], dtype=np.uint16))
    assert list(to_rgb(deep).tobytes()) == [0, 0, 0, 128, 128, 128, 255, 255, 255]


def test_pictures_are_turned_upright_by_their_exif_tag(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    noise_image(10, 20).save(tmp_path / "turned.png", exif=exif)
    image = load_image(tmp_path / "turned.png")
    assert (image.height, image.width) == (20, 10)


# --- bad input ------------------------------------------------------------------------------------


def test_unreadable_pictures_are_one_line_errors(tmp_path):
    whole = png(noise_image(64, 64))
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "short.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.png").write_bytes(b"")
    assert load_image(whole).size == (64, 64)
    for name, message in [
        ("absent.png", "does not exist"),
        ("text.png", "is not a picture"),
        ("empty.png", "is not a picture"),
        ("short.png", "cannot be read"),
        (".", "is a folder. Name an image inside it"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            load_image(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_picture_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UserError, match="too many pixels"):
        load_image(png(noise_image(64, 64)))


@pytest.mark.parametrize("side", [0, -16, 1040, 500, 8])
def test_sizes_that_the_grid_cannot_hold_name_its_limits(side):
    with pytest.raises(UsageError, match="multiples of 16 from 16 to 1024; the nearest is"):
        check_drawn_size(512, side, latent_grid_side=64)


def test_sizes_that_fit_pass():
    check_drawn_size(16, 1024, latent_grid_side=64)
    check_drawn_size(128, 128, latent_grid_side=8)


# --- patches --------------------------------------------------------------------------------------


def test_a_token_holds_rows_then_columns_then_channels():
    latent = torch.arange(2 * 2 * 4).reshape(2, 2, 4)  # 2 channels, 2 x 4
    assert patchify_latent(latent).tolist() == [
        [0, 8, 1, 9, 4, 12, 5, 13],
        [2, 10, 3, 11, 6, 14, 7, 15],
    ]
    assert torch.equal(unpatchify_latent(patchify_latent(latent), 2, 4), latent)


@needs_golden
def test_patch_orders_are_the_recorded_ones(misc):
    assert torch.equal(patchify_pixels(misc["vit_patchify.in"]), misc["vit_patchify.out"])
    tokens = misc["latent_patchify.out"]
    assert torch.equal(patchify_latent(misc["latent_patchify.in"]), tokens)
    assert torch.equal(unpatchify_latent(tokens, 6, 4), misc["latent_patchify.in"])


def test_sizes_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="30x28 cannot be cut into patches of 14"):
        patchify_pixels(torch.zeros(3, 30, 28))
    with pytest.raises(ValueError, match="5 tokens do not make a latent of 4x6"):
        unpatchify_latent(torch.zeros(5, 64), 4, 6)


def test_positions_count_along_the_tables_rows_and_never_wrap():
    assert grid_positions(2, 3, side=70).tolist() == [0, 1, 2, 70, 71, 72]
    with pytest.raises(ValueError, match="2x5 does not fit a position table of 4x4"):
        grid_positions(2, 5, side=4)


@needs_golden
def test_positions_are_the_recorded_ones_in_both_modes(misc):
    names = [name for name in misc if name.startswith("pos_ids.")]
    assert len(names) >= 13
    for name in names:
        mode, kind, *numbers = re.fullmatch(
            r"pos_ids\.(\w+)\.(\w+)_(\d+)x(\d+)_side(\d+)", name
        ).groups()
        height, width, side = map(int, numbers)
        patch = 16 if kind == "latent" else 14
        found = grid_positions(height // patch, width // patch, side, mode == "interpolate")
        assert torch.equal(found, misc[name])


def test_a_moved_picture_keeps_its_size_and_is_filled_from_its_border():
    picture = torch.arange(3 * 40 * 40, dtype=torch.float32).view(3, 40, 40)
    down = moved(ImageSegment(picture, picture[:, :28, :28]), (0.025, 0.0))
    assert torch.equal(down.vae_pixels[:, 1:], picture[:, :-1])
    assert torch.equal(down.vae_pixels[:, 0], picture[:, 0])
    assert torch.equal(down.vit_pixels[:, 1:], picture[:, :27, :28])
    left = moved(ImageSegment(vit_pixels=picture), (0.0, -0.05))
    assert not left.has_vae
    assert torch.equal(left.vit_pixels[:, :, :-2], picture[:, :, 2:])
    assert torch.equal(left.vit_pixels[:, :, -1], picture[:, :, -1])
    with pytest.raises(ValueError, match="latent cannot be moved"):
        moved(ImageSegment(latent=picture), (0.0, 0.025))
