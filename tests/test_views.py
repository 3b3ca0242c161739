"""The table of what each head sees, with contexts written out by hand."""

import pytest
import torch

from agent import views
from agent.types import Seen
from umm_reflect.context import Context, ImageSegment, TextSegment

SYSTEM, REQUEST, PLAN, PLAN_EDIT = (TextSegment((i,)) for i in (1, 2, 3, 4))
TURN0, TURN1, EDIT0, EDIT1 = (TextSegment((i,)) for i in (10, 11, 20, 21))
IMAGE0, IMAGE1 = (ImageSegment(vae_pixels=torch.zeros(3, 16, 16)) for _ in range(2))

FRESH = Seen(SYSTEM, REQUEST)
DRAWN = FRESH.with_image(IMAGE0).with_turn(TURN0, EDIT0).with_image(IMAGE1).with_turn(TURN1, EDIT1)
PLANNED = FRESH.with_turn(PLAN, PLAN_EDIT)
GIVEN = Seen(SYSTEM, REQUEST, editing=True, images=(IMAGE0,)).with_turn(TURN0, EDIT0)


def test_a_turn_sees_everything_in_order():
    assert views.reflect_view(FRESH) == Context.of(SYSTEM, REQUEST)
    assert views.reflect_view(FRESH.with_image(IMAGE0)) == Context.of(SYSTEM, REQUEST, IMAGE0)
    assert views.reflect_view(DRAWN) == Context.of(SYSTEM, REQUEST, IMAGE0, TURN0, IMAGE1, TURN1)


def test_a_plan_stands_before_the_first_image():
    looking = PLANNED.with_image(IMAGE0)
    assert views.reflect_view(PLANNED) == Context.of(SYSTEM, REQUEST, PLAN)
    assert views.reflect_view(looking) == Context.of(SYSTEM, REQUEST, PLAN, IMAGE0)


def test_the_users_image_stands_before_the_request():
    assert views.reflect_view(GIVEN) == Context.of(SYSTEM, IMAGE0, REQUEST, TURN0)
    later = GIVEN.with_image(IMAGE1)
    assert views.reflect_view(later) == Context.of(SYSTEM, IMAGE0, REQUEST, TURN0, IMAGE1)


def test_without_a_system_prompt_the_request_comes_first():
    assert views.reflect_view(Seen(None, REQUEST)) == Context.of(REQUEST)


def test_the_local_view_draws_the_first_image_from_the_prompt_alone():
    view = views.first_image_view(FRESH, "local")
    assert view.conditional == Context.of(REQUEST)
    assert view.text_uncond == Context()
    assert view.image_uncond is None


def test_the_local_view_draws_a_planned_first_image_from_the_edit_text_of_the_plan():
    assert views.first_image_view(PLANNED, "local").conditional == Context.of(PLAN_EDIT)
    nothing_to_draw = FRESH.with_turn(PLAN, None)
    assert views.first_image_view(nothing_to_draw, "local").conditional == Context.of(REQUEST)


def test_the_full_view_draws_the_first_image_from_system_request_and_plan():
    assert views.first_image_view(FRESH, "full").conditional == Context.of(SYSTEM, REQUEST)
    view = views.first_image_view(PLANNED, "full")
    assert view.conditional == Context.of(SYSTEM, REQUEST, PLAN)
    assert view.text_uncond == Context()
    assert view.image_uncond is None


@pytest.mark.parametrize(
    ("seen", "image", "edit"), [(DRAWN, IMAGE1, EDIT1), (GIVEN, IMAGE0, EDIT0)]
)
def test_the_local_view_edits_the_current_image_by_the_edit_text_alone(seen, image, edit):
    view = views.edit_view(seen, "local")
    assert view.conditional == Context.of(image, edit)
    assert view.text_uncond == Context.of(image)
    assert view.image_uncond == Context.of(edit)


def test_the_full_view_edits_in_the_running_context():
    view = views.edit_view(DRAWN, "full")
    assert view.conditional == Context.of(SYSTEM, REQUEST, IMAGE0, TURN0, IMAGE1, TURN1)
    assert view.text_uncond == Context.of(SYSTEM, REQUEST, IMAGE0, TURN0, IMAGE1)
    assert view.image_uncond == Context.of(SYSTEM, REQUEST, TURN0, TURN1)


def test_the_full_view_of_an_editing_task_likewise():
    view = views.edit_view(GIVEN, "full")
    assert view.conditional == Context.of(SYSTEM, IMAGE0, REQUEST, TURN0)
    assert view.text_uncond == Context.of(SYSTEM, IMAGE0, REQUEST)
    assert view.image_uncond == Context.of(SYSTEM, REQUEST, TURN0)


def test_the_full_view_of_a_planned_task_holds_the_plan_in_every_branch():
    seen = PLANNED.with_image(IMAGE0).with_turn(TURN0, EDIT0)
    view = views.edit_view(seen, "full")
    assert view.conditional == Context.of(SYSTEM, REQUEST, PLAN, IMAGE0, TURN0)
    assert view.text_uncond == Context.of(SYSTEM, REQUEST, PLAN, IMAGE0)
    assert view.image_uncond == Context.of(SYSTEM, REQUEST, PLAN, TURN0)


def test_rounds_and_sources_have_the_names_of_each_layout():
    assert views.current(FRESH) == (0, "None")
    assert views.current(FRESH.with_image(IMAGE0)) == (0, "Image #0")
    assert views.current(DRAWN.with_image(IMAGE0)) == (2, "Image #2")
    assert views.current(PLANNED.with_image(IMAGE0)) == (1, "Image #0")
    assert views.current(Seen(SYSTEM, REQUEST, editing=True, images=(IMAGE0,))) == (0, "given")
    assert views.current(GIVEN.with_image(IMAGE1)) == (1, "Image #1")
