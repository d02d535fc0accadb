"""Metal launches for attention over keys and values in nested planes, which are unpacked in threadgroup memory alone.

The text is that of `metal_attention`, with another way to copy a tile, and so are its promises: nothing of a query
depends on other queries, nor on keys that it does not see. A gear of the first plane reads no byte of the second one.
Planes may end before the last position; the positions after them are read as they are.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..errors import GearbxError
from .metal import DTYPES, LANES, LEAST_ELEMENTS, MAX_VECTORS, Launch
from .metal_attention import TILE, Entries, entries_launch, fits_tile, join_launch
from .shapes import heads_fit, known_mask

WORD = 32  # bits
WIDTHS = (2, 4, 8)  # of the planes that lanes read, in bits
MOST_PLANES = 2

Arrays = Sequence[mx.array]  # of keys, or of values: one plane or two, scales, offsets (formats/kv_planes.py)


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
        """Whether there is a kernel: known planes, a group's lanes in one SIMD group, each tile of one kind."""
        chunk = chunk_of(self.widths)
        known = len(self.widths) <= MOST_PLANES and all(width in WIDTHS for width in self.widths)
        whole = self.packed % TILE == 0 or not self.entries
        return whole and known and self.group_size % chunk == 0 and LANES % (self.group_size // chunk) == 0

    def describes(self, arrays: Arrays, batch: int, heads: int, dtype: mx.Dtype) -> bool:
        """Whether planes of so many heads have this form, with scales of this type."""
        elements = [*(self.dims * width // WORD for width in self.widths), *[self.dims // self.group_size] * 2]
        types = [mx.uint32] * len(self.widths) + [dtype] * 2
        return (
            [array.dtype for array in arrays] == types
            and all(array.shape[2] >= self.packed for array in arrays)
            and [(*array.shape[:2], array.shape[3]) for array in arrays] == [(batch, heads, n) for n in elements]
            and batch * heads * self.packed * min(elements[:-2]) >= LEAST_ELEMENTS
        )


def chunk_of(widths: Sequence[int]) -> int:
    """Numbers that a lane takes: whole words of each plane."""
    return WORD // min(widths)


def form_of(entries: Sequence[mx.array], arrays: Arrays, packed: int, dims: int) -> Form | None:
    """The form of planes of heads of `dims` numbers; None for arrays that cannot be such, or that have no kernel."""
    if len(arrays) < 3 or packed < 1 or any(array.ndim != 4 or array.size == 0 for array in (*entries, *arrays)):
        return None
    widths, groups = tuple(plane.shape[3] * WORD // dims for plane in arrays[:-2]), arrays[-2].shape[3]
    form = Form(dims, widths, dims // groups, packed, entries[0].shape[2] > packed)
    return form if dims % groups == 0 and 0 not in widths and form.runs() else None


def takes_nested(
    queries: mx.array,
    entries: Sequence[mx.array],
    planes: Sequence[Arrays],
    packed: int,
    mask: mx.array | str | None,
) -> bool:
    """Whether `nested_attention` takes these: shapes, types, widths of planes, 1 to 16 queries, the tile's size."""
    if queries.ndim != 4 or queries.size == 0 or queries.dtype not in DTYPES or queries.shape[2] > MAX_VECTORS:
        return False
    dims, dtype = queries.shape[3], queries.dtype
    form = form_of(entries, planes[0], packed, dims)
    if form is None or not known_mask(mask) or not fits_tile(dims, dtype):
        return False
    batch, heads = planes[0][0].shape[:2]
    count = max(packed, entries[0].shape[2])
    of_entries = (batch, heads, count, dims)
    return (
        heads_fit(queries.shape, of_entries)
        and all(form.describes(arrays, batch, heads, dtype) for arrays in planes)
        and (not form.entries or all(array.shape == of_entries and array.dtype == dtype for array in entries))
    )


def nested_attention(
    queries: mx.array,
    entries: Sequence[mx.array],
    planes: Sequence[Arrays],
    packed: int,
    scale: float,
    mask: mx.array | str | None,
) -> mx.array:
    """softmax(scale * queries keys^T) values, (B, H, L, D) of the queries' type; sums are in float32.

    Numbers that planes stand for are rounded to that type. A query that sees no key gets zeros. Arguments and errors as
    for `nested_launch`.
    """
    parts = nested_launch(queries, entries, planes, packed, scale, mask).run()
    return join_launch(parts, queries.dtype).run()


def nested_launch(
    queries: mx.array,
    entries: Sequence[mx.array],
    planes: Sequence[Arrays],
    packed: int,
    scale: float,
    mask: mx.array | str | None,
) -> Launch:
    """The launch for the sums over each block of keys, as `metal_attention.parts_launch`.

    Arrays are read by their strides, so that a cache which has room for more positions is not copied.

    Args:
        queries: (B, H, L, D) float16, bfloat16 or float32, L of 1 to 16.
        entries: keys and values (B, H / a whole number, S, D) of the queries' type, of which the first `packed`
            positions are not read; of any S <= `packed` where all positions are in planes.
        planes: of keys and of values what the gear reads: one plane or two, scales of the queries' type and offsets,
            `packed` positions or more.
        mask: "causal"; a bool array that broadcasts to (B, H, L, S), true for keys that a query sees; or None for all.

    Raises:
        GearbxError: the arguments do not fit each other, or have no kernel.
    """
    form = form_of(entries, planes[0], packed, queries.shape[-1])
    if form is None or not takes_nested(queries, entries, planes, packed, mask):
        raise GearbxError(
            f"attention of queries {queries.shape} {queries.dtype} over {packed} of {entries[0].shape[2]} positions in "
            f"planes {[array.shape for array in planes[0]]} has no Metal kernel"
        )
    read = [with_room(array[:, :, :packed]) for arrays in planes for array in arrays]
    given = [*entries, *read] if form.entries else read
    count = max(packed, entries[0].shape[2])
    return entries_launch(
        queries, read[0].shape[1], count, given, entries_of(form.widths, form.group_size, form.entries), scale, mask
    )


def with_room(array: mx.array) -> mx.array:
    """(B, KV, S, n), padded along S to 8 elements or more: MLX passes fewer in memory from which no kernel reads."""
    batch, heads, positions, elements = array.shape
    least = -(-LEAST_ELEMENTS // (batch * heads * elements))
    return array if positions >= least else mx.pad(array, [(0, 0), (0, 0), (0, least - positions), (0, 0)])


@functools.cache
def entries_of(widths: tuple[int, ...], group_size: int, entries: bool) -> Entries:
    """The buffers and macros of planes of these widths in groups of this size; `entries` as in `Form`."""
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
    return Entries((*(("keys", "values") if entries else ()), *arrays), tuple(macros.items()), "kv_planes")
