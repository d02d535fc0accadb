"""Layers of format `exact` whose low and high bytes stay in a file, and are read at every use.

MLX is lazy: layers that took their bytes while the graph is built would have those of the whole model in memory before
anything is computed. So these layers have every strip computed before they take a further one but two.
"""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import GearbxError
from ..formats.exact import (
    ExactLinear,
    ExactMultiLinear,
    ExactSwitchLinear,
    NativeExactLinear,
    NativeExactMultiLinear,
    NativeExactSwitchLinear,
)
from ..formats.native import Native, with_expert_bias
from ..kernels.exact import LOW_BITS, ExactMatrix, decode, decoded, exact_experts, exact_product, product_by_tiles
from .output_head import only_shapes
from .strip_reader import StripReader
from .strips import Remainder, Strip, strips_of, with_blocks, with_strip

EXACT = (ExactLinear, ExactSwitchLinear, ExactMultiLinear)


class Streamed(nn.Module):
    """What the layers share: an exact layer without `low` and `high`, and where these are."""

    remainder: Remainder
    reader: StripReader
    low_type: mx.Dtype

    @property
    def matrix(self) -> ExactMatrix:
        """What is in memory, with zeros for the rest: enough to work out shapes."""
        codes, width = self["codes"][0], self["group_scales"].shape[-1] * self.group_size
        low = mx.zeros(
            (*codes.shape[:-1], width if self.low_type == mx.uint8 else width * LOW_BITS // 32), self.low_type
        )
        beside = low, mx.zeros(1, mx.uint8), self["offsets"]
        packed = self["codes"], self["group_scales"], self["group_biases"], *beside
        return ExactMatrix(*packed, list(self.widths), self.group_size)

    @property
    def bytes_read(self) -> int:
        """The bytes of the whole weight, of all experts, in memory and in the file."""
        matrix = self.matrix
        arrays = *matrix.weights, matrix.scales, *matrix.biases, matrix.offsets
        return sum(array.nbytes for array in arrays) + self.remainder.nbytes

    def dense_weight(self) -> mx.array:
        """The weight (..., O, I), bfloat16."""
        if only_shapes.get():
            return decode(self.matrix)
        compute = functools.partial(decoded, decode=decode) if isinstance(self, NativeExactMultiLinear) else decode
        return mx.concatenate(self.by_strips(compute)).reshape(self.weight_shape)

    def rows(self, chosen: mx.array) -> mx.array:
        """Rows of the weight (O, I), (..., I) bfloat16, which alone are read. chosen: (...)."""
        if only_shapes.get():
            return mx.zeros((*chosen.shape, self.weight_shape[-1]), mx.bfloat16)
        numbers, places = np.unique(np.array(chosen), return_inverse=True)
        rows = decode(self.blocks(numbers, 1))
        return rows[mx.array(places.reshape(chosen.shape))]

    @functools.cached_property
    def offsets_on_cpu(self) -> np.ndarray:
        """Where the bytes of each row begin."""
        return np.array(self["offsets"])

    @functools.cached_property
    def strips(self) -> list[Strip]:
        """All rows, in the parts in which they are read."""
        return strips_of(self.remainder, self.matrix.flat, self.offsets_on_cpu)

    def by_strips(self, compute: Callable[[ExactMatrix], mx.array]) -> list[mx.array]:
        """What `compute` makes of each strip."""
        matrix = self.matrix.flat
        return self.reader.over(
            self.strips, lambda strip, memory: compute(with_strip(matrix, strip, memory, self.low_type))
        )

    def blocks(self, chosen: np.ndarray, height: int) -> ExactMatrix:
        """Some blocks of `height` rows as one matrix (rows, I), complete, which alone are read.

        Args:
            chosen: numbers of blocks. One beyond the last is the last: MLX reads anything there.
        """
        offsets = self.offsets_on_cpu
        numbers = np.clip(chosen.astype(np.int64), 0, (len(offsets) - 1) // height - 1)
        self.reader.verify(self.remainder.low, self.remainder.high)
        strips = [self.remainder.rows(height * n, height * (n + 1), offsets) for n in numbers.tolist()]
        low = self.reader.joined([strip.low for strip in strips])
        high = self.reader.joined([strip.high for strip in strips])
        return with_blocks(self.matrix.flat, numbers, height, strips, low.view(self.low_type), high)


class StreamedLinear(Streamed, ExactLinear):
    """A linear layer (..., I) -> (..., O), with MLX's kernels."""

    def __call__(self, x: mx.array) -> mx.array:
        if only_shapes.get():
            return super().__call__(x)
        product: Callable[..., mx.array] = exact_product if isinstance(self, Native) else product_by_tiles
        y = mx.concatenate(self.by_strips(lambda matrix: product(x, matrix, decode)), axis=-1)
        return y + self["bias"].astype(y.dtype) if "bias" in self else y


class NativeStreamedLinear(StreamedLinear, NativeExactLinear):
    """A linear layer with native kernels."""

    def kind(self) -> None:
        """Nothing to choose: to measure would be to read the disk."""


class StreamedSwitchLinear(Streamed, ExactSwitchLinear):
    """A SwitchLinear. The experts that `indices` names are read, when their names are known: nothing is read ahead."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if only_shapes.get():
            return super().__call__(x, indices, sorted_indices)
        height = self.output_dims
        chosen, places = np.unique(np.array(indices), return_inverse=True)
        matrix = self.blocks(chosen, height).each(lambda array: array.reshape(len(chosen), height, -1))
        now = mx.array(places.reshape(indices.shape).astype(np.uint32))
        y = exact_experts(x, matrix, decode, now, sorted_indices, isinstance(self, Native))
        y = with_expert_bias(self, y, indices)
        mx.eval(y)  # before the next layer reads its own experts
        return y


class NativeStreamedSwitchLinear(StreamedSwitchLinear, NativeExactSwitchLinear):
    """A SwitchLinear with native kernels."""


class StreamedMultiLinear(Streamed, ExactMultiLinear):
    """A MultiLinear: a matrix for each head, decoded at every use."""


class NativeStreamedMultiLinear(StreamedMultiLinear, NativeExactMultiLinear):
    """A MultiLinear that a native kernel decodes."""


KINDS: dict[Any, type[Streamed]] = {
    ExactLinear: StreamedLinear,
    NativeExactLinear: NativeStreamedLinear,
    ExactSwitchLinear: StreamedSwitchLinear,
    NativeExactSwitchLinear: NativeStreamedSwitchLinear,
    ExactMultiLinear: StreamedMultiLinear,
    NativeExactMultiLinear: NativeStreamedMultiLinear,
}


def stream(module: nn.Module, remainder: Remainder, reader: StripReader) -> None:
    """Make a layer over unread arrays one that reads them at every use, and does not keep them.

    Raises:
        GearbxError: a layer of a kind that cannot.
    """
    kind = KINDS.get(type(module))
    if kind is None:
        raise GearbxError(
            f"residency stream cannot read a {type(module).__name__} from the disk; use another residency"
        )
    own = {"remainder": remainder, "reader": reader, "low_type": module["low"].dtype}
    for name in ("low", "high"):
        del module[name]
    module.__class__ = kind
    for name, value in own.items():
        object.__setattr__(module, name, value)  # not into the dictionary of parameters
