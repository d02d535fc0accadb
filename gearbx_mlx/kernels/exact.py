"""Matrices of format `exact`: how they are decoded, and products over them.

The low gear, of 4 bits, says roughly what a weight is. Its value v picks 256 neighbouring bfloat16 numbers, and the low
byte of the weight says which one of them it is. Where v is near zero, neighbours differ too much in size: the weight's
high byte is stored there. `decode` does it with MLX's own operations; native kernels must agree with it bit for bit.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx

from .bit_planes import PanelPlanes, Planes, unpack_mlx_codes

CODE_BITS = 4
FIRST_NEIGHBOUR = 144  # neighbours of a value: from 144 below its upper 16 bits on, 256 of them
WEIGHTS_DECODED_AT_ONCE = 2**20  # weights that are decoded at a time for a product with many vectors


class ExactMatrix(NamedTuple):
    """A matrix (..., O, I) of bfloat16 in the arrays of format `exact`; the fields are the arguments of native kernels.

    codes: as `mx.quantize` packs them, (..., O, I / 8) uint32. scales, biases: (..., O, G) uint16, the bits of bfloat16
    numbers, so that no cast changes them. low: the low byte of every weight, (..., O, I) uint8. high: (N,) uint8, the
    high bytes of weights near zero, in order. offsets: (rows + 1,) uint32: where the bytes of each row begin.
    group_size: inputs that share a scale.
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
        """Return the same change to every array that has the rows (..., O) as its first axes; not to `high` and
        `offsets`."""
        codes, scales, biases, low = map(change, (self.codes, self.scales, self.biases, self.low))
        return self._replace(codes=codes, scales=scales, biases=biases, low=low)

    def by_row(self) -> "ExactMatrix":
        """Return the same matrix with its rows one after the other."""
        return self

    def in_panels(self, rows: int) -> "ExactMatrix":
        """Return the same matrix with codes, scales and biases in panels of so many rows (`Planes.in_panels`)."""
        return PanelExactMatrix(*self.with_plane(self.plane.in_panels(rows)))

    def with_plane(self, plane: Planes) -> "ExactMatrix":
        """Return the same with other codes, scales and biases."""
        return self._replace(codes=plane.weights[0], scales=plane.scales, biases=plane.biases[0])

    def rows(self, first: int, end: int) -> "ExactMatrix":
        """Return the rows from `first` to the one before `end` of a matrix (O, I)."""
        return self.each(lambda array: array[first:end])._replace(offsets=self.offsets[first : end + 1])

    @property
    def flat(self) -> "ExactMatrix":
        """The same as a matrix (rows, I): the matrices of experts and heads one after the other."""
        return self.each(lambda array: array.reshape(-1, array.shape[-1]))

    def after(self, computed: list[mx.array]) -> "ExactMatrix":
        """Return the same matrix, which MLX begins to decode when these arrays are computed."""

        def later(array: mx.array) -> mx.array:
            return mx.depends([array], computed)[0] if computed else array

        return self.each(later)._replace(offsets=later(self.offsets))

    def taken(self, chosen: mx.array) -> "ExactMatrix":
        """Return the rows, or experts, `chosen` (n,). Their bytes are where they were, so that native kernels refuse
        this."""
        begins = self.offsets[:-1].reshape(self.scales.shape[:-1])[chosen].flatten()
        return self.each(lambda array: array[chosen])._replace(offsets=mx.concatenate([begins, self.offsets[-1:]]))


class PanelExactMatrix(ExactMatrix):
    """A matrix (O, I) whose codes, scales and biases are those of `PanelPlanes`; the rest is as it was."""

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
    """What the codes say of each weight (..., G, group_size).

    neighbour: the first of its neighbours, uint16. near: whether it is near zero.
    """

    neighbour: mx.array
    near: mx.array


def predict(plane: Planes) -> Prediction:
    """Return what codes say of the weights. plane: with the bits of scales and biases, as in `ExactMatrix`."""
    grouped = (*plane.scales.shape, plane.group_size)
    codes = unpack_mlx_codes(plane.weights[0], CODE_BITS).reshape(grouped).astype(mx.float32)
    scale, bias = (as_floats(array)[..., None] for array in (plane.scales, plane.biases[0]))
    value = scale * codes + bias
    near = ~(mx.abs(value) > mx.abs(scale) * 0.5)  # true for NaN as well
    return Prediction(upper_bits(value) - FIRST_NEIGHBOUR, near)


def decode(matrix: ExactMatrix) -> mx.array:
    """Return the weight (..., O, I), bfloat16. The bytes of its rows may be anywhere in `high`."""
    found = predict(matrix.plane)
    low = matrix.low.astype(mx.uint16).reshape(found.near.shape)
    bytes_of = found.near.astype(mx.uint32).reshape(matrix.shape)
    place = matrix.offsets[:-1].reshape(*matrix.shape[:-1], 1) + mx.cumsum(bytes_of, axis=-1) - bytes_of
    high = matrix.high[mx.minimum(place, matrix.high.size - 1)].astype(mx.uint16).reshape(found.near.shape)
    return weight_bits(low, high, found).reshape(matrix.shape).view(mx.bfloat16)


def weight_bits(low: mx.array, high: mx.array, found: Prediction) -> mx.array:
    """Return the bits of weights, uint16.

    Args:
        low: their low bytes. high: their high bytes, which count near zero alone.
    """
    far = found.neighbour + ((low - found.neighbour) & 255)
    return mx.where(found.near, high << 8 | low, far)


def as_floats(bits: mx.array) -> mx.array:
    """Return the float32 numbers of which these uint16 are the upper bits."""
    return bits.view(mx.bfloat16).astype(mx.float32)


def upper_bits(values: mx.array) -> mx.array:
    """Return the upper 16 bits of float32 numbers, uint16."""
    return (values.view(mx.uint32) >> 16).astype(mx.uint16)


def tile_ends(matrix: ExactMatrix) -> Iterator[tuple[int, int]]:
    """First row and end of each part of a matrix (O, I) that is decoded at a time: at most TILE weights, or a row."""
    rows, width = matrix.shape
    height = max(1, WEIGHTS_DECODED_AT_ONCE // width)
    for first in range(0, rows, height):
        yield first, min(first + height, rows)


def tiles(matrix: ExactMatrix) -> Iterator[ExactMatrix]:
    """Yield the parts of a matrix (O, I) that are decoded at a time."""
    return (matrix.rows(*ends) for ends in tile_ends(matrix))


def decoded_by_tiles(matrix: ExactMatrix) -> mx.array:
    """Return the weight (..., O, I), bfloat16, decoded tile after tile: what MLX computes on the way takes 20 times a
    tile."""
    parts: list[mx.array] = []
    for tile in tiles(matrix.by_row().flat):
        parts.append(decode(tile.after(parts[-1:])))
    return mx.concatenate(parts).reshape(matrix.shape)


def product_by_tiles(x: mx.array, matrix: ExactMatrix) -> mx.array:
    """x (..., I) @ W^T of x's type, with MLX's product over one decoded tile after the other."""
    parts: list[mx.array] = []
    for tile in tiles(matrix.by_row()):
        parts.append(x @ decode(tile.after(parts[-1:])).astype(x.dtype).T)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
