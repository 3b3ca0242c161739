"""Contexts are immutable, hashable lists that share their prefixes.

python -m pytest tests/test_context.py
"""

from dataclasses import FrozenInstanceError

import pytest
import torch

from umm_reflect.context import Context, ImageSegment, TextSegment

HELLO, EDIT = TextSegment((1, 2)), TextSegment((3,))


def picture():
    return ImageSegment(vae_pixels=torch.zeros(3, 16, 16), vit_pixels=torch.zeros(3, 14, 14))


def test_texts_are_equal_by_their_ids_and_pictures_only_to_themselves():
    assert TextSegment([1, 2]) == HELLO
    assert hash(TextSegment([1, 2])) == hash(HELLO)
    image = picture()
    same = image
    assert image == same
    assert image != picture()
    assert Context.of(HELLO, image) == Context.of(TextSegment((1, 2)), image)
    assert len({Context.of(HELLO, image), Context.of(HELLO, image), Context.of(HELLO)}) == 2


def test_appending_leaves_the_parent_alone():
    parent = Context.of(HELLO)
    image = picture()
    child = parent + image + EDIT
    assert parent.segments == (HELLO,)
    assert child.segments == (HELLO, image, EDIT)
    assert child == parent + Context.of(image, EDIT)
    assert child == parent + (s for s in (image, EDIT))
    assert child.prefix(1) == parent
    with pytest.raises(FrozenInstanceError):
        parent.segments = ()


def test_texts_only_and_images_only_keep_the_order():
    first, second = picture(), picture()
    context = Context.of(first, HELLO, second, EDIT)
    assert context.texts_only() == Context.of(HELLO, EDIT)
    assert context.images_only() == Context.of(first, second)
    assert (context.has_images, Context.of(HELLO).has_images) == (True, False)
    assert len(Context()) == 0


def test_a_segment_says_which_blocks_it_has():
    latent_only = ImageSegment(latent=torch.zeros(16, 2, 2))
    assert (latent_only.has_vae, latent_only.has_vit) == (True, False)
    assert (picture().has_vae, picture().has_vit) == (True, True)
    with pytest.raises(ValueError, match="needs vae_pixels, latent or vit_pixels"):
        ImageSegment()


def test_only_segments_go_into_a_context():
    with pytest.raises(TypeError, match="not str"):
        Context.of("two red circles")
