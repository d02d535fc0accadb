"""Bit planes as arrays: how their codes are packed, and products over them with MLX's own kernels.

A plane is an ordinary affine weight of MLX: its codes are a little-endian stream of bits, 32 codes in `bits` words. A
stack of r planes takes r calls. A native kernel reads all planes in one pass; its results must agree with these.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

CODES = 32

# The smallest scale: groups of equal weights have no range.
SCALE_FLOOR = {mx.float16: 2.0**-24, mx.bfloat16: 2.0**-100, mx.float32: 2.0**-100}


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


def pack_mlx_codes(codes: mx.array, bits: int) -> mx.array:
    """Unsigned codes (..., n), below 2^bits, packed into (..., n * bits / 32) uint32; n is a multiple of 32."""
    groups = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, CODES)
    words: list[mx.array | None] = [None] * bits

    def put(index: int, value: mx.array) -> None:
        word = words[index]
        words[index] = value if word is None else word | value

    for i in range(CODES):
        index, shift = divmod(i * bits, 32)
        put(index, groups[..., i] << shift)
        if shift + bits > 32:  # the code spans two words
            put(index + 1, groups[..., i] >> (32 - shift))
    return mx.stack([w for w in words if w is not None], axis=-1).reshape(*codes.shape[:-1], -1)


def unpack_mlx_codes(words: mx.array, bits: int) -> mx.array:
    """The inverse of `pack_mlx_codes`: (..., n * bits / 32) uint32 to (..., n) uint32 codes."""
    groups = words.reshape(*words.shape[:-1], -1, bits)
    mask = (1 << bits) - 1
    codes = []
    for i in range(CODES):
        index, shift = divmod(i * bits, 32)
        code = groups[..., index] >> shift
        if shift + bits > 32:
            code = code | (groups[..., index + 1] << (32 - shift))
        codes.append(code & mask)
    return mx.stack(codes, axis=-1).reshape(*words.shape[:-1], -1)


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
