"""Matrix-vector products over packed weights on Metal, through `mx.fast.metal_kernel`.

The kernels are text in `metal/`. This file chooses a variant, fills in what a kernel is specialized on, and launches
it. Nothing is built at import, and nothing but `planes_matvec` needs a Mac: what `prepare` returns can be examined
anywhere.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import GearbxError
from .reference import plane_shifts

LANES = 32
MAX_VECTORS = 8
GROUP_SIZES = (32, 64, 128)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)

# GEARBX 8.1: activations are staged in threadgroup memory up to this many columns, in 24 KB at most.
STAGED_COLUMNS = 6144
STAGED_BYTES = 24 * 1024

# MLX passes smaller arrays in another address space ("constant"), which the kernels do not read.
LEAST_ELEMENTS = 8


@dataclass(frozen=True)
class Availability:
    """Whether Metal kernels can run here; if not, `reason` is one line that says why."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def available() -> Availability:
    """Whether `planes_matvec` can run on MLX's default device."""
    if not mx.metal.is_available():
        return Availability(False, "Metal kernels need a Mac with Apple silicon: this MLX has no Metal device")
    if mx.default_device() != mx.Device(mx.gpu):
        return Availability(False, "Metal kernels run on the GPU, and MLX's default device is the CPU")
    return Availability(True)


@dataclass(frozen=True)
class Variant:
    """How activations reach the lanes, and how rows are dealt out.

    name: where activations are read from: `registers`, `threadgroup` or `device`.
    simd_groups: per threadgroup. rows: per SIMD group.
    """

    name: str
    simd_groups: int
    rows: int


VARIANTS = ("registers", "threadgroup", "device")


def variant_named(name: str, bits: int, vectors: int) -> Variant:
    """The geometry of a variant.

    `registers` follows MLX's qmv_fast and llama.cpp: 2 SIMD groups of 4 rows, activations held in registers over the
    rows; fewer rows with many vectors, which fill the registers. The other two follow GEARBX 8.1 and 8.2: 8 SIMD
    groups of 2 rows, of 1 where unpacking dominates (2 bits).
    """
    if name == "registers":
        return Variant(name, 2, 4 if vectors <= 2 else 2)
    if name in VARIANTS:
        return Variant(name, 8, 1 if bits <= 2 else 2)
    raise GearbxError(f"kernel variant {name!r} is none of {', '.join(VARIANTS)}")


def fits_threadgroup(columns: int, vectors: int, dtype: mx.Dtype) -> bool:
    """Whether the `threadgroup` variant can stage so many activations."""
    return columns <= STAGED_COLUMNS and columns * vectors * dtype.size <= STAGED_BYTES


def choose_variant(bits: int, columns: int, vectors: int, dtype: mx.Dtype, name: str | None = None) -> Variant:
    """The variant that is used, or the named one. The only place where this is decided.

    The choice is a prediction: `registers` is the shape of the two fastest published kernels, and
    `scripts/bench_metal.py` times all three.

    Raises:
        GearbxError: no such variant, or `threadgroup` with more activations than it stages.
    """
    chosen = variant_named(name or "registers", bits, vectors)
    if chosen.name == "threadgroup" and not fits_threadgroup(columns, vectors, dtype):
        raise GearbxError(
            f"{vectors} x {columns} activations of {dtype.size} bytes do not fit threadgroup memory "
            f"({STAGED_COLUMNS} columns, {STAGED_BYTES} bytes); use 'registers' or 'device'"
        )
    return chosen


def source_text(name: str) -> str:
    """The text of metal/<name>.metal: beside the package when installed, at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "metal", package.parent / "metal"):
        file = folder / f"{name}.metal"
        if file.is_file():
            return file.read_text(encoding="utf-8")
    raise GearbxError(f"metal/{name}.metal is missing from this installation; install gearbx-mlx again")


@dataclass(frozen=True)
class Spec:
    """All that a kernel's text depends on."""

    widths: tuple[int, ...]
    group_size: int
    vectors: int
    variant: Variant
    has_bias: bool

    @property
    def name(self) -> str:
        """Unique: MLX keeps compiled kernels by name."""
        widths = "_".join(map(str, self.widths))
        variant = f"{self.variant.name}{self.variant.simd_groups}x{self.variant.rows}"
        return f"gearbx_planes_{widths}_g{self.group_size}_v{self.vectors}_{variant}_b{int(self.has_bias)}"

    @property
    def input_names(self) -> list[str]:
        count = range(len(self.widths))
        planes = [*(f"w{i}" for i in count), "scales", *(f"b{i}" for i in count)]
        return ["x", *planes, *(["bias"] if self.has_bias else []), "rows"]

    @property
    def header(self) -> str:
        """The macros that metal/planes.metal names, and the functions that it calls."""
        planes = " ".join(
            f"DO(w{i}, b{i}, {width}, {shift})"
            for i, (width, shift) in enumerate(zip(self.widths, plane_shifts(self.widths)))
        )
        macros = {
            "VECTORS": self.vectors,
            "ROWS": self.variant.rows,
            "SIMD_GROUPS": self.variant.simd_groups,
            "GROUP_SIZE": self.group_size,
            "HAS_BIAS": int(self.has_bias),
            "PLANES(DO)": planes,
        } | {f"X_{name.upper()}": int(name == self.variant.name) for name in VARIANTS}
        return "".join(f"#define {name} {value}\n" for name, value in macros.items()) + source_text("codes")


@functools.cache
def build(spec: Spec) -> Any:
    """The kernel as MLX's callable. MLX compiles it at its first launch."""
    return mx.fast.metal_kernel(
        name=spec.name,
        input_names=spec.input_names,
        output_names=["out"],
        source=source_text("planes"),
        header=spec.header,
    )


@dataclass(frozen=True)
class Launch:
    """One launch: what to build, and the arguments of the call."""

    spec: Spec
    inputs: list[Any]
    options: dict[str, Any]
    shape: tuple[int, ...]

    def run(self) -> mx.array:
        return build(self.spec)(inputs=self.inputs, **self.options)[0].reshape(self.shape)


def _readable(array: mx.array) -> mx.array:
    """Arrays of fewer than 8 elements, padded: what a kernel does not read may be anything."""
    if array.size >= LEAST_ELEMENTS:
        return array
    return mx.pad(array.reshape(-1), (0, LEAST_ELEMENTS - array.size))


def _check(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
    bias: mx.array | None,
) -> None:
    """Everything that would make a kernel read past an array, or give a wrong number."""
    if x.dtype not in DTYPES:
        raise GearbxError(f"activations of {x.dtype} are none of float16, bfloat16, float32")
    if group_size not in GROUP_SIZES:
        raise GearbxError(f"group size {group_size} is none of 32, 64, 128")
    if not widths or min(widths) < 1 or sum(widths) > 8:
        raise GearbxError(f"planes of {'+'.join(map(str, widths))} bits are not 1 to 8 bits together")
    if scales.ndim != 2 or len(weights) != len(widths) or len(biases) != len(widths):
        raise GearbxError(f"{len(widths)} planes need as many weights and biases, and scales of two dimensions")
    rows, columns = scales.shape[0], scales.shape[1] * group_size
    if x.ndim == 0 or x.shape[-1] != columns:
        raise GearbxError(f"activations of shape {x.shape} do not fit weights of {columns} columns")
    if not 1 <= x.size // max(columns, 1) <= MAX_VECTORS:
        raise GearbxError(f"activations of shape {x.shape} are not 1 to {MAX_VECTORS} vectors")
    for i, width in enumerate(widths):
        if weights[i].shape != (rows, columns * width // 32) or weights[i].dtype != mx.uint32:
            raise GearbxError(
                f"plane {i} is {weights[i].shape} {weights[i].dtype}, not {rows} rows of {width}-bit codes"
            )
        if biases[i].shape != scales.shape:
            raise GearbxError(f"biases of plane {i} are {biases[i].shape}, scales {scales.shape}")
    if bias is not None and bias.shape != (rows,):
        raise GearbxError(f"an output bias of shape {bias.shape} does not fit {rows} rows")


def prepare(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
    bias: mx.array | None = None,
    variant: str | None = None,
) -> Launch:
    """The launch that `planes_matvec` makes, for arguments as there; rows are 1 at least."""
    _check(x, weights, scales, biases, widths, group_size, bias)
    rows, columns = scales.shape[0], scales.shape[1] * group_size
    vectors = x.size // columns
    chosen = choose_variant(sum(widths), columns, vectors, x.dtype, variant)
    spec = Spec(tuple(widths), group_size, vectors, chosen, bias is not None)
    arrays = [*weights, scales, *biases, *([] if bias is None else [bias])]
    staged = vectors * columns if chosen.name == "threadgroup" else 0
    threads = LANES * chosen.simd_groups
    options = {
        "template": [("T", x.dtype), ("STAGED", staged)],
        "grid": (math.ceil(rows / (chosen.simd_groups * chosen.rows)) * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [(vectors, rows)],
        "output_dtypes": [x.dtype],
    }
    inputs = [x.reshape(vectors, columns), *map(_readable, arrays), rows]
    return Launch(spec, inputs, options, (*x.shape[:-1], rows))


def planes_matvec(
    x: mx.array,
    weights: Sequence[mx.array],
    scales: mx.array,
    biases: Sequence[mx.array],
    widths: Sequence[int],
    group_size: int,
    bias: mx.array | None = None,
    variant: str | None = None,
) -> mx.array:
    """x @ W^T + bias for a prefix of bit planes, all planes in one pass. MLX's affine weights are one plane.

    Sums are float32; the result is rounded once, to the type of x.

    Args:
        x: (..., I) float16, bfloat16 or float32; 1 to 8 vectors, which share one reading of the weights.
        weights: per plane, (O, I * width / 32) uint32 as `mx.quantize` packs them, most significant plane first.
        scales: (O, I / group_size), of the first plane; the others are powers of two below it.
        biases: per plane, (O, I / group_size).
        widths: bits of each plane, 8 at most together.
        group_size: 32, 64 or 128.
        bias: (O,), added to the result; or None.
        variant: `registers`, `threadgroup` or `device`; None lets `choose_variant` decide.

    Returns:
        (..., O), of the type of x.

    Raises:
        GearbxError: Metal is not available, or the arguments do not fit each other.

    Source: GEARBX 8.1, 8.2; MLX's qmv_fast for the shape of `registers`.
    """
    can = available()
    if not can:
        raise GearbxError(can.reason)
    if scales.ndim == 2 and scales.shape[0] == 0:
        return mx.zeros((*x.shape[:-1], 0), dtype=x.dtype)
    return prepare(x, weights, scales, biases, widths, group_size, bias, variant).run()
