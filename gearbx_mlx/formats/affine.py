"""Stock MLX quantization: w = scale * code + bias per group, one separate copy for each gear."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from .base import quantized_module


class Affine:
    """Every gear is an `nn.QuantizedLinear` (or mlx-lm's `QuantizedSwitchLinear`), as `mlx_lm.convert` makes it."""

    name = "affine"

    def modules(
        self, dense: nn.Module, wanted: int, ladder: Sequence[int], group_size: int, dtype: mx.Dtype
    ) -> dict[int, nn.Module]:
        weight, scales, biases = mx.quantize(dense.weight, group_size, wanted)
        return {wanted: quantized_module(dense, wanted, group_size, weight, scales.astype(dtype), biases.astype(dtype))}

    def bytes_read(self, weights: int, bits: int, ladder: Sequence[int], group_size: int, scale_size: int) -> int:
        return weights * bits // 8 + 2 * weights // group_size * scale_size
