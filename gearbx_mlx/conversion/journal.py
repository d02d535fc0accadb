"""What lets a conversion go on where it stopped.

The journal has its plan and a line for each parameter that is done. The safetensors files are written array by array.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import msgspec
import numpy as np
from msgspec import Meta, Struct

from ..errors import GearbxError
from ..files.reading import Count, json_lines, read_text
from ..gears.discovery import Predicate, with_bits
from ..gears.ladder import DENSE, EMBEDDINGS
from ..gears.manifest import DtypeName, GroupSize, Hash, View, Width
from ..gears.tensor_files import LENGTH, NAMES, SAMPLED, ArrayPlace, FileHeader, TensorEntry, end_of, hash_bytes
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

    def __init__(self, path: Path, room: int, entries: dict[str, TensorEntry] | None = None):
        self.path, self.room, self.entries = path, room, dict(entries or {})
        self.end = end_of(self.entries)
        if self.end and (not path.exists() or path.stat().st_size < LENGTH.size + room + self.end):
            raise GearbxError(f"{path}: shorter than its journal says")
        self.file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
        self.file.truncate(LENGTH.size + room + self.end)
        self.file.seek(0, os.SEEK_END)

    def append(self, arrays: Iterable[tuple[str, mx.array]]) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        """Write evaluated arrays, and return their entries and their hashes."""
        hashes = {
            name: self.append_data(name, NAMES[array.dtype], array.shape, bits_of(array)) for name, array in arrays
        }
        return {name: self.entries[name] for name in hashes}, hashes

    def append_data(self, name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray) -> str:
        """Write an array from its bits in memory, row after row, and return its hash."""
        self.file.write(data.data)
        span = (self.end, self.end + data.nbytes)
        self.entries[name] = TensorEntry(dtype, shape, span)
        self.end = span[1]
        return hash_bytes(data)

    @property
    def places(self) -> dict[str, ArrayPlace]:
        """Where each array is."""
        return FileHeader(self.path, self.entries, LENGTH.size + self.room).places

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


JOURNAL = "conversion.jsonl"  # the plan, and a line for each parameter that is done
REMOVE = "remove the directory, and the same command starts again"


class Plan(Struct, frozen=True):
    """What to make, as `Gearbox` takes it. source: the hashes of the model's files, by name."""

    format: str
    gears: tuple[Width, ...]
    manage: str
    group_size: GroupSize
    dtype: DtypeName | None
    source: Mapping[str, str]
    wish: Mapping[str, Any] | None = None  # floors or a budget, which the bits of every layer follow from
    bits: Mapping[str, Width] | None = None  # path to the fewest bits that a layer may have
    embeddings: str = EMBEDDINGS[1]  # what conversions did before there was a choice
    calibrated: str | None = None  # hash of the text that chose the lowest gear's codes

    @property
    def managed(self) -> str | Predicate:
        """The argument `manage` of `Gearbox`."""
        return self.manage if self.bits is None else with_bits(self.bits)


class Unit(Struct, frozen=True):
    """A line of the journal after the first, which has the plan: a parameter that is done.

    unit, shape, dtype: its name, shape and type. sample: bits of the float32 values that the fingerprint takes.
    base, gears: the arrays that were written, by name. hashes: of their bytes. names: of a managed layer, as in
    `SavedLayer.gears`. stock_bits: those of the layer in the base, where mlx-lm runs it quantized. rows: as in
    `SavedLayer`. larger: why the layer stays dense, if it would become larger. views: hash to what it shows of the
    parameter, where the original is to come back.
    """

    unit: str
    shape: tuple[Count, ...]
    dtype: str
    sample: Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(max_length=SAMPLED)]
    base: Mapping[str, TensorEntry]
    gears: Mapping[str, TensorEntry]
    hashes: Mapping[str, Hash]
    names: Mapping[Width, Mapping[str, str]] = {}
    stock_bits: Width | None = None
    rows: Width = DENSE
    larger: str | None = None
    views: Mapping[Hash, View] = {}


def read_journal(work: Path) -> tuple[Plan | None, dict[str, Unit], int]:
    """The plan of a conversion that was begun in a directory, the parameters that are done, and bytes of whole lines.

    Raises:
        GearbxError: a line that is damaged.
    """
    file = work / JOURNAL
    text = read_text(file, "the journal of a conversion", REMOVE) if os.path.lexists(file) else ""
    complete = text[: text.rfind("\n") + 1]
    head, _, rest = complete.partition("\n")
    plan = next((plan for _, plan in json_lines(file, head, Plan, REMOVE)), None)
    units = (unit for _, unit in json_lines(file, rest, Unit, REMOVE, first=2))
    return plan, {unit.unit: unit for unit in units}, len(complete.encode())


def is_begun(work: Path) -> bool:
    """Whether a conversion in a directory has done something that another run need not do again."""
    plan, done, _ = read_journal(work)
    return bool(done) or (plan is not None and plan.bits is not None)
