"""Residency `stream`: the base of a checkpoint of format `exact` is in memory, the rest is read at every use.

What the top gear has beside the codes of the low gears are the low and high bytes of each weight: 9 bits of 13.5.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..errors import GearbxError
from .discovery import Layer
from .ladder import DENSE
from .offload import Residency, Resident, make_residency
from .saved import SavedGears
from .saved_disk import SavedDisk
from .sharding import sharding_of
from .sources import FromFiles
from .streamed import EXACT, stream
from .strip_reader import Speed, StripReader
from .strips import Remainder

STREAM = "stream"
SLOWER = 10.0  # times that a disk is slower than memory, where it is not measured yet
REMEDY = "convert the original with python -m gearbx_mlx.convert --format exact"


class Stream(Resident):
    """Keeps every gear in memory, except for what is streamed.

    Args:
        saved: the gears of a checkpoint of format `exact`.

    `reader` reads, and measures the disk. `memory` is the speed at which drafts read weights.

    Raises:
        GearbxError: a checkpoint of another format.
    """

    name = STREAM

    def __init__(self, saved: SavedGears):
        if saved.format.name != "exact":
            raise GearbxError(
                f"{saved.directory}: residency stream is for gears of format exact, not {saved.format.name}; {REMEDY}"
            )
        self.reader = StripReader(saved.hashes, keeps_cache=fits_in_memory(saved))
        self.memory = Speed()

    @property
    def slowdown(self) -> float:
        """How many times slower the disk is than drafts read memory, both as measured."""
        disk, memory = self.reader.speed.bytes_per_second, self.memory.bytes_per_second
        return memory / disk if disk and memory else SLOWER

    def summary(self, tokens: int) -> dict[str, float]:
        """What a run of so many tokens read from the disk, for each of them, and how fast."""
        return {
            "disk_bytes_per_token": self.reader.bytes_read / max(1, tokens),
            "disk_bytes_per_second": self.reader.speed.bytes_per_second or 0.0,
        }


@dataclass(frozen=True)
class StreamedFiles(FromFiles):
    """Reads the base from a geared checkpoint, and leaves the rest to a reader."""

    reader: StripReader

    def disk_bytes(self, layer: Layer, bits: int) -> int:
        """The bytes that one use of a layer reads from the disk; all experts count."""
        if bits != DENSE or DENSE not in self.saved.manifest.stored(layer.path):
            return 0
        return remainder_of(self.saved, layer.path).nbytes

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        made = super().modules(layer, bits)
        for module in made[bits].modules():
            if isinstance(module, EXACT):
                stream(module, remainder_of(self.saved, layer.path), self.reader)
        return made


def remainder_of(saved: SavedGears, path: str) -> Remainder:
    """Where a layer's low and high bytes are."""
    names = saved.manifest.changing[path].gears[DENSE]
    low, high = names["low"], names["high"]
    return Remainder(low, high, saved.hashes.places[low], saved.hashes.places[high])


def fits_in_memory(saved: SavedGears) -> bool:
    """Whether the machine has twice the memory of the checkpoint, so that the system may keep what was read."""
    size = sum(place.size for place in saved.hashes.places.values())
    return 2 * size <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def residency_of(
    name: str, saved: SavedGears | None, model: nn.Module, checkpoint: str | Path | None, dtypes: Mapping[str, mx.Dtype]
) -> Residency:
    """The residency of this name, for a model with saved gears or without.

    Raises:
        GearbxError: it does not exist, or not for this model.
    """
    if sharding_of(model) is not None and (name == STREAM or (name == "disk" and saved is None)):
        raise GearbxError(f"residency {name} reads whole layers, and ranks have parts of them; use resident or host")
    if name == STREAM:
        if saved is None:
            raise GearbxError(f"residency stream reads a geared checkpoint, and this model is from none; {REMEDY}")
        return Stream(saved)
    if saved is not None and name == "disk":
        return SavedDisk(saved, dtypes)
    return make_residency(name, model, checkpoint, dtypes)
