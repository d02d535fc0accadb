"""Which candidate computes each kind of product, as measured on this machine.

At the first product of a kind, its candidates are timed for some milliseconds on the weights at hand. What was found is
kept in the user's cache (`tuning_cache.py`), so that a later start measures nothing.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import mlx.core as mx

from .candidates import CPU, MOST_VECTORS, SMALLEST, Kind, device, is_tuning, size_class
from .timing import compare
from .tuning_cache import Times, TuningCache

MARGIN = 1.05  # what is used without measuring stays, unless something else is faster by more than this
GIVE_UP = 1.5  # a candidate that takes so many times as long as the fastest is not timed again
TRIALS = 5
LEAST_SECONDS = 0.002  # of a trial
LARGEST_SIZE = 2**13  # rows or columns: larger weights are streamed alike

FAILED = 1e9  # seconds of a candidate that cannot be compiled: JSON has no infinity

Products = Callable[[str, mx.array], Sequence[mx.array]]
"""Builds products of activations (vectors, columns), each with other weights of one kind, by a candidate."""


class Tuner:
    """Chooses candidates for the products of a model.

    Args:
        dtype: of the activations. x_bits: to which CPU kernels round them.
        ours_alone: choose among our kernels alone, where there are some.
        anew: measure everything once more.
        cache: what was measured earlier; the user's, if not given.
    """

    def __init__(
        self,
        dtype: mx.Dtype,
        x_bits: int = 0,
        ours_alone: bool = False,
        anew: bool = False,
        cache: TuningCache | None = None,
    ):
        self.dtype, self.x_bits, self.ours_alone, self.anew = dtype, x_bits, ours_alone, anew
        self.cache = TuningCache() if cache is None else cache
        self.measured: dict[str, Times] = {}  # by this tuner
        self.seconds = 0.0  # that measuring took
        self.used: dict[str, tuple[str, Times]] = {}  # product to what was chosen for it, and by which times

    def choose(self, kind: Kind, vectors: int, products: Products) -> str:
        """The candidate for a product of this number of vectors; measured if that was not done yet.

        On a CPU it is chosen once, for one vector: our kernels give a vector the same bits in any company there.
        """
        if device() == CPU:
            vectors = 1
        candidates = kind.candidates(vectors, self.dtype, self.ours_alone)
        if len(candidates) == 1 or vectors > MOST_VECTORS or not is_worth_it(kind):
            return candidates[0]
        try:
            times = self.times(kind, vectors, products, candidates)
        except ValueError:  # nothing can be evaluated inside of mx.compile
            return candidates[0]
        chosen = fastest(times, candidates)
        self.used[self.name(kind, vectors)] = chosen, times
        return chosen

    def times(self, kind: Kind, vectors: int, products: Products, candidates: Sequence[str]) -> Times:
        """Seconds of a product by each candidate, from the cache or measured now.

        Raises:
            ValueError: inside of mx.compile, where nothing can be evaluated.
        """
        name, counted = self.name(kind, vectors), size_class(vectors)
        known = self.measured if self.anew else self.cache.times
        if not known.get(name, {}).keys() >= {*candidates}:
            begun = time.perf_counter()
            x = mx.random.normal((counted, kind.shape[1]), self.dtype, key=mx.random.key(0))
            found = measure({each: partial(products, each, x) for each in candidates})
            self.seconds += time.perf_counter() - begun
            self.measured[name] = found
            self.cache.keep(name, found)
        return (self.measured if name in self.measured else self.cache.times).get(name, {})

    def name(self, kind: Kind, vectors: int) -> str:
        """What a kind of product is called in the cache: sizes up to the next power of two share an entry."""
        rows, columns = (min(size_class(size), LARGEST_SIZE) for size in kind.shape)
        rounded = f", activations of {self.x_bits} bits" if self.x_bits and kind.rounded and device() == CPU else ""
        number = size_class(vectors)
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return f"{kind.form}, {rows} x {columns}, {dtype}{rounded}, {number} vector{'s' * (number > 1)}"


def is_worth_it(kind: Kind) -> bool:
    """Whether the candidates of a kind are to be timed: not small ones, and not with GEARBX_TUNE=0."""
    return is_tuning() and math.prod(kind.shape) >= SMALLEST


def measure(candidates: Mapping[str, Callable[[], Sequence[mx.array]]]) -> Times:
    """Seconds of one product by each candidate, medians; FAILED for one that cannot be compiled or evaluated."""
    working, failed = {}, {}
    for name, make in candidates.items():
        try:
            mx.eval(make())
            working[name] = make
        except RuntimeError:  # Metal's compiler refuses a text, say
            failed[name] = FAILED
    counts = {name: max(1, len(make())) for name, make in working.items()}
    found = compare(working, TRIALS, LEAST_SECONDS, GIVE_UP)
    return {name: statistics.median(each) / counts[name] for name, each in found.items()} | failed


def fastest(times: Times, candidates: Sequence[str]) -> str:
    """The candidate to use: the first, unless another one is faster by a margin."""
    known = {name: times[name] for name in candidates if name in times}
    if not known:
        return candidates[0]
    best = min(known, key=lambda name: known[name])
    first = known.get(candidates[0])
    return candidates[0] if first is not None and first <= MARGIN * known[best] else best
