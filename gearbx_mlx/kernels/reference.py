"""Matrix products over bit planes with MLX's own kernels.

A plane is an ordinary affine weight of MLX, and a stack of r planes takes r calls. A native kernel reads all planes in
one pass; its results must agree with these.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx


def plane_shifts(widths: Sequence[int]) -> list[int]:
    """The shift of each plane: the scale of plane i is 2^-shift times the first plane's."""
    shifts, below = [], 0
    for width in widths[1:]:
        below += width
        shifts.append(below)
    return [0, *shifts]


def sum_planes(product: Callable[[int, int], mx.array], widths: Sequence[int]) -> mx.array:
    """The sum of product(i, width) over the planes i, each times its power of two, which rounds nothing."""
    total = product(0, widths[0])
    for i, shift in enumerate(plane_shifts(widths)):
        if shift:
            total = total + product(i, widths[i]) * 2.0**-shift
    return total


def planes_matmul(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
    transpose: bool = True,
) -> mx.array:
    """x @ W^T for a prefix of bit planes, or x @ W.

    Args:
        x: (..., I); for x @ W (..., O).
        weights: per plane, (..., O, I * width / 32) uint32 as `mx.quantize` packs them, most significant plane first.
        scales: (..., O, I / group_size), of the first plane; the others are powers of two below it.
        biases: per plane, (..., O, I / group_size).
        widths: bits of each plane.
        transpose: whether W is transposed.

    Returns:
        (..., O); for x @ W (..., I).
    """

    def product(i: int, width: int) -> mx.array:
        return mx.quantized_matmul(
            x, weights[i], scales, biases[i], transpose=transpose, group_size=group_size, bits=width
        )

    return sum_planes(product, widths)


def planes_dense(
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
) -> mx.array:
    """The weight (..., O, I) of a prefix of bit planes, arguments as for `planes_matmul`; of the scales' type."""

    def plane(i: int, width: int) -> mx.array:
        return mx.dequantize(weights[i], scales, biases[i], group_size, width)

    return sum_planes(plane, widths)


def planes_gather_matmul(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
    indices: mx.array,
    sorted_indices: bool = False,
) -> mx.array:
    """As `planes_matmul`, for stacked experts (E, O, ...); `indices` names an expert for each vector."""

    def product(i: int, width: int) -> mx.array:
        return mx.gather_qmm(
            x,
            weights[i],
            scales,
            biases[i],
            rhs_indices=indices,
            transpose=True,
            group_size=group_size,
            bits=width,
            sorted_indices=sorted_indices,
        )

    return sum_planes(product, widths)
