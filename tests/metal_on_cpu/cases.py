"""Matrices for the kernels, what they should give, and what must hold of every launch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from gearbx_mlx.formats.packing import unpack
from gearbx_mlx.formats.planes import split
from gearbx_mlx.kernels.metal import Launch, build, prepare
from gearbx_mlx.kernels.reference import plane_shifts

from .launch import Report, run_call

UNIT = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}  # half the distance of neighbours, relative
SMALLEST = {mx.float16: 2.0**-25, mx.bfloat16: 2.0**-134, mx.float32: 2.0**-150}


@dataclass(frozen=True)
class Case:
    """One product: rows x columns, as many planes as `widths` says, and how it is computed."""

    widths: tuple[int, ...]
    rows: int
    columns: int
    group_size: int = 64
    vectors: int = 1
    dtype: mx.Dtype = mx.float16
    variant: str = "registers"
    bias: bool = False

    def __str__(self) -> str:
        widths = "+".join(map(str, self.widths))
        kind = str(self.dtype).removeprefix("mlx.core.")
        shape = f"{self.rows}x{self.columns}-g{self.group_size}-v{self.vectors}"
        return f"{widths}bit-{shape}-{kind}-{self.variant}{'-bias' if self.bias else ''}"


@dataclass
class Problem:
    """The arrays of a case: (vectors, columns) activations, planes, an output bias."""

    x: mx.array
    weights: Sequence[mx.array]
    scales: mx.array
    biases: Sequence[mx.array]
    bias: mx.array | None


def problem(case: Case, seed: int = 0) -> Problem:
    """Random weights, quantized as the formats do: one plane by MLX, several by `split`."""
    mx.random.seed(seed)
    weight = (mx.random.normal((case.rows, case.columns)) * 0.1 + 0.02).astype(case.dtype)
    x = mx.random.normal((case.vectors, case.columns)).astype(case.dtype)
    bias = mx.random.normal((case.rows,)).astype(case.dtype) if case.bias else None
    if len(case.widths) == 1 and case.widths[0] in (2, 3, 4, 5, 6, 8):
        words, scales, biases = mx.quantize(weight, group_size=case.group_size, bits=case.widths[0])
        return Problem(x, [words], scales, [biases], bias)
    planes = split(weight, case.widths, case.group_size)
    return Problem(x, planes.weights, planes.scales, planes.biases, bias)


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def expected(case: Case, p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how far a float32 sum, rounded to the type of x, may be from it.

    The bound is the usual one for a sum: as many roundings as a term goes through, each relative to the sum of the
    absolute values of what is added.
    """
    scales = exact(p.scales)[..., None]
    weight, size = np.zeros(1), np.zeros(1)
    for words, bias, width, shift in zip(p.weights, p.biases, case.widths, plane_shifts(case.widths)):
        codes = np.array(unpack(words, width)).reshape(*p.scales.shape, case.group_size).astype(np.float64)
        offset = exact(bias)[..., None]
        weight = weight + (scales * codes + offset) * 2.0**-shift
        size = size + (np.abs(scales) * codes + np.abs(offset)) * 2.0**-shift
    flat = (case.rows, case.columns)
    y = exact(p.x) @ weight.reshape(flat).T
    terms = np.abs(exact(p.x)) @ size.reshape(flat).T
    if p.bias is not None:
        y, terms = y + exact(p.bias), terms + np.abs(exact(p.bias))
    roundings = case.columns / 512 + 16 + 5 + 8  # steps of a lane, values of a step, lanes, scales and planes
    return y, roundings * 2.0**-24 * terms + UNIT[case.dtype] * np.abs(y) + SMALLEST[case.dtype]


def launch(case: Case, p: Problem) -> Launch:
    return prepare(p.x, p.weights, p.scales, p.biases, case.widths, case.group_size, p.bias, case.variant)


def run(
    case: Case, p: Problem, order: int = 0, schedule: int = 0, change: Callable[[str], str] | None = None
) -> Report:
    """What the case does on a CPU. `change` breaks the kernel's text."""
    made = launch(case, p)
    kernel = build(made.spec)
    return run_call(kernel, made.spec.input_names, made.inputs, made.options, order, schedule, change)


def only(counts: np.ndarray, size: int, times: int) -> bool:
    """Each of the first `size` bytes was touched so many times, and what is after them (padding) never."""
    return bool((counts[:size] == times).all() and not counts[size:].any())


def fault(case: Case, p: Problem, report: Report) -> str:
    """What is wrong with a launch; "" if nothing is."""
    if report.error:
        return report.error
    y, bound = expected(case, p)
    off = np.abs(report.out[0] - y) / bound
    if not (off <= 1).all():
        return f"result is {np.nanmax(off):.3g} times the rounding bound off"
    for i, words in enumerate(p.weights):
        if not only(report.reads[f"w{i}"], words.nbytes, 1):
            return f"packed bytes of plane {i} are not read exactly once"
    lanes = case.group_size // 16  # so many lanes of one SIMD group read a scale together
    for name, array in [("scales", p.scales), *((f"b{i}", b) for i, b in enumerate(p.biases))]:
        if not only(report.reads[name], array.nbytes, lanes):
            return f"{name} are not read once by each lane that needs them"
    if p.bias is not None and not only(report.reads["bias"], p.bias.nbytes, case.vectors):
        return "the output bias is not read exactly once for each vector"
    if not only(report.writes["out"], report.writes["out"].size, 1):
        return "outputs are not written exactly once"
    return ""
