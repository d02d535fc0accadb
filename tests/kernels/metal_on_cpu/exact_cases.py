"""Matrices in the format `exact`, encoded in numpy, and what must hold for the launches over them."""

from dataclasses import dataclass

import exact_reference
import mlx.core as mx
import numpy as np
from exact_reference import as_float

from gearbx_mlx.kernels.exact import ExactMatrix
from gearbx_mlx.kernels.metal import Launch
from gearbx_mlx.kernels.metal_exact import decode_launch, exact_launch, exact_layout

from .checks import SMALLEST, UNIT, access_fault, each, value_fault
from .checks import exact as float64
from .launch import Report

F32 = np.float32


def rounded(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest bf16 numbers."""
    return np.array(mx.array(values.astype(F32)).astype(mx.bfloat16).view(mx.uint16))


@dataclass(frozen=True)
class Packed:
    """A matrix (O, I) in the format, as numpy arrays, with groups of `group`. high: at least one byte."""

    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray
    low: np.ndarray
    high: np.ndarray
    offsets: np.ndarray
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * self.group

    @property
    def matrix(self) -> ExactMatrix:
        return ExactMatrix(**self.arguments())

    def arguments(self) -> dict:
        """The fields of an `ExactMatrix`."""
        arrays = {name: mx.array(value) for name, value in vars(self).items() if name != "group"}
        return {**arrays, "group_size": self.group}


def encode(bits: np.ndarray, group: int = 64) -> Packed:
    """bf16 bits (O, I), packed: groups that do not come back have neither scale nor codes."""
    *arrays, group = exact_reference.encode(bits, group).values()
    return Packed(*map(np.array, arrays), group)


@dataclass(frozen=True)
class ExactCase:
    """One product over a random matrix."""

    rows: int
    columns: int
    group: int = 64
    vectors: int = 1
    dtype: mx.Dtype = mx.bfloat16
    bias: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        return f"{self.rows}x{self.columns}-g{self.group}-v{self.vectors}-{kind}{'-bias' * self.bias}"


@dataclass
class Product:
    """The weight's bits (O, I), their packed matrix, activations (vectors, I) and an output bias."""

    bits: np.ndarray
    packed: Packed
    x: mx.array
    bias: mx.array | None

    def launch(self) -> Launch:
        return exact_launch(self.x, self.packed.matrix, self.bias)

    def decoder(self, chosen: mx.array | None = None) -> Launch:
        return decode_launch(self.packed.matrix, chosen)


def product(case: ExactCase, seed: int = 0) -> Product:
    """Random weights with a heavy tail, some of them 0; one group in ten has tiny ones. No NaN, no infinity."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_t(5, (case.rows, case.columns)) * 0.05
    odd = rng.random((case.rows, case.columns // case.group, 1)) < 0.1
    tiny = (weight.reshape(case.rows, -1, case.group) * np.where(odd, 1e-8, 1)).reshape(weight.shape)
    bits = rounded(np.where(rng.random(weight.shape) < 0.02, 0, tiny))
    x = mx.array(rng.standard_normal((case.vectors, case.columns)).astype(F32)).astype(case.dtype)
    bias = mx.array(rng.standard_normal(case.rows).astype(F32)).astype(case.dtype) if case.bias else None
    return Product(bits, encode(bits, case.group), x, bias)


def fault(case: ExactCase, p: Product, report: Report) -> str:
    """Return what is wrong with a product; "" if nothing is. The bound is that of a float32 sum of exact terms."""
    weight, x = as_float(p.bits).astype(np.float64), float64(p.x)
    y, terms = x @ weight.T, np.abs(x) @ np.abs(weight).T
    if p.bias is not None:
        y, terms = y + float64(p.bias), terms + np.abs(float64(p.bias))
    codes = exact_layout(case.group).codes
    roundings = case.columns / (32 * codes) + codes + 5 + 2  # steps of a lane, terms of a step, lanes, the bias
    bound = roundings * 2.0**-24 * terms + UNIT[case.dtype] * np.abs(y) + SMALLEST[case.dtype]
    return value_fault(report, y, bound) or access_fault(report, expected_reads(p, case.vectors if case.bias else 0))


def expected_reads(p: Product, bias_reads: int = 0) -> dict[str, np.ndarray]:
    """Return how often each byte has to be read: a packed one once; scales once by each lane of their group."""
    packed, begins = p.packed, np.full(len(p.packed.offsets), 64)
    begins[[0, -1]] = 32  # each lane reads the offsets at which a row's bytes begin and end
    numbers = packed.group // exact_layout(packed.group).codes
    reads = {
        "codes": each(mx.array(packed.codes), 1),
        "scales": each(mx.array(packed.scales), numbers),
        "biases": each(mx.array(packed.biases), numbers),
        "low": each(mx.array(packed.low), 1),
        "high": (np.arange(packed.high.size) < packed.offsets[-1]).astype(int),
        "offsets": np.repeat(begins, 4),
    }
    return reads | ({"bias": each(p.bias, bias_reads)} if bias_reads else {})
