"""When the drafts of a batch end: a step drafts a token for every sequence, in one pass.

Be g the cost of a token of text, and p_i the probability that the top gear accepts all that is drafted for sequence i.
One more step costs c for all sequences together, and saves g with probability p_i a for each of them. It is worth its
cost while g a times the sum of p_i is above c. So the more sequences agree, the longer drafts are; and the more a
verification of all their rows costs, the shorter.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Protocol

from .acceptance import DEFAULT_BOUND, DraftRule
from .draft_costs import KEPT_DRAFTS, RunningMean, of_one_more
from .pass_costs import PassCosts, RoundCounts


class BatchRule(Protocol):
    """Decides when the drafts of a batch end."""

    def begin(self, rows: int) -> None:
        """Start new drafts of so many sequences."""
        ...

    def goes_on(self, entropies: Sequence[float], live: Sequence[bool]) -> bool:
        """Whether to draft one more token for all.

        Args:
            entropies: of the distributions of the last tokens, bits.
            live: whether more may follow in this sequence at all.
        """
        ...

    def end(self, drafted: int, tokens: int) -> None:
        """Count a round: steps of the draft, and tokens of text that it made in all sequences."""
        ...


class EachRule:
    """Drafts that go on while a rule for single texts wants to, for any of the sequences."""

    def __init__(self, rule: DraftRule):
        self._rule = rule

    def begin(self, rows: int) -> None:
        self._rules = [copy.copy(self._rule) for _ in range(rows)]
        for rule in self._rules:
            rule.begin()
        self._wants = [True] * rows

    def goes_on(self, entropies: Sequence[float], live: Sequence[bool]) -> bool:
        for row, entropy in enumerate(entropies):
            self._wants[row] = live[row] and self._wants[row] and self._rules[row].goes_on(entropy)
        return any(self._wants)

    def end(self, drafted: int, tokens: int) -> None:
        pass


class BatchCostRule:
    """Drafts that end where one more step costs more than it is expected to save over all sequences.

    Args:
        agreement: the function a, from the low gear's entropy (bits) to a probability.
        costs: of a step of the draft, and of verifications by rows of one sequence, for a batch of this size.
    """

    def __init__(self, agreement: Callable[[float], float], costs: PassCosts):
        self.agreement, self.costs = agreement, costs
        self._counts = RoundCounts(KEPT_DRAFTS)
        self._mean = RunningMean()

    def begin(self, rows: int) -> None:
        self._products, self._drafted = [1.0] * rows, 0

    def goes_on(self, entropies: Sequence[float], live: Sequence[bool]) -> bool:
        agreed = [self.agreement(entropy) if on else 0.0 for entropy, on in zip(entropies, live)]
        for value, on in zip(agreed, live):
            if on:
                self._mean.add(value)
        self._products = [product * value for product, value in zip(self._products, agreed)]
        self._drafted += 1
        alive = sum(self._products)
        if not self.costs.draft():  # nothing is measured yet
            return alive >= DEFAULT_BOUND * max(sum(live), 1)
        return alive * self._mean.value * self._of_token() > of_one_more(self.costs, self._drafted)

    def end(self, drafted: int, tokens: int) -> None:
        self._counts.add(drafted, tokens)

    def _of_token(self) -> float:
        """What a token of text costs; at first as if nothing were accepted."""
        if self._counts.tokens:
            return self._counts.spent(self.costs) / self._counts.tokens
        return self.costs.verification(1) / len(self._products)
