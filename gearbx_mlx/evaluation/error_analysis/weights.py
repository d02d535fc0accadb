"""The error of quantized weights against its textbook estimate, and what quantizing twice adds (GEARBX 13.1, 13.3)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...decoding.rows import linear_layers
from ...formats import rowwise
from ...gears.sources import looks_quantized

BITS = (8, 6, 4, 2)
IDEAL = {bits: (rowwise.Q_MAX[8] / rowwise.Q_MAX[bits]) ** 2 for bits in BITS}  # s^2 over that of 8 bits (13.1)
GROUP = 64

Quantizer = Callable[[mx.array], mx.array]


def mean(values: mx.array) -> float:
    return float(np.array(values.mean()))


def mean_square(values: mx.array) -> float:
    return mean(mx.square(values.astype(mx.float32)))


def by_rows(bits: int) -> Quantizer:
    """Quantizes and dequantizes (O, I), with one scale a row (GEARBX 5.1)."""
    return lambda weight: rowwise.dequantize(*rowwise.quantize(weight, bits))


def by_groups(bits: int) -> Quantizer:
    """Quantizes and dequantizes (O, I), as MLX does with groups of 64."""
    return lambda weight: mx.dequantize(*mx.quantize(weight, GROUP, bits), GROUP, bits)


def error_of(weight: mx.array, bits: int) -> tuple[float, float]:
    """The MSE of a matrix (O, I) in per-row symmetric codes, and its estimate, the mean of s^2 / 12 over its rows."""
    codes, scales = rowwise.quantize(weight, bits)
    error = rowwise.dequantize(codes, scales) - weight.astype(mx.float32)
    return mean_square(error), mean_square(scales) / 12


def layer_errors(model: nn.Module, bits: Sequence[int] = BITS) -> list[dict[str, Any]]:
    """The errors of a model's blocks, matrices weighted by their sizes.

    Returns:
        a row for each block and number of bits: `layer`, `bits`, `mse`, `estimate` (mean s^2 / 12), their `quotient`,
        and `ratio` (the MSE over that of 8 bits).
    """
    rows = []
    for number, block in enumerate(model.layers):
        weights = [layer.weight for layer in linear_layers(block)]
        sizes = [weight.size for weight in weights]
        means = {}
        for each in sorted({*bits, 8}):
            found = [error_of(weight, each) for weight in weights]
            means[each] = np.average(found, axis=0, weights=sizes).tolist()
        for each in bits:
            mse, estimate = means[each]
            found_row = {"layer": number, "bits": each, "mse": mse, "estimate": estimate}
            rows.append(found_row | {"quotient": mse / estimate, "ratio": mse / means[8][0]})
    return rows


def twice(weight: mx.array, first: Quantizer, second: Quantizer) -> dict[str, float]:
    """The parts of the error of a matrix (O, I) that is quantized, widened, and quantized again (GEARBX 13.3).

    Returns:
        mean squares: `total` = `original` (the first error) + `second` (of the widened matrix) + `cross` (twice the
        mean product of both errors); `once`: the error of `second` on the matrix itself.
    """
    exact = weight.astype(mx.float32)
    widened = first(exact)
    errors = widened - exact, second(widened) - widened
    return {
        "original": mean_square(errors[0]),
        "second": mean_square(errors[1]),
        "cross": 2 * mean(errors[0] * errors[1]),
        "total": mean_square(errors[0] + errors[1]),
        "once": mean_square(second(exact) - exact),
    }


WAYS: Mapping[str, Quantizer] = {
    "8 bits, rows": by_rows(8),
    "8 bits, groups of 64": by_groups(8),
    "4 bits, groups of 64": by_groups(4),
    "4 bits, rows": by_rows(4),
}


def twice_in_all_ways(model: nn.Module, ways: Mapping[str, Quantizer] = WAYS) -> list[dict[str, Any]]:
    """`twice` for each pair of ways, as means over the matrices of a model's blocks.

    Returns:
        rows that have `first` and `then`, the names, and `flagged`: whether the widened matrices look quantized to
        `looks_quantized`.
    """
    weights = [layer.weight.astype(mx.float32) for block in model.layers for layer in linear_layers(block)]
    total = sum(weight.size for weight in weights)
    rows = []
    for first, widen in ways.items():
        flagged = looks_quantized([widen(weight).astype(mx.float16) for weight in weights])
        for then, quantizer in ways.items():
            found = [twice(weight, widen, quantizer) for weight in weights]
            means = {k: sum(f[k] * w.size for f, w in zip(found, weights)) / total for k in found[0]}
            rows.append({"first": first, "then": then, "flagged": flagged} | means)
    return rows
