"""Where the modules of gears come from: made of the weights that were loaded, or read from a geared checkpoint."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError
from ..formats.base import Format
from ..formats.native import Native
from ..formats.tied import in_place_of, linear_of
from .discovery import Layer, widths_of
from .ladder import DENSE, Ladder
from .saved import SavedGears

FITTED = ("scales", "codebook", "library", "outliers")  # parameters that show weights which are not finite


class Source(Protocol):
    """Modules of any layer at the bits that it can be put to."""

    def widths(self, layer: Layer) -> tuple[int, ...]:
        """Bits that a layer can be put to, ascending."""
        ...

    def stored(self, layer: Layer) -> tuple[int, ...]:
        """The quantized ones that are stored together, from which a format knows what one use reads."""
        ...

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        """Bits to what stands in the layer's place, `bits` among them; unevaluated."""
        ...

    def read(self, made: Mapping[str, Iterable[nn.Module]]) -> None:
        """Have modules in memory: path to those that were made together. Raises GearbxError for bad weights."""
        ...


@dataclass(frozen=True)
class Original:
    """Gears of the original weights, whose values are rounded to the type that each layer is stored in.

    tables: bits of a gear to path to bits, for layers that have not the gear's own. further: bits that every layer is
    stored at besides.
    """

    format: Format
    ladder: Ladder
    group_size: int
    storage: Mapping[str, mx.Dtype]
    compute_dtype: mx.Dtype
    tables: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    further: Sequence[int] = ()

    def widths(self, layer: Layer) -> tuple[int, ...]:
        in_gears = {self.tables.get(gear.bits, {}).get(layer.path, gear.bits) for gear in self.ladder}
        return widths_of(layer, in_gears | {*self.further}, self.format.layer_bits)

    def stored(self, layer: Layer) -> tuple[int, ...]:
        return tuple(bits for bits in self.widths(layer) if bits != DENSE)

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        if bits == DENSE:
            return {DENSE: layer.module}
        dense = copy.copy(linear_of(layer.module))
        dense.weight = dense.weight.astype(self.storage[layer.path])
        # Native kernels widen scales as they read them; MLX's are fast only with scales of the type computed in.
        held_in = self.storage[layer.path] if isinstance(dense, Native) else self.compute_dtype
        made = self.format.modules(dense, bits, self.stored(layer), self.group_size, held_in)
        return {b: in_place_of(layer.module, linear, self.compute_dtype) for b, linear in made.items()}

    def read(self, made: Mapping[str, Iterable[nn.Module]]) -> None:
        for path, modules in made.items():  # one by one, so that what one needs in passing is freed before the next
            # All that was made together: an array that is still to be computed keeps the original weight in memory.
            mx.eval([module.parameters() for module in modules])
            fitted = [linear_of(module).get(name) for module in modules for name in FITTED]
            if not all(mx.isfinite(array).all().item() for array in fitted if array is not None):
                raise GearbxError(f"{path}: weights are not finite and cannot be quantized; check the checkpoint")


@dataclass(frozen=True)
class FromFiles:
    """Gears of a geared checkpoint; held_in: the type that scales of a layer, and its weight at 16 bits, are put in."""

    saved: SavedGears
    held_in: Mapping[str, mx.Dtype]
    compute_dtype: mx.Dtype

    def widths(self, layer: Layer) -> tuple[int, ...]:
        return self.saved.widths(layer)

    def stored(self, layer: Layer) -> tuple[int, ...]:
        return self.saved.stored(layer)

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        linear = self.saved.module(layer, bits, self.held_in[layer.path])
        whole = bits == DENSE  # else of a tied embedding it is the head alone
        return {bits: linear if whole else in_place_of(layer.module, linear, self.compute_dtype)}

    def read(self, made: Mapping[str, Iterable[nn.Module]]) -> None:
        self.saved.read([module.parameters() for modules in made.values() for module in modules])
