"""The external low gear (`--low-model`): the lowest gear comes from a model that another quantizer wrote."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from ..errors import GearbxError
from ..formats.base import quantized_module
from ..formats.fused import FUSED
from ..formats.native import Native, with_kernels
from .activations import stored_dtype
from .adapters import layers_of
from .cost import layer_bytes
from .discovery import Layer, is_quantized
from .ladder import Ladder
from .sources import Original, Source

AFFINE = (nn.QuantizedLinear, QuantizedSwitchLinear, QuantizedMultiLinear)


@dataclass(frozen=True)
class ExternalLowGear:
    """A source whose lowest gear has the modules of another model.

    others: makes the other gears. bits: of the lowest gear. layers: path to its module. bytes: path to the bytes that
    one use of this module reads, without its bias.
    """

    others: Original
    bits: int
    layers: Mapping[str, nn.Module]
    bytes: Mapping[str, int]

    def widths(self, layer: Layer) -> tuple[int, ...]:
        return tuple(sorted({self.bits, *self.others.widths(layer)}))

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        return {bits: self.layers[layer.path]} if bits == self.bits else self.others.modules(layer, bits)

    def bytes_read(self, layer: Layer, bits: int, made: nn.Module | None) -> int:
        return self.bytes[layer.path] if bits == self.bits else self.others.bytes_read(layer, bits, made)

    def rows_at(self, layer: Layer, bits: int) -> int:
        return bits if bits == self.bits else self.others.rows_at(layer, bits)

    def read(self, made: Mapping[str, Iterable[nn.Module]]) -> None:
        self.others.read(made)


def external_low_gear(model: nn.Module, layers: Iterable[Layer], others: Source, residency: str) -> ExternalLowGear:
    """The source of a gearbox whose lowest gear is a quantized model.

    A layer has native kernels if it has them in the other gears. What the quantizer left dense stays dense.

    Args:
        model: of the same architecture, as mlx-lm's DWQ, AWQ, GPTQ and dynamic quantization write it.
        others: makes the other gears.

    Raises:
        GearbxError: a model that is not quantized, or has other layers; a residency other than resident.
    """
    if not isinstance(others, Original):
        raise GearbxError("a geared checkpoint has its low gear; give a model for it beside the original")
    if residency != "resident":
        raise GearbxError(
            f"residency {residency} gives idle gears up, and those of another model would not come back; use resident"
        )
    if len(others.ladder) < 2:
        raise GearbxError(f"gears {others.ladder} have none above the one that the other model is; give another")
    if not is_quantized(model):
        raise GearbxError("the model for the low gear is not quantized; give what a quantizer has written")
    found, low_layers, storage = dict(model.named_modules()), {}, stored_dtype(model)
    for layer in layers:
        module = found.get(layer.path)
        if module is None or shape_of(module) != shape_of(layer.module):
            problem = "no such layer" if module is None else f"{shape_of(module)} in place of {shape_of(layer.module)}"
            raise GearbxError(f"the model for the low gear is another model: {problem} at {layer.path}")
        low_layers[layer.path] = in_gear(module, layer, others.compute_dtype)
    low, rest = others.ladder[0], Ladder([gear.bits for gear in others.ladder][1:])
    read = {path: layer_bytes(found[path], storage) for path in low_layers}
    read = {path: size - storage.size * found[path].get("bias", mx.zeros(0)).size for path, size in read.items()}
    return ExternalLowGear(dataclasses.replace(others, ladder=rest), low.bits, low_layers, read)


def in_gear(module: nn.Module, layer: Layer, dtype: mx.Dtype) -> nn.Module:
    """A layer of the quantized model as it runs here: with native kernels, or converted to `dtype`."""
    if isinstance(module, AFFINE) and module.mode == "affine":
        made = quantized_module(
            layer.module, module.bits, module.group_size, module.weight, module.scales, module.biases
        )
        if "bias" in module:
            made.bias = module.bias
    else:
        made = with_kernels(module, isinstance(layer.module, Native))
    if not isinstance(made, Native):
        cast(made, dtype)
    return made


def cast(module: nn.Module, dtype: mx.Dtype) -> None:
    """Convert the floating parameters of a module to another type, in place."""
    module.update(
        tree_map(lambda a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a, module.parameters())
    )


def differing(
    model: nn.Module, other: nn.Module, managed: Collection[str], dtype: mx.Dtype
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The other modules that the quantizer changed: norms, into which AWQ puts scales, and embeddings.

    Returns:
        path to module in `model`, and path to module in `other`, whose parameters are converted to `dtype`.
    """
    before, after = layers_of(model), dict(other.named_modules())
    parents = {path.rpartition(".")[0] for path in before}
    changed = []
    for path, module in before.items():
        if path in parents or path in managed or path not in after or not module.parameters():
            continue
        own, its = (dict(tree_flatten(m.parameters())) for m in (module, after[path]))
        if own.keys() != its.keys() or not all(mx.array_equal(own[n], its[n].astype(own[n].dtype)) for n in own):
            cast(after[path], dtype)
            after[path] = with_kernels(after[path], type(module) in FUSED.values())
            changed.append(path)
    return {path: before[path] for path in changed}, {path: after[path] for path in changed}


def shape_of(module: nn.Module) -> tuple[int, ...]:
    """The shape of a module's dequantized weight."""
    *rows, width = module.weight.shape
    return (*rows, width * 32 // module.bits) if "scales" in module else (*rows, width)
