"""The headers of safetensors files, and a hash that tells one file from another."""

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import msgspec
from msgspec import Struct
from safetensors import SafetensorError, safe_open

from ..errors import GearbxError, one_line
from ..files.reading import Count, parse_json, shown, typed

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
        OSError: there is no file, or it cannot be read.
        GearbxError: it is something else, or incomplete; the message names the file, but no remedy.
    """
    try:
        with safe_open(path, framework="np"), open(path, "rb") as file:  # the library checks sizes and places
            (room,) = LENGTH.unpack(file.read(LENGTH.size))
            header = parse_json(file.read(room))
        header.pop("__metadata__", None)
        return typed(header, dict[str, Entry]), LENGTH.size + room
    except (SafetensorError, GearbxError) as error:
        raise GearbxError(f"{path}: damaged or truncated ({one_line(error)})") from error


def hash_of(path: Path) -> str:
    """64 hexadecimal digits of names, types, shapes, and of the middle of every array.

    A model that was trained on, quantized anew or merged with another differs in all of its arrays. To read the whole
    file would take longer than everything else that loading does.

    Raises:
        OSError, GearbxError: as read_entries.
    """
    return hash_with(path, *read_entries(path))


def hash_with(path: Path, entries: Mapping[str, Entry], start: int) -> str:
    """As `hash_of`, with what `read_entries` has returned."""
    digest = hashlib.sha256(json.dumps(msgspec.to_builtins(entries), sort_keys=True).encode())
    with open(path, "rb") as file:
        for entry in sorted(entries.values(), key=lambda entry: entry.data_offsets):
            begin, end = entry.data_offsets
            file.seek(start + max(begin, (begin + end - SAMPLE) // 2))
            digest.update(file.read(min(SAMPLE, end - begin)))
    return digest.hexdigest()
