"""Symmetric per-channel quantization (GEARBX's rowwise; 5.1, 5.2): w = scale * code, with 8, 6, 4 or 2 bits.

Each output row has one scale. Rows are packed one by one and padded to 16 bytes, so that a vector register can be
loaded from the start of every row. An offset makes the stored codes unsigned, and the padding contains the code of 0.
8-bit codes are stored as int8, without an offset.
"""

import math
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError
from ..kernels.bit_planes import CODES_TOGETHER, pack_mlx_codes
from ..kernels.dispatch import MatmulKind
from ..kernels.products import SymmetricCodes, symmetric_experts, symmetric_product
from .base import (
    Arrays,
    Bits,
    Gears,
    Reconstructed,
    ReconstructedFormat,
    ReconstructedLinear,
    ReconstructedSwitchLinear,
    Shape,
    StoredArray,
    StoredArrays,
)
from .native import Native, NativeExperts, experts_kind, with_expert_bias

Q_MAX = {8: 127, 6: 31, 4: 7, 2: 1}
CODE_OFFSET = {6: 32, 4: 8, 2: 2}
UNIT = {8: (1, 1), 6: (4, 3), 4: (2, 1), 2: (4, 1)}  # bits to codes that share bytes, and number of these bytes
ROW_BYTES = 16  # bytes

# GEARBX has a floor for fp16, where smaller scales would be subnormal, and one for fp32. bfloat16 has the exponents
# of fp32, and therefore its floor.
MIN_SCALES = {mx.float16: 1e-4, mx.bfloat16: 1e-8, mx.float32: 1e-8}


def row_bytes(width: int, bits: int) -> int:
    """Return bytes of one packed row of `width` codes, padding included."""
    codes, size = UNIT[bits]
    return math.ceil(math.ceil(width / codes) * size / ROW_BYTES) * ROW_BYTES


def pack_symmetric_codes(codes: mx.array, bits: int) -> mx.array:
    """Pack signed codes (..., I) into rows (..., row_bytes(I, bits)): int8 for 8 bits, else uint8.

    The first of the codes that share bytes is in the lowest bits of the first byte.
    """
    width, total = codes.shape[-1], row_bytes(codes.shape[-1], bits)
    filled = -(-total * 8 // bits // CODES_TOGETHER) * CODES_TOGETHER  # a row may cut the last ones
    codes = mx.pad(codes.astype(mx.int32), [(0, 0)] * (codes.ndim - 1) + [(0, filled - width)])
    if bits == 8:
        return codes[..., :total].astype(mx.int8)
    return pack_mlx_codes(codes + CODE_OFFSET[bits], bits).view(mx.uint8)[..., :total]


def unpack_symmetric_codes(rows: mx.array, bits: int, width: int) -> mx.array:
    """Return the inverse of `pack_symmetric_codes`: (..., bytes) to (..., width) int8 codes."""
    if bits == 8:
        return rows[..., :width]
    count, size = UNIT[bits]
    units = rows[..., : math.ceil(width / count) * size].reshape(*rows.shape[:-1], -1, size).astype(mx.uint32)
    word = units[..., 0]
    for i in range(1, size):
        word = word | (units[..., i] << (8 * i))
    codes = mx.stack([(word >> (i * bits)) & (2**bits - 1) for i in range(count)], axis=-1)
    return (codes.astype(mx.int32) - CODE_OFFSET[bits]).astype(mx.int8).reshape(*rows.shape[:-1], -1)[..., :width]


def quantize(weight: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """Quantize a matrix (..., O, I): codes int8, of its shape, and scales (..., O), of its type.

    Each scale is rounded to the weight's type before codes are fitted to it, so that every code is right for the
    stored scale: no error exceeds half a scale. The scale of a row with NaN or infinity is not finite.
    """
    w = weight.astype(mx.float32)
    scales = mx.maximum(mx.abs(w).max(axis=-1) / Q_MAX[bits], MIN_SCALES[weight.dtype]).astype(weight.dtype)
    codes = mx.round(w / scales.astype(mx.float32)[..., None])
    return mx.clip(codes, -Q_MAX[bits], Q_MAX[bits]).astype(mx.int8), scales


def dequantize(codes: mx.array, scales: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Return the weights (..., O, I), computed in float32 and rounded once, to `dtype`."""
    return (codes.astype(mx.float32) * scales.astype(mx.float32)[..., None]).astype(dtype)


class NativeSymmetric(Native, Reconstructed):
    """Base of native layers over symmetric codes, whose kernels read the packed rows."""

    @property
    def codes(self) -> SymmetricCodes:
        """The layer's current arrays."""
        return SymmetricCodes(self["weight"], self["scales"], self.bits, self.input_dims)

    def kind(self) -> MatmulKind | None:
        return MatmulKind(f"{self.format.name} {self.bits}", self.weight_shape, stock=False)


class NativeSymmetricLinear(NativeSymmetric, ReconstructedLinear):
    """A linear layer over symmetric codes, with native kernels that read the packed rows."""

    def __call__(self, x: mx.array) -> mx.array:
        y = symmetric_product(x, self.codes, self.get("bias"), self.x_bits, self.chosen)
        return super().__call__(x) if y is None else y

    def part(self, kernels: ModuleType) -> Any:
        weight, scales, bits, width = self.codes
        return kernels.symmetric_part(weight, scales, width, bits, self.x_bits, self.get("bias"))


class NativeSymmetricExperts(NativeExperts, NativeSymmetric, ReconstructedSwitchLinear):
    """A SwitchLinear over symmetric codes, with native kernels on Metal; a CPU reconstructs the weights of experts."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = symmetric_experts(x, self.codes, indices, self.chosen)
        return super().__call__(x, indices, sorted_indices) if y is None else with_expert_bias(self, y, indices)

    def kind(self) -> MatmulKind | None:
        kind = super().kind()
        return kind and experts_kind(kind)


class SymmetricFormat(ReconstructedFormat):
    """Base of formats of symmetric codes: every gear has separate codes, and rows or groups are padded."""

    native, native_experts, rounds = True, False, True
    native_kinds = NativeSymmetricLinear, NativeSymmetricExperts

    def fits(self, width: int, group_size: int) -> str | None:
        return None


class Rowwise(SymmetricFormat):
    """Format with 8, 6, 4 and 2 bits. Scales take little memory; the largest weight of a row sets the error of all."""

    name = "rowwise"
    scales = frozenset({"scales"})

    def check(self, bits: int) -> None:
        if bits not in Q_MAX:
            raise GearbxError(f"format 'rowwise' has no {bits}-bit gear; choose from 2, 4, 6, 8, 16")

    def reconstruct(self, arrays: Arrays, bits: int, width: int, dtype: mx.Dtype) -> mx.array:
        return dequantize(unpack_symmetric_codes(arrays["weight"], bits, width), arrays["scales"], dtype)

    def modules(self, dense: nn.Module, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> Gears:
        codes, scales = quantize(dense.weight, bits)
        arrays = {"weight": pack_symmetric_codes(codes, bits), "scales": scales.astype(dtype)}
        return {bits: self.module(dense, bits, arrays, ladder, group_size)}

    def stored_arrays(self, shape: Shape, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> StoredArrays:
        rows = tuple(shape[:-1])
        weight = StoredArray(mx.int8 if bits == 8 else mx.uint8, (*rows, row_bytes(shape[-1], bits)), bits, "weight")
        return {"weight": weight, "scales": StoredArray(dtype, rows, bits, "scales")}

    def bytes_read(self, shape: Shape, bits: int, ladder: Bits, group_size: int, scale_size: int) -> int:
        return math.prod(shape[:-1]) * (row_bytes(shape[-1], bits) + scale_size)
