"""Products over matrices of format `exact`, and the choice of kernels for them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx

from . import metal
from .candidates import STOCK, Chosen
from .dispatch import cpu_kernels
from .experts import cpu_kernels_for_experts, dense_experts_of_mlx
from .metal_exact import decode_launch, exact_launch, exact_matmul_tiles
from .products import add_bias, again, compiled, kernel_for, launched

TILE = 2**20  # weights that are decoded at a time for a product with many vectors


class ExactMatrix(NamedTuple):
    """A matrix (..., O, I) of bfloat16 in the arrays of format `exact`; the fields are the arguments of native kernels.

    weights: codes as `mx.quantize` packs them, one plane of 3 or 4 bits, or two of 4 (`formats/planes.py`).
    scales: (..., O, G) uint16, the bits of bfloat16 numbers, so that no cast changes them. biases: the same per plane.
    low: the low byte of every weight, (..., O, I) uint8; over two planes its 5 low bits, packed, uint32.
    high: (N,) uint8, what is stored beside that of weights near zero, in order. offsets: (rows + 1,) uint32: where the
    bytes of each row begin. widths: bits of each plane. group_size: inputs that share a scale.
    """

    weights: list[mx.array]
    scales: mx.array
    biases: list[mx.array]
    low: mx.array
    high: mx.array
    offsets: mx.array
    widths: list[int]
    group_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., O, I)."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group_size)

    def each(self, change: Callable[[mx.array], mx.array]) -> "ExactMatrix":
        """The same change to every array that has the rows (..., O) as its first axes; not to `high` and `offsets`."""
        return self._replace(
            weights=[change(codes) for codes in self.weights],
            scales=change(self.scales),
            biases=[change(bias) for bias in self.biases],
            low=change(self.low),
        )

    def rows(self, first: int, end: int) -> "ExactMatrix":
        """The rows from `first` to the one before `end` of a matrix (O, I)."""
        return self.each(lambda array: array[first:end])._replace(offsets=self.offsets[first : end + 1])

    @property
    def flat(self) -> "ExactMatrix":
        """The same as a matrix (rows, I): the matrices of experts and heads one after the other."""
        return self.each(lambda array: array.reshape(-1, array.shape[-1]))

    def after(self, computed: list[mx.array]) -> "ExactMatrix":
        """The same matrix, which MLX begins to decode when these arrays are computed."""

        def later(array: mx.array) -> mx.array:
            return mx.depends([array], computed)[0] if computed else array

        return self.each(later)._replace(offsets=later(self.offsets))

    def taken(self, chosen: mx.array) -> "ExactMatrix":
        """The rows, or experts, `chosen` (n,). Their bytes are where they were, so that native kernels refuse this."""
        begins = self.offsets[:-1].reshape(self.scales.shape[:-1])[chosen].flatten()
        return self.each(lambda array: array[chosen])._replace(offsets=mx.concatenate([begins, self.offsets[-1:]]))


Decode = Callable[[ExactMatrix], mx.array]
"""Makes the weight (..., O, I), bfloat16, with MLX's own operations."""


def tile_ends(matrix: ExactMatrix) -> Iterator[tuple[int, int]]:
    """First row and end of each part of a matrix (O, I) that is decoded at a time: at most TILE weights, or a row."""
    rows, width = matrix.shape
    height = max(1, TILE // width)
    for first in range(0, rows, height):
        yield first, min(first + height, rows)


def tiles(matrix: ExactMatrix) -> Iterator[ExactMatrix]:
    """The parts of a matrix (O, I) that are decoded at a time."""
    return (matrix.rows(*ends) for ends in tile_ends(matrix))


def product_by_tiles(x: mx.array, matrix: ExactMatrix, decode: Decode) -> mx.array:
    """x (..., I) @ W^T of x's type, with MLX's product over one decoded tile after the other."""
    parts: list[mx.array] = []
    for tile in tiles(matrix):
        parts.append(x @ decode(tile.after(parts[-1:])).astype(x.dtype).T)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def decoded_by_tiles(matrix: ExactMatrix, decode: Decode) -> mx.array:
    """The weight (..., O, I), bfloat16, decoded tile after tile: what MLX computes on the way takes 20 times a tile."""
    parts: list[mx.array] = []
    for tile in tiles(matrix.flat):
        parts.append(decode(tile.after(parts[-1:])))
    return mx.concatenate(parts).reshape(matrix.shape)


def exact_product(
    x: mx.array, matrix: ExactMatrix, decode: Decode, bias: mx.array | None = None, chosen: Chosen | None = None
) -> mx.array:
    """x (..., I) @ W^T + bias over exact weights, of x's type. decode: for MLX's kernels. chosen: for `kernel_for`."""
    beside = matrix.low, matrix.high, matrix.offsets
    y = again(x, (*matrix.weights, matrix.scales, *matrix.biases, *beside), bias, chosen)
    if y is not None:
        return y
    kernel = kernel_for(x, chosen)
    if metal.available():
        if kernel in STOCK:
            return add_bias(exact_matmul_tiles(x, *matrix), bias)
        return launched(exact_launch(x, *matrix, bias), bias, chosen)
    if kernel in STOCK:
        return add_bias(product_by_tiles(x, matrix, decode), bias)
    return add_bias(compiled().exact_matvec(x, *matrix).astype(x.dtype), bias)


def exact_experts(
    x: mx.array,
    matrix: ExactMatrix,
    decode: Decode,
    indices: mx.array,
    sorted_indices: bool,
    native: bool,
) -> mx.array:
    """As `exact_product`, for stacked experts (E, O, I); `indices` names an expert for each vector (..., 1, I)."""
    module = cpu_kernels_for_experts(x, indices) if native else None
    if module is not None:
        return module.exact_experts(x, *matrix, indices).astype(x.dtype)
    if indices.size >= matrix.shape[0]:
        weight = decoded(matrix, decode) if native else decoded_by_tiles(matrix, decode)
        return dense_experts_of_mlx(x, weight, indices, sorted_indices)
    chosen = matrix.taken(indices.flatten())
    weight, places = decoded_by_tiles(chosen, decode), mx.arange(indices.size, dtype=mx.uint32)
    return dense_experts_of_mlx(x, weight, places.reshape(indices.shape), sorted_indices)


def decoded(matrix: ExactMatrix, decode: Decode) -> mx.array:
    """The weight (..., O, I), bfloat16, by a native kernel if there is one, else by `decode`."""
    if metal.available():
        return decode_launch(*matrix).run()
    module = cpu_kernels(1)
    return decoded_by_tiles(matrix, decode) if module is None else module.exact_decode(*matrix)
