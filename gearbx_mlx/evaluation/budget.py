"""A budget instead of thresholds: the policy that meets a wish at the least cost, from one recorded pass per gear.

Candidates are each static gear; kickdown between any two gears, at every share; lossless under the top gear with any
gear as the draft. Routing by past tokens is no candidate: at the same share it is about as good as chance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import GearbxError
from ..gears.ladder import Gear, Ladder
from .drafting import best_rule
from .replay import Recording
from .wish import PolicyOutcome, Wish

SHARES = np.arange(1, 100) / 100  # of tokens that kickdown computes again
STATIC, KICKDOWN, LOSSLESS = "static", "kickdown", "lossless"


@dataclass(frozen=True)
class Candidate:
    """A mode with its gears (bits, lowest first), its thresholds (bits), and the outcome that is predicted for it."""

    mode: str
    gears: tuple[int, ...]
    predicted: PolicyOutcome
    thresholds: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"{self.mode} {','.join(map(str, self.gears))}"


def candidates(recordings: Mapping[Gear, Recording], weight_bytes: Callable[[Ladder, Gear], float]) -> list[Candidate]:
    """Every candidate, with its predicted outcome.

    Args:
        recordings: each gear alone over the same text, lowest first; the last is the reference itself.
        weight_bytes: of a token in a gear of a ladder: a gear alone has fewer planes to read than one among many.
    """

    def cost(bits: Sequence[int]) -> list[float]:
        ladder = Ladder(bits)
        return [weight_bytes(ladder, gear) for gear in ladder]

    gears = list(recordings)
    found = [
        Candidate(STATIC, (gear.bits,), PolicyOutcome(float(r.agree.mean()), float(r.kl.mean()), *cost([gear.bits])))
        for gear, r in recordings.items()
    ]
    for index, low in enumerate(gears):
        for high in gears[index + 1 :]:
            found += kickdowns(recordings, low, high, *cost([low.bits, high.bits]))
    for low in gears[:-1]:
        *_, read = best_rule(recordings[low], *cost([low.bits, gears[-1].bits]))
        found.append(Candidate(LOSSLESS, (low.bits, gears[-1].bits), PolicyOutcome(1.0, 0.0, read)))
    return found


def kickdowns(
    recordings: Mapping[Gear, Recording], low: Gear, high: Gear, low_bytes: float, high_bytes: float
) -> list[Candidate]:
    """Kickdown between two gears at every share. The prediction ignores the low gear's entries in the KV cache."""
    below, above = recordings[low], recordings[high]
    found = []
    for threshold in np.unique(np.quantile(below.entropy, 1 - SHARES, method="inverted_cdf")):
        again = below.entropy > threshold
        outcome = PolicyOutcome(
            float(np.where(again, above.agree, below.agree).mean()),
            float(np.where(again, above.kl, below.kl).mean()),
            low_bytes + float(again.mean()) * high_bytes,
        )
        found.append(Candidate(KICKDOWN, (low.bits, high.bits), outcome, (float(threshold),)))
    return found


def in_order(found: Sequence[Candidate], wish: Wish) -> list[Candidate]:
    """The candidates that are predicted to meet the wish, the best first.

    Raises:
        GearbxError: no candidate is.
    """
    meeting = sorted((c for c in found if wish.met_by(c.predicted)), key=lambda c: wish.rank(c.predicted))
    if not meeting:
        least = min(found, key=lambda c: c.predicted.weight_bytes)
        raise GearbxError(
            f"no gear and no way of shifting meets {wish}: the least is {least.predicted.weight_bytes:.0f} weight "
            f"bytes per token ({least}); allow more, or give a ladder that begins lower"
        )
    return meeting
