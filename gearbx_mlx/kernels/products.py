"""Matmuls of linear layers and mixtures of experts, by the kernels that dispatch.py chose.

For experts, `indices` has an expert for each vector (..., 1, I), and a weight has a leading dimension E.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple

import mlx.core as mx

from . import cpu, metal, proven
from .bit_planes import Planes, planes_dense, planes_gather_matmul, planes_matmul
from .dispatch import MLX, NATIVE, RECONSTRUCT, STOCK, ChosenKernels, cpu_kernels, is_metal, on_cpu
from .exact import ExactMatrix, decode, decoded_by_tiles, product_by_tiles
from .metal_exact import decode_launch, exact_launch
from .metal_products import (
    codebook_inputs,
    codebook_launch,
    dense_launch,
    planes_launch,
    symmetric_launch,
    takes_dense,
    takes_experts,
)

MAX_EXPERTS = 16  # per token
MAX_PAIRS = metal.MAX_VECTORS * MAX_EXPERTS  # pairs of a vector and an expert in a Metal launch
METAL_TILE = 2**22  # weights of format exact that Metal decodes at a time


class SymmetricCodes(NamedTuple):
    """A weight (O, I) of format `rowwise` or `groupwise`.

    weight: packed codes. scales: per row (O,), or per group (O, G). bits: of a code. width: I.
    """

    weight: mx.array
    scales: mx.array
    bits: int
    width: int


def stack_product(
    x: mx.array, planes: Planes, bias: mx.array | None = None, x_bits: int = 0, chosen: ChosenKernels | None = None
) -> mx.array:
    """Return x (..., I) @ W^T + bias over a stack of bit planes, (..., O) of x's type, accumulated in float32.

    Args:
        bias: (O,) or None.
        x_bits: bits to which CPU kernels quantize activations, 8 or 16, for integer matmuls; 0: not quantized.
        chosen: as for `kernel_for`.
    """
    kernel, y = on_metal(x, planes.arrays, bias, chosen, partial(planes_launch, x, planes, bias))
    if y is not None:
        return y
    if kernel in STOCK:  # native kernels do not round the bias of a gear with omitted bits
        planes = planes.by_row().with_biases(mx.float32)
    if kernel == MLX:
        return add_bias(planes_matmul(x, planes).astype(x.dtype), bias)  # scales may be wider
    if kernel == RECONSTRUCT:
        return add_bias(x @ planes_dense(planes).astype(x.dtype).T, bias)
    return add_bias(native_kernels().stack_matvec(x, *planes, x_bits).astype(x.dtype), bias)


def symmetric_product(
    x: mx.array,
    codes: SymmetricCodes,
    bias: mx.array | None = None,
    x_bits: int = 0,
    chosen: ChosenKernels | None = None,
) -> mx.array | None:
    """Return x (..., I) @ W^T + bias over symmetric codes, with the arguments of `stack_product`.

    The result is None without a native kernel; the caller then reconstructs the weight.
    """
    kernel, y = on_metal(x, codes[:2], bias, chosen, partial(symmetric_launch, x, *codes, bias))
    if kernel in STOCK:
        return y
    return add_bias(native_kernels().symmetric_matvec(x, *codes[:3], x_bits).astype(x.dtype), bias)


def dense_product(
    x: mx.array,
    weight: mx.array,
    chosen: ChosenKernels | None = None,
    x_bits: int = 0,
    bias: mx.array | None = None,
) -> mx.array:
    """Return x (..., I) @ weight (O, I)^T + bias, of x's type; a native kernel reads the weight in its own type."""
    if not (on_cpu() or takes_dense(x, weight)):
        chosen = None
    kernel, y = on_metal(x, (weight,), None, chosen, lambda variant: dense_launch(x, weight))
    if y is not None:
        return add_bias(y, bias)
    if kernel in STOCK:
        columns = weight.astype(x.dtype).T
        return x @ columns if bias is None else mx.addmm(bias.astype(x.dtype), x, columns)  # as mlx.nn.Linear
    return add_bias(native_kernels().dense_matvec(x, weight, x_bits).astype(x.dtype), bias)


def codebook_product(
    x: mx.array,
    arrays: Mapping[str, mx.array],
    bits: int,
    dense: Callable[[], mx.array],
    bias: mx.array | None = None,
    chosen: ChosenKernels | None = None,
) -> mx.array:
    """Return x (..., I) @ W^T + bias over one codebook per row, or a library of codebooks, of x's type.

    Args:
        arrays: by name in the format; with a `library` or a `codebook`.
        dense: returns W (O, I) of x's type, for MLX's kernels.
    """
    inputs = codebook_inputs(arrays)
    kernel, y = on_metal(x, inputs, bias, chosen, partial(codebook_launch, x, arrays, bits, bias))
    if y is not None:
        return y
    if kernel in STOCK:
        return add_bias(x @ dense().T, bias)
    return add_bias(native_kernels().codebook_matvec(x, inputs, bits).astype(x.dtype), bias)


def exact_product(
    x: mx.array,
    matrix: ExactMatrix,
    bias: mx.array | None = None,
    chosen: ChosenKernels | None = None,
    x_bits: int = 0,
) -> mx.array:
    """Return x (..., I) @ W^T + bias over exact weights, of x's type. chosen, x_bits: as for `dense_product`."""
    kernel, y = on_metal(x, matrix.arrays, bias, chosen, lambda variant: exact_launch(x, matrix, bias))
    if y is not None:
        return y
    if kernel == RECONSTRUCT and metal.available():
        return add_bias(product_by_tiles(x, matrix, decoded_tile, METAL_TILE), bias)
    if kernel in STOCK:
        return add_bias(product_by_tiles(x, matrix), bias)
    return add_bias(native_kernels().exact_matvec(x, *matrix, x_bits).astype(x.dtype), bias)


def decoded_tile(tile: ExactMatrix) -> mx.array:
    """Return a weight (O, I), bfloat16, by the Metal kernel, or by `decode` if it cannot run."""
    weight = decode_launch(tile).attempt()
    return decode(tile) if weight is None else weight


def decoded(matrix: ExactMatrix) -> mx.array:
    """Return the weight (..., O, I), bfloat16, by a native kernel if available, otherwise by `decode`."""
    weight = decoded_on_metal(matrix)
    if weight is not None:
        return weight
    module = cpu_kernels(1)
    return decoded_by_tiles(matrix) if module is None else module.exact_decode(*matrix)


def decoded_on_metal(matrix: ExactMatrix, chosen: mx.array | None = None) -> mx.array | None:
    """Return the result of `decode_launch` if it was proven correct and faster than `decode` here; otherwise None."""
    if not metal.available() or not proven.won(proven.decoder_key(matrix.group_size)):
        return None
    return decode_launch(matrix, chosen).attempt()


def exact_rows(matrix: ExactMatrix, chosen: mx.array) -> mx.array:
    """Return the rows `chosen` (...) of a weight (O, I), (..., I) bfloat16."""
    flat = chosen.flatten()
    rows = decoded_on_metal(matrix, flat)
    if rows is None:
        rows = decode(matrix.taken(flat))
    return rows.reshape(*chosen.shape, -1)


def stack_experts(
    x: mx.array,
    planes: Planes,
    indices: mx.array,
    sorted_indices: bool = False,
    x_bits: int = 0,
    chosen: ChosenKernels | None = None,
) -> mx.array:
    """Multiply as `stack_product`, for stacked experts."""
    launch = partial(planes_launch, x, planes, None, indices=indices)
    kernel, y = on_metal(x, planes.arrays, indices, chosen, launch, experts=True)
    if y is not None:
        return y
    if kernel in STOCK:
        return planes_gather_matmul(x, planes, indices, sorted_indices=uses_order(indices, sorted_indices))
    return native_kernels().stack_experts(x, *planes, indices, x_bits).astype(x.dtype)


def symmetric_experts(
    x: mx.array, codes: SymmetricCodes, indices: mx.array, chosen: ChosenKernels | None = None
) -> mx.array | None:
    """Multiply as `symmetric_product`, for stacked experts; None without a Metal kernel."""
    launch = partial(symmetric_launch, x, *codes, None, indices=indices)
    return on_metal(x, codes[:2], indices, chosen, launch, experts=True)[1]


def dense_experts(
    x: mx.array, weight: mx.array, indices: mx.array, sorted_indices: bool = False, x_bits: int = 0
) -> mx.array:
    """Multiply as `dense_product`, for stacked experts."""
    module = cpu_kernels_for_experts(x, indices)
    if module is None:
        return dense_experts_of_mlx(x, weight, indices, sorted_indices)
    return module.dense_experts(x, weight, indices, x_bits).astype(x.dtype)


def codebook_experts(
    x: mx.array,
    arrays: Mapping[str, mx.array],
    bits: int,
    indices: mx.array,
    chosen: ChosenKernels | None = None,
) -> mx.array | None:
    """Multiply as `codebook_product`, for stacked experts with their own tables and outliers; None without a kernel."""
    launch, inputs = partial(codebook_launch, x, arrays, bits, None, indices=indices), codebook_inputs(arrays)
    kernel, y = on_metal(x, inputs, indices, chosen, launch, experts=True)
    if kernel in STOCK:
        return y
    return native_kernels().codebook_experts(x, inputs, bits, indices).astype(x.dtype)


def exact_experts(
    x: mx.array, matrix: ExactMatrix, indices: mx.array, sorted_indices: bool, x_bits: int | None
) -> mx.array:
    """Multiply as `exact_product`, for stacked experts. x_bits: None to exclude native kernels."""
    native = x_bits is not None
    module = cpu_kernels_for_experts(x, indices) if native else None
    if module is not None:
        return module.exact_experts(x, *matrix, indices, x_bits).astype(x.dtype)
    if indices.size >= matrix.shape[0]:
        weight = decoded(matrix) if native else decoded_by_tiles(matrix)
        return dense_experts_of_mlx(x, weight, indices, sorted_indices)
    weight = decoded_by_tiles(matrix.taken(indices.flatten()))
    places = mx.arange(indices.size, dtype=mx.uint32).reshape(indices.shape)
    return dense_experts_of_mlx(x, weight, places, sorted_indices)


def dense_experts_of_mlx(x: mx.array, weight: mx.array, indices: mx.array, sorted_indices: bool) -> mx.array:
    """Multiply as `dense_experts`, by MLX's matmul."""
    computed = mx.float32 if on_cpu() else x.dtype  # MLX's only type for it on a CPU
    transposed = weight.astype(computed).swapaxes(-1, -2)
    in_order = uses_order(indices, sorted_indices)
    return mx.gather_mm(x.astype(computed), transposed, rhs_indices=indices, sorted_indices=in_order).astype(x.dtype)


def kernel_for(x: mx.array, chosen: ChosenKernels | None) -> str:
    """Return the candidate for a linear layer's matmul with activations (..., I).

    Args:
        chosen: the layer's candidates; None: native on a CPU if it takes these activations, MLX's on Metal.
    """
    vectors = x.size // x.shape[-1] if x.size else 0
    native = is_metal(x) or cpu_kernels(vectors) is not None
    if chosen is None or not vectors:
        return NATIVE if native and not metal.available() else MLX
    name = chosen(vectors)
    return name if native or name in STOCK else MLX


def kernel_for_experts(x: mx.array, indices: mx.array, chosen: ChosenKernels | None) -> str:
    """Return the candidate for the matmul with stacked experts; arguments as for `kernel_for`.

    On Metal, one candidate serves any number of pairs, so that a pair's bits do not depend on the others.
    """
    if not metal.available():
        return MLX if cpu_kernels_for_experts(x, indices) is None else NATIVE
    if indices.size > MAX_PAIRS or not takes_experts(x, indices):
        return MLX
    return MLX if chosen is None else chosen(1)


def native_kernels() -> ModuleType:
    """Return the native CPU kernels, after `kernel_for` selected them."""
    module = cpu.native()
    assert module is not None
    return module


def panel_rows() -> int:
    """Return the number of rows in a panel of the native CPU kernels."""
    return int(native_kernels().panel_rows())


def cpu_kernels_for_experts(x: mx.array, indices: mx.array) -> ModuleType | None:
    """Return the native CPU kernels if each index has one vector (..., 1, I); MLX's kernels also take several vectors.

    A limit of vectors applies to tokens here, each of which uses up to MAX_EXPERTS experts.
    """
    tokens = math.ceil(indices.size / MAX_EXPERTS)
    return cpu_kernels(tokens) if x.ndim >= 2 and x.shape[-2] == 1 and x.size > 0 else None


def uses_order(indices: mx.array, sorted_indices: bool) -> bool:
    """Return whether to pass MLX the flag of sorted indices. With it, Metal multiplies several vectors at a time.

    Verification omits it, so that each vector is multiplied separately, as for a single token.
    """
    return sorted_indices and not (metal.available() and indices.size <= MAX_PAIRS)


def on_metal(
    x: mx.array,
    inputs: Sequence[mx.array],
    last: mx.array | None,
    chosen: ChosenKernels | None,
    prepare: Callable[[str | None], metal.Launch],
    experts: bool = False,
) -> tuple[str, mx.array | None]:
    """Return the fallback candidate, and the Metal kernel's result; None if none is chosen or it cannot run.

    The launch is kept for the layer. Every token takes the first path on a Mac, so that each microsecond counts. If a
    trial cannot run, MLX's error is raised.

    Args:
        inputs: of the kernel, after the activations. last: the bias, or the indices of experts.
        prepare: returns the launch of a variant; None: the expected one.
    """
    key = x.shape, x.dtype, last if last is None else last.shape
    prepared = chosen.prepared.get(key) if chosen is not None and metal.available() else None
    if prepared is not None:
        return MLX, prepared(x, *inputs) if last is None else prepared(x, *inputs, last)
    kernel = kernel_for_experts(x, last, chosen) if experts and last is not None else kernel_for(x, chosen)
    if kernel in STOCK or not metal.available():
        return kernel, None
    launch = prepare(None if kernel == NATIVE else kernel)
    y = launch.run() if chosen is not None and chosen.is_trial else launch.attempt()
    if y is not None and chosen is not None:
        chosen.prepared[key] = launch.prepared
    return MLX, y


def add_bias(y: mx.array, bias: mx.array | None) -> mx.array:
    return y if bias is None else y + bias.astype(y.dtype)
