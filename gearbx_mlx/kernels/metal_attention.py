"""Metal launches for attention in which a query has the same bits whichever other queries are in the call.

MLX's own attention changes with the number of queries and of keys (metal/README.md). Two launches: blocks of keys each
by themselves, then the blocks put together. Nothing of a query depends on keys that it does not see.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..errors import GearbxError
from .metal import DTYPES, LANES, MAX_VECTORS, Launch, Prepared, options
from .metal_text import TextKernel
from .shapes import are_attention

BLOCK = 128  # keys of a threadgroup: predicted to be enough work for one, and few enough to use many
SIMD_GROUPS = 8
MOST_QUERIES = 16 * SIMD_GROUPS  # of a threadgroup; a SIMD group keeps the sums of its own in registers
TILE, TILE_BYTES = 32, 32 * 1024  # keys in threadgroup memory at a time, and its size
JOIN_THREADS = 64
CONTEXTS = 1024  # lengths of the KV cache, in blocks, for which launches are kept


def padding(dtype: mx.Dtype) -> int:
    """Elements of 4 bytes together between two keys in threadgroup memory."""
    return 4 // dtype.size


@dataclass(frozen=True)
class Entries:
    """How keys and values lie in the KV cache, as buffers and macros of metal/attention.metal.

    arrays: names of the buffers, of keys and of values. macros: names and values. library: a text with their functions.
    """

    arrays: tuple[str, ...] = ("keys", "values")
    macros: tuple[tuple[str, int], ...] = (("ENTRIES", 1), ("PLANES", 0))
    library: str = ""


DENSE = Entries()


def takes_attention(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> bool:
    """Whether `attention` takes these arguments: shapes, types, 1 to 16 queries, keys that fit threadgroup memory."""
    dtype = queries.dtype
    if dtype not in DTYPES or not are_attention(queries, keys, values, mask):
        return False
    return queries.shape[2] <= MAX_VECTORS and fits_tile(queries.shape[3], dtype)


def fits_tile(width: int, dtype: mx.Dtype) -> bool:
    """Whether a tile of heads of this width fits threadgroup memory."""
    return TILE * (width + padding(dtype)) * dtype.size <= TILE_BYTES


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """softmax(scale * queries keys^T) values, (B, H, L, D) of the queries' type; sums are in float32.

    A query that sees no key gets zeros. Arguments and errors as for `parts_launch`.
    """
    parts = parts_launch(queries, keys, values, scale, mask).run()
    return join_launch(parts, queries.dtype).run()


def parts_launch(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> Launch:
    """The launch for the sums over each block of keys, (B, H, L, blocks, D + 2) float32 (metal/attention.metal).

    Arrays are read by their strides, so that a cache which has room for more keys is not copied.

    Args:
        queries: (B, H, L, D) float16, bfloat16 or float32, L of 1 to 16.
        keys, values: (B, H / a whole number, S, D) of the same type, S >= L.
        mask: "causal"; a bool array that broadcasts to (B, H, L, S), true for keys that a query sees; or None for all.

    Raises:
        GearbxError: the arguments do not fit each other, or are too wide for threadgroup memory.
    """
    if not takes_attention(queries, keys, values, mask):
        raise GearbxError(
            f"attention of queries {queries.shape} {queries.dtype}, keys {keys.shape} {keys.dtype} and values "
            f"{values.shape} {values.dtype} has no Metal kernel"
        )
    return entries_launch(queries, keys.shape[1], keys.shape[2], (keys, values), DENSE, scale, mask)


def entries_launch(
    queries: mx.array,
    kv_heads: int,
    key_count: int,
    arrays: Sequence[mx.array],
    entries: Entries,
    scale: float,
    mask: mx.array | str | None,
) -> Launch:
    """`parts_launch` for keys and values that lie in arrays as `entries` says, and are known to fit the queries."""
    masked = isinstance(mask, mx.array)
    masks = [mx.broadcast_to(mask, (*queries.shape[:3], key_count))] if isinstance(mask, mx.array) else []
    blocks, hides = math.ceil(key_count / BLOCK), "some" if masked else mask
    prepared = _parts_prepared(queries.shape, queries.dtype, kv_heads, blocks, hides, float(scale), entries)
    return Launch(prepared, (queries, *arrays, *masks))


@functools.lru_cache(CONTEXTS)
def _parts_prepared(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    kv_heads: int,
    blocks: int,
    hides: str | None,
    scale: float,
    entries: Entries,
) -> Prepared:
    """For queries of this shape and type; keys in so many blocks; `hides`: "causal", "some" for a mask, or None."""
    batch, heads, length, width = shape
    own_heads = heads_together(heads // kv_heads, length)
    masked = hides == "some"
    macros = {
        "DIMS": width,
        "HEADS": own_heads,
        "BLOCK": BLOCK,
        "QUERIES": 2 ** math.ceil(math.log2(math.ceil(own_heads * length / SIMD_GROUPS))),
        "SIMD_GROUPS": SIMD_GROUPS,
        "CAUSAL": int(hides == "causal"),
        "MASKED": int(masked),
        "PADDING": padding(dtype),
        "TILE": TILE,
        "THREADS": SIMD_GROUPS * LANES,
    }
    names = ("queries", *entries.arrays, *(["mask"] if masked else []), "scale")
    once = entries.arrays if own_heads == heads // kv_heads else ()
    kernel = TextKernel(
        "attention",
        dtype,
        names,
        (*macros.items(), *entries.macros),
        strided=True,
        read_once=once,
        library=entries.library,
    )
    threadgroups, threadgroup = batch * heads // own_heads * blocks, SIMD_GROUPS * LANES
    sums = (batch, heads, length, blocks, width + 2)
    return Prepared(kernel, options(threadgroups * threadgroup, threadgroup, sums, mx.float32), (mx.array(scale),))


def heads_together(heads: int, length: int) -> int:
    """How many query heads of a KV head a threadgroup computes: all of them, if it has room for their queries."""
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * length <= MOST_QUERIES))


def join_launch(parts: mx.array, dtype: mx.Dtype) -> Launch:
    """The launch for (B, H, L, D) of type `dtype`, from the sums over blocks of `parts_launch`."""
    return Launch(_join_prepared((*parts.shape[:3], parts.shape[4] - 2), dtype), (parts,))


@functools.cache
def _join_prepared(shape: tuple[int, ...], dtype: mx.Dtype) -> Prepared:
    """For a result of this shape and type."""
    kernel = TextKernel("attention_join", dtype, ("parts",), (("DIMS", shape[3]),))
    threads = math.prod(shape)
    return Prepared(kernel, options(threads, min(threads, JOIN_THREADS), shape, dtype))
