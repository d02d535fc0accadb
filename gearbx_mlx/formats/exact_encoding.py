"""Exact weights: from a bfloat16 matrix to its low gear and what is beside it.

The encoder proves itself: it decodes every group, and stores one that does not come back in another way. The window of
neighbours was found by trying, and not by a proof; groups with NaN or infinities have no scale.
"""

import itertools
import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import GearbxError
from ..kernels.exact import ExactMatrix
from .exact_decoding import LOW_BITS, Prediction, decode, joined_codes, near_bits, predict, upper_bits
from .packing import pack_mlx_codes
from .planes import split

BLOCK = 2**22  # weights that are encoded at a time: the temporary memory is several times their size


def encode(weight: mx.array, widths: Sequence[int], group_size: int) -> ExactMatrix:
    """A matrix (..., O, I) of bfloat16 in format `exact`.

    Args:
        weight: any bit patterns. I is a multiple of group_size.
        widths: bits of the planes of codes: one of 3 or 4, or two of 4.
        group_size: 32, 64 or 128.
    """
    rows = weight.reshape(-1, weight.shape[-1])
    count = max(1, min(len(rows), math.ceil(rows.size / BLOCK)))
    cuts = [len(rows) * i // count for i in range(count + 1)]
    parts = [encode_block(rows[first:end], tuple(widths), group_size) for first, end in itertools.pairwise(cuts)]
    return join(parts, weight.shape[:-1])


def encode_block(weight: mx.array, widths: tuple[int, ...], group_size: int) -> ExactMatrix:
    """`encode` for rows (O, I) that are not too many to be encoded at once; evaluated."""
    codes, scales, biases = quantize(weight, widths, group_size)
    bits = weight.view(mx.uint16).reshape(codes.shape)
    low = bits & (255 if len(widths) == 1 else 2**LOW_BITS - 1)
    found = predict(codes, scales[..., None], [bias[..., None] for bias in biases], list(widths))
    stored = beside(bits, found, len(widths))
    returns = come_back(bits, low, stored, found, len(widths)) & mx.stack(list(map(finite, [scales, *biases]))).all(0)
    if not returns.all().item():
        codes, scales, *biases = (blank(array, returns) for array in (codes, scales, *biases))
        found = predict(codes, scales[..., None], [bias[..., None] for bias in biases], list(widths))
    taken = found.near.astype(mx.uint32) + 2 * found.whole.astype(mx.uint32)
    ends = taken.reshape(len(weight), -1).sum(-1).cumsum()
    low = low.reshape(weight.shape)
    matrix = ExactMatrix(
        packed(codes.reshape(weight.shape), widths),
        scales,
        biases,
        low.astype(mx.uint8) if len(widths) == 1 else pack_mlx_codes(low, LOW_BITS),
        mx.array(in_order(bits, stored, found)),
        mx.concatenate([mx.zeros(1, mx.uint32), ends.astype(mx.uint32)]),
        list(widths),
        group_size,
    )
    mx.eval(*matrix[:-2])
    if not mx.array_equal(decode(matrix).view(mx.uint16), weight.view(mx.uint16)).item():
        raise GearbxError("a weight does not come back from format exact; please report this, and use another format")
    return matrix


def quantize(weight: mx.array, widths: tuple[int, ...], group_size: int) -> tuple[mx.array, mx.array, list[mx.array]]:
    """Codes (O, G, group_size) of all planes together; scales and biases (O, G) as the bits of bfloat16 numbers."""
    if len(widths) == 1:
        words, scales, bias = mx.quantize(weight, group_size, widths[0])
        planes, biases = [words], [bias]
    else:
        made = split(weight, widths, group_size)
        planes, scales, biases = made.weights, made.scales, made.biases
    halves = [bias.view(mx.uint16) for bias in biases]
    unread = scales.view(mx.uint16)
    # The other fields are not needed to join codes.
    codes = joined_codes(ExactMatrix(planes, unread, halves, EMPTY, EMPTY, EMPTY, list(widths), group_size))
    return codes.reshape(*scales.shape, group_size), unread, halves


EMPTY = mx.zeros((0,), mx.uint8)


def beside(bits: mx.array, found: Prediction, planes: int) -> mx.array:
    """The byte that is stored beside the low bits of a weight near zero, for every weight; uint16."""
    if planes == 1:
        return bits >> 8
    magnitude = bits & 0x7FFF
    below = (upper_bits(16 * mx.abs(found.step)) - magnitude) & 0xFFF
    return (bits >> 15) << 7 | mx.where(magnitude == 0, 127, below >> LOW_BITS)


def come_back(bits: mx.array, low: mx.array, stored: mx.array, found: Prediction, planes: int) -> mx.array:
    """Whether all weights of each group come back, (O, G)."""
    mask = 255 if planes == 1 else 2**LOW_BITS - 1
    far = found.neighbour + ((low - found.neighbour) & mask)
    near = stored << 8 | low if planes == 1 else near_bits(stored, low, found.step)
    return (mx.where(found.near, near, far) == bits).all(-1)


def finite(halves: mx.array) -> mx.array:
    """Which of the bfloat16 numbers with these bits are finite."""
    return (halves & 0x7F80) != 0x7F80


def blank(array: mx.array, kept: mx.array) -> mx.array:
    """The array (O, G, ...) with zeros in the groups that are not kept."""
    return mx.where(kept.reshape(*kept.shape, *(1,) * (array.ndim - 2)), array, mx.zeros_like(array))


def packed(codes: mx.array, widths: tuple[int, ...]) -> list[mx.array]:
    """The planes of codes (O, I)."""
    if len(widths) == 1:
        return [pack_mlx_codes(codes, widths[0])]
    return [pack_mlx_codes(codes >> widths[1], widths[0]), pack_mlx_codes(codes & (2 ** widths[1] - 1), widths[1])]


def in_order(bits: mx.array, stored: mx.array, found: Prediction) -> np.ndarray:
    """All bytes that are stored beside low bits, row after row; at least one, since a file has no empty arrays."""
    near = np.array(found.near)
    if not found.whole.any().item():
        chosen = np.array(stored.astype(mx.uint8))[near]
    else:
        whole = np.array(found.whole)
        halves = np.array(mx.stack([bits & 255, bits >> 8], axis=-1).astype(mx.uint8))
        halves[..., 0] = np.where(whole, halves[..., 0], np.array(stored.astype(mx.uint8)))
        chosen = halves[np.stack([near | whole, whole], axis=-1)]
    return chosen if len(chosen) else np.zeros(1, np.uint8)


def join(parts: Sequence[ExactMatrix], rows: tuple[int, ...]) -> ExactMatrix:
    """The matrix (*rows, I) from those of its blocks of rows."""

    def whole(arrays: Sequence[mx.array]) -> mx.array:
        made = arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays))
        return made.reshape(*rows, -1)

    begins, offsets, high = 0, [mx.zeros(1, mx.uint32)], []
    for part in parts:
        offsets.append(part.offsets[1:] + begins)
        count = np.array(part.offsets)[-1].item()
        begins += count
        high.append(part.high[:count])
    first = parts[0]
    made = first._replace(
        weights=[whole(planes) for planes in zip(*(part.weights for part in parts))],
        scales=whole([part.scales for part in parts]),
        biases=[whole(biases) for biases in zip(*(part.biases for part in parts))],
        low=whole([part.low for part in parts]),
        high=mx.concatenate(high) if begins else first.high,
        offsets=mx.concatenate(offsets),
    )
    mx.eval(*made[:-2])
    return made
