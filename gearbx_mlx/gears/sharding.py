"""A model's class divides its weights among ranks (`shard`). Here a rank learns its part before any weight is read."""

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..errors import GearbxError, one_line
from ..formats.native import bare
from .adapters import put_modules
from .parts import Part, ranges_of
from .random_numbers import same_random_numbers

SHARDED = "sharded_over"  # attribute of a model of which each rank has a part
DENSE: dict[type[nn.Module], type[nn.Module]] = {  # of the layers that can be divided, the dense class
    **{nn.Linear: nn.Linear, nn.QuantizedLinear: nn.Linear},
    **{SwitchLinear: SwitchLinear, QuantizedSwitchLinear: SwitchLinear},
    **{MultiLinear: MultiLinear, QuantizedMultiLinear: MultiLinear},
}


class Sharding(NamedTuple):
    """How a model is divided. parts: path of each divided layer to the rank's part. fingerprint: of the whole model."""

    group: mx.distributed.Group
    parts: Mapping[str, Part]
    fingerprint: str

    def __deepcopy__(self, memo: dict) -> "Sharding":
        return self  # a copy of the model has the same ranks


def sharding_of(model: nn.Module) -> Sharding | None:
    """How a model is divided among ranks, if it is."""
    return getattr(model, SHARDED, None)


def parts_of(model: nn.Module, group: mx.distributed.Group) -> dict[str, Part]:
    """Path to this rank's part of each layer that `model.shard` divides.

    It is run on copies of the model whose weights are the numbers of their rows and columns. The model's own weights
    stay unread.

    Raises:
        GearbxError: the class has no `shard`, or cannot divide this model by the number of ranks.
    """
    if not hasattr(model, "shard"):
        name = type(model).__module__.rpartition(".")[2]
        raise GearbxError(f"mlx-lm's class '{name}' cannot be sharded; run it in one process, or as a pipeline")
    shapes = {path: dense_shape(module) for path, module in model.named_modules() if type(module) in DENSE}
    numbers = {path: numbered_rows(shape, group.size()) for path, shape in shapes.items()}
    found = sharded_layers(model, group, numbers)
    parts = {path: rows_in(module.weight, shapes[path]) for path, module in found.items()}
    narrow = {path for path, module in found.items() if module.weight.shape[-1] < group.size()}
    if narrow:
        found = sharded_layers(model, group, numbers | {path: numbered_columns(shapes[path]) for path in narrow})
    for path in narrow:
        weight = found[path].weight
        columns = ranges_of(numbers_in(weight.reshape(-1, weight.shape[-1])[0]))
        parts[path] = dataclasses.replace(parts[path], columns=columns)
    # Where there are more ranks than heads, some classes leave a rank all of a layer, as a class that a gearbox does
    # not know.
    return {path: part for path, part in parts.items() if part.shape != part.whole or type(found[path]) not in DENSE}


def dense_shape(module: nn.Module) -> tuple[int, ...]:
    """The shape (..., O, I) of the weight that a stock layer, quantized or not, stands for."""
    shape = module.weight.shape
    return (*shape[:-1], shape[-1] * 32 // module.bits) if "scales" in module else shape


def numbered_rows(shape: tuple[int, ...], ranks: int) -> mx.array:
    """A weight as that of a shape (..., O, I), with as many columns as ranks; each number is that of its row."""
    count = mx.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1)
    return mx.broadcast_to(count, (*shape[:-1], ranks))


def numbered_columns(shape: tuple[int, ...]) -> mx.array:
    """A weight as that of a shape (..., O, I), with one row; each number is that of its column."""
    return mx.broadcast_to(mx.arange(shape[-1]), (*shape[:-2], 1, shape[-1]))


def rows_in(weight: mx.array, shape: tuple[int, ...]) -> Part:
    """The part of a weight of this shape whose rows are numbered in `weight`."""
    first = weight[..., 0].reshape(-1, weight.shape[-2])
    matrices, rows = numbers_in(first[:, 0] // shape[-2]), numbers_in(first[0] % shape[-2])
    own_matrices = None if len(shape) == 2 or matrices == [*range(shape[0])] else ranges_of(matrices)
    return Part(shape, own_matrices, None if rows == [*range(shape[-2])] else ranges_of(rows))


def numbers_in(array: mx.array) -> list[int]:
    return np.array(array).tolist()


def sharded_layers(
    model: nn.Module, group: mx.distributed.Group, weights: Mapping[str, mx.array]
) -> dict[str, nn.Module]:
    """Path to what `model.shard` makes of layers with these weights, on a copy of the model.

    Raises:
        GearbxError: the class cannot divide this model by the number of ranks.
    """
    arrays = [value for module in model.modules() for value in module.values() if isinstance(value, mx.array)]
    # Arrays of its own that are not computed: some classes change a bias in its place.
    other = copy.deepcopy(model, {id(array): array[...] for array in arrays})
    modules = dict(other.named_modules())
    for path, weight in weights.items():
        blank = bare(DENSE[type(modules[path])])
        blank.weight = weight
        if "bias" in modules[path]:
            blank.bias = modules[path].bias
        put_modules(other, tree_unflatten([(path, blank)]))
    shard(other, group)
    modules = dict(other.named_modules())
    found = {path: modules[path] for path in weights}
    mx.eval([module.weight for module in found.values()])
    return found


def shard(model: nn.Module, group: mx.distributed.Group) -> None:
    """`model.shard`. Raises GearbxError where the class cannot divide this model by the number of ranks.

    It makes layers with random weights, and the same seed is to give the text of one process: so the random numbers
    drawn here will be drawn again.
    """
    ranks, before = group.size(), head_counts(model)
    try:
        with same_random_numbers():
            model.shard(group)
    except (ValueError, AssertionError, ZeroDivisionError) as error:
        raise undivided(ranks, one_line(error) or "its class does not say why") from error
    for (path, name), count in head_counts(model).items():
        was = before.get((path, name), count)
        if count != was and count * ranks < was:  # most classes round down
            raise undivided(ranks, f"{path}.{name} is {was}")


def head_counts(model: nn.Module) -> dict[tuple[str, str], int]:
    """Path of a module and name of an attribute to the number of heads that it says."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if "heads" in name and type(value) is int
    }


def undivided(ranks: int, why: str) -> GearbxError:
    return GearbxError(f"the model cannot be divided among {ranks} ranks ({why}); start another number of them")
