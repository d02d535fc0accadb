"""Headers and hashes of safetensors files, and the fingerprint of a model.

The hash of a file identifies it without reading all of it. The hash of every array of a geared checkpoint is compared
when a layer is first read, so that damage never reaches the output. A calibration file has the fingerprint of its
model, and is refused for other models.
"""

import hashlib
import json
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from msgspec import Struct
from safetensors import SafetensorError, safe_open

from ..errors import GearbxError, one_line
from ..files.reading import Count, parse_json, typed
from ..files.writing import LINE
from .adapters import adapter_arrays

TYPE_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.uint16: "U16",
    mx.uint8: "U8",
    mx.int32: "I32",
    mx.int16: "I16",
    mx.int8: "I8",
}
TYPE_SIZES = {name: dtype.size for dtype, name in TYPE_NAMES.items()}  # bytes of a number
LENGTH = struct.Struct("<Q")  # length of the header, at the start of the file
HASHED_BYTES = 4096  # bytes in the middle of an array that are hashed


class TensorEntry(Struct, frozen=True):
    """The header's entry of an array. data_offsets: its first byte, and the one after its last."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


@dataclass(frozen=True)
class ArrayPlace:
    """Location of an array: in a file, from byte `begin` to before `end`."""

    file: Path
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.end - self.begin


class FileHeader(NamedTuple):
    """The header of a safetensors file. entries: of its arrays, by name. start: of the data."""

    path: Path
    entries: dict[str, TensorEntry]
    start: int

    @property
    def places(self) -> dict[str, ArrayPlace]:
        """Locations of the arrays, by name."""
        return {
            name: ArrayPlace(self.path, *(self.start + offset for offset in entry.data_offsets))
            for name, entry in self.entries.items()
        }

    @property
    def hash(self) -> str:
        """Hash of names, types, shapes, and of the middle of every array: 64 hexadecimal digits. Raises OSError.

        Training, quantizing or merging a model changes all of its arrays. Reading the whole file would take longer
        than all other steps of loading.
        """
        digest = hashlib.sha256(json.dumps(msgspec.to_builtins(self.entries), sort_keys=True).encode())
        with open(self.path, "rb") as file:
            for entry in sorted(self.entries.values(), key=lambda entry: entry.data_offsets):
                begin, end = entry.data_offsets
                file.seek(self.start + max(begin, (begin + end - HASHED_BYTES) // 2))
                digest.update(file.read(min(HASHED_BYTES, end - begin)))
        return digest.hexdigest()


def header_of(path: Path) -> FileHeader:
    """Return the header of a safetensors file. Raises OSError for one that cannot be read.

    Raises GearbxError for a different or incomplete file; the message names the file, but no remedy.
    """
    try:
        with safe_open(path, framework="np"), open(path, "rb") as file:  # the library checks sizes and places
            (room,) = LENGTH.unpack(file.read(LENGTH.size))
            header = parse_json(file.read(room))
        header.pop("__metadata__", None)
        return FileHeader(path, typed(header, dict[str, TensorEntry]), LENGTH.size + room)
    except (SafetensorError, GearbxError) as error:
        raise GearbxError(f"{path}: damaged or truncated ({one_line(error)})") from error


UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # bytes of a number to its type
K = TypeVar("K")


def hash_bytes(data: Any) -> str:
    """Return the SHA-256 of an array's bytes, in 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sum_of_bytes(data: np.ndarray) -> int:
    """Return the sum of the 64-bit words. It takes a tenth of a hash's time, and a flipped bit changes it."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    whole = len(flat) // 8 * 8
    words = int(flat[:whole].view("<u8").sum(dtype=np.uint64))
    return (words + int.from_bytes(flat[whole:].tobytes(), "little")) % 2**64


def bits_in(array: mx.array) -> np.ndarray:
    """Return the bits of an evaluated array as integers, in its shape."""
    return np.array(array.reshape(-1).view(UNSIGNED[array.dtype.size]), copy=False).reshape(array.shape)


def hash_place(place: ArrayPlace) -> str:
    """Return the SHA-256 of an array in a file, in 64 hexadecimal digits. Raises OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open(place.file, "rb", buffering=0) as file:
        file.seek(place.begin)
        left = place.size
        while left and (part := file.read(min(left, 2**22))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()


class TensorFile:
    """A new safetensors file: concatenated arrays, after `room` for the header, written last.

    hashed: function for the results of `append`, from an array's bytes.
    """

    def __init__(self, path: Path, room: int, hashed: Callable[[Any], Any] = hash_bytes):
        room += -(LENGTH.size + room) % LINE
        self.path, self.room, self.end, self.hashed = path, room, 0, hashed
        self.entries: dict[str, TensorEntry] = {}
        self.file = open(path, "wb")  # noqa: SIM115
        self.file.seek(LENGTH.size + room)

    def append(self, arrays: Iterable[tuple[str, mx.array]]) -> dict[str, str]:
        """Write evaluated arrays, and return their hashes."""
        return {
            name: self.append_data(name, TYPE_NAMES[array.dtype], array.shape, bits_in(array)) for name, array in arrays
        }

    def append_data(self, name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray) -> Any:
        """Write an array from its bits in memory, row after row, and return its hash."""
        self.file.write(data.data)
        span = (self.end, self.end + data.nbytes)
        self.entries[name] = TensorEntry(dtype, shape, span)
        self.end = span[1]
        return self.hashed(data)

    @property
    def places(self) -> dict[str, ArrayPlace]:
        """Locations of the arrays, by name."""
        return FileHeader(self.path, self.entries, LENGTH.size + self.room).places

    def finish(self, about: Mapping[str, str] | None = None) -> None:
        """Write the header, and close the file."""
        header = msgspec.json.encode({"__metadata__": {"format": "mlx", **(about or {})}} | self.entries)
        assert len(header) <= self.room, "more names than there is room for"
        self.file.seek(0)
        self.file.write(LENGTH.pack(self.room) + header.ljust(self.room))
        self.close()

    def close(self) -> None:
        self.file.close()


def hash_places(places: Mapping[K, ArrayPlace], remedy: str = "restore it") -> Iterator[tuple[K, str]]:
    """Yield each key and its place's hash; on all cores, since hashing is slow. Raises GearbxError with `remedy`."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            yield from zip(places, pool.map(hash_place, places.values()))
        except OSError as error:
            files = error.filename or ", ".join(sorted({str(place.file) for place in places.values()}))
            raise GearbxError(f"{files}: cannot be read ({error.strerror}); {remedy}") from error
        finally:
            pool.shutdown(cancel_futures=True)


class ArrayHashes:
    """Hashes of arrays, each compared once. Threads may share it.

    expected: name to hash; arrays without one are not compared. pending: the names that were not compared yet.
    """

    def __init__(self, places: Mapping[str, ArrayPlace], expected: Mapping[str, str]):
        self.places, self.expected = places, expected
        self.pending = {*expected}
        self._lock = threading.Lock()

    def verify(self, names: Iterable[str], remedy: str) -> None:
        """Compare arrays that were not compared before. Raises GearbxError, with `remedy`, for a wrong hash."""
        with self._lock:
            wanted = sorted(self.pending.intersection(names))
            for name, is_whole in self.compare(wanted, remedy):
                if not is_whole:
                    raise self.damaged(name, remedy)
            self.pending.difference_update(wanted)

    def confirm(self, name: str, found: str, remedy: str) -> None:
        """Accept the hash of an array that other code has read whole. Raises GearbxError for a wrong hash."""
        if found != self.expected[name]:
            raise self.damaged(name, remedy)
        with self._lock:
            self.pending.discard(name)

    def damaged(self, name: str, remedy: str) -> GearbxError:
        """Return the error for an array with a wrong hash."""
        return GearbxError(f"{self.places[name].file}: {name} is damaged, or from a different model; {remedy}")

    def compare(self, names: Iterable[str], remedy: str) -> Iterator[tuple[str, bool]]:
        """Yield each array, and True if its hash is the expected one. Raises GearbxError as `hash_places`."""
        for name, found in hash_places({name: self.places[name] for name in names}, remedy):
            yield name, found == self.expected[name]


SAMPLED = 8  # values of each array: enough to distinguish a fine-tuned model from its original


def with_adapters(base: str, model: nn.Module) -> str:
    """Return the fingerprint of a model with its adapters, given the fingerprint without them."""
    own = adapter_arrays(model)
    return hashlib.sha256(f"{base} {fingerprint_of(samples_of(own))}".encode()).hexdigest()[:32] if own else base


Samples = dict[str, tuple[tuple[int, ...], np.ndarray]]
"""The shape of each parameter and a few of its values, by name."""


def samples_of(arrays: Mapping[str, mx.array]) -> Samples:
    """Return the shape of each array and a few of its values, by name."""
    few = {name: few_values(array) for name, array in arrays.items()}
    mx.eval(few)
    return {name: (array.shape, np.array(few[name])) for name, array in arrays.items()}


def few_values(array: mx.array) -> mx.array:
    """Return a few values of a parameter, in float32."""
    return array.reshape(-1)[:: max(1, array.size // SAMPLED)][:SAMPLED].astype(mx.float32)


def fingerprint_of(samples: Mapping[str, tuple[Sequence[int], np.ndarray]]) -> str:
    """Return 32 hexadecimal digits of every parameter's shape and sample, by name; the same in every type."""
    digest = hashlib.sha256()
    for name, (shape, values) in sorted(samples.items(), key=lambda item: item[0]):
        digest.update(f"{name} {tuple(shape)} ".encode() + values.tobytes())
    return digest.hexdigest()[:32]
