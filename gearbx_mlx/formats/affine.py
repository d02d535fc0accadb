"""Stock MLX quantization: w = scale * code + bias per group, one separate copy for each gear."""

import math
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from .base import quantized_module, whole_groups


class Affine:
    """Every gear is an `nn.QuantizedLinear` (or mlx-lm's `QuantizedSwitchLinear`), as `mlx_lm.convert` makes it."""

    name = "affine"
    layer_bits: tuple[int, ...] = ()
    native = native_experts = True

    def check(self, bits: int) -> None:
        pass  # a ladder has no bits that MLX has not

    def fits(self, width: int, group_size: int) -> str | None:
        return whole_groups(width, group_size)

    def modules(
        self, dense: nn.Module, wanted: int, ladder: Sequence[int], group_size: int, dtype: mx.Dtype
    ) -> dict[int, nn.Module]:
        weight, scales, biases = mx.quantize(dense.weight, group_size, wanted)
        return {wanted: quantized_module(dense, wanted, group_size, weight, scales.astype(dtype), biases.astype(dtype))}

    def bytes_read(
        self, shape: Sequence[int], bits: int, ladder: Sequence[int], group_size: int, scale_size: int
    ) -> int:
        weights = math.prod(shape)
        return weights * bits // 8 + 2 * weights // group_size * scale_size
