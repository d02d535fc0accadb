"""A tied embedding: one matrix, whose rows are looked up for input tokens, and which is also the output head."""

import mlx.core as mx
import mlx.nn as nn

from .native import NativeDense, NativeEmbedding, bare


class TiedEmbedding(nn.Embedding):
    """A token embedding whose output head is a linear layer that changes gear.

    An input token reads one row of the original weight. Quantizing that row would save next to nothing: the head reads
    every row.

    Args:
        weight: (V, D).
        projection: the head, a linear layer (..., D) -> (..., V) over the same matrix, in any precision.
        dtype: of the rows that are looked up; the weight's own type if not given, or once the weight gets another.
    """

    def __init__(self, weight: mx.array, projection: nn.Module, dtype: mx.Dtype | None = None):
        nn.Module.__init__(self)  # that of nn.Embedding would draw random numbers
        self.weight = weight
        self.projection = projection
        self.stored, self.dtype = weight.dtype, dtype or weight.dtype
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        return weight[x].astype(self.dtype if weight.dtype == self.stored else weight.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.projection(x)


def linear_of(module: nn.Module) -> nn.Module:
    """The linear layer of a managed module: the module itself, or the head of an embedding."""
    if isinstance(module, TiedEmbedding):
        return module.projection
    if not isinstance(module, nn.Embedding):
        return module
    head = bare(NativeDense if isinstance(module, NativeEmbedding) else nn.Linear)
    head.weight = module.weight
    return head


def in_place_of(module: nn.Module, linear: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """The replacement for `module` with `linear` as its linear layer; an embedding stays a tied embedding."""
    if not isinstance(module, nn.Embedding):
        return linear
    made = TiedEmbedding(module.weight, linear, dtype)
    made.stored = getattr(module, "stored", made.stored)
    return made
