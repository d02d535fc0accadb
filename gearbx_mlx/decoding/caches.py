"""The caches of a model's layers: what they are made of, and how many tokens they have been given."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

Cache = Sequence[Any]


def parts(cache: Cache) -> Iterator[Any]:
    """The caches of single layers, also of those that keep several."""
    for entry in cache:
        yield from parts(entry.caches) if hasattr(entry, "caches") else (entry,)


def room(cache: Cache) -> float:
    """How many entries may be added now and still be trimmed by mlx-lm.

    Infinite for a cache that grows; what a rotating cache has left before it overwrites itself; 0 for one that keeps
    no entries (a state space) or has begun to overwrite.
    """
    return min((_room(part) for part in parts(cache)), default=math.inf)


def _room(part: Any) -> float:
    if not part.is_trimmable():
        return 0
    offset = _offset(part)
    if hasattr(part, "chunk_size"):  # drops entries at its front when a chunk is full
        return max(part.chunk_size - (offset - part.start_position) - 1, 0)
    return max(part.max_size - offset - 1, 0) if hasattr(part, "max_size") else math.inf


def length(cache: Cache) -> int:
    """Tokens that the cache has been given; 0 if it keeps states alone, which do not count them."""
    return max((_offset(part) for part in parts(cache)), default=0)


def given(part: Any) -> int | None:
    """Tokens that the cache of one layer has been given; None if it keeps a state alone, which does not count them."""
    if hasattr(part, "given"):  # of a pair's model, which has still to read some of them
        return part.given
    return _offset(part) if hasattr(part, "offset") else None


def cut(cache: Cache, tokens: int) -> bool:
    """Whether every layer's cache that counts its tokens could be trimmed to so many. If not, some of them are."""
    counts = [(part, count) for part in parts(cache) if (count := given(part)) is not None]
    return all(count == tokens or trimmed(part, count - tokens) for part, count in counts)


def trimmed(part: Any, tokens: int) -> bool:
    """Whether the last tokens could be trimmed from the cache of one layer; it may have been given too few."""
    return tokens > 0 and part.is_trimmable() and part.trim(tokens) == tokens


def _offset(part: Any) -> int:
    return int(getattr(part, "_offset", getattr(part, "offset", 0)))  # of a batch, `offset` is an array
