"""Quantized checkpoints: layers with gears in place, and possible ladders.

The upper bits of an affine code are a coarser affine code. So an 8-, 6- or 5-bit layer has lower gears without an
original: its codes are split into planes, and a lower gear reads the first ones. The top gear is the unchanged
checkpoint. A layer with fewer bits than a gear is the same in both.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..compat.classes import readers
from ..errors import GearbxError
from .adapters import layers_of
from .discovery import Layer, Predicate, discover, get_predicate, is_quantized, natural_order, tied_head
from .ladder import DEFAULT_GROUP_SIZE, DENSE, QUANTIZED_BITS, Ladder
from .ownership import ATTACHED
from .saved import saved_gears
from .sharding import DENSE_CLASSES, QUANTIZED_AS, blank, dense_shape, sharding_of
from .tensor_files import TensorEntry

SPLIT = (*QUANTIZED_AS.values(), nn.QuantizedEmbedding)  # classes that mlx-lm loads
LOWER_BITS = 4  # bits of the lower gear by default, if codes have more
OF_SCALES = 0.5  # bits a weight of scales and biases in groups of 64
AGREEMENT = 0.78  # top-1 agreement of a 4-bit gear with 6 or 8 bits: docs/tried.md, on SmolLM2


class CodedLayer(NamedTuple):
    """A quantized layer: bits and group size of its codes, True if these are affine, and the number of its weights."""

    bits: int
    group_size: int
    affine: bool
    weights: int


@dataclass(frozen=True)
class Codes:
    """The quantized weights of a checkpoint, by headers or layers.

    bits: of most weights. widths: the bits of all layers, ascending; several in mixed recipes. group_size: of most
    layers; each keeps its own. nested: True if coarser codes are inside, as in affine codes.
    """

    bits: int
    widths: tuple[int, ...]
    group_size: int
    nested: bool

    @property
    def splits(self) -> bool:
        """Flag for codes with a lower gear by default."""
        return self.bits > LOWER_BITS and self.nested

    def watched(self, default: Ladder) -> Ladder:
        """Return the gears that a record names if none is engaged: its own, if there are several."""
        return self.chosen(None) if self.splits else default

    def drafting(self) -> Ladder:
        """Return the default ladder of mode lossless: with a lower gear only if drafting saves more than it reads.

        Drafting and verifying one token yields 1 + AGREEMENT tokens. It reads (1 + c) times the top gear's bytes, c
        being the lower gear's share.
        """
        share = (LOWER_BITS + OF_SCALES) / (self.bits + OF_SCALES)
        saves_bytes = (1 + AGREEMENT) / (1 + share) >= 1.1  # in bytes; drafting has other costs too
        return self.chosen(None) if saves_bytes else Ladder([self.bits])

    def summary(self, ladder: Ladder | None = None) -> str:
        """Return the uses of these codes, for a message. ladder: the chosen one; None: the default."""
        ladder, bits = self.chosen(ladder), " and ".join(map(str, self.widths))
        if len(ladder) > 1:
            return f"{bits}-bit weights: gears {ladder} in place"
        more = "for gears, use the original, and this model as its --base"
        if self.widths[-1] > LOWER_BITS and self.nested:
            more = f"gears {LOWER_BITS},{self.widths[-1]} in place can draft too"
        return f"{bits}-bit weights: drafts by prompt lookup; {more}"

    def chosen(self, ladder: Ladder | str | None) -> Ladder:
        """Return the requested ladder; by default a 4-bit gear below wider codes, and only the codes otherwise.

        The top gear of a mixed recipe has the bits of most layers, or the most bits of any. Raises GearbxError if the
        ladder's top gear is not the checkpoint.
        """
        if ladder is None or ladder == "":
            return Ladder([LOWER_BITS, self.bits] if self.splits else [self.bits])
        ladder = ladder if isinstance(ladder, Ladder) else Ladder.parse(ladder)
        tops = sorted({self.bits, self.widths[-1]}, reverse=True)
        if ladder.top.bits not in tops or (len(ladder) > 1 and not self.nested):
            pairs = [f"{b},{top}" for top in tops for b in reversed(QUANTIZED_BITS) if b < top] if self.nested else []
            shown = " and ".join(map(str, self.widths))
            reason = "of which a gear uses the first ones" if self.nested else "in codes without coarser ones inside"
            choices = ", ".join([*pairs, f"{'or ' if pairs else ''}only {self.bits}"])
            raise GearbxError(
                f"gears {ladder}: the model is quantized to {shown} bits, {reason}; choose from {choices}, or use "
                "the original"
            )
        return ladder


def summarized(layers: Sequence[CodedLayer]) -> Codes:
    """Return the codes of one or more layers."""
    affine, weights = [layer for layer in layers if layer.affine], collections.Counter[int]()
    for layer in affine or layers:
        weights[layer.bits] += layer.weights
    bits = max(weights, key=lambda each: weights[each])
    sizes = collections.Counter(layer.group_size for layer in affine)
    size = sizes.most_common(1)[0][0] if sizes else 0
    return Codes(bits, tuple(sorted({bits, *(layer.bits for layer in affine)})), size, bool(affine))


@dataclass(frozen=True)
class OwnCodes(Codes):
    """The quantized layers of a model; a gearbox can make gears from them.

    modules: path to the module as loaded, whose arrays are removed when its codes are split.
    """

    modules: dict[str, nn.Module]


def own_codes(model: nn.Module) -> OwnCodes | None:
    """Return the layers of a quantized model from which a gearbox can make gears; None for other models.

    Layers with codes that are not affine, such as mxfp4's, do not change.
    """
    others = saved_gears(model), sharding_of(model), getattr(model, ATTACHED, None)
    if any(other is not None for other in others) or not is_quantized(model):
        return None
    found = {path: module for path, module in layers_of(model).items() if type(module) in SPLIT}
    if len(found) < sum("scales" in module or "record" in vars(module) for module in layers_of(model).values()):
        return None  # some have gears of a gearbox already
    read_by = readers(model)
    affine = {path: one for path, one in found.items() if one.mode == "affine" and path not in read_by}
    layers = [
        CodedLayer(one.bits, one.group_size, path in affine, one.weight.size * 32 // one.bits)
        for path, one in found.items()
    ]
    return OwnCodes(**vars(summarized(layers)), modules=affine)


def codes_in(config: Mapping[str, Any], arrays: Mapping[str, TensorEntry]) -> Codes | None:
    """Return the codes that `own_codes` will find in a model, by its configuration and the headers of its files.

    None if mlx-lm loads no quantized layer: it converts some other programs' 8-bit checkpoints to 16 bits.
    """
    stated = stated_codes(config)
    usual = {} if stated is None else stated
    layers = []
    for name, scales in arrays.items():
        path, _, kind = name.rpartition(".")
        weight = arrays.get(f"{path}.weight")
        if kind != "scales" or weight is None or weight.dtype != "U32":
            continue
        own = usual[path] if isinstance(usual.get(path), dict) else usual
        words, groups = weight.shape[-1], scales.shape[-1]
        group_size = own.get("group_size") or DEFAULT_GROUP_SIZE
        bits = words * 32 // (groups * group_size)  # mlx-lm prefers the arrays to config.json
        if path in usual or bits not in QUANTIZED_BITS:
            bits = own.get("bits") or bits
        layers.append(CodedLayer(bits, group_size, scales.dtype != "U8", math.prod(weight.shape) * 32 // bits))
    if layers:
        return summarized(layers)
    if stated is None or "quantization" in config:  # a checkpoint whose arrays would have these names
        return None
    return summarized([CodedLayer(stated["bits"], stated["group_size"], stated["mode"] == "affine", 1)])


# By the name in "quantization_config", mlx-lm's equivalent of other programs' codes.
OF_OTHERS = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "modelopt": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "compressed-tensors": {"group_size": 32, "bits": 4, "mode": "affine"},
    "awq": {"group_size": 128, "bits": 4, "mode": "affine"},
    "gptq": {"group_size": 128, "bits": 4, "mode": "affine"},
}


def stated_codes(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the codes in config.json, with exceptions by path of a layer; None if there are none."""
    own, text = config.get("quantization"), config.get("text_config")
    if isinstance(own, dict):
        return own
    other = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not isinstance(other, dict) or other.get("quant_method") not in [*OF_OTHERS]:  # it may be unhashable
        return None
    size = other.get("group_size")
    return OF_OTHERS[other["quant_method"]] | ({"group_size": size} if isinstance(size, int) else {})


def stock_quantization(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the config.json entry of each layer that mlx-lm loaded quantized, by path."""
    stored = {path: module for path, module in layers_of(model).items() if type(module) in SPLIT}
    return {path: {key: getattr(one, key) for key in ("group_size", "bits", "mode")} for path, one in stored.items()}


def without_gears(model: nn.Module) -> bool:
    """Return True for a quantized model from which a `Gearbox` cannot make gears."""
    return is_quantized(model) and saved_gears(model) is None and own_codes(model) is None


def coded_layers(model: nn.Module, codes: OwnCodes, manage: str | Predicate) -> tuple[list[Layer], dict[str, str]]:
    """Return the layers and embeddings as dense ones without weights, and path to reason of the others.

    Layers that `manage` does not select keep their bits.
    """
    head, predicate = tied_head(model), get_predicate(manage)
    _, unmanaged = discover(model, lambda path, module: False)
    unmanaged = {path: reason for path, reason in unmanaged.items() if path not in codes.modules}
    unmanaged |= dict.fromkeys((p for p, reason in unmanaged.items() if "selected" in reason), "not quantized")
    layers = []
    for path, module in sorted(codes.modules.items(), key=lambda item: natural_order(item[0])):
        floor = 0 if predicate(path, module) else DENSE
        is_table = isinstance(module, nn.QuantizedEmbedding) and path != head
        weight = mx.zeros(dense_shape(module), module.scales.dtype)
        made = blank(DENSE_CLASSES.get(type(module), nn.Embedding), weight, module)
        layers.append(Layer(path, made, floor, is_table=is_table))
    return layers, unmanaged


def alike_layers(
    model: nn.Module, codes: OwnCodes, manage: str | Predicate, ladder: Sequence[int]
) -> tuple[list[Layer], dict[str, str]]:
    """Return the `coded_layers` that change gear and have the bits and the group size of most, and the others."""
    layers, others = coded_layers(model, codes, manage)
    alike = []
    for layer in layers:
        stored = codes.modules[layer.path]
        kind = stored.bits, stored.group_size
        if layer.is_table:
            continue
        if kind != (codes.bits, codes.group_size):
            others[layer.path] = "is quantized to {} bits in groups of {}".format(*kind)
        elif len(widths_in(layer, codes.bits, ladder)) == 1:
            others[layer.path] = "not selected by manage"
        else:
            alike.append(layer)
    return alike, others


def widths_in(layer: Layer, bits: int, ladder: Sequence[int]) -> tuple[int, ...]:
    """Return the bits, ascending, that a layer with codes of `bits` has in gears of a ladder; the top gear has all."""
    lower = (max(gear, layer.lowest_bits) for gear in ladder[:-1])
    return (bits,) if layer.is_table else tuple(sorted({*(min(gear, bits) for gear in lower), bits}))
