"""mlx-lm's two stages of a batch, prompts and tokens, which name the sequences of a pass before it runs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

Pass = Callable[[Sequence[int]], AbstractContextManager]
"""Takes the ids of the sequences whose rows a pass computes; the pass runs inside."""


class GearedTokens(GenerationBatch):
    """The sequences that have begun to write."""

    begin: Pass

    @classmethod
    def of(cls, model: nn.Module, sampler: Any, begin: Pass) -> "GearedTokens":
        """One without sequences."""
        batch = cls.empty(model, sampler)
        batch.begin = begin
        return batch

    def _step(self) -> Any:
        with self.begin(self.uids):
            return super()._step()


class GearedPrompts(PromptProcessingBatch):
    """The sequences whose prompts are still read, all in the same gear."""

    begin: Pass

    @classmethod
    def of(cls, model: nn.Module, sampler: Any, prefill_step_size: int, begin: Pass) -> "GearedPrompts":
        """One without sequences."""
        batch = cls.empty(model, sampler, prefill_step_size)
        batch.begin = begin
        return batch

    def _copy(self) -> "GearedPrompts":
        batch = super()._copy()
        batch.begin = self.begin
        return batch

    def prompt(self, tokens: list[list[int]]) -> None:
        with self.begin(self.uids):
            super().prompt(tokens)

    def generate(self, tokens: list[list[int]]) -> GenerationBatch:
        """Reads the last tokens of prompts, and samples the first of the texts."""
        with self.begin(self.uids):
            return super().generate(tokens)
