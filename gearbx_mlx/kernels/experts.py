"""Products of mixtures of experts: a native CPU kernel, or MLX's."""

import math
from collections.abc import Mapping, Sequence
from types import ModuleType

import mlx.core as mx

from . import metal, reference
from .dispatch import cpu_kernels, on_cpu
from .metal_codebooks import experts_launch
from .metal_rows import MOST_EXPERTS, uses_order


def stack_experts(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
    indices: mx.array,
    sorted_indices: bool = False,
    x_bits: int = 0,
) -> mx.array:
    """As `stack_product`, for stacked experts (E, O, ...); `indices` names an expert for each vector (..., 1, I)."""
    module = cpu_kernels_for_experts(x, indices)
    if module is None:
        return reference.planes_gather_matmul(
            x, weights, scales, biases, widths, group_size, indices, sorted_indices=uses_order(indices, sorted_indices)
        )
    stack = list(weights), scales, list(biases), list(widths), group_size
    return module.stack_experts(x, *stack, indices, x_bits).astype(x.dtype)


def dense_experts(x: mx.array, weight: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
    """As `dense_product`, for stacked experts (E, O, I); `indices` names an expert for each vector (..., 1, I)."""
    module = cpu_kernels_for_experts(x, indices)
    if module is None:
        return dense_experts_of_mlx(x, weight, indices, sorted_indices)
    return module.dense_experts(x, weight, indices).astype(x.dtype)


def codebook_experts(x: mx.array, arrays: Mapping[str, mx.array], bits: int, indices: mx.array) -> mx.array | None:
    """As `codebook_product`, for stacked experts, each with its own tables and outliers; None if there is no kernel."""
    if metal.available() and indices.size <= metal.MAX_VECTORS * MOST_EXPERTS:
        launch = experts_launch(x, arrays, bits, indices)
        return None if launch is None else launch.run()
    module = cpu_kernels_for_experts(x, indices)
    if module is None:
        return None
    product = module.library_experts if "library" in arrays else module.codebook_experts
    return product(x, **arrays, indices=indices, bits=bits).astype(x.dtype)


def dense_experts_of_mlx(x: mx.array, weight: mx.array, indices: mx.array, sorted_indices: bool) -> mx.array:
    """`dense_experts` by MLX's own product."""
    computed = mx.float32 if on_cpu() else x.dtype  # a CPU has it for no other type
    transposed = weight.astype(computed).swapaxes(-1, -2)
    in_order = uses_order(indices, sorted_indices)
    return mx.gather_mm(x.astype(computed), transposed, rhs_indices=indices, sorted_indices=in_order).astype(x.dtype)


def cpu_kernels_for_experts(x: mx.array, indices: mx.array) -> ModuleType | None:
    """The native CPU kernels, if each index has one vector (..., 1, I); MLX's kernels also take several vectors.

    Where they take few vectors, they take those of as many tokens: a token uses up to MOST_EXPERTS experts.
    """
    tokens = math.ceil(indices.size / MOST_EXPERTS)
    return cpu_kernels(tokens) if x.ndim >= 2 and x.shape[-2] == 1 and x.size > 0 else None
