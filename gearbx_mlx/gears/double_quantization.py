"""Detect weights that were quantized before and widened again (GEARBX 6.4, 13.3)."""

import statistics
import warnings
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import GearbxWarning

SAMPLED_LAYERS, SAMPLED_ROWS = 8, 8
GROUP = 32  # the smallest group in use: a group of 4-bit codes has 16 values at most
FEW_IN_GROUP = 16
FEW_IN_ROW, LONG_ROW = 256, 1024  # a row with one 8-bit scale has 256 values at most


def distinct(values: np.ndarray) -> int:
    """The number of different values."""
    return len(np.unique(values))


def looks_quantized(weights: Sequence[mx.array]) -> bool:
    """Whether weights have so few different values that they must have been quantized.

    Args:
        weights: dense matrices (..., O, I); a few rows of some of them are read.

    Returns:
        True if the median group of 32 has at most 16 values, or the median row of 1024 or more at most 256.
    """
    in_group: list[int] = []
    in_row: list[int] = []
    for weight in weights[:: max(1, len(weights) // SAMPLED_LAYERS)]:
        rows = weight.reshape(-1, weight.shape[-1])
        sample = np.array(rows[:: max(1, rows.shape[0] // SAMPLED_ROWS)][:SAMPLED_ROWS].astype(mx.float32))
        for row in sample:
            in_group += [distinct(group) for group in row[: len(row) // GROUP * GROUP].reshape(-1, GROUP)]
            if len(row) >= LONG_ROW:
                in_row.append(distinct(row))
    few_in_groups = bool(in_group) and statistics.median(in_group) <= FEW_IN_GROUP
    return few_in_groups or (bool(in_row) and statistics.median(in_row) <= FEW_IN_ROW)


def warn_if_quantized(weights: Sequence[mx.array]) -> None:
    """Warn if weights look quantized: quantizing them again loses more."""
    if looks_quantized(weights):
        warnings.warn(
            "the weights have few different values, as if they had been quantized before: "
            "quantizing them again adds to their error, most of all in the lowest gear",
            GearbxWarning,
            stacklevel=3,
        )
