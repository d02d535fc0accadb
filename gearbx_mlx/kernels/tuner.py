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

from ..errors import GearbxError
from .candidates import CPU, MOST_VECTORS, SMALLEST, STOCK, CannotMeasure, Kind, device, is_tuning, size_class
from .timing import compare, seconds_of
from .tuning_cache import Times, TuningCache

MARGIN = 1.05  # what is used without measuring stays, unless something else is faster by more than this
GIVE_UP = 1.5  # a candidate that takes so many times as long as the fastest is not timed again
TRIALS = 5
LEAST_SECONDS = 0.002  # of a trial
LARGEST_SIZE = 2**13  # rows or columns: larger weights are streamed alike

HOPELESS = 3.0  # a candidate that takes so many times as long for a single product is not timed over many
FAILED = 1e9  # seconds of a candidate that cannot be compiled: JSON has no infinity
REFUSED = ("metal library", "kernel")  # in what MLX says if Metal's compiler refuses a text

Product = Callable[[mx.array], mx.array]
Products = Callable[[str], Sequence[Product]]
"""The products by a candidate, each with other weights of one kind; none if no weights are in memory."""


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

        On a CPU one candidate computes any number of vectors: ours give a vector the same bits in any company there.
        MLX's has to be faster for one vector and for many.

        Raises:
            CannotMeasure: nothing can be evaluated now, or no weights are in memory.
        """
        if device() != CPU:
            return self._fastest(kind, size_class(vectors), products)
        chosen = self._fastest(kind, 1, products)
        if chosen in STOCK and chosen != self._fastest(kind, MOST_VECTORS, products):
            return kind.candidates(1, self.dtype, self.ours_alone)[0]
        return chosen

    def _fastest(self, kind: Kind, vectors: int, products: Products) -> str:
        candidates = kind.candidates(vectors, self.dtype, self.ours_alone)
        if len(candidates) == 1 or vectors > MOST_VECTORS or not is_worth_it(kind):
            return candidates[0]
        name = self.name(kind, vectors)
        times = self.times(name, kind, vectors, products, candidates)
        chosen = fastest(times, candidates)
        self.used[name] = chosen, times
        return chosen

    def times(self, name: str, kind: Kind, vectors: int, products: Products, candidates: Sequence[str]) -> Times:
        """Seconds of a product by each candidate, from the cache or measured now. Raises CannotMeasure."""
        known = self.measured if self.anew else self.cache.times
        if known.get(name, {}).keys() >= {*candidates}:
            return known[name]
        begun = time.perf_counter()
        x = mx.random.normal((vectors, kind.shape[1]), self.dtype, key=mx.random.key(0))
        try:
            found = measure({each: products(each) for each in candidates}, x)
        except GearbxError:
            raise
        except (ValueError, RuntimeError):  # inside of mx.compile; without memory for it
            raise CannotMeasure(candidates[0]) from None
        if not found:
            raise CannotMeasure(candidates[0])
        self.seconds += time.perf_counter() - begun
        self.measured[name] = found
        self.cache.keep(name, found)
        return found

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


def measure(products: Mapping[str, Sequence[Product]], x: mx.array) -> Times:
    """Seconds of one product by each candidate, medians; FAILED for one that Metal cannot compile; or nothing at all.

    Raises:
        ValueError, RuntimeError: from MLX, where something else cannot be evaluated.
    """
    if not all(products.values()):
        return {}
    found = {name: seconds_of_one(each[0], x) for name, each in products.items()}
    hopeful = [name for name, seconds in found.items() if seconds <= HOPELESS * min(found.values())]
    if len(hopeful) > 1:
        makes = {name: partial(built, products[name], x) for name in hopeful}
        times = compare(makes, TRIALS, LEAST_SECONDS, GIVE_UP)
        found |= {name: statistics.median(each) / len(products[name]) for name, each in times.items()}
    return found


def seconds_of_one(product: Product, x: mx.array) -> float:
    """Of one product, after another one that may compile its kernel."""
    try:
        mx.eval(product(x))
    except RuntimeError as error:
        if any(word in str(error) for word in REFUSED):
            return FAILED
        raise
    return seconds_of(lambda: [product(x)])


def built(products: Sequence[Product], x: mx.array) -> list[mx.array]:
    """One product of each, not evaluated."""
    return [product(x) for product in products]


def fastest(times: Times, candidates: Sequence[str]) -> str:
    """The candidate to use: the first, unless another one is faster by a margin."""
    known = {name: times[name] for name in candidates if name in times}
    if not known:
        return candidates[0]
    best = min(known, key=lambda name: known[name])
    first = known.get(candidates[0])
    return candidates[0] if first is not None and first <= MARGIN * known[best] else best
