"""Conversion of a model to a geared checkpoint, one layer at a time.

The arrays of a layer in all gears are divided between the base, which stock mlx-lm reads, and a second file.

The bytes of original tensors are in the parameters, but model classes stack, transpose and divide tensors. Their views
are numpy arrays of unsigned integers of the same size: bits without values.
"""

import hashlib
import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten

from ..compat.arrays import dtype_name
from ..errors import GearbxError
from ..formats import get_format
from ..formats.base import Format, check_quantized, check_supported, is_finite, stored_bits
from ..formats.exact import too_large
from ..formats.native import affine_planes
from ..formats.planes import SplitCodes
from ..formats.tied import linear_of
from ..gears.activations import stored_dtype
from ..gears.discovery import Layer, Predicate, discover, none_managed, stored_widths, tables_to_pack, with_bits
from ..gears.in_place import alike_layers, own_codes, stock_quantization
from ..gears.ladder import DENSE, EMBEDDINGS, Ladder
from ..gears.manifest import GEARS_FILE, MANIFEST, RESTORE, Manifest, OriginalModel, SavedLayer, Tensor, View
from ..gears.offload import EMPTY, put_parameters
from ..gears.saved import LAYER_KINDS
from ..gears.sources import made_over
from ..gears.tensor_files import (
    TensorFile,
    bits_in,
    few_values,
    fingerprint_of,
    hash_bytes,
    header_of,
)
from ..kernels.bit_planes import Planes

COUNTS = (2, 3, 4, 8, 16, 32, 64, 128)  # numbers of equal pieces into which classes cut tensors: gate and up, experts
TENSOR_CUTS = [(axis, count, False) for axis in (-2, -1) for count in COUNTS] + [(axis, 2, True) for axis in (-2, -1)]


def hash_bits(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's bytes, row after row."""
    return hash_bytes(np.ascontiguousarray(array))


def views_of(name: str, array: np.ndarray, wanted: Container[str]) -> dict[str, View]:
    """Return hash to view of a parameter, for those views whose hash is wanted.

    No hash is wanted if the parameter is a part of an original tensor, or is new. Then the views are the whole
    parameter and its transpose.
    """
    whole, view = hash_bits(array), View(name)
    if whole in wanted or array.ndim < 2:
        return {whole: view}
    unmatched = {whole: view}
    for transposed in (False, True):
        digest, found = hashlib.sha256(), {}
        for i, matrix in enumerate(matrices(array)):
            data = np.ascontiguousarray(matrix.T if transposed else matrix)
            digest.update(data.data)
            found[hash_bytes(data)] = View(name, i, transposed)
        if digest.hexdigest() in wanted:
            return {digest.hexdigest(): View(name, None, transposed)}
        if any(hash in wanted for hash in found):
            return {hash: view for hash, view in found.items() if hash in wanted}
        unmatched[digest.hexdigest()] = View(name, None, transposed)
    return unmatched


def matrices(array: np.ndarray) -> np.ndarray:
    """Return all matrices along the last two axes, (n, rows, columns)."""
    return array.reshape(-1, *array.shape[-2:])


def tensor_of(tensor: np.ndarray, hash: str, views: Mapping[str, View]) -> Tensor:
    """Return an original tensor with this hash by its pieces; without pieces if `views` (by hash) do not have them."""
    if hash in views:
        return Tensor(hash, (views[hash],))
    for axis, count, interleaved in TENSOR_CUTS:
        found = (views.get(hash_bits(piece)) for piece in pieces_of(tensor, axis, count, interleaved))
        pieces = tuple(piece for piece in itertools.takewhile(lambda piece: piece is not None, found) if piece)
        if len(pieces) == count:
            return Tensor(hash, pieces, axis, interleaved)
    return Tensor(hash)


def pieces_of(array: np.ndarray, axis: int, count: int, interleaved: bool) -> Iterator[np.ndarray]:
    """Yield equal pieces of an array, side by side along an axis or interleaved; none if it cannot be divided."""
    if array.ndim < -axis or array.shape[axis] % count or not array.size:
        return
    length = array.shape[axis] // count
    for i in range(count):
        chosen = np.s_[i::count] if interleaved else np.s_[i * length : (i + 1) * length]
        yield array[..., chosen] if axis == -1 else array[..., chosen, :]


def viewed(array: np.ndarray, view: View) -> np.ndarray:
    """Return the part of a parameter that a view describes. Raises GearbxError if the parameter has no such part."""
    if view.matrix is None and not view.transposed:
        return array
    if array.ndim < 2 or (view.matrix is not None and view.matrix >= len(matrices(array))):
        raise GearbxError(f"{view.parameter}: has no part {view.matrix}, got shape {list(array.shape)}; {RESTORE}")
    part = array if view.matrix is None else matrices(array)[view.matrix]
    return part.swapaxes(-1, -2) if view.transposed else part


def assembled(tensor: Tensor, parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return an original tensor, given its parts. Raises GearbxError for parts that are no equal pieces."""
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0])
    if len(shape) < -tensor.axis or shape[tensor.axis] % len(parts) or len({part.dtype for part in parts}) > 1:
        raise GearbxError(f"{list(shape)} does not have {len(parts)} pieces along axis {tensor.axis}; {RESTORE}")
    length = list(shape)
    length[tensor.axis] //= len(parts)
    if any(part.size != math.prod(length) for part in parts):
        raise GearbxError(f"its pieces do not fit {list(shape)}; {RESTORE}")
    shaped = [part.reshape(length) for part in parts]
    whole = np.stack(shaped, tensor.axis) if tensor.interleaved else np.concatenate(shaped, tensor.axis)
    return np.ascontiguousarray(whole)  # numpy keeps the order of transposed parts


STOCK_KINDS = tuple(quantized for _, quantized in LAYER_KINDS.values())

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Plan:
    """The settings of a conversion, as in `Gearbox`.

    bits: path to the fewest bits of a layer; None: each layer has the gear's.
    """

    format: str
    gears: tuple[int, ...]
    manage: str
    group_size: int
    bits: Mapping[str, int] | None = None
    embeddings: str = EMBEDDINGS[0]

    @property
    def managed(self) -> str | Predicate:
        """The argument `manage` of `Gearbox`."""
        return self.manage if self.bits is None else with_bits(self.bits)


@dataclass(frozen=True)
class Packed:
    """The arrays of one layer or embedding in the files.

    base, gears: arrays by name. names: as in `SavedLayer.gears`. stock_bits: quantized bits in the base; None if the
    base has the dense layer. rows: as in `SavedLayer`. larger: the reason to keep the layer dense, if it would grow.
    """

    base: Arrays = field(default_factory=dict)
    gears: Arrays = field(default_factory=dict)
    names: dict[int, dict[str, str]] = field(default_factory=dict)
    stock_bits: int | None = None
    rows: int = DENSE
    larger: str | None = None


def pack_layer(
    layer: Layer,
    widths: Iterable[int],
    format: Format,
    group_size: int,
    pack_rows: bool,
    base: Planes | None = None,
) -> Packed:
    """Return the arrays of a layer at all bits of a ladder. Raises GearbxError for weights that are not finite.

    pack_rows: True if input tokens read packed rows in the lowest gear of a tied embedding, as in mlx-lm. base: the
    calibrated plane of the lowest gear, if any.
    """
    path, original, dense = layer.path, layer.module.weight, linear_of(layer.module)
    wanted = stored_widths(layer, format, widths)
    stored = stored_bits(format, wanted)
    made: dict[int, nn.Module] = {}
    for bits in stored:
        if bits not in made:
            made |= made_over(format, dense, bits, stored, group_size, original.dtype, base)
    reason = too_large(made[DENSE]) if DENSE in made else None
    if reason:
        return Packed({f"{path}.weight": original}, larger=reason)
    stock = bool(stored) and type(made[stored[0]]) in STOCK_KINDS
    tied = isinstance(layer.module, nn.Embedding)
    packs_rows = stock and ((tied and pack_rows) or layer.is_table)
    packed = replace(packed_gears(layer, made, format, group_size, stock), rows=stored[0] if packs_rows else DENSE)
    if DENSE not in stored and (DENSE in wanted or (tied and {*wanted} != {packed.rows})):
        into, key = (packed.gears, f"{path}@{DENSE}.weight") if stock else (packed.base, f"{path}.weight")
        into[key] = original
        packed.names[DENSE] = {"weight": key}
    mx.eval(packed.base, packed.gears)
    if not format.ladders:  # such formats restore any weight, including NaN
        check_quantized(path, original, (*packed.base.values(), *packed.gears.values()))
    return packed


def packed_gears(layer: Layer, made: Mapping[int, nn.Module], format: Format, group_size: int, stock: bool) -> Packed:
    """Return the arrays of all gears of a layer. stock: True if the base has the lowest one."""
    stored, shape, dtype = tuple(sorted(made)), layer.module.weight.shape, layer.module.weight.dtype
    packed = Packed(stock_bits=stored[0] if stock else None)
    for bits in stored:
        arrays = dict(tree_flatten(made[bits].parameters()))
        packed.names[bits] = {}
        for name, origin in format.stored_arrays(shape, bits, stored, group_size, dtype).items():
            in_base = origin.bits == packed.stock_bits
            own = f"{layer.path}.{origin.name}" if in_base else f"{layer.path}@{origin.bits}.{origin.name}"
            packed.names[bits][name] = own
            if origin.bits == bits:
                (packed.base if in_base else packed.gears)[own] = arrays[name]
    return packed


def pack_codes(layer: Layer, quantized: nn.Module, widths: Sequence[int]) -> Packed:
    """Return the arrays of a layer that is already quantized, at all bits of a ladder, whose highest are its own.

    layer: its dense form. Raises GearbxError for scales that are not finite.
    """
    format = SplitCodes()
    made = format.of_codes(linear_of(layer.module), affine_planes(quantized), widths)
    packed = packed_gears(layer, made, format, quantized.group_size, True)
    mx.eval(packed.base, packed.gears)
    if not all(map(is_finite, (*packed.base.values(), *packed.gears.values()))):
        raise GearbxError(f"{layer.path}: scales are not finite; check the checkpoint")
    return packed


def pack_table(table: Layer, widths: Iterable[int], format: Format, group_size: int) -> Packed:
    """Return the arrays of an embedding that is not a layer: packed for the lowest gear, and its original rows."""
    if format.ladders:
        return pack_layer(table, widths, format, group_size, True)
    bits = max(min(widths), table.lowest_bits)
    one_gear = Layer(table.path, table.module, bits, is_table=True)
    gears = {bits, *([DENSE] if max(widths) > bits else [])}
    return pack_layer(one_gear, gears, get_format("affine"), group_size, True)


def possible_names(layer: Layer, widths: Iterable[int], format: Format, group_size: int) -> list[str]:
    """Return upper bounds of the names of all arrays of a layer or a table, for the size of a header."""
    own = get_format("affine") if layer.is_table and not format.ladders else format
    stored = stored_bits(own, stored_widths(layer, own, widths))
    shape, dtype = layer.module.weight.shape, layer.module.weight.dtype
    arrays = {(a.bits, a.name) for b in stored for a in own.stored_arrays(shape, b, stored, group_size, dtype).values()}
    return [f"{layer.path}@{bits}.{name}" for bits, name in sorted({*arrays, (DENSE, "weight")})]


@dataclass(frozen=True)
class WrittenParameter:
    """The record of a parameter that is written.

    shape, sample: for the fingerprint. hashes: of its arrays, by name. packed: without the arrays. views: hash to view,
    if the original is to be restorable.
    """

    shape: tuple[int, ...]
    sample: np.ndarray
    hashes: Mapping[str, str]
    packed: Packed
    views: Mapping[str, View]


BASE_FILE = "model.safetensors"
GEARED_ROOM = 144  # bytes of a header for the entry of one array, without its name


class Converter:
    """A conversion of a model to a geared checkpoint, in an empty directory.

    model: not quantized, or with codes that have gears in place (gears/in_place.py). Unread weights are
    read when they are needed; all are dropped once written. planes: path to the calibrated plane of a layer's
    lowest gear. wanted: hashes of tensors to find in the parameters.

    Raises GearbxError for a model that has no layer to manage, or bits that the format does not support.
    """

    def __init__(self, model: nn.Module, plan: Plan, work: Path, planes: Mapping[str, Planes] | None = None):
        self.planes = planes or {}
        self.done: dict[str, WrittenParameter] = {}
        self.wanted: set[str] = set()
        self.model, self.plan, self.work = model, plan, work
        self.ladder, self.format = Ladder(plan.gears), get_format(plan.format)
        check_supported(self.format, plan.gears)
        self.codes = own_codes(model)
        if self.codes is None:
            self.layers, self.unmanaged = discover(model, plan.managed, plan.group_size, self.format)
        else:
            self.layers, self.unmanaged = alike_layers(model, self.codes, plan.manage, plan.gears)
        if not self.layers:
            raise none_managed(self.unmanaged)
        tables = plan.manage, plan.gears, self.format, plan.group_size
        self.tables = tables_to_pack(model, *tables) if self.packs_rows and self.codes is None else []
        parameters = tree_flatten(model.parameters())
        self.dtype = dtype_name(stored_dtype(model))
        self.size = sum(array.nbytes for _, array in parameters)
        # Everything that changes with the gear, by the name of its weight; and its original shape and type.
        self.changing = {f"{layer.path}.weight": layer for layer in (*self.layers, *self.tables)}
        dense = {name: layer.module.weight for name, layer in self.changing.items()}
        self.dense = {name: (weight.shape, dtype_name(weight.dtype)) for name, weight in dense.items()}
        self.rest = [name for name, _ in parameters if name not in self.changing]
        own = (possible_names(layer, plan.gears, self.format, plan.group_size) for layer in self.changing.values())
        names = [*self.rest, *itertools.chain.from_iterable(own)]
        room = GEARED_ROOM + sum(GEARED_ROOM + len(msgspec.json.encode(name)) for name in names)
        self.files = {"base": TensorFile(work / BASE_FILE, room), "gears": TensorFile(work / GEARS_FILE, room)}

    def __iter__(self) -> Iterator[int]:
        """Convert. Yields the bytes of each finished parameter."""
        now = dict(tree_flatten(self.model.parameters()))
        for name, layer in self.changing.items():
            weight = now.pop(name)
            size = weight.nbytes
            self._write(name, weight, self._pack(layer))
            put_parameters(self.model, {name: EMPTY})
            del weight
            mx.clear_cache()
            yield size
        for name in self.rest:
            array = now.pop(name)
            if not self.format.ladders and not is_finite(array):
                raise GearbxError(f"{name}: has values that are not finite; check the checkpoint")
            mx.eval(array)
            self._write(name, array, Packed() if self._is_of_codes(name) else Packed({name: array}))
            yield array.nbytes
            put_parameters(self.model, {name: EMPTY})

    def finish(self, original: OriginalModel | None = None) -> Manifest:
        """Close the files and write gears.json. Raises GearbxError if every layer would become larger."""
        for file in self.files.values():
            file.finish()
        larger = self.larger
        layers = [layer for layer in self.layers if layer.path not in larger]
        if not layers:
            every = "; ".join(sorted(set(larger.values())))
            raise GearbxError(f"no layer becomes smaller: each {every}; use --format planes or affine")
        manifest = Manifest(
            format=self.plan.format,
            gears=self.plan.gears,
            group_size=self.plan.group_size,
            manage=self.plan.manage,
            dtype=self.dtype,
            fingerprint=fingerprint_of({name: (each.shape, each.sample) for name, each in self.done.items()}),
            stock=all(f"{layer.path}.weight" in self.files["base"].entries for layer in layers),
            base={BASE_FILE: header_of(self.work / BASE_FILE).hash},
            gears_hash=header_of(self.work / GEARS_FILE).hash,
            layers={layer.path: self._saved(layer) for layer in layers},
            tables={table.path: self._saved(table) for table in self.tables if table.path not in larger},
            unmanaged=self.unmanaged | larger,
            hashes=self.hashes,
            original=original,
        )
        (self.work / MANIFEST).write_text(manifest.as_json(), encoding="utf-8")
        return manifest

    def quantization(self) -> dict[str, Any] | None:
        """Return the base's quantization for config.json, by layer; None if the base is dense."""
        known = {} if self.codes is None else stock_quantization(self.model)
        for name, layer in self.changing.items():
            found = self.done[name].packed.stock_bits
            if found:
                known[layer.path] = {"group_size": self.plan.group_size, "bits": found, "mode": "affine"}
        if not known:
            return None
        default = {"group_size": self.plan.group_size, "bits": self.ladder.quantized_bits[0], "mode": "affine"}
        able = [path for path, module in self.model.named_modules() if hasattr(module, "to_quantized")]
        return default | dict.fromkeys(able, False) | known

    @property
    def larger(self) -> dict[str, str]:
        """Path to reason of layers that stay dense since they would become larger."""
        reasons = {layer.path: self.done[name].packed.larger for name, layer in self.changing.items()}
        return {path: reason for path, reason in reasons.items() if reason}

    @property
    def hashes(self) -> dict[str, str]:
        """Name to hash of every written array."""
        return {name: hash for each in self.done.values() for name, hash in each.hashes.items()}

    @property
    def views(self) -> dict[str, View]:
        """Hash to view of all finished parameters."""
        return {hash: view for each in self.done.values() for hash, view in each.views.items()}

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    @property
    def packs_rows(self) -> bool:
        """Flag for embeddings that are quantized as by mlx-lm."""
        return self.plan.embeddings == EMBEDDINGS[0]

    def _is_of_codes(self, name: str) -> bool:
        """Return True for scales or biases of split codes: other arrays replace them."""
        path, _, own = name.rpartition(".")
        return self.codes is not None and own in ("scales", "biases") and f"{path}.weight" in self.changing

    def _pack(self, layer: Layer) -> Packed:
        if self.codes is not None:
            return pack_codes(layer, self.codes.modules[layer.path], self.plan.gears)
        if layer.is_table:
            return pack_table(layer, self.plan.gears, self.format, self.plan.group_size)
        settings = self.plan.gears, self.format, self.plan.group_size, self.packs_rows
        return pack_layer(layer, *settings, self.planes.get(layer.path))

    def _write(self, name: str, original: mx.array, packed: Packed) -> None:
        hashes = self.files["base"].append(packed.base.items()) | self.files["gears"].append(packed.gears.items())
        self.done[name] = WrittenParameter(
            shape=original.shape,
            sample=np.array(few_values(original)),
            hashes=hashes,
            packed=replace(packed, base={}, gears={}),
            views=views_of(name, bits_in(original), self.wanted) if self.wanted else {},
        )

    def _saved(self, layer: Layer) -> SavedLayer:
        name = f"{layer.path}.weight"
        packed = self.done[name].packed
        kind = next(name for name, (dense, *_) in LAYER_KINDS.items() if isinstance(layer.module, dense))
        kind = "table" if layer.is_table else kind
        stays_dense = bool(self.format.ladders) and {*packed.names} == {DENSE}
        lowest = DENSE if stays_dense else layer.lowest_bits
        return SavedLayer(kind, *self.dense[name], lowest, packed.names, packed.rows)
