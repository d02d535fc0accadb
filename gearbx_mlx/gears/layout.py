"""Layout of a gearbox before it is made: gears and managed layers; the model's kernels and its type."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..errors import GearbxError, check_choice
from ..formats import DEFAULT_FORMAT, SPLIT_CODES, get_format
from ..formats.base import Format, check_supported
from ..formats.holders import over_gears
from ..formats.native import Native, NativeEmbedding, with_kernels
from ..kernels import GROUP_SIZES
from ..kernels.dispatch import CPU, KernelChoice, device
from .activations import compute_in, stored_dtype
from .adapters import adapters_of, layers_of, places_of, put_layers
from .discovery import Layer, Predicate, discover, is_quantized, tables_to_pack
from .in_place import OwnCodes, coded_layers, own_codes
from .ladder import (
    DEFAULT_GROUP_SIZE,
    DEFAULT_LADDER,
    DENSE,
    EXACT_FORMAT,
    EXACT_LADDER,
    SUPPORTED,
    WIDTHS,
    Ladder,
)
from .manifest import Manifest
from .saved import SavedGears, saved_gears

Bits = Mapping[str, int]
"""Path of a layer to its bits."""


def check_as_saved(manifest: Manifest, **settings: Any) -> None:
    """Validate settings of a Gearbox against the checkpoint's. Raises GearbxError."""
    for name, value in settings.items():
        own, value = getattr(manifest, name), getattr(value, "name", value)
        if value not in (None, own):
            shown = name.replace("_", " ")
            raise GearbxError(f"the checkpoint's gears have {shown} {own}, not {value}; convert the original again")


def check_tables(tables: Mapping[str, Bits], ladder: Ladder, layers: Sequence[Layer]) -> dict[int, Bits]:
    """Return the tables by their gears' bits. Raises GearbxError for an unknown gear, layer or width."""
    paths = {layer.path for layer in layers}
    for name, table in tables.items():
        if table.keys() - paths:
            raise GearbxError(
                f"the table of {name} has {min(table.keys() - paths)}, but it does not change gear; use managed layers"
            )
        for path, bits in table.items():
            if bits not in WIDTHS:
                raise GearbxError(f"the table of {name} has {bits} bits for {path}; choose from {SUPPORTED}")
    return {ladder.find(name).bits: table for name, table in tables.items()}


@dataclass(frozen=True)
class Layout:
    """Storage of gears. They are made from the model's weights unless `saved` or `codes` has them.

    saved: the gears of a geared checkpoint. codes: of a checkpoint that is already quantized.
    """

    ladder: Ladder
    format: Format
    group_size: int
    saved: SavedGears | None = None
    codes: OwnCodes | None = None

    @property
    def of_codes(self) -> bool:
        """Flag for top gears of a quantized checkpoint, loaded from it or converted."""
        return self.codes is not None or self.format.name == SPLIT_CODES


def layout_of(
    model: nn.Module,
    ladder: Ladder | str | None,
    format: str | Format | None,
    manage: str | Predicate | None,
    group_size: int | None,
) -> Layout:
    """Return the layout of these settings, with defaults. Raises GearbxError if a checkpoint has a different one."""
    saved = saved_gears(model)
    if saved is not None:
        manifest = saved.manifest
        check_as_saved(manifest, format=format, manage=manage, group_size=group_size)
        return Layout(manifest.chosen(ladder), saved.format, manifest.group_size, saved)
    if is_quantized(model):
        codes = own_codes(model)
        if codes is None:
            raise GearbxError(
                "the model is quantized already, by a gearbox or in parts for several ranks; use telemetry only, the "
                "original, or its conversion by gearbx_mlx convert"
            )
        return Layout(codes.chosen(ladder), get_format(DEFAULT_FORMAT), codes.group_size, codes=codes)
    group_size = DEFAULT_GROUP_SIZE if group_size is None else group_size
    check_choice("group size", group_size, GROUP_SIZES)
    chosen = get_format(DEFAULT_FORMAT if format is None else format)
    if ladder is None or isinstance(ladder, str):
        ladder = Ladder.parse(ladder or (EXACT_LADDER if chosen.name == EXACT_FORMAT else DEFAULT_LADDER))
    return Layout(ladder, chosen, group_size)


def managed_layers(
    model: nn.Module, layout: Layout, manage: str | Predicate | None
) -> tuple[list[Layer], list[Layer], dict[str, str]]:
    """Return layers that change gear, embeddings that change with it, and path to reason of the other linear layers.

    With gears or codes from a checkpoint, dense layers without weights replace them in the model. Rows of embeddings
    are packed only in that case, and in formats that drop the originals. Adapters get the form that works over any
    gear.
    """
    adapters = [(path, over_gears(adapter)) for path, adapter in adapters_of(model).items()]
    nn.Module.update_modules(model, tree_unflatten(adapters))
    manage = manage or "all"
    if layout.codes is None and layout.saved is None:
        layers, unmanaged = discover(model, manage, layout.group_size, layout.format)
        wanted = manage, [gear.bits for gear in layout.ladder], layout.format, layout.group_size
        return layers, tables_to_pack(model, *wanted) if layout.format.ladders else [], unmanaged
    if layout.saved is not None:
        layers, tables = layout.saved.layers(model), layout.saved.tables(model)
        unmanaged = dict(layout.saved.manifest.unmanaged)
    elif layout.codes is not None:
        found, unmanaged = coded_layers(model, layout.codes, manage)
        layers, tables = ([layer for layer in found if layer.is_table == is_table] for is_table in (False, True))
    put_layers(model, {layer.path: layer.module for layer in (*layers, *tables)})
    return layers, tables, unmanaged


def has_quantized(layout: Layout, tables: Mapping[int, Bits], widths: Sequence[int]) -> bool:
    """Return True if any layer is stored at fewer than 16 bits. Raises GearbxError for bits that the format lacks."""
    if layout.codes is not None:
        return bool(layout.ladder.quantized_bits)
    others = {*widths, *(bits for table in tables.values() for bits in table.values())}
    stored = layout.saved.manifest.gears if layout.saved else tuple(gear.bits for gear in layout.ladder)
    check_supported(layout.format, stored, others)
    return bool({*layout.ladder.quantized_bits, *others} - {DENSE})


def use_kernels(model: nn.Module, choice: KernelChoice, *layers: Sequence[Layer]) -> list[list[Layer]]:
    """Put the whole model on the chosen kernels, and return the layers with their current modules."""
    fused = device() == CPU
    for path, module in list(model.named_modules()):
        made = with_kernels(module, choice.native, fused)
        if made is not module:  # one by one, since modules are nested
            nn.Module.update_modules(model, tree_unflatten([(path, made)]))
    for module in model.modules():
        if isinstance(module, Native):
            module.x_bits = choice.x_bits  # determines the memory layout of its gears
    now = layers_of(model)
    return [[replace(layer, module=now[layer.path]) for layer in found] for found in layers]


def compute_model_in(
    model: nn.Module, layers: Sequence[Layer], layout: Layout, dtype: str, quantized: bool
) -> tuple[mx.Dtype, dict[str, mx.Dtype], dict[str, mx.Dtype]]:
    """Put the model into its compute type.

    Returns:
        The compute type. The checkpoint's type of each weight, by path and for "" of most of the model; it defines
        a gear in any compute type. The type of scales, and of the 16-bit weight, by path.
    """
    native = [module for _, module in model.named_modules() if isinstance(module, Native)]
    drops_originals = (layout.saved or layout.codes) is not None or bool(layout.format.ladders)
    unread = [layer.module for layer in layers if drops_originals]  # weights that are unread, or will be dropped
    compute_dtype = compute_in(model, dtype, quantized, [*native, *unread])
    for module in native:
        if isinstance(module, NativeEmbedding):
            module.stored, module.dtype = module.weight.dtype, compute_dtype
    places = places_of(model)
    names = {layer.path: f"{places.get(layer.path, layer.path)}.weight" for layer in layers}
    storage = {path: stored_dtype(model, name) for path, name in {"": "", **names}.items()}
    scales = dict.fromkeys(storage, compute_dtype)
    scales |= {layer.path: storage[layer.path] for layer in layers if isinstance(layer.module, Native)}
    for layer in layers:
        if (layout.saved or layout.codes) is not None and "bias" in layer.module:
            layer.module.bias = layer.module.bias.astype(scales[layer.path])
    return compute_dtype, storage, scales
