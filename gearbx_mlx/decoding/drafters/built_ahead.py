"""Graphs of the next draft's first token, built while a device verifies the current one.

Otherwise the device would wait for Python after each verification. The number of accepted tokens is not known yet, so
there is a graph for each, the likeliest first, as far as time allows. Only one of them is evaluated.
"""

import copy
import time
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ...compat.arrays import random_state, set_random_state
from ..caches import Cache
from ..policy import MAX_ON_GPU
from ..rows import Verification
from ..sampling import ChosenRows
from . import Drafted, DraftTarget, drafted_token, last_logits

# The most rows of a verification, and bytes of a KV cache, for which graphs are built. Unused graphs keep references to
# its buffers, so MLX copies them once instead of writing in place: 1 ms on an M4 Pro, where Python takes 2 ms for a
# graph (estimated).
MAX_BUILT, MAX_COPIED = MAX_ON_GPU + 1, 128e6

Entries = list[tuple[mx.array, mx.array]]
"""Keys and values of the cache of each layer."""
clock = time.perf_counter  # seconds


class FirstToken(NamedTuple):
    """Graph of a drafted token, with the KV cache's entries and MLX's random state after it (None: nothing drawn)."""

    drafted: Drafted
    entries: Entries
    state: mx.array | None


class BuiltAhead:
    """Graphs of the first token of a sequence's next draft, by the number of entries before it.

    Args:
        target: its KV caches stay unchanged until a graph is taken.
    """

    def __init__(self, target: DraftTarget):
        self._target, self._pace = target, Pace()
        self._found: Verification | None = None  # the graphs follow its rows
        self._graphs: dict[int, FirstToken] = {}

    def can_build(self, found: Verification) -> bool:
        """Return whether graphs can follow a verification of the target."""
        target = self._target
        if target.chooser.processors or target.chooser.random is not None:  # a processor needs the tokens themselves
            return False
        if found.count > MAX_BUILT or target.agreement.group is not None:
            return False
        appends = all(type(part) is KVCache for part in target.cache)
        return appends and sum(k.nbytes + v.nbytes for k, v in entries_of(target.cache)) <= MAX_COPIED

    def build(self, found: Verification, rows: ChosenRows) -> None:
        """Build graphs after the rows of a verification, of which the KV cache holds all. The draft gear is engaged.

        Args:
            rows: the token after each row, which the device may still compute.
        """
        target, start = self._target, clock()
        self._found, self._graphs = found, {}  # frees the previous graphs, which takes milliseconds
        cache, count = target.cache, min(self._pace.graphs, found.count)
        whole, end = entries_of(cache), cache[0].offset
        try:
            for row in [found.count - 1, *range(found.count - 1)][:count]:  # all accepted, then none, one, ...
                kept = end - found.count + row + 1
                # A write changes the object of an array, so each graph has its own.
                set_entries(cache, [(copy.copy(keys), copy.copy(values)) for keys, values in whole], kept)
                if rows.states:
                    set_random_state(rows.states[row])
                logits = last_logits(target.gearbox.model, cache, rows.tokens[row : row + 1])
                drafted = drafted_token(logits, None, target)
                self._graphs[kept] = FirstToken(drafted, entries_of(cache), random_state() if rows.states else None)
        finally:
            set_entries(cache, whole, end)
        self._pace.built(count, clock() - start)

    def update(self, found: Verification | None) -> None:
        """Adjust the pace after a verification; drop graphs that were built for a different one."""
        if self._found is not None and self._found is found:
            self._pace.verified()
        else:
            self._found, self._graphs = None, {}

    def take(self) -> Drafted | None:
        """Return the first token after the entries of the KV cache, which then has the token's; None if not built.

        The random numbers of the token are then drawn.
        """
        cache = self._target.cache
        built = None if self._found is None else self._graphs.get(cache[0].offset)
        self._found = None
        if built is None:
            return None
        set_entries(cache, built.entries, cache[0].offset + 1)
        if built.state is not None:
            set_random_state(built.state)
        return built.drafted


class Pace:
    """Number of graphs that Python can build while a device verifies, from the time that was left after earlier ones.

    Attributes:
        graphs: to build during the next verification.
    """

    def __init__(self) -> None:
        self.graphs = 1
        self._cost = 0.0  # seconds per graph, with the freeing of an earlier one
        self._built_at = 0.0

    def built(self, count: int, seconds: float) -> None:
        """Record the seconds that building `count` graphs took."""
        self._built_at = clock()
        if count:
            self._cost = seconds / count

    def verified(self) -> None:
        """Plan one more graph if time was left until the end of the verification, one fewer if not."""
        left = clock() - self._built_at
        if left > 2 * self._cost:
            self.graphs = min(self.graphs + 1, MAX_BUILT)
        elif left < self._cost / 2:
            self.graphs = max(self.graphs - 1, 0)


def entries_of(cache: Cache) -> Entries:
    return [(part.keys, part.values) for part in cache]


def set_entries(cache: Cache, entries: Entries, offset: int) -> None:
    for part, (keys, values) in zip(cache, entries):
        part.keys, part.values, part.offset = keys, values, offset
