"""The three verbs of a unified model: read (`Engine`), say and draw. Each is batched and ragged,
the model first.

engine = Engine(bagel)
caches = engine.caches(contexts)                                    # reads what has not been read
yet said = say(bagel, caches, forced=..., temperature=0.5, max_tokens=512, generators=...)
drawn = draw(engine, [DrawRequest(context, text_uncond, image_uncond, (512, 512), generator)],
settings)
"""

from umm_reflect.draw import Drawn, DrawRequest, draw
from umm_reflect.flow import DrawSettings
from umm_reflect.prefill import Engine
from umm_reflect.say import Said, Trie, say

__all__ = ["DrawRequest", "DrawSettings", "Drawn", "Engine", "Said", "Trie", "draw", "say"]
