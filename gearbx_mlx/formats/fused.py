"""Fused native operations that replace MLX's: norms, rotary positions, attention, SwiGLU.

For one token, a CPU spends more time on MLX's many small operations than on their arithmetic.
"""

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import activations, base
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.models.rope_utils import Llama3RoPE
from mlx_lm.models.switch_layers import SwiGLU

from ..compat.classes import calling, frequencies_of
from ..kernels import dispatch
from .kv_cache import NestedKVCache, block_planes


class NativeRMSNorm(nn.RMSNorm):
    """An RMSNorm that one native operation computes."""

    def __call__(self, x: mx.array) -> mx.array:
        return dispatch.rms_norm(x, self["weight"], self.eps)


class NativeRoPE(nn.RoPE):
    """A RoPE that one native operation computes."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        y = dispatch.rope(x, inverse_frequencies(self.dims, self.base), offset, self.traditional, self.scale)
        return super().__call__(x, offset) if y is None else y


class NativeLlama3RoPE(Llama3RoPE):
    """Llama 3's RoPE, with scaled frequencies, that one native operation computes."""

    @property
    def frequencies(self) -> mx.array:
        """Radians from position to position, (dims / 2,) float32."""
        if "_inverse" not in self:
            self._inverse = 1 / frequencies_of(self)
            mx.eval(self._inverse)
        return self["_inverse"]

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        y = dispatch.rope(x, self.frequencies, offset, self.traditional)
        return super().__call__(x, offset) if y is None else y


@functools.cache
def inverse_frequencies(dims: int, base: float) -> mx.array:
    """Return radians per position, base^(-2i / dims), (dims / 2,), bit-identical to mx.fast.rope."""
    step = mx.array(np.log(np.float32(base)) / np.float32(dims // 2))
    with mx.stream(mx.cpu):
        frequencies = mx.exp(mx.arange(0, -(dims // 2), -1, dtype=mx.float32) * step)
        mx.eval(frequencies)
    return frequencies


class NativeShiftedNorm(nn.Module):
    """A mixin that makes mlx-lm's norm of Gemma native, whose weight is one less than its factor."""

    def __call__(self, x: mx.array) -> mx.array:
        return dispatch.rms_norm(x, 1.0 + self["weight"], self.eps)


class NativeGeGLU(nn.Module):
    """A mixin that fuses the gate of mlx-lm's class of an MLP with an approximate GELU."""

    def __call__(self, x: mx.array) -> mx.array:
        y = dispatch.gated("geglu", self.gate_proj(x), self.up_proj(x))
        return super().__call__(x) if y is None else self.down_proj(y)


class NativeSwiGLU(SwiGLU):
    """The SwiGLU of a mixture's experts that one native operation computes."""

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        return swiglu(gate, x)


FUSED: dict[type[nn.Module], type[nn.Module]] = {  # MLX's module to its native form
    nn.RMSNorm: NativeRMSNorm,
    nn.RoPE: NativeRoPE,
    Llama3RoPE: NativeLlama3RoPE,
    SwiGLU: NativeSwiGLU,
}

BY_PRIVATE_NAMES = (Llama3RoPE,)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up, of gate's type."""
    y = dispatch.gated("swiglu", gate, up)
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
    """Compute attention with the arguments of mlx-lm's `scaled_dot_product_attention`.

    Quantized caches, masks of numbers and sinks use mlx-lm's function.
    """
    plain = sinks is None and not hasattr(cache, "bits")
    y = attended(queries, keys, values, cache, scale, mask) if plain else None
    if y is None:
        return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    return y


def left_padding(cache: object) -> mx.array | None:
    """Return how many first entries of a batch's cache are padding, (B,) int32; None for other caches."""
    return cache.left_padding if isinstance(cache, BatchKVCache) else None


def attended(
    queries: mx.array, keys: mx.array, values: mx.array, cache: object, scale: float, mask: mx.array | str | None
) -> mx.array | None:
    """Compute `attention`, reading keys and values of a cache in gears directly; None if there is no kernel."""
    nested = cache.read(queries.shape[2]) if isinstance(cache, NestedKVCache) else None
    if nested is None:
        return dispatch.attention(queries, keys, values, scale, mask, left_padding(cache))
    return dispatch.nested_attention(queries, nested.entries, block_planes(nested), scale, mask)


ATTENTION = "scaled_dot_product_attention"
# Names by which mlx-lm's models call a function: mlx-lm's function, and its native replacement.
FUNCTIONS = {
    "swiglu": (activations.swiglu, swiglu),
    ATTENTION: (base.scaled_dot_product_attention, attention),
}


@functools.cache
def native_class(kind: Any, names: tuple[str, ...] = tuple(FUNCTIONS)) -> type[nn.Module] | None:
    """Return a subclass of mlx-lm's class that calls native FUNCTIONS with these names; None if it calls none."""
    return calling(kind, {name: FUNCTIONS[name] for name in names})
