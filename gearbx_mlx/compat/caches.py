"""The insides of mlx-lm's KV caches: how many entries they have, how some of these are cut, and what a cache is.

mlx-lm says nothing when a text ends. So its cache has to be complete for what uses it next. `settle_later` makes a
cache compute its state when it is first used, by another class for as long.
"""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, RotatingKVCache

from .classes import become


def entries(cache: Any) -> int:
    """How many tokens have been through a cache, padding included."""
    count: int = 0 if cache is None else cache._idx if type(cache) is BatchKVCache else cache.offset
    return count


def set_entries(cache: Any, count: int) -> None:
    """Say that a cache has so many entries."""
    if type(cache) is BatchKVCache:  # its offsets are always these; a sum for each token would wait for its sum before
        cache._idx, cache.offset = count, count - cache.left_padding
    else:
        cache.offset = count


def counted(part: Any) -> int:
    """How many entries of its arrays a cache that keeps keys and values uses."""
    return getattr(part, "_idx", part.offset - getattr(part, "start_position", 0))


def offset_of(part: Any) -> int:
    """Tokens that a cache has been given; of a batch `offset` is an array, and the number has another name."""
    return int(getattr(part, "_offset", getattr(part, "offset", 0)))


def cut_window(part: RotatingKVCache, entries: int) -> None:
    """Drop the last entries of a sliding window after a pass over several tokens, which leaves it in order."""
    part.keys, part.values = part.keys[..., :-entries, :], part.values[..., :-entries, :]
    part.offset -= entries
    part._idx = part.keys.shape[2]
    mx.async_eval(part.keys, part.values)  # another thread could not: what is still to be computed belongs to this one


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
        become(part, unsettled(kind))


def settled(part: Any, kind: type) -> None:
    """Make it an ordinary cache again."""
    if is_unsettled(part):
        become(part, kind)
        del vars(part)[SETTLE]
