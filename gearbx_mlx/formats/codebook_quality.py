"""The quality of codebooks for a matrix: the median cosine between rows and their reconstruction (XFP 4.3)."""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from . import codebook, codebook_library
from .codebook import Codebook, CodebookFormat
from .codebook_fitting import SortedRows, find_all, lloyd

EXPERTS_JUDGED = 4
# XFP judges every channel. The median of 1024 of 4096 is within 0.0002 of that of all, in a quarter of the time.
WEIGHTS_JUDGED = 2**22


@dataclass(frozen=True)
class Quality:
    """The quality of one matrix at `bits`.

    cosine: median over channels. bulk_cosine: without outliers apart, when codebooks are fitted to all weights.
    error, bulk_error: squared error over the sum of the squared weights. outlier_share: of the weights.
    effective_bits: per weight, with everything that is stored.
    """

    bits: int
    cosine: float
    bulk_cosine: float
    error: float
    bulk_error: float
    outlier_share: float
    effective_bits: float


@dataclass(frozen=True)
class Match:
    """Sums over each row, (R,) float32: `own`, its squares; `made`, the reconstruction's; `product`, of both."""

    own: mx.array
    made: mx.array
    product: mx.array

    def cosine(self) -> float:
        """The median cosine; a row of zeros counts as 1."""
        norm = mx.sqrt(self.own * self.made)
        return float(np.median(np.array(mx.where(norm > 0, self.product / mx.maximum(norm, 1e-38), self.own == 0))))

    def error(self) -> float:
        """The squared error over the sum of the squared weights."""
        off = mx.maximum((self.own - 2 * self.product + self.made).sum(), 0)
        return float(np.array(off / mx.maximum(self.own.sum(), 1e-38)))


def compare(rows: mx.array, made: mx.array) -> Match:
    """Compare rows (R, I) with their reconstruction."""
    return Match(mx.square(rows).sum(-1), mx.square(made).sum(-1), (rows * made).sum(-1))


def compare_cells(rows: SortedRows, own: mx.array, kept: mx.array, codebook: mx.array) -> Match:
    """Compare rows with their reconstruction by a codebook (R, K), from the sums of its cells alone.

    Args:
        own: (R,) sums of the squares of the rows. kept: of their outliers, whose reconstruction is exact.
    """
    codebook = codebook.astype(mx.float16).astype(mx.float32)
    counts, sums = rows.cells(codebook)
    return Match(own, (counts * mx.square(codebook)).sum(-1) + kept, (sums * codebook).sum(-1) + kept)


def sample(weight: mx.array, mask: np.ndarray) -> tuple[mx.array, mx.array]:
    """Evenly spaced rows of a weight (..., O, I) and of its mask, at most WEIGHTS_JUDGED weights: float32 and bool."""
    width = weight.shape[-1]
    rows, outlying = weight.reshape(-1, width), mask.reshape(-1, width)
    count = max(1, min(len(rows), WEIGHTS_JUDGED // width))
    chosen = np.arange(count) * len(rows) // count
    return rows[mx.array(chosen)].astype(mx.float32), mx.array(outlying[chosen])


def some_experts(weight: mx.array, count: int = EXPERTS_JUDGED) -> mx.array:
    """So many evenly spaced experts of (E, O, I), or all if there are fewer; a matrix is returned as it is."""
    if weight.ndim == 2 or len(weight) <= count:
        return weight
    return weight[mx.arange(count) * len(weight) // count]


def match_rows(format: CodebookFormat, weight: mx.array, mask: np.ndarray) -> Iterator[tuple[int, Match, Match]]:
    """Bits, and the match of one codebook per row with outliers apart, and without."""
    rows, outlying = sample(weight, mask)
    own = mx.square(rows).sum(-1)
    kept = mx.where(outlying, mx.square(rows), 0).sum(-1)
    split, whole = SortedRows.of(rows, outlying), SortedRows.of(rows, mx.zeros_like(outlying))
    for bits in format.layer_bits:
        yield (
            bits,
            compare_cells(split, own, kept, lloyd(split, bits, format.options.rounds)),
            compare_cells(whole, own, mx.zeros_like(kept), lloyd(whole, bits, format.options.rounds)),
        )


def match_library(format: CodebookFormat, weight: mx.array, mask: np.ndarray) -> Iterator[tuple[int, Match, Match]]:
    """Bits, and the match of a library with outliers apart, and without."""
    rows, outlying = sample(weight, mask)
    for bits in format.layer_bits:
        made = []
        for left_out in (np.array(outlying), np.zeros(outlying.shape, bool)):
            arrays = codebook_library.encode(rows, bits, format.options, left_out)
            made.append(compare(rows, codebook.decode(arrays, bits, rows.shape[-1])))
        yield bits, made[0], made[1]


def qualities(format: CodebookFormat, weight: mx.array, experts: int = EXPERTS_JUDGED) -> Iterator[Quality]:
    """The quality of a matrix (O, I), or of some experts of (E, O, I), at each of the format's bits, ascending."""
    judged = some_experts(weight, experts)
    mask = find_all(judged, format.options)
    share = float(mask.mean())
    match = match_rows if isinstance(format, Codebook) else match_library
    for bits, kept, alone in match(format, judged, mask):
        effective = 8 * format.stored_bytes(weight.shape, bits, share) / weight.size
        yield Quality(bits, kept.cosine(), alone.cosine(), kept.error(), alone.error(), share, effective)
