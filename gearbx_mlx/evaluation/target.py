"""A budget instead of thresholds: the policy that meets a wish at the least cost, from one recorded pass per gear.

The wish of `calibrate --target-...` is at least this agreement, at most this KL, or at most these bytes. Candidates are
each static gear; kickdown between any two gears, at every share; lossless under the top gear with any gear as the
draft. Routing by past tokens is not a candidate: at the same share it is about as good as chance.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import GearbxError
from ..gears.ladder import Gear, Ladder, Schedule

if TYPE_CHECKING:
    from .replay import Recording


@dataclass(frozen=True)
class PolicyOutcome:
    """The quality and the cost of a policy: agreement with the top gear, mean KL (nats), weight bytes per token."""

    agreement: float
    kl_mean: float
    weight_bytes: float


@dataclass(frozen=True)
class Wish:
    """One of three: the least agreement with the top gear, the most mean KL (nats), the most weight bytes per token.

    Raises:
        GearbxError: not exactly one of them, or a value that it cannot have.
    """

    agreement: float | None = None
    kl: float | None = None
    weight_bytes: float | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in vars(self).values()) != 1:
            raise GearbxError("give one of a target agreement, a target KL, or target bytes")
        if self.agreement is not None and not 0 < self.agreement <= 1:
            raise GearbxError(f"target agreement is {self.agreement}; give a part of 1, such as 0.99")
        if self.kl is not None and not self.kl >= 0:
            raise GearbxError(f"target KL is {self.kl}; give nats, 0 or more")
        if self.weight_bytes is not None and not self.weight_bytes > 0:
            raise GearbxError(f"target bytes are {self.weight_bytes}; give weight bytes per token")

    def __str__(self) -> str:
        if self.agreement is not None:
            return f"agreement of {self.agreement:g} with the top gear"
        return (
            f"mean KL of {self.kl:g} nats" if self.kl is not None else f"{self.weight_bytes:g} weight bytes per token"
        )

    def met_by(self, outcome: PolicyOutcome) -> bool:
        if self.agreement is not None:
            return outcome.agreement >= self.agreement
        if self.kl is not None:
            return outcome.kl_mean <= self.kl
        return outcome.weight_bytes <= (self.weight_bytes or 0)

    def rank(self, outcome: PolicyOutcome) -> tuple[float, float]:
        """Sort key, the best outcome first: by bytes, then KL; where bytes are the wish, by KL, then bytes."""
        both = outcome.weight_bytes, outcome.kl_mean
        return both if self.weight_bytes is None else both[::-1]


SHARES = np.arange(1, 100) / 100  # of tokens that kickdown computes again
STATIC, KICKDOWN, LOSSLESS, ROUTE = "static", "kickdown", "lossless", "route"


@dataclass(frozen=True)
class Candidate:
    """A mode with its gears (bits, lowest first), its thresholds (bits), and the outcome that is predicted for it."""

    mode: str
    gears: tuple[int, ...]
    predicted: PolicyOutcome
    thresholds: tuple[float, ...] = ()
    schedule: Schedule | None = None  # of mode route

    def __str__(self) -> str:
        if self.schedule is not None:
            return f"--schedule {self.schedule}"
        return f"{self.mode} {','.join(map(str, self.gears))}"


def candidates(
    recordings: "Mapping[Gear, Recording]", weight_bytes: Callable[[Ladder, Gear], float]
) -> list[Candidate]:
    """Every candidate, with its predicted outcome.

    Args:
        recordings: each gear alone over the same text, lowest first; the last is the reference itself.
        weight_bytes: of a token in a gear of a ladder: a gear alone has fewer planes to read than one among many.
    """

    from .replay import best_rule  # the flags read this module before mlx_lm is loaded

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
    recordings: "Mapping[Gear, Recording]", low: Gear, high: Gear, low_bytes: float, high_bytes: float
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


ENDS = 32  # places in a text where a gear may end


def schedules(
    recordings: "Mapping[Gear, Recording]",
    gears: Sequence[Gear],
    positions: np.ndarray,
    weight_bytes: Callable[[Ladder, Gear], float],
) -> list[Candidate]:
    """Every schedule of some of the gears, those of one gear too, with its predicted outcome.

    The KL of a token is predicted as that of its gear alone, so that one reading per gear is enough. This does not
    model what other gears wrote into the KV cache before: a real run has to check what is found. The ladder of each has
    the top gear as well, for prompts.

    Args:
        recordings: each gear alone over the same text, after prompts in the top gear. gears: descending.
        positions: (n,), of the predictions in their windows.
        weight_bytes: as of `candidates`.
    """
    length, top = int(positions.max()) + 1, max(gear.bits for gear in recordings)
    before = running(np.ones(len(positions)), positions)
    agree = {gear: running(recordings[gear].agree, positions) for gear in gears}
    kl = {gear: running(recordings[gear].kl, positions) for gear in gears}
    step, found = -(-length // ENDS), []
    for used in itertools.chain.from_iterable(itertools.combinations(gears, n) for n in range(1, len(gears) + 1)):
        ladder = Ladder(sorted({*(gear.bits for gear in used), top}))
        cost = {gear: weight_bytes(ladder, ladder.find(gear.bits)) for gear in used}
        for cuts in itertools.combinations(range(step, length, step), len(used) - 1):
            parts = [*zip(used, (0, *cuts), (*cuts, length))]
            outcome = PolicyOutcome(
                float(sum(agree[gear][end] - agree[gear][start] for gear, start, end in parts)),
                float(sum(kl[gear][end] - kl[gear][start] for gear, start, end in parts)),
                float(sum(cost[gear] * (before[end] - before[start]) for gear, start, end in parts)),
            )
            schedule = Schedule(used, tuple(end - start for _, start, end in parts[:-1]))
            found.append(Candidate(ROUTE, tuple(gear.bits for gear in ladder), outcome, schedule=schedule))
    return found


def running(values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The sum of values (n,) at all positions before each one, over n."""
    return np.concatenate([[0.0], np.cumsum(np.bincount(positions, values))]) / len(positions)


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
