"""Metal launches for matrix-vector products over packed weights.

They all come from one text, `metal/matvec.metal`, but for exact weights (`metal_exact.py`). This module defines the
macros that specialize the text; `metal_formats.py` describes how each format is packed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..errors import GearbxError
from .metal import (
    DTYPES,
    LANES,
    MAX_VECTORS,
    VARIANTS,
    Launch,
    Prepared,
    Variant,
    choose_variant,
    options,
    places_of_few,
    takes,
)
from .metal_text import TYPES, Layout, definitions, source_text


@dataclass(frozen=True)
class Spec:
    """Everything that the text of a product's kernel depends on.

    dtype: of activations and product. ragged: the last step of a row has fewer columns. staged: elements of x in
    threadgroup memory. experts: each vector has a matrix of its own, one of several. Rows and columns are no part of
    it: Metal's compiler would have a kernel for each shape.
    """

    layout: Layout
    vectors: int
    variant: Variant
    has_bias: bool
    dtype: mx.Dtype
    ragged: bool = False
    staged: int = 0
    experts: bool = False

    text = "matvec"  # its file in metal/
    strided = False  # inputs are contiguous

    @property
    def name(self) -> str:
        """The kernel's name, which is unique, because MLX finds compiled kernels by name and types."""
        kind = f"{self.layout.name}_{TYPES[self.dtype]}_v{self.vectors}"
        variant = f"{self.variant.name}{self.variant.simd_groups}x{self.variant.rows}"
        flags = f"b{int(self.has_bias)}r{int(self.ragged)}s{self.staged}{'e' if self.experts else ''}"
        return f"gearbx_{kind}_{variant}_{flags}"

    @property
    def input_names(self) -> list[str]:
        return [
            "x",
            *self.layout.arrays,
            *(["bias"] if self.has_bias else []),
            *(["experts"] if self.experts else []),
            "sizes",
        ]

    @property
    def read_once(self) -> list[str]:
        """The buffers of which a launch reads no byte twice. Codes below outliers are read again."""
        return [] if self.layout.tables else self.planes

    @property
    def planes(self) -> list[str]:
        return [name for name in self.layout.arrays if name.startswith("w")]

    @property
    def header(self) -> str:
        """The macros that specialize metal/matvec.metal, and the functions that it calls."""
        macros = {
            "VECTORS": self.vectors,
            "ROWS": self.variant.rows,
            "SIMD_GROUPS": self.variant.simd_groups,
            "HAS_BIAS": int(self.has_bias),
            "EXPERTS": int(self.experts),
            "RAGGED": int(self.ragged),
            "STAGED": self.staged,
            "CODES": self.layout.codes,
            "PLANE_COUNT": len(self.planes),
            "TABLES": self.layout.tables,
        } | {f"X_{name.upper()}": int(name == self.variant.name) for name in VARIANTS}
        return definitions(macros | dict(self.layout.macros), self.dtype) + source_text("codes")


def check_product(x: mx.array, rows: int, columns: int, bias: mx.array | None) -> None:
    """Raise GearbxError unless weights (rows, columns) take these activations and this output bias."""
    if x.dtype not in DTYPES:
        raise GearbxError(f"activations of {x.dtype} are none of float16, bfloat16, float32")
    if x.ndim == 0 or x.shape[-1] != columns:
        raise GearbxError(f"activations of shape {x.shape} do not fit weights of {columns} columns")
    if not takes(x, columns):
        raise GearbxError(f"activations of shape {x.shape} are not 1 to {MAX_VECTORS} vectors")
    if bias is not None and bias.shape != (rows,):
        raise GearbxError(f"an output bias of shape {bias.shape} does not fit {rows} rows")


def threads(variant: Variant, rows: int) -> tuple[int, int]:
    """How many threads there are, in all and of a threadgroup: as many threadgroups as all rows need."""
    threadgroup = LANES * variant.simd_groups
    return math.ceil(rows / (variant.simd_groups * variant.rows)) * threadgroup, threadgroup


def prepare(
    x: mx.array,
    layout: Layout,
    arrays: Sequence[mx.array],
    rows: int,
    columns: int,
    row_words: int,
    bias: mx.array | None = None,
    variant: str | None = None,
) -> Launch:
    """Prepare the launch for x W^T + bias, with sums in float32 and one rounding, to the type of x.

    Args:
        x: (..., columns) float16, bfloat16 or float32; 1 to 16 vectors, for which the weights are read once.
        layout: of the weights. arrays: its buffers, whose shapes the caller has checked.
        rows, columns: of W. row_words: 16-bit words from one row to the next; for planes, words for each bit.
        bias: (rows,), or None.
        variant: `registers`, `threadgroup` or `device`; None lets `choose_variant` decide.

    Raises:
        GearbxError: the activations or the bias do not fit the weights.
    """
    check_product(x, rows, columns, bias)
    vectors = x.size // columns
    chosen = choose_variant(layout.bits, columns, vectors, x.dtype, variant)
    staged = vectors * columns if chosen.name == "threadgroup" else 0
    spec = Spec(layout, vectors, chosen, bias is not None, x.dtype, columns % layout.codes != 0, staged)
    return product_launch(spec, [x, *arrays, *([] if bias is None else [bias])], [rows, columns, row_words])


def product_launch(spec: Spec, inputs: Sequence[mx.array], sizes: list[int]) -> Launch:
    """The launch of a product's kernel. inputs: x, packed arrays, bias. sizes: rows first, as the text reads them."""
    rows = sizes[0]
    how = options(*threads(spec.variant, rows), (*inputs[0].shape[:-1], rows), spec.dtype)
    return Launch(Prepared(spec, how, (mx.array(sizes, mx.int32),), places_of_few(inputs)), tuple(inputs))
