"""Bit planes as arrays: the record of a stack, the packing of codes, and matmuls with MLX's kernels.

A plane is an ordinary affine weight of MLX: its codes are a little-endian stream of bits, 32 codes in `bits` words. MLX
multiplies a stack of r planes in r calls. A native kernel reads all planes in one pass, and must agree with MLX.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx

CODES_TOGETHER = 32

# The smallest scale, for groups of equal weights (a range of 0).
SCALE_FLOOR = {mx.float16: 2.0**-24, mx.bfloat16: 2.0**-100, mx.float32: 2.0**-100}


class Planes(NamedTuple):
    """A weight (..., O, I) as a stack of bit planes; the fields are the arguments of native kernels.

    A single plane is an affine weight of MLX.

    weights: per plane, (..., O, I * width / 32) uint32 packed as by `mx.quantize`, most significant plane first.
    scales: (..., O, I / group_size), of the first plane; a power of two smaller for each later plane. biases: of the
    first plane and possibly later ones, same shape; 0 for the other planes. widths: bits of each plane. group_size:
    number of inputs that share a scale. rest: number of lower bits of longer codes that the stack omits. The biases
    then belong to the longer codes, and a weight is the middle of the range of the omitted bits.
    """

    weights: Sequence[mx.array]
    scales: mx.array
    biases: Sequence[mx.array]
    widths: Sequence[int]
    group_size: int
    rest: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., O, I)."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group_size)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All arrays, in the order of the fields."""
        return (*self.weights, self.scales, *self.biases)

    def gear(self, bits: int) -> "Planes":
        """Return the first planes with a total of `bits` bits, as read by that gear."""
        count = list(itertools.accumulate(self.widths)).index(bits) + 1
        return self._replace(weights=self.weights[:count], biases=self.biases[:count], widths=self.widths[:count])

    def each(self, change: Callable[[mx.array], mx.array]) -> "Planes":
        """Return the stack with a change to every array."""
        return self.each_scale(change)._replace(weights=[change(codes) for codes in self.weights])

    def each_scale(self, change: Callable[[mx.array], mx.array]) -> "Planes":
        """Return the stack with a change to the scales and all biases."""
        return self._replace(scales=change(self.scales), biases=[change(bias) for bias in self.biases])

    def taken(self, chosen: mx.array) -> "Planes":
        """Return the rows, or experts, `chosen` (n,)."""
        return self.each(lambda array: array[chosen])

    def by_row(self) -> "Planes":
        """Return the same weight with consecutive rows, as in MLX."""
        return self

    def in_panels(self, rows: int) -> "Planes":
        """Return the same weight (O, I) in panels of `rows` rows, a divisor of O."""
        made = PanelPlanes(*self.each(partial(side_by_side, rows=rows)))
        mx.eval(made.arrays)
        return made

    def dequantize(self) -> mx.array:
        """Return the weights (..., O, I), float32."""
        planes, shifts = self.by_row().each_scale(lambda array: array.astype(mx.float32)), plane_shifts(self.widths)
        bias = sum((bias * 2.0**-shift for bias, shift in zip(planes.biases, shifts)), mx.zeros(()))
        bias, step = bias + planes.scales * middle_of(self.rest), planes.scales * 2.0 ** -shifts[-1]
        codes = joined_codes(planes.weights, self.widths)
        return mx.dequantize(codes, step, bias, self.group_size, sum(self.widths))

    def joined(self) -> "Planes":
        """Return one plane, the inverse of `split_affine`, bit for bit."""
        planes, shift = self.by_row(), plane_shifts(self.widths)[-1]
        codes = joined_codes(planes.weights, planes.widths)
        return Planes([codes], planes.scales * 2.0**-shift, planes.biases[:1], (sum(planes.widths),), self.group_size)

    def prefix(self, bits: int) -> "Planes":
        """Return the first `bits` of a stack from `split_affine`: weights in the middle of the omitted bits' range."""
        return self.gear(bits)._replace(rest=sum(self.widths) - bits)

    def with_biases(self, dtype: mx.Dtype | None = None) -> "Planes":
        """Return the stack with a bias for each plane and `rest` 0, as MLX's kernels need it.

        Args:
            dtype: of the first bias if bits are omitted; the scales' type, the default, rounds it by some steps.
        """
        if not self.rest and len(self.biases) == len(self.widths):
            return self
        first, *others = self.biases
        if self.rest:
            middle = self.scales.astype(mx.float32) * middle_of(self.rest)
            first = (first.astype(mx.float32) + middle).astype(dtype or self.scales.dtype)
        none = [mx.zeros_like(first)] * (len(self.widths) - len(self.biases))
        return self._replace(biases=[first, *others, *none], rest=0)


class PanelPlanes(Planes):
    """A weight (O, I) in panels of R rows; a CPU multiplies the rows of a panel together.

    An array (O, K) of the stack becomes (O / R, K, R): the first number of each row of a panel, then the second.
    """

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        panels, groups, rows = self.scales.shape
        return panels * rows, groups * self.group_size

    def taken(self, chosen: mx.array) -> Planes:
        rows = self.scales.shape[-1]
        return Planes(*self.each(lambda array: array[chosen // rows, :, chosen % rows]))

    def by_row(self) -> Planes:
        return Planes(*self.each(lambda array: mx.contiguous(array.swapaxes(1, 2)).reshape(-1, array.shape[1])))

    def in_panels(self, rows: int) -> Planes:
        return self


def side_by_side(array: mx.array, rows: int) -> mx.array:
    """Return an array (O, K) as (O / rows, K, rows)."""
    return mx.contiguous(array.reshape(-1, rows, array.shape[-1]).swapaxes(1, 2))


def plane_shifts(widths: Sequence[int]) -> list[int]:
    """Return the shift of each plane: the scale of plane i is 2^-shift times the first plane's."""
    return [0, *itertools.accumulate(widths[1:])]


def middle_of(rest: int) -> float:
    """Return the middle of the range of `rest` omitted bits, in units of the scale."""
    return (1 - 2.0**-rest) / 2


def sum_planes(product: Callable[[mx.array, mx.array, int], mx.array], planes: Planes) -> mx.array:
    """Return the sum of product(weight, bias, width) over the planes, each times an (exact) power of two."""
    planes = planes.with_biases()
    parts = [product(*plane) for plane in zip(planes.weights, planes.biases, planes.widths)]
    total = parts[0]
    for part, shift in zip(parts[1:], plane_shifts(planes.widths)[1:]):
        total = total + part * 2.0**-shift
    return total


def planes_matmul(x: mx.array, planes: Planes, transpose: bool = True) -> mx.array:
    """Return x (..., I) @ W^T, (..., O); without `transpose`, x (..., O) @ W, (..., I)."""

    def product(weight: mx.array, bias: mx.array, width: int) -> mx.array:
        return mx.quantized_matmul(x, weight, planes.scales, bias, transpose, planes.group_size, width)

    return sum_planes(product, planes.with_biases(x.dtype))


def planes_dense(planes: Planes) -> mx.array:
    """Return the weight (..., O, I), of the scales' type."""

    def plane(weight: mx.array, bias: mx.array, width: int) -> mx.array:
        return mx.dequantize(weight, planes.scales, bias, planes.group_size, width)

    return sum_planes(plane, planes)


def planes_gather_matmul(x: mx.array, planes: Planes, indices: mx.array, sorted_indices: bool = False) -> mx.array:
    """Multiply as `planes_matmul`, by stacked experts (E, O, ...); `indices` has an expert for each vector."""

    def product(weight: mx.array, bias: mx.array, width: int) -> mx.array:
        arrays, group_size = (weight, planes.scales, bias), planes.group_size
        return mx.gather_qmm(x, *arrays, None, indices, True, group_size, width, sorted_indices=sorted_indices)

    return sum_planes(product, planes.with_biases(x.dtype))


def split_affine(affine: Planes, widths: Sequence[int]) -> Planes:
    """Return an affine weight of one plane as a stack of exactly the same numbers.

    The first plane has the whole bias, and the codes' scale times a power of two.

    Args:
        widths: bits of the planes, most significant first; their sum is the bits of a code.
    """
    (words,), (bits,) = affine.weights, affine.widths
    return scaled_for(affine, widths)._replace(weights=split_codes(words, bits, widths))


def scaled_for(affine: Planes, widths: Sequence[int]) -> Planes:
    """Return the stack of `split_affine` with unsplit codes."""
    scales = affine.scales * 2.0 ** (affine.widths[0] - widths[0])
    return affine._replace(scales=scales, widths=tuple(widths))


def split_codes(words: mx.array, bits: int, widths: Sequence[int]) -> list[mx.array]:
    """Return packed codes (..., n * bits / 32) as packed planes of these widths."""
    if tuple(widths) == (bits,):
        return [words]
    if words.ndim > 1 and words.size > 2**19 and len(words) > 1:  # unpacked, codes take several times their size
        half = len(words) // 2
        parts = [split_codes(rows, bits, widths) for rows in (words[:half], words[half:])]
        mx.eval(parts)
        return [mx.concatenate(list(planes)) for planes in zip(*parts)]
    if tuple(widths) == (4, 4):  # the nibbles of two adjacent bytes form one byte of each plane
        pairs = words.view(mx.uint16)
        high, low = pairs >> 4, pairs
        halves = (((each & 0x0F) | ((each >> 4) & 0xF0)).astype(mx.uint8) for each in (high, low))
        return [half.view(mx.uint32) for half in halves]
    return packed_planes(unpack_mlx_codes(words, bits), widths)


def packed_planes(codes: mx.array, widths: Sequence[int]) -> list[mx.array]:
    """Return codes (..., n) as packed planes of these widths, most significant first."""
    planes, unread = [], sum(widths)
    for width in widths:
        unread -= width
        planes.append(pack_mlx_codes((codes >> unread) & (2**width - 1), width))
    return planes


def joined_codes(weights: Sequence[mx.array], widths: Sequence[int]) -> mx.array:
    """Return the inverse of `split_codes`."""
    if len(widths) == 1:
        return weights[0]
    if tuple(widths) == (4, 4):
        high, low = (plane.view(mx.uint8).astype(mx.uint16) for plane in weights)
        low = (low & 0x0F) | ((low & 0xF0) << 4)
        return (low | ((high & 0x0F) << 4) | ((high & 0xF0) << 8)).view(mx.uint32)
    codes = unpack_mlx_codes(weights[0], widths[0])
    for plane, width in zip(weights[1:], widths[1:]):
        codes = (codes << width) | unpack_mlx_codes(plane, width)
    return pack_mlx_codes(codes, sum(widths))


def scale_and_bias(low: mx.array, high: mx.array, widths: Sequence[int], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Return scale and bias (..., groups) of the first plane for groups with these extremes, float32 after rounding."""
    bits, rest = sum(widths), sum(widths[1:])
    scale = rounded(mx.maximum((high - low) / (2**bits - 1) * 2**rest, SCALE_FLOOR[dtype]), dtype)
    return scale, rounded(low + scale * 2.0**-rest * (2**rest - 1) / 2, dtype)


def rounded(values: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return float32 values rounded to a type."""
    return values.astype(dtype).astype(mx.float32)


def pack_mlx_codes(codes: mx.array, bits: int) -> mx.array:
    """Pack unsigned codes (..., n) below 2^bits into (..., n * bits / 32) uint32; n is a multiple of 32."""
    groups = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, CODES_TOGETHER)
    words = [mx.zeros_like(groups[..., 0])] * bits
    for i in range(CODES_TOGETHER):
        index, shift = divmod(i * bits, 32)
        words[index] = words[index] | (groups[..., i] << shift)
        if shift + bits > 32:  # the code spans two words
            words[index + 1] = words[index + 1] | (groups[..., i] >> (32 - shift))
    return mx.stack(words, axis=-1).reshape(*codes.shape[:-1], -1)


def unpack_mlx_codes(words: mx.array, bits: int) -> mx.array:
    """Return the inverse of `pack_mlx_codes`: (..., n * bits / 32) uint32 to (..., n) uint32 codes."""
    groups = words.reshape(*words.shape[:-1], -1, bits)
    mask = (1 << bits) - 1
    codes = []
    for i in range(CODES_TOGETHER):
        index, shift = divmod(i * bits, 32)
        code = groups[..., index] >> shift
        if shift + bits > 32:
            code = code | (groups[..., index + 1] << (32 - shift))
        codes.append(code & mask)
    return mx.stack(codes, axis=-1).reshape(*words.shape[:-1], -1)
