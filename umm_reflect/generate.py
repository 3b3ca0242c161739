"""The three verbs of a unified model: read (`Engine`), say, draw. Each is batched and ragged.

    engine = Engine(bagel)
    caches = engine.caches(contexts)             # reads what has not been read yet
    said = say(bagel, caches, forced=..., temperature=0.5, max_tokens=512, generators=...)
    request = DrawRequest(context, text_uncond, image_uncond, (512, 512), generator)
    [drawn] = draw(engine, [request], settings)

They live in prefill.py, say.py (its steps: decode.py) and draw.py.
"""

from umm_reflect.draw import Drawn, DrawRequest, draw
from umm_reflect.flow import DrawSettings
from umm_reflect.prefill import Engine
from umm_reflect.say import Said, StopRule, Sure, Trie, first_shares, say

__all__ = [
    "DrawRequest",
    "DrawSettings",
    "Drawn",
    "Engine",
    "Said",
    "StopRule",
    "Sure",
    "Trie",
    "draw",
    "first_shares",
    "say",
]
