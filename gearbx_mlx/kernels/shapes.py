"""Which arrays go together in an operation, whatever computes it."""

from collections.abc import Sequence

import mlx.core as mx


def are_attention(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> bool:
    """Whether these are queries (B, H, L, D) and keys and values (B, H / a whole number, S, D), S >= L, of one type.

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
    """As `are_attention`, for entries behind positions that lie elsewhere: there may be fewer of them than queries."""
    batch, heads, _, dims = queries.shape
    return (
        known_mask(mask)
        and keys.dtype == values.dtype == queries.dtype
        and keys.shape == values.shape
        and heads_fit((batch, heads, 0, dims), keys.shape)
    )


def known_mask(mask: mx.array | str | None) -> bool:
    """Whether a mask is "causal", a bool array or None."""
    return mask.dtype == mx.bool_ if isinstance(mask, mx.array) else mask in ("causal", None)


def heads_fit(queries: Sequence[int], keys: Sequence[int]) -> bool:
    """Whether these are shapes of queries (B, H, L, D) and keys (B, H / a whole number, S, D), S >= L."""
    return (keys[0], keys[3]) == (queries[0], queries[3]) and queries[1] % keys[1] == 0 and queries[2] <= keys[2]
