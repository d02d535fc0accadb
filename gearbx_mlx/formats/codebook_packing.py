"""Pack codes of codebooks into words, in the layout of XFP, Table 3.3: no code spans two words.

| bits | codes in a word | word   | bits unused |
| ---  | ---             | ---    | ---         |
| 2    | 16              | uint32 | 0           |
| 3    | 10              | uint32 | 2           |
| 4    | 8               | uint32 | 0           |
| 5    | 3               | uint16 | 1           |
| 6    | 5               | uint32 | 2           |

The first code is in the lowest bits. Rows are packed one by one and padded to 4 bytes with codes of 0.
"""

import math

import mlx.core as mx

LAYOUT = {2: (16, mx.uint32), 3: (10, mx.uint32), 4: (8, mx.uint32), 5: (3, mx.uint16), 6: (5, mx.uint32)}
ALIGNMENT = 4  # bytes: words of 5-bit codes come in pairs


def row_bytes(width: int, bits: int) -> int:
    """Bytes of one packed row of `width` codes, padding included."""
    count, word = LAYOUT[bits]
    return math.ceil(math.ceil(width / count) * word.size / ALIGNMENT) * ALIGNMENT


def pack_codebook_codes(codes: mx.array, bits: int) -> mx.array:
    """Unsigned codes (..., I), below 2^bits, packed into words (..., row_bytes(I, bits) / size of a word)."""
    count, word = LAYOUT[bits]
    words = row_bytes(codes.shape[-1], bits) // word.size
    missing = words * count - codes.shape[-1]
    codes = mx.pad(codes.astype(word), [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    parts = codes.reshape(*codes.shape[:-1], words, count)
    packed = parts[..., 0]
    for i in range(1, count):
        packed = packed | (parts[..., i] << (i * bits))
    return packed


def unpack_codebook_codes(words: mx.array, bits: int, width: int) -> mx.array:
    """The inverse of `pack_codebook_codes`: words to (..., width) uint8 codes."""
    count = LAYOUT[bits][0]
    codes = mx.stack([((words >> (i * bits)) & (2**bits - 1)).astype(mx.uint8) for i in range(count)], axis=-1)
    return codes.reshape(*words.shape[:-1], -1)[..., :width]
