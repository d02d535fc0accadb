"""How long a low gear drafts before the top gear verifies: the probability that both agree.

A drafted token is worth its pass only if the top gear chooses the same one. The margin m by which it won says how
likely that is: a(m), which is learned while texts are written (`LearnedAgreement`). The product of a(m) over a draft is
the probability that the top gear accepts all of it.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Protocol

from ..errors import GearbxError
from .lookup import RunningMean

MOST_DRAFTED = 15  # with the token before them 16 vectors, which native kernels take in one pass over the weights
MOST_ROWS = MOST_DRAFTED + 1
USUAL_LENGTH = 3  # of drafts where nothing may be measured: not the best anywhere, and seldom far from it
MARGINS = (0.15, 0.3, 0.45, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)  # between the bins of a learned a(m)
MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise((0.0, *MARGINS, 10.0))]
BIN_NAMES = [*(f"below {margin:g}" for margin in MARGINS), "beyond"]
KEPT_DRAFTED = 0.997  # of the weight of earlier drafted tokens in a bin, at each further one
FIRST_WEIGHT = 8.0  # drafted tokens that the guess counts for in a bin
LEAST_SHARE = 1e-6
USUAL_ERROR = NormalDist(0.0, 0.8)  # of the difference between two logits in a low gear; SmolLM2's of 4 bits has 0.65
TYPICAL_HALVING = 4.0  # bits of entropy that halve the agreement: not fitted, but near to what small models show


class DraftRule(Protocol):
    """Decides when a draft ends. The token at which it ends is verified too, since it is paid for."""

    def begin(self) -> None:
        """Start a new draft."""

    def goes_on(self, entropy: float) -> bool:
        """Whether to draft one more token, after a token whose distribution has this entropy (bits)."""


class FixedLength:
    """Drafts of always the same length. Raises GearbxError for a length that a verification cannot take."""

    def __init__(self, length: int):
        if not 1 <= length <= MOST_DRAFTED:
            raise GearbxError(f"draft length is {length}; give 1 to {MOST_DRAFTED} tokens")
        self.length = length
        self.begin()

    def begin(self) -> None:
        self.drafted = 0

    def goes_on(self, entropy: float) -> bool:
        self.drafted += 1
        return self.drafted < self.length


def longest_draft(rule: DraftRule) -> int:
    """How many tokens no draft of a rule exceeds."""
    return rule.length if isinstance(rule, FixedLength) else MOST_DRAFTED


def pool_adjacent_violators(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-increasing sequence closest to `values` in weighted squares (isotonic regression)."""
    blocks: list[list[float]] = []  # mean, weight, count
    for value, weight in zip(values, weights):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            mean, weight, count = blocks.pop()
            before = blocks[-1]
            total = before[1] + weight
            blocks[-1] = [(before[0] * before[1] + mean * weight) / total, total, before[2] + count]
    return [mean for mean, _, count in blocks for _ in range(int(count))]


class LearnedAgreement:
    """a(m) as steps, learned while texts are written, by the drafted tokens that the top gear accepts.

    The margin m is how much the logit of a drafted token could lose before another token is chosen: the difference from
    the next one, after the noise of a sampler. The low gear's logits are off by an error that is much the same for
    all tokens, and m says whether it may change the choice. So m says more than the entropy, and the same at every
    temperature. Before anything is known, the error is taken to be normal.

    The latest tokens weigh most, since texts differ. A token after one that was rejected says nothing: the draft had
    left the text.

    Args:
        kept: what `state` returned at an earlier start.
    """

    def __init__(self, kept: Mapping[str, float] | None = None):
        kept = kept or {}
        self._bins = [
            RunningMean(
                KEPT_DRAFTED, min(kept.get(f"share {name}", share), 1.0), kept.get(f"count {name}", FIRST_WEIGHT)
            )
            for name, share in zip(BIN_NAMES, map(usual_agreement, MIDDLES))
        ]
        self.drafted = 0
        """Tokens that were learned from, since the start."""
        self._update()

    def __call__(self, margin: float) -> float:
        return self._agreement[bisect.bisect_right(MARGINS, margin)]

    def add(self, margins: Sequence[float], accepted: int) -> None:
        """Take a draft: the margins of its tokens, the first `accepted` of which the top gear has chosen."""
        for place, margin in enumerate(margins[: accepted + 1]):
            self._bins[bisect.bisect_right(MARGINS, margin)].add(place < accepted)
            self.drafted += 1
        if margins:
            self._update()

    @property
    def state(self) -> dict[str, float]:
        """What another start may begin with: positive numbers."""
        shares = {f"share {name}": max(mean.value, LEAST_SHARE) for name, mean in zip(BIN_NAMES, self._bins)}
        return shares | {f"count {name}": mean.weight for name, mean in zip(BIN_NAMES, self._bins)}

    def _update(self) -> None:
        falling = [(mean.value, mean.weight) for mean in reversed(self._bins)]
        self._agreement = pool_adjacent_violators(*zip(*falling))[::-1]


def usual_agreement(margin: float) -> float:
    """a(m) before anything is learned: the probability that an error does not change the choice."""
    return USUAL_ERROR.cdf(margin)


def margin_worth(entropy: float) -> float:
    """The margin that says as much as an entropy (bits), where a sampler does not tell by how much its token won."""
    agreement = 2.0 ** -(entropy / TYPICAL_HALVING)
    return USUAL_ERROR.inv_cdf(min(max(agreement, 0.5), 1 - LEAST_SHARE))
