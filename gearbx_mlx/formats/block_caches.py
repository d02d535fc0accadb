"""Which KV caches native blocks take, and how many entries those have."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache

from .nested_kv_cache import Nested, NestedKVCache


def takes_cache(cache: Any) -> bool:
    """Whether a block knows how a cache takes keys and values; those that it has must be float32."""
    if cache is None:
        return True
    known = type(cache) in (KVCache, RotatingKVCache, BatchKVCache, NestedKVCache)
    return known and (cache.keys is None or cache.keys.dtype == mx.float32)


def takes_in_place(cache: Any) -> bool:
    """Whether a pass over a few tokens appends to the entries of a cache, in arrays that grow at times."""
    return type(cache) in (KVCache, BatchKVCache) or (type(cache) is NestedKVCache and cache.has_entries)


def read_before(cache: Any) -> Nested | None:
    """What a pass reads of tokens that are in a cache already; None: the entries as they are."""
    return cache.read(0) if type(cache) is NestedKVCache else None


def planes_of(nested: Nested | None) -> tuple[Any, ...]:
    """Planes as the last arguments of a native block: of keys, of values, positions in them, the size of groups."""
    return () if nested is None else (*nested.planes, nested.packed, nested.group_size)


def has_room(cache: Any, x: mx.array) -> bool:
    """Whether the arrays of a cache have room for the keys and values of x, which has as many sequences."""
    keys = cache.keys
    return keys is not None and entries(cache) + x.shape[1] <= keys.shape[2] and keys.shape[0] == x.shape[0]


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
