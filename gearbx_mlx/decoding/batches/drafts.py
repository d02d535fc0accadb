"""Drafts for all sequences of a batch: each step is one pass of the low gear.

Neither the KV cache nor random numbers keep a trace of them (drafting.py). Entropies are read after every step, since
they decide about the next one.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ...gears.gearbox import Gearbox
from ...gears.ladder import Gear
from ...routing.batch_drafts import BatchRule
from ..entropy import Entropy
from ..snapshots import Snapshot
from ..step import DRAFT, LOOKUP
from .choosing import Chooser, choose


@dataclass
class Beginning:
    """Where the draft of a sequence begins.

    room: the most tokens that may follow the last one. matcher: mlx-lm's, after the tokens before the last one; nothing
    counts after the end of a text. proposed: what follows by the text itself; then nothing is drafted for it.
    """

    chooser: Chooser
    room: int
    matcher: Any
    proposed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._taken = 0
        self.live = self.room > 0 and not self.matcher.advance(self.chooser.token)

    @property
    def drafts(self) -> bool:
        """Whether one more drafted token may count."""
        return self.live and not self.proposed

    def take(self, token: int) -> bool:
        """Take the next token of the draft; returns whether it counts."""
        counts = self.live
        self._taken += 1
        self.live = self.live and self._taken < self.room and not self.matcher.advance(token)
        return counts


@dataclass
class Drafts:
    """What follows each sequence: tokens that were drafted, with their entropies (bits), or what the text proposed.

    steps: passes that drafted. usable: how many tokens of each sequence count; the others stand behind its end, or make
    all of them equally many. sources: who proposed them.
    """

    tokens: list[list[int]]
    entropies: list[list[float]]
    usable: list[int]
    sources: list[str]
    steps: int = 0

    @property
    def width(self) -> int:
        """Tokens of every sequence in the pass that verifies."""
        return 1 + len(self.tokens[0])

    def add_proposed(self, beginnings: Sequence[Beginning]) -> None:
        """Put what texts propose in the place of what was drafted for them, and make all equally long."""
        for row, beginning in enumerate(beginnings):
            if beginning.proposed:
                self.tokens[row], self.entropies[row], self.sources[row] = beginning.proposed[:], [], LOOKUP
                self.usable[row] = sum([beginning.take(token) for token in beginning.proposed])
        longest = max(map(len, self.tokens))
        self.tokens = [[*tokens, *[PADDING] * (longest - len(tokens))] for tokens in self.tokens]


PADDING = 0  # a token that nobody accepts


class BatchDrafter:
    """Writes drafts in a gear of a gearbox, which is engaged afterwards."""

    def __init__(self, gearbox: Gearbox, gear: Gear, entropy: Entropy):
        self.gearbox, self.gear, self.entropy = gearbox, gear, entropy

    def draft(
        self, beginnings: Sequence[Beginning], inputs: mx.array, cache: Any, rule: BatchRule, most: int
    ) -> Drafts:
        """Tokens that follow the last one of every sequence.

        Args:
            inputs: (B,), the last tokens.
            most: steps.
        """
        count = len(beginnings)
        done = Drafts([[] for _ in range(count)], [[] for _ in range(count)], [0] * count, [DRAFT] * count)
        rule.begin(count)
        with Snapshot(cache).borrowed(), rewound([beginning.chooser for beginning in beginnings]):
            self.gearbox.shift(self.gear)
            while done.steps < most and any(beginning.drafts for beginning in beginnings):
                logits = self.gearbox.model(inputs[:, None], cache=cache)[:, -1]
                drafting = [beginning.chooser if beginning.drafts else None for beginning in beginnings]
                inputs, logprobs = choose(drafting, logits, done.tokens)
                if not self._take(done, beginnings, inputs, self.entropy(logprobs), rule):
                    break
        done.add_proposed(beginnings)
        return done

    def _take(
        self, done: Drafts, beginnings: Sequence[Beginning], sampled: mx.array, entropy: mx.array, rule: BatchRule
    ) -> bool:
        """Add a step to the drafts; returns whether another one pays."""
        mx.eval(sampled, entropy)
        tokens, entropies = np.array(sampled).tolist(), np.array(entropy).tolist()
        done.steps += 1
        for row, beginning in enumerate(beginnings):
            done.tokens[row].append(tokens[row])
            done.entropies[row].append(entropies[row])
            beginning.live = beginning.live and beginning.chooser.owner.error is None
            if not beginning.proposed:
                done.usable[row] += beginning.take(tokens[row])
        return rule.goes_on(entropies, [beginning.drafts for beginning in beginnings])


@contextlib.contextmanager
def rewound(choosers: Sequence[Chooser]) -> Iterator[None]:
    """Random numbers that sequences draw in the block will be drawn again after it, and its errors do not count."""
    states = [chooser.random for chooser in choosers]
    try:
        yield
    finally:
        for chooser, state in zip(choosers, states):
            chooser.rewind(state)
            chooser.owner.error = None
