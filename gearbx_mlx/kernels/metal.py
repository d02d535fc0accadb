"""Metal kernels through `mx.fast.metal_kernel`, and first of all matrix-vector products over packed weights.

Those all come from one text, `metal/matvec.metal`, but for exact weights (`metal_exact.py`). This module chooses a
variant, defines the macros that specialize the text, and launches the kernel; `metal_formats.py` describes how each
format is packed. Nothing is built at import. Only `Launch.run` needs a Mac: a launch can be examined anywhere.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import GearbxError
from .metal_text import Kernel, definitions

LANES, CODES = 32, 16  # lanes of a SIMD group; codes that a lane reads at a time
MAX_VECTORS = 16
MOST_IN_REGISTERS = 8  # vectors whose activations fit a lane's registers
DTYPES = (mx.float16, mx.bfloat16, mx.float32)

# GEARBX 8.1: the largest activations that are staged in threadgroup memory.
STAGED_COLUMNS = 6144
STAGED_BYTES = 24 * 1024

# MLX passes smaller arrays in another address space ("constant"), from which the kernels do not read.
LEAST_ELEMENTS = 8


@dataclass(frozen=True)
class Availability:
    """Whether Metal kernels can run here; if not, `reason` says why in one line."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def available() -> Availability:
    """Whether `Launch.run` can run on MLX's default device."""
    if not mx.metal.is_available():
        return Availability(False, "Metal kernels need a Mac with Apple silicon: this MLX has no Metal device")
    if mx.default_device() != mx.Device(mx.gpu):
        return Availability(False, "Metal kernels run on the GPU, and MLX's default device is the CPU")
    return Availability(True)


@dataclass(frozen=True)
class Variant:
    """How activations reach the lanes, and which rows a SIMD group computes.

    name: the memory that lanes read activations from: `registers`, `threadgroup` or `device`.
    simd_groups: per threadgroup. rows: per SIMD group.
    """

    name: str
    simd_groups: int
    rows: int


VARIANTS = ("registers", "threadgroup", "device")


def variant_named(name: str, bits: int, vectors: int) -> Variant:
    """The variant with this name. Raises GearbxError if there is none.

    `registers` follows MLX's qmv_fast and llama.cpp: 2 SIMD groups of 4 rows, whose activations stay in registers; of 2
    rows where three vectors or more fill the registers. The other two follow GEARBX 8.1 and 8.2: 8 SIMD groups of 2
    rows, or of 1 row for 2 bits, where unpacking takes most of the time.
    """
    if name == "registers":
        return Variant(name, 2, 4 if vectors <= 2 else 2)
    if name in VARIANTS:
        return Variant(name, 8, 1 if bits <= 2 else 2)
    raise GearbxError(f"kernel variant {name!r} is none of {', '.join(VARIANTS)}")


def expected_variant(vectors: int) -> str:
    """The variant that should be the fastest; nobody has measured that.

    The two fastest published kernels are like `registers`, and more than 8 vectors do not fit there.
    """
    return "registers" if vectors <= MOST_IN_REGISTERS else "device"


def fits_threadgroup(columns: int, vectors: int, dtype: mx.Dtype) -> bool:
    """Whether the `threadgroup` variant can stage this number of vectors, columns and bytes."""
    return columns <= STAGED_COLUMNS and columns * vectors * dtype.size <= STAGED_BYTES


def choose_variant(bits: int, columns: int, vectors: int, dtype: mx.Dtype, name: str | None = None) -> Variant:
    """The variant with this name, or the expected one. A result has the same bits in every variant.

    Raises:
        GearbxError: there is no such variant, or the activations are too large for `threadgroup`.
    """
    chosen = variant_named(name or expected_variant(vectors), bits, vectors)
    if chosen.name == "threadgroup" and not fits_threadgroup(columns, vectors, dtype):
        raise GearbxError(
            f"{vectors} x {columns} activations of {dtype.size} bytes do not fit threadgroup memory "
            f"({STAGED_COLUMNS} columns, {STAGED_BYTES} bytes); use 'registers' or 'device'"
        )
    return chosen


def source_text(name: str) -> str:
    """The text of metal/<name>.metal."""
    file = metal_folder() / f"{name}.metal"
    if not file.is_file():
        raise GearbxError(f"metal/{name}.metal is missing from this installation; install gearbx-mlx again")
    return file.read_text(encoding="utf-8")


def metal_folder() -> Path:
    """The folder of the kernels' texts: in the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next((each for each in (package / "metal", package.parent / "metal") if each.is_dir()), package / "metal")


@dataclass(frozen=True)
class Layout:
    """How a matrix is packed, as buffers and macros of metal/matvec.metal.

    name: unique. bits: of a code, all planes together. arrays: names of the buffers. macros: names and values.
    codes: that a lane reads at a time. tables: how many codebooks a threadgroup reads, if any.
    """

    name: str
    bits: int
    arrays: tuple[str, ...]
    macros: tuple[tuple[str, object], ...]
    codes: int = CODES
    tables: object = 0


@dataclass(frozen=True)
class Spec:
    """Everything that the text of a product's kernel depends on. `ragged`: the last step of a row has fewer columns."""

    layout: Layout
    vectors: int
    variant: Variant
    has_bias: bool
    ragged: bool

    text = "matvec"  # its file in metal/
    strided = False  # inputs are contiguous

    @property
    def name(self) -> str:
        """The kernel's name, which is unique, because MLX finds compiled kernels by name and types."""
        variant = f"{self.variant.name}{self.variant.simd_groups}x{self.variant.rows}"
        flags = f"b{int(self.has_bias)}r{int(self.ragged)}"
        return f"gearbx_{self.layout.name}_v{self.vectors}_{variant}_{flags}"

    @property
    def input_names(self) -> list[str]:
        bias = ["bias"] if self.has_bias else []
        return ["x", *self.layout.arrays, *bias, "rows", "columns", "row_words"]

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
            "RAGGED": int(self.ragged),
            "CODES": self.layout.codes,
            "PLANE_COUNT": len(self.planes),
            "TABLES": self.layout.tables,
        } | {f"X_{name.upper()}": int(name == self.variant.name) for name in VARIANTS}
        return definitions(macros | dict(self.layout.macros)) + source_text("codes")


@functools.cache
def build(spec: Kernel) -> Any:
    """Make MLX's callable for a kernel. MLX compiles it at its first launch."""
    return mx.fast.metal_kernel(
        name=spec.name,
        input_names=list(spec.input_names),
        output_names=["out"],
        source=source_text(spec.text),
        header=spec.header,
        ensure_row_contiguous=not spec.strided,
    )


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel to build, the arguments of the call, and the shape of the result.

    dtype: of the result, if the kernel writes its bits as whole numbers.
    """

    spec: Kernel
    inputs: list[Any]
    options: dict[str, Any]
    shape: tuple[int, ...]
    dtype: mx.Dtype | None = None

    def run(self) -> mx.array:
        """Compute the result; a product has the activations' type. Raises GearbxError where Metal is not available."""
        can = available()
        if not can:
            raise GearbxError(can.reason)
        if 0 in self.shape:
            return self.result(mx.zeros(self.shape, self.options["output_dtypes"][0]))
        return self.result(build(self.spec)(inputs=self.inputs, **self.options)[0])

    def result(self, out: mx.array) -> mx.array:
        """What the kernel wrote, in the shape and type of the result."""
        shaped = out.reshape(self.shape)
        return shaped if self.dtype is None else shaped.view(self.dtype)


def pad_small(array: mx.array) -> mx.array:
    """The array, padded to 8 elements if it has fewer; kernels do not read the padding."""
    if array.size >= LEAST_ELEMENTS:
        return array
    return mx.pad(array.reshape(-1), (0, LEAST_ELEMENTS - array.size))


def takes(x: mx.array, columns: int) -> bool:
    """Whether a kernel takes activations (..., columns): their number and their type."""
    return x.ndim > 0 and 0 < x.size <= MAX_VECTORS * columns and x.dtype in DTYPES


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


def grid(variant: Variant, rows: int) -> dict[str, tuple[int, int, int]]:
    """Options of a call: as many threadgroups as all rows need."""
    threads = LANES * variant.simd_groups
    threadgroups = math.ceil(rows / (variant.simd_groups * variant.rows))
    return {"grid": (threadgroups * threads, 1, 1), "threadgroup": (threads, 1, 1)}


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
    spec = Spec(layout, vectors, chosen, bias is not None, columns % layout.codes != 0)
    read = [x.reshape(vectors, columns), *arrays, *([] if bias is None else [bias])]
    options = {
        "template": [("T", x.dtype), ("STAGED", vectors * columns if chosen.name == "threadgroup" else 0)],
        **grid(chosen, rows),
        "output_shapes": [(vectors, rows)],
        "output_dtypes": [x.dtype],
    }
    return Launch(spec, [*map(pad_small, read), rows, columns, row_words], options, (*x.shape[:-1], rows))
