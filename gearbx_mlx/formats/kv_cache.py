"""A KV cache with gears: the gear determines the bytes of keys and values that a forward pass reads.

With 16 in its ladder the cache keeps the unquantized entries, and planes in addition. The top gear reads the entries;
lower gears read planes of all positions except the latest. These are packed some at a time. Without 16 there are only
planes, packed at each position; only a prompt's entries stay until the first token after it is read. In prefill, a
pass reads entries if there are any, in any gear.

Keys and values are nested planes: the first 4 bits of every number are a coarse copy, 4 additional bits refine it. Each
position is quantized separately, so that a cache appends and trims at any position. A number is

    in the gear of the first plane:   offset + scale * c0
    with the planes after it:         offset + scale * (c0 + c1 / 2^w1 + ... - (1 - 2^-(w1 + ...)) / 2)

so a coarse number is the middle of the range that the other bits choose from, as in planes.py.

Layout, for vectors (..., D) in groups of G numbers along D, the last axis:

- planes[i]: (..., D * widths[i] / 32) uint32, most significant plane first, contiguous. A word has 32 / width codes of
  consecutive numbers, the first in the lowest bits, as `mx.quantize` packs them: planes[0] with scales and offsets is
  an affine weight of MLX if it supports such groups. There is no padding: D * width is a multiple of 32.
- scales, offsets: (..., D / G), of the type of the vectors.

With vectors (batch, heads, positions, D) the strides of a plane are as in such an array: D * width / 32 words per
position. The capacity of a cache may be larger than its positions; the rest is not read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from ..compat.loops import positions_in
from ..errors import GearbxError
from ..kernels import dispatch
from ..kernels.bit_planes import scale_and_bias

BITS_OF_WORD = 32

PLANE_BITS = 4  # bits of each plane
ENTRY_BITS = 16  # bits of the gear that reads the unquantized entries
PACKED_AT_ONCE = 64  # positions that are packed at once, with entries kept; native attention reads planes of 16 at once


def group_for(dims: int) -> int | None:
    """Return the group size for heads of `dims` numbers; None if none divides them."""
    return next((size for size in (32, 16, 8) if dims % size == 0), None)  # the best first (docs/kv_gears.md)


def pack(vectors: mx.array, widths: Sequence[int], group_size: int) -> tuple[list[mx.array], mx.array, mx.array]:
    """Return the planes, scales and offsets of vectors (..., D), floating, in the layout of this module.

    widths: bits of each plane, most significant first: powers of two, at most 8 in total. group_size: divides D; a
    multiple of 8. Raises GearbxError for unsupported ones.
    """
    check(vectors.shape[-1], widths, group_size)
    bits = sum(widths)
    grouped = vectors.astype(mx.float32).reshape(*vectors.shape[:-1], -1, group_size)
    scales, offsets = scale_and_bias(grouped.min(axis=-1), grouped.max(axis=-1), widths, vectors.dtype)
    step, least = finest(scales, offsets, widths)
    codes = mx.clip(mx.round((grouped - least[..., None]) / step[..., None]), 0, 2**bits - 1).astype(mx.uint32)
    planes, unread = [], bits
    for width in widths:
        unread -= width
        plane = ((codes >> unread) & (2**width - 1)).reshape(*vectors.shape[:-1], -1, BITS_OF_WORD // width)
        planes.append((plane << mx.arange(0, BITS_OF_WORD, width, dtype=mx.uint32)).sum(axis=-1))
    return planes, scales.astype(vectors.dtype), offsets.astype(vectors.dtype)


def unpack(
    planes: Sequence[mx.array], scales: mx.array, offsets: mx.array, widths: Sequence[int], bits: int
) -> mx.array:
    """Return the vectors (..., D), of the scales' type, as read by the gear with `bits`: the first few planes."""
    codes = mx.zeros((*planes[0].shape[:-1], planes[0].shape[-1] * BITS_OF_WORD // widths[0]), mx.uint32)
    read: list[int] = []
    for plane, width in zip(planes, widths):
        if sum(read) == bits:
            break
        read.append(width)
        places = mx.arange(0, BITS_OF_WORD, width, dtype=mx.uint32)
        bits_read = (plane[..., None] >> places) & (2**width - 1)
        codes = (codes << width) | bits_read.reshape(codes.shape)
    step, least = finest(scales.astype(mx.float32), offsets.astype(mx.float32), read)
    grouped = codes.reshape(*scales.shape, -1).astype(mx.float32)
    return (grouped * step[..., None] + least[..., None]).reshape(codes.shape).astype(scales.dtype)


def finest(scales: mx.array, offsets: mx.array, widths: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Return step and lowest number of the codes of all these planes together, float32."""
    share = 2.0 ** -sum(widths[1:])
    return scales * share, offsets - scales * ((1 - share) / 2)


def check(dims: int, widths: Sequence[int], group_size: int) -> None:
    """Validate planes for vectors of `dims` numbers. Raises GearbxError."""
    if not widths or any(width not in (1, 2, 4, 8) for width in widths) or sum(widths) > 8:
        raise GearbxError(f"planes of {'+'.join(map(str, widths))} bits: use 1, 2, 4 or 8 bits each, 8 in all")
    if group_size % 8 or dims % group_size or any(dims * width % BITS_OF_WORD for width in widths):
        raise GearbxError(f"groups of {group_size} numbers do not fit vectors of {dims}; use a divisor")


class KVMeter:
    """Counter of the keys and values that forward passes read, except in prefill.

    bytes: by gear (bits). caches: number of layers' caches read, by gear.
    """

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self.caches: dict[int, int] = {}

    def add(self, bits: int, count: int) -> None:
        self.bytes[bits] = self.bytes.get(bits, 0) + count
        self.caches[bits] = self.caches.get(bits, 0) + 1

    def take(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return `bytes` and `caches` since the last call, and reset them."""
        taken = self.bytes, self.caches
        self.bytes, self.caches = {}, {}
        return taken


class KVGears:
    """The ladder of the caches of a model's layers; all of them and their copies share this object.

    ladder: bits in ascending order, of 4, 8 and 16. engaged: returns the bits of the gear that a pass reads now.
    native: True to pack with a native kernel if possible. in_prompt: True during prefill.
    """

    def __init__(self, ladder: tuple[int, ...], engaged: Callable[[], int] | None = None, native: bool = False):
        self.native = native
        self.ladder = ladder
        self.engaged = engaged or (lambda: ladder[-1])
        self.widths = (PLANE_BITS,) * (2 if 8 in ladder else 1)
        self.exact = ladder[-1] == ENTRY_BITS
        self.meter = KVMeter()
        self.in_prompt = False

    def begin_prompt(self) -> None:
        """Start prefill."""
        self.in_prompt = True
        self.meter.take()

    def end_prompt(self) -> None:
        """Start decoding, after prefill."""
        self.in_prompt = False

    def __deepcopy__(self, memo: object) -> "KVGears":
        return self


@dataclass(frozen=True)
class Nested:
    """The entries that a pass reads in a low gear: the first `packed` positions as planes, the others unquantized.

    Attributes:
        entries: keys and values (B, H, S, D) of all positions; with any S if all positions are packed.
        planes: arrays that a gear reads of keys and of values: one plane or two, scales, offsets.
        packed: number of positions in planes.
    """

    entries: tuple[mx.array, mx.array]
    planes: tuple[list[mx.array], list[mx.array]]
    packed: int

    @property
    def group_size(self) -> int:
        """The numbers of a key or value that share a scale."""
        return self.entries[0].shape[-1] // self.planes[0][-1].shape[-1]

    def unpacked(self) -> tuple[mx.array, mx.array]:
        """Return keys and values (B, H, positions, D)."""
        keys, values = (self._whole(*each) for each in zip(self.entries, self.planes))
        return keys, values

    def _whole(self, entries: mx.array, arrays: list[mx.array]) -> mx.array:
        *planes, scales, offsets = (array[..., : self.packed, :] for array in arrays)
        widths = (PLANE_BITS,) * len(planes)
        made = unpack(planes, scales, offsets, widths, sum(widths))
        return mx.concatenate([made, entries[..., self.packed :, :]], axis=2)

    def nbytes(self) -> int:
        """Return the bytes of keys and values that a pass reads."""
        rest = max(self.entries[0].shape[2] - self.packed, 0)
        packed = sum(position_bytes(array) for arrays in self.planes for array in arrays)
        return self.packed * packed + rest * sum(map(position_bytes, self.entries))


def position_bytes(array: mx.array) -> int:
    """Return the bytes of one position of an array (B, H, positions, ...)."""
    return array.nbytes // array.shape[2]


class NestedKVCache(KVCache):
    """The cache of one layer, whose gears all layers share.

    `keys` and `values` are the entries, as in KVCache; None if there are only planes.
    """

    keys: Any
    values: Any

    def __init__(self, gears: KVGears):
        super().__init__()
        self.gears = gears
        self.beside = 0  # entries that are also packed
        self.planes: list[list[mx.array]] = []  # for keys, for values: planes, scales, offsets (B, H, capacity, ...)

    @classmethod
    def of(cls, cache: KVCache, gears: KVGears) -> "NestedKVCache":
        """Return a cache with the entries of a cache of mlx-lm."""
        made = cls(gears)
        made.keys, made.values, made.offset = cache.keys, cache.values, cache.offset
        return made

    def plain(self) -> KVCache:
        """Return mlx-lm's cache with the entries of the top gear, for writing to a file."""
        made = KVCache()
        made.offset = self.offset
        if self.keys is not None:
            made.keys, made.values = self.keys, self.values
        elif self.offset:
            made.keys, made.values = self._nested(len(self.gears.widths)).unpacked()
        return made

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        return self.plain().to_quantized(group_size, bits)

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> BatchKVCache:
        """Return the entries of several sequences' top gears, in a cache of a batch without gears."""
        return BatchKVCache.merge([part.plain() if isinstance(part, cls) else part for part in caches])

    @property
    def packed(self) -> int:
        """Number of positions, from the first one on, that are in planes."""
        return self.beside if self.keys is not None else self.offset

    @property
    def has_entries(self) -> bool:
        """Flag for passes that append to the entries, in any gear."""
        return self.keys is not None and (self.gears.exact or self.gears.in_prompt)

    @property
    def reads_entries(self) -> bool:
        """Flag for passes that read the entries, in the engaged gear, without packing them."""
        reads = self.gears.in_prompt or (self.gears.exact and self.gears.engaged() == ENTRY_BITS)
        return self.keys is not None and reads

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append as mlx-lm's caches, and return the engaged gear's keys and values, unpacked."""
        nested = self.update(keys, values)
        return super().keys_and_values() if nested is None else nested.unpacked()

    def update(self, keys: mx.array, values: mx.array) -> Nested | None:
        """Append keys and values (B, H, new, D), and return the planes that the engaged gear reads; None: entries."""
        new = keys.shape[2]
        if self.gears.exact or (self.packed == 0 and self.gears.in_prompt):
            super().update_and_fetch(keys, values)
        else:
            self._append(keys, values)
        read = self.read(new)
        self.count(read)
        return read

    def read(self, new: int) -> Nested | None:
        """Return the planes that a pass over `new` tokens, already in the cache, reads; None: the entries."""
        if self.reads_entries:
            return None
        if self.keys is not None:
            self._pack_beside((self.offset - new) // PACKED_AT_ONCE * PACKED_AT_ONCE)
            if not self.packed:
                return None
        return self._engaged()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return keys and values, for layers that share this cache; a low gear's if there are no entries."""
        return super().keys_and_values() if self.keys is not None else self._engaged().unpacked()

    def _engaged(self) -> Nested:
        return self._nested(min(self.gears.engaged() // PLANE_BITS, len(self.gears.widths)))

    def count(self, read: Nested | None, new: int = 0) -> None:
        """Add the bytes of a pass to the meter, with `new` entries since `read`; none in prefill."""
        if self.gears.in_prompt:
            return
        if read is not None:
            count = read.nbytes() + new * sum(map(position_bytes, read.entries))
        else:
            count = self.offset * (position_bytes(self.keys) + position_bytes(self.values))
        self.gears.meter.add(self.gears.engaged(), count)

    def trim(self, n: int) -> int:
        trimmed = super().trim(n)
        self.drop_later_planes()
        return trimmed

    def drop_later_planes(self) -> None:
        """Mark positions beyond the end of a trimmed cache as unpacked; others stay packed."""
        self.beside = min(self.beside, self.offset // PACKED_AT_ONCE * PACKED_AT_ONCE)

    @property
    def state(self) -> Any:
        return [*self._arrays, NoFile()]

    @state.setter
    def state(self, value: Any) -> None:
        raise NotImplementedError("a cache in gears is written as the plain cache of its top gear")

    def empty(self) -> bool:
        return self.keys is None and not self.planes

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    @property
    def _arrays(self) -> list[mx.array]:
        entries = [] if self.keys is None else [self.keys, self.values]
        return [*entries, *(array for arrays in self.planes for array in arrays)]

    def _append(self, keys: mx.array, values: mx.array) -> None:
        """Put new positions into planes. A prompt's entries are packed too, and then dropped."""
        if self.keys is not None:
            before = super().keys_and_values()
            keys, values = (mx.concatenate([old, new], axis=2) for old, new in zip(before, (keys, values)))
            self.offset, self.keys, self.values = 0, None, None
        first, self.offset = self.offset, self.offset + keys.shape[2]
        self._pack(keys, values, first)

    def _pack_beside(self, end: int) -> None:
        """Pack the entries up to a position, if they are not packed yet."""
        if end > self.beside:
            keys, values = (entries[..., self.beside : end, :] for entries in (self.keys, self.values))
            self._pack(keys, values, self.beside)
            self.beside = end

    def _pack(self, keys: mx.array, values: mx.array, first: int) -> None:
        new = [self._packed(vectors) for vectors in (keys, values)]
        self.planes = [put_positions(old, added, first, self.step) for old, added in zip(self.planes or [[], []], new)]

    def _packed(self, vectors: mx.array) -> list[mx.array]:
        widths, group_size = self.gears.widths, group_for(vectors.shape[-1]) or 0
        made = dispatch.pack_kv(vectors, len(widths), group_size) if self.gears.native else None
        if made is not None:
            return made
        planes, scales, offsets = pack(vectors, widths, group_size)
        return [*planes, scales, offsets]

    def _nested(self, planes: int) -> Nested:
        keys, values = ([*arrays[:planes], *arrays[-2:]] for arrays in self.planes)
        entries = (none_of(keys), none_of(values)) if self.keys is None else super().keys_and_values()
        return Nested(entries, (keys, values), self.packed)


class NoFile:
    """A part of the state of a cache in gears that stops mlx-lm from writing a file that it could not read again."""

    def __str__(self) -> str:
        return "a KV cache in gears; use [part.plain() for part in cache] instead"


def none_of(arrays: list[mx.array]) -> mx.array:
    """Return entries (B, H, 1, D) of zeros, as placeholders of packed ones."""
    coarse, scales = arrays[0], arrays[-1]
    return mx.zeros((*coarse.shape[:2], 1, coarse.shape[3] * 8), scales.dtype)


def put_positions(arrays: list[mx.array], new: list[mx.array], first: int, step: int) -> list[mx.array]:
    """Return arrays (B, H, capacity, ...) with new positions from `first` on; capacity grows in steps."""
    end = first + new[0].shape[2]
    if not arrays or end > arrays[0].shape[2]:
        more = (end - first + step - 1) // step * step
        room = [mx.zeros((*array.shape[:2], more, array.shape[3]), array.dtype) for array in new]
        kept = [array[..., :first, :] for array in arrays]
        arrays = [mx.concatenate([old, free], axis=2) for old, free in zip(kept, room)] if kept else room
    for array, added in zip(arrays, new):
        array[..., first:end, :] = added
    return arrays


def takes_cache(cache: Any) -> bool:
    """Return True if a block supports a cache; existing keys and values must be float32."""
    if cache is None:
        return True
    known = type(cache) in (KVCache, RotatingKVCache, BatchKVCache, NestedKVCache)
    return known and (cache.keys is None or cache.keys.dtype == mx.float32)


def takes_in_place(cache: Any) -> bool:
    """Return True if a pass over a few tokens appends to the entries of a cache, in arrays that sometimes grow."""
    return type(cache) in (KVCache, BatchKVCache) or (type(cache) is NestedKVCache and cache.has_entries)


def read_before(cache: Any) -> Nested | None:
    """Return the planes that a pass reads of tokens already in a cache; None: the unquantized entries."""
    return cache.read(0) if type(cache) is NestedKVCache else None


def block_planes(nested: Nested | None) -> tuple[Any, ...]:
    """Return planes as the last arguments of a native block: of keys, of values, positions in them, group size."""
    return () if nested is None else (*nested.planes, nested.packed, nested.group_size)


def has_room(cache: Any, shape: tuple[int, ...]) -> bool:
    """Return whether the arrays of a cache have room for the keys and values of L tokens in each of its B sequences.

    Args:
        shape: (B, L), or more.
    """
    keys = cache.keys
    return keys is not None and positions_in(cache) + shape[1] <= keys.shape[2] and keys.shape[0] == shape[0]
