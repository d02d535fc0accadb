"""KV caches of which the last entries are taken back: what a low gear wrote there, or what was not accepted."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import GearbxError

Cache = Sequence[Any]


def parts(cache: Cache) -> Iterator[Any]:
    """The caches of single layers, also of those that keep several."""
    for entry in cache:
        yield from parts(entry.caches) if hasattr(entry, "caches") else (entry,)


def room(cache: Cache) -> float:
    """How many entries may be added now and still be taken back.

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


def take_back(cache: Cache, entries: int) -> None:
    """Drop the last entries. A negative number brings back those just dropped, if nothing was written since."""
    if entries:
        for part in cache:
            part.trim(entries)


def length(cache: Cache) -> int:
    """Tokens that the cache has been given."""
    return max((_offset(part) for part in parts(cache)), default=0)


def _offset(part: Any) -> int:
    return int(getattr(part, "_offset", getattr(part, "offset", 0)))  # of a batch, `offset` is an array


@contextlib.contextmanager
def borrowed(cache: Cache) -> Iterator[None]:
    """What is written in the block is taken back at its end, by an interrupt in the middle of a pass as well."""
    before = [_offset(part) for part in parts(cache)]
    try:
        yield
    finally:
        for part, offset in zip(parts(cache), before):
            if _offset(part) > offset:
                part.trim(_offset(part) - offset)


def untrimmable(cache: Cache, mode: str) -> GearbxError:
    """The error for a cache that cannot be taken back from, with the class that is to blame."""
    part = min(parts(cache), key=_room)
    kind = type(part).__name__
    full = getattr(part, "max_size", None)
    if full is not None:
        why = f"is full at {full} tokens and overwrites its oldest entries; raise --max-kv-size, shorten the prompt"
    else:
        why = "keeps a state instead of entries"
    return GearbxError(
        f"mode '{mode}' has to take entries back from the KV cache, and {kind} {why}; or use mode 'route'"
    )
