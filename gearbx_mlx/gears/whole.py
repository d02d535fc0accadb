"""Formats whose top gear contains the original: every gear of a layer is made at once, and the original dropped."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError
from ..formats.base import dense_weight
from ..formats.exact import too_large
from ..formats.tied import linear_of
from .discovery import Layer
from .ladder import DENSE
from .layout import Layout
from .sources import Original

Gears = dict[int, nn.Module]
Advance = Callable[[int], object]


def unseen(total: int) -> AbstractContextManager[Advance]:
    return nullcontext(lambda done: None)


# Surrounds the encoding of `total` bytes, which takes seconds, and is called with the bytes of each layer that is done:
# a command puts its progress bar here.
while_encoding: Callable[[int], AbstractContextManager[Advance]] = unseen


def refuse_other_codes(
    layout: Layout, layers: Iterable[Layer], tables: Mapping, low_model: nn.Module | None, residency: str
) -> None:
    """Raises GearbxError for settings that give gears other codes than those of the format, or need the originals."""
    name = layout.format.name
    if tables or any(layer.clamp is not None for layer in layers):
        raise GearbxError(f"format {name} has the same bits in every layer, and no clamps; leave out tables and clamps")
    if low_model is not None:
        raise GearbxError(f"format {name} is one copy of the weights, and its low gear cannot be another model's")
    if residency == "disk" and layout.saved is None:
        raise GearbxError(
            f"format {name} has no originals to read again from disk; write its gears there with gearbx_mlx.convert, "
            "or leave out residency 'disk'"
        )


def make_all(layers: Sequence[Layer], source: Original) -> tuple[dict[str, Gears], dict[str, str]]:
    """Make all gears of all layers, and drop each original once its gears are there.

    If this fails, the layers have their weights again.

    Returns:
        path to the gears of a layer; path to reason of layers that stay as they are, since they would become larger.
    """
    made: dict[str, Gears] = {}
    larger: dict[str, str] = {}
    try:
        with while_encoding(sum(layer.module.weight.nbytes for layer in layers)) as advance:
            for layer in layers:
                gears, reason = gears_of(layer, source)
                if reason:
                    larger[layer.path] = reason
                else:
                    made[layer.path] = gears
                if len(gears) > 1:
                    drop(layer.module)
                advance(layer.module.weight.nbytes)
    except BaseException:
        for layer in layers:
            if layer.path in made and len(made[layer.path]) > 1:
                layer.module.weight = dense_weight(linear_of(made[layer.path][DENSE]))
        raise
    return made, larger


def gears_of(layer: Layer, source: Original) -> tuple[Gears, str | None]:
    """All gears of a layer, evaluated; or none, and the reason, if it would become larger."""
    lowest, *others = source.widths(layer)
    gears = source.modules(layer, lowest)
    if not others:
        return gears, None
    source.read({layer.path: gears.values()})
    reason = too_large(linear_of(gears[DENSE]))
    return ({}, reason) if reason else (gears, None)


def drop(module: nn.Module) -> None:
    """Replace a weight by one of the same shape and type that is never evaluated."""
    module.weight = mx.zeros(module.weight.shape, module.weight.dtype)
