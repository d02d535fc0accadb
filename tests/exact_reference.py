"""A slow encoder and decoder of exact bf16 weights, in numpy: what the kernels of format `exact` are compared with."""

import mlx.core as mx
import numpy as np

from gearbx_mlx.formats.planes import split
from gearbx_mlx.kernels.bit_planes import pack_mlx_codes, unpack_mlx_codes

F32 = np.float32


def as_float(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as float32."""
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(F32)


def upper(values: np.ndarray) -> np.ndarray:
    """The upper 16 bits of float32, as int64."""
    return (np.ascontiguousarray(values, F32).view(np.uint32) >> 16).astype(np.int64)


def as_bf16(bits: np.ndarray) -> mx.array:
    return mx.array(np.ascontiguousarray(bits, np.uint16)).view(mx.bfloat16)


def bits_of(weights: mx.array) -> np.ndarray:
    return np.array(weights.view(mx.uint16))


class Base:
    """One plane of 3 or 4 bits in `low`; a weight in the zero cell takes a byte of `high` too."""

    mask = 255

    def __init__(self, widths, group):
        self.widths, self.group = list(widths), group

    def quantize(self, weight):
        words, scales, biases = mx.quantize(weight, self.group, self.widths[0])
        return [unpack_mlx_codes(words, self.widths[0])], scales, [biases]

    def values(self, q, s, b):
        """For each weight: the low gear's value, whether it is in the zero cell, the first of its neighbours."""
        with np.errstate(all="ignore"):
            v = s[..., None] * q[0].astype(F32) + b[0][..., None]
            return ~(np.abs(v) > np.abs(s)[..., None] * F32(0.5)), (upper(v) - 144) & 0xFFFF

    def fill(self, near, weights, s):
        """The bytes of weights in the zero cell, and the weights that come back from them."""
        return weights >> 8, weights

    def stored(self, low):
        return mx.array(low.astype(np.uint8))

    def bytes_of(self, raw, near, code, weights):
        return code[near]


class Planes(Base):
    """Planes of 4 and 4 bits; `low` is 5 bits, and a weight near zero takes a byte, or two in groups of scale 0."""

    mask = 31

    def quantize(self, weight):
        planes = split(weight, (4, 4), self.group)
        return [unpack_mlx_codes(words, 4) for words in planes.weights], planes.scales, planes.biases

    def values(self, q, s, b):
        with np.errstate(all="ignore"):
            step, offset = s * F32(2**-4), b[0] + b[1] * F32(2**-4)
            v = step[..., None] * (q[0] * 16 + q[1]).astype(F32) + offset[..., None]
            return ~(np.abs(v) >= F32(8.8) * np.abs(step)[..., None]), (upper(v) - 16) & 0xFFFF

    def fill(self, near, weights, s):
        with np.errstate(all="ignore"):
            top = upper(np.abs(s) * F32(2**-4) * F32(16))[..., None]
        distance = np.where(weights & 0x7FFF, (top - (weights & 0xFFF)) & 0xFFF, 0xF80 | (top - weights) & 31)
        sign = weights >> 15
        back = sign << 15 | np.where(distance >= 0xF80, 0, top - distance) & 0xFFFF
        return sign << 7 | distance >> 5, back

    def stored(self, low):
        return pack_mlx_codes(mx.array(low.astype(np.uint32)), 5)

    def bytes_of(self, raw, near, code, weights):
        out = []
        for group in np.ndindex(near.shape[:-1]):
            if raw[group]:
                out.append(np.stack([weights[group] & 255, weights[group] >> 8], -1).reshape(-1))
            else:
                out.append(code[group][near[group]])
        return np.concatenate(out)


def encode(bits: np.ndarray, widths=(4,), group=64) -> dict:
    """The arguments of `exact_decode` for bf16 bits (..., O, I) uint16; every group comes back."""
    form = (Base if len(widths) == 1 else Planes)(widths, group)
    q, scales, biases = form.quantize(as_bf16(bits))
    grouped = (*scales.shape, group)
    weights = bits.reshape(grouped).astype(np.int64)
    q = [np.array(each).reshape(grouped).astype(np.int64) for each in q]
    s, b = as_float(bits_of(scales)), [as_float(bits_of(each)) for each in biases]

    near, first = form.values(q, s, b)
    low = weights & form.mask
    code, back = form.fill(near, weights, s)
    right = np.where(near, back == weights, ((first + ((low - first) & form.mask)) & 0xFFFF) == weights).all(-1)
    failed = ~(right & np.isfinite([s, *b]).all(0))
    for array in (s, *b):
        array[failed] = 0
    for codes in q:
        codes[failed] = 0
    near, _ = form.values(q, s, b)
    code, _ = form.fill(near, weights, s)
    raw = s == 0
    count = np.where(raw, group * (1 if len(widths) == 1 else 2), near.sum(-1)).reshape(-1, grouped[-2]).sum(-1)
    high = form.bytes_of(raw, near, code, weights).astype(np.uint8)
    return {
        "weights": [pack_mlx_codes(mx.array(c.reshape(bits.shape).astype(np.uint32)), w) for c, w in zip(q, widths)],
        "scales": mx.array(upper(s).astype(np.uint16)),
        "biases": [mx.array(upper(each).astype(np.uint16)) for each in b],
        "low": form.stored(low.reshape(bits.shape)),
        "high": mx.array(high if high.size else np.zeros(1, np.uint8)),
        "offsets": mx.array(np.concatenate([[0], count.cumsum()]).astype(np.uint32)),
        "widths": list(widths),
        "group": group,
    }
