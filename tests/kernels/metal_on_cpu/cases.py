"""Matrices for the kernels, and their launches on a CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from gearbx_mlx.formats import CodebookOptions, codebook, codebook_library, groupwise, rowwise
from gearbx_mlx.formats.planes import split
from gearbx_mlx.kernels.bit_planes import Planes
from gearbx_mlx.kernels.metal import Launch, Prepared, Spec, build
from gearbx_mlx.kernels.metal_products import codebook_launch, planes_launch, symmetric_launch

from .launch import Report, run_call


@dataclass(frozen=True)
class Case:
    """One product: rows x columns in a format, and how it is computed. `bits` is a tuple for planes."""

    bits: tuple[int, ...] | int
    rows: int
    columns: int
    group_size: int = 64  # of planes
    vectors: int = 1
    dtype: mx.Dtype = mx.float16
    variant: str = "registers"
    bias: bool = False
    format: str = "planes"

    def __str__(self) -> str:
        bits = "+".join(map(str, self.bits)) if isinstance(self.bits, tuple) else str(self.bits)
        group = f"-g{self.group_size}" if self.format == "planes" else ""
        kind = str(self.dtype).removeprefix("mlx.core.")
        shape = f"{self.rows}x{self.columns}{group}-v{self.vectors}"
        return f"{self.format}-{bits}bit-{shape}-{kind}-{self.variant}{'-bias' if self.bias else ''}"


@dataclass
class Problem:
    """The arrays of a case: (vectors, columns) activations, the packed ones by name, an output bias."""

    x: mx.array
    arrays: dict[str, mx.array]
    bias: mx.array | None

    def planes(self, prefix: str) -> list[mx.array]:
        return [array for name, array in self.arrays.items() if name.startswith(prefix)]


def problem(case: Case, seed: int = 0) -> Problem:
    """Random weights, quantized as the formats do it: a single plane as MLX does."""
    mx.random.seed(seed)
    weight = (mx.random.normal((case.rows, case.columns)) * 0.1 + 0.02).astype(case.dtype)
    x = mx.random.normal((case.vectors, case.columns)).astype(case.dtype)
    bias = mx.random.normal((case.rows,)).astype(case.dtype) if case.bias else None
    return Problem(x, PACKED[case.format](case, weight), bias)


def _planes(case: Case, weight: mx.array) -> dict[str, mx.array]:
    if len(case.bits) == 1 and case.bits[0] in (2, 3, 4, 5, 6, 8):
        words, scales, biases = mx.quantize(weight, group_size=case.group_size, bits=case.bits[0])
        return {"w0": words, "scales": scales, "b0": biases}
    made = split(weight, case.bits, case.group_size)
    weights = {f"w{i}": words for i, words in enumerate(made.weights)}
    return weights | {"scales": made.scales} | {f"b{i}": bias for i, bias in enumerate(made.biases)}


def _symmetric(case: Case, weight: mx.array) -> dict[str, mx.array]:
    by_rows = case.format == "rowwise"
    codes, scales = rowwise.quantize(weight, case.bits) if by_rows else groupwise.quantize(weight)
    return {"w0": rowwise.pack_symmetric_codes(codes, case.bits), "scales": scales}


CODEBOOKS = {"codebook": codebook, "codebook-library": codebook_library}


def _codebook(case: Case, weight: mx.array) -> dict[str, mx.array]:
    """Arrays by the names of the kernel's buffers. Some rows have many outliers, some none."""
    often = mx.where(mx.arange(case.rows)[:, None] % 3 == 0, 0.2, 0.01)
    outlying = mx.random.uniform(shape=weight.shape) < mx.where(mx.arange(case.rows)[:, None] % 3 == 1, 0.0, often)
    arrays = CODEBOOKS[case.format].encode(weight, case.bits, CodebookOptions(rounds=2), np.array(outlying))
    return {{"weight": "w0", "library": "codebook"}.get(name, name): array for name, array in arrays.items()}


PACKED: dict[str, Callable[[Case, mx.array], dict[str, mx.array]]] = {
    "planes": _planes,
    "rowwise": _symmetric,
    "groupwise": _symmetric,
    "codebook": _codebook,
    "codebook-library": _codebook,
}


def codebook_arrays(case: Case, p: Problem) -> dict[str, mx.array]:
    """Arrays by the names of the format."""
    library = case.format == "codebook-library"
    formats = {"w0": "weight", "codebook": "library" if library else "codebook"}
    return {formats.get(name, name): array for name, array in p.arrays.items()}


def launch(case: Case, p: Problem, indices: mx.array | None = None) -> Launch:
    """indices: of experts; the first dimension of the arrays is the expert."""
    scales, how = p.arrays.get("scales"), {"bias": p.bias, "variant": case.variant, "indices": indices}
    if case.format in CODEBOOKS:
        return codebook_launch(p.x, codebook_arrays(case, p), case.bits, **how)
    if case.format == "planes":
        return planes_launch(p.x, Planes(p.planes("w"), scales, p.planes("b"), case.bits, case.group_size), **how)
    return symmetric_launch(p.x, p.arrays["w0"], scales, case.bits, case.columns, **how)


def run_launch(made: Launch, order: int = 0, schedule: int = 0, change: Callable[[str], str] | None = None) -> Report:
    """The result of a launch on a CPU. `change` breaks the kernel's text."""
    return run_prepared(made.prepared, made.inputs, order, schedule, change)


def read_once(spec: Spec) -> tuple[str, ...]:
    """Buffers whose bytes a launch reads once. Codes of outliers are read again, and experts once per pair."""
    return () if spec.layout.tables or spec.experts else spec.layout.arrays[: spec.layout.planes]


def run_prepared(
    made: Prepared, inputs: Sequence[Any], order: int = 0, schedule: int = 0, change: Callable[[str], str] | None = None
) -> Report:
    """The result of a prepared launch on a CPU with these inputs."""
    kernel, names = build(made.spec), made.spec.input_names
    return run_call(kernel, names, made.completed(inputs), made.options, order, schedule, change)


def run(
    case: Case, p: Problem, order: int = 0, schedule: int = 0, change: Callable[[str], str] | None = None
) -> Report:
    return run_launch(launch(case, p), order, schedule, change)
