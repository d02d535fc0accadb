"""The rev counter of a batch: the entropy of every row, noted where mlx-lm samples."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from ..entropy import Entropy
from ..sampler import Sampler
from ..step import Step
from .sequence import BatchText, SeenPass, SeenRow


class RowSampler:
    """A sampler of all rows of a pass, to mlx-lm one and the same for every sequence.

    It notes entropies and step as `EntropySampler` does. Then each row is sampled as its sequence would sample it
    alone; rows without a sampler and a seed of their own together, as in mlx-lm.

    Args:
        sampler: of sequences that have none.
        step: returns how the latest logits came about, those of so many rows.
        entropy: in bits, of log-probabilities (B, V).
    """

    def __init__(self, sampler: Sampler, step: Callable[[int], Step], entropy: Entropy):
        self.sampler, self.step, self.entropy = sampler, step, entropy
        self._sequences: Sequence[BatchText] = ()

    @contextmanager
    def of(self, sequences: Sequence[BatchText]) -> Iterator[None]:
        """Inside, the rows of a pass are of these sequences, in their order."""
        before, self._sequences = self._sequences, sequences
        try:
            yield
        finally:
            self._sequences = before

    def __call__(self, logprobs: mx.array) -> mx.array:
        entropies = self.entropy(logprobs)
        seen = SeenPass(self.step(len(logprobs)), entropies)
        for row, each in enumerate(self._sequences):
            each.rows.append(SeenRow(seen, row, each.wish))
        return mx.depends([self._sampled(logprobs)], [entropies])[0]  # one evaluation makes tokens and entropies

    def _sampled(self, logprobs: mx.array) -> mx.array:
        if all(each.sampler is None and each.random is None for each in self._sequences):
            return self.sampler(logprobs)
        return mx.concatenate(
            [each.sample(logprobs[row : row + 1], self.sampler) for row, each in enumerate(self._sequences)]
        )
