"""Outliers: the few weights far from all others, which are stored in fp16, apart from the codes (XFP 4.1).

A matrix has its outliers' values in fp16 and their columns in 16 bits, row after row, and the offset at which each row
begins: 4 bytes per outlier and 4 per row. The lists of stacked experts are padded to the longest; nothing reads the
padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..errors import GearbxError
from .base import StoredArray
from .codebook_options import CodebookOptions

DEFAULTS = CodebookOptions()
WIDEST = 2**16  # columns that 16 bits can store
OUTLIER_SIZE, OFFSET_SIZE = 4, 4  # bytes
GAUSSIAN_SHARE = DEFAULTS.gaussian_share
BLOCK = 2**22  # weights in a block of rows


def row_blocks(rows: int, width: int) -> list[slice]:
    """Slices of a few rows each, so that an encoder's temporary memory does not grow with the matrix."""
    height = max(1, BLOCK // width)
    return [slice(first, first + height) for first in range(0, rows, height)]


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

        The arrays may come from a file, whose content nobody has checked. They are read.
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
