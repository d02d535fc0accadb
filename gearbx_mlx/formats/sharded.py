"""Layers of which each rank of a group has some rows or columns, with what the ranks then tell each other.

A rank's rows or columns are a layer of their own (`linear`), in any format. Around a layer whose outputs are divided
there is nothing: the rank's outputs are what its next layer takes.
"""

import mlx.core as mx
import mlx.nn as nn

INNER = "linear"  # the name of the layer inside


class Shard(nn.Module):
    """A rank's part of a layer whose inputs are divided among the ranks.

    Args:
        linear: the part, a layer of its own; it changes gear.
        group: the ranks.
    """

    def __init__(self, linear: nn.Module, group: mx.distributed.Group):
        super().__init__()
        self.linear, self.group = linear, group


class SummedLinear(Shard):
    """Some columns of a linear layer (..., I / N) -> (..., O): the ranks' products are summed, as mlx-lm does it.

    The sum is rounded otherwise than that of one process. The bias belongs to this module, and is added once.
    """

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.distributed.all_sum(self.linear(x), group=self.group)
        return y + self["bias"].astype(y.dtype) if "bias" in self else y


class GatheredLinear(Shard):
    """Some rows of a linear layer (..., I / N) -> (..., O): every rank gets all inputs, and then all outputs.

    No sum is divided, so each output has the bits that it has in one process, and no group of inputs is cut.
    """

    def __call__(self, x: mx.array) -> mx.array:
        return gathered(self.linear(gathered(x, self.group)), self.group)


class PlacedLinear(Shard):
    """The same of a layer whose block sums over the ranks itself, such as experts: it gets zeros for others' outputs.

    x + 0 is x: the block's sum has the bits of one process.
    """

    def __call__(self, x: mx.array, *chosen: mx.array, sorted_indices: bool = False) -> mx.array:
        sorting = {"sorted_indices": True} if sorted_indices else {}
        y = self.linear(gathered(x, self.group), *chosen, **sorting)
        before = y.shape[-1] * self.group.rank()
        after = y.shape[-1] * self.group.size() - before - y.shape[-1]
        return mx.pad(y, [(0, 0)] * (y.ndim - 1) + [(before, after)])


def gathered(x: mx.array, group: mx.distributed.Group) -> mx.array:
    """The ranks' x (..., K) side by side in the order of the ranks, (..., N K)."""
    every = mx.distributed.all_gather(x[None], group=group)
    return mx.moveaxis(every, 0, -2).reshape(*x.shape[:-1], -1)
