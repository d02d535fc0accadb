"""Learned codebooks: XFP's V2, one for every output row, with the outliers kept beside them (XFP 3, 4).

A weight is the entry of its row's codebook that its code names, or, where it is an outlier, itself in fp16. The code
below an outlier is that of the mean of what is left in its row: one code for all outliers of a row, so that a kernel
that has summed all codes knows what to take back. Entries are rounded to fp16 before codes are fitted to them.
"""

import abc
import math
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import GearbxError
from ..kernels.dispatch import codebook_product
from .base import StoredArray
from .codebook_lloyd import ROUNDS, SortedRows, lloyd, nearest
from .codebook_outliers import (
    GAUSSIAN_SHARE,
    OFFSET_SIZE,
    OUTLIER_SIZE,
    WIDEST,
    Outliers,
    find_all,
    row_blocks,
    take_out,
)
from .codebook_packing import LAYOUT, pack, row_bytes, unpack
from .native import Native
from .reconstruct import Arrays, Reconstructed, ReconstructedLinear, ReconstructedSwitchLinear

ENTRY_SIZE = 2  # bytes: float16, whatever the checkpoint has


def bulk(rows: mx.array, outlying: mx.array) -> mx.array:
    """(R, I) with what is `outlying` replaced by the mean of the rest of its row, or 0 where nothing is left."""
    left = mx.maximum(rows.shape[-1] - outlying.sum(axis=-1, keepdims=True), 1)
    mean = mx.where(outlying, 0, rows).sum(axis=-1, keepdims=True) / left
    return mx.where(outlying, mean, rows)


def fit(rows: mx.array, outlying: mx.array, bits: int, rounds: int = ROUNDS) -> tuple[mx.array, mx.array]:
    """Codebooks and codes of rows (R, I).

    Args:
        rows: floating.
        outlying: (R, I) bool, what takes no part.

    Returns:
        (R, 2^bits) float16, ascending, not finite where the row is not, and (R, I) uint8.
    """
    rows = rows.astype(mx.float32)
    codebook = lloyd(SortedRows.of(rows, outlying), bits, rounds)
    codebook = mx.where(mx.isfinite(rows).all(axis=-1, keepdims=True), codebook, mx.nan).astype(mx.float16)
    return codebook, nearest(bulk(rows, outlying), codebook.astype(mx.float32))


def encode(weight: mx.array, bits: int, rounds: int = ROUNDS, mask: np.ndarray | None = None) -> dict[str, mx.array]:
    """A matrix (O, I), or experts (E, O, I), as a codebook layer holds it.

    Args:
        mask: (..., O, I) bool, the outliers; found if not given.

    Returns:
        weight: packed codes (..., O, words). codebook: (..., O, 2^bits) float16, not finite in rows that are not.
        outliers, outlier_columns, outlier_offsets: see `Outliers`. All evaluated: how many outliers there are shows
        only then.
    """
    mask = find_all(weight) if mask is None else mask
    rows, outlying = weight.reshape(-1, weight.shape[-1]), mask.reshape(-1, weight.shape[-1])
    parts = []
    for block in row_blocks(*rows.shape):
        codebook, codes = fit(rows[block], mx.array(outlying[block]), bits, rounds)
        parts.append((pack(codes, bits), codebook))
        mx.eval(parts[-1])
    words, codebooks = (mx.concatenate(list(p)).reshape(*weight.shape[:-1], -1) for p in zip(*parts))
    arrays = {"weight": words, "codebook": codebooks} | take_out(weight, mask).arrays()
    mx.eval(arrays)
    return arrays


def look_up(arrays: Arrays, bits: int, width: int) -> mx.array:
    """The weights (..., O, width) float32 that the codes name, outliers left out."""
    codes = unpack(arrays["weight"], bits, width).astype(mx.uint32)
    return mx.take_along_axis(arrays["codebook"].astype(mx.float32), codes, axis=-1)


def decode(arrays: Arrays, bits: int, width: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The weights (..., O, width), rounded once, to `dtype`."""
    return Outliers.of(arrays).put_into(look_up(arrays, bits, width)).astype(dtype)


def nbytes(arrays: Arrays) -> int:
    """Bytes that one use reads, of all experts; what fills up their shorter lists of outliers is not read."""
    if arrays["outliers"].ndim == 1:  # known without reading anything, which may still be in a file
        return sum(array.nbytes for array in arrays.values())
    held = sum(array.nbytes for name, array in arrays.items() if name not in ("outliers", "outlier_columns"))
    return held + OUTLIER_SIZE * Outliers.of(arrays).count()


def outlier_bytes(shape: Sequence[int], share: float) -> int:
    """Bytes of the outliers of (..., O, I) if so many weights are some."""
    matrices = math.prod(shape[:-2])
    return matrices * (OFFSET_SIZE * (shape[-2] + 1) + OUTLIER_SIZE * round(share * shape[-2] * shape[-1]))


class CodebookModule(Reconstructed):
    """A layer over codes, what they stand for, and outliers; `bytes_read` are those of one use."""

    def __init__(self, dense: nn.Module, bits: int, arrays: Arrays, cache: bool = False):
        super().__init__(dense, bits, arrays, cache)
        self.bytes_read = nbytes(arrays)


class _Rows(CodebookModule):
    def reconstruct(self, arrays: Arrays, dtype: mx.Dtype) -> mx.array:
        return decode(arrays, self.bits, self.input_dims, dtype)


class NativeProduct(Native, ReconstructedLinear):
    """A linear layer over codebooks, by the table in `kernels/dispatch.py`."""

    def __call__(self, x: mx.array) -> mx.array:
        return codebook_product(x, self.packed(), self.bits, lambda: self.dense_weight(x.dtype), self.get("bias"))


class CodebookLinear(_Rows, ReconstructedLinear):
    """A linear layer over codebooks."""


class NativeCodebookLinear(_Rows, NativeProduct):
    """The same over the same arrays, natively."""


class CodebookSwitchLinear(_Rows, ReconstructedSwitchLinear):
    """mlx-lm's SwitchLinear over codebooks."""


class CodebookFormat(abc.ABC):
    """What formats of learned codebooks have in common: every gear has codes and tables of its own.

    Args:
        cache: whether the modules keep what they reconstruct until their gear is left.
        rounds: of Lloyd's iteration.
    """

    name: str
    layer_bits: tuple[int, ...]
    linear: type[CodebookModule]
    native_linear: type[CodebookModule]
    experts: type[CodebookModule]
    native, native_experts = True, False
    scales: frozenset[str] = frozenset()  # float16, whatever is asked for

    def __init__(self, cache: bool = False, rounds: int = ROUNDS):
        self.cache, self.rounds = cache, rounds

    @abc.abstractmethod
    def encode(self, weight: mx.array, bits: int) -> dict[str, mx.array]:
        """The arrays that a module of so many bits holds."""

    @abc.abstractmethod
    def stored_bytes(self, shape: Sequence[int], bits: int, outlier_share: float = GAUSSIAN_SHARE) -> int:
        """Bytes of (..., O, I) if so many weights are outliers."""

    def check_places(self, arrays: Arrays, width: int) -> None:
        """Raises GearbxError for arrays with which a kernel would read outside of others."""
        Outliers.of(arrays).check(width)

    @abc.abstractmethod
    def stored_arrays(
        self, shape: Sequence[int], bits: int, ladder: Sequence[int], group_size: int, dtype: mx.Dtype
    ) -> dict[str, StoredArray]:
        """As Format.stored_arrays."""

    def check(self, bits: int) -> None:
        if bits not in self.layer_bits:
            held = ", ".join(map(str, self.layer_bits))
            raise GearbxError(f"format '{self.name}' has no gear of {bits} bits; choose from {held}, 16")

    def fits(self, width: int, group_size: int) -> str | None:
        if width > WIDEST:  # outliers are named by 16 bits
            return f"input width {width} is more than {WIDEST}, the columns that an outlier can be in"
        return None

    def modules(
        self, dense: nn.Module, wanted: int, ladder: Sequence[int], group_size: int, dtype: mx.Dtype
    ) -> dict[int, nn.Module]:
        return {wanted: self.module(dense, wanted, self.encode(dense.weight, wanted), ladder, group_size)}

    def module(self, dense: nn.Module, bits: int, arrays: Arrays, ladder: Sequence[int], group_size: int) -> nn.Module:
        self.check_places(arrays, dense.weight.shape[-1])
        linear = self.native_linear if isinstance(dense, Native) else self.linear
        kind = linear if dense.weight.ndim == 2 else self.experts
        return kind(dense, bits, arrays, self.cache)

    def bytes_read(
        self, shape: Sequence[int], bits: int, ladder: Sequence[int], group_size: int, scale_size: int
    ) -> int:
        """With the outliers of a Gaussian: how many there are shows when a gear is made (`bytes_read` of a module)."""
        return self.stored_bytes(shape, bits)


class Codebook(CodebookFormat):
    """A codebook for each row, fitted to the weights and nothing else."""

    name = "codebook"
    layer_bits = tuple(LAYOUT)
    linear, native_linear, experts = CodebookLinear, NativeCodebookLinear, CodebookSwitchLinear

    def encode(self, weight: mx.array, bits: int) -> dict[str, mx.array]:
        return encode(weight, bits, self.rounds)

    def stored_bytes(self, shape: Sequence[int], bits: int, outlier_share: float = GAUSSIAN_SHARE) -> int:
        rows = math.prod(shape[:-1])
        return rows * (row_bytes(shape[-1], bits) + ENTRY_SIZE * 2**bits) + outlier_bytes(shape, outlier_share)

    def stored_arrays(
        self, shape: Sequence[int], bits: int, ladder: Sequence[int], group_size: int, dtype: mx.Dtype
    ) -> dict[str, StoredArray]:
        rows, word = tuple(shape[:-1]), LAYOUT[bits][1]
        weight = StoredArray(word, (*rows, row_bytes(shape[-1], bits) // word.size), bits, "weight")
        codebook = StoredArray(mx.float16, (*rows, 2**bits), bits, "codebook")
        return {"weight": weight, "codebook": codebook} | Outliers.stored_arrays(shape, bits)
