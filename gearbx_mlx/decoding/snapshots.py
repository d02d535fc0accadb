"""A KV cache at a moment, to which it can be put back: after a draft, or after a pass in too low a gear.

Most caches only append: there, it is enough to remember how long they were. A sliding window overwrites its oldest
entries, and a recurrent layer replaces its whole state. Of those the snapshot keeps the arrays themselves. It copies
nothing: arrays of MLX are values, and whoever writes into one while a snapshot has it too gets an array of its own.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from ..formats.kv_cache import NestedKVCache
from .caches import Cache, parts

APPENDING = (KVCache, QuantizedKVCache, BatchKVCache, NestedKVCache)
ENTRIES = ("keys", "values", "planes", "beside", "gears")  # and planes, how many there are, and their ladder


def kept(value: Any) -> Any:
    """The same value, in containers and arrays of its own: `a[...] = b` changes the object `a`."""
    if isinstance(value, mx.array):
        return copy.copy(value)
    if isinstance(value, list | tuple):
        return type(value)(map(kept, value))
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class PartState:
    """The state of the cache of one layer: all its attributes, but for the entries of a cache that only appends."""

    part: Any
    kind: Any
    attributes: dict[str, Any]

    @classmethod
    def of(cls, part: Any) -> "PartState":
        left_out = ENTRIES if type(part) in APPENDING else ()
        return cls(part, type(part), {name: kept(value) for name, value in vars(part).items() if name not in left_out})

    @functools.cached_property
    def is_numbers(self) -> bool:
        """Whether nothing has to be kept apart, as in a cache that appends: this runs for every layer and token."""
        return all(isinstance(value, int) for value in self.attributes.values())

    def restore(self) -> None:
        """Put the part back."""
        vars(self.part).update(self.attributes if self.is_numbers else kept(self.attributes))
        if self.kind is NestedKVCache:
            self.part.drop_later_planes()

    def second(self) -> Any:
        """Another cache in this state."""
        made = self.kind.__new__(self.kind)
        if self.kind in APPENDING:
            vars(made).update((name, kept(getattr(self.part, name))) for name in ENTRIES if hasattr(self.part, name))
        vars(made).update(kept(self.attributes))
        if self.kind is NestedKVCache:
            made.drop_later_planes()
        return made


class Snapshot:
    """The state of a cache.

    Args:
        cache: one entry for each layer, as mlx-lm's models make them.
    """

    def __init__(self, cache: Cache):
        self._cache = list(cache)
        self.parts = [PartState.of(part) for part in parts(cache)]

    def restore(self) -> None:
        """Put the cache back."""
        for part in self.parts:
            part.restore()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """What is written in the block is taken back at its end, by an interrupt in the middle of a pass as well."""
        try:
            yield
        finally:
            self.restore()

    def second(self) -> list[Any]:
        """Another cache in this state. It shares the arrays, and writes into none of them."""
        states = iter(self.parts)
        return [_second(entry, states) for entry in self._cache]


def _second(entry: Any, states: Iterator[PartState]) -> Any:
    if not hasattr(entry, "caches"):
        return next(states).second()
    made = copy.copy(entry)
    made.caches = tuple(_second(part, states) for part in entry.caches)
    return made
