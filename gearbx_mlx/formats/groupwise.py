"""Symmetric quantization to 4 bits with one float32 scale per group of 32 inputs, two codes to a byte (AION 3.2).

AION requires symmetric codes without defining their range; here it is -7 to 7. Codes are packed as in `rowwise`,
the first in the low nibble, with an offset of 8. A group takes 16 bytes, so that rows are aligned without padding. A
partial last group is filled with zeros.
"""

import math

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError
from .base import Arrays, Bits, Gears, Shape, StoredArray, StoredArrays
from .rowwise import SymmetricFormat, pack_symmetric_codes, unpack_symmetric_codes

GROUP_BITS, GROUP_Q_MAX, GROUP_INPUTS = 4, 7, 32
GROUP_BYTES = GROUP_INPUTS * GROUP_BITS // 8
SCALE_SIZE = 4  # bytes: always float32


def quantize(weight: mx.array) -> tuple[mx.array, mx.array]:
    """Quantize a matrix (..., O, I).

    Returns:
        codes (..., O, G * 32) int8 and scales (..., O, G) float32, G = I / 32 rounded up. The scale of a group with
        NaN or infinity is not finite.
    """
    missing = -weight.shape[-1] % GROUP_INPUTS
    w = mx.pad(weight.astype(mx.float32), [(0, 0)] * (weight.ndim - 1) + [(0, missing)])
    w = w.reshape(*weight.shape[:-1], -1, GROUP_INPUTS)
    # AION defines no smallest scale, and a group of zeros needs one: the floor of per-channel float32 scales.
    scales = mx.maximum(mx.abs(w).max(axis=-1) / GROUP_Q_MAX, 1e-8)
    codes = mx.clip(mx.round(w / scales[..., None]), -GROUP_Q_MAX, GROUP_Q_MAX).astype(mx.int8)
    return codes.reshape(*weight.shape[:-1], -1), scales


def dequantize(codes: mx.array, scales: mx.array, width: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Return the weights (..., O, width), computed in float32 and rounded once, to `dtype`."""
    groups = codes.reshape(*scales.shape, GROUP_INPUTS).astype(mx.float32) * scales[..., None].astype(mx.float32)
    return groups.reshape(*scales.shape[:-1], -1)[..., :width].astype(dtype)


class Groupwise(SymmetricFormat):
    """Format with one 4-bit gear; with the scales, 5 bits per weight. A partial last group is filled with zeros."""

    name = "groupwise"
    scales: frozenset[str] = frozenset()  # always float32

    def check(self, bits: int) -> None:
        if bits != GROUP_BITS:
            raise GearbxError(f"format 'groupwise' has no {bits}-bit gear; choose from 4, 16")

    def span(self, group_size: int) -> int | None:
        return GROUP_INPUTS

    def reconstruct(self, arrays: Arrays, bits: int, width: int, dtype: mx.Dtype) -> mx.array:
        codes = unpack_symmetric_codes(arrays["weight"], GROUP_BITS, arrays["scales"].shape[-1] * GROUP_INPUTS)
        return dequantize(codes, arrays["scales"], width, dtype)

    def modules(self, dense: nn.Module, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> Gears:
        codes, scales = quantize(dense.weight)
        arrays = {"weight": pack_symmetric_codes(codes, GROUP_BITS), "scales": scales}
        return {GROUP_BITS: self.module(dense, GROUP_BITS, arrays, ladder, group_size)}

    def stored_arrays(self, shape: Shape, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> StoredArrays:
        rows, groups = tuple(shape[:-1]), math.ceil(shape[-1] / GROUP_INPUTS)
        weight = StoredArray(mx.uint8, (*rows, groups * GROUP_BYTES), GROUP_BITS, "weight")
        return {"weight": weight, "scales": StoredArray(mx.float32, (*rows, groups), GROUP_BITS, "scales")}

    def bytes_read(self, shape: Shape, bits: int, ladder: Bits, group_size: int, scale_size: int) -> int:
        groups = math.prod(shape[:-1]) * math.ceil(shape[-1] / GROUP_INPUTS)
        return groups * (GROUP_BYTES + SCALE_SIZE)
