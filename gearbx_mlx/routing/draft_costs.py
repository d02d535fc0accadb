"""When to stop drafting where costs are not those of the calibration: what one more drafted token costs, and saves.

Be g the cost of a token of text, and p the probability that the top gear accepts a whole draft. One more token, which
is accepted with probability a if the others are, saves g with probability p a. It is worth its cost c while p a g > c:
so the bound on p is c / (a g). The dearer a verification, the larger g, and the longer the drafts. g in turn depends
on the bound; both settle in a few drafts, on the bound that costs least.
"""

from collections.abc import Callable

KEPT = 0.95  # of the weight of earlier drafts in g, at each further draft
KEPT_AGREEMENT = 0.99  # the same of a, at each further token


class CostRule:
    """Drafts that end where one more token costs more than it is expected to save.

    Args:
        agreement: the function a, from the low gear's entropy (bits) to a probability.
        costs: what a drafted token and a verification cost now, in any one unit.
    """

    def __init__(self, agreement: Callable[[float], float], costs: Callable[[], tuple[float, float]]):
        self.agreement, self.costs = agreement, costs
        self._cost = self._tokens = 0.0
        self._agreements = self._count = 0.0
        self._begin()

    def begin(self) -> None:
        if self._drafted:
            token, verification = self.costs()
            self._cost = KEPT * self._cost + self._drafted * token + verification
            self._tokens = KEPT * self._tokens + self._expected
        self._begin()

    def goes_on(self, entropy: float) -> bool:
        agreement = self.agreement(entropy)
        self._agreements = KEPT_AGREEMENT * self._agreements + agreement
        self._count = KEPT_AGREEMENT * self._count + 1
        self._product *= agreement
        self._drafted += 1
        self._expected += self._product
        return self._product >= self.bound

    @property
    def bound(self) -> float:
        """The product of a(H) below which a draft ends now."""
        token, verification = self.costs()
        of_text = self._cost / self._tokens if self._tokens else verification  # at first as if nothing were accepted
        saved = of_text * (self._agreements / self._count if self._count else 1.0)
        return token / saved if saved else 1.0

    def _begin(self) -> None:
        self._product, self._drafted = 1.0, 0
        self._expected = 1.0  # tokens of this draft's text: a verification makes one of its own
