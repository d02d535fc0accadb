"""A library of 32 codebooks per matrix, shared by its groups of 128 weights (V2a of XFP; XFP 3.4).

Each group has the index of a codebook in the library, a scale and a mid-point: 0.31 bits per weight. A weight is
midpoint + scale * entry, and outliers are stored separately.

As in XFP, the library starts with V2's codebooks of the rows. They are normalized to mean 0 and deviation 1, and
condensed by Lloyd's iteration over vectors. The library is then fitted to the groups that use it. This lowers the
4-bit error by a tenth.

Codes are packed as MLX packs them: a group takes 4 * bits words. For 2 and 4 bits that is XFP's Table 3.3. XFP does not
support 3 bits, because in its layout a group of 3-bit codes ends within a word.
"""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import GearbxError
from ..kernels.bit_planes import pack_mlx_codes
from . import CodebookOptions
from .base import Arrays, Bits, Shape, StoredArray, StoredArrays, row_blocks
from .codebook import (
    DEFAULT_OPTIONS,
    ENTRY_SIZE,
    CodebookFormat,
    Outliers,
    SortedRows,
    all_outliers,
    bulk,
    extract_outliers,
    lloyd,
    nearest_entries,
)

LIBRARY_BITS = (2, 3, 4)
KERNEL_LIBRARY, KERNEL_GROUP = DEFAULT_OPTIONS.library, DEFAULT_OPTIONS.group  # supported by native kernels
GROUP_SIZE = 1 + 2 + 2  # bytes per group: index of its codebook, scale, mid-point
REFITS = 2
BINS, REACH = 256, 4.0  # number and range (in deviations) of the histogram that determines a group's codebook
MIN_SCALE = 2.0**-24  # the scale of a group of equal weights: the smallest number of fp16


def moments(rows: mx.array, outlying: mx.array) -> tuple[mx.array, mx.array]:
    """Return mean and standard deviation (R, 1) of rows (R, I) without their outliers."""
    count = mx.maximum((~outlying).sum(axis=-1, keepdims=True), 1)
    mean = mx.where(outlying, 0, rows).sum(axis=-1, keepdims=True) / count
    square = mx.where(outlying, 0, mx.square(rows - mean)).sum(axis=-1, keepdims=True) / count
    return mean, mx.maximum(mx.sqrt(square), MIN_SCALE)


def condense(codebooks: mx.array, size: int, rounds: int) -> mx.array:
    """Condense codebooks (R, K) to a library (size, K), by Lloyd's iteration, from quantiles of the largest entry."""
    order = mx.argsort(mx.abs(codebooks).max(axis=-1))
    library = codebooks[order[(2 * mx.arange(size) + 1) * len(codebooks) // (2 * size)]]
    for _ in range(rounds):
        distance = mx.square(library).sum(axis=-1) - 2 * codebooks @ library.T
        member = (distance.argmin(axis=-1, keepdims=True) == mx.arange(size)).astype(mx.float32)
        counts = member.sum(axis=0)[:, None]
        library = mx.where(counts > 0, member.T @ codebooks / mx.maximum(counts, 1), library)
    return mx.sort(library, axis=-1)


def learn(matrix: mx.array, outlying: mx.array, bits: int, options: CodebookOptions = DEFAULT_OPTIONS) -> mx.array:
    """Learn the library of a matrix (O, I): (L, 2^bits) float16, with L of the options."""
    shapes = []
    for block in row_blocks(*matrix.shape):
        rows, left_out = matrix[block].astype(mx.float32), outlying[block]
        mean, deviation = moments(rows, left_out)
        shapes.append((lloyd(SortedRows.of(rows, left_out), bits, options.rounds) - mean) / deviation)
        mx.eval(shapes[-1])
    library = condense(mx.concatenate(shapes), options.library, options.rounds).astype(mx.float16)
    height = max(1, min(len(matrix), 2**20 // matrix.shape[-1]))
    some = mx.arange(height) * len(matrix) // height
    groups, left_out = in_groups(matrix[some], outlying[some], options.group)
    for _ in range(8):
        library = refine(groups, left_out, library)
        mx.eval(library)
    return library


def choose_entries(z: mx.array, outlying: mx.array, library: mx.array) -> mx.array:
    """Return the index (G,) of the codebook in a library (L, K) with the least error for each group.

    The squared error of a codebook is a sum over the bins of a group's histogram: the weights in the bin, times the
    squared distance from the bin to the nearest entry. For all groups that is one matmul. z: groups (G, 128)
    with mean 0 and deviation 1.
    """
    centers = ((mx.arange(BINS) + 0.5) / BINS * 2 - 1) * REACH
    off = mx.abs(centers[:, None, None] - library.astype(mx.float32)).min(axis=-1)
    bins = mx.clip(mx.nan_to_num((z / REACH + 1) / 2 * BINS), 0, BINS - 1).astype(mx.int32)
    histogram = mx.zeros((len(z), BINS)).at[mx.arange(len(z))[:, None], bins].add(mx.where(outlying, 0.0, 1.0))
    return (histogram @ mx.square(off)).argmin(axis=-1)


def fit(groups: mx.array, outlying: mx.array, library: mx.array) -> tuple[mx.array, ...]:
    """Quantize groups (G, 128) float32 with a library (L, K) float16.

    Returns:
        codes (G, 128) uint8, entries (G,) uint8 (the groups' codebooks), scales and midpoints (G,) float16.
    """
    middle, scale = moments(groups, outlying)
    groups = bulk(groups, outlying)
    entries = choose_entries((groups - middle) / scale, outlying, library)
    codebook = library[entries].astype(mx.float32)
    counted = (~outlying).astype(mx.float32)
    count = mx.maximum(counted.sum(axis=-1, keepdims=True), 1)
    for i in range(REFITS + 1):
        scale, middle = scale.astype(mx.float16), middle.astype(mx.float16)
        codes = nearest_entries((groups - middle) / mx.maximum(scale.astype(mx.float32), MIN_SCALE), codebook)
        if i == REFITS:
            break
        # The scale and mid-point with the least squared error for these codes.
        named = mx.take_along_axis(codebook, codes.astype(mx.uint32), axis=-1)
        means = [(a * counted).sum(axis=-1, keepdims=True) / count for a in (named, groups)]
        along, across = (named - means[0]) * counted, groups - means[1]
        square = mx.square(along).sum(axis=-1, keepdims=True)
        scale = mx.where(square > 0, (along * across).sum(axis=-1, keepdims=True) / mx.maximum(square, 1e-12), 0)
        middle = means[1] - scale * means[0]
    return codes, entries.astype(mx.uint8), scale[:, 0], middle[:, 0]


def refine(groups: mx.array, outlying: mx.array, library: mx.array) -> mx.array:
    """Return a library after a round of Lloyd's iteration over groups (G, 128): entries become means of their weights.

    A weight counts with the square of its group's scale, as its error does. The sums are matmuls, because they
    add in the same order in every run; scattered additions on a GPU do not.
    """
    codes, entries, scales, midpoints = fit(groups, outlying, library)
    scale, middle = (a.astype(mx.float32)[:, None] for a in (scales, midpoints))
    member = (entries[:, None] == mx.arange(len(library))).astype(mx.float32)

    def by_entry(values: mx.array) -> mx.array:
        values = mx.where(outlying, 0, values)
        of_codes = [mx.where(codes == k, values, 0).sum(axis=-1) for k in range(library.shape[-1])]
        return member.T @ mx.stack(of_codes, axis=-1)

    weights, sums = by_entry(mx.square(scale)), by_entry(scale * (groups - middle))
    moved = mx.where(weights > 0, sums / mx.maximum(weights, 1e-30), library.astype(mx.float32))
    return mx.sort(moved, axis=-1).astype(mx.float16)


def in_groups(rows: mx.array, outlying: mx.array, group: int = KERNEL_GROUP) -> tuple[mx.array, mx.array]:
    """Return rows (R, I) in groups, float32; the padding of a partial last group counts as outliers."""
    missing = [(0, 0), (0, -rows.shape[-1] % group)]
    filled = mx.pad(rows.astype(mx.float32), missing), mx.pad(outlying, missing, constant_values=True)
    return filled[0].reshape(-1, group), filled[1].reshape(-1, group)


def encode(
    weight: mx.array, bits: int, options: CodebookOptions = DEFAULT_OPTIONS, mask: np.ndarray | None = None
) -> dict[str, mx.array]:
    """Quantize a matrix (O, I), or experts (E, O, I), to the arrays of a layer with a library.

    Args:
        mask: (..., O, I) bool, the outliers; None: they are found.

    Returns:
        Shapes with G = I / 128, rounded up, and L = 32, or as in `options`.
        weight: packed codes (..., O, G * 4 * bits). library: (..., L, 2^bits) float16. entries: (..., O, G) uint8.
        scales, midpoints: (..., O, G) float16, not finite for groups that are not finite.
        outliers, outlier_columns, outlier_offsets: see `Outliers`. All evaluated.
    """
    mask = all_outliers(weight, options) if mask is None else mask
    shape = (*weight.shape[:-1], math.ceil(weight.shape[-1] / options.group))
    libraries, parts = [], []
    for matrix, outlying in zip(weight.reshape(-1, *weight.shape[-2:]), mx.array(mask).reshape(-1, *weight.shape[-2:])):
        libraries.append(learn(matrix, outlying, bits, options))
        for block in row_blocks(*matrix.shape):
            codes, *rest = fit(*in_groups(matrix[block], outlying[block], options.group), libraries[-1])
            parts.append((pack_mlx_codes(codes, bits), *rest))
            mx.eval(parts[-1])
    words, entries, scales, midpoints = (mx.concatenate(list(p)) for p in zip(*parts))
    arrays = {
        "weight": words.reshape(*shape[:-1], -1),
        "library": mx.stack(libraries).reshape(*weight.shape[:-2], options.library, 2**bits),
        "entries": entries.reshape(shape),
        "scales": scales.reshape(shape),
        "midpoints": midpoints.reshape(shape),
    } | extract_outliers(weight, mask).arrays()
    mx.eval(arrays)
    return arrays


class CodebookLibrary(CodebookFormat):
    """32 codebooks for a matrix instead of one for each row: a kernel keeps them in less memory."""

    name = "codebook-library"
    layer_bits = LIBRARY_BITS

    def __init__(self, cache: bool = False, options: CodebookOptions = DEFAULT_OPTIONS):
        super().__init__(cache, options)
        self.native = self.native_experts = (options.library, options.group) == (KERNEL_LIBRARY, KERNEL_GROUP)

    def encode(self, weight: mx.array, bits: int) -> dict[str, mx.array]:
        return encode(weight, bits, self.options)

    def check_places(self, arrays: Arrays, width: int) -> None:
        super().check_places(arrays, width)
        if np.array(arrays["entries"]).max() >= self.options.library:
            raise GearbxError(f"its groups have indices of codebooks beyond the library of {self.options.library}")

    def stored_bytes(self, shape: Sequence[int], bits: int, outlier_share: float | None = None) -> int:
        group = self.options.group
        groups = math.prod(shape[:-1]) * math.ceil(shape[-1] / group)
        libraries = math.prod(shape[:-2]) * self.options.library * 2**bits * ENTRY_SIZE
        return groups * (group * bits // 8 + GROUP_SIZE) + libraries + self.outlier_bytes(shape, outlier_share)

    def stored_arrays(self, shape: Shape, bits: int, ladder: Bits, group_size: int, dtype: mx.Dtype) -> StoredArrays:
        group = self.options.group
        rows, groups = tuple(shape[:-1]), math.ceil(shape[-1] / group)
        types = {
            "weight": (mx.uint32, (*rows, groups * group * bits // 32)),
            "library": (mx.float16, (*shape[:-2], self.options.library, 2**bits)),
            "entries": (mx.uint8, (*rows, groups)),
            "scales": (mx.float16, (*rows, groups)),
            "midpoints": (mx.float16, (*rows, groups)),
        }
        arrays = {name: StoredArray(dtype, lengths, bits, name) for name, (dtype, lengths) in types.items()}
        return arrays | Outliers.stored_arrays(shape, bits)
