"""Codes to words and back, in the layout of XFP, Table 3.3: no code lies across two words.

| bits | codes in a word | word   | bits unused |
| ---  | ---             | ---    | ---         |
| 2    | 16              | uint32 | 0           |
| 3    | 10              | uint32 | 2           |
| 4    | 8               | uint32 | 0           |
| 5    | 3               | uint16 | 1           |
| 6    | 5               | uint32 | 2           |

The first code is in the lowest bits. A row is packed by itself and padded to 4 bytes, with codes of 0.
"""

import math

import mlx.core as mx

LAYOUT = {2: (16, mx.uint32), 3: (10, mx.uint32), 4: (8, mx.uint32), 5: (3, mx.uint16), 6: (5, mx.uint32)}
ALIGNMENT = 4  # bytes: words of 5-bit codes come in pairs


def row_bytes(width: int, bits: int) -> int:
    """Bytes of one packed row of `width` codes, padding included."""
    held, word = LAYOUT[bits]
    return math.ceil(math.ceil(width / held) * word.size / ALIGNMENT) * ALIGNMENT


def pack_codebook_codes(codes: mx.array, bits: int) -> mx.array:
    """(..., I) unsigned codes below 2^bits to words (..., row_bytes(I, bits) / size of a word)."""
    held, word = LAYOUT[bits]
    words = row_bytes(codes.shape[-1], bits) // word.size
    missing = words * held - codes.shape[-1]
    codes = mx.pad(codes.astype(word), [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    parts = codes.reshape(*codes.shape[:-1], words, held)
    packed = parts[..., 0]
    for i in range(1, held):
        packed = packed | (parts[..., i] << (i * bits))
    return packed


def unpack_codebook_codes(words: mx.array, bits: int, width: int) -> mx.array:
    """The inverse of `pack_codebook_codes`: words to (..., width) uint8 codes."""
    held = LAYOUT[bits][0]
    codes = mx.stack([((words >> (i * bits)) & (2**bits - 1)).astype(mx.uint8) for i in range(held)], axis=-1)
    return codes.reshape(*words.shape[:-1], -1)[..., :width]
