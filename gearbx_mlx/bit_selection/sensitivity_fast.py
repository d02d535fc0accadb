"""Sensitivity to first order, from one backward pass: mlx-lm's own estimate for its dynamic quantization."""

import copy
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.quant.dynamic_quant import estimate_sensitivities

from ..errors import GearbxError
from ..gears.activations import on_cpu


def first_order(
    model: nn.Module, windows: Sequence[Sequence[int]], low: int, high: int, group_size: int
) -> dict[str, float]:
    """Path to sensitivity (nats per million weights), as mlx_lm.dynamic_quant has it.

    The gradient of the KL at a model of `low` bits, along the way from there to `high` bits.

    Args:
        model: as it was loaded, with no gearbox.
        windows: tokens, which are cut into rows of one length.

    Raises:
        GearbxError: a layer that mlx-lm cannot quantize.
    """
    if (
        on_cpu()
    ):  # where half precision is slow; a copy, since the type that a model was loaded in says what its gears are
        model = copy.deepcopy(model)
        model.set_dtype(mx.float32)
    tokens = [token for window in windows for token in window]
    length = min(len(tokens), max(map(len, windows)))
    rows = mx.array(tokens[: len(tokens) // length * length]).reshape(-1, length)
    try:
        found = estimate_sensitivities(model, rows, low, group_size, high, group_size)
    except ValueError as error:
        raise GearbxError(f"mlx-lm cannot estimate sensitivities of this model ({error}); measure them") from error
    return dict(found)
