"""The insides of mlx-lm's loops, which offer no places to act in.

Its loops call `mx.logsumexp`, which takes a CPU half a millisecond over a vocabulary of 49,152: without the copies
below, SmolLM2 needs 1.20 times as long for a 4-bit token and 1.12 times for a 16-bit one (mode static, two cores of an
EPYC, 2026-11-29). The copies of mlx-lm's functions get a stand-in for `mx`, with another logarithm of a sum of
exponentials: nothing in mlx-lm changes. Around the passes of its continuous batching, classes stand in front of methods
that it keeps to itself.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, GenerationBatch, GenerationResponse, PromptProcessingBatch, generate_step
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import BatchKVCache, RotatingKVCache

from ..errors import GearbxError
from .classes import with_globals
from .versions import is_tested, untested

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
def streaming_with(logsumexp: LogSumExp | None) -> Callable[..., Iterator[GenerationResponse]]:
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


Pass = Callable[[Sequence[int]], AbstractContextManager]
"""Takes the ids of the sequences whose rows a pass computes; the pass runs inside."""


class GearedTokens(GenerationBatch):
    """The sequences that have begun to write. Each has a token that is sampled, and still to be given out."""

    begin: Pass
    logsumexp: LogSumExp | None = None

    @classmethod
    def of(cls, model: nn.Module, sampler: Any, begin: Pass, logsumexp: LogSumExp | None) -> "GearedTokens":
        """One without sequences, whose log-probabilities are made with this function; with MLX's without one."""
        batch = cls.empty(model, sampler)
        batch.begin, batch.logsumexp = begin, logsumexp
        return batch

    def _step(self) -> Any:
        with self.begin(self.uids):
            return batch_step(self.logsumexp)(self)


class GearedPrompts(PromptProcessingBatch):
    """The sequences whose prompts are still read, all in the same gear, and begin to write in the same one."""

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
        """One without sequences.

        Args:
            passes: over prompts without their last tokens, and over the last tokens.
            logsumexp: makes the first log-probabilities; without it MLX's.
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
        """Reads the last tokens of prompts, and samples the first of the texts."""
        if any(len(each) > 1 for each in tokens):
            self.prompt([each[:-1] for each in tokens])
        with self.passes[1](self.uids):
            return first_step(self.logsumexp)(self, [each[-1:] for each in tokens])


class StagedGenerator(BatchGenerator):
    """mlx-lm's BatchGenerator with stages of ours.

    Raises:
        GearbxError: versions of mlx-lm that are not tested.
    """

    _old_wired_limit: Any = None  # mlx-lm looks at it at the end, and it may never come to be set

    def __init__(self, model: nn.Module, **settings: Any):
        if not is_tested():
            raise GearbxError(f"a batch of texts needs tested versions: {untested()}")
        super().__init__(model, **settings)

    def use(self, tokens: GearedTokens, prompts: GearedPrompts) -> None:
        """Have these stages, both without sequences, in the place of those before."""
        self._generation_batch, self._prompt_batch = tokens, prompts

    def readable(self, waiting: Sequence[int], reading: Sequence[int], most: int) -> int:
        """Return how many prompts are read next.

        Args:
            waiting: ids of the sequences that come next. reading: of those whose prompts are being read.
            most: prompts at once.
        """
        return most

    def seen(self, step: Callable[[], tuple[list[Any], list[Any]]]) -> tuple[list[Any], list[Any]]:
        """Return what a step gives out: of prompts and of texts. step: mlx-lm's own."""
        return step()

    def _make_batch(self, n: int) -> PromptProcessingBatch:
        waiting = [each[0] for each in self._unprocessed_sequences][:n]
        return super()._make_batch(self.readable(waiting, self._prompt_batch.uids, n))

    def _next(self) -> tuple[list[Any], list[Any]]:
        return self.seen(super()._next)


def positions_in(cache: Any) -> int:
    """Return how many tokens have been through a cache, padding included."""
    count: int = 0 if cache is None else cache._idx if type(cache) is BatchKVCache else cache.offset
    return count


def set_entries(cache: Any, count: int) -> None:
    """Say that a cache has so many entries."""
    if type(cache) is BatchKVCache:  # its offsets are always these; a sum for each token would wait for its sum before
        cache._idx, cache.offset = count, count - cache.left_padding
    else:
        cache.offset = count


def counted(part: Any) -> int:
    """Return how many entries of its arrays a cache that keeps keys and values uses."""
    return getattr(part, "_idx", part.offset - getattr(part, "start_position", 0))


def offset_of(part: Any) -> int:
    """Return tokens that a cache has been given; of a batch `offset` is an array, and the number has another name."""
    return int(getattr(part, "_offset", getattr(part, "offset", 0)))


def cut_window(part: RotatingKVCache, entries: int) -> None:
    """Drop the last entries of a sliding window after a pass over several tokens, which leaves it in order."""
    part.keys, part.values = part.keys[..., :-entries, :], part.values[..., :-entries, :]
    part.offset -= entries
    part._idx = part.keys.shape[2]
    mx.async_eval(part.keys, part.values)  # another thread could not: what is still to be computed belongs to this one
