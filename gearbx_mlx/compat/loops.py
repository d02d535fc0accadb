"""mlx-lm's loops with another logarithm of a sum of exponentials: MLX's takes a CPU a tenth of a token's time.

They call it by the name `mx.logsumexp`. Copies of their functions get a stand-in for `mx`; nothing in mlx-lm changes.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, GenerationResponse, PromptProcessingBatch, generate_step
from mlx_lm.generate import stream_generate as mlx_stream_generate

from .classes import with_globals
from .versions import is_tested

LogSumExp = Callable[[mx.array], mx.array]
"""Over the last axis of logits (..., V), which it keeps: (..., 1)."""


class StandIn:
    """`mlx.core` with another `logsumexp` where it goes over the last axis alone."""

    def __init__(self, logsumexp: LogSumExp):
        self._logsumexp = logsumexp

    def logsumexp(self, a: mx.array, axis: Any = None, keepdims: bool = False) -> mx.array:
        over_last = axis == -1 or (axis is None and a.shape[0] == 1 and a.ndim == 2)
        return self._logsumexp(a) if over_last and keepdims else mx.logsumexp(a, axis=axis, keepdims=keepdims)

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


@functools.cache
def stream_generate(logsumexp: LogSumExp | None) -> Callable[..., Iterator[GenerationResponse]]:
    """mlx-lm's `stream_generate`, with this function; its own without one, or with versions that are not tested."""
    if logsumexp is None or not is_tested():
        return mlx_stream_generate
    step = with_globals(generate_step, {"mx": StandIn(logsumexp)})
    return with_globals(mlx_stream_generate, {"generate_step": step})


@functools.cache
def batch_step(logsumexp: LogSumExp | None) -> Callable[[GenerationBatch], Any]:
    """Like `stream_generate`, mlx-lm's step of a batch that writes."""
    step = GenerationBatch._step
    return step if logsumexp is None or not is_tested() else with_globals(step, {"mx": StandIn(logsumexp)})


@functools.cache
def first_step(logsumexp: LogSumExp | None) -> Callable[[PromptProcessingBatch, list[list[int]]], GenerationBatch]:
    """Like `stream_generate`, what samples the first tokens of texts whose prompts are read."""
    generate, step = PromptProcessingBatch.generate, batch_step(logsumexp)
    if step is GenerationBatch._step:
        return generate
    return with_globals(generate, {"GenerationBatch": type("GenerationBatch", (GenerationBatch,), {"_step": step})})
