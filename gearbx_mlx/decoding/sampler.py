"""mlx-lm's sampler for a tokenizer."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

Sampler = Callable[[mx.array], mx.array]
"""From log-probabilities (B, V) to tokens (B,)."""


def sampler_for(
    tokenizer: Any,
    *,
    temp: float = 0.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.0,
) -> Sampler:
    """mlx-lm's sampler for a tokenizer. XTC never drops line ends and the ends of texts."""
    return make_sampler(
        temp,
        top_p,
        min_p,
        min_tokens_to_keep,
        top_k=top_k,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )
