"""Checks of matrix-vector products beside their definitions, for `benchmark mac --own-kernels`.

A check demands a product's values, and that each row is bit-identical in any batch. own_kernels.py times products.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from ..compat.arrays import dtype_name
from ..errors import GearbxError, one_line
from ..formats import codebook, codebook_library, groupwise, rowwise
from ..formats.codebook import WORD_CODES
from ..formats.exact import encode
from ..formats.planes import Planes, split
from ..kernels.bit_planes import split_affine
from ..kernels.dispatch import RECONSTRUCT, always
from ..kernels.exact import decode
from ..kernels.metal import METAL_DTYPES, VARIANTS, fitting_variants
from ..kernels.metal_exact import decode_launch
from ..kernels.products import (
    SymmetricCodes,
    codebook_experts,
    codebook_product,
    dense_product,
    exact_product,
    stack_experts,
    stack_product,
    symmetric_experts,
    symmetric_product,
)
from .measuring import METAL_PATH

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
STACKS = ((4, 4), (4, 1, 1, 2))
IN_PLACE = ((4, 8), (5, 8), (4, 6))

Product = Callable[..., Any]
"""A function of `kernels/products.py`: x, a packed matrix and `chosen`; for experts, indices before `chosen`."""


@dataclass(frozen=True)
class MetalProduct:
    """A format at some bits.

    Attributes:
        pack: from a matrix (O, I) to an array or a record of arrays.
        dense: from a packed matrix and I to the dequantized matrix (O, I), float32.
        experts: the matmul with stacked matrices; None without a kernel.
        multiple: divisor of the number of columns.
        variants: names of variants; "" for a single one.
        decoded: from a packed matrix to the weight, bit for bit, by a launch; None without a kernel.
    """

    name: str
    pack: Callable[[mx.array], Any]
    dense: Callable[[Any, int], mx.array]
    product: Product
    experts: Product | None = None
    multiple: int = 1
    variants: tuple[str, ...] = VARIANTS
    decoded: Callable[[Any], mx.array] | None = None

    def multiply(self, x: mx.array, packed: Any, variant: str) -> mx.array:
        """Return the result (V, O) for x (V, I), by its own launch."""
        return self.product(x, packed, chosen=always(variant))


def stack_kernel(name: str, pack: Callable[..., Planes], group_size: int, **of: Any) -> MetalProduct:
    """Return the kernel of bit planes. pack: takes a matrix, the group size and the keywords `of`."""
    made = partial(pack, group_size=group_size, **of)
    return MetalProduct(
        name, made, lambda planes, columns: planes.dequantize(), stack_product, stack_experts, group_size
    )


def mlx_weights(weight: mx.array, bits: int, group_size: int) -> Planes:
    """Return MLX's quantized weights, as a stack of one plane."""
    words, scales, biases = mx.quantize(weight, group_size, bits)
    return Planes([words], scales, [biases], (bits,), group_size)


def first_bits(weight: mx.array, bits: int, of: int, group_size: int) -> Planes:
    """Return the first `bits` of the `of` bits of MLX's quantized weights."""
    return split_affine(mlx_weights(weight, of, group_size), (bits, of - bits)).prefix(bits)


def planes_kernel_codes(codes: mx.array, scales: mx.array, bits: int, width: int) -> SymmetricCodes:
    """Return packed codes."""
    return SymmetricCodes(rowwise.pack_symmetric_codes(codes, bits), scales, bits, width)


def symmetric_kernel(bits: int, grouped: bool = False) -> MetalProduct:
    """Return the kernel of symmetric codes with a scale per row, or per group."""

    def pack(weight: mx.array) -> SymmetricCodes:
        made = groupwise.quantize(weight) if grouped else rowwise.quantize(weight, bits)
        return planes_kernel_codes(*made, bits, weight.shape[1])

    def dense(packed: SymmetricCodes, columns: int) -> mx.array:
        padded = packed.scales.shape[1] * groupwise.GROUP_INPUTS if grouped else columns
        codes = rowwise.unpack_symmetric_codes(packed.weight, bits, padded)
        if grouped:
            return groupwise.dequantize(codes, packed.scales, columns)
        return rowwise.dequantize(codes, packed.scales)

    name = f"{'groupwise' if grouped else 'rowwise'} {bits}"
    return MetalProduct(name, pack, dense, symmetric_product, symmetric_experts)


def codebook_kernel(format: str, encode: Callable[..., Any], bits: int) -> MetalProduct:
    """Return the kernel of codebooks with outliers: one per row, or a library."""

    def dense(packed: Any, columns: int) -> mx.array:
        return codebook.decode(packed, bits, columns)

    def product(x: mx.array, packed: Any, **how: Any) -> mx.array:
        return codebook_product(x, packed, bits, lambda: dense(packed, x.shape[-1]), **how)

    def experts(x: mx.array, packed: Any, indices: mx.array, **how: Any) -> mx.array | None:
        return codebook_experts(x, packed, bits, indices, **how)

    return MetalProduct(f"{format} {bits}", lambda weight: dict(encode(weight, bits)), dense, product, experts)


def exact_kernel(group_size: int) -> MetalProduct:
    """Return the kernel of exact bfloat16 weights, packed or decoded in tiles for MLX's matmul."""
    return MetalProduct(
        "exact",
        lambda weight: encode(weight.astype(mx.bfloat16), group_size),
        lambda matrix, columns: decode(matrix).astype(mx.float32),
        exact_product,
        multiple=group_size,
        variants=("registers", RECONSTRUCT),
        decoded=lambda matrix: decode_launch(matrix).run(),
    )


def all_kernels(group_size: int) -> list[MetalProduct]:
    """Return every kernel; the last one multiplies original weights."""
    return [
        *(stack_kernel(f"affine {bits}", mlx_weights, group_size, bits=bits) for bits in AFFINE_BITS),
        *(stack_kernel(f"planes {'+'.join(map(str, each))}", split, group_size, widths=each) for each in STACKS),
        *(stack_kernel(f"in place {b} of {of}", first_bits, group_size, bits=b, of=of) for b, of in IN_PLACE),
        *map(symmetric_kernel, rowwise.Q_MAX),
        symmetric_kernel(groupwise.GROUP_BITS, grouped=True),
        *(codebook_kernel("codebook", codebook.encode, bits) for bits in WORD_CODES),
        *(codebook_kernel("codebook-library", codebook_library.encode, bits) for bits in codebook_library.LIBRARY_BITS),
        exact_kernel(group_size),
        MetalProduct("dense 16", lambda weight: weight, lambda weight, columns: weight, dense_product, variants=("",)),
    ]


# Largest allowed difference from the reference, relative to the largest value: a few roundings of the type.
TOLERANCE = {mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6, mx.float32: 2.0**-15}
CHECKED = ((37, 640), (13, 533))  # rows and columns; 533 is not a multiple of a group


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        text: its subject.
        most: largest allowed difference, relative to the largest value; 0: bit-identical.
        error: computes the difference.
    """

    text: str
    most: float
    error: Callable[[], float]


def examine(name: str, checks: Iterable[Check]) -> dict[str, Any]:
    """Return the results of checks: their number, the largest share of the allowed difference, and failures.

    An error inside a check is a failure. An error while a check is made, such as in packing, is raised.
    """
    checked, largest, wrong = 0, 0.0, []
    for check in checks:
        checked += 1
        try:
            error = check.error()
        except (RuntimeError, ValueError) as failure:  # refused by Metal's compiler, or by MLX
            wrong.append(f"{name}, {check.text}: {one_line(failure)}")
            continue
        if not error <= check.most:  # or it is NaN
            wrong.append(f"{name}, {check.text}: off by {error:.1e} of the largest value")
        elif check.most:
            largest = max(largest, error / check.most)
    return {"what": name, "checked": checked, "largest_error": largest, "wrong": wrong}


def error_between(result: mx.array | None, expected: mx.array | None) -> float:
    """Return the largest difference, relative to the largest expected value."""
    if result is None or expected is None:
        raise GearbxError("there is no kernel for it")
    with mx.stream(mx.cpu):
        apart = mx.abs(result.astype(mx.float32) - expected.astype(mx.float32)).max()
        largest = mx.abs(expected.astype(mx.float32)).max()
        return float(np.asarray(apart / largest))


def path_of(variant: str) -> str:
    return f"{METAL_PATH} {variant}".rstrip()


def random_matrix(rows: int, columns: int, dtype: mx.Dtype) -> mx.array:
    return (mx.random.normal((rows, columns)) * 0.05).astype(dtype)


def product_checks(kernel: MetalProduct, vectors: Sequence[int], dtypes: Sequence[mx.Dtype]) -> Iterator[Check]:
    """Yield the checks of a matmul: every shape, type, number of vectors and variant."""
    for (rows, columns), dtype in itertools.product(CHECKED, dtypes):
        if columns % kernel.multiple:
            continue
        packed = kernel.pack(random_matrix(rows, columns, dtype))
        if kernel.decoded is not None:
            yield Check(f"{rows}x{columns}, decoded", 0.0, partial(decoding_error, kernel, packed, columns))
        for count in vectors:
            x = mx.random.normal((count, columns)).astype(dtype)
            for variant in fitting_variants(kernel.variants, columns, count, dtype):
                text = f"{rows}x{columns}, {count} vectors, {dtype_name(dtype)}, {path_of(variant)}"
                yield Check(text, TOLERANCE[dtype], partial(product_error, kernel, packed, x, variant))
                if count > 1 and variant != RECONSTRUCT:  # that variant uses MLX's matmul
                    yield Check(f"{text}, the first alone", 0.0, partial(batch_error, kernel, packed, x, variant))


def product_error(kernel: MetalProduct, packed: Any, x: mx.array, variant: str) -> float:
    """Return the error of a matmul against float32 on the CPU, because a GPU may round inputs."""
    with mx.stream(mx.cpu):
        expected = x.astype(mx.float32) @ widened(kernel, packed, x.shape[-1]).T
    return error_between(kernel.multiply(x, packed, variant), expected)


def widened(kernel: MetalProduct, packed: Any, columns: int) -> mx.array:
    """Return the packed matrix, dequantized with float32 scales."""

    def wide(part: Any) -> Any:
        is_scale = isinstance(part, mx.array) and mx.issubdtype(part.dtype, mx.floating)
        return part.astype(mx.float32) if is_scale else part

    return kernel.dense(tree_map(wide, packed), columns)


EXPERTS, EXPERTS_CHOSEN = 3, 2  # experts in all, and for each vector


def mixture_checks(kernels: Iterable[MetalProduct], vectors: Sequence[int]) -> dict[str, Iterator[Check]]:
    """Return the checks of each kernel of experts, by name."""
    return {f"experts of {each.name}": experts_checks(each, vectors) for each in kernels if each.experts}


def experts_checks(kernel: MetalProduct, vectors: Sequence[int]) -> Iterator[Check]:
    """Yield the checks of a matmul with experts: every shape, type, number of vectors and variant."""
    for (rows, columns), dtype in itertools.product(CHECKED, METAL_DTYPES):
        if columns % kernel.multiple:
            continue
        each = [kernel.pack(random_matrix(rows, columns, dtype)) for _ in range(EXPERTS)]
        for count in vectors:
            x = mx.random.normal((count, 1, 1, columns)).astype(dtype)
            indices = mx.random.randint(0, EXPERTS, (count, EXPERTS_CHOSEN)).astype(mx.uint32)
            for variant in fitting_variants(kernel.variants, columns, 1, dtype):
                text = f"{rows}x{columns}, {count} vectors, {dtype_name(dtype)}, {path_of(variant)}"
                yield Check(text, TOLERANCE[dtype], partial(experts_error, kernel, each, x, indices, variant))
                yield Check(f"{text}, one alone", 0.0, partial(expert_alone_error, kernel, each, x, indices, variant))


def as_experts(*same: Any) -> Any:
    """Stack arrays of experts; lists of outliers are padded to the longest."""
    if not isinstance(same[0], mx.array):  # a field without arrays
        return same[0]
    most = max(map(len, same))
    return mx.stack([mx.pad(array, [(0, most - len(array)), *[(0, 0)] * (array.ndim - 1)]) for array in same])


def product_of_experts(
    kernel: MetalProduct, each: Sequence[Any], x: mx.array, indices: mx.array, variant: str
) -> mx.array:
    """Return x (V, 1, 1, I) times the experts at indices (V, n): (V, n, 1, O)."""
    assert kernel.experts is not None
    return kernel.experts(x, tree_map(as_experts, *each), indices, chosen=always(variant))


def experts_error(kernel: MetalProduct, each: Sequence[Any], x: mx.array, indices: mx.array, variant: str) -> float:
    """Return the error of a matmul with experts against float32 on the CPU."""
    with mx.stream(mx.cpu):
        weights = mx.stack([widened(kernel, packed, x.shape[-1]) for packed in each])
        expected = x.astype(mx.float32) @ weights[indices].swapaxes(-1, -2)
    return error_between(product_of_experts(kernel, each, x, indices, variant), expected)


def expert_alone_error(
    kernel: MetalProduct, each: Sequence[Any], x: mx.array, indices: mx.array, variant: str
) -> float:
    """Return the difference of the last pair's result from the matmul with that expert's matrix."""
    among = product_of_experts(kernel, each, x, indices, variant)[-1, -1]
    expert = each[int(np.asarray(indices[-1, -1]))]
    return error_between(among, kernel.multiply(x[-1, 0], expert, variant))


def batch_error(kernel: MetalProduct, packed: Any, x: mx.array, variant: str) -> float:
    """Return the difference of the first vector's result in a batch from its result in a batch of one."""
    return error_between(kernel.multiply(x, packed, variant)[:1], kernel.multiply(x[:1], packed, variant))


def decoding_error(kernel: MetalProduct, packed: Any, columns: int) -> float:
    """Return the difference between the weights decoded by a kernel and by MLX's operations."""
    assert kernel.decoded is not None
    with mx.stream(mx.cpu):
        expected = kernel.dense(packed, columns)
    return error_between(kernel.decoded(packed), expected)
