"""The insides of mlx-lm's KV caches: how many entries they have, and how some of these are cut."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, RotatingKVCache


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
