"""How far a right product may be from the expected one: what a kernel is compared with, and by which bound.

A product y = W x adds n terms in float32. A kernel may add them in any order, add scale * code and bias apart, and
round activations to steps. Let u = 2^-24 be the unit roundoff of float32, and let i be an input, g its group:

    d_ij  the largest terms of row j for input i: |scale| * largest code + |bias|, or |w_ij| of a dense weight
    c_ij  the largest weight that the codes of group g can stand for, at most d_ij
    t_g   the step of activations, 2^(1-b) of the largest one in its group, for b bits; 0 where none are rounded

Activations of a comparison (`trial_activations`) have one sign over each run of r = 128 inputs, so that a wrong scale
shows in every group, and signs at random from run to run. Partial sums then stay within a few times
R_j = sqrt(r sum_i (x_i d_ij)^2), and each of n additions changes them by u in relation: sqrt(n) u R_j in all, since
rounding errors are independent (Higham and Mary, 2019). A rounded activation is off by t_g / sqrt(12), in the root mean
square. The spread of a row is therefore

    s_j^2 = n u^2 R_j^2  +  sum_i t_g^2 / 12 c_ij^2  +  (u bias_j)^2

and a right product is within `LEEWAY` spreads of the expected one, and the rounding of results to their type. The bound
holds row by row: a matrix with large rows and small ones has large errors in the large ones alone. Activations are
numbers of bfloat16, which kernels that round to that type do not change.
"""

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .bit_planes import Planes, plane_shifts, planes_matmul

# Steps of activations alone move a right kernel by up to 2 spreads in the largest of some thousand rows.
LEEWAY = 4.0
RUN = 128  # inputs with one sign; of the largest group
WEIGHTS_AT_ONCE = 2**22  # weights as they are that become float64 at a time
UNIT = float(mx.finfo(mx.float32).eps) / 2


class Expected(NamedTuple):
    """A product (V, O) float32 as it should be, and the spread of right ones around it."""

    product: mx.array
    spread: mx.array

    def allowed(self, dtype: mx.Dtype) -> mx.array:
        """Return how far right results of a type are from this product, at most."""
        return LEEWAY * self.spread + float(mx.finfo(dtype).eps) * mx.abs(self.product)


def trial_activations(vectors: int, columns: int, dtype: mx.Dtype) -> mx.array:
    """Return activations (vectors, columns) of sizes from 0.5 to 1, which bfloat16 can represent.

    Each of them counts, so that no column can be left out unseen.
    """
    sizes = mx.random.uniform(0.5, 1.0, (vectors, columns), key=mx.random.key(1))
    signs = mx.random.bernoulli(0.5, (vectors, -(-columns // RUN)), key=mx.random.key(2))
    return mx.where(mx.repeat(signs, RUN, -1)[:, :columns], sizes, -sizes).astype(mx.bfloat16).astype(dtype)


def tolerance(dtype: mx.Dtype, columns: int) -> float:
    """Return the difference of two right products on a GPU, at most, in root mean squares of one.

    Args:
        dtype: to which the activations and the result are rounded; sums of this many columns are float32.
    """
    # So many roundings of a number as large as the root mean square a right product may differ by.
    return 8 * float(mx.finfo(dtype).eps + math.sqrt(columns) * mx.finfo(mx.float32).eps)


def expected_of_planes(x: mx.array, planes: Planes, bias: mx.array | None, x_bits: int) -> Expected:
    """Return what x (V, I) gives with a stack of planes, by MLX's own kernel in float32.

    Args:
        bias: of the layer (O,), or None. x_bits: to which kernels round activations; 0: they do not.
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
    """Return what x (V, I) gives with a weight (O, I) as it is, in float64: MLX's own sums are less exact than ours."""
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
    """Return what is expected of a product with a bias.

    Args:
        squares: sum_i (x_i d_ij)^2. of_steps: the second part of s^2.
    """
    wide = mx.zeros(()) if bias is None else bias.astype(mx.float32)
    of_sums = columns * RUN * squares + mx.square(wide)
    return Expected(product + wide, mx.sqrt(UNIT**2 * of_sums + of_steps))
