"""How the sequences of a batch choose tokens: each by its own processors and sampler, as mlx-lm would alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from ..sampler import Sampler
from .processors import Processor
from .sequence import BatchText


@dataclass
class Chooser:
    """Of one sequence.

    owner: the sequence; it draws random numbers of its own, unless it is greedy. shared: the sampler of those that have
    none; None: greedy. written: tokens in the KV cache. token: the one after them, whose pass is the next one.
    """

    owner: BatchText
    shared: Sampler | None
    processors: Sequence[Processor]
    written: Sequence[int]
    token: int

    @property
    def greedy(self) -> bool:
        return (self.owner.sampler or self.shared or greedy_sampler) is greedy_sampler

    @property
    def random(self) -> mx.array | None:
        """The state of its random numbers, if it draws any."""
        return None if self.owner.random is None else self.owner.random.state

    def rewind(self, state: mx.array | None) -> None:
        """Put its random numbers back to a state."""
        if self.owner.random is not None and state is not None:
            self.owner.random.state = state

    def sample(self, logprobs: mx.array) -> mx.array:
        """A token (1,) from log-probabilities (1, V)."""
        return self.owner.sample(logprobs, self.shared or greedy_sampler)

    def processed(self, logits: mx.array, drafted: Sequence[int]) -> mx.array:
        """Logits (1, V) of the token after the text and these drafted tokens."""
        if self.processors:
            context = mx.array([*self.written, self.token, *drafted], mx.int32)
            for processor in self.processors:
                logits = processor(context, logits)
        return logits


def normalized(logits: mx.array) -> mx.array:
    """Log-probabilities of the same shape (..., V)."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def choose(
    choosers: Sequence[Chooser | None], logits: mx.array, drafted: Sequence[Sequence[int]]
) -> tuple[mx.array, mx.array]:
    """The next token of every sequence (B,), and its log-probabilities (B, V).

    Args:
        choosers: None for a sequence whose token does not count: it gets the likeliest one.
        logits: (B, V).
        drafted: of every sequence, the tokens beyond its last one.
    """
    rows = [logits[i : i + 1] for i in range(len(choosers))]
    if any(chooser and chooser.processors for chooser in choosers):
        logits = mx.concatenate([c.processed(row, d) if c else row for c, row, d in zip(choosers, rows, drafted)])
    logprobs = normalized(logits)
    if all(chooser is None or chooser.greedy for chooser in choosers):
        return greedy_sampler(logprobs), logprobs
    rows = [logprobs[i : i + 1] for i in range(len(choosers))]
    return mx.concatenate([c.sample(row) if c else greedy_sampler(row) for c, row in zip(choosers, rows)]), logprobs


@dataclass(frozen=True)
class Chosen:
    """What a sequence chooses after each of several tokens, each time as if it had accepted all before.

    tokens: (n,), may still be computed; with processors they end at the first that was not drafted. random: states of
    its random numbers after each of them.
    """

    tokens: mx.array
    random: Sequence[mx.array | None]


def choose_all(
    choosers: Sequence[Chooser], logits: mx.array, usable: Sequence[Sequence[int]]
) -> tuple[list[Chosen], mx.array]:
    """What every sequence chooses after each token of a pass, and the log-probabilities (B, S, V).

    Args:
        logits: (B, S, V).
        usable: of every sequence, the tokens of the pass beyond its first one that count, S - 1 or fewer.
    """
    logprobs = normalized(logits)
    if not any(chooser.processors for chooser in choosers):
        return [_chosen(*row) for row in zip(choosers, logprobs)], logprobs
    chosen, rows = [], []
    for chooser, unprocessed, row, drafted in zip(choosers, logits, logprobs, usable):
        if chooser.processors:
            one, row = _accepted(chooser, unprocessed, row, drafted)
        else:
            one = _chosen(chooser, row)
        chosen.append(one)
        rows.append(row)
    return chosen, mx.stack(rows)


def _accepted(
    chooser: Chooser, logits: mx.array, logprobs: mx.array, drafted: Sequence[int]
) -> tuple[Chosen, mx.array]:
    """What a sequence chooses up to its first token that was not drafted, so that its processors see no others; and
    log-probabilities (S, V), after its processors up to there."""
    tokens, states, rows = [], [], []
    for place, proposed in enumerate([*drafted, None]):
        rows.append(normalized(chooser.processed(logits[place : place + 1], drafted[:place])))
        tokens.append(chooser.sample(rows[-1]))
        states.append(chooser.random)
        if proposed is None or tokens[-1].item() != proposed:
            break
    return Chosen(mx.concatenate(tokens), states), mx.concatenate([*rows, logprobs[len(rows) :]])


def _chosen(chooser: Chooser, logprobs: mx.array) -> Chosen:
    if chooser.greedy:
        return Chosen(greedy_sampler(logprobs), [None] * len(logprobs))
    tokens, states = [], []
    for place in range(len(logprobs)):
        tokens.append(chooser.sample(logprobs[place : place + 1]))
        states.append(chooser.random)
    return Chosen(mx.concatenate(tokens), states)
