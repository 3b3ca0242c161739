"""What each head sees. The agent, SFT, RL and the evaluation all ask here; nothing else decides it.

view   draws        conditional               without the text          without the images
local  first image  [prompt]                  nothing                   (folded)
local  edit         [image k, edit]           [image k]                 [edit]
full   first image  [system, request, plan]   nothing                   (folded)
full   edit         all up to and with the    all before that turn      all texts in order
                    turn that asks for it

In layout "sft" a planning turn precedes the first image, which the local view draws from its [EDIT]
text. In an editing task the user's image stands between the system prompt and the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.types import EditView, Seen, View
from umm_reflect.context import Context

if TYPE_CHECKING:
    from PIL.Image import Image

    from agent.policy import Policy


def start(policy: Policy, prompt: str, source: Image | None) -> Seen:
    """What is in sight at the start. source: the user's image in an editing task."""
    system = policy.text(policy.system_prompt) if policy.system_prompt else None
    images = () if source is None else (policy.image(source),)
    return Seen(system, policy.text(prompt), editing=source is not None, images=images)


def current(seen: Seen) -> tuple[int, str]:
    """The number of the next round and what [SOURCE_IMAGE] says in it; a plan counts as round 0."""
    looks = len(seen.turns)
    if seen.editing:
        return looks, f"Image #{looks}" if looks else "given"
    if not seen.images:
        return 0, "None"
    return looks + (seen.plan is not None), f"Image #{looks}"


def reflect_view(seen: Seen) -> Context:
    """The running context: what a turn (the planning turn too) is sampled from."""
    plan, first = (seen.plan,) if seen.plan else (), seen.images[:1]
    start = (*first, seen.request) if seen.editing else (seen.request, *plan, *first)
    context = Context((seen.system, *start) if seen.system else start)
    for k, turn in enumerate(seen.turns):
        context += (turn, *seen.images[k + 1 : k + 2])
    return context


def first_image_view(seen: Seen, view: EditView) -> View:
    """What image 0 of a drawing task is drawn from; no image is in sight: that branch is folded."""
    local = Context((seen.plan_edit or seen.request,))
    return View(local if view == "local" else reflect_view(seen), Context(), None)


def direct_edit_view(seen: Seen) -> View:
    """What an edit without any turn is drawn from: the user's image and the request itself."""
    image, edit = Context(seen.images[-1:]), Context((seen.request,))
    return View(image + edit, image, edit)


def edit_view(seen: Seen, view: EditView) -> View:
    """What the edit that the last turn asks for is drawn from."""
    assert len(seen.turns) == len(seen.images), "an edit follows a turn"
    if view == "local":
        image, edit = Context(seen.images[-1:]), Context(seen.edits[-1:])
        return View(image + edit, image, edit)
    everything = reflect_view(seen)
    return View(everything, everything.prefix(len(everything) - 1), everything.texts_only())
