"""Adapters over layers that change gear: mlx-lm's LoRA and DoRA in their own precision, on top of any gear.

LoRA adds a product to the output of its layer, and asks nothing else of it. DoRA also divides each output by the norm
of its row of W + scale * B A, for which mlx-lm's class reads the dense weight again at every token. Here the norms are
computed once in each gear, from the weight that the gear stands for: as mlx-lm does it over a quantized layer.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from ..errors import GearbxError
from .base import dense_weight
from .native import as_class

INNER: dict[type[nn.Module], str] = {  # mlx-lm's adapters, and the name of the layer inside
    **{LoRALinear: "linear", LoRASwitchLinear: "linear", LoRAEmbedding: "embedding"},
    **{DoRALinear: "linear", DoRAEmbedding: "embedding"},
}
OWN = ("lora_a", "lora_b", "m")  # an adapter's own arrays, as mlx-lm saves them
NORMS = "row_norms"  # attribute of a linear layer under DoRA


class Geared:
    """An adapter whose layer changes gear."""

    def fuse(self, dequantize: bool = False) -> nn.Module:
        """Raises GearbxError: the adapter would be in one gear, and not in the others."""
        raise GearbxError("an adapter cannot be fused into gears; fuse it into the original (mlx_lm.fuse), then shift")


class GearedLoRALinear(Geared, LoRALinear):
    """A LoRALinear over a linear layer in any gear."""


class GearedLoRASwitchLinear(Geared, LoRASwitchLinear):
    """A LoRASwitchLinear over experts in any gear."""


class GearedLoRAEmbedding(Geared, LoRAEmbedding):
    """A LoRAEmbedding over a tied embedding whose head is in any gear."""


class GearedDoRALinear(Geared, DoRALinear):
    """A DoRALinear over a linear layer (..., I) -> (..., O) in any gear: m * (x W + scale x A B) / norms + bias.

    The bias, which the norms do not touch, belongs to this module, and not to the layer inside.
    """

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        z = (self.dropout(x) @ self.lora_a) @ self.lora_b
        norms = row_norms(self, self.linear, lambda: (self.scale * self.lora_b.T) @ self.lora_a.T)
        out = (self.m / norms).astype(x.dtype) * (y + (self.scale * z).astype(x.dtype))
        return out + self["bias"] if "bias" in self else out


class GearedDoRAEmbedding(Geared, DoRAEmbedding):
    """A DoRAEmbedding over a tied embedding, whose head is in any gear. The rows of input tokens are the original's."""

    def as_linear(self, x: mx.array) -> mx.array:
        y = self.embedding.as_linear(x)
        z = (self.dropout(x) @ self.lora_b.T) @ self.lora_a.T
        head = self.embedding.projection if "projection" in self.embedding else self.embedding
        norms = row_norms(self, head, lambda: (self.scale * self.lora_a) @ self.lora_b)
        return (self.m / norms) * (y + (self.scale * z).astype(x.dtype))


GEARED: dict[type[nn.Module], type[nn.Module]] = {
    LoRALinear: GearedLoRALinear,
    LoRASwitchLinear: GearedLoRASwitchLinear,
    LoRAEmbedding: GearedLoRAEmbedding,
    DoRALinear: GearedDoRALinear,
    DoRAEmbedding: GearedDoRAEmbedding,
}


def row_norms(adapter: nn.Module, linear: nn.Module, delta: Callable[[], mx.array]) -> mx.array:
    """The norm of each row of a layer's weight plus what the adapter adds to it, (O,).

    They stay with the layer for as long as the adapter has these arrays: a gear's layer is another module.

    Args:
        linear: the layer inside, in the engaged gear.
        delta: computes what the adapter adds, (O, I).
    """
    kept = vars(linear).get(NORMS)
    if kept is not None and all(kept[name] is adapter[name] for name in ("lora_a", "lora_b")):
        return kept["norms"]
    norms = mx.stop_gradient(mx.linalg.norm(dense_weight(linear) + delta(), axis=1))
    if not adapter.training:
        mx.eval(norms)
        vars(linear)[NORMS] = {"lora_a": adapter.lora_a, "lora_b": adapter.lora_b, "norms": norms}
    return norms


def inner_name(module: nn.Module) -> str | None:
    """The name of the layer inside an adapter; None for other modules."""
    return next((name for kind, name in INNER.items() if isinstance(module, kind)), None)


def over_gears(module: nn.Module) -> nn.Module:
    """The form of an adapter that works over any gear; other modules as they are."""
    kind: Any = GEARED.get(type(module))
    if kind is None:
        return module
    made = as_class(module, kind)
    if kind is GearedDoRALinear and "bias" in made.linear:
        made.bias = made.linear.pop("bias")
    return made
