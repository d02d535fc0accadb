"""The arrays of one layer or embedding in all gears, divided between the base and the file beside it."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import GearbxError
from ..formats import get_format
from ..formats.base import Format, stored_bits
from ..formats.exact import too_large
from ..formats.tied import linear_of
from ..gears.discovery import Layer, stored_widths
from ..gears.ladder import DENSE
from ..gears.manifest import AFFINE
from ..gears.saved_check import KINDS

STOCK = tuple(quantized for _, quantized in KINDS.values())

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Packed:
    """What the files get of one layer or embedding.

    base, gears: arrays by name. names: as in `SavedLayer.gears`. stock_bits: those that the base has it at, where
    mlx-lm runs it quantized. rows: as in `SavedLayer`. larger: why the layer stays dense, if it would become larger.
    """

    base: Arrays = field(default_factory=dict)
    gears: Arrays = field(default_factory=dict)
    names: dict[int, dict[str, str]] = field(default_factory=dict)
    stock_bits: int | None = None
    rows: int = DENSE
    larger: str | None = None


def pack_layer(layer: Layer, widths: Iterable[int], format: Format, group_size: int, pack_rows: bool) -> Packed:
    """The arrays of a layer at all bits of a ladder.

    Args:
        widths: of the ladder.
        pack_rows: whether the lowest gear of a tied embedding looks up packed rows, as mlx-lm does.

    Raises:
        GearbxError: weights that are not finite.
    """
    path, original, dense = layer.path, layer.module.weight, linear_of(layer.module)
    if layer.clamp is not None:
        dense = copy.copy(dense)
        dense.weight = layer.cut(original)
    wanted = stored_widths(layer, format, widths)
    stored = stored_bits(format, wanted)
    made: dict[int, nn.Module] = {}
    for bits in stored:
        if bits not in made:
            made |= format.modules(dense, bits, stored, group_size, original.dtype)
    reason = too_large(made[DENSE]) if DENSE in made else None
    if reason:
        return Packed({f"{path}.weight": original}, larger=reason)
    stock = bool(stored) and type(made[stored[0]]) in STOCK
    tied = isinstance(layer.module, nn.Embedding)
    packs_rows = stock and ((tied and pack_rows) or layer.is_table)
    packed = Packed(stock_bits=stored[0] if stock else None, rows=stored[0] if packs_rows else DENSE)
    for bits in stored:
        made_for = format.stored_arrays(original.shape, bits, stored, group_size, original.dtype)
        arrays = dict(tree_flatten(made[bits].parameters()))
        packed.names[bits] = {}
        for name, origin in made_for.items():
            in_base = stock and origin.bits == stored[0]
            packed.names[bits][name] = f"{path}.{origin.name}" if in_base else f"{path}@{origin.bits}.{origin.name}"
            if origin.bits == bits:
                (packed.base if in_base else packed.gears)[packed.names[bits][name]] = arrays[name]
    if DENSE not in stored and (DENSE in wanted or (tied and {*wanted} != {packed.rows})):
        into, key = (packed.gears, f"{path}@{DENSE}.weight") if stock else (packed.base, f"{path}.weight")
        into[key] = original
        packed.names[DENSE] = {"weight": key}
    check_finite(path, packed)
    return packed


def pack_table(table: Layer, widths: Iterable[int], format: Format, group_size: int) -> Packed:
    """The arrays of an embedding that is no layer: packed ones for the lowest gear, and its rows as they are.

    Raises:
        GearbxError: weights that are not finite.
    """
    if format.ladders:
        return pack_layer(table, widths, format, group_size, True)
    bits = max(min(widths), table.lowest_bits)
    one_gear = Layer(table.path, table.module, bits, is_table=True)
    gears = {bits, *([DENSE] if max(widths) > bits else [])}
    return pack_layer(one_gear, gears, get_format(AFFINE), group_size, True)


def possible_names(layer: Layer, widths: Iterable[int], format: Format, group_size: int) -> list[str]:
    """The names of all arrays that a layer or a table may get; one file has no longer ones and no more of them."""
    own = get_format(AFFINE) if layer.is_table and not format.ladders else format
    stored = stored_bits(own, stored_widths(layer, own, widths))
    shape, dtype = layer.module.weight.shape, layer.module.weight.dtype
    arrays = {(a.bits, a.name) for b in stored for a in own.stored_arrays(shape, b, stored, group_size, dtype).values()}
    return [f"{layer.path}@{bits}.{name}" for bits, name in sorted({*arrays, (DENSE, "weight")})]


def is_finite(array: mx.array) -> bool:
    return not mx.issubdtype(array.dtype, mx.floating) or bool(mx.isfinite(array).all().item())


def check_finite(path: str, packed: Packed) -> None:
    """Raises GearbxError for an array that has other values; evaluates all of them."""
    mx.eval(packed.base, packed.gears)
    for array in (*packed.base.values(), *packed.gears.values()):
        if not is_finite(array):
            raise GearbxError(f"{path}: weights are not finite and cannot be quantized; check the checkpoint")
