"""Which candidate computes each kind of product: one that is right, and the fastest of those as measured here.

At the first product of a kind, its candidates are timed for some milliseconds on the weights at hand. What was found is
kept in a small JSON file in the user's cache, so that a later start measures nothing. An entry counts for one machine:
device, system, MLX and our kernels. Anything wrong with the file costs a measurement, and one line that says so.

On Metal that is so where our kernels are asked for; else `proven.py` says what computes, and nothing is measured.
Before a kernel is used on a GPU, its product is compared with MLX's on the model's own weights, for the very shape and
number of vectors; on a CPU that is done when a kind is measured, with a product and a bound for each row that no kernel
of ours made (`rounding.py`). One that differs by more than its types round is never used. The differences stand in the
same file.

How long a launch takes: its graph is built before the clock starts, and one evaluation has many launches. A single
small launch says more of Python and of the wait for a GPU than of the kernel. `compare` lets evaluations of all
candidates take about as long, so that what an evaluation itself costs raises all times by much the same factor.
"""

import atexit
import functools
import hashlib
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import mlx.core as mx
import msgspec

from ..compat.arrays import dtype_name
from ..errors import GearbxError
from .compiler import SOURCES, processor_key
from .dispatch import (
    BFLOAT16_BITS,
    CPU,
    METAL,
    MIN_WEIGHTS,
    MLX,
    STOCK,
    CannotMeasure,
    Kind,
    device,
    is_tuning,
    size_class,
)
from .measured_file import MeasuredFile, become_newest
from .metal import MAX_VECTORS, metal_folder
from .rounding import Expected, tolerance, trial_activations

Key = TypeVar("Key")
Make = Callable[[], Sequence[mx.array]]
"""Builds one launch or several, each an array that is not evaluated. They should not depend on each other."""

MIN_SECONDS = 0.004  # of an evaluation: twenty times what waiting for a GPU costs
MAX_CALLS = 4096

Times = dict[str, float]
"""Name of a candidate to seconds of a product."""

FAILED = 1e9  # seconds of a candidate that cannot be compiled: JSON has no infinity
REFUSED = ("metal library", "kernel")  # in what MLX says if Metal's compiler refuses a text

Differences = dict[str, float]
"""Name of a candidate to the largest difference of its product from MLX's; a right one's is at most 1."""

Product = Callable[[mx.array], mx.array]
Products = Callable[[str], Sequence[Product]]
"""The products by a candidate, each with other weights of one kind; none if no weights are in memory.

By EXPECTED: functions from activations to `Expected`, of kinds that a CPU compares.
"""

EXPECTED = "expected"


class Stored(msgspec.Struct):
    """The file: machine to kind of product to what was measured, and to what was compared."""

    machines: dict[str, dict[str, dict[str, Annotated[float, msgspec.Meta(gt=0)]]]] = {}
    differences: dict[str, dict[str, dict[str, Annotated[float, msgspec.Meta(ge=0)]]]] = {}


class TuningCache:
    """What was measured on this machine.

    Args:
        file: in the place of the user's.
    """

    def __init__(self, file: Path | None = None):
        remedy, unwritten = "it is written again", "kernels will be measured again at the next start"
        self._file = MeasuredFile(file or "tuning.json", Stored, "measurements of kernels", remedy, unwritten)
        self.machine = machine()
        self._fresh: dict[str, Times] = {}
        self._fresh_differences: dict[str, Differences] = {}
        self._saved = -math.inf

    @functools.cached_property
    def times(self) -> dict[str, Times]:
        """By the name of a kind of product."""
        return self._file.read().machines.get(self.machine, {})

    @functools.cached_property
    def differences(self) -> dict[str, Differences]:
        """By the name of a kind of product, its shape and number of vectors."""
        return self._file.read(quietly=True).differences.get(self.machine, {})

    def keep(self, name: str, times: Times) -> None:
        """Take what was measured for a kind of product; `save` writes it."""
        self.times[name] = self._fresh[name] = times

    def keep_differences(self, name: str, found: Differences) -> None:
        """Take how far products differ from MLX's; `save` writes it."""
        self.differences[name] = self._fresh_differences[name] = found

    def save(self) -> None:
        """Write what was measured since, beside what other processes wrote meanwhile."""
        if self._fresh or self._fresh_differences:
            self._saved = time.monotonic()
            self._file.change(self._write)
            self._fresh, self._fresh_differences = {}, {}

    def _write(self, stored: Stored) -> None:
        become_newest(stored.machines, self.machine, self._fresh)
        become_newest(stored.differences, self.machine, self._fresh_differences)

    def save_soon(self) -> None:
        """Write at most once in a second, since a file takes as long as some tokens; the rest at the end."""
        if time.monotonic() - self._saved >= 1.0:
            self.save()
        else:
            atexit.unregister(self.save)
            atexit.register(self.save)


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
    """Return what times depend on beside the product: device, system, MLX, our kernels; on a CPU its instructions,
    threads."""
    on = device()
    name = f"{mx.device_info().get('device_name', '')} ({on})"
    if on == CPU:
        threads = os.environ.get("GEARBX_THREADS") or os.cpu_count()
        name = f"{name} {processor_key()}, {threads} threads"
    return f"{name}, {platform.system()} {platform.release()}, mlx {version('mlx')}, kernels {kernels_hash()}"


class Tuner:
    """Chooses candidates for the products of a model.

    Args:
        dtype: of the activations. x_bits: to which CPU kernels round them.
        ours_alone: choose among our kernels alone, where there are some.
        again: measure everything once more.
        cache: what was measured earlier; the user's, if not given.
    """

    def __init__(
        self,
        dtype: mx.Dtype,
        x_bits: int = 0,
        ours_alone: bool = False,
        again: bool = False,
        cache: TuningCache | None = None,
    ):
        self.dtype, self.x_bits, self.ours_alone, self.again = dtype, x_bits, ours_alone, again
        self.cache = TuningCache() if cache is None else cache
        self.measured: dict[str, Times] = {}  # by this tuner
        self.seconds = 0.0  # that measuring took
        self.used: dict[str, tuple[str, Times]] = {}  # product to what was chosen for it, and by which times
        self.wrong: dict[str, Differences] = {}  # product to the candidates that are not used
        self._compared: set[tuple[str, str]] = set()  # products and candidates, by this tuner

    def choose(self, kind: Kind, vectors: int, products: Products) -> str:
        """Return the candidate for a product of this number of vectors; measured if that was not done yet.

        On a CPU one candidate computes any number of vectors: ours give a vector the same bits in any company there.
        MLX's has to be faster for one vector and for many. On Metal nothing is measured unasked (`proven.py`).

        Raises:
            CannotMeasure: nothing can be evaluated now, or no weights are in memory.
        """
        on_cpu = device() == CPU
        if device() == METAL and not (self.ours_alone or self.again):
            return kind.proven(vectors, self.dtype)
        counted = 1 if on_cpu else size_class(vectors)
        candidates = kind.candidates(counted, self.dtype, self.ours_alone)
        if device() == METAL:
            candidates = self._right_on_metal(kind, min(vectors, MAX_VECTORS + 1), products, candidates)
        elif on_cpu and len(candidates) > 1 and is_worth_it(kind):
            new = not self.known(self.name(kind, 1), candidates)
            candidates = self.right(kind, 1, products, candidates, compare_now=new)
        chosen = self._fastest(kind, counted, products, candidates)
        if on_cpu and chosen in STOCK and chosen != self._fastest(kind, MAX_VECTORS, products, candidates):
            return candidates[0]
        return chosen

    def _right_on_metal(
        self, kind: Kind, vectors: int, products: Products, candidates: Sequence[str]
    ) -> tuple[str, ...]:
        """Return all right candidates where they are timed, else the first of them."""
        if is_worth_it(kind):
            return self.right(kind, vectors, products, candidates)
        for each in candidates:
            if self.right(kind, vectors, products, (each,)) == (each,):
                return (each,)
        return (MLX,)

    def right(
        self, kind: Kind, vectors: int, products: Products, candidates: Sequence[str], compare_now: bool = True
    ) -> tuple[str, ...]:
        """Return the candidates whose products are MLX's as far as the types can tell; MLX where none is.

        Args:
            compare_now: compare those that were not compared yet; else they count as right.

        Raises:
            CannotMeasure: nothing can be evaluated now, or no weights are in memory.
        """
        name = self.name(kind, vectors, exactly=True)
        known = self.cache.differences.get(name, {})
        settled = {each for each in known if not self.again or (name, each) in self._compared}
        missing = [each for each in candidates if each not in {MLX, *settled}]
        if missing and compare_now:
            x = trial_activations(vectors, kind.shape[-1], self.dtype)
            reference, layers = (EXPECTED, 1) if device() == CPU else (MLX, None)
            found = product_errors({each: products(each)[:layers] for each in [reference, *missing]}, x)
            if not found:
                raise CannotMeasure(candidates[0] if device() == CPU else MLX)
            known = known | found
            self._compared |= {(name, each) for each in found}
            self.cache.keep_differences(name, known)
        wrong = {each: known[each] for each in candidates if known.get(each, 0) > 1}
        if wrong:
            self.wrong[name] = self.wrong.get(name, {}) | wrong
        return tuple(each for each in candidates if each not in wrong) or (MLX,)

    def _fastest(self, kind: Kind, vectors: int, products: Products, candidates: Sequence[str]) -> str:
        if len(candidates) == 1 or vectors > MAX_VECTORS or not is_worth_it(kind):
            return candidates[0]
        name = self.name(kind, vectors)
        times = self.times(name, kind, vectors, products, candidates)
        chosen = fastest(times, candidates)
        self.used[name] = chosen, times
        return chosen

    def known(self, name: str, candidates: Sequence[str]) -> Times | None:
        """Return seconds of all of these candidates, as measured earlier; None if that was not done."""
        times = (self.measured if self.again else self.cache.times).get(name, {})
        return times if times.keys() >= {*candidates} else None

    def times(self, name: str, kind: Kind, vectors: int, products: Products, candidates: Sequence[str]) -> Times:
        """Return seconds of a product by each candidate, from the cache or measured now. Raises CannotMeasure."""
        if known := self.known(name, candidates):
            return known
        begun = time.perf_counter()
        x = mx.random.normal((vectors, kind.shape[-1]), self.dtype, key=mx.random.key(0))
        try:
            found = times_of({each: products(each) for each in candidates}, x)
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

    def name(self, kind: Kind, vectors: int, exactly: bool = False) -> str:
        """Return what a kind of product is called in the cache: sizes up to the next power of two share an entry.

        exactly: they do not.
        """
        # Weights with more rows or columns than 2^13 are streamed alike.
        sizes = kind.shape if exactly else [min(size_class(size), 2**13) for size in kind.shape]
        bits = kind.rounding(self.x_bits)
        what = "bfloat16" if kind.most_bits == BFLOAT16_BITS else f"{bits} bits"
        rounded = f", activations of {what}" if bits else ""
        number = vectors if exactly else size_class(vectors)
        shape, dtype, many = " x ".join(map(str, sizes)), dtype_name(self.dtype), "s" * (number > 1)
        return f"{kind.form}, {shape}, {dtype}{rounded}, {number} vector{many}"


def is_worth_it(kind: Kind) -> bool:
    """Return whether the candidates of a kind are to be timed: not small ones, and not with GEARBX_TUNE=0."""
    return is_tuning() and math.prod(kind.shape) >= MIN_WEIGHTS


def product_errors(products: Mapping[str, Sequence[Any]], x: mx.array) -> Differences:
    """Return how far the products by each candidate are from right ones, in the differences that these allow.

    Right is what is EXPECTED (`rounding.py`), else MLX's product, which allows a share of its root mean square. Every
    layer at hand counts. Empty where nothing can be evaluated (inside of mx.compile, without memory), or no weights are
    at hand.
    """
    if not all(products.values()):
        return {}
    reference = EXPECTED if EXPECTED in products else MLX
    found = {name: 0.0 for name in products if name != reference}
    try:
        for number, right in enumerate(products[reference]):
            wanted, allowed = wanted_and_allowed(right(x), x)
            mx.eval(wanted, allowed)
            for name in found:
                for product in products[name][number : number + 1]:
                    found[name] = max(found[name], product_error(product, x, wanted, allowed))
    except (ValueError, RuntimeError):
        return {}
    return found


def wanted_and_allowed(right: mx.array | Expected, x: mx.array) -> tuple[mx.array, mx.array]:
    """Return a right product of x in float32, and how far another one may be from it."""
    if isinstance(right, Expected):
        return right.product, right.allowed(x.dtype)
    wanted = right.astype(mx.float32)
    return wanted, tolerance(x.dtype, x.shape[-1]) * mx.sqrt(mx.square(wanted).mean())


def product_error(product: Product, x: mx.array, wanted: mx.array, allowed: mx.array) -> float:
    """Return the largest difference from what is wanted, in those that are allowed; FAILED if it is not a number."""
    try:
        y = product(x).astype(mx.float32)
        mx.eval(y)
    except RuntimeError as error:
        if any(word in str(error) for word in REFUSED):
            return FAILED
        raise
    if y.shape != wanted.shape:
        return FAILED
    found = float(mx.where(y == wanted, 0, mx.abs(y - wanted) / allowed).max().item())  # type: ignore[arg-type]
    return found if math.isfinite(found) else FAILED


def times_of(products: Mapping[str, Sequence[Product]], x: mx.array) -> Times:
    """Return seconds of one product by each candidate, medians; FAILED for one that Metal cannot compile; or nothing at
    all.

    Raises:
        ValueError, RuntimeError: from MLX, where something else cannot be evaluated.
    """
    if not all(products.values()):
        return {}
    found = {name: seconds_of_one(each[0], x) for name, each in products.items()}
    # A candidate that takes three times as long for a single product is not timed over many.
    hopeful = [name for name, seconds in found.items() if seconds <= 3.0 * min(found.values())]
    if len(hopeful) > 1:
        makes = {name: partial(built, products[name], x) for name in hopeful}
        times = timed_in_turn(makes, least=0.002, give_up=1.5)
        found |= {name: statistics.median(each) / len(products[name]) for name, each in times.items()}
    return found


def seconds_of_one(product: Product, x: mx.array) -> float:
    """Return seconds of one product, after another one that may compile its kernel."""
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
    """Return the candidate to use: the first, unless another one is faster by a margin."""
    known = {name: times[name] for name in candidates if name in times}
    if not known:
        return candidates[0]
    best = min(known, key=lambda name: known[name])
    first = known.get(candidates[0])
    return candidates[0] if first is not None and first <= 1.05 * known[best] else best


def seconds_of(make: Make, calls: int = 1) -> float:
    """Return seconds in which one evaluation computes everything that so many calls of `make` build."""
    built = [array for _ in range(calls) for array in make()]
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(built)
    return time.perf_counter() - start


def enough_calls(make: Make, least: float = MIN_SECONDS) -> int:
    """Return the power of two of calls whose evaluation takes `least` seconds or more; at most MAX_CALLS.

    The first evaluation is not counted: it may compile a kernel.
    """
    seconds_of(make)
    calls = 1
    while calls < MAX_CALLS and seconds_of(make, calls) < least:
        calls *= 2
    return calls


def timed_in_turn(
    candidates: Mapping[Key, Make], trials: int = 5, least: float = MIN_SECONDS, give_up: float = math.inf
) -> dict[Key, list[float]]:
    """Return seconds of one call of each candidate, trial by trial; a trial goes through all of them in turn.

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
