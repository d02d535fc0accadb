"""What generation needs beside the weights: keys and values, and activations (XFP 6.3, hardware projection).

XFP reserves 8 GiB and 10 GiB for its model. Here both are measured by reading a few tokens with the model itself.
"""

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..files.model_directory import context_length

CONTEXT = 8192  # tokens, where the model's context is longer: few texts are
PREFILL = 2048  # tokens that mlx-lm reads in one pass
STEP = 256  # tokens by which mlx-lm's caches grow; one and two steps are read to measure


@dataclass(frozen=True)
class Reserve:
    """Bytes beside the weights. tokens: of the context that the cache is for; 0 where the user gave the bytes."""

    cache: int
    activations: int = 0
    tokens: int = 0

    @property
    def bytes(self) -> int:
        return self.cache + self.activations


def cache_bytes(model: nn.Module, tokens: int) -> tuple[int, int]:
    """Bytes of the cache after so many tokens, and of the activations of the pass that read them.

    Resets MLX's peak memory.
    """
    caches = make_prompt_cache(model)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    logits = model(mx.zeros((1, tokens), mx.int32), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    kept = sum(a.nbytes for _, a in tree_flatten([cache.state for cache in caches]) if isinstance(a, mx.array))
    return kept, max(0, mx.get_peak_memory() - before - kept)


def measure_reserve(model: nn.Module) -> Reserve:
    """The reserve for the model's context, at most 8192 tokens of it, read in passes of 2048.

    Two short passes give what 256 tokens add. A window or a state that stops growing counts as if it grew on.
    """
    made_for = context_length(vars(model.args)) if hasattr(model, "args") else None
    context = min(made_for or CONTEXT, CONTEXT)
    if context <= 2 * STEP:
        return Reserve(*cache_bytes(model, context), context)
    (start, _), (end, activations) = cache_bytes(model, STEP), cache_bytes(model, 2 * STEP)
    steps = math.ceil(context / STEP)
    return Reserve(end + (end - start) * (steps - 2), round(activations * min(PREFILL, context) / (2 * STEP)), context)
