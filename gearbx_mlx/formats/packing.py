"""Pack codes into words as `mx.quantize` does: a little-endian stream of bits, 32 codes in `bits` words."""

import mlx.core as mx

CODES = 32


def pack_mlx_codes(codes: mx.array, bits: int) -> mx.array:
    """Unsigned codes (..., n), below 2^bits, packed into (..., n * bits / 32) uint32; n is a multiple of 32."""
    groups = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, CODES)
    words: list[mx.array | None] = [None] * bits

    def put(index: int, value: mx.array) -> None:
        word = words[index]
        words[index] = value if word is None else word | value

    for i in range(CODES):
        index, shift = divmod(i * bits, 32)
        put(index, groups[..., i] << shift)
        if shift + bits > 32:  # the code spans two words
            put(index + 1, groups[..., i] >> (32 - shift))
    return mx.stack([w for w in words if w is not None], axis=-1).reshape(*codes.shape[:-1], -1)


def unpack_mlx_codes(words: mx.array, bits: int) -> mx.array:
    """The inverse of `pack_mlx_codes`: (..., n * bits / 32) uint32 to (..., n) uint32 codes."""
    groups = words.reshape(*words.shape[:-1], -1, bits)
    mask = (1 << bits) - 1
    codes = []
    for i in range(CODES):
        index, shift = divmod(i * bits, 32)
        code = groups[..., index] >> shift
        if shift + bits > 32:
            code = code | (groups[..., index + 1] << (32 - shift))
        codes.append(code & mask)
    return mx.stack(codes, axis=-1).reshape(*words.shape[:-1], -1)
