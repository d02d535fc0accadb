"""A safetensors file that is written array by array, and can be continued where it stopped."""

import os
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np

from ..errors import GearbxError
from ..gears.array_hashes import hash_bytes
from ..gears.tensor_entries import LENGTH, NAMES, Entry, end_of
from .views import bits_of


class TensorFile:
    """Arrays one after the other, after room for the header, which is known last.

    Args:
        path: created, or continued: what comes after `entries` is cut off.
        room: bytes for the header, which spaces fill up.
        entries: of the arrays that the file contains, by name.

    Raises:
        GearbxError: the file does not contain the arrays of `entries`.
    """

    def __init__(self, path: Path, room: int, entries: dict[str, Entry] | None = None):
        self.room, self.entries = room, dict(entries or {})
        self.end = end_of(self.entries)
        if self.end and (not path.exists() or path.stat().st_size < LENGTH.size + room + self.end):
            raise GearbxError(f"{path}: shorter than its journal says")
        self.file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
        self.file.truncate(LENGTH.size + room + self.end)
        self.file.seek(0, os.SEEK_END)

    def append(self, arrays: Iterable[tuple[str, mx.array]]) -> tuple[dict[str, Entry], dict[str, str]]:
        """Write evaluated arrays, and return their entries and their hashes."""
        hashes = {
            name: self.append_data(name, NAMES[array.dtype], array.shape, bits_of(array)) for name, array in arrays
        }
        return {name: self.entries[name] for name in hashes}, hashes

    def append_data(self, name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray) -> str:
        """Write an array from its bits in memory, row after row, and return its hash."""
        self.file.write(data.data)
        span = (self.end, self.end + data.nbytes)
        self.entries[name] = Entry(dtype, shape, span)
        self.end = span[1]
        return hash_bytes(data)

    def flush(self) -> None:
        """Return when everything is on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Write the header, which completes the file."""
        header = msgspec.json.encode({"__metadata__": {"format": "mlx"}} | self.entries)
        assert len(header) <= self.room, "more names than there is room for"
        self.file.seek(0)
        self.file.write(LENGTH.pack(self.room) + header.ljust(self.room))
        self.flush()
        self.close()

    def close(self) -> None:
        self.file.close()
