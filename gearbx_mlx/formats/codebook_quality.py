"""How well codebooks stand for a matrix: the median cosine between rows and their reconstruction (XFP 4.3)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from . import codebook_library
from .codebook import Codebook, CodebookFormat
from .codebook_lloyd import SortedRows, lloyd
from .codebook_outliers import find_all

EXPERTS_JUDGED = 4
# XFP judges every channel. The median of 1024 of 4096 is within 0.0002 of that of all, in a quarter of the time.
WEIGHTS_JUDGED = 2**22


@dataclass(frozen=True)
class Quality:
    """One matrix at so many bits.

    cosine: median over channels. bulk_cosine: the same of codebooks alone, fitted to outliers as to all other weights.
    error, bulk_error: square of what is off over the square of the weights. outlier_share: of the weights.
    effective_bits: per weight, all that is stored.
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
    """Of each row: its square, the square of its reconstruction, and their product; (R,) float32."""

    own: mx.array
    made: mx.array
    product: mx.array

    def cosine(self) -> float:
        """Median; a row of zeros is met exactly."""
        norm = mx.sqrt(self.own * self.made)
        return float(np.median(np.array(mx.where(norm > 0, self.product / mx.maximum(norm, 1e-38), self.own == 0))))

    def error(self) -> float:
        off = mx.maximum((self.own - 2 * self.product + self.made).sum(), 0)
        return float(np.array(off / mx.maximum(self.own.sum(), 1e-38)))


def compared(rows: mx.array, made: mx.array) -> Match:
    return Match(mx.square(rows).sum(-1), mx.square(made).sum(-1), (rows * made).sum(-1))


def summed(rows: SortedRows, own: mx.array, kept: mx.array, codebook: mx.array) -> Match:
    """The same without reconstructing: a cell counts with its entry's square, and its sum times its entry.

    own: (R,) squares of the rows, `kept` of their outliers, which are reconstructed as they are.
    """
    codebook = codebook.astype(mx.float16).astype(mx.float32)
    counts, sums = rows.cells(codebook)
    return Match(own, (counts * mx.square(codebook)).sum(-1) + kept, (sums * codebook).sum(-1) + kept)


def sample(weight: mx.array, mask: np.ndarray) -> tuple[mx.array, mx.array]:
    """Evenly spaced rows of (..., O, I) and of its outliers, WEIGHTS_JUDGED at most: (R, I) float32 and bool."""
    width = weight.shape[-1]
    rows, outlying = weight.reshape(-1, width), mask.reshape(-1, width)
    wanted = max(1, min(len(rows), WEIGHTS_JUDGED // width))
    chosen = np.arange(wanted) * len(rows) // wanted
    return rows[mx.array(chosen)].astype(mx.float32), mx.array(outlying[chosen])


def some_experts(weight: mx.array) -> mx.array:
    """Four evenly spaced experts of (E, O, I); a matrix as it is."""
    if weight.ndim == 2 or len(weight) <= EXPERTS_JUDGED:
        return weight
    return weight[mx.arange(EXPERTS_JUDGED) * len(weight) // EXPERTS_JUDGED]


def by_row(format: CodebookFormat, weight: mx.array, mask: np.ndarray) -> Iterator[tuple[int, Match, Match]]:
    rows, outlying = sample(weight, mask)
    own = mx.square(rows).sum(-1)
    kept = mx.where(outlying, mx.square(rows), 0).sum(-1)
    split, whole = SortedRows.of(rows, outlying), SortedRows.of(rows, mx.zeros_like(outlying))
    for bits in format.layer_bits:
        yield (
            bits,
            summed(split, own, kept, lloyd(split, bits, format.rounds)),
            summed(whole, own, mx.zeros_like(kept), lloyd(whole, bits, format.rounds)),
        )


def by_library(format: CodebookFormat, weight: mx.array, mask: np.ndarray) -> Iterator[tuple[int, Match, Match]]:
    rows, outlying = sample(weight, mask)
    for bits in format.layer_bits:
        made = []
        for left_out in (np.array(outlying), np.zeros(outlying.shape, bool)):
            arrays = codebook_library.encode(rows, bits, format.rounds, left_out)
            made.append(compared(rows, codebook_library.decode(arrays, bits, rows.shape[-1])))
        yield bits, made[0], made[1]


def qualities(format: CodebookFormat, weight: mx.array) -> Iterator[Quality]:
    """The quality of (O, I), or of (E, O, I) by four experts, at each of the format's bits, ascending, as asked for."""
    judged = some_experts(weight)
    mask = find_all(judged)
    share = float(mask.mean())
    found: Iterable[tuple[int, Match, Match]] = (
        by_row(format, judged, mask) if isinstance(format, Codebook) else by_library(format, judged, mask)
    )
    for bits, kept, alone in found:
        effective = 8 * format.stored_bytes(weight.shape, bits, share) / weight.size
        yield Quality(bits, kept.cosine(), alone.cosine(), kept.error(), alone.error(), share, effective)
