"""The sensitivities file of mlx_lm.dynamic_quant: a list of pairs, a layer's path and its sensitivity.

A sensitivity is the first-order estimate of the KL from full precision that is saved, per million weights, when one
layer of a model of low bits gets the high bits.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from ..errors import GearbxError
from ..files.reading import read_json

MAKE = "make it anew with mlx_lm.dynamic_quant"
Sensitivity = Annotated[float, Meta(ge=-1e100, le=1e100)]
MILLION = 1e6
LOW, HIGH = 4, 5  # mlx_lm's defaults
FOLD = 4.0  # by which the KL falls with every bit: the error halves, and the KL goes with its square


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
