"""A checkpoint that is quantized already: which of its layers have gears in place, and which ladders it allows.

The upper bits of an affine code are a coarser affine code. So a layer of 8, 6 or 5 bits has lower gears without an
original: its codes are split into planes, and a lower gear reads the first ones. The top gear is the checkpoint as it
is. A layer of fewer bits than a gear is the same in both.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..compat.classes import readers
from ..errors import GearbxError
from .adapters import layers_of
from .discovery import Layer, Predicate, discover, get_predicate, is_quantized, natural_order, tied_head
from .ladder import DENSE, QUANTIZED_BITS, Ladder
from .ownership import ATTACHED
from .saved import saved_gears
from .sharding import DENSE_CLASSES, QUANTIZED_AS, blank, dense_shape, sharding_of

SPLIT = (*QUANTIZED_AS.values(), nn.QuantizedEmbedding)  # as mlx-lm loads them
LOWER_BITS = 4  # bits of the lower gear by default, where codes have more
OF_SCALES = 0.5  # bits a weight of scales and biases in groups of 64
AGREEMENT = 0.78  # the share of tokens that 4 bits of 6 or 8 choose alike: docs/tried.md, on SmolLM2


@dataclass(frozen=True)
class OwnCodes:
    """The quantized layers of a checkpoint.

    modules: path to the module as loaded, which loses its arrays when its codes are split. bits: those of most weights.
    """

    modules: dict[str, nn.Module]
    bits: int

    @property
    def group_size(self) -> int:
        """The group size of most layers; each keeps its own."""
        sizes = collections.Counter(module.group_size for module in self.modules.values())
        return sizes.most_common(1)[0][0] if sizes else 0

    @property
    def widths(self) -> list[int]:
        """The bits of all layers, ascending: several in mixed recipes."""
        return sorted({self.bits, *(module.bits for module in self.modules.values())})

    @property
    def splits(self) -> bool:
        """True if there is a lower gear by default."""
        return self.bits > LOWER_BITS and bool(self.modules)

    def watched(self, default: Ladder) -> Ladder:
        """Return the gears that a record names where none is engaged: its own, if there are several."""
        return self.chosen(None) if self.splits else default

    def drafting(self) -> Ladder:
        """Return the default of mode lossless: with the lower gear only where its drafts save more than they read.

        One drafted token and its verification read (1 + c) times the top gear's bytes, c being the lower gear's share,
        for 1 + AGREEMENT tokens.
        """
        share = (LOWER_BITS + OF_SCALES) / (self.bits + OF_SCALES)
        pays = (1 + AGREEMENT) / (1 + share) >= 1.1  # in bytes; drafts have costs besides
        return self.chosen(None) if pays else Ladder([self.bits])

    def told(self, ladder: Ladder | None = None) -> str:
        """Return what can be done with these codes, for a message. ladder: what is chosen; None: what could be."""
        ladder, bits = self.chosen(ladder), " and ".join(map(str, self.widths))
        if len(ladder) > 1:
            return f"{bits} bits: gears {ladder} in place"
        more = "for more, give the original, and this model as its --base"
        if self.widths[-1] > LOWER_BITS and self.modules:
            more = f"gears {LOWER_BITS},{self.widths[-1]} in place draft too"
        return f"{bits} bits: drafts come by lookup; {more}"

    def chosen(self, ladder: Ladder | str | None) -> Ladder:
        """Return the ladder that is asked for; else 4 bits below codes of more, and the codes alone below that.

        The top gear of a mixed recipe has the bits of most layers, or the most bits of any. Raises GearbxError for
        a ladder whose top gear is not the checkpoint, naming those that there are.
        """
        if ladder is None or ladder == "":
            return Ladder([LOWER_BITS, self.bits] if self.splits else [self.bits])
        ladder = ladder if isinstance(ladder, Ladder) else Ladder.parse(ladder)
        tops = sorted({self.bits, self.widths[-1]}, reverse=True)
        if ladder.top.bits not in tops or (len(ladder) > 1 and not self.modules):
            pairs = [f"{b},{top}" for top in tops for b in reversed(QUANTIZED_BITS) if b < top] if self.modules else []
            shown = " and ".join(map(str, self.widths))
            reason = (
                "of which a gear has the first ones" if self.modules else "in codes that have no coarser ones inside"
            )
            choices = ", ".join([*pairs, f"{'or ' if pairs else ''}{self.bits} alone"])
            raise GearbxError(
                f"gears {ladder}: the model is quantized to {shown} bits, {reason}; choose from {choices}, or give "
                "the original"
            )
        return ladder


def own_codes(model: nn.Module) -> OwnCodes | None:
    """Return the layers of a quantized model that a gearbox can take as they are; None for another model.

    Layers with codes that are not affine, such as mxfp4's, stay what they are.
    """
    others = saved_gears(model), sharding_of(model), getattr(model, ATTACHED, None)
    if any(other is not None for other in others) or not is_quantized(model):
        return None
    found = {path: module for path, module in layers_of(model).items() if type(module) in SPLIT}
    if len(found) < sum("scales" in module or "record" in vars(module) for module in layers_of(model).values()):
        return None  # some have gears of a gearbox already
    weights: collections.Counter[int] = collections.Counter()
    for module in found.values():
        weights[module.bits] += module.weight.size * 32 // module.bits
    read_by = readers(model)
    affine = {path: one for path, one in found.items() if one.mode == "affine" and path not in read_by}
    counted = weights if not affine else {one.bits: weights[one.bits] for one in affine.values()}
    return OwnCodes(affine, max(counted, key=lambda bits: counted[bits]))


def stock_quantization(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what config.json says of each layer that mlx-lm loaded quantized, by path."""
    stored = {path: module for path, module in layers_of(model).items() if type(module) in SPLIT}
    return {path: {key: getattr(one, key) for key in ("group_size", "bits", "mode")} for path, one in stored.items()}


def without_gears(model: nn.Module) -> bool:
    """Return whether a model is quantized in a way that a `Gearbox` cannot make gears of."""
    return is_quantized(model) and saved_gears(model) is None and own_codes(model) is None


def coded_layers(model: nn.Module, codes: OwnCodes, manage: str | Predicate) -> tuple[list[Layer], dict[str, str]]:
    """Return the layers and embeddings as dense ones without weights, and path to reason of the others.

    What `manage` does not select keeps its bits.
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
    """Return the bits, ascending, that a layer with codes of `bits` has in gears of a ladder; the top one has all."""
    lower = (max(gear, layer.lowest_bits) for gear in ladder[:-1])
    return (bits,) if layer.is_table else tuple(sorted({*(min(gear, bits) for gear in lower), bits}))
