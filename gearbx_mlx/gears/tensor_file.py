"""A safetensors file that is written array by array, and can be continued where it stopped."""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
from msgspec import Struct
from safetensors import SafetensorError, safe_open

from ..errors import GearbxError
from ..files.problems import shown
from ..files.reading import Count, parse_json, typed

NAMES = {
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
SIZES = {name: dtype.size for dtype, name in NAMES.items()}  # bytes of a number
LENGTH = struct.Struct("<Q")  # of the header, which comes first
SAMPLE = 4096  # bytes in the middle of an array that are looked at


class Entry(Struct, frozen=True):
    """What the header says of an array; data_offsets: its first byte, and the one after its last."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


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

    def append(self, arrays: Iterable[tuple[str, mx.array]]) -> dict[str, Entry]:
        """Write evaluated arrays, and return their entries."""
        added: dict[str, Entry] = {}
        for name, array in arrays:
            self.file.write(np.array(array.reshape(-1).view(mx.uint8), copy=False).data)
            span = (self.end, self.end + array.nbytes)
            added[name] = Entry(NAMES[array.dtype], array.shape, span)
            self.end = span[1]
        self.entries |= added
        return added

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


def end_of(entries: Mapping[str, Entry]) -> int:
    """The length of the data. Raises GearbxError unless the arrays come one after the other, each of its own size."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end_of_entry = entry.data_offsets
        size = SIZES.get(entry.dtype, 0) * math.prod(entry.shape)
        if begin != end or end_of_entry - begin != size or entry.dtype not in SIZES:
            raise GearbxError(f"{shown(name)} is not where the array before it ends, or is not of its own size")
        end = end_of_entry
    return end


def read_entries(path: Path) -> tuple[dict[str, Entry], int]:
    """The entries of a safetensors file, by name, and the place where its data begin.

    Raises:
        FileNotFoundError: there is no file.
        GearbxError: it is something else, or incomplete; the message names the file, but no remedy.
    """
    try:
        with safe_open(path, framework="np"), open(path, "rb") as file:  # the library checks sizes and places
            (room,) = LENGTH.unpack(file.read(LENGTH.size))
            header = parse_json(file.read(room))
        header.pop("__metadata__", None)
        return typed(header, dict[str, Entry]), LENGTH.size + room
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, GearbxError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise GearbxError(f"{path}: damaged or truncated ({reason})") from error


def hash_of(path: Path) -> str:
    """64 hexadecimal digits of names, types, shapes, and of the middle of every array.

    A model that was trained on, quantized anew or merged with another differs in all of its arrays. To read the whole
    file would take longer than everything else that loading does.

    Raises:
        FileNotFoundError, GearbxError: as read_entries.
    """
    entries, start = read_entries(path)
    digest = hashlib.sha256(json.dumps(msgspec.to_builtins(entries), sort_keys=True).encode())
    with open(path, "rb") as file:
        for entry in sorted(entries.values(), key=lambda entry: entry.data_offsets):
            begin, end = entry.data_offsets
            file.seek(start + max(begin, (begin + end - SAMPLE) // 2))
            digest.update(file.read(min(SAMPLE, end - begin)))
    return digest.hexdigest()
