"""Nested bit planes: one matrix of codes, split so that each gear is a prefix of the next one.

An affine code q of R bits means the weight step * q + offset. Its first w0 bits are the first plane: a coarser affine
code with scale S = step * 2^(R - w0) and a bias B in the middle of the range that the other bits select from. A further
plane p of width w adds (S * p - S (2^w - 1) / 2) * 2^-shift: the same scale, a bias of its own, and a power of two.

So every plane is an ordinary affine weight of MLX. Gears of 4 and 8 bits together take 8 bits per weight, and three
half-precision numbers per group: one scale and two biases. A shift copies nothing.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..errors import GearbxError
from ..kernels.reference import plane_shifts
from .packing import pack_mlx_codes, unpack_mlx_codes

# The smallest scale: groups of equal weights have no range.
SCALE_FLOOR = {mx.float16: 2.0**-24, mx.bfloat16: 2.0**-100, mx.float32: 2.0**-100}

BLOCK = 2**23  # weights that are split at a time: the temporary memory is several times their size


@dataclass(frozen=True)
class Planes:
    """One weight matrix (..., O, I) as bit planes.

    weights: per plane, (..., O, I * width / 32) uint32. scales: (..., O, I / group_size), of the first plane.
    biases: per plane, the same shape. widths: bits of each plane, most significant first.
    """

    weights: list[mx.array]
    scales: mx.array
    biases: list[mx.array]
    widths: tuple[int, ...]
    group_size: int

    def prefix(self, bits: int) -> int:
        """The number of planes that the gear with `bits` reads."""
        return list(itertools.accumulate(self.widths)).index(bits) + 1

    def dequantize(self, bits: int) -> mx.array:
        """The weights (..., O, I) float32 of the gear with `bits`."""
        count = self.prefix(bits)
        grouped = (*self.scales.shape, self.group_size)
        total = mx.zeros(grouped)
        for words, bias, width, shift in zip(
            self.weights[:count], self.biases, self.widths, plane_shifts(self.widths[:count])
        ):
            codes = unpack_mlx_codes(words, width).reshape(grouped).astype(mx.float32)
            scale = self.scales.astype(mx.float32)[..., None]
            total = total + (scale * codes + bias.astype(mx.float32)[..., None]) * 2.0**-shift
        return total.reshape(*self.scales.shape[:-1], -1)


def plane_widths(ladder: Sequence[int]) -> tuple[int, ...]:
    """The widths of the planes for a ladder: gears of 4, 5, 6 and 8 bits need planes of 4, 1, 1 and 2 bits."""
    return (ladder[0], *(high - low for low, high in itertools.pairwise(ladder)))


def split(weight: mx.array, widths: Sequence[int], group_size: int, dtype: mx.Dtype | None = None) -> Planes:
    """Quantize a matrix (..., O, I) into planes.

    Scale and bias of the first plane are rounded to the weight's own type before codes are fitted to them. So the low
    gear is as good as MLX's own quantization, and the top gear loses nothing to the rounding.

    Args:
        weight: floating; I is a multiple of group_size.
        widths: bits of each plane, most significant first, 8 at most together.
        group_size: 32, 64 or 128.
        dtype: of scales and biases; the weight's own type if not given.

    Raises:
        GearbxError: the widths add up to more than 8 bits.
    """
    bits = sum(widths)
    if bits > 8:
        raise GearbxError(f"planes of {'+'.join(map(str, widths))} bits are more than 8 together")
    blocks = min(weight.shape[-2], math.ceil(weight.size / BLOCK))
    if blocks < 2:
        return _split(weight, widths, group_size, dtype or weight.dtype)
    parts = []
    for rows in mx.split(weight, [weight.shape[-2] * i // blocks for i in range(1, blocks)], axis=-2):
        parts.append(_split(rows, widths, group_size, dtype or weight.dtype))
        mx.eval(parts[-1].weights, parts[-1].scales, parts[-1].biases)
    return join(parts)


def _split(weight: mx.array, widths: Sequence[int], group_size: int, dtype: mx.Dtype) -> Planes:
    """`split` for rows that are not too many to be split at once."""
    bits, rest, own = sum(widths), sum(widths[1:]), weight.dtype
    w = weight.astype(mx.float32).reshape(*weight.shape[:-1], -1, group_size)
    scale, first = fit(w, widths, own)
    step = scale * 2.0**-rest
    others = {
        width: rounded(-scale * (2**width - 1) / 2, own) for width in widths[1:]
    }  # planes of one width share a bias
    offset = first
    for width, shift in zip(widths[1:], plane_shifts(widths)[1:]):
        offset = offset + others[width] * 2.0**-shift

    q = mx.clip(mx.round((w - offset[..., None]) / step[..., None]), 0, 2**bits - 1)
    q = q.astype(mx.uint32).reshape(weight.shape)
    weights, unread = [], bits
    for width in widths:
        unread -= width
        weights.append(pack_mlx_codes((q >> unread) & (2**width - 1), width))
    stored = {width: bias.astype(dtype) for width, bias in others.items()}
    biases = [first.astype(dtype), *(stored[width] for width in widths[1:])]
    return Planes(weights, scale.astype(dtype), biases, tuple(widths), group_size)


def fit(grouped: mx.array, widths: Sequence[int], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Scale and bias of the first plane for groups of numbers (..., groups, G) float32, rounded to a type.

    Returns:
        Two arrays (..., groups) float32.
    """
    bits, rest = sum(widths), sum(widths[1:])
    low, high = grouped.min(axis=-1), grouped.max(axis=-1)
    scale = rounded(mx.maximum((high - low) / (2**bits - 1) * 2**rest, SCALE_FLOOR[dtype]), dtype)
    return scale, rounded(low + scale * 2.0**-rest * (2**rest - 1) / 2, dtype)


def rounded(values: mx.array, dtype: mx.Dtype) -> mx.array:
    """The nearest numbers of a type, float32."""
    return values.astype(dtype).astype(mx.float32)


def join(parts: Sequence[Planes]) -> Planes:
    """Join the planes of blocks of rows to those of the whole matrix; planes that shared a bias still do."""
    first = parts[0]

    def whole(arrays: Sequence[mx.array]) -> mx.array:
        return mx.concatenate(list(arrays), axis=-2)

    biases = {id(bias): whole([part.biases[i] for part in parts]) for i, bias in enumerate(first.biases)}
    return Planes(
        [whole(weights) for weights in zip(*(part.weights for part in parts))],
        whole([part.scales for part in parts]),
        [biases[id(bias)] for bias in first.biases],
        first.widths,
        first.group_size,
    )
