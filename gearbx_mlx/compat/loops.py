"""Internals of mlx-lm's loops, since these have no extension points.

Its loops call `mx.logsumexp`, which takes a CPU half a millisecond over a vocabulary of 49,152. Without the copies
below, SmolLM2's tokens take 1.20 (4-bit) and 1.12 times (16-bit) as long (mode static, two EPYC cores, 2026-11-29). The
copies of mlx-lm's functions use a replacement of `mx` with a faster `logsumexp`: mlx-lm is not changed. Subclasses wrap
the forward passes of its continuous batching.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, GenerationBatch, GenerationResponse, PromptProcessingBatch, generate_step
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache

from ..errors import GearbxError
from .classes import with_globals
from .versions import is_tested, untested

LogSumExp = Callable[[mx.array], mx.array]
"""Function of logits (..., V), over the last axis, with kept dimensions: (..., 1)."""


class StandIn:
    """`mlx.core` with a different `logsumexp` over the last axis."""

    def __init__(self, logsumexp: LogSumExp):
        self._logsumexp = logsumexp

    def logsumexp(self, a: mx.array, axis: Any = None, keepdims: bool = False) -> mx.array:
        over_last = axis == -1 or (axis is None and a.shape[0] == 1 and a.ndim == 2)
        return self._logsumexp(a) if over_last and keepdims else mx.logsumexp(a, axis=axis, keepdims=keepdims)

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


@functools.cache
def streaming_with(logsumexp: LogSumExp | None) -> Callable[..., Iterator[GenerationResponse]]:
    """Return mlx-lm's `stream_generate` with this function; unchanged without one, or with untested versions."""
    if logsumexp is None or not is_tested():
        return mlx_stream_generate
    step = with_globals(generate_step, {"mx": StandIn(logsumexp)})
    return with_globals(mlx_stream_generate, {"generate_step": step})


@functools.cache
def batch_step(logsumexp: LogSumExp | None) -> Callable[[GenerationBatch], Any]:
    """Return mlx-lm's decoding step of a batch with this function, as `streaming_with`."""
    step = GenerationBatch._step
    return step if logsumexp is None or not is_tested() else with_globals(step, {"mx": StandIn(logsumexp)})


@functools.cache
def first_step(logsumexp: LogSumExp | None) -> Callable[[PromptProcessingBatch, list[list[int]]], GenerationBatch]:
    """Return mlx-lm's first step after prefill with this function, as `streaming_with`."""
    generate, step = PromptProcessingBatch.generate, batch_step(logsumexp)
    if step is GenerationBatch._step:
        return generate
    return with_globals(generate, {"GenerationBatch": type("GenerationBatch", (GenerationBatch,), {"_step": step})})


Pass = Callable[[Sequence[int]], AbstractContextManager]
"""Context of a forward pass, from the ids of its sequences."""


class GearedTokens(GenerationBatch):
    """The sequences that are decoding. Each has a token that is sampled, but not returned yet."""

    begin: Pass
    logsumexp: LogSumExp | None = None

    @classmethod
    def of(cls, model: nn.Module, sampler: Any, begin: Pass, logsumexp: LogSumExp | None) -> "GearedTokens":
        """Return an empty batch. logsumexp: for its log-probabilities; None: MLX's."""
        batch = cls.empty(model, sampler)
        batch.begin, batch.logsumexp = begin, logsumexp
        return batch

    def _step(self) -> Any:
        with self.begin(self.uids):
            return batch_step(self.logsumexp)(self)


class GearedPrompts(PromptProcessingBatch):
    """The sequences in prefill, all in the same gear, also for their first token."""

    passes: tuple[Pass, Pass]
    logsumexp: LogSumExp | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sampler: Any,
        prefill_step_size: int,
        passes: tuple[Pass, Pass],
        logsumexp: LogSumExp | None,
    ) -> "GearedPrompts":
        """Return an empty batch.

        Args:
            passes: over prompts without their last tokens, and over the last tokens.
            logsumexp: for the first log-probabilities; None: MLX's.
        """
        batch = cls.empty(model, sampler, prefill_step_size)
        batch.passes, batch.logsumexp = passes, logsumexp
        return batch

    def _copy(self) -> "GearedPrompts":
        batch = super()._copy()
        batch.passes, batch.logsumexp = self.passes, self.logsumexp
        return batch

    def prompt(self, tokens: list[list[int]]) -> None:
        with self.passes[0](self.uids):
            super().prompt(tokens)

    def generate(self, tokens: list[list[int]]) -> GenerationBatch:
        """Run the last tokens of prompts, and sample the first of the outputs."""
        if any(len(each) > 1 for each in tokens):
            self.prompt([each[:-1] for each in tokens])
        with self.passes[1](self.uids):
            return first_step(self.logsumexp)(self, [each[-1:] for each in tokens])


class StagedGenerator(BatchGenerator):
    """mlx-lm's BatchGenerator with replaced stages.

    Raises:
        GearbxError: untested versions of mlx-lm.
    """

    _old_wired_limit: Any = None  # mlx-lm reads it at the end, but may never have set it

    def __init__(self, model: nn.Module, **settings: Any):
        if not is_tested():
            raise GearbxError(f"batched generation needs tested versions: {untested()}")
        super().__init__(model, **settings)

    def use(self, tokens: GearedTokens, prompts: GearedPrompts) -> None:
        """Replace the stages by these, both without sequences."""
        self._generation_batch, self._prompt_batch = tokens, prompts

    def readable(self, waiting: Sequence[int], reading: Sequence[int], most: int) -> int:
        """Return the number of prompts for the next prefill.

        Args:
            waiting: ids of the next sequences. reading: of those in prefill.
            most: maximum number of prompts.
        """
        return most

    def seen(self, step: Callable[[], tuple[list[Any], list[Any]]]) -> tuple[list[Any], list[Any]]:
        """Return the results of a step: of prompts and of outputs. step: mlx-lm's."""
        return step()

    def _make_batch(self, n: int) -> PromptProcessingBatch:
        waiting = [each[0] for each in self._unprocessed_sequences][:n]
        return super()._make_batch(self.readable(waiting, self._prompt_batch.uids, n))

    def _next(self) -> tuple[list[Any], list[Any]]:
        return self.seen(super()._next)


OFFSET: Callable[[Any], int] = attrgetter("offset")
POSITIONS: dict[type, Callable[[Any], int]] = {KVCache: OFFSET, BatchKVCache: attrgetter("_idx")}
"""Class of a cache to a function like `positions_in`, without a call in Python for each layer."""


def positions_in(cache: Any) -> int:
    """Return how many tokens have passed through a cache, including padding."""
    return 0 if cache is None else POSITIONS.get(type(cache), OFFSET)(cache)


def set_entries(cache: Any, count: int) -> None:
    """Set the number of a cache's entries."""
    if type(cache) is BatchKVCache:  # always equal to these offsets; a sum per token would wait for the previous one
        cache._idx, cache.offset = count, count - cache.left_padding
    else:
        cache.offset = count


def counted(part: Any) -> int:
    """Return how many entries of its arrays a cache of keys and values uses."""
    return getattr(part, "_idx", part.offset - getattr(part, "start_position", 0))


def offset_of(part: Any) -> int:
    """Return the number of tokens given to a cache; in a batch `offset` is an array, so the number is separate."""
    return int(getattr(part, "_offset", getattr(part, "offset", 0)))


def cut_window(part: RotatingKVCache, entries: int) -> None:
    """Drop the last entries of a sliding window after a pass over several tokens. Such a pass leaves it in order."""
    part.keys, part.values = part.keys[..., :-entries, :], part.values[..., :-entries, :]
    part.offset -= entries
    part._idx = part.keys.shape[2]
    mx.async_eval(part.keys, part.values)  # other threads cannot evaluate operations of this one
