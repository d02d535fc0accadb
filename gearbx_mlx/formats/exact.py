"""Format `exact`: one copy of bfloat16 weights, bit for bit, smaller than bfloat16, that contains the low gear.

The low gear is MLX's own 4-bit module. The 16-bit gear reads the same codes and additional bytes: 13.5 bits per weight.
kernels/exact.py has the formula of a weight.

The encoder verifies its result: it decodes every group, and stores a group differently if a weight is wrong. The window
of neighbors was found by trial, without a proof; groups with NaN or infinities have no scale.
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
from ..kernels import DENSE
from ..kernels.bit_planes import PanelPlanes, Planes
from ..kernels.dispatch import NATIVE, MatmulKind, bits_beside_bfloat16, cpu_kernels
from ..kernels.exact import (
    CODE_BITS,
    FIRST_NEIGHBOR,
    ExactMatrix,
    PanelExactMatrix,
    as_floats,
    decoded_by_tiles,
    predict,
    product_by_tiles,
    weight_bits,
)
from ..kernels.products import decoded, exact_experts, exact_product, exact_rows, panel_rows
from ..kernels.proven import decoder_key
from .base import Arrays, Bits, Format, Gears, PackedExperts, Shape, StoredArray, StoredArrays, row_blocks
from .native import Native, NativeMultiLinear, native_rounding, stored_planes, takes_panels, with_expert_bias
from .planes import NestedPlanes, planes_module

LADDER = (CODE_BITS, DENSE)


def encode(weight: mx.array, group_size: int, base: Planes | None = None) -> ExactMatrix:
    """Return a matrix (..., O, I) of bfloat16, of any bit patterns, in format `exact`.

    base: calibrated codes (..., O, I) of the low gear. Groups that cannot be restored from them get RTN codes.
    """
    rows, parts = weight.reshape(-1, weight.shape[-1]), []
    base = base and base.each(lambda array: array.reshape(-1, array.shape[-1]))
    for block in row_blocks(*rows.shape):
        part = None if base is None else base.each(itemgetter(block))
        parts.append(encode_block(rows[block], group_size, part))
    return join(parts, weight.shape[:-1])


def encode_block(weight: mx.array, group_size: int, base: Planes | None = None) -> ExactMatrix:
    """Encode rows (O, I) that are few enough to be encoded at once; evaluated."""
    plane = base.each_scale(lambda array: array.view(mx.uint16)) if base else quantize(weight, group_size)
    values = mx.contiguous(weight).view(mx.uint16)
    kernels = cpu_kernels(1)

    def rest() -> tuple[mx.array, mx.array, mx.array, mx.array]:
        mx.eval(values, plane.arrays)
        packed = plane.weights[0], plane.scales, plane.biases[0], group_size
        return kernels.exact_encode(values, *packed) if kernels else bytes_beside(values, plane)

    kept, low, high, offsets = rest()
    if base is not None and not kept.all().item():
        plane = mixed(kept, plane, quantize(weight, group_size))
        kept, low, high, offsets = rest()
    if not kept.all().item():
        plane = plane.each(lambda array: pick_groups(kept, array, mx.zeros_like(array)))
    matrix = ExactMatrix(plane.weights[0], plane.scales, plane.biases[0], low, high, offsets, group_size)
    if not mx.array_equal(decoded(matrix).view(mx.uint16), values).item():
        raise GearbxError("format exact: a weight is not restored; please report this, and choose a different format")
    return matrix


def quantize(weight: mx.array, group_size: int) -> Planes:
    """Return MLX's codes of a matrix (O, I), with the bits of their bfloat16 scales and biases."""
    codes, scales, biases = mx.quantize(weight, group_size, CODE_BITS)
    return Planes([codes], scales.view(mx.uint16), [biases.view(mx.uint16)], (CODE_BITS,), group_size)


def pick_groups(better: mx.array, own: mx.array, other: mx.array) -> mx.array:
    """Return an array (O, ...) with groups of `own` where `better` (O, G) is True, and of `other` elsewhere."""
    groups, others = (array.reshape(*better.shape, -1) for array in (own, other))
    return mx.where(better[..., None], groups, others).reshape(own.shape)


def mixed(kept: mx.array, planes: Planes, others: Planes) -> Planes:
    """Return a plane with groups of `planes` where `kept` (O, G) is True, and of `others` elsewhere."""
    arrays = ((each.weights[0], each.scales, each.biases[0]) for each in (planes, others))
    words, scales, bias = (pick_groups(kept, own, other) for own, other in zip(*arrays))
    return planes._replace(weights=[words], scales=scales, biases=[bias])


def in_window(weight: np.ndarray, value: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return masks: weights that can be restored from the values of their codes, and those that take a byte more.

    All are float32; the weights are bfloat16 numbers.
    """
    zero = ~(np.abs(value) > np.abs(scale) * np.float32(0.5))
    first = (value.view(np.uint32) >> 16).astype(np.uint16) - np.uint16(FIRST_NEIGHBOR)
    return zero | ((weight.view(np.uint32) >> 16).astype(np.uint16) - first < 256), zero


def bytes_beside(values: mx.array, plane: Planes) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Return the bytes stored in addition to codes (`quantize`) of weights with these bits (O, I), as `exact_encode`.

    kept (O, G): True if a group is restored from its codes; low, high and offsets of an `ExactMatrix`, in which a group
    that is not kept has codes, scale and biases of 0. Uses MLX's operations.
    """
    found = predict(plane)
    bits = values.reshape(found.near.shape)
    largest = as_floats(plane.scales) * (2**CODE_BITS - 1)
    bounded = mx.isfinite(largest)  # otherwise a fused multiply-add would differ
    usable = bounded & are_finite(plane.scales) & are_finite(plane.biases[0])
    kept = usable & (weight_bits(bits & 255, bits >> 8, found) == bits).all(-1)
    near = found.near | ~kept[..., None]
    counts = near.reshape(len(values), -1).sum(-1)
    offsets = mx.concatenate([mx.zeros(1, mx.uint32), counts.cumsum().astype(mx.uint32)])
    high = np.array((bits >> 8).astype(mx.uint8))[np.array(near)]
    # at least one, since a file has no empty arrays
    return kept, (values & 255).astype(mx.uint8), mx.array(high if len(high) else np.zeros(1, np.uint8)), offsets


def are_finite(halves: mx.array) -> mx.array:
    """Return a mask of the finite bfloat16 numbers, given their bits."""
    return (halves & 0x7F80) != 0x7F80


def join(parts: Sequence[ExactMatrix], rows: tuple[int, ...]) -> ExactMatrix:
    """Return the matrix (*rows, I), given its blocks of rows."""

    def whole(arrays: Sequence[mx.array]) -> mx.array:
        made = arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays))
        return made.reshape(*rows, -1)

    total, offsets, high = 0, [mx.zeros(1, mx.uint32)], []
    for part in parts:
        offsets.append(part.offsets[1:] + total)
        count = np.array(part.offsets)[-1].item()
        total += count
        high.append(part.high[:count])
    first = parts[0]
    made = first._replace(
        codes=whole([part.codes for part in parts]),
        scales=whole([part.scales for part in parts]),
        biases=whole([part.biases for part in parts]),
        low=whole([part.low for part in parts]),
        high=mx.concatenate(high) if total else first.high,
        offsets=mx.concatenate(offsets),
    )
    mx.eval(made.arrays)
    return made


class ExactModule(nn.Module):
    """A layer whose weight is a matrix of format `exact`; its parameters are frozen, and shared with the low gear.

    Codes and biases are lists of one, as in the files of checkpoints: `codes.0`.
    """

    def __init__(self, matrix: ExactMatrix, dense: nn.Module):
        super().__init__()
        self.record = type(matrix)
        self.codes, self.group_scales, self.group_biases = [matrix.codes], matrix.scales, [matrix.biases]
        self.low, self.high, self.offsets = matrix.low, matrix.high, matrix.offsets
        self.group_size = matrix.group_size
        if "bias" in dense:
            self.bias = dense.bias
        self.freeze(recurse=False)

    @property
    def matrix(self) -> ExactMatrix:
        """The layer's current arrays."""
        beside = self["low"], self["high"], self["offsets"]
        return self.record(self["codes"][0], self["group_scales"], self["group_biases"][0], *beside, self.group_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape (..., O, I) of the weight."""
        return self.matrix.shape

    @property
    def bytes_read(self) -> int:
        """Bytes of the whole weight (all experts)."""
        return sum(array.nbytes for array in self.matrix.arrays)

    def dense_weight(self) -> mx.array:
        """Return the weight (..., O, I), bfloat16."""
        return decoded_by_tiles(self.matrix)

    def rows(self, chosen: mx.array) -> mx.array:
        """Return rows of the weight (O, I), (..., I) bfloat16. chosen: (...)."""
        return exact_rows(self.matrix, chosen)

    def _extra_repr(self) -> str:
        return f"shape={self.weight_shape}, group_size={self.group_size}, bias={'bias' in self}"


class ExactLinear(ExactModule):
    """A linear layer (..., I) -> (..., O) over exact weights, with MLX's kernels."""

    def __call__(self, x: mx.array) -> mx.array:
        y = product_by_tiles(x, self.matrix)
        return y + self["bias"].astype(y.dtype) if "bias" in self else y


class NativeExactLinear(Native, ExactLinear):
    """A linear layer over exact weights, with native kernels that decode each weight once for all vectors."""

    def __call__(self, x: mx.array) -> mx.array:
        return exact_product(x, self.matrix, self.get("bias"), self.chosen, self.x_bits)

    def kind(self) -> MatmulKind | None:
        return MatmulKind(
            f"exact, group {self.group_size}",
            self.weight_shape,
            stock=False,
            variants=(NATIVE,),
            most_bits=bits_beside_bfloat16(),
            decoding=decoder_key(self.group_size),
        )

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
    """A MultiLinear over exact weights, decoded by a native kernel."""

    def dense_weight(self) -> mx.array:
        return decoded(self.matrix)


class Exact(Format):
    """One copy of the weights that is both gears, the top one bit for bit.

    The low gear is a gear of `planes` over MLX's codes. A layer whose bits in the gears differ from the format's
    ladder (it has a floor) stays dense.
    """

    name = "exact"
    native = native_experts = rounds = takes_base = True
    scales = NestedPlanes.scales
    viewed = frozenset({"group_scales", "group_biases"})
    ladders: tuple[tuple[int, ...], ...] = (LADDER,)
    types = (mx.bfloat16,)

    def check(self, bits: int) -> None:
        if bits not in LADDER:
            raise GearbxError(f"format exact has 4-bit and 16-bit gears, got {bits}; use 4,16, or choose format planes")

    def modules(self, dense: nn.Module, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> Gears:
        return self._gears(dense, encode(dense.weight, group_size), dtype)

    def nearest(self, weight: mx.array, ladder: Bits, group_size: int) -> Planes | None:
        return quantize(weight, group_size).each_scale(lambda array: array.view(mx.bfloat16))

    window = staticmethod(in_window)

    def over_base(self, dense: nn.Module, base: Planes, ladder: Bits, dtype: mx.Dtype) -> Gears:
        return self._gears(dense, encode(dense.weight, base.group_size, base), dtype)

    def _gears(self, dense: nn.Module, matrix: ExactMatrix, dtype: mx.Dtype) -> Gears:
        """Return bits to module of both gears."""
        if takes_panels(dense, (CODE_BITS,)):
            matrix = matrix.in_panels(panel_rows())
        plane = matrix.plane.each_scale(lambda array: array.view(mx.bfloat16).astype(dtype))
        return {CODE_BITS: planes_module(dense, plane), DENSE: exact_module(dense, matrix)}

    def widths(self, bits: int, ladder: Bits) -> Bits:
        return (CODE_BITS,)

    def module(self, dense: nn.Module, bits: int, arrays: Arrays, ladder: Bits, group_size: int) -> nn.Module:
        if bits != DENSE:
            return LOW_PLANES.module(dense, bits, arrays, ladder[:-1], group_size)
        check_offsets(arrays["offsets"], arrays["high"].size)
        packed = Planes(
            [arrays["codes.0"]], arrays["group_scales"], [arrays["group_biases.0"]], (CODE_BITS,), group_size
        )
        plane = stored_planes(dense, packed)
        kind = PanelExactMatrix if isinstance(plane, PanelPlanes) else ExactMatrix
        beside = arrays["low"], arrays["high"], arrays["offsets"]
        return exact_module(dense, kind(plane.weights[0], plane.scales, plane.biases[0], *beside, group_size))

    def stored_arrays(self, shape: Shape, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> StoredArrays:
        low_gear = LOW_PLANES.stored_arrays(shape, CODE_BITS, ladder[:-1], group_size, dtype)
        if bits != DENSE:
            return low_gear
        return {
            "codes.0": low_gear["weight"],
            "group_scales": low_gear["scales"],
            "group_biases.0": low_gear["biases"],
            "low": StoredArray(mx.uint8, tuple(shape), DENSE, "low"),
            "high": StoredArray(mx.uint8, (None,), DENSE, "high"),
            "offsets": StoredArray(mx.uint32, (math.prod(shape[:-1]) + 1,), DENSE, "offsets"),
        }

    def bytes_read(self, shape: Shape, bits: int, ladder: Bits, group_size: int, scale_size: int) -> int:
        """Return an estimate of the 16-bit gear for Gaussian weights; a module has the exact number."""
        if bits != DENSE:
            return LOW_PLANES.bytes_read(shape, bits, ladder[:-1], group_size, scale_size)
        weights = math.prod(shape)
        per_group = 2 * 2 * weights // group_size
        near_zero = 0.123  # share of Gaussian weights with an additional byte
        return round(weights * (CODE_BITS + 8 + 8 * near_zero) / 8) + per_group + 4 * math.prod(shape[:-1])


LOW_PLANES = NestedPlanes()


def check_offsets(offsets: mx.array, stored: int) -> None:
    """Validate that rows' bytes follow each other through all `stored` ones: kernels index with offsets.

    The array may come from an unchecked file. It is read. Raises GearbxError.
    """
    found = np.array(offsets).astype(np.int64)
    if found[0] or (np.diff(found) < 0).any() or max(found[-1], 1) != stored:
        raise GearbxError(f"its offsets do not cover the {stored} bytes of high")


def exact_module(dense: nn.Module, matrix: ExactMatrix) -> nn.Module:
    """Return the 16-bit module that replaces a Linear, SwitchLinear or MultiLinear; it shares the bias."""
    native = isinstance(dense, Native)
    if isinstance(dense, MultiLinear):
        return (NativeExactMultiLinear if isinstance(dense, NativeMultiLinear) else ExactMultiLinear)(matrix, dense)
    if dense.weight.ndim == 3:
        return (NativeExactSwitchLinear if native else ExactSwitchLinear)(matrix, dense)
    return (NativeExactLinear if native else ExactLinear)(matrix, dense)


def too_large(module: nn.Module) -> str | None:
    """Return why an exact module is larger than the weight itself; None if it is not."""
    bits = 8 * module.bytes_read / math.prod(module.weight_shape)
    return f"would take {bits:.1f} bits a weight in format exact, instead of 16" if bits > DENSE else None
