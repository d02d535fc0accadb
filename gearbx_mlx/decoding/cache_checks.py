"""Whether KV caches are what a model needs: those read from a file, those to be quantized, those to draft with."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from ..errors import GearbxError
from .caches import Cache, parts, room

SETTINGS = ("max_size", "keep", "chunk_size")  # of a cache, and the same however full it is
AGAIN = "make it again with mlx_lm.cache_prompt and this model"


def begun_cache(model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
    """The caches that a model makes, with one token in them. Nothing is computed: they show shapes and types."""
    cache = make_prompt_cache(model, max_kv_size)
    model(mx.array([[0]]), cache=cache)
    return cache


def check_prompt_cache(cache: Cache, model: nn.Module) -> None:
    """Raises GearbxError unless a cache is one of this model, complete and with finite values."""
    sizes = (part.max_size for part in parts(cache) if hasattr(part, "max_size"))
    own = begun_cache(model, next(sizes, None))
    if len(cache) != len(own):
        raise GearbxError(f"holds {len(cache)} caches, and the model has {len(own)}; {AGAIN}")
    for number, (entry, needed) in enumerate(zip(cache, own)):
        there, expected = form(entry), form(as_quantized(needed, entry))
        if there != expected:
            raise GearbxError(f"cache {number} is {there}, and the model's {expected}; {AGAIN}")
    for number, part in enumerate(parts(cache)):
        if not is_whole(part):
            raise GearbxError(f"cache {number} says another number of tokens than it has; {AGAIN}")
    floating = [a for a in arrays_of(cache) if mx.issubdtype(a.dtype, mx.floating)]
    if not all(mx.isfinite(array).all().item() for array in floating):
        raise GearbxError(f"has values that are not finite; {AGAIN}")


def arrays_of(cache: Cache) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten([part.state for part in parts(cache)]) if isinstance(leaf, mx.array)]


def as_quantized(needed: Any, entry: Any) -> Any:
    """The model's cache, quantized where the one from the file is."""
    if not isinstance(entry, QuantizedKVCache) or not hasattr(needed, "to_quantized"):
        return needed
    try:
        return needed.to_quantized(group_size=entry.group_size, bits=entry.bits)
    except (NotImplementedError, TypeError, ValueError):  # nothing that mlx-lm can have written
        return needed


def form(entry: Any) -> str:
    """What does not change while a cache fills: class, settings, and the types and shapes of its arrays."""
    described = []
    for part in parts([entry]):
        settings = [f"{name}={getattr(part, name)}" for name in SETTINGS if hasattr(part, name)]
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


def is_whole(part: Any) -> bool:
    """Whether a cache that counts its tokens has so many of them."""
    if not hasattr(part, "keys"):
        return True
    entries = {array.shape[-2] for array in arrays_of([part])} or {0}
    used = getattr(part, "_idx", part.offset - getattr(part, "start_position", 0))
    return len(entries) == 1 and 0 <= used <= min(entries) and part.offset >= 0


def check_quantizable(model: nn.Module, bits: int, group_size: int = 64, max_kv_size: int | None = None) -> None:
    """Raises GearbxError unless a model runs with caches of so many bits."""
    cache = begun_cache(model, max_kv_size)
    able = [entry for entry in cache if hasattr(entry, "to_quantized")]
    if not able:
        raise GearbxError(f"--kv-bits is {bits}, and {type(cache[0]).__name__} cannot be quantized; leave it out")
    if any(hasattr(entry, "max_size") for entry in able):
        raise GearbxError(
            f"--kv-bits is {bits}, and a cache that rotates (--max-kv-size, or a sliding window) cannot be quantized; "
            "leave one of them out"
        )
    for size in sorted({array.shape[-1] for array in arrays_of(able)}):
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


def check_draftable(cache: Cache, name: str, tokens: float) -> None:
    """Raises GearbxError unless drafts can be taken back from a cache throughout a text.

    Args:
        name: of the model, for the error.
        tokens: that are added at most: of prompt, text and a draft together.
    """
    if room(cache) >= tokens:
        return
    part = min(parts(cache), key=lambda part: room([part]))
    full = getattr(part, "max_size", None) or getattr(part, "chunk_size", None)
    why = "keeps a state instead of entries; leave --draft-model out"
    if full is not None:
        why = f"has room for {full} tokens; give fewer --max-tokens, or leave --draft-model out"
    kind = type(part).__name__
    raise GearbxError(f"--draft-model: drafts are taken back from the KV cache, and the {kind} of the {name} {why}")
