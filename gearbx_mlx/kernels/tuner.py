"""Selection of the fastest correct candidate for each kind of matmul, as measured on this machine.

The first matmul of a kind times its candidates for some milliseconds on the model's weights. A JSON file in the user's
cache keeps the times for later starts. An entry applies to one machine: device, system, MLX and native kernels. A
damaged file costs a measurement and a one-line warning.

On Metal, candidates are measured only if native kernels are requested; by default `proven.py` selects them. On a GPU, a
kernel's result is first compared with MLX's, on the model's weights, for the exact shape and number of vectors. On a
CPU, this happens when a kind is measured, with a reference and a bound for each row (`rounding.py`). A kernel whose
error exceeds rounding is never used. The same file keeps the differences.

Timing: the graph is built before the clock starts, and one evaluation has many launches. A single small launch would
measure Python and the wait for a GPU. Evaluations of all candidates take about the same time (`timed_in_turn`), so that
their overhead raises all times by a similar factor.
"""

import atexit
import functools
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
from ..files.measured_file import MeasuredFile, become_newest
from .compiler import processor_key
from .dispatch import (
    BFLOAT16_BITS,
    CPU,
    METAL,
    MIN_WEIGHTS,
    MLX,
    STOCK,
    CannotMeasure,
    KernelChoice,
    MatmulKind,
    cpu_kernels,
    device,
    is_tuning,
)
from .metal import MAX_VECTORS
from .proven import kernels_hash
from .rounding import Expected, tolerance, trial_activations

Key = TypeVar("Key")
Make = Callable[[], Sequence[mx.array]]
"""Function that builds one or more independent, unevaluated launches."""

MIN_SECONDS = 0.004  # seconds of an evaluation, twenty times the wait for a GPU
MAX_CALLS = 4096

Times = dict[str, float]
"""Candidate to seconds of a matmul."""

FAILED = 1e9  # seconds of a candidate that cannot be compiled: JSON has no infinity
REFUSED = ("metal library", "kernel")  # words in MLX's errors if Metal's compiler refuses the source

Differences = dict[str, float]
"""Candidate to the largest difference from the reference, in allowed differences: at most 1 if correct."""

Product = Callable[[mx.array], mx.array]
Products = Callable[[str], Sequence[Product]]
"""Candidate to its matmuls with several weights of one kind; none if no weights are in memory.

For EXPECTED, on a CPU: functions from activations to `Expected`.
"""

EXPECTED = "expected"


class Stored(msgspec.Struct):
    """The file: times and differences by machine, kind of matmul and candidate."""

    machines: dict[str, dict[str, dict[str, Annotated[float, msgspec.Meta(gt=0)]]]] = {}
    differences: dict[str, dict[str, dict[str, Annotated[float, msgspec.Meta(ge=0)]]]] = {}


class TuningCache:
    """Measurements of this machine.

    Args:
        file: path; None for the user's cache.
        again: whether measurements of earlier starts are ignored.
    """

    def __init__(self, file: Path | None = None, again: bool = False):
        remedy, unwritten = "it is written again", "kernels will be measured again at the next start"
        self._file = MeasuredFile(file or "tuning.json", Stored, "measurements of kernels", remedy, unwritten)
        self.machine, self._again = machine(), again
        self._fresh: tuple[dict[str, Times], dict[str, Differences]] = {}, {}
        self._saved = -math.inf

    @functools.cached_property
    def _stored(self) -> Stored:
        return Stored() if self._again else self._file.read()

    @functools.cached_property
    def times(self) -> dict[str, Times]:
        """Times by kind of matmul."""
        return self._stored.machines.get(self.machine, {})

    @functools.cached_property
    def differences(self) -> dict[str, Differences]:
        """Differences by kind of matmul, shape and number of vectors."""
        return self._stored.differences.get(self.machine, {})

    def keep(self, name: str, times: Times) -> None:
        """Keep the times of a kind of matmul until `save` writes them."""
        self.times[name] = self._fresh[0][name] = times

    def keep_differences(self, name: str, found: Differences) -> None:
        """Keep the differences of a kind of matmul until `save` writes them."""
        self.differences[name] = self._fresh[1][name] = found

    def save(self) -> None:
        """Write new measurements, and keep those that other processes wrote in the meantime."""
        if any(self._fresh):
            self._saved = time.monotonic()
            self._file.change(self._write)
            self._fresh = {}, {}

    def _write(self, stored: Stored) -> None:
        for machines, fresh in zip((stored.machines, stored.differences), self._fresh):
            become_newest(machines, self.machine, fresh)

    def save_soon(self) -> None:
        """Save at most once a second, since writing takes as long as some tokens; save the rest at exit."""
        if time.monotonic() - self._saved >= 1.0:
            self.save()
        else:
            atexit.unregister(self.save)
            atexit.register(self.save)


def machine() -> str:
    """Return the device, system, MLX and kernels, and a CPU's instructions and threads: times depend on them."""
    on = device()
    name = f"{mx.device_info().get('device_name', '')} ({on})"
    if on == CPU:
        kernels = cpu_kernels(1)
        threads = os.cpu_count() if kernels is None else kernels.threads()
        name = f"{name} {processor_key()}, {threads} threads"
    return f"{name}, {platform.system()} {platform.release()}, mlx {version('mlx')}, kernels {kernels_hash()}"


class Tuner:
    """Chooser of candidates for the matmuls of a model.

    Args:
        dtype: of the activations. choice: of the model's kernels.
        cache: earlier measurements; None: the user's cache.

    Attributes:
        used, wrong: this tuner's choices and refused candidates, by kind of matmul.
        seconds: duration of its measurements.
    """

    def __init__(self, dtype: mx.Dtype, choice: KernelChoice, cache: TuningCache | None = None):
        self.dtype, self.choice = dtype, choice
        self.cache = TuningCache(again=choice.again) if cache is None else cache
        self.seconds = 0.0
        self.used: dict[str, tuple[str, Times]] = {}
        self.wrong: dict[str, Differences] = {}

    def choose(self, kind: MatmulKind, vectors: int, products: Products) -> str:
        """Return the candidate for a matmul of this number of vectors; measure if not done yet.

        On a CPU, one candidate computes any number of vectors, because native kernels are batch-invariant. MLX's kernel
        must be faster for one vector and for many. On Metal, proofs decide by default (`proven.py`).

        Raises:
            CannotMeasure: MLX cannot evaluate now, or no weights are in memory.
        """
        on_cpu = device() == CPU
        if device() == METAL and not (self.choice.ours_alone or self.choice.again):
            return kind.proven(vectors, self.dtype)
        counted = 1 if on_cpu else size_class(vectors)
        candidates = kind.candidates(counted, self.dtype, self.choice.ours_alone)
        if device() == METAL:
            right = partial(self.right, kind, min(vectors, MAX_VECTORS + 1), products)
            if is_worth_it(kind):
                candidates = right(candidates)
            else:  # untimed: the first correct one
                candidates = next((alone for each in candidates if right(alone := (each,)) == alone), (MLX,))
        elif on_cpu and len(candidates) > 1 and is_worth_it(kind):
            new = not self.known(self.name(kind, 1), candidates)
            candidates = self.right(kind, 1, products, candidates, compare_now=new)
        chosen = self._fastest(kind, counted, products, candidates)
        if on_cpu and chosen in STOCK and chosen != self._fastest(kind, MAX_VECTORS, products, candidates):
            return candidates[0]
        return chosen

    def right(
        self, kind: MatmulKind, vectors: int, products: Products, candidates: Sequence[str], compare_now: bool = True
    ) -> tuple[str, ...]:
        """Return the candidates whose results agree with the reference within rounding; MLX if none does.

        Args:
            compare_now: compare candidates that were not compared yet; otherwise they count as correct.

        Raises:
            CannotMeasure: MLX cannot evaluate now, or no weights are in memory.
        """
        name = self.name(kind, vectors, exactly=True)
        known = self.cache.differences.get(name, {})
        missing = [each for each in candidates if each not in {MLX, *known}]
        if missing and compare_now:
            x = trial_activations(vectors, kind.shape[-1], self.dtype)
            reference, layers = (EXPECTED, 1) if device() == CPU else (MLX, None)
            found = product_errors({each: products(each)[:layers] for each in [reference, *missing]}, x)
            if not found:
                raise CannotMeasure(candidates[0] if device() == CPU else MLX)
            known = known | found
            self.cache.keep_differences(name, known)
        wrong = {each: known[each] for each in candidates if known.get(each, 0) > 1}
        if wrong:
            self.wrong[name] = self.wrong.get(name, {}) | wrong
        return tuple(each for each in candidates if each not in wrong) or (MLX,)

    def _fastest(self, kind: MatmulKind, vectors: int, products: Products, candidates: Sequence[str]) -> str:
        if len(candidates) == 1 or vectors > MAX_VECTORS or not is_worth_it(kind):
            return candidates[0]
        name = self.name(kind, vectors)
        times = self.times(name, kind, vectors, products, candidates)
        chosen = fastest(times, candidates)
        self.used[name] = chosen, times
        return chosen

    def known(self, name: str, candidates: Sequence[str]) -> Times | None:
        """Return earlier times of these candidates, in seconds; None if any is missing."""
        times = self.cache.times.get(name, {})
        return times if times.keys() >= {*candidates} else None

    def times(self, name: str, kind: MatmulKind, vectors: int, products: Products, candidates: Sequence[str]) -> Times:
        """Return the times of a matmul, from the cache or measured now.

        Raises:
            CannotMeasure: MLX cannot evaluate now, or no weights are in memory.
        """
        if known := self.known(name, candidates):
            return known
        started = time.perf_counter()
        x = mx.random.normal((vectors, kind.shape[-1]), self.dtype, key=mx.random.key(0))
        try:
            found = times_of({each: products(each) for each in candidates}, x)
        except GearbxError:
            raise
        except (ValueError, RuntimeError):  # inside mx.compile, or out of memory
            found = {}
        if not found:
            raise CannotMeasure(candidates[0])
        self.seconds += time.perf_counter() - started
        self.cache.keep(name, found)
        return found

    def name(self, kind: MatmulKind, vectors: int, exactly: bool = False) -> str:
        """Return the name of a kind of matmul in the cache; unless `exactly`, sizes between powers of two share one."""
        # Streaming takes the same time per weight from 2^13 rows or columns.
        sizes = kind.shape if exactly else [min(size_class(size), 2**13) for size in kind.shape]
        bits = min(self.choice.x_bits, kind.most_bits) if device() == CPU else 0  # to which activations are quantized
        precision = "bfloat16" if kind.most_bits == BFLOAT16_BITS else f"{bits} bits"
        rounded = f", activations of {precision}" if bits else ""
        number = vectors if exactly else size_class(vectors)
        shape, dtype, many = " x ".join(map(str, sizes)), dtype_name(self.dtype), "s" * (number > 1)
        return f"{kind.form}, {shape}, {dtype}{rounded}, {number} vector{many}"


def size_class(count: int) -> int:
    """Return the power of two at or above `count`: sizes between two powers share their measurements."""
    return 1 << max(0, count - 1).bit_length()


def is_worth_it(kind: MatmulKind) -> bool:
    """Return whether to time the candidates of a kind: not if it is small, nor with GEARBX_TUNE=0."""
    return is_tuning() and math.prod(kind.shape) >= MIN_WEIGHTS


def product_errors(products: Mapping[str, Sequence[Any]], x: mx.array) -> Differences:
    """Return the largest difference of each candidate from the reference, in allowed differences.

    The reference is EXPECTED (`rounding.py`), otherwise MLX's result with a tolerance relative to its root mean square.
    All layers in memory are compared. The result is empty if MLX cannot evaluate (inside mx.compile, out of memory), or
    no weights are in memory.
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
    """Return the reference result for x in float32, and the allowed difference from it."""
    if isinstance(right, Expected):
        return right.product, right.allowed(x.dtype)
    wanted = right.astype(mx.float32)
    return wanted, tolerance(x.dtype, x.shape[-1]) * mx.sqrt(mx.square(wanted).mean())


def product_error(product: Product, x: mx.array, wanted: mx.array, allowed: mx.array) -> float:
    """Return the largest difference from `wanted`, in allowed differences; FAILED if it is not a number."""
    result = evaluated(product, x)
    if result is None or result.shape != wanted.shape:
        return FAILED
    y = result.astype(mx.float32)
    found = float(mx.where(y == wanted, 0, mx.abs(y - wanted) / allowed).max().item())  # type: ignore[arg-type]
    return found if math.isfinite(found) else FAILED


def times_of(products: Mapping[str, Sequence[Product]], x: mx.array) -> Times:
    """Return the median seconds of one matmul by each candidate; FAILED for one that Metal cannot compile.

    The result is empty without weights in memory.

    Raises:
        ValueError, RuntimeError: MLX cannot evaluate for a different reason.
    """
    if not all(products.values()):
        return {}
    found = dict.fromkeys(products, FAILED)
    for name, (product, *_) in products.items():
        if evaluated(product, x) is not None:  # the first matmul may compile its kernel
            found[name] = seconds_of(partial(lambda multiply: [multiply(x)], product))
    # A candidate that takes three times as long for a single matmul is not timed over many.
    hopeful = [name for name, seconds in found.items() if seconds <= 3.0 * min(found.values())]
    if len(hopeful) > 1:
        makes = {name: partial(lambda each: [product(x) for product in each], products[name]) for name in hopeful}
        times = timed_in_turn(makes, least=0.002, give_up=1.5)
        found |= {name: statistics.median(each) / len(products[name]) for name, each in times.items()}
    return found


def evaluated(product: Product, x: mx.array) -> mx.array | None:
    """Return the result of a matmul; None if Metal's compiler refuses its kernel. Raises RuntimeError otherwise."""
    try:
        y = product(x)
        mx.eval(y)
    except RuntimeError as error:
        if any(word in str(error) for word in REFUSED):
            return None
        raise
    return y


def fastest(times: Times, candidates: Sequence[str]) -> str:
    """Return the candidate to use: the first, unless a later one is more than 5% faster."""
    first, best = candidates[0], min(candidates, key=lambda name: times[name])
    return first if times[first] <= 1.05 * times[best] else best


def seconds_of(make: Make, calls: int = 1) -> float:
    """Return seconds of one evaluation of all arrays that this number of calls of `make` builds."""
    built = [array for _ in range(calls) for array in make()]
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(built)
    return time.perf_counter() - start


def enough_calls(make: Make, least: float = MIN_SECONDS) -> int:
    """Return a power of two of calls whose evaluation takes `least` seconds or more; at most MAX_CALLS.

    The first evaluation does not count, because it may compile a kernel.
    """
    seconds_of(make)
    calls = 1
    while calls < MAX_CALLS and seconds_of(make, calls) < least:
        calls *= 2
    return calls


def timed_in_turn(
    candidates: Mapping[Key, Make], trials: int = 5, least: float = MIN_SECONDS, give_up: float = math.inf
) -> dict[Key, list[float]]:
    """Return seconds of one call of each candidate in each trial; a trial times all of them in turn.

    Args:
        trials: 1 or more; every second one reverses the order.
        least: seconds of an evaluation, as in `enough_calls`.
        give_up: a candidate this many times slower than a trial's fastest is not timed again.

    Raises:
        RuntimeError: MLX cannot evaluate a candidate.
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
