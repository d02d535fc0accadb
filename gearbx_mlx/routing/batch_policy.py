"""Policies of a batch: the gear of a step, whose weights all sequences share, from the gear that each one wants."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

from ..errors import GearbxError

BatchPolicy = Callable[[Sequence[int]], int]
"""From the wishes of one or more sequences to the gear of a step. Gears are numbered from 0, the lowest precision."""

DEFAULT_POLICY = "highest"
QUANTILE = "quantile:"


def highest(wishes: Sequence[int]) -> int:
    """The highest gear that anybody wants: nobody gets less than alone."""
    return max(wishes)


def most(wishes: Sequence[int]) -> int:
    """The gear that most sequences want; of several the highest."""
    counts = Counter(wishes)
    return max(counts, key=lambda gear: (counts[gear], gear))


def quantile(share: float) -> BatchPolicy:
    """The lowest gear that is enough for this share of the sequences; 1 is `highest`, 0 the lowest wish."""

    def policy(wishes: Sequence[int]) -> int:
        return sorted(wishes)[max(0, math.ceil(share * len(wishes) - 1e-9) - 1)]

    return policy


NAMED: dict[str, BatchPolicy] = {"highest": highest, "most": most}


def policy_named(name: str | BatchPolicy) -> BatchPolicy:
    """The policy of a name: "highest", "most" or "quantile:Q", such as "quantile:0.75". A function is one already.

    Raises:
        GearbxError: a name that no policy has, a share outside of 0 to 1.
    """
    if callable(name):
        return name
    if isinstance(name, str) and name in NAMED:
        return NAMED[name]
    if isinstance(name, str) and name.startswith(QUANTILE):
        try:
            share = float(name.removeprefix(QUANTILE))
        except ValueError:
            share = math.nan
        if 0 <= share <= 1:
            return quantile(share)
    raise GearbxError(
        f"batch policy {name!a} does not exist; choose highest, most, or quantile:Q with Q from 0 to 1, "
        "such as quantile:0.75"
    )
