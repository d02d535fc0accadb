"""The frozen model of a draft head: its hidden states, embeddings and output rows."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..compat.classes import as_class
from ..decoding.hidden import recorded
from ..errors import GearbxError
from ..gears.gearbox import in_one_gear

STATES = 3  # hidden states that a head reads


class Table:
    """The matrix of an embedding or an output head, read row by row."""

    def __init__(self, module: nn.Module):
        self._rows: Any = as_class(module, nn.QuantizedEmbedding if "scales" in module else nn.Embedding)

    def rows(self, tokens: mx.array) -> mx.array:
        """Return the rows (..., D) of tokens (...), float32."""
        rows: mx.array = self._rows(tokens).astype(mx.float32)
        return rows


def recorded_layers(layers: int) -> tuple[int, int, int]:
    """Return the numbers of blocks after which the head reads: EAGLE-3's, or evenly spaced ones in a small model."""
    usual = 2, layers // 2, layers - 3
    few = max(1, layers // 3), max(1, 2 * layers // 3), layers
    return usual if len({*usual}) == STATES and min(usual) > 0 else few


class HeadTarget:
    """Model that a head drafts for, on its fastest kernels.

    Raises:
        GearbxError: a model without `model.model.layers` and an embedding.
    """

    def __init__(self, model: nn.Module, name: str):
        inner: Any = getattr(model, "model", None)
        parts: list[Any] = [getattr(inner, part, None) for part in ("layers", "embed_tokens", "norm")]
        if not isinstance(parts[0], list) or None in parts:
            raise GearbxError(
                f"{name}: {type(model).__module__} is not like a Llama, so it has no draft heads; "
                "use a model with model.layers, model.embed_tokens and model.norm"
            )
        self.model, self.inner, self.layers = model, inner, recorded_layers(len(parts[0]))
        self.embedding = Table(parts[1])
        self.output = Table(model.lm_head) if "lm_head" in model else self.embedding
        width = self.embedding.rows(mx.array([0])).shape[-1]
        self.norm = parts[2](mx.ones((1, width))).reshape(-1).astype(mx.float32)  # its weights, whatever its class
        mx.eval(self.norm)
        sizes = {name: array.nbytes for name, array in tree_flatten(model.parameters())}
        apart = 0 if self.output is self.embedding else parts[1].weight.nbytes
        self.nbytes = sum(sizes.values()) - apart  # bytes read per token
        self.gearbox = in_one_gear(model)
        self.scale = mx.ones(STATES * width)
        """Root mean square of each channel of the states; folded into `fc` when a head is saved."""

    @property
    def width(self) -> int:
        return self.norm.size

    def states(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Return scaled hidden states (B, L, 3D) of the recorded blocks and the last, normed one (B, L, D)."""
        with recorded(self.inner, self.layers) as outputs:
            last = self.inner(tokens)
        states = mx.concatenate([outputs[layer].astype(mx.float32) for layer in self.layers], axis=-1)
        return states / self.scale, last.astype(mx.float32)


def scale_of(states: mx.array) -> mx.array:
    """Return the root mean square of each channel of states (..., C)."""
    return mx.maximum(mx.sqrt(mx.square(states).reshape(-1, states.shape[-1]).mean(0)), 1e-4)
