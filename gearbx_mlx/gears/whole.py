"""Formats whose top gear contains the original: every gear of a layer is made at once, and the original dropped."""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError
from ..formats.base import dense_weight
from ..formats.exact import too_large
from ..formats.tied import linear_of
from .discovery import Layer, none_managed
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
    layout: Layout, layers: Sequence[Layer], tables: Mapping, low_model: nn.Module | None, residency: str
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
    shared = collections.Counter(id(layer.module) for layer in layers)
    for layer in layers:
        if shared[id(layer.module)] > 1:
            raise GearbxError(f"{layer.path} is a module of two places, which format {name} cannot drop; use another")


def make_all(layers: Sequence[Layer], source: Original) -> tuple[dict[str, Gears], dict[str, str]]:
    """Make all gears of all layers, and drop each original once its gears are there.

    If this fails, the layers have their weights again.

    Returns:
        path to the gears of a layer; path to reason of layers that stay as they are: they would become larger, or have
        floors.

    Raises:
        GearbxError: all of them do.
    """
    made: dict[str, Gears] = {}
    larger: dict[str, str] = {}
    size = sum(layer.module.weight.nbytes for layer in layers)
    with giving_back(layers, made):
        with while_encoding(size) as advance:
            for layer in layers:
                gears, reason = gears_of(layer, source)
                if reason:
                    larger[layer.path] = reason
                else:
                    made[layer.path] = gears
                if len(gears) > 1:
                    drop(layer.module)
                advance(layer.module.weight.nbytes)
        if not any(layer.path in made for layer in layers if not layer.is_table):
            raise none_managed(larger)
    return made, larger


@contextmanager
def giving_back(layers: Sequence[Layer], made: Mapping[str, Gears] | None) -> Iterator[None]:
    """If what is inside fails, layers get the weights again that were dropped when their gears were made."""
    try:
        yield
    except BaseException:
        for layer in layers:
            if made and len(made.get(layer.path, {})) > 1:
                layer.module.weight = dense_weight(linear_of(made[layer.path][DENSE]))
        raise


def gears_of(layer: Layer, source: Original) -> tuple[Gears, str | None]:
    """All gears of a layer, evaluated; or none, and the reason why it stays as it is."""
    lowest, *others = source.widths(layer)
    if not others:
        return {}, f"has a floor of {layer.lowest_bits} bits, and format {source.format.name} no such gears"
    gears = source.modules(layer, lowest)
    source.read({layer.path: gears.values()})
    reason = too_large(linear_of(gears[DENSE]))
    return ({}, reason) if reason else (gears, None)


def drop(module: nn.Module) -> None:
    """Replace a weight by one of the same shape and type that is never evaluated."""
    module.weight = mx.zeros(module.weight.shape, module.weight.dtype)
