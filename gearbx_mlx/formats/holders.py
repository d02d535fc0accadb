"""Holders of a layer that changes gear: an adapter, or the communication between ranks about their parts.

mlx-lm's adapters, LoRA and DoRA, stay in their own precision on top of any gear. LoRA adds a matmul to the output of
its layer. DoRA also divides each output by the norm of its row of W + scale * B A. For that, mlx-lm's class reads the
dense weight again at every token. Here the norms are computed once in each gear, from the gear's dequantized weight: as
mlx-lm does it over a quantized layer.

A rank of a group has some rows or columns of a layer, as a separate layer (`linear`) in any format. A layer whose
outputs are divided needs no holder: its outputs are the inputs of the rank's next layer.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from ..compat.classes import as_class
from ..errors import GearbxError
from .base import dense_weight

OWN_ARRAYS = ("lora_a", "lora_b", "m")  # an adapter's own arrays, as mlx-lm saves them
ROW_NORMS = "row_norms"  # attribute of a linear layer under DoRA


class GearedAdapter:
    """An adapter whose layer changes gear."""

    def fuse(self, dequantize: bool = False) -> nn.Module:
        """Raise GearbxError, since the adapter would be in one gear, and not in the others."""
        raise GearbxError("an adapter cannot be fused into gears; use mlx_lm.fuse on the original first")


class GearedDoRALinear(GearedAdapter, DoRALinear):
    """A DoRALinear over a linear layer (..., I) -> (..., O) in any gear: m * (x W + scale x A B) / norms + bias.

    The bias is not scaled by the norms, and belongs to this module, and not to the layer inside.
    """

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        z = (self.dropout(x) @ self.lora_a) @ self.lora_b
        norms = row_norms(self, self.linear, lambda: (self.scale * self.lora_b.T) @ self.lora_a.T)
        out = (self.m / norms).astype(x.dtype) * (y + (self.scale * z).astype(x.dtype))
        return out + self["bias"] if "bias" in self else out


class GearedDoRAEmbedding(GearedAdapter, DoRAEmbedding):
    """A DoRAEmbedding over a tied embedding with a head in any gear. Input tokens read the original rows."""

    def as_linear(self, x: mx.array) -> mx.array:
        y = self.embedding.as_linear(x)
        z = (self.dropout(x) @ self.lora_b.T) @ self.lora_a.T
        head = self.embedding.projection if "projection" in self.embedding else self.embedding
        norms = row_norms(self, head, lambda: (self.scale * self.lora_a) @ self.lora_b)
        return (self.m / norms) * (y + (self.scale * z).astype(x.dtype))


GEARED: dict[type[nn.Module], type[nn.Module]] = {  # mlx-lm's adapters, and their forms over gears
    **{
        kind: type(f"Geared{kind.__name__}", (GearedAdapter, kind), {})
        for kind in (LoRALinear, LoRASwitchLinear, LoRAEmbedding)
    },
    DoRALinear: GearedDoRALinear,
    DoRAEmbedding: GearedDoRAEmbedding,
}


def row_norms(adapter: nn.Module, linear: nn.Module, delta: Callable[[], mx.array]) -> mx.array:
    """Return the norm (O,) of each row of a layer's weight plus the adapter's product, `delta` (O, I).

    The layer keeps them as long as the adapter has the same arrays; each gear has its own layer.
    """
    kept = vars(linear).get(ROW_NORMS)
    if kept is not None and all(kept[name] is adapter[name] for name in ("lora_a", "lora_b")):
        return kept["norms"]
    norms = mx.stop_gradient(mx.linalg.norm(dense_weight(linear) + delta(), axis=1))
    if not adapter.training:
        mx.eval(norms)
        vars(linear)[ROW_NORMS] = {"lora_a": adapter.lora_a, "lora_b": adapter.lora_b, "norms": norms}
    return norms


def inner_name(module: nn.Module) -> str | None:
    """Return the name of the layer inside an adapter; None for other modules."""
    adapts = isinstance(module, tuple(GEARED))
    return next((name for name in ("linear", "embedding") if name in module), None) if adapts else None


def over_gears(module: nn.Module) -> nn.Module:
    """Return the form of an adapter that works over any gear; other modules are returned unchanged."""
    kind: Any = GEARED.get(type(module))
    if kind is None:
        return module
    made = as_class(module, kind)
    if kind is GearedDoRALinear and "bias" in made.linear:
        made.bias = made.linear.pop("bias")
    return made


def held_name(module: nn.Module) -> str | None:
    """Return the name of the layer inside a holder (an adapter or a rank's part); None for other modules."""
    return "linear" if isinstance(module, RankPart) else inner_name(module)


class RankPart(nn.Module):
    """Base of a rank's part of a layer whose inputs are divided among the ranks; the part is a layer in gears."""

    def __init__(self, linear: nn.Module, group: mx.distributed.Group):
        super().__init__()
        self.linear, self.group = linear, group


class SummedLinear(RankPart):
    """Some columns of a linear layer (..., I / N) -> (..., O): the ranks' products are summed, as in mlx-lm.

    The sum is rounded differently than in one process. The bias belongs to this module, and is added once.
    """

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.distributed.all_sum(self.linear(x), group=self.group)
        return y + self["bias"].astype(y.dtype) if "bias" in self else y


class GatheredLinear(RankPart):
    """Some rows of a linear layer (..., I / N) -> (..., O): every rank gets all inputs, and then all outputs.

    No sum is divided, so each output is bit-identical to one process, and no group of inputs is cut.
    """

    def __call__(self, x: mx.array) -> mx.array:
        return of_all_ranks(self.linear(of_all_ranks(x, self.group)), self.group)


class PlacedLinear(RankPart):
    """Some rows of a layer whose block sums over the ranks itself, such as experts: other ranks' outputs are zeros.

    x + 0 is x, so the block's sum is bit-identical to one process.
    """

    def __call__(self, x: mx.array, *chosen: mx.array, sorted_indices: bool = False) -> mx.array:
        sorting = {"sorted_indices": True} if sorted_indices else {}
        y = self.linear(of_all_ranks(x, self.group), *chosen, **sorting)
        before = y.shape[-1] * self.group.rank()
        after = y.shape[-1] * self.group.size() - before - y.shape[-1]
        return mx.pad(y, [(0, 0)] * (y.ndim - 1) + [(before, after)])


def of_all_ranks(x: mx.array, group: mx.distributed.Group) -> mx.array:
    """Return the ranks' x (..., K) side by side in the order of the ranks, (..., N K)."""
    every = mx.distributed.all_gather(x[None], group=group)
    return mx.moveaxis(every, 0, -2).reshape(*x.shape[:-1], -1)
