"""Which candidate computes each kind of product, as measured on this machine.

At the first product of a kind, its candidates are timed for some milliseconds on the weights at hand. What was found is
kept in a small JSON file in the user's cache, so that a later start measures nothing. An entry counts for one machine:
device, system, MLX and our kernels. Anything wrong with the file costs a measurement, and one line that says so.

How long a launch takes: its graph is built before the clock starts, and one evaluation has many launches. A single
small launch says more of Python and of the wait for a GPU than of the kernel. `compare` lets evaluations of all
candidates take about as long, so that what an evaluation itself costs raises all times by much the same factor.
"""

import functools
import hashlib
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, TypeVar

import mlx.core as mx
import msgspec
import platformdirs

from ..errors import GearbxError, GearbxWarning
from ..files.reading import read_json
from ..files.writing import write_text
from .compiler import SOURCES, processor_features
from .dispatch import CPU, SMALLEST, STOCK, CannotMeasure, Kind, device, is_tuning, size_class
from .library_cache import NAME
from .metal import MAX_VECTORS, metal_folder

Key = TypeVar("Key")
Make = Callable[[], Sequence[mx.array]]
"""Builds one launch or several, each an array that is not evaluated. They should not depend on each other."""

LEAST_SECONDS = 0.004  # of an evaluation: twenty times what waiting for a GPU costs
MOST_CALLS = 4096

FILE = "tuning.json"
MOST_MACHINES = 16  # a new version of MLX makes another one

Times = dict[str, float]
"""Name of a candidate to seconds of a product."""

MARGIN = 1.05  # what is used without measuring stays, unless something else is faster by more than this
GIVE_UP = 1.5  # a candidate that takes so many times as long as the fastest is not timed again
TRIALS = 5
TRIAL_SECONDS = 0.002  # of a trial
LARGEST_SIZE = 2**13  # rows or columns: larger weights are streamed alike

HOPELESS = 3.0  # a candidate that takes so many times as long for a single product is not timed over many
FAILED = 1e9  # seconds of a candidate that cannot be compiled: JSON has no infinity
REFUSED = ("metal library", "kernel")  # in what MLX says if Metal's compiler refuses a text

Product = Callable[[mx.array], mx.array]
Products = Callable[[str], Sequence[Product]]
"""The products by a candidate, each with other weights of one kind; none if no weights are in memory."""


class Stored(msgspec.Struct):
    """The file: machine to kind of product to what was measured."""

    machines: dict[str, dict[str, dict[str, Annotated[float, msgspec.Meta(gt=0)]]]] = {}


class TuningCache:
    """What was measured on this machine.

    Args:
        file: the user's, if not given.
    """

    def __init__(self, file: Path | None = None):
        self.file = file or platformdirs.user_cache_path(NAME, appauthor=False) / FILE
        self.machine = machine()
        self._fresh: dict[str, Times] = {}

    @functools.cached_property
    def times(self) -> dict[str, Times]:
        """By the name of a kind of product."""
        return dict(self._read().machines.get(self.machine, {}))

    def keep(self, name: str, times: Times) -> None:
        """Take what was measured for a kind of product; `save` writes it."""
        self.times[name] = self._fresh[name] = times

    def save(self) -> None:
        """Write what was measured since, beside what other processes wrote meanwhile."""
        if not self._fresh:
            return
        stored = self._read(quietly=True)
        mine = stored.machines.pop(self.machine, {}) | self._fresh
        newest = dict([*stored.machines.items(), (self.machine, mine)][-MOST_MACHINES:])
        self._fresh = {}
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = msgspec.json.encode(Stored(newest))
            write_text(self.file, msgspec.json.format(text, indent=1).decode())
        except (GearbxError, OSError) as error:
            say(f"{error}; kernels will be measured again at the next start")

    def _read(self, quietly: bool = False) -> Stored:
        """The file's content; nothing, where there is none or it is not what `save` wrote."""
        if not self.file.is_file():
            return Stored()
        try:
            return read_json(self.file, Stored, "measurements of kernels", "it is written anew")
        except GearbxError as error:
            if not quietly:
                say(str(error))
            return Stored()


def say(text: str) -> None:
    warnings.warn(text, GearbxWarning, stacklevel=4)


@functools.cache
def kernels_hash() -> str:
    """8 hexadecimal digits that change with the text of our kernels."""
    digest = hashlib.sha256()
    for folder in (SOURCES, metal_folder()):
        for path in sorted(folder.iterdir()):
            if path.is_file():
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def machine() -> str:
    """What times depend on beside the product: device, system, MLX, our kernels; on a CPU also the threads."""
    on = device()
    name = f"{mx.device_info().get('device_name', '')} ({on})"
    if on == CPU:
        features = hashlib.sha256(processor_features().encode()).hexdigest()[:8]
        threads = os.environ.get("GEARBX_THREADS") or os.cpu_count()
        name = f"{name} {features}, {threads} threads"
    return f"{name}, {platform.system()} {platform.release()}, mlx {version('mlx')}, kernels {kernels_hash()}"


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
        if chosen in STOCK and chosen != self._fastest(kind, MAX_VECTORS, products):
            return kind.candidates(1, self.dtype, self.ours_alone)[0]
        return chosen

    def _fastest(self, kind: Kind, vectors: int, products: Products) -> str:
        candidates = kind.candidates(vectors, self.dtype, self.ours_alone)
        if len(candidates) == 1 or vectors > MAX_VECTORS or not is_worth_it(kind):
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
        times = compare(makes, TRIALS, TRIAL_SECONDS, GIVE_UP)
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


def seconds_of(make: Make, calls: int = 1) -> float:
    """Seconds in which one evaluation computes everything that so many calls of `make` build."""
    built = [array for _ in range(calls) for array in make()]
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(built)
    return time.perf_counter() - start


def enough_calls(make: Make, least: float = LEAST_SECONDS) -> int:
    """The power of two of calls whose evaluation takes `least` seconds or more; at most MOST_CALLS.

    The first evaluation is not counted: it may compile a kernel.
    """
    seconds_of(make)
    calls = 1
    while calls < MOST_CALLS and seconds_of(make, calls) < least:
        calls *= 2
    return calls


def compare(
    candidates: Mapping[Key, Make], trials: int = 5, least: float = LEAST_SECONDS, give_up: float = math.inf
) -> dict[Key, list[float]]:
    """Seconds of one call of each candidate, trial by trial; a trial goes through all of them in turn.

    Args:
        trials: 1 or more; every second one goes backwards.
        least: seconds of an evaluation, as in `enough_calls`.
        give_up: a candidate that takes so many times as long as the fastest one of a trial is not timed again, so that
            it has fewer times.

    Raises:
        RuntimeError: from MLX, where a candidate cannot be evaluated.
    """
    calls = {key: enough_calls(make, least) for key, make in candidates.items()}
    times: dict[Key, list[float]] = {key: [] for key in candidates}
    left = list(candidates)
    for _ in range(trials):
        for key in left:
            times[key].append(seconds_of(candidates[key], calls[key]) / calls[key])
        fastest = min((times[key][-1] for key in left), default=0.0)
        left = [key for key in reversed(left) if times[key][-1] <= give_up * fastest]
    return times
