"""Strips: what of a layer is read from the disk at a time, and where it is in the file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..kernels.exact import ExactMatrix, tile_ends
from .array_hashes import Place

ALIGNED = 64  # bytes: where the second array of a strip may begin in memory


class Part(NamedTuple):
    """A piece of an array in a file: of which array, and from which byte of the file to the one before which."""

    array: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


class Strip:
    """Consecutive rows of a layer, and the pieces `low` and `high` that belong to them. Equal to itself alone."""

    def __init__(self, first: int, end: int, low: Part, high: Part):
        self.first, self.end, self.low, self.high = first, end, low, high
        self.second = -(-low.size // ALIGNED) * ALIGNED
        """Where `high` begins in the memory of a strip, in which `low` begins at 0."""
        self.size = self.second + max(1, high.size)
        """Bytes of memory."""


@dataclass(frozen=True)
class Remainder:
    """The arrays beside the base of one layer, which stay in the file.

    low, high: names of the arrays. low_place, high_place: where they are.
    """

    low: str
    high: str
    low_place: Place
    high_place: Place

    @property
    def nbytes(self) -> int:
        return self.low_place.size + self.high_place.size

    def rows(self, first: int, end: int, offsets: np.ndarray) -> Strip:
        """The rows from `first` to the one before `end`. offsets: of the layer."""
        width = self.low_place.size // (len(offsets) - 1)
        low = (self.low_place.begin + width * row for row in (first, end))
        high = (self.high_place.begin + int(offsets[row]) for row in (first, end))
        return Strip(first, end, Part(self.low, *low), Part(self.high, *high))


def strips_of(remainder: Remainder, matrix: ExactMatrix, offsets: np.ndarray) -> list[Strip]:
    """The strips of a matrix (O, I): the parts of rows in which MLX's kernels decode a resident one.

    They have every byte of the two arrays, also the one of a `high` of which no row needs any.
    """
    *strips, last = (remainder.rows(first, end, offsets) for first, end in tile_ends(matrix))
    high = last.high._replace(end=remainder.high_place.end)
    return [*strips, Strip(last.first, last.end, last.low, high)]


def with_strip(matrix: ExactMatrix, strip: Strip, memory: mx.array, low: mx.Dtype) -> ExactMatrix:
    """The rows of a strip, complete.

    Args:
        matrix: (O, I), without low and high.
        memory: uint8, in which the strip was read.
        low: the type of `low`.
    """
    rows = matrix.rows(strip.first, strip.end)
    return rows._replace(
        low=memory[: strip.low.size].view(low).reshape(strip.end - strip.first, -1),
        high=memory[strip.second : strip.size],
        offsets=rows.offsets - rows.offsets[0],
    )


def with_blocks(
    matrix: ExactMatrix, chosen: np.ndarray, height: int, strips: Sequence[Strip], low: mx.array, high: mx.array
) -> ExactMatrix:
    """Some blocks of rows, one after the other, complete.

    Args:
        matrix: (O, I), without low and high.
        chosen: numbers of blocks.
        height: rows of a block.
        strips: what was read of each block.
        low, high: the pieces of the strips, one after the other; `low` in its own type.
    """
    rows = mx.array((chosen[:, None] * height + np.arange(height)).reshape(-1))
    lengths = mx.concatenate([matrix.offsets[strip.first + 1 : strip.end + 1] for strip in strips])
    lengths = lengths - matrix.offsets[rows]
    return matrix.each(lambda array: array[rows])._replace(
        low=low.reshape(len(rows), -1),
        high=high,
        offsets=mx.concatenate([mx.zeros(1, mx.uint32), mx.cumsum(lengths)]).astype(mx.uint32),
    )
