"""Which kernel a product of activations and weights runs on, and why: the one place that decides.

| activations                       | native kernels chosen and there        | otherwise  |
| ---                               | ---                                    | ---        |
| 1 to 16 vectors                   | native                                 | MLX's own  |
| more (prefill, a batch), Linux    | native, 16 at a time                   | MLX's own  |
| more, macOS                       | MLX's own: Accelerate has matrix units | MLX's own  |
| experts                           | by their vectors, as above             | MLX's own  |

"native" reads packed weights, or dense ones of two bytes, once for 16 vectors, and accumulates in float32; a vector has
the same bits in any company. MLX's wheels for Linux come with the reference BLAS and scalar quantized products, which
take 25 to 40 times as long for many vectors (docs/performance.md). The choice between "native" and "mlx" is made once
for a model (`choose`); the number of vectors decides at each call.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from . import cpu, reference

KERNELS = ("auto", "native", "mlx")
CHUNK = 16  # vectors for which native kernels read the weights once
MOST_VECTORS = CHUNK if sys.platform == "darwin" else None


@dataclass(frozen=True)
class Choice:
    """Whether native kernels are used, and the reason in a few words."""

    native: bool
    reason: str


def choose(kernels: str) -> Choice:
    """What a name of KERNELS comes to on this machine; compiles the native kernels if they are wanted."""
    if kernels == "mlx":
        return Choice(False, "as asked")
    if mx.default_device().type != mx.DeviceType.cpu:
        return Choice(False, "native kernels are for the CPU, and MLX computes on a GPU")
    reason = cpu.why_not()
    if reason is not None:
        return Choice(False, reason)
    told = f"{CHUNK} vectors at a time" if MOST_VECTORS is None else f"up to {MOST_VECTORS} vectors, MLX beyond"
    eager = cpu.why_eager()
    return Choice(True, f"{told}; handed over eagerly: {eager}" if eager else told)


def is_native(vectors: int) -> bool:
    """Whether so many vectors go to a native kernel, and there is one."""
    return vectors > 0 and (MOST_VECTORS is None or vectors <= MOST_VECTORS) and cpu.native() is not None


def vectors_of(x: mx.array) -> int:
    """How many vectors activations (..., I) are."""
    return x.size // x.shape[-1] if x.size else 0


def stack_product(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
) -> mx.array:
    """x @ W^T over a stack of bit planes, of which MLX's affine weight is the one with a single plane.

    Arguments as `reference.planes_matmul`; returns (..., O) of x's type, accumulated in float32.
    """
    module = cpu.native() if is_native(vectors_of(x)) else None
    if module is None:
        return reference.planes_matmul(x, weights, scales, biases, widths, group_size)
    return module.stack_matvec(x, list(weights), scales, list(biases), list(widths), group_size).astype(x.dtype)


def dense_product(x: mx.array, weight: mx.array) -> mx.array:
    """x (..., I) @ weight (O, I)^T, of x's type; the weight is used in the type that it is held in."""
    module = cpu.native() if is_native(vectors_of(x)) else None
    if module is None:
        return x @ weight.astype(x.dtype).T
    return module.dense_matvec(x, weight).astype(x.dtype)


def codebook_product(x: mx.array, arrays: Mapping[str, mx.array], bits: int, dense: Callable[[], mx.array]) -> mx.array:
    """x (..., I) @ W^T over a codebook for each row, or a library of them, of x's type.

    Args:
        arrays: by the names that formats give them; with `library` a library, else with `codebook`.
        dense: makes W (O, I), of x's type, where no native kernel is used.
    """
    module = cpu.native() if is_native(vectors_of(x)) else None
    kernel = getattr(module, "library_matvec" if "library" in arrays else "codebook_matvec", None)
    if kernel is None:
        return x @ dense().T
    return kernel(x, **arrays, bits=bits).astype(x.dtype)


def stack_experts(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
    indices: mx.array,
    sorted_indices: bool = False,
) -> mx.array:
    """As stack_product for stacked experts (E, O, ...), of which `indices` names one for each vector (..., 1, I)."""
    module = cpu.native() if are_pairs(x, indices) else None
    if module is None:
        return reference.planes_gather_matmul(
            x, weights, scales, biases, widths, group_size, indices, sorted_indices=sorted_indices
        )
    stack = list(weights), scales, list(biases), list(widths), group_size
    return module.stack_experts(x, *stack, indices).astype(x.dtype)


def dense_experts(x: mx.array, weight: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
    """As dense_product for stacked experts (E, O, I), of which `indices` names one for each vector (..., 1, I)."""
    module = cpu.native() if are_pairs(x, indices) else None
    if module is None:
        transposed = weight.astype(x.dtype).swapaxes(-1, -2)
        return mx.gather_mm(x, transposed, rhs_indices=indices, sorted_indices=sorted_indices)
    return module.dense_experts(x, weight, indices).astype(x.dtype)


def are_pairs(x: mx.array, indices: mx.array) -> bool:
    """Whether vectors (..., 1, I) and experts make pairs for a native kernel; MLX takes several vectors an expert."""
    return x.ndim >= 2 and x.shape[-2] == 1 and x.size > 0 and is_native(indices.size)
