"""Drafts of mode lossless: tokens that a low gear writes, of which neither cache nor random numbers keep a trace.

A token is drafted with the random numbers that mlx-lm will use to sample its position, from logits that went through
the same processors: so draft and verification choose the same token wherever their distributions agree.

The entropy of a token says whether the draft goes on. To read it is to wait for the device, which has nothing to do
until the next step is queued. So steps may be queued ahead, as mlx-lm queues one: each takes the token before it as an
array that is still computed. Where the draft turns out to be over, the steps beyond its end are thrown away. They cost
passes, and change nothing.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler

from ..compat.arrays import same_random_numbers
from ..gears.gearbox import Gearbox
from ..gears.ladder import Gear
from ..ranks.agreement import ALONE, Agreement
from ..routing.acceptance import DEFAULT_BOUND, DraftRule, FixedLength
from ..routing.lookup import Lookup, LookupAgreement
from ..routing.rounds import BatchRule
from .batches import BatchText, Processor
from .caches import Snapshot
from .response import DRAFT, LOOKUP, Proposal
from .sampling import Entropy, Sampler


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


class LookedUp:
    """The proposals of one sequence.

    Args:
        agreement: counts how often proposals are right.
        prompt: tokens at its beginning that no model wrote.
    """

    def __init__(self, agreement: LookupAgreement, prompt: int):
        self._agreement, self._prompt = agreement, prompt
        self._lookup = Lookup(agreement)
        self._tokens: list[int] = []

    def proposed(self, written: Sequence[int], token: int, most: int) -> list[int]:
        """What may follow: as many tokens as are more likely right than not, all of them.

        Args:
            written: the tokens so far. token: the one after them.
            most: how many.
        """
        self._tokens += written[len(self._tokens) :]
        self._tokens.append(token)
        self._lookup.follow(self._tokens, self._prompt)
        if most < 1 or not self._lookup.run:
            return []
        likely = self._agreement.probabilities(self._lookup.run, most)
        return self._lookup.proposed(sum(probability >= DEFAULT_BOUND for probability in likely))


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
