"""Prompt lookup: proposals are copied from an earlier occurrence of the sequence's last tokens (n-grams).

Summaries, edited files and quotations repeat their source. The longest run of last tokens that occurred before predicts
the next tokens without reading weights. Its acceptance rate depends on the sequence and the run's length. Every
generated token updates this rate, also for proposals that were not used.
"""

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ...routing.gates import RunningMean
from ..policy import MAX_DRAFTED, LearnedPolicy
from ..response import LOOKUP, GeneratedText
from ..rows import Proposal
from . import Drafter, DraftTarget

SHORTEST_RUN, LONGEST_RUN = 2, 8  # tokens of a run; longer runs count as the longest
CANDIDATES = 16  # latest earlier occurrences that are compared
# Acceptance rate of proposals by the length of the run, before any observation. The demo model has higher values
# (docs/lossless.md).
PRIOR = {2: 0.3, 3: 0.4, 4: 0.5, 5: 0.55, 6: 0.6, 7: 0.65, 8: 0.75}
PRIOR_WEIGHT = 4.0  # number of proposals that the prior counts as
WEIGHT_KEPT = 0.98  # share of the earlier proposals' weight that each new one leaves


class LookupAgreement:
    """Acceptance rate of proposed tokens by the length of the run before them, learned from all sequences."""

    def __init__(self) -> None:
        self._shares = {length: RunningMean(WEIGHT_KEPT, share, PRIOR_WEIGHT) for length, share in PRIOR.items()}

    def add(self, run: int, right: bool) -> None:
        self._shares[min(run, LONGEST_RUN)].add(right)

    def probabilities(self, run: int, count: int) -> list[float]:
        """Return the probabilities that the first 1, 2, ... `count` tokens are accepted; each one extends the run."""
        product, found = 1.0, []
        for length in range(run, run + count):
            product *= self._shares[min(length, LONGEST_RUN)].value
            found.append(product)
        return found


_known: WeakKeyDictionary[Any, LookupAgreement] = WeakKeyDictionary()  # one per gearbox, for all its sequences


class Lookup(Drafter):
    """Prompt lookup by the longest run of last tokens that occurred before.

    Every pair of tokens links to its previous occurrence, as in LZ77: the links from the last pair lead to the longest
    run. Adding a token takes constant time.

    Args:
        agreement: counts accepted proposals.
        most: tokens per proposal.
    """

    reads_weights = False
    name, cost = "prompt lookup", 0.0

    def __init__(self, agreement: LookupAgreement, most: int = MAX_DRAFTED):
        self.agreement, self._most = agreement, most
        self._begin([])

    @classmethod
    def of(cls, target: DraftTarget) -> "Lookup | None":
        """Return the lookup of a sequence; None without prompt lookup."""
        if not target.lookup_tokens:
            return None
        agreement = LookupAgreement()
        if not target.is_fixed:
            agreement = _known.setdefault(target.gearbox, agreement)
        return cls(agreement, target.lookup_tokens)

    def length(self, text: GeneratedText, room: int, policy: LearnedPolicy) -> int:
        """Return how many of the run's next tokens save time if they are verified."""
        self.follow(text.tokens, text.prompt)
        room = min(room, self._most)
        found = self.proposed(room)
        if not found:
            return 0
        return policy.lookup_length(self.agreement.probabilities(self.run, len(found)), room)

    def propose(self, text: GeneratedText, length: int, policy: LearnedPolicy) -> Proposal:
        tokens = self.proposed(length)
        last = next((place for place, token in enumerate(tokens, 1) if token in text.ends), length)
        return Proposal(tokens[:last], LOOKUP)

    def _begin(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._count = 0  # linked tokens
        self._last: dict[tuple[int, int], int] = {}
        self._before: list[int] = []  # per position, the end of the same pair's previous occurrence; -1: none
        self.run, self._place = 0, 0

    def follow(self, tokens: Sequence[int], prompt: int) -> None:
        """Take a sequence: the same list with more tokens, or a different one.

        Args:
            prompt: number of its tokens; proposals for them do not count.
        """
        if tokens is not self._tokens or len(tokens) < self._count:
            self._begin(tokens)
        for place in range(self._count, len(tokens)):
            if place >= prompt:
                self._find()
                if self.run:
                    self.agreement.add(self.run, tokens[self._place] == tokens[place])
            pair = (tokens[place - 1] if place else -1, tokens[place])
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = place
            self._count = place + 1
        self._find()

    def proposed(self, count: int) -> list[int]:
        """Return the next `count` tokens; none if the last tokens have not occurred before.

        Past the end of the sequence the proposal repeats its own beginning, as LZ77 does: cyclic outputs continue.
        """
        if not self.run:
            return []
        period = self._tokens[self._place : self._count]
        return list(itertools.islice(itertools.cycle(period), count))

    def _find(self) -> None:
        """Set `run`, the length of the longest run (0: none), and the position after its earlier occurrence."""
        self.run, self._place = 0, 0
        if self._count < SHORTEST_RUN:
            return
        place = self._before[self._count - 1]
        for _ in range(CANDIDATES):
            if place < 1 or self.run == LONGEST_RUN:
                return
            run = self._run(place)
            if run > self.run:
                self.run, self._place = run, place + 1
            place = self._before[place]

    def _run(self, place: int) -> int:
        """Return how many tokens up to this position equal the last ones; at least two do."""
        tokens, end, run = self._tokens, self._count - 1, SHORTEST_RUN
        while run < LONGEST_RUN and run <= place and tokens[place - run] == tokens[end - run]:
            run += 1
        return run
