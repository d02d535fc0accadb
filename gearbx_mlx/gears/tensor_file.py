"""A safetensors file that is written array by array, and may be gone on with where it stopped."""

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

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
LENGTH = struct.Struct("<Q")  # of the header, which comes first
SAMPLE = 4096  # bytes at the beginning, the middle and the end of an array that are looked at

Entry = dict[str, Any]  # of the header: dtype, shape, data_offsets


class TensorFile:
    """Arrays one behind the other, behind room for the header that is known last.

    Args:
        path: created, or gone on with: what lies behind `entries` is cut off.
        room: bytes for the header, which spaces fill up.
        entries: name to entry of the arrays that are there already.
    """

    def __init__(self, path: Path, room: int, entries: dict[str, Entry] | None = None):
        self.room, self.entries = room, dict(entries or {})
        self.end = max((entry["data_offsets"][1] for entry in self.entries.values()), default=0)
        self.file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
        self.file.truncate(LENGTH.size + room + self.end)
        self.file.seek(0, os.SEEK_END)

    def append(self, arrays: Iterable[tuple[str, mx.array]]) -> dict[str, Entry]:
        """Write evaluated arrays, and return their entries."""
        added: dict[str, Entry] = {}
        for name, array in arrays:
            self.file.write(np.array(array.reshape(-1).view(mx.uint8), copy=False).data)
            span = [self.end, self.end + array.nbytes]
            added[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": span}
            self.end = span[1]
        self.entries |= added
        return added

    def flush(self) -> None:
        """What was written is on the disk when this returns."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Write the header: the file is whole from here on."""
        header = json.dumps({"__metadata__": {"format": "mlx"}} | self.entries, separators=(",", ":")).encode()
        assert len(header) <= self.room, "more names than there is room for"
        self.file.seek(0)
        self.file.write(LENGTH.pack(self.room) + header.ljust(self.room))
        self.flush()
        self.close()

    def close(self) -> None:
        self.file.close()


def read_entries(path: Path) -> tuple[dict[str, Entry], int]:
    """Entries of a safetensors file, and where its data begin.

    Raises:
        ValueError, OSError: a file that is something else, or not as long as its header says.
    """
    with open(path, "rb") as file:
        (room,) = LENGTH.unpack(file.read(LENGTH.size).ljust(LENGTH.size, b"\xff"))
        size = os.fstat(file.fileno()).st_size
        if room > size:
            raise ValueError("it ends within its header")
        entries = json.loads(file.read(room))
    entries.pop("__metadata__", None)
    start = LENGTH.size + room
    expected = start + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size != expected:
        raise ValueError(f"it is {size} bytes long, and its header says {expected}")
    return entries, start


def hash_of(path: Path) -> str:
    """64 hexadecimal digits of names, types, shapes, and of the beginning, middle and end of every array.

    A model that was trained on, quantized anew or merged with another differs in all of its arrays, and that takes no
    reading of the whole file, which would be most of the time that loading takes.
    """
    entries, start = read_entries(path)
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode())
    with open(path, "rb") as file:
        for entry in sorted(entries.values(), key=lambda entry: entry["data_offsets"]):
            begin, end = entry["data_offsets"]
            for at in sorted({begin, (begin + end) // 2, max(begin, end - SAMPLE)}):
                file.seek(start + at)
                digest.update(file.read(min(SAMPLE, end - at)))
    return digest.hexdigest()
