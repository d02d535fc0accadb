"""A tied embedding: one matrix that is read row by row going in, and multiplied whole as the output head."""

import mlx.core as mx
import mlx.nn as nn

from .native import NativeDense, NativeEmbedding, bare


class TiedEmbedding(nn.Embedding):
    """The token embedding of a model without a head of its own, whose head is a linear layer that changes gear.

    Tokens going in read their rows of the weight as it is: that is one row a token, and what it would save to round
    them is nothing beside the head, which reads every row.

    Args:
        weight: (V, D).
        projection: a linear layer (..., D) -> (..., V) over the same matrix, in any precision.
    """

    def __init__(self, weight: mx.array, projection: nn.Module, dtype: mx.Dtype | None = None):
        nn.Module.__init__(self)  # nn.Embedding's would draw a weight
        self.weight = weight
        self.projection = projection
        self.dtype = dtype or weight.dtype  # of the rows that go in
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        return self["weight"][x].astype(self.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.projection(x)


def linear_of(module: nn.Module) -> nn.Module:
    """The linear layer that a managed module multiplies by: itself, or the head that an embedding is."""
    if isinstance(module, TiedEmbedding):
        return module.projection
    if not isinstance(module, nn.Embedding):
        return module
    head = bare(NativeDense if isinstance(module, NativeEmbedding) else nn.Linear)
    head.weight = module.weight
    return head


def in_place_of(module: nn.Module, linear: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """What stands where `module` stood once its linear layer is `linear`: a tied embedding stays one."""
    return TiedEmbedding(module.weight, linear, dtype) if isinstance(module, nn.Embedding) else linear
