"""Metal launches for attention and rotary positions: a query's bits do not depend on the other queries in the call.

MLX's own attention changes with the number of queries and of keys, and so do its rotary positions with the number of
rows (metal/README.md). Attention takes two launches: blocks of keys each by themselves, then the blocks put together.
Nothing of a query depends on keys that it does not see.

Keys and values may lie in nested planes (formats/kv_cache.py), which are unpacked in threadgroup memory alone. A gear
of the first plane reads no byte of the second one. Planes may end before the last position; the positions after them
are read as they are.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from ..errors import GearbxError
from .metal import LANES, MAX_VECTORS, METAL_DTYPES, MIN_ELEMENTS, Launch, Prepared, TextKernel, options

BLOCK_KEYS = 128  # keys of a threadgroup: predicted to be enough work for one, and few enough to use many
ATTENTION_SIMD_GROUPS = 8
# Numbers that a lane keeps of its SIMD group's queries: of each its sums, and best, total and weight. A thread has 128
# registers on Apple's cores, and addresses, keys and queries need as many again (metal/README.md).
MAX_KEPT = 48
TILE_KEYS = 32  # keys in threadgroup memory at a time

WORD_BITS = 32  # bits

Arrays = Sequence[mx.array]  # of keys, or of values: one plane or two, scales, offsets (formats/kv_cache.py)


@dataclass(frozen=True)
class Entries:
    """How keys and values lie in the KV cache, as buffers and macros of metal/attention.metal.

    arrays: names of the buffers, of keys and of values. macros: names and values. libraries: texts with functions.
    """

    arrays: tuple[str, ...] = ("keys", "values")
    macros: tuple[tuple[str, int], ...] = (("ENTRIES", 1), ("PLANES", 0))
    libraries: tuple[str, ...] = ("loads",)


PLAIN_ENTRIES = Entries()


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array | None:
    """softmax(scale * queries keys^T) values, (B, H, L, D) of the queries' type; None if there is no kernel for it.

    Sums are in float32. A query that sees no key gets zeros. Arguments as for `parts_launch`.
    """
    return join_blocks(parts_launch(queries, keys, values, scale, mask), queries.dtype)


def takes_attention(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> bool:
    """Return whether `attention` takes these arguments: shapes, types, 1 to 16 queries, keys that fit threadgroup
    memory."""
    dtype = queries.dtype
    if dtype not in METAL_DTYPES or not are_attention(queries, keys, values, mask):
        return False
    return queries.shape[2] <= MAX_VECTORS and fits_tile(queries.shape[3], dtype)


def fits_tile(width: int, dtype: mx.Dtype) -> bool:
    """Return whether a tile of heads of this width, taken four numbers at a time, fits threadgroup memory."""
    return width % 4 == 0 and TILE_KEYS * (width + padding(dtype)) * dtype.size <= 32 * 1024


def padding(dtype: mx.Dtype) -> int:
    """Elements of 4 bytes together between two keys in threadgroup memory."""
    return 4 // dtype.size


def parts_launch(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> Launch | None:
    """Return the launch for the sums over each block of keys, (B, H, L, blocks, D + 2) float32 (metal/attention.metal).

    None for arguments that do not fit each other, or are too wide for threadgroup memory.

    Arrays are read by their strides, so that a cache which has room for more keys is not copied.

    Args:
        queries: (B, H, L, D) float16, bfloat16 or float32, L of 1 to 16.
        keys, values: (B, H / a whole number, S, D) of the same type, S >= L.
        mask: "causal"; a bool array that broadcasts to (B, H, L, S), true for keys that a query sees; or None for all.
    """
    if not takes_attention(queries, keys, values, mask):
        return None
    return entries_launch(queries, keys.shape[1], keys.shape[2], (keys, values), PLAIN_ENTRIES, scale, mask)


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
    blocks, hides = math.ceil(key_count / BLOCK_KEYS), "some" if masked else mask
    prepared = _parts_prepared(queries.shape, queries.dtype, kv_heads, blocks, hides, float(scale), entries)
    return Launch(prepared, (queries, *arrays, *masks))


@functools.lru_cache(1024)  # lengths of the KV cache, in blocks
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
    own_heads = heads_together(heads // kv_heads, length, width)
    masked = hides == "some"
    macros = {
        "DIMS": width,
        "HEADS": own_heads,
        "BLOCK": BLOCK_KEYS,
        "QUERIES": 2 ** math.ceil(math.log2(math.ceil(own_heads * length / ATTENTION_SIMD_GROUPS))),
        "SIMD_GROUPS": ATTENTION_SIMD_GROUPS,
        "CAUSAL": int(hides == "causal"),
        "MASKED": int(masked),
        "PADDING": padding(dtype),
        "TILE": TILE_KEYS,
        "THREADS": ATTENTION_SIMD_GROUPS * LANES,
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
        libraries=entries.libraries,
    )
    threadgroups, threadgroup = batch * heads // own_heads * blocks, ATTENTION_SIMD_GROUPS * LANES
    sums = (batch, heads, length, blocks, width + 2)
    return Prepared(kernel, options(threadgroups * threadgroup, threadgroup, sums, mx.float32), (mx.array(scale),))


def heads_together(heads: int, length: int, width: int) -> int:
    """Return how many query heads of a KV head a threadgroup computes: all of them, if it has room for their queries.

    Else keys and values are read by several threadgroups, and all but the first find most of them in a cache.
    """
    most = queries_of_a_group(width) * ATTENTION_SIMD_GROUPS
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * length <= most))


def queries_of_a_group(width: int) -> int:
    """Return how many queries of this width a SIMD group computes at most: a power of two."""
    return 2 ** int(math.log2(MAX_KEPT // (math.ceil(width / LANES) + 3)))


def join_blocks(parts: Launch | None, dtype: mx.Dtype) -> mx.array | None:
    """Attention (B, H, L, D) from the launch of its blocks; None where there is none, or a kernel cannot run."""
    sums = None if parts is None else parts.attempt()
    return None if sums is None else join_launch(sums, dtype).attempt()


def join_launch(parts: mx.array, dtype: mx.Dtype) -> Launch:
    """Return the launch for (B, H, L, D) of type `dtype`, from the sums over blocks of `parts_launch`."""
    return Launch(_join_prepared((*parts.shape[:3], parts.shape[4] - 2), dtype), (parts,))


@functools.cache
def _join_prepared(shape: tuple[int, ...], dtype: mx.Dtype) -> Prepared:
    """For a result of this shape and type."""
    kernel = TextKernel("attention_join", dtype, ("parts",), (("DIMS", shape[3]),))
    threads = math.prod(shape)
    return Prepared(kernel, options(threads, min(threads, 64), shape, dtype))


@dataclass(frozen=True)
class NestedEntries:
    """Keys and values in nested planes: the first `packed` positions are read as planes, the others as they are.

    entries: keys and values (B, H, S, D) of all positions; of any S <= `packed` where all are packed.
    planes: of keys and of values what the gear reads: one plane or two, scales and offsets (formats/kv_cache.py), with
        `packed` positions or more.
    """

    entries: tuple[mx.array, mx.array]
    planes: tuple[list[mx.array], list[mx.array]]
    packed: int

    @property
    def positions(self) -> int:
        return max(self.packed, self.entries[0].shape[2])

    @property
    def group_size(self) -> int:
        """Numbers of a key that share a scale; of a value too where it is as wide, as our kernels need it."""
        return self.entries[0].shape[-1] // self.planes[0][-1].shape[-1]


class Form(NamedTuple):
    """What planes of keys and of values have in common.

    dims: D. widths: bits of each plane. group_size: numbers that share a scale. packed: positions that are in planes.
    entries: whether further positions are read as they are.
    """

    dims: int
    widths: tuple[int, ...]
    group_size: int
    packed: int
    entries: bool

    def runs(self) -> bool:
        """Return whether there is a kernel: known planes, a group's lanes in one SIMD group, each tile of one kind."""
        chunk = chunk_of(self.widths)
        known = len(self.widths) <= 2 and all(width in (2, 4, 8) for width in self.widths)
        whole = self.packed % TILE_KEYS == 0 or not self.entries
        return whole and known and self.group_size % chunk == 0 and LANES % (self.group_size // chunk) == 0

    def describes(self, arrays: Arrays, batch: int, heads: int, dtype: mx.Dtype) -> bool:
        """Return whether planes of so many heads have this form, with scales of this type."""
        elements = [*(self.dims * width // WORD_BITS for width in self.widths), *[self.dims // self.group_size] * 2]
        types = [mx.uint32] * len(self.widths) + [dtype] * 2
        return (
            [array.dtype for array in arrays] == types
            and all(array.shape[2] >= self.packed for array in arrays)
            and [(*array.shape[:2], array.shape[3]) for array in arrays] == [(batch, heads, n) for n in elements]
            and batch * heads * self.packed * min(elements[:-2]) >= MIN_ELEMENTS
        )


def chunk_of(widths: Sequence[int]) -> int:
    """Numbers that a lane takes: whole words of each plane."""
    return WORD_BITS // min(widths)


def form_of(nested: NestedEntries, dims: int) -> Form | None:
    """Return the form of planes of heads of `dims` numbers; None for arrays that cannot be such, or that have no
    kernel."""
    entries, arrays, packed = nested.entries, nested.planes[0], nested.packed
    if len(arrays) < 3 or packed < 1 or any(array.ndim != 4 or array.size == 0 for array in (*entries, *arrays)):
        return None
    widths, groups = tuple(plane.shape[3] * WORD_BITS // dims for plane in arrays[:-2]), arrays[-2].shape[3]
    form = Form(dims, widths, dims // groups, packed, entries[0].shape[2] > packed)
    return form if dims % groups == 0 and 0 not in widths and form.runs() else None


def takes_nested(queries: mx.array, nested: NestedEntries, mask: mx.array | str | None) -> Form | None:
    """Return the form of planes that `nested_attention` takes: shapes, types, widths, 1 to 16 queries, the
    tile's size."""
    if queries.ndim != 4 or queries.size == 0 or queries.dtype not in METAL_DTYPES or queries.shape[2] > MAX_VECTORS:
        return None
    dims, dtype = queries.shape[3], queries.dtype
    form = form_of(nested, dims)
    if form is None or not known_mask(mask) or not fits_tile(dims, dtype):
        return None
    batch, heads = nested.planes[0][0].shape[:2]
    of_entries = (batch, heads, nested.positions, dims)
    fits = (
        heads_fit(queries.shape, of_entries)
        and all(form.describes(arrays, batch, heads, dtype) for arrays in nested.planes)
        and (not form.entries or all(array.shape == of_entries and array.dtype == dtype for array in nested.entries))
    )
    return form if fits else None


def nested_attention(
    queries: mx.array, nested: NestedEntries, scale: float, mask: mx.array | str | None
) -> mx.array | None:
    """softmax(scale * queries keys^T) values, (B, H, L, D) of the queries' type; None if there is no kernel for it.

    Sums are in float32, and numbers that planes stand for are rounded to that type. A query that sees no key gets
    zeros. Arguments as for `nested_launch`.
    """
    return join_blocks(nested_launch(queries, nested, scale, mask), queries.dtype)


def nested_launch(queries: mx.array, nested: NestedEntries, scale: float, mask: mx.array | str | None) -> Launch | None:
    """Return the launch for the sums over each block of keys, as `parts_launch`.

    Args:
        queries: (B, H, L, D) float16, bfloat16 or float32, L of 1 to 16.
        nested: entries and scales of the queries' type, of H / a whole number heads.
        mask: as for `parts_launch`.
    """
    form = takes_nested(queries, nested, mask)
    if form is None:
        return None
    read = [with_room(array[:, :, : nested.packed]) for arrays in nested.planes for array in arrays]
    given, heads = [*nested.entries, *read] if form.entries else read, read[0].shape[1]
    known = entries_of(form.widths, form.group_size, form.entries)
    return entries_launch(queries, heads, nested.positions, given, known, scale, mask)


def with_room(array: mx.array) -> mx.array:
    """(B, KV, S, n), padded along S to 8 elements or more: MLX passes fewer in memory from which no kernel reads."""
    batch, heads, positions, elements = array.shape
    least = -(-MIN_ELEMENTS // (batch * heads * elements))
    return array if positions >= least else mx.pad(array, [(0, 0), (0, 0), (0, least - positions), (0, 0)])


@functools.cache
def entries_of(widths: tuple[int, ...], group_size: int, entries: bool) -> Entries:
    """Return the buffers and macros of planes of these widths in groups of this size; `entries` as in `Form`."""
    parts = (*("_coarse", "_finer")[: len(widths)], "_scales", "_offsets")
    macros = {
        "ENTRIES": int(entries),
        "PLANES": len(widths),
        "FIRST_BITS": widths[0],
        "SECOND_BITS": sum(widths[1:]),
        "CHUNK": chunk_of(widths),
        "GROUP": group_size,
    }
    arrays = tuple(name + part for name in ("keys", "values") for part in parts)
    return Entries((*(("keys", "values") if entries else ()), *arrays), tuple(macros.items()), ("loads", "kv_planes"))


def takes_rope(x: mx.array) -> bool:
    """Return whether `rope_launch` takes x (B, H, L, D): 1 to 16 tokens, and their type."""
    return x.ndim == 4 and x.size > 0 and x.shape[2] <= MAX_VECTORS and x.dtype in METAL_DTYPES


def rope_launch(x: mx.array, frequencies: mx.array, offset: int, traditional: bool, scale: float) -> Launch:
    """Return the launch for rotary positions from `offset` on, of x's type and shape.

    Args:
        x: (B, H, L, D) float16, bfloat16 or float32, L of 1 to 16; by its strides, so that it is not copied.
        frequencies: (dims / 2,) float32, radians from position to position; the first `dims` of D are turned.
        traditional: whether neighbours are a pair; else the first and second half of `dims` are.
        scale: of positions.

    Raises:
        GearbxError: the arguments do not fit each other.
    """
    dims = 2 * frequencies.size
    if not takes_rope(x) or frequencies.dtype != mx.float32 or not 0 < dims <= x.shape[3]:
        raise GearbxError(f"rotary positions of {dims} values do not fit heads of shape {x.shape} {x.dtype}")
    return Launch(_rope_prepared(x.shape, x.dtype, dims, traditional, float(scale)), (x, frequencies, offset))


@functools.cache
def _rope_prepared(shape: tuple[int, ...], dtype: mx.Dtype, dims: int, traditional: bool, scale: float) -> Prepared:
    """For x of this shape and type."""
    macros = {"DIMS": dims, "TRADITIONAL": int(traditional)}
    names = ("x", "frequencies", "offset", "scale")
    kernel = TextKernel("rope", dtype, names, tuple(macros.items()), strided=True, read_once=("x",))
    threads = math.prod(shape[:3]) * (shape[3] - dims // 2)
    return Prepared(kernel, options(threads, min(threads, 64), shape, dtype), (mx.array(scale),))


def are_attention(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> bool:
    """Return whether these are queries (B, H, L, D) and keys and values (B, H / a whole number, S, D), S >= L, of one
    type.

    The mask is "causal", a bool array or None; kernels take no others.
    """
    arrays = queries, keys, values
    return (
        known_mask(mask)
        and all(a.ndim == 4 and a.dtype == queries.dtype and a.size > 0 for a in arrays)
        and keys.shape == values.shape
        and heads_fit(queries.shape, keys.shape)
    )


def are_nested(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> bool:
    """Like `are_attention`, for entries behind positions that lie elsewhere: they may be fewer than queries."""
    batch, heads, _, dims = queries.shape
    return (
        known_mask(mask)
        and keys.dtype == values.dtype == queries.dtype
        and keys.shape == values.shape
        and heads_fit((batch, heads, 0, dims), keys.shape)
    )


def known_mask(mask: mx.array | str | None) -> bool:
    """Return whether a mask is "causal", a bool array or None."""
    return mask.dtype == mx.bool_ if isinstance(mask, mx.array) else mask in ("causal", None)


def heads_fit(queries: Sequence[int], keys: Sequence[int]) -> bool:
    """Return whether these are shapes of queries (B, H, L, D) and keys (B, H / a whole number, S, D), S >= L."""
    return (keys[0], keys[3]) == (queries[0], queries[3]) and queries[1] % keys[1] == 0 and queries[2] <= keys[2]
