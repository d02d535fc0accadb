"""Matrices of format `exact`: how they are decoded, and products over them.

A low gear says roughly what a weight is. Its value v picks 2^t neighbouring bfloat16 numbers, and the t low bits of the
weight say which one of them it is. Where v is near zero, neighbours differ too much in size: the rest of the weight's
bits is stored there. `decode` does it with MLX's own operations; native kernels must agree with it bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx

from .bit_planes import PanelPlanes, Planes, unpack_mlx_codes

WINDOW = 144  # neighbours of a 4-bit or 3-bit value: from 144 below its upper 16 bits on, 256 of them
NEAR = 8.8  # steps of an 8-bit value around zero in which its neighbours would not suffice
LOW_BITS = 5  # of a weight that are stored beside an 8-bit value
TILE = 2**20  # weights that are decoded at a time for a product with many vectors


class ExactMatrix(NamedTuple):
    """A matrix (..., O, I) of bfloat16 in the arrays of format `exact`; the fields are the arguments of native kernels.

    weights: codes as `mx.quantize` packs them, one plane of 3 or 4 bits, or two of 4 (`formats/planes.py`).
    scales: (..., O, G) uint16, the bits of bfloat16 numbers, so that no cast changes them. biases: the same per plane.
    low: the low byte of every weight, (..., O, I) uint8; over two planes its 5 low bits, packed, uint32.
    high: (N,) uint8, what is stored beside that of weights near zero, in order. offsets: (rows + 1,) uint32: where the
    bytes of each row begin. widths: bits of each plane. group_size: inputs that share a scale.
    """

    weights: Sequence[mx.array]
    scales: mx.array
    biases: Sequence[mx.array]
    low: mx.array
    high: mx.array
    offsets: mx.array
    widths: Sequence[int]
    group_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., O, I)."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group_size)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All arrays, in the order of the fields."""
        return (*self.weights, self.scales, *self.biases, self.low, self.high, self.offsets)

    @property
    def planes(self) -> Planes:
        """The codes, with the bits of their scales and biases."""
        return Planes(self.weights, self.scales, self.biases, self.widths, self.group_size)

    def each(self, change: Callable[[mx.array], mx.array]) -> "ExactMatrix":
        """The same change to every array that has the rows (..., O) as its first axes; not to `high` and `offsets`."""
        return self._replace(
            weights=[change(codes) for codes in self.weights],
            scales=change(self.scales),
            biases=[change(bias) for bias in self.biases],
            low=change(self.low),
        )

    def by_row(self) -> "ExactMatrix":
        """The same matrix with its rows one after the other."""
        return self

    def in_panels(self, rows: int) -> "ExactMatrix":
        """The same matrix with codes, scales and biases in panels of so many rows (`Planes.in_panels`)."""
        return PanelExactMatrix(*self.with_planes(self.planes.in_panels(rows)))

    def with_planes(self, planes: Planes) -> "ExactMatrix":
        """The same with other codes, scales and biases."""
        return self._replace(weights=planes.weights, scales=planes.scales, biases=planes.biases)

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


class PanelExactMatrix(ExactMatrix):
    """A matrix (O, I) whose codes, scales and biases are those of `PanelPlanes`; the rest is as it was."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.planes.shape

    @property
    def planes(self) -> Planes:
        return PanelPlanes(self.weights, self.scales, self.biases, self.widths, self.group_size)

    def by_row(self) -> ExactMatrix:
        return ExactMatrix(*self.with_planes(self.planes.by_row()))

    def taken(self, chosen: mx.array) -> ExactMatrix:
        planes = self.planes.taken(chosen)
        ends = mx.concatenate([self.offsets[:-1][chosen], self.offsets[-1:]])
        return ExactMatrix(*self.with_planes(planes)._replace(low=self.low[chosen], offsets=ends))


class Prediction(NamedTuple):
    """What the codes say of each weight (..., G, group_size).

    neighbour: the first of its neighbours, uint16. near: whether it is near zero. whole: whether its group is stored
    whole, which is so in groups of two planes that could not be encoded. step: (..., G, 1), of the codes.
    """

    neighbour: mx.array
    near: mx.array
    whole: mx.array
    step: mx.array


def predict(planes: Planes) -> Prediction:
    """What codes say of the weights. planes: with the bits of scales and biases, as in `ExactMatrix`."""
    widths = planes.widths
    codes = joined_codes(planes).reshape(*planes.scales.shape, planes.group_size).astype(mx.float32)
    scale, first, *further = (as_floats(array)[..., None] for array in (planes.scales, *planes.biases))
    if len(widths) == 1:
        value = scale * codes + first
        near = ~(mx.abs(value) > mx.abs(scale) * 0.5)  # true for NaN as well
        return Prediction(upper_bits(value) - WINDOW, near, mx.zeros_like(near), scale)
    step = scale * 2.0 ** -widths[1]
    value = step * codes + (first + further[0] * 2.0 ** -widths[1])
    near = ~(mx.abs(value) >= NEAR * mx.abs(step))
    whole = mx.broadcast_to(planes.scales[..., None] == 0, near.shape)
    return Prediction(upper_bits(value) - 2 ** (LOW_BITS - 1), near & ~whole, whole, step)


def decode(matrix: ExactMatrix) -> mx.array:
    """The weight (..., O, I), bfloat16. The bytes of its rows may be anywhere in `high`."""
    grouped, planes = (*matrix.scales.shape, matrix.group_size), len(matrix.widths)
    found = predict(matrix.planes)
    low = (matrix.low if planes == 1 else unpack_mlx_codes(matrix.low, LOW_BITS)).astype(mx.uint16).reshape(grouped)
    bytes_of = (found.near.astype(mx.uint32) + 2 * found.whole.astype(mx.uint32)).reshape(matrix.shape)
    place = matrix.offsets[:-1].reshape(*matrix.shape[:-1], 1) + mx.cumsum(bytes_of, axis=-1) - bytes_of

    def stored(further: int) -> mx.array:
        at = mx.minimum(place + further, matrix.high.size - 1)
        return matrix.high[at].astype(mx.uint16).reshape(grouped)

    bits = weight_bits(low, stored(0), found, planes)
    if planes > 1:
        bits = mx.where(found.whole, stored(1) << 8 | stored(0), bits)
    return bits.reshape(matrix.shape).view(mx.bfloat16)


def weight_bits(low: mx.array, stored: mx.array, found: Prediction, planes: int) -> mx.array:
    """The bits of weights in groups that are not stored whole, uint16.

    Args:
        low: low bits. stored: the byte beside them, which counts near zero alone.
        planes: of the codes.
    """
    far = found.neighbour + ((low - found.neighbour) & low_mask(planes))
    near = stored << 8 | low if planes == 1 else near_bits(stored, low, found.step)
    return mx.where(found.near, near, far)


def low_mask(planes: int) -> int:
    """The bits of a weight that are stored beside its code."""
    return 255 if planes == 1 else 2**LOW_BITS - 1


def near_bits(byte: mx.array, low: mx.array, step: mx.array) -> mx.array:
    """A weight near zero of two planes: its sign, and how far its magnitude is below that of 16 steps."""
    largest = upper_bits(16 * mx.abs(step))
    below = (byte & 127) << LOW_BITS | ((largest - low) & (2**LOW_BITS - 1))
    return (byte >> 7) << 15 | mx.where(below >= 0xF80, 0, largest - below)


def joined_codes(planes: Planes) -> mx.array:
    """The codes of all planes together, (..., O, I) uint32."""
    codes = [unpack_mlx_codes(words, width) for words, width in zip(planes.weights, planes.widths)]
    return codes[0] if len(codes) == 1 else codes[0] << planes.widths[1] | codes[1]


def as_floats(bits: mx.array) -> mx.array:
    """The float32 numbers of which these uint16 are the upper bits."""
    return bits.view(mx.bfloat16).astype(mx.float32)


def upper_bits(values: mx.array) -> mx.array:
    """The upper 16 bits of float32 numbers, uint16."""
    return (values.view(mx.uint32) >> 16).astype(mx.uint16)


def tile_ends(matrix: ExactMatrix) -> Iterator[tuple[int, int]]:
    """First row and end of each part of a matrix (O, I) that is decoded at a time: at most TILE weights, or a row."""
    rows, width = matrix.shape
    height = max(1, TILE // width)
    for first in range(0, rows, height):
        yield first, min(first + height, rows)


def tiles(matrix: ExactMatrix) -> Iterator[ExactMatrix]:
    """The parts of a matrix (O, I) that are decoded at a time."""
    return (matrix.rows(*ends) for ends in tile_ends(matrix))


def decoded_by_tiles(matrix: ExactMatrix) -> mx.array:
    """The weight (..., O, I), bfloat16, decoded tile after tile: what MLX computes on the way takes 20 times a tile."""
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
