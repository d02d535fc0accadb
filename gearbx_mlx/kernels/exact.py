"""Matrices of format `exact`: decoding, and matmuls over them.

The 4-bit low gear approximates a weight. Its value v selects 256 neighboring bfloat16 numbers. The weight's
low byte then identifies the weight. If v is near zero, neighbors differ too much in size, and the weight's high byte is
stored as well. `decode` uses MLX's operations; native kernels are bit-identical.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx

from .bit_planes import PanelPlanes, Planes, unpack_mlx_codes

CODE_BITS = 4
FIRST_NEIGHBOR = 144  # the first of 256 neighbors is this far below the upper 16 bits of a value
WEIGHTS_DECODED_AT_ONCE = 2**20  # weights decoded at a time for a matmul with many vectors


class ExactMatrix(NamedTuple):
    """A matrix (..., O, I) of bfloat16 in the arrays of format `exact`; the fields are the arguments of native kernels.

    codes: packed as by `mx.quantize`, (..., O, I / 8) uint32. scales, biases: (..., O, G) uint16, the bits of bfloat16
    numbers, so that no cast changes them. low: the low byte of every weight, (..., O, I) uint8. high: (N,) uint8, the
    high bytes of weights near zero, in order. offsets: (rows + 1,) uint32, start of each row's bytes in `high`.
    group_size: number of inputs that share a scale.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array
    low: mx.array
    high: mx.array
    offsets: mx.array
    group_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., O, I)."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group_size)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All arrays, in the order of the fields."""
        return self[:-1]

    @property
    def plane(self) -> Planes:
        """The codes, with the bits of their scales and biases."""
        return Planes([self.codes], self.scales, [self.biases], [CODE_BITS], self.group_size)

    def each(self, change: Callable[[mx.array], mx.array]) -> "ExactMatrix":
        """Return the matrix with a change to every array whose first axes are (..., O): not `high` and `offsets`."""
        codes, scales, biases, low = map(change, (self.codes, self.scales, self.biases, self.low))
        return self._replace(codes=codes, scales=scales, biases=biases, low=low)

    def by_row(self) -> "ExactMatrix":
        """Return the same matrix with consecutive rows."""
        return self

    def in_panels(self, rows: int) -> "ExactMatrix":
        """Return the same matrix with codes, scales and biases in panels of `rows` rows (`Planes.in_panels`)."""
        return PanelExactMatrix(*self.with_plane(self.plane.in_panels(rows)))

    def with_plane(self, plane: Planes) -> "ExactMatrix":
        """Return the matrix with the codes, scales and biases of a plane."""
        return self._replace(codes=plane.weights[0], scales=plane.scales, biases=plane.biases[0])

    def rows(self, first: int, end: int) -> "ExactMatrix":
        """Return the rows from `first` to the one before `end` of a matrix (O, I)."""
        return self.each(lambda array: array[first:end])._replace(offsets=self.offsets[first : end + 1])

    @property
    def flat(self) -> "ExactMatrix":
        """The same matrix as (rows, I), with the rows of experts and heads in sequence."""
        return self.each(lambda array: array.reshape(-1, array.shape[-1]))

    def after(self, computed: list[mx.array]) -> "ExactMatrix":
        """Return the same matrix, whose decoding waits until MLX has computed these arrays."""

        def later(array: mx.array) -> mx.array:
            return mx.depends([array], computed)[0] if computed else array

        return self.each(later)._replace(offsets=later(self.offsets))

    def taken(self, chosen: mx.array) -> "ExactMatrix":
        """Return the rows, or experts, `chosen` (n,). `high` is unchanged, so that native kernels refuse the result."""
        starts = self.offsets[:-1].reshape(self.scales.shape[:-1])[chosen].flatten()
        return self.each(lambda array: array[chosen])._replace(offsets=mx.concatenate([starts, self.offsets[-1:]]))


class PanelExactMatrix(ExactMatrix):
    """A matrix (O, I) with codes, scales and biases in panels, as in `PanelPlanes`."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.plane.shape

    @property
    def plane(self) -> Planes:
        return PanelPlanes(*super().plane)

    def by_row(self) -> ExactMatrix:
        return ExactMatrix(*self.with_plane(self.plane.by_row()))

    def taken(self, chosen: mx.array) -> ExactMatrix:
        ends = mx.concatenate([self.offsets[:-1][chosen], self.offsets[-1:]])
        return ExactMatrix(*self.with_plane(self.plane.taken(chosen))._replace(low=self.low[chosen], offsets=ends))


class Prediction(NamedTuple):
    """A prediction of each weight (..., G, group_size) from its code.

    neighbor: the first of its neighbors, uint16. near: whether it is near zero.
    """

    neighbor: mx.array
    near: mx.array


def predict(plane: Planes) -> Prediction:
    """Return the prediction of weights from codes. plane: with the bits of scales and biases, as in `ExactMatrix`."""
    grouped = (*plane.scales.shape, plane.group_size)
    codes = unpack_mlx_codes(plane.weights[0], CODE_BITS).reshape(grouped).astype(mx.float32)
    scale, bias = (as_floats(array)[..., None] for array in (plane.scales, plane.biases[0]))
    value = scale * codes + bias
    near = ~(mx.abs(value) > mx.abs(scale) * 0.5)  # true for NaN as well
    upper = (value.view(mx.uint32) >> 16).astype(mx.uint16)  # bits
    return Prediction(upper - FIRST_NEIGHBOR, near)


def decode(matrix: ExactMatrix) -> mx.array:
    """Return the weight (..., O, I), bfloat16. The bytes of a row may have any position in `high`."""
    found = predict(matrix.plane)
    low = matrix.low.astype(mx.uint16).reshape(found.near.shape)
    bytes_of = found.near.astype(mx.uint32).reshape(matrix.shape)
    place = matrix.offsets[:-1].reshape(*matrix.shape[:-1], 1) + mx.cumsum(bytes_of, axis=-1) - bytes_of
    high = matrix.high[mx.minimum(place, matrix.high.size - 1)].astype(mx.uint16).reshape(found.near.shape)
    return weight_bits(low, high, found).reshape(matrix.shape).view(mx.bfloat16)


def weight_bits(low: mx.array, high: mx.array, found: Prediction) -> mx.array:
    """Return the bits of weights, uint16.

    Args:
        low: their low bytes. high: their high bytes, used only near zero.
    """
    far = found.neighbor + ((low - found.neighbor) & 255)
    return mx.where(found.near, high << 8 | low, far)


def as_floats(bits: mx.array) -> mx.array:
    """Return the float32 numbers with these uint16 as upper bits."""
    return bits.view(mx.bfloat16).astype(mx.float32)


def tile_ends(matrix: ExactMatrix, at_once: int = 0) -> Iterator[tuple[int, int]]:
    """Yield first row and end of each tile of a matrix (O, I): a row, or at most `at_once` weights; 0: the default."""
    rows, width = matrix.shape
    height = max(1, (at_once or WEIGHTS_DECODED_AT_ONCE) // width)
    for first in range(0, rows, height):
        yield first, min(first + height, rows)


def by_tiles(matrix: ExactMatrix, compute: Callable[[ExactMatrix], mx.array], at_once: int = 0) -> list[mx.array]:
    """Return results for each tile of a matrix (O, I); each waits for the previous one, since MLX might decode all."""
    parts: list[mx.array] = []
    for ends in tile_ends(matrix, at_once):
        parts.append(compute(matrix.rows(*ends).after(parts[-1:])))
    return parts


def decoded_by_tiles(matrix: ExactMatrix) -> mx.array:
    """Return the weight (..., O, I), bfloat16, decoded tile by tile, since MLX's temporaries take 20 times a tile."""
    return mx.concatenate(by_tiles(matrix.by_row().flat, decode)).reshape(matrix.shape)


def product_by_tiles(
    x: mx.array, matrix: ExactMatrix, decode: Callable[[ExactMatrix], mx.array] = decode, at_once: int = 0
) -> mx.array:
    """Return x (..., I) @ W^T of x's type, by MLX's matmul over one decoded tile at a time."""
    parts = by_tiles(matrix.by_row(), lambda tile: (x @ decode(tile).T).astype(x.dtype), at_once)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
