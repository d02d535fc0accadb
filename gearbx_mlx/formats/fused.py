"""What stands between the products of a layer, native: norms, rotary positions, attention, SwiGLU.

Their few weights have the type of the activations.
"""

import functools
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import activations, base
from mlx_lm.models.rope_utils import Llama3RoPE
from mlx_lm.models.switch_layers import SwiGLU

from ..kernels import dispatch


class NativeRMSNorm(nn.RMSNorm):
    """An RMSNorm."""

    def __call__(self, x: mx.array) -> mx.array:
        return dispatch.rms_norm(x, self["weight"], self.eps)


class NativeRoPE(nn.RoPE):
    """A RoPE."""

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        y = dispatch.rope(x, inverse_frequencies(self.dims, self.base), offset, self.traditional, self.scale)
        return super().__call__(x, offset) if y is None else y


class NativeLlama3RoPE(Llama3RoPE):
    """The RoPE of Llama 3, whose low frequencies are slowed down."""

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        if "_inverse" not in self:
            self._inverse = 1 / self._freqs
            mx.eval(self._inverse)
        y = dispatch.rope(x, self._inverse, offset, self.traditional)
        return super().__call__(x, offset) if y is None else y


@functools.cache
def inverse_frequencies(dims: int, base: float) -> mx.array:
    """base^(-2i / dims), (dims / 2,), bit for bit as mx.fast.rope has them."""
    step = mx.array(np.log(np.float32(base)) / np.float32(dims // 2))
    with mx.stream(mx.cpu):
        found = mx.exp(mx.arange(0, -(dims // 2), -1, dtype=mx.float32) * step)
        mx.eval(found)
    return found


class NativeSwiGLU(SwiGLU):
    """The activation of a mixture's experts."""

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        return gated(gate, x)


ORIGIN = "mlx_lm_class"  # attribute of a class that was made of one of mlx-lm's

FUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.RMSNorm: NativeRMSNorm,
    nn.RoPE: NativeRoPE,
    Llama3RoPE: NativeLlama3RoPE,
    SwiGLU: NativeSwiGLU,
}


def gated(gate: mx.array, up: mx.array) -> mx.array:
    y = dispatch.swiglu(gate, up)
    return activations.swiglu(gate, up) if y is None else y


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """As base.scaled_dot_product_attention of mlx-lm, which is called where ours takes no such cache, mask or sinks."""
    plain = sinks is None and not hasattr(cache, "bits")
    y = dispatch.attention(queries, keys, values, scale, mask) if plain else None
    if y is None:
        return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    return y


# Functions of mlx-lm that its models call by these names, and what is called in their place.
FUNCTIONS = {
    "swiglu": (activations.swiglu, gated),
    "scaled_dot_product_attention": (base.scaled_dot_product_attention, attention),
}


@functools.cache
def native_class(kind: Any) -> type[nn.Module] | None:
    """A class of mlx-lm, but that its own `__call__` finds native functions by the names of mlx-lm's.

    None where it calls none of them.
    """
    call = kind.__call__
    if not isinstance(call, FunctionType):
        return None
    found = {
        name: ours
        for name, (theirs, ours) in FUNCTIONS.items()
        if name in call.__code__.co_names and call.__globals__.get(name) is theirs
    }
    if not found:
        return None
    made = FunctionType(
        call.__code__, {**call.__globals__, **found}, call.__name__, call.__defaults__, call.__closure__
    )
    made.__kwdefaults__ = call.__kwdefaults__
    return type(f"Native{kind.__name__}", (kind,), {"__call__": made, ORIGIN: kind})


def stock_class(kind: Any) -> type[nn.Module] | None:
    """What native_class made `kind` of; None if it did not."""
    return vars(kind).get(ORIGIN)
