"""Which arrays go together in an operation, whatever computes it."""

import mlx.core as mx


def are_attention(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> bool:
    """Whether these are queries (B, H, L, D) and keys and values (B, H / a whole number, S, D), S >= L, of one type.

    The mask is "causal", a bool array or None; kernels take no others.
    """
    known = mask.dtype == mx.bool_ if isinstance(mask, mx.array) else mask in ("causal", None)
    arrays = queries, keys, values
    return (
        known
        and all(a.ndim == 4 and a.dtype == queries.dtype and a.size > 0 for a in arrays)
        and keys.shape == values.shape
        and (keys.shape[0], keys.shape[3]) == (queries.shape[0], queries.shape[3])
        and queries.shape[1] % keys.shape[1] == 0
        and queries.shape[2] <= keys.shape[2]
    )
