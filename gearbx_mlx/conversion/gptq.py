"""GPTQ: codes of a matrix that are chosen for its inputs (arXiv 2210.17323), with scales fitted to the codes.

The Hessian X^T X sums up a layer's inputs X, and an error E of the weights costs E X^T X E^T. In a draft, previous
layers have their codes too, so its inputs X drift away from the original's, Y. Weights W + a W (Y - X)^T X (X^T X)^-1
compensate a part a of the effect on its outputs (GPTAQ, arXiv 2504.02692, with a = 1). The codes approximate these
weights.

1. Scales: the range of each group whose RTN codes cost the least by the Hessian's diagonal (`best_ranges`).
2. Codes: columns are rounded in sequence, those with the largest inputs first. Later columns compensate the
   effect of each rounding on the outputs (`gptq_codes`).
3. Scales again: the least squares for these codes, by the whole Hessian (`refitted`).

Format `exact` can restore only weights near the value of their code (its `Window`). Too distant codes are replaced by
RTN codes, and a group whose weights could not be restored keeps its previous scale.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..formats.base import Window
from ..kernels.bit_planes import Planes, pack_mlx_codes

DAMPING = 0.01  # share of the mean of the Hessian's diagonal, added to the diagonal
DRIFT_SHARE = 0.5  # part a of the drift of outputs: a = 1 overfits the calibration text
BLOCK_COLUMNS = 64  # columns whose errors are compensated together
MAX_INVERTED = 128  # columns of a triangular matrix that NumPy inverts as a general one
MAX_NUMBERS = 2**24  # numbers in the largest array for rows that are fitted together


class Factored(NamedTuple):
    """The Hessian of a layer's inputs X, factored.

    damped: (I, I) float32. order: of its columns (I,), those with the largest inputs first. upper: the upper Cholesky
    factor U of its inverse U^T U in this order, (I, I) float32. inputs: X, (n, I) float32. drift: Y - X, of the same
    shape, where Y are the original's inputs; None: unknown.
    """

    damped: np.ndarray
    order: np.ndarray
    upper: np.ndarray
    inputs: np.ndarray
    drift: np.ndarray | None

    def corrected(self, weight: np.ndarray) -> np.ndarray:
        """Return a weight (O, I) that compensates a part of the drift."""
        if self.drift is None:
            return weight
        found, moved = weight.copy(), np.linalg.multi_dot([weight, self.drift.T, self.inputs])
        found[:, self.order] += DRIFT_SHARE * np.linalg.multi_dot([moved[:, self.order], self.upper.T, self.upper])
        return found


def factored(inputs: np.ndarray, drift: np.ndarray | None = None) -> Factored | None:
    """Factor the Hessian of inputs (n, I) float32; None for inputs that are not finite, or all 0."""
    with np.errstate(invalid="ignore"):
        hessian = (inputs.T @ inputs).astype(np.float64)
    diagonal = np.diag(hessian).copy()
    mean = diagonal.mean()
    if not np.isfinite(hessian).all() or mean <= 0:
        return None
    order = np.argsort(-diagonal, kind="stable")
    backwards = np.ix_(order[::-1], order[::-1])
    for damping in (DAMPING, 10 * DAMPING, 100 * DAMPING):  # a few tokens leave a Hessian singular
        np.fill_diagonal(hessian, diagonal + damping * mean + (diagonal == 0) * mean)
        try:
            # In reverse order H is L L^T, so H^-1 is L^-T L^-1; restoring the order makes L^-1 upper triangular.
            upper = inverse_of_lower(np.linalg.cholesky(hessian[backwards]))[::-1, ::-1]
        except np.linalg.LinAlgError:
            continue
        if np.isfinite(upper).all():
            return Factored(hessian.astype(np.float32), order, upper.astype(np.float32), inputs, drift)
    return None


def inverse_of_lower(matrix: np.ndarray) -> np.ndarray:
    """Return the inverse of a lower triangular matrix (I, I), by halves: three times as fast as a general inverse."""
    if len(matrix) <= MAX_INVERTED:
        return np.tril(np.linalg.inv(matrix))
    half = len(matrix) // 2
    first, last = inverse_of_lower(matrix[:half, :half]), inverse_of_lower(matrix[half:, half:])
    found = np.zeros_like(matrix)
    found[:half, :half], found[half:, half:] = first, last
    found[half:, :half] = -last @ (matrix[half:, :half] @ first)
    return found


class Grid(NamedTuple):
    """The values that codes of a matrix can have. Columns come first, so that each one is contiguous.

    scales, biases: (G, O) float32, rounded. bits: of a code. rounded: function that rounds numbers to their stored
    type.
    """

    scales: np.ndarray
    biases: np.ndarray
    bits: int
    rounded: Callable[[np.ndarray], np.ndarray]

    def nearest(self, weight: np.ndarray) -> np.ndarray:
        """Return RTN codes (G, g, O) of a weight of that shape."""
        scale, bias = self.scales[:, None], self.biases[:, None]
        return np.clip(np.rint((weight - bias) / scale), 0, 2**self.bits - 1)

    def values(self, codes: np.ndarray) -> np.ndarray:
        """Return the values of codes (G, g, O)."""
        return codes * self.scales[:, None] + self.biases[:, None]

    def where(self, better: np.ndarray, other: "Grid") -> "Grid":
        """Return a grid with `other`'s scales in the `better` groups (G, O)."""
        scales, biases = (np.where(better, new, own) for new, own in zip(other[:2], self[:2]))
        return self._replace(scales=scales, biases=biases)


def with_codes(weight: np.ndarray, nearest: Planes, hessian: Factored, window: Window | None) -> Planes:
    """Return a matrix (O, I) float32 in codes for these inputs.

    nearest: the plane of its RTN codes, with floating scales. window: the usable codes; None: all.
    """
    groups = nearest.scales.shape[-1]
    step = max(1, min(MAX_NUMBERS // (2 * groups) ** 2, MAX_NUMBERS // weight.shape[1]))
    wanted, parts = hessian.corrected(weight), []
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        parts.append(rows_with_codes(weight[rows], wanted[rows], nearest.each(itemgetter(rows)), hessian, window))
        mx.eval(parts[-1].arrays)
    words, scales, biases = (mx.concatenate([*arrays]) for arrays in zip(*(part.arrays for part in parts)))
    return nearest._replace(weights=[words], scales=scales, biases=[biases])


def rows_with_codes(
    weight: np.ndarray, wanted: np.ndarray, nearest: Planes, hessian: Factored, window: Window | None
) -> Planes:
    """Compute `with_codes` for rows that are few enough. wanted: weights (O, I) that the codes approximate."""
    (bits,), dtype = nearest.widths, nearest.scales.dtype

    def rounded(numbers: np.ndarray) -> np.ndarray:
        return np.array(mx.array(numbers).astype(dtype).astype(mx.float32))

    grid = Grid(by_columns(nearest.scales), by_columns(nearest.biases[0]), bits, rounded)
    grouped, wanted = (
        np.ascontiguousarray(array.T).reshape(len(grid.scales), nearest.group_size, -1) for array in (weight, wanted)
    )
    grid = best_ranges(grouped, grid, hessian, window)
    codes = gptq_codes(grouped, wanted, grid, hessian, window)
    grid = refitted(grouped, wanted, codes, grid, hessian, window)
    words = pack_mlx_codes(mx.array(np.ascontiguousarray(codes.reshape(-1, len(weight)).T, np.uint8)), bits)
    scales, biases = (mx.array(np.ascontiguousarray(array.T)).astype(dtype) for array in grid[:2])
    return nearest._replace(weights=[words], scales=scales, biases=[biases])


def by_columns(array: mx.array) -> np.ndarray:
    """Return an array (O, K) as (K, O) float32."""
    return np.ascontiguousarray(np.array(array.astype(mx.float32)).T)


def best_ranges(weight: np.ndarray, grid: Grid, hessian: Factored, window: Window | None) -> Grid:
    """Return a grid over the part of each group's range that costs the least, for a weight (G, g, O)."""
    cost = np.diag(hessian.damped).reshape(*weight.shape[:2], 1)
    low, high = weight.min(1), weight.max(1)

    def error(grid: Grid) -> np.ndarray:
        values = grid.values(grid.nearest(weight))
        return ((weight - values) ** 2 * cost).sum(1) + window_penalty(weight, values, grid, window)

    least = error(grid)
    for part in (1.0, 0.95, 0.9, 0.85, 0.8):  # parts of a group's range that its codes may span
        scales = grid.rounded(np.maximum(part * (high - low) / (2**grid.bits - 1), 1e-7))  # as mx.quantize
        other = grid._replace(scales=scales, biases=grid.rounded(part * low))
        found = error(other)
        grid, least = grid.where(found < least, other), np.minimum(found, least)
    return grid


def window_penalty(weight: np.ndarray, values: np.ndarray, grid: Grid, window: Window | None) -> np.ndarray | float:
    """Return infinity for the groups (G, O) with a weight that could not be restored, and 0 for the others."""
    if window is None:
        return 0.0
    usable, _ = window(weight, values, grid.scales[:, None])
    return np.where(usable.all(1), 0.0, np.inf)


def gptq_codes(
    weight: np.ndarray, wanted: np.ndarray, grid: Grid, hessian: Factored, window: Window | None
) -> np.ndarray:
    """Return GPTQ's codes (G, g, O). weight: of that shape. wanted: weights that the codes approximate."""
    groups, size, rows = weight.shape
    original, near = weight.reshape(-1, rows), grid.nearest(weight).reshape(-1, rows)
    left, codes = wanted.reshape(-1, rows)[hessian.order], np.empty_like(original)
    for start in range(0, len(left), BLOCK_COLUMNS):
        end = start + BLOCK_COLUMNS
        block, errors = left[start:end].copy(), np.empty_like(left[start:end])
        for place, column in enumerate(hessian.order[start:end]):
            scale, bias = grid.scales[column // size], grid.biases[column // size]
            code = np.clip(np.rint((block[place] - bias) / scale), 0, 2**grid.bits - 1)
            if window is not None:
                code = usable_code(window, original[column], code, near[column], scale, bias)
            codes[column] = code
            upper = hessian.upper[start + place]
            errors[place] = (block[place] - (code * scale + bias)) / upper[start + place]
            block[place + 1 :] -= upper[start + place + 1 : end, None] * errors[place]
        left[end:] -= hessian.upper[start:end, end:].T @ errors
    return codes.reshape(groups, size, rows)


def usable_code(
    window: Window, weight: np.ndarray, code: np.ndarray, nearest: np.ndarray, scale: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    """Return the codes (O,), with RTN codes where only those are usable, or take fewer bytes."""
    usable, dear = window(weight, code * scale + bias, scale)
    if usable.all() and not dear.any():
        return code
    _, nearest_is_dear = window(weight, nearest * scale + bias, scale)
    return np.where(~usable | (dear & ~nearest_is_dear), nearest, code)


def refitted(
    weight: np.ndarray, wanted: np.ndarray, codes: np.ndarray, grid: Grid, hessian: Factored, window: Window | None
) -> Grid:
    """Return the scales and biases that minimize the cost of these codes, in groups that can still be restored.

    A row's error is linear in its scales (times the group's codes) and its biases: the normal equations of 2 G
    unknowns. Centering the codes decorrelates scales and biases.

    Args:
        weight, codes: (G, g, O). wanted: weights that the codes approximate, of the same shape.
    """
    groups, size, rows = weight.shape
    middle = (2**grid.bits - 1) / 2
    centered = codes - np.float32(middle)
    pull = (hessian.damped @ (wanted - grid.values(codes)).reshape(-1, rows)).reshape(weight.shape)
    sides = np.concatenate([(centered * pull).sum(1), pull.sum(1)]).T
    normal = np.empty((rows, 2 * groups, 2 * groups), np.float32)
    normal[:, groups:, groups:] = hessian.damped.reshape(groups, size, groups, size).sum((1, 3))
    for group in range(groups):
        of_group = hessian.damped[:, group * size : (group + 1) * size] @ centered[group]
        of_group = of_group.reshape(weight.shape)
        normal[:, :groups, group] = (centered * of_group).sum(1).T
        normal[:, groups:, group] = normal[:, group, groups:] = of_group.sum(1).T
    diagonal = np.einsum("oii->oi", normal)
    diagonal *= 1 + 1e-3  # otherwise the least squares may have no solution
    diagonal += np.finfo(np.float32).tiny
    steps = np.linalg.solve(normal.astype(np.float64), sides[..., None].astype(np.float64))[..., 0].T
    scales = grid.rounded((grid.scales + steps[:groups]).astype(np.float32))
    at_middle = grid.biases + middle * grid.scales + steps[groups:]
    other = grid._replace(scales=scales, biases=grid.rounded((at_middle - middle * scales).astype(np.float32)))
    sound = np.isfinite(other.scales) & np.isfinite(other.biases)
    return grid.where(sound & (window_penalty(weight, other.values(codes), other, window) == 0), other)
