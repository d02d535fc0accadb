"""The gears of the KV cache: which of them a pass reads, and caches that have them."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..errors import GearbxError
from ..formats.kv_cache import KVGears, NestedKVCache, group_for
from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import kv_ladder, shown
from .cache_checks import begun_cache
from .caches import Cache, parts

OTHER = "leave --kv-gears out"


def check_mode(mode: str, fixed: int | None) -> None:
    """Raises GearbxError for a mode whose KV cache has no gears, or one that chooses them."""
    if mode == "pair":
        raise GearbxError(f"--kv-gears are of one model, and mode 'pair' has two; {OTHER}")
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
    ladder = shown(gears.ladder)
    if type(part) is NestedKVCache and part.gears.ladder != gears.ladder:
        theirs = shown(part.gears.ladder)
        raise GearbxError(
            f"--kv-gears is {ladder}, and the prompt cache has {theirs}; give these, or read the text anew"
        )
    if hasattr(part, "max_size"):
        raise GearbxError(
            f"--kv-gears is {ladder}, and a cache that rotates (--max-kv-size, or a sliding window) has no gears; "
            "leave one of them out"
        )
    if type(part) not in (KVCache, NestedKVCache):
        raise GearbxError(f"--kv-gears is {ladder}, and {type(part).__name__} has no gears; {OTHER}")


def check_heads(model: nn.Module, ladder: tuple[int, ...]) -> None:
    """Raises GearbxError unless the caches of a model can have gears, by their classes and the width of their heads."""
    cache = begun_cache(model)
    for part in cache:
        check_part(part, KVGears(ladder))
    for dims in sorted({vectors.shape[-1] for part in cache for vectors in (part.keys, part.values)}):
        if group_for(dims) is None:
            raise GearbxError(
                f"--kv-gears is {shown(ladder)}, and the model's heads have {dims} numbers, which groups of 8 do not "
                f"divide; {OTHER}"
            )


def cache_in_gears(
    model: nn.Module,
    gearbox: Gearbox | Observer | None,
    bits: str | Sequence[int],
    fixed: int | None = None,
    cache: list[Any] | None = None,
    max_kv_size: int | None = None,
) -> list[Any]:
    """The caches of a model's layers in gears: the list that is given, or a new one.

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
        for part in cache:
            check_part(part, gears)
        check_heads(model, ladder)
    put_in_gears(cache, gears)
    return cache


def gears_of(cache: Cache | None) -> KVGears | None:
    """The gears of a cache; None for one without."""
    return next((part.gears for part in parts(cache or ()) if type(part) is NestedKVCache), None)


def in_prompt(cache: Cache) -> bool:
    """Whether passes over a cache in gears read a prompt now, which they do in another way than a text."""
    gears = gears_of(cache)
    return gears is not None and gears.in_prompt


def plain_cache(cache: Cache) -> list[Any]:
    """The cache without gears: what its top gear reads, in mlx-lm's classes, for a file."""
    return [part.plain() if type(part) is NestedKVCache else part for part in cache]
