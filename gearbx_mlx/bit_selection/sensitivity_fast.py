"""Sensitivity to first order, from one backward pass: the estimate that mlx-lm's dynamic quantization uses."""

import copy
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.quant.dynamic_quant import estimate_sensitivities

from ..errors import GearbxError
from ..kernels.dispatch import on_cpu


def first_order(
    model: nn.Module, windows: Sequence[Sequence[int]], low: int, high: int, group_size: int
) -> dict[str, float]:
    """The sensitivity of each layer (nats per million weights), by path, as mlx_lm.dynamic_quant estimates it.

    It is the gradient of the KL at a model of `low` bits, in the direction of the model of `high` bits.

    Args:
        model: as loaded, without a gearbox.
        windows: tokens; they are cut into rows of one length.

    Raises:
        GearbxError: a layer that mlx-lm cannot quantize.
    """
    if on_cpu():  # where half precision is slow. A copy: the gears follow from the type that the model was loaded in
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
