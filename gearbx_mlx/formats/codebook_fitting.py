"""Fit codebooks to the rows of a matrix, and find the outliers that they leave out (Lloyd 1982; XFP 4.1, 4.2).

Lloyd's iteration runs over all rows at once. The cell of an entry is the weights nearest to it. In a sorted row that is
one interval, and its sum is a difference of two prefix sums: rows are sorted once, and a round costs O(2^bits log I)
per row.

A round moves every entry towards the mean of its cell. XFP moves it onto the mean. From quantiles, whose tails begin
far from their place, that converges slowly. Here it moves `STEP` = 1.9 times as far, and in the last two rounds onto
the mean. The error of a cell is a parabola in its entry, lowest at the mean, and any step between 0 and 2 lowers it. So
the error falls in every round, as in Lloyd's own iteration, and in 20 rounds much further. Nothing is random: two runs
give the same bits.

Outliers are the few weights far from all others, which are stored in fp16, apart from the codes. A matrix has their
values in fp16 and their columns in 16 bits, row after row, and the offset at which each row begins: 4 bytes per outlier
and 4 per row. The lists of stacked experts are padded to the longest; nothing reads the padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..errors import GearbxError
from . import CodebookOptions
from .base import StoredArray, row_blocks

ROUNDS = 20
STEP, PLAIN_ROUNDS = 1.9, 2

DEFAULTS = CodebookOptions()
WIDEST = 2**16  # columns that 16 bits can store
OUTLIER_SIZE, OFFSET_SIZE = 4, 4  # bytes


@dataclass(frozen=True)
class SortedRows:
    """Sorted rows with prefix sums, so that the sum of any interval is quick.

    values: (R, I) float32, ascending; values that are left out are +inf, at the end. sums: (R, I + 1), prefix sums of
    the values that count. counts: (R, 1) int32, how many values count.
    """

    values: mx.array
    sums: mx.array
    counts: mx.array

    @classmethod
    def of(cls, rows: mx.array, left_out: mx.array) -> "SortedRows":
        """Sort rows (R, I) float32 without the values where `left_out` (R, I) is true."""
        values = mx.sort(mx.where(left_out, mx.inf, rows), axis=-1)
        sums = mx.cumsum(mx.where(values == mx.inf, 0, values), axis=-1)
        counts = rows.shape[-1] - left_out.sum(axis=-1, keepdims=True).astype(mx.int32)
        return cls(values, mx.concatenate([mx.zeros_like(sums[:, :1]), sums], axis=-1), counts)

    def below(self, bounds: mx.array) -> mx.array:
        """How many values of each row are at most each of its bounds (R, K), by binary search."""
        size = self.values.shape[-1]
        found = mx.zeros(bounds.shape, mx.int32)
        step = 1 << (size.bit_length() - 1)
        while step:
            further = found + step
            value = mx.take_along_axis(self.values, mx.minimum(further, size) - 1, axis=-1)
            found = mx.where((further <= size) & (value <= bounds), further, found)
            step //= 2
        return found

    def cells(self, codebook: mx.array) -> tuple[mx.array, mx.array]:
        """Count and sum of the values nearest to each entry: (R, K) int32 and (R, K) float32."""
        inner = self.below(boundaries(codebook))
        edges = mx.concatenate([mx.zeros_like(self.counts), inner, self.counts], axis=-1)
        sums = mx.take_along_axis(self.sums, edges, axis=-1)
        return edges[:, 1:] - edges[:, :-1], sums[:, 1:] - sums[:, :-1]

    def quantiles(self, count: int) -> mx.array:
        """The values (R, count) at quantiles (k + 1/2) / count of each row; 0 for a row where no value counts."""
        middle = (2 * mx.arange(count) + 1) * self.counts // (2 * count)
        found = mx.take_along_axis(self.values, middle, axis=-1)
        return mx.where(self.counts > 0, found, 0)


def boundaries(codebook: mx.array) -> mx.array:
    """The values (R, K - 1) half way between neighbouring entries of codebooks (R, K), which are ascending."""
    return (codebook[:, 1:] + codebook[:, :-1]) / 2


def lloyd_round(rows: SortedRows, codebook: mx.array, step: float = 1.0) -> mx.array:
    """Move every entry `step` times the way to the mean of its cell; the entry of an empty cell stays."""
    counts, sums = rows.cells(codebook)
    means = mx.where(counts > 0, sums / mx.maximum(counts, 1), codebook)
    return mx.sort(codebook + step * (means - codebook), axis=-1)


def lloyd(rows: SortedRows, bits: int, rounds: int = ROUNDS) -> mx.array:
    """Fit a codebook to every row: (R, 2^bits) float32, ascending."""
    codebook = rows.quantiles(2**bits)
    for i in range(rounds):
        codebook = lloyd_round(rows, codebook, STEP if i < rounds - PLAIN_ROUNDS else 1.0)
    return codebook


def nearest(rows: mx.array, codebook: mx.array) -> mx.array:
    """The codes (R, I) uint8 of the entries in codebooks (R, K) nearest to values (R, I); of two, the lower one."""
    bounds = boundaries(codebook)
    codes = mx.zeros(rows.shape, mx.uint8)
    for k in range(bounds.shape[-1]):
        codes = codes + (rows > bounds[:, k : k + 1])
    return codes


@dataclass(frozen=True)
class Outliers:
    """The outliers of a matrix (O, I). For experts (E, O, I), each array has a leading dimension E.

    values: (N,) float16. columns: (N,) uint16. offsets: (O + 1,) uint32, where each row begins, and the end.
    N is at least 1: an array without elements looks like one whose memory was released.
    """

    values: mx.array
    columns: mx.array
    offsets: mx.array

    def arrays(self) -> dict[str, mx.array]:
        """The arrays by the names that a module gives them."""
        return {"outliers": self.values, "outlier_columns": self.columns, "outlier_offsets": self.offsets}

    @staticmethod
    def stored_arrays(shape: Sequence[int], bits: int) -> dict[str, StoredArray]:
        """`Format.stored_arrays` of them, for a weight of this shape."""
        types = {
            "outliers": (mx.float16, None),
            "outlier_columns": (mx.uint16, None),
            "outlier_offsets": (mx.uint32, shape[-2] + 1),
        }
        matrices = tuple(shape[:-2])
        return {name: StoredArray(dtype, (*matrices, length), bits, name) for name, (dtype, length) in types.items()}

    @classmethod
    def of(cls, arrays) -> "Outliers":
        """The outliers among a module's arrays; the inverse of `arrays`."""
        return cls(arrays["outliers"], arrays["outlier_columns"], arrays["outlier_offsets"])

    def check(self, width: int) -> None:
        """Raises GearbxError unless the lists are in order and every column is one of `width`: kernels index with both.

        The arrays may come from a file whose content was not checked. They are read.
        """
        offsets, columns = np.array(self.offsets).astype(np.int64), np.array(self.columns)
        ascend = not offsets[..., 0].any() and (np.diff(offsets) >= 0).all()
        if not ascend or offsets.max() > columns.shape[-1] or columns.max() >= width:
            raise GearbxError("its outliers lie outside of the weight")

    def count(self) -> int:
        return int(np.array(self.offsets[..., -1]).sum())

    def put_into(self, weight: mx.array) -> mx.array:
        """The matrix (..., O, I) with each outlier in its place, rounded to the matrix's type."""
        rows, width = weight.shape[-2:]
        flat = weight.reshape(-1, width)
        offsets = self.offsets.reshape(-1, rows + 1).astype(mx.int32)
        values, columns = (a.reshape(len(offsets), -1) for a in (self.values, self.columns))
        length = values.shape[-1]
        steps = mx.zeros((len(offsets), length + 1), mx.int32)
        steps = steps.at[mx.arange(len(offsets))[:, None], offsets[:, 1:]].add(1)
        row = mx.cumsum(steps, axis=-1)[:, :length]
        # Padding writes the last outlier of its list once more. In an empty list it writes the weight that is there.
        last = offsets[:, -1:] - 1
        entry = mx.maximum(mx.minimum(mx.arange(length), last), 0)
        row = mx.minimum(mx.take_along_axis(row, entry, axis=-1), rows - 1) + rows * mx.arange(len(offsets))[:, None]
        column = mx.take_along_axis(columns, entry, axis=-1).astype(mx.int32)
        value = mx.where(last < 0, flat[row, column], mx.take_along_axis(values, entry, axis=-1).astype(flat.dtype))
        flat[row, column] = value
        return flat.reshape(weight.shape)


def find(matrix: mx.array, options: CodebookOptions = DEFAULTS) -> np.ndarray:
    """Find the outliers of a matrix (O, I): |w - mean| > 3 sigma, but at most the furthest 2 %; or as options say.

    Mean and sigma are those of the matrix. Among equally distant weights the first ones count. If mean or sigma is not
    finite, there are no outliers.

    Returns:
        (O, I) bool.
    """
    rows, width = matrix.shape
    blocks = row_blocks(rows, width)
    mean = sum(matrix[block].astype(mx.float32).sum().item() for block in blocks) / matrix.size
    squares = sum(mx.square(matrix[block].astype(mx.float32) - mean).sum().item() for block in blocks)
    bound = options.sigma * (squares / matrix.size) ** 0.5
    mask, far = np.zeros((rows, width), bool), []
    for block in blocks:
        distance = np.array(mx.abs(matrix[block].astype(mx.float32) - mean))
        mask[block] = distance > bound
        far.append(distance[mask[block]])
    most = int(options.cap * matrix.size)
    found = np.flatnonzero(mask)
    if len(found) > most:
        mask.reshape(-1)[found[np.argsort(-np.concatenate(far), kind="stable")[most:]]] = False
    return mask


def find_all(weight: mx.array, options: CodebookOptions = DEFAULTS) -> np.ndarray:
    """Find the outliers of every matrix of (..., O, I): (..., O, I) bool."""
    matrices = weight.reshape(-1, *weight.shape[-2:])
    return np.stack([find(matrix, options) for matrix in matrices]).reshape(weight.shape)


def take_out(weight: mx.array, mask: np.ndarray) -> Outliers:
    """The outliers of a weight (..., O, I), at the places where `mask` is true."""
    rows, width = weight.shape[-2:]
    matrices, masks = weight.reshape(-1, rows, width), mask.reshape(-1, rows, width)
    lists = [np.flatnonzero(m) for m in masks]
    length = max(1, *map(len, lists))
    places = np.stack([np.pad(at, (0, length - len(at))) for at in lists])
    counts = masks.sum(axis=-1, dtype=np.uint32)
    offsets = np.concatenate([np.zeros((len(masks), 1), np.uint32), counts.cumsum(axis=-1, dtype=np.uint32)], axis=-1)
    values = mx.take_along_axis(matrices.reshape(len(masks), -1), mx.array(places), axis=-1).astype(mx.float16)
    columns = mx.array((places % width).astype(np.uint16))
    before = weight.shape[:-2]
    return Outliers(
        values.reshape(*before, length), columns.reshape(*before, length), mx.array(offsets).reshape(*before, rows + 1)
    )
