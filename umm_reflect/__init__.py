"""umm-reflect: one model that draws, looks at what it drew, and edits until it is right.

    from umm_reflect import Bagel
    bagel = Bagel.from_pretrained("pretrained/bagel-nano-shapes")

Nothing heavy is imported until it is used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umm_reflect.model import Bagel

__all__ = ["Bagel"]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name == "Bagel":
        from umm_reflect.model import Bagel

        return Bagel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
