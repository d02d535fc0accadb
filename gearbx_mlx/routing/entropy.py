"""Shannon entropy of the next-token distribution: the rev counter (GEARBX 3.1)."""

import mlx.core as mx

# GEARBX 10.1: half-precision logits may not be finite, and checking that first would cost a synchronisation.
NAN, POSITIVE_INFINITY, NEGATIVE_INFINITY = 0.0, 1e4, -1e4


def entropy_bits(logprobs: mx.array) -> mx.array:
    """H = -sum p log2 p over the last axis, in bits.

    Args:
        logprobs: shape (..., V), any floating type. Log-probabilities or logits: they are normalised here, since
            half-precision log-probabilities do not sum to one. NaN counts as 0, +inf as 1e4 and -inf as -1e4, so -inf
            entries contribute 0, and a vector of NaN is the uniform distribution.

    Returns:
        shape (...), float32, from 0 (all mass on one token) to log2 V (uniform); both ends are exact. The array is not
        evaluated: the caller decides when to wait for it (GEARBX 3.6).
    """
    z = mx.nan_to_num(logprobs.astype(mx.float32), NAN, POSITIVE_INFINITY, NEGATIVE_INFINITY)
    z = z - z.max(axis=-1, keepdims=True)
    weight = mx.exp(z)
    total = weight.sum(axis=-1)
    # log2 of a sum of V ones is exact where log2 V is; -sum p log2 p is not.
    bits = mx.log2(total) - (weight * z).sum(axis=-1) / (total * mx.log(mx.array(2.0)))
    return mx.clip(bits, 0.0, mx.log2(mx.array(float(z.shape[-1]))))
