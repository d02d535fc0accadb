"""Sensitivity to first order, from one backward pass: the estimate of mlx-lm's dynamic quantization, and its file.

A sensitivity is the first-order estimate of the KL from full precision that is saved, per million weights, when one
layer of a model of low bits gets the high bits. The file of mlx_lm.dynamic_quant is a list of pairs, a layer's path and
its sensitivity.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.quant.dynamic_quant import estimate_sensitivities
from msgspec import Meta

from ..errors import GearbxError
from ..files.reading import read_json
from ..kernels.dispatch import on_cpu
from .defaults import HIGH, LOW

MAKE = "make it anew with mlx_lm.dynamic_quant"
Sensitivity = Annotated[float, Meta(ge=-1e100, le=1e100)]
MILLION = 1e6
FOLD = 4.0  # by which the KL falls with every bit: the error halves, and the KL goes with its square


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


def read_sensitivities(file: Path) -> dict[str, float]:
    """The sensitivity of each layer, by path.

    Raises:
        GearbxError: it cannot be read, is no list of pairs, or has a number that is not finite.
    """
    pairs = dict(read_json(file, list[tuple[str, Sensitivity]], "sensitivities of mlx_lm.dynamic_quant", MAKE))
    if not pairs:
        raise GearbxError(f"{file}: has no layer; {MAKE}")
    return pairs


def as_kl(sensitivity: float, weights: int, bits: Sequence[int], low: int = LOW) -> dict[int, float]:
    """A proxy for a layer's KL (nats) at each width, from its sensitivity at `low` bits; at least 0."""
    return {width: max(sensitivity, 0.0) * weights / MILLION * FOLD ** (low - width) for width in bits}


def sensitivities_of(layers: Mapping[str, Any]) -> list[tuple[str, float]]:
    """For mlx_lm.dynamic_quant, from measured KLs: what 4 bits lose and 5 do not, per million weights.

    Args:
        layers: path to LayerPrecision.

    Raises:
        GearbxError: a layer was not measured at 4 and 5 bits.
    """
    found = []
    for path, layer in layers.items():
        if not {LOW, HIGH} <= layer.kl.keys():
            raise GearbxError(f"{path}: was not measured at {LOW} and {HIGH} bits, which mlx_lm.dynamic_quant needs")
        found.append((path, (layer.kl[LOW] - layer.kl[HIGH]) / (layer.weights / MILLION)))
    return found
