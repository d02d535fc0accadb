"""Drafts of mode lossless: tokens that a low gear writes, of which neither cache nor random numbers keep a trace.

A token is drafted with the random numbers that mlx-lm will use to sample its position, from logits that went through
the same processors: so draft and verification choose the same token wherever their distributions agree.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..routing.acceptance import DraftRule
from .entropy import Entropy
from .snapshots import Snapshot
from .step import DRAFT, Proposal


@dataclass(frozen=True)
class Drafter:
    """Writes drafts in a gear.

    Args:
        gear: of the gearbox; it is engaged after a draft.
        rule: when to stop.
        entropy: in bits, of log-probabilities (1, V).
        sampler, logits_processors: mlx-lm's own; greedy without.
        stop_tokens: tokens after which nothing is drafted.
    """

    gearbox: Gearbox
    gear: Gear
    rule: DraftRule
    entropy: Entropy
    sampler: Callable[[mx.array], mx.array] | None = None
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = ()
    stop_tokens: frozenset[int] = frozenset()

    def draft(self, token: int, cache: Any, most: int, text: Sequence[int] = ()) -> Proposal:
        """Tokens that follow `token`, `most` at most.

        Args:
            text: the tokens so far, `token` included; logits processors alone ask for them.
        """
        drafted: list[int] = []
        entropies: list[float] = []
        self.rule.begin()
        if most < 1:
            return Proposal([])
        with Snapshot(cache).borrowed(), same_random_numbers():
            while len(drafted) < most:
                sampled, entropy = self._step(token, cache, [*text, *drafted])
                mx.eval(entropy, sampled)
                token = np.array(sampled).item()
                drafted.append(token)
                entropies.append(float(entropy))
                if token in self.stop_tokens or not self.rule.goes_on(entropies[-1]):
                    break
        return Proposal(drafted, DRAFT, tuple(entropies))

    def _step(self, token: int, cache: Any, text: list[int]) -> tuple[mx.array, mx.array]:
        """What follows a token, and the entropy (bits) of its distribution."""
        self.gearbox.shift(self.gear)
        logits = self.gearbox.model(mx.array([[token]]), cache=cache)[:, -1]
        for processor in self.logits_processors:
            logits = processor(mx.array(text, mx.uint32), logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        entropy = self.entropy(logprobs)
        return self.sampler(logprobs) if self.sampler else mx.argmax(logprobs, axis=-1), entropy


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Random numbers drawn in the block will be drawn again after it."""
    state: Any = mx.random.state
    high, low = state[0].tolist()
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)  # a key is its seed
