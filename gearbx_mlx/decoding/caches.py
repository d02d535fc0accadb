"""KV caches of a model: parts, lengths, snapshots, checks, kept caches, caches in gears.

A snapshot restores a cache after a draft, or after a pass in too low a gear. For most caches, which only append, it
keeps their length. A sliding window overwrites its oldest entries, and a recurrent layer replaces its state, so the
snapshot keeps their arrays. It copies array objects, not data: a later write to the cache's array leaves the copied
object unchanged.

A chat keeps its cache with the tokens that it holds. A chat template may change earlier turns: it drops the reasoning,
or a date changes. Every turn therefore encodes the whole conversation. The cache is cut to the first tokens that
are unchanged, and the model prefills the others.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, make_prompt_cache

from ..compat.loops import counted, offset_of
from ..errors import GearbxError
from ..formats.kv_cache import KVGears, NestedKVCache, group_for
from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import bits_text, kv_ladder

Cache = Sequence[Any]


def parts(cache: Cache) -> list[Any]:
    """Return the caches of single layers, also of entries with several."""
    return [part for entry in cache for part in (parts(entry.caches) if hasattr(entry, "caches") else (entry,))]


def room(part: Any) -> float:
    """Return how many more entries the cache of a layer can take before mlx-lm can no longer trim it.

    Infinite for a cache that grows; the room before a rotating cache overwrites itself; 0 after that, and for a cache
    of states.
    """
    if not part.is_trimmable():
        return 0
    offset = offset_of(part)
    if hasattr(part, "chunk_size"):  # drops entries at its front when a chunk is full
        return max(part.chunk_size - (offset - part.start_position) - 1, 0)
    return max(part.max_size - offset - 1, 0) if hasattr(part, "max_size") else math.inf


def length(cache: Cache) -> int:
    """Return the number of tokens in a cache; 0 for states, as they do not count tokens."""
    return max((offset_of(part) for part in parts(cache)), default=0)


def total_tokens(part: Any) -> int | None:
    """Return the number of tokens that the cache of a layer has taken; None for a state without a count."""
    if hasattr(part, "total_tokens"):  # a pair's model may not have prefilled all of them yet
        return part.total_tokens
    return offset_of(part) if hasattr(part, "offset") else None


def cut_to(cache: Cache, tokens: int) -> bool:
    """Trim the caches of all layers that count tokens to `tokens`.

    Return False at the first one that cannot be trimmed; the caches before it stay trimmed.
    """
    for part in parts(cache):
        count = total_tokens(part)
        last = 0 if count is None else count - tokens  # negative if it has taken too few
        if last and not (last > 0 and part.is_trimmable() and part.trim(last) == last):
            return False
    return True


APPENDING = (KVCache, QuantizedKVCache, BatchKVCache, NestedKVCache)
# Attributes of appending caches that a snapshot need not copy.
ENTRIES = ("keys", "values", "planes", "beside", "gears")


def copied(value: Any) -> Any:
    """Return an equal value in new containers and arrays: `a[...] = b` changes the object `a`."""
    if isinstance(value, mx.array):
        return copy.copy(value)
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value


def attributes_of(part: Any) -> dict[str, Any]:
    """Return the attributes of the cache of a layer, without the entries of a cache that only appends."""
    apart = ENTRIES if type(part) in APPENDING else ()
    return {name: copied(value) for name, value in vars(part).items() if name not in apart}


class Snapshot:
    """State of a cache.

    Args:
        cache: one entry for each layer, as mlx-lm's models make them.

    Attributes:
        parts: the caches of single layers.
        kinds: their classes.
    """

    def __init__(self, cache: Cache):
        self.parts = parts(cache)
        self.kinds = {*map(type, self.parts)}
        self._offsets, self._attributes = list[int](), list[dict[str, Any]]()
        if self.kinds == {KVCache}:  # a fast path, since it runs for every token
            self._offsets = [part.offset for part in self.parts]
        else:
            self._attributes = [attributes_of(part) for part in self.parts]

    def restore(self) -> None:
        """Restore the cache."""
        for part, offset in zip(self.parts, self._offsets):
            part.offset = offset
        for part, attributes in zip(self.parts, self._attributes):
            vars(part).update(copied(attributes))
            if type(part) is NestedKVCache:
                part.drop_later_planes()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Restore the cache at the end of the context, also after an interrupt during a pass."""
        try:
            yield
        finally:
            self.restore()


CACHE_SETTINGS = ("max_size", "keep", "chunk_size")  # attributes that do not depend on a cache's fill level
MAKE_CACHE = "use mlx_lm.cache_prompt with this model"


def cache_of_a_token(model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
    """Return a model's caches with one token, for their shapes and types; nothing is evaluated."""
    cache = make_prompt_cache(model, max_kv_size)
    model(mx.array([[0]]), cache=cache)
    return cache


def check_prompt_cache(cache: Cache, model: nn.Module) -> None:
    """Validate that a cache is this model's, complete and finite. Raises GearbxError if it is not."""
    sizes = (part.max_size for part in parts(cache) if hasattr(part, "max_size"))
    own = cache_of_a_token(model, next(sizes, None))
    if len(cache) != len(own):
        raise GearbxError(f"must have {len(own)} caches for this model, got {len(cache)}; {MAKE_CACHE}")
    for number, (entry, needed) in enumerate(zip(cache, own)):
        there, expected = form(entry), form(as_quantized(needed, entry))
        if there != expected:
            raise GearbxError(f"cache {number}: must be {expected} for this model, got {there}; {MAKE_CACHE}")
    for number, part in enumerate(parts(cache)):
        if not is_complete(part):
            raise GearbxError(f"cache {number}: has a wrong number of tokens; {MAKE_CACHE}")
    floating = [a for a in cache_arrays(cache) if mx.issubdtype(a.dtype, mx.floating)]
    if not all(mx.isfinite(array).all().item() for array in floating):
        raise GearbxError(f"has values that are not finite; {MAKE_CACHE}")


def cache_arrays(cache: Cache) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten([part.state for part in parts(cache)]) if isinstance(leaf, mx.array)]


def as_quantized(needed: Any, entry: Any) -> Any:
    """Return the model's cache of a layer, quantized in the same way as an entry from a file."""
    if not isinstance(entry, QuantizedKVCache) or not hasattr(needed, "to_quantized"):
        return needed
    try:
        return needed.to_quantized(group_size=entry.group_size, bits=entry.bits)
    except (NotImplementedError, TypeError, ValueError):  # not a file of mlx-lm
        return needed


def form(entry: Any) -> str:
    """Return the invariants of a cache: class, settings, and the types and shapes of its arrays."""
    described = []
    for part in parts([entry]):
        settings = [f"{name}={getattr(part, name)}" for name in CACHE_SETTINGS if hasattr(part, name)]
        leaves = [leaf for _, leaf in tree_flatten(part.state) if isinstance(leaf, mx.array)]
        arrays = [array_form(leaf, hasattr(part, "keys")) for leaf in leaves]
        described.append(f"{type(part).__name__}({', '.join(settings + arrays)})")
    return " and ".join(described)


def array_form(array: mx.array, grows: bool) -> str:
    """Return type and shape; * for the axis of the tokens, if the array grows."""
    kind = "float" if mx.issubdtype(array.dtype, mx.floating) else str(array.dtype).removeprefix("mlx.core.")
    shape = [str(size) for size in array.shape]
    if grows:
        shape[-2:-1] = "*"
    return f"{kind} {'x'.join(shape)}"


def is_complete(part: Any) -> bool:
    """Return whether a cache has entries for all tokens that it counts; True for recurrent states."""
    if not hasattr(part, "keys"):
        return True
    entries = {array.shape[-2] for array in cache_arrays([part])} or {0}
    return len(entries) == 1 and 0 <= counted(part) <= min(entries) and part.offset >= 0


def check_quantizable(model: nn.Module, bits: int, group_size: int = 64, max_kv_size: int | None = None) -> None:
    """Validate that a model runs with caches of so many bits. Raises GearbxError if it does not."""
    cache = cache_of_a_token(model, max_kv_size)
    able = [entry for entry in cache if hasattr(entry, "to_quantized")]
    why = None if able else f"{type(cache[0]).__name__} cannot be quantized, got {bits}; omit it"
    if any(hasattr(entry, "max_size") for entry in able):
        why = f"a rotating cache (--max-kv-size, or a sliding window) cannot be quantized, got {bits}; omit one of them"
    if why is not None:
        raise GearbxError(f"--kv-bits: {why}")
    for size in sorted({array.shape[-1] for array in cache_arrays(able)}):
        if size % group_size:
            raise GearbxError(
                f"--kv-group-size: must divide the heads' {size} numbers, got {group_size}; use a divisor of {size}, "
                "or omit --kv-bits"
            )
    quantized = [entry.to_quantized(group_size, bits) if entry in able else entry for entry in cache]
    try:
        model(mx.array([[0]]), cache=quantized)
    except Exception as error:  # attention without support for quantized caches raises various errors
        raise GearbxError(
            f"--kv-bits: {type(model).__module__} has no attention for a quantized cache, got {bits}; omit it"
        ) from error


def check_draftable(cache: Cache, tokens: float) -> None:
    """Validate that drafts can be trimmed from a draft model's cache throughout a sequence.

    Args:
        tokens: most tokens that the cache gets: prompt, output and a draft.

    Raises:
        GearbxError: a cache of states, or without room.
    """
    part = min(parts(cache), key=room)
    if room(part) >= tokens:
        return
    full = getattr(part, "max_size", None) or getattr(part, "chunk_size", None)
    why = "a state instead of entries; omit --draft-model"
    if full is not None:
        why = f"room for {full} tokens; set a lower --max-tokens, or omit --draft-model"
    raise GearbxError(f"--draft-model: cannot trim rejected drafts, got a {type(part).__name__} with {why}")


class KeptCache:
    """A model's KV cache that outlives a sequence, with its tokens.

    Args:
        make: returns empty caches, as mlx-lm's `prompt_cache`; a draft model's follow the model's.

    Attributes:
        entries: the prompt_cache for `stream_generate`.
        tokens: in the cache.
        bits: of each token's gear; 0 without a required precision.
    """

    def __init__(self, make: Callable[[], list[Any]]):
        self._make = make
        self.forget()

    def forget(self) -> None:
        """Start again with empty caches."""
        self.entries, self.tokens, self.bits = list[Any](), list[int](), list[int]()  # consistent if `_make` is stopped
        self.entries = self._make()

    def unread(self, tokens: Sequence[int], bits: int = 0) -> list[int]:
        """Cut the cache to the first tokens that are unchanged, and return the others.

        The last token is always among them, since its pass computes logits. A cache that cannot be cut (a state, a
        window that has overwritten entries) is made again.

        Args:
            bits: of the prefill gear; tokens of a lower gear are prefilled again.
        """
        precise = next((place for place, read in enumerate(self.bits) if read < bits), len(self.bits))
        kept = min(in_common(self.tokens, tokens), precise, len(tokens) - 1)
        states = any(total_tokens(part) is None for part in parts(self.entries))
        if not self.entries or (states and kept < len(self.tokens)) or not cut_to(self.entries, kept):
            self.forget()
            kept = 0
        del self.tokens[kept:], self.bits[kept:]
        return list(tokens[kept:])

    def note(self, read: Sequence[int], whole: bool = True, bits: int = 0) -> None:
        """Note the tokens that the model was given after `tokens`, as far as all caches have taken them.

        The caches' counts may differ: mlx-lm runs one token ahead, and a draft model may lack the last tokens.

        Args:
            whole: True if the model was given exactly these tokens. Otherwise caches with states are made again, since
                states do not count tokens.
            bits: of the lowest gear that computed any of the tokens.
        """
        known = [*self.tokens, *read]
        counts = [total_tokens(part) for part in parts(self.entries)]
        counted = [count for count in counts if count is not None]
        if None in counts and not (whole and set(counted) <= {len(known)}):
            self.forget()
        else:
            self.tokens = known[: min(counted, default=len(known))]
            self.bits = [*self.bits, *[bits] * len(read)][: len(self.tokens)]

    def cut_to_tokens(self) -> list[Any]:
        """Return the entries, cut to exactly `tokens`. Raises GearbxError if they cannot be cut."""
        if not cut_to(self.entries, len(self.tokens)):
            self.forget()
            raise GearbxError("KV cache: cannot be cut to the shown tokens; use /save again after the next message")
        return self.entries


def in_common(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    size = min(len(a), len(b))
    same = np.equal(a[:size], b[:size])
    return size if same.all() else int(same.argmin())


OTHER = "omit --kv-gears"


def check_kv_mode(mode: str, fixed: int | None) -> None:
    """Validate that a mode can have these KV cache gears. Raises GearbxError if it cannot."""
    if mode == "pair":
        raise GearbxError(f"--kv-gears: is for one model, got mode 'pair' with two; {OTHER}")
    if mode == "lossless" and fixed is not None:
        raise GearbxError(f"--kv-gear: mode 'lossless' drafts in the lowest gear, got {fixed}; omit it")


def engaged_bits(
    ladder: tuple[int, ...], gearbox: Gearbox | Observer | None, fixed: int | None = None
) -> Callable[[], int]:
    """Return a function that returns the bits of the KV cache gear of a pass.

    Without a fixed gear, cache gears follow weight gears: top to top, lowest to lowest, the others by position. A
    gearbox with one gear reads the top cache gear.
    """
    if fixed is not None or gearbox is None or len(gearbox.ladder) == 1:
        bits = ladder[-1] if fixed is None else fixed
        return lambda: bits
    last = len(gearbox.ladder) - 1
    return lambda: ladder[gearbox.gear.index * (len(ladder) - 1) // last]


def put_in_gears(cache: list[Any], gears: KVGears) -> None:
    """Give the caches of a model's layers gears, in place; those of caches with the same ladder are replaced.

    Raises:
        GearbxError: a cache without keys and values of all positions, or with a different ladder.
    """
    for part in cache:
        check_part(part, gears)
    cache[:] = [part if type(part) is NestedKVCache else NestedKVCache.of(part, gears) for part in cache]
    for part in cache:
        part.gears = gears


def check_part(part: Any, gears: KVGears) -> None:
    """Validate that the cache of a layer can have these gears. Raises GearbxError if it cannot."""
    kind, got = type(part), f"got {bits_text(gears.ladder)}"
    if kind is NestedKVCache and part.gears.ladder != gears.ladder:
        own = bits_text(part.gears.ladder)
        raise GearbxError(f"--kv-gears: must be {own} as in the prompt cache, {got}; use these, or omit the cache")
    if hasattr(part, "max_size"):
        rotating = "a rotating cache (--max-kv-size, or a sliding window)"
        raise GearbxError(f"--kv-gears: {rotating} has no gears, {got}; omit one of them")
    if kind not in (KVCache, NestedKVCache):
        raise GearbxError(f"--kv-gears: {kind.__name__} has no gears, {got}; {OTHER}")


def check_heads(model: nn.Module, ladder: tuple[int, ...]) -> None:
    """Validate that caches and heads of a model can have gears. Raises GearbxError if they cannot."""
    cache = cache_of_a_token(model)
    for part in cache:
        check_part(part, KVGears(ladder))
    for dims in sorted({vectors.shape[-1] for part in cache for vectors in (part.keys, part.values)}):
        if group_for(dims) is None:
            raise GearbxError(f"--kv-gears: needs heads of a multiple of 8 numbers, got {dims}; {OTHER}")


def cache_in_gears(
    model: nn.Module,
    gearbox: Gearbox | Observer | None,
    bits: str | Sequence[int],
    fixed: int | None = None,
    cache: list[Any] | None = None,
    max_kv_size: int | None = None,
) -> list[Any]:
    """Return the caches of a model's layers in gears: the given list, or a new one.

    Args:
        bits: the ladder of the caches.
        fixed: bits of the gear that all passes read; None: the gear follows the weights' gear.
        max_kv_size: as in mlx-lm.

    Raises:
        GearbxError: as `kv_ladder`, `check_heads` and `put_in_gears`, such as for caches that rotate.
    """
    ladder = kv_ladder(bits)
    native = isinstance(gearbox, Gearbox) and gearbox.kernels.native
    gears = KVGears(ladder, engaged_bits(ladder, gearbox, fixed), native)
    cache = make_prompt_cache(model, max_kv_size) if cache is None else cache
    if not all(type(part) is NestedKVCache for part in cache):
        check_heads(model, ladder)
    put_in_gears(cache, gears)
    return cache


def gears_of(cache: Cache | None) -> KVGears | None:
    """Return the gears of a cache; None without."""
    return next((part.gears for part in parts(cache or ()) if type(part) is NestedKVCache), None)


def plain_cache(cache: Cache) -> list[Any]:
    """Return the cache as its top gear reads it, in mlx-lm's classes, for a file."""
    return [part.plain() if type(part) is NestedKVCache else part for part in cache]
