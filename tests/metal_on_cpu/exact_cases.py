"""Matrices in the format `exact`, encoded in numpy, and what must hold of the launches over them."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from gearbx_mlx.formats.packing import pack_mlx_codes, unpack_mlx_codes
from gearbx_mlx.formats.planes import split
from gearbx_mlx.kernels.metal import Launch
from gearbx_mlx.kernels.metal_exact import decode_launch, exact_launch

from .checks import CODES, SMALLEST, UNIT, each
from .checks import exact as float64
from .launch import Report

F32 = np.float32


def floats(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as float32."""
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(F32)


def rounded(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest bf16 numbers."""
    return np.array(mx.array(values.astype(F32)).astype(mx.bfloat16).view(mx.uint16))


@dataclass(frozen=True)
class Packed:
    """A matrix (O, I) in the format, as numpy arrays; `widths` and `group` say how. high: at least one byte."""

    weights: list[np.ndarray]
    scales: np.ndarray
    biases: list[np.ndarray]
    low: np.ndarray
    high: np.ndarray
    offsets: np.ndarray
    widths: tuple[int, ...]
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * self.group

    def arguments(self) -> dict:
        """Those of `decode_launch`; with x, of `exact_launch`."""
        return {
            "weights": [mx.array(each) for each in self.weights],
            "scales": mx.array(self.scales),
            "biases": [mx.array(each) for each in self.biases],
            "low": mx.array(self.low),
            "high": mx.array(self.high),
            "offsets": mx.array(self.offsets),
            "widths": self.widths,
            "group_size": self.group,
        }


def values(codes: np.ndarray, scale: np.ndarray, biases: list[np.ndarray]) -> np.ndarray:
    """What codes of all planes together (O, G, group) stand for, float32; the sum is the one rounding."""
    with np.errstate(all="ignore"):
        if len(biases) == 1:
            return scale[..., None] * codes.astype(F32) + floats(biases[0])[..., None]
        offset = floats(biases[0]) + floats(biases[1]) * F32(2.0**-4)
        return (scale * F32(2.0**-4))[..., None] * codes.astype(F32) + offset[..., None]


def encode(bits: np.ndarray, widths: tuple[int, ...] = (4,), group: int = 64) -> Packed:
    """bf16 bits (O, I), packed: groups that do not come back have neither scale nor codes."""
    w, middle = bits.reshape(len(bits), -1, group), len(widths) == 2
    dense = mx.array(bits).view(mx.bfloat16)
    if middle:
        made = split(dense, widths, group)
        words, scales, biases = made.weights, made.scales, made.biases
    else:
        first, scales, bias = mx.quantize(dense, group, widths[0])
        words, biases = [first], [bias]
    codes = [np.array(unpack_mlx_codes(each, width)).reshape(w.shape) for each, width in zip(words, widths)]
    scales, biases = np.array(scales.view(mx.uint16)), [np.array(each.view(mx.uint16)) for each in biases]
    all_codes = codes[0] * 16 + codes[1] if middle else codes[0]
    _, back, _ = _round_trip(w, all_codes, scales, biases)
    bad = (back != w).any(-1) | ~np.all([np.isfinite(floats(each)) for each in (scales, *biases)], axis=0)
    for array in (scales, *biases, *codes):
        array[bad] = 0
    all_codes = codes[0] * 16 + codes[1] if middle else codes[0]
    near, _, extra = _round_trip(w, all_codes, scales, biases)
    high, counts = _high(w, near, extra, bad if middle else np.zeros_like(bad))
    low = pack_mlx_codes(mx.array(bits & 31), 5) if middle else mx.array((bits & 255).astype(np.uint8))
    flat = [np.array(pack_mlx_codes(mx.array(c.reshape(bits.shape)), width)) for c, width in zip(codes, widths)]
    offsets = np.r_[0, counts.cumsum()].astype(np.uint32)
    return Packed(flat, scales, biases, np.array(low), high, offsets, widths, group)


def _round_trip(
    w: np.ndarray, codes: np.ndarray, scales: np.ndarray, biases: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which weights are near zero, what all decode to, and the byte of each that is near zero."""
    middle = len(biases) == 2
    scale = floats(scales)
    v, wide = values(codes, scale, biases), w.astype(np.int64)
    with np.errstate(all="ignore"):
        if middle:
            near = ~(np.abs(v) >= (F32(8.8) * (np.abs(scale) * F32(2.0**-4)))[..., None])
        else:
            near = ~(np.abs(v) > np.abs(scale)[..., None] * F32(0.5))
    mask, window = (31, 16) if middle else (255, 144)
    first = (v.view(np.uint32) >> 16).astype(np.int64) - window
    far = (first + ((wide - first) & mask)) & 0xFFFF
    if not middle:
        return near, np.where(near, wide, far), wide >> 8
    top = (scales.astype(np.int64) & 0x7FFF)[..., None]
    magnitude, sign = wide & 0x7FFF, wide >> 15
    below = np.where(magnitude == 0, 0xF80 | (top & 31), top - magnitude)
    back = sign << 15 | np.where(below >= 0xF80, 0, top - below) & 0x7FFF
    back = np.where((below >= 0) & (below < 0x1000), back, -1)
    return near, np.where(near, back, far), sign << 7 | below >> 5 & 0x7F


def _high(w: np.ndarray, near: np.ndarray, extra: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of `high`, at least one, and their number in each row."""
    rows = []
    for row in range(len(w)):
        parts = [np.zeros(0, np.uint8)]
        for g in range(w.shape[1]):
            one = w[row, g]
            parts.append(one.astype("<u2").view(np.uint8) if whole[row, g] else extra[row, g][near[row, g]])
        rows.append(np.concatenate(parts).astype(np.uint8))
    high = np.concatenate(rows)
    return high if high.size else np.zeros(1, np.uint8), np.array([row.size for row in rows])


@dataclass(frozen=True)
class ExactCase:
    """One product over a random matrix."""

    widths: tuple[int, ...]
    rows: int
    columns: int
    group: int = 64
    vectors: int = 1
    dtype: mx.Dtype = mx.bfloat16
    bias: bool = False

    def __str__(self) -> str:
        widths = "+".join(map(str, self.widths))
        kind = str(self.dtype).removeprefix("mlx.core.")
        return f"{widths}bit-{self.rows}x{self.columns}-g{self.group}-v{self.vectors}-{kind}{'-bias' * self.bias}"

    def of(self, vectors: int) -> "ExactCase":
        return replace(self, vectors=vectors)


@dataclass
class Product:
    """The weight's bits (O, I), the matrix that they are packed to, activations (vectors, I) and an output bias."""

    bits: np.ndarray
    packed: Packed
    x: mx.array
    bias: mx.array | None

    def launch(self) -> Launch:
        return exact_launch(self.x, **self.packed.arguments(), bias=self.bias)

    def decoder(self, first_row: int = 0, rows: int | None = None) -> Launch:
        return decode_launch(**self.packed.arguments(), first_row=first_row, rows=rows)


def product(case: ExactCase, seed: int = 0) -> Product:
    """Random weights with a heavy tail, some of them 0; a group in ten has tiny ones. No NaN, no infinity."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_t(5, (case.rows, case.columns)) * 0.05
    odd = rng.random((case.rows, case.columns // case.group, 1)) < 0.1
    tiny = (weight.reshape(case.rows, -1, case.group) * np.where(odd, 1e-8, 1)).reshape(weight.shape)
    bits = rounded(np.where(rng.random(weight.shape) < 0.02, 0, tiny))
    x = mx.array(rng.standard_normal((case.vectors, case.columns)).astype(F32)).astype(case.dtype)
    bias = mx.array(rng.standard_normal(case.rows).astype(F32)).astype(case.dtype) if case.bias else None
    return Product(bits, encode(bits, case.widths, case.group), x, bias)


def fault(case: ExactCase, p: Product, report: Report) -> str:
    """What is wrong with a product; "" if nothing is. The bound is that of a float32 sum of exact terms."""
    if report.error:
        return report.error
    weight, x = floats(p.bits).astype(np.float64), float64(p.x)
    y, terms = x @ weight.T, np.abs(x) @ np.abs(weight).T
    if p.bias is not None:
        y, terms = y + float64(p.bias), terms + np.abs(float64(p.bias))
    roundings = case.columns / (32 * CODES) + CODES + 5 + 2  # steps of a lane, terms of a step, lanes, the bias
    bound = roundings * 2.0**-24 * terms + UNIT[case.dtype] * np.abs(y) + SMALLEST[case.dtype]
    off = np.abs(report.out[0] - y) / bound
    if not (off <= 1).all():
        return f"result is {np.nan_to_num(off, nan=np.inf).max():.3g} times the rounding bound off"
    return access_fault(p, report, case.vectors if case.bias else 0)


def access_fault(p: Product, report: Report, bias_reads: int = 0) -> str:
    """Whether each packed byte is read once, and each output written once; scales once by each lane of their group."""
    if not (report.writes["out"] == 1).all():
        return "outputs are not written exactly once"
    packed, begins = p.packed, np.full(len(p.packed.offsets), 64)
    begins[[0, -1]] = 32  # each lane reads where a row's bytes begin and end
    numbers = packed.group // CODES
    wanted = {
        **{f"w{i}": each(mx.array(words), 1) for i, words in enumerate(packed.weights)},
        "scales": each(mx.array(packed.scales), numbers),
        **{f"b{i}": each(mx.array(bias), numbers) for i, bias in enumerate(packed.biases)},
        "low": each(mx.array(packed.low), 1),
        "high": (np.arange(packed.high.size) < packed.offsets[-1]).astype(int),
        "offsets": np.repeat(begins, 4),
    }
    if bias_reads:
        wanted["bias"] = each(p.bias, bias_reads)
    for name, counts in wanted.items():
        found = report.reads[name]  # small buffers are padded, with what must not be read
        if not (found[: counts.size] == counts.ravel()).all() or found[counts.size :].any():
            return f"bytes of {name} are not read exactly as often as they should be"
    return ""
