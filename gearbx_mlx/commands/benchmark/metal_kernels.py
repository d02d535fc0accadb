"""The Metal products that `benchmark metal` checks and times: how each packs a matrix, reads it and multiplies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from ...formats import codebook, codebook_library, groupwise, rowwise
from ...formats.codebook import LAYOUT
from ...formats.exact import encode
from ...formats.planes import split
from ...kernels.bit_planes import Planes
from ...kernels.exact import ExactMatrix, decode
from ...kernels.metal import VARIANTS
from ...kernels.metal_exact import EXACT_WIDTHS, decode_launch, exact_launch, exact_matmul_tiles
from ...kernels.metal_products import (
    INPUTS_OF_CODEBOOK,
    INPUTS_OF_LIBRARY,
    codebook_launch,
    dense_launch,
    groupwise_launch,
    library_launch,
    planes_launch,
    rowwise_launch,
)

AFFINE = (2, 3, 4, 5, 6, 8)
CODEBOOKS = {
    "codebook": (codebook, codebook_launch, INPUTS_OF_CODEBOOK),
    "codebook-library": (codebook_library, library_launch, INPUTS_OF_LIBRARY),
}
STACKS = ((4, 4), (4, 1, 1, 2))
TILES = "tiles"  # exact weights, decoded for MLX's product

Arrays = list[mx.array]
Product = Callable[..., mx.array]
"""x and the arrays of a matrix to the result: a launch that was prepared for such ones, or a product of MLX."""


@dataclass(frozen=True)
class Kernel:
    """A format at some bits.

    pack: a matrix (O, I) to arrays, in the order of a launch. dense: arrays and I to the dequantized matrix (O, I),
    float32. prepare: x (V, I), arrays and a variant to the product of these, or of others of their shapes and types.
    multiple: the columns have to be a multiple of it. variants: that there are; "" where there is one. decoded: arrays
    to the weight, bit for bit, by a launch; None: there is no such kernel.
    """

    format: str
    bits: str
    pack: Callable[[mx.array], Arrays]
    dense: Callable[[Arrays, int], mx.array]
    prepare: Callable[[mx.array, Arrays, str], Product]
    multiple: int = 1
    variants: tuple[str, ...] = VARIANTS
    decoded: Callable[[Arrays], mx.array] | None = None

    @property
    def name(self) -> str:
        return f"{self.format} {self.bits}"

    def product(self, x: mx.array, arrays: Arrays, variant: str) -> mx.array:
        """The result for x (V, I), by a launch that is prepared for it alone."""
        return self.prepare(x, arrays, variant)(x, *arrays)


def planes_kernel(widths: tuple[int, ...], group_size: int) -> Kernel:
    count = len(widths)

    def pack(weight: mx.array) -> Arrays:
        return list(split(weight, widths, group_size).arrays)

    def planes(a: Arrays) -> Planes:
        return Planes(a[:count], a[count], a[count + 1 :], widths, group_size)

    def dense(a: Arrays, columns: int) -> mx.array:
        return planes(a).dequantize()

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return planes_launch(x, planes(a), variant=variant).prepared

    return Kernel("planes", "+".join(map(str, widths)), pack, dense, prepare, group_size)


def affine_kernel(bits: int, group_size: int) -> Kernel:
    """MLX's own weights, as a stack of one plane."""
    stack = planes_kernel((bits,), group_size)

    def pack(weight: mx.array) -> Arrays:
        return list(mx.quantize(weight, group_size, bits))

    return Kernel("affine", str(bits), pack, stack.dense, stack.prepare, group_size)


def mlx_kernel(bits: int, group_size: int) -> Kernel:
    """MLX's own kernel, to compare the others with."""
    affine = affine_kernel(bits, group_size)

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return partial(mx.quantized_matmul, group_size=group_size, bits=bits)

    return Kernel("affine", str(bits), affine.pack, affine.dense, prepare, group_size)


def rowwise_kernel(bits: int) -> Kernel:
    def pack(weight: mx.array) -> Arrays:
        codes, scales = rowwise.quantize(weight, bits)
        return [rowwise.pack_symmetric_codes(codes, bits), scales]

    def dense(a: Arrays, columns: int) -> mx.array:
        return rowwise.dequantize(rowwise.unpack_symmetric_codes(a[0], bits, columns), a[1])

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return rowwise_launch(x, a[0], a[1], bits, x.shape[-1], variant=variant).prepared

    return Kernel("rowwise", str(bits), pack, dense, prepare)


def groupwise_kernel() -> Kernel:
    def pack(weight: mx.array) -> Arrays:
        codes, scales = groupwise.quantize(weight)
        return [rowwise.pack_symmetric_codes(codes, groupwise.BITS), scales]

    def dense(a: Arrays, columns: int) -> mx.array:
        codes = rowwise.unpack_symmetric_codes(a[0], groupwise.BITS, a[1].shape[1] * groupwise.GROUP)
        return groupwise.dequantize(codes, a[1], columns)

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return groupwise_launch(x, a[0], a[1], x.shape[-1], variant=variant).prepared

    return Kernel("groupwise", str(groupwise.BITS), pack, dense, prepare)


def codebook_kernel(format: str, bits: int) -> Kernel:
    """Codebooks with outliers: one per row, or a library."""
    module, launch, names = CODEBOOKS[format]

    def pack(weight: mx.array) -> Arrays:
        arrays = module.encode(weight, bits)
        return [arrays[name] for name in names]

    def dense(a: Arrays, columns: int) -> mx.array:
        return module.decode(dict(zip(names, a)), bits, columns)

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return launch(x, dict(zip(names, a)), bits, variant=variant).prepared

    return Kernel(format, str(bits), pack, dense, prepare)


def exact_kernel(widths: tuple[int, ...], group_size: int) -> Kernel:
    """bfloat16 weights, from the packed form, or in tiles that are decoded for MLX's product."""
    count = len(widths)

    def pack(weight: mx.array) -> Arrays:
        return list(encode(weight.astype(mx.bfloat16), widths, group_size).arrays)

    def matrix(a: Sequence[mx.array]) -> ExactMatrix:
        low, high, offsets = a[-3:]
        return ExactMatrix([*a[:count]], a[count], [*a[count + 1 : -3]], low, high, offsets, widths, group_size)

    def dense(a: Arrays, columns: int) -> mx.array:
        return decode(matrix(a)).astype(mx.float32)

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return tiles if variant == TILES else exact_launch(x, matrix(a)).prepared

    def tiles(x: mx.array, *a: mx.array) -> mx.array:
        return exact_matmul_tiles(x, matrix(a))

    def decoded(a: Arrays) -> mx.array:
        return decode_launch(matrix(a)).run()

    bits = "+".join(map(str, widths))
    return Kernel("exact", bits, pack, dense, prepare, group_size, ("registers", TILES), decoded)


def dense_kernel() -> Kernel:
    """Our product with the weight as it is."""

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return dense_launch(x, a[0]).prepared

    return dense_by(prepare)


def mlx_dense_kernel() -> Kernel:
    """MLX's own product with the weight as it is."""

    def prepare(x: mx.array, a: Arrays, variant: str) -> Product:
        return lambda x, weight: x @ weight.T

    return dense_by(prepare)


def dense_by(prepare: Callable[[mx.array, Arrays, str], Product]) -> Kernel:
    """A product with the weight as it is."""
    return Kernel("dense", "16", lambda weight: [weight], lambda a, columns: a[0], prepare, variants=("",))


def all_kernels(group_size: int) -> list[tuple[Kernel, Kernel]]:
    """Every kernel, with MLX's own at the same bits; with exact weights, MLX's over dense ones."""
    rowwise_bits = tuple(rowwise.Q_MAX)
    return [
        *((affine_kernel(bits, group_size), mlx_kernel(bits, group_size)) for bits in AFFINE),
        *((planes_kernel(widths, group_size), mlx_kernel(sum(widths), group_size)) for widths in STACKS),
        *((rowwise_kernel(bits), mlx_kernel(bits, group_size)) for bits in rowwise_bits),
        (groupwise_kernel(), mlx_kernel(groupwise.BITS, groupwise.GROUP)),
        *((codebook_kernel("codebook", bits), mlx_kernel(bits, group_size)) for bits in LAYOUT),
        *((codebook_kernel("codebook-library", bits), mlx_kernel(bits, group_size)) for bits in codebook_library.BITS),
        *((exact_kernel(widths, group_size), mlx_dense_kernel()) for widths in EXACT_WIDTHS),
        (dense_kernel(), mlx_dense_kernel()),
    ]
