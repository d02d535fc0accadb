"""Keys and values as nested planes: the first 4 bits of every number are a coarse copy, 4 further bits refine it.

Each position is quantized by itself, so that a cache appends and trims at any position. A number is

    in the gear of the first plane:   offset + scale * c0
    with the planes after it:         offset + scale * (c0 + c1 / 2^w1 + ... - (1 - 2^-(w1 + ...)) / 2)

so a coarse number is the middle of the range that the further bits choose from, as in planes.py.

Layout, for vectors (..., D) in groups of G numbers along D, the last axis:

- planes[i]: (..., D * widths[i] / 32) uint32, most significant plane first, contiguous. A word has 32 / width codes of
  consecutive numbers, the first in the lowest bits, as `mx.quantize` packs them: planes[0] with scales and offsets is
  MLX's own affine weight where it has such groups. There is no padding: D * width is a multiple of 32.
- scales, offsets: (..., D / G), of the type of the vectors.

With vectors (batch, heads, positions, D) the strides of a plane are those of such an array: from position to position
D * width / 32 words. The capacity of a cache may be larger than its positions; the rest is not read.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..errors import GearbxError
from .planes import fit

WORD = 32
GROUPS = (32, 16, 8)  # numbers that share a scale, the preferred size first (docs/kv_gears.md)


def group_for(dims: int) -> int | None:
    """The group size for heads of so many numbers; None if none divides them."""
    return next((size for size in GROUPS if dims % size == 0), None)


def pack(vectors: mx.array, widths: Sequence[int], group_size: int) -> tuple[list[mx.array], mx.array, mx.array]:
    """The planes, scales and offsets of vectors (..., D); the layout stands above.

    Args:
        vectors: floating.
        widths: bits of each plane, most significant first: powers of two, 8 at most together.
        group_size: divides D; a multiple of 8.

    Raises:
        GearbxError: widths or a group size that do not fit.
    """
    check(vectors.shape[-1], widths, group_size)
    bits = sum(widths)
    grouped = vectors.astype(mx.float32).reshape(*vectors.shape[:-1], -1, group_size)
    scales, offsets = fit(grouped, widths, vectors.dtype)
    step, least = finest(scales, offsets, widths)
    codes = mx.clip(mx.round((grouped - least[..., None]) / step[..., None]), 0, 2**bits - 1).astype(mx.uint32)
    planes, unread = [], bits
    for width in widths:
        unread -= width
        plane = ((codes >> unread) & (2**width - 1)).reshape(*vectors.shape[:-1], -1, WORD // width)
        planes.append((plane << mx.arange(0, WORD, width, dtype=mx.uint32)).sum(axis=-1))
    return planes, scales.astype(vectors.dtype), offsets.astype(vectors.dtype)


def unpack(
    planes: Sequence[mx.array], scales: mx.array, offsets: mx.array, widths: Sequence[int], bits: int
) -> mx.array:
    """The vectors (..., D), of the scales' type, that the gear with `bits` reads: the first few planes."""
    codes = mx.zeros((*planes[0].shape[:-1], planes[0].shape[-1] * WORD // widths[0]), mx.uint32)
    read: list[int] = []
    for plane, width in zip(planes, widths):
        if sum(read) == bits:
            break
        read.append(width)
        places = mx.arange(0, WORD, width, dtype=mx.uint32)
        further = (plane[..., None] >> places) & (2**width - 1)
        codes = (codes << width) | further.reshape(codes.shape)
    step, least = finest(scales.astype(mx.float32), offsets.astype(mx.float32), read)
    grouped = codes.reshape(*scales.shape, -1).astype(mx.float32)
    return (grouped * step[..., None] + least[..., None]).reshape(codes.shape).astype(scales.dtype)


def finest(scales: mx.array, offsets: mx.array, widths: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Step and least number of the codes of all these planes together, float32."""
    share = 2.0 ** -sum(widths[1:])
    return scales * share, offsets - scales * ((1 - share) / 2)


def check(dims: int, widths: Sequence[int], group_size: int) -> None:
    """Raises GearbxError for planes that cannot be made of vectors of `dims` numbers."""
    if not widths or any(width not in (1, 2, 4, 8) for width in widths) or sum(widths) > 8:
        raise GearbxError(f"planes of {'+'.join(map(str, widths))} bits: give 1, 2, 4 or 8 bits each, 8 together")
    if group_size % 8 or dims % group_size or any(dims * width % WORD for width in widths):
        raise GearbxError(f"groups of {group_size} numbers do not fit vectors of {dims}; give one that divides them")
