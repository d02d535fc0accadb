"""The original of a geared checkpoint, made again from its parameters and what is kept beside them."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import IO

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..compat.classes import bare
from ..errors import GearbxError, about
from ..files.reading import parse_json, shown, typed
from ..formats.base import dense_weight
from ..formats.tied import linear_of
from ..gears.discovery import Layer
from ..gears.ladder import DENSE
from ..gears.manifest import MANIFEST, ORIGINAL_FILE, RESTORE, OriginalModel, Tensor, file_key, header_key, tensor_key
from ..gears.saved import KINDS, SavedGears, opened
from ..gears.tensor_files import LENGTH, SIZES, TensorEntry, hash_bytes
from ..kernels.exact import ExactMatrix
from ..kernels.products import decoded
from .converter import assembled, bits_of, seen
from .original import Header, Key, content_of, places_in, read_place


class Restorer:
    """Makes the files of the original again, each with the SHA-256 that gears.json has of it.

    Args:
        saved: of the checkpoint.

    Raises:
        GearbxError: a checkpoint that does not have its original, or in which what is kept of it is missing, damaged,
            or not what gears.json says.
    """

    def __init__(self, saved: SavedGears):
        self.saved, self.directory = saved, saved.directory
        self.original = original_of(saved)
        self._kept = opened(self.directory / ORIGINAL_FILE, f"missing, and {MANIFEST} needs it").places
        self._base: dict[str, TensorEntry] = {}
        for name in saved.manifest.base:
            self._base |= opened(self.directory / name, "missing, and the gears beside it need it").entries
        self.headers = {name: self._header(name) for name in self.original.shards}

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(header.size - header.start for header in self.headers.values())

    @cached_property
    def groups(self) -> list[tuple[tuple[str, ...], list[Key]]]:
        """All tensors, those of the same parameters together; the parameters come first."""
        found: dict[tuple[str, ...], list[Key]] = {}
        for key in ((shard, name) for shard, header in self.headers.items() for name in header.entries):
            parameters = dict.fromkeys(piece.parameter for piece in self.tensor(key).pieces)
            found.setdefault(tuple(parameters), []).append(key)
        alone = [((), [key]) for key in found.pop((), [])]  # one at a time, for they may be large
        return alone + list(found.items())

    def tensor(self, key: Key) -> Tensor:
        """What gears.json says of a tensor."""
        return self.original.shards[key[0]].tensors[key[1]]

    def size_of(self, key: Key) -> int:
        """The bytes of a tensor."""
        begin, end = self.headers[key[0]].entries[key[1]].data_offsets
        return end - begin

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Every file without weights: name and content."""
        for name, hash in self.original.files.items():
            if name in self.original.kept:
                yield name, self._bytes(file_key(name), hash)
            else:
                data = content_of(self.directory / name)
                check_hash(self.directory / name, "it", data, hash)
                yield name, data

    def tensors(self, parameters: tuple[str, ...], keys: list[Key]) -> Iterator[tuple[Key, bytes | memoryview]]:
        """The bytes of every tensor of a group."""
        arrays = {name: self._parameter(name) for name in parameters}
        for key in keys:
            tensor, size = self.tensor(key), self.size_of(key)
            if not tensor.pieces:
                data = self._bytes(tensor_key(*key), tensor.hash)
                if len(data) != size:
                    kept = self.directory / ORIGINAL_FILE
                    raise GearbxError(f"{kept}: {shown(key[1])} is not of its own size; {RESTORE}")
                yield key, data
                continue
            with about(f"{self.directory / MANIFEST}: original: {shown(key[1])}"):
                parts = [seen(arrays[piece.parameter], piece) for piece in tensor.pieces]
                if sum(part.nbytes for part in parts) != size:
                    raise GearbxError(f"takes {size} bytes, which its pieces do not have; {RESTORE}")
                whole = assembled(tensor, parts, self.headers[key[0]].entries[key[1]].shape).data
            check_hash(self.directory, key[1], whole, tensor.hash)
            yield key, whole

    def _parameter(self, name: str) -> np.ndarray:
        """The bits of a parameter of the model, (..., O, I) or of its own shape."""
        path = name.removesuffix(".weight")
        if path != name and path in self.saved.manifest.changing:
            return self._weight(path)
        file, entry = self.directory / MANIFEST, self._base.get(name)
        if entry is None or entry.dtype not in SIZES:
            raise GearbxError(f"{file}: original names {shown(name)}, which is not a parameter of the model; {RESTORE}")
        self.saved.hashes.verify([name], RESTORE)
        data = read_place(self.saved.hashes.places[name])
        return np.frombuffer(data, f"u{SIZES[entry.dtype]}").reshape(entry.shape)

    def _weight(self, path: str) -> np.ndarray:
        """The bits of the weight of a layer or a table in the gear of 16 bits."""
        layer = self.saved.manifest.changing[path]
        dtype = self.saved.storage(path)
        blank = bare(KINDS[layer.kind][0])
        blank.weight = mx.zeros(layer.shape, dtype)  # never evaluated
        module = self.saved.module(Layer(path, blank, layer.lowest_bits), DENSE, dtype, dtype)
        self.saved.read(module.parameters())
        return weight_bits(linear_of(module))

    def _header(self, shard: str) -> Header:
        """Raises GearbxError for a header that does not fit gears.json."""
        data = self._bytes(header_key(shard), self.original.shards[shard].header)
        with about(f"{self.directory / ORIGINAL_FILE}: the header of {shard}"):
            content = parse_json(data)
            if isinstance(content, dict):
                content.pop("__metadata__", None)
            entries = typed(content, dict[str, TensorEntry])
            if entries.keys() != self.original.shards[shard].tensors.keys():
                raise GearbxError(f"does not have the tensors that {MANIFEST} names; {RESTORE}")
            end = 0
            for begin, end_of_one in sorted(entry.data_offsets for entry in entries.values()):
                if begin != end or end_of_one < begin:
                    raise GearbxError(f"has tensors that do not follow each other; {RESTORE}")
                end = end_of_one
        return Header(data, entries)

    def _bytes(self, key: str, hash: str) -> bytes:
        """What `original.safetensors` has under a key."""
        file = self.directory / ORIGINAL_FILE
        if key not in self._kept:
            raise GearbxError(f"{file}: has no {shown(key)}, which {MANIFEST} names; {RESTORE}")
        data = read_place(self._kept[key])
        check_hash(file, key, data, hash)
        return data


def check_hash(file: Path, name: str, data: bytes | memoryview, hash: str) -> None:
    """Raises GearbxError for data that are not the original's."""
    if hash_bytes(data) != hash:
        raise GearbxError(f"{file}: {name} is not what the original had; {RESTORE}")


def original_of(saved: SavedGears) -> OriginalModel:
    """What gears.json says of the original. Raises GearbxError for a checkpoint that does not have it."""
    manifest = saved.manifest
    if manifest.original is not None and DENSE in manifest.gears:
        return manifest.original
    gears = ",".join(map(str, manifest.gears))
    raise GearbxError(
        f"{saved.directory}: format {manifest.format}, gears {gears}, does not have its original; "
        "only what was written with --format exact has, and comes back with --restore"
    )


def weight_bits(linear: nn.Module) -> np.ndarray:
    """The bits of the weight (..., O, I) of a linear layer; a native kernel decodes exact ones, if there is one."""
    matrix = getattr(linear, "matrix", None)
    weight = decoded(matrix) if isinstance(matrix, ExactMatrix) else dense_weight(linear)
    mx.eval(weight)
    return bits_of(weight)


def write_original(restorer: Restorer, work: Path, progress: Callable[[int], None]) -> None:
    """Fill the directory `work` with the files of an original.

    Args:
        progress: called with the bytes of every tensor that is written.

    Raises:
        GearbxError: a disk without room, or a damaged checkpoint.
        OSError: the directory cannot be written.
    """
    check_room(restorer, work)
    places = places_in(restorer.headers, work)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(begun(work / name, header)) for name, header in restorer.headers.items()}
        for parameters, keys in restorer.groups:
            for key, data in restorer.tensors(parameters, keys):
                files[key[0]].seek(places[key].begin)
                files[key[0]].write(data)
                progress(places[key].size)
    for name, content in restorer.files():
        (work / name).write_bytes(content)


def check_room(restorer: Restorer, work: Path) -> None:
    """Raises GearbxError for a disk without room for the files with weights; before the work, not after it."""
    needed = sum(header.size for header in restorer.headers.values())
    free = shutil.disk_usage(work).free
    if needed > free:
        place = work.parent
        raise GearbxError(f"{place}: needs {needed} bytes, and the disk has {free} left; make room, or choose another")


@contextlib.contextmanager
def begun(path: Path, header: Header) -> Iterator[IO[bytes]]:
    """Make a file of the original's size with its header, to write tensors to."""
    with open(path, "wb") as file:
        file.truncate(header.size)
        file.write(LENGTH.pack(len(header.data)) + header.data)
        yield file
