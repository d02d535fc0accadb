"""Drafts of mode lossless: tokens that a low gear writes, of which neither cache nor random numbers keep a trace.

A token is drafted with the random numbers that mlx-lm will use to sample its position, from logits that went through
the same processors: so draft and verification choose the same token wherever their distributions agree.

The entropy of a token says whether the draft goes on. To read it is to wait for the device, which has nothing to do
until the next step is queued. So steps may be queued ahead, as mlx-lm queues one: each takes the token before it as an
array that is still computed. Where the draft turns out to be over, the steps beyond its end are thrown away. They cost
passes, and change nothing.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..compat.arrays import same_random_numbers
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..ranks.agreement import ALONE, Agreement
from ..routing.acceptance import DraftRule, FixedLength
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
        ahead: steps that are queued beyond the one whose entropy is read.
        agreement: of the ranks that share the model.
    """

    gearbox: Gearbox
    gear: Gear
    rule: DraftRule
    entropy: Entropy
    sampler: Callable[[mx.array], mx.array] | None = None
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = ()
    stop_tokens: frozenset[int] = frozenset()
    ahead: int = 0
    agreement: Agreement = ALONE

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
        if isinstance(self.rule, FixedLength):
            most = min(most, self.rule.length)  # nothing is queued beyond an end that is known
        with Snapshot(cache).borrowed(), same_random_numbers():
            steps = itertools.islice(self._steps(token, cache, text), most)
            queued = deque(itertools.islice(steps, 1 + self.ahead))
            while queued:
                sampled, entropy = queued.popleft()
                drafted.append(np.array(sampled).item())
                entropies.append(float(entropy))
                if drafted[-1] in self.stop_tokens or not self.rule.goes_on(entropies[-1]):
                    break
                queued.extend(itertools.islice(steps, 1))
        return Proposal(drafted, DRAFT, tuple(entropies), discarded=len(queued))

    def _steps(self, token: int, cache: Any, text: Sequence[int]) -> Iterator[tuple[mx.array, mx.array]]:
        """The tokens (1,) that follow, without end, and the entropies (bits) of their distributions.

        The device still computes them; processors get the tokens so far as such an array too, as from mlx-lm.
        """
        self.gearbox.shift(self.gear)
        inputs, history = mx.array([token], mx.uint32), mx.array([*text], mx.uint32)
        while True:
            logits = self.gearbox.model(inputs[None], cache=cache)[:, -1]
            for processor in self.logits_processors:
                logits = processor(history, logits)
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            sampled = self.sampler(logprobs) if self.sampler else mx.argmax(logprobs, axis=-1)
            sampled, entropy = self.agreement.arrays(sampled, self.entropy(logprobs))
            mx.async_eval(sampled, entropy)
            yield sampled, entropy
            inputs = sampled.reshape(1)
            if self.logits_processors:
                history = mx.concatenate([history, inputs.astype(mx.uint32)])
