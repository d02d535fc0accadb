"""What stands between the products of a layer, native: norms, rotary positions, SwiGLU.

Their few weights have the type of the activations.
"""

import functools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import activations, llama
from mlx_lm.models.rope_utils import Llama3RoPE
from mlx_lm.models.switch_layers import SwiGLU

from ..kernels.dispatch import rms_norm, rope, swiglu


class NativeRMSNorm(nn.RMSNorm):
    """An RMSNorm."""

    def __call__(self, x: mx.array) -> mx.array:
        return rms_norm(x, self["weight"], self.eps)


class NativeRoPE(nn.RoPE):
    """A RoPE."""

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        y = rope(x, inverse_frequencies(self.dims, self.base), offset, self.traditional, self.scale)
        return super().__call__(x, offset) if y is None else y


class NativeLlama3RoPE(Llama3RoPE):
    """The RoPE of Llama 3, whose low frequencies are slowed down."""

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        if "_inverse" not in self:
            self._inverse = 1 / self._freqs
            mx.eval(self._inverse)
        y = rope(x, self._inverse, offset, self.traditional)
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


class GatedMLP:
    """What a class of MLPs is combined with whose `__call__` is that of Llama's, word for word."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))  # type: ignore[attr-defined]


BETWEEN: dict[type[nn.Module], type[nn.Module]] = {
    nn.RMSNorm: NativeRMSNorm,
    nn.RoPE: NativeRoPE,
    Llama3RoPE: NativeLlama3RoPE,
    SwiGLU: NativeSwiGLU,
}


def gated(gate: mx.array, up: mx.array) -> mx.array:
    y = swiglu(gate, up)
    return activations.swiglu(gate, up) if y is None else y


@functools.cache
def native_mlp(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The native class for one of the many that mlx-lm's models have for the same MLP; None for other classes."""
    call, ours = kind.__call__, llama.MLP.__call__
    code = getattr(call, "__code__", None)
    if code is None or (code.co_code, code.co_names) != (ours.__code__.co_code, ours.__code__.co_names):
        return None
    if call.__globals__.get("swiglu") is not activations.swiglu:
        return None
    return type(f"Native{kind.__name__}", (GatedMLP, kind), {})


def stock_mlp(kind: type[nn.Module]) -> type[nn.Module] | None:
    """What native_mlp made `kind` of; None if it did not."""
    return kind.__bases__[1] if GatedMLP in kind.__bases__ else None
