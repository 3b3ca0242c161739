"""What training sees is what the agent saw: rows of a run against the contexts of that very run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from agent import trace
from agent.loop import run_episodes
from agent.policy import ScriptedPolicy
from agent.types import Reflection
from sft.data import read_dataset
from sft.rows import Layer, expand
from tests.letters import LETTERS
from umm_reflect.context import ImageSegment, TextSegment
from umm_reflect.images import mended_transforms

TRANSFORMS = mended_transforms(vae=(48, 16, 16), vit=(42, 14, 14))
PROMPT = "Look closely."
WRONG = Reflection("One circle.", 4, "edit", "Add a circle.")
WORSE = Reflection("Three circles.", 3, "edit", "Remove a circle.")
RIGHT = Reflection("Two circles.", 10, "done", "")


def plain(segments) -> list:
    """Segments as values that compare: ids, or the pixels of each block."""
    out = []
    for segment in segments:
        if isinstance(segment, TextSegment):
            out.append(segment.ids)
            continue
        for pixels in (segment.vae_pixels, segment.vit_pixels):
            if pixels is not None:
                out.append((tuple(pixels.shape), pixels.sum().item()))
    return out


@pytest.mark.parametrize("edit_view", ["local", "full"])
@pytest.mark.parametrize("task", ["draw", "edit", "plan"])
def test_rows_hold_what_the_agent_saw(tmp_path, task, edit_view):
    script = [WRONG, WORSE, RIGHT] if task != "plan" else [WRONG, WRONG, WORSE, RIGHT]
    layout = "sft" if task == "plan" else "rl"
    source = Image.new("RGB", (48, 32), "blue") if task == "edit" else None

    def paint(ask):
        return Image.new("RGB", (48, 32), (60 * ask.number, 10, 0))

    scripted = ScriptedPolicy(script, paint, layout=layout, system_prompt=PROMPT)
    [made] = run_episodes(scripted, ["two red circles"], max_rounds=4, sources=[source])
    assert made.stop == "done"
    trace.save(made, tmp_path / "run", trace.About("scripted"))

    policy = SimpleNamespace(
        text=lambda text: LETTERS.segment(text, allow_special=False),
        image=TRANSFORMS.segment,
        system_prompt=PROMPT,
        edit_view=edit_view,
    )
    run = trace.load(tmp_path / "run", policy)
    found = read_dataset(tmp_path)
    layer = Layer(LETTERS, TRANSFORMS, PROMPT, edit_view=edit_view)
    rows = expand(found.records)

    turns = [step.turn for step in run.steps]
    looks = turns[1:] if task == "edit" else turns  # no row looks at the user's own image alone
    assert len(rows["verifier"]) == len(looks)
    for row, turn in zip(sorted(rows["verifier"], key=lambda r: r.image), looks, strict=True):
        *seen, said = layer.lay(row).pieces
        assert plain(piece.segment for piece in seen) == plain(turn.context)
        assert LETTERS.decode(said.segment.ids) == turn.said
        assert [piece.learn for piece in (*seen, said)] == [False] * len(seen) + [True]

    drawn = [run.first] if run.first else []
    drawn += [step.transition for step in run.steps if step.transition]
    pairs = zip(sorted(rows["transition"], key=lambda r: r.image), drawn, strict=True)
    for row, transition in pairs:
        for branch in ("conditional", "text_uncond", "image_uncond"):
            *seen, image = layer.lay(row, branch).pieces
            context = getattr(transition.view, branch)
            context = transition.view.conditional if context is None else context
            assert plain(piece.segment for piece in seen) == plain(context)
            assert torch.equal(image.segment.vae_pixels, transition.segment.vae_pixels)

    whole = layer.lay(expand(found.records, kinds=["whole"])["whole"][0]).pieces
    seen = [p.segment for p in whole if not (p.learn and isinstance(p.segment, ImageSegment))]
    assert plain(seen[:-1]) == plain(turns[-1].context)
