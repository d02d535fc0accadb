"""The files of the original: copies in a checkpoint, and the additional data that makes all of them restorable.

`Restorer` restores the original from the parameters of a geared checkpoint and that additional data.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from ..compat.classes import bare
from ..errors import GearbxError, error_context
from ..files.reading import LARGEST_JSON, parse_json, shown, typed, unreadable
from ..formats.base import dense_weight
from ..formats.tied import linear_of
from ..gears.discovery import Layer
from ..gears.ladder import DENSE
from ..gears.manifest import (
    GEARS_FILE,
    MANIFEST,
    ORIGINAL_FILE,
    PRECISION,
    RESTORE,
    OriginalModel,
    OriginalShard,
    Tensor,
    View,
    is_plain,
)
from ..gears.saved import LAYER_KINDS, SavedGears, open_header
from ..gears.tensor_files import (
    LENGTH,
    TYPE_SIZES,
    ArrayPlace,
    FileHeader,
    TensorEntry,
    TensorFile,
    bits_in,
    hash_bytes,
    hash_places,
    header_of,
)
from ..gears.weight_files import weight_files
from ..kernels.exact import ExactMatrix
from ..kernels.products import decoded
from ..loading import read_config
from .converter import BASE_FILE, assembled, tensor_of, viewed
from .model_card import CARD

REPORT = "selection.json"  # bits of every layer, with reasons
# Files that a conversion writes itself.
OWN_FILES = {"config.json", BASE_FILE, GEARS_FILE, ORIGINAL_FILE, MANIFEST, REPORT, PRECISION, CARD}


def is_copied(name: str) -> bool:
    """Return True for copied files of the original: tokenizer and code, except files that a conversion writes."""
    weights = name.endswith((".safetensors", ".safetensors.index.json"))
    return name not in OWN_FILES and not weights and any(fnmatch(name, pattern) for pattern in DEFAULT_ALLOW_PATTERNS)


def copy_companions(source: Path, work: Path) -> None:
    """Copy tokenizer and code unchanged."""
    for file in source.iterdir():
        if is_copied(file.name):
            (work / file.name).write_bytes(original_bytes(file))


def original_bytes(file: Path) -> bytes:
    """Return the content of a file of the original. Raises GearbxError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error


def write_config(source: Path, work: Path, quantization: dict[str, Any] | None) -> None:
    """Write config.json of the original with the base's quantization; None: without one."""
    config = read_config(source)
    if quantization is not None:
        config |= {"quantization": quantization, "quantization_config": quantization}
    (work / "config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")


# Restorable files

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.npz")
ORIGINAL_ROOM = 128  # bytes of a header for the entry of one array, without its name
Key = tuple[str, str]  # a shard's name and a tensor's
# Names in `original.safetensors` of a shard's header, of a tensor and of a different file.
header_key, tensor_key, file_key = "header/{}".format, "tensor/{}/{}".format, "file/{}".format


@dataclass(frozen=True)
class Header:
    """The start of a safetensors file: the header's bytes, and its entry of each tensor."""

    data: bytes
    entries: dict[str, TensorEntry]

    @property
    def start(self) -> int:
        """Offset of the data in the file, in bytes."""
        return LENGTH.size + len(self.data)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.start + max((entry.data_offsets[1] for entry in self.entries.values()), default=0)


def places_in(headers: Mapping[str, Header], directory: Path) -> dict[Key, ArrayPlace]:
    """Return the location of each tensor in the files of a directory. headers: by the name of a file."""
    files = {name: FileHeader(directory / name, header.entries, header.start) for name, header in headers.items()}
    return {(name, tensor): place for name, file in files.items() for tensor, place in file.places.items()}


class OriginalFiles:
    """The files of a model to convert; they are never changed. Raises GearbxError for damaged ones.

    progress: called with the bytes of each hashed tensor.
    """

    def __init__(self, directory: Path, progress: Callable[[int], None] = lambda size: None):
        self.directory = directory
        self.shards = {file.name: read_header(file) for file in weight_files(directory)}
        self.places = places_in(self.shards, directory)
        self.hashes: dict[Key, str] = {}
        for key, hash in hash_places(self.places):
            self.hashes[key] = hash
            progress(self.places[key].size)

    @property
    def size(self) -> int:
        """Bytes of the files with weights."""
        return sum(header.size for header in self.shards.values())

    @property
    def others(self) -> tuple[list[Path], list[str]]:
        """The other restorable files, and the names of the others: weights, folders, hidden files, odd names."""
        kept: list[Path] = []
        omitted: list[str] = []
        for file in sorted(self.directory.iterdir()):
            is_weight = any(fnmatch(file.name, pattern) for pattern in WEIGHTS)
            if file.name not in self.shards:
                plain = (
                    not file.name.startswith(".")
                    and is_plain(file.name)
                    and file.is_file()
                    and not is_weight
                    and file.stat().st_size <= LARGEST_JSON
                )
                kept.append(file) if plain else omitted.append(file.name)
        return kept, omitted

    def keep(self, views: Mapping[str, View], work: Path) -> OriginalModel:
        """Write data that the parameters do not contain into `original.safetensors` of a directory.

        views: hash to view of a parameter. Raises GearbxError for a file of the original that cannot be
        read, OSError for a directory that cannot be written.
        """
        others, _ = self.others
        kept = [file for file in others if not is_copied(file.name)]
        keys = [*map(header_key, self.shards), *(file_key(file.name) for file in kept)]
        keys += [tensor_key(*key) for key in self.places]
        out = TensorFile(work / ORIGINAL_FILE, sum(ORIGINAL_ROOM + 6 * len(key) for key in keys) + ORIGINAL_ROOM)
        try:
            headers = {name: store(out, header_key(name), header.data) for name, header in self.shards.items()}
            for file in kept:
                store(out, file_key(file.name), original_bytes(file))
            tensors: dict[str, dict[str, Tensor]] = {name: {} for name in self.shards}
            for (shard, name), hash in self.hashes.items():
                tensors[shard][name] = self._kept(shard, name, hash, views, out)
            out.finish()
        finally:
            out.close()
        return OriginalModel(
            shards={name: OriginalShard(headers[name], tensors[name]) for name in self.shards},
            files={file.name: hash_bytes(original_bytes(file)) for file in others},
            kept=tuple(file.name for file in kept),
        )

    def _kept(self, shard: str, name: str, hash: str, views: Mapping[str, View], out: TensorFile) -> Tensor:
        """Return one tensor by its pieces; it is stored whole if there are none."""
        if hash in views:  # without reading it
            return Tensor(hash, (views[hash],))
        entry, data = self.shards[shard].entries[name], read_place(self.places[shard, name])
        size = TYPE_SIZES.get(entry.dtype, 1)
        shape = entry.shape if size * np.prod(entry.shape, dtype=int) == len(data) else (len(data) // size,)
        tensor = tensor_of(np.frombuffer(data, f"u{size}").reshape(shape), hash, views)
        if not tensor.pieces:
            store(out, tensor_key(shard, name), data)
        return tensor


def check_names(directory: Path) -> None:
    """Validate the names of the files of weights, before these are hashed. Raises GearbxError."""
    for file in weight_files(directory):
        if not is_plain(file.name):
            raise GearbxError(
                f"{file}: format exact keeps the names of weight files, and this one has a backslash, a control "
                "character or a byte that is not UTF-8; use a different name"
            )


def read_header(file: Path) -> Header:
    """Return the header of a file. Raises GearbxError for a file that is damaged or cannot be read."""
    try:
        _, entries, start = header_of(file)
        with open(file, "rb") as opened:
            opened.seek(LENGTH.size)
            return Header(opened.read(start - LENGTH.size), entries)
    except OSError as error:
        raise unreadable(file, error) from error


def read_place(place: ArrayPlace) -> bytes:
    """Return the bytes of an array. Raises GearbxError for a file that cannot be read, or became shorter."""
    try:
        with open(place.file, "rb") as file:
            file.seek(place.begin)
            data = file.read(place.size)
    except OSError as error:
        raise unreadable(place.file, error) from error
    if len(data) != place.size:
        raise GearbxError(f"{place.file}: is shorter than its header requires; download it again")
    return data


def store(file: TensorFile, key: str, data: bytes) -> str:
    """Append bytes to a file, and return their hash."""
    return file.append_data(key, "U8", (len(data),), np.frombuffer(data, np.uint8))


class Restorer:
    """A restorer of the original's files, each with its SHA-256 in gears.json.

    Raises GearbxError for a checkpoint without its original, or whose additional data is missing, damaged, or does not
    fit gears.json.
    """

    def __init__(self, saved: SavedGears):
        self.saved, self.directory = saved, saved.directory
        self.original = original_of(saved)
        self._kept = open_header(self.directory / ORIGINAL_FILE, f"missing, and {MANIFEST} needs it").places
        self._base: dict[str, TensorEntry] = {}
        for name in saved.manifest.base:
            self._base |= open_header(self.directory / name, "missing, and the gears beside it need it").entries
        self.headers = {name: self._header(name) for name in self.original.shards}

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(header.size - header.start for header in self.headers.values())

    @cached_property
    def groups(self) -> list[tuple[tuple[str, ...], list[Key]]]:
        """All tensors, grouped by their parameters."""
        found: dict[tuple[str, ...], list[Key]] = {}
        for key in ((shard, name) for shard, header in self.headers.items() for name in header.entries):
            parameters = dict.fromkeys(piece.parameter for piece in self.tensor(key).pieces)
            found.setdefault(tuple(parameters), []).append(key)
        stored = [((), [key]) for key in found.pop((), [])]  # one at a time, since they may be large
        return stored + list(found.items())

    def tensor(self, key: Key) -> Tensor:
        """Return the description of a tensor in gears.json."""
        return self.original.shards[key[0]].tensors[key[1]]

    def size_of(self, key: Key) -> int:
        """Return the bytes of a tensor."""
        begin, end = self.headers[key[0]].entries[key[1]].data_offsets
        return end - begin

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Yield every file without weights: name and content."""
        for name, hash in self.original.files.items():
            if name in self.original.kept:
                yield name, self._bytes(file_key(name), hash)
            else:
                data = original_bytes(self.directory / name)
                check_hash(self.directory / name, "it", data, hash)
                yield name, data

    def tensors(self, parameters: tuple[str, ...], keys: list[Key]) -> Iterator[tuple[Key, bytes | memoryview]]:
        """Yield the bytes of every tensor of a group."""
        arrays = {name: self._parameter(name) for name in parameters}
        for key in keys:
            tensor, size = self.tensor(key), self.size_of(key)
            if not tensor.pieces:
                data = self._bytes(tensor_key(*key), tensor.hash)
                if len(data) != size:
                    kept = self.directory / ORIGINAL_FILE
                    raise GearbxError(f"{kept}: {shown(key[1])} has the wrong size; {RESTORE}")
                yield key, data
                continue
            with error_context(f"{self.directory / MANIFEST}: original: {shown(key[1])}"):
                parts = [viewed(arrays[piece.parameter], piece) for piece in tensor.pieces]
                if sum(part.nbytes for part in parts) != size:
                    raise GearbxError(f"takes {size} bytes, but its pieces do not; {RESTORE}")
                whole = assembled(tensor, parts, self.headers[key[0]].entries[key[1]].shape).data
            check_hash(self.directory, key[1], whole, tensor.hash)
            yield key, whole

    def _parameter(self, name: str) -> np.ndarray:
        """Return the bits of a parameter of the model, (..., O, I) or of its own shape."""
        path = name.removesuffix(".weight")
        if path != name and path in self.saved.manifest.changing:
            return self._weight(path)
        file, entry = self.directory / MANIFEST, self._base.get(name)
        if entry is None or entry.dtype not in TYPE_SIZES:
            raise GearbxError(f"{file}: original names {shown(name)}, which is not a parameter of the model; {RESTORE}")
        self.saved.hashes.verify([name], RESTORE)
        data = read_place(self.saved.hashes.places[name])
        return np.frombuffer(data, f"u{TYPE_SIZES[entry.dtype]}").reshape(entry.shape)

    def _weight(self, path: str) -> np.ndarray:
        """Return the bits of the weight of a layer or a table in the 16-bit gear."""
        layer = self.saved.manifest.changing[path]
        dtype = self.saved.storage(path)
        blank = bare(LAYER_KINDS[layer.kind][0])
        blank.weight = mx.zeros(layer.shape, dtype)  # never evaluated
        module = self.saved.module(Layer(path, blank, layer.lowest_bits), DENSE, dtype, dtype)
        self.saved.read(module.parameters())
        return bits_of_weight(linear_of(module))

    def _header(self, shard: str) -> Header:
        """Return the header of a shard. Raises GearbxError if it does not fit gears.json."""
        data = self._bytes(header_key(shard), self.original.shards[shard].header)
        with error_context(f"{self.directory / ORIGINAL_FILE}: the header of {shard}"):
            content = parse_json(data)
            if isinstance(content, dict):
                content.pop("__metadata__", None)
            entries = typed(content, dict[str, TensorEntry])
            if entries.keys() != self.original.shards[shard].tensors.keys():
                raise GearbxError(f"does not have the tensors that {MANIFEST} lists; {RESTORE}")
            end = 0
            for begin, end_of_one in sorted(entry.data_offsets for entry in entries.values()):
                if begin != end or end_of_one < begin:
                    raise GearbxError(f"has tensors that are not consecutive; {RESTORE}")
                end = end_of_one
        return Header(data, entries)

    def _bytes(self, key: str, hash: str) -> bytes:
        """Return the content of `original.safetensors` under a key."""
        file = self.directory / ORIGINAL_FILE
        if key not in self._kept:
            raise GearbxError(f"{file}: has no {shown(key)}, which {MANIFEST} names; {RESTORE}")
        data = read_place(self._kept[key])
        check_hash(file, key, data, hash)
        return data


def check_hash(file: Path, name: str, data: bytes | memoryview, hash: str) -> None:
    """Validate data by its hash. Raises GearbxError if it differs from the original's."""
    if hash_bytes(data) != hash:
        raise GearbxError(f"{file}: {name} differs from the original; {RESTORE}")


def original_of(saved: SavedGears) -> OriginalModel:
    """Return the description of the original in gears.json. Raises GearbxError if the checkpoint does not have it."""
    manifest = saved.manifest
    if manifest.original is not None and DENSE in manifest.gears:
        return manifest.original
    gears = ",".join(map(str, manifest.gears))
    raise GearbxError(
        f"{saved.directory}: format {manifest.format}, gears {gears}, does not have its original; "
        "use --restore with checkpoints of --format exact"
    )


def bits_of_weight(linear: nn.Module) -> np.ndarray:
    """Return the bits of the weight (..., O, I) of a linear layer."""
    matrix = getattr(linear, "matrix", None)
    weight = decoded(matrix) if isinstance(matrix, ExactMatrix) else dense_weight(linear)
    mx.eval(weight)
    return bits_in(weight)


def write_original(restorer: Restorer, work: Path, progress: Callable[[int], None]) -> None:
    """Fill the directory `work` with the files of an original. progress: called with the bytes of every tensor.

    Raises GearbxError for a disk without room or a damaged checkpoint, OSError if a file cannot be written.
    """
    check_disk(restorer, work)
    for name, header in restorer.headers.items():
        with open(work / name, "wb") as file:
            file.truncate(header.size)
            file.write(LENGTH.pack(len(header.data)) + header.data)
    places = places_in(restorer.headers, work)
    for parameters, keys in restorer.groups:
        for key, data in restorer.tensors(parameters, keys):
            with open(places[key].file, "r+b") as file:
                file.seek(places[key].begin)
                file.write(data)
            progress(places[key].size)
    for name, content in restorer.files():
        (work / name).write_bytes(content)


def check_disk(restorer: Restorer, work: Path) -> None:
    """Validate that the disk has room for the files with weights, before the work. Raises GearbxError."""
    needed = sum(header.size for header in restorer.headers.values())
    free = shutil.disk_usage(work).free
    if needed > free:
        place = work.parent
        raise GearbxError(f"{place}: needs {needed} bytes, and the disk has {free} left; choose a disk with more room")
