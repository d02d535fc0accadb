"""A model becomes one rank's part of it, array by array, so that no rank ever has all of it in memory."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import GearbxError
from ..formats.holders import GatheredLinear, PlacedLinear, SummedLinear
from ..formats.native import bare
from .adapters import put_modules
from .fingerprint import fingerprint_of, sample
from .parts import Part
from .sharding import DENSE, SHARDED, Sharding, parts_of, shard

SUMS = ("gather", "sum")  # what ranks do about layers whose inputs are divided
SUMMING = (nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear)  # of others that are cut by columns, the block sums
Take = Callable[[str, str, mx.array, Part], mx.array]
"""Path of a layer, name of a parameter, the whole array, and the rank's part, to the rank's array."""


class Ranks(NamedTuple):
    """Those that share a model. gather: whether they gather inputs instead of summing products (loading.load)."""

    group: mx.distributed.Group
    gather: bool = True


def ranks_of(group: mx.distributed.Group | None, sums: str, keywords: dict[str, Any]) -> Ranks | None:
    """Who shares a model; None: nobody.

    Args:
        sums: one of SUMS.
        keywords: of `load`; what is loaded for several ranks becomes lazy, since each keeps a part.

    Raises:
        GearbxError: other sums, or an adapter, which is not divided.
    """
    if sums not in SUMS:
        raise GearbxError(f"shard_sums '{sums}' does not exist; choose from {', '.join(SUMS)}")
    if group is None or group.size() == 1:
        return None
    if keywords.get("adapter_path") is not None:
        raise GearbxError("ranks cannot share a model with an adapter; fuse it into the model first (mlx_lm.fuse)")
    keywords["lazy"] = True
    return Ranks(group, sums == "gather")


def divide(model: nn.Module, ranks: Ranks) -> None:
    """Leave a rank its part of a model that no gearbox has, in memory. The model's weights may be unread.

    Raises:
        GearbxError: as `parts_of`.
    """
    group = ranks.group
    parts = parts_of(model, group)
    samples = {}

    def take(path: str, name: str, array: mx.array, part: Part) -> mx.array:
        own, few = part.of(array, name), sample(array)
        mx.eval(own, few)  # together: the whole array is then freed
        samples[f"{path}.{name}"] = array.shape, np.array(few)
        return own

    for name, array in tree_flatten(model.parameters()):
        if name.rpartition(".")[0] not in parts:
            samples[name] = array.shape, np.array(sample(array))
    own = own_parts(parts, group, lambda path: ranks.gather)
    take_parts(model, group, parts, own, take)
    setattr(model, SHARDED, Sharding(group, own, fingerprint_of(samples)))
    mx.eval(model.parameters())


def own_parts(
    parts: Mapping[str, Part], group: mx.distributed.Group, gathers: Callable[[str], bool]
) -> dict[str, Part]:
    """The parts, with rows in the place of columns where ranks gather inputs instead of summing products.

    Args:
        parts: as `model.shard` divides the layers.
        gathers: whether the layer of a path does.
    """
    return {path: by_rows(part, group) if part.columns and gathers(path) else part for path, part in parts.items()}


def by_rows(part: Part, group: mx.distributed.Group) -> Part:
    """As many rows of a weight as the part has columns, if the ranks' columns and rows are in their order."""
    *_, rows, columns = part.whole
    height, width = rows // group.size(), columns // group.size()
    rank = group.rank()
    if rows % group.size() or part.rows or part.columns != ((rank * width, rank * width + width),):
        return part
    return dataclasses.replace(part, rows=((rank * height, rank * height + height),), columns=None)


def take_parts(
    model: nn.Module, group: mx.distributed.Group, parts: Mapping[str, Part], own: Mapping[str, Part], take: Take
) -> None:
    """Leave a rank its part of each divided layer.

    They are then mlx-lm's own classes over fewer rows or columns, which a gearbox manages as any others. What the ranks
    tell each other is in a module around those whose inputs are divided (formats/holders.py).

    Args:
        parts: as `model.shard` divides the layers. own: from `own_parts`.
    """
    modules = dict(model.named_modules())
    whole = {path: copy.copy(modules[path]) for path in parts}
    for path, module in whole.items():  # `shard` divides everything else, and does not touch these weights
        put_modules(model, tree_unflatten([(path, blank(module, parts[path].whole))]))
    shard(model, group)
    sharded = dict(model.named_modules())
    for path, module in whole.items():
        made = bare(type(module))
        vars(made).update(vars(module))
        for name in list(module):
            value = module.pop(name)
            made[name] = take(path, name, value, own[path]) if isinstance(value, mx.array) else value
            del value
        placed = made if parts[path].columns is None else around(made, sharded[path], own[path], group)
        put_modules(model, tree_unflatten([(path, placed)]))


def blank(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """A dense layer in the place of another: its bias, and a weight of this shape that nobody reads."""
    made = bare(DENSE[type(module)])
    made.weight = mx.zeros(shape, mx.bfloat16)
    if "bias" in module:
        made.bias = module.bias[...]  # which some classes change in its place
    return made


def around(own: nn.Module, sharded: nn.Module, part: Part, group: mx.distributed.Group) -> nn.Module:
    """What takes the place of a layer whose inputs are divided.

    Args:
        own: the rank's part of the layer.
        sharded: what `model.shard` makes of the whole layer.
        part: the rank's.
    """
    block_sums = not isinstance(sharded, SUMMING)
    if part.columns is None:
        return (PlacedLinear if block_sums else GatheredLinear)(own, group)
    if block_sums:
        if "bias" in own:
            own.bias = sharded.bias  # a part of it, since the block adds it up
        return own
    summed = SummedLinear(own, group)
    if "bias" in own:
        summed.bias = own.pop("bias")
    return summed
