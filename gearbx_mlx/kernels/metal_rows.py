"""Metal launches for dense products and rotary positions: a row has the same bits whichever others are in the call.

MLX's own kernels for these change with the number of rows (metal/README.md). Attention is in `metal_attention.py`.
"""

import functools
import math

import mlx.core as mx

from ..errors import GearbxError
from . import metal
from .metal import DTYPES, LANES, MAX_VECTORS, Launch, Prepared, options, places_of_few, takes
from .metal_text import TextKernel

MOST_EXPERTS = 16  # of a token
CHUNK = 8  # columns of a dense weight that a lane reads at a time
SIMD_GROUPS = 2  # of a dense product's threadgroup
ROPE_THREADS = 64


def takes_dense(x: mx.array, weight: mx.array) -> bool:
    """Whether `dense_launch` takes activations (..., I) and a weight (O, I): their number and types."""
    return takes(x, x.shape[-1]) and weight.dtype in DTYPES


def dense_launch(x: mx.array, weight: mx.array) -> Launch:
    """The launch for x W^T, with sums in float32 and one rounding, to the type of x; the product is (..., O).

    Args:
        x: (..., I) float16, bfloat16 or float32; 1 to 16 vectors, for which the weight is read once.
        weight: (O, I), of any of these types.

    Raises:
        GearbxError: the arguments do not fit each other.
    """
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise GearbxError(f"activations of shape {x.shape} do not fit a weight of shape {weight.shape}")
    if not takes_dense(x, weight):
        raise GearbxError(
            f"activations {x.shape} {x.dtype} and a weight of {weight.dtype} are not 1 to {MAX_VECTORS} vectors of "
            "float16, bfloat16 or float32"
        )
    inputs = x, weight
    return Launch(_dense_prepared(x.shape, x.dtype, weight.shape[0], places_of_few(inputs)), inputs)


@functools.cache
def _dense_prepared(shape: tuple[int, ...], dtype: mx.Dtype, rows: int, few: tuple[int, ...]) -> Prepared:
    """For activations of this shape and type."""
    columns = shape[-1]
    vectors = math.prod(shape[:-1])
    rows_each = 4 if vectors <= MAX_VECTORS // 2 else 2  # of a SIMD group: as many as its registers hold
    macros = {
        "VECTORS": vectors,
        "ROWS": rows_each,
        "SIMD_GROUPS": SIMD_GROUPS,
        "CHUNK": CHUNK,
        "RAGGED": int(columns % CHUNK != 0),
    }
    kernel = TextKernel("dense", dtype, ("x", "weight", "sizes"), tuple(macros.items()), read_once=("weight",))
    threadgroup = SIMD_GROUPS * LANES
    threadgroups = math.ceil(rows / (SIMD_GROUPS * rows_each))
    how = options(threadgroups * threadgroup, threadgroup, (*shape[:-1], rows), dtype)
    return Prepared(kernel, how, (mx.array([rows, columns], mx.int32),), few)


def uses_order(indices: mx.array, sorted_indices: bool) -> bool:
    """Whether MLX is to use that experts' indices ascend: on Metal, it then multiplies several vectors at a time.

    For the tokens of one verification it is not: each vector is multiplied by itself, as that of a single token is.
    """
    return sorted_indices and not (metal.available() and indices.size <= MAX_VECTORS * MOST_EXPERTS)


def takes_rope(x: mx.array) -> bool:
    """Whether `rope_launch` takes x (B, H, L, D): 1 to 16 tokens, and their type."""
    return x.ndim == 4 and x.size > 0 and x.shape[2] <= MAX_VECTORS and x.dtype in DTYPES


def rope_launch(x: mx.array, frequencies: mx.array, offset: int, traditional: bool, scale: float) -> Launch:
    """The launch for rotary positions from `offset` on, of x's type and shape.

    Args:
        x: (B, H, L, D) float16, bfloat16 or float32, L of 1 to 16; by its strides, so that it is not copied.
        frequencies: (dims / 2,) float32, radians from position to position; the first `dims` of D are turned.
        traditional: whether neighbours are a pair; else the first and second half of `dims` are.
        scale: of positions.

    Raises:
        GearbxError: the arguments do not fit each other.
    """
    dims = 2 * frequencies.size
    if not takes_rope(x) or frequencies.dtype != mx.float32 or not 0 < dims <= x.shape[3]:
        raise GearbxError(f"rotary positions of {dims} values do not fit heads of shape {x.shape} {x.dtype}")
    return Launch(_rope_prepared(x.shape, x.dtype, dims, traditional, float(scale)), (x, frequencies, offset))


@functools.cache
def _rope_prepared(shape: tuple[int, ...], dtype: mx.Dtype, dims: int, traditional: bool, scale: float) -> Prepared:
    """For x of this shape and type."""
    macros = {"DIMS": dims, "TRADITIONAL": int(traditional)}
    names = ("x", "frequencies", "offset", "scale")
    kernel = TextKernel("rope", dtype, names, tuple(macros.items()), strided=True, read_once=("x",))
    threads = math.prod(shape[:3]) * (shape[3] - dims // 2)
    return Prepared(kernel, options(threads, min(threads, ROPE_THREADS), shape, dtype), (mx.array(scale),))
