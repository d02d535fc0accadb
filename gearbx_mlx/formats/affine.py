"""MLX's own quantization: w = scale * code + bias per group, with a separate copy for each gear."""

import math
from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn

from .base import Copies, StoredArray, affine_arrays, quantized_module, whole_groups


class Affine(Copies):
    """Every gear is an `nn.QuantizedLinear` (or mlx-lm's `QuantizedSwitchLinear`), as `mlx_lm.convert` makes it."""

    name = "affine"
    layer_bits: tuple[int, ...] = ()
    native = native_experts = rounds = True
    scales = frozenset({"scales", "biases"})

    def check(self, bits: int) -> None:
        pass  # MLX supports all bits that a ladder may have

    def fits(self, width: int, group_size: int) -> str | None:
        return whole_groups(width, group_size)

    def span(self, group_size: int) -> int | None:
        return group_size

    def modules(
        self, dense: nn.Module, bits: int, ladder: Sequence[int], group_size: int, dtype: mx.Dtype
    ) -> dict[int, nn.Module]:
        weight, scales, biases = mx.quantize(dense.weight, group_size, bits)
        arrays = {"weight": weight, "scales": scales.astype(dtype), "biases": biases.astype(dtype)}
        return {bits: self.module(dense, bits, arrays, ladder, group_size)}

    def module(
        self, dense: nn.Module, bits: int, arrays: Mapping[str, mx.array], ladder: Sequence[int], group_size: int
    ) -> nn.Module:
        return quantized_module(dense, bits, group_size, arrays["weight"], arrays["scales"], arrays["biases"])

    def stored_arrays(
        self, shape: Sequence[int], bits: int, ladder: Sequence[int], group_size: int, dtype: mx.Dtype
    ) -> dict[str, StoredArray]:
        return affine_arrays(shape, bits, group_size, dtype)

    def bytes_read(
        self, shape: Sequence[int], bits: int, ladder: Sequence[int], group_size: int, scale_size: int
    ) -> int:
        weights = math.prod(shape)
        return weights * bits // 8 + 2 * weights // group_size * scale_size
