"""The gears of a checkpoint that `convert` wrote, read from its files when they are engaged.

gears.json is compared with the arrays in the files, and with the model, before any module is made.
"""

import copy
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import GearbxError
from ..files.reading import shown, unreadable
from ..formats import get_format
from ..formats.base import StoredArray
from ..formats.native import takes_panels
from ..formats.tied import ExactTied, QuantizedTied, TiedEmbedding, linear_of, quantized_table
from ..kernels.bit_planes import Planes, side_by_side
from ..kernels.products import panel_rows
from .activations import DTYPES
from .adapters import layers_of, put_layers
from .discovery import Layer
from .ladder import DENSE
from .manifest import GEARS_FILE, MANIFEST, RESTORE, Manifest, SavedLayer, read_manifest
from .ownership import own
from .sharding import QUANTIZED_AS, blank, dense_shape
from .tensor_files import TYPE_NAMES, ArrayHashes, FileHeader, TensorEntry, header_of

LAYER_KINDS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {  # dense, and as mlx-lm quantizes it
    **dict(zip(("linear", "switch", "multi"), QUANTIZED_AS.items())),
    "embedding": (nn.Embedding, nn.QuantizedEmbedding),
    "table": (nn.Embedding, nn.QuantizedEmbedding),
}
SAVED = "saved_gears"  # attribute of a model that was loaded from a geared checkpoint
OURS_ALONE = "the base of these gears runs only with gearbx-mlx; save the original instead"
PROJECTION, ROWS = "projection.", "table."  # prefixes in a tied embedding: formats/tied.py


def saved_gears(model: nn.Module) -> "SavedGears | None":
    """Return the gears in the checkpoint of a model, if it is a geared one."""
    return getattr(model, SAVED, None)


class SavedGears:
    """A factory of the modules of a checkpoint's gears, over arrays that are still in the files."""

    partial: frozenset[str] = frozenset()  # arrays that are read in part, without a hash

    def __init__(self, directory: Path, manifest: Manifest, hashes: ArrayHashes):
        self.directory, self.manifest, self.hashes = directory, manifest, hashes
        self.format = get_format(manifest.format)
        self._files = (directory / GEARS_FILE, *(directory / name for name in manifest.base))
        self._unread: dict[str, mx.array] = {}
        of_gears = [names.values() for layer in manifest.changing.values() for names in layer.gears.values()]
        self._in_every_gear = {*manifest.hashes}.difference(*of_gears)  # the arrays that no gear changes
        self._in_panels: dict[tuple[str, int], bool] = {}  # True for gears in panels
        self._opened_in: threading.Thread | None = None  # MLX reads an array in the thread that opened the file
        # Gears that share an array in the files share it here too, as long as any gear has it.
        self._live: weakref.WeakValueDictionary[tuple[str, mx.Dtype | None, int], mx.array]
        self._live = weakref.WeakValueDictionary()

    def check(self, model: nn.Module) -> None:
        """Validate that the model has every layer of the manifest, of its kind and shape. Raises GearbxError."""
        modules = layers_of(model)
        for path, layer in self.manifest.changing.items():
            module = modules.get(path)
            if not isinstance(module, LAYER_KINDS[layer.kind]):
                found = "no module" if module is None else f"a {type(module).__name__}"
                field = "tables" if path in self.manifest.tables else "layers"
                problem = f"{field} has the key {shown(path)}, and the model has {found} there"
            elif (shape := dense_shape(module)) != layer.shape:
                place = self.manifest.place_of(path)
                problem = f"{place}.shape is {list(layer.shape)}, and the model's is {list(shape)}"
            else:
                continue
            raise GearbxError(f"{self.directory / MANIFEST}: {problem}; {RESTORE}")

    def attach(self, model: nn.Module) -> None:
        """Let a `Gearbox` of this model find its gears; a base that mlx-lm cannot run gets the lowest gear."""
        self.check(model)
        setattr(model, SAVED, self)
        if not self.manifest.stock:
            lowest = {}
            for layer in self.layers(model):
                dtype = self.storage(layer.path)
                lowest[layer.path] = self.module(layer, self.widths(layer)[0], dtype, dtype)
            put_layers(model, lowest)
        own(model, self.manifest.layers, lambda: None if self.manifest.stock else OURS_ALONE)

    def storage(self, path: str) -> mx.Dtype:
        """Return the type of a layer in the original."""
        return DTYPES[self.manifest.changing[path].dtype]

    def layers(self, model: nn.Module) -> list[Layer]:
        """Return the managed layers of a model as dense ones without weights."""
        return self._blanks(model, self.manifest.layers)

    def tables(self, model: nn.Module) -> list[Layer]:
        """Return the embeddings that change with the gear and are not layers, as dense ones without weights."""
        return self._blanks(model, self.manifest.tables)

    def dense(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return path to the dense module of everything that changes with the gear."""
        return {layer.path: layer.module for layer in (*self.layers(model), *self.tables(model))}

    def module(self, layer: Layer, bits: int, dtype: mx.Dtype, activations: mx.Dtype, panels: bool = True) -> nn.Module:
        """Return the module of a layer in a gear, unread.

        layer: with the dense module from `layers` or `tables`. dtype: of scales, and of the 16-bit weight.
        activations: of embedding rows. panels: True to pack codes in panels if kernels support that.
        """
        saved, group_size = self.manifest.changing[layer.path], self.manifest.group_size
        stored = self.manifest.stored(layer.path)
        if bits == DENSE and DENSE not in stored:
            dense = copy.copy(layer.module)
            dense.weight = self._array(saved.gears[DENSE]["weight"], dtype)
            return dense
        if saved.kind == "table" and bits != DENSE:
            arrays = self._arrays(layer.path, bits, dtype)
            planes = Planes([arrays["weight"]], arrays["scales"], [arrays["biases"]], (bits,), group_size)
            return quantized_table(planes, activations)
        linear = self._linear(layer, bits, dtype, panels)
        if saved.kind not in ("embedding", "table"):
            return linear
        rows = saved.rows_at(bits)
        if rows == saved.rows != DENSE:
            return QuantizedTied(linear, activations)
        if rows in stored:
            whole = linear if bits == rows else self._linear(layer, rows, dtype, panels)
            return ExactTied(linear, whole, activations)
        return TiedEmbedding(self._array(saved.gears[DENSE]["weight"], dtype), linear, activations)

    def _linear(self, layer: Layer, bits: int, dtype: mx.Dtype, panels: bool) -> nn.Module:
        """Return the linear layer of a module."""
        stored, format = self.manifest.stored(layer.path), self.manifest.format_of(layer.path)
        dense = linear_of(layer.module)
        self._in_panels[layer.path, bits] = panels and takes_panels(dense, format.widths(bits, stored))
        arrays = self._arrays(layer.path, bits, dtype)
        try:
            return format.module(dense, bits, arrays, stored, self.manifest.group_size)
        except GearbxError as error:
            raise GearbxError(f"{self.directory / GEARS_FILE}: {layer.path}: {error}; {RESTORE}") from error

    def _arrays(self, path: str, bits: int, dtype: mx.Dtype) -> dict[str, mx.array]:
        names = self.manifest.changing[path].gears[bits]
        return {name: self._parameter(path, bits, name, dtype) for name in names}

    def parameter(self, path: str, bits: int, name: str, dtype: mx.Dtype) -> mx.array:
        """Return a parameter of a gear's module by its flat name, unread unless a live module has it."""
        layer = self.manifest.changing[path]
        if layer.kind == "embedding" and not name.startswith(PROJECTION):
            bits = layer.rows_at(bits)
        return self._parameter(path, bits, name.removeprefix(PROJECTION).removeprefix(ROWS), dtype)

    def _parameter(self, path: str, bits: int, name: str, dtype: mx.Dtype) -> mx.array:
        """Return an array of a layer, by its name in gears.json."""
        format, first = self.manifest.format_of(path), name.split(".")[0]
        widened = first in format.scales or (bits == DENSE and DENSE not in self.manifest.stored(path))
        read_as = mx.uint16 if first in format.viewed else dtype if widened else None
        by_row = first in ("low", "high", "offsets")  # parameters of format exact that are never in panels
        rows = panel_rows() if self._in_panels.get((path, bits)) and not by_row else 1
        return self._array(self.manifest.changing[path].gears[bits][name], read_as, rows)

    def widths(self, layer: Layer) -> tuple[int, ...]:
        """Return the bits of a layer's gears, ascending."""
        return tuple(sorted(self.manifest.changing[layer.path].gears))

    def in_base(self, layer: Layer, bits: int) -> bool:
        """Return True if mlx-lm reads this gear of a layer from the checkpoint."""
        saved = self.manifest.layers[layer.path]
        return saved.kind != "embedding" and saved.gears[bits].get("weight") == f"{layer.path}.weight"

    def __deepcopy__(self, memo: dict) -> "SavedGears":
        return self  # a copy of the model reads the same files

    def __reduce__(self) -> Any:
        raise GearbxError(f"{self.directory}: a model with gears cannot be pickled; use load in the other process")

    def read(self, arrays: Any) -> None:
        """Read arrays into memory. Raises GearbxError for unreadable or changed files."""
        wanted = {id(array) for _, array in tree_flatten(arrays)}
        names = {name for (name, *_), array in self._live.items() if id(array) in wanted}
        self.hashes.verify((names | self._in_every_gear) - self.partial, RESTORE)
        try:
            mx.eval(arrays)
        except RuntimeError as error:
            raise GearbxError(f"{self.directory}: a gear cannot be read ({error}); {RESTORE}") from error

    def _blanks(self, model: nn.Module, wanted: Mapping[str, SavedLayer]) -> list[Layer]:
        modules = layers_of(model)
        blanks = []
        for path, one in wanted.items():
            weight = mx.zeros(one.shape, self.storage(path))
            blanks.append(Layer(path, blank(LAYER_KINDS[one.kind][0], weight, modules[path]), one.lowest_bits))
        return blanks

    def _array(self, name: str, dtype: mx.Dtype | None = None, rows: int = 1) -> mx.array:
        """Return an array of the files, in panels of `rows`, in its type or `dtype` (uint16: the bits of halves)."""
        found = self._live.get((name, dtype, rows))
        if found is None:
            found = self._live.get((name, None, 1))
            if found is None:
                found = self._live[name, None, 1] = self._take(name)
            if dtype is not None and dtype != found.dtype:
                found = found.view(dtype) if dtype == mx.uint16 else found.astype(dtype)
            if rows > 1:
                found = side_by_side(found, rows)
            self._live[name, dtype, rows] = found
        return found

    def _take(self, name: str) -> mx.array:
        """Return an array of the files, unread."""
        if name not in self._unread or self._opened_in is not threading.current_thread():
            self._unread, self._opened_in = self._open(), threading.current_thread()
        return self._unread.pop(name)

    def _open(self) -> dict[str, mx.array]:
        unread: dict[str, mx.array] = {}
        for file in self._files:
            try:
                arrays = mx.load(str(file))
            except RuntimeError as error:
                raise GearbxError(f"{file}: cannot be read ({error}); {RESTORE}") from error
            assert isinstance(arrays, dict)
            unread |= arrays
        return unread


def open_gears(directory: Path) -> "SavedGears | None":
    """Return a directory's gears, checked and unread, or None. Raises GearbxError for files that do not fit."""
    manifest = read_manifest(directory)
    if manifest is None:
        return None
    gears = open_header(directory / GEARS_FILE, f"missing beside {MANIFEST}")
    if manifest.gears_hash != gears.hash:
        raise GearbxError(f"{directory / GEARS_FILE}: is not the one that {MANIFEST} was written with; {RESTORE}")
    base, places = dict[str, TensorEntry](), gears.places
    for name, expected in manifest.base.items():
        file = open_header(directory / name, "missing, and the gears beside it need it")
        if file.hash != expected:
            raise GearbxError(f"{directory / name}: changed since its gears were made, so they do not fit; {RESTORE}")
        base |= file.entries
        places |= file.places
    try:
        check_files(manifest, gears.entries, base)
    except GearbxError as error:
        raise GearbxError(f"{directory}/{error}; {RESTORE}") from error
    return SavedGears(directory, manifest, ArrayHashes(places, manifest.hashes))


def open_header(file: Path, missing: str) -> FileHeader:
    """Return the header of a file. Raises GearbxError for a damaged one, or with `missing` if there is none."""
    try:
        return header_of(file)
    except FileNotFoundError as error:
        raise GearbxError(f"{file}: {missing}; {RESTORE}") from error
    except OSError as error:
        raise unreadable(file, error) from error
    except GearbxError as error:
        raise GearbxError(f"{error}; {RESTORE}") from error


def check_files(manifest: Manifest, gears: Mapping[str, TensorEntry], base: Mapping[str, TensorEntry]) -> None:
    """Validate a manifest against the entries of gears.safetensors and of the base. Raises GearbxError."""
    if twice := gears.keys() & base.keys():
        raise GearbxError(f"{GEARS_FILE}: has {shown(min(twice))}, as the base")
    entries, used = {**base, **gears}, set[str]()
    for path, layer in manifest.changing.items():
        for bits, names in layer.gears.items():
            place = f"{manifest.place_of(path)}.gears[{shown(str(bits))}]"
            expected = stored_arrays(manifest, path, bits)
            if names.keys() != expected.keys():
                raise GearbxError(f"{MANIFEST}: {place} has {', '.join(map(shown, names))}, not {', '.join(expected)}")
            check_gear(place, path, names, expected, entries)
            used |= {*names.values()}
    managed = {f"{path}.{name}" for path in manifest.changing for name in ("weight", "scales", "biases")}
    unused = (gears.keys() | (managed & base.keys())) - used
    if unused:
        raise GearbxError(f"{MANIFEST}: does not name {shown(min(unused))}, which is in the files")
    if manifest.hashes.keys() != entries.keys():
        differing = min(manifest.hashes.keys() ^ entries.keys())
        raise GearbxError(f"{MANIFEST}: hashes and the files do not have the same arrays: {shown(differing)}")
    if manifest.stock != all(f"{path}.weight" in base for path in manifest.layers):
        raise GearbxError(f"{MANIFEST}: stock is {shown(manifest.stock)}, which the files of the base contradict")


def stored_arrays(manifest: Manifest, path: str, bits: int) -> dict[str, StoredArray]:
    """Return the arrays of a gear of a layer or a table."""
    layer = manifest.changing[path]
    dtype = DTYPES[layer.dtype]
    stored = manifest.stored(path)
    if bits == DENSE and DENSE not in stored:
        return {"weight": StoredArray(dtype, layer.shape, DENSE, "weight")}
    return manifest.format_of(path).stored_arrays(layer.shape, bits, stored, manifest.group_size, dtype)


def check_gear(
    place: str,
    path: str,
    names: Mapping[str, str],
    expected: Mapping[str, StoredArray],
    entries: Mapping[str, TensorEntry],
) -> None:
    """Validate the arrays of one gear against its format. Raises GearbxError."""
    free = set()  # lengths that depend on the data; a gear has only one
    for parameter, array in expected.items():
        name = names[parameter]
        if name not in entries:
            raise GearbxError(f"{GEARS_FILE}: has no {shown(name)[1:-1]}, which {MANIFEST} names")
        own = f"{path}.{array.name}", f"{path}@{array.bits}.{array.name}"  # in the base, or beside it
        if name not in own:
            raise GearbxError(f"{MANIFEST}: {place}.{parameter} is {shown(name)}, not {shown(own[1])}")
        entry = entries[name]
        lengths = tuple(length for length, known in zip(entry.shape, array.shape) if known is None)
        fits = len(entry.shape) == len(array.shape) and all(
            length == known or (known is None and length > 0) for length, known in zip(entry.shape, array.shape)
        )
        free |= {*lengths}
        if entry.dtype != TYPE_NAMES[array.dtype] or not fits or len(free) > 1:
            wanted = ["any" if length is None else length for length in array.shape]
            raise GearbxError(
                f"{GEARS_FILE}: {shown(name)} is {entry.dtype} of {list(entry.shape)}, and {MANIFEST} needs "
                f"{TYPE_NAMES[array.dtype]} of {wanted}"
            )
