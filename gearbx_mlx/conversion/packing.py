"""The arrays of one layer or embedding in all gears, divided between the base and the file beside it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import GearbxError
from ..formats import OF_MLX, get_format
from ..formats.base import Format, whole_groups
from ..formats.tied import linear_of, linear_with
from ..gears.discovery import Layer, Predicate, get_predicate, own_predicate, widths_of
from ..gears.ladder import DENSE
from ..gears.manifest import AFFINE
from ..gears.output_head import tied_head
from ..gears.saved_check import KINDS

STOCK = tuple(quantized for _, quantized in KINDS.values())

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Packed:
    """What the files get of one layer or embedding.

    base, gears: arrays by name. names: as in `SavedLayer.gears`. stock_bits: those that the base has it at, where
    mlx-lm runs it quantized. rows: as in `SavedLayer`.
    """

    base: Arrays = field(default_factory=dict)
    gears: Arrays = field(default_factory=dict)
    names: dict[int, dict[str, str]] = field(default_factory=dict)
    stock_bits: int | None = None
    rows: int = DENSE


def pack_layer(layer: Layer, widths: Iterable[int], format: Format, group_size: int, pack_rows: bool) -> Packed:
    """The arrays of a layer at all bits of a ladder.

    Args:
        widths: of the ladder.
        pack_rows: whether the lowest gear of a tied embedding looks up packed rows, as mlx-lm does.

    Raises:
        GearbxError: weights that are not finite.
    """
    path, original, dense = layer.path, layer.module.weight, linear_of(layer.module)
    wanted = widths_of(layer, widths, format.layer_bits)
    stored = tuple(bits for bits in wanted if bits != DENSE)
    made: dict[int, nn.Module] = {}
    for bits in stored:
        if bits not in made:
            made |= format.modules(dense, bits, stored, group_size, original.dtype)
    stock = made[wanted[0]] if stored and type(made[wanted[0]]) in STOCK else None
    tied = isinstance(layer.module, nn.Embedding)
    packed = Packed(stock_bits=wanted[0] if stock else None, rows=wanted[0] if stock and tied and pack_rows else DENSE)
    known: dict[int, str] = {}  # id of an array to its name
    for bits in stored:
        packed.names[bits] = {}
        into, mark = (packed.base, "") if made[bits] is stock else (packed.gears, f"@{bits}")
        for name, array in tree_flatten(made[bits].parameters()):
            if name == "bias":
                continue
            if id(array) not in known:
                known[id(array)] = f"{path}{mark}.{name}"
                into[known[id(array)]] = array
            packed.names[bits][name] = known[id(array)]
    if DENSE in wanted or (tied and {*wanted} != {packed.rows}):
        into, key = (packed.gears, f"{path}@{DENSE}.weight") if stock else (packed.base, f"{path}.weight")
        into[key] = original
        packed.names[DENSE] = {"weight": key}
    check_finite(path, packed)
    return packed


def pack_table(table: Layer, widths: Iterable[int], group_size: int) -> Packed:
    """The arrays of an embedding that is no layer: packed ones for the lowest gear, and its rows as they are.

    Raises:
        GearbxError: weights that are not finite.
    """
    bits = max(min(widths), table.lowest_bits)
    weight = table.module.weight
    made = get_format(AFFINE).modules(linear_with(weight), bits, (bits,), group_size, weight.dtype)[bits]
    base = {f"{table.path}.{name}": array for name, array in tree_flatten(made.parameters())}
    names = {bits: {name.rpartition(".")[2]: name for name in base}}
    gears: Arrays = {}
    if max(widths) > bits:
        names[DENSE] = {"weight": f"{table.path}@{DENSE}.weight"}
        gears = {names[DENSE]["weight"]: weight}
    packed = Packed(base, gears, names, bits, bits)
    check_finite(table.path, packed)
    return packed


def tables_to_pack(
    model: nn.Module, manage: str | Predicate, widths: Iterable[int], format: Format, group_size: int
) -> list[Layer]:
    """The embeddings that `mlx_lm.convert` would quantize and that are no output heads.

    None where the base is the original: its format is not one of mlx-lm's, and the ladder has the original weights.
    """
    lowest, *_ = sorted(widths)
    if lowest == DENSE or (DENSE in widths and format.name not in OF_MLX):
        return []
    predicate, own, head, found = get_predicate(manage), own_predicate(model), tied_head(model), []
    for path, module in model.named_modules():
        if type(module) is not nn.Embedding or path == head or not predicate(path, module):
            continue
        floor = own(path, module)
        fits = not whole_groups(module.weight.shape[-1], group_size) and mx.issubdtype(module.weight.dtype, mx.floating)
        bits = floor.get("bits", 0) if isinstance(floor, dict) else 0
        if floor is not False and fits and bits < DENSE:
            found.append(Layer(path, module, bits))
    return found


def check_finite(path: str, packed: Packed) -> None:
    """Raises GearbxError for an array that has other values; evaluates all of them."""
    mx.eval(packed.base, packed.gears)
    for array in (*packed.base.values(), *packed.gears.values()):
        if mx.issubdtype(array.dtype, mx.floating) and not mx.isfinite(array).all().item():
            raise GearbxError(f"{path}: weights are not finite and cannot be quantized; check the checkpoint")
