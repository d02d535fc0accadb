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
from ..kernels.dispatch import cpu_kernels
from ..kernels.exact import ExactMatrix, decoded
from .exact_decoding import LOW_BITS, Prediction, decode, joined_codes, low_mask, predict, upper_bits, weight_bits
from .packing import pack_mlx_codes
from .planes import split

Arrays = list[mx.array]

RANGES = {3: (0.9, 0.8), 4: ()}  # bits to parts of a group's range that are tried beside all of it
FARTHEST = 1.7  # times a code's value: neighbours reach to 1.8
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
    planes, scales, biases = quantize(weight, widths, group_size)
    values = mx.contiguous(weight).view(mx.uint16)
    mx.eval(values, planes, scales, biases)
    how = values, planes, scales, biases, list(widths), group_size
    kernels = cpu_kernels(1)
    kept, low, high, offsets = kernels.exact_encode(*how) if kernels else beside(*how)
    if not kept.all().item():
        planes, biases = ([without(array, kept) for array in arrays] for arrays in (planes, biases))
        scales = without(scales, kept)
    matrix = ExactMatrix(planes, scales, biases, low, high, offsets, list(widths), group_size)
    if not mx.array_equal(decoded(matrix, decode).view(mx.uint16), values).item():
        raise GearbxError("a weight does not come back from format exact; please report this, and use another format")
    return matrix


def quantize(weight: mx.array, widths: tuple[int, ...], group_size: int) -> tuple[Arrays, mx.array, Arrays]:
    """Packed codes of each plane; scales and, for each plane, biases (O, G) as the bits of bfloat16 numbers."""
    if len(widths) == 1:
        words, scales, bias = fitted(weight, widths[0], group_size)
        return [words], scales.view(mx.uint16), [bias.view(mx.uint16)]
    made = split(weight, widths, group_size)
    return made.weights, made.scales.view(mx.uint16), [bias.view(mx.uint16) for bias in made.biases]


def fitted(weight: mx.array, bits: int, group_size: int) -> tuple[mx.array, mx.array, mx.array]:
    """As `mx.quantize`, with the range of each group that leaves the smallest squared error.

    A code of 3 bits says more of the many small weights if the few largest are cut off. What is cut off must still be
    a neighbour of the code's value: the sum of squares is kept, and the weights come back all the same.
    """
    grouped = weight.astype(mx.float32).reshape(len(weight), -1, group_size)
    low, high = grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True)
    words, scales, biases = mx.quantize(weight, group_size, bits)
    best = squared_error(grouped, (words, scales, biases), bits)
    for part in RANGES[bits]:
        cut = mx.clip(grouped, part * low, part * high).reshape(weight.shape).astype(weight.dtype)
        made = mx.quantize(cut, group_size, bits)
        error = squared_error(grouped, made, bits)
        better = error < best  # false for NaN
        words, scales, biases = (
            mx.where(better[..., None], new.reshape(*better.shape, -1), old.reshape(*better.shape, -1)).reshape(
                old.shape
            )
            for new, old in zip(made, (words, scales, biases))
        )
        best = mx.where(better, error, best)
        mx.eval(words, scales, biases, best)
    return words, scales, biases


def squared_error(grouped: mx.array, made: Sequence[mx.array], bits: int) -> mx.array:
    """Of weights (O, G, group_size) as codes, (O, G); infinite where one is no neighbour of its code's value."""
    words, scales, biases = made
    group_size = grouped.shape[-1]
    values = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), group_size, bits)
    values = values.reshape(grouped.shape)
    counts = mx.abs(values) > mx.abs(scales.astype(mx.float32))[..., None] * 0.5
    far = (counts & (mx.abs(grouped) > FARTHEST * mx.abs(values))).any(-1)
    return mx.where(far, mx.inf, ((grouped - values) ** 2).sum(-1))


def without(array: mx.array, kept: mx.array) -> mx.array:
    """An array (O, ...) with zeros in the groups that are not kept. kept: (O, G)."""
    groups = array.reshape(*kept.shape, -1)
    return mx.where(kept[..., None], groups, mx.zeros_like(groups)).reshape(array.shape)


def beside(
    values: mx.array, planes: Arrays, scales: mx.array, biases: Arrays, widths: list[int], group_size: int
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """What is stored beside the codes: as the native `exact_encode`, with MLX's own operations.

    Args:
        values: (O, I), the bits of the weights.

    Returns:
        kept (O, G): whether a group comes back from its codes; low, high and offsets of an `ExactMatrix`, for which a
        group that is not kept has codes, scale and biases of 0.
    """
    codes = joined_codes(planes, widths).reshape(*scales.shape, group_size)
    bits = values.reshape(codes.shape)
    low = bits & low_mask(len(widths))
    found = predict(codes, scales[..., None], [bias[..., None] for bias in biases], widths)
    stored = stored_byte(bits, found, len(widths))
    bounded = mx.isfinite(found.step[..., 0] * (2 ** sum(widths) - 1))  # else a fused product would differ
    usable = mx.stack([bounded, *map(finite, [scales, *biases])]).all(0)
    come_back = (~found.whole & (weight_bits(low, stored, found, len(widths)) == bits)).all(-1)
    kept = usable & come_back
    whole = ~kept[..., None] if len(widths) > 1 else mx.array(False)
    near = (found.near & kept[..., None]) if len(widths) > 1 else found.near | ~kept[..., None]
    counts = (near + 2 * mx.broadcast_to(whole, near.shape)).reshape(len(values), -1).sum(-1)
    offsets = mx.concatenate([mx.zeros(1, mx.uint32), counts.cumsum().astype(mx.uint32)])
    high = in_order(bits, stored, np.array(near), np.array(mx.broadcast_to(whole, near.shape)))
    low = low.reshape(values.shape)
    low = low.astype(mx.uint8) if len(widths) == 1 else pack_mlx_codes(low, LOW_BITS)
    return kept, low, mx.array(high), offsets


def stored_byte(bits: mx.array, found: Prediction, planes: int) -> mx.array:
    """The byte that is stored beside the low bits of a weight near zero, for every weight; uint16."""
    if planes == 1:
        return bits >> 8
    magnitude = bits & 0x7FFF
    below = (upper_bits(16 * mx.abs(found.step)) - magnitude) & 0xFFF
    return (bits >> 15) << 7 | mx.where(magnitude == 0, 127, below >> LOW_BITS)


def finite(halves: mx.array) -> mx.array:
    """Which of the bfloat16 numbers with these bits are finite."""
    return (halves & 0x7F80) != 0x7F80


def in_order(bits: mx.array, stored: mx.array, near: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """All bytes that are stored beside low bits, row after row; at least one, since a file has no empty arrays."""
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
