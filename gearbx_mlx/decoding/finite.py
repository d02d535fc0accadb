"""Logits that are no numbers: which layer they come from."""

import math

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..compat.arrays import dtype_name
from ..errors import GearbxError
from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import Gear


def check_finite(logprobs: mx.array, entropy: float, gearbox: Gearbox | Observer, gear: Gear) -> None:
    """Raises GearbxError, with the layer to blame, for log-probabilities that are NaN.

    Args:
        logprobs: of one token, (V,).
        entropy: of the token, bits.
        gear: that computed it.
    """
    if has_nan(logprobs, entropy):
        gearbox.shift(gear)
        raise not_finite(gearbox.model, f"gear '{gear.name}'", gearbox.compute_dtype)


def has_nan(logprobs: mx.array, entropy: float) -> bool:
    """Whether log-probabilities are NaN.

    A NaN or an infinity among the logits leaves no number but -inf among the log-probabilities, so that their entropy
    is the largest or 0. Other tokens cost no look at the array.
    """
    highest = math.log2(logprobs.shape[-1]) * (1 - 1e-6)
    return not 0.0 < entropy < highest and bool(mx.isnan(logprobs).any())


def not_finite(model: nn.Module, where: str, dtype: mx.Dtype) -> GearbxError:
    """The error for logits that are NaN. It names the first parameter that is not finite, if there is one."""
    for path, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating) and not mx.isfinite(array).all().item():
            layer, _, name = path.rpartition(".")
            why = "is not finite (NaN or infinity), and so no logits are; check the checkpoint"
            return GearbxError(f"{layer or 'the model'}: its {name} {why}")
    remedy = "give --dtype float32" if dtype != mx.float32 else "check the checkpoint, or what processes the logits"
    return GearbxError(
        f"the logits are not finite (NaN) in {where} and {dtype_name(dtype)}, and all weights are; {remedy}"
    )
