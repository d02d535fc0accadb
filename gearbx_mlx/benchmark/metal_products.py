"""The Metal products that `benchmark metal` checks: how each packs a matrix, reads it and multiplies.

Checks demand its values, and each row's bits in any company. `benchmark kernels` times them.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import one_line
from ..formats import codebook, codebook_library, groupwise, rowwise
from ..formats.codebook import LAYOUT
from ..formats.exact import encode
from ..formats.planes import Planes, split
from ..kernels.exact import ExactMatrix, decode
from ..kernels.metal import VARIANTS, fits_threadgroup
from ..kernels.metal_exact import EXACT_WIDTHS, decode_launch, exact_launch, exact_matmul_tiles
from ..kernels.metal_products import (
    INPUTS_OF_CODEBOOK,
    INPUTS_OF_LIBRARY,
    codebook_launch,
    dense_launch,
    groupwise_launch,
    library_launch,
    planes_launch,
    rowwise_launch,
)
from .measuring import METAL

AFFINE = (2, 3, 4, 5, 6, 8)
CODEBOOKS = {
    "codebook": (codebook, codebook_launch, INPUTS_OF_CODEBOOK),
    "codebook-library": (codebook_library, library_launch, INPUTS_OF_LIBRARY),
}
STACKS = ((4, 4), (4, 1, 1, 2))
TILES = "tiles"  # exact weights, decoded for MLX's product

Arrays = list[mx.array]
Product = Callable[..., mx.array]
"""x and the arrays of a matrix to the result: a launch that was prepared for such ones, or a product of MLX."""


@dataclass(frozen=True)
class MetalProduct:
    """A format at some bits.

    pack: a matrix (O, I) to arrays, in the order of a launch. dense: arrays and I to the dequantized matrix (O, I),
    float32. prepare: x (V, I), arrays and a variant to the product of these, or of others of their shapes and types.
    multiple: the columns have to be a multiple of it. variants: that there are; "" where there is one. decoded: arrays
    to the weight, bit for bit, by a launch; None: there is no such kernel.
    """

    format: str
    bits: str
    pack: Callable[[mx.array], Arrays]
    dense: Callable[[Arrays, int], mx.array]
    prepare: Callable[[mx.array, Arrays, str], Product]
    multiple: int = 1
    variants: tuple[str, ...] = VARIANTS
    decoded: Callable[[Arrays], mx.array] | None = None

    @property
    def name(self) -> str:
        return f"{self.format} {self.bits}"

    def product(self, x: mx.array, arrays: Arrays, variant: str) -> mx.array:
        """The result for x (V, I), by a launch that is prepared for it alone."""
        return self.prepare(x, arrays, variant)(x, *arrays)


def planes_kernel(widths: tuple[int, ...], group_size: int) -> MetalProduct:
    count = len(widths)

    def pack(weight: mx.array) -> Arrays:
        return list(split(weight, widths, group_size).arrays)

    def planes(a: Arrays) -> Planes:
        return Planes(a[:count], a[count], a[count + 1 :], widths, group_size)

    def dense(a: Arrays, columns: int) -> mx.array:
        return planes(a).dequantize()

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return planes_launch(x, planes(a), variant=variant).prepared

    return MetalProduct("planes", "+".join(map(str, widths)), pack, dense, prepare, group_size)


def affine_kernel(bits: int, group_size: int) -> MetalProduct:
    """MLX's own weights, as a stack of one plane."""
    stack = planes_kernel((bits,), group_size)

    def pack(weight: mx.array) -> Arrays:
        return list(mx.quantize(weight, group_size, bits))

    return MetalProduct("affine", str(bits), pack, stack.dense, stack.prepare, group_size)


def rowwise_kernel(bits: int) -> MetalProduct:
    def pack(weight: mx.array) -> Arrays:
        codes, scales = rowwise.quantize(weight, bits)
        return [rowwise.pack_symmetric_codes(codes, bits), scales]

    def dense(a: Arrays, columns: int) -> mx.array:
        return rowwise.dequantize(rowwise.unpack_symmetric_codes(a[0], bits, columns), a[1])

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return rowwise_launch(x, a[0], a[1], bits, x.shape[-1], variant=variant).prepared

    return MetalProduct("rowwise", str(bits), pack, dense, prepare)


def groupwise_kernel() -> MetalProduct:
    def pack(weight: mx.array) -> Arrays:
        codes, scales = groupwise.quantize(weight)
        return [rowwise.pack_symmetric_codes(codes, groupwise.BITS), scales]

    def dense(a: Arrays, columns: int) -> mx.array:
        codes = rowwise.unpack_symmetric_codes(a[0], groupwise.BITS, a[1].shape[1] * groupwise.GROUP)
        return groupwise.dequantize(codes, a[1], columns)

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return groupwise_launch(x, a[0], a[1], x.shape[-1], variant=variant).prepared

    return MetalProduct("groupwise", str(groupwise.BITS), pack, dense, prepare)


def codebook_kernel(format: str, bits: int) -> MetalProduct:
    """Codebooks with outliers: one per row, or a library."""
    module, launch, names = CODEBOOKS[format]

    def pack(weight: mx.array) -> Arrays:
        arrays = module.encode(weight, bits)
        return [arrays[name] for name in names]

    def dense(a: Arrays, columns: int) -> mx.array:
        return codebook.decode(dict(zip(names, a)), bits, columns)

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return launch(x, dict(zip(names, a)), bits, variant=variant).prepared

    return MetalProduct(format, str(bits), pack, dense, prepare)


def exact_kernel(widths: tuple[int, ...], group_size: int) -> MetalProduct:
    """bfloat16 weights, from the packed form, or in tiles that are decoded for MLX's product."""
    count = len(widths)

    def pack(weight: mx.array) -> Arrays:
        return list(encode(weight.astype(mx.bfloat16), widths, group_size).arrays)

    def matrix(a: Sequence[mx.array]) -> ExactMatrix:
        low, high, offsets = a[-3:]
        return ExactMatrix([*a[:count]], a[count], [*a[count + 1 : -3]], low, high, offsets, widths, group_size)

    def dense(a: Arrays, columns: int) -> mx.array:
        return decode(matrix(a)).astype(mx.float32)

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return tiles if variant == TILES else exact_launch(x, matrix(a)).prepared

    def tiles(x: mx.array, *a: mx.array) -> mx.array:
        return exact_matmul_tiles(x, matrix(a))

    def decoded(a: Arrays) -> mx.array:
        return decode_launch(matrix(a)).run()

    bits = "+".join(map(str, widths))
    return MetalProduct("exact", bits, pack, dense, prepare, group_size, ("registers", TILES), decoded)


def dense_kernel() -> MetalProduct:
    """Our product with the weight as it is."""

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return dense_launch(x, a[0]).prepared

    return MetalProduct("dense", "16", lambda weight: [weight], lambda a, columns: a[0], prepare, variants=("",))


def all_kernels(group_size: int) -> list[MetalProduct]:
    """Every kernel."""
    return [
        *(affine_kernel(bits, group_size) for bits in AFFINE),
        *(planes_kernel(widths, group_size) for widths in STACKS),
        *map(rowwise_kernel, rowwise.Q_MAX),
        groupwise_kernel(),
        *(codebook_kernel("codebook", bits) for bits in LAYOUT),
        *(codebook_kernel("codebook-library", bits) for bits in codebook_library.BITS),
        *(exact_kernel(widths, group_size) for widths in EXACT_WIDTHS),
        dense_kernel(),
    ]


# The largest difference from the reference that is allowed, relative to the largest value: some roundings of the type.
TOLERANCE = {mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6, mx.float32: 2.0**-15}
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
CHECKED = ((37, 640), (13, 533))  # rows and columns; 533 is not a multiple of a group


@dataclass(frozen=True)
class Check:
    """One comparison.

    text: of what. most: the largest difference that is allowed, relative to the largest value; 0: the same bits. error:
    computes the difference.
    """

    text: str
    most: float
    error: Callable[[], float]


def examine(name: str, checks: Iterable[Check]) -> dict[str, Any]:
    """What came of some checks: how many, the largest difference as a share of what is allowed, and what is wrong.

    Raises whatever making a check raises, such as packing a matrix. An error of the check itself counts as wrong.
    """
    checked, largest, wrong = 0, 0.0, []
    for check in checks:
        checked += 1
        try:
            error = check.error()
        except (RuntimeError, ValueError) as failure:  # Metal's compiler refuses the text, or MLX the arrays
            wrong.append(f"{name}, {check.text}: {one_line(failure)}")
            continue
        if not error <= check.most:  # or it is NaN
            wrong.append(f"{name}, {check.text}: off by {error:.1e} of the largest value")
        elif check.most:
            largest = max(largest, error / check.most)
    return {"what": name, "checked": checked, "largest_error": largest, "wrong": wrong}


def difference(result: mx.array, expected: mx.array) -> float:
    """The largest difference, relative to the largest value that is expected."""
    with mx.stream(mx.cpu):
        apart = mx.abs(result.astype(mx.float32) - expected.astype(mx.float32)).max()
        largest = mx.abs(expected.astype(mx.float32)).max()
        return float(np.asarray(apart / largest))


def type_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def path_of(variant: str) -> str:
    return f"{METAL} {variant}".rstrip()


def random_matrix(rows: int, columns: int, dtype: mx.Dtype) -> mx.array:
    return (mx.random.normal((rows, columns)) * 0.05).astype(dtype)


def variants_for(kernel: MetalProduct, columns: int, vectors: int, dtype: mx.Dtype) -> list[str]:
    """The variants that take activations of this size."""
    return [name for name in kernel.variants if name != "threadgroup" or fits_threadgroup(columns, vectors, dtype)]


def product_checks(kernel: MetalProduct, vectors: Sequence[int]) -> Iterator[Check]:
    """Every shape, type, number of vectors and variant of a product."""
    for (rows, columns), dtype in itertools.product(CHECKED, DTYPES):
        if columns % kernel.multiple:
            continue
        arrays = kernel.pack(random_matrix(rows, columns, dtype))
        if kernel.decoded is not None:
            yield Check(f"{rows}x{columns}, decoded", 0.0, partial(decoding_error, kernel, arrays, columns))
        for count in vectors:
            x = mx.random.normal((count, columns)).astype(dtype)
            for variant in variants_for(kernel, columns, count, dtype):
                text = f"{rows}x{columns}, {count} vectors, {type_name(dtype)}, {path_of(variant)}"
                yield Check(text, TOLERANCE[dtype], partial(product_error, kernel, arrays, x, variant))
                if count > 1 and variant != TILES:  # which MLX multiplies
                    yield Check(f"{text}, the first alone", 0.0, partial(company_error, kernel, arrays, x, variant))


def product_error(kernel: MetalProduct, arrays: Arrays, x: mx.array, variant: str) -> float:
    """How far a product is from one in float32, on the CPU: a GPU may round what it multiplies."""
    with mx.stream(mx.cpu):
        wide = [array.astype(mx.float32) if is_scale(array) else array for array in arrays]
        expected = x.astype(mx.float32) @ kernel.dense(wide, x.shape[-1]).T
    return difference(kernel.product(x, arrays, variant), expected)


def is_scale(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


def company_error(kernel: MetalProduct, arrays: Arrays, x: mx.array, variant: str) -> float:
    """How far the first vector's product alone is from the same among others."""
    return difference(kernel.product(x, arrays, variant)[:1], kernel.product(x[:1], arrays, variant))


def decoding_error(kernel: MetalProduct, arrays: Arrays, columns: int) -> float:
    """How far a decoded weight is from the one that MLX's operations decode."""
    assert kernel.decoded is not None
    with mx.stream(mx.cpu):
        expected = kernel.dense(arrays, columns)
    return difference(kernel.decoded(arrays), expected)
