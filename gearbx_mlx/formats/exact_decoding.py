"""Exact weights: bfloat16 matrices bit for bit, decoded from the codes of their low gear with MLX's own operations.

A low gear says roughly what a weight is. Its value v picks 2^t neighbouring bfloat16 numbers, and the t low bits of the
weight say which one of them it is. Where v is near zero, neighbours differ too much in size: the rest of the weight's
bits is stored there. Native kernels must agree with these functions bit for bit.
"""

from typing import NamedTuple

import mlx.core as mx

from ..kernels.exact import ExactMatrix
from .packing import unpack_mlx_codes

WINDOW = 144  # neighbours of a 4-bit or 3-bit value: from 144 below its upper 16 bits on, 256 of them
NEAR = 8.8  # steps of an 8-bit value around zero in which its neighbours would not suffice
LOW_BITS = 5  # of a weight that are stored beside an 8-bit value


class Prediction(NamedTuple):
    """What the codes say of each weight (..., G, group_size).

    neighbour: the first of its neighbours, uint16. near: whether it is near zero. whole: whether its group is stored
    whole, which is so in groups of two planes that could not be encoded. step: (..., G, 1), of the codes.
    """

    neighbour: mx.array
    near: mx.array
    whole: mx.array
    step: mx.array


def predict(codes: mx.array, scales: mx.array, biases: list[mx.array], widths: list[int]) -> Prediction:
    """What codes say of the weights.

    Args:
        codes: (..., G, group_size), of all planes together.
        scales, biases, widths: as in `ExactMatrix`, with one axis more at the end.
    """
    scale, first = as_floats(scales), as_floats(biases[0])
    if len(widths) == 1:
        value = scale * codes.astype(mx.float32) + first
        near = ~(mx.abs(value) > mx.abs(scale) * 0.5)  # true for NaN as well
        return Prediction(upper_bits(value) - WINDOW, near, mx.zeros_like(near), scale)
    step = scale * 2.0 ** -widths[1]
    value = step * codes.astype(mx.float32) + (first + as_floats(biases[1]) * 2.0 ** -widths[1])
    near = ~(mx.abs(value) >= NEAR * mx.abs(step))
    whole = mx.broadcast_to(scales == 0, near.shape)
    return Prediction(upper_bits(value) - 2 ** (LOW_BITS - 1), near & ~whole, whole, step)


def decode(matrix: ExactMatrix) -> mx.array:
    """The weight (..., O, I), bfloat16. The bytes of its rows may be anywhere in `high`."""
    grouped = (*matrix.scales.shape, matrix.group_size)
    found = predict(
        joined_codes(matrix.weights, matrix.widths).reshape(grouped),
        matrix.scales[..., None],
        [bias[..., None] for bias in matrix.biases],
        matrix.widths,
    )
    low = low_bits(matrix).reshape(grouped)
    bytes_of = (found.near.astype(mx.uint32) + 2 * found.whole.astype(mx.uint32)).reshape(matrix.shape)
    place = matrix.offsets[:-1].reshape(*matrix.shape[:-1], 1) + mx.cumsum(bytes_of, axis=-1) - bytes_of

    def stored(further: int) -> mx.array:
        at = mx.minimum(place + further, matrix.high.size - 1)
        return matrix.high[at].astype(mx.uint16).reshape(grouped)

    bits = weight_bits(low, stored(0), found, len(matrix.widths))
    if len(matrix.widths) > 1:
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


def joined_codes(weights: list[mx.array], widths: list[int]) -> mx.array:
    """The codes of all planes together, (..., O, I) uint32."""
    codes = [unpack_mlx_codes(words, width) for words, width in zip(weights, widths)]
    return codes[0] if len(codes) == 1 else codes[0] << widths[1] | codes[1]


def low_bits(matrix: ExactMatrix) -> mx.array:
    """The low bits of every weight, (..., O, I) uint16."""
    return (matrix.low if len(matrix.widths) == 1 else unpack_mlx_codes(matrix.low, LOW_BITS)).astype(mx.uint16)


def as_floats(bits: mx.array) -> mx.array:
    """The float32 numbers of which these uint16 are the upper bits."""
    return bits.view(mx.bfloat16).astype(mx.float32)


def upper_bits(values: mx.array) -> mx.array:
    """The upper 16 bits of float32 numbers, uint16."""
    return (values.view(mx.uint32) >> 16).astype(mx.uint16)
