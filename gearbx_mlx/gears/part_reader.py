"""Reads one rank's part of the arrays in safetensors files, and no other bytes of them."""

import errno
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import GearbxError
from .array_hashes import Place
from .parts import Part, Ranges, length

NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # integers of so many bytes; numpy has no bfloat16
# Arrays of one list for each row, and the array that says where the lists begin: exact.py, codebook_outliers.py.
LISTS = {"high": "offsets", "outliers": "outlier_offsets", "outlier_columns": "outlier_offsets"}


class Stored(NamedTuple):
    """A whole array in a file."""

    place: Place
    dtype: mx.Dtype
    shape: tuple[int, ...]


Find = Callable[[str], Stored]
"""Name of a parameter of a module to its array."""


class PartReader:
    """Reads parts of arrays. `bytes_read`: so far."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def read(self, name: str, part: Part, find: Find) -> mx.array:
        """The rank's part of a parameter.

        Args:
            name: of the parameter; of planes, with the number of the plane.
            part: what the rank has of the layer.
            find: finds this parameter and those beside it.

        Raises:
            OSError: the file cannot be read.
            GearbxError: lists that lie outside of their array.
        """
        stored = find(name)
        if name in LISTS:
            return self._lists(part, self._starts(part, find(LISTS[name])), stored)
        if name in LISTS.values():
            return offsets_of(self._starts(part, stored), len(stored.shape) == 2)
        cuts = dict(part.cuts(stored.shape, name.partition(".")[0]))
        shape = [length(cuts[axis]) if axis in cuts else size for axis, size in enumerate(stored.shape)]
        return self._numbers(stored, runs(stored.shape, cuts)).reshape(*shape)

    def _starts(self, part: Part, offsets: Stored) -> list[list[np.ndarray]]:
        """For each of the rank's matrices and ranges of rows, where the lists begin, and where the last one ends."""
        rows = part.whole[-2]
        stride = rows + (len(offsets.shape) == 2)  # each matrix has an end of its own, or all share one
        return [
            [
                np.array(self._numbers(offsets, [(number * stride + a, b - a + 1)])).astype(np.int64)
                for a, b in part.rows or ((0, rows),)
            ]
            for number in matrices_of(part)
        ]

    def _lists(self, part: Part, starts: list[list[np.ndarray]], stored: Stored) -> mx.array:
        """The lists of the rank's rows, one after the other; of each matrix, if the array has an axis of them."""
        own, by_matrix, size = [], len(stored.shape) == 2, stored.shape[-1]
        for number, ranges in zip(matrices_of(part), starts):
            found = []
            for start in ranges:
                first, last = int(start[0]), int(start[-1])
                if not 0 <= first <= last <= size:
                    raise GearbxError("its lists lie outside of their array")
                found.append(self._numbers(stored, [(first + number * size * by_matrix, last - first)]))
            own.append(mx.concatenate(found))
        if not by_matrix:
            return padded(mx.concatenate(own), 1)
        longest = max(1, *(each.size for each in own))
        return mx.stack([padded(each, longest) for each in own])

    def _numbers(self, stored: Stored, pieces: Iterable[tuple[int, int]]) -> mx.array:
        """Numbers of an array, (K,). pieces: the first of each run, and how many."""
        size, parts = stored.dtype.size, []
        with open(stored.place.file, "rb", buffering=0) as file:
            for first, count in pieces:
                file.seek(stored.place.begin + first * size)
                part = file.read(count * size)
                if len(part) != count * size:
                    raise OSError(errno.EIO, "it ends too early")
                self.bytes_read += len(part)
                parts.append(part)
        return mx.array(np.frombuffer(b"".join(parts), NUMPY[size])).view(stored.dtype)


def matrices_of(part: Part) -> list[int]:
    """The numbers of the rank's experts or heads; 0 of a single matrix."""
    if part.matrices is None:
        return [*range(math.prod(part.whole[:-2]))]
    return [number for a, b in part.matrices for number in range(a, b)]


def offsets_of(starts: list[list[np.ndarray]], by_matrix: bool) -> mx.array:
    """Where the lists of the rank's rows begin once they are alone."""
    counts = [np.concatenate([np.diff(each) for each in ranges]) for ranges in starts]
    table = np.stack(counts) if by_matrix else np.concatenate(counts)
    first = np.zeros((*table.shape[:-1], 1), np.int64)
    return mx.array(np.concatenate([first, table.cumsum(axis=-1)], axis=-1).astype(np.uint32))


def padded(array: mx.array, size: int) -> mx.array:
    """An array (K,) with zeros up to at least this size."""
    return mx.pad(array, [(0, max(0, size - array.size))])


def runs(shape: Sequence[int], cuts: dict[int, Ranges]) -> Iterator[tuple[int, int]]:
    """The first number and the length of each run of numbers without a gap, in the order of the rank's part.

    Args:
        shape: of the whole array. cuts: axis to ranges, of the axes that are cut.
    """
    last = max(cuts, default=0)
    inner = math.prod(shape[last + 1 :])
    before = [[index for a, b in cuts.get(axis, ((0, shape[axis]),)) for index in range(a, b)] for axis in range(last)]
    for place in itertools.product(*before):
        row = 0
        for index, size in zip(place, shape):
            row = row * size + index
        for a, b in cuts.get(last, ((0, shape[last]),)):
            yield (row * shape[last] + a) * inner, (b - a) * inner
