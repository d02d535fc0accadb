"""Learned codebooks, one per output row, with outliers stored separately (V2 of XFP; XFP 3, 4).

The code of a weight is an index into its row's codebook; an outlier is stored in fp16. An outlier has the code of the
mean of the row's other weights: one code for all outliers of a row, so that a kernel that has summed all codes can
subtract it. Entries are rounded to fp16 before codes are fitted to them.

Codes are packed into words in the layout of XFP, Table 3.3: no code spans two words.

| bits | codes in a word | word   | bits unused |
| ---  | ---             | ---    | ---         |
| 2    | 16              | uint32 | 0           |
| 3    | 10              | uint32 | 2           |
| 4    | 8               | uint32 | 0           |
| 5    | 3               | uint16 | 1           |
| 6    | 5               | uint32 | 2           |

The first code is in the lowest bits. Rows are packed one by one and padded to 4 bytes with codes of 0.

Codebooks are fitted by Lloyd's iteration, over all rows at once (Lloyd 1982; XFP 4.1, 4.2). The cell of an entry is
the weights nearest to it. In a sorted row that is one interval, and its sum is a difference of two prefix sums: rows
are sorted once, and a round costs O(2^bits log I) per row.

A round moves every entry towards the mean of its cell. XFP moves it onto the mean. That converges slowly from
quantiles, whose tails start far from their final place. Here it moves 1.9 times as far, and in the last two rounds onto
the mean. The error of a cell is a parabola in its entry, lowest at the mean, and any step between 0 and 2 lowers it. So
the error falls in every round, as in Lloyd's own iteration, and in 20 rounds much more. Without random numbers, two
runs are bit-identical. A matrix has, row after row, the values of its outliers in fp16 and their columns as uint16. The
offset of each row's first outlier is stored too: 4 bytes per outlier and 4 per row. The lists of stacked experts are
padded to the longest; the padding is never read.
"""

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import GearbxError
from ..kernels.bit_planes import unpack_mlx_codes
from ..kernels.dispatch import MatmulKind
from ..kernels.products import codebook_experts, codebook_product
from . import CodebookOptions, name_with
from .base import (
    Arrays,
    Bits,
    Gears,
    Reconstructed,
    ReconstructedFormat,
    ReconstructedLinear,
    ReconstructedSwitchLinear,
    Shape,
    StoredArray,
    StoredArrays,
    row_blocks,
)
from .native import Native, NativeExperts, experts_kind, with_expert_bias

ROUNDS = 20
LLOYD_STEP = 1.9

DEFAULT_OPTIONS = CodebookOptions()
MAX_WIDTH = 2**16  # columns that 16 bits can store
OUTLIER_SIZE, OFFSET_SIZE = 4, 4  # bytes


@dataclass(frozen=True)
class SortedRows:
    """Sorted rows with prefix sums, so that the sum of any interval is quick.

    values: (R, I) float32, ascending; excluded values are +inf, at the end. sums: (R, I + 1), prefix sums of
    the included values. counts: (R, 1) int32, how many values are included.
    """

    values: mx.array
    sums: mx.array
    counts: mx.array

    @classmethod
    def of(cls, rows: mx.array, left_out: mx.array) -> "SortedRows":
        """Return sorted rows (R, I) float32 without the values where `left_out` (R, I) is true."""
        values = mx.sort(mx.where(left_out, mx.inf, rows), axis=-1)
        sums = mx.cumsum(mx.where(values == mx.inf, 0, values), axis=-1)
        counts = rows.shape[-1] - left_out.sum(axis=-1, keepdims=True).astype(mx.int32)
        return cls(values, mx.concatenate([mx.zeros_like(sums[:, :1]), sums], axis=-1), counts)

    def below(self, bounds: mx.array) -> mx.array:
        """Return how many values of each row are at most each of its bounds (R, K), by binary search."""
        size = self.values.shape[-1]
        found = mx.zeros(bounds.shape, mx.int32)
        step = 1 << (size.bit_length() - 1)
        while step:
            candidate = found + step
            value = mx.take_along_axis(self.values, mx.minimum(candidate, size) - 1, axis=-1)
            found = mx.where((candidate <= size) & (value <= bounds), candidate, found)
            step //= 2
        return found

    def cells(self, codebook: mx.array) -> tuple[mx.array, mx.array]:
        """Return count and sum of the values nearest to each entry: (R, K) int32 and (R, K) float32."""
        inner = self.below(boundaries(codebook))
        edges = mx.concatenate([mx.zeros_like(self.counts), inner, self.counts], axis=-1)
        sums = mx.take_along_axis(self.sums, edges, axis=-1)
        return edges[:, 1:] - edges[:, :-1], sums[:, 1:] - sums[:, :-1]

    def quantiles(self, count: int) -> mx.array:
        """Return the values (R, count) at quantiles (k + 1/2) / count of each row; 0 in a row without values."""
        middle = (2 * mx.arange(count) + 1) * self.counts // (2 * count)
        found = mx.take_along_axis(self.values, middle, axis=-1)
        return mx.where(self.counts > 0, found, 0)


def boundaries(codebook: mx.array) -> mx.array:
    """Return the values (R, K - 1) halfway between neighboring entries of ascending codebooks (R, K)."""
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
        codebook = lloyd_round(rows, codebook, LLOYD_STEP if i < rounds - 2 else 1.0)
    return codebook


def nearest_entries(rows: mx.array, codebook: mx.array) -> mx.array:
    """Return the codes (R, I) uint8 of the nearest entries in codebooks (R, K), the lower of two, for (R, I)."""
    bounds = boundaries(codebook)
    codes = mx.zeros(rows.shape, mx.uint8)
    for k in range(bounds.shape[-1]):
        codes = codes + (rows > bounds[:, k : k + 1])
    return codes


@dataclass(frozen=True)
class Outliers:
    """The outliers of a matrix (O, I). For experts (E, O, I), each array has a leading dimension E.

    values: (N,) float16. columns: (N,) uint16. offsets: (O + 1,) uint32, the start of each row, and the end.
    N is at least 1: an array without elements looks like one whose memory was released.
    """

    values: mx.array
    columns: mx.array
    offsets: mx.array

    def arrays(self) -> dict[str, mx.array]:
        """Return the arrays by their names in a module."""
        return {"outliers": self.values, "outlier_columns": self.columns, "outlier_offsets": self.offsets}

    @staticmethod
    def stored_arrays(shape: Sequence[int], bits: int) -> dict[str, StoredArray]:
        """Return `Format.stored_arrays` of outliers, for a weight of this shape."""
        types = {
            "outliers": (mx.float16, None),
            "outlier_columns": (mx.uint16, None),
            "outlier_offsets": (mx.uint32, shape[-2] + 1),
        }
        matrices = tuple(shape[:-2])
        return {name: StoredArray(dtype, (*matrices, length), bits, name) for name, (dtype, length) in types.items()}

    @classmethod
    def of(cls, arrays) -> "Outliers":
        """Return the outliers among a module's arrays; the inverse of `arrays`."""
        return cls(arrays["outliers"], arrays["outlier_columns"], arrays["outlier_offsets"])

    def check(self, width: int) -> None:
        """Validate lists in order, and columns below `width`: kernels index with both. Raises GearbxError.

        The arrays may come from an unchecked file. They are read.
        """
        offsets, columns = np.array(self.offsets).astype(np.int64), np.array(self.columns)
        ascend = not offsets[..., 0].any() and (np.diff(offsets) >= 0).all()
        if not ascend or offsets.max() > columns.shape[-1] or columns.max() >= width:
            raise GearbxError("its outliers exceed the weight")

    def count(self) -> int:
        return int(np.array(self.offsets[..., -1]).sum())

    def put_into(self, weight: mx.array) -> mx.array:
        """Return the matrix (..., O, I) with all outliers in place, rounded to the matrix's type."""
        rows, width = weight.shape[-2:]
        flat = weight.reshape(-1, width)
        offsets = self.offsets.reshape(-1, rows + 1).astype(mx.int32)
        values, columns = (a.reshape(len(offsets), -1) for a in (self.values, self.columns))
        length = values.shape[-1]
        steps = mx.zeros((len(offsets), length + 1), mx.int32)
        steps = steps.at[mx.arange(len(offsets))[:, None], offsets[:, 1:]].add(1)
        row = mx.cumsum(steps, axis=-1)[:, :length]
        # Padding repeats the last outlier of its list. In an empty list it repeats an existing weight.
        last = offsets[:, -1:] - 1
        entry = mx.maximum(mx.minimum(mx.arange(length), last), 0)
        row = mx.minimum(mx.take_along_axis(row, entry, axis=-1), rows - 1) + rows * mx.arange(len(offsets))[:, None]
        column = mx.take_along_axis(columns, entry, axis=-1).astype(mx.int32)
        value = mx.where(last < 0, flat[row, column], mx.take_along_axis(values, entry, axis=-1).astype(flat.dtype))
        flat[row, column] = value
        return flat.reshape(weight.shape)


def outliers_of(matrix: mx.array, options: CodebookOptions = DEFAULT_OPTIONS) -> np.ndarray:
    """Find the outliers of a matrix (O, I) bool: |w - mean| > 3 sigma, but at most the furthest 2%, or as in `options`.

    Mean and sigma are of the matrix. Among equally distant weights the first ones are taken. If mean or sigma is
    not finite, there are no outliers.
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


def all_outliers(weight: mx.array, options: CodebookOptions = DEFAULT_OPTIONS) -> np.ndarray:
    """Find the outliers of every matrix of (..., O, I): (..., O, I) bool."""
    matrices = weight.reshape(-1, *weight.shape[-2:])
    return np.stack([outliers_of(matrix, options) for matrix in matrices]).reshape(weight.shape)


def extract_outliers(weight: mx.array, mask: np.ndarray) -> Outliers:
    """Return the outliers of a weight (..., O, I), at the places where `mask` is true."""
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


WORD_CODES = {2: (16, mx.uint32), 3: (10, mx.uint32), 4: (8, mx.uint32), 5: (3, mx.uint16), 6: (5, mx.uint32)}
WORD_BYTES = 4  # bytes: words of 5-bit codes come in pairs


def row_bytes(width: int, bits: int) -> int:
    """Return bytes of one packed row of `width` codes, padding included."""
    count, word = WORD_CODES[bits]
    return math.ceil(math.ceil(width / count) * word.size / WORD_BYTES) * WORD_BYTES


def pack_codebook_codes(codes: mx.array, bits: int) -> mx.array:
    """Return unsigned codes (..., I) below 2^bits, packed into words (..., row_bytes(I, bits) / size of a word)."""
    count, word = WORD_CODES[bits]
    words = row_bytes(codes.shape[-1], bits) // word.size
    missing = words * count - codes.shape[-1]
    codes = mx.pad(codes.astype(word), [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    parts = codes.reshape(*codes.shape[:-1], words, count)
    packed = parts[..., 0]
    for i in range(1, count):
        packed = packed | (parts[..., i] << (i * bits))
    return packed


def unpack_codebook_codes(words: mx.array, bits: int, width: int) -> mx.array:
    """Return the inverse of `pack_codebook_codes`: words to (..., width) uint8 codes."""
    count = WORD_CODES[bits][0]
    codes = mx.stack([((words >> (i * bits)) & (2**bits - 1)).astype(mx.uint8) for i in range(count)], axis=-1)
    return codes.reshape(*words.shape[:-1], -1)[..., :width]


ENTRY_SIZE = 2  # bytes: always float16


def bulk(rows: mx.array, outlying: mx.array) -> mx.array:
    """Return rows (R, I) with outliers replaced by the mean of the rest of their row, or by 0 if there is no rest."""
    left = mx.maximum(rows.shape[-1] - outlying.sum(axis=-1, keepdims=True), 1)
    mean = mx.where(outlying, 0, rows).sum(axis=-1, keepdims=True) / left
    return mx.where(outlying, mean, rows)


def fit(rows: mx.array, outlying: mx.array, bits: int, rounds: int = ROUNDS) -> tuple[mx.array, mx.array]:
    """Fit a codebook to each row (R, I) without its outliers (R, I) bool, and codes to the codebooks.

    Returns codebooks (R, 2^bits) float16, ascending, not finite for rows that are not finite; and codes (R, I) uint8.
    """
    rows = rows.astype(mx.float32)
    codebook = lloyd(SortedRows.of(rows, outlying), bits, rounds)
    codebook = mx.where(mx.isfinite(rows).all(axis=-1, keepdims=True), codebook, mx.nan).astype(mx.float16)
    return codebook, nearest_entries(bulk(rows, outlying), codebook.astype(mx.float32))


def encode(
    weight: mx.array, bits: int, options: CodebookOptions = DEFAULT_OPTIONS, mask: np.ndarray | None = None
) -> dict[str, mx.array]:
    """Quantize a matrix (O, I), or experts (E, O, I), to the arrays of a codebook layer.

    Args:
        mask: (..., O, I) bool, the outliers; None: they are found.

    Returns:
        weight: packed codes (..., O, words). codebook: (..., O, 2^bits) float16, not finite for rows that are not.
        outliers, outlier_columns, outlier_offsets: see `Outliers`. All are evaluated, since their number must be known.
    """
    mask = all_outliers(weight, options) if mask is None else mask
    rows, outlying = weight.reshape(-1, weight.shape[-1]), mask.reshape(-1, weight.shape[-1])
    parts = []
    for block in row_blocks(*rows.shape):
        codebook, codes = fit(rows[block], mx.array(outlying[block]), bits, options.rounds)
        parts.append((pack_codebook_codes(codes, bits), codebook))
        mx.eval(parts[-1])
    words, codebooks = (mx.concatenate(list(p)).reshape(*weight.shape[:-1], -1) for p in zip(*parts))
    arrays = {"weight": words, "codebook": codebooks} | extract_outliers(weight, mask).arrays()
    mx.eval(arrays)
    return arrays


def look_up(arrays: Arrays, bits: int, width: int) -> mx.array:
    """Return weights (..., O, width) float32 of arrays from an `encode`, with codebook entries for outliers."""
    if "library" not in arrays:
        codes = unpack_codebook_codes(arrays["weight"], bits, width).astype(mx.uint32)
        return mx.take_along_axis(arrays["codebook"].astype(mx.float32), codes, axis=-1)
    codes = unpack_mlx_codes(arrays["weight"], bits).reshape(*arrays["entries"].shape, -1)
    groups, library = codes.shape, arrays["library"].astype(mx.float32)
    first = mx.arange(math.prod(library.shape[:-2])).reshape(*library.shape[:-2], 1, 1) * library.shape[-2]
    entry = (first + arrays["entries"].astype(mx.int32))[..., None] * 2**bits
    scales, midpoints = (arrays[name].astype(mx.float32)[..., None] for name in ("scales", "midpoints"))
    weight = midpoints + scales * library.reshape(-1)[entry + codes.astype(mx.int32)]
    return weight.reshape(*groups[:-2], -1)[..., :width]


def decode(arrays: Arrays, bits: int, width: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Return the weights (..., O, width), outliers included, rounded once, to `dtype`; `arrays` as for `look_up`."""
    return Outliers.of(arrays).put_into(look_up(arrays, bits, width)).astype(dtype)


def nbytes(arrays: Arrays) -> int:
    """Return the bytes that a matmul with the matrix, or all experts, reads, without padding of lists."""
    if arrays["outliers"].ndim == 1:  # no padding, and no offsets to read from a file
        return sum(array.nbytes for array in arrays.values())
    others = sum(array.nbytes for name, array in arrays.items() if name not in ("outliers", "outlier_columns"))
    return others + OUTLIER_SIZE * Outliers.of(arrays).count()


def codebook_kind(module: Reconstructed) -> MatmulKind:
    """Return the kind of matmuls with a layer over codebooks."""
    form = "codebook library" if "library" in module else "codebook"
    return MatmulKind(f"{form} {module.bits}", module.weight_shape, stock=False, most_bits=0)


class NativeCodebookLinear(Native, ReconstructedLinear):
    """A linear layer over codebooks, with native kernels that read the packed rows."""

    def __call__(self, x: mx.array) -> mx.array:
        packed = self.packed(), self.bits, lambda: self.dense_weight(x.dtype)
        return codebook_product(x, *packed, self.get("bias"), self.chosen)

    def kind(self) -> MatmulKind:
        return codebook_kind(self)


class NativeCodebookSwitchLinear(NativeExperts, ReconstructedSwitchLinear):
    """A SwitchLinear over codebooks, with native kernels that read the packed rows of the experts in use."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = codebook_experts(x, self.packed(), self.bits, indices, self.chosen)
        return super().__call__(x, indices, sorted_indices) if y is None else with_expert_bias(self, y, indices)

    def kind(self) -> MatmulKind | None:
        return experts_kind(codebook_kind(self))


class CodebookFormat(ReconstructedFormat, abc.ABC):
    """Base of codebook formats: every gear has its own codes and tables. The options are a part of the name."""

    native = native_experts = True
    native_kinds = NativeCodebookLinear, NativeCodebookSwitchLinear
    rounds = False  # entries of a table are fp16
    scales: frozenset[str] = frozenset()  # always float16
    by_rows = False  # outliers depend on the whole matrix

    def __init__(self, cache: bool = False, options: CodebookOptions = DEFAULT_OPTIONS):
        super().__init__(cache)
        self.options = options
        self.name = name_with(type(self).name, options)

    @abc.abstractmethod
    def encode(self, weight: mx.array, bits: int) -> dict[str, mx.array]:
        """Quantize a weight (..., O, I) to the arrays of a module with `bits`."""

    @abc.abstractmethod
    def stored_bytes(self, shape: Sequence[int], bits: int, outlier_share: float | None = None) -> int:
        """Return the bytes of a weight (..., O, I) with this share of outliers; None: the share of a Gaussian."""

    def outlier_bytes(self, shape: Shape, share: float | None) -> int:
        """Return the bytes of a weight's outliers; arguments as for `stored_bytes`."""
        share = self.options.gaussian_share if share is None else share
        each = OFFSET_SIZE * (shape[-2] + 1) + OUTLIER_SIZE * round(share * shape[-2] * shape[-1])
        return math.prod(shape[:-2]) * each

    def check_places(self, arrays: Arrays, width: int) -> None:
        """Validate arrays with which a kernel indexes. Raises GearbxError."""
        Outliers.of(arrays).check(width)

    def check(self, bits: int) -> None:
        if bits not in self.layer_bits:
            choices = ", ".join(map(str, self.layer_bits))
            raise GearbxError(f"format '{self.name}' has no {bits}-bit gear; choose from {choices}, 16")

    def fits(self, width: int, group_size: int) -> str | None:
        if width > MAX_WIDTH:  # 16 bits store an outlier's column
            return f"input width {width} is more than {MAX_WIDTH}, the limit for the column of an outlier"
        return None

    def reconstruct(self, arrays: Arrays, bits: int, width: int, dtype: mx.Dtype) -> mx.array:
        return decode(arrays, bits, width, dtype)

    def modules(self, dense: nn.Module, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> Gears:
        return {bits: self.module(dense, bits, self.encode(dense.weight, bits), ladder, group_size)}

    def module(self, dense: nn.Module, bits: int, arrays: Arrays, ladder: Bits, group_size: int) -> nn.Module:
        self.check_places(arrays, dense.weight.shape[-1])
        made = super().module(dense, bits, arrays, ladder, group_size)
        made.bytes_read = nbytes(arrays)
        return made

    def bytes_read(self, shape: Shape, bits: int, ladder: Bits, group_size: int, scale_size: int) -> int:
        """Return an estimate, with the outliers of a Gaussian; `bytes_read` of a module uses the actual outliers."""
        return self.stored_bytes(shape, bits)


class Codebook(CodebookFormat):
    """A codebook for each row, fitted only to the weights."""

    name = "codebook"
    layer_bits = tuple(WORD_CODES)

    def __init__(self, cache: bool = False, options: CodebookOptions = DEFAULT_OPTIONS):
        if (options.library, options.group) != (DEFAULT_OPTIONS.library, DEFAULT_OPTIONS.group):
            raise GearbxError(
                f"format {self.name} has a table for each row and no library or group, got {options}; "
                "omit them, or choose format codebook-library"
            )
        super().__init__(cache, options)

    def encode(self, weight: mx.array, bits: int) -> dict[str, mx.array]:
        return encode(weight, bits, self.options)

    def stored_bytes(self, shape: Sequence[int], bits: int, outlier_share: float | None = None) -> int:
        rows = math.prod(shape[:-1])
        return rows * (row_bytes(shape[-1], bits) + ENTRY_SIZE * 2**bits) + self.outlier_bytes(shape, outlier_share)

    def stored_arrays(self, shape: Shape, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> StoredArrays:
        rows, word = tuple(shape[:-1]), WORD_CODES[bits][1]
        weight = StoredArray(word, (*rows, row_bytes(shape[-1], bits) // word.size), bits, "weight")
        codebook = StoredArray(mx.float16, (*rows, 2**bits), bits, "codebook")
        return {"weight": weight, "codebook": codebook} | Outliers.stored_arrays(shape, bits)
