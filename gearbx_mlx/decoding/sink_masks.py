"""The mask of a sliding window that always sees the first tokens (attention sinks, `--max-kv-size`).

mlx-lm computes one token over such a window without a mask. For several tokens its mask slides over the sinks too, so
that all but the first token would lose some of them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from .caches import Cache, parts


def sink_mask(part: RotatingKVCache, count: int) -> mx.array:
    """Which of the keys each of `count` new tokens sees, (count, keys): the sinks, and the window that ends with it."""
    before = min(part.offset, part.max_size - 1)  # entries that mlx-lm leaves in front of the new ones
    own, keys = mx.arange(before, before + count)[:, None], mx.arange(before + count)
    return (keys <= own) & ((keys < part.keep) | (keys > own - (part.max_size - part.keep)))


@contextlib.contextmanager
def sinks_seen(cache: Cache) -> Iterator[None]:
    """In the block, several tokens see in a window with sinks what each of them would see alone."""
    changed = [part for part in parts(cache) if type(part) is RotatingKVCache and part.keep]
    for part in changed:
        part.make_mask = lambda count, *args, part=part, **kwargs: masked(part, count, *args, **kwargs)
    try:
        yield
    finally:
        for part in changed:
            del part.make_mask


def masked(part: RotatingKVCache, count: int, window_size: int | None = None, **kwargs: Any) -> Any:
    if count == 1 or window_size not in (None, part.max_size):
        return RotatingKVCache.make_mask(part, count, window_size, **kwargs)
    return sink_mask(part, count)
