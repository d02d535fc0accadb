"""Which part of a weight a rank has: ranges of its heads or experts, rows and columns."""

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

from ..errors import GearbxError
from ..formats.base import Format

Ranges = tuple[tuple[int, int], ...]  # from the first index to the one after the last
WHOLE_AXES = ("library",)  # arrays whose second axis is none of rows: codebook_library.py


@dataclass(frozen=True)
class Part:
    """What one rank has of a weight.

    whole: the shape of the weight, (O, I), or (E, O, I) of experts or heads. matrices, rows, columns: the rank's own,
    along the axes of E, O and I; None: all of them.
    """

    whole: tuple[int, ...]
    matrices: Ranges | None = None
    rows: Ranges | None = None
    columns: Ranges | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rank's part."""
        cuts = dict(self.cuts(self.whole))
        return tuple(length(cuts[axis]) if axis in cuts else size for axis, size in enumerate(self.whole))

    def cuts(self, shape: tuple[int, ...], name: str = "weight") -> list[tuple[int, Ranges]]:
        """Axis and ranges of what a rank has of an array that belongs to the weight.

        Args:
            shape: of the whole array: (..., O, K) with K in proportion to I, or (..., O).
            name: of the parameter; a `bias` is (..., O), and a library belongs to a matrix.

        Raises:
            GearbxError: the columns end inside of what one number of the array stands for.
        """
        lead = len(self.whole) - 2
        found = [(0, self.matrices)] if lead else []
        if name not in WHOLE_AXES:
            found.append((lead, self.rows))
        if len(shape) == len(self.whole) and name not in WHOLE_AXES and self.columns is not None:
            found.append((lead + 1, tuple((self._scaled(a, shape), self._scaled(b, shape)) for a, b in self.columns)))
        return [(axis, ranges) for axis, ranges in found if ranges is not None]

    def _scaled(self, column: int, shape: tuple[int, ...]) -> int:
        place, rest = divmod(column * shape[-1], self.whole[-1])
        if rest:
            raise GearbxError(
                f"a rank's columns end at {column} of {self.whole[-1]}, inside of a group or a word of a quantized "
                "weight; load with shard_sums 'gather', or start another number of ranks"
            )
        return place

    def of(self, array: mx.array, name: str = "weight") -> mx.array:
        """The rank's part of an array that belongs to the weight; arguments are those of `cuts`."""
        for axis, ranges in self.cuts(array.shape, name):
            pieces = [array[(slice(None),) * axis + (slice(*each),)] for each in ranges]
            array = mx.concatenate(pieces, axis=axis) if len(pieces) > 1 else pieces[0]
        return mx.contiguous(array)

    def __str__(self) -> str:
        """What the rank has, in words: "rows 0-127 of 256"."""
        lead = len(self.whole) - 2
        axes = [("matrices", self.matrices, 0), ("rows", self.rows, lead), ("columns", self.columns, lead + 1)]
        return ", ".join(
            f"{name} {'+'.join(f'{a}-{b - 1}' for a, b in ranges)} of {self.whole[axis]}"
            for name, ranges, axis in axes
            if ranges is not None
        )


def misfit(part: Part | None, format: Format, group_size: int) -> str | None:
    """Why a part of a weight is not stored as the whole one is; None: it is, or it is whole."""
    if part is None:
        return None
    if part.rows and not format.by_rows:
        return f"codes of format {format.name} depend on the whole matrix, of which ranks have rows; convert it first"
    if part.columns is None:
        return None
    span = format.span(group_size)
    if span is None:
        return (
            f"format {format.name} stores whole rows, of which ranks have some columns; load with shard_sums 'gather'"
        )
    if any(a % span or b % span for a, b in part.columns):
        return f"ranks have columns that end inside of a group of {span}; load with shard_sums 'gather'"
    return None


def length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def ranges_of(indices: Iterable[int]) -> Ranges:
    """Indices as ranges, in their order: 4, 5, 6, 1, 2 -> ((4, 7), (1, 3))."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = found[-1][0], index + 1
        else:
            found.append((index, index + 1))
    return tuple(found)
