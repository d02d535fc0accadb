"""Sources make the modules of gears: from the loaded weights, or from the files of a geared checkpoint."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError
from ..formats.base import Format, stored_bits
from ..formats.native import Native
from ..formats.tied import ExactTied, QuantizedTied, in_place_of, linear_of, quantized_table
from .discovery import Layer, stored_widths
from .ladder import DENSE, Ladder
from .saved import SavedGears

FITTED = ("scales", "codebook", "library", "outliers")  # parameters that show weights which are not finite


class Source(Protocol):
    """Makes the module of any layer at any of its bits."""

    def widths(self, layer: Layer) -> tuple[int, ...]:
        """The bits that a layer can have, ascending."""
        ...

    def bytes_read(self, layer: Layer, bits: int, made: nn.Module | None) -> int:
        """The bytes that one use of a layer reads, without its bias; all experts count. made: its module, if made."""
        ...

    def rows_at(self, layer: Layer, bits: int) -> int:
        """The bits of the rows that input tokens read of a tied embedding whose head has `bits`."""
        ...

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        """Bits to the module that takes the layer's place, with `bits` among them; not evaluated."""
        ...

    def read(self, made: Mapping[str, Iterable[nn.Module]]) -> None:
        """Evaluate modules: path to those that were made together. Raises GearbxError for bad weights."""
        ...


def bytes_of(
    format: Format,
    shape: tuple[int, ...],
    bits: int,
    stored: Sequence[int],
    group_size: int,
    size: int,
    made: nn.Module | None,
) -> int:
    """The bytes that one use of a weight reads. A format estimates the number of outliers; a module knows it."""
    if bits == DENSE and DENSE not in stored:
        return math.prod(shape) * size
    counted = 0 if made is None else getattr(linear_of(made), "bytes_read", 0)
    return counted or format.bytes_read(shape, bits, stored, group_size, size)


@dataclass(frozen=True)
class Original:
    """Makes gears from the original weights.

    storage: path to the type of a layer in the checkpoint, to which scales are rounded. shapes: of the weights, by
    path. tables: bits of a gear to path to bits, for layers whose bits differ from the gear's. further: more bits at
    which every layer is stored.
    """

    format: Format
    ladder: Ladder
    group_size: int
    storage: Mapping[str, mx.Dtype]
    compute_dtype: mx.Dtype
    shapes: Mapping[str, tuple[int, ...]]
    tables: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    further: Sequence[int] = ()

    def widths(self, layer: Layer) -> tuple[int, ...]:
        in_gears = {self.tables.get(gear.bits, {}).get(layer.path, gear.bits) for gear in self.ladder}
        return stored_widths(layer, self.format, in_gears, self.further)

    def stored(self, layer: Layer) -> tuple[int, ...]:
        return stored_bits(self.format, self.widths(layer))

    def bytes_read(self, layer: Layer, bits: int, made: nn.Module | None) -> int:
        shape, size = self.shapes[layer.path], self.storage[layer.path].size
        return bytes_of(self.format, shape, bits, self.stored(layer), self.group_size, size, made)

    def rows_at(self, layer: Layer, bits: int) -> int:
        stored = self.stored(layer)
        return bits if DENSE in stored and bits == stored[0] else DENSE

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        if bits == DENSE and DENSE not in self.stored(layer):
            return {DENSE: layer.module}
        dense = copy.copy(linear_of(layer.module))
        dense.weight = layer.cut(dense.weight.astype(self.storage[layer.path]))
        # Native kernels widen scales as they read; MLX's are fast only with scales of the type they compute in.
        dtype = self.storage[layer.path] if isinstance(dense, Native) else self.compute_dtype
        made = self.format.modules(dense, bits, self.stored(layer), self.group_size, dtype)
        if DENSE in made and isinstance(layer.module, nn.Embedding):
            return whole_embedding(made, layer.is_table, self.compute_dtype)
        return {b: in_place_of(layer.module, linear, self.compute_dtype) for b, linear in made.items()}

    def read(self, made: Mapping[str, Iterable[nn.Module]]) -> None:
        for path, modules in made.items():  # one by one, so that temporary memory is freed before the next
            # All that was made together: an array that is not yet computed keeps the original weight in memory.
            mx.eval([module.parameters() for module in modules])
            fitted = [linear_of(module).get(name) for module in modules for name in FITTED]
            if not all(mx.isfinite(array).all().item() for array in fitted if array is not None):
                raise GearbxError(f"{path}: weights are not finite and cannot be quantized; check the checkpoint")


def whole_embedding(made: Mapping[int, nn.Module], is_table: bool, dtype: mx.Dtype) -> dict[int, nn.Module]:
    """Bits to embedding, from linear layers of which the one of 16 bits is exact.

    Args:
        is_table: whether rows are looked up and nothing else; else the linear layers are the output head too.
        dtype: of the rows.
    """
    low, *others = sorted(made)
    exact = made[DENSE]
    if is_table:
        arrays = {name: made[low][name] for name in ("weight", "scales", "biases")}
        return {low: quantized_table(arrays, low, made[low].group_size, dtype), DENSE: ExactTied(exact, exact, dtype)}
    return {low: QuantizedTied(made[low], dtype)} | {bits: ExactTied(made[bits], exact, dtype) for bits in others}


@dataclass(frozen=True)
class FromFiles:
    """Reads gears from a geared checkpoint.

    dtypes: path to the type of a layer's scales, and of its weight at 16 bits.
    """

    saved: SavedGears
    dtypes: Mapping[str, mx.Dtype]
    compute_dtype: mx.Dtype

    def widths(self, layer: Layer) -> tuple[int, ...]:
        return self.saved.widths(layer)

    def bytes_read(self, layer: Layer, bits: int, made: nn.Module | None) -> int:
        manifest, size = self.saved.manifest, self.saved.storage(layer.path).size
        saved, format = manifest.changing[layer.path], manifest.format_of(layer.path)
        return bytes_of(format, saved.shape, bits, manifest.stored(layer.path), manifest.group_size, size, made)

    def rows_at(self, layer: Layer, bits: int) -> int:
        return self.saved.manifest.changing[layer.path].rows_at(bits)

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        return {bits: self.saved.module(layer, bits, self.dtypes[layer.path], self.compute_dtype)}

    def read(self, made: Mapping[str, Iterable[nn.Module]]) -> None:
        self.saved.read([module.parameters() for modules in made.values() for module in modules])
