"""Prompt lookup: what followed the last tokens of the text where they occurred before is drafted.

A summary, an edited file or a quotation repeats its source. So the longest run of tokens that ends the text and stands
in it once more, further up, predicts what comes next, and no weight is read for that. How often it is right depends on
the text and on how long the run is; this is counted at every token, whether the proposal was used or not.
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

SHORTEST_RUN, LONGEST_RUN = 2, 8  # tokens of a run; more than the longest count as it
CANDIDATES = 16  # earlier places that are compared, the latest ones
# The share of proposals that are right, by the length of the run: where nothing was counted yet. Chosen below what
# texts of the demo model show (docs/lossless.md).
PRIOR = {2: 0.3, 3: 0.4, 4: 0.5, 5: 0.55, 6: 0.6, 7: 0.65, 8: 0.75}
PRIOR_WEIGHT = 4.0  # proposals that the prior counts for
WEIGHT_KEPT = 0.98  # of the weight of earlier proposals, at each further one


class LookupAgreement:
    """The probability that a proposed token is right, by the length of the run before it. It learns over texts."""

    def __init__(self) -> None:
        self._shares = {length: RunningMean(WEIGHT_KEPT, share, PRIOR_WEIGHT) for length, share in PRIOR.items()}

    def add(self, run: int, right: bool) -> None:
        self._shares[min(run, LONGEST_RUN)].add(right)

    def probabilities(self, run: int, count: int) -> list[float]:
        """That the first, the first two, ... `count` tokens of a proposal are all right: each one prolongs the run."""
        product, found = 1.0, []
        for length in range(run, run + count):
            product *= self._shares[min(length, LONGEST_RUN)].value
            found.append(product)
        return found


_known: WeakKeyDictionary[Any, LookupAgreement] = WeakKeyDictionary()  # of each gearbox, over its texts


class Lookup(Drafter):
    """Draft what followed the longest run of tokens that ends the text, where it occurred before.

    Every pair of tokens is linked to the place where it ended before, as in LZ77: following the links from the last
    pair finds the longest run. A token is added in a time that does not grow with the text.

    Args:
        agreement: counts how often the proposals are right.
        most: tokens of a proposal.
    """

    reads_weights = False
    name, cost = "the text", 0.0

    def __init__(self, agreement: LookupAgreement, most: int = MAX_DRAFTED):
        self.agreement, self._most = agreement, most
        self._begin([])

    @classmethod
    def of(cls, target: DraftTarget) -> "Lookup | None":
        """Return the lookup of a text; None where the mode has none."""
        if not target.lookup_tokens:
            return None
        agreement = LookupAgreement()
        if not target.is_fixed:
            agreement = _known.setdefault(target.gearbox, agreement)
        return cls(agreement, target.lookup_tokens)

    def length(self, text: GeneratedText, room: int, policy: LearnedPolicy) -> int:
        """Return how many tokens of the run's continuation are worth a verification."""
        self.follow(text.tokens, text.prompt)
        room = min(room, self._most)
        found = self.proposed(room)
        if not found:
            return 0
        return policy.lookup_length(self.agreement.probabilities(self.run, len(found)), room)

    def propose(self, text: GeneratedText, length: int, policy: LearnedPolicy) -> Proposal:
        return Proposal(text.until_end(self.proposed(length)), LOOKUP)

    def _begin(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._count = 0  # tokens that are linked
        self._last: dict[tuple[int, int], int] = {}
        self._before: list[int] = []  # of each place: where the same pair ended before; -1: nowhere
        self.run, self._place = 0, 0

    def follow(self, tokens: Sequence[int], prompt: int) -> None:
        """Take a text, the same object as before with more tokens at its end, or another one.

        Args:
            prompt: tokens at its beginning that were not written by the model, whose proposals are not counted.
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
        """Return the next `count` tokens; none where the last tokens are new.

        Past the end of the text the proposal goes on with its own beginning, as LZ77 copies: a text that goes round
        goes round once more.
        """
        if not self.run:
            return []
        period = self._tokens[self._place : self._count]
        return list(itertools.islice(itertools.cycle(period), count))

    def _find(self) -> None:
        """Set `run`, the tokens that the longest run has (0: there is none), and the place after it."""
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
        """Return how many tokens up to this place are the last ones of the text, whose last two are."""
        tokens, end, run = self._tokens, self._count - 1, SHORTEST_RUN
        while run < LONGEST_RUN and run <= place and tokens[place - run] == tokens[end - run]:
            run += 1
        return run
