"""The insides of mlx-lm's continuous batching: its stages, prompts and tokens, with a place to act around a pass.

mlx-lm offers no such places, so these classes stand in front of methods that it keeps to itself.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch

from .loops import LogSumExp, batch_step, first_step
from .versions import check_tested

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
        check_tested("a batch of texts")
        super().__init__(model, **settings)

    def use(self, tokens: GearedTokens, prompts: GearedPrompts | None = None) -> None:
        """Have these stages, both without sequences, in the place of those before."""
        self._generation_batch = tokens
        if prompts is not None:
            self._prompt_batch = prompts

    def readable(self, waiting: Sequence[int], reading: Sequence[int], most: int) -> int:
        """How many prompts are read next.

        Args:
            waiting: ids of the sequences that come next. reading: of those whose prompts are being read.
            most: prompts at once.
        """
        return most

    def seen(self, step: Callable[[], tuple[list[Any], list[Any]]]) -> tuple[list[Any], list[Any]]:
        """What a step gives out: of prompts and of texts. step: mlx-lm's own."""
        return step()

    def _make_batch(self, n: int) -> PromptProcessingBatch:
        waiting = [each[0] for each in self._unprocessed_sequences][:n]
        return super()._make_batch(self.readable(waiting, self._prompt_batch.uids, n))

    def _next(self) -> tuple[list[Any], list[Any]]:
        return self.seen(super()._next)
