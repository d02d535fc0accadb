"""Residency `stream`: the base of an `exact` checkpoint stays in memory, and the rest is read at every use.

The rest is the low and high bytes of each weight, only for the top gear: 9 bits of 13.5.
"""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..compat.classes import become
from ..errors import GearbxError, check_choice
from ..formats.exact import ExactLinear, ExactMultiLinear, ExactSwitchLinear, NativeExactMultiLinear
from ..formats.native import Native, native_rounding, with_expert_bias
from ..kernels.exact import ExactMatrix, decode, product_by_tiles
from ..kernels.products import decoded, exact_experts, exact_product
from .discovery import Layer, only_shapes
from .ladder import DENSE, RESIDENCIES
from .offload import OriginalDisk, Residency, SavedDisk
from .saved import SavedGears
from .sharding import sharding_of
from .sources import FromFiles
from .strips import Piece, Remainder, Strip, StripReader, strips_of, with_blocks, with_strip

STREAM = "stream"
CONVERT_EXACT = "use gearbx_mlx convert --format exact on the original"


class Streamed(nn.Module):
    """Base of streamed layers: an exact layer without `low` and `high`, and their location."""

    remainder: Remainder
    reader: StripReader

    @property
    def matrix(self) -> ExactMatrix:
        """The matrix with zeros for all that is not in memory: enough to compute shapes."""
        scales = self["group_scales"]
        low = mx.zeros((*scales.shape[:-1], scales.shape[-1] * self.group_size), mx.uint8)
        beside = low, mx.zeros(1, mx.uint8), self["offsets"]
        return ExactMatrix(self["codes"][0], scales, self["group_biases"][0], *beside, self.group_size)

    @property
    def bytes_read(self) -> int:
        """Bytes of the whole weight (all experts), in memory and in the file."""
        matrix = self.matrix
        arrays = matrix.codes, matrix.scales, matrix.biases, matrix.offsets
        return sum(array.nbytes for array in arrays) + self.remainder.nbytes

    def dense_weight(self) -> mx.array:
        """Return the weight (..., O, I), bfloat16."""
        if only_shapes.get():
            return decode(self.matrix)
        compute = decoded if isinstance(self, NativeExactMultiLinear) else decode
        return mx.concatenate(self.by_strips(compute)).reshape(self.weight_shape)

    def rows(self, chosen: mx.array) -> mx.array:
        """Return rows of the weight (O, I), (..., I) bfloat16, reading only those. chosen: (...)."""
        if only_shapes.get():
            return mx.zeros((*chosen.shape, self.weight_shape[-1]), mx.bfloat16)
        numbers, places = np.unique(np.array(chosen), return_inverse=True)
        rows = decode(self.blocks(numbers, 1))
        return rows[mx.array(places.reshape(chosen.shape))]

    @functools.cached_property
    def offsets_on_cpu(self) -> np.ndarray:
        """Offsets of the bytes of each row."""
        return np.array(self["offsets"])

    @functools.cached_property
    def strips(self) -> list[Strip]:
        """All rows, in the strips in which they are read."""
        return strips_of(self.remainder, self.matrix.flat, self.offsets_on_cpu)

    def by_strips(self, compute: Callable[[ExactMatrix], mx.array]) -> list[mx.array]:
        """Return the results of `compute` for all strips."""
        matrix = self.matrix.flat
        return self.reader.over(self.strips, lambda strip, memory: compute(with_strip(matrix, strip, memory)))

    def blocks(self, chosen: np.ndarray, height: int) -> ExactMatrix:
        """Return some blocks of `height` rows as one matrix (rows, I), complete, reading only those.

        Args:
            chosen: numbers of blocks. Numbers beyond the last are clipped: MLX may read anything there.
        """
        offsets = self.offsets_on_cpu
        numbers = np.clip(chosen.astype(np.int64), 0, (len(offsets) - 1) // height - 1)
        self.reader.verify(self.remainder.low.array, self.remainder.high.array)
        strips = [self.remainder.rows(height * n, height * (n + 1), offsets) for n in numbers.tolist()]
        low = self.reader.joined([strip.low for strip in strips])
        high = self.reader.joined([strip.high for strip in strips])
        return with_blocks(self.matrix.flat, numbers, height, strips, low, high)


class StreamedLinear(Streamed):
    """A linear layer (..., I) -> (..., O)."""

    def __call__(self, x: mx.array) -> mx.array:
        if only_shapes.get():
            return super().__call__(x)
        product: Callable[..., mx.array] = product_by_tiles
        if isinstance(self, Native):
            product = functools.partial(exact_product, x_bits=self.x_bits)
        y = mx.concatenate(self.by_strips(lambda matrix: product(x, matrix)), axis=-1)
        return y + self["bias"].astype(y.dtype) if "bias" in self else y

    def kind(self) -> None:
        """Return None: measuring kernels would read the disk."""


class StreamedSwitchLinear(Streamed):
    """A SwitchLinear that reads the experts in `indices` once these are known, so never ahead."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if only_shapes.get():
            return super().__call__(x, indices, sorted_indices)
        height = self.output_dims
        chosen, places = np.unique(np.array(indices), return_inverse=True)
        matrix = self.blocks(chosen, height).each(lambda array: array.reshape(len(chosen), height, -1))
        now = mx.array(places.reshape(indices.shape).astype(np.uint32))
        y = exact_experts(x, matrix, now, sorted_indices, native_rounding(self))
        y = with_expert_bias(self, y, indices)
        mx.eval(y)  # before the next layer reads its own experts
        return y


STREAMED_KINDS: dict[Any, type[Streamed]] = {ExactLinear: StreamedLinear, ExactSwitchLinear: StreamedSwitchLinear}


@functools.cache
def streamed(kind: Any) -> type[nn.Module]:
    """Return the streamed class for a class of exact layers, native or not."""
    own = next((made for exact, made in STREAMED_KINDS.items() if issubclass(kind, exact)), Streamed)
    return type(f"Streamed{kind.__name__}", (own, kind), {})


def stream(module: nn.Module, remainder: Remainder, reader: StripReader) -> None:
    """Turn an exact layer over unread arrays into one that reads them at every use, and does not keep them."""
    own = {"remainder": remainder, "reader": reader}
    for name in ("low", "high"):
        del module[name]
    kind: Any = type(module)
    become(module, streamed(kind))
    for name, value in own.items():
        object.__setattr__(module, name, value)  # not into the dictionary of parameters


class Stream(Residency):
    """A residency that keeps gears of format `exact` in memory, except for strips that its `reader` reads and times.

    Raises GearbxError for a checkpoint of a different format.
    """

    name = STREAM

    def __init__(self, saved: SavedGears):
        if saved.format.name != "exact":
            raise GearbxError(
                f"{saved.directory}: residency stream is for gears of format exact, not {saved.format.name}; "
                f"{CONVERT_EXACT}"
            )
        self.reader = StripReader(saved.hashes, keeps_cache=fits_in_memory(saved))

    def summary(self, bytes_read: int, tokens: int) -> dict[str, float]:
        """Return the disk bytes per token of a run that read so many bytes, and the read speed (bytes per second)."""
        return {
            "disk_bytes_per_token": bytes_read / max(1, tokens),
            "disk_bytes_per_second": self.reader.speed.bytes_per_second or 0.0,
        }


@dataclass(frozen=True)
class StreamedFiles(FromFiles):
    """A source that reads the base from a geared checkpoint, and leaves the rest to a reader."""

    reader: StripReader
    panels = False

    def disk_bytes(self, layer: Layer, bits: int) -> int:
        if bits != DENSE or DENSE not in self.saved.manifest.stored(layer.path):
            return 0
        return remainder_of(self.saved, layer.path).nbytes

    def modules(self, layer: Layer, bits: int) -> dict[int, nn.Module]:
        made = super().modules(layer, bits)
        for module in made[bits].modules():
            if isinstance(module, ExactLinear | ExactSwitchLinear | ExactMultiLinear):
                stream(module, remainder_of(self.saved, layer.path), self.reader)
        return made


def remainder_of(saved: SavedGears, path: str) -> Remainder:
    """Return the location of a layer's low and high bytes."""
    names = (saved.manifest.changing[path].gears[DENSE][parameter] for parameter in ("low", "high"))
    places = {name: saved.hashes.places[name] for name in names}
    return Remainder(*(Piece(name, place.begin, place.end) for name, place in places.items()))


def fits_in_memory(saved: SavedGears) -> bool:
    """Return True if memory is at least twice the checkpoint, so that the system may cache it."""
    size = sum(place.size for place in saved.hashes.places.values())
    return 2 * size <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def residency_of(
    name: str, saved: SavedGears | None, model: nn.Module, checkpoint: str | Path | None, dtypes: Mapping[str, mx.Dtype]
) -> Residency:
    """Return the residency of this name. Raises GearbxError if it does not exist, or not for this model."""
    check_choice("residency", name, RESIDENCIES)
    if sharding_of(model) is not None and (name == STREAM or (name == "disk" and saved is None)):
        raise GearbxError(f"residency {name} reads whole layers, but ranks have parts of them; use resident")
    if name == STREAM and saved is None:
        raise GearbxError(f"residency stream needs a geared checkpoint, got a model without gears; {CONVERT_EXACT}")
    if name == "disk":
        return OriginalDisk(model, checkpoint, dtypes) if saved is None else SavedDisk(saved, dtypes)
    return Stream(saved) if saved is not None and name == STREAM else Residency()
