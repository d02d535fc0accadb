"""A gearbox that only observes, for a checkpoint that is quantized already, or where no layer may change."""

import math

import mlx.core as mx
import mlx.nn as nn

from ..kernels.device import device_in_use
from .activations import compute_in, stored_dtype
from .adapters import layers_of
from .cost import layer_bytes, token_bytes
from .description import LayerPath
from .discovery import DENSE as DENSE_LAYERS
from .discovery import QUANTIZED, is_quantized
from .ladder import DENSE, Gear, Ladder
from .names import DEFAULT_LADDER
from .output_head import tied_head


class Observer:
    """Has the interface of a Gearbox and names the gear that it would engage, but changes no module.

    Bytes and bits are those of the model as it is, in every gear.
    """

    def __init__(self, model: nn.Module, ladder: Ladder | str = DEFAULT_LADDER, *, dtype: str = "auto"):
        self.ladder = ladder if isinstance(ladder, Ladder) else Ladder.parse(ladder)
        self.model, self.device = model, device_in_use()
        linear = linear_layers(model)
        self.compute_dtype = compute_in(model, dtype, is_quantized(model))
        storage = stored_dtype(model)
        self.storage = {"": storage}
        self.layers: list[str] = []
        self.unmanaged = dict.fromkeys(linear, "telemetry only")
        read = sum(layer_bytes(module, storage) for module in linear.values())
        weights = sum(weight_count(module) for module in linear.values())
        self._bits = 8 * read / weights if weights else 8.0 * storage.size
        self._token_bytes = token_bytes(model, {}, self.storage, tied_head(model))
        self.gear = self.ladder.top
        self.shifts = 0
        self.shift_seconds = 0.0
        self.active_memory = {"as loaded": mx.get_active_memory()}

    def prepare(self, gear: Gear) -> None:
        pass

    def shift(self, gear: Gear | str | int) -> float:
        self.gear = self.ladder.find(gear)
        return 0.0

    def bits_per_weight(self, gear: Gear) -> float:
        return self._bits

    def ladder_report(self) -> list[dict]:
        """Name, bits and nominal bytes per weight (GEARBX Table 7) of each gear. No gear was made."""
        return [{"name": gear.name, "bits": gear.bits, "bytes_per_weight": gear.bits / 8} for gear in self.ladder]

    def layer_paths(self) -> list[LayerPath]:
        """Every linear layer with its bits, which are the same in each gear."""
        modules = layers_of(self.model)
        return [
            LayerPath(path, (getattr(modules[path], "bits", DENSE),) * len(self.ladder), "mlx", reason)
            for path, reason in self.unmanaged.items()
        ]

    def weight_bytes_per_token(self, gear: Gear, positions: int = 1) -> int:
        return self._token_bytes

    def original_bytes_per_token(self) -> int:
        return self._token_bytes


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Path to module of the linear layers, packed or not, with a tied output head."""
    head = tied_head(model)
    kinds = (*DENSE_LAYERS, *(kind for kind in QUANTIZED if kind is not nn.QuantizedEmbedding))
    return {path: m for path, m in layers_of(model).items() if isinstance(m, kinds) or path == head}


def weight_count(module: nn.Module) -> int:
    """The number of weights of a linear layer, packed or not."""
    shape = getattr(module, "weight_shape", None)
    if shape is not None:
        return math.prod(shape)
    bits = getattr(module, "bits", None)
    return module.weight.size * 32 // bits if bits else module.weight.size
