"""A rank's part of each weight, by the division of the model's class (`shard`), known before any weight is read.

A part consists of ranges of a weight's heads or experts, rows and columns.
"""

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..compat.arrays import same_random_numbers
from ..compat.classes import bare
from ..errors import GearbxError, one_line
from ..formats.base import Format

Ranges = tuple[tuple[int, int], ...]  # from the first index to the one after the last
WHOLE_AXES = ("library",)  # arrays whose second axis is not rows: codebook_library.py


@dataclass(frozen=True)
class WeightPart:
    """One rank's part of a weight.

    whole: the shape of the weight, (O, I), or (E, O, I) for experts or heads. matrices, rows, columns: the rank's own,
    along the axes of E, O and I; None: all of them.
    """

    whole: tuple[int, ...]
    matrices: Ranges | None = None
    rows: Ranges | None = None
    columns: Ranges | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rank's part."""
        cuts = dict(self.cuts(self.whole))
        return tuple(
            sum(end - start for start, end in cuts.get(axis, ((0, size),))) for axis, size in enumerate(self.whole)
        )

    def cuts(self, shape: tuple[int, ...], name: str = "weight") -> list[tuple[int, Ranges]]:
        """Return axes with the rank's ranges, for an array that belongs to the weight.

        shape: of the whole array: (..., O, K) with K in proportion to I, or (..., O). name: of the parameter; a bias
        is (..., O), and a library belongs to a matrix. Raises GearbxError for columns that split a stored number.
        """
        lead = len(self.whole) - 2
        found = [(0, self.matrices)] if lead else []
        if name not in WHOLE_AXES:
            found.append((lead, self.rows))
        if len(shape) == len(self.whole) and name not in WHOLE_AXES and self.columns is not None:
            found.append((lead + 1, tuple((self._scaled(a, shape), self._scaled(b, shape)) for a, b in self.columns)))
        return [(axis, ranges) for axis, ranges in found if ranges is not None]

    def _scaled(self, column: int, shape: tuple[int, ...]) -> int:
        place, rest = divmod(column * shape[-1], self.whole[-1])
        if rest:
            raise GearbxError(
                f"a rank's columns end at {column} of {self.whole[-1]}, inside of a group or a word of a quantized "
                "weight; set shard_sums to 'gather', or use a different number of ranks"
            )
        return place

    def of(self, array: mx.array, name: str = "weight") -> mx.array:
        """Return the rank's part of an array that belongs to the weight; arguments as for `cuts`."""
        for axis, ranges in self.cuts(array.shape, name):
            pieces = [array[(slice(None),) * axis + (slice(*each),)] for each in ranges]
            array = mx.concatenate(pieces, axis=axis) if len(pieces) > 1 else pieces[0]
        return mx.contiguous(array)

    def __str__(self) -> str:
        """Return the rank's part as text: "rows 0-127 of 256"."""
        lead = len(self.whole) - 2
        axes = [("matrices", self.matrices, 0), ("rows", self.rows, lead), ("columns", self.columns, lead + 1)]
        return ", ".join(
            f"{name} {'+'.join(f'{a}-{b - 1}' for a, b in ranges)} of {self.whole[axis]}"
            for name, ranges, axis in axes
            if ranges is not None
        )


def part_misfit(part: WeightPart | None, format: Format, group_size: int) -> str | None:
    """Return why a part of a weight cannot be stored like the whole; None if it can, or is whole."""
    if part is None:
        return None
    if part.rows and not format.by_rows:
        return f"codes of format {format.name} depend on the whole matrix, but ranks have rows; use convert first"
    if part.columns is None:
        return None
    span = format.span(group_size)
    if span is None:
        return f"format {format.name} stores whole rows, but ranks have some columns; set shard_sums to 'gather'"
    if any(a % span or b % span for a, b in part.columns):
        return f"ranks have columns that end inside of a group of {span}; set shard_sums to 'gather'"
    return None


def ranges_of(indices: Iterable[int]) -> Ranges:
    """Return indices as ranges, in their order: 4, 5, 6, 1, 2 -> ((4, 7), (1, 3))."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = found[-1][0], index + 1
        else:
            found.append((index, index + 1))
    return tuple(found)


SHARDED = "sharded_over"  # attribute of a model of which each rank has a part
QUANTIZED_AS: dict[type[nn.Module], type[nn.Module]] = {  # dense class to the one that mlx-lm quantizes it to
    **{nn.Linear: nn.QuantizedLinear, SwitchLinear: QuantizedSwitchLinear, MultiLinear: QuantizedMultiLinear}
}
# Dense class of each layer class that can be divided.
DENSE_CLASSES = {kind: dense for dense, quantized in QUANTIZED_AS.items() for kind in (dense, quantized)}


class Sharding(NamedTuple):
    """A model's division. parts: path of each divided layer to the rank's part. fingerprint: of the whole model."""

    group: mx.distributed.Group
    parts: Mapping[str, WeightPart]
    fingerprint: str

    def __deepcopy__(self, memo: dict) -> "Sharding":
        return self  # a copy of the model has the same ranks


def sharding_of(model: nn.Module) -> Sharding | None:
    """Return a model's division among ranks, if any."""
    return getattr(model, SHARDED, None)


def divided_parts(model: nn.Module) -> Mapping[str, WeightPart]:
    """Return path to this rank's part of each divided layer."""
    sharding = sharding_of(model)
    return {} if sharding is None else sharding.parts


def sharded_parts(model: nn.Module, group: mx.distributed.Group) -> dict[str, WeightPart]:
    """Return path to this rank's part of each layer that `model.shard` divides. Raises GearbxError if it cannot.

    `shard` runs on copies of the model with numbers of rows and columns as weights. The model's own weights
    stay unread.
    """
    if not hasattr(model, "shard"):
        name = type(model).__module__.rpartition(".")[2]
        raise GearbxError(f"mlx-lm's class '{name}' cannot be sharded; use one process, or a pipeline")
    shapes = {path: dense_shape(module) for path, module in model.named_modules() if type(module) in DENSE_CLASSES}
    numbers = {path: numbered_rows(shape, group.size()) for path, shape in shapes.items()}
    found = sharded_layers(model, group, numbers)
    parts = {path: rows_in(module.weight, shapes[path]) for path, module in found.items()}
    narrow = {path for path, module in found.items() if module.weight.shape[-1] < group.size()}
    if narrow:
        for path in narrow:  # a weight of one row; each value is the number of its column
            *lead, _, width = shapes[path]
            numbers[path] = mx.broadcast_to(mx.arange(width), (*lead, 1, width))
        found = sharded_layers(model, group, numbers)
    for path in narrow:
        weight = found[path].weight
        columns = ranges_of(numbers_in(weight.reshape(-1, weight.shape[-1])[0]))
        parts[path] = dataclasses.replace(parts[path], columns=columns)
    # With more ranks than heads, some classes leave a rank a whole layer, in a class that a gearbox does not know.
    return {
        path: part for path, part in parts.items() if part.shape != part.whole or type(found[path]) not in DENSE_CLASSES
    }


def dense_shape(module: nn.Module) -> tuple[int, ...]:
    """Return the shape (..., O, I) of the weight of a stock layer, quantized or not."""
    shape: tuple[int, ...] = module.weight.shape
    return (*shape[:-1], shape[-1] * 32 // module.bits) if "scales" in module else shape


def blank(kind: type[nn.Module], weight: mx.array, now: nn.Module) -> nn.Module:
    """Return a layer of a dense class, with a weight that is never read and the bias of the current module."""
    made = bare(kind)
    made.weight = weight
    if "bias" in now:
        made.bias = now.bias
    made.train(now.training)
    return made


def numbered_rows(shape: tuple[int, ...], ranks: int) -> mx.array:
    """Return a weight (..., O, columns) with one column per rank; each value is the number of its row."""
    count = mx.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1)
    return mx.broadcast_to(count, (*shape[:-1], ranks))


def rows_in(weight: mx.array, shape: tuple[int, ...]) -> WeightPart:
    """Return the part of a weight of this shape whose rows are numbered in `weight`."""
    first = weight[..., 0].reshape(-1, weight.shape[-2])
    matrices, rows = numbers_in(first[:, 0] // shape[-2]), numbers_in(first[0] % shape[-2])
    own_matrices = None if len(shape) == 2 or matrices == [*range(shape[0])] else ranges_of(matrices)
    return WeightPart(shape, own_matrices, None if rows == [*range(shape[-2])] else ranges_of(rows))


def numbers_in(array: mx.array) -> list[int]:
    return np.array(array).tolist()


def sharded_layers(
    model: nn.Module, group: mx.distributed.Group, weights: Mapping[str, mx.array]
) -> dict[str, nn.Module]:
    """Return path to the divided layers that `model.shard` makes from these weights, on a copy of the model."""
    arrays = [value for module in model.modules() for value in module.values() if isinstance(value, mx.array)]
    # Unevaluated copies of the arrays: some classes change a bias in place.
    other = copy.deepcopy(model, {id(array): array[...] for array in arrays})
    modules = dict(other.named_modules())
    for path, weight in weights.items():
        made = blank(DENSE_CLASSES[type(modules[path])], weight, modules[path])
        nn.Module.update_modules(other, tree_unflatten([(path, made)]))
    shard(other, group)
    modules = dict(other.named_modules())
    found = {path: modules[path] for path in weights}
    mx.eval([module.weight for module in found.values()])
    return found


def shard(model: nn.Module, group: mx.distributed.Group) -> None:
    """Run `model.shard`. Raises GearbxError if the class cannot divide this model by the number of ranks.

    `shard` makes layers with random weights. The random state is restored, so that a seed gives the output of one
    process.
    """
    ranks, before = group.size(), head_counts(model)
    try:
        with same_random_numbers():
            model.shard(group)
    except (ValueError, AssertionError, ZeroDivisionError) as error:
        raise undivided(ranks, one_line(error) or "its class has no reason") from error
    for (path, name), count in head_counts(model).items():
        was = before.get((path, name), count)
        if count != was and count * ranks < was:  # most classes round down
            raise undivided(ranks, f"{path}.{name} is {was}")


def head_counts(model: nn.Module) -> dict[tuple[str, str], int]:
    """Return path of a module and name of an attribute to its number of heads."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if "heads" in name and type(value) is int
    }


def undivided(ranks: int, why: str) -> GearbxError:
    return GearbxError(f"the model cannot be divided among {ranks} ranks ({why}); use a different number of ranks")
