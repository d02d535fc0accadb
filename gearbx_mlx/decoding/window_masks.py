"""The mask of several tokens over a sliding window: each of them sees what it would see alone.

Alone, a token sees what is in the cache: the first tokens if they stay there (attention sinks, `--max-kv-size`), and
the latest ones. For several tokens, mlx-lm's mask slides over the sinks too, and a few models ask for a window that is
wider than their cache.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from .caches import Cache, parts


def window_mask(part: RotatingKVCache, count: int) -> mx.array:
    """Which keys each of `count` new tokens sees, (count, keys): the sinks, and the window that ends with the token."""
    before = min(part.offset, part.max_size - 1)  # entries that mlx-lm leaves in front of the new ones
    own, keys = mx.arange(before, before + count)[:, None], mx.arange(before + count)
    return (keys <= own) & ((keys < part.keep) | (keys > own - (part.max_size - part.keep)))


def make_mask(part: RotatingKVCache, count: int, window_size: int | None = None, **kwargs: Any) -> Any:
    """mlx-lm's mask, or the one above where mlx-lm's is not that of single tokens."""
    narrow = window_size is not None and window_size < part.max_size
    usual = part.keep == 0 and window_size in (None, part.max_size)
    if count == 1 or narrow or usual:
        return RotatingKVCache.make_mask(part, count, window_size, **kwargs)
    return window_mask(part, count)


@contextlib.contextmanager
def windows_of_single_tokens(cache: Cache) -> Iterator[None]:
    """In the block, the sliding windows of a cache make such masks."""
    windows = [part for part in parts(cache) if type(part) is RotatingKVCache]
    for part in windows:
        part.make_mask = partial(make_mask, part)
    try:
        yield
    finally:
        for part in windows:
            del part.make_mask
