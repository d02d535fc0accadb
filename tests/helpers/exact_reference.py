"""A slow encoder and decoder of exact bf16 weights, in numpy: what the kernels of format `exact` are compared with."""

import mlx.core as mx
import numpy as np

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


def predicted(codes: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each weight (..., G, group): whether it is in the zero cell, and the first of its neighbours."""
    with np.errstate(all="ignore"):
        values = scales[..., None] * codes.astype(F32) + biases[..., None]
        return ~(np.abs(values) > np.abs(scales)[..., None] * F32(0.5)), (upper(values) - 144) & 0xFFFF


def encode(bits: np.ndarray, group=64) -> dict:
    """The arguments of `exact_decode` for bf16 bits (..., O, I) uint16; every group comes back."""
    words, scales, biases = mx.quantize(as_bf16(bits), group, 4)
    grouped = (*scales.shape, group)
    weights = bits.reshape(grouped).astype(np.int64)
    codes = np.array(unpack_mlx_codes(words, 4)).reshape(grouped).astype(np.int64)
    scales, biases = (as_float(bits_of(each)) for each in (scales, biases))

    near, first = predicted(codes, scales, biases)
    right = (near | (((first + ((weights - first) & 255)) & 0xFFFF) == weights)).all(-1)
    failed = ~(right & np.isfinite([scales, biases]).all(0))
    for array in (codes, scales, biases):
        array[failed] = 0
    near, _ = predicted(codes, scales, biases)
    count = near.sum(-1).reshape(-1, grouped[-2]).sum(-1)
    high = (weights >> 8)[near].astype(np.uint8)
    return {
        "codes": pack_mlx_codes(mx.array(codes.reshape(bits.shape).astype(np.uint32)), 4),
        "scales": mx.array(upper(scales).astype(np.uint16)),
        "biases": mx.array(upper(biases).astype(np.uint16)),
        "low": mx.array((weights & 255).reshape(bits.shape).astype(np.uint8)),
        "high": mx.array(high if high.size else np.zeros(1, np.uint8)),
        "offsets": mx.array(np.concatenate([[0], count.cumsum()]).astype(np.uint32)),
        "group": group,
    }
