"""Matrix-vector products in every format and on each path, against the machine's read bandwidth."""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from gearbx_mlx.benchmark.measuring import (
    GIBIBYTE,
    GIGABYTE,
    INT8,
    INT16,
    METAL_PATH,
    MLX_PATH,
    NATIVE_PATH,
    BandwidthMeter,
    check_room,
    paths_here,
    spread_of,
)
from gearbx_mlx.benchmark.metal_checks import planes_kernel_codes
from gearbx_mlx.cli.terminal import counting
from gearbx_mlx.compat.arrays import dtype_name
from gearbx_mlx.errors import GearbxError
from gearbx_mlx.formats import CodebookOptions, codebook, codebook_library, groupwise, rowwise
from gearbx_mlx.formats.codebook import WORD_CODES
from gearbx_mlx.formats.codebook_library import LIBRARY_BITS as LIBRARY
from gearbx_mlx.formats.exact import encode
from gearbx_mlx.formats.planes import split
from gearbx_mlx.kernels import metal
from gearbx_mlx.kernels.bit_planes import planes_matmul
from gearbx_mlx.kernels.dispatch import NATIVE as OURS
from gearbx_mlx.kernels.dispatch import always, on_cpu
from gearbx_mlx.kernels.products import (
    codebook_product,
    dense_product,
    exact_product,
    stack_product,
    symmetric_product,
)
from gearbx_mlx.kernels.tuner import seconds_of

from .decoding_costs import as_table
from .studies import Found, study

GROUP = 64
SLOW_TRIALS = 2  # of MLX's own kernels on a CPU
COLUMNS = ("format", "bits", "path", "seconds", "gigabytes_per_second", "bandwidth_ratio", "spread")

Product = Callable[..., Any]  # an array: its path has a kernel
Many = list[mx.array]


@dataclass(frozen=True)
class MatrixSizes:
    """Trials of products with a matrix of so many rows and columns; megabytes: of weights, read in a trial.

    Raises:
        GearbxError: columns that groups do not divide.
    """

    trials: int
    rows: int
    cols: int
    megabytes: int

    def __post_init__(self) -> None:
        if self.cols < GROUP or self.cols % GROUP:
            raise GearbxError(f"--cols is {self.cols}; give a multiple of {GROUP}")


@study(minutes=4)
def kernels(
    rows: int = 4096,
    cols: int = 4096,
    megabytes: int = 256,
    vectors: int = 1,
    trials: int = 5,
    native_only: bool = False,
) -> Found:
    """Time a matrix times one or several vectors, in each format and on each path, as a share of the read bandwidth.

    Args:
        megabytes: Size of the weights in a trial, above the last-level cache.
        vectors: Vectors per call.
        native_only: Omit MLX's own kernels.
    """
    sizes = MatrixSizes(trials, rows, cols, megabytes)
    total, matrix = sizes.megabytes * 2**20, 4 * rows * cols
    check_room(2 * matrix + max(total, matrix) + 4 * vectors * (rows + cols) + GIBIBYTE, "a matrix of this size")
    dtype = mx.float32 if on_cpu() else mx.bfloat16  # in which a model computes there
    paths = product_paths(cols, vectors, dtype, native_only)
    weight = mx.random.normal((rows, cols), key=mx.random.key(0)) * 0.02
    x = mx.random.normal((vectors, cols), key=mx.random.key(1)).astype(dtype)
    read_bandwidth = BandwidthMeter()
    mx.eval(weight, x)
    shape = {"rows": rows, "cols": cols, "vectors": vectors} | read_bandwidth.row
    makers = dense_cases, stack_cases, symmetric_cases, codebook_cases, exact_cases
    found = []
    with counting("kernels timed", None) as advance:
        for case in chain.from_iterable(make(weight, total, paths) for make in makers):
            slow = case.row["path"] == MLX_PATH and on_cpu()
            found.append(time_case(case, x, min(trials, SLOW_TRIALS) if slow else trials, read_bandwidth) | shape)
            advance()
    return Found({"kernels": as_table(COLUMNS, found)}, found)


@dataclass
class ProductCase:
    """A format on a path: its row, products of x (1, inputs) with every copy of a matrix, bytes of one, how many.

    make: builds the products, which are not evaluated.
    """

    row: dict[str, Any]
    make: Callable[[mx.array], Many]
    size: int
    copies: int


def cases_of(
    name: str, bits: int, matrix: Any, total: int, products: dict[str, Product], paths: Sequence[str]
) -> Iterator[ProductCase]:
    """Yield a case for each path that there is a product for.

    Args:
        matrix: an array, or a record of arrays.
        total: bytes of all copies together.
        products: path to a function of x and the matrix.
    """
    arrays = [array for _, array in tree_flatten(matrix) if isinstance(array, mx.array)]
    size = sum({id(array): array.nbytes for array in arrays}.values())
    copies = [tree_map(copied, matrix) for _ in range(max(1, total // size))]
    mx.eval(copies)
    for path in paths:
        if path in products:

            def make(x: mx.array, product: Product = products[path]) -> Many:
                return [product(x, copy) for copy in copies]

            yield ProductCase({"format": name, "bits": bits, "path": path}, make, size, len(copies))


def copied(part: Any) -> Any:
    """Return an array at another address; sizes of a record as they are."""
    return part + 0 if isinstance(part, mx.array) else part


def dense_cases(weight: mx.array, total: int, paths: Sequence[str]) -> Iterator[ProductCase]:
    """Weights as they are. On a CPU MLX widens half-precision ones whole at every use, which is nothing to compare."""
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        products: dict[str, Product] = {NATIVE_PATH: dense_product, METAL_PATH: on_metal(dense_product)}
        if dtype == mx.bfloat16:
            products |= rounded(dense_product)
        if dtype == mx.float32 or not on_cpu():
            products[MLX_PATH] = lambda x, w: x.astype(w.dtype) @ w.T
        yield from cases_of(f"dense {dtype_name(dtype)}", 8 * dtype.size, weight.astype(dtype), total, products, paths)


def stack_cases(weight: mx.array, total: int, paths: Sequence[str]) -> Iterator[ProductCase]:
    """Affine weights, which are stacks of one plane, and stacks of several; scales of bfloat16, groups of 64."""
    for widths in [(b,) for b in (2, 3, 4, 5, 6, 8)] + [(4, 4), (4, 1, 1, 2)]:
        yield from cases_of_stack(weight, widths, total, paths)


def cases_of_stack(
    weight: mx.array, widths: tuple[int, ...], total: int, paths: Sequence[str]
) -> Iterator[ProductCase]:
    """Yield a stack of planes of these widths."""
    name = "affine" if len(widths) == 1 else "planes " + "+".join(map(str, widths))
    products = rounded(stack_product) | variants_of(stack_product) | {MLX_PATH: planes_matmul}
    yield from cases_of(name, sum(widths), split(weight.astype(mx.bfloat16), widths, GROUP), total, products, paths)


def symmetric_cases(weight: mx.array, total: int, paths: Sequence[str]) -> Iterator[ProductCase]:
    """Rowwise and groupwise codes, which MLX has no kernels for."""
    for bits in sorted(rowwise.Q_MAX):
        matrix = planes_kernel_codes(*rowwise.quantize(weight.astype(mx.bfloat16), bits), bits, weight.shape[1])
        products = rounded(symmetric_product) | variants_of(symmetric_product)
        yield from cases_of("rowwise", bits, matrix, total, products, paths)
    yield from groupwise_cases(weight, total, paths)


def groupwise_cases(weight: mx.array, total: int, paths: Sequence[str]) -> Iterator[ProductCase]:
    """Codes of 4 bits with a scale for 32 inputs."""
    matrix = planes_kernel_codes(*groupwise.quantize(weight), groupwise.GROUP_BITS, weight.shape[1])
    products = rounded(symmetric_product) | variants_of(symmetric_product)
    yield from cases_of("groupwise", groupwise.GROUP_BITS, matrix, total, products, paths)


def codebook_cases(weight: mx.array, total: int, paths: Sequence[str]) -> Iterator[ProductCase]:
    """Codebooks of each row, and a library of them, hardly fitted: how long a product takes does not depend on that."""
    quick = CodebookOptions(rounds=1)
    for name, module, widths in (
        ("codebook", codebook, WORD_CODES),
        ("codebook-library", codebook_library, LIBRARY),
    ):
        for bits in widths:
            products = variants_of(functools.partial(packed_product, bits=bits))
            yield from cases_of(name, bits, dict(module.encode(weight, bits, quick)), total, products, paths)


def packed_product(x: mx.array, arrays: dict[str, mx.array], bits: int, **how: Any) -> mx.array:
    """`codebook_product`, which needs the dense matrix for MLX alone."""
    return codebook_product(x, arrays, bits, lambda: codebook.decode(arrays, bits, x.shape[-1]), **how)


def exact_cases(weight: mx.array, total: int, paths: Sequence[str]) -> Iterator[ProductCase]:
    """bfloat16 weights that contain their low gear."""
    ours: dict[str, Product] = {NATIVE_PATH: exact_product, METAL_PATH: on_metal(exact_product)}
    products = ours | rounded(exact_product)
    matrix = encode(weight.astype(mx.bfloat16), GROUP)
    yield from cases_of("exact", 16, matrix, total, products, paths)


def variants_of(product: Product) -> dict[str, Product]:
    """Return the paths of a product of x and a matrix: on a CPU, and each variant with Metal."""
    variants = {f"{METAL_PATH} {name}": functools.partial(product, chosen=always(name)) for name in metal.VARIANTS}
    return {NATIVE_PATH: product, **variants}


def on_metal(product: Product) -> Product:
    """Return the product by our Metal kernel, of which there is one variant."""
    return functools.partial(product, chosen=always(OURS))


def rounded(product: Product) -> dict[str, Product]:
    """Return the paths of a CPU's product whose activations are rounded."""
    return {path: functools.partial(product, x_bits=bits) for path, bits in {INT16: 16, INT8: 8}.items()}


def time_case(case: ProductCase, x: mx.array, trials: int, read_bandwidth: BandwidthMeter) -> dict[str, Any]:
    """Return one row: medians over trials, each beside a measurement of the read bandwidth made just before it."""
    make = functools.partial(case.make, x)
    seconds_of(make)  # a warm-up
    speeds, ratios, bandwidths = [], [], []
    for _ in range(trials):
        bandwidths.append(read_bandwidth())
        speeds.append(case.size * case.copies / seconds_of(make) / GIGABYTE)
        ratios.append(speeds[-1] / bandwidths[-1])
    return case.row | {
        "seconds": case.size / statistics.median(speeds) / GIGABYTE,
        "gigabytes_per_second": statistics.median(speeds),
        "bandwidth_ratio": statistics.median(ratios),
        "spread": spread_of(ratios),
        "read_bandwidth_gigabytes_per_second": statistics.median(bandwidths),
        "trials": trials,
    }


def product_paths(cols: int, vectors: int, dtype: mx.Dtype, ours_alone: bool) -> list[str]:
    """Return the paths of a product here; those of Metal are its variants, and METAL for a kernel that has none.

    Raises:
        GearbxError: ours_alone, and there are no kernels of ours for this many vectors.
    """
    names = [name for name, *_ in paths_here()]
    if METAL_PATH in names:
        variants = [f"{METAL_PATH} {name}" for name in metal.fitting_variants(metal.VARIANTS, cols, vectors, dtype)]
        names = [METAL_PATH, *variants, MLX_PATH] if vectors <= metal.MAX_VECTORS else [MLX_PATH]
    if ours_alone:
        names.remove(MLX_PATH)
    if not names:
        raise GearbxError("there are no native kernels for these products here; leave --native-only out")
    return names
