"""Format `exact`: one copy of bfloat16 weights, bit for bit, smaller than bfloat16, that contains the low gears.

The lowest gear is MLX's own 4-bit or 3-bit module, or the bit planes of 4 and 8 bits are as in format `planes`. The
gear of 16 bits reads the same codes and what is stored beside them: 13.5 bits per weight over one plane, 14.8 over two.
How a weight follows from these stands in kernels/exact.py.

The encoder proves itself: it decodes every group, and stores one that does not come back in another way. The window of
neighbours was found by trying, and not by a proof; groups with NaN or infinities have no scale.
"""

import math
from collections.abc import Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.mla import MultiLinear

from ..errors import GearbxError
from ..kernels.bit_planes import PanelPlanes, Planes, pack_mlx_codes
from ..kernels.dispatch import NATIVE, Kind, bits_beside_bfloat16, cpu_kernels
from ..kernels.exact import (
    LOW_BITS,
    WINDOW,
    ExactMatrix,
    PanelExactMatrix,
    Prediction,
    decoded_by_tiles,
    low_mask,
    predict,
    product_by_tiles,
    upper_bits,
    weight_bits,
)
from ..kernels.products import decoded, exact_experts, exact_product, exact_rows
from .base import DENSE, Arrays, Bits, Format, Gears, PackedExperts, Shape, StoredArray, StoredArrays, row_blocks
from .native import Native, NativeMultiLinear, for_kernels, native_rounding, stored_planes, with_expert_bias
from .planes import NestedPlanes, planes_module, split

WIDTHS = {(3, 16): (3,), (4, 16): (4,), (4, 8, 16): (4, 4)}  # ladder to bits of its planes
NEAR_ZERO = {(3,): 0.228, (4,): 0.123, (4, 4): 0.128}  # share of Gaussian weights that have a byte beside the others

RANGES = {3: (0.9, 0.8), 4: ()}  # bits to parts of a group's range that are tried beside all of it
FARTHEST = 1.7  # times a code's value: neighbours reach to 1.8


def encode(weight: mx.array, widths: Sequence[int], group_size: int, base: Planes | None = None) -> ExactMatrix:
    """A matrix (..., O, I) of bfloat16 in format `exact`.

    Args:
        weight: any bit patterns. I is a multiple of group_size.
        widths: bits of the planes of codes: one of 3 or 4, or two of 4.
        group_size: 32, 64 or 128.
        base: codes (..., O, I) of the lowest gear in the place of the nearest ones. Groups that could not come back
            from them get the nearest.
    """
    rows, parts = weight.reshape(-1, weight.shape[-1]), []
    base = base and base.each(lambda array: array.reshape(-1, array.shape[-1]))
    for block in row_blocks(*rows.shape):
        part = None if base is None else base.each(itemgetter(block))
        parts.append(encode_block(rows[block], tuple(widths), group_size, part))
    return join(parts, weight.shape[:-1])


def encode_block(weight: mx.array, widths: tuple[int, ...], group_size: int, base: Planes | None = None) -> ExactMatrix:
    """`encode` for rows (O, I) that are not too many to be encoded at once; evaluated."""
    planes = base.each_scale(lambda array: array.view(mx.uint16)) if base else quantize(weight, widths, group_size)
    values = mx.contiguous(weight).view(mx.uint16)
    kernels = cpu_kernels(1)

    def rest() -> tuple[mx.array, mx.array, mx.array, mx.array]:
        mx.eval(values, planes.arrays)
        return kernels.exact_encode(values, *planes[:5]) if kernels else beside(values, planes)

    kept, low, high, offsets = rest()
    if base is not None and not kept.all().item():
        planes = mixed(kept, planes, quantize(weight, widths, group_size))
        kept, low, high, offsets = rest()
    if not kept.all().item():
        planes = planes.each(lambda array: pick_groups(kept, array, mx.zeros_like(array)))
    matrix = ExactMatrix(*planes[:3], low, high, offsets, planes.widths, planes.group_size)
    if not mx.array_equal(decoded(matrix).view(mx.uint16), values).item():
        raise GearbxError("a weight does not come back from format exact; please report this, and use another format")
    return matrix


def quantize(weight: mx.array, widths: tuple[int, ...], group_size: int) -> Planes:
    """The planes of a matrix (O, I), with the bits of their scales and biases, which are bfloat16."""
    if len(widths) > 1:
        planes = split(weight, widths, group_size)
    else:
        words, scales, bias = fitted(weight, widths[0], group_size)
        planes = Planes([words], scales, [bias], widths, group_size)
    return planes.each_scale(lambda array: array.view(mx.uint16))


def fitted(weight: mx.array, bits: int, group_size: int) -> tuple[mx.array, mx.array, mx.array]:
    """Like `mx.quantize`, with the range of each group that leaves the smallest squared error.

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
        words, scales, biases = (pick_groups(better, new, old) for new, old in zip(made, (words, scales, biases)))
        best = mx.where(better, error, best)
        mx.eval(words, scales, biases, best)
    return words, scales, biases


def squared_error(grouped: mx.array, made: Sequence[mx.array], bits: int) -> mx.array:
    """Error (O, G) of weights (O, G, group_size) as codes; infinite if one is not a neighbour of its code's value."""
    words, scales, biases = made
    group_size = grouped.shape[-1]
    values = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), group_size, bits)
    values = values.reshape(grouped.shape)
    counts = mx.abs(values) > mx.abs(scales.astype(mx.float32))[..., None] * 0.5
    far = (counts & (mx.abs(grouped) > FARTHEST * mx.abs(values))).any(-1)
    return mx.where(far, mx.inf, ((grouped - values) ** 2).sum(-1))


def pick_groups(better: mx.array, own: mx.array, other: mx.array) -> mx.array:
    """An array (O, ...) where its groups are the better ones, and another one elsewhere. better: (O, G)."""
    groups, others = (array.reshape(*better.shape, -1) for array in (own, other))
    return mx.where(better[..., None], groups, others).reshape(own.shape)


def mixed(kept: mx.array, planes: Planes, others: Planes) -> Planes:
    """A plane whose groups are those of another one where they are not kept. kept: (O, G)."""
    arrays = ((each.weights[0], each.scales, each.biases[0]) for each in (planes, others))
    words, scales, bias = (pick_groups(kept, own, other) for own, other in zip(*arrays))
    return planes._replace(weights=[words], scales=scales, biases=[bias])


def in_window(weight: np.ndarray, value: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether a weight comes back from the value of a code of 3 or 4 bits, and whether that takes a further byte.

    All are float32; the weights are bfloat16 numbers.
    """
    zero = ~(np.abs(value) > np.abs(scale) * np.float32(0.5))
    first = (value.view(np.uint32) >> 16).astype(np.uint16) - np.uint16(WINDOW)
    return zero | ((weight.view(np.uint32) >> 16).astype(np.uint16) - first < 256), zero


def beside(values: mx.array, planes: Planes) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """What is stored beside the codes: as the native `exact_encode`, with MLX's own operations.

    Args:
        values: (O, I), the bits of the weights. planes: as `quantize` makes them.

    Returns:
        kept (O, G): whether a group comes back from its codes; low, high and offsets of an `ExactMatrix`, for which a
        group that is not kept has codes, scale and biases of 0.
    """
    count = len(planes.widths)
    found = predict(planes)
    bits = values.reshape(found.near.shape)
    low = bits & low_mask(count)
    stored = stored_byte(bits, found, count)
    bounded = mx.isfinite(found.step[..., 0] * (2 ** sum(planes.widths) - 1))  # else a fused product would differ
    usable = mx.stack([bounded, *map(finite, [planes.scales, *planes.biases])]).all(0)
    kept = usable & (~found.whole & (weight_bits(low, stored, found, count) == bits)).all(-1)
    lost = ~kept[..., None]
    near = found.near & ~lost if count > 1 else found.near | lost
    whole = mx.broadcast_to(lost if count > 1 else mx.array(False), near.shape)
    counts = (near + 2 * whole).reshape(len(values), -1).sum(-1)
    offsets = mx.concatenate([mx.zeros(1, mx.uint32), counts.cumsum().astype(mx.uint32)])
    high = in_order(bits, stored, np.array(near), np.array(whole))
    low = low.reshape(values.shape)
    low = low.astype(mx.uint8) if count == 1 else pack_mlx_codes(low, LOW_BITS)
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
    mx.eval(made.arrays)
    return made


class ExactModule(nn.Module):
    """A layer whose weight is a matrix of format `exact`; its parameters are frozen, and shared with the low gears."""

    def __init__(self, matrix: ExactMatrix, dense: nn.Module):
        super().__init__()
        self.record = type(matrix)
        self.codes = list(matrix.weights)
        self.group_scales, self.group_biases = matrix.scales, list(matrix.biases)
        self.low, self.high, self.offsets = matrix.low, matrix.high, matrix.offsets
        self.widths, self.group_size = tuple(matrix.widths), matrix.group_size
        if "bias" in dense:
            self.bias = dense.bias
        self.freeze(recurse=False)

    @property
    def matrix(self) -> ExactMatrix:
        """The arrays as they are now."""
        codes, beside = self["codes"], (self["low"], self["high"], self["offsets"])
        return self.record(codes, self["group_scales"], self["group_biases"], *beside, self["widths"], self.group_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape (..., O, I) of the weight."""
        return self.matrix.shape

    @property
    def bytes_read(self) -> int:
        """The bytes of the whole weight, of all experts."""
        return sum(array.nbytes for array in self.matrix.arrays)

    def dense_weight(self) -> mx.array:
        """The weight (..., O, I), bfloat16."""
        return decoded_by_tiles(self.matrix)

    def rows(self, chosen: mx.array) -> mx.array:
        """Rows of the weight (O, I), (..., I) bfloat16. chosen: (...)."""
        return exact_rows(self.matrix, chosen)

    def _extra_repr(self) -> str:
        return f"shape={self.weight_shape}, widths={self.widths}, group_size={self.group_size}, bias={'bias' in self}"


class ExactLinear(ExactModule):
    """A linear layer (..., I) -> (..., O) over exact weights, with MLX's kernels."""

    def __call__(self, x: mx.array) -> mx.array:
        y = product_by_tiles(x, self.matrix)
        return y + self["bias"].astype(y.dtype) if "bias" in self else y


class NativeExactLinear(Native, ExactLinear):
    """A linear layer over exact weights, with native kernels that decode each weight once for all vectors."""

    def __call__(self, x: mx.array) -> mx.array:
        return exact_product(x, self.matrix, self.get("bias"), self.chosen, self.x_bits)

    def kind(self) -> Kind | None:
        form = f"exact {'+'.join(map(str, self.widths))}, group {self.group_size}"
        return Kind(form, self.weight_shape, stock=False, variants=(NATIVE,), most_bits=bits_beside_bfloat16())

    def part(self, kernels: ModuleType) -> Any:
        return kernels.exact_part(*self.matrix, self.get("bias"), self.x_bits)


class ExactSwitchLinear(PackedExperts, ExactModule):
    """A SwitchLinear over exact weights: E experts of one shape, chosen by `indices`."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = exact_experts(x, self.matrix, indices, sorted_indices, native_rounding(self))
        return with_expert_bias(self, y, indices)


class NativeExactSwitchLinear(Native, ExactSwitchLinear):
    """A SwitchLinear over exact weights, with native kernels."""


class ExactMultiLinear(ExactModule):
    """A MultiLinear over exact weights: a matrix for each head, (..., H, T, I) -> (..., H, T, O)."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        weight = self.dense_weight().astype(x.dtype)
        return x @ (weight.swapaxes(-1, -2) if transpose else weight)


class NativeExactMultiLinear(ExactMultiLinear):
    """A MultiLinear over exact weights, which a native kernel decodes."""

    def dense_weight(self) -> mx.array:
        return decoded(self.matrix)


class Exact(Format):
    """One copy of the weights that is every gear of its ladder, the top gear bit for bit.

    The low gears are those of `planes`, over codes as MLX has them. A layer whose bits in the gears are not a ladder of
    this format (it has a floor) stays dense.
    """

    name = "exact"
    native = native_experts = rounds = takes_base = True
    scales = NestedPlanes.scales
    viewed = frozenset({"group_scales", "group_biases"})
    ladders: tuple[tuple[int, ...], ...] = tuple(WIDTHS)
    types = (mx.bfloat16,)

    def check(self, bits: int) -> None:
        if not any(bits in ladder for ladder in WIDTHS):
            raise GearbxError(f"format exact has gears of 3, 4, 8 and 16 bits, and none of {bits}")

    def modules(self, dense: nn.Module, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> Gears:
        return self._gears(dense, encode(dense.weight, self.widths(bits, ladder), group_size), ladder, dtype)

    def nearest(self, weight: mx.array, ladder: Bits, group_size: int) -> Planes | None:
        if len(ladder) > 2:
            return None  # the second plane goes on from the first
        return quantize(weight, WIDTHS[tuple(ladder)], group_size).each_scale(lambda array: array.view(mx.bfloat16))

    window = staticmethod(in_window)

    def over_base(self, dense: nn.Module, base: Planes, ladder: Bits, dtype: mx.Dtype) -> Gears:
        return self._gears(dense, encode(dense.weight, base.widths, base.group_size, base), ladder, dtype)

    def _gears(self, dense: nn.Module, matrix: ExactMatrix, ladder: Bits, dtype: mx.Dtype) -> Gears:
        """Bits to module of all gears."""
        matrix = for_kernels(dense, matrix)
        planes = matrix.planes.each_scale(lambda array: array.view(mx.bfloat16).astype(dtype))
        low = {gear: planes_module(dense, planes.gear(gear)) for gear in ladder[:-1]}
        return low | {DENSE: exact_module(dense, matrix)}

    def widths(self, bits: int, ladder: Bits) -> Bits:
        return WIDTHS[tuple(ladder)]

    def module(self, dense: nn.Module, bits: int, arrays: Arrays, ladder: Bits, group_size: int) -> nn.Module:
        if bits != DENSE:
            return PLANES.module(dense, bits, arrays, ladder[:-1], group_size)
        widths = self.widths(bits, ladder)
        codes, biases = ([arrays[f"{name}.{i}"] for i in range(len(widths))] for name in ("codes", "group_biases"))
        check_offsets(arrays["offsets"], arrays["high"].size)
        planes = stored_planes(dense, Planes(codes, arrays["group_scales"], biases, widths, group_size))
        kind = PanelExactMatrix if isinstance(planes, PanelPlanes) else ExactMatrix
        beside = arrays["low"], arrays["high"], arrays["offsets"]
        return exact_module(dense, kind(planes.weights, planes.scales, planes.biases, *beside, widths, group_size))

    def stored_arrays(self, shape: Shape, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> StoredArrays:
        if bits != DENSE:
            return PLANES.stored_arrays(shape, bits, ladder[:-1], group_size, dtype)
        highest = PLANES.stored_arrays(shape, ladder[-2], ladder[:-1], group_size, dtype)
        if len(WIDTHS[tuple(ladder)]) == 1:
            highest = {"weights.0": highest["weight"], "scales": highest["scales"], "plane_biases.0": highest["biases"]}
        arrays = {renamed(name): array for name, array in highest.items()}
        low = StoredArray(mx.uint8, tuple(shape), DENSE, "low")
        if len(WIDTHS[tuple(ladder)]) > 1:
            low = StoredArray(mx.uint32, (*shape[:-1], shape[-1] * LOW_BITS // 32), DENSE, "low")
        high = StoredArray(mx.uint8, (None,), DENSE, "high")
        offsets = StoredArray(mx.uint32, (math.prod(shape[:-1]) + 1,), DENSE, "offsets")
        return arrays | {"low": low, "high": high, "offsets": offsets}

    def bytes_read(self, shape: Shape, bits: int, ladder: Bits, group_size: int, scale_size: int) -> int:
        """An estimate at 16 bits, for Gaussian weights; a module knows its own."""
        if bits != DENSE:
            return PLANES.bytes_read(shape, bits, ladder[:-1], group_size, scale_size)
        widths = WIDTHS[tuple(ladder)]
        weights, low = math.prod(shape), 8 if len(widths) == 1 else LOW_BITS
        per_group = (1 + len(widths)) * 2 * weights // group_size
        return round(weights * (sum(widths) + low + 8 * NEAR_ZERO[widths]) / 8) + per_group + 4 * math.prod(shape[:-1])


PLANES = NestedPlanes()


def renamed(name: str) -> str:
    """The name in the gear of 16 bits of a parameter of planes."""
    return (
        name.replace("weights.", "codes.").replace("plane_biases.", "group_biases.").replace("scales", "group_scales")
    )


def check_offsets(offsets: mx.array, stored: int) -> None:
    """Raises GearbxError unless the bytes of each row begin where those of the row before end: kernels index with them.

    The array may come from a file whose content was not checked. It is read.

    Args:
        stored: how many bytes there are; one where none is used.
    """
    found = np.array(offsets).astype(np.int64)
    if found[0] or (np.diff(found) < 0).any() or max(found[-1], 1) != stored:
        raise GearbxError(f"its offsets do not lead through the {stored} bytes beside its low ones")


def exact_module(dense: nn.Module, matrix: ExactMatrix) -> nn.Module:
    """The module of the gear of 16 bits in the place of a Linear, SwitchLinear or MultiLinear; it shares the bias."""
    native = isinstance(dense, Native)
    if isinstance(dense, MultiLinear):
        return (NativeExactMultiLinear if isinstance(dense, NativeMultiLinear) else ExactMultiLinear)(matrix, dense)
    if dense.weight.ndim == 3:
        return (NativeExactSwitchLinear if native else ExactSwitchLinear)(matrix, dense)
    return (NativeExactLinear if native else ExactLinear)(matrix, dense)


def too_large(module: nn.Module) -> str | None:
    """Why an exact module is not worth it, if it takes more bytes than the weight itself."""
    bits = 8 * module.bytes_read / math.prod(module.weight_shape)
    return f"would take {bits:.1f} bits a weight in format exact, and takes 16" if bits > DENSE else None
