"""The local text reader on text that we draw: ten fonts, three sizes, pictures without any."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pytest
from PIL import Image, ImageDraw, ImageFont

from eval.rewards.registry import build

FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSerif-Bold"),
    *("DejaVuSerif-Italic", "DejaVuSansMono", "DejaVuSansMono-Bold", "STIXGeneral"),
    "STIXGeneralBol",
)
SIZES = (14, 24, 40)
TEXTS = ("Green tea 3", "OPEN 24 hours", "lost cat", "Exit 17")


@pytest.fixture(scope="module")
def reward():
    reward = build({"reward": "ocr"})
    yield reward
    reward.close()


def drawn(text: str, font: str, size: int, ink: str = "black", paper: str = "white") -> Image.Image:
    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    image = Image.new("RGB", (320, 160), paper)
    ImageDraw.Draw(image).text(
        (160, 80), text, ink, ImageFont.truetype(str(file), size), anchor="mm"
    )
    return image


def test_text_in_ten_fonts_and_three_sizes_is_read(reward, record_property):
    cases = [(TEXTS[i % 4], font, size) for i, font in enumerate(FONTS) for size in SIZES]
    images = [drawn(*case) for case in cases]
    verdicts = reward.score(images, [{"prompt": f'a sign "{text}"'} for text, _, _ in cases])
    exact = sum(bool(v.correct) for v in verdicts) / len(verdicts)
    letters = sum(v.score for v in verdicts) / len(verdicts)
    record_property("ocr_exact", exact)
    print(f"\nread exactly: {exact:.1%} of {len(cases)}; letters {letters:.1%}")
    wrong = [(c, v.reason) for c, v in zip(cases, verdicts, strict=True) if not v.correct]
    assert exact >= 0.9, wrong
    assert letters >= 0.97, wrong


def test_light_text_on_dark_paper_is_read_with_its_place(reward):
    image = drawn("lost cat", "DejaVuSans", 40, "white", "navy")
    [verdict] = reward.score([image], [{"prompt": 'a poster "Lost Cat"'}])
    assert verdict.correct
    x0, y0, x1, y1 = verdict.evidence["words"][0]["box"]
    assert 60 < x0 < 110
    assert 40 < y0 < 80 < y1 < 120
    assert 210 < x1 < 260


def test_pictures_without_text_of_any_size_read_as_empty(reward):
    sizes = [(1, 1), (3, 200), (200, 3), (64, 64)]
    images = [Image.new("RGB", size, "white") for size in sizes]
    verdicts = reward.score(images, [{"prompt": 'a "word"'}] * len(sizes))
    assert [v.score for v in verdicts] == [0.0] * len(sizes)
    assert verdicts[0].reason == "no text, not 'word'"
    [verdict] = reward.score(images[-1:], [{"prompt": "a blank page", "text": ""}])
    assert verdict.correct


def test_the_reader_checks_itself_and_names_its_weights(reward):
    reward.check()
    hashes = reward.manifest()["sha256"]
    assert len(hashes) == 3
    assert all(len(sha256) == 64 for sha256 in hashes.values())
