"""KV caches of a model: their parts and lengths, states to go back to, checks, caches that are kept or in gears.

A snapshot puts a cache back to a moment: after a draft, or after a pass in too low a gear. Most caches only append:
there, it is enough to remember how long they were. A sliding window overwrites its oldest entries, and a recurrent
layer replaces its whole state. Of those the snapshot keeps the arrays themselves. It copies nothing: arrays of MLX
are values, and a write into one that a snapshot has too makes a new array.

A cache that is kept from one turn of a chat to the next knows the tokens that it holds. A chat template may change
earlier turns: it leaves out what was thought, or a date changes. So every turn gives all tokens of the conversation.
The cache is cut to what they begin with, and the model reads only the rest.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


def parts(cache: Cache) -> Iterator[Any]:
    """Yield the caches of single layers, also of those that keep several."""
    for entry in cache:
        yield from parts(entry.caches) if hasattr(entry, "caches") else (entry,)


def room(part: Any) -> float:
    """Return how many entries may be added now to the cache of a layer and still be trimmed by mlx-lm.

    Infinite for a cache that grows; what a rotating cache has left before it overwrites itself; 0 for one that keeps
    no entries (a state space) or has begun to overwrite.
    """
    if not part.is_trimmable():
        return 0
    offset = offset_of(part)
    if hasattr(part, "chunk_size"):  # drops entries at its front when a chunk is full
        return max(part.chunk_size - (offset - part.start_position) - 1, 0)
    return max(part.max_size - offset - 1, 0) if hasattr(part, "max_size") else math.inf


def length(cache: Cache) -> int:
    """Return tokens that the cache has been given; 0 if it keeps states alone, which do not count them."""
    return max((offset_of(part) for part in parts(cache)), default=0)


def given_tokens(part: Any) -> int | None:
    """Return tokens that the cache of one layer has been given; None if it keeps a state alone, which does not count
    them."""
    if hasattr(part, "given"):  # of a pair's model, which has still to read some of them
        return part.given
    return offset_of(part) if hasattr(part, "offset") else None


def cut_to(cache: Cache, tokens: int) -> bool:
    """Return whether every layer's cache that counts its tokens could be trimmed to so many. If not, some of
    them are."""
    for part in parts(cache):
        count = given_tokens(part)
        last = 0 if count is None else count - tokens  # which it may have been given too few of
        if last and not (last > 0 and part.is_trimmable() and part.trim(last) == last):
            return False
    return True


APPENDING = (KVCache, QuantizedKVCache, BatchKVCache, NestedKVCache)
ENTRIES = ("keys", "values", "planes", "beside", "gears")  # and planes, how many there are, and their ladder


def copied(value: Any) -> Any:
    """Return the same value, in containers and arrays of its own: `a[...] = b` changes the object `a`."""
    if isinstance(value, mx.array):
        return copy.copy(value)
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class PartState:
    """The state of the cache of one layer: all its attributes, but for the entries of a cache that only appends."""

    part: Any
    kind: Any
    attributes: dict[str, Any]

    @classmethod
    def of(cls, part: Any) -> "PartState":
        apart = ENTRIES if type(part) in APPENDING else ()
        return cls(part, type(part), {name: copied(value) for name, value in vars(part).items() if name not in apart})

    @functools.cached_property
    def is_numbers(self) -> bool:
        """True if nothing has to be kept apart, as in a cache that appends: this runs for every layer and token."""
        return all(isinstance(value, int) for value in self.attributes.values())

    def restore(self) -> None:
        """Put the part back."""
        vars(self.part).update(self.attributes if self.is_numbers else copied(self.attributes))
        if self.kind is NestedKVCache:
            self.part.drop_later_planes()


class Snapshot:
    """The state of a cache.

    Args:
        cache: one entry for each layer, as mlx-lm's models make them.

    Attributes:
        parts: the caches of single layers.
    """

    def __init__(self, cache: Cache):
        self.parts = [*parts(cache)]
        self._offsets, self._states = list[int](), list[PartState]()
        if all(type(part) is KVCache for part in self.parts):  # the usual cache, for every token
            self._offsets = [part.offset for part in self.parts]
        else:
            self._states = [PartState.of(part) for part in self.parts]

    def restore(self) -> None:
        """Put the cache back."""
        for part, offset in zip(self.parts, self._offsets):
            part.offset = offset
        for state in self._states:
            state.restore()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Take back what is written in the block at its end, by an interrupt in the middle of a pass as well."""
        try:
            yield
        finally:
            self.restore()


CACHE_SETTINGS = ("max_size", "keep", "chunk_size")  # of a cache, and the same however full it is
MAKE_CACHE = "make it again with mlx_lm.cache_prompt and this model"


def begun_cache(model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
    """Return the caches that a model makes, with one token in them. Nothing is computed: they show shapes and types."""
    cache = make_prompt_cache(model, max_kv_size)
    model(mx.array([[0]]), cache=cache)
    return cache


def check_prompt_cache(cache: Cache, model: nn.Module) -> None:
    """Raises GearbxError unless a cache is one of this model, complete and with finite values."""
    sizes = (part.max_size for part in parts(cache) if hasattr(part, "max_size"))
    own = begun_cache(model, next(sizes, None))
    if len(cache) != len(own):
        raise GearbxError(f"holds {len(cache)} caches, and the model has {len(own)}; {MAKE_CACHE}")
    for number, (entry, needed) in enumerate(zip(cache, own)):
        there, expected = form(entry), form(as_quantized(needed, entry))
        if there != expected:
            raise GearbxError(f"cache {number} is {there}, and the model's {expected}; {MAKE_CACHE}")
    for number, part in enumerate(parts(cache)):
        if not is_complete(part):
            raise GearbxError(f"cache {number} says another number of tokens than it has; {MAKE_CACHE}")
    floating = [a for a in cache_arrays(cache) if mx.issubdtype(a.dtype, mx.floating)]
    if not all(mx.isfinite(array).all().item() for array in floating):
        raise GearbxError(f"has values that are not finite; {MAKE_CACHE}")


def cache_arrays(cache: Cache) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten([part.state for part in parts(cache)]) if isinstance(leaf, mx.array)]


def as_quantized(needed: Any, entry: Any) -> Any:
    """Return the model's cache, quantized where the one from the file is."""
    if not isinstance(entry, QuantizedKVCache) or not hasattr(needed, "to_quantized"):
        return needed
    try:
        return needed.to_quantized(group_size=entry.group_size, bits=entry.bits)
    except (NotImplementedError, TypeError, ValueError):  # nothing that mlx-lm can have written
        return needed


def form(entry: Any) -> str:
    """Return what does not change while a cache fills: class, settings, and the types and shapes of its arrays."""
    described = []
    for part in parts([entry]):
        settings = [f"{name}={getattr(part, name)}" for name in CACHE_SETTINGS if hasattr(part, name)]
        leaves = [leaf for _, leaf in tree_flatten(part.state) if isinstance(leaf, mx.array)]
        arrays = [array_form(leaf, hasattr(part, "keys")) for leaf in leaves]
        described.append(f"{type(part).__name__}({', '.join(settings + arrays)})")
    return " and ".join(described)


def array_form(array: mx.array, grows: bool) -> str:
    """Type and shape; * for the axis of the tokens, if there is one."""
    kind = "float" if mx.issubdtype(array.dtype, mx.floating) else str(array.dtype).removeprefix("mlx.core.")
    shape = [str(size) for size in array.shape]
    if grows:
        shape[-2:-1] = "*"
    return f"{kind} {'x'.join(shape)}"


def is_complete(part: Any) -> bool:
    """Return whether a cache that counts its tokens has so many of them."""
    if not hasattr(part, "keys"):
        return True
    entries = {array.shape[-2] for array in cache_arrays([part])} or {0}
    return len(entries) == 1 and 0 <= counted(part) <= min(entries) and part.offset >= 0


def check_quantizable(model: nn.Module, bits: int, group_size: int = 64, max_kv_size: int | None = None) -> None:
    """Raises GearbxError unless a model runs with caches of so many bits."""
    cache = begun_cache(model, max_kv_size)
    able = [entry for entry in cache if hasattr(entry, "to_quantized")]
    why = None if able else f"{type(cache[0]).__name__} cannot be quantized; leave it out"
    if any(hasattr(entry, "max_size") for entry in able):
        why = "a cache that rotates (--max-kv-size, or a sliding window) cannot be quantized; leave one of them out"
    if why is not None:
        raise GearbxError(f"--kv-bits is {bits}, and {why}")
    for size in sorted({array.shape[-1] for array in cache_arrays(able)}):
        if size % group_size:
            raise GearbxError(
                f"--kv-group-size is {group_size}, and the model's heads have {size} numbers; give a group size that "
                f"divides {size}, or leave --kv-bits out"
            )
    quantized = [entry.to_quantized(group_size, bits) if entry in able else entry for entry in cache]
    try:
        model(mx.array([[0]]), cache=quantized)
    except Exception as error:  # attention that is not made for quantized caches fails in its own way
        raise GearbxError(
            f"--kv-bits is {bits}, and {type(model).__module__} has no attention for a quantized cache; leave it out"
        ) from error


def check_draftable(cache: Cache, tokens: float) -> None:
    """Raises GearbxError unless drafts can be taken back from a draft model's cache throughout a text.

    Args:
        tokens: that are added at most: of prompt, text and a draft together.
    """
    part = min(parts(cache), key=room)
    if room(part) >= tokens:
        return
    full = getattr(part, "max_size", None) or getattr(part, "chunk_size", None)
    why = "keeps a state instead of entries; leave --draft-model out"
    if full is not None:
        why = f"has room for {full} tokens; give fewer --max-tokens, or leave --draft-model out"
    kind = type(part).__name__
    raise GearbxError(
        f"--draft-model: drafts are taken back from the KV cache, and the {kind} of the draft model {why}"
    )


class KeptCache:
    """The caches of a model's layers, and what was read into them.

    Args:
        make: returns empty caches, as mlx-lm's `prompt_cache`; with a draft model its caches follow the model's.

    `entries` is what `stream_generate` takes as its prompt_cache. `tokens` are those that were read, and `bits` those
    of the gear that read each of them; 0 where no precision is asked for.
    """

    def __init__(self, make: Callable[[], list[Any]]):
        self._make = make
        self.forget()

    def forget(self) -> None:
        """Begin with empty caches."""
        self.entries, self.tokens, self.bits = list[Any](), list[int](), list[int]()  # also if a signal comes meanwhile
        self.entries = self._make()

    def unread(self, tokens: Sequence[int], bits: int = 0) -> list[int]:
        """Cut the cache to what the tokens begin with, and return the rest of them.

        The last token is always unread, since logits come from reading. A cache that cannot be cut, a state or a window
        that has begun to slide, is made again.

        Args:
            bits: of the gear that reads prompts now. What a lower one read is read again.
        """
        precise = next((place for place, read in enumerate(self.bits) if read < bits), len(self.bits))
        kept = min(in_common(self.tokens, tokens), precise, len(tokens) - 1)
        states = any(given_tokens(part) is None for part in parts(self.entries))
        if not self.entries or (states and kept < len(self.tokens)) or not cut_to(self.entries, kept):
            self.forget()
            kept = 0
        del self.tokens[kept:], self.bits[kept:]
        return list(tokens[kept:])

    def note(self, read: Sequence[int], whole: bool = True, bits: int = 0) -> None:
        """Note what the model was given after `tokens`.

        The cache says how much of it is there. mlx-lm runs ahead, so that it may hold one token more; with a draft
        model it holds the last tokens not yet, or not in both models.

        Args:
            whole: all of it was given, and nothing else. States do not count, and so are lost where that is not known.
            bits: of the lowest gear that computed any of it.
        """
        known = [*self.tokens, *read]
        counts = [given_tokens(part) for part in parts(self.entries)]
        counted = [count for count in counts if count is not None]
        if None in counts and not (whole and set(counted) <= {len(known)}):
            self.forget()
        else:
            self.tokens = known[: min(counted, default=len(known))]
            self.bits = [*self.bits, *[bits] * len(read)][: len(self.tokens)]

    def cut_to_tokens(self) -> list[Any]:
        """Return the entries, with `tokens` in them and nothing else. Raises GearbxError where they cannot be cut."""
        if not cut_to(self.entries, len(self.tokens)):
            self.forget()
            raise GearbxError("the KV cache cannot be cut to what was shown; it is read again with the next message")
        return self.entries


def in_common(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Return how many tokens two texts begin with together."""
    size = min(len(a), len(b))
    same = np.equal(a[:size], b[:size])
    return size if same.all() else int(same.argmin())


OTHER = "leave --kv-gears out"


def check_kv_mode(mode: str, fixed: int | None) -> None:
    """Raises GearbxError for a mode whose KV cache has no gears, or one that chooses them."""
    if mode == "pair":
        raise GearbxError(f"--kv-gears are for one model, and mode 'pair' has two; {OTHER}")
    if mode == "lossless" and fixed is not None:
        raise GearbxError("--kv-gear does not go with mode 'lossless', which drafts in the lowest gear; leave it out")


def engaged_bits(
    ladder: tuple[int, ...], gearbox: Gearbox | Observer | None, fixed: int | None = None
) -> Callable[[], int]:
    """Returns the bits of the gear that a pass reads now.

    Without a fixed gear that of the cache follows that of the weights: top and top go together, lowest and lowest, and
    those between by their places, never the top one below the top of the weights.
    """
    if fixed is not None or gearbox is None or len(gearbox.ladder) == 1:
        bits = ladder[-1] if fixed is None else fixed
        return lambda: bits
    last = len(gearbox.ladder) - 1
    return lambda: ladder[gearbox.gear.index * (len(ladder) - 1) // last]


def put_in_gears(cache: list[Any], gears: KVGears) -> None:
    """Give the caches of a model's layers gears, in place; those that have the ladder already go on with `gears`.

    Raises:
        GearbxError: a cache that has no keys and values of all positions, or that has another ladder.
    """
    for part in cache:
        check_part(part, gears)
    cache[:] = [part if type(part) is NestedKVCache else NestedKVCache.of(part, gears) for part in cache]
    for part in cache:
        part.gears = gears


def check_part(part: Any, gears: KVGears) -> None:
    """Raises GearbxError unless the cache of a layer can have these gears."""
    why = None
    if type(part) is NestedKVCache and part.gears.ladder != gears.ladder:
        why = f"the prompt cache has {bits_text(part.gears.ladder)}; give these, or read the text again"
    elif hasattr(part, "max_size"):
        why = "a cache that rotates (--max-kv-size, or a sliding window) has no gears; leave one of them out"
    elif type(part) not in (KVCache, NestedKVCache):
        why = f"{type(part).__name__} has no gears; {OTHER}"
    if why is not None:
        raise GearbxError(f"--kv-gears is {bits_text(gears.ladder)}, and {why}")


def check_heads(model: nn.Module, ladder: tuple[int, ...]) -> None:
    """Raises GearbxError unless the caches of a model can have gears, by their classes and the width of their heads."""
    cache = begun_cache(model)
    for part in cache:
        check_part(part, KVGears(ladder))
    for dims in sorted({vectors.shape[-1] for part in cache for vectors in (part.keys, part.values)}):
        if group_for(dims) is None:
            raise GearbxError(
                f"--kv-gears is {bits_text(ladder)}, and the model's heads have {dims} numbers, which groups of 8 do "
                f"not divide; {OTHER}"
            )


def cache_in_gears(
    model: nn.Module,
    gearbox: Gearbox | Observer | None,
    bits: str | Sequence[int],
    fixed: int | None = None,
    cache: list[Any] | None = None,
    max_kv_size: int | None = None,
) -> list[Any]:
    """Return the caches of a model's layers in gears: the list that is given, or a new one.

    Args:
        bits: the ladder of the caches.
        fixed: bits of the gear that all passes read; without it the gear follows that of the weights.
        max_kv_size: as mlx-lm's, which makes caches that rotate.

    Raises:
        GearbxError: as `kv_ladder` and `check_heads`.
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
    """Return the gears of a cache; None for one without."""
    return next((part.gears for part in parts(cache or ()) if type(part) is NestedKVCache), None)


def plain_cache(cache: Cache) -> list[Any]:
    """Return the cache without gears: what its top gear reads, in mlx-lm's classes, for a file."""
    return [part.plain() if type(part) is NestedKVCache else part for part in cache]
