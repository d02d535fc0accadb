"""Caches whose state is still to be computed: the first use of one computes it.

mlx-lm says nothing when a text ends. So whoever takes up its cache then, to save it or to go on from it, must find it
complete; and as long as nobody does, the states of recurrent layers are not computed for nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

SETTLE = "settle"  # attribute of such a cache: what computes its state


class Unsettled:
    """Mixed into the class of a cache, in front of it."""

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in own or hasattr(type(self), name):
            own[SETTLE]()
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "__dict__")[SETTLE]()
        setattr(self, name, value)


@functools.cache
def unsettled(kind: Any) -> type:
    """A class of caches that are `kind` once they are used."""
    return type(f"Unsettled{kind.__name__}", (Unsettled, kind), {})


def is_unsettled(part: Any) -> bool:
    return issubclass(type(part), Unsettled)  # isinstance would use it


def settle_later(part: Any, kind: type, settle: Callable[[], None]) -> None:
    """Call `settle` when the cache `part`, which is of this kind, is first used. It must call `settled`."""
    if not is_unsettled(part):
        vars(part)[SETTLE] = settle
        part.__class__ = unsettled(kind)


def settled(part: Any, kind: type) -> None:
    """Make it an ordinary cache again."""
    if is_unsettled(part):
        object.__setattr__(part, "__class__", kind)
        del vars(part)[SETTLE]
