"""The reference and error bound of matmul kernels.

A matmul y = W x adds n terms in float32. A kernel may add them in any order, add scale * code and bias separately, and
quantize activations. Let u = 2^-24 be the unit roundoff of float32, and let i be an input, g its group:

    d_ij  the largest terms of row j for input i: |scale| * largest code + |bias|, or |w_ij| of a dense weight
    c_ij  the largest absolute weight that a code of group g can have, at most d_ij
    t_g   the scale of activations, 2^(1-b) of the largest one in its group, for b bits; 0 if they are not quantized

Activations of a comparison (`trial_activations`) have one sign over each run of r = 128 inputs, so that a wrong scale
shows in every group, and random signs from run to run. Partial sums then stay within a few times
R_j = sqrt(r sum_i (x_i d_ij)^2), and each of n additions has a relative error of u: sqrt(n) u R_j in all, since
rounding errors are independent (Higham and Mary, 2019). A quantized activation has a root-mean-square error of
t_g / sqrt(12). The spread of a row is therefore

    s_j^2 = n u^2 R_j^2  +  sum_i t_g^2 / 12 c_ij^2  +  (u bias_j)^2

A correct result is within `LEEWAY` spreads of the reference, plus the rounding of results to their type. The bound
applies to each row: in a matrix with large and small rows, only large rows have large errors. Activations are bfloat16
numbers, so that kernels that round to bfloat16 do not change them.
"""

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .bit_planes import Planes, plane_shifts, planes_matmul

# Quantized activations move a correct result by up to 2 spreads in the largest of some thousand rows.
LEEWAY = 4.0
RUN = 128  # inputs with one sign, the size of the largest group
WEIGHTS_AT_ONCE = 2**22  # original weights that become float64 at a time
UNIT = float(mx.finfo(mx.float32).eps) / 2


class Expected(NamedTuple):
    """A reference result (V, O) float32, and the spread of correct results around it."""

    product: mx.array
    spread: mx.array

    def allowed(self, dtype: mx.Dtype) -> mx.array:
        """Return the maximum difference of correct results of a type from this reference."""
        return LEEWAY * self.spread + float(mx.finfo(dtype).eps) * mx.abs(self.product)


def trial_activations(vectors: int, columns: int, dtype: mx.Dtype) -> mx.array:
    """Return activations (vectors, columns) with absolute values from 0.5 to 1, exact in bfloat16.

    None is small, so that an omitted column is noticed.
    """
    sizes = mx.random.uniform(0.5, 1.0, (vectors, columns), key=mx.random.key(1))
    signs = mx.random.bernoulli(0.5, (vectors, -(-columns // RUN)), key=mx.random.key(2))
    return mx.where(mx.repeat(signs, RUN, -1)[:, :columns], sizes, -sizes).astype(mx.bfloat16).astype(dtype)


def tolerance(dtype: mx.Dtype, columns: int) -> float:
    """Return the maximum difference of two correct results on a GPU, relative to the root mean square of one.

    Args:
        dtype: of activations and result. columns: number of terms of each float32 sum.
    """
    # The result may differ by 8 roundings of a number as large as the root mean square.
    return 8 * float(mx.finfo(dtype).eps + math.sqrt(columns) * mx.finfo(mx.float32).eps)


def expected_of_planes(x: mx.array, planes: Planes, bias: mx.array | None, x_bits: int) -> Expected:
    """Return the reference for x (V, I) and a stack of planes, by MLX's kernel in float32.

    Args:
        bias: of the layer (O,), or None. x_bits: bits to which kernels quantize activations; 0: not quantized.
    """
    x, planes = x.astype(mx.float32), planes.by_row().with_biases(mx.float32)
    scales, *biases = (array.astype(mx.float32) for array in (planes.scales, *planes.biases))
    shifts = plane_shifts(planes.widths)
    largest_code = sum((2**width - 1) * 2.0**-shift for width, shift in zip(planes.widths, shifts))
    lowest = sum((each * 2.0**-shift for each, shift in zip(biases, shifts)), mx.zeros_like(scales))
    weights = mx.maximum(mx.abs(lowest), mx.abs(lowest + scales * largest_code))
    offsets = sum((mx.abs(each) * 2.0**-shift for each, shift in zip(biases, shifts)), mx.zeros_like(scales))
    terms = offsets + mx.abs(scales) * largest_code
    grouped = x.reshape(len(x), -1, planes.group_size)
    steps = mx.abs(grouped).max(-1) * (2.0 ** (1 - x_bits) if x_bits else 0.0)
    of_steps = planes.group_size * mx.square(steps) / 12 @ mx.square(weights).T
    squares = mx.square(grouped).sum(-1) @ mx.square(terms).T
    return expected(planes_matmul(x, planes), squares, of_steps, x.shape[-1], bias)


def expected_of_dense(x: mx.array, weight: mx.array, bias: mx.array | None) -> Expected:
    """Return the reference for x (V, I) and a dense weight (O, I), in float64: more exact than MLX's sums."""
    wide = np.array(x.astype(mx.float32)).astype(np.float64)
    height = max(1, WEIGHTS_AT_ONCE // weight.shape[-1])
    products, squares = [], []
    for first in range(0, len(weight), height):
        strip = np.array(weight[first : first + height].astype(mx.float32)).astype(np.float64)
        products.append(wide @ strip.T)
        squares.append(wide**2 @ (strip**2).T)
    product, found = (mx.array(np.concatenate(parts, -1).astype(np.float32)) for parts in (products, squares))
    return expected(product, found, mx.zeros(()), x.shape[-1], bias)


def expected(product: mx.array, squares: mx.array, of_steps: mx.array, columns: int, bias: mx.array | None) -> Expected:
    """Return the reference with a bias, and its spread.

    Args:
        squares: sum_i (x_i d_ij)^2. of_steps: the second term of s^2.
    """
    wide = mx.zeros(()) if bias is None else bias.astype(mx.float32)
    of_sums = columns * RUN * squares + mx.square(wide)
    return Expected(product + wide, mx.sqrt(UNIT**2 * of_sums + of_steps))
