"""Codes of a low gear chosen by what they do to a layer's outputs, and not one by one: GPTQ (arXiv 2210.17323).

The inputs that a layer saw are summed up in its Hessian X^T X. Columns are rounded one after the other, and the columns
that follow take back what each rounding did to the outputs. Scales and biases stay those of the nearest codes. Format
`exact` can take back only what lies near to a weight, so there a code that is too far away is the nearest one instead.
"""

from operator import itemgetter

import mlx.core as mx
import numpy as np

from ..formats.base import Window
from ..kernels.bit_planes import Planes, pack_mlx_codes, unpack_mlx_codes

DAMPING = 0.01  # of the mean of the Hessian's diagonal, which is added to it
DAMPINGS = (DAMPING, 10 * DAMPING, 100 * DAMPING)  # tried in turn: a few tokens leave a Hessian singular
ROWS = 8192  # rounded at a time: the temporary memory is some times their size


class Hessian:
    """X^T X of all inputs that a layer saw, (I, I) float32. It may have NaN or infinities, which the inputs had."""

    def __init__(self, width: int):
        self.sum = np.zeros((width, width), np.float32)
        self.tokens = 0

    def add(self, inputs: np.ndarray) -> None:
        """inputs: (tokens, I) float32."""
        self.sum += inputs.T @ inputs
        self.tokens += len(inputs)

    def factor(self) -> np.ndarray | None:
        """The upper Cholesky factor of the damped inverse, (I, I) float32; None where the inputs say nothing."""
        diagonal = np.diag(self.sum).astype(np.float64)
        mean = diagonal.mean()
        if not np.isfinite(self.sum).all() or mean <= 0:
            return None
        for damping in DAMPINGS:
            damped = self.sum.astype(np.float64)
            damped[np.diag_indices_from(damped)] += damping * mean + (diagonal == 0) * mean
            try:
                factor = np.linalg.cholesky(np.linalg.inv(damped)).T
            except np.linalg.LinAlgError:
                continue
            if np.isfinite(factor).all():
                return factor.astype(np.float32)
        return None


def calibrated(weight: np.ndarray, nearest: Planes, factor: np.ndarray, window: Window | None) -> Planes:
    """A matrix of codes for these inputs, with the scales and biases of the nearest codes.

    Args:
        weight: (O, I) float32.
        nearest: its single plane of codes, with floating scales.
        factor: of the layer's Hessian.
        window: which codes may be used; None: all.
    """
    rows = len(weight)
    parts = []
    for first in range(0, rows, ROWS):
        part = nearest.each(itemgetter(slice(first, first + ROWS)))
        parts.append(pack_mlx_codes(codes_of(weight[first : first + ROWS], part, factor, window), part.widths[0]))
        mx.eval(parts[-1])
    return nearest._replace(weights=[parts[0] if len(parts) == 1 else mx.concatenate(parts)])


def codes_of(weight: np.ndarray, nearest: Planes, factor: np.ndarray, window: Window | None) -> mx.array:
    """`calibrated` for rows that are not too many: their codes (O, I)."""
    (bits,), group = nearest.widths, nearest.group_size
    # Columns first, so that each is one stretch of memory.
    original = np.ascontiguousarray(weight.T)
    left = original.copy()
    near = columns(unpack_mlx_codes(nearest.weights[0], bits))
    scales, biases = columns(nearest.scales), columns(nearest.biases[0])
    codes = np.empty(left.shape, np.uint8)
    for index, start in enumerate(range(0, len(left), group)):
        end = start + group
        scale, bias = scales[index], biases[index]
        block, errors = left[start:end].copy(), np.empty((group, left.shape[1]), np.float32)
        for place, column in enumerate(range(start, end)):
            code = np.clip(np.rint((block[place] - bias) / scale), 0, 2**bits - 1)
            if window is not None:
                code = within(window, original[column], code, near[column], scale, bias)
            codes[column] = code
            error = (block[place] - (code * scale + bias)) / factor[column, column]
            block[place + 1 :] -= factor[column, column + 1 : end, None] * error
            errors[place] = error
        left[end:] -= factor[start:end, end:].T @ errors
    return mx.array(np.ascontiguousarray(codes.T))


def columns(array: mx.array) -> np.ndarray:
    """(O, K) as (K, O) float32."""
    return np.ascontiguousarray(np.array(array.astype(mx.float32)).T)


def within(
    window: Window, weight: np.ndarray, code: np.ndarray, nearest: np.ndarray, scale: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    """The code, or the nearest one where that can be used and this cannot, or costs more bytes than that; (O,)."""
    usable, dear = window(weight, code * scale + bias, scale)
    if usable.all() and not dear.any():
        return code
    _, nearest_is_dear = window(weight, nearest * scale + bias, scale)
    return np.where(~usable | (dear & ~nearest_is_dear), nearest, code)
