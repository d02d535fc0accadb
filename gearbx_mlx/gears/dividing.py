"""Division of a model among ranks, array by array, so that no rank ever has all of it in memory.

A rank of a geared checkpoint reads only its own rows or columns of a divided layer's arrays. In a pipeline each rank
has some of the layers, and hidden states are sent from rank to rank.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.pipeline import PipelineMixin
from msgspec.structs import replace

from ..compat.classes import bare
from ..errors import GearbxError, check_choice
from ..files.reading import unreadable
from ..formats.holders import GatheredLinear, PlacedLinear, SummedLinear
from ..ranks.agreement import gathered_values
from .manifest import RESTORE
from .saved import SavedGears
from .sharding import DENSE_CLASSES, SHARDED, Sharding, WeightPart, blank, part_misfit, shard, sharded_parts
from .tensor_files import ArrayPlace, Samples, few_values, fingerprint_of, samples_of

SHARD_SUMS = ("gather", "sum")  # collective operation for layers whose inputs are divided


class Ranks(NamedTuple):
    """The ranks that share a model. gather: True to gather inputs instead of summing products (loading.load)."""

    group: mx.distributed.Group
    gather: bool = True


def ranks_of(group: mx.distributed.Group | None, sums: str, adapter: object, keywords: dict[str, Any]) -> Ranks | None:
    """Return the ranks that share a model; None for one process. Raises GearbxError for an adapter, or unknown sums.

    keywords: of `load`; a model for several ranks is loaded lazily, since each rank keeps a part.
    """
    check_choice("shard_sums", sums, SHARD_SUMS)
    if group is None or group.size() == 1:
        return None
    if adapter is not None:
        raise GearbxError("ranks cannot share a model with an adapter; use mlx_lm.fuse to fuse it into the model first")
    keywords["lazy"] = True
    return Ranks(group, sums == "gather")


Take = Callable[[str, str, mx.array, WeightPart], mx.array]
"""A function from a layer's path, a parameter's name, the whole array and the rank's part to the rank's array."""


def divide(model: nn.Module, ranks: Ranks) -> None:
    """Keep only a rank's part of a model without gearbox, in memory. The model's weights may be unread."""
    group = ranks.group
    parts, own = parts_of_ranks(model, group, lambda path, part: ranks.gather)
    samples: Samples = {}

    def take(path: str, name: str, array: mx.array, part: WeightPart) -> mx.array:
        own, few = part.of(array, name), few_values(array)
        mx.eval(own, few)  # together: the whole array is then freed
        samples[f"{path}.{name}"] = array.shape, np.array(few)
        return own

    samples |= samples_of(
        {name: a for name, a in tree_flatten(model.parameters()) if name.rpartition(".")[0] not in parts}
    )
    take_parts(model, group, parts, own, take)
    setattr(model, SHARDED, Sharding(group, own, fingerprint_of(samples)))
    mx.eval(model.parameters())


def parts_of_ranks(
    model: nn.Module, group: mx.distributed.Group, gathers: Callable[[str, WeightPart], bool]
) -> tuple[dict[str, WeightPart], dict[str, WeightPart]]:
    """Return path to this rank's part of each layer as `model.shard` divides it, and path to the part that it uses.

    gathers: if True for a layer, ranks gather inputs instead of summing products, and have rows instead of columns.
    """
    parts = sharded_parts(model, group)
    rows = {path: by_rows(part, group) for path, part in parts.items() if part.columns and gathers(path, part)}
    return parts, parts | rows


def by_rows(part: WeightPart, group: mx.distributed.Group) -> WeightPart:
    """Return a part with as many rows as this one has columns, if the ranks' columns and rows are in rank order."""
    *_, rows, columns = part.whole
    height, width = rows // group.size(), columns // group.size()
    rank = group.rank()
    if rows % group.size() or part.rows or part.columns != ((rank * width, rank * width + width),):
        return part
    return dataclasses.replace(part, rows=((rank * height, rank * height + height),), columns=None)


def take_parts(
    model: nn.Module,
    group: mx.distributed.Group,
    parts: Mapping[str, WeightPart],
    own: Mapping[str, WeightPart],
    take: Take,
) -> None:
    """Keep only a rank's part of each divided layer, from `parts_of_ranks`.

    The parts are of mlx-lm's own classes with fewer rows or columns, and a gearbox manages them as usual. For layers
    whose inputs are divided, a module around the part communicates between ranks (formats/holders.py).
    """
    modules = dict(model.named_modules())
    whole = {path: copy.copy(modules[path]) for path in parts}
    for path, module in whole.items():  # `shard` divides everything else, and does not touch these weights
        placed = blank(DENSE_CLASSES[type(module)], mx.zeros(parts[path].whole, mx.bfloat16), module)
        if "bias" in placed:
            placed.bias = placed.bias[...]  # a copy, since some classes change the bias in place
        nn.Module.update_modules(model, tree_unflatten([(path, placed)]))
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
        nn.Module.update_modules(model, tree_unflatten([(path, placed)]))


def around(own: nn.Module, sharded: nn.Module, part: WeightPart, group: mx.distributed.Group) -> nn.Module:
    """Return the replacement of a layer with divided inputs: the operation of `sharded`, around a rank's own part."""
    block_sums = not isinstance(sharded, nn.ShardedToAllLinear | nn.QuantizedShardedToAllLinear)
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


NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # integers of so many bytes; numpy has no bfloat16
# Arrays of one list for each row, and the array with the start of each list: exact.py, codebook.py.
LISTS = {"high": "offsets", "outliers": "outlier_offsets", "outlier_columns": "outlier_offsets"}


class WholeArray(NamedTuple):
    """A whole array in a file."""

    place: ArrayPlace
    dtype: mx.Dtype
    shape: tuple[int, ...]

    @property
    def values(self) -> np.ndarray:
        """Numbers of the array, as integers; the system reads them on use. Raises OSError as `open`."""
        return np.memmap(self.place.file, NUMPY[self.dtype.size], "r", self.place.begin, self.shape)


def matrices_of(part: WeightPart) -> list[int]:
    """Return the numbers of the rank's experts or heads; 0 for a single matrix."""
    if part.matrices is None:
        return [*range(math.prod(part.whole[:-2]))]
    return [number for a, b in part.matrices for number in range(a, b)]


def offsets_of(starts: list[list[np.ndarray]], by_matrix: bool) -> mx.array:
    """Return the starts of the lists of the rank's rows, after the other ranks' lists are removed."""
    counts = [np.concatenate([np.diff(each) for each in ranges]) for ranges in starts]
    table = np.stack(counts) if by_matrix else np.concatenate(counts)
    first = np.zeros((*table.shape[:-1], 1), np.int64)
    return mx.array(np.concatenate([first, table.cumsum(axis=-1)], axis=-1).astype(np.uint32))


def padded(array: mx.array, size: int) -> mx.array:
    """Return an array (K,) with zeros up to at least this size."""
    return mx.pad(array, [(0, max(0, size - array.size))])


class SavedPart(SavedGears):
    """Source of a rank's modules of any gear. The manifest has the shapes of the rank's parts.

    Hashes cover whole arrays, so hashes of arrays that are read in parts are not compared. parts: path to the rank's
    part of a layer. bytes_read: of divided layers, so far.
    """

    def __init__(self, saved: SavedGears, parts: dict[str, WeightPart]):
        manifest = saved.manifest
        cut = {p: replace(one, shape=parts[p].shape) for p, one in manifest.layers.items() if p in parts}
        super().__init__(saved.directory, replace(manifest, layers={**manifest.layers, **cut}), saved.hashes)
        self.parts, self.bytes_read = parts, 0
        self._stored = {
            name: WholeArray(self.hashes.places[name], array.dtype, array.shape) for name, array in self._open().items()
        }
        self._gears: dict[str, tuple[str, str, dict[str, str]]] = {}  # array to layer, parameter, all arrays of a gear
        for path, layer in self.manifest.changing.items():
            for names in layer.gears.values() if path in parts else ():
                self._gears |= {array: (path, parameter, dict(names)) for parameter, array in names.items()}
        unmanaged = {name for name in self._stored if name.rpartition(".")[0] in parts}
        self.partial = frozenset(self._gears.keys() | unmanaged)
        self._kept: list[mx.array] = []  # arrays read before the gearbox exists

    def take(self, path: str, name: str, array: mx.array, part: WeightPart) -> mx.array:
        """Return the rank's part of a parameter of the base. array: the whole one, unread if possible."""
        full = f"{path}.{name}"
        if full in self._gears:
            return self._array(full)
        if path in self.manifest.changing and name != "bias":
            return mx.zeros(part.shape, array.dtype)  # never read: the lowest gear replaces it
        if full in self._stored and self._stored[full].shape == array.shape:
            return self._read(path, name, {name: full})
        own = part.of(array, name)
        mx.eval(own)
        return own

    def read(self, arrays: object) -> None:
        super().read(arrays)
        self._kept.clear()

    def _take(self, name: str) -> mx.array:
        if name not in self._gears:
            return super()._take(name)
        self._kept.append(self._read(*self._gears[name]))
        return self._kept[-1]

    def _read(self, path: str, parameter: str, names: dict[str, str]) -> mx.array:
        """Return the rank's part of a parameter. names: parameters of the same module to their arrays."""
        try:
            return self._cut(parameter, self.parts[path], {name: self._stored[of] for name, of in names.items()})
        except OSError as error:
            raise unreadable(self.hashes.places[names[parameter]].file, error) from error
        except GearbxError as error:
            raise GearbxError(f"{self.directory}: {path}: {error}; {RESTORE}") from error

    def _cut(self, name: str, part: WeightPart, arrays: Mapping[str, WholeArray]) -> mx.array:
        """Return the rank's part of a parameter; a plane's name contains its number. arrays: by parameters.

        Raises GearbxError for lists outside of their array.
        """
        stored = arrays[name]
        if name in LISTS:
            return self._lists(part, self._starts(part, arrays[LISTS[name]]), stored)
        if name in LISTS.values():
            return offsets_of(self._starts(part, stored), len(stored.shape) == 2)
        values = stored.values
        for axis, ranges in part.cuts(stored.shape, name.partition(".")[0]):
            pieces = [values[(slice(None),) * axis + (slice(*each),)] for each in ranges]
            values = np.concatenate(pieces, axis) if len(pieces) > 1 else pieces[0]
        return mx.array(self._loaded(values)).view(stored.dtype)

    def _starts(self, part: WeightPart, offsets: WholeArray) -> list[list[np.ndarray]]:
        """Return, per matrix and range of rows of the rank, the starts of the lists and the end of the last one."""
        rows, values = part.whole[-2], offsets.values.reshape(-1)
        stride = rows + (len(offsets.shape) == 2)  # an end per matrix, or one end for all matrices
        return [
            [self._loaded(values[first + a : first + b + 1]).astype(np.int64) for a, b in part.rows or ((0, rows),)]
            for first in (number * stride for number in matrices_of(part))
        ]

    def _lists(self, part: WeightPart, starts: list[list[np.ndarray]], stored: WholeArray) -> mx.array:
        """Return the lists of the rank's rows, concatenated; per matrix if the array has that axis."""
        own, by_matrix, size, whole = [], len(stored.shape) == 2, stored.shape[-1], stored.values
        for number, ranges in zip(matrices_of(part), starts):
            values, found = whole[number] if by_matrix else whole, []
            for first, last in ((int(start[0]), int(start[-1])) for start in ranges):
                if not 0 <= first <= last <= size:
                    raise GearbxError("its lists exceed their array")
                found.append(self._loaded(values[first:last]))
            own.append(mx.array(np.concatenate(found)).view(stored.dtype))
        if not by_matrix:
            return padded(mx.concatenate(own), 1)
        longest = max(1, *(each.size for each in own))
        return mx.stack([padded(each, longest) for each in own])

    def _loaded(self, values: np.ndarray) -> np.ndarray:
        """Return numbers of a file, in memory."""
        self.bytes_read += values.nbytes
        return np.array(values)


def divide_saved(model: nn.Module, saved: SavedGears, ranks: Ranks) -> SavedPart:
    """Keep only a rank's part of the base of a geared checkpoint, and return its part of the gears.

    A layer always gathers if its format stores whole rows, or if a part would cut its groups.
    """
    saved.check(model)
    group = ranks.group
    parts, own = parts_of_ranks(model, group, lambda path, part: ranks.gather or not can_be_cut(saved, path, part))
    part = SavedPart(saved, own)
    take_parts(model, group, parts, own, part.take)
    setattr(model, SHARDED, Sharding(group, own, saved.manifest.fingerprint))
    return part


def can_be_cut(saved: SavedGears, path: str, part: WeightPart) -> bool:
    """Return True if the gears of a layer can be cut between the columns of a part."""
    managed = path in saved.manifest.changing
    return not managed or part_misfit(part, saved.manifest.format_of(path), saved.manifest.group_size) is None


def cut_into_stages(model: nn.Module, group: mx.distributed.Group) -> None:
    """Keep only a rank's layers of a model, in memory. The model's weights may be unread.

    Other ranks' layers are not read. Modules that mlx-lm gives to every stage, such as the head, are on every rank.
    """
    into_stages(model, group)
    mx.eval(model.parameters())
    setattr(model, SHARDED, Sharding(group, {}, fingerprint_of_all(model, group)))


def stage_of(model: nn.Module, saved: SavedGears, group: mx.distributed.Group) -> SavedGears:
    """Keep only a rank's layers of the base of a geared checkpoint, unread, and return their gears."""
    saved.check(model)
    into_stages(model, group)
    setattr(model, SHARDED, Sharding(group, {}, saved.manifest.fingerprint))
    own = dict(model.named_modules())
    layers = {path: layer for path, layer in saved.manifest.layers.items() if path in own}
    return SavedGears(saved.directory, replace(saved.manifest, layers=layers), saved.hashes)


def into_stages(model: nn.Module, group: mx.distributed.Group) -> None:
    """Keep only a rank's layers; the last rank has the first ones. Raises GearbxError if the model cannot be split."""
    inner = getattr(model, "model", None)
    if not isinstance(inner, PipelineMixin):
        name = type(model).__module__.rpartition(".")[2]
        raise GearbxError(f"mlx-lm's class '{name}' has no pipeline; omit pipeline=True to divide each layer")
    if len(inner.layers) < group.size():
        raise GearbxError(f"the model has {len(inner.layers)} layers for {group.size()} ranks; use fewer ranks")
    inner.pipeline(group)


def fingerprint_of_all(model: nn.Module, group: mx.distributed.Group) -> str:
    """Return the fingerprint of the model of all ranks. Raises GearbxError for an array that differs between them."""
    samples = samples_of(dict(tree_flatten(model.parameters())))
    own = {name: [list(shape), values.tobytes().hex()] for name, (shape, values) in samples.items()}
    every: dict[str, list] = {}
    for rank, arrays in enumerate(gathered_values(group, own)):
        for name, described in arrays.items():
            if every.setdefault(name, described) != described:
                raise GearbxError(f"rank {rank}: {name} differs from other ranks'; use the same model on all ranks")
    return fingerprint_of(
        {name: (shape, np.frombuffer(bytes.fromhex(few), np.float32)) for name, (shape, few) in every.items()}
    )
