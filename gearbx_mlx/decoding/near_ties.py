"""Tokens that rounding may have decided: several positions in one pass are added up in another order than one."""

import mlx.core as mx

NOISE = 4  # units in the last place of the largest logit: less than that between two logits is a near-tie


def noise_of(logits: mx.array) -> mx.array:
    """How much rounding may move each row of logits (..., V): (...)."""
    return NOISE * mx.finfo(logits.dtype).eps * mx.abs(logits).max(axis=-1)


def near_ties(logprobs: mx.array, noise: mx.array) -> mx.array:
    """Whether the two best of log-probabilities (..., V) are no further apart than rounding may move them.

    Args:
        noise: (...), of the logits; the largest of the positions that were computed together.
    """
    best = mx.topk(logprobs, 2, axis=-1)
    return mx.abs(best[..., 0] - best[..., 1]) <= noise
