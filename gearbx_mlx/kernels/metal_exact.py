"""Metal launches for `exact`: bit-identical bf16 weights from the low gear's codes and additional bits.

Up to 16 vectors are multiplied by the packed form. For more, as in prefill, tiles of rows are decoded, and MLX
multiplies (`exact.product_by_tiles`). Scales and biases are the bits of bf16 numbers, so that no cast of a model's
type changes them.
"""

import functools
import math

import mlx.core as mx

from ..errors import GearbxError
from . import GROUP_SIZES
from .exact import CODE_BITS, ExactMatrix
from .metal import Launch, Spec, Variant, WeightLayout, check_arrays, launch
from .metal_products import check_product

MAX_HIGH_BYTES = 2**31 - 1  # bytes of `high`; kernels take 32-bit numbers
# Two rows of a SIMD group share activations and a sum over the lanes; four would take twice the registers.
PRODUCT, DECODER = Variant("registers", 2, 2), Variant("registers", 2, 1)


@functools.cache
def exact_layout(group_size: int) -> WeightLayout:
    """Return the layout of exact weights."""
    return WeightLayout(
        name=f"exact_g{group_size}",
        bits=CODE_BITS + 8,
        arrays=("codes", "scales", "biases", "low", "high", "offsets"),
        codes=8,  # a word
        macros=(("SIGN_BITS", 0), ("GROUP_SIZE", group_size), ("CODE_BITS", CODE_BITS)),
        text="exact",
        libraries=("codes", "loads", "exact_weights"),
    )


def exact_launch(x: mx.array, matrix: ExactMatrix, bias: mx.array | None = None) -> Launch:
    """Return the launch for x @ W^T + bias, (..., O), over exact weights, each decoded once for all vectors.

    The launch is batch-invariant.

    Args:
        x: (..., I) float16, bfloat16 or float32; 1 to 16 vectors.
        matrix: (O, I), in groups of 32, 64 or 128. `high` has 1 byte or more; a weight without its byte is NaN.
        bias: (O,), or None.

    Raises:
        GearbxError: the arguments do not fit each other.
    """
    layout = _checked_layout(matrix)
    if matrix.scales.ndim != 2 or matrix.scales.size == 0:
        raise GearbxError(f"scales: must belong to one matrix, got shape {matrix.scales.shape}")
    rows, columns = matrix.shape
    check_product(x, rows, columns, bias)
    spec = Spec(layout, x.size // columns, PRODUCT, bias is not None, x.dtype)
    inputs = [x, *matrix.arrays, *([] if bias is None else [bias])]
    return launch(spec, inputs, [rows, columns, matrix.high.size, rows], (*x.shape[:-1], rows))


def decode_launch(matrix: ExactMatrix, chosen: mx.array | None = None) -> Launch:
    """Return the launch that decodes rows of exact weights to bfloat16, bit for bit.

    Args:
        matrix: (..., O, I), as for `exact_launch`, or stacked experts.
        chosen: (n,) indices of rows over all experts, for a result (n, I); None for all rows, (..., O, I). An index
            beyond the last row selects the last one.

    Raises:
        GearbxError: the arguments do not fit each other.
    """
    layout = _checked_layout(matrix)
    *leading, columns = matrix.shape
    total = math.prod(leading)
    rows = mx.arange(total) if chosen is None else chosen
    shape = matrix.shape if chosen is None else (rows.size, columns)
    spec = Spec(layout, 0, DECODER, False, mx.bfloat16)
    inputs = [*matrix.arrays, rows.astype(mx.uint32)]
    return launch(spec, inputs, [rows.size, columns, matrix.high.size, total], shape)


def _checked_layout(matrix: ExactMatrix) -> WeightLayout:
    """Return the layout of a matrix. Raises GearbxError for a wrong shape or type, or one without a kernel."""
    scales, high = matrix.scales, matrix.high
    if matrix.group_size not in GROUP_SIZES:
        raise GearbxError(f"group size: must be 32, 64 or 128, got {matrix.group_size}")
    if scales.ndim < 2:
        raise GearbxError(f"scales: must have rows, got shape {scales.shape}")
    *leading, columns = matrix.shape
    wanted: list[tuple[mx.Dtype, tuple[int, ...]]] = [
        (mx.uint32, (*leading, columns * CODE_BITS // 32)),
        (mx.uint16, scales.shape),
        (mx.uint16, scales.shape),
        (mx.uint8, (*leading, columns)),
        (mx.uint8, (high.size,)),
        (mx.uint32, (math.prod(leading) + 1,)),
    ]
    layout = exact_layout(matrix.group_size)
    names = (f"{name} of exact weights" for name in layout.arrays)
    check_arrays(*((name, array, *each) for name, array, each in zip(names, matrix.arrays, wanted)))
    if not 0 < high.size <= MAX_HIGH_BYTES:
        raise GearbxError(f"high of exact weights: must have 1 to {MAX_HIGH_BYTES} bytes, got {high.size}")
    return layout
