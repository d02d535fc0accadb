"""Tied embeddings: one matrix for the rows of input tokens and for the output head."""

import mlx.core as mx
import mlx.nn as nn

from ..compat.classes import bare
from ..kernels.bit_planes import Planes
from .native import NativeDense, NativeEmbedding, affine_planes, over_plane

IN_DRAFTS = "second"  # attribute for a head that replaces the projection during drafting, if there is one


class TiedEmbedding(nn.Embedding):
    """A token embedding whose output head is a linear layer that changes gear.

    An input token reads one row of the original weight. Quantizing that row would save no time: the head reads every
    row. In a file it saves most of the matrix (`QuantizedTied`).

    weight: (V, D). projection: the head, a linear layer (..., D) -> (..., V) over the same matrix, in any precision.
    dtype: of the rows of input tokens; the weight's type if not given, or after the weight's type changes.
    """

    def __init__(self, weight: mx.array, projection: nn.Module, dtype: mx.Dtype | None = None):
        nn.Module.__init__(self)  # nn.Embedding's would draw random numbers
        self.weight = weight
        self.projection = projection
        self.stored, self.dtype = weight.dtype, dtype or weight.dtype
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        return weight[x].astype(self.dtype if weight.dtype == self.stored else weight.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        logits: mx.array = self.get(IN_DRAFTS, self["projection"])(x)
        return logits

    def _extra_repr(self) -> str:
        return ""  # nn.Embedding's reads the weight, but some subclasses have none


class QuantizedTied(TiedEmbedding):
    """A tied embedding whose input tokens read rows, in `dtype`, of the affine head's own matrix, as in mlx-lm."""

    def __init__(self, projection: nn.Module, dtype: mx.Dtype):
        nn.Module.__init__(self)
        self.projection, self.stored, self.dtype = projection, projection["scales"].dtype, dtype
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        return packed_rows(self.projection, x, self.stored, self.dtype)


class ExactTied(TiedEmbedding):
    """A tied embedding whose input tokens read their rows of exact weights; or a table that is not an output head.

    rows: the exact linear layer whose rows are read; it may be the head itself. dtype: of these rows; it follows the
    model's type.
    """

    def __init__(self, projection: nn.Module, rows: nn.Module, dtype: mx.Dtype):
        nn.Module.__init__(self)
        self.projection, self.dtype = projection, dtype
        if rows is not projection:
            self.table = rows
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        rows: mx.array = self.get("table", self["projection"]).rows(x)
        return rows.astype(self.dtype)

    @property
    def dtype(self) -> mx.Dtype:
        """The type of an empty array that `set_dtype` converts; exact weights are integers and do not change."""
        return self["typed"].dtype

    @dtype.setter
    def dtype(self, dtype: mx.Dtype) -> None:
        self.typed = mx.zeros((0,), dtype)


class QuantizedTable(nn.QuantizedEmbedding):
    """MLX's quantized embedding, whose scales may have a different type than its rows."""

    stored = dtype = mx.float32

    def __call__(self, x: mx.array) -> mx.array:
        return packed_rows(self, x, self.stored, self.dtype)


def packed_rows(table: nn.Module, x: mx.array, stored: mx.Dtype, dtype: mx.Dtype) -> mx.array:
    """Return rows x of an affine matrix, (..., D), in `dtype` while its scales have the type `stored`, else theirs."""
    own = table["scales"].dtype
    dtype = dtype if own == stored else own
    (codes,), scales, (biases,), *_ = affine_planes(table).taken(x.flatten())
    rows = mx.dequantize(codes, scales.astype(dtype), biases.astype(dtype), table.group_size, table.bits)
    return rows.reshape(*x.shape, -1)


def quantized_table(planes: Planes, dtype: mx.Dtype) -> nn.Module:
    """Return an embedding over a single plane. dtype: of its rows."""
    table = bare(QuantizedTable)
    table.stored, table.dtype = planes.scales.dtype, dtype
    table.num_embeddings, table.dims = planes.shape
    return over_plane(table, planes)


def linear_of(module: nn.Module) -> nn.Module:
    """Return the linear layer of a managed module: the module itself, or the head of an embedding."""
    if isinstance(module, TiedEmbedding):
        return module.projection
    if not isinstance(module, nn.Embedding):
        return module
    linear = linear_with(module.weight, isinstance(module, NativeEmbedding))
    if isinstance(module, NativeEmbedding):
        linear.x_bits = module.x_bits
    return linear


def linear_with(weight: mx.array, native: bool = False) -> nn.Module:
    """Return a linear layer with this weight (O, I) and no bias."""
    linear = bare(NativeDense if native else nn.Linear)
    linear.weight = weight
    return linear


def in_place_of(module: nn.Module, linear: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """Return the replacement for `module` with `linear` as its linear layer; an embedding stays a tied embedding."""
    if not isinstance(module, nn.Embedding):
        return linear
    made = TiedEmbedding(module.weight, linear, dtype)
    made.stored = getattr(module, "stored", made.stored)
    return made
