"""Matrix times vector in every format, against the read bandwidth of the machine."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import mlx.core as mx

from ...cli.parsers.benchmark import GROUP, KernelBenchmark
from ...cli.terminal import progress_bar, show_compiling
from ...errors import GearbxError
from ...formats import groupwise, rowwise
from ...formats.planes import split
from ...kernels import cpu, reference
from ...kernels.products import dense_product, groupwise_product, rowwise_product, stack_product
from .memory import check_memory

GIGABYTE, GIBIBYTE = 1e9, 2**30
SLOW_TRIALS = 2  # of MLX's own kernels
NATIVE, INT16, INT8, MLX = "native", "native int16", "native int8", "mlx"  # paths; int16, int8: rounded activations

Product = Callable[..., mx.array | None]
Many = list[mx.array]


@dataclass
class Case:
    """A format on a path: its row, a product of x (1, inputs) with every copy of a matrix, bytes of one, how many."""

    row: dict[str, Any]
    work: Callable[[mx.array], None]
    size: int
    copies: int


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cases_of(
    name: str, bits: int, arrays: Sequence[Any], total: int, products: dict[str, Product], paths: Sequence[str]
) -> Iterator[Case]:
    """A case for each path that there is a product for.

    Args:
        arrays: of one matrix, arguments of a product after x; lists of arrays among them.
        total: bytes of all copies together.
        products: path to a function of x and the arrays.
    """
    sizes = {id(a): a.nbytes for part in arrays for a in (part if isinstance(part, list) else [part])}
    size = sum(sizes.values())
    copies = [[copied(part) for part in arrays] for _ in range(max(1, total // size))]
    mx.eval(copies)
    for path in paths:
        if path in products:

            def work(x: mx.array, product: Product = products[path]) -> None:
                mx.eval([product(x, *arrays) for arrays in copies])

            yield Case({"format": name, "bits": bits, "path": path}, work, size, len(copies))


def copied(part: Any) -> Any:
    return [array + 0 for array in part] if isinstance(part, list) else part + 0


def dense_cases(weight: mx.array, total: int, paths: Sequence[str]) -> Iterator[Case]:
    """Weights as they are. MLX widens half-precision ones whole at every use, which is no kernel to compare with."""
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        products: dict[str, Product] = {NATIVE: dense_product}
        if dtype == mx.float32:
            products[MLX] = lambda x, w: x @ w.T
        name = f"dense {str(dtype).rpartition('.')[2]}"
        yield from cases_of(name, 8 * dtype.size, [weight.astype(dtype)], total, products, paths)


def stack_cases(weight: mx.array, total: int, paths: Sequence[str]) -> Iterator[Case]:
    """Affine weights, which are stacks of one plane, and stacks of several; scales of bfloat16, groups of 64."""
    for widths in [(b,) for b in (2, 3, 4, 5, 6, 8)] + [(4, 4), (4, 1, 1, 2)]:
        yield from cases_of_stack(weight, widths, total, paths)


def cases_of_stack(weight: mx.array, widths: tuple[int, ...], total: int, paths: Sequence[str]) -> Iterator[Case]:
    """A stack of planes of these widths."""
    planes = split(weight.astype(mx.bfloat16), widths, GROUP)

    def product(x: mx.array, w: Many, s: mx.array, b: Many, x_bits: int = 0) -> mx.array:
        return stack_product(x, w, s, b, widths, GROUP, x_bits=x_bits)

    def own(x: mx.array, w: Many, s: mx.array, b: Many) -> mx.array:
        return reference.planes_matmul(x, w, s, b, widths, GROUP)

    name = "affine" if len(widths) == 1 else "planes " + "+".join(map(str, widths))
    arrays = [planes.weights, planes.scales, planes.biases]
    yield from cases_of(name, sum(widths), arrays, total, by_activations(product) | {MLX: own}, paths)


def symmetric_cases(weight: mx.array, total: int, paths: Sequence[str]) -> Iterator[Case]:
    """Rowwise and groupwise codes, which MLX has no kernels for."""
    width = weight.shape[1]
    for bits in sorted(rowwise.Q_MAX):

        def rows(x: mx.array, codes: mx.array, scales: mx.array, bits: int = bits, x_bits: int = 0) -> mx.array | None:
            return rowwise_product(x, codes, scales, bits, width, x_bits=x_bits)

        codes, scales = rowwise.quantize(weight.astype(mx.bfloat16), bits)
        arrays = [rowwise.pack_symmetric_codes(codes, bits), scales]
        yield from cases_of("rowwise", bits, arrays, total, by_activations(rows), paths)

    def groups(x: mx.array, w: mx.array, s: mx.array, x_bits: int = 0) -> mx.array | None:
        return groupwise_product(x, w, s, width, x_bits=x_bits)

    codes, scales = groupwise.quantize(weight)
    arrays = [rowwise.pack_symmetric_codes(codes, groupwise.BITS), scales]
    yield from cases_of("groupwise", groupwise.BITS, arrays, total, by_activations(groups), paths)


def by_activations(product: Product) -> dict[str, Product]:
    """The paths of a product: activations as they are, and rounded."""
    return {path: functools.partial(product, x_bits=bits) for path, bits in {NATIVE: 0, INT16: 16, INT8: 8}.items()}


def time_case(case: Case, x: mx.array, trials: int, read_bandwidth: Callable[[], float]) -> dict[str, Any]:
    """One row: medians over trials, each beside a measurement of the read bandwidth made just before it."""
    case.work(x)  # a warm-up
    speeds, ratios, bandwidths = [], [], []
    for _ in range(trials):
        bandwidths.append(read_bandwidth())
        speeds.append(case.size * case.copies / timed(lambda: case.work(x)) / GIGABYTE)
        ratios.append(speeds[-1] / bandwidths[-1])
    return case.row | {
        "seconds": case.size / statistics.median(speeds) / GIGABYTE,
        "gigabytes_per_second": statistics.median(speeds),
        "bandwidth_ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "read_bandwidth_gigabytes_per_second": statistics.median(bandwidths),
        "trials": trials,
    }


def benchmark_kernels(settings: KernelBenchmark) -> list[dict[str, Any]]:
    """A row for each format and path.

    Raises:
        GearbxError: no native kernels, with which the read bandwidth is measured, or more than memory allows.
    """
    rows, cols, vectors, total = settings.rows, settings.cols, settings.vectors, settings.megabytes * 2**20
    matrix = 4 * rows * cols
    check_memory(2 * matrix + max(total, matrix) + 4 * vectors * (rows + cols) + GIBIBYTE, "a matrix of this size")
    module = native_module()
    paths = [NATIVE, INT16, INT8] if settings.native_only else [NATIVE, INT16, INT8, MLX]
    weight = mx.random.normal((rows, cols), key=mx.random.key(0)) * 0.02
    x = mx.random.normal((vectors, cols), key=mx.random.key(1))
    read_bandwidth = bandwidth_reader(module)
    mx.eval(weight, x)
    shape = {"rows": rows, "cols": cols, "vectors": vectors, "threads": module.threads()}
    makers = dense_cases, stack_cases, symmetric_cases
    found = []
    with progress_bar() as progress:
        task = progress.add_task("kernels timed", total=None)
        for case in chain.from_iterable(make(weight, total, paths) for make in makers):
            trials = settings.trials if case.row["path"] != MLX else min(settings.trials, SLOW_TRIALS)
            found.append(time_case(case, x, trials, read_bandwidth) | shape)
            progress.advance(task)
    return found


def native_module() -> Any:
    """Raises GearbxError where there are no native kernels."""
    show_compiling()
    module = cpu.native()
    if module is None:
        raise GearbxError(f"there are no native kernels to compare with: {cpu.why_not()}")
    return module


def bandwidth_reader(module: Any, size: int = GIBIBYTE) -> Callable[[], float]:
    """Measures GB/s of a sum over `size` bytes of words, on all threads, when called."""
    words = mx.full((size // 4,), 1, dtype=mx.uint32)
    mx.eval(words)

    def read() -> float:
        return words.nbytes / timed(lambda: module.read_sum(words)) / GIGABYTE

    read()  # a warm-up
    return read
