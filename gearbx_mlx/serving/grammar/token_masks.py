"""Sets of tokens as bit masks, and logits of which only the tokens of a set are left.

A mask is an array of bytes: token t is in the set where bit t % 8 of byte t // 8 is set.
"""

import functools
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

# The bits of minus infinity, and the integers that have as many.
MINUS_INFINITY = {
    mx.float32: (np.uint32, 0xFF800000),
    mx.float16: (np.uint16, 0xFC00),
    mx.bfloat16: (np.uint16, 0xFF80),
}


def mask_of(tokens: Iterable[int], size: int) -> np.ndarray:
    """The mask (size,) uint8 of these tokens."""
    mask = np.zeros(size, np.uint8)
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return mask


def allow(logits: mx.array, mask: np.ndarray) -> mx.array:
    """Logits (1, V), minus infinity where a token is not in the mask; tokens beyond its end are not.

    Eight numbers are looked up for every byte of the mask, and added: on a CPU, MLX takes four times as long to select.
    """
    size = -(-logits.shape[-1] // 8)
    fitting = mask[:size] if len(mask) >= size else np.pad(mask, (0, size - len(mask)))
    bias = mx.array(_biases(logits.dtype).take(fitting, axis=0).reshape(-1)[: logits.shape[-1]])
    return logits + bias.view(logits.dtype)


@functools.cache
def _biases(dtype: mx.Dtype) -> np.ndarray:
    """For every byte, the bits of eight numbers (256, 8): 0 where a bit is set, else minus infinity."""
    kind, infinity = MINUS_INFINITY[dtype]
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, kind(0), kind(infinity))
