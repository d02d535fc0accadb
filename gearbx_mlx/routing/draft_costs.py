"""When to stop drafting where costs are not those of the calibration: what one more drafted token costs, and saves.

Be g the cost of a token of text, and p the probability that the top gear accepts a whole draft. One more token, which
is accepted with probability a if the others are, saves g with probability p a. It is worth its cost c while p a g > c:
so the bound on p is c / (a g). The dearer a verification, the larger g, and the longer the drafts. g in turn depends
on the bound; both settle in a few drafts, on the bound that costs least.
"""

from collections.abc import Callable, Sequence

from .acceptance import MOST_DRAFTED, replay_drafts
from .pass_costs import PassCosts, RoundCounts

KEPT_DRAFTS = 0.95  # of the weight of earlier drafts in g, at each further draft
KEPT_AGREEMENT = 0.99  # the same of a, at each further token
AHEAD = 4  # rows over which the cost of one more is taken: single rows cost in steps, where a kernel takes some at once


def predicted_cost(
    sequences: Sequence[tuple[Sequence[float], Sequence[bool]]],
    agreement: Callable[[float], float],
    costs: PassCosts,
) -> float:
    """What a token costs with a CostRule, replayed on recorded tokens (`acceptance.replay_drafts`)."""
    done = replay_drafts(sequences, CostRule(agreement, costs))
    verified = sum(count * costs.verification(1 + drafted) for drafted, count in done.drafts.items())
    return (done.drafted * costs.draft() + verified) / done.tokens


class RunningMean:
    """The mean of values, the latest of which weigh most; 1 before there are any."""

    def __init__(self) -> None:
        self._sum = self._count = 0.0

    def add(self, value: float) -> None:
        self._sum = KEPT_AGREEMENT * self._sum + value
        self._count = KEPT_AGREEMENT * self._count + 1

    @property
    def value(self) -> float:
        return self._sum / self._count if self._count else 1.0


def of_one_more(costs: PassCosts, drafted: int) -> float:
    """The cost of one more drafted token after so many, and of a row for it."""
    rows = min(drafted + 1, MOST_DRAFTED + 1 - AHEAD)
    row = (costs.verification(rows + AHEAD) - costs.verification(rows)) / AHEAD
    return costs.draft() + row


class CostRule:
    """Drafts that end where one more token costs more than it is expected to save.

    Args:
        agreement: the function a, from the low gear's entropy (bits) to a probability.
        costs: of a drafted token and of verifications, now.
    """

    def __init__(self, agreement: Callable[[float], float], costs: PassCosts):
        self.agreement, self.costs = agreement, costs
        self._counts = RoundCounts(KEPT_DRAFTS)
        self._mean = RunningMean()
        self._begin()

    def begin(self) -> None:
        if self._drafted:
            self._counts.add(self._drafted, self._expected)
        self._begin()

    def goes_on(self, entropy: float) -> bool:
        agreement = self.agreement(entropy)
        self._mean.add(agreement)
        self._product *= agreement
        self._drafted += 1
        self._expected += self._product
        return self._product >= self.bound

    @property
    def bound(self) -> float:
        """The product of a(H) below which a draft ends now."""
        of_text = self.costs.verification(1)  # at first as if nothing were accepted
        if self._counts.tokens:
            of_text = self._counts.spent(self.costs) / self._counts.tokens
        saved = of_text * self._mean.value
        return of_one_more(self.costs, self._drafted) / saved if saved else 1.0

    def _begin(self) -> None:
        self._product, self._drafted = 1.0, 0
        self._expected = 1.0  # tokens of this draft's text: a verification makes one of its own
