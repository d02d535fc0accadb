"""Metal launches for `exact`: bf16 weights, bit for bit, from the low gear's codes and what those leave open.

Up to 16 vectors are multiplied from the packed form. For more, such as a prompt, tiles of rows are decoded one after
the other, and MLX multiplies. Scales and biases are the bits of bf16 numbers, so that no cast of a model's type changes
them.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..errors import GearbxError
from .bit_planes import plane_shifts
from .metal import Launch, Layout, Prepared, Variant, options, places_of_few, source_text, variant_named
from .metal_products import GROUP_SIZES, Spec, check_product, named, product_launch, threads

EXACT_WIDTHS = ((3,), (4,), (4, 4))  # of the codes below a weight; with two planes there is a middle gear
LOW_BITS = {1: 8, 2: 5}  # planes to low bits of every weight
TILE = 2**22  # weights that are decoded at a time
MOST_BYTES = 2**31 - 1  # of `high`; kernels get numbers of 32 bits
DECODER = Variant("registers", 2, 1)


@functools.cache
def exact_layout(widths: tuple[int, ...], group_size: int) -> Layout:
    """The layout of exact weights over codes of these widths."""
    shifts = plane_shifts(widths)
    planes = range(len(widths))
    return Layout(
        name=f"exact_{'_'.join(map(str, widths))}_g{group_size}",
        bits=sum(widths) + LOW_BITS[len(widths)],
        arrays=(*(f"w{i}" for i in planes), "scales", *(f"b{i}" for i in planes), "low", "high", "offsets"),
        macros=named(
            PLANES=" ".join(f"DO(w{i}, {widths[i]}, {shifts[i]})" for i in planes),
            SIGN_BITS=0,
            GROUP_SIZE=group_size,
            GROUP_OFFSET="(" + " + ".join(f"float_of(b{i}[group]) * {2.0 ** -shifts[i]}f" for i in planes) + ")",
            MIDDLE_GEAR=len(widths) - 1,
        ),
    )


@dataclass(frozen=True)
class ExactSpec(Spec):
    """Everything that the text of a kernel for exact weights depends on.

    One that decodes them has 0 vectors.
    """

    text = "exact"

    @property
    def input_names(self) -> list[str]:
        return super().input_names if self.vectors else [*self.layout.arrays, "sizes"]

    @property
    def header(self) -> str:
        """The macros that specialize metal/exact.metal, and the functions that it calls."""
        return super().header + source_text("exact_weights")


def exact_launch(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    low: mx.array,
    high: mx.array,
    offsets: mx.array,
    widths: Sequence[int],
    group_size: int,
    bias: mx.array | None = None,
) -> Launch:
    """The launch for x @ W^T + bias over exact weights, each decoded once for all vectors; the product is (..., O).

    A vector's result has the same bits with any other vectors in the call.

    Args:
        x: (..., I) float16, bfloat16 or float32; 1 to 16 vectors.
        weights: per plane, (O, I * width / 32) uint32 as `mx.quantize` packs them, most significant plane first.
        scales: (O, I / group_size) uint16, bits of bfloat16. biases: per plane, the same.
        low: the low bits of every weight; 8 over one plane, (O, I) uint8, or 5 over two, (O, I * 5 / 32) uint32.
        high: (N,) uint8, 1 byte or more; the bytes of weights near zero, row after row.
        offsets: (O + 1,) uint32, where each row's bytes begin. A weight whose byte is not there counts as NaN.
        widths: bits of each plane: 3, 4, or 4 and 4.
        group_size: 32, 64 or 128.
        bias: (O,), or None.

    Raises:
        GearbxError: the arguments do not fit each other.
    """
    layout = _layout(widths, group_size)
    arrays = _arrays(weights, scales, biases, low, high, offsets, layout, widths, group_size)
    rows, columns = _shape(scales, group_size)
    check_product(x, rows, columns, bias)
    vectors = x.size // columns
    variant = variant_named("registers", layout.bits, vectors)
    spec = ExactSpec(layout, vectors, variant, bias is not None, x.dtype)
    return product_launch(spec, [x, *arrays, *([] if bias is None else [bias])], [rows, columns, high.size, 0])


def decode_launch(
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    low: mx.array,
    high: mx.array,
    offsets: mx.array,
    widths: Sequence[int],
    group_size: int,
    first_row: int = 0,
    rows: int | None = None,
) -> Launch:
    """The launch that decodes exact weights (..., O, I) to bfloat16, bit for bit.

    Args:
        weights, scales, biases, low, high, offsets, widths, group_size: as for `exact_launch`; stacked experts have a
            dimension more, (E, O, ...), and offsets of all their rows, (E * O + 1,).
        first_row, rows: which rows to decode, (rows, I), counted over all experts. By default (None) all that follow
            the first; all rows have the shape (..., O, I).

    Raises:
        GearbxError: the arguments do not fit each other, or there are no such rows.
    """
    layout = _layout(widths, group_size)
    arrays = _arrays(weights, scales, biases, low, high, offsets, layout, widths, group_size)
    total, columns = math.prod(scales.shape[:-1]), scales.shape[-1] * group_size
    count = total - first_row if rows is None else rows
    if first_row < 0 or count < 0 or first_row + count > total:
        raise GearbxError(f"rows {first_row} to {first_row + count} are not among the {total} rows of the weights")
    spec = ExactSpec(layout, 0, DECODER, False, mx.bfloat16)
    shape = (*scales.shape[:-1], columns) if count == total else (count, columns)
    how = options(*threads(DECODER, count), shape, mx.uint16)
    sizes = mx.array([count, columns, high.size, first_row], mx.int32)
    return Launch(Prepared(spec, how, (sizes,), places_of_few(arrays), mx.bfloat16), tuple(arrays))


def exact_matmul_tiles(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    low: mx.array,
    high: mx.array,
    offsets: mx.array,
    widths: Sequence[int],
    group_size: int,
    tile: int = TILE,
) -> mx.array:
    """x (..., I) @ W^T over exact weights for any number of vectors, (..., O) of x's type, in MLX's matrix products.

    Args:
        x, weights, scales, biases, low, high, offsets, widths, group_size: as for `exact_launch`.
        tile: the most weights that are dense at a time; one row at least.

    Raises:
        GearbxError: the arguments do not fit each other, or Metal is not available.
    """
    total, columns = _shape(scales, group_size)
    if x.ndim == 0 or x.shape[-1] != columns:
        raise GearbxError(f"activations of shape {x.shape} do not fit weights of {columns} columns")
    height = max(1, tile // columns)
    parts: list[mx.array] = []
    for first in range(0, total, height):
        # MLX may order what does not depend on each other as it likes: all tiles first would be the whole matrix.
        after = mx.depends([offsets], parts[-1:])[0] if parts else offsets
        rows = min(height, total - first)
        launch = decode_launch(weights, scales, biases, low, high, after, widths, group_size, first, rows)
        parts.append((x @ launch.run().T).astype(x.dtype))
    return mx.concatenate(parts, axis=-1)


def _shape(scales: mx.array, group_size: int) -> tuple[int, int]:
    """Rows and columns of one matrix that has weights."""
    if scales.ndim != 2 or scales.size == 0:
        raise GearbxError(f"scales of shape {scales.shape} are not those of one matrix")
    return scales.shape[0], scales.shape[1] * group_size


def _layout(widths: Sequence[int], group_size: int) -> Layout:
    if group_size not in GROUP_SIZES:
        raise GearbxError(f"group size {group_size} is none of 32, 64, 128")
    if tuple(widths) not in EXACT_WIDTHS:
        raise GearbxError(f"exact weights over {'+'.join(map(str, widths))} bits are none of 3, 4, 4+4")
    return exact_layout(tuple(widths), group_size)


def _arrays(
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    low: mx.array,
    high: mx.array,
    offsets: mx.array,
    layout: Layout,
    widths: Sequence[int],
    group_size: int,
) -> list[mx.array]:
    """The kernel's buffers, in its order. Raises GearbxError where a shape or type is not the format's."""
    if scales.ndim < 2:
        raise GearbxError(f"scales of shape {scales.shape} have no rows")
    leading, columns = scales.shape[:-1], scales.shape[-1] * group_size
    wanted: dict[str, tuple[mx.Dtype, tuple[int, ...]]] = {
        **{f"w{i}": (mx.uint32, (*leading, columns * width // 32)) for i, width in enumerate(widths)},
        "scales": (mx.uint16, scales.shape),
        **{f"b{i}": (mx.uint16, scales.shape) for i in range(len(widths))},
        "low": (mx.uint8, (*leading, columns)) if len(widths) == 1 else (mx.uint32, (*leading, columns * 5 // 32)),
        "high": (mx.uint8, (high.size,)),
        "offsets": (mx.uint32, (math.prod(leading) + 1,)),
    }
    arrays = [*weights, scales, *biases, low, high, offsets]
    if len(weights) != len(widths) or len(biases) != len(widths):
        raise GearbxError(f"{len(widths)} planes need as many weights and biases")
    for name, array in zip(layout.arrays, arrays):
        if (array.dtype, array.shape) != wanted[name]:
            dtype, shape = wanted[name]
            raise GearbxError(f"{name} of exact weights is {array.shape} {array.dtype}, not {shape} {dtype}")
    if not 0 < high.size <= MOST_BYTES:
        raise GearbxError(f"high of exact weights is {high.size} bytes, not 1 to {MOST_BYTES}")
    return arrays
