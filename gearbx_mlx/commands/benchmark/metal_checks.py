"""What `benchmark metal` demands of every Metal product: its values, and each row's bits in any company."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import one_line
from ...kernels.metal import fits_threadgroup
from .machine import METAL
from .metal_kernels import TILES, Arrays, Kernel

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


def variants_for(kernel: Kernel, columns: int, vectors: int, dtype: mx.Dtype) -> list[str]:
    """The variants that take activations of this size."""
    return [name for name in kernel.variants if name != "threadgroup" or fits_threadgroup(columns, vectors, dtype)]


def product_checks(kernel: Kernel, vectors: Sequence[int]) -> Iterator[Check]:
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


def product_error(kernel: Kernel, arrays: Arrays, x: mx.array, variant: str) -> float:
    """How far a product is from one in float32, on the CPU: a GPU may round what it multiplies."""
    with mx.stream(mx.cpu):
        wide = [array.astype(mx.float32) if is_scale(array) else array for array in arrays]
        expected = x.astype(mx.float32) @ kernel.dense(wide, x.shape[-1]).T
    return difference(kernel.product(x, arrays, variant), expected)


def is_scale(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


def company_error(kernel: Kernel, arrays: Arrays, x: mx.array, variant: str) -> float:
    """How far the first vector's product alone is from the same among others."""
    return difference(kernel.product(x, arrays, variant)[:1], kernel.product(x[:1], arrays, variant))


def decoding_error(kernel: Kernel, arrays: Arrays, columns: int) -> float:
    """How far a decoded weight is from the one that MLX's operations decode."""
    assert kernel.decoded is not None
    with mx.stream(mx.cpu):
        expected = kernel.dense(arrays, columns)
    return difference(kernel.decoded(arrays), expected)
